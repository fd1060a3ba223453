"""Runs the collector next to a plain port with its health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import uvicorn
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from clustergym.collector.collect import Collector
from clustergym.webhook.pages import pages_app

log = logging.getLogger(__name__)

MISSED_SAMPLES = 10
"""The collector is not healthy if it could not list its pods for so many intervals, at least a minute."""


async def serve(collector: Collector, host: str, port: int) -> None:
    """Collect until a signal arrives."""

    def health() -> Response:
        silent_s = time.monotonic() - collector.last_sample_s
        if silent_s > max(60.0, MISSED_SAMPLES * collector.interval_s):
            return PlainTextResponse(f"no sample for {silent_s:.0f} s", 503)
        return PlainTextResponse("ok")

    def metrics() -> Response:
        return Response(generate_latest(collector.registry), media_type=CONTENT_TYPE_LATEST)

    app = pages_app({"/healthz": health, "/metrics": metrics})
    config = uvicorn.Config(
        app, host=host, port=port, lifespan="off", access_log=False, log_config=None, ws="none", limit_concurrency=64
    )
    collecting = asyncio.create_task(collector.run())
    log.info("watching the pods of %s", collector.node)
    try:
        await uvicorn.Server(config).serve()
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
        await collector.send_waiting()
        await collector.close()
