"""Registered environment ids: the ladder of placement tasks.

Every rung is registered for every profile and schedule, with both kinds of actions:
``MoEPlacement-4x4-sglang-prefill-drift-v0`` and ``MoEPlacementFlat-4x4-sglang-prefill-drift-v0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

RUNGS: dict[str, dict[str, Any]] = {
    "small": {"trace": "synthetic-small", "cluster": "h800-2x4", "slots_per_gpu": 2, "tokens_per_rank": 64,
              "sampled_passes": 1, "passes_per_interval": 10_000},
    "2x8": {"trace": "tiny_moe", "cluster": "h800-2x8"},
    "4x4": {"trace": "tiny_moe", "cluster": "h800-4x4"},
    "4x8": {"trace": "tiny_moe", "cluster": "h800-4x8"},
    "deepseek-v3": {"trace": "synthetic-deepseek-v3", "cluster": "h800-4x8"},
}  # fmt: skip
"""Size of a task → its arguments, from easy to hard. ``small`` has 16 experts on 8 GPUs and no spare slots. Its
optimum is not proven: the exact planner takes at most 120 binary choices, and this task has 128."""
PROFILES = ("sglang-prefill", "sglang-decode", "vllm", "vllm-deepep", "tensorrt-llm", "vllm-ascend")
"""Engine profiles that an environment can have."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "stationary": {"schedule": "stationary"},
    "drift": {"schedule": "drift", "intervals": 8, "start": "eplb"},
    "switch": {"schedule": "switch", "intervals": 8, "start": "eplb"},
    "replay": {"schedule": "replay", "intervals": 8, "start": "eplb"},
}
"""Traffic → its arguments. ``stationary`` is one walk over the layers from the static placement. The others serve eight
intervals from EPLB's placement."""
KINDS = {
    "MoEPlacement": ("environment:MoEPlacementEnv", "vector:MoEPlacementVectorEnv"),
    "MoEPlacementFlat": ("flat:MoEPlacementFlatEnv", "flat:MoEPlacementFlatVectorEnv"),
}
"""First part of an id → module and class of the single and of the vector environment."""


def ladder() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every task of the ladder: the middle of its id, and its arguments."""
    for rung, size in RUNGS.items():
        for profile in PROFILES:
            for schedule, traffic in SCHEDULES.items():
                yield f"{rung}-{profile}-{schedule}", {**size, "profile": profile, **traffic}


def placement_ids() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, first part of the id, arguments) of every placement environment."""
    for kind in KINDS:
        yield f"{kind}-v0", kind, {}
        yield f"{kind}Drift-v0", kind, SCHEDULES["drift"]
        for name, arguments in ladder():
            yield f"{kind}-{name}-v0", kind, arguments
