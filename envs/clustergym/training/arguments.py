"""Arguments of a run: flags that trainers share, YAML files, checks of values, plain data for checkpoints."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from clustergym.common.checkpoints import CheckpointError
from clustergym.common.extras import require


@dataclass
class BaseArgs:
    """Arguments that every trainer has."""

    seed: int = 1
    """Seed for all random number generators."""
    config: Path | None = None
    """YAML file with values of flags, for example "learning_rate: 0.001". Flags on the command line come first."""
    run_dir: Path | None = None
    """Folder for logs and checkpoints. Default: runs/<trainer>__<task>__<seed>."""
    resume: bool = False
    """Resume from the checkpoint in the run folder. The length of the run can be increased.
    The result is bit-identical to that of an uninterrupted run."""
    save_model: bool = False
    """Also save the trained network: model.safetensors with model.json, and model.pt for clustergym eval."""
    cuda: bool = False
    """Train on the GPU. Environments stay on the CPU."""
    torch_deterministic: bool = True
    """On the GPU, use only deterministic kernels. They can be slower."""
    track: bool = False
    """Also log to Weights & Biases. Without an account, the run is recorded offline. Always on in a wandb sweep."""
    wandb_project_name: str = "clustergym"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Team in Weights & Biases. Default: that of the account."""


@dataclass
class RunArgs(BaseArgs):
    """Arguments of trainers that end after a number of iterations."""

    checkpoint_interval: int = 50
    """Iterations between checkpoints, 0 for none. Gymnasium environments are reset there, so that resuming is exact."""
    eval_interval: int = 0
    """Iterations between evaluations, for learning curves. 0: only after training. They do not change the training."""


@dataclass
class TrainArgs(RunArgs):
    """Arguments of trainers that play environments for a number of steps."""

    total_timesteps: int = 500_000
    """Total number of environment steps, over all environments and processes. Rounded up to whole iterations."""
    compile: bool = False
    """Compile the network with torch.compile."""
    capture_video: bool = False
    """Record an episode of each evaluation to the folder videos, if the environment can be rendered."""


FREE_ON_RESUME = {
    "config", "resume", "run_dir", "track", "cuda", "save_model", "torch_deterministic", "wandb_project_name",
    "wandb_entity", "capture_video", "total_timesteps", "eval_interval",
}  # fmt: skip
"""Arguments that can change when a run is resumed."""

AnyArgs = TypeVar("AnyArgs")


def parse_args(
    args_class: type[AnyArgs],
    description: str | None = None,
    argv: Sequence[str] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> AnyArgs:
    """Parse the command line of a trainer.

    Values come from the command line, then from the YAML file of ``--config``, then from ``--preset`` (a name in
    ``presets``), then from the defaults of the class. Booleans can be written ``--flag``, ``--no-flag``,
    ``--flag True`` or ``--flag=True``.
    """
    words = boolean_flags(args_class, sys.argv[1:] if argv is None else argv)
    file = _option(words, "--config")
    config = [] if file is None else boolean_flags(args_class, config_flags(Path(file), args_class))
    default = args_class()
    preset = _option(words, "--preset") or _option(config, "--preset") or ""
    if presets and preset in presets:
        default = replace(default, **presets[preset])  # type: ignore[type-var]
    if config:
        default = tyro.cli(args_class, args=config, default=default)
    return tyro.cli(args_class, description=description, args=words, default=default)


def config_flags(file: Path, args_class: Any) -> list[str]:
    """The flags of a YAML file. Raises SystemExit if it has a name that is no flag."""
    yaml = require("yaml", "train")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as reason:
        raise SystemExit(f"--config {file}: {reason}") from reason
    if not isinstance(content, Mapping):
        raise SystemExit(f"--config {file}: expected names and values of flags, found {type(content).__name__}")
    known = {name.replace("-", "_") for name, _ in _flags(args_class())}
    flags: list[str] = []
    for key, value in _flat(content).items():
        if str(key).replace("-", "_") not in known:
            raise SystemExit(f"--config {file}: no flag {key!r}. The flags are {', '.join(sorted(known))}")
        flags += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def boolean_flags(args_class: Any, argv: Sequence[str]) -> list[str]:
    """Rewrite ``--flag True`` and ``--flag=False`` to ``--flag`` and ``--no-flag``. Sweeps use the longer form."""
    names = {f"--{name}" for name, value in _flags(args_class()) if isinstance(value, bool)}
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in names and not has_value and rest and rest[0].lower() in ("true", "false"):
            has_value, value = "=", rest.pop(0)
        if name in names and value.lower() in ("true", "false"):
            group, _, last = name[2:].rpartition(".")
            off = f"--{group}{'.' if group else ''}no-{last}"
            words.append(name if value.lower() == "true" else off)
        else:
            words.append(name + has_value + value)
    return words


def _flags(args: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names, with dashes, and values of all flags. Fields of a group are named "group.field", or "field" alone."""
    for each in fields(args):  # type: ignore[arg-type]
        value, name = getattr(args, each.name), each.name.replace("_", "-")
        if is_dataclass(value):
            yield from _flags(value, "" if "OmitArgPrefixes" in str(each.type) else f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of ``--name VALUE`` or ``--name=VALUE``; the last one counts."""
    found = [following for word, following in pairwise(words) if word == name]
    found += [word.partition("=")[2] for word in words if word.startswith(name + "=")]
    return found[-1] if found else None


def plain_args(args: object) -> dict[str, Any]:
    """Convert an Args dataclass to values that a checkpoint can hold. A nested dataclass becomes a nested dict."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return plain_args(value)
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return str(value) if isinstance(value, Path) else value

    return {key: plain(value) for key, value in vars(args).items()}


def _flat(args: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Arguments of nested dicts as "group.name"."""
    flat: dict[str, Any] = {}
    for key, value in args.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def check_same_args(saved: Mapping[str, Any], given: Mapping[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Raise CheckpointError if a run would resume with other hyperparameters than those in its checkpoint."""
    ignored = {*FREE_ON_RESUME, *may_differ}
    before, now = _flat(saved), _flat(given)
    differing = [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in ignored and before.get(key) != now.get(key)
    ]
    if differing:
        raise CheckpointError("cannot resume with other arguments: " + "; ".join(differing))


def check_values(args: object, names: str, valid: Callable[[float], bool], expected: str) -> None:
    """Raise ValueError if a field is an invalid number. ``names`` are separated by spaces; None is always valid."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and valid(value)):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected {expected}")
