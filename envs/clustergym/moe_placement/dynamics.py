"""What happens to ONE environment: plain functions over arrays, compiled for CPU and CUDA alike.

A ``Sim`` holds a batch of independent simulations ``b``, each of one MoE layer under one placement, seen by W windows of
T tokens. Everything in it is a count of whole things (tokens, copies, pairs, received experts); only :func:`layer_time`
and :func:`migration_time` turn counts into µs. Counts change one expert at a time: :func:`retarget` visits just the
tokens that use the expert, so that an operation costs what it touches.

Names: E experts, G GPUs on N nodes, S slots a GPU, K experts a token. ``net`` (G + 1,) holds each GPU's node and, last,
the GPUs a node has: a table, because integer division would cost more than all the rest of :func:`shift`. ``int8`` counts suffice because a token has K < 128
experts. The launchers (:mod:`.launchers`) run these functions under ``prange`` or a CUDA grid. Under numba's CUDA
simulator they stay plain Python, because simulated device arrays cannot enter compiled code.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import config, njit

device: Any = (
    (lambda function: function)
    if config.ENABLE_CUDASIM
    else njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
)

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


class Sim(NamedTuple):
    """Counts of B simulations. Leading axes: simulation ``b``, then window ``w`` where the array depends on traffic."""

    tok: np.ndarray
    """(B, W, T) int32: rows of the trace that make up the window"""
    src: np.ndarray
    """(B, W, T) int16: GPU that holds the token before this layer (its home, or where it stayed)"""
    loc: np.ndarray
    """(B, W, T) int16: GPU that holds the token after this layer"""
    off: np.ndarray
    """(B, W, E + 1) int32: ``lst[off[e] : off[e + 1]]`` are the tokens that use expert e"""
    lst: np.ndarray
    """(B, W, T·K) int32"""
    cnt: np.ndarray
    """(B, W, T, G) int8: experts of the token that run on the GPU"""
    ncnt: np.ndarray
    """(B, W, T, N) int8: experts of the token that run on the node"""
    out: np.ndarray
    """(B, W, G, G) int32: copies dispatched from row to column"""
    back: np.ndarray
    """(B, W, G, G) int32: copies combined from column to row, in mode MODE_STAY; elsewhere combine mirrors dispatch"""
    pairs: np.ndarray
    """(B, W, E, G) int32: tokens of the expert that run on the GPU"""
    slots: np.ndarray
    """(B, G, S) int16: expert in each slot, −1 empty"""
    rep: np.ndarray
    """(B, E + 2, G) int16: GPUs that hold each expert, ascending; the last two rows are scratch"""
    nrep: np.ndarray
    """(B, E + 2) int16"""
    pick: np.ndarray
    """(B, E + 2, G, 2) int16: for a token on GPU g, the replicas it may use are ``rep[pick[g, 0] :]``, ``pick[g, 1]`` of them"""
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
def choose(rep, pick, home, token_hash):
    """GPU that runs an expert for a token: the replica on its GPU, else on its node, else any; ties by the token's hash."""
    return rep[pick[home, 0] + (token_hash * pick[home, 1] >> 31)]


@device
def write_picks(sim, b, e, net):
    """Derive ``pick`` of an expert from its replicas. Replicas on one node are neighbours in the ascending list."""
    n_gpus, n = sim.slots.shape[1], sim.nrep[b, e]
    pick, rep = sim.pick[b, e], sim.rep[b, e]
    for g in range(n_gpus):
        pick[g, 0] = 0
        pick[g, 1] = n
    for i in range(n):
        node = net[rep[i]]
        first = i
        while first > 0 and net[rep[first - 1]] == node:
            first -= 1
        for g in range(node * net[n_gpus], (node + 1) * net[n_gpus]):
            pick[g, 0] = first
            pick[g, 1] = i - first + 1
    for i in range(n):
        pick[rep[i], 0] = i
        pick[rep[i], 1] = 1


@device
def shift(cnt, ncnt, out, t, gpu, home, sign, net, mode):
    """Add (sign 1) or take away (−1) one expert of token ``t`` on ``gpu``, and the copies which that causes.

    Without branches: which copies arise cannot be predicted, and a wrong guess costs more than an addition of 0.
    """
    if mode == MODE_PER_EXPERT:
        out[home, gpu] += sign * (gpu != home)
        return
    there, here = net[gpu], net[home]
    last = (1 - sign) >> 1
    # One copy crosses to the GPU of the same rank on the other node, which forwards it to its neighbours.
    relay = home + (there - here) * net[cnt.shape[1]]
    count = cnt[t, gpu]
    cnt[t, gpu] = count + sign
    out[relay, gpu] += sign * ((count == last) & (gpu != relay))
    count = ncnt[t, there]
    ncnt[t, there] = count + sign
    out[home, relay] += sign * ((count == last) & (there != here))


@device
def flow(cnt, t, origin, sign, matrix, net):
    """Add or take away all copies between ``origin`` and the GPUs of token ``t``, deduplicated."""
    per_node = net[cnt.shape[1]]
    here = net[origin]
    for node in range(net[cnt.shape[1] - 1] + 1):
        relay = origin + (node - here) * per_node
        sender = origin if node == here else relay
        reached = False
        for gpu in range(node * per_node, (node + 1) * per_node):
            if cnt[t, gpu] > 0:
                reached = True
                if gpu != sender:
                    matrix[sender, gpu] += sign
        if reached and node != here:
            matrix[origin, relay] += sign


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
def count_window(sim, b, w, trace, layer, net, mode):
    """Count window ``w`` from scratch for the layer under the current replicas; ``tok`` and ``src`` must be set.

    ``trace`` is (L, rows, K): the walk reads one layer at a time.
    """
    n_tokens, n_gpus = sim.cnt.shape[2], sim.cnt.shape[3]
    n_experts, top_k = sim.pairs.shape[2], trace.shape[2]
    experts = trace[layer]
    tok, src, off, lst = sim.tok[b, w], sim.src[b, w], sim.off[b, w], sim.lst[b, w]
    cnt, ncnt, out, back, pairs = sim.cnt[b, w], sim.ncnt[b, w], sim.out[b, w], sim.back[b, w], sim.pairs[b, w]
    rep, pick, loc = sim.rep[b], sim.pick[b], sim.loc[b, w]
    for e in range(n_experts + 1):
        off[e] = 0
    for e in range(n_experts):
        for g in range(n_gpus):
            pairs[e, g] = 0
    for g in range(n_gpus):
        for h in range(n_gpus):
            out[g, h] = 0
    for t in range(n_tokens):
        row = tok[t]
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                off[e + 1] += 1
    for e in range(n_experts):
        off[e + 1] += off[e]
    for t in range(n_tokens):
        row, home = tok[t], src[t]
        token_hash = hash31(row)
        for g in range(n_gpus):
            cnt[t, g] = 0
        for n in range(ncnt.shape[1]):
            ncnt[t, n] = 0
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                lst[off[e]] = t
                off[e] += 1
                gpu = choose(rep[e], pick[e], home, token_hash)
                shift(cnt, ncnt, out, t, gpu, home, 1, net, mode)
                pairs[e, gpu] += 1
    for e in range(n_experts, 0, -1):
        off[e] = off[e - 1]
    off[0] = 0
    if mode == MODE_STAY:
        for g in range(n_gpus):
            for h in range(n_gpus):
                back[g, h] = 0
        for t in range(n_tokens):
            e = experts[tok[t], 0]
            loc[t] = src[t] if e < 0 else choose(rep[e], pick[e], src[t], hash31(tok[t]))
            flow(cnt, t, loc[t], 1, back, net)


@device
def retarget(sim, b, w, e, before, trace, layer, net, mode):
    """Bring window ``w`` up to date after the replicas of ``e`` changed from those in row ``before`` of ``rep``."""
    tok, src, loc, lst = sim.tok[b, w], sim.src[b, w], sim.loc[b, w], sim.lst[b, w]
    cnt, ncnt, out, back, pairs = sim.cnt[b, w], sim.ncnt[b, w], sim.out[b, w], sim.back[b, w], sim.pairs[b, w]
    old, new, old_pick, new_pick = sim.rep[b, before], sim.rep[b, e], sim.pick[b, before], sim.pick[b, e]
    for i in range(sim.off[b, w, e], sim.off[b, w, e + 1]):
        t = lst[i]
        home = src[t]
        row = tok[t]
        token_hash = hash31(row)
        left = choose(old, old_pick, home, token_hash)
        right = choose(new, new_pick, home, token_hash)
        if left == right:
            continue
        if mode == MODE_STAY:
            flow(cnt, t, loc[t], -1, back, net)
        shift(cnt, ncnt, out, t, left, home, -1, net, mode)
        shift(cnt, ncnt, out, t, right, home, 1, net, mode)
        pairs[e, left] -= 1
        pairs[e, right] += 1
        if mode == MODE_STAY:
            if trace[layer, row, 0] == e:
                loc[t] = right
            flow(cnt, t, loc[t], 1, back, net)


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
def _remember(sim, b, e, row):
    for i in range(sim.nrep[b, e]):
        sim.rep[b, row, i] = sim.rep[b, e, i]
    for g in range(sim.slots.shape[1]):
        sim.pick[b, row, g, 0] = sim.pick[b, e, g, 0]
        sim.pick[b, row, g, 1] = sim.pick[b, e, g, 1]
    sim.nrep[b, row] = sim.nrep[b, e]


@device
def change(sim, b, e, e_from, e_to, v, v_from, v_to, trace, layer, net, mode, n_windows):
    """Move a replica of ``e`` and, where v ≥ 0, one of ``v``; a GPU of −1 means nowhere (a new or a dropped replica).

    Its own inverse with from and to exchanged. Windows 0 … n_windows−1 are brought up to date.
    """
    n_experts = sim.pairs.shape[2]
    _remember(sim, b, e, n_experts)
    count_received(sim, b, e, -1, net)
    if e_from >= 0:
        remove(sim, b, e, e_from)
    if v >= 0:
        _remember(sim, b, v, n_experts + 1)
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
        retarget(sim, b, w, e, n_experts, trace, layer, net, mode)
        if v >= 0:
            retarget(sim, b, w, v, n_experts + 1, trace, layer, net, mode)


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
def comm_time(matrix, intra_us, inter_us, net, doublings):
    """µs that the busiest GPU needs to send or receive its copies: inside the node, plus between nodes."""
    n_gpus = matrix.shape[0]
    intra, inter = 0.0, 0.0
    for g in range(n_gpus):
        first = net[g] * net[n_gpus]
        sent_all, got_all, sent_near, got_near = 0, 0, 0, 0
        for h in range(n_gpus):
            sent_all += matrix[g, h]
            got_all += matrix[h, g]
        for h in range(first, first + net[n_gpus]):
            sent_near += matrix[g, h]
            got_near += matrix[h, g]
        if doublings < 0:
            intra = max(intra, max(sent_near, got_near) * intra_us)
            inter = max(inter, max(sent_all - sent_near, got_all - got_near) * inter_us)
        else:
            intra = _accumulate(intra, sent_near * intra_us, doublings)
            intra = _accumulate(intra, got_near * intra_us, doublings)
            inter = _accumulate(inter, (sent_all - sent_near) * inter_us, doublings)
            inter = _accumulate(inter, (got_all - got_near) * inter_us, doublings)
    return _root(intra, doublings) + _root(inter, doublings)


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
        time += comm_time(sim.out[b, w], intra_us, inter_us, net, doublings)
        intra_us, inter_us = cost[COST_COMBINE_INTRA_US] * scale, cost[COST_COMBINE_INTER_US] * scale
        return time + comm_time(sim.back[b, w], intra_us, inter_us, net, doublings)
    # What is combined is what was dispatched, the other way round: one pass over the matrix serves both.
    intra_us += cost[COST_COMBINE_INTRA_US] * scale
    inter_us += cost[COST_COMBINE_INTER_US] * scale
    return time + comm_time(sim.out[b, w], intra_us, inter_us, net, doublings)


@device
def layer_times(sim, b, w, cost, net, mode):
    """True (dispatch, compute, combine, migration) µs of window ``w``, for reports."""
    returned = sim.back[b, w] if mode == MODE_STAY else sim.out[b, w]
    dispatch = comm_time(sim.out[b, w], cost[COST_DISPATCH_INTRA_US], cost[COST_DISPATCH_INTER_US], net, -1)
    combine = comm_time(returned, cost[COST_COMBINE_INTRA_US], cost[COST_COMBINE_INTER_US], net, -1)
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
def has_victim(sim, b, g, e, source):
    """Whether :func:`victim_on` would find one."""
    for s in range(sim.slots.shape[2]):
        v = sim.slots[b, g, s]
        if v >= 0 and v != e and not holds(sim, b, v, source):
            return True
    return False


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
def look_ahead(sim, b, e, cost, trace, layer, net, mode, doublings, result):
    """Write what each of the 3·G operations on ``e`` would take off the time of window 0 (µs, migration included).

    Operations that are illegal or do nothing give 0. Counts are restored exactly.
    """
    before = layer_time(sim, b, 0, cost, net, mode, doublings, 1.0) + migration_time(sim, b, cost)
    for node in range(3 * sim.slots.shape[1]):
        kind, source, target, victim = resolve(sim, b, e, node)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            result[node] = 0.0
            continue
        change(sim, b, e, source, target, victim, target, source, trace, layer, net, mode, 1)
        after = layer_time(sim, b, 0, cost, net, mode, doublings, 1.0) + migration_time(sim, b, cost)
        change(sim, b, e, target, source, victim, source, target, trace, layer, net, mode, 1)
        result[node] = before - after


@device
def static_slots(slots, n_experts):
    """Experts in order over the slots, starting again at 0 when all are placed: what engines do before they have loads."""
    n_slots = slots.shape[1]
    for g in range(slots.shape[0]):
        for s in range(n_slots):
            slots[g, s] = (g * n_slots + s) % n_experts
