"""Experts that are used together lie together: co-occurrence (TensorRT-LLM) and affinity groups (GRACE-MoE)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner

Array = npt.NDArray[np.float64]
Slots = npt.NDArray[np.int16]
ITERATIONS = 10  # of k-means


@dataclass(eq=False)
class OnCoactivation(Planner):
    """Base of planners that look at the number of tokens that use two experts together."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        interval, n_experts = history[-1], self.simulator.n_experts
        layers = [self.plan_layer(interval.coactivation(l, n_experts)) for l in range(interval.n_layers)]
        return np.stack(layers).astype(np.int16)

    @abstractmethod
    def plan_layer(self, together: Array) -> Slots:
        """The placement (G, S) of one layer for its co-activation (E, E), which has the loads on the diagonal."""


@dataclass(eq=False, kw_only=True)
class CoOccurrence(OnCoactivation):
    """Part of each GPU is filled with experts that are used together, the rest balances the load."""

    fill: float = 0.8
    """Share of the slots and of the mean load of a GPU that is filled by co-activation."""

    def plan_layer(self, together: Array) -> Slots:
        sim, load = self.simulator, np.diag(together)
        copies = replica_counts(load, sim.n_gpus, sim.n_gpus * sim.n_slots)
        share, mean = load / copies, load.sum() / sim.n_gpus
        members: list[list[int]] = [[] for _ in range(sim.n_gpus)]
        weight, left = np.zeros(sim.n_gpus), copies.copy()
        for g, here in enumerate(members):
            attraction = share
            while len(here) < int(self.fill * sim.n_slots):
                # The first expert is the heaviest. Those after it must fit.
                fits = (left > 0) & ((weight[g] + share <= self.fill * mean) | (not here))
                fits[here] = False
                if not fits.any():
                    break
                e = int(np.where(fits, attraction, -1.0).argmax())
                here.append(e)
                attraction = together[here].sum(0)
                weight[g] += share[e]
                left[e] -= 1
        for e in np.argsort(-share, kind="stable").tolist():
            for _ in range(left[e]):
                fits = np.array([len(here) < sim.n_slots and e not in here for here in members])
                if not fits.any():
                    break  # the GPUs with room all hold this expert
                g = int(np.where(fits, weight, np.inf).argmin())
                members[g].append(e)
                weight[g] += share[e]
        return as_slots(members, sim.n_slots)


class AffinityGroups(OnCoactivation):
    """Spectral clustering of the co-activation into groups for nodes, then GPUs. Spare slots replicate hot experts.

    A replica goes to a node that holds the fewest copies of the expert, there to the least loaded GPU.
    """

    def plan_layer(self, together: Array) -> Slots:
        sim, load = self.simulator, np.diag(together)
        rng = np.random.default_rng(self.seed)
        members: list[list[int]] = []
        for node in spectral_groups(together, np.arange(sim.n_experts), sim.cluster.n_nodes, rng):
            groups = spectral_groups(together, node, sim.cluster.gpus_per_node, rng)
            members += [group.tolist() for group in groups]
        node_of = np.arange(sim.n_gpus) // sim.cluster.gpus_per_node
        held = np.zeros((sim.n_gpus, sim.n_experts), bool)
        for g, here in enumerate(members):
            held[g, here] = True
        while True:
            copies = held.sum(0)
            fits = (held.sum(1) < sim.n_slots)[:, None] & ~held
            if not fits.any():
                return as_slots(members, sim.n_slots)
            e = int(np.where(fits.any(0), load / copies, -1.0).argmax())
            weight = held @ (load / copies)
            near = np.bincount(node_of, weights=held[:, e])[node_of]
            g = int(np.lexsort((weight, near, ~fits[:, e]))[0])
            members[g].append(e)
            held[g, e] = True


def replica_counts(load: Array, n_gpus: int, n_slots: int, fewest: int = 1) -> npt.NDArray[np.int64]:
    """(E,) copies of each expert as in EPLB: each spare slot to the most load per copy, at most one per GPU."""
    copies = np.full(len(load), fewest)
    for _ in range(n_slots - fewest * len(load)):
        open_ = copies < n_gpus
        if not open_.any():
            break
        copies[np.where(open_, load / copies, -1.0).argmax()] += 1
    return copies


def as_slots(members: list[list[int]], n_slots: int) -> Slots:
    """Lists of experts as slots (G, S), filled up with −1."""
    return np.array([here + [-1] * (n_slots - len(here)) for here in members], np.int16)


def spectral_groups(
    together: Array, experts: npt.NDArray[np.int64], n_groups: int, rng: np.random.Generator
) -> list[npt.NDArray[np.int64]]:
    """``experts`` in groups whose sizes differ by at most one: k-means on eigenvectors of the normalised Laplacian."""
    n = len(experts)
    if n_groups == 1:
        return [experts]
    if n <= n_groups:
        return [experts[i : i + 1] for i in range(n_groups)]
    affinity = together[np.ix_(experts, experts)]
    np.fill_diagonal(affinity, 0.0)
    degree = affinity.sum(1)
    scale = np.divide(1.0, np.sqrt(degree), out=np.zeros(n), where=degree > 0)
    laplacian = np.eye(n) - scale[:, None] * affinity * scale
    points = eigh(laplacian, subset_by_index=[0, n_groups - 1])[1]
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    # Each centre has as many places as its group has members; the cheapest assignment fills them all.
    places = np.sort(np.arange(n) % n_groups)
    centres = points[[int(rng.integers(n))]]
    while len(centres) < n_groups:
        centres = np.vstack([centres, points[_distances(points, centres).min(1).argmax()]])
    group = np.full(n, -1)
    for _ in range(ITERATIONS):
        point, place = linear_sum_assignment(_distances(points, centres)[:, places])
        assigned = np.empty(n, np.int64)
        assigned[point] = places[place]
        if (assigned == group).all():
            break
        group = assigned
        centres = np.stack([points[group == i].mean(0) for i in range(n_groups)])
    return [experts[group == i] for i in range(n_groups)]


def _distances(points: Array, centres: Array) -> Array:
    return np.asarray(((points[:, None] - centres[None]) ** 2).sum(2))
