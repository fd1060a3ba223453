"""Simulated annealing of one layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.passes import change
from clustergym.moe_placement.kernels.replicas import holds
from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.planners.kernels.launch import Objective, draw, objective_us, over_layers


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
def anneal_layer(sim, b, objective, key, heat, iterations, best, best_cost, prior, guide):
    """Anneal from the current placement; ``best`` (G, S) and ``best_cost`` (B,) keep the best placement found.

    A step swaps two replicas, moves one to an empty slot, replaces a spare replica by one of another expert, or deletes
    it (each active expert costs kernel time, so fewer replicas can be faster). ``heat`` has the temperatures of the
    first and the last iteration, as shares of the cost. A share ``guide`` of the steps starts at an expert drawn from
    ``prior`` (E,), which is cumulative; the others start at a random slot.
    """
    n_gpus, n_slots, n_experts, n_passes = (
        sim.slots.shape[1],
        sim.slots.shape[2],
        sim.replicas.shape[1],
        sim.rows.shape[1],
    )
    topology, costs = objective.topology, objective.costs
    cost = objective_us(sim, b, objective)
    first_cost = cost
    _keep_best(sim, b, cost, best, best_cost)
    for i in range(iterations):
        g, s = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
        if guide > 0.0 and draw(key, b) < guide:
            wanted = _draw_expert(key, b, prior)
            g = int(sim.replicas[b, wanted, int(draw(key, b) * sim.n_replicas[b, wanted])])
            s = 0
            while sim.slots[b, g, s] != wanted:
                s += 1
        # A replica of e moves, and one of v in exchange; a GPU of -1 means none.
        e, e_from, e_to, v, v_from, v_to = -1, -1, -1, -1, -1, -1
        here = sim.slots[b, g, s]
        if draw(key, b) < 0.3:
            # Another expert, or none, replaces a spare replica or fills an empty slot.
            if here >= 0 and sim.n_replicas[b, here] < 2:
                continue
            e = int(draw(key, b) * (n_experts + 1))
            if e == n_experts:
                if here < 0:
                    continue
                e, e_from = here, g
            elif holds(sim, b, e, g):
                continue
            else:
                e_to, v, v_from = g, here, g
        else:
            h, t = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
            there = sim.slots[b, h, t]
            if g == h or here == there:
                continue
            if here < 0:
                here, there, g, h = there, here, h, g
            if holds(sim, b, here, h) or (there >= 0 and holds(sim, b, there, g)):
                continue
            e, e_from, e_to, v, v_from, v_to = here, g, h, there, h, g
        change(sim, b, e, e_from, e_to, v, v_from, v_to, topology, costs, n_passes)
        after = objective_us(sim, b, objective)
        temperature = first_cost * heat[0] * (heat[1] / heat[0]) ** (i / iterations)
        if after <= cost or draw(key, b) < math.exp((cost - after) / temperature):
            cost = after
            _keep_best(sim, b, cost, best, best_cost)
        else:
            change(sim, b, e, e_to, e_from, v, v_to, v_from, topology, costs, n_passes)


@device
def _anneal_layers(first, last, sim, objective, key, heat, iterations, best, best_cost, prior, guide):
    for b in range(first, last):
        anneal_layer(sim, b, objective, key, heat, iterations, best[b], best_cost, prior[b], guide)


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
