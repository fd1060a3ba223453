"""The baselines of serving engines: the static placement, and EPLB on the load of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.kernels import loads as kernels
from clustergym.moe_placement.simulator import Placement, Window


class Static(Planner):
    """Never moves an expert."""

    needs_tokens = False
    keeps_placement = True

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        return placement


@dataclass(eq=False, kw_only=True)
class OnLoads(Planner):
    """Base of planners that look only at a moving average of the load of each expert."""

    needs_tokens = False

    ema: float = 1.0
    """Weight of the newest window in the moving average. 1 uses only the last window."""

    def __post_init__(self) -> None:
        if not 0 < self.ema <= 1:
            raise ValueError(f"ema is {self.ema}: expected more than 0 and at most 1")
        self.reset()

    def reset(self) -> None:
        self.average: npt.NDArray[np.float64] | None = None

    def observe(self, window: Window) -> npt.NDArray[np.float64]:
        """(L, E) moving average of the loads, the window included."""
        loads = self.loads(window)
        self.average = loads if self.average is None else self.ema * loads + (1 - self.ema) * self.average
        return self.average

    def imbalance(self, loads: npt.NDArray[np.float64], placement: Placement) -> npt.NDArray[np.float64]:
        """(L,) load of the busiest GPU over the mean, if the replicas of an expert share its load evenly."""
        layers = np.arange(len(loads))[:, None, None]
        empty = placement < 0
        ids = np.where(empty, 0, placement).astype(np.int64)
        copies = np.zeros_like(loads)
        np.add.at(copies, (np.broadcast_to(layers, ids.shape)[~empty], ids[~empty]), 1)
        share = np.where(empty, 0.0, (loads / np.maximum(copies, 1))[layers, ids])
        gpus = share.sum(2)
        return np.asarray(gpus.max(1) / np.maximum(gpus.mean(1), 1e-12))


@dataclass(eq=False, kw_only=True)
class EPLB(OnLoads):
    """The expert-parallel load balancer that engines ship: replicate hot experts, then pack the heaviest first."""

    hierarchical: bool = False
    """Assign expert groups to nodes first, then balance within each node. If the groups of the model do not divide
    evenly among the nodes, every expert is its own group."""
    threshold: float = 0.0
    """Plan a layer only if the busiest GPU has more than this many times the mean load."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        loads = self.observe(history[-1])
        planned = self.pack(loads)
        if self.threshold > 0:
            kept = self.imbalance(loads, placement) <= self.threshold
            planned[kept] = placement[kept]
        return planned

    @property
    def n_groups(self) -> int:
        """Expert groups of the hierarchical variant, 0 for the global one."""
        sizes = (self.simulator.model.n_groups, self.simulator.n_experts) if self.hierarchical else ()
        return next((groups for groups in sizes if groups % self.simulator.cluster.n_nodes == 0), 0)

    def pack(self, loads: npt.NDArray[np.float64]) -> Placement:
        """The placement for (L, E) loads."""
        sim, layers = self.simulator, len(loads)
        slots = np.empty((layers, sim.n_gpus, sim.n_slots), np.int16)
        ints = np.empty((layers, 3, sim.n_experts), np.int32)
        floats = np.empty((layers, sim.n_experts + sim.n_gpus))
        kernels.eplb(
            slots, np.ascontiguousarray(loads, dtype=np.float64), sim.cluster.n_nodes, self.n_groups, ints, floats
        )
        return slots


class EPLBOnce(EPLB):
    """EPLB on the first window. The placement is kept after that."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        return super().plan(history, placement, tokens) if self.average is None else placement
