"""The HTTP API. Every path needs a token except four that are listed; everything else is refused before it is read."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from clustergym.agent import status
from clustergym.agent.service import Refused, Service
from clustergym.agent.store import StoreUnavailable
from clustergym.kubernetes.messages import AllocateRequest, AllocateResponse, FeedbackRequest, FeedbackResponse

PUBLIC_PATHS = ("/healthz", "/readyz", "/metrics", "/ui")
"""Can be read without a token, because probes and scrapers have none, and the page itself shows nothing."""
READ = ["GET", "HEAD"]


class Problem(BaseModel):
    """Why a request was refused."""

    detail: Any


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is not JSON"},
    401: {"model": Problem, "description": "Missing or wrong bearer token"},
    408: {"model": Problem, "description": "The body did not arrive in time"},
    409: {"model": Problem, "description": "The feedback needs an id, or a request id was used for another request"},
    413: {"model": Problem, "description": "The body is too long"},
    422: {"model": Problem, "description": "A value in the body is invalid"},
    500: {"model": Problem, "description": "An error in the agent; nothing was stored"},
    503: {"model": Problem, "description": "The store cannot be used; nothing was decided"},
}


def create_app(service: Service, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """The application of a service."""
    page, events = status.page(), status.EventLog()

    async def authorize(request: Request) -> None:
        """Runs before every route, and before the answer to a path or method that has no route."""
        public = request.method in READ and request.scope["path"] in PUBLIC_PATHS
        header = request.headers.get("authorization", "").encode("latin-1")
        if not public and not service.access.allows(request.method, request.scope["path"], header):
            raise HTTPException(401, "missing or wrong bearer token", {"www-authenticate": "Bearer"})

    async def body(request: Request) -> bytes:
        """The body, as long as it is not longer than the limit. It is not read before the token was checked."""
        limit, found = service.settings.max_body_bytes, b""
        length = request.headers.get("content-length", "0")
        too_long = HTTPException(413, f"the body is longer than {limit} bytes")
        if not length.isdecimal() or int(length[:20]) > limit:
            raise too_long
        try:
            async with asyncio.timeout(service.settings.read_timeout_s):
                async for chunk in request.stream():
                    found += chunk
                    if len(found) > limit:
                        raise too_long
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time") from None
        except ClientDisconnect:
            raise HTTPException(400, "the body did not arrive in full") from None
        return found

    async def allocate_request(content: Annotated[bytes, Depends(body)]) -> AllocateRequest:
        return AllocateRequest.model_validate_json(content)

    async def feedback_request(content: Annotated[bytes, Depends(body)]) -> FeedbackRequest:
        return FeedbackRequest.model_validate_json(content)

    # The documents of FastAPI are routes without dependencies, so they are left out.
    app = FastAPI(
        title="clustergym GPU allocation agent", lifespan=lifespan, openapi_url=None, redirect_slashes=False,
        dependencies=[Depends(authorize)],
    )  # fmt: skip

    def refuse(code: int, detail: Any, headers: Any = None) -> JSONResponse:
        service.metrics.refused.labels(str(code)).inc()
        # The client may still be sending a body that nobody will read: close the connection.
        closing = {"connection": "close"} if code in (401, 404, 405, 408, 413) else {}
        return JSONResponse({"detail": detail}, code, closing | (headers or {}))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        """Paths and methods without a route are refused like all others: first the token is checked."""
        if error.status_code in (404, 405):
            try:
                await authorize(request)
            except HTTPException as unauthorized:
                error = unauthorized
        return refuse(error.status_code, error.detail, error.headers)

    @app.exception_handler(ValidationError)
    async def invalid(_: Request, error: ValidationError) -> Response:
        problems = [
            {"where": list(map(str, one["loc"])), "problem": one["msg"], "type": one["type"]} for one in error.errors()
        ]
        return refuse(400 if problems[0]["type"] == "json_invalid" else 422, problems)

    def answer_to(exception: type[Exception], answer: Callable[[Any], Response]) -> None:
        async def handler(_: Request, error: Exception) -> Response:
            return answer(error)

        app.add_exception_handler(exception, handler)

    answer_to(Refused, lambda error: refuse(error.status, str(error)))
    answer_to(StoreUnavailable, lambda error: refuse(503, str(error)))
    answer_to(sqlite3.Error, lambda error: refuse(503, service.store.fail(f"the store cannot be read: {error}")))
    # A bug: the transaction was rolled back, and memory is changed after it. uvicorn logs the traceback.
    answer_to(Exception, lambda _: refuse(500, "an error in the agent; nothing was stored"))

    def documented(model: type[BaseModel]) -> dict[str, Any]:
        """What the OpenAPI document says about an endpoint, whose body FastAPI would read before the token."""
        content = {"application/json": {"schema": model.model_json_schema()}}
        extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
        if service.access.tokens:
            extra["security"] = [{"bearer": []}]
        return {"openapi_extra": extra, "responses": PROBLEMS}

    @app.post("/allocate", **documented(AllocateRequest))
    async def allocate(request: Annotated[AllocateRequest, Depends(allocate_request)]) -> AllocateResponse:
        """Decide what a pod gets."""
        with service.metrics.seconds.labels("/allocate").time():
            return service.allocate(request)

    @app.post("/feedback", **documented(FeedbackRequest))
    async def feedback(request: Annotated[FeedbackRequest, Depends(feedback_request)]) -> FeedbackResponse:
        """Report the outcome of an allocation. After the first report, only a missed objective has an effect."""
        with service.metrics.seconds.labels("/feedback").time():
            return service.feedback(request)

    def read(path: str, **options: Any) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Any]:
        return app.api_route(path, methods=READ, response_model=None, **options)

    @read("/healthz", responses={503: PROBLEMS[503]})
    async def healthz() -> Any:
        """The process is running and the file of its store is there: otherwise a restart helps."""
        lost = service.store.lost
        return {"status": "ok"} if lost is None else JSONResponse({"status": lost}, 503)

    @read("/readyz", responses={503: PROBLEMS[503]})
    async def readyz() -> Any:
        """Whether decisions can be made; the reasons if not, or if something that is not essential is missing."""
        reasons, code = service.problems(), 200
        if service.store.problem is not None:
            reasons, code = [service.store.problem, *reasons], 503
        text = "not ready" if code == 503 else "degraded" if reasons else "ready"
        return JSONResponse({"status": text, "reasons": reasons, "policy_version": service.policy.version}, code)

    @read("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @read("/ui", response_class=HTMLResponse, include_in_schema=False)
    async def ui() -> HTMLResponse:
        policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(page, headers={"content-security-policy": policy, "x-frame-options": "DENY"})

    @app.get("/status.json", include_in_schema=False)
    async def status_document() -> JSONResponse:
        return JSONResponse(status.document(service, events))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        found = app.openapi()
        if service.access.tokens:
            found.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        return JSONResponse(found)

    return app
