"""The estimate of :mod:`.surrogate` for agents: what operations would save, and how an operation changes it."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device, inlined
from clustergym.moe_placement.kernels.operations import resolve
from clustergym.moe_placement.kernels.replicas import free_slot, holds, slot_of
from clustergym.moe_placement.kernels.state import (
    MEMORY_GAIN,
    MEMORY_LOOKED,
    OP_ADD,
    OP_ILLEGAL,
    OP_NOTHING,
    PART_MIGRATION,
    PART_SMOOTH,
    PART_TRUE,
)
from clustergym.moe_placement.planners.kernels.surrogate import NOW, THEN, estimate_times, total_load
from clustergym.moe_placement.planners.kernels.surrogate_steps import keep_expert, move, settle, try_change


@inlined
def _try(s, b, e, source, target, v, v_from, v_to, objective):
    """Try a change of ``e`` and of ``v`` (−1 for none); a GPU of −1 means none. Returns their numbers of replicas."""
    n_e, n_v = move(s, b, 0, e, source, target), 0
    if v >= 0:
        n_v = move(s, b, 1, v, v_from, v_to)
    try_change(s, b, e, n_e, v, n_v, objective.topology, objective.costs)
    return n_e, n_v


@inlined
def _saved(s, b, e, source, target, v, v_from, v_to, objective, total, time, moved):
    """(time, migration time) that a change saves. It is undone."""
    _try(s, b, e, source, target, v, v_from, v_to, objective)
    time_then, moved_then = estimate_times(s, b, THEN, objective, total)
    settle(s, b, NOW, THEN, objective.topology)
    return time - time_then, moved - moved_then


@device
def look_ahead(first, last, s, sim, experts, n_passes, objective, unit_us, parts, spare, memory):
    """Write (B, M, 3·G, parts): what each operation on ``experts`` (B, M) saves by the estimate, in units (B,).

    The same as :func:`~clustergym.moe_placement.kernels.lookahead.look_ahead_parts` without counting tokens. The state
    ``sim`` tells what an operation means. The smooth time stands for the true one. ``memory`` (B, E, 2) keeps the best.

    ADD to a full GPU takes the place of a spare replica there: ``spare`` (B, M, G) has the expert that it is best to
    delete first, or −1. To delete a replica does not pay by itself, so agents would not begin with it.
    """
    n_gpus = s.slots.shape[1]
    for b in range(first, last):
        total = total_load(s, b)
        time, moved = estimate_times(s, b, NOW, objective, total)
        for i in range(experts.shape[1]):
            e, best = experts[b, i], 0.0
            for node in range(3 * n_gpus):
                g, saved, less_moved = node % n_gpus, 0.0, 0.0
                adds = node >= n_gpus and node < 2 * n_gpus
                if adds:
                    spare[b, i, g] = -1
                kind, source, target, victim = resolve(sim, b, e, node, n_passes)
                if kind != OP_NOTHING and kind != OP_ILLEGAL:
                    saved, less_moved = _saved(
                        s, b, e, source, target, victim, target, source, objective, total, time, moved
                    )
                elif adds and not holds(s, b, e, g):
                    for k in range(s.slots.shape[2]):
                        v = int(s.slots[b, g, k])
                        if v >= 0 and s.n_replicas[b, v] > 1:
                            one, other = _saved(s, b, e, -1, g, v, g, -1, objective, total, time, moved)
                            if spare[b, i, g] < 0 or one + other > saved + less_moved:
                                spare[b, i, g], saved, less_moved = v, one, other
                parts[b, i, node, PART_SMOOTH] = saved / unit_us[b]
                parts[b, i, node, PART_TRUE] = saved / unit_us[b]
                parts[b, i, node, PART_MIGRATION] = less_moved / unit_us[b]
                best = max(best, (saved + less_moved) / unit_us[b])
            memory[b, e, MEMORY_GAIN] = best
            memory[b, e, MEMORY_LOOKED] = 1.0


@device
def operate(first, last, s, sim, experts, nodes, spare, n_passes, objective, must_save):
    """Apply the operation ``nodes`` (B,) on ``experts`` (B,), which ``sim`` has not made yet.

    If ``spare`` (B,) is not −1, the expert takes the place of a replica of that one. With ``must_save``, operations
    that save nothing are not made, and ``experts`` and ``spare`` become −1 there.
    """
    topology, n_gpus = objective.topology, s.slots.shape[1]
    for b in range(first, last):
        e, v, kind = experts[b], spare[b], OP_ADD
        g = nodes[b] % n_gpus
        source, target, v_from, v_to = -1, g, g, -1
        if v < 0:
            kind, source, target, v = resolve(sim, b, e, nodes[b], n_passes)
            v_from, v_to = target, source
        elif holds(s, b, e, g) or not holds(s, b, v, g) or s.n_replicas[b, v] < 2:
            kind = OP_ILLEGAL  # another operation came before
        saves = kind != OP_NOTHING and kind != OP_ILLEGAL
        if saves:
            total = total_load(s, b)
            time, moved = estimate_times(s, b, NOW, objective, total)
            n_e, n_v = _try(s, b, e, source, target, v, v_from, v_to, objective)
            time_then, moved_then = estimate_times(s, b, THEN, objective, total)
            if must_save and time_then + moved_then >= time + moved:
                settle(s, b, NOW, THEN, topology)
                saves = False
        if not saves:
            if must_save:
                experts[b], spare[b] = -1, -1
            continue
        left = slot_of(s, b, e, source) if source >= 0 else -1
        if target >= 0:
            s.slots[b, target, slot_of(s, b, v, target) if v >= 0 else free_slot(s, b, target)] = e
        if source >= 0:
            s.slots[b, source, left] = v
        keep_expert(s, b, 0, e, n_e, topology, n_gpus)
        if v >= 0:
            keep_expert(s, b, 1, v, n_v, topology, n_gpus)
        settle(s, b, THEN, NOW, topology)
