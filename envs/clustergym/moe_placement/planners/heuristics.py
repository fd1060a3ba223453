"""Planners that know only loads or co-activation: what engines run today, and the classics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.planners import kernels
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.simulator import Placement, Simulator, Window
from clustergym.traces.statistics import coactivation_groups


class Static(Planner):
    """Never moves: the placement stays what it was."""

    needs_tokens = False
    keeps_placement = True

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        return placement


class EPLB(Planner):
    """Greedy replication and longest-processing-time packing, as engines ship it, for all layers at once.

    Args:
        hierarchical: first expert groups to nodes, then within each node. Where the model has no groups that divide over
            the nodes, every expert is its own group.
        ema: weight of the newest window in a moving average of the loads; 1 plans on the last window alone.
        threshold: plan a layer anew only where the busiest GPU has more than this times the mean load.
    """

    needs_tokens = False

    def __init__(
        self, simulator: Simulator, seed: int = 0, hierarchical: bool = False, ema: float = 1.0, threshold: float = 0.0
    ) -> None:
        super().__init__(simulator, seed)
        if not 0 < ema <= 1:
            raise ValueError(f"ema is {ema}: expected more than 0 and at most 1")
        self.ema, self.threshold = ema, threshold
        self.n_groups = self._groups() if hierarchical else 0
        self.average: npt.NDArray[np.float64] | None = None

    def _groups(self) -> int:
        nodes = self.simulator.cluster.n_nodes
        for groups in (self.simulator.model.n_groups, self.simulator.n_experts):
            if groups % nodes == 0:
                return groups
        return 0

    def reset(self) -> None:
        self.average = None

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        loads = self.loads(history[-1])
        self.average = loads if self.average is None else self.ema * loads + (1 - self.ema) * self.average
        planned = self.pack(self.average)
        if self.threshold > 0:
            kept = self.imbalance(self.average, placement) <= self.threshold
            planned[kept] = placement[kept]
        return planned

    def pack(self, loads: npt.NDArray[np.float64]) -> Placement:
        """The placement for (L, E) loads."""
        sim = self.simulator
        layers = len(loads)
        slots = np.empty((layers, sim.n_gpus, sim.n_slots), np.int16)
        ints = np.empty((layers, 3, sim.n_experts), np.int32)
        floats = np.empty((layers, sim.n_experts + sim.n_gpus))
        kernels.eplb(
            slots, np.ascontiguousarray(loads, dtype=np.float64), sim.cluster.n_nodes, self.n_groups, ints, floats
        )
        return slots

    def imbalance(self, loads: npt.NDArray[np.float64], placement: Placement) -> npt.NDArray[np.float64]:
        """(L,) load of the busiest GPU over the mean, each replica carrying an equal share."""
        layers = np.arange(len(loads))[:, None, None]
        empty = placement < 0
        ids = np.where(empty, 0, placement).astype(np.int64)
        copies = np.zeros_like(loads)
        np.add.at(copies, (np.broadcast_to(layers, ids.shape)[~empty], ids[~empty]), 1)
        share = np.where(empty, 0.0, (loads / np.maximum(copies, 1))[layers, ids])
        gpus = share.sum(2)
        return np.asarray(gpus.max(1) / np.maximum(gpus.mean(1), 1e-12))


class EPLBOnce(EPLB):
    """EPLB on the first window, never again."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        if self.average is not None:
            return placement
        return super().plan(history, placement, tokens)


class Incremental(EPLB):
    """Swaps between the most and the least loaded GPU until a budget of moves is spent. Knows loads only.

    Args:
        moves: swaps a layer and window.
        ema: as in :class:`EPLB`.
    """

    def __init__(self, simulator: Simulator, seed: int = 0, moves: int = 8, ema: float = 1.0) -> None:
        super().__init__(simulator, seed, ema=ema)
        self.moves = moves

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        loads = self.loads(history[-1])
        self.average = loads if self.average is None else self.ema * loads + (1 - self.ema) * self.average
        slots = placement.copy()
        copies = np.empty((len(loads), self.simulator.n_experts), np.int32)
        weight = np.empty((len(loads), self.simulator.n_gpus))
        kernels.balance(slots, self.average, self.moves, copies, weight)
        return slots


class Grouping(Planner):
    """Experts that fire together lie together, whatever the balance; spare slots go to replicas of the hottest experts."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        sim, window = self.simulator, history[-1]
        slots = np.full((window.n_layers, sim.n_gpus, sim.n_slots), -1, np.int16)
        for l in range(window.n_layers):
            together = _coactivation(window, l, sim.n_experts)
            load = np.diag(together).copy()
            gpu = coactivation_groups(together, sim.n_gpus)
            members = [[int(e) for e in np.flatnonzero(gpu == g)] for g in range(sim.n_gpus)]
            copies = np.ones(sim.n_experts)
            for g in sorted(range(sim.n_gpus), key=lambda g: float(load[members[g]].sum())):
                while len(members[g]) < sim.n_slots:
                    wanted = load / copies
                    wanted[members[g]] = -1.0
                    e = int(np.argmax(wanted))
                    members[g].append(e)
                    copies[e] += 1
                slots[l, g] = members[g]
        return slots


def _coactivation(window: Window, layer: int, n_experts: int) -> npt.NDArray[np.float64]:
    """(E, E) tokens that use both experts; the diagonal holds the loads."""
    ids = window.experts[layer, window.rows].astype(np.int64)
    table = np.zeros((len(ids), n_experts + 1), dtype=np.float32)
    np.put_along_axis(table, np.where(ids < 0, n_experts, ids), 1.0, axis=1)
    table = table[:, :-1]
    return (table.T @ table).astype(np.float64)
