"""The infrastructure of the trainers: run folders, checkpoints, logs, random states and devices."""

from __future__ import annotations

import ast
import math
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clustergym.training
from clustergym.common.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from clustergym.training.args import FlagError
from clustergym.training.distributed import choose_device
from clustergym.training.envs import derive_seed
from clustergym.training.logs import Progress, open_tensorboard, read_scalars
from clustergym.training.runs import choose_folder, rng_state, set_rng_state


def test_new_run_takes_the_next_free_folder_and_resume_takes_the_last_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_folder("a", None, False) == Path("runs/a")
    for name in ("a", "a-2", "a-10", "a-b-99"):  # the last one is another name with the same prefix
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert choose_folder("a", None, False) == Path("runs/a-11")
    (tmp_path / "runs/a-2/checkpoint.pt").touch()
    assert choose_folder("a", None, True) == Path("runs/a-2")
    assert choose_folder("b", None, True) == Path("runs/b")


def test_run_dir_with_a_checkpoint_is_refused_without_resume(tmp_path: Path) -> None:
    assert choose_folder("a", tmp_path, False) == tmp_path
    (tmp_path / "checkpoint.pt").touch()
    assert choose_folder("a", tmp_path, True) == tmp_path
    with pytest.raises(FlagError, match="use --resume to continue that run"):
        choose_folder("a", tmp_path, False)


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


def test_random_state_round_trip(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [torch.randn(4).tolist(), np.random.rand(4).tolist(), random.random()]  # noqa: NPY002

    save_checkpoint(tmp_path / "c.pt", "x", {"rng": rng_state()})
    expected = draw()
    assert draw() != expected
    set_rng_state(load_checkpoint(tmp_path / "c.pt", "x")["rng"])
    assert draw() == expected


def test_derived_seeds_are_stable_distinct_and_have_31_bits() -> None:
    seeds = {derive_seed(seed, iteration, rank) for seed in range(10) for iteration in range(50) for rank in range(4)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3) != derive_seed(3, 2, 1)


def log(folder: Path, scalars: dict[int, float], start_step: int = 0) -> None:
    with open_tensorboard(folder, {"lr": 1.0}, start_step) as writer:
        for step, value in scalars.items():
            writer.add_scalar("charts/a", value, step)


def test_resumed_run_hides_the_scalars_after_its_checkpoint(tmp_path: Path) -> None:
    log(tmp_path, {10: 1.0, 20: 2.0, 30: 3.0})
    log(tmp_path, {30: -1.0}, start_step=20)
    assert read_scalars(tmp_path, "charts/a") == ([10, 20, 30], [1.0, 2.0, -1.0])
    with pytest.raises(KeyError, match=r"no scalar 'charts/c': it has charts/a"):
        read_scalars(tmp_path, "charts/c")


def test_run_resumed_within_the_same_second_is_read_second(tmp_path: Path) -> None:
    log(tmp_path, {10: 1.0, 20: 2.0, 30: 3.0})
    # The file name of the killed process sorts after that of the resumed one, which would then hide nothing.
    (file,) = tmp_path.glob("events.out.tfevents.*")
    file.rename(tmp_path / f"events.out.tfevents.{int(time.time())}.zzz.999.0")
    log(tmp_path, {30: -1.0}, start_step=20)
    assert read_scalars(tmp_path, "charts/a") == ([10, 20, 30], [1.0, 2.0, -1.0])


def test_progress_without_a_terminal_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1000, start_step=500)
    progress.update(600, {"mean_return": 1.0})
    progress.update(1000, {"mean_return": 12.5, "missing": math.nan})
    assert progress.steps_per_s(1000) > 0
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("1,000/1,000 steps")
    assert "mean_return 12.5" in err
    assert "missing" not in err


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    progress = Progress(1000, start_step=0)
    progress.update(250, {"mean_return": 3.0})
    progress.close()
    err = capsys.readouterr().err
    assert "250/1000" in err
    assert "steps/s" in err
    assert "mean_return 3" in err


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(False) == torch.device("cpu")
    assert choose_device(None) == torch.device("cpu")
    with pytest.raises(FlagError, match="torch finds no GPU"):
        choose_device(True)


def test_gpu_is_used_without_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic kernels on demand."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        assert choose_device(None, 1) == torch.device("cuda", 1)
        assert choose_device(False, 1, deterministic=True) == torch.device("cpu")
        assert not torch.are_deterministic_algorithms_enabled()
        choose_device(None, 1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


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
