"""Counting by sets of tokens, 64 tokens per integer.

Environments in MODE_DEDUP that share the index of their trace count this way. Whether a token visits a GPU is an OR over
the GPU's slots, and an operation takes a few dozen such ORs for any number of tokens that it affects.
"""

from __future__ import annotations

import numpy as np

from clustergym.moe_placement.kernels.compile import PLAIN_PYTHON, device, index
from clustergym.moe_placement.kernels.replicas import choose, hash31, slot_of
from clustergym.moe_placement.kernels.state import SEGMENT_OFFSET, SEGMENT_PIECE, SEGMENT_TOKEN

uint64 = np.uint64
_ALL = uint64(0xFFFFFFFFFFFFFFFF)
_PAIRS, _FOURS = uint64(0x5555555555555555), uint64(0x3333333333333333)
_EIGHTS, _SUM = uint64(0x0F0F0F0F0F0F0F0F), uint64(0x0101010101010101)


if PLAIN_PYTHON:

    def popcount(x):
        """Number of bits that are set in a uint64."""
        return uint64(int(x).bit_count())

else:

    @device
    def popcount(x):
        """Number of bits that are set in a uint64. The compiler recognises this form and emits one instruction."""
        x = x - ((x >> uint64(1)) & _PAIRS)
        x = (x & _FOURS) + ((x >> uint64(2)) & _FOURS)
        x = (x + (x >> uint64(4))) & _EIGHTS
        return (x * _SUM) >> uint64(56)


@device
def _count_common(some, others):
    """Number of tokens that are in both sets."""
    total = uint64(0)
    for d in range(some.shape[0]):
        total += popcount(some[index(d)] & others[index(d)])
    return np.int64(total)


@device
def _range_set(first, last, d):
    """Those of the tokens ``first`` … ``last``−1 that are among the 64 of word ``d``; at least one must be."""
    return (_ALL << uint64(max(first - 64 * d, 0))) & (_ALL >> uint64(64 - min(last - 64 * d, 64)))


@device
def _write_token_masks(sim, b, w, mixed, network):
    """Write the sets of tokens that each GPU and node holds."""
    masks, origin, segments = sim.token_masks[b, w], sim.origin[b, w], sim.segments[b, w]
    n_gpus, n_tokens = sim.slots.shape[1], sim.rows.shape[2]
    for i in range(masks.shape[0] - 1):
        for d in range(masks.shape[1]):
            masks[index(i), index(d)] = uint64(0)
    if mixed:
        for t in range(n_tokens):
            home, one = index(origin[index(t)]), uint64(1) << uint64(t & 63)
            masks[home, index(t >> 6)] |= one
            masks[index(n_gpus + int(network.node_of[home])), index(t >> 6)] |= one
        return
    s = 0
    while segments[s, SEGMENT_TOKEN] < n_tokens:
        first, last = int(segments[s, SEGMENT_TOKEN]), int(segments[s + 1, SEGMENT_TOKEN])
        s += 1
        home = index(origin[index(first)])
        node = index(n_gpus + int(network.node_of[home]))
        for d in range(first >> 6, (last + 63) >> 6):
            here = _range_set(first, last, d)
            masks[home, index(d)] |= here
            masks[node, index(d)] |= here


@device
def _write_slot_tokens(sim, b, w):
    """Write to ``slot_tokens`` all tokens that use the slot's expert, for any number of replicas, and the upper-half mask.

    The trace's index holds them by row. Each segment is shifted to its place in the window, for all experts at once.
    """
    segments, slot_tokens, slots, users = sim.segments[b, w], sim.slot_tokens[b, w], sim.slots[b], sim.block_users[b]
    user_bits, upper = sim.user_bits[sim.index_plane[b, w]], sim.token_masks[b, w, sim.token_masks.shape[2] - 1]
    s = 0
    for d in range(slot_tokens.shape[2]):
        for e in range(users.shape[0]):
            users[index(e)] = uint64(0)
        last = 0
        while last < 64 * (d + 1) and last < sim.rows.shape[2]:
            first, last = int(segments[s, SEGMENT_TOKEN]), int(segments[s + 1, SEGMENT_TOKEN])
            row = int(sim.piece_starts[segments[s, SEGMENT_PIECE]]) + int(segments[s, SEGMENT_OFFSET]) + 64 * d - first
            here, shift = _range_set(first, last, d), uint64(row & 63)
            back = uint64(63) - shift
            block = (row >> 6) + 1
            low, high = user_bits[index(block)], user_bits[index(block + 1)]
            for e in range(users.shape[0]):
                users[index(e)] |= ((low[index(e)] >> shift) | (high[index(e)] << back << uint64(1))) & here
            s += 1
        if last > 64 * (d + 1):
            s -= 1
        for g in range(slots.shape[0]):
            for i in range(slots.shape[1]):
                slot_tokens[index(g), index(i), index(d)] = users[index(max(slots[index(g), index(i)], 0))]
        upper[index(d)] = users[index(users.shape[0] - 1)]


@device
def collect_tokens(sim, b, w, e, which):
    """Collect the tokens of ``e`` from its replicas into ``moved_tokens``."""
    tokens, pairs = sim.moved_tokens[b, w, which], sim.pairs[b, w, e]
    for i in range(sim.n_replicas[b, e]):
        g = sim.replicas[b, e, i]
        pairs[g] = 0
        here = sim.slot_tokens[b, w, g, slot_of(sim, b, e, g)]
        for d in range(here.shape[0]):
            tokens[index(d)] = here[index(d)] if i == 0 else tokens[index(d)] | here[index(d)]


@device
def assign_tokens(sim, b, w, e, which, network):
    """Give each replica of ``e`` its part of the tokens in ``moved_tokens``; writes ``slot_tokens`` and ``pairs``."""
    tokens, masks = sim.moved_tokens[b, w, which], sim.token_masks[b, w]
    replicas, pairs = sim.replicas[b, e], sim.pairs[b, w, e]
    n, n_gpus, n_sets = int(sim.n_replicas[b, e]), sim.slots.shape[1], sim.slot_tokens.shape[4]
    total, other_total = uint64(0), uint64(0)
    one_slot = sim.slot_tokens[b, w, replicas[0], slot_of(sim, b, e, replicas[0])]
    if n == 1:
        for d in range(n_sets):
            one_slot[index(d)] = tokens[index(d)]
            total += popcount(tokens[index(d)])
        pairs[replicas[0]] = total
        return
    if n == 2:
        other_slot = sim.slot_tokens[b, w, replicas[1], slot_of(sim, b, e, replicas[1])]
        one_node, other_node = network.node_of[replicas[0]], network.node_of[replicas[1]]
        same_node = one_node == other_node
        near_one = masks[replicas[0] if same_node else n_gpus + one_node]
        near_other = masks[replicas[1] if same_node else n_gpus + other_node]
        upper = masks[masks.shape[0] - 1]
        for d in range(n_sets):
            here = tokens[index(d)] & (near_one[index(d)] | ~(near_other[index(d)] | upper[index(d)]))
            there = tokens[index(d)] ^ here
            one_slot[index(d)] = here
            other_slot[index(d)] = there
            total += popcount(here)
            other_total += popcount(there)
        pairs[replicas[0]] = total
        pairs[replicas[1]] = other_total
        return
    for i in range(n):
        one_slot = sim.slot_tokens[b, w, replicas[i], slot_of(sim, b, e, replicas[i])]
        for d in range(n_sets):
            one_slot[index(d)] = uint64(0)
        pairs[replicas[i]] = 0
    for d in range(n_sets):
        left = tokens[index(d)]
        while left != uint64(0):
            one = left & (~left + uint64(1))
            left ^= one
            t = uint64(64 * d) + popcount(one - uint64(1))
            choice = int(sim.replica_choice[b, e, sim.origin[b, w, t]])
            g = choose(replicas, choice, hash31(int(sim.rows[b, w, t])))
            sim.slot_tokens[b, w, g, slot_of(sim, b, e, g), d] |= one
            pairs[g] += 1


@device
def save_tokens(sim, b, w, e, g, which):
    """Keep the tokens that run the replica of ``e`` on ``g`` in ``moved_tokens``, for :func:`restore_tokens`.

    A window that is not updated is then correct again after the change is undone, even if slots have changed order.
    """
    if g >= 0:
        here, tokens = sim.slot_tokens[b, w, g, slot_of(sim, b, e, g)], sim.moved_tokens[b, w, which]
        for d in range(here.shape[0]):
            tokens[index(d)] = here[index(d)]


@device
def restore_tokens(sim, b, w, e, g, which):
    """Put what :func:`save_tokens` kept into the slot that holds ``e`` on ``g`` now."""
    if g >= 0:
        here, tokens = sim.slot_tokens[b, w, g, slot_of(sim, b, e, g)], sim.moved_tokens[b, w, which]
        for d in range(here.shape[0]):
            here[index(d)] = tokens[index(d)]


@device
def count_touched(sim, b, w, network):
    """Count again which tokens visit the GPUs marked in ``touched``, and their nodes."""
    n_gpus, n_sets, n_slots = sim.slots.shape[1], sim.slot_tokens.shape[4], sim.slots.shape[2]
    slots, slot_tokens, masks, touched = sim.slots[b], sim.slot_tokens[b, w], sim.token_masks[b, w], sim.touched[b]
    on_gpu, on_node, per_node = sim.visitors[b, 0], sim.visitors[b, 1], network.gpus_per_node
    for node in range(sim.node_visits.shape[3]):
        first, any_touched = node * per_node, 0
        for g in range(first, first + per_node):
            any_touched |= touched[index(g)]
        if not any_touched:
            continue
        for d in range(n_sets):
            on_node[index(d)] = uint64(0)
        for g in range(first, first + per_node):
            for d in range(n_sets):
                on_gpu[index(d)] = uint64(0)
            for s in range(n_slots):
                if slots[index(g), index(s)] >= 0:
                    tokens = slot_tokens[index(g), index(s)]
                    for d in range(n_sets):
                        on_gpu[index(d)] |= tokens[index(d)]
            for d in range(n_sets):
                on_node[index(d)] |= on_gpu[index(d)]
            if touched[index(g)]:
                for home in range(n_gpus):
                    sim.visits[b, w, index(home), index(g)] = _count_common(masks[index(home)], on_gpu)
        for home in range(n_gpus):
            sim.node_visits[b, w, index(home), index(node)] = _count_common(masks[index(home)], on_node)


@device
def count_by_sets(sim, b, w, mixed, network):
    """Count window ``w`` from scratch by sets of tokens."""
    load, pairs, replicas = sim.load[b, w], sim.pairs[b, w], sim.replicas[b]
    _write_token_masks(sim, b, w, mixed, network)
    _write_slot_tokens(sim, b, w)
    for e in range(pairs.shape[0]):
        for g in range(pairs.shape[1]):
            pairs[e, g] = 0
        if sim.n_replicas[b, e] == 1:
            tokens = sim.slot_tokens[b, w, replicas[e, 0], slot_of(sim, b, e, replicas[e, 0])]
            load[e] = _count_common(tokens, tokens)
            pairs[e, replicas[e, 0]] = load[e]
            continue
        # Each replica has all tokens so far.
        collect_tokens(sim, b, w, e, 0)
        assign_tokens(sim, b, w, e, 0, network)
        load[e] = 0
        for i in range(sim.n_replicas[b, e]):
            load[e] += pairs[e, replicas[e, i]]
    for g in range(sim.slots.shape[1]):
        sim.touched[b, g] = 1
    count_touched(sim, b, w, network)
