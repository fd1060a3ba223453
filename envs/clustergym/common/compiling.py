"""A word to a user who waits for the compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

AFTER_S = 3.0
_told = False


def _tell() -> None:
    global _told
    if not _told:
        _told = True
        logging.getLogger("clustergym").warning(
            "compiling the simulator for this machine: one to two minutes, once; the result is cached on disk"
        )


@contextmanager
def patience() -> Iterator[None]:
    """Log, once in a process, that kernels are being compiled, if what is inside takes longer than a few seconds."""
    timer = Timer(AFTER_S, _tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
