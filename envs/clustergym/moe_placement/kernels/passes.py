"""Counting a pass, from scratch and after a change of placement."""

from __future__ import annotations

import numpy as np

from clustergym.common.compiling import device, index, inlined
from clustergym.moe_placement.kernels.cost import gpu_kernel_time
from clustergym.moe_placement.kernels.replicas import choose, count_received, insert, remove, slot_of, write_choices
from clustergym.moe_placement.kernels.state import (
    PIECE_RANK,
    PIECE_WORD,
    RECEIVED_INTER,
    RECEIVED_INTRA,
    SENT_INTER,
    SENT_INTRA,
)
from clustergym.moe_placement.kernels.token_sets import (
    add_all,
    clear,
    copy_set,
    count_common,
    popcount,
    range_word,
    transpose,
)
from clustergym.moe_placement.profiles import ALLGATHER, DEDUP, PER_EXPERT, RANDOM, RANK_NEAREST, TOKEN_HASH


@device
def count_pass(state, b, w, experts, topology, costs):
    """Count pass ``w`` from scratch for ``experts`` (rows, K) of a layer.

    ``rows``, ``rank_start`` and the replicas must be set.
    """
    write_users(state, b, w, experts)
    count_users(state, b, w, topology, costs)


@device
def write_users(state, b, w, experts):
    """Write ``users`` of pass ``w`` for ``experts`` (rows, K) of a layer."""
    rows, users = state.rows[b, w], state.users[b]
    for e in range(state.replicas.shape[1]):
        clear(users[e])
    for t in range(rows.shape[0]):
        row, token, word = index(rows[index(t)]), index(1) << index(t & 63), index(t >> 6)
        for k in range(experts.shape[1]):
            e = experts[row, index(k)]
            if e >= 0:
                users[index(e), word] |= token


@device
def write_users_from_sets(state, b, w, expert_sets):
    """As :func:`write_users`, from ``expert_sets`` (rows, words): the experts of each token as bits.

    To turn 64 sets of experts into sets of tokens at once is faster than to go through the experts of each token.
    """
    rows = state.rows[b, w]
    for block in range(expert_sets.shape[1]):
        users = state.users[b, 64 * block : 64 * block + 64]
        for t in range(rows.shape[0]):
            users[index(t & 63), index(t >> 6)] = expert_sets[index(rows[index(t)]), index(block)]
        for t in range(rows.shape[0], 64 * users.shape[1]):
            users[index(t & 63), index(t >> 6)] = index(0)
        transpose(users)


@device
def count_users(state, b, w, topology, costs):
    """:func:`count_pass`, when ``users`` of this pass is written."""
    users = state.users[b]
    _write_pieces(state, b, w)
    if topology.dispatch == RANDOM or topology.dispatch == TOKEN_HASH:
        _write_second_choice(state, b, w, topology)
    # By slots: to look for the slot of each expert would take longer.
    for g in range(state.slots.shape[1]):
        for s in range(state.slots.shape[2]):
            e = state.slots[b, g, s]
            if e < 0:
                continue
            e = index(e)
            if state.n_replicas[b, e] == 1:
                here, total = state.slot_tokens[b, w, g, s], index(0)
                for word in range(here.shape[0]):
                    tokens = users[e, index(word)]
                    here[index(word)] = tokens
                    total += popcount(tokens)
                state.load[b, w, e] = np.int64(total)
                state.slot_pairs[b, w, g, s] = np.int64(total)
            elif g == state.replicas[b, e, 0]:
                state.load[b, w, e] = count_common(users[e], users[e])
                copy_set(users[e], state.moved_tokens[b, w, 0])
                _assign_tokens(state, b, w, w + 1, e, 0, topology)
    count_all(state, b, w, topology, costs)


@device
def count_all(state, b, w, topology, costs):
    """Count all that follows from ``slot_tokens`` and ``slot_pairs``."""
    n_gpus = state.slots.shape[1]
    for home in range(n_gpus):
        state.touched[b, home] = 1
        for i in range(state.copies.shape[2]):
            state.copies[b, w, i, home] = 0
        for g in range(n_gpus):
            state.visits[b, w, home, g] = 0
        for node in range(state.node_visits.shape[3]):
            state.node_visits[b, w, home, node] = 0
    _count_touched(state, b, w, topology, costs, True)


@device
def change(state, b, e, e_from, e_to, v, v_from, v_to, topology, costs, n_passes):
    """Move a replica of ``e`` and, if v ≥ 0, one of ``v``. A GPU of −1 means none: a new or a deleted replica.

    The same call with from and to exchanged undoes it. Passes 0 … n_passes−1 are updated; if there are others, the next
    change must undo this one.
    """
    # With one copy per token and expert, only the visits to these two experts change.
    each = topology.transport == PER_EXPERT
    for g in range(state.slots.shape[1]):
        state.touched[b, g] = 0
    for which in range(2):
        moved, source = (e, e_from) if which == 0 else (v, v_from)
        if moved >= 0:
            _touch(state, b, moved)
            _collect_tokens(state, b, n_passes, moved, which)
            _save_tokens(state, b, n_passes, moved, source, which)
            if each:
                _add_visits(state, b, n_passes, moved, -1, topology)
    count_received(state, b, e, -1, topology)
    if e_from >= 0:
        remove(state, b, e, e_from)
    if v >= 0:
        count_received(state, b, v, -1, topology)
        if v_from >= 0:
            remove(state, b, v, v_from)
        if v_to >= 0:
            insert(state, b, v, v_to)
        write_choices(state, b, v, topology)
        count_received(state, b, v, 1, topology)
    if e_to >= 0:
        insert(state, b, e, e_to)
    write_choices(state, b, e, topology)
    count_received(state, b, e, 1, topology)
    for which in range(2):
        moved, target = (e, e_to) if which == 0 else (v, v_to)
        if moved >= 0:
            _touch(state, b, moved)
            _assign_tokens(state, b, 0, n_passes, moved, which, topology)
            _restore_tokens(state, b, n_passes, moved, target, which)
            if each:
                _add_visits(state, b, n_passes, moved, 1, topology)
    for w in range(n_passes):
        _count_touched(state, b, w, topology, costs, not each)


@inlined
def _touch(state, b, e):
    """Mark the GPUs that hold ``e``."""
    for i in range(state.n_replicas[b, e]):
        state.touched[b, state.replicas[b, e, i]] = 1


@inlined
def _collect_tokens(state, b, n_passes, e, which):
    """Collect the tokens of all replicas of ``e`` in ``moved_tokens``, for the first passes."""
    for i in range(state.n_replicas[b, e]):
        g = state.replicas[b, e, i]
        s = slot_of(state, b, e, g)
        for w in range(n_passes):
            if i == 0:
                copy_set(state.slot_tokens[b, w, g, s], state.moved_tokens[b, w, which])
            else:
                add_all(state.moved_tokens[b, w, which], state.slot_tokens[b, w, g, s])


@inlined
def _save_tokens(state, b, first, e, g, which):
    """Keep what the replica of ``e`` on ``g`` runs in passes that are not updated: an undo may give it another slot."""
    if g >= 0 and first < state.slot_tokens.shape[1]:
        s = slot_of(state, b, e, g)
        for w in range(first, state.slot_tokens.shape[1]):
            copy_set(state.slot_tokens[b, w, g, s], state.moved_tokens[b, w, which])
            state.moved_pairs[b, w, which] = state.slot_pairs[b, w, g, s]


@inlined
def _restore_tokens(state, b, first, e, g, which):
    if g >= 0 and first < state.slot_tokens.shape[1]:
        s = slot_of(state, b, e, g)
        for w in range(first, state.slot_tokens.shape[1]):
            copy_set(state.moved_tokens[b, w, which], state.slot_tokens[b, w, g, s])
            state.slot_pairs[b, w, g, s] = state.moved_pairs[b, w, which]


@inlined
def _write_second_choice(state, b, w, topology):
    """Write which tokens choose the second of two replicas."""
    chosen = state.second_choice[b, w]
    clear(chosen)
    for rank in range(state.slots.shape[1]):
        first = int(state.rank_start[b, w, rank])
        for t in range(first, state.rank_start[b, w, rank + 1]):
            if choose(topology, int(state.rows[b, w, t]), t - first, rank, 0, 2):
                chosen[index(t >> 6)] |= index(1) << index(t & 63)


@inlined
def _assign_tokens(state, b, first_pass, last_pass, e, which, topology):
    """Give each replica of ``e`` its part of the tokens in ``moved_tokens``."""
    replicas, n = state.replicas[b, e], int(state.n_replicas[b, e])
    for i in range(n):
        state.replica_slot[b, i] = slot_of(state, b, e, replicas[i])
    hashes = topology.dispatch == RANDOM or topology.dispatch == TOKEN_HASH
    by_rank = topology.dispatch == RANK_NEAREST
    for w in range(first_pass, last_pass):
        tokens, load = state.moved_tokens[b, w, which], int(state.load[b, w, e])
        here = state.slot_tokens[b, w, replicas[0], state.replica_slot[b, 0]]
        if n == 1:
            copy_set(tokens, here)
            state.slot_pairs[b, w, replicas[0], state.replica_slot[b, 0]] = load
        elif n == 2 and (hashes or by_rank):
            there, total = state.slot_tokens[b, w, replicas[1], state.replica_slot[b, 1]], index(0)
            if hashes:
                copy_set(state.second_choice[b, w], there)
            else:
                _write_second_ranks(state, b, w, e, there)
            for word in range(tokens.shape[0]):
                moved = tokens[index(word)] & there[index(word)]
                there[index(word)] = moved
                here[index(word)] = tokens[index(word)] ^ moved
                total += popcount(moved)
            state.slot_pairs[b, w, replicas[1], state.replica_slot[b, 1]] = np.int64(total)
            state.slot_pairs[b, w, replicas[0], state.replica_slot[b, 0]] = load - np.int64(total)
        else:
            for i in range(n):
                clear(state.slot_tokens[b, w, replicas[i], state.replica_slot[b, i]])
            if by_rank:
                _assign_by_rank(state, b, w, e, tokens)
            else:
                for rank in range(state.slots.shape[1]):
                    _assign_rank(state, b, w, e, rank, tokens, topology)
            for i in range(n):
                run = state.slot_tokens[b, w, replicas[i], state.replica_slot[b, i]]
                state.slot_pairs[b, w, replicas[i], state.replica_slot[b, i]] = count_common(run, run)


@inlined
def _write_second_ranks(state, b, w, e, chosen):
    """Write to ``chosen`` the tokens of the ranks that choose the second of the two replicas of ``e``."""
    choice, at, mask = state.replica_choice[b, e], state.piece_at[b, w], state.piece_mask[b, w]
    clear(chosen)
    for piece in range(state.n_pieces[b, w]):
        second = choice[index(at[piece, PIECE_RANK])] & 1
        chosen[index(at[piece, PIECE_WORD])] |= mask[piece] if second else index(0)


@inlined
def _assign_by_rank(state, b, w, e, tokens):
    """Send all tokens of a rank to one replica."""
    for piece in range(state.n_pieces[b, w]):
        word = index(state.piece_at[b, w, piece, PIECE_WORD])
        chosen = int(state.replica_choice[b, e, state.piece_at[b, w, piece, PIECE_RANK]]) & 0xFFFF
        here = tokens[word] & state.piece_mask[b, w, piece]
        state.slot_tokens[b, w, state.replicas[b, e, chosen], state.replica_slot[b, chosen], word] |= here


@inlined
def _assign_rank(state, b, w, e, rank, tokens, topology):
    """Send the tokens that rank ``rank`` holds, of those in ``tokens``, to the replicas of ``e`` that they choose."""
    replicas = state.replicas[b, e]
    choice = int(state.replica_choice[b, e, rank])
    first, count = choice & 0xFFFF, choice >> 16
    start, last = int(state.rank_start[b, w, rank]), int(state.rank_start[b, w, rank + 1])
    if last <= start:
        return
    g = replicas[first]
    run, ordinal = state.slot_tokens[b, w, g, slot_of(state, b, e, g)], 0
    for word in range(start >> 6, (last + 63) >> 6):
        here = tokens[index(word)] & range_word(start, last, word)
        if count == 1:
            run[index(word)] |= here
            continue
        while here != index(0):
            token = here & (~here + index(1))
            here ^= token
            t = 64 * word + np.int64(popcount(token - index(1)))
            picked = first + choose(topology, int(state.rows[b, w, t]), t - start, rank, ordinal, count)
            ordinal += 1
            g = replicas[picked]
            state.slot_tokens[b, w, g, slot_of(state, b, e, g), word] |= token


@inlined
def _write_pieces(state, b, w):
    """Cut the tokens of a pass where a rank or a word ends."""
    n = 0
    for rank in range(state.slots.shape[1]):
        start, last = int(state.rank_start[b, w, rank]), int(state.rank_start[b, w, rank + 1])
        if last > start:
            for word in range(start >> 6, (last + 63) >> 6):
                state.piece_mask[b, w, n] = range_word(start, last, word)
                state.piece_at[b, w, n, PIECE_WORD] = word
                state.piece_at[b, w, n, PIECE_RANK] = rank
                n += 1
    state.n_pieces[b, w] = n


@inlined
def _add_by_home(state, b, w, tokens):
    """Add to ``by_home`` how many tokens of a set each GPU holds."""
    by_home = state.by_home[b]
    at, mask = state.piece_at[b, w], state.piece_mask[b, w]
    for i in range(state.n_pieces[b, w]):
        piece = index(i)
        held = popcount(tokens[index(at[piece, index(PIECE_WORD)])] & mask[piece])
        by_home[index(at[piece, index(PIECE_RANK)])] += np.int64(held)


@inlined
def _add_visits(state, b, n_passes, e, sign, topology):
    """With per-expert transport: add (1) or take away (−1) visits to ``e`` in the first passes, and their copies."""
    node_of = topology.node_of
    for i in range(state.n_replicas[b, e]):
        g = state.replicas[b, e, i]
        s, gpu, node = slot_of(state, b, e, g), index(g), node_of[g]
        for w in range(n_passes):
            tokens, visits, copies = state.slot_tokens[b, w, g, s], state.visits[b, w], state.copies[b, w]
            at, mask, near, far = state.piece_at[b, w], state.piece_mask[b, w], 0, 0
            for piece in range(state.n_pieces[b, w]):
                home = index(at[index(piece), index(PIECE_RANK)])
                held = tokens[index(at[index(piece), index(PIECE_WORD)])] & mask[index(piece)]
                visitors = sign * np.int64(popcount(held))
                visits[home, gpu] += visitors
                if node_of[home] != node:
                    copies[index(SENT_INTER), home] += visitors
                    far += visitors
                elif home != gpu:
                    copies[index(SENT_INTRA), home] += visitors
                    near += visitors
            copies[index(RECEIVED_INTRA), gpu] += near
            copies[index(RECEIVED_INTER), gpu] += far


@inlined
def _count_touched(state, b, w, topology, costs, recount_visits):
    """Update all that follows from ``slot_tokens`` for the GPUs that are marked in ``touched``."""
    n_gpus, per_node, transport = state.slots.shape[1], topology.gpus_per_node, topology.transport
    for node in range(state.node_visits.shape[3]):
        first, changed = node * per_node, 0
        for g in range(first, first + per_node):
            if state.touched[b, g]:
                changed = 1
                if recount_visits and transport != ALLGATHER:
                    _count_visits(state, b, w, g, topology)
                state.kernel_us[b, w, g] = gpu_kernel_time(state, b, w, g, topology, costs)
        if changed and transport == DEDUP:
            near, by_home = state.node_visitors[b], state.by_home[b]
            clear(near)
            for g in range(first, first + per_node):
                add_all(near, state.visitors[b, w, g])
            for home in range(n_gpus):
                by_home[home] = 0
            _add_by_home(state, b, w, near)
            for home in range(n_gpus):
                visits = by_home[home]
                difference = visits - state.node_visits[b, w, home, node]
                state.node_visits[b, w, home, node] = visits
                if node != topology.node_of[home]:
                    relay = home + (node - topology.node_of[home]) * per_node
                    state.copies[b, w, SENT_INTER, home] += difference
                    state.copies[b, w, RECEIVED_INTER, relay] += difference


@inlined
def _count_visits(state, b, w, g, topology):
    """Update who visits GPU ``g``, and the copies that follow from it."""
    node_of, per_node, each = topology.node_of, topology.gpus_per_node, topology.transport == PER_EXPERT
    node, gpu, here = node_of[g], index(g), state.visitors[b, w, g]
    copies, by_home, visits = state.copies[b, w], state.by_home[b], state.visits[b, w]
    for home in range(by_home.shape[0]):
        by_home[index(home)] = 0
    if not each:
        clear(here)
    for s in range(state.slots.shape[2]):
        if state.slots[b, g, s] >= 0:
            if each:
                _add_by_home(state, b, w, state.slot_tokens[b, w, g, s])
            else:
                add_all(here, state.slot_tokens[b, w, g, s])
    if not each:
        _add_by_home(state, b, w, here)
    near, far = 0, 0
    for home in range(by_home.shape[0]):
        difference = by_home[index(home)] - visits[index(home), gpu]
        visits[index(home), gpu] = by_home[index(home)]
        # With deduplication a copy crosses once to each node, to the GPU of the same local rank, which forwards it.
        sender = index(home if each else home + (node - node_of[index(home)]) * per_node)
        if node_of[sender] != node:
            copies[index(SENT_INTER), sender] += difference
            far += difference
        elif sender != gpu:
            copies[index(SENT_INTRA), sender] += difference
            near += difference
    copies[index(RECEIVED_INTRA), gpu] += near
    copies[index(RECEIVED_INTER), gpu] += far
