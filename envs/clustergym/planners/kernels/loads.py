"""Kernels that look only at the load of each expert."""

from __future__ import annotations

from typing import Any

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.simulator import Placement


@device
def _on_gpu(slots, g, e):
    for s in range(slots.shape[1]):
        if slots[g, s] == e:
            return True
    return False


@device
def balance_layer(slots, load, moves, copies, gpu_load):
    """Up to ``moves`` times, the best swap or move between the GPUs with the highest and the lowest load.

    The replicas of an expert share its load (E,) evenly. Scratch: ``copies`` (E,) int32, ``gpu_load`` (G,) float64.
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
            gpu_load[g] = 0.0
            for s in range(n_slots):
                if slots[g, s] >= 0:
                    gpu_load[g] += load[slots[g, s]] / copies[slots[g, s]]
            if gpu_load[g] > gpu_load[heavy]:
                heavy = g
            if gpu_load[g] < gpu_load[light]:
                light = g
        gap = gpu_load[heavy] - gpu_load[light]
        smallest, best_s, best_t = gap, -1, -1
        for s in range(n_slots):
            for t in range(n_slots):
                e, v = slots[heavy, s], slots[light, t]
                if e < 0 or e == v or _on_gpu(slots, light, e) or (v >= 0 and _on_gpu(slots, heavy, v)):
                    continue
                shifted = load[e] / copies[e] - (load[v] / copies[v] if v >= 0 else 0.0)
                left = abs(gap - 2.0 * shifted)
                if left < smallest:
                    smallest, best_s, best_t = left, s, t
        if best_s < 0:
            return
        slots[heavy, best_s], slots[light, best_t] = slots[light, best_t], slots[heavy, best_s]


@device
def _balance_layers(first, last, slots, loads, moves, copies, gpu_load):
    for b in range(first, last):
        balance_layer(slots[b], loads[b], moves, copies[b], gpu_load[b])


@device
def _eplb_layers(first, last, slots, loads, n_nodes, n_groups, ints, floats):
    for b in range(first, last):
        eplb_slots(slots[b], loads[b], n_nodes, n_groups, ints[b], floats[b])


def balance(slots: Placement, *arguments: Any) -> None:
    """:func:`balance_layer` on every layer of ``slots`` (L, G, S)."""
    spread(_balance_layers, len(slots), slots, *arguments)


def eplb(slots: Placement, *arguments: Any) -> None:
    """:func:`~clustergym.moe_placement.kernels.eplb.eplb_slots` on every layer of ``slots`` (L, G, S)."""
    spread(_eplb_layers, len(slots), slots, *arguments)
