"""Runs the agent: server, background tasks and learner process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sqlite3
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clustergym.agent.learner import CHECKPOINT_KIND, LearnerProcess, LearnOnce, OpenLogger, State
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import DATABASE_NAME, Store, exclusive_lock
from clustergym.agent.telemetry import Telemetry
from clustergym.common.checkpoints import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from clustergym.common.extras import require

if TYPE_CHECKING:
    from clustergym.agent.api import BearerToken
    from clustergym.agent.service import Policy, Service

log = logging.getLogger(__name__)


def serve(
    settings: ServerSettings,
    *,
    seed: int,
    resume: bool,
    initial_state: Callable[[], State],
    make_policy: Callable[[State], Policy],
    learn_once: LearnOnce,
    open_logger: OpenLogger,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: flags of the server.
        seed: seed of exploration. A restarted server explores with other numbers.
        resume: whether to accept a store that has been used.
        initial_state: makes the content of the first checkpoint.
        make_policy: makes the policy from the content of a checkpoint.
        learn_once: one update. It runs in the learner process, so it must be picklable, as must ``open_logger``.
        open_logger: opens the log of the learner process.
    """
    for module in ("fastapi", "prometheus_client", "uvicorn"):
        require(module, "agent")
    import uvicorn

    from clustergym.agent.api import BearerToken, create_app
    from clustergym.agent.service import Service

    settings.check()
    torch.set_num_threads(1)
    settings.store.mkdir(parents=True, exist_ok=True)
    checkpoint = settings.store / CHECKPOINT_NAME
    with exclusive_lock(settings.store / "agent.lock"), contextlib.ExitStack() as stack:
        if not resume and (settings.store / DATABASE_NAME).exists():
            raise ValueError(f"{settings.store} has been used: drop --no-resume to resume it, or use another --store")
        token = BearerToken(settings.token_file)
        if not checkpoint.exists():
            save_checkpoint(checkpoint, CHECKPOINT_KIND, initial_state())
        policy = make_policy(load_checkpoint(checkpoint, CHECKPOINT_KIND))
        store = Store(settings.store, settings.durability)
        telemetry = Telemetry(settings.gpu_index, settings.telemetry_s)
        stack.callback(telemetry.stop)
        learner = None
        if settings.explore != "off" and not settings.shadow:
            learner = LearnerProcess(settings, learn_once, open_logger)
            stack.callback(learner.stop)
        service = Service(settings, store, telemetry, policy, learner, seed)

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            tasks = [
                asyncio.create_task(follow_files(service, token, checkpoint, make_policy)),
                asyncio.create_task(run_maintenance(service)),
            ]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            store.close()

        app = create_app(service, token, lifespan)
        # uvicorn raises a signal again after it has shut down. As KeyboardInterrupt, SIGTERM lets this function return.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Objects made so far live as long as the process: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        uvicorn.run(
            app,
            host=settings.host,
            port=settings.port,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=10,
            timeout_keep_alive=75,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            ssl_ca_certs=None if settings.client_ca is None else str(settings.client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if settings.client_ca is None else ssl.CERT_REQUIRED,
        )


async def follow_files(
    service: Service, token: BearerToken, checkpoint: Path, make_policy: Callable[[State], Policy]
) -> None:
    """Load new versions of the policy and of the token, four times per second."""
    loaded = checkpoint.stat().st_mtime_ns
    while True:
        await asyncio.sleep(0.25)
        token.refresh()
        newest = checkpoint.stat().st_mtime_ns
        if newest != loaded:
            loaded = newest
            service.policy = make_policy(load_checkpoint(checkpoint, CHECKPOINT_KIND))


async def run_maintenance(service: Service) -> None:
    """Once per second: shrink the log of the database, delete old rows, restart a dead learner process."""
    while True:
        await asyncio.sleep(1.0)
        try:
            await service.store.shrink_log()
            service.store.delete_before(time.time() - 86_400 * service.settings.retention_days)
        except sqlite3.Error as error:
            log.warning("maintenance of the store failed: %s", error)
        if service.learner is not None and service.learner.restart_if_dead():
            service.learner_restarts.inc()
