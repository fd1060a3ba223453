"""Random tiny placement problems, and legal placements for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clustergym import TokenTrace
from clustergym.moe_placement import (
    ClusterSpec,
    EngineProfile,
    Interval,
    IntervalStream,
    ModelSpec,
    Placement,
    Simulator,
    Traffic,
)
from clustergym.moe_placement.kernels.state import Costs


def made_profile(dispatch: str = "rank-nearest", transport: str = "dedup", phase: str = "decode") -> EngineProfile:
    """A profile of any replica choice and transport. rank-nearest-dealt is the rule of newer SGLang, which it follows
    from its first rebalancing on; rank-nearest-start is what it does before."""
    rule, start = dispatch.removesuffix("-dealt").removesuffix("-start"), dispatch.endswith("-start")
    dealt = start or dispatch.endswith("-dealt")
    return EngineProfile("made", "sglang", phase, rule, transport, (), "made by a test", dealt, start)


@dataclass(frozen=True)
class Instance:
    model: ModelSpec
    cluster: ClusterSpec
    interval: Interval
    placement: Placement
    before: Placement
    passes_per_interval: int

    def simulator(self, profile: str | EngineProfile = "sglang-prefill", **options: Any) -> Simulator:
        return Simulator(self.model, self.cluster, profile, self.passes_per_interval, **options)


def random_placement(
    rng: np.random.Generator, n_layers: int, n_gpus: int, n_slots: int, n_experts: int, fill: float
) -> Placement:
    """Every expert in a random slot, then replicas in about ``fill`` of the slots that are left."""
    placement = np.full((n_layers, n_gpus, n_slots), -1, np.int16)
    for layer in placement:
        cells = rng.permutation(n_gpus * n_slots)
        layer.ravel()[cells[:n_experts]] = rng.permutation(n_experts)
        for cell in cells[n_experts:]:
            absent = np.setdiff1d(np.arange(n_experts), layer[cell // n_slots])
            if len(absent) and rng.random() < fill:
                layer.ravel()[cell] = rng.choice(absent)
    return placement


def random_trace(
    rng: np.random.Generator, lengths: list[int], n_experts: int, top_k: int, layers: int = 2, pads: float = 0.0
) -> TokenTrace:
    """Sequences of these lengths in three domains. ``pads`` is the share of entries without an expert."""
    experts = np.argsort(rng.random((sum(lengths), layers, n_experts)), axis=2)[:, :, :top_k].astype(np.int16)
    experts[rng.random(experts.shape) < pads] = -1
    domains = np.array(["abc"[i % 3] for i in range(len(lengths))])
    return TokenTrace(experts, n_experts=n_experts, seq_lens=np.array(lengths), domains=domains, name="random")


def random_instance(
    seed: int,
    *,
    nodes: int,
    per_node: int,
    n_experts: int,
    top_k: int,
    tokens: int,
    layers: int,
    spare_slots: int,
    passes: int = 2,
    phase: str = "decode",
    rank_imbalance: float = 0.0,
    fill: float = 0.6,
    pads: float = 0.2,
) -> Instance:
    """``tokens`` is per rank and pass."""
    rng = np.random.default_rng(seed)
    n_gpus, top_k = nodes * per_node, min(top_k, n_experts)
    n_slots = min(-(-n_experts // n_gpus) + spare_slots, n_experts)
    numbers = rng.uniform(0.1, 50, 10)
    model = ModelSpec("random", layers, n_experts, top_k, int(rng.integers(1, 5000)), int(rng.integers(1, 500)),
        weight_bytes=numbers[0], dispatch_bytes=numbers[1], combine_bytes=numbers[2],
        kernel_start_us=numbers[3], kernel_expert_us=numbers[4], kernel_pair_us=numbers[5],
    )  # fmt: skip
    cluster = ClusterSpec("random", nodes, per_node, n_slots, *numbers[6:10])
    trace = random_trace(rng, rng.integers(passes, 30, 12).tolist(), n_experts, top_k, layers, pads)
    traffic = Traffic(phase, tokens, passes, rank_imbalance=rank_imbalance, allow_reuse=True)
    interval = next(IntervalStream(trace, n_gpus, traffic, seed))
    placements = [random_placement(rng, layers, n_gpus, n_slots, n_experts, fill) for _ in range(2)]
    return Instance(model, cluster, interval, *placements, passes_per_interval=int(rng.integers(1, 200)))


class Costly(Simulator):
    """A simulator whose kernel has all terms: floor, start, tokens, experts, blocks and pairs."""

    def costs(self, n_tokens: int) -> Costs:
        terms = {"kernel_us": 3.0, "kernel_floor_us": 40.0, "token_us": 0.7, "expert_us": 2.0, "pair_us": 0.11}
        return super().costs(n_tokens)._replace(**terms, block_us=1.3, block_tokens=4)
