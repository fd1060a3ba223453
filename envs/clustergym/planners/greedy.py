"""Greedy search: look ahead at every operation, and make the best one on each expert in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.kernels.greedy import improve_layers
from clustergym.planners.kernels.launch import over_layers
from clustergym.traces.token_trace import TokenTrace


@dataclass(eq=False, kw_only=True)
class Greedy(Planner):
    """Changes each layer in rounds. In a round, experts have their turn, those that can save most first.

    The look-ahead is the estimate of annealing, so it does not count tokens, and it knows past traffic if the planner
    has learned it. A layer starts from the best of the current placement, EPLB's and, after learning, the plan for past
    traffic. Rounds end when one saves less than half a percent.
    """

    learns = True

    operations: int | None = None
    """Maximum number of operations per layer and interval."""
    restart: bool = True
    """Start each layer from another placement than the current one if that is better, migration included."""

    def __post_init__(self) -> None:
        if self.operations is not None and self.operations < 1:
            raise ValueError(f"operations is {self.operations}: expected at least 1")
        self.search = Anneal(self.simulator, self.seed, restart=self.restart)

    def learn(self, trace: TokenTrace) -> None:
        self.search.learn(trace)

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        topic = self.search.topics(history, hurry=True)
        state, objective = self.search.prepare_estimate(history, placement, topic)
        self.search.start_estimate(state, placement, objective)
        most = np.iinfo(np.int64).max if self.operations is None else self.operations
        gains = np.empty((len(placement), self.simulator.n_experts))
        over_layers(improve_layers, 0, len(placement), state, objective, most, gains)
        return state.slots.copy()
