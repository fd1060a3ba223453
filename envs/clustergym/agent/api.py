"""HTTP API: authentication, size limits, and the FastAPI application."""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError

from clustergym.agent import messages
from clustergym.agent.messages import PROBLEMS, AllocateRequest, FeedbackRequest
from clustergym.agent.service import Service
from clustergym.agent.store import StoreUnavailable

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Endpoint = Callable[[Any], Awaitable[Response]]
Endpoints = dict[str, tuple[type[BaseModel], Endpoint]]
"""Path to (request model, endpoint)."""

PUBLIC_PATHS = ("/healthz", "/readyz", "/metrics")
"""Can be read without a token, because probes and scrapers have none."""
DOCUMENT_PATHS = ("/docs", "/openapi.json")


class BearerToken:
    """The token that clients must send. Its file is read again when it changes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._expected: bytes | None = None
        self._file_version: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it has changed. Once there is a token, an unreadable or empty file does not remove it."""
        if self.path is None:
            return
        try:
            status = self.path.stat()
            file_version = status.st_mtime_ns, status.st_ino
            if file_version == self._file_version:
                return
            token = self.path.read_text().strip()
        except OSError as error:
            if self._expected is None:
                raise ValueError(f"--token-file {self.path} cannot be read: {error}") from None
            log.warning("token file %s cannot be read, the old token stays valid: %s", self.path, error)
            return
        if token:
            self._expected, self._file_version = f"Bearer {token}".encode(), file_version
        elif self._expected is None:
            raise ValueError(f"--token-file {self.path} is empty: expected a token")

    def accepts(self, header: bytes) -> bool:
        """Check an Authorization header in constant time."""
        return self._expected is None or hmac.compare_digest(header, self._expected)


class AccessMiddleware:
    """Authenticates every request before it is routed, limits request bodies, and calls the two POST endpoints.

    FastAPI documents those endpoints, but they are called from here, because its routing, dependencies and middleware
    take longer than the decision.
    """

    def __init__(self, app: Any, service: Service, token: BearerToken, endpoints: Endpoints) -> None:
        self.app, self.service, self.token = app, service, token
        self.endpoints = {
            path: (model, endpoint, service.seconds.labels(path)) for path, (model, endpoint) in endpoints.items()
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Deny by default: the token is checked before any path is looked up."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        reads = method in ("GET", "HEAD")
        if not (reads and path in PUBLIC_PATHS) and not self.token.accepts(headers.get(b"authorization", b"")):
            refusal = self.refuse(401, "missing or wrong bearer token", {"www-authenticate": "Bearer"})
        elif path in self.endpoints and method == "POST":
            await self.post(scope, headers, receive, send)
            return
        elif path in (*PUBLIC_PATHS, *DOCUMENT_PATHS) and reads:
            await self.app(scope, receive, send)
            return
        elif path in (*self.endpoints, *PUBLIC_PATHS, *DOCUMENT_PATHS):
            allowed = "POST" if path in self.endpoints else "GET"
            refusal = self.refuse(405, f"{path} requires {allowed}", {"allow": allowed})
        else:
            refusal = self.refuse(404, f"no such path; the paths are {', '.join((*self.endpoints, *PUBLIC_PATHS))}")
        await refusal(scope, receive, send)

    async def post(self, scope: Any, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Call an endpoint with the validated body."""
        start = time.perf_counter()
        model, endpoint, seconds = self.endpoints[scope["path"]]
        body = await self.read_body(headers, receive)
        if body is None:
            response = self.refuse(413, f"the body is longer than {self.service.settings.max_body_bytes} bytes")
        else:
            response = await self.call(model, endpoint, body)
        await response(scope, receive, send)
        seconds.observe(time.perf_counter() - start)

    async def read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body, or None as soon as it is known to be too long."""
        limit = self.service.settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            return None
        body, more = b"", True
        while more and len(body) <= limit:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body if len(body) <= limit else None

    async def call(self, model: type[BaseModel], endpoint: Endpoint, body: bytes) -> Response:
        try:
            return await endpoint(model.model_validate_json(body))
        except ValidationError as error:
            problems = [
                {"where": list(map(str, one["loc"])), "problem": one["msg"], "type": one["type"]}
                for one in error.errors()
            ]
            return self.refuse(400 if problems[0]["type"] == "json_invalid" else 422, problems)
        except StoreUnavailable as error:
            return self.refuse(503, str(error))

    def refuse(self, status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
        self.service.refused.labels(str(status)).inc()
        # The client may still be sending a body that nobody will read: close the connection.
        closing = {"connection": "close"} if status in (401, 404, 405, 413) else {}
        return JSONResponse({"detail": detail}, status, closing | (headers or {}))


def json_response(document: dict[str, Any]) -> Response:
    return Response(json.dumps(document), media_type="application/json")


def create_app(
    service: Service, token: BearerToken, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastAPI:
    """The FastAPI application of a service."""
    app = FastAPI(title="clustergym GPU allocation agent", lifespan=lifespan, redoc_url=None)
    security: dict[str, Any] = {"security": [{"bearer": []}]} if token.path is not None else {}

    @app.post("/allocate", response_model=messages.AllocateResponse, responses=PROBLEMS, openapi_extra=security)
    async def allocate(request: AllocateRequest) -> Response:
        """Decide what a pod gets."""
        made = await service.allocate(request)
        return json_response(
            {"allocation_id": made.id, "cores": made.cores, "memory": made.memory_mb, "policy_version": made.version}
        )

    @app.post("/feedback", response_model=messages.FeedbackResponse, responses=PROBLEMS, openapi_extra=security)
    async def feedback(request: FeedbackRequest) -> Response:
        """Report the outcome of an allocation. Only the first report has an effect."""
        status, reward = await service.feedback(request)
        return json_response({"status": status, "reward": reward})

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is running."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: PROBLEMS[503]})
    async def readyz() -> dict[str, Any]:
        """Whether decisions can be made. Degraded without GPU telemetry or without the learner process."""
        service.store.count("readiness-checks")
        await service.store.committed()
        problems = service.problems()
        status = "degraded" if problems else "ready"
        return {"status": status, "reasons": problems, "policy_version": service.policy.version}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(StoreUnavailable)
    async def store_unavailable(_: Any, error: StoreUnavailable) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=503)

    document = app.openapi()
    if security:
        document.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    endpoints: Endpoints = {"/allocate": (AllocateRequest, allocate), "/feedback": (FeedbackRequest, feedback)}
    app.add_middleware(AccessMiddleware, service=service, token=token, endpoints=endpoints)
    return app
