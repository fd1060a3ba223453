"""Heuristics: swaps between the most and the least loaded GPU, and groups of experts that are used together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.eplb import OnLoads
from clustergym.moe_placement.planners.kernels import loads as kernels
from clustergym.moe_placement.simulator import Placement, Window
from clustergym.traces.statistics import coactivation_groups


@dataclass(eq=False, kw_only=True)
class Incremental(OnLoads):
    """Swaps experts of the most and the least loaded GPU, a limited number of times."""

    moves: int = 8
    """Maximum number of swaps per layer and window."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        loads, slots = self.observe(history[-1]), placement.copy()
        copies = np.empty((len(loads), self.simulator.n_experts), np.int32)
        gpu_loads = np.empty((len(loads), self.simulator.n_gpus))
        kernels.balance(slots, loads, self.moves, copies, gpu_loads)
        return slots


class Grouping(Planner):
    """Groups experts that are used together on one GPU, regardless of balance. Spare slots replicate hot experts."""

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        sim, window = self.simulator, history[-1]
        slots = np.full((window.n_layers, sim.n_gpus, sim.n_slots), -1, np.int16)
        for l in range(window.n_layers):
            together = _coactivation(window, l, sim.n_experts)
            load = np.diag(together).copy()
            group_of = coactivation_groups(together, sim.n_gpus)
            members = [np.flatnonzero(group_of == g).tolist() for g in range(sim.n_gpus)]
            copies = np.ones(sim.n_experts)
            for g in sorted(range(sim.n_gpus), key=lambda g: float(load[members[g]].sum())):
                while len(members[g]) < sim.n_slots:
                    share = load / copies
                    share[members[g]] = -1.0
                    hottest = int(np.argmax(share))
                    members[g].append(hottest)
                    copies[hottest] += 1
                slots[l, g] = members[g]
        return slots


def _coactivation(window: Window, layer: int, n_experts: int) -> npt.NDArray[np.float64]:
    """(E, E) number of tokens that use both experts. The diagonal has the loads."""
    ids = window.experts[layer, window.rows].astype(np.int64)
    table = np.zeros((len(ids), n_experts + 1), dtype=np.float32)
    np.put_along_axis(table, np.where(ids < 0, n_experts, ids), 1.0, axis=1)
    table = table[:, :-1]
    return (table.T @ table).astype(np.float64)
