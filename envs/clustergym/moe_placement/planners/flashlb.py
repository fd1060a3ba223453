"""FlashLB of vllm-ascend: plans on mean and covariance of the loads, and only layers whose balance fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from clustergym.common.threads import spread
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.kernels.flashlb import flashlb_slots
from clustergym.moe_placement.simulator import Placement, Window

PARTS = 8
SHORTEST_PART = 32  # tokens; counts of fewer tokens are mostly noise


@dataclass(eq=False, kw_only=True)
class FlashLB(Planner):
    """Tries many replica budgets per layer and keeps the one with the best balance over samples of the loads.

    Loads are sampled over time: one sample per window, or eight if the window is long.
    """

    needs_tokens = False

    windows: int = 4
    """Number of recent windows to plan on."""
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

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        planned = placement.copy()
        loads = self.loads(history[-1])
        past = np.zeros(len(loads)) if self.past is None else self.past
        now = balance(loads, placement)
        poor = np.flatnonzero((now < self.fall * past) | (now < self.floor))
        if len(poor):
            samples = np.concatenate([self.samples(window) for window in history[-self.windows :]])[:, poor]

            def plan_layers(first: int, last: int) -> None:
                for i in range(first, last):
                    planned[poor[i]] = match_gpus(self.search(samples[:, i]), placement[poor[i]])

            spread(plan_layers, len(poor), chunks=len(poor))
            past[poor] = balance(loads[poor], planned[poor])
        self.past = past
        return planned

    def samples(self, window: Window) -> npt.NDArray[np.float64]:
        """(T, L, E) loads over time."""
        # A window of which only the loads are known has no rows, so that it cannot be cut.
        rows = vars(window).get("rows")
        if rows is None or len(rows) < 2 * SHORTEST_PART:
            return self.loads(window)[None]
        parts = min(PARTS, len(rows) // SHORTEST_PART)
        cuts = np.linspace(0, len(rows), parts + 1).astype(int)
        return np.stack([self.loads(Window(window.experts, rows[a:b], window.home[a:b])) for a, b in pairwise(cuts)])

    def search(self, samples: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
        """The placement (G, S) of one layer for its loads (T, E)."""
        sim = self.simulator
        samples = np.ascontiguousarray(samples)
        mean = samples.mean(0)
        covariance = (samples - mean).T @ (samples - mean) / len(samples)
        value = mean + self.z * np.sqrt(np.diag(covariance))
        order = np.argsort(-value, kind="stable").astype(np.int32)
        best = np.empty((sim.n_gpus, sim.n_slots), np.int16)
        ints = np.zeros((2, sim.n_experts + sim.n_gpus + PARTS), np.int32)
        flashlb_slots(
            best, samples, value, order, mean, covariance, self.z, self.width, np.empty_like(best), ints,
            np.empty((2, sim.n_gpus)),
        )  # fmt: skip
        return best


def balance(loads: npt.NDArray[np.float64], placement: Placement) -> npt.NDArray[np.float64]:
    """(L,) mean load over the load of the busiest GPU, if the replicas of an expert share its load evenly."""
    layers, n_experts = loads.shape
    flat = np.where(placement < 0, n_experts, placement).reshape(layers, -1).astype(np.int64)
    flat += np.arange(layers)[:, None] * (n_experts + 1)
    copies = np.bincount(flat.ravel(), minlength=layers * (n_experts + 1))
    shares = np.pad(loads, ((0, 0), (0, 1))).ravel() / np.maximum(copies, 1)
    gpus = shares[flat].reshape(placement.shape).sum(2)
    peak = gpus.max(1)
    return np.asarray(np.divide(gpus.mean(1), peak, out=np.ones(layers), where=peak > 0))


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
