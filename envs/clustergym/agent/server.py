"""Runs the agent: server, background tasks and learner process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clustergym.agent.clock import DAY_S
from clustergym.agent.database import DATABASE_NAME, exclusive_lock, set_aside_if_corrupt
from clustergym.agent.learner import LearnerProcess, LearnOnce, OpenLogger, State
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Store
from clustergym.agent.telemetry import Telemetry
from clustergym.agent.versions import CHECKPOINT_KIND, load_or_restore, read_champion, version_path
from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint
from clustergym.common.extras import require
from clustergym.common.tls import CertificateReloader

if TYPE_CHECKING:
    import uvicorn

    from clustergym.agent.connections import ConnectionPool
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

    from clustergym.agent.api import create_app
    from clustergym.agent.connections import ConnectionLimits, ConnectionPool, Loop, listen, reserve_files
    from clustergym.agent.credentials import Access
    from clustergym.agent.service import Service

    settings.check()
    torch.set_num_threads(1)
    access = Access(
        settings.token_file, settings.webhook_token_file, settings.collector_token_file, settings.token_overlap_s
    )
    reserve_files(settings.max_connections)
    pool = ConnectionPool(ConnectionLimits(settings.max_connections, settings.read_timeout_s, settings.write_timeout_s))
    os.umask(0o077)
    settings.store.mkdir(parents=True, exist_ok=True)
    checkpoint = settings.store / CHECKPOINT_NAME
    with exclusive_lock(settings.store / "agent.lock"), contextlib.ExitStack() as stack:
        if not resume and (settings.store / DATABASE_NAME).exists():
            raise ValueError(f"{settings.store} has been used: drop --no-resume to resume it, or use another --store")
        listener = stack.enter_context(contextlib.closing(listen(settings.host, settings.port, pool)))
        if not checkpoint.exists():
            save_checkpoint(checkpoint, CHECKPOINT_KIND, initial_state())
        state = load_or_restore(settings.store)
        aside = set_aside_if_corrupt(settings.store)
        store = Store(
            settings.store, settings.durability, DAY_S * settings.retention_days, settings.accept_clock_jump,
            settings.guard_settings,
        )  # fmt: skip
        store.number_feedback_after(state["learned_through"])
        telemetry = Telemetry(settings.gpus, settings.telemetry_s)
        stack.callback(telemetry.stop)
        learner = None
        if settings.explore != "off":
            learner = LearnerProcess(settings, learn_once, open_logger)
            stack.callback(learner.stop)
        service = Service(settings, store, telemetry, make_policy(state), learner, access, pool, seed)
        service.champion = load_champion(settings.store, make_policy) or service.policy
        if aside is not None:
            service.task_problems["store"] = f"the database was corrupt at the start and is now {aside}"

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            follow = PolicyFollower(service, checkpoint, make_policy)
            tasks = [
                asyncio.create_task(repeat(service, "policy", 0.25, follow)),
                asyncio.create_task(repeat(service, "credentials", 0.25, lambda: refresh_credentials(service))),
                asyncio.create_task(repeat(service, "maintenance", 1.0, lambda: run_maintenance(service))),
            ]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            store.close()

        config = make_config(settings, create_app(service, lifespan), pool)
        if config.ssl is not None and settings.tls_cert is not None and settings.tls_key is not None:
            service.certificate = CertificateReloader(
                config.ssl, settings.tls_cert, settings.tls_key, settings.client_ca
            )
        Loop.handshake_timeout_s = settings.read_timeout_s
        # Objects made so far live as long as the process: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        log.info("listening on %s, port %s", settings.host, listener.getsockname()[1])
        run(config, listener)


def load_champion(store: Path, make_policy: Callable[[State], Policy]) -> Policy | None:
    """The last good version of the policy, or None if it is not known any more."""
    version = read_champion(store)
    if version is None:
        return None
    try:
        return make_policy(load_checkpoint(version_path(store, version), CHECKPOINT_KIND))
    except (FileNotFoundError, CheckpointError) as error:
        log.warning("the last good version cannot be loaded, the newest takes its place: %s", error)
        return None


def make_config(settings: ServerSettings, app: Any, pool: ConnectionPool) -> uvicorn.Config:
    """The configuration of uvicorn."""
    import uvicorn

    from clustergym.agent.connections import BACKLOG, make_protocol

    config = uvicorn.Config(
        app,
        http=make_protocol(pool),
        ws="none",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.client_ca is None else str(settings.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.client_ca is None else ssl.CERT_REQUIRED,
    )
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return config


def run(config: uvicorn.Config, listener: Any) -> None:
    """Serve until a signal arrives. SIGTERM and SIGINT let this function return, even if they repeat."""
    import uvicorn

    from clustergym.agent.connections import Loop

    class Server(uvicorn.Server):
        """Does not raise signals again after the shutdown: what follows the server must run."""

        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: setattr(self, "should_exit", True))
            yield

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(Server(config).serve(sockets=[listener]))


async def repeat(service: Service, name: str, interval_s: float, task: Callable[[], Awaitable[None]]) -> None:
    """Run a task repeatedly. A failure is logged, counted and shown by /readyz until the task succeeds."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await task()
            service.task_problems.pop(name, None)
        except Exception as error:  # any error: the next run may succeed
            problem = f"{type(error).__name__}: {error}"
            if service.task_problems.get(name) != problem:
                log.error("the background task %r failed and is tried again: %s", name, problem)
            service.task_problems[name] = problem
            service.metrics.task_failures.labels(name).inc()


class PolicyFollower:
    """Loads new versions of the policy. A file that cannot be loaded is tried again; the old policy stays."""

    def __init__(self, service: Service, checkpoint: Path, make_policy: Callable[[State], Policy]) -> None:
        self.service, self.checkpoint, self.make_policy = service, checkpoint, make_policy
        self._loaded = checkpoint.stat().st_mtime_ns
        self._rollback_id = load_checkpoint(checkpoint, CHECKPOINT_KIND).get("rollback_id")

    async def __call__(self) -> None:
        newest = self.checkpoint.stat().st_mtime_ns
        if newest != self._loaded:
            state = load_checkpoint(self.checkpoint, CHECKPOINT_KIND)
            self.service.policy = self.make_policy(state)
            self._loaded = newest
            if self.service.champion is None or state.get("rollback_id") != self._rollback_id:
                # After a rollback, the version with the old weights is the one to compare with.
                self._rollback_id = state.get("rollback_id")
                self.service.accept_version()


async def refresh_credentials(service: Service) -> None:
    """Read the token file and the certificate again if they have changed."""
    service.access.refresh()
    if service.certificate is not None:
        service.certificate.check()


async def run_maintenance(service: Service) -> None:
    """Restart a dead learner process, look whether the store is back, shrink its log, delete old rows."""
    if service.store.recover() and service.learner is not None:
        service.learner.stop()  # it has the old database open, and is restarted
    if service.learner is not None and service.learner.restart_if_dead():
        service.metrics.learner_restarts.inc()
    store = service.store
    if store.problem is not None:
        return
    await store.shrink_log()
    oldest_s = store.clock.now() - DAY_S * service.settings.retention_days
    while store.delete_before(oldest_s):
        # 2,000 rows per second: faster than rows can come. A batch takes half a millisecond, so requests hardly wait.
        await asyncio.sleep(0.025)
