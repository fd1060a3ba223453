"""Simulated annealing on the estimate of :mod:`.surrogate`: how steps are drawn, tried and kept."""

from __future__ import annotations

import math

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.replicas import holds, slot_of
from clustergym.planners.kernels.launch import draw
from clustergym.planners.kernels.surrogate import (
    COPIES,
    NOW,
    SAME_GPU,
    SPARE,
    THEN,
    TOGETHER,
    TWO_NODES,
    add,
    add_tables,
    copy_gpu,
    copy_node,
    copy_slots,
    estimate,
    is_touched,
    receive,
    total_load,
    write_node,
    write_shares,
    write_times,
)


@inlined
def move(s, b, which, e, source, target):
    """Write the replicas of ``e`` with ``source`` replaced by ``target`` (−1 means none). Returns their number."""
    moved, n = s.moved[b, which], 0
    for i in range(s.n_replicas[b, e]):
        if s.replicas[b, e, i] != source:
            moved[n] = s.replicas[b, e, i]
            n += 1
    if target >= 0:
        i = n
        while i > 0 and moved[i - 1] > target:
            moved[i] = moved[i - 1]
            i -= 1
        moved[i] = target
        n += 1
    return n


@inlined
def _on_two_nodes(s, b, e, source, target, per_node):
    """Whether ``e`` is on two nodes once its replica on ``source`` has moved to ``target`` (−1 means none)."""
    first = -1
    if target >= 0:
        first = target // per_node
    for i in range(s.n_replicas[b, e]):
        g = int(s.replicas[b, e, i])
        if g != source:
            if first < 0:
                first = g // per_node
            elif g // per_node != first:
                return True
    return False


@inlined
def _propose(s, b, key, per_node):
    """(g, slot, h, slot): exchange two slots; or (g, slot, −1, expert): put a replica of the expert into the slot.

    g = −1 if the draw is not legal.
    """
    n_gpus, n_slots, shape = s.slots.shape[1], s.slots.shape[2], s.shape
    sample = s.sample[b]
    kind = draw(key, b)
    g, k = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    here = int(s.slots[b, g, k])
    if kind < shape[SPARE] or here < 0:
        if here >= 0 and s.n_replicas[b, here] <= shape[COPIES]:
            return -1, -1, -1, -1
        if here >= 0 and shape[TWO_NODES] > 0.0 and not _on_two_nodes(s, b, here, g, -1, per_node):
            return -1, -1, -1, -1
        e = int(sample[int(draw(key, b) * sample.shape[0]), int(draw(key, b) * sample.shape[1])])
        if e < 0 or holds(s, b, e, g):
            return -1, -1, -1, -1
        return g, k, -1, e
    h, m = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    if kind < shape[SPARE] + shape[TOGETHER]:
        token = sample[int(draw(key, b) * sample.shape[0])]
        wanted, other = int(token[int(draw(key, b) * len(token))]), int(token[int(draw(key, b) * len(token))])
        if wanted < 0 or other < 0 or wanted == other:
            return -1, -1, -1, -1
        h = int(s.replicas[b, other, int(draw(key, b) * s.n_replicas[b, other])])
        if draw(key, b) >= shape[SAME_GPU]:
            h += int(draw(key, b) * per_node) - h % per_node
        g = int(s.replicas[b, wanted, int(draw(key, b) * s.n_replicas[b, wanted])])
        k = slot_of(s, b, wanted, g)
        here = wanted
    there = int(s.slots[b, h, m])
    if g == h or here == there or there < 0 or holds(s, b, here, h) or holds(s, b, there, g):
        return -1, -1, -1, -1
    if shape[TWO_NODES] > 0.0 and not (
        _on_two_nodes(s, b, here, g, h, per_node) and _on_two_nodes(s, b, there, h, g, per_node)
    ):
        return -1, -1, -1, -1
    return g, k, h, m


@inlined
def _try_expert(s, b, which, x, n, other, n_other, common, topology, n_gpus):
    """Replace the old replicas of ``x`` by the ``n`` in ``moved[which]`` in the sums of the trial."""
    moved, shares, old = s.moved[b, which], s.moved_shares[b, which], int(s.n_replicas[b, x])
    write_shares(moved, n, shares, topology, n_gpus)
    add(s, b, THEN, x, s.replicas[b, x], old, s.shares[b, x], -1.0, other, n_other, common, topology, n_gpus)
    add(s, b, THEN, x, moved, n, shares, 1.0, other, n_other, common, topology, n_gpus)
    receive(s, b, THEN, x, s.replicas[b, x], old, -1, topology)
    receive(s, b, THEN, x, moved, n, 1, topology)


@inlined
def keep_expert(s, b, slot, x, n, topology, n_gpus):
    """Make the new replicas of ``x`` the current ones."""
    if s.pairs.shape[1] > 1:
        add_tables(s, b, x, s.replicas[b, x], int(s.n_replicas[b, x]), s.shares[b, x], -1.0, topology, n_gpus)
        add_tables(s, b, x, s.moved[b, slot], n, s.moved_shares[b, slot], 1.0, topology, n_gpus)
    s.n_replicas[b, x] = n
    for i in range(n):
        s.replicas[b, x, i] = s.moved[b, slot, i]
        for j in range(3):
            s.shares[b, x, i, j] = s.moved_shares[b, slot, i, j]


@inlined
def try_change(s, b, e, n_e, v, n_v, topology, costs):
    """Write the sums of the trial, in which ``e`` has ``n_e`` replicas and ``v`` (−1 for none) has ``n_v``."""
    n_gpus, per_node = s.slots.shape[1], topology.gpus_per_node
    common = float(s.pairs[b, e, v]) if s.pairs.shape[1] > 1 and v >= 0 else 0.0
    _try_expert(s, b, 0, e, n_e, -1, 0, 0.0, topology, n_gpus)
    if v >= 0:
        _try_expert(s, b, 1, v, n_v, e, n_e, common, topology, n_gpus)
    for node in range(s.nodes.shape[2]):
        if is_touched(s, b, node, per_node):
            for x in range(node * per_node, (node + 1) * per_node):
                if s.touched[b, x]:
                    write_times(s, b, THEN, x, topology)
            write_node(s, b, THEN, node, topology, costs)


@inlined
def settle(s, b, source, target, topology):
    """End a trial: sums ``target`` become those of ``source`` wherever the trial changed them."""
    per_node = topology.gpus_per_node
    for node in range(s.nodes.shape[2]):
        if is_touched(s, b, node, per_node):
            copy_node(s, b, node, source, target)
            for x in range(node * per_node, (node + 1) * per_node):
                if s.touched[b, x]:
                    copy_gpu(s, b, x, source, target)
                    s.touched[b, x] = 0


@device
def anneal_layer(s, b, objective, key, heat, iterations, best, best_cost):
    """Anneal layer ``b`` on the estimate. ``best`` (G, S) and ``best_cost`` (B,) keep the best placement.

    ``heat`` has the temperatures of the first and the last iteration, as shares of the cost.
    """
    topology, costs, n_gpus = objective.topology, objective.costs, s.slots.shape[1]
    total_uses = total_load(s, b)
    cost = estimate(s, b, NOW, objective, total_uses)
    scale = cost
    if cost < best_cost[b]:
        best_cost[b] = cost
        copy_slots(s.slots[b], best)
    for i in range(iterations):
        g, k, h, m = _propose(s, b, key, topology.gpus_per_node)
        if g < 0:
            continue
        here = int(s.slots[b, g, k])
        if h < 0:  # a new replica of e in place of a spare one, or in an empty slot
            e, v = m, here
            n_e, n_v = move(s, b, 0, e, -1, g), 0
            if v >= 0:
                n_v = move(s, b, 1, v, g, -1)
        else:
            e, v = here, int(s.slots[b, h, m])
            n_e, n_v = move(s, b, 0, e, g, h), move(s, b, 1, v, h, g)
        try_change(s, b, e, n_e, v, n_v, topology, costs)
        after = estimate(s, b, THEN, objective, total_uses)
        temperature = scale * heat[0] * (heat[1] / heat[0]) ** (i / iterations)
        if after <= cost - temperature * math.log(1.0 - draw(key, b)):
            keep_expert(s, b, 0, e, n_e, topology, n_gpus)
            if v >= 0:
                keep_expert(s, b, 1, v, n_v, topology, n_gpus)
            if h < 0:
                s.slots[b, g, k] = e
            else:
                s.slots[b, g, k] = v
                s.slots[b, h, m] = e
            source, target = THEN, NOW
            cost = after
            if cost < best_cost[b]:
                best_cost[b] = cost
                copy_slots(s.slots[b], best)
        else:
            source, target = NOW, THEN
        settle(s, b, source, target, topology)


@device
def anneal_layers(first, last, s, objective, key, heat, iterations, best, best_cost):
    """:func:`anneal_layer` on layers first … last−1."""
    for b in range(first, last):
        anneal_layer(s, b, objective, key, heat, iterations, best[b], best_cost)
