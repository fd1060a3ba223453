"""A small HTTP client: bounded responses, and errors that say who did not answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from clustergym.kubernetes.clients import MAX_RESPONSE_BYTES, Unavailable, read_token, send, tls_context


class Fetcher:
    """Requests with a timeout, a size limit and, if given, a bearer token."""

    def __init__(self, timeout_s: float, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        self.token_file = token_file
        self._client = httpx.AsyncClient(verify=tls_context(ca_file), trust_env=False, timeout=timeout_s)

    async def send(self, method: str, url: str, what: str, **options: Any) -> tuple[int, bytes]:
        """Status and body of the response. Raises :class:`Unavailable`."""
        return await send(self._client, method, url, read_token(self.token_file), what, MAX_RESPONSE_BYTES, **options)

    async def text(self, url: str, what: str) -> str:
        status, body = await self.send("GET", url, what)
        if status != 200:
            raise Unavailable(f"{what} answered {status}")
        return body.decode(errors="replace")

    async def json(self, method: str, url: str, what: str, **options: Any) -> Any:
        """The JSON of a response with status 200."""
        status, body = await self.send(method, url, what, **options)
        if status != 200:
            raise Unavailable(f"{what} answered {status}: {body[:200].decode(errors='replace')}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Unavailable(f"{what} sent a response that is not JSON") from None

    async def close(self) -> None:
        await self._client.aclose()
