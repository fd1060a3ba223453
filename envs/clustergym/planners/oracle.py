"""Planners that know more than an engine can: the next passes, or the next mixture of domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB


class Forecast(Anneal):
    """Annealing on other tokens of the next interval's domains: what a perfect forecast of the mixture would give."""

    needs_mixture = True
    learns = False


@dataclass(eq=False, kw_only=True)
class Oracle(Planner):
    """Anneals on the passes to come and ignores migration: what hindsight gives. It is not a proven bound.

    It starts from the current placement and from EPLB's, and minimizes first the smooth norm, then the true time.
    """

    needs_future = True

    iterations: int = 12000
    """Annealing steps per layer, start and stage."""

    def __post_init__(self) -> None:
        # It may leave slots empty, because some planners do.
        options: dict[str, Any] = {"iterations": self.iterations, "mix_tokens": 0, "migration_weight": 0.0}
        options["shares"] = (0.3, 0.35, 0.2, 0.1)
        self.stages = [
            Anneal(self.simulator, self.seed + i, norm=norm, heat=heat, **options)
            for i, (norm, heat) in enumerate([(16, (2e-3, 3e-5)), (0, (3e-4, 1e-5))])
        ]
        self.eplb = EPLB(self.simulator)

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        best, least_us = placement, np.full(len(placement), np.inf)
        for start in (placement, self.eplb.pack(self.eplb.loads(history[-1]))):
            plan = start
            for stage in self.stages:
                plan = stage.plan(history[-1:], plan)
            times_us = self.simulator.evaluate(history[-1], plan).time_us
            better = times_us < least_us
            best, least_us = np.where(better[:, None, None], plan, best), np.where(better, times_us, least_us)
        return best.astype(np.int16)
