"""Which GPUs hold an expert, and which of them serves a rank's tokens."""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.state import FROM_OTHER_NODE, FROM_OWN_NODE
from clustergym.moe_placement.profiles import RANDOM, RANK_MOD, RANK_NEAREST, ROUND_ROBIN, TOKEN_HASH

MASK31 = 0x7FFFFFFF
# Multiplicative hash of 32-bit integers, with vLLM's constant.
_KNUTH, _MASK32 = 2654435769, 0xFFFFFFFF


@device
def hash31(x):
    """A fixed hash of 31-bit integers that never overflows int64."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & MASK31
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & MASK31
    return x ^ (x >> 16)


@inlined
def choose(topology, row, position, rank, ordinal, count):
    """Which of ``count`` replicas a token takes.

    ``position`` is the token's place in its rank's batch. ``ordinal`` is how many tokens of the rank used the expert
    before it.
    """
    if topology.dispatch == TOKEN_HASH:
        return (position * _KNUTH & _MASK32) % count
    if topology.dispatch == ROUND_ROBIN:
        return (ordinal + rank) % count
    return hash31(row) * count >> 31


@inlined
def write_choices(state, b, e, topology):
    """Derive from the replicas of ``e`` which of them a token of each rank chooses from.

    * rank-nearest: the one on the rank's GPU, else the first on its node. Other ranks are dealt over all replicas. With
      ``deals_one_node``, so are the ranks of a node that has all replicas. With ``draws``, each rank draws one instead.
    * rank-mod: replica number rank modulo the number of replicas.
    * local-hash: the one on the rank's GPU, else those on its node, else all.
    * random, token-hash, round-robin: all.
    """
    n_gpus, n = state.slots.shape[1], int(state.n_replicas[b, e])
    choice, replicas, node_of = state.replica_choice[b, e], state.replicas[b, e], topology.node_of
    dispatch, per_node = topology.dispatch, topology.gpus_per_node
    for g in range(n_gpus):
        choice[g] = n << 16
    if n == 1 or dispatch == RANDOM or dispatch == TOKEN_HASH or dispatch == ROUND_ROBIN:
        return
    if dispatch == RANK_MOD:
        for g in range(n_gpus):
            choice[g] = g % n | 1 << 16
        return
    # Replicas on one node are neighbours in the ascending list.
    one_node = node_of[replicas[0]] == node_of[replicas[n - 1]]
    first = 0
    for i in range(0 if one_node and topology.deals_one_node else n):
        node = node_of[replicas[i]]
        if node_of[replicas[first]] != node:
            first = i
        count = 1 if dispatch == RANK_NEAREST else i - first + 1
        for g in range(node * per_node, (node + 1) * per_node):
            choice[g] = first | count << 16
    for i in range(n):
        choice[replicas[i]] = i | 1 << 16
    if dispatch == RANK_NEAREST:
        # Begin with another replica for each expert, so that the first ones do not get all remainders.
        dealt, key = int(e % n), int(e)
        if topology.draws:
            for i in range(n):
                key = hash31((key * n_gpus + replicas[i] + 1) & MASK31)
        for g in range(n_gpus):
            if choice[g] >> 16 != n:
                continue
            if topology.draws:
                choice[g] = hash31((key + g * 0x9E3779B) & MASK31) * n >> 31 | 1 << 16
            else:
                choice[g] = dealt | 1 << 16
                dealt = dealt + 1 if dealt + 1 < n else 0


@device
def write_replicas(state, b, topology):
    """Derive ``replicas``, ``n_replicas`` and ``replica_choice`` from ``slots``."""
    n_experts = state.replicas.shape[1]
    for e in range(n_experts):
        state.n_replicas[b, e] = 0
    for g in range(state.slots.shape[1]):
        for s in range(state.slots.shape[2]):
            e = state.slots[b, g, s]
            if e >= 0:
                state.replicas[b, e, state.n_replicas[b, e]] = g
                state.n_replicas[b, e] += 1
    for e in range(n_experts):
        write_choices(state, b, e, topology)


@device
def set_first_placement(state, b, topology):
    """Take the placement in ``slots`` as the one that the interval begins with: nothing has to be received."""
    write_replicas(state, b, topology)
    for e in range(state.replicas.shape[1]):
        for g in range(state.slots.shape[1]):
            state.held_before[b, e, g] = 0
        for i in range(state.n_replicas[b, e]):
            state.held_before[b, e, state.replicas[b, e, i]] = 1
    for g in range(state.slots.shape[1]):
        state.received[b, g, FROM_OWN_NODE] = 0
        state.received[b, g, FROM_OTHER_NODE] = 0


@device
def set_placement(state, b, slots, topology):
    """Replace the whole placement within an interval: what is new must be received."""
    for g in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            state.slots[b, g, s] = slots[g, s]
    write_replicas(state, b, topology)
    for e in range(state.replicas.shape[1]):
        count_received(state, b, e, 1, topology)


@inlined
def count_received(state, b, e, sign, topology):
    """Add (1) or take away (−1) what the current replicas of ``e`` make GPUs receive."""
    for i in range(state.n_replicas[b, e]):
        g = state.replicas[b, e, i]
        if state.held_before[b, e, g] == 0:
            source, first = FROM_OTHER_NODE, topology.node_of[g] * topology.gpus_per_node
            for h in range(first, first + topology.gpus_per_node):
                if state.held_before[b, e, h] == 1:
                    source = FROM_OWN_NODE
            state.received[b, g, source] += sign


@inlined
def slot_of(state, b, e, g):
    """Slot of GPU ``g`` that holds ``e``."""
    s = 0
    while state.slots[b, g, s] != e:
        s += 1
    return s


@inlined
def insert(state, b, e, g):
    """Put ``e`` on GPU ``g``, which has an empty slot and does not hold it."""
    state.slots[b, g, slot_of(state, b, -1, g)] = e
    i = state.n_replicas[b, e]
    while i > 0 and state.replicas[b, e, i - 1] > g:
        state.replicas[b, e, i] = state.replicas[b, e, i - 1]
        i -= 1
    state.replicas[b, e, i] = g
    state.n_replicas[b, e] += 1


@inlined
def remove(state, b, e, g):
    """Take ``e`` off GPU ``g``, which holds it."""
    state.slots[b, g, slot_of(state, b, e, g)] = -1
    found = 0
    for i in range(state.n_replicas[b, e]):
        state.replicas[b, e, i - found] = state.replicas[b, e, i]
        if state.replicas[b, e, i] == g:
            found = 1
    state.n_replicas[b, e] -= 1


@inlined
def holds(state, b, e, g):
    for i in range(state.n_replicas[b, e]):
        if state.replicas[b, e, i] == g:
            return True
    return False


@inlined
def free_slot(state, b, g):
    """Index of an empty slot on the GPU, −1 if it is full."""
    for s in range(state.slots.shape[2]):
        if state.slots[b, g, s] < 0:
            return s
    return -1


@device
def static_slots(slots, n_experts):
    """Experts in order over the slots, from 0 again when all are placed: what engines do before they know the loads."""
    n_slots = slots.shape[1]
    for g in range(slots.shape[0]):
        for s in range(n_slots):
            slots[g, s] = (g * n_slots + s) % n_experts
