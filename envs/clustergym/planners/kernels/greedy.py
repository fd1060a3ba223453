"""Greedy search of one layer on the estimate of :mod:`.surrogate`."""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.replicas import free_slot, holds, slot_of
from clustergym.planners.kernels.surrogate import NOW, THEN, estimate, total_load
from clustergym.planners.kernels.surrogate_steps import keep_expert, move, settle, try_change

MOST_ROUNDS = 5
LITTLE = 0.005
"""Share of the time that a round must save, or there is no other."""


@inlined
def _try(s, b, e, source, target, v, objective):
    """Try to move ``e`` from ``source`` to ``target``, and ``v`` (−1 for none) the other way; a GPU of −1 means none.

    Returns their numbers of replicas.
    """
    n_e, n_v = move(s, b, 0, e, source, target), 0
    if v >= 0:
        n_v = move(s, b, 1, v, target, source)
    try_change(s, b, e, n_e, v, n_v, objective.topology, objective.costs)
    return n_e, n_v


@device
def best_change(s, b, e, objective, total):
    """The best operation on ``e``: (time saved, from GPU, to GPU, victim). Nothing is saved if there is none.

    A replica moves to another GPU, or one is added there (from GPU −1). On a full GPU the move exchanges it for a
    replica there, and the addition replaces a spare one.
    """
    n_gpus, n_slots = s.slots.shape[1], s.slots.shape[2]
    now, saved, source, target, victim = estimate(s, b, NOW, objective, total), 0.0, -1, -1, -1
    for g in range(n_gpus):
        if holds(s, b, e, g):
            continue
        has_room = free_slot(s, b, g) >= 0
        for i in range(-1, s.n_replicas[b, e]):
            origin = int(s.replicas[b, e, i]) if i >= 0 else -1
            for k in range(1 if has_room else n_slots):
                v = -1 if has_room else int(s.slots[b, g, k])
                if v >= 0 and (holds(s, b, v, origin) if i >= 0 else s.n_replicas[b, v] < 2):
                    continue
                _try(s, b, e, origin, g, v, objective)
                gain = now - estimate(s, b, THEN, objective, total)
                settle(s, b, NOW, THEN, objective.topology)
                if gain > saved:
                    saved, source, target, victim = gain, origin, g, v
    return saved, source, target, victim


@device
def _make(s, b, e, source, target, v, objective):
    """Make an operation."""
    topology, n_gpus = objective.topology, s.slots.shape[1]
    n_e, n_v = _try(s, b, e, source, target, v, objective)
    left = slot_of(s, b, e, source) if source >= 0 else -1
    s.slots[b, target, slot_of(s, b, v, target) if v >= 0 else free_slot(s, b, target)] = e
    if source >= 0:
        s.slots[b, source, left] = v
    keep_expert(s, b, 0, e, n_e, topology, n_gpus)
    if v >= 0:
        keep_expert(s, b, 1, v, n_v, topology, n_gpus)
    settle(s, b, THEN, NOW, topology)


@device
def improve_layer(s, b, objective, most, gains):
    """Make at most ``most`` operations, in rounds. ``gains`` (E,) is scratch: what each expert could save."""
    total, n_experts = total_load(s, b), gains.shape[0]
    for _ in range(MOST_ROUNDS):
        before = estimate(s, b, NOW, objective, total)
        for e in range(n_experts):
            gains[e] = best_change(s, b, e, objective, total)[0]
        while most > 0:
            e = 0
            for other in range(n_experts):
                if gains[other] > gains[e]:
                    e = other
            if gains[e] <= 0.0:
                break
            gains[e] = 0.0
            # After the operations before it, the expert may save less, or by another one.
            saved, source, target, victim = best_change(s, b, e, objective, total)
            if saved > 0.0:
                _make(s, b, e, source, target, victim, objective)
                most -= 1
        if most == 0 or before - estimate(s, b, NOW, objective, total) < LITTLE * before:
            return


@device
def improve_layers(first, last, s, objective, most, gains):
    """:func:`improve_layer` on layers first … last−1."""
    for b in range(first, last):
        improve_layer(s, b, objective, most, gains[b])
