"""An estimate of the time of a layer that does not look at tokens, for simulated annealing (:mod:`.surrogate_steps`).

The estimate reads the load of each expert and how often two experts are used by the same token. A step costs a fraction
of a microsecond, whatever the number of tokens; an exact trial counts tokens and costs about ten. Ranks are balanced,
so all ranks send alike: a replica that serves a share of the ranks gets that share of its expert's tokens.

With deduplication a token is sent once to a GPU (and to a node) however many of its experts are there. For a set of
experts with ``uses`` uses in all, ``common`` of them (ordered pairs) by one token, the number of tokens is estimated as
``uses / (1 + a·x)``, x = common / uses: how many other experts of the set the token of a use has on average.

One placement may serve several phases with their own kernels and transports. The sums are the same for all of them, so
a phase more costs little.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.cost import with_migration
from clustergym.moe_placement.kernels.state import FROM_OTHER_NODE, FROM_OWN_NODE, Costs
from clustergym.moe_placement.profiles import ALLGATHER, DEDUP, LOCAL_HASH, RANK_MOD, RANK_NEAREST
from clustergym.planners.kernels.proposals import SAMPLE

# Shares of the ranks that a replica serves: all of them, those of its node without its own GPU, those of other nodes.
ALL, NEAR, FAR = range(3)
# Sums over the replicas on a GPU: uses; uses from its own node and from other nodes; active experts; common uses.
USES, USES_NEAR, USES_FAR, ACTIVE, COMMON = range(5)
N_GPU_SUMS = 5
# Sums over the replicas on a node: uses and common uses of tokens of other nodes. Then what follows from them and from
# the GPUs of the node: copies that enter it; uses by its own ranks; the longest time to receive experts. Then for each
# phase the 8th powers of the columns of Surrogate.times.
NODE_USES, NODE_COMMON, ENTER, LOCAL, RECEIVE, POWERS = range(6)
# Columns of Surrogate.times, for each phase: the kernel in µs, copies that the GPU receives from its own node and from
# other nodes.
KERNEL_US, COPIES_INTRA, COPIES_INTER = range(3)
N_TIMES = 3
# Columns of Surrogate.prices, one row for each phase: its weight, its transport, and its costs.
WEIGHT, TRANSPORT, FIXED_US, TOKEN_US, EXPERT_US, PAIR_US, INTRA_US, INTER_US = range(8)
# Columns of Surrogate.shape: the estimate of deduplication, then how steps are drawn.
VISIT_A, SPARE, TOGETHER, SAME_GPU, COPIES, TWO_NODES = range(6)
DEFAULT_SHAPE = (0.5, 0.3, 0.45, 0.5, 1.0, 0.0)
"""First: a of the formula above. Then the share of the steps that replace a spare replica, the share that move an
expert next to one that the same token uses, and how often of these to the same GPU instead of the same node. Last: the
fewest copies of an expert, and whether (1) they must be on two nodes."""


class Surrogate(NamedTuple):
    """The estimate of B layers, and scratch."""

    shape: np.ndarray
    """(6,) float64: see ``DEFAULT_SHAPE``"""
    prices: np.ndarray
    """(P, 8) float64: see ``WEIGHT``"""
    n_tokens: int
    sample: np.ndarray
    """(B, tokens, K) int16: experts of some tokens"""
    load: np.ndarray
    """(B, E) float64: tokens that use each expert"""
    deviation: np.ndarray
    """(B, E, topics) float64: how much the load of each expert varies with the share of each topic"""
    pairs: np.ndarray
    """(B, E, E) float32: tokens that use both experts; of size 1 unless the transport of a phase is ``dedup``"""
    beside: np.ndarray
    """(B, G, E) float32: sum of ``pairs`` over the replicas on a GPU, by their share"""
    around: np.ndarray
    """(B, N, E) float32: the same over the replicas on a node, by their share of tokens of other nodes"""
    slots: np.ndarray
    """(B, G, S) int16"""
    replicas: np.ndarray
    """(B, E, G) int16: GPUs that hold each expert, ascending"""
    n_replicas: np.ndarray
    """(B, E) int16"""
    shares: np.ndarray
    """(B, E, G, 3) float32: of each replica, see ``ALL``"""
    gpus: np.ndarray
    """(B, 2, G, 5) float64: see ``USES``; now and after the change that is tried"""
    deviations: np.ndarray
    """(B, 2, G, topics) float64: how much the uses of a GPU vary with it"""
    nodes: np.ndarray
    """(B, 2, N, 5 + 3 · P) float64: see ``NODE_USES``"""
    times: np.ndarray
    """(B, 2, G, 3 · P) float64: see ``KERNEL_US``"""
    held_before: np.ndarray
    """(B, E, G) int8"""
    received: np.ndarray
    """(B, 2, G, 2) int32: experts that the GPU must receive from its own node and from other nodes"""
    moved: np.ndarray
    """(B, 2 experts, G) int16: replicas after the change"""
    moved_shares: np.ndarray
    """(B, 2 experts, G, 3) float32"""
    touched: np.ndarray
    """(B, G) int8"""


NOW, THEN = range(2)


def prices_of(costs: Costs, transport: int, weight: float = 1.0) -> list[float]:
    """A row of ``Surrogate.prices``."""
    intra_us = costs.dispatch_intra_us + costs.combine_intra_us
    inter_us = costs.dispatch_inter_us + costs.combine_inter_us
    fixed_us = costs.dispatch_us + costs.combine_us + costs.kernel_us
    return [weight, transport, fixed_us, costs.token_us, costs.expert_us, costs.pair_us, intra_us, inter_us]


def allocate(
    shape: tuple[float, ...],
    prices: list[list[float]],
    n_tokens: int,
    top_k: int,
    n_experts: int,
    slots: np.ndarray,
    n_nodes: int,
    n_topics: int = 0,
) -> Surrogate:
    """Tables to be filled by :mod:`.counts` and :func:`take_placement`. The search changes ``slots`` in place."""
    layers, n_gpus = slots.shape[:2]
    dedup = any(row[TRANSPORT] == DEDUP for row in prices)
    return Surrogate(
        shape=np.array(shape),
        prices=np.array(prices, float),
        n_tokens=n_tokens,
        sample=np.zeros((layers, SAMPLE, top_k), np.int16),
        load=np.zeros((layers, n_experts)),
        deviation=np.zeros((layers, n_experts, n_topics)),
        pairs=np.zeros((layers, n_experts, n_experts) if dedup else (layers, 1, 1), np.float32),
        beside=np.zeros((layers, n_gpus, n_experts) if dedup else (layers, 1, 1), np.float32),
        around=np.zeros((layers, n_nodes, n_experts) if dedup else (layers, 1, 1), np.float32),
        slots=slots,
        replicas=np.zeros((layers, n_experts, n_gpus), np.int16),
        n_replicas=np.zeros((layers, n_experts), np.int16),
        shares=np.zeros((layers, n_experts, n_gpus, 3), np.float32),
        gpus=np.zeros((layers, 2, n_gpus, N_GPU_SUMS)),
        deviations=np.zeros((layers, 2, n_gpus, n_topics)),
        nodes=np.zeros((layers, 2, n_nodes, POWERS + N_TIMES * len(prices))),
        times=np.zeros((layers, 2, n_gpus, N_TIMES * len(prices))),
        held_before=np.zeros((layers, n_experts, n_gpus), np.int8),
        received=np.zeros((layers, 2, n_gpus, 2), np.int32),
        moved=np.zeros((layers, 2, n_gpus), np.int16),
        moved_shares=np.zeros((layers, 2, n_gpus, 3), np.float32),
        touched=np.zeros((layers, n_gpus), np.int8),
    )


# Which ranks a replica serves


@inlined
def write_shares(replicas, n, shares, topology, n_gpus):
    """Write the shares of the ranks that each of ``n`` replicas serves, as the dispatch rule deals them on average."""
    per_node, dispatch, one = topology.gpus_per_node, topology.dispatch, 1.0 / n_gpus
    far = (n_gpus - per_node) * one
    if n == 1 or not (dispatch == RANK_NEAREST or dispatch == RANK_MOD or dispatch == LOCAL_HASH):
        for i in range(n):
            shares[i, ALL] = 1.0 / n
            shares[i, NEAR] = (1.0 - one - far) / n
            shares[i, FAR] = far / n
        return
    if dispatch == RANK_MOD:
        for i in range(n):
            everyone, near, own = 0, 0, 0
            for rank in range(i, n_gpus, n):
                everyone += 1
                near += topology.node_of[rank] == topology.node_of[replicas[i]]
                own += rank == replicas[i]
            shares[i, ALL] = everyone * one
            shares[i, NEAR] = (near - own) * one
            shares[i, FAR] = (everyone - near) * one
        return
    one_node = topology.node_of[replicas[0]] == topology.node_of[replicas[n - 1]]
    if dispatch == RANK_NEAREST and topology.deals_one_node and one_node:
        for i in range(n):
            shares[i, NEAR] = (per_node - n) * one / n
            shares[i, FAR] = far / n
            shares[i, ALL] = one + shares[i, NEAR] + shares[i, FAR]
        return
    nodes, last = 0, -1
    for i in range(n):
        nodes += topology.node_of[replicas[i]] != last
        last = topology.node_of[replicas[i]]
    dealt = (1.0 - nodes * per_node * one) / n
    i = 0
    while i < n:
        end = i + 1
        while end < n and topology.node_of[replicas[end]] == topology.node_of[replicas[i]]:
            end += 1
        others = (per_node - (end - i)) * one
        for k in range(i, end):
            near = others / (end - i)
            if dispatch == RANK_NEAREST:
                near = others if k == i else 0.0
            shares[k, ALL] = one + near + dealt
            shares[k, NEAR] = near
            shares[k, FAR] = dealt
        i = end


# Sums


@inlined
def add(s, b, when, x, replicas, n, shares, sign, other, n_other, common, topology, n_gpus):
    """Add (sign 1) or remove (−1) the replicas of expert ``x``.

    ``beside`` and ``around`` are of the current placement. If ``other`` ≥ 0, that expert has been changed already: it
    has ``n_other`` replicas now, and ``common`` tokens use both.
    """
    per_node, dedup = topology.gpus_per_node, s.pairs.shape[1] > 1
    outside = n_gpus / max(1.0, float(n_gpus - per_node))
    load = s.load[b, x]
    for i in range(n):
        g = int(replicas[i])
        node, sums = topology.node_of[g], s.gpus[b, when, g]
        share = sign * shares[i, ALL]
        sums[USES] += share * load
        sums[USES_NEAR] += sign * shares[i, NEAR] * load
        sums[USES_FAR] += sign * shares[i, FAR] * load
        if load > 0.0:
            sums[ACTIVE] += sign
        for d in range(s.deviation.shape[2]):
            s.deviations[b, when, g, d] += share * s.deviation[b, x, d]
        s.touched[b, g] = 1
        if not dedup:
            continue
        beside, around = float(s.beside[b, g, x]), float(s.around[b, node, x])
        if other >= 0:
            for j in range(s.n_replicas[b, other]):
                h = s.replicas[b, other, j]
                if h == g:
                    beside -= s.shares[b, other, j, ALL] * common
                if topology.node_of[h] == node:
                    around -= s.shares[b, other, j, FAR] * outside * common
            for j in range(n_other):
                h = s.moved[b, 0, j]
                if h == g:
                    beside += s.moved_shares[b, 0, j, ALL] * common
                if topology.node_of[h] == node:
                    around += s.moved_shares[b, 0, j, FAR] * outside * common
        sums[COMMON] += 2.0 * share * beside
        abroad = sign * shares[i, FAR] * outside
        s.nodes[b, when, node, NODE_USES] += abroad * load
        s.nodes[b, when, node, NODE_COMMON] += 2.0 * abroad * around


@inlined
def add_tables(s, b, x, replicas, n, shares, sign, topology, n_gpus):
    """Add the replicas of ``x`` to ``beside`` and ``around``, or remove them."""
    outside = n_gpus / max(1.0, float(n_gpus - topology.gpus_per_node))
    pairs = s.pairs[b, x]
    for i in range(n):
        g = int(replicas[i])
        beside, around = s.beside[b, g], s.around[b, topology.node_of[g]]
        share, abroad = np.float32(sign * shares[i, ALL]), np.float32(sign * shares[i, FAR] * outside)
        for e in range(pairs.shape[0]):
            beside[e] += share * pairs[e]
            around[e] += abroad * pairs[e]


@inlined
def receive(s, b, when, x, replicas, n, sign, topology):
    """What the replicas of ``x`` make GPUs receive."""
    per_node = topology.gpus_per_node
    for i in range(n):
        g = int(replicas[i])
        if s.held_before[b, x, g] == 0:
            source, first = FROM_OTHER_NODE, topology.node_of[g] * per_node
            for h in range(first, first + per_node):
                if s.held_before[b, x, h] == 1:
                    source = FROM_OWN_NODE
            s.received[b, when, g, source] += sign


@inlined
def _visits(s, uses, common):
    """Tokens of a set of experts."""
    if uses <= 0.0:
        return 0.0
    return uses / (1.0 + s.shape[VISIT_A] * max(0.0, common / uses))


@inlined
def write_times(s, b, when, g, topology):
    """Kernel time and received copies of one GPU from its sums."""
    per_node, sums = topology.gpus_per_node, s.gpus[b, when, g]
    # The standard deviation of the uses, over mixtures of topics, is added to them.
    variance, more = 0.0, 1.0
    for d in range(s.deviation.shape[2]):
        variance += s.deviations[b, when, g, d] ** 2
    if variance > 0.0 and sums[USES] > 0.0:
        more = 1.0 + math.sqrt(variance) / sums[USES]
    for p in range(s.prices.shape[0]):
        prices, times, tokens = s.prices[p], s.times[b, when, g, p * N_TIMES :], sums[USES]
        if prices[TRANSPORT] == DEDUP:
            tokens = _visits(s, sums[USES], sums[COMMON])
            times[COPIES_INTRA] = tokens * (per_node - 1.0) / per_node
        elif prices[TRANSPORT] == ALLGATHER:
            tokens = float(s.n_tokens)
        else:
            times[COPIES_INTRA], times[COPIES_INTER] = sums[USES_NEAR], sums[USES_FAR]
        work = prices[TOKEN_US] * tokens + prices[PAIR_US] * sums[USES]
        if more > 1.0:
            work *= more
        times[KERNEL_US] = work + prices[EXPERT_US] * sums[ACTIVE]


@inlined
def _power8(x):
    x *= x
    x *= x
    return x * x


@inlined
def _root8(x):
    return math.sqrt(math.sqrt(math.sqrt(x)))


@inlined
def write_node(s, b, when, node, topology, costs):
    """What follows from the sums of a node and from its GPUs."""
    per_node, n_gpus = topology.gpus_per_node, s.slots.shape[1]
    received, gpus, sums = s.received[b, when], s.gpus[b, when], s.nodes[b, when, node]
    first, local, longest = node * per_node, 0.0, 0.0
    for g in range(first, first + per_node):
        local += (gpus[g, USES] - gpus[g, USES_FAR]) / per_node
        moved = received[g, FROM_OWN_NODE] * costs.receive_intra_us
        longest = max(longest, moved + received[g, FROM_OTHER_NODE] * costs.receive_inter_us)
    sums[LOCAL], sums[RECEIVE] = local, longest
    # A copy enters a node at the GPU of its rank's number, so all GPUs of a node receive alike.
    if s.pairs.shape[1] > 1:
        sums[ENTER] = _visits(s, sums[NODE_USES], sums[NODE_COMMON]) * (n_gpus - per_node) / (n_gpus * per_node)
    for p in range(s.prices.shape[0]):
        times, powers = s.times[b, when, :, p * N_TIMES :], sums[POWERS + p * N_TIMES :]
        kernel, intra, inter, near = 0.0, 0.0, 0.0, 0.0
        for g in range(first, first + per_node):
            kernel += _power8(times[g, KERNEL_US])
            near += times[g, COPIES_INTRA]
            inter += _power8(times[g, COPIES_INTER])
        for g in range(first, first + per_node):
            # What the other GPUs of the node receive inside it, all of its GPUs have sent alike.
            intra += _power8(times[g, COPIES_INTRA]) + _power8((near - times[g, COPIES_INTRA]) / max(1, per_node - 1))
        powers[KERNEL_US], powers[COPIES_INTRA], powers[COPIES_INTER] = kernel, intra, inter


@inlined
def estimate_times(s, b, when, total_uses, per_node):
    """(weighted time of a pass of each phase in the 8-norm, longest time to receive experts) from the nodes' sums."""
    n_gpus, n_nodes, nodes = s.slots.shape[1], s.nodes.shape[2], s.nodes[b, when]
    longest, entering, total = 0.0, 0.0, 0.0
    for node in range(n_nodes):
        entering += nodes[node, ENTER]
        longest = max(longest, nodes[node, RECEIVE])
    for p in range(s.prices.shape[0]):
        prices, first = s.prices[p], POWERS + p * N_TIMES
        kernel, intra, inter = 0.0, 0.0, 0.0
        for node in range(n_nodes):
            kernel += nodes[node, first + KERNEL_US]
            intra += nodes[node, first + COPIES_INTRA]
        time = prices[FIXED_US] + _root8(kernel)
        if prices[TRANSPORT] != ALLGATHER:
            for node in range(n_nodes):
                if prices[TRANSPORT] == DEDUP:
                    enter = nodes[node, ENTER]
                    inter += per_node * (_power8(enter) + _power8((entering - enter) / max(1, n_nodes - 1)))
                else:
                    sent = max(0.0, total_uses / n_gpus - nodes[node, LOCAL])
                    inter += nodes[node, first + COPIES_INTER] + per_node * _power8(sent)
            time += prices[INTRA_US] * _root8(intra)
            time += prices[INTER_US] * _root8(inter)
        total += prices[WEIGHT] * time
    return total, longest


@inlined
def estimate(s, b, when, objective, total_uses):
    """The objective in the 8-norm."""
    time, longest = estimate_times(s, b, when, total_uses, objective.topology.gpus_per_node)
    return with_migration(time, objective.migration_weight * longest, objective.before_us[b], objective.costs)


@inlined
def total_load(s, b):
    total = 0.0
    for e in range(s.load.shape[1]):
        total += s.load[b, e]
    return total


@inlined
def copy_slots(source, target):
    for g in range(source.shape[0]):
        for k in range(source.shape[1]):
            target[g, k] = source[g, k]


@device
def take_placements(first, last, s, placement, objective, result):
    """Begin with ``placement`` (L, G, S), and write its estimate to ``result`` (L,)."""
    topology, n_gpus, dedup = objective.topology, s.slots.shape[1], s.pairs.shape[1] > 1
    for b in range(first, last):
        copy_slots(placement[b], s.slots[b])
        s.n_replicas[b] = 0
        s.gpus[b, NOW] = 0.0
        s.deviations[b, NOW] = 0.0
        s.nodes[b, NOW] = 0.0
        s.received[b, NOW] = 0
        if dedup:
            s.beside[b] = np.float32(0.0)
            s.around[b] = np.float32(0.0)
        for g in range(n_gpus):
            for k in range(s.slots.shape[2]):
                e = s.slots[b, g, k]
                if e >= 0:
                    s.replicas[b, e, s.n_replicas[b, e]] = g
                    s.n_replicas[b, e] += 1
        for e in range(s.load.shape[1]):
            n = int(s.n_replicas[b, e])
            write_shares(s.replicas[b, e], n, s.shares[b, e], topology, n_gpus)
            # The tables have only the experts before it, so every pair is counted once.
            add(s, b, NOW, e, s.replicas[b, e], n, s.shares[b, e], 1.0, -1, 0, 0.0, topology, n_gpus)
            receive(s, b, NOW, e, s.replicas[b, e], n, 1, topology)
            if dedup:
                add_tables(s, b, e, s.replicas[b, e], n, s.shares[b, e], 1.0, topology, n_gpus)
        for g in range(n_gpus):
            write_times(s, b, NOW, g, topology)
            s.touched[b, g] = 0
            copy_gpu(s, b, g, NOW, THEN)
        for node in range(s.nodes.shape[2]):
            write_node(s, b, NOW, node, topology, objective.costs)
            copy_node(s, b, node, NOW, THEN)
        result[b] = estimate(s, b, NOW, objective, total_load(s, b))


@inlined
def copy_gpu(s, b, g, source, target):
    for i in range(N_GPU_SUMS):
        s.gpus[b, target, g, i] = s.gpus[b, source, g, i]
    for i in range(s.deviation.shape[2]):
        s.deviations[b, target, g, i] = s.deviations[b, source, g, i]
    for i in range(s.times.shape[3]):
        s.times[b, target, g, i] = s.times[b, source, g, i]
    for i in range(2):
        s.received[b, target, g, i] = s.received[b, source, g, i]


@inlined
def copy_node(s, b, node, source, target):
    for i in range(s.nodes.shape[3]):
        s.nodes[b, target, node, i] = s.nodes[b, source, node, i]


@inlined
def is_touched(s, b, node, per_node):
    for g in range(node * per_node, (node + 1) * per_node):
        if s.touched[b, g]:
            return True
    return False
