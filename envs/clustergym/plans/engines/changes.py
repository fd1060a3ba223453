"""What it takes to change from one plan to another: experts that move, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.plans.engines.base import EnginePlan
from clustergym.traces.readers.slot_plans import PlanError


@dataclass(frozen=True)
class PlanChange:
    """Experts that GPUs receive when one plan replaces another. An expert that stays on its GPU does not move."""

    moves: int
    """Experts received, over all layers and GPUs."""
    slots: int
    """Slots of the new plan, over all layers and GPUs."""
    layers: int
    """Layers in which an expert moves."""
    between_nodes: int
    """Moves whose expert was on no GPU of the same node."""
    n_bytes: float
    seconds: float
    """Time of the transfer if all GPUs receive at once: that of the GPU that receives longest."""

    @property
    def duration(self) -> str:
        """``seconds`` for a reader."""
        return f"{self.seconds:.2f} s" if self.seconds >= 0.1 else f"{1000 * self.seconds:.3g} ms"

    def describe(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return (
            f"{self.moves:,} of {self.slots:,} experts move ({self.between_nodes:,} of them between nodes), in "
            f"{layers}: {self.n_bytes / 1e9:.2f} GB, {self.duration} if all GPUs receive at once"
        )


def compare_plans(old: EnginePlan, new: EnginePlan, cluster: ClusterSpec) -> PlanChange:
    """The experts that each GPU receives, from its own node if one of its GPUs holds the expert."""
    if old.n_gpus != new.n_gpus or old.n_gpus != cluster.n_gpus:
        raise PlanError(f"plans of {old.n_gpus} and {new.n_gpus} GPUs, on a cluster of {cluster.n_gpus}")
    shared = sorted(set(old.layer_ids.tolist()) & set(new.layer_ids.tolist()))  # MTP layers may be in one only
    if not shared:
        raise PlanError("the plans have no layer in common")
    before, after = _held(old, shared), _held(new, shared)
    received = after & ~before  # (L, G, E)
    shape = (len(before), cluster.n_nodes, cluster.gpus_per_node, before.shape[2])
    on_node = np.repeat(before.reshape(shape).any(2), cluster.gpus_per_node, axis=1)
    intra, inter = received & on_node, received & ~on_node
    size = new.model.expert_bytes
    per_gpu = size * (intra.sum((0, 2)) / cluster.intra_gb_s + inter.sum((0, 2)) / cluster.inter_gb_s) / 1e9
    return PlanChange(
        moves=int(received.sum()),
        slots=len(shared) * new.n_physical,
        layers=int(received.any((1, 2)).sum()),
        between_nodes=int(inter.sum()),
        n_bytes=float(size * received.sum()),
        seconds=float(per_gpu.max()),
    )


def _held(plan: EnginePlan, layers: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """(L, G, E) whether a GPU holds an expert."""
    placement = plan.placement[[plan.layer_ids.tolist().index(layer) for layer in layers]].astype(np.int64)
    n_experts = plan.model.n_experts
    if placement.max() >= n_experts or placement.min() < -1:
        raise PlanError(f"a plan holds expert {placement.max()}: {plan.model.name} has {n_experts} experts")
    held = np.zeros((*placement.shape[:2], n_experts + 1), bool)
    np.put_along_axis(held, np.where(placement < 0, n_experts, placement), True, axis=2)
    return held[:, :, :-1]
