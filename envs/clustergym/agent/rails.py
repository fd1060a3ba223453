"""Limits on every grant, whoever decides: the owner's peaks, a floor, and the bounds of the workload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from clustergym.agent.owners import OwnerState
from clustergym.gpu_allocation.space import MIN_CORES, MIN_MEMORY_MB


@dataclass(frozen=True)
class RailSettings:
    memory_margin: float = 1.2
    """A grant is at least the owner's peak memory × this."""
    cores_margin: float = 1.1
    """A grant is at least the largest need of the owner × this. Margins are larger while few pods have been seen."""
    margin_sensitive: float = 1.4
    """The margin of cores and memory for latency-sensitive pods."""
    floor: float = 0.1
    """A grant is at least this share of the request."""


class Amounts(NamedTuple):
    """A share of a GPU."""

    cores: float
    """% of the GPU."""
    memory_mb: float


class Limited(NamedTuple):
    """Amounts after rails or bounds, and the names of those that changed them."""

    amounts: Amounts
    limits: tuple[str, ...]


RARE_PODS, RARE_PODS_SENSITIVE = 2.0, 50.0
"""The margin is (1 + this / pods) times as large while few pods have been seen."""


def needed(peak: float, pods: float, margin: float, rare: float) -> float:
    """Smallest share of its request that a pod gets, if n pods before it needed at most ``peak``.

    The next pod exceeds the peak of n pods with a probability of 1 / (n + 1), and by more if n is small.

    >>> [round(needed(0.2, n, 1.4, RARE_PODS_SENSITIVE), 2) for n in (0, 10, 50, 100, 1000)]
    [1.0, 1.0, 0.56, 0.42, 0.29]
    """
    # In this order, a peak of 0 stays 0 for very small numbers of pods.
    return min(peak * margin * (pods + rare) / pods, 1.0) if pods > 0 else 1.0


def apply_rails(
    proposal: Amounts, requested: Amounts, sensitive: bool, owner: OwnerState, settings: RailSettings
) -> Limited:
    """Raise a proposal to what the rails demand; never above the request."""
    margins, rare, pods = (settings.cores_margin, settings.memory_margin), RARE_PODS, owner.evidence
    if sensitive:
        margins, rare = (settings.margin_sensitive, settings.margin_sensitive), RARE_PODS_SENSITIVE
        pods = owner.active  # idle pods say nothing about the peak of the others
    rails = {
        "floor": Amounts(settings.floor * requested.cores, settings.floor * requested.memory_mb),
        "smallest grant": Amounts(MIN_CORES, MIN_MEMORY_MB),
        "largest need": Amounts(
            needed(owner.peak_need, pods, margins[0], rare) * requested.cores,
            needed(owner.peak_memory_share, owner.evidence, margins[1], rare) * requested.memory_mb,
        ),
        "peak memory": Amounts(0.0, settings.memory_margin * owner.peak_memory_mb),
    }
    found, limits = [], []
    for i, unit in enumerate(("cores", "memory")):
        name, least = max(((name, rail[i]) for name, rail in rails.items()), key=lambda one: one[1])
        least = min(float(math.ceil(least - 1e-9)), requested[i])
        if least > proposal[i]:
            limits.append(f"rail on {unit}: {name}")
        found.append(min(max(proposal[i], least), requested[i]))
    return Limited(Amounts(*found), tuple(limits))


def apply_bounds(amounts: Amounts, requested: Amounts, least: Amounts, most: Amounts) -> Limited:
    """Apply the workload's own limits; never above the request. Where they contradict, ``least`` counts."""
    rows = amounts, least, most, requested
    found = [min(max(min(a, high), low), limit) for a, low, high, limit in zip(*rows, strict=True)]
    names = (f"bound on {unit}" for unit, a, b in zip(("cores", "memory"), found, amounts, strict=True) if a != b)
    return Limited(Amounts(*found), tuple(names))
