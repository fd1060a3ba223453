"""Placements that keep a copy of every expert whatever single GPU, or node, is lost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement

COPIES = 2
"""Two copies on different GPUs (or nodes) are needed, and enough."""


def check_room(n_experts: int, n_gpus: int, n_slots: int, groups: int) -> None:
    """Raise a ValueError if two copies of every expert have no room, or nowhere to be apart."""
    if groups < COPIES:
        raise ValueError("--survive needs at least two GPUs (or nodes): there is one")
    if n_gpus * n_slots < COPIES * n_experts:
        raise ValueError(
            f"--survive needs {COPIES} copies of {n_experts} experts, but {n_gpus} GPUs × {n_slots} slots hold "
            f"{n_gpus * n_slots}: give --slots {-(-COPIES * n_experts // n_gpus)} or more"
        )


def survives(placement: Placement, n_experts: int, group_of: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(L,) whether every expert has copies in two groups of GPUs. ``group_of`` (G,) is the group of each GPU."""
    held = np.zeros((len(placement), n_experts, int(group_of.max()) + 1), bool)
    layers, groups = np.arange(len(placement))[:, None, None], group_of[None, :, None]
    filled = placement >= 0
    where = np.broadcast_arrays(layers, placement, groups)
    held[tuple(index[filled] for index in where)] = True
    return np.asarray((held.sum(2) >= COPIES).all(1))


def survivable(loads: npt.NDArray[np.float64], n_slots: int, group_of: npt.NDArray[np.int64]) -> Placement:
    """(L, G, S) replicas as EPLB chooses them, but at least two, packed heaviest first with two in different groups."""
    check_room(loads.shape[1], len(group_of), n_slots, int(group_of.max()) + 1)
    return np.stack([_pack(layer, n_slots, group_of) for layer in loads])


def _pack(loads: npt.NDArray[np.float64], n_slots: int, group_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
    n_gpus, copies = len(group_of), np.full(len(loads), min(COPIES, len(group_of)))
    for _ in range(n_gpus * n_slots - copies.sum()):
        share = np.where(copies < n_gpus, loads / copies, -1.0)
        if share.max() < 0:
            break
        copies[share.argmax()] += 1
    slots, work = np.full((n_gpus, n_slots), -1, np.int16), np.zeros(n_gpus)
    used = np.zeros(n_gpus, int)
    order = sorted(((loads[e] / n, e) for e, n in enumerate(copies) for _ in range(n)), key=lambda one: -one[0])
    for weight, e in order:
        allowed = _allowed(slots, e, group_of)
        free = np.flatnonzero(allowed & (used < n_slots))
        if len(free):
            g = int(free[work[free].argmin()])
        else:
            g = _make_room(
                slots, e, np.flatnonzero(used < n_slots), np.flatnonzero(allowed), group_of, work, loads, copies
            )
            used[int(np.flatnonzero((slots >= 0).sum(1) > used)[0])] += 1
            work[g] += weight
            continue
        slots[g, used[g]] = e
        used[g] += 1
        work[g] += weight
    return slots


def _allowed(slots: npt.NDArray[np.int16], e: int, group_of: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(G,) GPUs that may get another copy of ``e``: not where it is; while it is in one group only, in another one."""
    holds = (slots == e).any(1)
    groups = np.unique(group_of[holds])
    return ~holds & ((group_of != groups[0]) if len(groups) == 1 else True)


def _make_room(
    slots: npt.NDArray[np.int16],
    e: int,
    free: npt.NDArray[np.int64],
    allowed: npt.NDArray[np.int64],
    group_of: npt.NDArray[np.int64],
    work: npt.NDArray[np.float64],
    loads: npt.NDArray[np.float64],
    copies: npt.NDArray[np.int64],
) -> int:
    """Put ``e`` in place of another expert, which moves to a GPU with a free slot. Returns the GPU of ``e``."""
    for g in allowed[work[allowed].argsort()]:
        for s, other in enumerate(slots[g]):
            rest = np.delete(group_of, g)[(np.delete(slots, g, 0) == other).any(1)]
            for target in free:
                apart = len(np.unique([*rest, group_of[target]])) >= min(COPIES, len(rest) + 1)
                if other not in slots[target] and apart:
                    slots[target, int(np.flatnonzero(slots[target] < 0)[0])] = other
                    slots[g, s] = e
                    moved = loads[other] / copies[other]
                    work[target] += moved
                    work[g] -= moved
                    return int(g)
    raise ValueError("no placement found that survives: give one more slot per GPU")
