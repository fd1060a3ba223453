"""Annealing with a learned model of the traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal

LEARNED_SPREAD = 1.4


@dataclass(eq=False, kw_only=True)
class AnnealLearned(Anneal):
    """Annealing on the tokens of the last interval and on training tokens of the same topics.

    See :mod:`.traffic_model`. It pays off where an interval has few tokens or the mixture of topics changes.
    """

    needs_training = True

    spread: float = LEARNED_SPREAD
    """See :class:`Search`. Topics of training traffic are better known than those of one interval, so plans can be
    prepared for larger changes."""

    def plan(self, history: Sequence[Interval], placement: Placement, others: Sequence[Placement] = ()) -> Placement:
        if self.traffic is None:
            raise ValueError("anneal-learned needs a model of the traffic: call learn(trace) with past traffic first")
        return super().plan(history, placement, others)
