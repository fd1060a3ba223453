"""Greedy searches: the best operation on a few experts, or the best of all swaps and moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement.planners.kernels import greedy as kernels
from clustergym.moe_placement.planners.kernels.launch import Objective
from clustergym.moe_placement.planners.search import Search
from clustergym.moe_placement.simulator import Placement, Window


@dataclass(eq=False, kw_only=True)
class Bottleneck(Search):
    """Applies the best operation on experts of the busiest GPU, a few times per layer."""

    starts_from_eplb = True

    operations: int = 8
    """Maximum number of operations per layer and window."""
    candidates: int = 1
    """Experts tried for each operation: those of the busiest GPU, heaviest first, then random ones. 0 tries one random
    expert of any GPU."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        window, sim, scale = self.observe(history, placement, tokens)
        simulator, layers = self.simulator, window.n_layers
        # look_ahead counts every token once, so the costs must hold the weight of a token against migration.
        costs = simulator.costs.weigh_tokens(scale)
        chosen = np.zeros((layers, self.candidates + simulator.n_slots + 1), np.int64)
        saved_us = np.zeros((layers, 3 * simulator.n_gpus))
        key = self.random_keys(layers)

        def search(first: int, last: int) -> None:
            kernels.bottleneck(
                first, last, sim, costs, simulator.network, self.norm_log2, self.operations, self.candidates, key,
                chosen, saved_us,
            )  # fmt: skip

        self.each_layer(window, sim, search)
        return sim.slots.copy()


@dataclass(eq=False, kw_only=True)
class SwapGreedy(Search):
    """Applies the best of all swaps and moves, a few times per layer. Slow and strong."""

    starts_from_eplb = True

    operations: int = 8
    """Maximum number of operations per layer and window."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        window, sim, scale = self.observe(history, placement, tokens)
        objective = Objective(self.simulator.costs, self.simulator.network, self.norm_log2, scale, 1.0)
        self.each_layer(
            window, sim, lambda first, last: kernels.swap_greedy(first, last, sim, objective, self.operations)
        )
        return sim.slots.copy()
