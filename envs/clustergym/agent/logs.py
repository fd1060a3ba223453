"""Logging of the agent: one line per record, and no flood of equal messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from clustergym.common.logs import configure_logging


class RateLimit(logging.Filter):
    """Lets ``burst`` messages of one kind through per interval. The next one says how many were left out."""

    MAX_KINDS = 1000

    def __init__(self, burst: int = 10, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.burst, self.interval_s, self.clock = burst, interval_s, clock
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, record.levelno, str(record.msg)), self.clock()
        start, count = self._kinds.get(kind, (now, 0))
        if now - start >= self.interval_s:
            if count > self.burst:
                record.msg = f"{record.msg} ({count - self.burst} similar messages left out)"
            start, count = now, 0
        if len(self._kinds) >= self.MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = start, count + 1
        return count < self.burst


def setup_logging() -> None:
    """Log to standard error with the rate limit."""
    configure_logging()
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimit())
