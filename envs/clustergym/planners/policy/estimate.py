"""The agents' look-ahead when they plan: an estimate that does not look at tokens.

In training, the look-ahead simulates each operation on the observed tokens. A planner knows more than these tokens, and
it has less time. The estimate of annealing reads the loads and pairs of experts, those of past traffic included, and
tries an operation in less than a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels.state import N_PARTS
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal
from clustergym.planners.kernels import surrogate_operations as kernels
from clustergym.planners.policy.network import MASKED_LOGIT


class Estimate:
    """The estimate of all layers, and the placement that operations change.

    It begins with the best placement that ``search`` knows for each layer.
    """

    def __init__(self, search: Anneal, history: Sequence[Interval], placement: Placement) -> None:
        self.state, self.objective = search.prepare_estimate(history, placement, search.topics(history, hurry=True))
        _, self.start_us = search.start_estimate(self.state, placement, self.objective)
        self.memory = torch.zeros((*self.state.load.shape, 2))

    @property
    def placement(self) -> Placement:
        """(L, G, S) after the operations so far"""
        return self.state.slots.copy()

    def look_ahead(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """What each operation on ``experts`` (L, M) saves, (L, M, 3·G, parts), and which are legal, (L, M, 3·G).

        The parts are those of :meth:`PlacementBatch.lookahead`. ``memory`` keeps the best of each expert.
        """
        n_nodes = 3 * self.state.slots.shape[1]
        parts, legal = torch.empty((*experts.shape, n_nodes, N_PARTS)), torch.empty((*experts.shape, n_nodes)).bool()
        arrays = [x.numpy() for x in (parts, legal, self.memory)]
        arguments = (self.state, experts.contiguous().numpy(), self.objective, self.start_us, *arrays)
        spread(kernels.look_ahead, len(experts), *arguments)
        return parts, legal

    def operate(self, experts: Tensor, scores: Tensor, per_gain: float) -> float:
        """Make one operation per layer on each of ``experts`` (L, M), one after another, if it saves time.

        It is the one with the best sum of ``scores`` (L, M, 3·G) and ``per_gain`` times the share of the time that it
        saves after the operations before it. Returns the share that all of them save, mean over layers.
        """
        saved, chosen = np.zeros(len(experts)), [x.contiguous().numpy() for x in (experts, scores)]
        arguments = (self.state, *chosen, MASKED_LOGIT, per_gain, self.objective, self.start_us, saved)
        spread(kernels.operate, len(experts), *arguments)
        return float(saved.mean())
