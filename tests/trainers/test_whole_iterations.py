"""``train(args)`` for one and two iterations, compared with the slow reference: every detail of roll-out and update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slow_training import BOX, MASKED, OUTLIERS, TWO, Case, games, record, replay, scripted_environments, short_streams

pytestmark = pytest.mark.usefixtures("reproducible")

SMALL: dict[str, Any] = {
    "num_envs": 4, "num_steps": 7, "num_minibatches": 2, "update_epochs": 3, "hidden": 8, "learning_rate": 1e-2,
    "eval_episodes": 0, "eval_streams": 0, "checkpoint_interval": 0,
}  # fmt: skip
PLAIN = {
    "anneal_lr": False, "bootstrap_truncated": False, "norm_adv": False, "clip_vloss": False, "max_grad_norm": 100.0,
    "ent_coef": 0.2, "vf_coef": 0.9, "gamma": 0.6, "gae_lambda": 0.5,
}  # fmt: skip
ALLOCATION = {"num_envs": 8, "levels": 3, "copies": 4, "gamma": 0.0, "qos_penalty": 0.7}
CASES = [
    Case("ppo"),
    Case("ppo", MASKED, PLAIN, "plain"),
    Case("ppo", TWO, {"target_kl": 0.01}, "two-components"),
    Case("ppo_kl", MASKED, {"kl_target": 0.0036}, "strict"),
    Case("ppo_kl", TWO, {"kl_target": 10.0, "kl_coef": 0.15}, "loose"),
    Case("ppo_continuous_action", BOX),
    Case("ppo_continuous_action", BOX, PLAIN | {"norm_obs": False, "norm_reward": False}, "plain"),
    Case("ppo_continuous_action", OUTLIERS, {"num_steps": 60, "update_epochs": 1}, "clipped-numbers"),
    Case("ppo_atari", flags={"num_envs": 2, "num_steps": 4}),
    Case("ppo_lstm"),
    Case("ppo_lstm", MASKED, PLAIN, "plain"),
    Case("ppo_lstm", TWO, label="two-components"),
    Case("ppo_gpu_alloc", "GPUAllocationHistory-v0", ALLOCATION, "levels"),
    Case("ppo_gpu_alloc", "GPUAllocation-v0", {"levels": 0, "copies": 1, "gamma": 0.9}, "normal"),
    Case("ppo_gpu_alloc_lstm", "GPUAllocation-v0", {"gamma": 0.9, "update_epochs": 1}),
]


@pytest.fixture(scope="module", autouse=True)
def _environments() -> Iterator[None]:
    with scripted_environments():
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_and_metrics_are_those_of_the_formulas(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = SMALL | {"env_id": case.env_id} | case.flags
    flags["total_timesteps"] = 2 * flags["num_envs"] * flags["num_steps"]
    known = {key: value for key, value in flags.items() if hasattr(case.trainer.Args, key)}
    args = case.trainer.Args(**known, run_dir=tmp_path)
    replaced = short_streams if "GPU" in case.env_id else games if case.name == "ppo_atari" else None
    found = record(case.trainer, args, monkeypatch, replaced)
    assert len(found.weights) == 2
    assert any((answer[3] & ~answer[2]).any() for answer in found.answers[1:]), "no episode was truncated"
    for step, played in enumerate(found.played):
        np.testing.assert_allclose(played, case.played(found, step), rtol=1e-5, atol=1e-6)
    for order in found.orders:
        assert sorted(order) == list(range(len(order))) != order, "an epoch is not a shuffle"
    assert len(set(map(tuple, found.orders))) > 1, "all epochs have the same order"
    updates = [metrics.get("charts/updates") for metrics in found.metrics]
    assert "target_kl" not in case.flags or len(set(updates)) > 1, "the target must stop one of the updates"
    for number, (weights, metrics) in enumerate(replay(case, found)):
        for name, value in metrics.items():
            assert found.metrics[number][name] == pytest.approx(value, rel=1e-6, abs=1e-9), (number, name)
        for name, weight in found.weights[number].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-7, atol=1e-10, msg=f"{name} differs")
    assert any(not torch.equal(weight, found.weights[0][name]) for name, weight in found.weights[1].items())
    assert np.isfinite(list(metrics.values())).all()
