"""The infrastructure of the trainers: run folders, checkpoints, logging, random states, progress and results."""

from __future__ import annotations

import ast
import json
import math
import os
import pickle
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import safetensors.numpy
import torch

import clustergym.training
from clustergym.training import (
    CheckpointError,
    EpisodeStatistics,
    NonFiniteLoss,
    Progress,
    Run,
    RunLogger,
    TrainArgs,
    VectorEnvs,
    World,
    action_mask,
    capture_rng_state,
    check_same_args,
    choose_device,
    derive_seed,
    flat_size,
    flatten,
    load_checkpoint,
    parse_args,
    play_episodes,
    print_result,
    read_scalars,
    restore_rng_state,
    run_folder,
    save_checkpoint,
)
from trainers import in_two_processes


def test_new_run_takes_the_next_free_folder_and_resume_takes_the_last_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder("a") == Path("runs/a")
    assert run_folder("a") == Path("runs/a-2")
    (tmp_path / "runs/a-10").mkdir()
    (tmp_path / "runs/a-b-99").mkdir()  # another name with the same prefix
    assert run_folder("a") == Path("runs/a-11")
    (tmp_path / "runs/a-2/checkpoint.pt").touch()
    assert run_folder("a", resume=True) == Path("runs/a-2")
    assert run_folder("b", resume=True) == Path("runs/b")


def test_run_dir_with_a_checkpoint_is_refused_without_resume(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    assert run_folder("a", folder) == folder
    (folder / "checkpoint.pt").touch()
    assert run_folder("a", folder, resume=True) == folder
    with pytest.raises(FileExistsError, match="use --resume to continue that run"):
        run_folder("a", folder)


def state() -> dict[str, Any]:
    return {"weights": torch.arange(5.0), "iteration": 3, "args": {"env": "x", "kl": None}, "returns": [1.5, 2.5]}


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "deep" / "c.pt", "ppo", state())
    loaded = load_checkpoint(tmp_path / "deep" / "c.pt", "ppo")
    assert torch.equal(loaded.pop("weights"), state().pop("weights"))
    assert loaded == {key: value for key, value in state().items() if key != "weights"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c.pt"]


@pytest.mark.parametrize("failing", ["save", "fsync", "replace"])
def test_failed_save_keeps_the_old_checkpoint_and_leaves_no_temporary_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, "ppo", state())
    before = path.read_bytes()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch if failing == "save" else os, failing, broken)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, "ppo", {"weights": torch.zeros(9)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_unusable_checkpoint_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(path, "ppo")

    save_checkpoint(path, "ppo", state())
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(
            CheckpointError, match=rf"c\.pt \({cut} bytes\) is truncated or not a clustergym checkpoint"
        ):
            load_checkpoint(path, "ppo")

    torch.save({"model": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="was not written by clustergym: found model"):
        load_checkpoint(path, "ppo")
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="was not written by clustergym: found list"):
        load_checkpoint(path, "ppo")

    torch.save({"format": "clustergym-checkpoint", "schema": 99, "kind": "ppo", "state": {}}, path)
    with pytest.raises(CheckpointError, match="has schema 99, but this clustergym reads up to 1: update clustergym"):
        load_checkpoint(path, "ppo")

    save_checkpoint(path, "ppo_lstm", state())
    with pytest.raises(CheckpointError, match="belongs to 'ppo_lstm', not to 'ppo'"):
        load_checkpoint(path, "ppo")


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_checkpoint_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": "clustergym-checkpoint", "schema": 1, "kind": "ppo", "state": Malicious()}, "c.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(Path("c.pt"), "ppo")
    Path("plain.pt").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError):
        load_checkpoint(Path("plain.pt"), "ppo")
    assert not Path("ran").exists()


def test_resume_with_other_hyperparameters_is_refused() -> None:
    saved = {"lr": 1.0, "seed": 1, "track": False, "gone": 1}
    check_same_args(saved, saved | {"track": True, "resume": True})
    check_same_args(saved, saved | {"lr": 2.0}, may_differ=["lr"])
    with pytest.raises(CheckpointError, match=r"ppo\.clip was 0\.2, now 0\.1$"):
        check_same_args(saved | {"ppo": {"clip": 0.2, "envs": 4}}, saved | {"ppo": {"clip": 0.1, "envs": 4}})
    with pytest.raises(CheckpointError, match=r"gone was 1, now None; lr was 1\.0, now 2\.0"):
        check_same_args(saved, {"lr": 2.0, "seed": 1})


def test_random_state_round_trip(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    generator.standard_normal(3)
    save_checkpoint(tmp_path / "c.pt", "x", {"rng": capture_rng_state(generator)})
    expected = generator.random(4), torch.randn(4)
    loaded = load_checkpoint(tmp_path / "c.pt", "x")["rng"]
    other = np.random.default_rng(6)
    restore_rng_state(loaded, other)
    assert np.array_equal(other.random(4), expected[0])
    assert torch.equal(torch.randn(4), expected[1])


def test_derived_seeds_are_stable_distinct_and_have_31_bits() -> None:
    seeds = {derive_seed(seed, iteration, rank) for seed in range(10) for iteration in range(50) for rank in range(4)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3) != derive_seed(3, 2, 1)


def test_resumed_run_hides_the_scalars_after_its_checkpoint(tmp_path: Path) -> None:
    with RunLogger(tmp_path, {"lr": 1.0}) as logger:
        for step in (10, 20, 30):
            logger.scalars({"charts/a": step / 10, "charts/b": 0.0}, step)
    with RunLogger(tmp_path, {"lr": 1.0}, start_step=20) as logger:
        logger.scalar("charts/a", -1.0, 30)
    assert read_scalars(tmp_path, "charts/a") == ([10, 20, 30], [1.0, 2.0, -1.0])
    with pytest.raises(KeyError, match=r"no scalar 'charts/c': it has charts/a, charts/b"):
        read_scalars(tmp_path, "charts/c")


def test_run_resumed_within_the_same_second_is_read_second(tmp_path: Path) -> None:
    with RunLogger(tmp_path, {}) as logger:
        for step in (10, 20, 30):
            logger.scalar("a", step, step)
    # The file name of the killed process sorts after that of the resumed one, which would then hide nothing.
    (file,) = tmp_path.glob("events.out.tfevents.*")
    file.rename(tmp_path / f"events.out.tfevents.{int(time.time())}.zzz.999.0")
    with RunLogger(tmp_path, {}, start_step=20) as logger:
        logger.scalar("a", -1.0, 30)
    assert read_scalars(tmp_path, "a") == ([10, 20, 30], [10.0, 20.0, -1.0])


def test_disabled_logger_writes_nothing(tmp_path: Path) -> None:
    with RunLogger(tmp_path, {}, enabled=False) as logger:
        logger.scalar("a", 1.0, 1)
        logger.text("b", "c", 1)
        logger.flush()
    assert not list(tmp_path.iterdir())


def test_wandb_offline_writes_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with RunLogger(tmp_path / "run", {"lr": 1.0}, track=True) as logger:
        logger.scalar("charts/a", 1.0, 1)
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))


def test_progress_without_a_terminal_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000, start_step=500, line_every_s=1e9) as progress:
        progress.update(600, mean_return=1.0)
        progress.update(1000, mean_return=12.5, missing=math.nan)
        assert progress.steps_per_s(1000) > 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("1,000/1,000 steps")
    assert "mean_return 12.5" in err
    assert "missing" not in err


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    with Progress(1000) as progress:
        progress.update(250, mean_return=3.0)
    err = capsys.readouterr().err
    assert "250/1000" in err
    assert "steps/s" in err
    assert "mean_return 3" in err


def test_result_line_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(
        {"a": np.float32(1.5), "b": math.nan, "path": Path("x"), "list": (1, np.int64(2)), "deep": {"c": math.inf}}
    )
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("result ")
    assert json.loads(line.removeprefix("result ")) == {
        "a": 1.5,
        "b": None,
        "path": "x",
        "list": [1, 2],
        "deep": {"c": None},
    }


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(False) == torch.device("cpu")
    with pytest.raises(RuntimeError, match="torch finds no GPU"):
        choose_device(True)


# Runs


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


# Vector environments


def test_observations_are_flattened() -> None:
    spaces = gym.spaces
    space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        kind=spaces.Discrete(3, start=5),
        flags=spaces.MultiBinary(2),
        action_mask=spaces.Box(0, 1, (4,), np.int8),
    )
    obs = {
        "image": np.arange(8).reshape(2, 2, 2),
        "kind": np.array([5, 7]),
        "flags": np.array([[0, 1], [1, 0]]),
        "action_mask": np.array([[1, 0, 1, 1], [0, 1, 0, 0]]),
    }
    rows = {"flags": [0, 1], "image": [0, 1, 2, 3], "kind": [1, 0, 0]}
    flat = flatten(space, obs)
    assert flat.shape == (2, flat_size(space)) == (2, 9)
    assert flat[0].tolist() == list(chain(*(rows[key] for key in space if key != "action_mask")))
    assert action_mask(obs, {}).tolist() == [[True, False, True, True], [False, True, False, False]]
    with pytest.raises(TypeError, match="Tuple"):
        flat_size(spaces.Tuple([space]))


def test_episode_statistics_by_hand() -> None:
    statistics = EpisodeStatistics(2)
    assert math.isnan(statistics.charts()["charts/mean_return_100"])
    every = np.ones(2, bool)
    statistics.step(np.array([1.0, 2.0]), np.array([False, True]), every)
    statistics.step(np.array([3.0, 5.0]), np.array([True, False]), every)
    expected = {"charts/mean_return_100": 3.0, "charts/episodic_return": 3.0, "charts/episodic_length": 1.5}
    assert statistics.charts() == expected
    # A reset step has no length, and unfinished episodes are forgotten after restart().
    statistics.step(np.array([0.0, 1.0]), np.array([False, True]), np.array([False, True]))
    statistics.step(np.array([7.0, 9.0]), np.array([True, False]), every)
    expected = {"charts/mean_return_100": 4.75, "charts/episodic_return": 6.5, "charts/episodic_length": 1.5}
    assert statistics.charts() == expected
    statistics.step(np.array([50.0, 50.0]), np.array([False, False]), every)
    statistics.restart()
    statistics.step(np.array([1.0, 1.0]), np.array([True, True]), every)
    assert statistics.charts()["charts/episodic_return"] == 1.0
    statistics.add([0.0] * 200, [1] * 200)
    assert statistics.charts()["charts/mean_return_100"] == statistics.mean_return_100 == 0.0


class Countdown(gym.Env[Any, Any]):
    """Reward 1 per step. An episode has 2 + seed % 3 steps."""

    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.left = 2 + (seed or 0) % 3
        return self.left, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.left, float(action), self.left == 0, False, {}


@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_play_episodes_counts_one_episode_per_environment(mode: gym.vector.AutoresetMode) -> None:
    envs = VectorEnvs(gym.vector.SyncVectorEnv([Countdown] * 3, autoreset_mode=mode), seed=3)
    assert play_episodes(envs, lambda obs, _: torch.ones(len(obs), dtype=torch.int64)) == [2.0, 3.0, 4.0]


class Masked(Countdown):
    """The mask in the info names the number of steps left."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"action_mask": np.arange(5) == self.left}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, truncated, terminated, {"action_mask": np.arange(5) == self.left}


class MaskInObservation(Masked):
    """The mask is part of the observation."""

    observation_space = gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(5), left=gym.spaces.Discrete(9))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return info | {"left": obs}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return info | {"left": obs}, reward, terminated, truncated, {}


@pytest.mark.parametrize("env", [Masked, MaskInObservation])
@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_observations_masks_and_last_observations_for_every_autoreset_mode(
    mode: gym.vector.AutoresetMode, env: type[Masked]
) -> None:
    """Environments count down from 2, 3 and 4. Ends are truncations with observation 0 (one-hot, so column 0)."""
    statistics = EpisodeStatistics(3)
    envs = VectorEnvs(gym.vector.SyncVectorEnv([env] * 3, autoreset_mode=mode), seed=3, episodes=statistics)
    lengths = []
    for _ in range(12):
        left = envs.obs.argmax(1)
        assert envs.masks is not None
        assert torch.equal(envs.masks.int().argmax(1), left)
        step = envs.step(torch.ones(3, dtype=torch.int64))
        assert step.rewards.dtype == torch.float32
        assert torch.equal(step.valid, left > 0)
        assert step.valid.all() or mode == gym.vector.AutoresetMode.NEXT_STEP
        assert torch.equal(step.truncated, left == 1)
        cut, last_obs = step.final_obs
        assert torch.equal(cut, step.truncated.nonzero().squeeze(1))
        assert bool((last_obs.argmax(1) == 0).all())
        lengths += [1] * int(step.truncated.sum())
    charts = statistics.charts()
    # Later episodes start without a seed and have two steps.
    assert charts["charts/episodic_return"] == charts["charts/episodic_length"]
    assert 2 <= charts["charts/episodic_length"] < 3
    envs.close()


class OneComponent(Masked):
    action_space = gym.spaces.MultiDiscrete([3])

    def step(self, action: Any) -> tuple[Any, ...]:
        assert action.shape == (1,)
        return super().step(1)


def test_actions_have_the_shape_of_the_action_space() -> None:
    """A policy over one component returns one number per environment."""
    envs = VectorEnvs(gym.vector.SyncVectorEnv([OneComponent] * 3), seed=3)
    assert envs.step(torch.ones(3, dtype=torch.int64)).valid.all()
    envs.close()


# Arguments


@dataclass
class Group:
    width: int = 3
    deep: bool = False


@dataclass
class Flags(TrainArgs):
    rate: float = 0.1
    sizes: list[int] = field(default_factory=lambda: [1])
    limit: float | None = 0.5
    anneal: bool = True
    preset: str = "tuned"
    group: Group = field(default_factory=Group)


def test_config_file_sets_defaults_and_flags_come_first(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "rate: 1e-3\ntotal-timesteps: 7\nsizes: [4, 5]\nlimit: null\nanneal: false\ntrack: true\n"
        "group: {width: 9, deep: true}\nrun_dir: x/y\n"
    )
    args = parse_args(Flags, argv=["--config", str(file)])
    assert (args.rate, args.total_timesteps, args.sizes, args.limit) == (1e-3, 7, [4, 5], None)
    assert (args.anneal, args.track, args.group, args.run_dir) == (False, True, Group(9, True), Path("x/y"))
    assert args.config == file
    args = parse_args(Flags, argv=[f"--config={file}", "--rate=2", "--anneal", "--group.width", "1", "--sizes", "8"])
    assert (args.rate, args.anneal, args.group, args.sizes, args.total_timesteps) == (2, True, Group(1, True), [8], 7)


def test_presets_are_defaults_below_the_config_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("preset: small\nrate: 3\n")
    presets = {"small": {"rate": 0.7, "total_timesteps": 8, "anneal": False}}
    args = parse_args(Flags, argv=["--preset", "small"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 0.7, 8, False)
    args = parse_args(Flags, argv=["--config", str(file), "--total-timesteps", "500000"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 3.0, 500_000, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rat: 1", "no flag 'rat'. The flags are .*rate"),
        ("group: {size: 1}", "no flag 'group.size'"),
        ("- 1", "expected names and values of flags, found list"),
        ("a: [", "while parsing"),
    ],
)
def test_invalid_config_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit, match=message):
        parse_args(Flags, argv=["--config", str(tmp_path / "a.yaml")])


def test_missing_config_file_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"nowhere\.yaml"):
        parse_args(Flags, argv=["--config", "nowhere.yaml"])


def test_shared_arguments_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(TrainArgs, argv=["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Project in Weights & Biases" in shown
    assert "Record an episode of each evaluation" in shown


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


def test_run_of_a_wandb_sweep_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with RunLogger(tmp_path / "alone", {}) as logger:
        assert logger._wandb is None
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with RunLogger(tmp_path / "sweep", {}) as logger:
        logger.scalar("charts/episodic_return", 1.0, 1)
        assert logger._wandb is not None
    assert list((tmp_path / "sweep").rglob("*.wandb"))


def test_project_and_entity_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    @dataclass
    class Tracked(Args):
        track: bool = True
        wandb_project_name: str = "mine"
        wandb_entity: str | None = "team"

    with Run("x", Tracked(tmp_path), World(), "task", 10) as run:
        assert (run.logger._wandb.project, run.logger._wandb.entity) == ("mine", "team")


def test_training_imports_only_common() -> None:
    imported = {
        node.module or ""
        for file in Path(clustergym.training.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    ours = {module for module in imported if module.partition(".")[0] == "clustergym"}
    assert ours
    assert {module.split(".")[1] for module in ours} <= {"common", "training"}
