"""Arguments of a run: spellings of booleans, checks of values, plain data for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from clustergym.common.checkpoints import CheckpointError


def plain_args(args: object) -> dict[str, Any]:
    """Convert an Args dataclass to values that a checkpoint can hold. A nested dataclass becomes a nested dict."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return plain_args(value)
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
    ignored = {"resume", "run_dir", "track", "cuda", "save_model", *may_differ}
    before, now = _flat(saved), _flat(given)
    differing = [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in ignored and before.get(key) != now.get(key)
    ]
    if differing:
        raise CheckpointError("cannot resume with other arguments: " + "; ".join(differing))


def expand_booleans(args_class: Any, argv: Sequence[str]) -> list[str]:
    """Rewrite ``--flag`` and ``--no-flag`` to ``--flag True`` and ``--flag False`` for boolean fields of a dataclass.

    ``--flag True`` and ``--flag=True`` stay as they are. Sweeps use that form, people the shorter one.
    """
    flags = {f"--{each.name.replace('_', '-')}" for each in fields(args_class) if isinstance(each.default, bool)}
    expanded: list[str] = []
    for i, word in enumerate(argv):
        following = argv[i + 1] if i + 1 < len(argv) else "--"
        name = word.replace("_", "-")
        if name in flags and following.startswith("-"):
            expanded += [name, "True"]
        elif name.startswith("--no-") and (positive := "--" + name.removeprefix("--no-")) in flags:
            expanded += [positive, "False"]
        else:
            expanded.append(word)
    return expanded


def check_values(args: object, names: str, valid: Callable[[float], bool], expected: str) -> None:
    """Raise ValueError if a field is an invalid number. ``names`` are separated by spaces; None is always valid."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and valid(value)):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected {expected}")
