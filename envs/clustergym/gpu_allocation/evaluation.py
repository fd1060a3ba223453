"""Evaluate allocation policies on the same unseen streams of pods (``clustergym eval --task gpu-allocation``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from clustergym.common.statistics import ci95
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.rules import RULES
from clustergym.gpu_allocation.specs import FIRST_SEEDS
from clustergym.gpu_allocation.state import SUM_MET, SUM_REWARD, SUM_STEPS, Floats

if TYPE_CHECKING:
    from clustergym.gpu_allocation.policy import AllocationPolicy  # needs torch, which rules do without

HELD_OUT_SEED = FIRST_SEEDS["test"]
"""First seed of the streams for evaluation. Trainers use 31-bit seeds, so they never see these streams."""


def play(
    batch: AllocationBatch,
    act: Callable[[], Floats],
    learn: Callable[[], None] | None = None,
    seed: int = HELD_OUT_SEED,
) -> dict[str, Any]:
    """Play one episode in each environment. Environment i sees stream seed + i, for every policy.

    Returns:
        Means over all decisions (``reward``, ``qos``, ``efficiency``, ``oom``, ``monopoly``, ``wait_s``, ``room``), the
        mean return of an episode, and 95 % confidence intervals over streams.
    """
    batch.seed(seed + np.arange(batch.num_envs))
    batch.reset()
    for _ in range(batch.config.arrivals):
        batch.step(act())
        if learn is not None:
            learn()
    sums = batch.state.sums
    means = sums[:, :SUM_STEPS] / sums[:, SUM_STEPS:]
    names = ("reward", "qos", "efficiency", "oom", "monopoly", "wait_s", "room")
    result: dict[str, Any] = {name: float(value) for name, value in zip(names, means.mean(0), strict=True)}
    result["reward_ci95"] = ci95(means[:, SUM_REWARD].tolist())
    result["qos_ci95"] = ci95(means[:, SUM_MET].tolist())
    result["mean_return"] = float(sums[:, SUM_REWARD].mean())
    result["mean_return_ci95"] = ci95(sums[:, SUM_REWARD].tolist())
    result["streams"] = batch.num_envs
    return result


def play_rules(
    batch: AllocationBatch, names: Iterable[str] = RULES, seed: int = HELD_OUT_SEED
) -> dict[str, dict[str, Any]]:
    """Play every named rule on the same streams."""
    results = {}
    for name in names:
        if name not in RULES:
            raise ValueError(f"unknown policy {name!r}; the rules are: {', '.join(RULES)}")
        rule = RULES[name](batch)
        results[name] = play(batch, rule.act, rule.learn, seed)
    return results


def play_policy(batch: AllocationBatch, policy: AllocationPolicy, seed: int = HELD_OUT_SEED) -> dict[str, Any]:
    """Play a trained policy on the same streams."""
    policy.reset()
    return play(batch, lambda: policy.act(batch.obs), seed=seed)


def gap_closed(reward: float, rules: Mapping[str, Mapping[str, Any]]) -> float:
    """Position of a reward between the best rule (0) and the oracle (1)."""
    low, high = max(r["reward"] for name, r in rules.items() if name != "oracle"), rules["oracle"]["reward"]
    return float((reward - low) / (high - low))
