"""Limits on every grant, whoever decides: peaks, a floor, small steps, and the bounds of the workload."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clustergym.agent.owners import OwnerState
from clustergym.gpu_allocation.space import MIN_CORES, MIN_MEMORY_MB


@dataclass(frozen=True)
class RailSettings:
    memory_margin: float = 1.2
    """A grant is at least the owner's observed peak memory × this."""
    cores_margin: float = 1.1
    """A grant is at least the largest need of the owner × this."""
    cores_margin_sensitive: float = 1.25
    """The same for latency-sensitive pods."""
    floor: float = 0.1
    """A grant is at least this share of the request."""
    step: float = 0.1
    """A grant is at most this share of the request below the last one of the owner."""


@dataclass(frozen=True)
class Bounds:
    """Limits that the workload sets for itself. Above the request they have no effect."""

    min_cores: float = 0.0
    max_cores: float = math.inf
    min_memory_mb: float = 0.0
    max_memory_mb: float = math.inf


def limit(
    cores: float,
    memory_mb: float,
    requested_cores: float,
    requested_memory_mb: float,
    sensitive: bool,
    owner: OwnerState,
    last_share: float,
    last_memory_share: float,
    settings: RailSettings,
) -> tuple[float, float]:
    """Raise a proposal (cores %, memory MB) to what the rails demand; never above the request.

    Args:
        cores: proposed cores, %.
        memory_mb: proposed memory, MB.
        requested_cores: requested cores, %.
        requested_memory_mb: requested memory, MB.
        sensitive: whether the pod is latency-sensitive.
        owner: state of the pod's owner.
        last_share: share of the request that the last pod of the owner was granted, with feedback or without.
        last_memory_share: the same for memory.
        settings: the rails.
    """
    margin = settings.cores_margin_sensitive if sensitive else settings.cores_margin
    share = max(settings.floor, owner.peak_need * margin, max(last_share, owner.share) - settings.step)
    memory_share = max(settings.floor, max(last_memory_share, owner.memory_share) - settings.step)
    floor_mb = max(memory_share * requested_memory_mb, owner.peak_memory_mb * settings.memory_margin)
    cores = max(cores, float(math.ceil(share * requested_cores - 1e-9)), MIN_CORES)
    memory_mb = max(memory_mb, float(math.ceil(floor_mb - 1e-9)), MIN_MEMORY_MB)
    return min(cores, requested_cores), min(memory_mb, requested_memory_mb)


def bound(
    cores: float, memory_mb: float, requested_cores: float, requested_memory_mb: float, bounds: Bounds
) -> tuple[float, float]:
    """Apply the workload's own limits; never above the request, and never 0."""
    cores = min(max(min(cores, bounds.max_cores), bounds.min_cores), requested_cores)
    memory_mb = min(max(min(memory_mb, bounds.max_memory_mb), bounds.min_memory_mb), requested_memory_mb)
    return cores, memory_mb
