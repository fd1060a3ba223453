"""Reward of an allocation: efficiency, quality of service (QoS), and penalties for monopoly and under-allocation.

Standard library only, so that an agent on a node can use it alone. The simulator compiles :func:`score` and
:func:`room`. The sum of the four terms is the reward ``"seed"``; the simulator's default, ``"room"``, adds
:func:`room`.
"""

from __future__ import annotations

import math

EFFICIENCY_WEIGHT = 0.5
QOS_MET, QOS_MISSED = 1.0, -0.5
MONOPOLY_FACTOR, MONOPOLY_PENALTY = 1.5, 0.3
UNDER_PERCENT, UNDER_PENALTY = 10.0, 0.2
ROOM_WEIGHT = 0.5
"""Largest penalty for the waiting time of the next pod: the weight of the efficiency."""
ROOM_SCALE_S = 440.0
"""A wait this long costs half of :data:`ROOM_WEIGHT`: the median life of a pod in openb."""


def score(cores: float, usage: float, qos_met: bool, running_pods: int) -> tuple[float, float, float, float]:
    """(efficiency, QoS, monopoly, under-allocation), without checks. The usage must not exceed the cores."""
    sharing = max(running_pods - 1, 1)  # the pods that the state showed, before this one
    return (
        EFFICIENCY_WEIGHT * usage / cores if cores > 0.0 else 0.0,
        QOS_MET if qos_met else QOS_MISSED,
        -MONOPOLY_PENALTY if cores > MONOPOLY_FACTOR * 100.0 / sharing else 0.0,
        -UNDER_PENALTY if cores < UNDER_PERCENT else 0.0,
    )


def room(wait_s: float) -> float:
    """Penalty for the time that the next pod waits until its request fits.

    It is the part of an allocation's effect on others that can be measured when the next pod starts. Unused cores
    or memory keep it waiting.

    >>> room(0.0), room(440.0)
    (-0.0, -0.25)
    """
    return -ROOM_WEIGHT * wait_s / (wait_s + ROOM_SCALE_S)


def compute_reward(
    allocated_cores: float, allocated_memory_mb: float, actual_usage: float, qos_met: bool, running_pods: int
) -> float:
    """Reward of one allocation: 0.5 · usage / allocation, +1 or −0.5 for QoS, −0.3 for monopoly, −0.2 below 10 %.

    Args:
        allocated_cores: % of the GPU's SMs that the pod got, after ``min(allocated, requested)``.
        allocated_memory_mb: MB that the pod got. Only ``qos_met`` depends on it: too little memory means an OOM kill,
            which is a QoS miss.
        actual_usage: % of the GPU (not of the allocation) that the pod used; at most the allocation counts.
        qos_met: whether the pod met its objective.
        running_pods: pods on the GPU including this one, as feedback reports them. The fair share is that of the pods
            that the state showed before this one was admitted, 100 / (running_pods − 1), or 100 without others. More
            than 1.5 times the fair share is a monopoly.

    With two pods in the state, the fair share is 50 %. An allocation of 60 % is not more than 1.5 times that, with
    three pods it is:

    >>> round(compute_reward(60, 3000, 55, True, 3), 2)
    1.46
    >>> round(compute_reward(60, 3000, 55, True, 4), 2)
    1.16
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
    return sum(score(allocated_cores, min(actual_usage, allocated_cores), qos_met, running_pods))
