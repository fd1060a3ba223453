"""Runs the agent: server, background tasks and learner process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sqlite3
import ssl
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import torch

from clustergym.agent.learner import LearnerProcess, LearnOnce
from clustergym.agent.policy import Policy
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import DATABASE_NAME, Store, exclusive_lock, set_aside_if_corrupt
from clustergym.agent.telemetry import Telemetry
from clustergym.agent.versions import State, add_version, load_newest, newest_version
from clustergym.common.extras import require
from clustergym.common.tls import CertificateReloader

if TYPE_CHECKING:
    from clustergym.agent.service import Service

log = logging.getLogger(__name__)


def serve(
    settings: ServerSettings, *, seed: int, resume: bool, initial_state: Callable[[], State], learn_once: LearnOnce
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: flags of the server.
        seed: seed of exploration. A restarted server explores with other numbers.
        resume: whether to accept a store that has been used.
        initial_state: makes the first version of the policy.
        learn_once: one update. It runs in the learner process, so it must be picklable.
    """
    for module in ("fastapi", "prometheus_client", "uvicorn"):
        require(module, "agent")

    from clustergym.agent.api import create_app
    from clustergym.agent.credentials import Access
    from clustergym.agent.past import read_past
    from clustergym.agent.service import Service
    from clustergym.kubernetes.clients import Unavailable

    settings.check()
    torch.set_num_threads(1)
    access = Access(settings.token_file, settings.webhook_token_file, settings.collector_token_file)
    os.umask(0o077)
    settings.store.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(settings.store / "agent.lock"), contextlib.ExitStack() as stack:
        if not resume and (settings.store / DATABASE_NAME).exists():
            raise ValueError(f"{settings.store} has been used: drop --no-resume to resume it, or use another --store")
        listener = stack.enter_context(listen(settings.host, settings.port))
        problem = None
        try:
            aside = set_aside_if_corrupt(settings.store)
            store = Store(settings.store)
            stack.callback(store.close)
            if aside is not None:
                problem = f"the database was corrupt at the start and is now {aside}"
            newest = newest_version(store.connection)
            try:
                state = load_newest(store.connection)
            except ValueError as error:
                if newest is not None:
                    problem = f"{error}; the agent begins with a new policy"
                    log.error("%s", problem)
                state = initial_state() | {"version": 0 if newest is None else newest + 1, "learned_through": 0}
                add_version(store.connection, state, "initial", newest, {})
        except sqlite3.Error as error:
            raise ValueError(f"the store {settings.store} cannot be used: {error}") from error
        if settings.history_from is not None:
            try:
                read_past(store, settings.history_from, settings.history_days, settings.guard_settings)
            except Unavailable as error:
                problem = f"the past could not be read: {error}"
                log.error("%s", problem)
        telemetry = Telemetry(settings.gpus, settings.telemetry_s, settings.telemetry)
        stack.callback(telemetry.stop)
        learner = None
        if settings.explore != "off":
            learner = LearnerProcess(settings, learn_once)
            stack.callback(learner.stop)
        service = Service(settings, store, telemetry, Policy(state), learner, access, seed)
        if problem is not None:
            service.task_problems["store"] = problem
        run(service, create_app, listener)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port that is in use is an error before anything else starts."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listener


def run(service: Service, create_app: Callable[..., Any], listener: socket.socket) -> None:
    """Serve until a signal arrives."""
    import uvicorn

    from clustergym.kubernetes.pages import GuardedServer

    settings = service.settings

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(repeat(service, name, interval_s, task))
            for name, interval_s, task in (
                ("policy", 0.25, lambda: follow_policy(service)),
                ("credentials", 0.25, lambda: refresh_credentials(service)),
                ("maintenance", 1.0, lambda: run_maintenance(service)),
            )
        ]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    config = uvicorn.Config(
        create_app(service, lifespan), http="h11", ws="none", backlog=128, access_log=False, log_config=None,
        limit_concurrency=settings.max_connections, timeout_graceful_shutdown=10, timeout_keep_alive=75,
        server_header=False, proxy_headers=False, ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
    )  # fmt: skip
    config.load()
    if config.ssl is not None and settings.tls_cert is not None and settings.tls_key is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        service.certificate = CertificateReloader(config.ssl, settings.tls_cert, settings.tls_key)
    # uvicorn reports every malformed request: no flood of these.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = GuardedServer(config, settings.read_timeout_s)
    log.info("listening on %s, port %s", settings.host, listener.getsockname()[1])
    # After its shutdown, uvicorn raises the signal again: what follows the server must run.
    with contextlib.suppress(KeyboardInterrupt), terminated_like_interrupted():
        server.run(sockets=[listener])


@contextlib.contextmanager
def terminated_like_interrupted() -> Any:
    """SIGTERM raises KeyboardInterrupt where nothing else handles it."""
    import signal

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def repeat(service: Service, name: str, interval_s: float, task: Callable[[], None]) -> None:
    """Run a task repeatedly. A failure is logged, counted and shown by /readyz until the task succeeds."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            task()
            service.task_problems.pop(name, None)
        except Exception as error:  # any error: the next run may succeed
            problem = f"{type(error).__name__}: {error}"
            if service.task_problems.get(name) != problem:
                log.error("the background task %r failed and is tried again: %s", name, problem)
            service.task_problems[name] = problem
            service.metrics.task_failures.labels(name).inc()


def follow_policy(service: Service) -> None:
    """Use the newest version of the policy. One that cannot be read is reported, and the old policy stays."""
    newest = newest_version(service.store.connection)
    if newest is not None and newest != service.policy.version:
        service.policy = Policy(load_newest(service.store.connection))


def refresh_credentials(service: Service) -> None:
    """Read the token files and the certificate again if they have changed."""
    service.access.refresh()
    if service.certificate is not None:
        service.certificate.check()


def run_maintenance(service: Service) -> None:
    """Restart a dead learner process, look whether the store is back, delete old rows."""
    if service.learner is not None and service.learner.restart_if_dead():
        service.metrics.learner_restarts.inc()
    service.store.recover()
    if service.store.problem is None:
        # Up to 1,000 per second: more than can come. A hundred take about a millisecond.
        for _ in range(10):
            if not service.store.delete_old(service.settings.keep_allocations):
                break
