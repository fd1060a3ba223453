"""A placement task of three layers and four GPUs for tests of the environments."""

from __future__ import annotations

from typing import Any

import numpy as np

from clustergym import TokenTrace, synthetic_trace
from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, PlacementBatch
from clustergym.moe_placement.kernels.observation import PAIR_HOLDS
from clustergym.moe_placement.streams import layer_first

MODEL = ModelSpec("tiny", 3, 8, 2, 512, 256, kernel_start_us=4, kernel_expert_us=1, kernel_pair_us=0.2)
CLUSTER = ClusterSpec("tiny", 2, 2, 3, intra_gb_s=4, inter_gb_s=1, intra_latency_us=1, inter_latency_us=2)
EXPERTS, GPUS, LAYERS, OPS = 8, 4, 3, 3


def padded(trace: TokenTrace, share: float) -> TokenTrace:
    """The trace with some of its entries replaced by pads."""
    experts = trace.experts.copy()
    experts[np.random.default_rng(7).random(experts.shape) < share] = -1
    return TokenTrace(experts, trace.n_experts, trace.layer_ids, trace.seq_lens, trace.domains, trace.model, "padded")


TRACE = padded(
    synthetic_trace(n_tokens=600, n_layers=LAYERS, n_experts=EXPERTS, top_k=2, n_domains=3, mean_seq_len=20.0, seed=1),
    0.1,
)
TINY: dict[str, Any] = {
    "trace": TRACE, "split": "all", "model": MODEL, "cluster": CLUSTER, "tokens_per_rank": 6, "sampled_passes": 2,
    "ops_per_layer": OPS, "passes_per_interval": 5,
}  # fmt: skip
IDS = ("MoEPlacement-v0", "MoEPlacementDrift-v0")


def held_by(obs: dict[str, np.ndarray]) -> np.ndarray:
    """(E, G) 1 where the GPU holds the expert."""
    return obs["pairs"][..., PAIR_HOLDS]


def legal_action(obs: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """A random operation that changes something wherever one exists."""
    changes = obs["action_mask"].astype(bool)
    changes[:, :GPUS] &= held_by(obs) == 0
    return rng.choice(np.argwhere(changes))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and np.array_equal(a, b)


def interval_of(batch: PlacementBatch, which: int) -> Interval:
    """A copy of the observed (0) or the next (1) interval of environment 0."""
    n = batch.rules_host.n_passes
    passes = slice(which * n, (which + 1) * n)
    arrays = (batch.sim[name][0, passes].copy() for name in ("rows", "rank_start"))
    return Interval(layer_first(batch.trace), *arrays)
