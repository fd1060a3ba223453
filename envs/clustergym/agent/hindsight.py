"""What another allocation would have led to, judged from what was measured of the pod."""

from __future__ import annotations

import math
from typing import NamedTuple

from clustergym.gpu_allocation.reward import score
from clustergym.gpu_allocation.space import MIN_CORES

MISS_GROWTH = 1.2
"""A pod that missed its objective, with no pressure measured, is assumed to need this much more than it had."""


class Measured(NamedTuple):
    """What feedback says about a pod."""

    requested_cores: float
    usage: float
    """Cores that the pod used, in % of the GPU."""
    needed_cores: float
    """Cores that the pod needed to meet its objective, in % of the GPU."""
    needed_mb: float
    pods: int


def would_be(measured: Measured, cores: float, memory_mb: float) -> tuple[float, bool]:
    """Estimated (reward, QoS met) of the pod with these resources.

    Assumes that a pod that gets what it needs meets its objective, that it uses as much as it did, and that its
    neighbours do not change.
    """
    fits = memory_mb >= measured.needed_mb
    met = fits and cores >= measured.needed_cores - 1e-9
    usage = min(measured.usage, cores) if fits else 0.0
    return sum(score(cores, usage, met, max(measured.pods, 1))), met


def best_reward(measured: Measured) -> float:
    """Estimated reward of the smallest allocation that would have been enough, or of the request if none would."""
    cores = min(max(math.ceil(measured.needed_cores - 1e-9), MIN_CORES), measured.requested_cores)
    return would_be(measured, cores, math.ceil(measured.needed_mb))[0]
