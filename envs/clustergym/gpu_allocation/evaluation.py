"""Allocation policies side by side on streams of pods that they have not seen: the numbers behind ``clustergym eval``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import dynamics
from clustergym.gpu_allocation.baselines import RULES
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.policy import AllocationPolicy

HELD_OUT_SEED = 2**40
"""Streams from this seed on are for evaluation. Trainers draw theirs from 31-bit seeds: the two never meet."""


def play(
    batch: AllocationBatch,
    act: Callable[[], torch.Tensor],
    learn: Callable[[], None] | None = None,
    seed: int = HELD_OUT_SEED,
) -> dict[str, Any]:
    """One episode in each environment: environment i sees stream seed + i whatever the policy.

    Returns means over all decisions (``reward``, ``qos``, ``efficiency``, ``oom``, ``monopoly``, ``wait_s``), the mean return of
    an episode, and 95 % intervals over streams.
    """
    batch.seed(seed + np.arange(batch.num_envs))
    batch.reset()
    for _ in range(batch.config.arrivals):
        batch.step(act())
        if learn is not None:
            learn()
    sums = batch.final_sums.numpy()
    means = sums[:, : dynamics.S_STEPS] / sums[:, dynamics.S_STEPS :]
    names = ("reward", "qos", "efficiency", "oom", "monopoly", "wait_s")
    result: dict[str, Any] = {name: float(value) for name, value in zip(names, means.mean(0), strict=True)}
    result["reward_ci95"] = ci95(means[:, dynamics.S_RETURN].tolist())
    result["qos_ci95"] = ci95(means[:, dynamics.S_MET].tolist())
    result["mean_return"] = float(sums[:, dynamics.S_RETURN].mean())
    result["mean_return_ci95"] = ci95(sums[:, dynamics.S_RETURN].tolist())
    result["streams"] = batch.num_envs
    return result


def play_rules(
    batch: AllocationBatch, names: Iterable[str] = RULES, seed: int = HELD_OUT_SEED
) -> dict[str, dict[str, Any]]:
    """Every named rule on the same streams."""
    results = {}
    for name in names:
        if name not in RULES:
            raise ValueError(f"unknown policy {name!r}; the rules are: {', '.join(RULES)}")
        rule = RULES[name](batch)
        results[name] = play(batch, rule.act, rule.learn, seed)
    return results


def play_policy(batch: AllocationBatch, policy: AllocationPolicy, seed: int = HELD_OUT_SEED) -> dict[str, Any]:
    """A trained policy on the same streams."""
    policy.reset()
    return play(batch, lambda: policy.act(batch.obs), seed=seed)


def gap_closed(reward: float, rules: Mapping[str, Mapping[str, Any]]) -> float:
    """How far a reward is on the way from VPA (0) to the oracle (1)."""
    low, high = rules["vpa"]["reward"], rules["oracle"]["reward"]
    return float((reward - low) / (high - low))
