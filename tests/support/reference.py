"""The serving model once more, slowly: one token at a time, with sets and counters.

Written from the definitions of the model. It shares nothing with the kernels but the constants in
:class:`~clustergym.moe_placement.kernels.state.Costs`, so that agreement means something. Links are (sender, receiver).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clustergym.moe_placement.kernels.state import Costs
from clustergym.moe_placement.streams import Interval

Links = Counter[tuple[int, int]]
Slots = Sequence[Sequence[int]]
"""Experts in the slots of each GPU of one layer, −1 for an empty slot."""


def token_hash(row: int) -> int:
    """The fixed hash of a token: two rounds of xor-shift and multiply on 31 bits."""
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):
        row = (row ^ row >> shift) * factor % 2**31
    return row ^ row >> 16


@dataclass(frozen=True)
class Token:
    """What a replica choice may depend on."""

    row: int
    """in the trace"""
    position: int
    """in the batch of the rank that runs the request"""
    rank: int
    """GPU that runs the request"""


def serving_gpu(
    dispatch: str, expert: int, token: Token, earlier: int, holders: list[int], per_node: int, n_gpus: int
) -> int:
    """GPU whose replica serves a token. ``earlier`` tokens of the same rank have used the expert in this pass."""
    n, rank = len(holders), token.rank
    near = [g for g in holders if g // per_node == rank // per_node]
    if dispatch == "token-hash":
        return holders[token.position * 2654435769 % 2**32 % n]
    if dispatch == "round-robin":
        return holders[(earlier + rank) % n]
    if dispatch == "rank-mod":
        return holders[rank % n]
    if dispatch == "random":
        return holders[token_hash(token.row) * n >> 31]
    if rank in holders:
        return rank
    if dispatch == "local-hash":
        candidates = near or holders
        return candidates[token_hash(token.row) * len(candidates) >> 31]
    assert dispatch in ("rank-nearest", "rank-nearest-dealt")
    nodes = {g // per_node for g in holders}
    dealt = [g for g in range(n_gpus) if g // per_node not in nodes]
    if dispatch == "rank-nearest-dealt" and len(nodes) == 1:
        dealt = [g for g in range(n_gpus) if g not in holders]
    # These ranks are dealt over all replicas, beginning with another one for each expert.
    return holders[(expert + dealt.index(rank)) % n] if rank in dealt else near[0]


def copies_of(at: int, ran: list[int], per_node: int, transport: str) -> list[tuple[int, int]]:
    """The copies of one token that is on GPU ``at`` and whose experts run on ``ran``."""
    if transport == "per-expert":
        return [(at, g) for g in ran if g != at]
    # One copy per GPU of the token's node. One per other node, to the GPU of the same local rank, which forwards it.
    links = []
    for node in {g // per_node for g in ran}:
        entry = node * per_node + at % per_node
        if node != at // per_node:
            links.append((at, entry))
        links += [(entry, g) for g in set(ran) if g // per_node == node and g != entry]
    return links


@dataclass
class PassResult:
    """What one layer does in one pass."""

    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(expert, GPU) → tokens"""
    links: Links = field(default_factory=Counter)
    """copies dispatched"""
    ran: list[list[int]] = field(default_factory=list)
    """GPU of each expert of each token, pads left out"""

    def gpu_pairs(self, n_gpus: int) -> list[int]:
        total = [0] * n_gpus
        for (_, g), n in self.pairs.items():
            total[g] += n
        return total


def serve_pass(
    experts: Sequence[Sequence[int]], rows: Sequence[int], rank_start: Sequence[int], slots: Slots, per_node: int,
    dispatch: str, transport: str, shares: np.ndarray | None = None,
) -> PassResult:  # fmt: skip
    """Serve the tokens ``rows`` with ``experts`` (rows, K) of a layer.

    ``shares`` (E, G) are the tokens that the linear program gives to each replica, for dispatch ``lp``.
    """
    n_gpus, result = len(slots), PassResult()
    home = [g for g in range(n_gpus) for _ in range(rank_start[g], rank_start[g + 1])]
    earlier: Counter[tuple[int, int]] = Counter()
    holders_of: dict[int, list[int]] = {}
    for t, row in enumerate(int(r) for r in rows):
        token = Token(row, t - int(rank_start[home[t]]), home[t])
        used = [int(e) for e in experts[row] if e >= 0]
        ran = []
        for e in used:
            if e not in holders_of:
                holders_of[e] = [g for g in range(n_gpus) if e in slots[g]]
            holders = holders_of[e]
            if shares is not None and len(holders) > 1:
                limits = np.cumsum(shares[e, holders]) / shares[e].sum()
                below = sum(limit <= token_hash(row) / 2**31 for limit in limits)
                ran.append(holders[min(below, len(holders) - 1)])
            elif len(holders) == 1:
                ran.append(holders[0])
            else:
                ran.append(serving_gpu(dispatch, e, token, earlier[token.rank, e], holders, per_node, n_gpus))
            earlier[token.rank, e] += 1
        result.ran.append(ran)
        result.pairs.update(zip(used, ran, strict=True))
        if transport != "allgather":
            result.links.update(copies_of(token.rank, ran, per_node, transport))
    if transport == "allgather":
        result.links = Counter(
            {(g, h): n for g, n in Counter(home).items() for h in range(n_gpus) if g != h and n}
        )  # fmt: skip
    return result


def serve(
    interval: Interval, placement: Sequence[Slots], per_node: int, dispatch: str, transport: str
) -> list[list[PassResult]]:
    """What each layer does in each pass: [layer][pass]."""
    return [
        [
            serve_pass(interval.experts[layer], rows, interval.rank_start[w], slots, per_node, dispatch, transport)
            for w, rows in enumerate(interval.rows)
        ]
        for layer, slots in enumerate(placement)
    ]


# Time


def sent_and_received(links: Links, n_gpus: int, per_node: int) -> np.ndarray:
    """(4, G): copies sent and received inside the node, then between nodes."""
    table = np.zeros((4, n_gpus), int)
    for (sender, receiver), n in links.items():
        far = 2 * (sender // per_node != receiver // per_node)
        table[far, sender] += n
        table[far + 1, receiver] += n
    return table


def norm(values: Sequence[float], p: int) -> float:
    """The p-norm; 0 is the maximum."""
    largest = float(max(values))
    return largest * sum((v / largest) ** p for v in values) ** (1 / p) if p and largest else largest


def kernel_us(result: PassResult, n_gpus: int, costs: Costs, transport: str) -> list[float]:
    """Time of each GPU's expert kernel without its start."""
    times = []
    for g in range(n_gpus):
        loads = [n for (_, h), n in result.pairs.items() if h == g]
        received = {
            "allgather": len(result.ran),
            "per-expert": sum(loads),
            "dedup": sum(g in ran for ran in result.ran),
        }[transport]
        blocks = sum(-(-n // costs.block_tokens) for n in loads)
        times.append(
            costs.token_us * received + costs.expert_us * len(loads) + costs.block_us * blocks
            + costs.pair_us * sum(loads)
        )  # fmt: skip
    return times


def times_us(
    result: PassResult, n_gpus: int, per_node: int, costs: Costs, transport: str, p: int = 0
) -> tuple[float, float, float]:
    """(dispatch, compute, combine). The smooth p-norm has no floor."""

    def exchange_us(links: Links, intra_us: float, inter_us: float) -> float:
        if transport == "allgather":
            return 0.0
        table = sent_and_received(links, n_gpus, per_node)
        return norm(table[:2].ravel() * intra_us, p) + norm(table[2:].ravel() * inter_us, p)

    compute = costs.kernel_us + norm(kernel_us(result, n_gpus, costs, transport), p)
    return (
        costs.dispatch_us + exchange_us(result.links, costs.dispatch_intra_us, costs.dispatch_inter_us),
        compute if p else max(costs.kernel_floor_us, compute),
        costs.combine_us + exchange_us(result.links, costs.combine_intra_us, costs.combine_inter_us),
    )


def received(slots: Slots, before: Slots, per_node: int) -> Counter[tuple[int, bool]]:
    """(GPU, from another node) → experts that it must receive."""
    found: Counter[tuple[int, bool]] = Counter()
    held = [{int(e) for e in gpu if e >= 0} for gpu in before]
    for g, gpu in enumerate(slots):
        first = g // per_node * per_node
        for e in {int(e) for e in gpu if e >= 0} - held[g]:
            found[g, not any(e in held[h] for h in range(first, first + per_node))] += 1
    return found


def migration_us(slots: Slots, before: Slots, per_node: int, costs: Costs) -> float:
    """Transfer time of the GPU that receives most, per pass."""
    moved = received(slots, before, per_node)
    cost = {False: costs.receive_intra_us, True: costs.receive_inter_us}
    return max(sum(cost[far] * moved[g, far] for far in (False, True)) for g in range(len(slots)))
