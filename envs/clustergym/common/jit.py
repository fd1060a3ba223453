"""Compile functions with numba for one thread each, and cache the machine code on disk.

Two private parts of numba are used: the option ``_nrt`` and the stamp of a cache file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import config, njit

Function = TypeVar("Function", bound=Callable[..., Any])


def source_fingerprint(paths: Iterable[Path]) -> str:
    """Hash of source files, in the order of their paths."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def _probe() -> None:
    """Compiled only to look at the attributes of its dispatcher."""


@cache
def private_api_available() -> bool:
    """Whether this numba has the private option and attributes that :func:`compiler` uses."""
    try:
        return bool(njit(cache=True, _nrt=False)(_probe)._cache._cache_file._source_stamp)
    except (AttributeError, KeyError, TypeError):
        logging.getLogger("clustergym").warning(
            "numba %s lacks private functions that clustergym uses: the simulator runs, but slower, and is compiled "
            "again at every start; install the numba version of constraints.txt",
            numba.__version__,
        )
        return False


def compiler(fingerprint: str) -> Callable[[Function], Function]:
    """A decorator that compiles functions that allocate nothing and hold no interpreter lock.

    Args:
        fingerprint: :func:`source_fingerprint` of all files with code that is part of the compiled functions. numba
            only notices changes in a function's own file, but the functions that it calls are compiled into it.
    """

    def compiled(function: Function) -> Function:
        if config.DISABLE_JIT:
            return function
        if not private_api_available():
            # Without a cache on disk, because numba would not notice changes in other files.
            plain: Function = njit(nogil=True, error_model="numpy")(function)
            return plain
        # Nothing is allocated, so reference counts are not needed. They are atomic, all threads write them to the same
        # cache lines, and they cost as much as the simulation itself.
        cached = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function)
        cached._cache._cache_file._source_stamp = fingerprint
        result: Function = cached
        return result

    return compiled
