"""Flags of the trainers: presets, booleans, other types. Bad values: tests/trainers/test_runs_of_trainers.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from clustergym.training.args import RunArgs, parse_args


@dataclass
class Flags(RunArgs):
    rate: float = 0.1
    sizes: list[int] = field(default_factory=lambda: [1])
    limit: float | None = 0.5
    anneal: bool = True
    preset: str = "tuned"


def test_presets_are_defaults_below_the_flags() -> None:
    presets = {"small": {"rate": 0.7, "total_timesteps": 8, "anneal": False}}
    args = parse_args(Flags, argv=["--preset", "small"], presets=presets)
    assert (args.preset, args.rate, args.total_timesteps, args.anneal) == ("small", 0.7, 8, False)
    args = parse_args(Flags, argv=["--rate=3", "--preset", "small", "--total-timesteps", "500000"], presets=presets)
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
    ("words", "message"),
    [
        (["--rate", "abc"], "error: Error parsing --rate: could not convert string to float: 'abc'\n"),
        (["--total-timesteps", "1.5"], "error: Error parsing --total-timesteps: invalid literal for int() with base"),
        (["--limit", "x"], "--limit"),
        (["--rate"], "error: Missing value for argument '--rate'. Expected 1 values.\n"),
        (["--anneal", "maybe"], "error: unknown flag maybe"),
    ],
)
def test_values_of_another_type_are_refused_with_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(Flags, argv=words)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert message in shown
