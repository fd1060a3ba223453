"""Compile functions of one environment for the CPU; a CUDA kernel that calls them compiles them as device functions.

Under numba's CUDA simulator the functions stay plain Python, because simulated device arrays cannot enter compiled code.
There, and with NUMBA_DISABLE_JIT, a numpy integer keeps its width: ``int()`` stands where a shift or a product needs more
bits than the array has.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import config, njit, types

PLAIN_PYTHON = bool(config.ENABLE_CUDASIM or config.DISABLE_JIT)

# An index that cannot be negative: numba then omits the check for negative values, which halves the time of hot loops.
index = np.uint64


def source_fingerprint() -> str:
    """Hash of all sources that hold functions compiled with :func:`device`."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hashlib.sha256(b"".join(source for source in sources if b"\n@device\n" in source)).hexdigest()


FINGERPRINT = source_fingerprint()


def _probe() -> None:
    """Never called: only its compiler object is inspected."""


@cache
def private_api_available() -> bool:
    """Whether this numba has the private options and attributes that :func:`device` uses; logs a warning if not."""
    try:
        probe = njit(cache=True, _nrt=False)(_probe)
        if callable(probe.get_call_template) and hasattr(probe._cache._cache_file, "_source_stamp"):
            return True
    except (AttributeError, KeyError, TypeError):
        pass
    logging.getLogger("clustergym").warning(
        "numba %s lacks private functions that clustergym uses: the simulator gives the same results, but is slower and "
        "compiles for minutes at every start; install the numba version of constraints.txt",
        numba.__version__,
    )
    return False


def device(function: Any) -> Any:
    """Compile a function of one environment. A CUDA kernel that calls it compiles it as a device function."""
    if PLAIN_PYTHON:
        return function
    if not private_api_available():
        # No cache on disk: numba alone would keep using a caller after a function that it calls has changed.
        return njit(nogil=True, error_model="numpy")(function)
    # Without reference counts: nothing is allocated here, and counting would cost more than the work.
    compiled = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function)
    # numba only checks whether a function's own file is newer than its cache, but the code it calls is compiled into it.
    compiled._cache._cache_file._source_stamp = FINGERPRINT
    template = compiled.get_call_template

    def without_literals(args: Any, kws: Any) -> Any:
        """Keep numba from compiling a function again for each constant argument."""
        return template([types.unliteral(a) for a in args], {k: types.unliteral(a) for k, a in kws.items()})

    compiled.get_call_template = without_literals
    return compiled
