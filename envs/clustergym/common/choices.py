"""Checks of options that take one of a few words."""

from __future__ import annotations

from collections.abc import Sequence


def one_of(value: str, allowed: Sequence[str], what: str) -> int:
    """Index of ``value`` among the allowed words."""
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; expected one of: {', '.join(allowed)}")
    return list(allowed).index(value)
