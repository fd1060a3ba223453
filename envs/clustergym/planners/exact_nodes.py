"""The proven optimum on one or two nodes with one copy per expert.

What a pass costs are maxima over GPUs: of copies inside nodes, of copies between nodes, of kernels. What the GPUs of a
node add to them depends on the experts of that node and their order, not on the order in the other node. So the search
divides the experts among the nodes in every way, and finds the times of every order of each node. With the least that
the other node can add, they are bounds from below. Only pairs of orders whose bounds are below the best so far are
tried.
"""

from __future__ import annotations

from itertools import combinations
from math import comb, factorial

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.streams import Interval
from clustergym.planners.kernels.nodes import Scratch, search

MAX_DIVISIONS = 20_000
MAX_ORDERS = 10_000
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def can_search(sim: Simulator) -> bool:
    """Whether the search is for such placements, and they are few enough."""
    nodes, on_node = sim.cluster.n_nodes, sim.cluster.gpus_per_node * sim.n_slots
    if nodes > 2 or nodes * on_node != sim.n_experts or sim.migration != "blocking":
        return False
    orders = factorial(on_node) // factorial(sim.n_slots) ** sim.cluster.gpus_per_node
    return sim.profile.dispatch != "lp" and comb(sim.n_experts, on_node) <= MAX_DIVISIONS and orders <= MAX_ORDERS


class NodeSearch:
    """The search for one layer.

    Args:
        before: (G, S) placement that experts are moved from.
        migration: whether migration time counts.
    """

    def __init__(self, sim: Simulator, interval: Interval, before: npt.NDArray[np.int16], migration: bool) -> None:
        self.sim, self.passes, self.costs = sim, interval.n_passes, sim.interval_costs(interval)
        self.nodes, self.per_node, self.slots = sim.cluster.n_nodes, sim.cluster.gpus_per_node, sim.n_slots
        self.intra_us = self.costs.dispatch_intra_us + self.costs.combine_intra_us
        self.inter_us = self.costs.dispatch_inter_us + self.costs.combine_inter_us
        self.dedup, self.allgather = sim.profile.transport == "dedup", sim.profile.transport == "allgather"
        # All-gather costs the same on every placement.
        if self.allgather:
            self.intra_us = self.inter_us = 0.0
        # A filling is a set of experts that fill a GPU.
        self.fillings: Ids = np.array(list(combinations(range(sim.n_experts), self.slots)))
        self.number = np.full(2**sim.n_experts, -1)
        """Number of a filling by the bits of its experts"""
        self.number[(1 << self.fillings).sum(1)] = np.arange(len(self.fillings))
        on_node = self.per_node * self.slots
        self.local = list(combinations(range(on_node), self.slots))
        self.orders = np.array(_orders(tuple(range(on_node)), self.slots, {f: i for i, f in enumerate(self.local)}))
        self._count(interval)
        held = np.zeros((sim.n_gpus, sim.n_experts), bool)
        for g in range(sim.n_gpus):
            held[g, before[g][before[g] >= 0]] = True
        near = np.repeat(np.asarray(held.reshape(self.nodes, self.per_node, -1).any(1)), self.per_node, axis=0)
        fetch = np.where(held, 0.0, np.where(near, self.costs.receive_intra_us, self.costs.receive_inter_us))
        self.migration = fetch[:, self.fillings].sum(2) * migration
        """(G, fillings)"""

    def _count(self, interval: Interval) -> None:
        """Count who uses which experts: ``uses`` (P, G, tokens of a rank, E) and what follows for each filling."""
        sim, costs = self.sim, self.costs
        ids = interval.experts[0, interval.rows].astype(np.int64)
        table = np.zeros((*ids.shape[:2], sim.n_experts + 1), bool)
        np.put_along_axis(table, np.where(ids < 0, sim.n_experts, ids), True, axis=2)
        rank = np.stack([np.repeat(np.arange(sim.n_gpus), np.diff(starts)) for starts in interval.rank_start])
        self.uses, self.of_rank = table[..., :-1], np.equal(rank[..., None], np.arange(sim.n_gpus))
        visits = np.stack([self._copies(filling) for filling in self.fillings], axis=-1)
        """(P, G, fillings) copies that a rank sends to a GPU with that filling"""
        loads = self.uses.sum(1)
        blocks = -(-loads // costs.block_tokens)
        work = costs.pair_us * loads + costs.expert_us * (loads > 0) + costs.block_us * blocks
        self.work = work
        """(P, E) what an expert adds to the kernel of its GPU at least"""
        tokens = np.full(visits.shape[::2], interval.n_tokens) if self.allgather else visits.sum(1)
        self.kernel = work[:, self.fillings].sum(2) + costs.token_us * tokens
        """(P, fillings)"""
        by_node = visits.reshape(self.passes, self.nodes, self.per_node, -1)
        # Deduplicated copies from the other node are forwarded by the GPU of the same place in the node.
        self.senders = np.repeat(by_node.sum(1, keepdims=True), self.nodes, axis=1) if self.dedup else by_node
        """(P, nodes, GPUs of a node, fillings) copies that a GPU sends to one with that filling in its own node"""
        from_node = by_node.sum(2)
        self.received = 0.0 * from_node if self.dedup else from_node.sum(1, keepdims=True) - from_node
        """(P, nodes, fillings) copies that a GPU of the node with that filling receives from the other node"""

    def _copies(self, experts: Ids) -> Ids:
        """(P, G) copies from each rank to a GPU with these experts."""
        used = self.uses[:, :, experts]
        tokens = np.asarray(used.any(2) if self.dedup else used.sum(2))
        copies: Ids = (tokens[..., None] * self.of_rank).sum(1)
        return copies

    def _sent_us(self, divisions: Ids) -> Floats:
        """(divisions, P) µs of copies between nodes by the rank that sends most. It depends on the division alone."""
        most = np.zeros((len(divisions), self.passes))
        for n in range(self.nodes if self.nodes > 1 else 0):
            on_node = np.zeros((len(divisions), self.sim.n_experts), np.float32)
            np.put_along_axis(on_node, divisions[:, n], 1.0, axis=1)
            others = slice((1 - n) * self.per_node, (2 - n) * self.per_node)
            for p in range(self.passes):
                used = on_node @ self.uses[p].T.astype(np.float32)
                tokens = (used > 0).astype(np.float32) if self.dedup else used
                sent = tokens @ self.of_rank[p, :, others].astype(np.float32)
                most[:, p] = np.maximum(most[:, p], sent.max(1))
        return most * self.inter_us

    def run(self, best_us: float = np.inf) -> tuple[npt.NDArray[np.int16] | None, float]:
        """The best placement (G, S) below ``best_us``, and its time; None if there is none."""
        experts = np.arange(self.sim.n_experts)
        first = np.array(list(combinations(experts, self.per_node * self.slots)))
        rest = [np.setdiff1d(experts, chosen) for chosen in first] if self.nodes == 2 else []
        divisions = np.stack([first, np.array(rest)][: self.nodes], axis=1)
        sent = self._sent_us(divisions)
        order, costs = np.argsort(sent.sum(1), kind="stable"), self.costs
        nodes, n_orders, columns = self.nodes, len(self.orders), 3 * self.passes + 1
        scratch = Scratch(
            np.zeros((nodes, n_orders, columns)), np.zeros((nodes, len(self.local)), np.int64),
            np.zeros((nodes, n_orders), np.int64), np.ones(nodes, np.int64), np.zeros(self.per_node, np.int64),
            np.zeros((nodes + 1, columns)),
        )  # fmt: skip
        fillings = np.full((nodes, self.per_node), -1)
        found_us = search(
            divisions[order], sent[order], np.array(self.local), self.orders, self.number,
            self.senders * self.intra_us, self.received * self.inter_us, self.kernel, self.work, self.migration,
            costs.kernel_us, costs.kernel_floor_us, best_us - costs.dispatch_us - costs.combine_us, fillings, scratch,
        )  # fmt: skip
        if fillings[0, 0] < 0:
            return None, best_us
        return self.fillings[fillings.ravel()].astype(np.int16), found_us + costs.dispatch_us + costs.combine_us


def _orders(experts: tuple[int, ...], slots: int, number: dict[tuple[int, ...], int]) -> list[list[int]]:
    """Every way to fill GPUs with the experts, as numbers of fillings."""
    if not experts:
        return [[]]
    return [
        [number[filling], *rest]
        for filling in combinations(experts, slots)
        for rest in _orders(tuple(e for e in experts if e not in filling), slots, number)
    ]
