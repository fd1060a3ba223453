"""Trainers are single files: shared functions are identical copies, and no trainer imports another one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections import defaultdict
from pathlib import Path

import pytest
import tyro
import yaml

from trainers import FOLDER, load_trainer

TRAINERS = sorted(FOLDER.glob("ppo*.py"))

# Names that each trainer defines in its own way. Methods are not compared.
MEANT_TO_DIFFER = {
    "Agent",
    "Args",
    "Batch",
    "Rollouts",
    "check_args",
    "collect",
    "evaluate",
    "main",
    "make_agent",
    "make_env",
    "make_envs",
    "rollout",
    "train",
    "update",
}


def definitions(path: Path) -> dict[str, str]:
    """Source of every top-level function and class of a file, by name."""
    source = path.read_text()
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def test_trainers_are_found() -> None:
    assert "ppo.py" in [path.name for path in TRAINERS]


def test_functions_with_the_same_name_are_identical() -> None:
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in TRAINERS:
        for name, source in definitions(path).items():
            sources[name][source].append(path.name)
    differing = {
        name: list(versions.values())
        for name, versions in sources.items()
        if len(versions) > 1 and name not in MEANT_TO_DIFFER
    }
    assert not differing, f"same name, different source: copy the function or rename it: {differing}"


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_continuous_action"])
def test_diff_with_ppo_shows_only_the_idea(name: str) -> None:
    """Games and continuous actions change the network and the environments, not the roll-out and the update."""
    first, other = (definitions(FOLDER / f"{each}.py") for each in ("ppo", name))
    assert first["update"] == other["update"]
    assert first["Batch"] == other["Batch"]
    collect = "    def collect(self)"
    assert first["Rollouts"].partition(collect)[2] == other["Rollouts"].partition(collect)[2] != ""


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
def test_no_trainer_imports_a_sibling(path: Path) -> None:
    siblings = {each.stem for each in FOLDER.glob("*.py")} | {FOLDER.name}
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            imported.add((node.module or "").split(".")[0])
    assert not imported & siblings


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
def test_every_argument_is_documented(path: Path) -> None:
    classes = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args")
    ]
    assert "Args" in [tree.name for tree in classes]
    undocumented = [
        node.target.id
        for tree in classes
        for node, following in zip(tree.body, [*tree.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
    ]
    assert not undocumented, f"{path.name}: Args without a docstring below: {undocumented}"


def flag_names(args: object) -> set[str]:
    """Names of all arguments, those of groups without a prefix included."""
    names: set[str] = set()
    for field in dataclasses.fields(args):
        if "OmitArgPrefixes" in str(field.type):
            names |= flag_names(getattr(args, field.name))
        else:
            names.add(field.name)
    return names


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
def test_help_shows_every_flag_and_the_common_ones_exist(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_trainer(path.stem)
    with pytest.raises(SystemExit) as stop:
        tyro.cli(module.Args, args=["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    names = {field.name for field in dataclasses.fields(module.Args)}
    for name, value in vars(module.Args()).items():
        # Flags of a nested dataclass have its name as a prefix, or no prefix (tyro.conf.OmitArgPrefixes).
        nested = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else [name]
        for flag in (one.replace("_", "-") for one in nested):
            assert any(f"--{prefix}{flag}" in shown for prefix in ("", "no-", f"{name}.")), flag
    assert {"seed", "run_dir", "cuda", "track", "save_model", "resume"} <= names
    assert inspect.getdoc(module), f"{path.name} has no module docstring"
    assert dataclasses.asdict(tyro.cli(module.Args, args=[])) == dataclasses.asdict(module.Args())


@pytest.mark.parametrize("sweep", sorted((FOLDER.parent / "sweeps").glob("*.yaml")), ids=lambda path: path.name)
def test_sweep_parameters_and_metrics_exist(sweep: Path) -> None:
    content = yaml.safe_load(sweep.read_text())
    program = FOLDER.parent / content["program"]
    fields = flag_names(load_trainer(program.stem).Args())
    unknown = {name for name in content["parameters"] if name.replace("-", "_") not in fields}
    assert not unknown, f"{sweep.name}: {program.name} has no such arguments: {unknown}"
    assert content["metric"]["goal"] in ("maximize", "minimize")
    group, _, name = content["metric"]["name"].partition("/")
    source = program.read_text()
    assert f'"{group}/{name}"' in source or (f'"{group}/{{' in source and f'"{name}"' in source)
