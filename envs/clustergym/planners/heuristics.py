"""Heuristics: swaps between the most and the least loaded GPU, and groups of experts that are used together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.eplb import OnLoads
from clustergym.planners.kernels import loads as kernels
from clustergym.traces.statistics import coactivation_groups


@dataclass(eq=False, kw_only=True)
class Incremental(OnLoads):
    """Swaps experts of the most and the least loaded GPU, a limited number of times."""

    moves: int = 8
    """Maximum number of swaps per layer and interval."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        loads, slots = self.observe(history[-1]), placement.copy()
        copies = np.empty((len(loads), self.simulator.n_experts), np.int32)
        gpu_loads = np.empty((len(loads), self.simulator.n_gpus))
        kernels.balance(slots, loads, self.moves, copies, gpu_loads)
        return slots


class Grouping(Planner):
    """Groups experts that are used together on one GPU, regardless of balance. Spare slots replicate hot experts."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        sim, interval = self.simulator, history[-1]
        slots = np.full((interval.n_layers, sim.n_gpus, sim.n_slots), -1, np.int16)
        for l in range(interval.n_layers):
            together = interval.coactivation(l, sim.n_experts)
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
