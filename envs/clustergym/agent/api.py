"""HTTP API: authentication, size limits, and the FastAPI application."""

from __future__ import annotations

import html
import json
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from clustergym.agent import messages
from clustergym.agent.messages import PROBLEMS, AllocateRequest, FeedbackRequest
from clustergym.agent.metrics import Seconds
from clustergym.agent.service import Refused, Service
from clustergym.agent.status import page
from clustergym.agent.store import StoreUnavailable

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Endpoint = Callable[[Any], dict[str, Any]]
Endpoints = dict[str, tuple[type[BaseModel], Endpoint]]
"""Path to (request model, endpoint). An endpoint returns the answer."""

PUBLIC_PATHS = ("/healthz", "/readyz", "/metrics", "/ui")
"""Can be read without a token, because probes and scrapers have none, and the page itself shows nothing."""
DOCUMENT_PATHS = ("/docs", "/openapi.json", "/status.json")


class Disconnected(Exception):
    """The client disconnected before it sent the whole body."""


class AccessMiddleware:
    """Authenticates every request before it is routed, limits request bodies, and calls the two POST endpoints.

    FastAPI documents those endpoints, but they are called from here, because its routing, dependencies and middleware
    take longer than the decision.
    """

    def __init__(self, app: Any, service: Service, endpoints: Endpoints) -> None:
        self.app, self.service = app, service
        self.endpoints = {
            path: (model, endpoint, service.metrics.seconds.setdefault(path, Seconds()))
            for path, (model, endpoint) in endpoints.items()
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
        authorization = headers.get(b"authorization", b"")
        public = reads and path in PUBLIC_PATHS
        if not public and not self.service.access.allows(method, path, authorization):
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
        try:
            limit = self.service.settings.max_body_bytes
            body = await self.read_body(headers, receive, limit)
        except Disconnected:
            return
        if body is None:
            answer: dict[str, Any] | Response = self.refuse(413, f"the body is longer than {limit} bytes")
        else:
            answer = self.call(model, endpoint, body)
        if isinstance(answer, Response):
            await answer(scope, receive, send)
        else:
            # Creating a Response object would take longer than sending the answer.
            content = to_json(answer)
            headers_sent = ((b"content-length", b"%d" % len(content)), (b"content-type", b"application/json"))
            await send({"type": "http.response.start", "status": 200, "headers": headers_sent})
            await send({"type": "http.response.body", "body": content})
        seconds.observe(time.perf_counter() - start)

    async def read_body(self, headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes | None:
        """The body, or None as soon as it is known to be too long."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            return None
        body, more = b"", True
        while more and len(body) <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body if len(body) <= limit else None

    def call(self, model: type[BaseModel], endpoint: Endpoint, body: bytes) -> dict[str, Any] | Response:
        try:
            return endpoint(model.model_validate_json(body))
        except ValidationError as error:
            problems = [
                {"where": list(map(str, one["loc"])), "problem": one["msg"], "type": one["type"]}
                for one in error.errors()
            ]
            return self.refuse(400 if problems[0]["type"] == "json_invalid" else 422, problems)
        except Refused as error:
            return self.refuse(error.status, str(error))
        except StoreUnavailable as error:
            return self.refuse(503, str(error))
        except sqlite3.Error as error:
            self.service.store.failure = f"the store cannot be read: {error}"
            log.error("%s", self.service.store.failure)
            return self.refuse(503, self.service.store.failure)
        except Exception:  # a bug: the transaction was rolled back, and memory is changed after it
            log.exception("a request failed and had no effect")
            return self.refuse(500, "an error in the agent; nothing was stored")

    def refuse(self, status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
        self.service.metrics.refused.labels(str(status)).inc()
        # The client may still be sending a body that nobody will read: close the connection.
        closing = {"connection": "close"} if status in (401, 404, 405, 413) else {}
        return JSONResponse({"detail": detail}, status, closing | (headers or {}))


def document_page(document: dict[str, Any]) -> str:
    """The OpenAPI document as a page without scripts: it can be read on a node without access to the internet."""
    operations = [
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('description', ''))}</td></tr>"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = []
    for name, schema in document["components"]["schemas"].items():
        required = schema.get("required", [])
        rows = [
            f"<tr><td><code>{html.escape(field)}</code>{' *' if field in required else ''}</td>"
            f"<td><code>{html.escape(_type_of(content))}</code></td>"
            f"<td>{html.escape(content.get('description', ''))}</td></tr>"
            for field, content in schema.get("properties", {}).items()
        ]
        schemas.append(
            f"<h2>{html.escape(name)}</h2><p>{html.escape(schema.get('description', ''))}</p>"
            f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>"
        )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>clustergym agent: API</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.3em .6em;text-align:left}</style>"
        f"<h1>{html.escape(document['info']['title'])}</h1><p>* is required. The same document for programs: "
        f"<a href=openapi.json>openapi.json</a></p><table>{''.join(operations)}</table>{''.join(schemas)}</html>"
    )


def _type_of(content: dict[str, Any]) -> str:
    """Type, limits and default of a field, as text."""
    kinds = [content, *content.get("anyOf", [])]
    text = " or ".join(kind["type"] for kind in kinds if "type" in kind) or "any"
    limits = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤"}
    for kind in kinds:
        text += "".join(f" {sign} {kind[key]:g}" for key, sign in limits.items() if key in kind)
    return text + (f", default {json.dumps(content['default'])}" if "default" in content else "")


def create_app(service: Service, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> AccessMiddleware:
    """The application of a service: FastAPI behind the access checks."""
    app = FastAPI(title="clustergym GPU allocation agent", lifespan=lifespan, docs_url=None, redoc_url=None)
    status_page = page()
    security: dict[str, Any] = {"security": [{"bearer": []}]} if service.access.tokens else {}

    @app.post("/allocate", response_model=messages.AllocateResponse, responses=PROBLEMS, openapi_extra=security)
    async def allocate(request: AllocateRequest) -> Response:
        """Decide what a pod gets."""
        raise NotImplementedError("called by the middleware")

    @app.post("/feedback", response_model=messages.FeedbackResponse, responses=PROBLEMS, openapi_extra=security)
    async def feedback(request: FeedbackRequest) -> Response:
        """Report the outcome of an allocation. After the first report, only a missed objective has an effect."""
        raise NotImplementedError("called by the middleware")

    def answer_allocate(request: AllocateRequest) -> dict[str, Any]:
        made = service.allocate(request)
        return {
            "allocation_id": made.id, "cores": made.cores, "memory": made.memory_mb,
            "policy_version": made.version, "gpu": made.gpu, "decided_by": made.decided_by,
            "recommended_cores": made.recommended_cores, "recommended_memory": made.recommended_memory_mb,
        }  # fmt: skip

    def answer_feedback(request: FeedbackRequest) -> dict[str, Any]:
        status, reward = service.feedback(request)
        return {"status": status, "reward": reward}

    @app.get("/healthz", responses={503: PROBLEMS[503]})
    async def healthz() -> Any:
        """The process is running and the file of its store is there: otherwise a restart helps."""
        lost = service.store.lost
        return {"status": "ok"} if lost is None else JSONResponse({"status": lost}, 503)

    @app.get("/readyz", responses={503: PROBLEMS[503]})
    async def readyz() -> Any:
        """Whether decisions can be made; the reasons if not, or if something that is not essential is missing."""
        reasons, status = service.problems(), 200
        if service.store.problem is not None:
            reasons, status = [service.store.problem, *reasons], 503
        text = "not ready" if status == 503 else "degraded" if reasons else "ready"
        document = {"status": text, "reasons": reasons, "policy_version": service.policy.version}
        return JSONResponse(document, status)

    @app.get("/ui", response_class=HTMLResponse, include_in_schema=False)
    async def ui() -> HTMLResponse:
        policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(status_page, headers={"content-security-policy": policy, "x-frame-options": "DENY"})

    @app.get("/status.json", include_in_schema=False)
    async def status() -> JSONResponse:
        return JSONResponse(service.status.document(service))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    document = app.openapi()
    if security:
        document.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return document_page(document)

    endpoints: Endpoints = {
        "/allocate": (AllocateRequest, answer_allocate),
        "/feedback": (FeedbackRequest, answer_feedback),
    }
    return AccessMiddleware(app, service, endpoints)
