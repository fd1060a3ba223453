"""A small trace, its counts, and plans made of them in a second."""

from __future__ import annotations

from typing import Any

import numpy as np

from clustergym import TokenTrace
from clustergym.moe_placement import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN
from clustergym.plans.engines import ENGINES
from clustergym.plans.planning import Plan, Sizes, make_plan
from clustergym.traces import LoadTrace, SyntheticConfig, synthetic_trace

SUFFIX = {name: engine.suffixes[0] for name, engine in ENGINES.items()}


def small_trace(**changes: Any) -> TokenTrace:
    options: dict[str, Any] = {
        "n_tokens": 3000, "n_layers": 32, "first_layer": 0, "n_experts": 8, "top_k": 2, "mean_seq_len": 30,
        "popularity_skew": 0.8, "model": "mixtral-8x7b",
    }  # fmt: skip
    return synthetic_trace(SyntheticConfig(**(options | changes)), seed=1)


CLUSTER = get_cluster("h800-2x4", slots_per_gpu=2)
SIMULATOR = Simulator("mixtral-8x7b", CLUSTER, "sglang-decode", PASSES_OF_A_PERMANENT_PLAN)
TRAFFIC = Traffic("decode", tokens_per_rank=8, sampled_passes=2)
SIZES = Sizes(plan_passes=8, passes=8)


def small_make_plan(trace: TokenTrace | LoadTrace, planner: str, **options: Any) -> Plan:
    return make_plan(trace, SIMULATOR, planner, **({"traffic": TRAFFIC, "sizes": SIZES} | options))


def counts_trace(steps: int = 6) -> LoadTrace:
    counts = np.random.default_rng(4).integers(1, 100, (steps, 32, 8))
    counts[:, :, 0] += 300
    return LoadTrace(counts, np.arange(32), 2, "mixtral-8x7b", "counted")
