"""FlashLB of vllm-ascend: plans on mean and covariance of the loads, and only layers whose balance fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from clustergym.common.threads import parallel_for
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.eplb import balance
from clustergym.planners.kernels.flashlb import BLOCKS, flashlb_slots


@dataclass(eq=False, kw_only=True)
class FlashLB(Planner):
    """Tries many replica budgets per layer and keeps the one with the best balance over the recent passes."""

    needs_tokens = False

    intervals: int = 4
    """Number of recent intervals to plan on. Every sampled pass is a sample of the loads."""
    z: float = 0.674
    """Weight of the standard deviation. 0.674 is the third quartile of a normal distribution."""
    width: int = 8
    """Replica budgets of a block of experts are tried up to this far from the greedy budget."""
    fall: float = 0.9
    """Plan a layer if its balance (mean load over that of the busiest GPU) is below this share of its past value."""
    floor: float = 0.85
    """Also plan a layer if its balance is below this."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.past: npt.NDArray[np.float64] | None = None
        """(L,) balance that each layer had after it was last planned; 0 if it never was."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        planned = placement.copy()
        loads = self.loads(history[-1])
        past = np.zeros(len(loads)) if self.past is None else self.past
        now = balance(loads, placement)
        poor = np.flatnonzero((now < self.fall * past) | (now < self.floor))
        if len(poor):
            recent = [interval.pass_loads(self.simulator.n_experts) for interval in history[-self.intervals :]]
            samples = np.concatenate(recent)[:, poor].astype(np.float64)

            def plan_layers(first: int, last: int) -> None:
                for i in range(first, last):
                    planned[poor[i]] = match_gpus(self.search(samples[:, i]), placement[poor[i]])

            parallel_for(plan_layers, len(poor), chunks=len(poor))
            past[poor] = balance(loads[poor], planned[poor])
        self.past = past
        return planned

    def search(self, samples: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
        """The placement (G, S) of one layer for its loads (T, E)."""
        sim = self.simulator
        samples = np.ascontiguousarray(samples)
        mean = samples.mean(0)
        covariance = (samples - mean).T @ (samples - mean) / len(samples)
        value = mean + self.z * np.sqrt(np.diag(covariance))
        order = np.argsort(-value, kind="stable").astype(np.int32)
        best = np.empty((sim.n_gpus, sim.n_slots), np.int16)
        ints = np.zeros((2, sim.n_experts + sim.n_gpus + BLOCKS), np.int32)
        flashlb_slots(
            best, samples, value, order, mean, covariance, self.z, self.width, np.empty_like(best), ints,
            np.empty((2, sim.n_gpus)),
        )  # fmt: skip
        return best


def match_gpus(slots: npt.NDArray[np.int16], before: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """The same groups of experts, each on the GPU that makes the number of experts to fetch least."""
    n_experts = max(int(slots.max()), int(before.max())) + 1
    new, old = (np.zeros((len(slots), n_experts + 1)) for _ in range(2))
    np.put_along_axis(new, np.where(slots < 0, n_experts, slots).astype(np.int64), 1.0, axis=1)
    np.put_along_axis(old, np.where(before < 0, n_experts, before).astype(np.int64), 1.0, axis=1)
    group, gpu = linear_sum_assignment(-(new[:, :-1] @ old[:, :-1].T))
    matched = np.empty_like(slots)
    matched[gpu] = slots[group]
    return matched
