"""What a change of the placement would cost, without counting it into the state.

Most steps of a search are refused. A trial reads the counts of :class:`SimulationState`, adds the differences in
scratch, and leaves the state as it was, which is several times cheaper than a change and its undoing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clustergym.common.compiling import device, index, inlined
from clustergym.moe_placement.kernels.cost import migration_time, with_migration
from clustergym.moe_placement.kernels.replicas import count_received, write_choices
from clustergym.moe_placement.kernels.state import (
    PIECE_RANK,
    PIECE_WORD,
    RECEIVED_INTER,
    RECEIVED_INTRA,
    SENT_INTER,
    SENT_INTRA,
    SimulationState,
    Topology,
)
from clustergym.moe_placement.kernels.token_sets import add_all, clear, popcount
from clustergym.moe_placement.profiles import ALLGATHER, DEDUP, PER_EXPERT, RANK_MOD, RANK_NEAREST

NOW, THEN = range(2)


class Scratch(NamedTuple):
    """Tables of the observed passes that no placement changes, and scratch, for B layers."""

    uses: np.ndarray
    """(B, W, E, words) uint64: tokens that use each expert; of size 1 unless transport is ``dedup``"""
    rank_uses: np.ndarray
    """(B, W, E, G) int32: how many of them each rank has"""
    visitors: np.ndarray
    """(B, G, words) uint64: tokens that would visit the GPU"""
    near: np.ndarray
    """(B, words) uint64: tokens that would visit the node"""
    served_by: np.ndarray
    """(B, 2 experts, 2, G) int32: GPU that serves the tokens of each rank, now and then"""
    touched: np.ndarray
    """(B, G) int8"""
    copies: np.ndarray
    """(B, 4, G) int32: copies that each GPU would send and receive"""
    kernel_us: np.ndarray
    """(B, G) float64"""
    powers: np.ndarray
    """(B, 2 · G) float64"""


def allocate(sim: SimulationState, topology: Topology) -> Scratch:
    """Tables to be filled by :func:`prepare`."""
    layers, passes = sim.rows.shape[:2]
    n_gpus, n_experts, words = sim.slots.shape[1], sim.replicas.shape[1], sim.visitors.shape[3]
    whole = topology.transport == DEDUP
    return Scratch(
        uses=np.zeros((layers, passes, n_experts, words) if whole else (layers, 1, 1, 1), np.uint64),
        rank_uses=np.zeros((layers, passes, n_experts, n_gpus), np.int32),
        visitors=np.zeros((layers, n_gpus, words) if whole else (layers, 1, 1), np.uint64),
        near=np.zeros((layers, words), np.uint64),
        served_by=np.zeros((layers, 2, 2, n_gpus), np.int32),
        touched=np.zeros((layers, n_gpus), np.int8),
        copies=np.zeros((layers, 4, n_gpus), np.int32),
        kernel_us=np.zeros((layers, n_gpus)),
        powers=np.zeros((layers, 2 * n_gpus)),
    )


@device
def prepare(first, last, scratch, sim, experts, topology):
    """Fill the tables for ``experts`` (L, rows, K)."""
    for b in range(first, last):
        for w in range(sim.rows.shape[1]):
            for home in range(sim.slots.shape[1]):
                for t in range(sim.rank_start[b, w, home], sim.rank_start[b, w, home + 1]):
                    row = sim.rows[b, w, t]
                    for k in range(experts.shape[2]):
                        e = experts[b, row, k]
                        if e >= 0:
                            scratch.rank_uses[b, w, e, home] += 1
                            if topology.transport == DEDUP:
                                scratch.uses[b, w, e, t >> 6] |= index(1) << index(t & 63)


@device
def can_try(sim, b, e, e_from, e_to, v, v_from, v_to, topology):
    """Whether one GPU serves all tokens of a rank that use an expert, before and after the change."""
    if topology.dispatch == RANK_NEAREST or topology.dispatch == RANK_MOD:
        return True
    if sim.n_replicas[b, e] > 1 or (e_from < 0 and e_to >= 0):
        return False
    return v < 0 or (sim.n_replicas[b, v] == 1 and (v_from >= 0 or v_to < 0))


@inlined
def _write_served_by(sim, scratch, b, which, when, e):
    """Which GPU serves each rank's tokens of ``e``; its GPUs are touched."""
    served_by = scratch.served_by[b, which, when]
    for home in range(sim.slots.shape[1]):
        served_by[home] = sim.replicas[b, e, sim.replica_choice[b, e, home] & 0xFFFF]
    for i in range(sim.n_replicas[b, e]):
        scratch.touched[b, sim.replicas[b, e, i]] = 1


@inlined
def _move(sim, b, e, source, target):
    """Change the list of replicas of ``e``; a GPU of −1 means none."""
    replicas, n = sim.replicas[b, e], int(sim.n_replicas[b, e])
    if source >= 0:
        i = 0
        while replicas[i] != source:
            i += 1
        n -= 1
        while i < n:
            replicas[i] = replicas[i + 1]
            i += 1
    if target >= 0:
        i = n
        while i > 0 and replicas[i - 1] > target:
            replicas[i] = replicas[i - 1]
            i -= 1
        replicas[i] = target
        n += 1
    sim.n_replicas[b, e] = n


@inlined
def _place(sim, b, e, e_from, e_to, v, v_from, v_to, topology):
    """Change replicas, choices and what is received, but not the slots."""
    count_received(sim, b, e, -1, topology)
    _move(sim, b, e, e_from, e_to)
    write_choices(sim, b, e, topology)
    count_received(sim, b, e, 1, topology)
    if v >= 0:
        count_received(sim, b, v, -1, topology)
        _move(sim, b, v, v_from, v_to)
        write_choices(sim, b, v, topology)
        count_received(sim, b, v, 1, topology)


@inlined
def _kernel_time(sim, scratch, b, w, g, e, v, topology, costs, visits):
    """µs of the GPU's kernel without its start, as :func:`gpu_kernel_time`, after the change."""
    active, blocks, pairs, size = 0, 0, 0, costs.block_tokens
    for s in range(sim.slots.shape[2]):
        x = sim.slots[b, g, s]
        if x >= 0 and x != e and x != v:
            here = int(sim.slot_pairs[b, w, g, s])
            active += here > 0
            blocks += (here + size - 1) // size
            pairs += here
    for which in range(2 if v >= 0 else 1):
        here, x = 0, v if which else e
        for home in range(sim.slots.shape[1]):
            if scratch.served_by[b, which, THEN, home] == g:
                here += scratch.rank_uses[b, w, x, home]
        active += here > 0
        blocks += (here + size - 1) // size
        pairs += here
    tokens = visits
    if topology.transport == ALLGATHER:
        tokens = sim.rows.shape[2]
    elif topology.transport == PER_EXPERT:
        tokens = pairs
    return costs.token_us * tokens + costs.expert_us * active + costs.block_us * blocks + costs.pair_us * pairs


@inlined
def _add_uses(sim, scratch, b, w, which, x, g, near):
    """Add the tokens of ``x`` that ``g`` serves after the change."""
    served_by, uses = scratch.served_by[b, which, THEN], scratch.uses[b, w, x]
    if sim.n_replicas[b, x] == 1:
        if served_by[0] == g:
            add_all(near, uses)
        return
    at, mask = sim.piece_at[b, w], sim.piece_mask[b, w]
    for piece in range(sim.n_pieces[b, w]):
        if served_by[index(at[piece, PIECE_RANK])] == g:
            word = index(at[piece, PIECE_WORD])
            near[word] |= uses[word] & mask[piece]


@inlined
def _count_by_home(sim, b, w, tokens):
    """Write to ``by_home`` how many tokens of a set each rank has."""
    by_home, at, mask = sim.by_home[b], sim.piece_at[b, w], sim.piece_mask[b, w]
    for home in range(by_home.shape[0]):
        by_home[home] = 0
    for piece in range(sim.n_pieces[b, w]):
        held = popcount(tokens[index(at[piece, PIECE_WORD])] & mask[piece])
        by_home[index(at[piece, PIECE_RANK])] += np.int64(held)


@inlined
def _count_gpu(sim, scratch, b, w, g, e, v, topology):
    """With deduplication: who visits ``g`` after the change, and the copies inside its node. Returns the visits."""
    near, copies, total = scratch.visitors[b, g], scratch.copies[b], 0
    clear(near)
    for s in range(sim.slots.shape[2]):
        x = sim.slots[b, g, s]
        if x >= 0 and x != e and x != v:
            add_all(near, sim.slot_tokens[b, w, g, s])
    _add_uses(sim, scratch, b, w, 0, e, g, near)
    if v >= 0:
        _add_uses(sim, scratch, b, w, 1, v, g, near)
    per_node = topology.gpus_per_node
    first = g - g % per_node
    _count_by_home(sim, b, w, near)
    for home in range(sim.slots.shape[1]):
        visits = sim.by_home[b, home]
        total += visits
        relay = first + home % per_node
        if g != relay:
            difference = visits - sim.visits[b, w, home, g]
            copies[SENT_INTRA, relay] += difference
            copies[RECEIVED_INTRA, g] += difference
    return total


@inlined
def _count_nodes(sim, scratch, b, w, topology):
    """With deduplication: the copies between nodes after the change."""
    per_node, copies, near = topology.gpus_per_node, scratch.copies[b], scratch.near[b]
    for node in range(sim.node_visits.shape[3]):
        first, touched = node * per_node, False
        for g in range(first, first + per_node):
            touched = touched or scratch.touched[b, g] == 1
        if not touched:
            continue
        clear(near)
        for g in range(first, first + per_node):
            add_all(near, scratch.visitors[b, g] if scratch.touched[b, g] else sim.visitors[b, w, g])
        _count_by_home(sim, b, w, near)
        for home in range(sim.slots.shape[1]):
            if topology.node_of[home] != node:
                difference = sim.by_home[b, home] - sim.node_visits[b, w, home, node]
                copies[SENT_INTER, home] += difference
                copies[RECEIVED_INTER, first + home % per_node] += difference


@inlined
def _count_pairs(sim, scratch, b, w, which, x, topology):
    """With one copy per pair: the copies after the change of expert ``x``."""
    node_of, copies = topology.node_of, scratch.copies[b]
    for home in range(sim.slots.shape[1]):
        for when in range(2):
            g = scratch.served_by[b, which, when, home]
            if g != home:
                tokens = scratch.rank_uses[b, w, x, home] * (1 if when == THEN else -1)
                near = node_of[g] == node_of[home]
                copies[SENT_INTRA if near else SENT_INTER, home] += tokens
                copies[RECEIVED_INTRA if near else RECEIVED_INTER, g] += tokens


@inlined
def _norm(values, n, norm_log2):
    """The 2^norm_log2-norm of the first n values, or their maximum. The values are lost."""
    total = 0.0
    if norm_log2 < 0:
        for i in range(n):
            total = max(total, values[i])
        return total
    for _ in range(norm_log2):
        for i in range(n):
            values[i] *= values[i]
    for i in range(n):
        total += values[i]
    for _ in range(norm_log2):
        total = math.sqrt(total)
    return total


@inlined
def _copies_time(scratch, b, sent, received, copy_us, norm_log2):
    copies, powers, n_gpus = scratch.copies[b], scratch.powers[b], scratch.copies.shape[2]
    for g in range(n_gpus):
        powers[g] = copies[sent, g] * copy_us
        powers[n_gpus + g] = copies[received, g] * copy_us
    return _norm(powers, 2 * n_gpus, norm_log2)


@inlined
def _pass_time(sim, scratch, b, topology, costs, norm_log2):
    """As :func:`pass_time`, from the counts in the scratch."""
    n_gpus = sim.slots.shape[1]
    for g in range(n_gpus):
        scratch.powers[b, g] = scratch.kernel_us[b, g]
    compute = costs.kernel_us + _norm(scratch.powers[b], n_gpus, norm_log2)
    if norm_log2 < 0:
        compute = max(costs.kernel_floor_us, compute)
    time = costs.dispatch_us + costs.combine_us + compute
    if topology.transport != ALLGATHER:
        intra_us = costs.dispatch_intra_us + costs.combine_intra_us
        inter_us = costs.dispatch_inter_us + costs.combine_inter_us
        time += _copies_time(scratch, b, SENT_INTRA, RECEIVED_INTRA, intra_us, norm_log2)
        time += _copies_time(scratch, b, SENT_INTER, RECEIVED_INTER, inter_us, norm_log2)
    return time


@device
def try_change(sim, scratch, b, e, e_from, e_to, v, v_from, v_to, objective):
    """The objective after :func:`~clustergym.moe_placement.kernels.passes.change` with these arguments.

    :func:`can_try` must hold. The state is as before afterwards.
    """
    topology, costs, norm_log2 = objective.topology, objective.costs, objective.norm_log2
    n_gpus, n_passes, transport = sim.slots.shape[1], sim.rows.shape[1], topology.transport
    for g in range(n_gpus):
        scratch.touched[b, g] = 0
    _write_served_by(sim, scratch, b, 0, NOW, e)
    if v >= 0:
        _write_served_by(sim, scratch, b, 1, NOW, v)
    _place(sim, b, e, e_from, e_to, v, v_from, v_to, topology)
    _write_served_by(sim, scratch, b, 0, THEN, e)
    if v >= 0:
        _write_served_by(sim, scratch, b, 1, THEN, v)
    total = 0.0
    for w in range(n_passes):
        for i in range(4):
            for g in range(n_gpus):
                scratch.copies[b, i, g] = sim.copies[b, w, i, g]
        if transport == PER_EXPERT:
            _count_pairs(sim, scratch, b, w, 0, e, topology)
            if v >= 0:
                _count_pairs(sim, scratch, b, w, 1, v, topology)
        for g in range(n_gpus):
            if scratch.touched[b, g]:
                visits = _count_gpu(sim, scratch, b, w, g, e, v, topology) if transport == DEDUP else 0
                scratch.kernel_us[b, g] = _kernel_time(sim, scratch, b, w, g, e, v, topology, costs, visits)
            else:
                scratch.kernel_us[b, g] = sim.kernel_us[b, w, g]
        if transport == DEDUP:
            _count_nodes(sim, scratch, b, w, topology)
        total += _pass_time(sim, scratch, b, topology, costs, norm_log2)
    moved = objective.migration_weight * migration_time(sim, b, costs)
    _place(sim, b, e, e_to, e_from, v, v_to, v_from, topology)
    return with_migration(total / n_passes, moved, objective.before_us[b], costs)
