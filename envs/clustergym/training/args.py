"""Command line of a trainer: the flags that all trainers share, and checks of the values."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import tyro

from clustergym.common.checkpoints import CheckpointError


@dataclass
class RunArgs:
    """Flags that every trainer has."""

    seed: int = 1
    """Seed for all random number generators."""
    total_timesteps: int = 500_000
    """Total number of environment steps. Rounded up to whole iterations."""
    run_dir: Path | None = None
    """Folder for logs and checkpoints. Default: runs/<trainer>__<task>__<seed>."""
    resume: bool = False
    """Continue from the checkpoint in the run folder. With an environment that can save its state (those of clustergym
    can), the result is bit-identical to that of a run without interruption; other environments begin new episodes.
    With another --total-timesteps the annealed learning rate differs, and so does the result."""
    checkpoint_interval: int = 50
    """Number of iterations between checkpoints, 0 for none. Has no influence on the training."""
    eval_interval: int = 0
    """Number of iterations between evaluations, 0 for one at the end only. Has no influence on the training."""
    save_model: bool = False
    """Save the trained network: model.safetensors with model.json, and model.pt for clustergym eval."""
    capture_video: bool = False
    """Record an episode of each evaluation to the folder videos."""
    cuda: bool | None = None
    """Train on the GPU. Default: if there is one."""
    torch_deterministic: bool = True
    """Use only deterministic GPU kernels. They can be slower."""
    track: bool = False
    """Also log to Weights & Biases, always on in a wandb sweep. WANDB_PROJECT and WANDB_ENTITY name project and team.
    Without an account, the run is recorded offline."""


FREE_ON_RESUME = {
    "run_dir", "resume", "total_timesteps", "checkpoint_interval", "eval_interval", "eval_episodes", "eval_args",
    "save_model", "capture_video", "cuda", "torch_deterministic", "track", "compile",
    "cudagraphs", "async_envs",
}  # fmt: skip
"""Flags that may change when a run is resumed. They have no influence on the next iteration."""


class FlagError(ValueError):
    """The value of a flag that cannot be used. The message names the flag, the value and what was expected."""


class Range(NamedTuple):
    """Valid values of a flag: from ``low`` to ``high``; ``low`` itself is invalid if ``above``."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"a number from {self.low:g} to {self.high:g}" + (f", not {self.low:g}" if self.above else "")
        return f"more than {self.low:g}" if self.above else f"at least {self.low:g}"


COUNT, POSITIVE, NOT_NEGATIVE, PROBABILITY = Range(1), Range(0, above=True), Range(0), Range(0, 1)
RANGES: dict[str, Range] = {
    **dict.fromkeys(["total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden"], COUNT),
    **dict.fromkeys(["learning_rate", "clip_coef", "max_grad_norm", "target_kl", "kl_target", "kl_coef"], POSITIVE),
    **dict.fromkeys(["seed", "checkpoint_interval", "eval_interval", "eval_episodes", "eval_streams"], NOT_NEGATIVE),
    **dict.fromkeys(["ent_coef", "vf_coef"], NOT_NEGATIVE),
    **dict.fromkeys(["gamma", "gae_lambda"], PROBABILITY),
}
"""Valid values by name. A flag has the same meaning in every trainer."""


def check_args(args: object, ranges: Mapping[str, Range] | None = None) -> list[str]:
    """One line per bad flag. ``ranges`` are those of flags that only one trainer has. None is always valid."""
    values = vars(args)
    bad = [
        f"--{name.replace('_', '-')} is {values[name]}: expected {valid}"
        for name, valid in (RANGES | dict(ranges or {})).items()
        if values.get(name) is not None and values[name] not in valid
    ]
    if not bad and {"num_envs", "num_steps", "num_minibatches"} <= values.keys():
        parts, batch = values["num_minibatches"], values["num_envs"] * values["num_steps"]
        if batch % parts or batch < 2 * parts:
            expected = f"a divisor of --num-envs × --num-steps = {batch} with at least 2 transitions per minibatch"
            bad.append(f"--num-minibatches is {parts}: expected {expected}")
    return bad


AnyArgs = TypeVar("AnyArgs", bound=RunArgs)


def parse_args(
    args_class: type[AnyArgs],
    description: str | None = None,
    argv: Sequence[str] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    ranges: Mapping[str, Range] | None = None,
) -> AnyArgs:
    """Parse and check the command line of a trainer. Exits with code 2 and one line per bad flag.

    Values come from the command line, then from ``--preset`` (a name in ``presets``), then from the defaults of the
    class. Booleans can be written ``--flag``, ``--no-flag`` or ``--flag True``.
    """
    words = _boolean_flags(args_class, sys.argv[1:] if argv is None else argv)
    preset = next((value for word, value in reversed(list(pairwise(words))) if word == "--preset"), "")
    default, shown = replace(args_class(), **(presets or {}).get(preset, {})), io.StringIO()
    try:
        with redirect_stderr(shown):
            args, unknown = tyro.cli(
                args_class, description=description, args=words, default=default, return_unknown_args=True
            )
    except SystemExit as stop:
        if stop.code:  # tyro explains a value of another type in a box
            lines = [line.strip("│| ") for line in shown.getvalue().splitlines()[1:]]
            message = takewhile(lambda line: not _is_rule(line), dropwhile(_is_rule, lines))
            exit_with(" ".join(message))
        raise
    if unknown:
        names = [f"--{field.name.replace('_', '-')}" for field in fields(args_class)]
        similar = get_close_matches(unknown[0], names, n=1)
        exit_with(f"unknown flag {unknown[0]}: " + (f"did you mean {similar[0]}?" if similar else "see --help"))
    if bad := check_args(args, ranges):
        exit_with(*bad)
    return args


def main(train: Callable[[AnyArgs], object], args: AnyArgs) -> None:
    """Run ``train(args)``. A bad flag, environment or checkpoint exits with code 2 and one line."""
    try:
        train(args)
    except (FlagError, CheckpointError, gym.error.Error) as reason:
        exit_with(str(reason))


def exit_with(*lines: str) -> None:
    print(*(f"error: {line}" for line in lines), sep="\n", file=sys.stderr)
    raise SystemExit(2)


def _is_rule(line: str) -> bool:
    return line.startswith(("───", "---"))


def _boolean_flags(args_class: type, argv: Sequence[str]) -> list[str]:
    """Rewrite ``--flag True`` and ``--flag=False``, as sweeps write them, to ``--flag`` and ``--no-flag``.

    ``--cuda`` has three values, so it is rewritten in the other direction, to ``--cuda True``.
    """
    names = {f"--{field.name}".replace("_", "-") for field in fields(args_class) if str(field.type) == "bool"}
    words: list[str] = []
    rest = [word for each in argv for word in (each.split("=", 1) if each.startswith("--") else [each])]
    while rest:
        word = rest.pop(0)
        name = word.replace("_", "-") if word.startswith("--") else word
        given = rest[0].lower() if rest else ""
        if name in ("--cuda", "--no-cuda"):
            value = rest.pop(0).capitalize() if given in ("true", "false", "none") else str(name == "--cuda")
            words += ["--cuda", value]
        elif name in names and given in ("true", "false"):
            words.append(name if rest.pop(0).lower() == "true" else f"--no-{name[2:]}")
        else:
            words.append(name)
    return words
