"""The agents' look-ahead when they plan: an estimate that does not look at tokens.

In training, the look-ahead simulates each operation on the observed tokens. A planner knows more than these tokens, and
it has less time. The estimate of annealing reads the loads and pairs of experts, those of past traffic included, and
tries an operation in less than a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clustergym.moe_placement.batch import PlacementBatch
from clustergym.moe_placement.kernels.state import N_PARTS, SimulationState
from clustergym.moe_placement.planners.anneal import Anneal
from clustergym.moe_placement.planners.kernels import surrogate_operations as kernels
from clustergym.moe_placement.planners.kernels.launch import over_layers
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval


class Simulated:
    """The look-ahead of the training: every operation is simulated on the observed tokens."""

    def __init__(self, batch: PlacementBatch) -> None:
        self.batch = batch

    def look_ahead(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Estimate.look_ahead`; ADD to a full GPU stays illegal."""
        return self.batch.lookahead(experts), torch.full((*experts.shape, self.batch.n_gpus), -1)

    def operate(self, experts: Tensor, nodes: Tensor, spare: Tensor, must_save: bool) -> None:
        assert not must_save, "an operation that was chosen together with others cannot be checked again"


class Estimate:
    """The estimate of all layers, which follows the operations of a batch with one environment per layer."""

    def __init__(
        self, search: Anneal, history: Sequence[Interval], placement: Placement, batch: PlacementBatch
    ) -> None:
        self.batch, self.n_passes = batch, batch.rules_host.n_passes
        self.sim = SimulationState(**{name: tensor.numpy() for name, tensor in batch.sim.items()})
        self.state, self.objective = search.prepare_estimate(history, placement, search.topics(history, own=False))
        self.start_us = search.take(self.state, placement, self.objective)

    def look_ahead(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """What each operation on ``experts`` (L, M) saves, (L, M, 3·G, parts), as :meth:`PlacementBatch.lookahead`.

        Also (L, M, G): the expert, or −1, whose spare replica is best deleted first to ADD to a full GPU.
        """
        parts = torch.empty((*experts.shape, 3 * self.batch.n_gpus, N_PARTS))
        spare = torch.empty((*experts.shape, self.batch.n_gpus), dtype=torch.int64)
        self._run(
            kernels.look_ahead, self.state, self.sim, experts.contiguous().numpy(), self.n_passes, self.objective,
            self.start_us, parts.numpy(), spare.numpy(), self.batch.buffers["memory"].numpy(),
        )  # fmt: skip
        return parts, spare

    def operate(self, experts: Tensor, nodes: Tensor, spare: Tensor, must_save: bool) -> None:
        """Follow the operations (L,), (L,) that the batch is about to make, after it deletes ``spare`` replicas (L,).

        With ``must_save``, ``experts`` and ``spare`` become −1 where an operation saves nothing.
        """
        self._run(
            kernels.operate, self.state, self.sim, experts.numpy(), nodes.numpy(), spare.numpy(), self.n_passes,
            self.objective, must_save,
        )  # fmt: skip

    def _run(self, kernel: Callable[..., None], *arguments: object) -> None:
        over_layers(kernel, 0, len(self.start_us), *arguments)
