"""Operations on a placement: what an action means, and exact incremental changes of the counts."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.counting import update_window
from clustergym.moe_placement.kernels.replicas import count_received, free_slot, holds, insert, remove, write_choices
from clustergym.moe_placement.kernels.state import (
    MODE_DEDUP,
    OP_ADD,
    OP_DELETE,
    OP_ILLEGAL,
    OP_NOTHING,
    OP_PLACE,
    OP_SWAP,
    PREVIOUS_CHOICE,
    PREVIOUS_COUNT,
    PREVIOUS_REPLICAS,
)
from clustergym.moe_placement.kernels.token_sets import (
    assign_tokens,
    collect_tokens,
    count_touched,
    restore_tokens,
    save_tokens,
)


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
def _source_of(sim, b, e):
    """The replica of ``e`` that moves: the one on the GPU with most pairs in window 0."""
    best, most = sim.replicas[b, e, 0], -1
    if sim.n_replicas[b, e] == 1:
        return best
    for i in range(sim.n_replicas[b, e]):
        pairs = gpu_pairs(sim, b, 0, sim.replicas[b, e, i])
        if pairs > most:
            best, most = sim.replicas[b, e, i], pairs
    return best


@device
def _victim_on(sim, b, g, e, source):
    """The replica on GPU ``g`` with fewest tokens that can go to ``source`` in exchange for ``e``; −1 if there is none.

    Ties go to the lower expert id, not to the slot order, which has no meaning.
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
    """What the action (expert ``e``, ``node`` of 3·G) means here: (kind, from GPU, to GPU, victim)."""
    n_gpus = sim.slots.shape[1]
    if e < 0 or e >= sim.pairs.shape[2] or node < 0 or node >= 3 * n_gpus:
        return OP_ILLEGAL, -1, -1, -1
    g = node % n_gpus
    if node < n_gpus:
        if holds(sim, b, e, g):
            return OP_NOTHING, -1, -1, -1
        source = _source_of(sim, b, e)
        if free_slot(sim, b, g) >= 0:
            return OP_PLACE, source, g, -1
        victim = _victim_on(sim, b, g, e, source)
        if victim < 0:
            return OP_ILLEGAL, -1, -1, -1
        return OP_SWAP, source, g, victim
    if node < 2 * n_gpus:
        if holds(sim, b, e, g) or free_slot(sim, b, g) < 0:
            return OP_ILLEGAL, -1, -1, -1
        return OP_ADD, -1, g, -1
    if sim.n_replicas[b, e] < 2 or not holds(sim, b, e, g):
        return OP_ILLEGAL, -1, -1, -1
    return OP_DELETE, g, -1, -1


@device
def _save_choices(sim, b, e, which):
    """Keep where the tokens of ``e`` go, for :func:`update_window`."""
    for g in range(sim.slots.shape[1]):
        sim.previous[b, which, PREVIOUS_CHOICE, g] = sim.replica_choice[b, e, g]
    for i in range(sim.n_replicas[b, e]):
        sim.previous[b, which, PREVIOUS_REPLICAS, i] = sim.replicas[b, e, i]
    sim.previous[b, which, PREVIOUS_COUNT, 0] = sim.n_replicas[b, e]


@device
def _touch(sim, b, e):
    """Mark the GPUs that hold ``e``."""
    for i in range(sim.n_replicas[b, e]):
        sim.touched[b, sim.replicas[b, e, i]] = 1


@device
def change(sim, b, e, e_from, e_to, v, v_from, v_to, network, n_windows):
    """Move a replica of ``e`` and, if v ≥ 0, one of ``v``. A GPU of −1 means none: a new or a deleted replica.

    The same call with from and to exchanged undoes it. Windows 0 … n_windows−1 are updated; if there are others, the next
    change must undo this one.
    """
    by_sets = sim.own_index[0] == 0 and network.mode == MODE_DEDUP
    if by_sets:
        for g in range(sim.slots.shape[1]):
            sim.touched[b, g] = 0
        _touch(sim, b, e)
        if v >= 0:
            _touch(sim, b, v)
        for w in range(sim.slot_tokens.shape[1]):
            if w < n_windows:
                collect_tokens(sim, b, w, e, 0)
                if v >= 0:
                    collect_tokens(sim, b, w, v, 1)
            else:
                save_tokens(sim, b, w, e, e_from, 0)
                if v >= 0:
                    save_tokens(sim, b, w, v, v_from, 1)
    else:
        _save_choices(sim, b, e, 0)
        if v >= 0:
            _save_choices(sim, b, v, 1)
    count_received(sim, b, e, -1, network)
    if e_from >= 0:
        remove(sim, b, e, e_from)
    if v >= 0:
        count_received(sim, b, v, -1, network)
        if v_from >= 0:
            remove(sim, b, v, v_from)
        if v_to >= 0:
            insert(sim, b, v, v_to)
        write_choices(sim, b, v, network)
        count_received(sim, b, v, 1, network)
    if e_to >= 0:
        insert(sim, b, e, e_to)
    write_choices(sim, b, e, network)
    count_received(sim, b, e, 1, network)
    if by_sets:
        _touch(sim, b, e)
        if v >= 0:
            _touch(sim, b, v)
        for w in range(sim.slot_tokens.shape[1]):
            if w < n_windows:
                assign_tokens(sim, b, w, e, 0, network)
                if v >= 0:
                    assign_tokens(sim, b, w, v, 1, network)
                count_touched(sim, b, w, network)
            else:
                restore_tokens(sim, b, w, e, e_to, 0)
                if v >= 0:
                    restore_tokens(sim, b, w, v, v_to, 1)
        return
    for w in range(n_windows):
        update_window(sim, b, w, e, 0, network)
        if v >= 0:
            update_window(sim, b, w, v, 1, network)


@device
def apply_operation(sim, b, e, source, target, victim, network, n_windows):
    """Apply what :func:`resolve` found. The same call with ``source`` and ``target`` exchanged undoes it."""
    change(sim, b, e, source, target, victim, target, source, network, n_windows)
