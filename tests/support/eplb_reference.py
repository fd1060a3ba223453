"""EPLB as its authors describe it (deepseek-ai/EPLB), in plain loops: the reference that ours is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pack(weights: Sequence[float], n_packs: int) -> list[int]:
    """Pack of each item: heaviest first onto the lightest pack with room. All packs get the same number of items."""
    room = len(weights) // n_packs
    totals, items = [0.0] * n_packs, [0] * n_packs
    packs = [-1] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        best = min((p for p in range(n_packs) if items[p] < room), key=totals.__getitem__)
        packs[i] = best
        totals[best] += weights[i]
        items[best] += 1
    return packs


def eplb(
    load: npt.NDArray[np.float64], n_physical: int, n_groups: int, n_nodes: int, n_gpus: int
) -> npt.NDArray[np.int64]:
    """(G, S) expert in each slot. An expert may be twice on a GPU."""
    if n_groups % n_nodes:
        n_groups = n_nodes = 1  # the global variant
    size = len(load) // n_groups
    node_of = pack(load.reshape(n_groups, size).sum(1).tolist(), n_nodes)
    gpus = []
    for node in range(n_nodes):
        members = [e for e in range(len(load)) if node_of[e // size] == node]
        copies = dict.fromkeys(members, 1)
        physical = list(members)
        while len(physical) < n_physical // n_nodes:
            hottest = max(members, key=lambda e: load[e] / copies[e])
            copies[hottest] += 1
            physical.append(hottest)
        packs = pack([load[e] / copies[e] for e in physical], n_gpus // n_nodes)
        gpus += [[e for e, p in zip(physical, packs, strict=True) if p == g] for g in range(n_gpus // n_nodes)]
    return np.array(gpus)


def balancedness(slots: npt.NDArray[np.integer], load: npt.NDArray[np.float64]) -> float:
    """Mean over maximum of the GPU loads, if every slot of an expert gets the same share. −1 is an empty slot."""
    copies = np.bincount(slots[slots >= 0], minlength=len(load))
    share = np.append(load / np.maximum(copies, 1), 0.0)
    gpus = share[slots].sum(1)
    return float(gpus.mean() / gpus.max())
