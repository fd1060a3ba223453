"""Search for the best placement node by node. See :mod:`clustergym.planners.exact_nodes`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import device


@device
def _write_times(names, n, sent_us, intra, inter, kernel, migration, times):
    """Write what the GPUs of node ``n`` with these fillings add to each maximum: (intra, inter, kernel) of each pass,
    then migration.
    """
    passes, gpus = kernel.shape[0], names.shape[0]
    for p in range(passes):
        near, far, slowest = 0.0, sent_us[p], 0.0
        for j in range(gpus):
            sent, received = 0.0, 0.0
            for other in range(gpus):
                if other != j:
                    sent += intra[p, n, j, names[other]]
                    received += intra[p, n, other, names[j]]
            near = max(near, sent, received)
            far = max(far, inter[p, n, names[j]])
            slowest = max(slowest, kernel[p, names[j]])
        times[3 * p], times[3 * p + 1], times[3 * p + 2] = near, far, slowest
    times[3 * passes] = 0.0
    for j in range(gpus):
        times[3 * passes] = max(times[3 * passes], migration[n * gpus + j, names[j]])


@device
def _joint_time(one, other, start_us, floor_us):
    """µs of a placement with these maxima on one and on the other node."""
    passes, total = one.shape[0] // 3, 0.0
    for p in range(passes):
        total += max(one[3 * p], other[3 * p]) + max(one[3 * p + 1], other[3 * p + 1])
        total += max(floor_us, start_us + max(one[3 * p + 2], other[3 * p + 2]))
    return total / passes + max(one[3 * passes], other[3 * passes])


@device
def _least(times, kept, n_kept, least):
    """Write the least that any of the kept orders adds to each maximum."""
    for i in range(least.shape[0]):
        least[i] = times[kept[0], i]
        for k in range(1, n_kept):
            least[i] = min(least[i], times[kept[k], i])


@device
def _keep(times, kept, n_kept, other, start_us, floor_us, best_us):
    """Drop the orders that are not better than ``best_us`` if the other node adds ``other``; returns how many stay."""
    n = 0
    for k in range(n_kept):
        if _joint_time(times[kept[k]], other, start_us, floor_us) < best_us:
            kept[n] = kept[k]
            n += 1
    return n


@device
def _write_bound(names, local, experts, n, gpus, sent_us, intra, inter, kernel, work, bound):
    """Write what node ``n`` with these experts adds to each maximum at least, in any order."""
    for p in range(kernel.shape[0]):
        near, far, slowest, together = 0.0, sent_us[p], 0.0, 0.0
        for i in range(experts.shape[0]):
            # The expert is somewhere, with some others.
            least_near, least_far, least_kernel = np.inf, np.inf, np.inf
            for f in range(local.shape[0]):
                for s in range(local.shape[1]):
                    if local[f, s] == i:
                        for j in range(gpus):
                            received = 0.0
                            for other in range(gpus):
                                if other != j:
                                    received += intra[p, n, other, names[f]]
                            least_near = min(least_near, received)
                        least_far = min(least_far, inter[p, n, names[f]])
                        least_kernel = min(least_kernel, kernel[p, names[f]])
            near, far, slowest = max(near, least_near), max(far, least_far), max(slowest, least_kernel)
            together += work[p, experts[i]]
        bound[3 * p], bound[3 * p + 1], bound[3 * p + 2] = near, far, max(slowest, together / gpus)
    bound[3 * kernel.shape[0]] = 0.0


class Scratch(NamedTuple):
    """Memory of :func:`search`: compiled code does not allocate."""

    times: npt.NDArray[np.float64]
    """(nodes, orders, 3·P + 1) what each order adds to each maximum"""
    names: npt.NDArray[np.int64]
    """(nodes, fillings of a node)"""
    kept: npt.NDArray[np.int64]
    """(nodes, orders) orders that may be part of a better placement"""
    n_kept: npt.NDArray[np.int64]
    """(nodes,)"""
    filling: npt.NDArray[np.int64]
    """(GPUs of a node,)"""
    least: npt.NDArray[np.float64]
    """(nodes + 1, 3·P + 1) the least that a node adds; zeros at the end"""


@device
def search(
    divisions, sent, local, orders, number, intra, inter, kernel, work, migration, start_us, floor_us, best_us, best,
    scratch,
):  # fmt: skip
    """Write the fillings of the best placement below ``best_us`` into ``best`` (nodes, GPUs of a node).

    Returns its time, or ``best_us`` if there is none.

    Args:
        divisions: (divisions, nodes, experts of a node).
        sent: (divisions, P) µs of copies between nodes that follow from the division.
        local, orders: fillings of positions among the experts of a node; every order of them.
        number: number of a filling by the bits of its experts.
        intra: (P, nodes, GPUs of a node, fillings) µs of copies from a GPU to one with that filling in its node.
        inter: (P, nodes, fillings) µs of copies from the other node.
        kernel: (P, fillings) µs.
        work: (P, E) what an expert adds to the kernel of its GPU at least.
        migration: (G, fillings) µs.
    """
    nodes, n_orders, gpus = divisions.shape[1], orders.shape[0], orders.shape[1]
    times, names, kept, n_kept, filling, least = scratch
    nothing = least[nodes]
    for d in range(divisions.shape[0]):
        for n in range(nodes):
            n_kept[n] = 0
        for n in range(nodes):
            for f in range(local.shape[0]):
                bits = 0
                for s in range(local.shape[1]):
                    bits |= 1 << divisions[d, n, local[f, s]]
                names[n, f] = number[bits]
            _write_bound(names[n], local, divisions[d, n], n, gpus, sent[d], intra, inter, kernel, work, least[n])
        if _joint_time(least[0], least[nodes - 1], start_us, floor_us) >= best_us:
            continue
        for n in range(nodes):
            for o in range(n_orders):
                for j in range(gpus):
                    filling[j] = names[n, orders[o, j]]
                _write_times(filling, n, sent[d], intra, inter, kernel, migration, times[n, o])
                kept[n, o] = o
            n_kept[n] = _keep(times[n], kept[n], n_orders, nothing, start_us, floor_us, best_us)
            if n_kept[n] == 0:
                break
            _least(times[n], kept[n], n_kept[n], least[n])
        if n_kept[0] == 0 or n_kept[nodes - 1] == 0:
            continue
        if nodes == 2:
            n_kept[1] = _keep(times[1], kept[1], n_kept[1], least[0], start_us, floor_us, best_us)
            if n_kept[1] > 0:
                _least(times[1], kept[1], n_kept[1], least[1])
                n_kept[0] = _keep(times[0], kept[0], n_kept[0], least[1], start_us, floor_us, best_us)
        for a in range(n_kept[0]):
            one = times[0, kept[0, a]]
            if nodes == 2 and _joint_time(one, least[1], start_us, floor_us) >= best_us:
                continue
            for b in range(n_kept[1] if nodes == 2 else 1):
                other = times[1, kept[1, b]] if nodes == 2 else nothing
                total = _joint_time(one, other, start_us, floor_us)
                if total < best_us:
                    best_us = total
                    for j in range(gpus):
                        best[0, j] = names[0, orders[kept[0, a], j]]
                        if nodes == 2:
                            best[1, j] = names[1, orders[kept[1, b], j]]
    return best_us
