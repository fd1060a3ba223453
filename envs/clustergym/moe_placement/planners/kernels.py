"""Searches over one layer's placement on the incremental simulator, and their launchers over all layers.

Like :mod:`clustergym.moe_placement.kernels`: functions of one simulation ``b`` (a layer), spread over the cores.
"""

from __future__ import annotations

import math

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import layer_time, migration_time
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.lookahead import look_ahead
from clustergym.moe_placement.kernels.operations import apply_operation, change, gpu_pairs, resolve
from clustergym.moe_placement.kernels.replicas import hash31, holds
from clustergym.moe_placement.kernels.state import OP_ILLEGAL, OP_NOTHING


@device
def _draw(key, b):
    """A number in [0, 1) from a counter-based generator."""
    key[b, 1] += 1
    return hash31(hash31(key[b, 0]) ^ hash31((key[b, 1] ^ 0x2545F491) & 0x7FFFFFFF)) / 2147483648.0


@device
def _cost(sim, b, costs, network, norm_log2, scale, migration_weight):
    time = layer_time(sim, b, 0, costs, network, norm_log2, scale)
    return time + migration_weight * migration_time(sim, b, costs)


@device
def _costs(first, last, sim, costs, network, norm_log2, scale, migration_weight, found):
    for b in range(first, last):
        found[b] = _cost(sim, b, costs, network, norm_log2, scale, migration_weight)


@device
def _draw_expert(key, b, prior):
    """An expert drawn from cumulative weights (E,) that end at 1."""
    x, low, high = _draw(key, b), 0, prior.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if prior[middle] > x:
            high = middle
        else:
            low = middle + 1
    return low


@device
def anneal_layer(
    sim, b, costs, network, norm_log2, scale, migration_weight, key, heat, iterations, best, best_cost, prior, guide
):
    """Simulated annealing from the current placement; ``best`` (G, S) and ``best_cost`` (B,) keep the best one seen.

    A step swaps two replicas, moves one to an empty slot, replaces a spare replica by one of another expert, or drops it
    (each active expert costs kernel time, so that fewer replicas can be faster).
    ``heat`` holds the temperature at the beginning and at the end of these iterations, as a share of the cost.
    A share ``guide`` of the steps concerns an expert drawn from ``prior`` (E,), cumulative; the others a slot at random.
    """
    n_gpus, n_slots, n_experts = sim.slots.shape[1], sim.slots.shape[2], sim.pairs.shape[2]
    now = _cost(sim, b, costs, network, norm_log2, scale, migration_weight)
    unit = now
    if now < best_cost[b]:
        best_cost[b] = now
        for g in range(n_gpus):
            for s in range(n_slots):
                best[g, s] = sim.slots[b, g, s]
    for i in range(iterations):
        g, s = int(_draw(key, b) * n_gpus), int(_draw(key, b) * n_slots)
        if guide > 0.0 and _draw(key, b) < guide:
            wanted = _draw_expert(key, b, prior)
            g = int(sim.replicas[b, wanted, int(_draw(key, b) * sim.n_replicas[b, wanted])])
            s = 0
            while sim.slots[b, g, s] != wanted:
                s += 1
        e, e_from, e_to, v, v_from, v_to = -1, -1, -1, -1, -1, -1
        here = sim.slots[b, g, s]
        if _draw(key, b) < 0.3:
            # Another expert, or nothing, takes the place of a spare replica or an empty slot.
            if here >= 0 and sim.n_replicas[b, here] < 2:
                continue
            e = int(_draw(key, b) * (n_experts + 1))
            if e == n_experts:
                if here < 0:
                    continue
                e, e_from = here, g
            elif holds(sim, b, e, g):
                continue
            else:
                e_to, v, v_from = g, here, g
        else:
            h, t = int(_draw(key, b) * n_gpus), int(_draw(key, b) * n_slots)
            there = sim.slots[b, h, t]
            if g == h or here == there:
                continue
            if here < 0:
                here, there, g, h = there, here, h, g
            if holds(sim, b, here, h) or (there >= 0 and holds(sim, b, there, g)):
                continue
            e, e_from, e_to, v, v_from, v_to = here, g, h, there, h, g
        change(sim, b, e, e_from, e_to, v, v_from, v_to, network, 1)
        after = _cost(sim, b, costs, network, norm_log2, scale, migration_weight)
        temperature = unit * heat[0] * (heat[1] / heat[0]) ** (i / iterations)
        if after <= now or _draw(key, b) < math.exp((now - after) / temperature):
            now = after
            if now < best_cost[b]:
                best_cost[b] = now
                for x in range(n_gpus):
                    for y in range(n_slots):
                        best[x, y] = sim.slots[b, x, y]
        else:
            change(sim, b, e, e_to, e_from, v, v_to, v_from, network, 1)


@device
def bottleneck_layer(sim, b, costs, network, norm_log2, operations, candidates, key, chosen, ahead):
    """Up to ``operations`` times the exact best operation on one of ``candidates`` experts, the bottleneck GPU's first.

    ``candidates`` beyond what that GPU holds are drawn at random; 0 takes one expert at random and no bottleneck.
    """
    n_gpus, n_slots, n_experts = sim.slots.shape[1], sim.slots.shape[2], sim.pairs.shape[2]
    for _ in range(operations):
        busiest, most = 0, -1
        for g in range(n_gpus):
            pairs = gpu_pairs(sim, b, 0, g)
            if pairs > most:
                busiest, most = g, pairs
        n_chosen = 0
        if candidates == 0:
            chosen[b, 0] = int(_draw(key, b) * n_experts)
            n_chosen = 1
        else:
            for s in range(n_slots):
                if sim.slots[b, busiest, s] >= 0:
                    chosen[b, n_chosen] = sim.slots[b, busiest, s]
                    n_chosen += 1
            # Heaviest first, so that fewer candidates than residents keep the ones that matter.
            for i in range(1, n_chosen):
                j = i
                while j > 0 and sim.pairs[b, 0, chosen[b, j], busiest] > sim.pairs[b, 0, chosen[b, j - 1], busiest]:
                    chosen[b, j], chosen[b, j - 1] = chosen[b, j - 1], chosen[b, j]
                    j -= 1
            while n_chosen < candidates:
                chosen[b, n_chosen] = int(_draw(key, b) * n_experts)
                n_chosen += 1
            n_chosen = candidates
        gain, best_e, best_node = 0.0, -1, -1
        for i in range(n_chosen):
            look_ahead(sim, b, chosen[b, i], costs, network, norm_log2, ahead[b])
            for node in range(3 * n_gpus):
                if ahead[b, node] > gain:
                    gain, best_e, best_node = ahead[b, node], chosen[b, i], node
        if best_e < 0:
            if candidates == 0:
                continue
            return
        kind, source, target, victim = resolve(sim, b, best_e, best_node)
        if kind != OP_NOTHING and kind != OP_ILLEGAL:
            apply_operation(sim, b, best_e, source, target, victim, network, 1)


@device
def _seat(sim, b, g, s, e):
    """Put ``e`` back into slot ``s``: undoing a change may leave it in another empty slot of the GPU."""
    for x in range(sim.slots.shape[2]):
        if sim.slots[b, g, x] == e:
            sim.slots[b, g, x] = -1
    sim.slots[b, g, s] = e


@device
def swap_greedy_layer(sim, b, costs, network, norm_log2, scale, operations):
    """Up to ``operations`` times the best of ALL swaps of two replicas and moves to empty slots, each tried exactly."""
    n_gpus, n_slots = sim.slots.shape[1], sim.slots.shape[2]
    for _ in range(operations):
        now = _cost(sim, b, costs, network, norm_log2, scale, 1.0)
        least, best_e, best_from, best_v, best_to = now, -1, -1, -1, -1
        for g in range(n_gpus):
            for h in range(n_gpus):
                for s in range(n_slots):
                    for t in range(n_slots):
                        e, v = sim.slots[b, g, s], sim.slots[b, h, t]
                        # Each swap once; a move from either side.
                        if e < 0 or g == h or e == v or (v >= 0 and g > h):
                            continue
                        if holds(sim, b, e, h) or (v >= 0 and holds(sim, b, v, g)):
                            continue
                        change(sim, b, e, g, h, v, h, g, network, 1)
                        after = _cost(sim, b, costs, network, norm_log2, scale, 1.0)
                        change(sim, b, e, h, g, v, g, h, network, 1)
                        # The loops go by slots: each replica must be where it was.
                        _seat(sim, b, g, s, e)
                        if v >= 0:
                            _seat(sim, b, h, t, v)
                        if after < least:
                            least, best_e, best_from, best_v, best_to = after, e, g, v, h
        if best_e < 0:
            return
        change(sim, b, best_e, best_from, best_to, best_v, best_to, best_from, network, 1)


@device
def balance_layer(slots, load, moves, copies, weight):
    """Up to ``moves`` swaps or moves between the GPU with most and the one with least load, each the best of its pair.

    Knows loads (E,) only, a replica carrying an equal share. Scratch: ``copies`` (E,) int32, ``weight`` (G,) float64.
    """
    n_gpus, n_slots = slots.shape
    for e in range(load.shape[0]):
        copies[e] = 0
    for g in range(n_gpus):
        for s in range(n_slots):
            if slots[g, s] >= 0:
                copies[slots[g, s]] += 1
    for _ in range(moves):
        heavy, light = 0, 0
        for g in range(n_gpus):
            weight[g] = 0.0
            for s in range(n_slots):
                if slots[g, s] >= 0:
                    weight[g] += load[slots[g, s]] / copies[slots[g, s]]
            if weight[g] > weight[heavy]:
                heavy = g
            if weight[g] < weight[light]:
                light = g
        gap = weight[heavy] - weight[light]
        best, best_s, best_t = gap, -1, -1
        for s in range(n_slots):
            for t in range(n_slots):
                e, v = slots[heavy, s], slots[light, t]
                if e < 0 or e == v:
                    continue
                clash = False
                for x in range(n_slots):
                    if slots[light, x] == e or (v >= 0 and slots[heavy, x] == v):
                        clash = True
                if clash:
                    continue
                shifted = load[e] / copies[e] - (load[v] / copies[v] if v >= 0 else 0.0)
                left = abs(gap - 2.0 * shifted)
                if left < best:
                    best, best_s, best_t = left, s, t
        if best_s < 0:
            return
        slots[heavy, best_s], slots[light, best_t] = slots[light, best_t], slots[heavy, best_s]


@device
def _anneal(
    first,
    last,
    sim,
    costs,
    network,
    norm_log2,
    scale,
    migration_weight,
    key,
    heat,
    iterations,
    best,
    best_cost,
    prior,
    guide,
):
    for b in range(first, last):
        anneal_layer(
            sim, b, costs, network, norm_log2, scale, migration_weight, key, heat, iterations, best[b], best_cost,
            prior[b], guide,
        )  # fmt: skip


@device
def _bottleneck(first, last, sim, costs, network, norm_log2, operations, candidates, key, chosen, ahead):
    for b in range(first, last):
        bottleneck_layer(sim, b, costs, network, norm_log2, operations, candidates, key, chosen, ahead)


@device
def _swap_greedy(first, last, sim, costs, network, norm_log2, scale, operations):
    for b in range(first, last):
        swap_greedy_layer(sim, b, costs, network, norm_log2, scale, operations)


@device
def _eplb(first, last, slots, loads, n_nodes, n_groups, ints, floats):
    for b in range(first, last):
        eplb_slots(slots[b], loads[b], n_nodes, n_groups, ints[b], floats[b])


@device
def _balance(first, last, slots, loads, moves, copies, weight):
    for b in range(first, last):
        balance_layer(slots[b], loads[b], moves, copies[b], weight[b])


def _over_layers(kernel, first, last, *arguments):
    if last - first == 1:
        kernel(first, last, *arguments)
    else:
        # Searches end early on some layers: small parts keep the threads even.
        spread(lambda a, b: kernel(first + a, first + b, *arguments), last - first, chunks=last - first)


def costs(first, last, *arguments):
    """What annealing makes small, of layers first … last−1."""
    _over_layers(_costs, first, last, *arguments)


def anneal(first, last, *arguments):
    """:func:`anneal_layer` on layers first … last−1."""
    _over_layers(_anneal, first, last, *arguments)


def bottleneck(first, last, *arguments):
    """:func:`bottleneck_layer` on layers first … last−1."""
    _over_layers(_bottleneck, first, last, *arguments)


def swap_greedy(first, last, *arguments):
    """:func:`swap_greedy_layer` on layers first … last−1."""
    _over_layers(_swap_greedy, first, last, *arguments)


def eplb(slots, *arguments):
    """:func:`eplb_slots` on every layer of ``slots`` (L, G, S)."""
    spread(_eplb, len(slots), slots, *arguments)


def balance(slots, *arguments):
    """:func:`balance_layer` on every layer of ``slots`` (L, G, S)."""
    spread(_balance, len(slots), slots, *arguments)
