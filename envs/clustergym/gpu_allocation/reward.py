"""What an allocation is worth: efficiency, quality of service, a penalty for hogging the GPU and one for starving the pod.

Plain Python without third-party imports, so that an agent that only answers feedback can use it alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

EFFICIENCY_WEIGHT = 0.5
QOS_MET, QOS_MISSED = 1.0, -0.5
MONOPOLY_FACTOR, MONOPOLY_PENALTY = 1.5, 0.3
UNDER_PERCENT, UNDER_PENALTY = 10.0, 0.2


class RewardTerms(NamedTuple):
    """The terms of one reward; penalties are 0 or negative, so that the reward is their plain sum."""

    efficiency: float
    qos: float
    monopoly: float
    under_allocation: float

    @property
    def total(self) -> float:
        return self.efficiency + self.qos + self.monopoly + self.under_allocation


def fair_share_percent(running_pods: int) -> float:
    """100 % / running pods, the new one included."""
    return 100.0 / running_pods


def reward_terms(
    allocated_cores: float, allocated_memory_mb: float, actual_usage: float, qos_met: bool, running_pods: int
) -> RewardTerms:
    """The terms of :func:`compute_reward`, one by one.

    >>> terms = reward_terms(60, 3000, 55, True, 3)
    >>> round(terms.efficiency, 4), terms.qos, terms.monopoly, terms.under_allocation
    (0.4583, 1.0, -0.3, 0.0)
    """
    numbers = {
        "allocated_cores": (allocated_cores, 100.0),
        "allocated_memory_mb": (allocated_memory_mb, math.inf),
        "actual_usage": (actual_usage, 100.0),
    }
    for name, (value, top) in numbers.items():
        if not (math.isfinite(value) and 0 <= value <= top):
            limit = "a finite number from 0" if top == math.inf else f"0 … {top:g} % of the GPU"
            raise ValueError(f"{name} is {value}: expected {limit}")
    if running_pods < 1 or running_pods != int(running_pods):
        raise ValueError(f"running_pods is {running_pods}: expected a whole number from 1 (the new pod counts)")
    used = min(actual_usage, allocated_cores)
    return RewardTerms(
        efficiency=EFFICIENCY_WEIGHT * used / allocated_cores if allocated_cores > 0 else 0.0,
        qos=QOS_MET if qos_met else QOS_MISSED,
        monopoly=-MONOPOLY_PENALTY if allocated_cores > MONOPOLY_FACTOR * fair_share_percent(running_pods) else 0.0,
        under_allocation=-UNDER_PENALTY if allocated_cores < UNDER_PERCENT else 0.0,
    )


def compute_reward(
    allocated_cores: float, allocated_memory_mb: float, actual_usage: float, qos_met: bool, running_pods: int
) -> float:
    """Reward of one allocation: 0.5 · usage / allocation, +1 or −0.5 for QoS, −0.3 for monopoly, −0.2 below 10 %.

    Args:
        allocated_cores: % of the GPU's SMs that the pod got, after ``min(allocated, requested)``.
        allocated_memory_mb: MB that the pod got. It enters through ``qos_met`` alone: too little memory is an OOM kill,
            and that is a QoS miss.
        actual_usage: % of the GPU (not of the allocation) that the pod used; more than the allocation counts as all of it.
        qos_met: whether the pod met its objective.
        running_pods: pods on the GPU including this one; the fair share is 100 / running_pods.

    The document that this task grew from works one example, ``compute_reward(60, 3000, 55 %, true, 3) = 1.46``, with a
    monopoly term of 0. That does not follow from its own table: with three pods the fair share is 33.3 %, and 60 % is more
    than 1.5 times that (50 %), so the penalty of 0.3 is due. We follow the table:

    >>> round(compute_reward(60, 3000, 55, True, 3), 4)
    1.1583

    and the example's 1.46 is what the same allocation earns between two pods:

    >>> round(compute_reward(60, 3000, 55, True, 2), 4)
    1.4583
    """
    return reward_terms(allocated_cores, allocated_memory_mb, actual_usage, qos_met, running_pods).total
