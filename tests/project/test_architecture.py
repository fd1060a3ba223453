"""The layout: imports go one way, and the contracts in pyproject.toml notice when one does not."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "envs" / "clustergym"
TRAINERS = sorted((ROOT / "cleanrl_ppo").glob("*.py"))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lint-imports on the copy of the package in ``folder``."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "envs")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(PACKAGE, folder / "envs" / "clustergym", ignore=lambda at, names: _not_source(Path(at), names))
    return folder


def _not_source(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or not ((folder / name).is_dir() or name.endswith(".py"))]


def test_the_contracts_hold(copied: Path) -> None:
    result = lint_imports(copied)
    assert result.returncode == 0, result.stdout
    assert " 0 broken." in result.stdout


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("common/files.py", "clustergym.traces.token_trace"),
        ("gpu_allocation/specs.py", "clustergym.traces.token_trace"),
        ("agent/settings.py", "clustergym.training"),
        ("moe_placement/kernels/cost.py", "clustergym.moe_placement.launchers.cpu"),
        ("moe_offload/kernels/state.py", "clustergym.moe_offload.batch"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(copied: Path, module: str, imported: str) -> None:
    path = copied / "envs" / "clustergym" / module
    source = path.read_text()
    try:
        # Inside a function, because a late import is an import too.
        path.write_text(f"{source}\n\ndef _late() -> None:\n    import {imported}\n")
        result = lint_imports(copied)
    finally:
        path.write_text(source)
    assert result.returncode == 1, result.stdout
    assert f"-> {imported}" in " ".join(result.stdout.split())  # long lines are wrapped


def test_a_package_without_a_place_breaks_a_contract(copied: Path) -> None:
    path = copied / "envs" / "clustergym" / "newcomer.py"
    path.write_text("")
    try:
        result = lint_imports(copied)
    finally:
        path.unlink()
    assert result.returncode == 1
    assert "newcomer" in result.stdout


def imported_names(path: Path) -> set[str]:
    """First components of all modules that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module).split(".")[0])
    return names


def test_imported_names_finds_late_and_relative_imports(tmp_path: Path) -> None:
    path = tmp_path / "trainer.py"
    path.write_text("import os.path\n\ndef main():\n    from ppo import Agent\n    from .ppo import Agent\n")
    assert imported_names(path) == {"os", "ppo", "."}


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.stem)
def test_a_trainer_imports_no_other_trainer(path: Path) -> None:
    assert not imported_names(path) & ({trainer.stem for trainer in TRAINERS} | {"cleanrl_ppo", "."})


def test_the_package_imports_no_trainer() -> None:
    trainers = {trainer.stem for trainer in TRAINERS} | {"cleanrl_ppo"}
    assert not {path: found for path in PACKAGE.rglob("*.py") if (found := imported_names(path) & trainers)}
