"""Spread compiled work over the cores: threads that run a kernel's range without the interpreter lock.

Chosen over numba's own ``parallel=True``, which made slower code of the same kernels (a change of layer took half as long
again on one thread), compiles each loop once more, and whose OpenMP threads do not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from numba import config

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """A forked child has the pool object but none of its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def spread(function: Callable[..., Any], n: int, *arguments: Any, chunks: int | None = None) -> None:
    """Call ``function(first, last, *arguments)`` over parts of 0 … n−1, on as many threads as numba may use.

    ``chunks`` parts (by default one a thread) are dealt out as threads become free.
    """
    global _pool
    n_threads = min(config.NUMBA_NUM_THREADS, n)
    if n_threads <= 1 or config.ENABLE_CUDASIM:
        function(0, n, *arguments)
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(config.NUMBA_NUM_THREADS, thread_name_prefix="clustergym")
    chunks = min(n, chunks or n_threads)
    bounds = [n * i // chunks for i in range(chunks + 1)]
    futures = [_pool.submit(function, a, b, *arguments) for a, b in pairwise(bounds[1:])]
    function(bounds[0], bounds[1], *arguments)
    for future in futures:
        future.result()
