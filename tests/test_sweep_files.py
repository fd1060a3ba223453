"""The sweep files of the repository are valid, and the trainers, flags and metrics that they name exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tyro

from clustergym.sweeping import load_sweep
from clustergym.sweeping.proposers import make_proposer

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
# Learns from feedback over HTTP, so it cannot be swept offline.
NOT_SWEPT = {"ppo_gpu_alloc_online"}


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


gen_pages = load_module(ROOT / "docs" / "gen_pages.py")


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


def test_every_trainer_has_a_sweep_file() -> None:
    trainers = {path.stem for path in gen_pages.trainers()} - NOT_SWEPT
    assert {path.stem for path in FILES} == trainers


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_file_is_valid_and_the_names_in_it_exist(file: Path) -> None:
    sweep = load_sweep(file)
    program = ROOT / sweep.program
    assert program.is_file()
    known = {name for rows in gen_pages.flag_groups(program).values() for name, *_ in rows}
    unknown = [name for name in sweep.config["parameters"] if name.replace("-", "_") not in known]
    assert not unknown
    assert sweep.metric is not None
    assert any(re.fullmatch(pattern, sweep.metric) for pattern in tags(program)), (
        f"{program.name} logs no {sweep.metric}"
    )
    assert sweep.config["metric"]["goal"] in ("maximize", "minimize")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_trainer_parses_the_proposed_flags(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Args of the trainer parse the first two commands of the sweep to the proposed values."""
    monkeypatch.chdir(ROOT)
    sweep = load_sweep(file)
    module: Any = load_module(ROOT / sweep.program)
    parse = getattr(module, "parse_args", None) or (lambda argv: tyro.cli(module.Args, args=argv))
    for seed in range(2):
        proposed = make_proposer("sweeps", sweep, seed).propose([])
        assert proposed is not None
        command = sweep.command(proposed, tmp_path)
        args = parse([*command[command.index(sweep.program) + 1 :], f"--run-dir={tmp_path}"])
        groups = [vars(value) for value in vars(args).values() if is_dataclass(value)]
        parsed = {key: value for group in [vars(args), *groups] for key, value in group.items()}
        for name, value in proposed.items():
            found = parsed[name.replace("-", "_")]
            assert str(found) == str(value) or found == pytest.approx(value), name
