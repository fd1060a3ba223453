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
    margin_sensitive: float = 1.4
    """The margin of cores and memory for latency-sensitive pods. It is larger while few pods have been seen."""
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


RARE_PODS = 50.0
"""The margin for latency-sensitive pods is (1 + this / pods) times as large while few pods have been seen."""


def sensitive_floor(peak: float, pods: float, margin: float) -> float:
    """Smallest share of its request that a latency-sensitive pod gets, if n pods needed at most ``peak``.

    The next pod exceeds the peak of n pods with a probability of 1 / (n + 1), and by more if n is small.

    >>> [round(sensitive_floor(0.2, n, 1.4), 2) for n in (0, 10, 50, 100, 1000)]
    [1.0, 1.0, 0.56, 0.42, 0.29]
    """
    return min(peak * margin * (1.0 + RARE_PODS / pods), 1.0) if pods > 0 else 1.0


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
    share = max(settings.floor, owner.peak_need * settings.cores_margin, max(last_share, owner.share) - settings.step)
    memory_share = max(settings.floor, max(last_memory_share, owner.memory_share) - settings.step)
    if sensitive:
        share = max(share, sensitive_floor(owner.peak_need, owner.active, settings.margin_sensitive))
        memory_share = max(
            memory_share, sensitive_floor(owner.peak_memory_share, owner.pods, settings.margin_sensitive)
        )
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
