"""The sweep files of the repository are valid, and the trainers, flags and metrics that they name exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from clustergym.sweeping import load_sweep
from clustergym.sweeping.proposers import make_proposer
from clustergym.training import parse_args
from trainers import FOLDER, load_trainer

ROOT = FOLDER.parent
FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
# Learns from feedback over HTTP, so it cannot be swept offline.
NOT_SWEPT = {"ppo_gpu_alloc_online"}


@lru_cache
def tags(path: Path) -> list[str]:
    """Regular expressions of all strings in a source file. Fields of an f-string match anything."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".+" for v in node.values]
            if any(part != ".+" for part in parts):
                found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.escape(node.value))
    return found


def all_values(args: Any) -> dict[str, Any]:
    """Arguments by name, including those in groups."""
    values = vars(args)
    groups = [value for value in values.values() if dataclasses.is_dataclass(value)]
    return values | {name: value for group in groups for name, value in all_values(group).items()}


def test_every_trainer_has_a_sweep_file() -> None:
    assert {path.stem for path in FILES} == {path.stem for path in FOLDER.glob("ppo*.py")} - NOT_SWEPT


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_file_is_valid_and_the_trainer_logs_its_metric(file: Path) -> None:
    sweep = load_sweep(file)
    assert sweep.metric is not None
    assert any(re.fullmatch(pattern, sweep.metric) for pattern in tags(ROOT / sweep.program))
    assert sweep.config["metric"]["goal"] in ("maximize", "minimize")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_configuration_runs_with_fixed_seeds(file: Path, tmp_path: Path) -> None:
    """A search that draws the seed picks lucky ones."""
    sweep = load_sweep(file)
    assert "seed" not in sweep.config["parameters"]
    command = sweep.command({}, tmp_path)
    assert command[2:4] == ["-m", "clustergym.sweeping.seeds"]
    assert len(command[4].split(",")) >= 2
    assert command[5] == sweep.program


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_trainer_parses_the_proposed_flags(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Args of the trainer parse the first two commands of the sweep to the proposed values."""
    monkeypatch.chdir(ROOT)
    sweep = load_sweep(file)
    module = load_trainer(Path(sweep.program).stem)
    for seed in range(2):
        proposed = make_proposer("sweeps", sweep, seed).propose([])
        assert proposed is not None
        assert proposed.keys() == sweep.config["parameters"].keys()
        command = sweep.command(proposed, tmp_path)
        flags = [*command[command.index(sweep.program) + 1 :], f"--run-dir={tmp_path}"]
        values = all_values(parse_args(module.Args, argv=flags))
        for name, value in proposed.items():
            found = values[name.replace("-", "_")]
            if isinstance(found, tuple):  # a flag that takes several values gets one
                (found,) = found
            assert str(found) == str(value) or found == pytest.approx(value), name
