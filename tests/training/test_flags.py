"""Flags of the trainers: YAML files, presets and sweeps. Bad values: tests/trainers/test_runs_of_trainers.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clustergym.training.args import RunArgs, parse_args


@dataclass
class Flags(RunArgs):
    rate: float = 0.1
    sizes: list[int] = field(default_factory=lambda: [1])
    limit: float | None = 0.5
    anneal: bool = True
    preset: str = "tuned"


def test_config_file_sets_defaults_and_flags_come_first(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "rate: 1e-3\ntotal-timesteps: 7\nsizes: [4, 5]\nlimit: null\nanneal: false\ntrack: true\nrun_dir: x/y\n"
    )
    args = parse_args(Flags, argv=["--config", str(file)])
    assert (args.rate, args.total_timesteps, args.sizes, args.limit) == (1e-3, 7, [4, 5], None)
    assert (args.anneal, args.track, args.run_dir, args.config) == (False, True, Path("x/y"), file)
    args = parse_args(Flags, argv=[f"--config={file}", "--rate=2", "--anneal", "--sizes", "8"])
    assert (args.rate, args.anneal, args.sizes, args.total_timesteps) == (2, True, [8], 7)


def test_presets_are_defaults_below_the_config_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("preset: small\nrate: 3\n")
    presets = {"small": {"rate": 0.7, "total_timesteps": 8, "anneal": False}}
    args = parse_args(Flags, argv=["--preset", "small"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 0.7, 8, False)
    args = parse_args(Flags, argv=["--config", str(file), "--total-timesteps", "500000"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 3.0, 500_000, False)


@pytest.mark.parametrize(
    ("words", "anneal", "cuda"),
    [
        ([], True, None),
        (["--anneal", "False", "--cuda"], False, True),
        (["--anneal=false", "--cuda=False"], False, False),
        (["--no-anneal", "--no-cuda"], False, False),
        (["--anneal", "True", "--cuda", "None"], True, None),
    ],
)
def test_booleans_are_read_as_people_and_sweeps_write_them(words: list[str], anneal: bool, cuda: bool | None) -> None:
    args = parse_args(Flags, argv=words)
    assert (args.anneal, args.cuda) == (anneal, cuda)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rat: 1", "no flag 'rat'. The flags are "),
        ("- 1", "expected names and values of flags, found list"),
        ("a: [", "while parsing"),
        (None, "No such file"),
    ],
)
def test_bad_config_file_is_refused_with_one_line(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        parse_args(Flags, argv=["--config", str(file)])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert message in shown
