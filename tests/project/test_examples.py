"""The notebooks and the example run, print what they promise, and draw pictures."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import nbformat
import pytest
from nbclient import NotebookClient

from clustergym.planners.registry import PLANNERS
from doc_commands import ROOT, commands

NOTEBOOKS = ("allocation", "offload", "placement")


def test_the_guide_shows_every_example() -> None:
    page = ROOT / "docs" / "guides" / "examples.md"
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb")) == list(NOTEBOOKS)
    assert "python examples/custom_planner.py" in commands(page)
    for name in NOTEBOOKS:
        assert f"(../../examples/{name}.ipynb)" in page.read_text()
        assert (ROOT / "docs" / "images" / "examples" / f"{name}.png").is_file()


def test_notebooks_are_committed_without_outputs() -> None:
    for name in NOTEBOOKS:
        notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", 4)
        nbformat.validate(notebook)
        assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)


def printed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the cells of a notebook print when they are run one after another. Each notebook draws a picture."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel draws into the notebook
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", 4)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
def test_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule in four lines is better than random evictions."""
    output = printed("offload", tmp_path, monkeypatch)
    stall = {name: float(ms) for name, ms in re.findall(r"^([\w ]+): .*?([\d.]+) ms per token", output, flags=re.M)}
    assert stall["longest ago first"] < 0.8 * stall["random"]
    assert (tmp_path / "memory.png").stat().st_size > 10_000


@pytest.mark.slow
def test_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPLB is faster than no plan, and annealing is faster than EPLB, on traffic that neither has seen."""
    output = printed("placement", tmp_path, monkeypatch)
    times = {name: float(us) for name, us in re.findall(r"^(\w+) +([\d.]+) µs", output, flags=re.M)}
    assert times["anneal"] < 0.98 * times["eplb"] < 0.98 * 0.95 * times["static"]


@pytest.mark.slow
def test_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is between the best rule and the oracle."""
    order = re.findall(r"^([\w-]+) +reward", printed("allocation", tmp_path, monkeypatch), flags=re.M)
    assert order[-2:] == ["PPO", "oracle"]
    assert len(order) == 6


@pytest.fixture
def plain_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No window is opened, and the planner that the example registers is gone afterwards."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    kept = dict(PLANNERS)
    yield
    PLANNERS.clear()
    PLANNERS.update(kept)


@pytest.mark.usefixtures("plain_registry")
def test_custom_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The planner of the example balances, so it is clearly faster than the static placement."""
    monkeypatch.setattr(sys, "argv", ["examples/custom_planner.py", str(tmp_path / "a.png")])
    runpy.run_path(str(ROOT / "examples" / "custom_planner.py"), run_name="__main__")
    assert matplotlib.image.imread(tmp_path / "a.png").std() > 0.05  # not an empty page
    totals = {
        name: float(us) for name, us in re.findall(r"│ ([\w-]+) +│[^│]+│[^│]+│ +([\d.]+)", capsys.readouterr().out)
    }
    assert totals["snake"] < 0.97 * totals["static"]
    assert set(totals) == {"static", "eplb", "flashlb", "snake", "anneal"}


def test_the_concepts_define_every_word() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    defined = {word.lower() for line in re.findall(r"^\*\*(.+?)\*\*$", page, flags=re.M) for word in line.split(", ")}
    assert {"rank", "pass", "interval", "slot", "replica", "placement", "profile"} <= defined
