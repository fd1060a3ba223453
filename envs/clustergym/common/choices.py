"""Checks of options: fixed sets of values, and the keyword arguments of an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def index_of_choice(value: str, allowed: Sequence[str], what: str) -> int:
    """Index of ``value`` in ``allowed``. Raises a ValueError that lists the allowed values."""
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; expected one of: {', '.join(allowed)}")
    return list(allowed).index(value)


def config_from(kind: type[Config], options: dict[str, Any], removed: dict[str, str] | None = None) -> Config:
    """Keyword arguments as a configuration, a dataclass. A ``TypeError`` names an unknown one.

    ``removed`` says of arguments of earlier versions what to use instead.
    """
    for name in (removed or {}).keys() & options.keys():
        raise TypeError(f"argument {name!r} was removed: {(removed or {})[name]}")
    known = sorted(f.name for f in fields(kind))  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; the environment takes: {', '.join(known)}")
    return kind(**options)
