"""A warning for users who wait for the compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

WARN_AFTER_S = 3.0
_warned = False


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        logging.getLogger("clustergym").warning(
            "compiling the simulator for this machine: one to two minutes, once; the result is cached on disk"
        )


@contextmanager
def warn_while_compiling() -> Iterator[None]:
    """Log, once per process, that kernels are being compiled, if the block takes longer than a few seconds."""
    timer = Timer(WARN_AFTER_S, _warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
