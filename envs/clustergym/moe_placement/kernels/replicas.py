"""Which GPUs hold an expert, which of them serves a token, and which experts a GPU must receive."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device, index
from clustergym.moe_placement.kernels.state import FROM_OTHER_NODE, FROM_OWN_NODE

MASK31 = 0x7FFFFFFF


@device
def hash31(x):
    """A fixed hash of 31-bit integers that never overflows int64."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & MASK31
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & MASK31
    return x ^ (x >> 16)


@device
def upper_half(token_hash):
    """Which of two replicas a token chooses, 0 or 1: the same as in :func:`choose`."""
    return token_hash >> 30


@device
def choose(replicas, choice, token_hash):
    """GPU that runs an expert for a token. The token's hash decides between equal candidates."""
    return replicas[index((choice & 0xFFFF) + (token_hash * int(choice >> 16) >> 31))]


@device
def write_choices(sim, b, e, network):
    """Write ``replica_choice`` of an expert: the replica on the token's GPU, else those on its node, else all.

    Replicas on one node are neighbours in the ascending list.
    """
    n_gpus, n = sim.slots.shape[1], int(sim.n_replicas[b, e])
    choice, replicas = sim.replica_choice[b, e], sim.replicas[b, e]
    if n == 1:
        for g in range(n_gpus):
            choice[g] = 1 << 16
        return
    for g in range(n_gpus):
        choice[g] = n << 16
    first = 0
    for i in range(n):
        node = network.node_of[replicas[i]]
        if network.node_of[replicas[first]] != node:
            first = i
        for g in range(node * network.gpus_per_node, (node + 1) * network.gpus_per_node):
            choice[g] = first | (i - first + 1) << 16
    for i in range(n):
        choice[replicas[i]] = i | 1 << 16


@device
def write_replicas(sim, b, network):
    """Write ``replicas``, ``n_replicas`` and ``replica_choice`` for the placement in ``slots``."""
    for e in range(sim.pairs.shape[2]):
        sim.n_replicas[b, e] = 0
    for g in range(sim.slots.shape[1]):
        for s in range(sim.slots.shape[2]):
            e = sim.slots[b, g, s]
            if e >= 0:
                sim.replicas[b, e, sim.n_replicas[b, e]] = g
                sim.n_replicas[b, e] += 1
    for e in range(sim.pairs.shape[2]):
        write_choices(sim, b, e, network)


@device
def set_first_placement(sim, b, network):
    """Take the placement in ``slots`` as the one that the window begins with: nothing has to be received."""
    write_replicas(sim, b, network)
    for e in range(sim.pairs.shape[2]):
        for g in range(sim.slots.shape[1]):
            sim.held_before[b, e, g] = 0
        for i in range(sim.n_replicas[b, e]):
            sim.held_before[b, e, sim.replicas[b, e, i]] = 1
    for g in range(sim.slots.shape[1]):
        sim.received[b, g, FROM_OWN_NODE] = 0
        sim.received[b, g, FROM_OTHER_NODE] = 0


@device
def set_placement(sim, b, slots, network):
    """Replace the whole placement within a window: experts that are new on a GPU must be received."""
    for g in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            sim.slots[b, g, s] = slots[g, s]
    write_replicas(sim, b, network)
    for e in range(sim.pairs.shape[2]):
        count_received(sim, b, e, 1, network)


@device
def static_slots(slots, n_experts):
    """Experts in order over the slots, from 0 again when all are placed: what engines do before they know the loads."""
    n_slots = slots.shape[1]
    for g in range(slots.shape[0]):
        for s in range(n_slots):
            slots[g, s] = (g * n_slots + s) % n_experts


@device
def count_received(sim, b, e, sign, network):
    """Add (sign 1) or subtract (−1) what GPUs must receive for the current replicas of ``e``."""
    for i in range(sim.n_replicas[b, e]):
        g = sim.replicas[b, e, i]
        if sim.held_before[b, e, g] == 0:
            source = FROM_OTHER_NODE
            for h in range(sim.slots.shape[1]):
                if network.node_of[h] == network.node_of[g] and sim.held_before[b, e, h] == 1:
                    source = FROM_OWN_NODE
            sim.received[b, g, source] += sign


@device
def holds(sim, b, e, g):
    for i in range(sim.n_replicas[b, e]):
        if sim.replicas[b, e, i] == g:
            return True
    return False


@device
def slot_of(sim, b, e, g):
    """Slot of GPU ``g`` that holds ``e``, which must be there."""
    s = 0
    while sim.slots[b, g, s] != e:
        s += 1
    return s


@device
def free_slot(sim, b, g):
    """Index of an empty slot on the GPU, −1 if it is full."""
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, g, s] < 0:
            return s
    return -1


@device
def insert(sim, b, e, g):
    """Put ``e`` on GPU ``g``, which has an empty slot and does not hold it."""
    sim.slots[b, g, free_slot(sim, b, g)] = e
    i = sim.n_replicas[b, e]
    while i > 0 and sim.replicas[b, e, i - 1] > g:
        sim.replicas[b, e, i] = sim.replicas[b, e, i - 1]
        i -= 1
    sim.replicas[b, e, i] = g
    sim.n_replicas[b, e] += 1


@device
def remove(sim, b, e, g):
    """Take ``e`` off GPU ``g``, which holds it."""
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, g, s] == e:
            sim.slots[b, g, s] = -1
    found = 0
    for i in range(sim.n_replicas[b, e]):
        sim.replicas[b, e, i - found] = sim.replicas[b, e, i]
        if sim.replicas[b, e, i] == g:
            found = 1
    sim.n_replicas[b, e] -= 1
