"""The proven optimum of small instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.exact_nodes import NodeSearch, can_search

MAX_PLACEMENTS = 300_000
BATCH = 1024


@dataclass(eq=False, kw_only=True)
class Exact(Planner):
    """The placement with the least served and migration time on the observed passes, proven.

    Without spare slots it searches node by node if there are at most two nodes of a few GPUs (16 experts on 2 × 4 GPUs
    take about 5 s per layer). Otherwise it tries every placement. It refuses instances that are too large.
    ``optimum_us`` (L,) is the proven time of each layer of the last plan.
    """

    small_only = True

    migration: bool = True
    """Whether migration time counts."""

    def __post_init__(self) -> None:
        self.optimum_us: npt.NDArray[np.float64] = np.zeros(0)

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        sim, interval = self.simulator, history[-1]
        solve = self._search if can_search(sim) else self._enumerate
        solutions = [
            solve(Interval(interval.experts[l : l + 1], interval.rows, interval.rank_start), placement[l])
            for l in range(interval.n_layers)
        ]
        self.optimum_us = np.array([time_us for _, time_us in solutions])
        return np.stack([slots for slots, _ in solutions]).astype(np.int16)

    def _search(self, interval: Interval, before: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], float]:
        """Search node by node, for placements that are better than one that annealing finds."""
        sim, start = self.simulator, before[None]
        found = Anneal(sim, norm=0, mix_tokens=0).plan([interval], start)
        served = sim.evaluate(interval, found, start)
        found_us = float((served.total_us if self.migration else served.time_us)[0])
        best, best_us = NodeSearch(sim, interval, before, self.migration).run(found_us)
        return (found[0], found_us) if best is None else (best, best_us)

    def _enumerate(self, interval: Interval, before: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], float]:
        """Simulate every placement."""
        sim = self.simulator
        fillings = sum(comb(sim.n_experts, size) for size in range(sim.n_slots + 1))
        if fillings**sim.n_gpus > MAX_PLACEMENTS:
            raise ValueError(
                f"{sim.n_experts} experts in {sim.n_gpus} × {sim.n_slots} slots have about "
                f"{fillings**sim.n_gpus:.1e} placements: the exact planner tries at most {MAX_PLACEMENTS}; "
                "use annealing, or as many slots as experts on one or two nodes (then it searches node by node)"
            )
        best, least = before, np.inf
        every = _placements(sim.n_experts, sim.n_gpus, sim.n_slots)
        # Many at once: each placement is a layer of its own with the same traffic.
        while some := list(islice(every, BATCH)):
            plans, n = np.stack(some), len(some)
            same = Interval(np.repeat(interval.experts, n, axis=0), interval.rows, interval.rank_start)
            served = sim.evaluate(same, plans, np.repeat(before[None], n, axis=0), check=False)
            times_us = served.total_us if self.migration else served.time_us
            i = int(times_us.argmin())
            if times_us[i] < least:
                best, least = plans[i], float(times_us[i])
        return best, least


def _placements(n_experts: int, n_gpus: int, n_slots: int) -> Iterator[npt.NDArray[np.int16]]:
    """Every (G, S) placement that covers all experts, ignoring the order of slots."""
    fillings = [list(c) for size in range(n_slots + 1) for c in combinations(range(n_experts), size)]
    padded = np.array([filling + [-1] * (n_slots - len(filling)) for filling in fillings], dtype=np.int16)
    masks = [sum(1 << e for e in filling) for filling in fillings]
    full = (1 << n_experts) - 1

    def fill(g: int, covered: int, chosen: list[int]) -> Iterator[npt.NDArray[np.int16]]:
        if g == n_gpus:
            if covered == full:
                yield padded[chosen]
            return
        for i, mask in enumerate(masks):
            # Experts that are still missing must fit into the remaining GPUs.
            if (full & ~(covered | mask)).bit_count() <= (n_gpus - g - 1) * n_slots:
                yield from fill(g + 1, covered | mask, [*chosen, i])

    yield from fill(0, 0, [])
