"""A clock that refuses jumps, so that a wrong system time cannot delete the store or expire all feedback."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

DAY_S = 86_400.0


class Clock:
    """Unix time that never goes back and does not follow the system clock over a jump of more than a day.

    Args:
        last_s: the last time that was recorded before this process, or None.
        max_stop_s: a longer gap since ``last_s`` is taken for a wrong system clock, not for a stopped agent.
        accept_jump: trust the system clock at the start, whatever was recorded.
    """

    MAX_JUMP_S = DAY_S

    def __init__(
        self,
        last_s: float | None = None,
        max_stop_s: float = DAY_S,
        accept_jump: bool = False,
        system: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system, self._monotonic = system, monotonic
        self.problem: str | None = None
        now = system()
        trusted = last_s is None or accept_jump or -self.MAX_JUMP_S <= now - last_s <= max_stop_s
        self._base_s = now if last_s is None or trusted else last_s
        self._base_monotonic = monotonic()
        self._last_s = 0.0
        self.now()

    def now(self) -> float:
        """The time. If the system clock has jumped, time continues from before the jump and ``problem`` says so."""
        system, monotonic = self._system(), self._monotonic()
        expected = self._base_s + monotonic - self._base_monotonic
        jump = system - expected
        if abs(jump) <= self.MAX_JUMP_S:
            expected = self._base_s = system
            self._base_monotonic = monotonic
            self.problem = None
        elif self.problem is None:
            self.problem = (
                f"the system clock jumped by {jump / DAY_S:.1f} days and is ignored; correct it, or restart the agent "
                "with --accept-clock-jump if it is right"
            )
            log.error("%s", self.problem)
        self._last_s = max(self._last_s, expected)
        return self._last_s
