"""How many spare slots per GPU are worth their memory: time per layer against room for the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from clustergym.moe_placement.specs import ClusterSpec, ModelSpec
from clustergym.plans.planning import Plan

SPARES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Spare slots per GPU and layer that are tried."""
USABLE_MEMORY = 0.8
"""Share of a GPU's memory for experts and KV cache, if the user does not say. Other weights need the rest."""
NEARLY = 0.99
"""The fewest slots are taken that reach this share of the best throughput."""


@dataclass(frozen=True)
class SlotPoint:
    """What a number of slots costs and brings."""

    slots: int
    """Slots per GPU and layer"""
    spare: int
    """Slots more than the experts need"""
    layer_us: float
    """Time of a layer and pass"""
    experts_gb: float
    """Memory of all experts on a GPU"""
    kv_tokens: int
    """Tokens of KV cache that fit beside them on a GPU"""
    kv_lost: int
    """Tokens of KV cache fewer than without spare slots"""
    requests: int
    """Requests of the given length that a GPU runs at once: those wanted, or those that fit"""

    @property
    def throughput(self) -> float:
        """Requests served per µs of a layer, for comparisons."""
        return self.requests / self.layer_us


@dataclass(frozen=True)
class SlotCurve:
    """The points, fewest slots first."""

    points: tuple[SlotPoint, ...]
    memory_gb: float
    """For experts and KV cache, per GPU"""
    context: int
    """Tokens of a request"""
    wanted: int
    """Requests per GPU that the traffic has"""

    @property
    def chosen(self) -> SlotPoint:
        """The fewest slots that reach nearly the best throughput."""
        best = max(point.throughput for point in self.points)
        return next(point for point in self.points if point.throughput >= NEARLY * best)

    def describe(self) -> str:
        point = self.chosen
        return (
            f"{point.slots} slots per GPU are chosen ({point.spare} spare): {point.layer_us:.1f} µs per layer, "
            f"{point.requests} requests of {self.context:,} tokens per GPU in {self.memory_gb:g} GB, "
            f"{point.kv_lost:,} tokens of KV cache fewer than without spare slots"
        )


def slot_curve(
    plan_with: Callable[[ClusterSpec], Plan],
    model: ModelSpec,
    cluster: ClusterSpec,
    n_layers: int,
    *,
    wanted: int,
    context: int,
    memory_gb: float | None = None,
    spares: Sequence[int] = SPARES,
) -> SlotCurve:
    """Make a plan for each number of slots that fits into memory.

    A GPU runs the requests that are wanted, but no more than its memory holds. So spare slots that take memory which
    no request needs cost nothing, and the others cost requests.

    Args:
        plan_with: makes a plan for a cluster with a number of slots.
        n_layers: layers with experts that GPUs hold, MTP layers included.
        wanted: requests per GPU that the traffic has.
        context: tokens of a request at its end, prompt included.
        memory_gb: memory of a GPU for experts and KV cache.
    """
    memory_gb = USABLE_MEMORY * cluster.memory_gb if memory_gb is None else memory_gb
    if not model.kv_bytes:
        raise ValueError(
            f"--slots auto needs the bytes of KV cache per token, which {model.name} does not tell: give --model a "
            "YAML file with kv_bytes"
        )
    if context < 1 or not memory_gb > 0:
        raise ValueError(f"--context is {context} and --gpu-memory {memory_gb:g}: expected at least 1 token and 1 GB")
    least = ceil(model.n_experts / cluster.n_gpus)

    def kv_tokens(slots: int) -> int:
        return int((1e9 * memory_gb - slots * n_layers * model.expert_bytes) / model.kv_bytes)

    if kv_tokens(least) < context:
        raise ValueError(
            f"{memory_gb:g} GB per GPU do not hold {least * n_layers * model.expert_bytes / 1e9:.1f} GB of experts and "
            f"the KV cache of one request of {context:,} tokens: give a larger --gpu-memory, a shorter --context, or "
            "more GPUs"
        )
    tried = [slots for slots in sorted({least + spare for spare in spares}) if slots <= model.n_experts]
    points = []
    for slots in tried:
        requests = min(wanted, kv_tokens(slots) // context)
        if requests < 1:
            break
        points.append(
            SlotPoint(
                slots=slots,
                spare=slots - least,
                layer_us=plan_with(replace(cluster, slots_per_gpu=slots)).best.served_us,
                experts_gb=slots * n_layers * model.expert_bytes / 1e9,
                kv_tokens=kv_tokens(slots),
                kv_lost=kv_tokens(least) - kv_tokens(slots),
                requests=requests,
            )
        )
    return SlotCurve(tuple(points), memory_gb, context, wanted)
