"""Compile functions of one environment for the CPU; a CUDA kernel that calls them compiles them as device functions.

Under numba's CUDA simulator the functions stay plain Python, because simulated device arrays cannot enter compiled code.
There, and with NUMBA_DISABLE_JIT, a numpy integer keeps its width: ``int()`` stands where a shift or a product needs more
bits than the array has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numba import config

from clustergym.common.compiling import compiler, source_fingerprint

PLAIN_PYTHON = bool(config.ENABLE_CUDASIM or config.DISABLE_JIT)

# An index that cannot be negative: numba then omits the check for negative values, which halves the time of hot loops.
index = np.uint64


def kernel_sources() -> list[Path]:
    """All files of ``moe_placement`` that define functions with :func:`device`, and the constants that they use."""
    files = Path(__file__).parents[1].rglob("*.py")
    return [path for path in files if path.parent.name in ("kernels", "serving") or b"\n@device\n" in path.read_bytes()]


FINGERPRINT = source_fingerprint(kernel_sources())
_compiled = compiler(FINGERPRINT)


def device(function: Any) -> Any:
    """Compile a function of one environment. A CUDA kernel that calls it compiles it as a device function."""
    return function if PLAIN_PYTHON else _compiled(function)
