"""The HTTPS server of the webhooks. Every failure admits the pod."""

from __future__ import annotations

import asyncio
import datetime
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clustergym.webhook import certificates, decisions
from clustergym.webhook.clients import Agents, ApiServer, Unavailable
from clustergym.webhook.decisions import Decision, as_warnings, request_decision
from clustergym.webhook.names import PROTECTED_NAMESPACES, Backend
from clustergym.webhook.review import BadReview, Review, duration_s, make_response, parse

log = logging.getLogger(__name__)

Decide = Callable[[Review, float], Awaitable[Decision]]
"""Decides on a review within a number of seconds."""

MAX_BODY_BYTES = 8 << 20
"""The API server limits objects to 3 MB, and a review can contain the object twice."""


class Webhooks:
    """Both webhooks and their metrics. A decision takes at most ``deadline_s`` seconds."""

    def __init__(self, backend: Backend, deadline_s: float, api: ApiServer, agents: Agents, certificate: Path) -> None:
        if deadline_s <= 0:
            raise ValueError(f"deadline is {deadline_s} s: expected more than 0")
        self.backend, self.max_deadline_s, self.certificate = backend, deadline_s, certificate
        self.api, self.agents = api, agents
        self.registry = CollectorRegistry()
        self.decisions = Counter(
            "clustergym_webhook_decisions", "Reviews by outcome", ("webhook", "outcome"), registry=self.registry
        )
        self.seconds = Histogram(
            "clustergym_webhook_seconds",
            "Time of a decision",
            ("webhook",),
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5),
            registry=self.registry,
        )
        expiry = Gauge(
            "clustergym_webhook_certificate_expiry_timestamp_seconds", "Certificate expiry", registry=self.registry
        )
        expiry.set_function(lambda: certificates.expiry(certificate).timestamp())

    async def pods(self, review: Review, _: float) -> Decision:
        """The pod webhook."""
        if review.resource != "pods" or review.operation != "CREATE":
            return Decision("not-ours")
        return decisions.admit_pod(review.object, review.namespace, self.backend)

    async def bindings(self, review: Review, deadline_s: float) -> Decision:
        """The binding webhook. The agent gets 90 % of the time; the rest is left to report that it did not respond."""
        agent_deadline = asyncio.get_running_loop().time() + 0.9 * deadline_s
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
        found = decisions.managed_request(pod, review.namespace)
        if found is None:
            return Decision("nothing-to-ask")
        if review.dry_run:
            # The agent would store an allocation, and a dry run must not store anything.
            return Decision("dry-run")
        request, backend = found
        node = str(target.get("name") or "")
        try:
            async with asyncio.timeout_at(agent_deadline):
                address = await self.api.node_address(node) if self.agents.needs_address else ""
                uid = str((pod.get("metadata") or {}).get("uid", ""))
                grant = await self.agents.allocate(node, address, request, f"{uid}@{node}"[:128])
        except Unavailable as error:
            return request_decision(binding, "agent-unavailable", str(error))
        except TimeoutError:
            reason = f"the agent on {node} did not respond within {deadline_s:g} s"
            return request_decision(binding, "deadline", reason)
        return decisions.grant_decision(binding, request, backend, grant)

    def deadline_s(self, timeout: str | None) -> float:
        """Time for a decision: at most 80 % of the time that the API server waits (``?timeout=3s``)."""
        timeout_s = duration_s(timeout) if timeout else None
        return self.max_deadline_s if timeout_s is None else min(self.max_deadline_s, 0.8 * timeout_s)

    async def decide(self, webhook: str, decide: Decide, review: Review, deadline_s: float) -> Decision:
        """Decide within the deadline, count and log the outcome. If that fails, admit the object unchanged."""
        with self.seconds.labels(webhook).time():
            try:
                async with asyncio.timeout(deadline_s):
                    decision = await decide(review, deadline_s)
            except TimeoutError:
                decision = _unchanged("deadline", f"no decision within {deadline_s:g} s")
            except Unavailable as error:
                decision = _unchanged("unavailable", str(error))
            except Exception:
                # Fail open: a bug must not prevent pods from starting.
                log.exception("%s %s/%s: admitted unchanged", webhook, review.namespace, review.name)
                decision = _unchanged("error", "internal error")
        self.decisions.labels(webhook, decision.outcome).inc()
        log.info("%s %s/%s: %s", webhook, review.namespace, review.name or "(generated)", decision.outcome)
        return decision


def _unchanged(outcome: str, reason: str) -> Decision:
    return Decision(outcome, warnings=as_warnings([f"{reason}; admitted unchanged"]))


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body. The response is 413 as soon as it is longer than the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"the body is longer than {limit} bytes")
    return bytes(body)


def create_app(webhooks: Webhooks) -> FastAPI:
    """The FastAPI application of the webhooks."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await webhooks.api.close()
        await webhooks.agents.close()

    app = FastAPI(title="clustergym webhooks", lifespan=lifespan)

    async def respond(webhook: str, decide: Decide, request: Request, timeout: str | None) -> Response:
        body = await read_body(request, MAX_BODY_BYTES)
        try:
            review = parse(body)
        except BadReview as error:
            webhooks.decisions.labels(webhook, "bad-review").inc()
            raise HTTPException(400, str(error)) from None
        decision = await webhooks.decide(webhook, decide, review, webhooks.deadline_s(timeout))
        return JSONResponse(make_response(review.uid, decision))

    @app.post("/mutate/pods")
    async def mutate_pods(request: Request, timeout: str | None = None) -> Response:
        """The pod webhook, for AdmissionReviews of new pods."""
        return await respond("pods", webhooks.pods, request, timeout)

    @app.post("/mutate/bindings")
    async def mutate_bindings(request: Request, timeout: str | None = None) -> Response:
        """The binding webhook, for AdmissionReviews of new bindings."""
        return await respond("bindings", webhooks.bindings, request, timeout)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> str:
        """Not ready if the certificate has expired."""
        expiry = certificates.expiry(webhooks.certificate)
        if expiry < datetime.datetime.now(datetime.UTC):
            raise HTTPException(503, f"the serving certificate expired at {expiry.isoformat()}")
        return "ok"

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(webhooks.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def serve(
    app: FastAPI, host: str, port: int, certificate: Path, key: Path, client_ca: Path | None, reload_s: float
) -> None:
    """Serve HTTPS until a signal arrives, and check for a rotated certificate every ``reload_s`` seconds."""
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

    async def reload() -> None:
        while True:
            await asyncio.sleep(reload_s)
            reloader.check()

    reloading = asyncio.create_task(reload())
    try:
        await uvicorn.Server(config).serve()
    finally:
        reloading.cancel()
        with suppress(asyncio.CancelledError):
            await reloading
