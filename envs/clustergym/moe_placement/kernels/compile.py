"""Compile functions of one environment for the CPU; a CUDA kernel that calls them compiles them as device functions.

Under numba's CUDA simulator the functions stay plain Python, because simulated device arrays cannot enter compiled
code. There, and with NUMBA_DISABLE_JIT, a numpy integer keeps its width: ``int()`` stands where a shift or a product
needs more bits than the array has.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import config

from clustergym.common.compiling import compiler, imported_sources, source_fingerprint

PLAIN_PYTHON = bool(config.ENABLE_CUDASIM or config.DISABLE_JIT)

# An index that cannot be negative: numba then omits the check for negative values, which halves the time of hot loops.
index = np.uint64


def device(function: Any) -> Any:
    """Compile a function of one environment. A CUDA kernel that calls it compiles it as a device function."""
    if PLAIN_PYTHON:
        return function
    return compiler(_fingerprint(Path(function.__code__.co_filename)))(function)


def inlined(function: Any) -> Any:
    """As :func:`device`, but compiled into its callers.

    Passing a state of dozens of arrays to a function takes longer than most functions of the simulator.
    """
    compiled = device(function)
    if hasattr(compiled, "targetoptions"):
        compiled.targetoptions["forceinline"] = True
    return compiled


@cache
def _fingerprint(path: Path) -> str:
    """A function is compiled again only if its file, or one that this file imports, has changed."""
    return source_fingerprint(imported_sources(path))
