"""Plain ports that serve a few pages and nothing else: probes and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi.responses import PlainTextResponse, Response

Page = Callable[[], Response]


def pages_app(pages: dict[str, Page]) -> Callable[..., Awaitable[None]]:
    """An ASGI application that answers GET and HEAD of these paths, and 404 to everything else."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        page = pages.get(scope["path"]) if scope["method"] in ("GET", "HEAD") else None
        response = PlainTextResponse("not found", 404, {"Connection": "close"}) if page is None else page()
        await response(scope, receive, send)

    return app


class GuardedServer(uvicorn.Server):
    """Closes connections that make no progress: uvicorn waits for ever for a slow client.

    A connection is closed if for ``stalled_s`` seconds it neither ends the request that it is at, nor is idle between
    two requests, which uvicorn limits.
    """

    def __init__(self, config: uvicorn.Config, stalled_s: float, signals: bool = True) -> None:
        super().__init__(config)
        self._ticks, self._signals = max(round(10 * stalled_s), 1), signals  # uvicorn ticks ten times per second
        self._seen: dict[Any, Any] = {}

    async def on_tick(self, counter: int) -> bool:
        if counter % self._ticks == 0:
            waiting = [one for one in self.server_state.connections if one.timeout_keep_alive_task is None]  # type: ignore[union-attr]
            for one in waiting:
                if one in self._seen and self._seen[one] is one.cycle:  # type: ignore[union-attr]
                    one.transport.abort()
            self._seen = {one: one.cycle for one in waiting}  # type: ignore[union-attr]
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Only the main server of a process handles signals."""
        if self._signals:
            with super().capture_signals():
                yield
        else:
            yield
