"""A planner that sees the next window, to estimate how much other planners could gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement.kernels.state import MODE_STAY
from clustergym.moe_placement.planners.anneal import Anneal
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.simulator import Placement, Window


@dataclass(eq=False, kw_only=True)
class Oracle(Planner):
    """Anneals on the window to come and ignores migration. A strong reference, but not a proven bound.

    It starts from the current placement and from EPLB's, and minimizes first the smooth norm, then the true time.
    """

    needs_future = True

    iterations: int = 12000
    """Annealing steps per layer, start and stage."""

    def __post_init__(self) -> None:
        self.stages = [
            Anneal(
                self.simulator, self.seed + i, norm=norm, heat=heat, iterations=self.iterations, migration_weight=0.0
            )
            for i, (norm, heat) in enumerate([(16, (2e-3, 3e-5)), (0, (3e-4, 1e-5))])
        ]
        self.eplb = EPLB(self.simulator)

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        best, least_us = placement, np.full(len(placement), np.inf)
        for start in (placement, self.eplb.pack(self.eplb.loads(history[-1]))):
            plan = start
            for stage in self.stages:
                plan = stage.plan(history[-1:], plan, tokens)
            times_us = self.simulator.evaluate(history[-1], plan).time_us
            better = times_us < least_us
            if self.simulator.mode == MODE_STAY:  # layers depend on each other: keep a plan whole
                better[:] = times_us.sum() < least_us.sum()
            best, least_us = np.where(better[:, None, None], plan, best), np.where(better, times_us, least_us)
        return best.astype(np.int16)
