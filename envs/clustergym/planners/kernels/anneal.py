"""Simulated annealing of one layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import device
from clustergym.moe_placement.kernels.passes import change
from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.planners.kernels.launch import Objective, draw, objective_us, over_layers
from clustergym.planners.kernels.proposals import propose
from clustergym.planners.kernels.trial import can_try, try_change


@device
def _keep_best(sim, b, cost, best, best_cost):
    if cost < best_cost[b]:
        best_cost[b] = cost
        for g in range(best.shape[0]):
            for s in range(best.shape[1]):
                best[g, s] = sim.slots[b, g, s]


@device
def anneal_layer(sim, scratch, b, objective, key, heat, iterations, best, best_cost, shares, sample):
    """Anneal from the current placement; ``best`` (G, S) and ``best_cost`` (B,) keep the best placement found.

    ``heat`` has the temperatures of the first and the last iteration, as shares of the cost.
    """
    n_passes, topology, costs = sim.rows.shape[1], objective.topology, objective.costs
    cost = objective_us(sim, b, objective)
    first_cost = cost
    _keep_best(sim, b, cost, best, best_cost)
    for i in range(iterations):
        e, e_from, e_to, v, v_from, v_to = propose(sim, b, key, sample[b], shares, topology.gpus_per_node)
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
def _anneal_layers(first, last, sim, scratch, objective, key, heat, iterations, best, best_cost, shares, sample):
    for b in range(first, last):
        anneal_layer(sim, scratch, b, objective, key, heat, iterations, best[b], best_cost, shares, sample)


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
