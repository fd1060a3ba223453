"""A run of a trainer: checkpoints, logs, evaluation, the saved model and Weights & Biases."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from clustergym.training import (
    NonFiniteLoss,
    Run,
    RunLogger,
    World,
    load_checkpoint,
    read_scalars,
)
from trainers import in_two_processes


@dataclass
class Args:
    run_dir: Path
    seed: int = 1
    total_timesteps: int = 100
    resume: bool = False
    checkpoint_interval: int = 2
    save_model: bool = False
    cuda: bool = False
    track: bool = False


def test_run_saves_logs_and_resumes(tmp_path: Path) -> None:
    run = Run("x", Args(tmp_path), World(), "task", batch_size=15)
    assert run.load_checkpoint() is None
    with run:
        for iteration in run.iterations():
            run.log({"charts/a": iteration / 10}, iteration, a=1.0)
            if run.checkpoint_due(iteration):
                run.save_checkpoint(iteration, weights=torch.full((2,), float(iteration)))
            if iteration == 3:
                break
    assert (run.num_iterations, run.total_steps, run.folder) == (7, 105, tmp_path)

    run = Run("x", Args(tmp_path, resume=True), World(), "task", batch_size=15)
    state = run.load_checkpoint()
    assert state is not None
    assert (state["iteration"], state["weights"].tolist()) == (2, [2.0, 2.0])
    with run:
        seen = []
        for iteration in run.iterations():
            seen.append(iteration)
            run.log({"charts/a": -iteration / 10}, iteration)
    assert seen == [3, 4, 5, 6, 7]
    assert read_scalars(tmp_path, "charts/a") == (
        [15, 30, 45, 60, 75, 90, 105],
        pytest.approx([0.1, 0.2, -0.3, -0.4, -0.5, -0.6, -0.7]),
    )
    assert read_scalars(tmp_path, "charts/SPS")[0] == [15, 30, 45, 60, 75, 90, 105]
    result = run.result(score=math.nan, other=3)
    assert result["score"] is None
    assert (result["other"], result["seed"], result["steps"], result["run_dir"]) == (3, 1, 105, tmp_path)
    assert result["checkpoint"] == tmp_path / "checkpoint.pt"
    assert result["steps_per_s"] > 0


def test_checkpoints_are_due_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    def due(world: World, **options: Any) -> list[int]:
        run = Run("x", Args(tmp_path, **options), world, "task", batch_size=20)
        return [iteration for iteration in range(1, run.num_iterations + 1) if run.checkpoint_due(iteration)]

    assert due(World()) == [2, 4, 5]
    assert due(World(), checkpoint_interval=0) == []
    assert due(World(1, 2), total_timesteps=200) == [2, 4, 5]


def test_one_checkpoint_holds_the_state_of_every_rank(tmp_path: Path) -> None:
    """Both ranks resume from the same iteration, each with its own state."""

    def work(world: World, folder: Path) -> list[Any]:
        args = Args(folder / "run", resume=True)
        with Run("x", args, world, "task", 10) as run:
            for iteration in (1, 2):
                run.save_checkpoint(iteration, {"own": torch.tensor(world.rank)}, common=torch.tensor(7))
        state = Run("x", args, world, "task", 10).load_checkpoint()
        assert state is not None
        return [state["iteration"], int(state["own"]), int(state["common"])]

    assert in_two_processes(work, tmp_path) == [[2, 0, 7], [2, 1, 7]]
    assert [file.name for file in (tmp_path / "run").glob("*.pt")] == ["checkpoint.pt"]


def test_moments_cover_the_rows_of_all_ranks(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(5, 3, (8, 3))

    def work(world: World, folder: Path) -> list[Any]:
        mean, var, n = world.moments(rows[world.rank :: 2])
        return [mean.tolist(), var.tolist(), n]

    for mean, var, n in in_two_processes(work, tmp_path):
        np.testing.assert_allclose(mean, rows.mean(0))
        np.testing.assert_allclose(var, rows.var(0))
        assert n == 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_loss_stops_the_run_and_names_the_last_good_checkpoint(tmp_path: Path, value: float) -> None:
    with Run("x", Args(tmp_path), World(), "task", 10) as run:
        run.log({"losses/policy_loss": 1.0, "losses/explained_variance": math.nan, "charts/a": math.nan}, 1)
        with pytest.raises(NonFiniteLoss, match=r"iteration 2: losses/grad_norm is .*; there is no checkpoint yet"):
            run.log({"losses/policy_loss": 1.0, "losses/grad_norm": value}, 2)
        run.save_checkpoint(1)
        with pytest.raises(NonFiniteLoss, match=f"the last good checkpoint is {tmp_path}/checkpoint.pt"):
            run.log({"losses/value_loss": value}, 3)


def test_model_is_saved_only_with_the_flag(tmp_path: Path) -> None:
    Run("x", Args(tmp_path), World(), "task", 10).save_model(weights=torch.ones(2))
    assert not (tmp_path / "model.pt").exists()
    Run("x", Args(tmp_path, save_model=True), World(), "task", 10).save_model(weights=torch.ones(2))
    state = load_checkpoint(tmp_path / "model.pt", "x-model")
    assert state["weights"].tolist() == [1.0, 1.0]
    assert state["args"]["save_model"] is True


def test_evaluation_returns_are_logged_and_reported(tmp_path: Path) -> None:
    with Run("x", Args(tmp_path), World(), "task", 10) as run:
        assert run.log_returns([]) == {"mean_return": None, "mean_return_ci95": None}
        found = run.log_returns([1.0, 3.0])
    assert found["mean_return"] == 2.0
    assert found["mean_return_ci95"] == pytest.approx(12.706, abs=1e-3)
    assert read_scalars(tmp_path, "eval/mean_return") == ([100], [2.0])


def test_saved_model_is_readable_without_torch_and_clustergym(tmp_path: Path) -> None:
    args = Args(tmp_path, save_model=True)
    shared = torch.ones(2)
    state = {
        "agent": {"a.weight": torch.arange(6.0).view(2, 3).T, "b": shared, "c": shared},
        "statistics": {"n": shared},
    }
    Run("x", args, World(), "task", 10).save_model(**state, note="not a tensor")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert sorted(tensors) == ["agent.a.weight", "agent.b", "agent.c", "statistics.n"]
    assert tensors["agent.a.weight"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["trainer"] == "x"
    assert about["args"]["total_timesteps"] == 100


@pytest.mark.usefixtures("new_wandb_session")
def test_run_of_a_wandb_sweep_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLogger(tmp_path / "alone", {}) as logger:
        assert logger._wandb is None
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with RunLogger(tmp_path / "sweep", {}) as logger:
        logger.scalar("charts/episodic_return", 1.0, 1)
        assert logger._wandb is not None
    assert list((tmp_path / "sweep").rglob("*.wandb"))


@pytest.mark.usefixtures("new_wandb_session")
def test_project_and_entity_reach_wandb(tmp_path: Path) -> None:

    @dataclass
    class Tracked(Args):
        track: bool = True
        wandb_project_name: str = "mine"
        wandb_entity: str | None = "team"

    with Run("x", Tracked(tmp_path), World(), "task", 10) as run:
        assert (run.logger._wandb.project, run.logger._wandb.entity) == ("mine", "team")
