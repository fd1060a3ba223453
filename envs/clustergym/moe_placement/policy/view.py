"""What the placement policy sees: the environment's observation, exact look-ahead, and what it learnt on this layer so far.

The trainer and the ``policy`` planner both look at a :class:`~clustergym.moe_placement.PlacementBatch` through
:class:`PolicyView`, so that a network meets the same inputs in training and at work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clustergym.common.choices import one_of
from clustergym.common.compiling import warn_while_compiling
from clustergym.common.threads import spread
from clustergym.moe_placement.batch import PlacementBatch
from clustergym.moe_placement.kernels.observation import (
    PROGRESS_MIGRATION,
    PROGRESS_OPERATION,
    PROGRESS_SLOWEST_KERNEL,
    PROGRESS_TIME,
)
from clustergym.moe_placement.kernels.state import CLOCK_OPERATION, LAST_KIND, OP_ILLEGAL, OP_NOTHING
from clustergym.moe_placement.launchers import cpu
from clustergym.moe_placement.planners.search import HOMES
from clustergym.moe_placement.policy import view_kernels
from clustergym.moe_placement.policy.view_kernels import N_PARTS, PART_MIGRATION, PART_SMOOTH
from clustergym.moe_placement.simulator import Placement, Window, norm_log2

# Columns of the environment's progress that hold wherever the policy works; layer and window numbers do not.
PROGRESS = [PROGRESS_OPERATION, PROGRESS_TIME, PROGRESS_SLOWEST_KERNEL, PROGRESS_MIGRATION]
# Features are shares of a layer's time, mostly below a hundredth: networks like them near one.
UNIT = 100.0
# Inputs that stay the same while the agents work on a layer, and those that change with each operation.
LAYER_KEYS = ("coactivation", "similar")
STEP_KEYS = ("experts", "memory", "gpus", "traffic", "placement", "progress", "expert_mask", "gpu_mask")

Inputs = dict[str, Tensor]


class PolicyView:
    """Both agents' view of B environments.

    Args:
        batch: the environments; this view steps them.
        homes: ``even`` observes the last window with its tokens dealt evenly over the GPUs, ``served`` as it was served.
        norm: smooth norm of the look-ahead; 0 is the true time.
    """

    def __init__(self, batch: PlacementBatch, homes: str = "even", norm: int = 4) -> None:
        one_of(homes, HOMES, "homes")
        self.batch, self.even, self.norm_log2 = batch, homes == "even", norm_log2(norm)
        size, experts, device = batch.num_envs, batch.n_experts, batch.device
        self.memory = torch.zeros((size, experts, 2), device=device)
        """(B, E, 2): the best that an operation on the expert promised when it was last looked at on this layer; whether it was"""
        self.spent = torch.zeros((size, experts), dtype=torch.bool, device=device)
        """(B, E): was looked at and left alone since the placement last changed; looking again would show the same"""
        self.similar = torch.zeros((size, experts, experts), device=device)
        """(B, E, E): experts that the same experts of the layer before feed, rows sum to 1"""
        self.rows = torch.arange(size, device=device)
        node = torch.from_numpy(batch.simulator.network.node_of).to(device)
        self.same_node = (node[:, None] == node[None, :]).float() / batch.cluster.gpus_per_node
        """(G, G): who shares a node, rows sum to 1"""

    # Stepping

    def reset(self, where: Tensor | None = None) -> None:
        """New episodes, in all environments or where ``where`` (B,) is true."""
        self.batch.reset(where)
        self._begin_layers(torch.ones_like(self.batch.done) if where is None else where)

    def seat(self, placement: Placement, window: Window) -> None:
        """Environment b at the beginning of layer b mod L: placement (L, G, S) after this window."""
        copies = self.batch.num_envs // len(placement)
        slots = np.ascontiguousarray(np.tile(placement, (copies, 1, 1)), dtype=np.int16)
        home = np.ascontiguousarray(window.home, dtype=np.int16)
        batch = self.batch
        batch.episode["clock"].zero_()
        batch.episode["last_operation"].fill_(-1)
        self._run(
            view_kernels.seat_range, batch.num_envs, batch._episode, batch._sim, batch._obs, batch._trace, batch._rules,
            slots, np.ascontiguousarray(window.rows, dtype=np.int32), home,
        )  # fmt: skip
        self._begin_layers(torch.ones_like(batch.done))

    def step(self, expert: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the choices (B,), (B,). Returns rewards (B,) float32 and where a layer was left behind (B,) bool."""
        batch = self.batch
        _, reward, _ = batch.step(expert, node)
        kind = batch.episode["last_operation"][:, LAST_KIND]
        idle = (kind == OP_NOTHING) | (kind == OP_ILLEGAL)
        self.spent &= idle[:, None]
        self.spent[self.rows, expert] |= idle
        began = batch.episode["clock"][:, CLOCK_OPERATION] == 0
        self._begin_layers(began)
        return reward.float(), began

    def settle(self, expert: Tensor, node: Tensor) -> None:
        """The last choices (B,), (B,) on a layer: they are applied and ``episode["slots"]`` is up to date; nothing goes on from there."""
        batch = self.batch
        self._run(
            view_kernels.settle_range, batch.num_envs, batch._array(expert.contiguous()), batch._array(node.contiguous()),
            batch._episode, batch._sim, batch._rules,
        )  # fmt: skip

    def _begin_layers(self, where: Tensor) -> None:
        if not bool(where.any()):
            return
        batch = self.batch
        if self.even:
            self._run(
                view_kernels.deal_range,
                batch.num_envs,
                batch._episode,
                batch._sim,
                batch._obs,
                batch._trace,
                batch._rules,
            )
        fresh = where[:, None]
        self.memory.masked_fill_(fresh[..., None], 0.0)
        self.spent &= ~fresh
        affinity = batch.obs["affinity"]
        similar = affinity.transpose(1, 2) @ affinity
        self.similar = similar / similar.sum(-1, keepdim=True).clamp(min=1e-6)

    # Seeing

    def inputs(self) -> Inputs:
        """What the networks take, as tensors that the next step overwrites."""
        obs = self.batch.obs
        allowed = obs["expert_mask"].bool()
        fresh = allowed & ~self.spent
        return {
            "experts": obs["experts"],
            "memory": self.memory,
            "gpus": obs["gpus"],
            "traffic": obs["traffic"],
            "placement": obs["placement"],
            "progress": obs["progress"][:, PROGRESS],
            "expert_mask": torch.where(fresh.any(-1, keepdim=True), fresh, allowed),
            "gpu_mask": obs["gpu_mask"].bool(),
            "coactivation": obs["coactivation"],
            "similar": self.similar,
            "same_node": self.same_node,
        }

    def legal(self, expert: Tensor) -> Tensor:
        """(B, 3·G): nodes that are legal for the chosen expert."""
        return self.batch.obs["joint_mask"][self.rows, expert].bool()

    def look(self, expert: Tensor) -> Tensor:
        """(B, 3·G, parts): what each operation on ``expert`` (B,) would save, in per cent of the layer's time; remembered."""
        parts = self.look_many(expert[:, None])[:, 0]
        best = (parts[..., PART_SMOOTH] + parts[..., PART_MIGRATION]).amax(-1)
        self.memory[self.rows, expert] = torch.stack([best, torch.ones_like(best)], -1)
        return parts

    def look_many(self, experts: Tensor) -> Tensor:
        """(B, M, 3·G, parts) for the experts (B, M) of each environment."""
        batch = self.batch
        parts = torch.empty((*experts.shape, 3 * batch.n_gpus, N_PARTS), device=batch.device)
        self._run(
            view_kernels.look_range, batch.num_envs, batch._array(experts.contiguous()), batch._array(parts),
            batch._episode, batch._sim, batch._rules, self.norm_log2,
        )  # fmt: skip
        return parts.mul_(UNIT)

    def _run(self, kernel: Any, size: int, *arguments: Any) -> None:
        """``kernel(first, last, …)`` over all environments, on the cores or on the CUDA grid."""
        if self.batch.launcher is cpu:
            with warn_while_compiling():
                spread(kernel, size, *arguments)
            return
        from clustergym.moe_placement.policy import view_cuda

        view_cuda.run(kernel, size, *(self._on_device(argument) for argument in arguments))

    def _on_device(self, argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            return self.batch._array(torch.from_numpy(argument).to(self.batch.device))
        return argument


def gains(parts: Tensor) -> Tensor:
    """What an operation is worth in one number: smooth served time and migration together, (…, parts) → (…)."""
    return parts[..., PART_SMOOTH] + parts[..., PART_MIGRATION]


def trace_of(window: Window) -> npt.NDArray[np.int16]:
    """(tokens, L, K): the trace that a window was drawn from, token first."""
    return np.ascontiguousarray(window.experts.transpose(1, 0, 2)).astype(np.int16)
