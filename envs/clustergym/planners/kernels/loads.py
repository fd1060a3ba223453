"""Kernels that look only at the load of each expert."""

from __future__ import annotations

from typing import Any

from clustergym.common.compiling import device
from clustergym.common.threads import parallel_for
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.simulator import Placement


@device
def _eplb_layers(first, last, slots, loads, n_nodes, n_groups, ints, floats):
    for b in range(first, last):
        eplb_slots(slots[b], loads[b], n_nodes, n_groups, ints[b], floats[b])


def eplb(slots: Placement, *arguments: Any) -> None:
    """:func:`~clustergym.moe_placement.kernels.eplb.eplb_slots` on every layer of ``slots`` (L, G, S)."""
    parallel_for(_eplb_layers, len(slots), slots, *arguments)
