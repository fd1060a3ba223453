"""The infrastructure of the trainers: run folders, checkpoints, logging, random states, progress and results."""

from __future__ import annotations

import ast
import json
import math
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clustergym.training
from clustergym.training import (
    CheckpointError,
    Progress,
    RunLogger,
    capture_rng_state,
    check_same_args,
    choose_device,
    derive_seed,
    load_checkpoint,
    print_result,
    read_scalars,
    restore_rng_state,
    run_folder,
    save_checkpoint,
)


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


@pytest.mark.usefixtures("new_wandb_session")
def test_wandb_offline_writes_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
