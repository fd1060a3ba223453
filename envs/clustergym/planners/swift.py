"""SwiftBalancer of vllm-ascend: few transfers, and none if they would not lower the peaks enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustergym.common.threads import parallel_for
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.kernels.swift import swift_layers


@dataclass(eq=False, kw_only=True)
class Swift(Planner):
    """Keeps the first copy of each expert, chooses the other copies again, then swaps between busy and light GPUs.

    In each layer a GPU sends at most one expert to each other GPU.
    """

    needs_tokens = False
    starts_from_eplb = True

    swaps: int = 100
    """Maximum number of swaps per layer."""
    gain: float = 0.05
    """The plan is used only if the sum over layers of the load of the busiest GPU falls by more than this share."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        loads = self.loads(history[-1])
        (layers, n_experts), (_, n_gpus, n_slots) = loads.shape, placement.shape
        slots, peaks = np.empty(placement.shape, np.int16), np.empty((layers, 2))
        held, used = np.zeros((layers, n_experts, n_gpus), np.int8), np.zeros((layers, n_gpus, n_gpus), np.int8)
        received, copies = np.zeros((layers, n_gpus, n_slots), np.int8), np.zeros((layers, n_experts), np.int32)
        weight, marks = np.zeros((layers, n_gpus)), np.zeros((layers, n_experts + n_gpus), np.int32)
        before = np.ascontiguousarray(placement, dtype=np.int16)
        parallel_for(
            swift_layers, layers, slots, before, loads, self.swaps, held, used, received, copies, weight, marks, peaks
        )
        old, new = peaks.sum(0)
        return slots if new < (1 - self.gain) * old else placement.copy()
