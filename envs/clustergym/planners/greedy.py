"""Greedy searches: the best operation on a few experts, or the best of all swaps and moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.kernels import greedy as kernels
from clustergym.planners.search import Search


@dataclass(eq=False, kw_only=True)
class Bottleneck(Search):
    """Applies the best operation on experts of the busiest GPU, a few times per layer."""

    starts_from_eplb = True

    operations: int = 8
    """Maximum number of operations per layer and interval."""
    candidates: int = 1
    """Experts tried for each operation: those of the busiest GPU, heaviest first, then random ones. 0 tries one random
    expert of any GPU."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        interval = self.observe(history)
        layers, sim = interval.n_layers, self.simulator.count(interval, placement)
        objective, key = self.objective(interval, sim), self.random_keys(layers)
        chosen = np.zeros((layers, self.candidates + self.simulator.n_slots + 1), np.int64)
        saved_us = np.zeros((layers, 3 * self.simulator.n_gpus))

        def search(first: int, last: int) -> None:
            kernels.bottleneck(
                first, last, sim, objective, self.operations, self.candidates, key, chosen, saved_us
            )  # fmt: skip

        self.each_layer(interval, sim, search, sim.slots)
        return sim.slots.copy()


@dataclass(eq=False, kw_only=True)
class SwapGreedy(Search):
    """Applies the best of all swaps and moves, a few times per layer. Slow and strong."""

    starts_from_eplb = True

    operations: int = 8
    """Maximum number of operations per layer and interval."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        interval = self.observe(history)
        sim = self.simulator.count(interval, placement)
        objective = self.objective(interval, sim)

        def search(first: int, last: int) -> None:
            kernels.swap_greedy(first, last, sim, objective, self.operations)

        self.each_layer(interval, sim, search, sim.slots)
        return sim.slots.copy()
