"""Runs the collector next to a plain port with its health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import uvicorn
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from clustergym.agent.collector.collect import Collector
from clustergym.kubernetes.pages import GuardedServer, pages_app

log = logging.getLogger(__name__)

MISSED_STEPS = 10
"""The collector is not healthy if its loop stands still for so many intervals, at least two minutes."""


async def serve(collector: Collector, host: str, port: int) -> None:
    """Collect until a signal arrives."""

    def health() -> Response:
        silent_s = time.monotonic() - collector.last_step_s
        if silent_s > max(120.0, MISSED_STEPS * collector.interval_s):
            return PlainTextResponse(f"no step for {silent_s:.0f} s", 503)
        return PlainTextResponse("ok")

    def metrics() -> Response:
        return Response(generate_latest(collector.registry), media_type=CONTENT_TYPE_LATEST)

    app = pages_app({"/healthz": health, "/metrics": metrics})
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        lifespan="off",
        access_log=False,
        log_config=None,
        ws="none",
        limit_concurrency=64,
        http="h11",
    )
    collecting = asyncio.create_task(collector.run())
    log.info("watching the pods of %s", collector.node)
    try:
        await GuardedServer(config, 5.0).serve()
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
        await collector.send_waiting()
        await collector.close()
