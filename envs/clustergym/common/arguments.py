"""Command-line arguments of trainers: spellings of booleans, and checks of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any


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
