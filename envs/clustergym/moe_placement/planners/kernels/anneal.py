"""Simulated annealing of one layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.passes import change
from clustergym.moe_placement.kernels.replicas import holds, slot_of
from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.planners.kernels.launch import Objective, draw, objective_us, over_layers
from clustergym.moe_placement.planners.kernels.trial import can_try, try_change

# Shares of the kinds of steps; EMPTY is the part of the first kind that empties a slot.
SPARE, TOGETHER, BUSY, EMPTY = range(4)


@device
def _draw_expert(key, b, prior):
    """An expert drawn from cumulative weights (E,) that end at 1."""
    x, low, high = draw(key, b), 0, prior.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if prior[middle] > x:
            high = middle
        else:
            low = middle + 1
    return low


@device
def _keep_best(sim, b, cost, best, best_cost):
    if cost < best_cost[b]:
        best_cost[b] = cost
        for g in range(best.shape[0]):
            for s in range(best.shape[1]):
                best[g, s] = sim.slots[b, g, s]


@device
def _random_use(sim, b, key, experts):
    """(pass, row, place among the row's experts) of a random use of an expert: busy experts are drawn more often."""
    row = int(sim.rows[b, int(draw(key, b) * sim.rows.shape[1]), int(draw(key, b) * sim.rows.shape[2])])
    return row, int(draw(key, b) * experts.shape[2])


@device
def _replica_of(sim, b, key, e):
    """GPU of a random replica."""
    return int(sim.replicas[b, e, int(draw(key, b) * sim.n_replicas[b, e])])


@device
def _busiest(sim, b, w):
    best = 0
    for g in range(sim.slots.shape[1]):
        if sim.kernel_us[b, w, g] > sim.kernel_us[b, w, best]:
            best = g
    return best


@device
def _propose(sim, b, key, experts, shares, prior, guide, per_node):
    """A random legal change: (e, from, to, v, from, to), or e = −1 if the draw is not legal.

    A replica of e moves, and one of v in exchange; a GPU of −1 means none. The kinds: replace a spare replica (or fill
    or empty a slot), move an expert to the node of another that a token uses too, move an expert off the busiest GPU of
    a pass, and swap two slots.
    """
    n_gpus, n_slots = sim.slots.shape[1], sim.slots.shape[2]
    kind, layer = draw(key, b), experts[b]
    g, s = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    h, t = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    if kind < shares[SPARE]:
        here = int(sim.slots[b, g, s])
        if here >= 0 and sim.n_replicas[b, here] < 2:
            return -1, -1, -1, -1, -1, -1
        if draw(key, b) < shares[EMPTY]:
            return (here, g, -1, -1, -1, -1) if here >= 0 else (-1, -1, -1, -1, -1, -1)
        row, k = _random_use(sim, b, key, experts)
        e = int(layer[row, k])
        if e < 0 or holds(sim, b, e, g):
            return -1, -1, -1, -1, -1, -1
        return e, -1, g, here, g, -1
    wanted = -1
    if guide > 0.0 and draw(key, b) < guide:
        wanted = _draw_expert(key, b, prior)
    elif kind < shares[SPARE] + shares[TOGETHER]:
        row, k = _random_use(sim, b, key, experts)
        other = int(layer[row, int(draw(key, b) * experts.shape[2])])
        wanted = int(layer[row, k])
        if wanted < 0 or other < 0 or wanted == other:
            return -1, -1, -1, -1, -1, -1
        h = _replica_of(sim, b, key, other)
        if draw(key, b) < 0.5:
            h += int(draw(key, b) * per_node) - h % per_node
    elif kind < shares[SPARE] + shares[TOGETHER] + shares[BUSY]:
        g = _busiest(sim, b, int(draw(key, b) * sim.rows.shape[1]))
    if wanted >= 0:
        g = _replica_of(sim, b, key, wanted)
        s = slot_of(sim, b, wanted, g)
    here, there = int(sim.slots[b, g, s]), int(sim.slots[b, h, t])
    if g == h or here == there:
        return -1, -1, -1, -1, -1, -1
    if here < 0:
        here, there, g, h = there, here, h, g
    if holds(sim, b, here, h) or (there >= 0 and holds(sim, b, there, g)):
        return -1, -1, -1, -1, -1, -1
    return here, g, h, there, h, g


@device
def anneal_layer(sim, scratch, b, objective, key, heat, iterations, best, best_cost, experts, shares, prior, guide):
    """Anneal from the current placement; ``best`` (G, S) and ``best_cost`` (B,) keep the best placement found.

    ``heat`` has the temperatures of the first and the last iteration, as shares of the cost. A share ``guide`` of the
    moves is of an expert drawn from ``prior`` (E,), which is cumulative.
    """
    n_passes, topology, costs = sim.rows.shape[1], objective.topology, objective.costs
    cost = objective_us(sim, b, objective)
    first_cost = cost
    _keep_best(sim, b, cost, best, best_cost)
    for i in range(iterations):
        e, e_from, e_to, v, v_from, v_to = _propose(sim, b, key, experts, shares, prior, guide, topology.gpus_per_node)
        if e < 0:
            continue
        temperature = first_cost * heat[0] * (heat[1] / heat[0]) ** (i / iterations)
        limit = cost - temperature * math.log(1.0 - draw(key, b))
        if can_try(sim, b, e, e_from, e_to, v, v_from, v_to, topology):
            if try_change(sim, scratch, b, e, e_from, e_to, v, v_from, v_to, objective) > limit:
                continue
            change(sim, b, e, e_from, e_to, v, v_from, v_to, topology, costs, n_passes)
            cost = objective_us(sim, b, objective)
        else:
            change(sim, b, e, e_from, e_to, v, v_from, v_to, topology, costs, n_passes)
            after = objective_us(sim, b, objective)
            if after > limit:
                change(sim, b, e, e_to, e_from, v, v_to, v_from, topology, costs, n_passes)
                continue
            cost = after
        _keep_best(sim, b, cost, best, best_cost)


@device
def _anneal_layers(
    first, last, sim, scratch, objective, key, heat, iterations, best, best_cost, experts, shares, prior, guide
):
    for b in range(first, last):
        anneal_layer(
            sim, scratch, b, objective, key, heat, iterations, best[b], best_cost, experts, shares, prior[b], guide
        )


@device
def _objectives(first, last, sim, objective, result):
    for b in range(first, last):
        result[b] = objective_us(sim, b, objective)


def anneal(first: int, last: int, *arguments: Any) -> None:
    """:func:`anneal_layer` on layers first … last−1."""
    over_layers(_anneal_layers, first, last, *arguments)


def objectives(sim: SimulationState, objective: Objective, result: npt.NDArray[np.float64]) -> None:
    """Write the objective of each layer to ``result`` (L,)."""
    over_layers(_objectives, 0, len(result), sim, objective, result)
