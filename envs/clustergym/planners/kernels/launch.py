"""Runs a kernel on many layers, and what several kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from clustergym.common.compiling import device, inlined
from clustergym.common.threads import parallel_for
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time, with_migration


class Objective(NamedTuple):
    """What a search minimizes: the mean time of the passes plus the weighted migration time."""

    costs: Any
    topology: Any
    norm_log2: int
    migration_weight: float
    before_us: np.ndarray
    """(L,) time of each layer when the interval begins; only migration in the background needs it."""


def over_layers(kernel: Callable[..., None], first: int, last: int, *arguments: Any) -> None:
    """Run ``kernel(first, last, *arguments)`` on layers first … last−1, on all cores."""
    if last - first == 1:
        kernel(first, last, *arguments)
    else:
        # Searches end early on some layers: many small parts keep all threads busy.
        parallel_for(lambda a, b: kernel(first + a, first + b, *arguments), last - first, chunks=last - first)


@inlined
def draw(key, b):
    """A number in [0, 1) from Marsaglia's xorshift generator with 32 bits; the state is not 0."""
    x = key[b]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    key[b] = x
    return x / 4294967296.0


@device
def objective_us(sim, b, objective):
    costs = objective.costs
    time = mean_pass_time(sim, b, 0, sim.rows.shape[1], objective.topology, costs, objective.norm_log2)
    moved = objective.migration_weight * migration_time(sim, b, costs)
    return with_migration(time, moved, objective.before_us[b], costs)


@device
def pass_times(first, last, sim, topology, costs, norm_log2, result):
    """Write the mean time of the passes of layers first … last−1, without migration."""
    for b in range(first, last):
        result[b] = mean_pass_time(sim, b, 0, sim.rows.shape[1], topology, costs, norm_log2)
