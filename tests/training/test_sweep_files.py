"""The sweep files of the repository are valid, and the trainers, flags and metrics that they name exist."""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clustergym.sweeping import read_sweep, search_space
from clustergym.training.args import parse_args
from trainers import FOLDER, load_trainer

ROOT = FOLDER.parent
FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
# Learns from feedback over HTTP, so it cannot be swept offline; the name of a file that has moved.
NOT_SWEPT = {"ppo_gpu_alloc_online", "ppo_recurrent"}


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
def test_wandb_accepts_the_file(file: Path) -> None:
    """With the schema in wandb's own package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweeps = pytest.importorskip("sweeps")
    assert sweeps.schema_violations_from_proposed_config(yaml.safe_load(file.read_text())) == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_trainer_logs_the_metric(file: Path) -> None:
    sweep = read_sweep(file)
    assert any(re.fullmatch(pattern, sweep.metric["name"]) for pattern in tags(ROOT / sweep.program))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_trainer_parses_the_proposed_flags(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Args of the trainer parse two commands of the sweep to the proposed values."""
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(file)
    module = load_trainer(Path(sweep.program).stem)
    for seed in range(2):
        generator = np.random.default_rng(seed)
        proposed = {
            name: domain.sample(random_state=generator) if hasattr(domain, "sample") else domain
            for name, domain in search_space(sweep).items()
        }
        command = sweep.command_line(proposed)
        flags = [*command[command.index(sweep.program) + 1 :], f"--seed={seed}", f"--run-dir={tmp_path}"]
        values = all_values(parse_args(module.Args, argv=flags, ranges=getattr(module, "RANGES", None)))
        for name, value in proposed.items():
            found = values[name.replace("-", "_")]
            if isinstance(found, tuple):  # a flag that takes several values gets one
                (found,) = found
            assert str(found) == str(value) or found == pytest.approx(value), name
