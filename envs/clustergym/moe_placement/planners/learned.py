"""Annealing with a learned model of the traffic."""

from __future__ import annotations

from collections.abc import Sequence

from clustergym.moe_placement.planners.anneal import Anneal
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval


class AnnealLearned(Anneal):
    """Annealing on the tokens of the last interval and on training tokens of the same topics.

    See :mod:`.traffic_model`. It pays off where an interval has few tokens or the mixture of topics changes.
    """

    needs_training = True

    def plan(self, history: Sequence[Interval], placement: Placement, others: Sequence[Placement] = ()) -> Placement:
        if self.traffic is None:
            raise ValueError("anneal-learned needs a model of the traffic: call learn(trace) with past traffic first")
        return super().plan(history, placement, others)
