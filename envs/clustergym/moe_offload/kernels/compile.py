"""Compile functions of one environment, with machine code that depends on a file and all files it imports."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clustergym.common.compiling import compiler, imported_sources, source_fingerprint

# An index that cannot be negative: numba then omits the check for negative values, which halves the time of hot loops.
index = np.uint64


@cache
def _fingerprint(path: Path) -> str:
    return source_fingerprint(imported_sources(path))


def device(function: Any) -> Any:
    """Compile a function that allocates nothing."""
    return compiler(_fingerprint(Path(function.__code__.co_filename)))(function)


def inlined(function: Any) -> Any:
    """As :func:`device`, but compiled into its callers: passing dozens of arrays costs more than a short function."""
    compiled = device(function)
    if hasattr(compiled, "targetoptions"):
        compiled.targetoptions["forceinline"] = True
    return compiled
