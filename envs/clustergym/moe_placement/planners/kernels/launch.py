"""Runs a kernel on many layers, and what several kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import layer_time, migration_time
from clustergym.moe_placement.kernels.replicas import hash31


class Objective(NamedTuple):
    """What a search minimizes: the time of the window plus the weighted migration time."""

    costs: Any
    network: Any
    norm_log2: int
    scale: float
    """Weight of a token."""
    migration_weight: float


def over_layers(kernel: Callable[..., None], first: int, last: int, *arguments: Any) -> None:
    """Run ``kernel(first, last, *arguments)`` on layers first … last−1, on all cores."""
    if last - first == 1:
        kernel(first, last, *arguments)
    else:
        # Searches end early on some layers: many small parts keep all threads busy.
        spread(lambda a, b: kernel(first + a, first + b, *arguments), last - first, chunks=last - first)


@device
def draw(key, b):
    """A number in [0, 1) from a counter-based generator."""
    key[b, 1] += 1
    return hash31(hash31(key[b, 0]) ^ hash31((key[b, 1] ^ 0x2545F491) & 0x7FFFFFFF)) / 2147483648.0


@device
def objective_us(sim, b, objective):
    time = layer_time(sim, b, 0, objective.costs, objective.network, objective.norm_log2, objective.scale)
    return time + objective.migration_weight * migration_time(sim, b, objective.costs)
