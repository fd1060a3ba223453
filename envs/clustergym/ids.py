"""Registered environment ids: placement tasks from small to large.

Every size is registered for every profile and schedule, with both kinds of actions:
``MoEPlacement-4x4-sglang-prefill-drift-v0`` and ``MoEPlacementFlat-4x4-sglang-prefill-drift-v0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNGS: dict[str, dict[str, Any]] = {
    "small": {"trace": "synthetic-small", "cluster": "h800-2x4", "slots_per_gpu": 2},
    "2x8": {"trace": "tiny_moe_domains", "cluster": "h800-2x8"},
    "4x4": {"trace": "tiny_moe_domains", "cluster": "h800-4x4"},
    "4x8": {"trace": "tiny_moe_domains", "cluster": "h800-4x8"},
    "deepseek-v3": {"trace": "synthetic-deepseek-v3", "cluster": "h800-4x8"},
}
"""Size of a task → its arguments, from easy to hard. ``small`` has 16 experts on 8 GPUs and no spare slots: the exact
planner proves its optimum."""
PHASES = {
    "sglang-prefill": "prefill",
    "sglang-decode": "decode",
    "vllm": "decode",
    "vllm-deepep": "decode",
    "tensorrt-llm": "decode",
    "vllm-ascend": "decode",
}
"""Engine profiles that an environment can have → the phase that they serve."""
SAMPLED_PASSES = {"prefill": 2, "decode": 4}
INTERVAL_TOKENS = 2048
"""Tokens of the sampled passes of an interval, in every task. Nine intervals, the longest episode, then fit into the
smallest split of every trace, so no episode serves a token twice."""
_GPUS = {"h800-2x4": 8, "h800-2x8": 16, "h800-4x4": 16, "h800-4x8": 32}
SCHEDULES: dict[str, dict[str, Any]] = {
    "stationary": {"schedule": "stationary"},
    "drift": {"schedule": "drift", "intervals": 8, "start": "eplb"},
    "switch": {"schedule": "switch", "intervals": 8, "start": "eplb"},
    "replay": {"schedule": "replay", "intervals": 8, "start": "eplb"},
}
"""Traffic → its arguments. ``stationary`` is one walk over the layers from the static placement. The others serve eight
intervals from EPLB's placement."""
REFERENCE_SCORES = Path(__file__).parent / "reference_scores.json"
"""Scores of simple agents, planners and bounds on every task; made by ``benchmarks/reference_scores.py``."""
KINDS = {
    "MoEPlacement": ("environment:MoEPlacementEnv", "vector:MoEPlacementVectorEnv"),
    "MoEPlacementFlat": ("flat:MoEPlacementFlatEnv", "flat:MoEPlacementFlatVectorEnv"),
}
"""First part of an id → module and class of the single and of the vector environment."""

OFFLOADING: dict[str, dict[str, Any]] = {
    "": {},
    "Busy": {"link": "pcie4"},
    "Batch": {"batch": 4, "slots": 0.5},
    "Node": {"gpus": 4},
}
"""Variant of the offloading task → its arguments: ``MoEOffloadBusy-v0``, ``MoEOffloadBusyFlat-v0``."""
OFFLOADING_KINDS = {
    "": ("environment:MoEOffloadEnv", "vector:MoEOffloadVectorEnv"),
    "Flat": ("flat:MoEOffloadFlatEnv", "flat:MoEOffloadFlatVectorEnv"),
}


def ladder() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every placement task: the middle of its id, and its arguments."""
    for rung, size in RUNGS.items():
        for profile, phase in PHASES.items():
            passes = SAMPLED_PASSES[phase]
            sizes = {"sampled_passes": passes, "tokens_per_rank": INTERVAL_TOKENS // passes // _GPUS[size["cluster"]]}
            for schedule, traffic in SCHEDULES.items():
                yield f"{rung}-{profile}-{schedule}", {**size, **sizes, "profile": profile, **traffic}


def placement_ids() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, first part of the id, arguments) of every placement environment."""
    for kind in KINDS:
        yield f"{kind}-v0", kind, {}
        for name, arguments in ladder():
            if name == "4x4-sglang-prefill-drift":
                yield f"{kind}Drift-v0", kind, arguments
            yield f"{kind}-{name}-v0", kind, arguments
