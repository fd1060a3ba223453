"""Placements that keep a copy of every expert whatever single GPU, or node, is lost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement
from clustergym.planners.groups import replica_counts

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


def survivable(loads: npt.NDArray[np.float64], n_slots: int, group_of: npt.NDArray[np.int64]) -> Placement:
    """(L, G, S) a placement that survives, for a search to begin with: replicas as EPLB chooses them, but at least two.

    They are dealt over the GPUs, heaviest first, and neighbours in the order of the GPUs are in different groups. An
    expert has at most as many replicas as there are GPUs, so no GPU gets it twice.
    """
    n_gpus = len(group_of)
    check_room(loads.shape[1], n_gpus, n_slots, int(group_of.max()) + 1)
    place_in_group = np.arange(n_gpus) - np.searchsorted(group_of, group_of)
    order = np.lexsort((group_of, place_in_group))
    placement = np.full((len(loads), n_slots, n_gpus), -1, np.int16)
    for slots, layer in zip(placement, loads, strict=True):
        copies = replica_counts(layer, n_gpus, n_gpus * n_slots, COPIES)
        heaviest = np.argsort(-layer / copies, kind="stable")
        dealt = np.repeat(heaviest, copies[heaviest])
        slots.reshape(-1)[: len(dealt)] = dealt
    found = np.empty((len(loads), n_gpus, n_slots), np.int16)
    found[:, order] = placement.transpose(0, 2, 1)
    return found
