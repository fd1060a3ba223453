"""Plans with a budget: as many operations on each layer between two intervals as an agent of the environments has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner

MOST_STEPS = 32
"""Steps towards a plan that are tried on a layer at a time: those of the experts with the highest load."""
EMPTY = -1

Gpus = npt.NDArray[np.int16]
"""(G, S) the experts of one layer."""


@dataclass(eq=False, kw_only=True)
class WithinBudget(Planner):
    """Goes from the current placement towards the plan of another planner, with few operations.

    An operation moves a replica to a free slot, exchanges two replicas, adds one or deletes one. Each layer takes, one
    after another, the step that makes the observed interval fastest, migration included. What it had when that was
    fastest is the plan. GPUs of a plan are renamed inside and among nodes so that it is close to the current placement.
    """

    planner: Planner
    """Whose plan is wanted."""
    operations: int
    """Operations on each layer between two intervals."""

    def __post_init__(self) -> None:
        # Of this planner, not of the class.
        vars(self).update(
            {name: getattr(self.planner, name) for name in ("needs_tokens", "needs_future", "needs_mixture")}
        )

    def reset(self) -> None:
        self.planner.reset()

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        interval, sim = history[-1], self.simulator
        wanted = self.planner.plan(history, placement)
        wanted = np.stack([renamed(w, p, sim.cluster.gpus_per_node) for w, p in zip(wanted, placement, strict=True)])
        loads = self.loads(interval)
        now, left = placement.copy(), np.full(len(placement), self.operations)
        best, least = placement.copy(), sim.evaluate(interval, now, placement).total_us
        while True:
            choices = [
                list(steps(layer, goal, load, budget))
                for layer, goal, load, budget in zip(now, wanted, loads, left, strict=True)
            ]
            if not any(choices):
                return best
            times = np.full((max(map(len, choices)), len(now)), np.inf)
            for i, row in enumerate(times):
                tried = now.copy()
                for layer, found in enumerate(choices):
                    if i < len(found):
                        tried[layer] = found[i][0]
                total = sim.evaluate(interval, tried, placement, check=False).total_us
                for layer, found in enumerate(choices):
                    row[layer] = total[layer] if i < len(found) else np.inf
            for layer, found in enumerate(choices):
                if found:
                    i = int(times[:, layer].argmin())
                    now[layer], cost = found[i]
                    left[layer] -= cost
                    if times[i, layer] < least[layer]:
                        best[layer], least[layer] = now[layer], times[i, layer]


def steps(now: Gpus, wanted: Gpus, load: npt.NDArray[np.float64], budget: int) -> Iterator[tuple[Gpus, int]]:
    """Placements of a layer that are a step closer to the wanted one, and the operations that each takes.

    A full GPU takes two if the replica that leaves has no place to go to: a deletion and an addition.
    """
    surplus = [sorted(set(a.tolist()) - set(b.tolist()) - {EMPTY}) for a, b in zip(now, wanted, strict=True)]
    missing = [(int(e), g) for g, row in enumerate(wanted) for e in set(row.tolist()) - set(now[g].tolist()) - {EMPTY}]
    missing.sort(key=lambda pair: (-load[pair[0]], pair))
    copies = np.bincount(now[now != EMPTY], minlength=len(load))
    spare = [[v for v in row if copies[v] > 1] for row in surplus]
    for e, g in missing[:MOST_STEPS]:
        sources = [h for h, row in enumerate(surplus) if e in row]
        free = EMPTY in now[g]
        if sources:
            h = sources[0]
            back = [EMPTY] if free else [v for v in surplus[g] if v not in now[h]]
            if back and budget >= 1:
                yield _exchanged(now, e, h, min(back, key=lambda v: (v != EMPTY and load[v], v)), g), 1
        elif free and budget >= 1:
            yield _replaced(now, g, EMPTY, e), 1
        elif spare[g] and budget >= 2:
            yield _replaced(now, g, min(spare[g], key=lambda v: (load[v], v)), e), 2
    if not missing and budget >= 1:
        for g, row in enumerate(spare):
            yield from ((_replaced(now, g, v, EMPTY), 1) for v in row)


def _replaced(now: Gpus, g: int, old: int, new: int) -> Gpus:
    after = now.copy()
    after[g, np.flatnonzero(now[g] == old)[0]] = new
    return after


def _exchanged(now: Gpus, e: int, h: int, v: int, g: int) -> Gpus:
    """``e`` goes from ``h`` to ``g``, ``v`` (or an empty slot) the other way."""
    return _replaced(_replaced(now, h, e, v), g, v, e)


def renamed(wanted: Gpus, now: Gpus, gpus_per_node: int) -> Gpus:
    """The wanted placement with its nodes, and the GPUs of each node, in the order that is closest to the present."""
    from scipy.optimize import linear_sum_assignment  # takes long to import

    n_nodes = len(now) // gpus_per_node
    common = np.array([[len((set(a) & set(b)) - {EMPTY}) for b in wanted.tolist()] for a in now.tolist()])
    blocks = common.reshape(n_nodes, gpus_per_node, n_nodes, gpus_per_node).transpose(0, 2, 1, 3)
    gpus = [[linear_sum_assignment(-block)[1] for block in row] for row in blocks]
    kept = np.array([[block[np.arange(gpus_per_node), chosen].sum() for block, chosen in zip(*rows, strict=True)]
                     for rows in zip(blocks, gpus, strict=True)])  # fmt: skip
    nodes = linear_sum_assignment(-kept)[1]
    order = np.concatenate([gpus_per_node * other + gpus[node][other] for node, other in enumerate(nodes)])
    result: Gpus = wanted[order]
    return result
