"""The placement simulator once more, slowly: sets, dicts and one token at a time.

Written from DESIGN section 3 and the environment's docstring, and sharing nothing with the kernels but the token hash, so that
agreement means something. Links are directed pairs (sender, receiver); times come from the specs' fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from clustergym.moe_placement import ClusterSpec, ModelSpec

Holders = list[set[int]]
"""Experts on each GPU of one layer."""


def token_hash(row: int) -> int:
    """The fixed hash of a token: two rounds of xor-shift and multiply on 31 bits."""
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):
        row = (row ^ row >> shift) * factor % 2**31
    return row ^ row >> 16


def holders_of(placement: Sequence[Sequence[Sequence[int]]]) -> list[Holders]:
    """Slots (L, G, S) as sets, empty slots left out."""
    return [[{int(e) for e in gpu if e >= 0} for gpu in layer] for layer in placement]


def runs_on(expert: int, row: int, at: int, held: Holders, per_node: int) -> int:
    """The GPU whose replica a token on GPU ``at`` uses: its own, else one on its node, else any."""
    everywhere = [g for g, experts in enumerate(held) if expert in experts]
    if at in everywhere:
        return at
    near = [g for g in everywhere if g // per_node == at // per_node]
    candidates = near or everywhere
    return candidates[token_hash(row) * len(candidates) >> 31]


def dedup_links(at: int, visited: set[int], per_node: int) -> list[tuple[int, int]]:
    """One copy to each GPU of the token's node; one to each other node, to the GPU of the same rank, which forwards it."""
    links = []
    for node in {g // per_node for g in visited}:
        entry = node * per_node + at % per_node
        if node != at // per_node:
            links.append((at, entry))
        links += [(entry, g) for g in visited if g // per_node == node and g != entry]
    return links


@dataclass
class LayerResult:
    dispatch_us: float = 0.0
    compute_us: float = 0.0
    combine_us: float = 0.0
    migration_us: float = 0.0
    links: Counter[tuple[int, int]] = field(default_factory=Counter)
    """copies dispatched"""
    back: Counter[tuple[int, int]] = field(default_factory=Counter)
    """copies combined, each as (GPU that wants the result, GPU that sends it)"""
    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(expert, GPU) → tokens"""
    ran: list[list[int]] = field(default_factory=list)
    """GPU of each expert of each token, pads left out"""
    stays: list[int] = field(default_factory=list)
    """GPU that holds each token after the layer"""
    received: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """(GPU, from another node) → experts"""

    @property
    def time_us(self) -> float:
        return self.dispatch_us + self.compute_us + self.combine_us


def busiest(links: Counter[tuple[int, int]], per_node: int, far: bool) -> int:
    """Most copies that one GPU sends, or receives, over the links inside nodes (or between them)."""
    sent: Counter[int] = Counter()
    got: Counter[int] = Counter()
    for (sender, receiver), copies in links.items():
        if (sender // per_node != receiver // per_node) == far:
            sent[sender] += copies
            got[receiver] += copies
    return max([0, *sent.values(), *got.values()])


def serve(
    experts: Sequence[Sequence[Sequence[int]]],
    rows: Sequence[int],
    homes: Sequence[int],
    placement: Sequence[Sequence[Sequence[int]]],
    model: ModelSpec,
    cluster: ClusterSpec,
    comm: str,
    passes: int,
    before: Sequence[Sequence[Sequence[int]]] | None = None,
) -> list[LayerResult]:
    """Serve the tokens ``rows`` of a trace (L, rows, K) and return what each layer did."""
    per_node, n_gpus = cluster.gpus_per_node, cluster.n_nodes * cluster.gpus_per_node
    latency = (cluster.intra_latency_us if per_node > 1 else 0) + (
        cluster.inter_latency_us if cluster.n_nodes > 1 else 0
    )
    bytes_per_us = {False: cluster.intra_gb_s * 1e3, True: cluster.inter_gb_s * 1e3}

    def exchange_us(links: Counter[tuple[int, int]], copy_bytes: float) -> float:
        return latency + sum(busiest(links, per_node, far) * copy_bytes / bytes_per_us[far] for far in (False, True))

    results = []
    where = [int(g) for g in homes]
    old_layers = holders_of(placement if before is None else before)
    for layer, (held, old) in enumerate(zip(holders_of(placement), old_layers, strict=True)):
        out = LayerResult()
        for i, row in enumerate(int(r) for r in rows):
            used = [int(e) for e in experts[layer][row] if e >= 0]
            ran = [runs_on(e, row, where[i], held, per_node) for e in used]
            out.ran.append(ran)
            out.pairs.update(zip(used, ran, strict=True))
            if comm == "per-expert":
                links = [(where[i], g) for g in ran if g != where[i]]
                out.links.update(links)
                out.back.update(links)
            else:
                out.links.update(dedup_links(where[i], set(ran), per_node))
                if comm == "stay" and ran:
                    where[i] = ran[0]
                out.back.update(dedup_links(where[i], set(ran), per_node))
            out.stays.append(where[i])
        out.dispatch_us = exchange_us(out.links, model.hidden * model.dispatch_bytes)
        out.combine_us = exchange_us(out.back, model.hidden * model.combine_bytes)
        kernels = []
        for g in range(n_gpus):
            loads = [n for (_, gpu), n in out.pairs.items() if gpu == g]
            kernels.append(
                model.kernel_start_us + model.kernel_expert_us * len(loads) + model.kernel_pair_us * sum(loads)
            )
        out.compute_us = max(kernels)
        expert_bytes = 3 * model.hidden * model.intermediate * model.weight_bytes
        fetching = [0.0]
        for g in range(n_gpus):
            for e in held[g] - old[g]:
                neighbours = range(g // per_node * per_node, (g // per_node + 1) * per_node)
                far = not any(e in old[h] for h in neighbours)
                out.received[g, far] += 1
            fetching.append(sum(out.received[g, far] * expert_bytes / bytes_per_us[far] for far in (False, True)))
        out.migration_us = max(fetching) / passes
        results.append(out)
    return results
