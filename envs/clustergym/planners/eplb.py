"""The baselines of serving engines: the static placement, and EPLB on the load of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.kernels import loads as kernels


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


class Static(Planner):
    """Never moves an expert."""

    needs_tokens = False
    keeps_placement = True

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        return placement


@dataclass(eq=False, kw_only=True)
class EPLB(Planner):
    """The expert-parallel load balancer that engines ship: replicate hot experts, then pack the heaviest first."""

    needs_tokens = False

    hierarchical: bool = False
    """Assign expert groups to nodes first, then balance within each node. If the groups of the model do not divide
    evenly among the nodes, every expert is its own group."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        return self.pack(self.loads(history[-1]))

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
