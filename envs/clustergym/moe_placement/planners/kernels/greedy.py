"""Greedy searches of one layer: the best of a few operations, or of all swaps and moves."""

from __future__ import annotations

from typing import Any

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.lookahead import look_ahead
from clustergym.moe_placement.kernels.operations import apply_operation, change, gpu_pairs, resolve
from clustergym.moe_placement.kernels.replicas import holds
from clustergym.moe_placement.kernels.state import OP_ILLEGAL, OP_NOTHING
from clustergym.moe_placement.planners.kernels.launch import draw, objective_us, over_layers


@device
def _choose_candidates(sim, b, candidates, key, chosen):
    """Write experts of the busiest GPU to ``chosen``, heaviest first, then random ones; return their number."""
    n_experts = sim.pairs.shape[2]
    if candidates == 0:
        chosen[0] = int(draw(key, b) * n_experts)
        return 1
    busiest, most = 0, -1
    for g in range(sim.slots.shape[1]):
        pairs = gpu_pairs(sim, b, 0, g)
        if pairs > most:
            busiest, most = g, pairs
    count = 0
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, busiest, s] >= 0:
            chosen[count] = sim.slots[b, busiest, s]
            count += 1
    for i in range(1, count):
        j = i
        while j > 0 and sim.pairs[b, 0, chosen[j], busiest] > sim.pairs[b, 0, chosen[j - 1], busiest]:
            chosen[j], chosen[j - 1] = chosen[j - 1], chosen[j]
            j -= 1
    while count < candidates:
        chosen[count] = int(draw(key, b) * n_experts)
        count += 1
    return candidates


@device
def bottleneck_layer(sim, b, costs, network, norm_log2, operations, candidates, key, chosen, saved_us):
    """Up to ``operations`` times, apply the best operation on one of ``candidates`` experts.

    0 candidates means one random expert, which may not lie on the busiest GPU. Scratch: ``chosen`` and ``saved_us``.
    """
    for _ in range(operations):
        count = _choose_candidates(sim, b, candidates, key, chosen)
        most_us, best_expert, best_node = 0.0, -1, -1
        for i in range(count):
            look_ahead(sim, b, chosen[i], costs, network, norm_log2, saved_us)
            for node in range(saved_us.shape[0]):
                if saved_us[node] > most_us:
                    most_us, best_expert, best_node = saved_us[node], chosen[i], node
        if best_expert < 0:
            if candidates == 0:
                continue
            return
        kind, source, target, victim = resolve(sim, b, best_expert, best_node)
        if kind != OP_NOTHING and kind != OP_ILLEGAL:
            apply_operation(sim, b, best_expert, source, target, victim, network, 1)


@device
def _put_back(sim, b, g, s, e):
    """Put ``e`` back into slot ``s``: undoing a change may leave it in another empty slot of the GPU."""
    for x in range(sim.slots.shape[2]):
        if sim.slots[b, g, x] == e:
            sim.slots[b, g, x] = -1
    sim.slots[b, g, s] = e


@device
def swap_greedy_layer(sim, b, objective, operations):
    """Up to ``operations`` times, apply the best of all swaps of two replicas and moves to empty slots."""
    n_gpus, n_slots, network = sim.slots.shape[1], sim.slots.shape[2], objective.network
    for _ in range(operations):
        least, best_e, best_from, best_v, best_to = objective_us(sim, b, objective), -1, -1, -1, -1
        for g in range(n_gpus):
            for h in range(n_gpus):
                for s in range(n_slots):
                    for t in range(n_slots):
                        e, v = sim.slots[b, g, s], sim.slots[b, h, t]
                        # Each swap is tried once, each move from either side.
                        if e < 0 or g == h or e == v or (v >= 0 and g > h):
                            continue
                        if holds(sim, b, e, h) or (v >= 0 and holds(sim, b, v, g)):
                            continue
                        change(sim, b, e, g, h, v, h, g, network, 1)
                        after = objective_us(sim, b, objective)
                        change(sim, b, e, h, g, v, g, h, network, 1)
                        # The loops go over slots, so each replica must return to its slot.
                        _put_back(sim, b, g, s, e)
                        if v >= 0:
                            _put_back(sim, b, h, t, v)
                        if after < least:
                            least, best_e, best_from, best_v, best_to = after, e, g, v, h
        if best_e < 0:
            return
        apply_operation(sim, b, best_e, best_from, best_to, best_v, network, 1)


@device
def _bottleneck_layers(first, last, sim, costs, network, norm_log2, operations, candidates, key, chosen, saved_us):
    for b in range(first, last):
        bottleneck_layer(sim, b, costs, network, norm_log2, operations, candidates, key, chosen[b], saved_us[b])


@device
def _swap_greedy_layers(first, last, sim, objective, operations):
    for b in range(first, last):
        swap_greedy_layer(sim, b, objective, operations)


def bottleneck(first: int, last: int, *arguments: Any) -> None:
    """:func:`bottleneck_layer` on layers first … last−1."""
    over_layers(_bottleneck_layers, first, last, *arguments)


def swap_greedy(first: int, last: int, *arguments: Any) -> None:
    """:func:`swap_greedy_layer` on layers first … last−1."""
    over_layers(_swap_greedy_layers, first, last, *arguments)
