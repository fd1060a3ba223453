"""What happens to ONE environment: plain functions over arrays, compiled for CPU and CUDA alike.

A ``Sim`` holds a batch of independent simulations ``b``, each of one MoE layer under one placement, seen by W windows of
T tokens. Everything in it is a count of whole things (tokens, copies, pairs, received experts); only :func:`layer_time`
and :func:`migration_time` turn counts into µs. Counts change one expert at a time: :func:`retarget` visits just the
tokens that use the expert, so that an operation costs what it touches. It finds them in an index: pieces of tokens that follow each
other, and for each piece the uses of each expert. Environments share the index of their trace (a window is a few ranges of
it, ``seg``); a window of any other rows brings its own, with :func:`list_uses`.

Names: E experts, G GPUs on N nodes, S slots a GPU, K experts a token. How many of a token's experts run on each GPU is packed
into the bits of a few integers (``met``), so that taking one expert away or adding it, and asking who else is on its GPU or node, is
a handful of instructions however large K is. ``net`` (4·G + 2,) says where: the node of each GPU, bits of a field, GPUs that a
node has, the word of each GPU, the shift of its field in the word, the bits of its node in the word (see :func:`.specs.network`). A
table, because integer division would cost more than all the rest.

Environments in MODE_DEDUP that share the index of their trace count by sets of tokens instead, 64 tokens an integer: which run
the expert of each slot (``run``), are held by each GPU or node, choose the upper of two replicas (``masks``). Whether a token
visits a GPU is then an OR over the GPU's slots, and an operation is a few dozen of those, whatever tokens it touches.
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
    """Hash of all sources that hold functions compiled with :func:`device`."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
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
# Longest piece: a token's place in it fits, beside one flag, into the 16 bits of an entry of ``lst``.
LONGEST_PIECE = 1 << 15
# Columns of Sim.seg.
SEG_PIECE, SEG_PLACE, SEG_TOKEN = 0, 1, 2

# An index that cannot be negative: numba then leaves out the check for one, which halves the time of the hot loops.
u = np.uint64
# Sets of 64 tokens.
ALL = u(0xFFFFFFFFFFFFFFFF)
_PAIRS, _FOURS = u(0x5555555555555555), u(0x3333333333333333)
_EIGHTS, _SUM = u(0x0F0F0F0F0F0F0F0F), u(0x0101010101010101)


class Sim(NamedTuple):
    """Counts of B simulations. Leading axes: simulation ``b``, then window ``w`` where the array depends on traffic."""

    tok: np.ndarray
    """(B, W, T) int32: rows of the trace that make up the window"""
    src: np.ndarray
    """(B, W, T) uint8: GPU that holds the token before this layer (its home, or where it stayed)"""
    loc: np.ndarray
    """(B, W, T) uint8: GPU that holds the token after this layer"""
    load: np.ndarray
    """(B, W, E) int32: tokens that use each expert"""
    seg: np.ndarray
    """(B, W, segments + 1, 3) int32: ranges of the index that make up the window: piece, first place in it, first token; one with
    token T ends them"""
    own: np.ndarray
    """(1,) int8: 1 where every window has an index of its own, 0 where all share the trace's"""
    plane: np.ndarray
    """(B, W) int32: plane of the index that holds the window's layer"""
    pieces: np.ndarray
    """(pieces + 1,) int32: rows at which the index's pieces begin"""
    off: np.ndarray
    """(planes, pieces, E + 1) int32: ``lst[off[e] : off[e + 1]]`` are the uses of expert e in the piece"""
    lst: np.ndarray
    """(planes, rows·K) uint16: place of the token in its piece << 1 | whether the expert is the token's first"""
    bits: np.ndarray
    """(planes, blocks, E + 1) uint64: tokens of 64 rows of the trace that use each expert; last those of the upper half (see
    :func:`half`). Row r is bit r % 64 of block r // 64 + 1."""
    run: np.ndarray
    """(B, W, G, S, sets) uint64: set of the window's tokens that run the expert of the slot there; what an empty one has is void"""
    masks: np.ndarray
    """(B, W, G + N + 1, sets) uint64: sets of the tokens held by each GPU, by each node, and of the upper half"""
    moved: np.ndarray
    """(B, W, 2, sets) uint64 scratch: tokens of two experts whose replicas change"""
    visitors: np.ndarray
    """(B, 2, sets) uint64 scratch: tokens that visit a GPU and a node"""
    columns: np.ndarray
    """(B, E + 1) uint64 scratch: ``bits`` of 64 tokens of a window"""
    touched: np.ndarray
    """(B, G) int8 scratch: 1 where what the GPU runs has changed"""
    met: np.ndarray
    """(B, W, T, words) int64: experts of the token that run on each GPU, a field of bits a GPU"""
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
    """(B, E, G) int32: a token on GPU g chooses among ``n = pick >> 16`` replicas of e from ``rep[e, pick & 0xFFFF]`` on"""
    was: np.ndarray
    """(B, 2, 3, G) int32 scratch: ``pick``, ``rep`` and ``nrep`` of two experts before their replicas changed"""
    uses: np.ndarray
    """(B, T + 1) int32 scratch: tokens of a window that use an expert"""
    solo: np.ndarray
    """(B, 1 + E) int64 scratch: 1 in the field of the expert's only GPU, 0 where it has replicas; first of all 0 for a pad"""
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
def half(token_hash):
    """Which of two replicas a token chooses, 0 or 1: see :func:`choose`."""
    return token_hash >> 30


if config.ENABLE_CUDASIM or config.DISABLE_JIT:

    def popcount(x):
        """Bits of a uint64 that are set."""
        return u(int(x).bit_count())

else:

    @device
    def popcount(x):
        """Bits of a uint64 that are set. The compiler knows this way to count them, and makes one instruction of it."""
        x = x - ((x >> u(1)) & _PAIRS)
        x = (x & _FOURS) + ((x >> u(2)) & _FOURS)
        x = (x + (x >> u(4))) & _EIGHTS
        return (x * _SUM) >> u(56)


@device
def write_picks(sim, b, e, net):
    """Derive ``pick`` of an expert from its replicas: the one on the token's GPU, else those on its node, else all.

    Replicas on one node are neighbours in the ascending list.
    """
    n_gpus, n = sim.slots.shape[1], int(sim.nrep[b, e])
    pick, rep = sim.pick[b, e], sim.rep[b, e]
    if n == 1:
        for g in range(n_gpus):
            pick[g] = 1 << 16
        return
    for g in range(n_gpus):
        pick[g] = n << 16
    first = 0
    for i in range(n):
        node = net[rep[i]]
        if net[rep[first]] != node:
            first = i
        for g in range(node * net[n_gpus + 1], (node + 1) * net[n_gpus + 1]):
            pick[g] = first | (i - first + 1) << 16
    for i in range(n):
        pick[rep[i]] = i | 1 << 16


@device
def choose(rep, pick, token_hash):
    """GPU that runs an expert for a token, ties settled by the token's hash."""
    return rep[u((pick & 0xFFFF) + (token_hash * int(pick >> 16) >> 31))]


@device
def visit(met, origin, sign, vis, nvis, net):
    """Add (sign 1) or take away (−1) all that a token visits, seen from ``origin``; ``met`` are the token's words."""
    n_gpus = vis.shape[0]
    field = (1 << int(net[n_gpus])) - 1
    last = -1
    for g in range(n_gpus):
        if met[net[n_gpus + 2 + g]] >> int(net[2 * n_gpus + 2 + g]) & field:
            vis[origin, g] += sign
            if net[g] != last:
                last = net[g]
                nvis[origin, last] += sign


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
def list_uses(experts, tok, off, lst, first, last):
    """Index the piece of tokens ``first`` … ``last``−1, which are rows ``tok`` of ``experts``."""
    n_experts, top_k = off.shape[0] - 1, experts.shape[1]
    for e in range(n_experts + 1):
        off[e] = 0
    for t in range(first, last):
        row = u(tok[t])
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                off[u(e + 1)] += 1
    off[0] = first * top_k
    for e in range(n_experts):
        off[e + 1] += off[e]
    for t in range(first, last):
        row = u(tok[t])
        entry = (t - first) << 1 | 1
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                at = off[u(e)]
                off[u(e)] = at + 1
                lst[u(at)] = entry
                entry &= -2
    for e in range(n_experts, 0, -1):
        off[e] = off[e - 1]
    off[0] = first * top_k


@device
def list_bits(experts, bits):
    """Write ``Sim.bits`` of one layer, ``experts`` (rows, K)."""
    for row in range(experts.shape[0]):
        one, block = u(1) << u(row & 63), u((row >> 6) + 1)
        for k in range(experts.shape[1]):
            e = int(experts[row, k])
            if e >= 0:
                bits[block, u(e)] |= one
        if half(hash31(row)):
            bits[block, u(bits.shape[1] - 1)] |= one


@device
def _own_index(sim, b, w, experts):
    """Index the rows of the window itself in the plane that it has for its own."""
    plane, n_pieces = sim.plane[b, w], sim.off.shape[1]
    for piece in range(n_pieces):
        first, last = sim.pieces[piece], sim.pieces[piece + 1]
        list_uses(experts, sim.tok[b, w], sim.off[plane, piece], sim.lst[plane], first, last)
        sim.seg[b, w, piece, SEG_PIECE] = piece
        sim.seg[b, w, piece, SEG_PLACE] = 0
        sim.seg[b, w, piece, SEG_TOKEN] = first
    sim.seg[b, w, n_pieces, SEG_TOKEN] = sim.tok.shape[2]


@device
def find_segments(tok, src, pieces, seg):
    """Write the ranges of the trace's index (see ``Sim.seg``) that the rows ``tok`` (T,) of a window are.

    Returns whether tokens of one range are held by several GPUs, ``src`` (T,).
    """
    n, t, n_tokens, mixed = 0, 0, tok.shape[0], 0
    while t < n_tokens:
        row = int(tok[u(t)])
        # Mostly nothing has changed since the layer before.
        piece = int(seg[n, SEG_PIECE])
        if row < pieces[piece] or row >= pieces[piece + 1]:
            piece, high = 0, pieces.shape[0] - 1
            while piece + 1 < high:
                middle = (piece + high) // 2
                if pieces[middle] <= row:
                    piece = middle
                else:
                    high = middle
        last = min(n_tokens, t + int(pieces[piece + 1]) - row)
        # Without a way out of the loop it takes many tokens at a time.
        broken, home = 0, int(src[u(t)])
        for i in range(t, last):
            broken |= int(tok[u(i)]) ^ (row - t + i)
            mixed |= int(src[u(i)]) ^ home
        if broken:
            # Tokens of other ranges were looked at too: count by token, which is always right.
            mixed, last = 1, t + 1
            while tok[u(last)] == row - t + last:
                last += 1
        seg[n, SEG_PIECE] = piece
        seg[n, SEG_PLACE] = row - pieces[piece]
        seg[n, SEG_TOKEN] = t
        n += 1
        t = last
    seg[n, SEG_TOKEN] = n_tokens
    return mixed != 0


@device
def _within(first, last, d):
    """Tokens ``first`` … ``last``−1 as a set, as far as they are among the 64 of word ``d``, and some are."""
    return (ALL << u(max(first - 64 * d, 0))) & (ALL >> u(64 - min(last - 64 * d, 64)))


@device
def _write_masks(sim, b, w, mixed, net):
    """Write the tokens that each GPU and node holds."""
    masks, src, seg = sim.masks[b, w], sim.src[b, w], sim.seg[b, w]
    n_gpus, n_tokens = sim.slots.shape[1], sim.tok.shape[2]
    for i in range(masks.shape[0] - 1):
        for d in range(masks.shape[1]):
            masks[u(i), u(d)] = u(0)
    if mixed:
        for t in range(n_tokens):
            home, one = u(src[u(t)]), u(1) << u(t & 63)
            masks[home, u(t >> 6)] |= one
            masks[u(n_gpus + int(net[home])), u(t >> 6)] |= one
        return
    s = 0
    while seg[s, SEG_TOKEN] < n_tokens:
        first, last = int(seg[s, SEG_TOKEN]), int(seg[s + 1, SEG_TOKEN])
        s += 1
        home = u(src[u(first)])
        node = u(n_gpus + int(net[home]))
        for d in range(first >> 6, (last + 63) >> 6):
            here = _within(first, last, d)
            masks[home, u(d)] |= here
            masks[node, u(d)] |= here


@device
def _write_runs(sim, b, w):
    """Write to ``run`` all tokens that use the slot's expert, however many replicas it has, and to ``masks`` the upper half.

    The trace's index has them by rows; a segment is moved to its place in the window, all experts at once.
    """
    seg, run, slots, columns = sim.seg[b, w], sim.run[b, w], sim.slots[b], sim.columns[b]
    bits, upper_half = sim.bits[sim.plane[b, w]], sim.masks[b, w, sim.masks.shape[2] - 1]
    s = 0
    for d in range(run.shape[2]):
        for e in range(columns.shape[0]):
            columns[u(e)] = u(0)
        last = 0
        while last < 64 * (d + 1) and last < sim.tok.shape[2]:
            first, last = int(seg[s, SEG_TOKEN]), int(seg[s + 1, SEG_TOKEN])
            row = int(sim.pieces[seg[s, SEG_PIECE]]) + int(seg[s, SEG_PLACE]) + 64 * d - first
            here, shift = _within(first, last, d), u(row & 63)
            back = u(63) - shift
            block = (row >> 6) + 1
            low, high = bits[u(block)], bits[u(block + 1)]
            for e in range(columns.shape[0]):
                columns[u(e)] |= ((low[u(e)] >> shift) | (high[u(e)] << back << u(1))) & here
            s += 1
        if last > 64 * (d + 1):
            s -= 1
        for g in range(slots.shape[0]):
            for i in range(slots.shape[1]):
                run[u(g), u(i), u(d)] = columns[u(max(slots[u(g), u(i)], 0))]
        upper_half[u(d)] = columns[u(columns.shape[0] - 1)]


@device
def _slot_of(sim, b, e, g):
    """Slot of GPU ``g`` that holds ``e``."""
    s = 0
    while sim.slots[b, g, s] != e:
        s += 1
    return s


@device
def _lift(sim, b, w, e, which):
    """Gather the tokens of ``e`` from its replicas into ``moved``."""
    tokens, pairs = sim.moved[b, w, which], sim.pairs[b, w, e]
    for i in range(sim.nrep[b, e]):
        g = sim.rep[b, e, i]
        pairs[g] = 0
        run = sim.run[b, w, g, _slot_of(sim, b, e, g)]
        for d in range(run.shape[0]):
            tokens[u(d)] = run[u(d)] if i == 0 else tokens[u(d)] | run[u(d)]


@device
def _deal(sim, b, w, e, which, net):
    """Give each replica of ``e`` its part of the tokens in ``moved``; writes ``run`` and ``pairs``."""
    tokens, masks, rep, pairs = sim.moved[b, w, which], sim.masks[b, w], sim.rep[b, e], sim.pairs[b, w, e]
    n, n_gpus, n_sets = int(sim.nrep[b, e]), sim.slots.shape[1], sim.run.shape[4]
    total, other_total = u(0), u(0)
    run = sim.run[b, w, rep[0], _slot_of(sim, b, e, rep[0])]
    if n == 1:
        for d in range(n_sets):
            run[u(d)] = tokens[u(d)]
            total += popcount(tokens[u(d)])
        pairs[rep[0]] = total
        return
    if n == 2:
        other = sim.run[b, w, rep[1], _slot_of(sim, b, e, rep[1])]
        one_node = net[rep[0]] == net[rep[1]]
        near = masks[rep[0] if one_node else n_gpus + net[rep[0]]]
        far = masks[rep[1] if one_node else n_gpus + net[rep[1]]]
        upper = masks[masks.shape[0] - 1]
        for d in range(n_sets):
            here = tokens[u(d)] & (near[u(d)] | ~(far[u(d)] | upper[u(d)]))
            there = tokens[u(d)] ^ here
            run[u(d)] = here
            other[u(d)] = there
            total += popcount(here)
            other_total += popcount(there)
        pairs[rep[0]] = total
        pairs[rep[1]] = other_total
        return
    for i in range(n):
        run = sim.run[b, w, rep[i], _slot_of(sim, b, e, rep[i])]
        for d in range(n_sets):
            run[u(d)] = u(0)
        pairs[rep[i]] = 0
    for d in range(n_sets):
        left = tokens[u(d)]
        while left != u(0):
            one = left & (~left + u(1))
            left ^= one
            t = u(64 * d) + popcount(one - u(1))
            g = choose(rep, int(sim.pick[b, e, sim.src[b, w, t]]), hash31(int(sim.tok[b, w, t])))
            sim.run[b, w, g, _slot_of(sim, b, e, g), d] |= one
            pairs[g] += 1


@device
def _carry(sim, b, w, e, g, which, away):
    """Take what the replica of ``e`` on ``g`` runs away from its slot into ``moved``, or put it into its slot from there.

    So windows that are not brought up to date are right again when the change is undone, though slots may be others then.
    """
    if g < 0:
        return
    run, tokens = sim.run[b, w, g, _slot_of(sim, b, e, g)], sim.moved[b, w, which]
    for d in range(run.shape[0]):
        if away:
            tokens[u(d)] = run[u(d)]
        else:
            run[u(d)] = tokens[u(d)]


@device
def _in_both(some, others):
    """How many tokens are in two sets."""
    total = u(0)
    for d in range(some.shape[0]):
        total += popcount(some[u(d)] & others[u(d)])
    return np.int64(total)


@device
def _count_touched(sim, b, w, net):
    """Count afresh who visits the GPUs that are marked in ``touched``, and their nodes."""
    n_gpus, n_sets, n_slots = sim.slots.shape[1], sim.run.shape[4], sim.slots.shape[2]
    slots, run, masks, touched = sim.slots[b], sim.run[b, w], sim.masks[b, w], sim.touched[b]
    here, near, per_node = sim.visitors[b, 0], sim.visitors[b, 1], int(net[n_gpus + 1])
    for node in range(sim.nvis.shape[3]):
        first, any_touched = node * per_node, 0
        for g in range(first, first + per_node):
            any_touched |= touched[u(g)]
        if not any_touched:
            continue
        for d in range(n_sets):
            near[u(d)] = u(0)
        for g in range(first, first + per_node):
            for d in range(n_sets):
                here[u(d)] = u(0)
            for s in range(n_slots):
                if slots[u(g), u(s)] >= 0:
                    tokens = run[u(g), u(s)]
                    for d in range(n_sets):
                        here[u(d)] |= tokens[u(d)]
            for d in range(n_sets):
                near[u(d)] |= here[u(d)]
            if touched[u(g)]:
                for home in range(n_gpus):
                    sim.vis[b, w, u(home), u(g)] = _in_both(masks[u(home)], here)
        for home in range(n_gpus):
            sim.nvis[b, w, u(home), u(node)] = _in_both(masks[u(home)], near)


@device
def _count_sets(sim, b, w, mixed, net):
    """Count window ``w`` from scratch by sets of tokens."""
    load, pairs, rep = sim.load[b, w], sim.pairs[b, w], sim.rep[b]
    _write_masks(sim, b, w, mixed, net)
    _write_runs(sim, b, w)
    _clear(pairs)
    for e in range(pairs.shape[0]):
        if sim.nrep[b, e] == 1:
            run = sim.run[b, w, rep[e, 0], _slot_of(sim, b, e, rep[e, 0])]
            load[e] = _in_both(run, run)
            pairs[e, rep[e, 0]] = load[e]
            continue
        # Each replica has all tokens so far.
        _lift(sim, b, w, e, 0)
        _deal(sim, b, w, e, 0, net)
        load[e] = 0
        for i in range(sim.nrep[b, e]):
            load[e] += pairs[e, rep[e, i]]
    for g in range(sim.slots.shape[1]):
        sim.touched[b, g] = 1
    _count_touched(sim, b, w, net)


@device
def _count_uses(sim, b, w, experts):
    """Write ``load``: from the index where a piece is whole, else token by token."""
    load, tok, seg, off = sim.load[b, w], sim.tok[b, w], sim.seg[b, w], sim.off[sim.plane[b, w]]
    n_tokens = sim.tok.shape[2]
    for e in range(load.shape[0]):
        load[e] = 0
    s = 0
    while seg[s, SEG_TOKEN] < n_tokens:
        piece, first, last = seg[s, SEG_PIECE], seg[s, SEG_TOKEN], seg[s + 1, SEG_TOKEN]
        s += 1
        if last - first == sim.pieces[piece + 1] - sim.pieces[piece]:
            uses = off[piece]
            for e in range(load.shape[0]):
                load[e] += uses[e + 1] - uses[e]
            continue
        for t in range(first, last):
            row = u(tok[t])
            for k in range(experts.shape[1]):
                e = experts[row, k]
                if e >= 0:
                    load[u(e)] += 1


@device
def _run_single(experts, tok, met, solo, rep, net):
    """Write ``met`` of the experts that lie on one GPU."""
    n_gpus = rep.shape[1]
    if met.shape[1] == 1:
        for t in range(met.shape[0]):
            row, total = u(tok[t]), 0
            for k in range(experts.shape[1]):
                total += solo[u(experts[row, k] + 1)]
            met[t, 0] = total
        return
    for t in range(met.shape[0]):
        row = u(tok[t])
        for m in range(met.shape[1]):
            met[t, m] = 0
        for k in range(experts.shape[1]):
            e = experts[row, k]
            if e >= 0:
                met[t, u(net[u(n_gpus + 2 + rep[u(e), 0])])] += solo[u(e + 1)]


@device
def _gather_uses(sim, b, w, e):
    """Write to ``uses`` the tokens of the window that use ``e``, << 1 | whether it is their first expert; returns how many."""
    uses, seg, n_tokens = sim.uses[b], sim.seg[b, w], sim.tok.shape[2]
    off, lst = sim.off[sim.plane[b, w]], sim.lst[sim.plane[b, w]]
    n, s = 0, 0
    while seg[s, SEG_TOKEN] < n_tokens:
        piece, first, last = seg[s, SEG_PIECE], int(seg[s, SEG_TOKEN]), int(seg[s + 1, SEG_TOKEN])
        start = (first - int(seg[s, SEG_PLACE])) << 1
        s += 1
        begin, end = off[piece, e], off[piece, e + 1]
        if last - first == sim.pieces[piece + 1] - sim.pieces[piece]:
            for i in range(begin, end):
                uses[u(n)] = start + int(lst[u(i)])
                n += 1
            continue
        for i in range(begin, end):
            use = start + int(lst[u(i)])
            uses[u(n)] = use
            n += int(use >> 1 >= first) & int(use >> 1 < last)
    return n


@device
def _run_replicas(sim, b, w, e, net):
    """Send the tokens that use ``e``, which has several replicas, to the one that each of them chooses."""
    n_gpus, uses = sim.slots.shape[1], sim.uses[b]
    tok, src, met = sim.tok[b, w], sim.src[b, w], sim.met[b, w]
    pairs, rep, pick = sim.pairs[b, w, e], sim.rep[b, e], sim.pick[b, e]
    for i in range(_gather_uses(sim, b, w, e)):
        t = u(int(uses[u(i)]) >> 1)
        choice = int(pick[u(src[t])])
        token_hash = hash31(int(tok[t])) if choice >> 16 > 1 else 0
        gpu = u(choose(rep, choice, token_hash))
        pairs[gpu] += 1
        met[t, u(net[u(n_gpus + 2) + gpu])] += 1 << int(net[u(2 * n_gpus + 2) + gpu])


@device
def _add_fields(total, shift, step, counts, first, last, field):
    """Add the fields of an integer to a row of counts."""
    for i in range(first, last):
        counts[i] += total >> shift & field
        shift += step


@device
def _count_visits(met, src, vis, nvis, net):
    """Count what the tokens visit, each GPU and node once.

    Neighbours are mostly on one GPU: their fields, each made 0 or 1, are summed up inside the word until one might overflow.
    No branches on what a token visits: that cannot be predicted, and a wrong guess costs more than adding 0.
    """
    n_gpus = vis.shape[0]
    width, per_node = int(net[n_gpus]), int(net[n_gpus + 1])
    field = (1 << width) - 1
    g_end, n_end = 0, 0
    for m in range(met.shape[1]):
        # GPUs and nodes of this word follow each other.
        g_start, n_start = g_end, n_end
        while g_end < n_gpus and net[n_gpus + 2 + g_end] == m:
            g_end += 1
        n_end = n_start + (g_end - g_start) // per_node
        # ``low`` are all bits of a field but the top one: adding it to them carries into the top bit unless they are 0.
        gpu_top, node_top = 0, 0
        for i in range(g_end - g_start):
            gpu_top |= 1 << i * width + width - 1
        for i in range(n_end - n_start):
            node_top |= 1 << (i + 1) * per_node * width - 1
        gpu_one, node_one = gpu_top >> width - 1, node_top >> per_node * width - 1
        gpu_low, node_low = gpu_top - gpu_one, node_top - node_one
        gpus, nodes, summed, home = 0, 0, 0, u(0)
        for t in range(met.shape[0]):
            if summed == field or u(src[t]) != home:
                _add_fields(gpus, 0, width, vis[home], g_start, g_end, field)
                _add_fields(nodes, 0, per_node * width, nvis[home], n_start, n_end, field)
                gpus, nodes, summed, home = 0, 0, 0, u(src[t])
            here = int(met[t, m])
            gpus += ((here & gpu_low) + gpu_low | here) >> width - 1 & gpu_one
            nodes += ((here & node_low) + node_low | here) >> per_node * width - 1 & node_one
            summed += 1
        _add_fields(gpus, 0, width, vis[home], g_start, g_end, field)
        _add_fields(nodes, 0, per_node * width, nvis[home], n_start, n_end, field)


@device
def _count_all_visits(met, src, vis, nvis, net, dedup):
    """As :func:`_count_visits` for nodes of several words, and without deduplication."""
    n_gpus, n_nodes = vis.shape[0], nvis.shape[1]
    field, per_node = (1 << int(net[n_gpus])) - 1, int(net[n_gpus + 1])
    for t in range(met.shape[0]):
        home, g = u(src[t]), 0
        for n in range(n_nodes):
            on_node = 0
            for _ in range(per_node):
                count = met[t, u(net[u(n_gpus + 2 + g)])] >> int(net[u(2 * n_gpus + 2 + g)]) & field
                vis[home, g] += min(count, 1) if dedup else count
                on_node += count
                g += 1
            nvis[home, n] += min(on_node, 1) if dedup else on_node


@device
def count_window(sim, b, w, trace, layer, net, mode):
    """Count window ``w`` from scratch for the layer under the current replicas; ``tok`` and ``src`` must be set.

    ``trace`` is (L, rows, K): the walk reads one layer at a time.
    """
    n_gpus, n_experts = sim.vis.shape[2], sim.pairs.shape[2]
    experts, solo, rep, nrep = trace[layer], sim.solo[b], sim.rep[b], sim.nrep[b]
    met, pairs, vis, nvis = sim.met[b, w], sim.pairs[b, w], sim.vis[b, w], sim.nvis[b, w]
    if sim.own[0]:
        _own_index(sim, b, w, experts)
    else:
        sim.plane[b, w] = layer
        mixed = find_segments(sim.tok[b, w], sim.src[b, w], sim.pieces, sim.seg[b, w])
        if mode == MODE_DEDUP:
            _count_sets(sim, b, w, mixed, net)
            return
    _count_uses(sim, b, w, experts)
    for e in range(n_experts):
        solo[e + 1] = 1 << int(net[2 * n_gpus + 2 + rep[e, 0]]) if nrep[e] == 1 else 0
    solo[0] = 0
    _run_single(experts, sim.tok[b, w], met, solo, rep, net)
    _clear(pairs)
    for e in range(n_experts):
        if nrep[e] == 1:
            pairs[e, rep[e, 0]] = sim.load[b, w, e]
        else:
            _run_replicas(sim, b, w, e, net)
    _clear(vis)
    _clear(nvis)
    if mode == MODE_PER_EXPERT or net[n_gpus + 1 + net[n_gpus + 1]] != 0:
        _count_all_visits(met, sim.src[b, w], vis, nvis, net, mode != MODE_PER_EXPERT)
    else:
        _count_visits(met, sim.src[b, w], vis, nvis, net)
    if mode == MODE_STAY:
        _stay(sim, b, w, experts, net)


@device
def _stay(sim, b, w, experts, net):
    """Where the tokens are after the layer in MODE_STAY: with their first expert; one that uses none does not move."""
    tok, src, loc, met = sim.tok[b, w], sim.src[b, w], sim.loc[b, w], sim.met[b, w]
    _clear(sim.bvis[b, w])
    _clear(sim.bnvis[b, w])
    for t in range(met.shape[0]):
        loc[t] = src[t]
        for k in range(experts.shape[1]):
            e = experts[tok[t], k]
            if e >= 0:
                loc[t] = choose(sim.rep[b, e], int(sim.pick[b, e, src[t]]), hash31(int(tok[t])))
                break
        visit(met[t], loc[t], 1, sim.bvis[b, w], sim.bnvis[b, w], net)


@device
def _on_node(met, word, span):
    """Other than 0 where the token (its words) uses the node that fills ``span`` words from ``word`` on."""
    found = met[word]
    for m in range(1, span):
        found |= met[word + u(m)]
    return found


@device
def retarget(sim, b, w, e, which, net, mode):
    """Bring window ``w`` up to date after the replicas of ``e`` changed: visits just the tokens that use ``e``.

    ``was[b, which]`` must hold what its picks and replicas were.
    """
    n_gpus, uses = sim.vis.shape[2], sim.uses[b]
    tok, src, loc, met = sim.tok[b, w], sim.src[b, w], sim.loc[b, w], sim.met[b, w]
    vis, nvis, pairs = sim.vis[b, w], sim.nvis[b, w], sim.pairs[b, w, e]
    rep, pick, old_pick, old_rep = sim.rep[b, e], sim.pick[b, e], sim.was[b, which, 0], sim.was[b, which, 1]
    width, per_node = int(net[n_gpus]), int(net[n_gpus + 1])
    word_of, shift_of, mask_of = u(n_gpus + 2), u(2 * n_gpus + 2), u(3 * n_gpus + 2)
    # A node's fields lie in one word, or fill words of their own.
    span = int(net[word_of + u(per_node - 1)] - net[word_of]) + 1
    counted_each = int(mode == MODE_PER_EXPERT)
    # Without replicas all tokens go from one GPU to another; with them it hangs on the token.
    alike = sim.was[b, which, 2, 0] == 1 and sim.nrep[b, e] == 1
    left, right = u(old_rep[0]), u(rep[0])
    if alike and left == right:
        return
    one_left, one_right = 1 << int(net[shift_of + left]), 1 << int(net[shift_of + right])
    field_left, field_right = (one_left << width) - one_left, (one_right << width) - one_right
    mask_left, mask_right = net[mask_of + left], net[mask_of + right]
    node_left, node_right = u(net[left]), u(net[right])
    word_left, word_right = u(net[word_of + left]), u(net[word_of + right])
    # Gathered first: the loop over them, which waits for memory, then runs on without surprises.
    for i in range(_gather_uses(sim, b, w, e)):
        use = int(uses[u(i)])
        t = u(use >> 1)
        home = u(src[t])
        if not alike:
            before, after = int(old_pick[home]), int(pick[home])
            token_hash = hash31(int(tok[t]))
            left, right = u(choose(old_rep, before, token_hash)), u(choose(rep, after, token_hash))
            if left == right:
                continue
            one_left, one_right = 1 << int(net[shift_of + left]), 1 << int(net[shift_of + right])
            field_left, field_right = (one_left << width) - one_left, (one_right << width) - one_right
            mask_left, mask_right = net[mask_of + left], net[mask_of + right]
            node_left, node_right = u(net[left]), u(net[right])
            word_left, word_right = u(net[word_of + left]), u(net[word_of + right])
        if mode == MODE_STAY:
            visit(met[t], loc[t], -1, sim.bvis[b, w], sim.bnvis[b, w], net)
        met_left = met[t, word_left] - one_left
        met[t, word_left] = met_left
        met_right = met[t, word_right]
        if span == 1:
            on_left, on_right = met_left & mask_left, met_right & mask_right
        else:
            on_left = _on_node(met[t], u(net[word_of + node_left * u(per_node)]), span)
            on_right = _on_node(met[t], u(net[word_of + node_right * u(per_node)]), span)
        met[t, word_right] = met_right + one_right
        pairs[left] -= 1
        pairs[right] += 1
        vis[home, left] -= counted_each | (met_left & field_left == 0)
        vis[home, right] += counted_each | (met_right & field_right == 0)
        nvis[home, node_left] -= counted_each | (on_left == 0)
        nvis[home, node_right] += counted_each | (on_right == 0)
        if mode == MODE_STAY:
            if use & 1:
                loc[t] = right
            visit(met[t], loc[t], 1, sim.bvis[b, w], sim.bnvis[b, w], net)


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
def _remember(sim, b, e, which):
    """Keep where the tokens of ``e`` go, for :func:`retarget`."""
    for g in range(sim.slots.shape[1]):
        sim.was[b, which, 0, g] = sim.pick[b, e, g]
    for i in range(sim.nrep[b, e]):
        sim.was[b, which, 1, i] = sim.rep[b, e, i]
    sim.was[b, which, 2, 0] = sim.nrep[b, e]


@device
def _touch(sim, b, e):
    """Mark the GPUs that hold ``e``."""
    for i in range(sim.nrep[b, e]):
        sim.touched[b, sim.rep[b, e, i]] = 1


@device
def change(sim, b, e, e_from, e_to, v, v_from, v_to, net, mode, n_windows):
    """Move a replica of ``e`` and, where v ≥ 0, one of ``v``; a GPU of −1 means nowhere (a new or a dropped replica).

    Its own inverse with from and to exchanged. Windows 0 … n_windows−1 are brought up to date; if there are others, the next change
    must be the inverse.
    """
    by_sets = sim.own[0] == 0 and mode == MODE_DEDUP
    if by_sets:
        for g in range(sim.slots.shape[1]):
            sim.touched[b, g] = 0
        _touch(sim, b, e)
        if v >= 0:
            _touch(sim, b, v)
        for w in range(sim.run.shape[1]):
            if w < n_windows:
                _lift(sim, b, w, e, 0)
                if v >= 0:
                    _lift(sim, b, w, v, 1)
            else:
                _carry(sim, b, w, e, e_from, 0, True)
                if v >= 0:
                    _carry(sim, b, w, v, v_from, 1, True)
    else:
        _remember(sim, b, e, 0)
        if v >= 0:
            _remember(sim, b, v, 1)
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
    if by_sets:
        _touch(sim, b, e)
        if v >= 0:
            _touch(sim, b, v)
        for w in range(sim.run.shape[1]):
            if w < n_windows:
                _deal(sim, b, w, e, 0, net)
                if v >= 0:
                    _deal(sim, b, w, v, 1, net)
                _count_touched(sim, b, w, net)
            else:
                _carry(sim, b, w, e, e_to, 0, False)
                if v >= 0:
                    _carry(sim, b, w, v, v_to, 1, False)
        return
    for w in range(n_windows):
        retarget(sim, b, w, e, 0, net, mode)
        if v >= 0:
            retarget(sim, b, w, v, 1, net, mode)


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
def copies_time(tot, intra_us, inter_us, doublings):
    """µs that the busiest GPU needs for the copies in ``tot``: inside the node, plus between nodes."""
    intra, inter = 0.0, 0.0
    for g in range(tot.shape[1]):
        intra = _accumulate(_accumulate(intra, tot[0, g] * intra_us, doublings), tot[1, g] * intra_us, doublings)
        inter = _accumulate(_accumulate(inter, tot[2, g] * inter_us, doublings), tot[3, g] * inter_us, doublings)
    return _root(intra, doublings) + _root(inter, doublings)


@device
def comm_time(sim, b, vis, nvis, intra_us, inter_us, net, mode, doublings):
    """µs that the busiest GPU needs to send or receive its copies."""
    count_copies(sim, b, vis, nvis, net, mode)
    return copies_time(sim.tot[b], intra_us, inter_us, doublings)


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
def smooth_and_true(sim, b, w, cost, net, mode, doublings):
    """:func:`layer_time` in the smooth norm and as it is, from one count of the copies."""
    if mode == MODE_STAY:
        smooth = layer_time(sim, b, w, cost, net, mode, doublings, 1.0)
        return smooth, layer_time(sim, b, w, cost, net, mode, -1, 1.0)
    fixed = cost[COST_DISPATCH_US] + cost[COST_COMBINE_US]
    intra_us = cost[COST_DISPATCH_INTRA_US] + cost[COST_COMBINE_INTRA_US]
    inter_us = cost[COST_DISPATCH_INTER_US] + cost[COST_COMBINE_INTER_US]
    count_copies(sim, b, sim.vis[b, w], sim.nvis[b, w], net, mode)
    smooth = (
        fixed + compute_time(sim, b, w, cost, doublings, 1.0) + copies_time(sim.tot[b], intra_us, inter_us, doublings)
    )
    return smooth, fixed + compute_time(sim, b, w, cost, -1, 1.0) + copies_time(sim.tot[b], intra_us, inter_us, -1)


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
