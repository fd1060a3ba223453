"""The HTTPS server around the decisions. Whatever happens in here, the pod is admitted."""

from __future__ import annotations

import asyncio
import datetime
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clustergym.webhook import certificates
from clustergym.webhook.clients import Agents, ApiServer, Unavailable
from clustergym.webhook.decisions import Decision, admit_pod, grant_decision, managed_request, stands_decision
from clustergym.webhook.names import BACKENDS, PROTECTED_NAMESPACES, Backend
from clustergym.webhook.review import BadReview, Review, answer, duration_s, parse

log = logging.getLogger(__name__)

Decide = Callable[[Review, float], Awaitable[Decision]]
"""What a webhook does with a review within so many seconds."""

MAX_BODY_BYTES = 8 << 20
"""An API server's own limit for an object is 3 MB; a review may hold it twice."""


@dataclass(frozen=True)
class Settings:
    """How the webhooks decide."""

    backend: str = "mps"
    deadline_s: float = 2.0
    """At most this long for one decision, and always less than what the API server is ready to wait."""


class Webhooks:
    """Both webhooks, the services they ask, and their counters."""

    def __init__(self, settings: Settings, api: ApiServer, agents: Agents, certificate: Path | None = None) -> None:
        if settings.backend not in BACKENDS:
            raise ValueError(f"backend is {settings.backend!r}: expected one of {', '.join(BACKENDS)}")
        if settings.deadline_s <= 0:
            raise ValueError(f"deadline is {settings.deadline_s} s: expected more than 0")
        self.settings, self.api, self.agents = settings, api, agents
        self.certificate = certificate
        self.backend: Backend = BACKENDS[settings.backend]
        self.registry = CollectorRegistry()
        self.decisions = Counter(
            "clustergym_webhook_decisions",
            "Reviews answered, by webhook and outcome",
            ("webhook", "outcome"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "clustergym_webhook_seconds",
            "Time of a decision",
            ("webhook",),
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5),
            registry=self.registry,
        )
        expiry = Gauge(
            "clustergym_webhook_certificate_expiry_timestamp_seconds",
            "When the serving certificate ends",
            registry=self.registry,
        )
        expiry.set_function(lambda: self.certificate_expiry().timestamp())

    def certificate_expiry(self) -> datetime.datetime:
        if self.certificate is None:
            return datetime.datetime.max.replace(tzinfo=datetime.UTC)
        return certificates.expiry(self.certificate)

    async def pods(self, review: Review, _: float) -> Decision:
        """Webhook A."""
        if review.resource != "pods" or review.operation != "CREATE":
            return Decision("not-ours")
        return admit_pod(review.object, review.namespace, self.backend)

    async def bindings(self, review: Review, deadline_s: float) -> Decision:
        """Webhook B. The agent gets nine tenths of the time, so that there is some left to say that it did not answer."""
        give_up = asyncio.get_running_loop().time() + 0.9 * deadline_s
        if review.resource not in ("pods/binding", "bindings") or review.operation != "CREATE":
            return Decision("not-ours")
        if review.namespace in PROTECTED_NAMESPACES:
            return Decision("not-opted-in")
        binding = review.object
        target = binding.get("target") or {}
        if target.get("kind") not in (None, "", "Node"):
            return Decision("not-ours")
        name = review.name or (binding.get("metadata") or {}).get("name", "")
        pod = await self.api.pod(review.namespace, name)
        found = managed_request(pod, review.namespace)
        if found is None:
            return Decision("nothing-to-ask")
        if review.dry_run:
            # An allocation would be stored by the agent; a dry run must leave nothing behind.
            return Decision("dry-run")
        request, backend = found
        node = str(target.get("name") or "")
        try:
            async with asyncio.timeout_at(give_up):
                address = await self.api.node_address(node) if self.agents.needs_address else ""
                uid = str((pod.get("metadata") or {}).get("uid", ""))
                grant = await self.agents.allocate(node, address, request, f"{uid}@{node}"[:128])
        except Unavailable as error:
            return stands_decision(binding, "agent-unavailable", str(error))
        except TimeoutError:
            return stands_decision(binding, "deadline", f"the agent on {node} did not answer within {deadline_s:g} s")
        return grant_decision(binding, request, backend, grant)

    def deadline_s(self, timeout: str | None) -> float:
        """The API server says how long it waits (``?timeout=3s``); answer well before that."""
        patience = duration_s(timeout) if timeout else None
        return self.settings.deadline_s if patience is None else min(self.settings.deadline_s, 0.8 * patience)

    async def decide(self, webhook: str, decide: Decide, review: Review, deadline_s: float) -> Decision:
        """A decision within the deadline, counted and logged; an unchanged admission where there is none."""
        with self.seconds.labels(webhook).time():
            try:
                async with asyncio.timeout(deadline_s):
                    decision = await decide(review, deadline_s)
            except TimeoutError:
                decision = _unchanged("deadline", f"no decision within {deadline_s:g} s")
            except Unavailable as error:
                decision = _unchanged("unavailable", str(error))
            except Exception:
                # Fail open: a bug in here must not keep pods from starting.
                log.exception("%s %s/%s: admitted without a change", webhook, review.namespace, review.name)
                decision = _unchanged("error", "internal error")
        self.decisions.labels(webhook, decision.outcome).inc()
        log.info("%s %s/%s: %s", webhook, review.namespace, review.name or "(generated)", decision.outcome)
        return decision


def _unchanged(outcome: str, reason: str) -> Decision:
    return Decision(outcome, warnings=[f"clustergym: {reason}; admitted without a change"[:250]])


async def limited_body(request: Request, limit: int) -> bytes:
    """The body, or 413 as soon as it is longer than the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"the body is longer than {limit} bytes")
    return bytes(body)


def create_app(webhooks: Webhooks) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await webhooks.api.close()
        await webhooks.agents.close()

    app = FastAPI(title="clustergym webhooks", lifespan=lifespan)

    async def respond(webhook: str, decide: Decide, request: Request, timeout: str | None) -> Response:
        body = await limited_body(request, MAX_BODY_BYTES)
        try:
            review = parse(body)
        except BadReview as error:
            webhooks.decisions.labels(webhook, "bad-review").inc()
            raise HTTPException(400, str(error)) from None
        decision = await webhooks.decide(webhook, decide, review, webhooks.deadline_s(timeout))
        return JSONResponse(answer(review.uid, decision))

    @app.post("/mutate/pods")
    async def mutate_pods(request: Request, timeout: str | None = None) -> Response:
        """Webhook A: an AdmissionReview of a pod's CREATE."""
        return await respond("pods", webhooks.pods, request, timeout)

    @app.post("/mutate/bindings")
    async def mutate_bindings(request: Request, timeout: str | None = None) -> Response:
        """Webhook B: an AdmissionReview of a binding's CREATE."""
        return await respond("bindings", webhooks.bindings, request, timeout)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> str:
        """Not ready with a certificate that API servers would refuse."""
        ends = webhooks.certificate_expiry()
        if ends < datetime.datetime.now(datetime.UTC):
            raise HTTPException(503, f"the serving certificate ended at {ends.isoformat()}")
        return "ok"

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(webhooks.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def serve(
    app: FastAPI, host: str, port: int, certificate: Path, key: Path, client_ca: Path | None, reload_s: float
) -> None:
    """Serve over TLS until told to stop, and look for a rotated certificate every ``reload_s`` seconds."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_ca_certs=None if client_ca is None else str(client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
    )
    config.load()
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    reloader = certificates.Reloader(config.ssl, certificate, key)

    async def follow() -> None:
        while True:
            await asyncio.sleep(reload_s)
            reloader.check()

    following = asyncio.create_task(follow())
    try:
        await uvicorn.Server(config).serve()
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
