"""Arguments of the trainers: flags, YAML files and presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clustergym.training import (
    TrainArgs,
    parse_args,
)


@dataclass
class Group:
    width: int = 3
    deep: bool = False


@dataclass
class Flags(TrainArgs):
    rate: float = 0.1
    sizes: list[int] = field(default_factory=lambda: [1])
    limit: float | None = 0.5
    anneal: bool = True
    preset: str = "tuned"
    group: Group = field(default_factory=Group)


def test_config_file_sets_defaults_and_flags_come_first(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "rate: 1e-3\ntotal-timesteps: 7\nsizes: [4, 5]\nlimit: null\nanneal: false\ntrack: true\n"
        "group: {width: 9, deep: true}\nrun_dir: x/y\n"
    )
    args = parse_args(Flags, argv=["--config", str(file)])
    assert (args.rate, args.total_timesteps, args.sizes, args.limit) == (1e-3, 7, [4, 5], None)
    assert (args.anneal, args.track, args.group, args.run_dir) == (False, True, Group(9, True), Path("x/y"))
    assert args.config == file
    args = parse_args(Flags, argv=[f"--config={file}", "--rate=2", "--anneal", "--group.width", "1", "--sizes", "8"])
    assert (args.rate, args.anneal, args.group, args.sizes, args.total_timesteps) == (2, True, Group(1, True), [8], 7)


def test_presets_are_defaults_below_the_config_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("preset: small\nrate: 3\n")
    presets = {"small": {"rate": 0.7, "total_timesteps": 8, "anneal": False}}
    args = parse_args(Flags, argv=["--preset", "small"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 0.7, 8, False)
    args = parse_args(Flags, argv=["--config", str(file), "--total-timesteps", "500000"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 3.0, 500_000, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rat: 1", "no flag 'rat'. The flags are .*rate"),
        ("group: {size: 1}", "no flag 'group.size'"),
        ("- 1", "expected names and values of flags, found list"),
        ("a: [", "while parsing"),
    ],
)
def test_invalid_config_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit, match=message):
        parse_args(Flags, argv=["--config", str(tmp_path / "a.yaml")])


def test_missing_config_file_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"nowhere\.yaml"):
        parse_args(Flags, argv=["--config", "nowhere.yaml"])


def test_shared_arguments_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(TrainArgs, argv=["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Project in Weights & Biases" in shown
    assert "Record an episode of each evaluation" in shown
