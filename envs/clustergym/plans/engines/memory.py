"""What a plan costs in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

from clustergym.plans.engines.base import EnginePlan


@dataclass(frozen=True)
class MemoryUse:
    """Memory per GPU. All GPUs hold the same number of experts."""

    experts_gb: float
    """Weights of all experts on a GPU, in all planned layers."""
    redundant_gb: float
    """The part of it that is there because of redundant slots."""
    kv_tokens_lost: int | None
    """Tokens of KV cache that would fit into the memory of the redundant slots; None if the model does not tell."""

    def describe(self) -> str:
        lost = "" if self.kv_tokens_lost is None else f" (room for the KV cache of {self.kv_tokens_lost:,} tokens)"
        return f"{self.experts_gb:.2f} GB of experts per GPU, {self.redundant_gb:.2f} GB of it in redundant slots{lost}"


def memory_use(plan: EnginePlan) -> MemoryUse:
    """Memory per GPU of the planned layers, and what the redundant slots take from the KV cache."""
    per_slot = plan.model.expert_bytes * len(plan.placement)
    redundant = per_slot * plan.n_redundant / plan.n_gpus
    lost = int(redundant / plan.model.kv_bytes) if plan.model.kv_bytes else None
    return MemoryUse(per_slot * plan.n_slots / 1e9, redundant / 1e9, lost)
