"""A training run: its folder, logs, checkpoints, saved model, result, and Weights & Biases."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from clustergym.common.checkpoints import CheckpointError, load_checkpoint
from clustergym.training import runs
from clustergym.training.args import RunArgs
from clustergym.training.distributed import World
from clustergym.training.logs import read_scalars
from clustergym.training.runs import NonFiniteLoss, Run
from trainers import in_two_processes


def make_run(folder: Path, world: World | None = None, **flags: Any) -> Run:
    args = RunArgs(**({"total_timesteps": 100, "checkpoint_interval": 2, "run_dir": folder} | flags))
    return Run("x", args, "task", steps_per_iteration=15, world=world)


def test_run_saves_logs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, layer = make_run(tmp_path), torch.nn.Linear(1, 1)
    assert run.load_checkpoint(layer=layer) == {}
    assert f"device cpu, folder {tmp_path}" in capsys.readouterr().err
    for iteration in run.iterations():
        run.log({"charts/a": iteration / 10}, a=1.0)
        torch.nn.init.constant_(layer.weight, float(iteration))
        run.checkpoint(layer=layer, own=torch.full((2,), float(iteration)))
        if iteration == 3:
            break
    assert (run.num_iterations, run.total_steps, run.folder) == (7, 105, tmp_path)

    run = make_run(tmp_path, resume=True)
    saved = run.load_checkpoint(layer=layer)
    assert (saved["own"].tolist(), layer.weight.item(), run.first_iteration) == ([2.0, 2.0], 2.0, 3)
    seen = []
    for iteration in run.iterations():
        seen.append(iteration)
        run.log({"charts/a": -iteration / 10})
        run.checkpoint(layer=layer)
    assert seen == [3, 4, 5, 6, 7]
    result = run.finish([1.0, 3.0], score=math.nan, other=3)
    assert (result["mean_return"], result["other"], result["steps"]) == (2.0, 3, 105)
    assert result["mean_return_ci95"] == pytest.approx(12.706, abs=1e-3)
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line.removeprefix("result "))["score"] is None
    expected = [15, 30, 45, 60, 75, 90, 105], pytest.approx([0.1, 0.2, -0.3, -0.4, -0.5, -0.6, -0.7])
    assert read_scalars(tmp_path, "charts/a") == expected
    assert read_scalars(tmp_path, "charts/SPS")[0] == expected[0]
    assert read_scalars(tmp_path, "eval/mean_return") == ([105], [2.0])
    with pytest.raises(CheckpointError, match="already has 105 steps: increase --total-timesteps"):
        make_run(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="cannot resume with other arguments: seed was 1, now 7"):
        make_run(tmp_path, resume=True, seed=7)
    assert make_run(tmp_path, resume=True, total_timesteps=300, eval_interval=3).first_iteration == 8


def test_one_checkpoint_holds_the_state_of_every_rank(tmp_path: Path) -> None:
    """Both ranks resume from the same iteration, each with its own state."""

    def work(world: World, folder: Path) -> list[Any]:
        run = make_run(folder / "run", world, resume=True, checkpoint_interval=1)
        for _ in run.iterations():
            run.checkpoint(own=torch.tensor(world.rank))
            break
        run = make_run(folder / "run", world, resume=True)
        return [run.first_iteration, run.total_steps, int(run.load_checkpoint()["own"])]

    assert in_two_processes(work, tmp_path) == [[2, 120, 0], [2, 120, 1]]
    assert [file.name for file in (tmp_path / "run").glob("*.pt")] == ["checkpoint.pt"]
    with pytest.raises(CheckpointError, match="is of 2 processes, not 1"):
        make_run(tmp_path / "run", resume=True)


def test_ranks_share_gradients_numbers_and_moments(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(5, 3, (8, 3))

    def work(world: World, folder: Path) -> list[Any]:
        layer = torch.nn.Linear(2, 1)
        layer.weight.grad = torch.full((1, 2), 1.0 + world.rank)
        layer.bias.grad = torch.full((1,), 10.0 * world.rank)
        world.average_gradients(layer.parameters())
        mean, var, n = world.moments(rows[world.rank :: 2])
        return [layer.weight.grad.tolist(), layer.bias.grad.tolist(), world.mean(3.0 * world.rank), mean.tolist(),
                var.tolist(), n]  # fmt: skip

    for weight, bias, number, mean, var, n in in_two_processes(work, tmp_path):
        assert (weight, bias, number, n) == ([[1.5, 1.5]], [5.0], 1.5, 8)
        np.testing.assert_allclose(mean, rows.mean(0))
        np.testing.assert_allclose(var, rows.var(0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_loss_stops_the_run_and_names_the_last_good_checkpoint(tmp_path: Path, value: float) -> None:
    run = make_run(tmp_path)
    for iteration in run.iterations():
        if iteration == 1:
            run.log({"losses/policy_loss": 1.0, "losses/explained_variance": math.nan, "charts/a": math.nan})
            with pytest.raises(NonFiniteLoss, match=r"iteration 1: losses/grad_norm is .*; no checkpoint yet"):
                run.log({"losses/policy_loss": 1.0, "losses/grad_norm": value})
        run.checkpoint()
        if iteration == 3:
            with pytest.raises(NonFiniteLoss, match=f"the last good checkpoint is {tmp_path}/checkpoint.pt"):
                run.log({"losses/value_loss": value})


def test_saved_model_is_readable_without_torch_and_clustergym(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 1)
    shared = torch.nn.Sequential(layer, layer)
    make_run(tmp_path).save_model(agent=shared)
    assert not (tmp_path / "model.pt").exists()
    make_run(tmp_path, save_model=True).save_model(agent=shared)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert sorted(tensors) == ["agent.0.bias", "agent.0.weight", "agent.1.bias", "agent.1.weight"]
    assert tensors["agent.1.weight"].tolist() == layer.weight.tolist()
    about = json.loads((tmp_path / "model.json").read_text())
    assert (about["trainer"], about["args"]["total_timesteps"]) == ("x", 100)
    state = load_checkpoint(tmp_path / "model.pt", "x-model")
    assert torch.equal(state["agent"]["0.weight"], layer.weight)


# Weights & Biases


@pytest.fixture
def wandb_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Instead of wandb: the settings of each run, and what was logged."""
    calls: list[Any] = []

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return SimpleNamespace(log=lambda *given, **_: calls.append(given[0]), finish=lambda: None)

    fake = SimpleNamespace(
        init=init, errors=SimpleNamespace(UsageError=KeyError),
        Video=lambda file, format: f"video {Path(file).name}",
    )  # fmt: skip
    monkeypatch.setattr(runs, "require", lambda name, extra: fake)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    return calls


def test_only_a_resumed_run_uses_its_wandb_id_again(tmp_path: Path, wandb_calls: list[Any]) -> None:
    """Two folders with the same name are two runs. A new run in an old folder is one too."""
    for folder in ("a/same", "b/same"):
        run = make_run(tmp_path / folder, track=True)
        for _ in run.iterations():
            run.checkpoint()
            if run.iteration == 2:
                break
    make_run(tmp_path / "a/same", track=True, resume=True)
    (tmp_path / "a/same/checkpoint.pt").unlink()
    make_run(tmp_path / "a/same", track=True)
    first, other, resumed, again = [each["id"] for each in wandb_calls]
    assert first == resumed
    assert len({first, other, again}) == 3
    assert [each["resume"] for each in wandb_calls] == ["never", "never", "allow", "never"]
    assert all(each["save_code"] and each["project"] == "clustergym" for each in wandb_calls)


def test_sweep_is_tracked_and_chooses_project_and_id(
    tmp_path: Path, wandb_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "alone")
    assert wandb_calls == []
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    make_run(tmp_path / "sweep")
    assert not {"project", "id", "resume"} & wandb_calls[0].keys()


def test_videos_and_metrics_are_uploaded(tmp_path: Path, wandb_calls: list[Any]) -> None:
    run = make_run(tmp_path, track=True, capture_video=True, total_timesteps=15)
    for _ in run.iterations():
        run.log({"charts/a": 1.0})
        folder = run.video_folder()
        assert folder == tmp_path / "videos" / "step-15"
        folder.mkdir(parents=True)
        (folder / "episode.mp4").touch()
    run.finish([2.0])
    assert wandb_calls[1]["charts/a"] == 1.0
    assert {"videos/step-15": "video episode.mp4"} in wandb_calls
    assert wandb_calls[-1]["final/mean_return"] == 2.0


@pytest.mark.usefixtures("new_wandb_session")
def test_wandb_offline_writes_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = make_run(tmp_path, track=True, total_timesteps=15)
    for _ in run.iterations():
        run.log({"charts/a": 1.0})
    run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
