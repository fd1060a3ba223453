"""Checks for options with a fixed set of values."""

from __future__ import annotations

from collections.abc import Sequence


def one_of(value: str, allowed: Sequence[str], what: str) -> int:
    """Index of ``value`` in ``allowed``. Raises a ValueError that lists the allowed values."""
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; expected one of: {', '.join(allowed)}")
    return list(allowed).index(value)
