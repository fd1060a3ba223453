"""Compiled work on all cores: threads that run a kernel's range without the interpreter lock.

numba's own ``parallel=True`` made slower code of the same kernels (50 % slower on one thread), compiles each loop once
more, and its OpenMP threads do not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import config

CHUNKS = 4
SMALLEST = 8
_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """A forked child has the pool object but none of its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def parallel_for(function: Callable[..., Any], n: int, *arguments: Any, chunks: int | None = None) -> None:
    """Call ``function(first, last, *arguments)`` over parts of 0 … n−1, on as many threads as numba may use.

    All threads, the caller's among them, take the next of ``chunks`` parts until none is left: one that is held up, or
    gets heavier parts, leaves more to the others. By default there are ``CHUNKS`` parts per thread, none smaller than
    ``SMALLEST``.
    """
    global _pool
    n_threads = min(config.NUMBA_NUM_THREADS, n)
    if n_threads <= 1 or config.ENABLE_CUDASIM:
        function(0, n, *arguments)
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(config.NUMBA_NUM_THREADS, thread_name_prefix="clustergym")
    chunks = min(n, chunks or max(n_threads, min(CHUNKS * n_threads, n // SMALLEST)))
    parts = [(n * i // chunks, n * (i + 1) // chunks) for i in reversed(range(chunks))]

    def work() -> None:
        # A list's pop is atomic under the interpreter lock, which the kernels do not hold.
        while True:
            try:
                first, last = parts.pop()
            except IndexError:
                return
            function(first, last, *arguments)

    helpers = [_pool.submit(work) for _ in range(n_threads - 1)]
    work()
    for helper in helpers:
        helper.result()
