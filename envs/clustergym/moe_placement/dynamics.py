"""What happens to ONE environment: plain functions over arrays, compiled for CPU and CUDA alike.

A ``Sim`` holds a batch of independent simulations ``b``, each of one MoE layer under one placement, seen by W windows of
T tokens. Everything in it is a count of whole things (tokens, copies, pairs, received experts); only :func:`layer_time`
and :func:`migration_time` turn counts into µs. Counts change one expert at a time: :func:`retarget` visits just the
tokens that use the expert, so that an operation costs what it touches.

Names: E experts, G GPUs on N nodes, S slots a GPU, K experts a token. ``net`` (G + 2,) holds each GPU's node, −1 for the pad
GPU G, and the GPUs that a node has: a table, because integer division would cost more than all the rest.
The launchers (:mod:`.launchers`) run these functions on all cores or on a CUDA grid. Under numba's CUDA simulator they stay
plain Python, because simulated device arrays cannot enter compiled code; there, and with NUMBA_DISABLE_JIT, a numpy integer
keeps its width, so ``int()`` stands where a shift or product needs more bits than the array has.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import config, njit, types


def _fingerprint() -> str:
    """Hash of all sources that hold compiled functions."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hashlib.sha256(b"".join(source for source in sources if b"\n@device\n" in source)).hexdigest()


_FINGERPRINT = _fingerprint()


def device(function: Any) -> Any:
    """Compile a function of one environment. Called from a CUDA kernel, it becomes a device function."""
    if config.ENABLE_CUDASIM or config.DISABLE_JIT:
        return function
    # No reference counts: nothing is allocated here, and counting would cost more than the work.
    compiled = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function)
    # numba asks only whether a function's own file is newer than its cache, but what it calls is compiled into it.
    compiled._cache._cache_file._source_stamp = _FINGERPRINT
    template = compiled.get_call_template

    def without_literals(args: Any, kws: Any) -> Any:
        """Keep numba from compiling a function anew for each constant that it is called with."""
        return template([types.unliteral(a) for a in args], {k: types.unliteral(a) for k, a in kws.items()})

    compiled.get_call_template = without_literals
    return compiled


# Order of specs.cost_vector.
COST_DISPATCH_US, COST_DISPATCH_INTRA_US, COST_DISPATCH_INTER_US = 0, 1, 2
COST_COMBINE_US, COST_COMBINE_INTRA_US, COST_COMBINE_INTER_US = 3, 4, 5
COST_KERNEL_US, COST_EXPERT_US, COST_PAIR_US = 6, 7, 8
COST_RECEIVE_INTRA_US, COST_RECEIVE_INTER_US = 9, 10
N_COSTS = 11

# How tokens travel.
MODE_DEDUP, MODE_PER_EXPERT, MODE_STAY = 0, 1, 2

# What an action came to.
OP_NOTHING, OP_ILLEGAL, OP_PLACE, OP_SWAP, OP_ADD, OP_DELETE = 0, 1, 2, 3, 4, 5

_MASK31 = 0x7FFFFFFF
# GPUs, and the pad GPU beside them, that fit into the bits of one integer.
WIDEST = 61

# An index that cannot be negative: numba then leaves out the check for one, which halves the time of the hot loops.
u = np.uint64


class Sim(NamedTuple):
    """Counts of B simulations. Leading axes: simulation ``b``, then window ``w`` where the array depends on traffic."""

    tok: np.ndarray
    """(B, W, T) int32: rows of the trace that make up the window"""
    src: np.ndarray
    """(B, W, T) uint8: GPU that holds the token before this layer (its home, or where it stayed)"""
    loc: np.ndarray
    """(B, W, T) uint8: GPU that holds the token after this layer"""
    off: np.ndarray
    """(B, W, E + 1) int32: ``lst[off[e] : off[e + 1]]`` are the uses of expert e"""
    lst: np.ndarray
    """(B, W, T·K) int32: token << 8 | position of the expert in it"""
    dst: np.ndarray
    """(B, W, T, K) uint8: GPU that runs each expert of the token, G for a pad"""
    vis: np.ndarray
    """(B, W, G, G) int32: tokens held by the row's GPU that visit the column's (token-expert pairs in MODE_PER_EXPERT)"""
    nvis: np.ndarray
    """(B, W, G, N) int32: tokens held by the row's GPU that visit the column's node"""
    bvis: np.ndarray
    """(B, W, G, G) int32: as ``vis`` for the way back, in MODE_STAY; elsewhere the way back mirrors the way out"""
    bnvis: np.ndarray
    """(B, W, G, N) int32"""
    tot: np.ndarray
    """(B, 4, G) int32 scratch: copies that each GPU sends and gets, inside its node and between nodes"""
    pairs: np.ndarray
    """(B, W, E, G) int32: tokens of the expert that run on the GPU"""
    slots: np.ndarray
    """(B, G, S) int16: expert in each slot, −1 empty"""
    rep: np.ndarray
    """(B, E, G) int16: GPUs that hold each expert, ascending"""
    nrep: np.ndarray
    """(B, E) int16"""
    pick: np.ndarray
    """(B, G, E) int32: a token on GPU g chooses among ``n = pick >> 16`` replicas of e from ``rep[e, pick & 0xFFFF]`` on"""
    old: np.ndarray
    """(B, E, G) int8: 1 where the expert lay when the window began"""
    mig: np.ndarray
    """(B, G, 2) int32: experts that the GPU must receive from its node and from other nodes"""


@device
def hash31(x):
    """A fixed mixing of 31-bit integers, without overflow in int64."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & _MASK31
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & _MASK31
    return x ^ (x >> 16)


@device
def write_picks(sim, b, e, net):
    """Derive ``pick`` of an expert from its replicas: the one on the token's GPU, else those on its node, else all.

    Replicas on one node are neighbours in the ascending list.
    """
    n_gpus, n = sim.slots.shape[1], int(sim.nrep[b, e])
    pick, rep = sim.pick[b], sim.rep[b, e]
    for g in range(n_gpus):
        pick[g, e] = n << 16
    first = 0
    for i in range(n):
        node = net[rep[i]]
        if net[rep[first]] != node:
            first = i
        for g in range(node * net[n_gpus + 1], (node + 1) * net[n_gpus + 1]):
            pick[g, e] = first | (i - first + 1) << 16
    for i in range(n):
        pick[rep[i], e] = i | 1 << 16


@device
def choose(rep, pick, token_hash):
    """GPU that runs an expert for a token, ties settled by the token's hash."""
    return rep[u((pick & 0xFFFF) + (token_hash * int(pick >> 16) >> 31))]


@device
def visit(dst, t, origin, sign, vis, nvis, net):
    """Add (sign 1) or take away (−1) all that token ``t`` visits, seen from ``origin``."""
    n_gpus = vis.shape[0]
    for k in range(dst.shape[1]):
        gpu = dst[t, k]
        if gpu == n_gpus:
            continue
        new_gpu, new_node = True, True
        for j in range(k):
            new_gpu = new_gpu and dst[t, j] != gpu
            new_node = new_node and net[dst[t, j]] != net[gpu]
        if new_gpu:
            vis[origin, gpu] += sign
        if new_node:
            nvis[origin, net[gpu]] += sign


@device
def stays_on(dst, t, source, n_gpus):
    """GPU that holds the token after the layer in MODE_STAY: its first expert's; one that uses no expert does not move."""
    for k in range(dst.shape[1]):
        if dst[t, k] != n_gpus:
            return dst[t, k]
    return source


@device
def write_replicas(sim, b, net):
    """Derive ``rep``, ``nrep`` and ``pick`` from ``slots``."""
    n_gpus, n_slots = sim.slots.shape[1], sim.slots.shape[2]
    for e in range(sim.pairs.shape[2]):
        sim.nrep[b, e] = 0
    for g in range(n_gpus):
        for s in range(n_slots):
            e = sim.slots[b, g, s]
            if e >= 0:
                sim.rep[b, e, sim.nrep[b, e]] = g
                sim.nrep[b, e] += 1
    for e in range(sim.pairs.shape[2]):
        write_picks(sim, b, e, net)


@device
def begin_window(sim, b, net):
    """Take the placement in ``slots`` as the one that the window begins with: nothing has to be received."""
    write_replicas(sim, b, net)
    for e in range(sim.pairs.shape[2]):
        for g in range(sim.slots.shape[1]):
            sim.old[b, e, g] = 0
        for i in range(sim.nrep[b, e]):
            sim.old[b, e, sim.rep[b, e, i]] = 1
    for g in range(sim.slots.shape[1]):
        sim.mig[b, g, 0] = 0
        sim.mig[b, g, 1] = 0


@device
def take_slots(sim, b, slots, net):
    """Replace the whole placement within a window: what is new must be received."""
    for g in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            sim.slots[b, g, s] = slots[g, s]
    write_replicas(sim, b, net)
    for e in range(sim.pairs.shape[2]):
        count_received(sim, b, e, 1, net)


@device
def _clear(matrix):
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            matrix[i, j] = 0


@device
def _count_narrow(experts, tok, src, rep, pick, off, lst, dst, pairs, vis, nvis, net):
    """Send every token to its experts and count what it visits; the GPUs that it meets are bits of one integer.

    No branches on what a token visits: that cannot be predicted, and a wrong guess costs more than adding 0.
    """
    n_gpus, n_nodes, top_k = vis.shape[0], nvis.shape[1], experts.shape[1]
    per_node = int(net[n_gpus + 1])
    node_bits = (1 << per_node) - 1
    for t in range(tok.shape[0]):
        row, home = u(tok[t]), u(src[t])
        token_hash = hash31(int(tok[t]))
        met = 0
        for k in range(top_k):
            e = experts[row, k]
            if e < 0:
                dst[t, k] = n_gpus
                continue
            at = off[u(e)]
            off[u(e)] = at + 1
            lst[u(at)] = t << 8 | k
            gpu = int(choose(rep[u(e)], pick[home, u(e)], token_hash))
            dst[t, k] = gpu
            pairs[u(e), u(gpu)] += 1
            met |= 1 << gpu
        for g in range(n_gpus):
            vis[home, g] += met >> g & 1
        for n in range(n_nodes):
            nvis[home, n] += met & node_bits != 0
            met >>= per_node


@device
def _count_wide(experts, tok, src, rep, pick, off, lst, dst, pairs, vis, nvis, net, dedup):
    """As :func:`_count_narrow` for any number of GPUs, and without deduplication."""
    n_gpus, top_k = vis.shape[0], experts.shape[1]
    for t in range(tok.shape[0]):
        row, home = u(tok[t]), u(src[t])
        token_hash = hash31(int(tok[t]))
        for k in range(top_k):
            e = experts[row, k]
            if e < 0:
                dst[t, k] = n_gpus
                continue
            at = off[u(e)]
            off[u(e)] = at + 1
            lst[u(at)] = t << 8 | k
            gpu = int(choose(rep[u(e)], pick[home, u(e)], token_hash))
            new_gpu, new_node = True, True
            if dedup:
                for j in range(k):
                    new_gpu &= dst[t, j] != gpu
                    new_node &= net[u(dst[t, j])] != net[u(gpu)]
            dst[t, k] = gpu
            pairs[u(e), u(gpu)] += 1
            vis[home, u(gpu)] += new_gpu
            nvis[home, u(net[u(gpu)])] += new_node


@device
def count_window(sim, b, w, trace, layer, net, mode):
    """Count window ``w`` from scratch for the layer under the current replicas; ``tok`` and ``src`` must be set.

    ``trace`` is (L, rows, K): the walk reads one layer at a time.
    """
    n_tokens, top_k, n_gpus, n_experts = sim.dst.shape[2], sim.dst.shape[3], sim.vis.shape[2], sim.pairs.shape[2]
    experts = trace[layer]
    tok, src, loc, off, lst, dst = (
        sim.tok[b, w],
        sim.src[b, w],
        sim.loc[b, w],
        sim.off[b, w],
        sim.lst[b, w],
        sim.dst[b, w],
    )
    vis, nvis, pairs, rep, pick = sim.vis[b, w], sim.nvis[b, w], sim.pairs[b, w], sim.rep[b], sim.pick[b]
    for e in range(n_experts + 1):
        off[e] = 0
    _clear(pairs)
    _clear(vis)
    _clear(nvis)
    for t in range(n_tokens):
        row = u(tok[t])
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                off[u(e + 1)] += 1
    for e in range(n_experts):
        off[e + 1] += off[e]
    if mode == MODE_PER_EXPERT or n_gpus > WIDEST:
        dedup = mode != MODE_PER_EXPERT
        _count_wide(experts, tok, src, rep, pick, off, lst, dst, pairs, vis, nvis, net, dedup)
    else:
        _count_narrow(experts, tok, src, rep, pick, off, lst, dst, pairs, vis, nvis, net)
    for e in range(n_experts, 0, -1):
        off[e] = off[e - 1]
    off[0] = 0
    if mode == MODE_STAY:
        _clear(sim.bvis[b, w])
        _clear(sim.bnvis[b, w])
        for t in range(n_tokens):
            loc[t] = stays_on(dst, t, src[t], n_gpus)
            visit(dst, t, loc[t], 1, sim.bvis[b, w], sim.bnvis[b, w], net)


@device
def retarget(sim, b, w, e, net, mode):
    """Bring window ``w`` up to date after the replicas of ``e`` changed: visits just the tokens that use ``e``."""
    top_k, n_gpus = sim.dst.shape[3], sim.vis.shape[2]
    tok, src, loc, lst, dst = sim.tok[b, w], sim.src[b, w], sim.loc[b, w], sim.lst[b, w], sim.dst[b, w]
    vis, nvis, pairs, rep, pick = sim.vis[b, w], sim.nvis[b, w], sim.pairs[b, w], sim.rep[b, e], sim.pick[b]
    per_node = int(net[n_gpus + 1])
    node_bits = (1 << per_node) - 1
    for i in range(sim.off[b, w, e], sim.off[b, w, e + 1]):
        use = u(lst[u(i)])
        t, k = use >> u(8), use & u(255)
        home = u(src[t])
        left, right = int(dst[t, k]), int(choose(rep, pick[home, u(e)], hash31(int(tok[t]))))
        if left == right:
            continue
        if mode == MODE_STAY:
            visit(dst, t, loc[t], -1, sim.bvis[b, w], sim.bnvis[b, w], net)
        pairs[u(e), u(left)] -= 1
        pairs[u(e), u(right)] += 1
        node_left, node_right = int(net[u(left)]), int(net[u(right)])
        only_left, only_right, alone_left, alone_right = True, True, True, True
        if mode == MODE_PER_EXPERT:
            pass
        elif n_gpus <= WIDEST:
            met = 0
            for j in range(top_k):
                met |= int(u(j) != k) << int(dst[t, u(j)])
            only_left, only_right = met >> left & 1 == 0, met >> right & 1 == 0
            alone_left = met >> node_left * per_node & node_bits == 0
            alone_right = met >> node_right * per_node & node_bits == 0
        else:
            for j in range(top_k):
                gpu = n_gpus if u(j) == k else int(dst[t, u(j)])
                node = net[u(gpu)]
                only_left &= gpu != left
                only_right &= gpu != right
                alone_left &= node != node_left
                alone_right &= node != node_right
        vis[home, u(left)] -= only_left
        vis[home, u(right)] += only_right
        nvis[home, u(node_left)] -= alone_left
        nvis[home, u(node_right)] += alone_right
        dst[t, k] = right
        if mode == MODE_STAY:
            loc[t] = stays_on(dst, t, src[t], n_gpus)
            visit(dst, t, loc[t], 1, sim.bvis[b, w], sim.bnvis[b, w], net)


@device
def count_received(sim, b, e, sign, net):
    """Add or take away what the current replicas of ``e`` make GPUs receive, compared with the window's beginning."""
    for i in range(sim.nrep[b, e]):
        g = sim.rep[b, e, i]
        if sim.old[b, e, g] == 0:
            near = 1
            for h in range(sim.slots.shape[1]):
                if net[h] == net[g] and sim.old[b, e, h] == 1:
                    near = 0
            sim.mig[b, g, near] += sign


@device
def holds(sim, b, e, g):
    for i in range(sim.nrep[b, e]):
        if sim.rep[b, e, i] == g:
            return True
    return False


@device
def free_slot(sim, b, g):
    """Index of an empty slot on the GPU, −1 where it is full."""
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, g, s] < 0:
            return s
    return -1


@device
def insert(sim, b, e, g):
    """Put ``e`` on GPU ``g``, which has an empty slot and does not hold it."""
    sim.slots[b, g, free_slot(sim, b, g)] = e
    i = sim.nrep[b, e]
    while i > 0 and sim.rep[b, e, i - 1] > g:
        sim.rep[b, e, i] = sim.rep[b, e, i - 1]
        i -= 1
    sim.rep[b, e, i] = g
    sim.nrep[b, e] += 1


@device
def remove(sim, b, e, g):
    """Take ``e`` off GPU ``g``, which holds it."""
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, g, s] == e:
            sim.slots[b, g, s] = -1
    found = 0
    for i in range(sim.nrep[b, e]):
        sim.rep[b, e, i - found] = sim.rep[b, e, i]
        if sim.rep[b, e, i] == g:
            found = 1
    sim.nrep[b, e] -= 1


@device
def change(sim, b, e, e_from, e_to, v, v_from, v_to, net, mode, n_windows):
    """Move a replica of ``e`` and, where v ≥ 0, one of ``v``; a GPU of −1 means nowhere (a new or a dropped replica).

    Its own inverse with from and to exchanged. Windows 0 … n_windows−1 are brought up to date.
    """
    count_received(sim, b, e, -1, net)
    if e_from >= 0:
        remove(sim, b, e, e_from)
    if v >= 0:
        count_received(sim, b, v, -1, net)
        if v_from >= 0:
            remove(sim, b, v, v_from)
        if v_to >= 0:
            insert(sim, b, v, v_to)
        write_picks(sim, b, v, net)
        count_received(sim, b, v, 1, net)
    if e_to >= 0:
        insert(sim, b, e, e_to)
    write_picks(sim, b, e, net)
    count_received(sim, b, e, 1, net)
    for w in range(n_windows):
        retarget(sim, b, w, e, net, mode)
        if v >= 0:
            retarget(sim, b, w, v, net, mode)


@device
def gpu_pairs(sim, b, w, g):
    """Token-expert pairs that the GPU computes."""
    total = 0
    for s in range(sim.slots.shape[2]):
        e = sim.slots[b, g, s]
        if e >= 0:
            total += sim.pairs[b, w, e, g]
    return total


@device
def _accumulate(total, value, doublings):
    """Running max (doublings < 0) or sum of 2^doublings-th powers."""
    if doublings < 0:
        return max(total, value)
    for _ in range(doublings):
        value = value * value
    return total + value


@device
def _root(total, doublings):
    for _ in range(doublings):
        total = math.sqrt(total)
    return total


@device
def count_copies(sim, b, vis, nvis, net, mode):
    """Write to ``tot`` the copies that each GPU sends near, gets near, sends far and gets far.

    A copy crosses once to each other node, to the GPU of the same rank there, which forwards it to its neighbours.
    """
    n_gpus = vis.shape[0]
    per_node, tot = net[n_gpus + 1], sim.tot[b]
    for i in range(4):
        for g in range(n_gpus):
            tot[i, g] = 0
    for home in range(n_gpus):
        here = net[home]
        if mode == MODE_PER_EXPERT:
            for g in range(n_gpus):
                if g != home:
                    far = 0 if net[g] == here else 2
                    tot[far, home] += vis[home, g]
                    tot[far + 1, g] += vis[home, g]
            continue
        g = 0
        for node in range(nvis.shape[1]):
            relay = home + (node - here) * per_node
            for _ in range(per_node):
                count = vis[home, u(g)] * (g != relay)
                tot[0, u(relay)] += count
                tot[1, u(g)] += count
                g += 1
            count = nvis[home, node] * (node != here)
            tot[2, home] += count
            tot[3, u(relay)] += count


@device
def comm_time(sim, b, vis, nvis, intra_us, inter_us, net, mode, doublings):
    """µs that the busiest GPU needs to send or receive its copies: inside the node, plus between nodes."""
    count_copies(sim, b, vis, nvis, net, mode)
    tot = sim.tot[b]
    intra, inter = 0.0, 0.0
    for g in range(tot.shape[1]):
        intra = _accumulate(_accumulate(intra, tot[0, g] * intra_us, doublings), tot[1, g] * intra_us, doublings)
        inter = _accumulate(_accumulate(inter, tot[2, g] * inter_us, doublings), tot[3, g] * inter_us, doublings)
    return _root(intra, doublings) + _root(inter, doublings)


@device
def link_copies(sim, b, w, net, mode, links):
    """Write to ``links`` (G, G) the copies dispatched from row to column."""
    vis, nvis = sim.vis[b, w], sim.nvis[b, w]
    n_gpus = vis.shape[0]
    for g in range(n_gpus):
        for h in range(n_gpus):
            links[g, h] = 0
    for home in range(n_gpus):
        for g in range(n_gpus):
            sender = home if mode == MODE_PER_EXPERT else home + (net[g] - net[home]) * net[n_gpus + 1]
            if g != sender:
                links[sender, g] += vis[home, g]
        if mode != MODE_PER_EXPERT:
            for node in range(nvis.shape[1]):
                if node != net[home]:
                    links[home, home + (node - net[home]) * net[n_gpus + 1]] += nvis[home, node]


@device
def compute_time(sim, b, w, cost, doublings, scale):
    """µs of the slowest GPU's expert kernel."""
    longest = 0.0
    for g in range(sim.slots.shape[1]):
        pairs, active = 0, 0
        for s in range(sim.slots.shape[2]):
            e = sim.slots[b, g, s]
            if e >= 0 and sim.pairs[b, w, e, g] > 0:
                pairs += sim.pairs[b, w, e, g]
                active += 1
        longest = _accumulate(longest, cost[COST_EXPERT_US] * active + cost[COST_PAIR_US] * pairs * scale, doublings)
    return cost[COST_KERNEL_US] + _root(longest, doublings)


@device
def layer_time(sim, b, w, cost, net, mode, doublings, scale):
    """Dispatch + compute + combine of window ``w``, µs.

    ``doublings`` = −1 is the true time, set by the busiest GPU; d ≥ 0 replaces that max by the smooth 2^d-norm over GPUs,
    which planners like. ``scale`` weighs each token (1/n when the window is n windows joined).
    """
    time = cost[COST_DISPATCH_US] + cost[COST_COMBINE_US] + compute_time(sim, b, w, cost, doublings, scale)
    intra_us, inter_us = cost[COST_DISPATCH_INTRA_US] * scale, cost[COST_DISPATCH_INTER_US] * scale
    if mode == MODE_STAY:
        time += comm_time(sim, b, sim.vis[b, w], sim.nvis[b, w], intra_us, inter_us, net, mode, doublings)
        intra_us, inter_us = cost[COST_COMBINE_INTRA_US] * scale, cost[COST_COMBINE_INTER_US] * scale
        return time + comm_time(sim, b, sim.bvis[b, w], sim.bnvis[b, w], intra_us, inter_us, net, mode, doublings)
    # What is combined is what was dispatched, the other way round: one count serves both.
    intra_us += cost[COST_COMBINE_INTRA_US] * scale
    inter_us += cost[COST_COMBINE_INTER_US] * scale
    return time + comm_time(sim, b, sim.vis[b, w], sim.nvis[b, w], intra_us, inter_us, net, mode, doublings)


@device
def layer_times(sim, b, w, cost, net, mode):
    """True (dispatch, compute, combine, migration) µs of window ``w``, for reports."""
    near, far = cost[COST_DISPATCH_INTRA_US], cost[COST_DISPATCH_INTER_US]
    dispatch = comm_time(sim, b, sim.vis[b, w], sim.nvis[b, w], near, far, net, mode, -1)
    near, far = cost[COST_COMBINE_INTRA_US], cost[COST_COMBINE_INTER_US]
    if mode == MODE_STAY:
        combine = comm_time(sim, b, sim.bvis[b, w], sim.bnvis[b, w], near, far, net, mode, -1)
    else:
        combine = comm_time(sim, b, sim.vis[b, w], sim.nvis[b, w], near, far, net, mode, -1)
    compute = compute_time(sim, b, w, cost, -1, 1.0)
    migration = migration_time(sim, b, cost)
    return cost[COST_DISPATCH_US] + dispatch, compute, cost[COST_COMBINE_US] + combine, migration


@device
def migration_time(sim, b, cost):
    """µs a pass until the GPU that receives most experts has them, spread over the window's passes."""
    longest = 0.0
    for g in range(sim.slots.shape[1]):
        time = sim.mig[b, g, 0] * cost[COST_RECEIVE_INTRA_US] + sim.mig[b, g, 1] * cost[COST_RECEIVE_INTER_US]
        longest = max(longest, time)
    return longest


@device
def source_of(sim, b, e):
    """The replica of ``e`` that a move takes: the one on the GPU with most pairs in window 0."""
    best, most = sim.rep[b, e, 0], -1
    if sim.nrep[b, e] == 1:
        return best
    for i in range(sim.nrep[b, e]):
        pairs = gpu_pairs(sim, b, 0, sim.rep[b, e, i])
        if pairs > most:
            best, most = sim.rep[b, e, i], pairs
    return best


@device
def victim_on(sim, b, g, e, source):
    """The replica on GPU ``g`` with fewest tokens that may go to ``source`` in exchange for ``e``; −1 where none may.

    Ties go to the lower id, never to the slot order, which carries no meaning.
    """
    best, least = -1, 0
    for s in range(sim.slots.shape[2]):
        v = sim.slots[b, g, s]
        if v >= 0 and v != e and not holds(sim, b, v, source):
            pairs = sim.pairs[b, 0, v, g]
            if best < 0 or pairs < least or (pairs == least and v < best):
                best, least = v, pairs
    return best


@device
def resolve(sim, b, e, node):
    """What the action (expert ``e``, node ``node`` of 3·G) means here: (kind, from GPU, to GPU, victim)."""
    n_gpus = sim.slots.shape[1]
    if e < 0 or e >= sim.pairs.shape[2] or node < 0 or node >= 3 * n_gpus:
        return OP_ILLEGAL, -1, -1, -1
    g = node % n_gpus
    if node < n_gpus:
        if holds(sim, b, e, g):
            return OP_NOTHING, -1, -1, -1
        source = source_of(sim, b, e)
        if free_slot(sim, b, g) >= 0:
            return OP_PLACE, source, g, -1
        victim = victim_on(sim, b, g, e, source)
        if victim < 0:
            return OP_ILLEGAL, -1, -1, -1
        return OP_SWAP, source, g, victim
    if node < 2 * n_gpus:
        if holds(sim, b, e, g) or free_slot(sim, b, g) < 0:
            return OP_ILLEGAL, -1, -1, -1
        return OP_ADD, -1, g, -1
    if sim.nrep[b, e] < 2 or not holds(sim, b, e, g):
        return OP_ILLEGAL, -1, -1, -1
    return OP_DELETE, g, -1, -1


@device
def look_ahead(sim, b, e, cost, net, mode, doublings, result):
    """Write what each of the 3·G operations on ``e`` would take off the time of window 0 (µs, migration included).

    Operations that are illegal or do nothing give 0. Counts are restored exactly.
    """
    before = layer_time(sim, b, 0, cost, net, mode, doublings, 1.0) + migration_time(sim, b, cost)
    for node in range(3 * sim.slots.shape[1]):
        kind, source, target, victim = resolve(sim, b, e, node)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            result[node] = 0.0
            continue
        change(sim, b, e, source, target, victim, target, source, net, mode, 1)
        after = layer_time(sim, b, 0, cost, net, mode, doublings, 1.0) + migration_time(sim, b, cost)
        change(sim, b, e, target, source, victim, source, target, net, mode, 1)
        result[node] = before - after


@device
def static_slots(slots, n_experts):
    """Experts in order over the slots, starting again at 0 when all are placed: what engines do before they have loads."""
    n_slots = slots.shape[1]
    for g in range(slots.shape[0]):
        for s in range(n_slots):
            slots[g, s] = (g * n_slots + s) % n_experts
