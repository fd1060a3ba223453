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


class BackgroundServer(uvicorn.Server):
    """A server next to the main one, which handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
