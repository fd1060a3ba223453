"""Expert-parallel load balancing with the interface of deepseek-ai/EPLB.

``rebalance_experts`` takes the same arguments and returns the same tensors as the function of that name in eplb.py. No
GPU gets an expert twice while it has room for another one, and it runs compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Slots = npt.NDArray[np.int64]
"""(L, P) expert in each slot. Slot p is on GPU p // (P / GPUs)."""


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place the replicas of all experts so that the GPUs have equal loads.

    Args:
        weight: (L, E) load of each expert of each layer.
        num_replicas: slots per layer, P, a multiple of ``num_gpus``.
        num_groups: expert groups. If they divide over the nodes, the experts of a group stay on one node.
        num_nodes: nodes, whose GPUs have fast links.
        num_gpus: GPUs, a multiple of ``num_nodes``.

    Returns:
        physical_to_logical_map (L, P), logical_to_physical_map (L, E, X) padded with −1, expert_count (L, E).
    """
    import torch  # the engine has it; planners do without

    slots = plan_slots(weight.float().cpu().numpy(), num_replicas, num_groups, num_nodes, num_gpus)
    logical_to_physical, count = invert(slots, weight.shape[1])
    return torch.from_numpy(slots), torch.from_numpy(logical_to_physical), torch.from_numpy(count)


def plan_slots(
    loads: npt.NDArray[np.floating], n_physical: int, n_groups: int, n_nodes: int, n_gpus: int, old: Slots | None = None
) -> Slots:
    """The slots for (L, E) loads. With the ``old`` slots, GPUs and slots are renamed so that few experts move."""
    from clustergym.planners.kernels import loads as kernels

    n_layers, n_experts = loads.shape
    check_sizes(n_experts, n_physical, n_groups, n_nodes, n_gpus)
    per_gpu = n_physical // n_gpus
    placement = np.empty((n_layers, n_gpus, min(per_gpu, n_experts)), np.int16)
    ints, floats = np.empty((n_layers, 3, n_experts), np.int32), np.empty((n_layers, n_experts + n_gpus))
    values = np.ascontiguousarray(np.nan_to_num(loads, nan=0.0, posinf=0.0).clip(min=0.0), dtype=np.float64)
    kernels.eplb(placement, values, n_nodes, 0 if n_groups % n_nodes else n_groups, ints, floats)
    slots = np.full((n_layers, n_gpus, per_gpu), -1, np.int64)
    slots[:, :, : placement.shape[2]] = placement
    fill(slots, values, n_groups, n_nodes)
    planned = slots.reshape(n_layers, n_physical)
    if old is not None and old.shape == planned.shape:
        return keep_in_place(planned, old, n_nodes, n_gpus)
    return planned


def check_sizes(n_experts: int, n_physical: int, n_groups: int, n_nodes: int, n_gpus: int) -> None:
    """Raise a ValueError that names the argument of the engine that cannot work."""
    for name, value in (("num_groups", n_groups), ("num_nodes", n_nodes), ("num_gpus", n_gpus)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1")
    if n_gpus % n_nodes:
        raise ValueError(f"num_gpus is {n_gpus}: expected a multiple of num_nodes = {n_nodes}")
    if n_physical % n_gpus or n_physical < n_experts:
        raise ValueError(
            f"num_replicas is {n_physical}: expected a multiple of num_gpus = {n_gpus}, at least {n_experts} experts"
        )
    if n_groups % n_nodes == 0 and n_experts % n_groups:
        raise ValueError(f"{n_experts} experts do not divide into num_groups = {n_groups}")


def fill(slots: Slots, loads: npt.NDArray[np.float64], n_groups: int, n_nodes: int) -> None:
    """Fill empty slots (−1) of (L, G, S) with the lightest expert of the node that the GPU does not hold yet."""
    gpus_per_node = slots.shape[1] // n_nodes
    for l, g, s in np.argwhere(slots < 0):
        node = slots[l, g // gpus_per_node * gpus_per_node :][:gpus_per_node] if n_groups % n_nodes == 0 else slots[l]
        members = np.unique(node[node >= 0])
        others = np.setdiff1d(members, slots[l, g])
        choice = others if len(others) else members
        slots[l, g, s] = choice[loads[l, choice].argmin()]


def keep_in_place(new: Slots, old: Slots, n_nodes: int, n_gpus: int) -> Slots:
    """``new`` with the GPUs of each node, and the slots of each GPU, reordered so that few experts change their slot.

    The GPUs of a node are equal, so which of them gets which set of experts is free.
    """
    from clustergym.plans import transition

    planned, live = (slots.reshape(len(slots), n_gpus, -1).astype(np.int16) for slots in (new, old))
    return transition.keep_in_place(planned, live, n_gpus // n_nodes).reshape(new.shape).astype(np.int64)


def invert(slots: Slots, n_experts: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """((L, E, X) slots of each expert padded with −1, (L, E) number of slots of each expert)."""
    n_layers, n_physical = slots.shape
    count = np.zeros((n_layers, n_experts), np.int64)
    np.add.at(count, (np.arange(n_layers)[:, None], slots), 1)
    where = np.full((n_layers, n_experts, int(count.max())), -1, np.int64)
    filled = np.zeros_like(count)
    for p in range(n_physical):
        experts = slots[:, p]
        rows = np.arange(n_layers)
        where[rows, experts, filled[rows, experts]] = p
        filled[rows, experts] += 1
    return where, count
