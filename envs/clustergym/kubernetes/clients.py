"""HTTP clients of webhook and collector: bounded answers, and errors that say who did not answer and why."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from clustergym.kubernetes import names
from clustergym.kubernetes.messages import AllocateRequest, AllocateResponse

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_RESPONSE_BYTES = 16 << 20
"""Of the API server, for the pods of a node."""
MAX_GRANT_BYTES = 64 << 10
"""Of an agent."""
# Names become part of URLs: only Kubernetes names are allowed.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Unavailable(Exception):
    """A service did not give a usable response. The message says which service and why."""


def is_name(name: Any) -> bool:
    """Whether this is a valid Kubernetes name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def checked_name(name: Any, what: str) -> str:
    """Return ``name`` if it is a valid Kubernetes name, otherwise raise :class:`Unavailable`."""
    if not is_name(name):
        raise Unavailable(f"{what} is {name!r}, which is not a Kubernetes name")
    return str(name)


class Client:
    """Requests with a size limit and, if given, a timeout and a bearer token. Nothing is decompressed."""

    def __init__(
        self, token_file: Path | None = None, ca_file: Path | None = None, timeout_s: float = 5.0,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:  # fmt: skip
        self.token_file, self.max_bytes = token_file, max_bytes
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        self._client = httpx.AsyncClient(verify=context, trust_env=False, timeout=timeout_s)

    async def send(self, method: str, url: str, what: str, **options: Any) -> tuple[int, bytes]:
        """Status and body of the response. Raises :class:`Unavailable`."""
        headers = {"Accept-Encoding": "identity"} | options.pop("headers", {})
        if self.token_file is not None:
            # Read for each request: Kubernetes rotates tokens in place.
            headers["Authorization"] = f"Bearer {self._token()}"
        try:
            async with self._client.stream(method, url, headers=headers, **options) as response:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > self.max_bytes:
                        raise Unavailable(f"{what} sent more than {self.max_bytes} bytes")
                return response.status_code, bytes(body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"{what} cannot be reached ({type(error).__name__})") from error

    def _token(self) -> str:
        assert self.token_file is not None
        try:
            return self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Unavailable(f"token file {self.token_file} cannot be read ({type(error).__name__})") from None

    async def content(self, method: str, url: str, what: str, **options: Any) -> bytes:
        """The body of a response with status 200. Raises :class:`Unavailable`."""
        status, body = await self.send(method, url, what, **options)
        if status != 200:
            raise Unavailable(f"{what} answered {status}: {body[:200].decode(errors='replace')}")
        return body

    async def json(self, method: str, url: str, what: str, **options: Any) -> Any:
        """The JSON of a response with status 200. Raises :class:`Unavailable`."""
        try:
            return json.loads(await self.content(method, url, what, **options))
        except (ValueError, RecursionError):
            raise Unavailable(f"{what} sent a response that is not JSON") from None

    async def close(self) -> None:
        await self._client.aclose()


class ApiServer:
    """Reads nodes for the webhook, pods and namespaces for the collector, and keeps what the webhook makes itself."""

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None) -> None:
        self.url, self.client = url.rstrip("/"), Client(token_file, ca_file)

    @classmethod
    def in_cluster(cls, url: str | None, token_file: Path | None, ca_file: Path | None) -> ApiServer:
        """Use the service account that Kubernetes mounts for everything that is None."""
        if url is None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if host is None:
                raise ValueError("KUBERNETES_SERVICE_HOST is not set: outside of a cluster, use --api-server")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
            token_file = token_file or SERVICE_ACCOUNT / "token"
            ca_file = ca_file or SERVICE_ACCOUNT / "ca.crt"
        return cls(url, token_file, ca_file)

    async def get(self, path: str, what: str) -> dict[str, Any]:
        what = f"the API server ({what})"
        found = await self.client.json("GET", self.url + path, what)
        if not isinstance(found, dict):
            raise Unavailable(f"{what} did not send an object")
        return found

    async def write(self, method: str, path: str, body: Any, content_type: str, what: str) -> bool:
        """Write an object. False if it was changed by others meanwhile."""
        options = {"content": json.dumps(body), "headers": {"Content-Type": content_type}}
        status, answer = await self.client.send(method, self.url + path, f"the API server ({what})", **options)
        if status not in (200, 409, 422):
            raise Unavailable(f"the API server ({what}) answered {status}: {answer[:200].decode(errors='replace')}")
        return status == 200

    async def pods_on(self, node: str) -> list[dict[str, Any]]:
        """The pods of a node that opted in, from the cache of the API server."""
        node = checked_name(node, "the node's name")
        query = f"fieldSelector=spec.nodeName%3D{node}&labelSelector={quote(f'{names.LABEL}=true')}&resourceVersion=0"
        found = await self.get(f"/api/v1/pods?{query}", f"pods of node {node}")
        return [one for one in found.get("items") or [] if isinstance(one, dict)]

    async def namespaces(self) -> set[str]:
        """Names of the namespaces that opted in, from the cache of the API server."""
        found = await self.get(f"/api/v1/namespaces?labelSelector={quote(names.MODE)}&resourceVersion=0", "namespaces")
        every = {str((one.get("metadata") or {}).get("name")) for one in found.get("items") or []}
        return every - names.PROTECTED_NAMESPACES

    async def node_address(self, node: str) -> str:
        """Internal address of the node. The agent listens there, because it uses the host network."""
        node = checked_name(node, "the node's name")
        found = await self.get(f"/api/v1/nodes/{node}", f"node {node}")
        addresses = {a.get("type"): a.get("address") for a in (found.get("status") or {}).get("addresses") or []}
        address = addresses.get("InternalIP")
        try:
            parsed = ipaddress.ip_address(str(address))
        except ValueError:
            raise Unavailable(f"node {node} has no InternalIP") from None
        return f"[{parsed}]" if parsed.version == 6 else str(parsed)

    async def close(self) -> None:
        await self.client.close()


class Agents:
    """The allocation agents: one per node, or one for the cluster that recommends before the node is known."""

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None = None) -> None:
        try:
            url.format(ip="127.0.0.1", node="node")
        except (KeyError, IndexError, ValueError):
            raise ValueError(f"agent URL {url!r}: expected a URL, possibly with {{ip}} or {{node}}") from None
        self.url = url.rstrip("/")
        self.client = Client(token_file, ca_file, max_bytes=MAX_GRANT_BYTES)

    async def allocate(self, request: AllocateRequest, node: str = "", address: str = "") -> AllocateResponse:
        """Ask the agent of a node, or the recommender without one. A repeated request id gets the same allocation."""
        what = f"the agent on {node}" if node else "the recommender"
        url = self.url.format(ip=address, node=node) + "/allocate"
        body = await self.client.content("POST", url, what, json=request.model_dump())
        try:
            return AllocateResponse.model_validate_json(body)
        except ValueError:
            raise Unavailable(f"{what} sent an invalid allocation") from None

    async def close(self) -> None:
        await self.client.close()
