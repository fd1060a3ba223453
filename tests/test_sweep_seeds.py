"""Runs of a sweep with several fixed seeds: their means rank a configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from clustergym.sweeping import Runner, load_sweep
from clustergym.sweeping.scores import Scores, last_result
from clustergym.sweeping.seeds import mean_result, run_seeds, split_flags
from sweep_program import write_events

PROGRAM = str(Path(__file__).parent / "sweep_program.py")
COMMAND = ["${env}", "${interpreter}", "-m", "clustergym.sweeping.seeds", "1,2,6", "${program}", "${args}"]


def sweep_file(path: Path, **parameters: object) -> Path:
    config = {
        "program": PROGRAM, "method": "grid", "metric": {"name": "score", "goal": "maximize"}, "command": COMMAND,
        "parameters": {"x": {"values": [1, 3]}} | parameters,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_configuration_is_scored_by_the_mean_of_its_seeds(tmp_path: Path) -> None:
    runs = Runner(load_sweep(sweep_file(tmp_path / "s.yaml")), tmp_path / "sweep").run(None)
    # −(x − 3)² + seed, seeds 1, 2 and 6.
    assert {run.parameters["x"]: run.metric for run in runs} == {1: -4 + 3, 3: 0 + 3}
    assert runs[0].result is not None
    assert runs[0].result["score/seeds"] == [-3, -2, 2]
    starts = (tmp_path / "sweep" / "run-0001" / "starts.txt").read_text().splitlines()
    assert sorted(line.split()[0] for line in starts) == ["seed-1", "seed-2", "seed-6"]


def test_curves_are_means_over_seeds(tmp_path: Path) -> None:
    for seed, values in ((1, [1.0, 2.0, 3.0]), (2, [3.0, 6.0])):
        write_events(tmp_path / f"seed-{seed}", values, "m")
    scores = Scores(tmp_path, "m")
    assert scores.curve() == {0: 2.0, 1: 4.0}
    assert scores.history() == [2.0, 4.0]
    assert scores.curve(3) == {}, "one seed has not begun"


def test_seeds_with_a_result_are_not_run_again(tmp_path: Path) -> None:
    for seed, score in ((1, 10.0), (2, 20.0)):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "result.json").write_text(json.dumps({"score": score}))
    result = run_seeds([1, 2, 3], [PROGRAM, "--x=3"], tmp_path)
    assert result["score/seeds"] == [10.0, 20.0, 3.0]
    assert result["score"] == 11.0
    assert (tmp_path / "starts.txt").read_text().startswith("seed-3 ")


def test_a_seed_that_fails_fails_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clustergym.sweeping.seeds", "1,2", PROGRAM, "--x=1", "--kind=crash"]
    done = subprocess.run([*command, f"--run-dir={tmp_path}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: cannot train with x = 1.0" in done.stderr


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_seed_survives_its_run(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clustergym.sweeping.seeds", "1,2", PROGRAM, "--x=1", "--pause=30", "--steps=9"]
    process = subprocess.Popen([*command, f"--run-dir={tmp_path}"], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    starts: list[str] = []
    while len(starts) < 2 and time.monotonic() < until:
        time.sleep(0.05)
        starts = (tmp_path / "starts.txt").read_text().splitlines() if (tmp_path / "starts.txt").exists() else []
    os.kill(process.pid, number)
    process.wait(timeout=60)
    pids = [int(line.split()[1]) for line in starts]
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_means_of_results() -> None:
    results = [{"a": 1, "b": True, "c": "x", "d": 1.0}, {"a": 2, "b": True, "c": "x", "d": float("nan")}]
    assert mean_result(results) == {"a": 1.5, "a/seeds": [1, 2]}


def test_a_searched_seed_is_refused() -> None:
    assert split_flags(["--x=1", "--run-dir=a", "--resume"]) == (["--x=1"], Path("a"), True)
    with pytest.raises(SystemExit, match="seed is a parameter of the sweep"):
        split_flags(["--seed=3"])


def test_a_wandb_sweep_gets_the_means(tmp_path: Path) -> None:
    """With a real wandb in offline mode: the run of the agent has the means, the trainers do not write to it."""
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "clustergym.sweeping.seeds", "1,2", PROGRAM, "--x=3", "--kind=events"]
    wandb = {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "r", "WANDB_DIR": str(tmp_path)}
    environment = os.environ | wandb
    done = subprocess.run(
        [*command, f"--run-dir={tmp_path / 'run'}"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-r.wandb")
    content = record.read_bytes()
    assert b"eval/score" in content
    assert last_result(tmp_path / "run" / "seed-1" / "output.log") is None
