"""Replica choice by a linear program (SGLang ``lp``, DeepSeek's LPLB): the largest GPU load of a pass is minimal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array

from clustergym.moe_placement.kernels.passes import count_all
from clustergym.moe_placement.kernels.replicas import hash31
from clustergym.moe_placement.kernels.state import Costs, SimulationState, Topology


def optimal_shares(loads: npt.NDArray[np.int32], held: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.float64], float]:
    """Split the loads (E,) over the GPUs that hold each expert, ``held`` (E, G).

    Returns (tokens of each expert on each GPU (E, G), the largest GPU load).
    """
    experts, gpus = np.nonzero(held)
    n = len(experts)
    variables = np.arange(n)
    # Variables: the tokens of each replica, then the largest load. Each expert's replicas share its load; no GPU has
    # more than the largest load.
    shared = csr_array((np.ones(n), (experts, variables)), shape=(len(loads), n + 1))
    values = np.concatenate([np.ones(n), -np.ones(held.shape[1])])
    where = (np.concatenate([gpus, np.arange(held.shape[1])]), np.concatenate([variables, np.full(held.shape[1], n)]))
    below = csr_array((values, where), shape=(held.shape[1], n + 1))
    objective = np.zeros(n + 1)
    objective[n] = 1.0
    result = linprog(objective, A_ub=below, b_ub=np.zeros(held.shape[1]), A_eq=shared, b_eq=loads, method="highs")
    if result.status != 0:
        raise RuntimeError(f"the linear program of the dispatch failed: {result.message}")
    split = np.zeros(held.shape)
    split[experts, gpus] = np.maximum(result.x[:n], 0.0)
    return split, float(result.x[n])


def split_by_program(state: SimulationState, topology: Topology, costs: Costs) -> None:
    """Share the tokens of every layer and pass over the replicas as the linear program says, and count again.

    A token chooses among the replicas of an expert by a hash, with the program's shares as probabilities.
    """
    n_layers, n_passes, n_tokens = state.rows.shape
    # All layers serve the same tokens. The plain function works on arrays; with NUMBA_DISABLE_JIT it is the only one.
    chances = getattr(hash31, "py_func", hash31)(state.rows[0].astype(np.int64)) / 2**31  # (P, T)
    for b in range(n_layers):
        held = np.zeros((state.replicas.shape[1], state.slots.shape[1]), bool)
        for g, slots in enumerate(state.slots[b]):
            held[slots[slots >= 0], g] = True
        several = {e: np.nonzero(state.slots[b] == e) for e in np.flatnonzero(held.sum(1) > 1)}
        for w in range(n_passes):
            split, _ = optimal_shares(state.load[b, w], held)
            for e, (gpus, slots) in several.items():
                words = np.bitwise_or.reduce(state.slot_tokens[b, w, gpus, slots], axis=0)
                uses = np.unpackbits(words.view(np.uint8), bitorder="little")[:n_tokens].astype(bool)
                limits = np.cumsum(split[e, gpus]) / max(1, state.load[b, w, e])
                chosen = np.minimum(np.searchsorted(limits, chances[w], side="right"), len(gpus) - 1)
                for i, place in enumerate(zip(gpus, slots, strict=True)):
                    run = np.zeros(64 * len(words), np.uint8)
                    run[:n_tokens] = uses & (chosen == i)
                    state.slot_tokens[b, w][place] = np.packbits(run, bitorder="little").view(np.uint64)
                    state.slot_pairs[b, w][place] = run.sum()
            count_all(state, b, w, topology, costs)
