"""The examples run, print what they promise, and draw a picture."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import pytest

from clustergym.planners.registry import PLANNERS
from doc_commands import ROOT, commands

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def plain_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No window is opened, and planners that an example registers are gone afterwards."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    kept = dict(PLANNERS)
    yield
    PLANNERS.clear()
    PLANNERS.update(kept)


def output_of(name: str, picture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", str(picture)])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert matplotlib.image.imread(picture).std() > 0.05  # not an empty page
    return capsys.readouterr().out


def test_the_guide_shows_every_example() -> None:
    page = ROOT / "docs" / "guides" / "examples.md"
    assert EXAMPLES == ["allocation", "custom_planner", "placement"]
    for name in EXAMPLES:
        assert f"python examples/{name}.py" in commands(page)
        assert (ROOT / "docs" / "images" / "examples" / f"{name}.png").is_file()
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 65


def test_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """EPLB is faster than no plan, and annealing is faster than EPLB, on traffic that neither has seen."""
    output = output_of("placement", tmp_path / "a.png", monkeypatch, capsys)
    times = {name: float(us) for name, us in re.findall(r"^(\w+) +([\d.]+) µs", output, flags=re.M)}
    assert times["anneal"] < 0.98 * times["eplb"] < 0.98 * 0.95 * times["static"]


def test_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy is between the best rule and the oracle."""
    output = output_of("allocation", tmp_path / "a.png", monkeypatch, capsys)
    order = re.findall(r"^([\w-]+) +reward", output, flags=re.M)
    assert order[-2:] == ["PPO", "oracle"]
    assert len(order) == 6


def test_custom_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The planner of the example balances, so it is clearly faster than the static placement."""
    output = output_of("custom_planner", tmp_path / "a.png", monkeypatch, capsys)
    totals = {name: float(us) for name, us in re.findall(r"│ ([\w-]+) +│[^│]+│[^│]+│ +([\d.]+)", output)}
    assert totals["snake"] < 0.97 * totals["static"]
    assert set(totals) == {"static", "eplb", "flashlb", "snake", "anneal"}


def test_the_concepts_define_every_word() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    defined = {word.lower() for line in re.findall(r"^\*\*(.+?)\*\*$", page, flags=re.M) for word in line.split(", ")}
    assert {"rank", "pass", "interval", "slot", "replica", "placement", "profile"} <= defined
