"""Registered ids of the placement and the offloading environments. ``clustergym/__init__.py`` registers them.

The two ids of GPU allocation are in ``clustergym/__init__.py`` only.

A placement task is here if the best planner is at least two points above agents that play at random. Other traces,
clusters, profiles and schedules are keyword arguments: ``gymnasium.make("MoEPlacement-v0", cluster="h800-2x8")``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

SIZES: dict[str, dict[str, Any]] = {
    "small": {"trace": "synthetic-small", "cluster": "h800-2x4", "slots_per_gpu": 2},
    "4x4": {"trace": "tiny_moe_domains", "cluster": "h800-4x4"},
    "deepseek-v3": {"trace": "synthetic-deepseek-v3", "cluster": "h800-4x8"},
}
"""Size of a task → its arguments. ``small`` has 16 experts on 8 GPUs and no spare slots: its optimum can be proven."""
INTERVAL_TOKENS = 2048
"""Tokens of the sampled passes of an interval, in every named task. Nine intervals, the longest episode, then fit into
the smallest split of every trace, so no episode serves a token twice."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "stationary": {"schedule": "stationary"},
    "drift": {"schedule": "drift", "intervals": 8, "start": "eplb"},
    "switch": {"schedule": "switch", "intervals": 8, "start": "eplb"},
}
"""Traffic → its arguments. ``stationary`` is one walk over the layers from the static placement. The others serve eight
intervals from EPLB's placement."""
_PASSES = {"sglang-prefill": 2, "sglang-decode": 4, "vllm-deepep": 4}
_GPUS = {"h800-2x4": 8, "h800-4x4": 16, "h800-4x8": 32}
REFERENCE_SCORES = Path(__file__).parent / "reference_scores.json"
"""Scores of simple agents, planners and bounds; made by ``benchmarks/placement/reference_scores.py``."""


class Task(NamedTuple):
    """One task."""

    why: str
    """What is to be learned here that is not in the other tasks."""
    arguments: dict[str, Any]
    flat: bool
    """Whether it is also registered with one discrete action."""


def _task(size: str, profile: str, schedule: str, why: str, flat: bool = False) -> Task:
    sizes, passes = SIZES[size], _PASSES[profile]
    tokens = INTERVAL_TOKENS // passes // _GPUS[sizes["cluster"]]
    more = {"profile": profile, "sampled_passes": passes, "tokens_per_rank": tokens}
    return Task(why, {**sizes, **more, **SCHEDULES[schedule]}, flat)


TASKS: dict[str, Task] = {
    "": Task("The first task: one walk over the layers, where a policy that learns gains most.", {}, True),
    "Drift": _task(
        "4x4", "sglang-prefill", "drift",
        "The hard task: traffic moves on, so old loads mislead, and moving experts must pay for itself.", True,
    ),
    "-small-sglang-decode-stationary": _task(
        "small", "sglang-decode", "stationary", "Small enough for a proven optimum: how far is an agent from it?", True,
    ),
    "-4x4-sglang-prefill-switch": _task(
        "4x4", "sglang-prefill", "switch", "Domains change at once: is it better to follow, or to stay robust?",
    ),
    "-4x4-sglang-decode-stationary": _task(
        "4x4", "sglang-decode", "stationary", "One copy per expert: traffic between nodes counts as much as load.",
    ),
    "-4x4-sglang-decode-drift": _task(
        "4x4", "sglang-decode", "drift", "The drifting task where good placements last longest.",
    ),
    "-4x4-sglang-decode-switch": _task(
        "4x4", "sglang-decode", "switch", "Sudden changes with small passes: the observed interval is noisy.",
    ),
    "-4x4-vllm-deepep-stationary": _task(
        "4x4", "vllm-deepep", "stationary", "Replicas are chosen by a hash: a near copy does not help, balance does.",
    ),
    "-4x4-vllm-deepep-switch": _task(
        "4x4", "vllm-deepep", "switch", "Balance alone, where the hot experts change.",
    ),
    "-deepseek-v3-sglang-prefill-stationary": _task(
        "deepseek-v3", "sglang-prefill", "stationary", "256 experts on 32 GPUs: the budget is short, choose well.",
    ),
    "-deepseek-v3-sglang-prefill-drift": _task(
        "deepseek-v3", "sglang-prefill", "drift", "The largest task with drift.",
    ),
    "-deepseek-v3-sglang-decode-stationary": _task(
        "deepseek-v3", "sglang-decode", "stationary", "The largest gap between planners and simple agents.",
    ),
    "-deepseek-v3-sglang-decode-drift": _task(
        "deepseek-v3", "sglang-decode", "drift", "Drift at full size with small passes.",
    ),
    "-deepseek-v3-vllm-deepep-stationary": _task(
        "deepseek-v3", "vllm-deepep", "stationary", "Balance alone at full size.",
    ),
}  # fmt: skip
"""Part of an id between ``MoEPlacement`` and ``-v0`` → the task."""
KINDS = {
    "MoEPlacement": ("environment:MoEPlacementEnv", "vector:MoEPlacementVectorEnv"),
    "MoEPlacementFlat": ("flat:MoEPlacementFlatEnv", "flat:MoEPlacementFlatVectorEnv"),
}
"""First part of an id → module and class of the single and of the vector environment."""

OFFLOADING: dict[str, Task] = {
    "": Task("The first task: one pool of slots for 37.5 % of all experts, and time to load some ahead.", {}, True),
    "Busy": Task("PCIe 4: the link is busy with demand loads, so it counts what is evicted.", {"link": "pcie4"}, True),
    "Batch": Task(
        "Four sequences together: a layer needs more experts, and they share what is loaded.",
        {"batch": 4, "slots": 0.5}, True,
    ),
    "Node": Task("Four GPUs with links of their own: on which of them should an expert be?", {"gpus": 4}, True),
}  # fmt: skip
"""Variant of the offloading task: ``MoEOffloadBusy-v0``, ``MoEOffloadBusyFlat-v0``."""
OFFLOADING_KINDS = {
    "": ("environment:MoEOffloadEnv", "vector:MoEOffloadVectorEnv"),
    "Flat": ("flat:MoEOffloadFlatEnv", "flat:MoEOffloadFlatVectorEnv"),
}


def placement_ids() -> dict[str, tuple[str, Task]]:
    """Every placement id → (kind, task)."""
    return {
        f"{kind}{name}-v0": (kind, task)
        for name, task in TASKS.items()
        for kind in KINDS
        if kind == "MoEPlacement" or task.flat
    }
