"""Operations on a placement: what an action means. :mod:`.passes` applies it."""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.passes import change
from clustergym.moe_placement.kernels.replicas import free_slot, holds
from clustergym.moe_placement.kernels.state import OP_ADD, OP_DELETE, OP_ILLEGAL, OP_NOTHING, OP_PLACE, OP_SWAP


@inlined
def slot_pairs(sim, b, g, s, n_passes):
    """Token-expert pairs of the slot's expert that the GPU computes in the first passes. The slot must not be empty."""
    total = 0
    for w in range(n_passes):
        total += sim.slot_pairs[b, w, g, s]
    return total


@inlined
def gpu_pairs(sim, b, g, n_passes):
    """Token-expert pairs that the GPU computes in the first passes."""
    total = 0
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, g, s] >= 0:
            total += slot_pairs(sim, b, g, s, n_passes)
    return total


@inlined
def _source_of(sim, b, e, n_passes):
    """The replica of ``e`` that moves: the one on the GPU with most pairs."""
    best, most = sim.replicas[b, e, 0], -1
    if sim.n_replicas[b, e] == 1:
        return best
    for i in range(sim.n_replicas[b, e]):
        pairs = gpu_pairs(sim, b, sim.replicas[b, e, i], n_passes)
        if pairs > most:
            best, most = sim.replicas[b, e, i], pairs
    return best


@inlined
def victim_on(sim, b, g, e, source, n_passes):
    """The replica on GPU ``g`` with fewest tokens that can go to ``source`` in exchange for ``e``; −1 if there is none.

    Ties go to the lower expert id, not to the slot order, which has no meaning.
    """
    best, least = -1, 0
    for s in range(sim.slots.shape[2]):
        v = sim.slots[b, g, s]
        if v >= 0 and v != e and not holds(sim, b, v, source):
            pairs = slot_pairs(sim, b, g, s, n_passes)
            if best < 0 or pairs < least or (pairs == least and v < best):
                best, least = v, pairs
    return best


@device
def resolve(sim, b, e, node, n_passes):
    """What the action (expert ``e``, ``node`` of 3·G) means here: (kind, from GPU, to GPU, victim).

    The first ``n_passes`` passes decide which replica moves and which one it is exchanged for.
    """
    n_gpus = sim.slots.shape[1]
    if e < 0 or e >= sim.replicas.shape[1] or node < 0 or node >= 3 * n_gpus:
        return OP_ILLEGAL, -1, -1, -1
    g = node % n_gpus
    if node < n_gpus:
        if holds(sim, b, e, g):
            return OP_NOTHING, -1, -1, -1
        source = _source_of(sim, b, e, n_passes)
        if free_slot(sim, b, g) >= 0:
            return OP_PLACE, source, g, -1
        victim = victim_on(sim, b, g, e, source, n_passes)
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
def apply_operation(sim, b, e, source, target, victim, topology, costs, n_passes):
    """Apply what :func:`resolve` found. The same call with ``source`` and ``target`` exchanged undoes it."""
    change(sim, b, e, source, target, victim, target, source, topology, costs, n_passes)
