"""The estimate of :mod:`.surrogate` for agents: what operations would save, and how operations change it."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device, inlined
from clustergym.moe_placement.kernels.replicas import free_slot, holds, slot_of
from clustergym.moe_placement.kernels.state import (
    MEMORY_GAIN,
    MEMORY_LOOKED,
    PART_MIGRATION,
    PART_SMOOTH,
    PART_TRUE,
)
from clustergym.planners.kernels.surrogate import NOW, THEN, estimate_times, total_load
from clustergym.planners.kernels.surrogate_steps import keep_expert, move, settle, try_change

_PLACE, _ADD = range(2)
_NOTHING = -1e30


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
def best_change(s, b, e, node, objective, total, time, moved):
    """The best way to make operation ``node`` (of 3·G) on ``e``: (time saved, migration time saved, from GPU, victim).

    PLACE moves any replica to the GPU, ADD adds one. If the GPU is full, PLACE exchanges it for the best replica there,
    and ADD replaces the best spare one: to delete a replica does not pay by itself, so agents would not begin with it.
    ``time`` and ``moved`` are those of the current placement. Without any legal way, the time saved is far below zero.
    """
    n_gpus, n_slots = s.slots.shape[1], s.slots.shape[2]
    g, kind, best = node % n_gpus, node // n_gpus, (_NOTHING, 0.0, -1, -1)
    is_there = holds(s, b, e, g)
    if (kind <= _ADD and is_there) or (kind > _ADD and (not is_there or s.n_replicas[b, e] < 2)):
        return best
    has_room = kind > _ADD or free_slot(s, b, g) >= 0
    for i in range(s.n_replicas[b, e] if kind == _PLACE else 1):
        source, target = -1, g
        if kind == _PLACE:
            source = int(s.replicas[b, e, i])
        elif kind > _ADD:
            source, target = g, -1
        for k in range(1 if has_room else n_slots):
            v = -1 if has_room else int(s.slots[b, g, k])
            if v >= 0 and (holds(s, b, v, source) if kind == _PLACE else s.n_replicas[b, v] < 2):
                continue
            _try(s, b, e, source, target, v, objective)
            time_then, moved_then = estimate_times(s, b, THEN, objective, total)
            settle(s, b, NOW, THEN, objective.topology)
            if time - time_then + moved - moved_then > best[0] + best[1]:
                best = (time - time_then, moved - moved_then, source, v)
    return best


@device
def look_ahead(first, last, s, experts, objective, unit_us, parts, legal, memory):
    """Write (B, M, 3·G, parts): what each operation on ``experts`` (B, M) saves by the estimate, in units (B,).

    The smooth time stands for the true one. ``legal`` (B, M, 3·G) tells which operations can be made, ``memory``
    (B, E, 2) keeps the best of each expert.
    """
    for b in range(first, last):
        total = total_load(s, b)
        time, moved = estimate_times(s, b, NOW, objective, total)
        for i in range(experts.shape[1]):
            e, best = experts[b, i], 0.0
            for node in range(3 * s.slots.shape[1]):
                saved, less_moved, _, _ = best_change(s, b, e, node, objective, total, time, moved)
                legal[b, i, node] = saved > _NOTHING
                if saved <= _NOTHING:
                    saved = 0.0
                parts[b, i, node, PART_SMOOTH] = saved / unit_us[b]
                parts[b, i, node, PART_TRUE] = saved / unit_us[b]
                parts[b, i, node, PART_MIGRATION] = less_moved / unit_us[b]
                best = max(best, (saved + less_moved) / unit_us[b])
            memory[b, e, MEMORY_GAIN] = best
            memory[b, e, MEMORY_LOOKED] = 1.0


@device
def operate(first, last, s, experts, scores, masked, per_gain, objective, unit_us, saved_share):
    """Make one operation on each of ``experts`` (B, M), one after another, if any saves time.

    It is the one with the best sum of ``scores`` (B, M, 3·G) and ``per_gain`` times what it saves now, in units (B,),
    among those that save anything. Operations with a score of ``masked`` or less are not tried. What they save is added
    to ``saved_share`` (B,).
    """
    topology, n_gpus = objective.topology, s.slots.shape[1]
    for b in range(first, last):
        total = total_load(s, b)
        for i in range(experts.shape[1]):
            e, target, source, v, highest, gain = experts[b, i], -1, -1, -1, _NOTHING, 0.0
            time, moved = estimate_times(s, b, NOW, objective, total)
            for node in range(2 * n_gpus):
                if scores[b, i, node] <= masked:
                    continue
                saved, less_moved, from_gpu, victim = best_change(s, b, e, node, objective, total, time, moved)
                share = (saved + less_moved) / unit_us[b]
                score = scores[b, i, node] + per_gain * share
                if share > 0.0 and score > highest:
                    highest, gain, target, source, v = score, share, node % n_gpus, from_gpu, victim
            if target < 0:
                continue
            saved_share[b] += gain
            n_e, n_v = _try(s, b, e, source, target, v, objective)
            left = slot_of(s, b, e, source) if source >= 0 else -1
            s.slots[b, target, slot_of(s, b, v, target) if v >= 0 else free_slot(s, b, target)] = e
            if source >= 0:
                s.slots[b, source, left] = v
            keep_expert(s, b, 0, e, n_e, topology, n_gpus)
            if v >= 0:
                keep_expert(s, b, 1, v, n_v, topology, n_gpus)
            settle(s, b, THEN, NOW, topology)
