"""Round robin (vLLM's initial placement), and hot experts on every GPU (ROCm ATOM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner


class RoundRobin(Planner):
    """Expert e on GPU e mod G. Spare slots continue in the same order and skip experts that the GPU already holds."""

    needs_tokens = False

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        n_gpus, n_slots, n_experts = self.simulator.n_gpus, self.simulator.n_slots, self.simulator.n_experts
        slots = np.full((n_gpus, n_slots), -1, np.int16)
        following = 0
        for i in range(n_gpus * n_slots):
            s, g = divmod(i, n_gpus)
            candidates = (np.arange(n_experts) + following) % n_experts
            absent = candidates[~np.isin(candidates, slots[g])]
            if len(absent):
                slots[g, s] = absent[0]
                following = (int(absent[0]) + 1) % n_experts
        return np.repeat(slots[None], len(placement), axis=0)


@dataclass(eq=False)
class HotEverywhere(Planner):
    """The hottest experts on every GPU, the others once, heaviest first onto the least loaded GPU.

    The number of hot experts is the number of spare slots per GPU. A layer is planned again only if its set of hot
    experts changes. Slots that this leaves over stay empty.
    """

    needs_tokens = False

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.planned: dict[int, tuple[frozenset[int], npt.NDArray[np.int16]]] = {}
        """Hot experts and slots (G, S) of each layer's last plan."""

    @property
    def n_hot(self) -> int:
        sim = self.simulator
        return (sim.n_gpus * sim.n_slots - sim.n_experts) // sim.n_gpus

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        slots = np.empty(placement.shape, np.int16)
        for l, load in enumerate(self.loads(history[-1])):
            order = np.argsort(-load, kind="stable")
            hot = frozenset(order[: self.n_hot].tolist())
            if l not in self.planned or self.planned[l][0] != hot:
                self.planned[l] = hot, self.pack(load, order)
            slots[l] = self.planned[l][1]
        return slots

    def pack(self, load: npt.NDArray[np.float64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
        """The placement (G, S) of one layer. ``order`` lists the experts by load."""
        sim = self.simulator
        slots = np.full((sim.n_gpus, sim.n_slots), -1, np.int16)
        slots[:, : self.n_hot] = np.sort(order[: self.n_hot])
        filled, weight = np.full(sim.n_gpus, self.n_hot), np.zeros(sim.n_gpus)
        for e in order[self.n_hot :]:
            g = int(np.argmin(np.where(filled < sim.n_slots, weight, np.inf)))
            slots[g, filled[g]] = e
            filled[g] += 1
            weight[g] += load[e]
        return slots
