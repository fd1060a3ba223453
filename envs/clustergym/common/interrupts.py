"""Ctrl-C as a request to finish early."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ctrl_c_requests_stop(said: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Within the context, the first Ctrl-C calls ``said``, and the function that is yielded returns True from then on.

    The second Ctrl-C raises KeyboardInterrupt as usual. Only the main thread may handle signals: elsewhere Ctrl-C does
    what it always does.
    """
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        said()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
