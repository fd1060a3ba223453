"""Greedy searches of one layer: the best of a few operations, or of all swaps and moves."""

from __future__ import annotations

from typing import Any

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.lookahead import look_ahead
from clustergym.moe_placement.kernels.operations import apply_operation, gpu_pairs, resolve, slot_pairs
from clustergym.moe_placement.kernels.passes import change
from clustergym.moe_placement.kernels.replicas import free_slot, holds, slot_of
from clustergym.moe_placement.kernels.state import OP_ILLEGAL, OP_NOTHING
from clustergym.planners.kernels.launch import draw, objective_us, over_layers


@device
def _pairs_on(sim, b, e, g):
    return slot_pairs(sim, b, g, slot_of(sim, b, e, g), sim.rows.shape[1])


@device
def _choose_candidates(sim, b, candidates, key, chosen):
    """Write experts of the busiest GPU to ``chosen``, heaviest first, then random ones; return their number."""
    n_experts, n_passes = sim.replicas.shape[1], sim.rows.shape[1]
    if candidates == 0:
        chosen[0] = int(draw(key, b) * n_experts)
        return 1
    busiest, most = 0, -1
    for g in range(sim.slots.shape[1]):
        pairs = gpu_pairs(sim, b, g, n_passes)
        if pairs > most:
            busiest, most = g, pairs
    count = 0
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, busiest, s] >= 0:
            chosen[count] = sim.slots[b, busiest, s]
            count += 1
    for i in range(1, count):
        j = i
        while j > 0 and _pairs_on(sim, b, chosen[j], busiest) > _pairs_on(sim, b, chosen[j - 1], busiest):
            chosen[j], chosen[j - 1] = chosen[j - 1], chosen[j]
            j -= 1
    while count < candidates:
        chosen[count] = int(draw(key, b) * n_experts)
        count += 1
    return candidates


@device
def bottleneck_layer(sim, b, objective, operations, candidates, key, chosen, saved_us):
    """Up to ``operations`` times, apply the best operation on one of ``candidates`` experts.

    0 candidates means one random expert, which may not lie on the busiest GPU. Scratch: ``chosen`` and ``saved_us``.
    """
    topology, costs, n_passes = objective.topology, objective.costs, sim.rows.shape[1]
    for _ in range(operations):
        count = _choose_candidates(sim, b, candidates, key, chosen)
        most_us, best_expert, best_node = 0.0, -1, -1
        for i in range(count):
            look_ahead(
                sim, b, chosen[i], topology, costs, objective.norm_log2, n_passes, objective.before_us[b], saved_us
            )
            for node in range(saved_us.shape[0]):
                if saved_us[node] > most_us:
                    most_us, best_expert, best_node = saved_us[node], chosen[i], node
        if best_expert < 0:
            if candidates == 0:
                continue
            return
        kind, source, target, victim = resolve(sim, b, best_expert, best_node, n_passes)
        if kind != OP_NOTHING and kind != OP_ILLEGAL:
            apply_operation(sim, b, best_expert, source, target, victim, topology, costs, n_passes)


@device
def _objective_after(sim, b, e, g, v, h, objective):
    """The objective if ``e`` moved from GPU ``g`` to ``h`` and, if v ≥ 0, ``v`` the other way."""
    topology, costs, n_passes = objective.topology, objective.costs, sim.rows.shape[1]
    change(sim, b, e, g, h, v, h, g, topology, costs, n_passes)
    after = objective_us(sim, b, objective)
    change(sim, b, e, h, g, v, g, h, topology, costs, n_passes)
    return after


@device
def swap_greedy_layer(sim, b, objective, operations):
    """Up to ``operations`` times, apply the best of all swaps of two replicas and moves to empty slots."""
    n_gpus, n_experts = sim.slots.shape[1], sim.replicas.shape[1]
    for _ in range(operations):
        least, best_e, best_from, best_v, best_to = objective_us(sim, b, objective), -1, -1, -1, -1
        for e in range(n_experts):
            for i in range(sim.n_replicas[b, e]):
                g = int(sim.replicas[b, e, i])
                for v in range(e, n_experts):
                    for j in range(n_gpus if v == e else sim.n_replicas[b, v]):
                        # v = e stands for a move to an empty slot.
                        h, other = (j, -1) if v == e else (int(sim.replicas[b, v, j]), v)
                        if g == h or holds(sim, b, e, h) or (v != e and holds(sim, b, v, g)):
                            continue
                        if v == e and free_slot(sim, b, h) < 0:
                            continue
                        after = _objective_after(sim, b, e, g, other, h, objective)
                        if after < least:
                            least, best_e, best_from, best_v, best_to = after, e, g, other, h
        if best_e < 0:
            return
        apply_operation(
            sim, b, best_e, best_from, best_to, best_v, objective.topology, objective.costs, sim.rows.shape[1]
        )


@device
def _bottleneck_layers(first, last, sim, objective, operations, candidates, key, chosen, saved_us):
    for b in range(first, last):
        bottleneck_layer(sim, b, objective, operations, candidates, key, chosen[b], saved_us[b])


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
