"""The HTTPS server of the webhook, and plain ports for health and metrics. Every failure admits the pod."""

from __future__ import annotations

import asyncio
import datetime
import logging
import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clustergym.common.tls import CertificateReloader
from clustergym.kubernetes import certificates, decisions
from clustergym.kubernetes.clients import Agents, ApiServer, Unavailable, checked_name
from clustergym.kubernetes.decisions import Decision, PodPlan, as_warnings
from clustergym.kubernetes.messages import AllocateRequest, AllocateResponse
from clustergym.kubernetes.names import MODES, Backend, Mode
from clustergym.kubernetes.pages import GuardedServer, Page, pages_app
from clustergym.kubernetes.review import BadReview, Review, duration_s, make_response, parse

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 3 << 20
"""The API server limits requests to 3 MB and objects to 1.5 MB. A review of a new object contains it once."""
MAX_BODIES_BYTES = 24 << 20
"""Bodies in memory at the same time. Further reviews wait, unread, for at most their deadline."""
MAX_CONNECTIONS = 256
"""More connections are answered 503: the API server then admits the pod unchanged."""


class ByteBudget:
    """Limits the bytes that are in use at the same time."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until ``size`` bytes are free, and use them inside the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            async with self._changed:
                self._free += size
                self._changed.notify_all()


class Webhook:
    """The webhook and its metrics. A decision takes at most ``deadline_s`` seconds."""

    def __init__(
        self,
        backend: Backend,
        deadline_s: float,
        api: ApiServer,
        agents: Agents,
        recommender: Agents | None,
        certificate: Path,
    ) -> None:
        if deadline_s <= 0:
            raise ValueError(f"deadline is {deadline_s} s: expected more than 0")
        self.backend, self.max_deadline_s, self.certificate = backend, deadline_s, certificate
        self.api, self.agents, self.recommender = api, agents, recommender
        self.registry = CollectorRegistry()
        self.decisions = Counter(
            "clustergym_webhook_decisions", "Reviews by outcome", ("outcome",), registry=self.registry
        )
        self.seconds = Histogram(
            "clustergym_webhook_seconds",
            "Time of a decision",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5),
            registry=self.registry,
        )
        self.amounts = {
            name: Counter(f"clustergym_webhook_{name}", text, ("mode",), registry=self.registry)
            for name, text in (
                ("requested_cores_percent", "Cores that pods with a recommendation requested, % of a GPU"),
                ("recommended_cores_percent", "Cores that were recommended for these pods, % of a GPU"),
                ("requested_memory_megabytes", "GPU memory that pods with a recommendation requested"),
                ("recommended_memory_megabytes", "GPU memory that was recommended for these pods"),
            )
        }
        expiry = Gauge(
            "clustergym_webhook_certificate_expiry_timestamp_seconds", "Certificate expiry", registry=self.registry
        )
        expiry.set_function(lambda: certificates.expiry(certificate).timestamp())

    async def pods(self, namespace_mode: Mode, review: Review, deadline_s: float) -> Decision:
        """Decide on a new pod. The agent gets 90 % of the time; the rest is left to report that it did not respond."""
        if review.resource.resource != "pods" or review.subResource or review.operation != "CREATE":
            return Decision("not-ours")
        plan = decisions.plan_pod(review.object, review.namespace, self.backend, namespace_mode)
        if isinstance(plan, Decision):
            return plan
        if not plan.is_new or (plan.node is None and self.recommender is None):
            return decisions.admit_pod(review.object, plan)
        if review.dryRun:
            # The agent would store an allocation, and a dry run must not store anything.
            return decisions.admit_pod(review.object, plan, problem="not decided in a dry run")
        try:
            async with asyncio.timeout(0.9 * deadline_s):
                answer = await self.ask(plan, review.uid[:128])
        except Unavailable as error:
            return decisions.admit_pod(review.object, plan, problem=str(error))
        except TimeoutError:
            who = "the recommender" if plan.node is None else f"the agent on {plan.node[:64]}"
            return decisions.admit_pod(review.object, plan, problem=f"{who} did not respond in time")
        self._count(plan, answer)
        return decisions.admit_pod(review.object, plan, answer)

    async def ask(self, plan: PodPlan, request_id: str) -> AllocateResponse:
        """The answer of the agent of the pod's node, or of the recommender."""
        request, bounds = plan.request, plan.bounds
        message = AllocateRequest(
            owner=request.owner, cores=request.cores, memory=request.memory_mb, qos_class=request.qos_class,
            request_id=request_id, shadow=plan.mode == "Off", min_cores=bounds.min_cores, max_cores=bounds.max_cores,
            min_memory=bounds.min_memory_mb, max_memory=bounds.max_memory_mb,
        )  # fmt: skip
        if plan.node is None:
            assert self.recommender is not None
            return await self.recommender.allocate(message)
        node = checked_name(plan.node, "the node's name")
        address = await self.api.node_address(node) if "{ip}" in self.agents.url else ""
        return await self.agents.allocate(message, node, address)

    def _count(self, plan: PodPlan, answer: AllocateResponse) -> None:
        amounts = answer.recommended_cores, answer.recommended_memory
        recommended_cores, recommended_memory = plan.bounds.clamp(*amounts)
        for name, amount in (
            ("requested_cores_percent", plan.request.cores),
            ("recommended_cores_percent", recommended_cores),
            ("requested_memory_megabytes", plan.request.memory_mb),
            ("recommended_memory_megabytes", recommended_memory),
        ):
            self.amounts[name].labels(plan.mode).inc(amount)

    def deadline_s(self, timeout: str | None) -> float:
        """Time for a decision: at most 80 % of the time that the API server waits (``?timeout=3s``)."""
        timeout_s = duration_s(timeout) if timeout else None
        return self.max_deadline_s if timeout_s is None else min(self.max_deadline_s, 0.8 * timeout_s)

    async def decide(self, mode: Mode, review: Review, deadline_s: float) -> Decision:
        """Decide within the deadline, count and log the outcome. If that fails, admit the pod unchanged."""
        with self.seconds.time():
            try:
                async with asyncio.timeout(deadline_s):
                    decision = await self.pods(mode, review, deadline_s)
            except TimeoutError:
                decision = _unchanged("deadline", f"no decision within {deadline_s:g} s")
            except Unavailable as error:
                decision = _unchanged("unavailable", str(error))
            except Exception:
                # Fail open: a bug must not prevent pods from starting.
                log.exception("%s/%s: admitted unchanged", review.namespace, review.name)
                decision = _unchanged("error", "internal error")
        self.decisions.labels(decision.outcome).inc()
        log.info("%s/%s: %s", review.namespace, review.name or "(generated)", decision.outcome)
        return decision

    async def close(self) -> None:
        await self.api.close()
        await self.agents.close()
        if self.recommender is not None:
            await self.recommender.close()


def _unchanged(outcome: str, reason: str) -> Decision:
    return Decision(outcome, warnings=as_warnings([f"{reason}; admitted unchanged"]))


def body_length(request: Request) -> int:
    """The announced length of the body. A body that is too long, or of unknown length, is refused unread."""
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        raise HTTPException(411, "the request needs a Content-Length")
    if len(length) > 12 or int(length) > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return int(length)


def create_app(webhook: Webhook) -> FastAPI:
    """The FastAPI application that the API server calls. It serves nothing else."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await webhook.close()

    app = FastAPI(title="clustergym webhook", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    budget, modes = ByteBudget(MAX_BODIES_BYTES), {mode.lower(): mode for mode in MODES}

    @app.post("/mutate/pods/{mode}")
    async def mutate_pods(mode: str, request: Request, timeout: str | None = None) -> Response:
        """AdmissionReviews of new pods. The path has the mode of the pod's namespace."""
        if mode not in modes:
            raise HTTPException(404, f"no such path; the modes are {', '.join(modes)}")
        deadline_s, started_s = webhook.deadline_s(timeout), asyncio.get_running_loop().time()
        size = body_length(request)
        try:
            async with asyncio.timeout(deadline_s) as waiting, budget.hold(size):
                review = parse(await request.body())
                waiting.reschedule(None)
                left_s = max(started_s + deadline_s - asyncio.get_running_loop().time(), 0.05)
                decision = await webhook.decide(modes[mode], review, left_s)
                return JSONResponse(make_response(review.uid, decision))
        except BadReview as error:
            webhook.decisions.labels("bad-review").inc()
            raise HTTPException(400, str(error)) from None
        except TimeoutError:
            webhook.decisions.labels("busy").inc()
            raise HTTPException(503, "busy: the body was not read in time", {"Connection": "close"}) from None

    return app


def health_pages(webhook: Webhook) -> dict[str, Page]:
    def ready() -> Response:
        """Not ready if the certificate has expired or cannot be read."""
        try:
            expiry = certificates.expiry(webhook.certificate)
        except (OSError, ValueError) as error:
            return PlainTextResponse(f"the serving certificate cannot be read: {error}", 503)
        if expiry < datetime.datetime.now(datetime.UTC):
            return PlainTextResponse(f"the serving certificate expired at {expiry.isoformat()}", 503)
        return PlainTextResponse("ok")

    return {"/healthz": lambda: PlainTextResponse("ok"), "/readyz": ready}


def metrics_pages(webhook: Webhook) -> dict[str, Page]:
    return {"/metrics": lambda: Response(generate_latest(webhook.registry), media_type=CONTENT_TYPE_LATEST)}


@dataclass(frozen=True)
class Listen:
    """Where the servers listen, and with which certificates."""

    host: str
    port: int
    health_port: int
    metrics_port: int
    certificate: Path
    key: Path
    client_ca: Path | None
    reload_s: float
    installation: certificates.Installation | None = None
    """Makes and renews certificate and token."""


async def attempt(installation: certificates.Installation) -> bool:
    """Whether certificate and token are there and up to date."""
    try:
        await installation.ensure()
    except Exception as error:  # the API server is down, a role is missing: what is there is used on
        log.warning("certificate and tokens: %s", error)
        return False
    return True


async def serve(webhook: Webhook, listen: Listen) -> None:
    """Serve until a signal arrives, and check for rotated certificates every ``reload_s`` seconds."""
    while listen.installation is not None and not await attempt(listen.installation):
        await asyncio.sleep(2.0)
    # A connection without a client certificate uses a file until its handshake fails: allow as many as the system does.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    # h11 limits the size of headers.
    common: dict[str, Any] = {
        "host": listen.host, "access_log": False, "log_config": None, "ws": "none", "http": "h11",
    }  # fmt: skip
    config = uvicorn.Config(
        create_app(webhook),
        port=listen.port,
        ssl_certfile=str(listen.certificate),
        ssl_keyfile=str(listen.key),
        ssl_ca_certs=None if listen.client_ca is None else str(listen.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if listen.client_ca is None else ssl.CERT_REQUIRED,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=10,
        **common,
    )
    config.load()
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    reloader = CertificateReloader(config.ssl, listen.certificate, listen.key, listen.client_ca)
    plain = [
        GuardedServer(
            uvicorn.Config(pages_app(pages), port=port, lifespan="off", limit_concurrency=64, **common), 5.0, False
        )
        for port, pages in (
            (listen.health_port, health_pages(webhook)),
            (listen.metrics_port, metrics_pages(webhook)),
        )
    ]  # fmt: skip

    async def reload() -> None:
        while True:
            await asyncio.sleep(listen.reload_s)
            if listen.installation is not None:
                await attempt(listen.installation)
            reloader.check()

    tasks = [asyncio.create_task(reload()), *(asyncio.create_task(one.serve()) for one in plain)]
    try:
        await GuardedServer(config, webhook.max_deadline_s + 5.0).serve()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
