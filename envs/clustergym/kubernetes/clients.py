"""Clients of the binding webhook: the API server for pods and nodes, and the agents for grants."""

from __future__ import annotations

import json
import math
import os
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from clustergym.kubernetes import names
from clustergym.kubernetes.decisions import Grant
from clustergym.kubernetes.requests import Bounds, GpuRequest

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_RESPONSE_BYTES = 16 << 20
"""Of the API server, for the pods of a node."""
MAX_GRANT_BYTES = 64 << 10
"""Of an agent."""
# Names become part of URLs: only Kubernetes names are allowed.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ALLOCATION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_POLICY_VERSION = re.compile(r"[A-Za-z0-9._:-]{1,64}")


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


def read_token(path: Path | None) -> str | None:
    """Read a token. Read it for each request: Kubernetes rotates tokens in place."""
    return None if path is None else path.read_text().strip()


def is_allocation_id(text: Any) -> bool:
    """Whether this can be the id of an allocation."""
    return isinstance(text, str) and _ALLOCATION_ID.fullmatch(text) is not None


async def send(
    client: httpx.AsyncClient, method: str, url: str, token: str | None, what: str, max_bytes: int, **options: Any
) -> tuple[int, bytes]:
    """Send a request and return status and body of the response. Raises :class:`Unavailable`.

    Nothing is decompressed: a small response could become a large one.
    """
    headers = {"Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        async with client.stream(method, url, headers=headers, **options) as response:
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > max_bytes:
                    raise Unavailable(f"{what} sent more than {max_bytes} bytes")
            return response.status_code, bytes(body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"{what} cannot be reached ({type(error).__name__})") from error


async def _request(
    client: httpx.AsyncClient, method: str, url: str, token: str | None, what: str, max_bytes: int, **options: Any
) -> Any:
    """Send a request and return the JSON of the response. Raises :class:`Unavailable` if the status is not 200."""
    status, body = await send(client, method, url, token, what, max_bytes, **options)
    if status != 200:
        raise Unavailable(f"{what} answered {status}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Unavailable(f"{what} sent a response that is not JSON") from None


def tls_context(ca_file: Path | None, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    if certificate is not None:
        context.load_cert_chain(str(certificate), None if key is None else str(key))
    return context


class ApiServer:
    """Reads pods and nodes."""

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None) -> None:
        self.url, self.token_file = url.rstrip("/"), token_file
        self._client = httpx.AsyncClient(verify=tls_context(ca_file), trust_env=False)

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

    async def _get(self, path: str, what: str) -> dict[str, Any]:
        what = f"the API server ({what})"
        token = read_token(self.token_file)
        found = await _request(self._client, "GET", self.url + path, token, what, MAX_RESPONSE_BYTES)
        if not isinstance(found, dict):
            raise Unavailable(f"{what} did not send an object")
        return found

    async def pod(self, namespace: str, name: str) -> dict[str, Any]:
        namespace, name = checked_name(namespace, "the namespace"), checked_name(name, "the pod's name")
        return await self._get(f"/api/v1/namespaces/{namespace}/pods/{name}", f"pod {namespace}/{name}")

    async def pods_on(self, node: str) -> list[dict[str, Any]]:
        """The pods of a node that opted in, from the cache of the API server."""
        node = checked_name(node, "the node's name")
        query = f"fieldSelector=spec.nodeName%3D{node}&labelSelector={quote(f'{names.LABEL}=true')}&resourceVersion=0"
        found = await self._get(f"/api/v1/pods?{query}", f"pods of node {node}")
        return [one for one in found.get("items") or [] if isinstance(one, dict)]

    async def namespaces(self) -> set[str]:
        """Names of the namespaces that opted in, from the cache of the API server."""
        found = await self._get(f"/api/v1/namespaces?labelSelector={quote(names.MODE)}&resourceVersion=0", "namespaces")
        every = {str((one.get("metadata") or {}).get("name")) for one in found.get("items") or []}
        return every - names.PROTECTED_NAMESPACES

    async def node_address(self, node: str) -> str:
        """Internal address of the node. The agent listens there, because it uses the host network."""
        node = checked_name(node, "the node's name")
        found = await self._get(f"/api/v1/nodes/{node}", f"node {node}")
        addresses = {a.get("type"): a.get("address") for a in (found.get("status") or {}).get("addresses") or []}
        address = addresses.get("InternalIP")
        if not address:
            raise Unavailable(f"node {node} has no InternalIP")
        return f"[{address}]" if ":" in address else str(address)

    async def close(self) -> None:
        await self._client.aclose()


class Agents:
    """The allocation agents: one per node, or one for the cluster that recommends before the node is known."""

    def __init__(
        self,
        url: str,
        token_file: Path | None,
        ca_file: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        try:
            url.format(ip="127.0.0.1", node="node")
        except (KeyError, IndexError, ValueError):
            raise ValueError(f"agent URL {url!r}: expected a URL, possibly with {{ip}} or {{node}}") from None
        self.url, self.token_file = url.rstrip("/"), token_file
        self._client = httpx.AsyncClient(verify=tls_context(ca_file, certificate, key), trust_env=False)

    @property
    def needs_address(self) -> bool:
        return "{ip}" in self.url

    async def allocate(
        self, request: GpuRequest, bounds: Bounds, request_id: str, *, node: str = "", address: str = "",
        shadow: bool = False,
    ) -> Grant:  # fmt: skip
        """Ask for a grant. A repeated request id gets the same allocation.

        Args:
            request: what the pod requests.
            bounds: what it may be granted. Agents that do not know bounds ignore them, so the caller applies them too.
            request_id: identifies the question.
            node: name of the node; empty for the recommender.
            address: address of the node, if the URL contains ``{ip}``.
            shadow: the pod will run with its request; the answer is what it would be granted.
        """
        what = f"the agent on {checked_name(node, 'node')}" if node else "the recommender"
        url = self.url.format(ip=address, node=node) + "/allocate"
        body = {
            "owner": request.owner, "cores": request.cores, "memory": request.memory_mb,
            "qos_class": request.qos_class, "request_id": request_id, "shadow": shadow,
            "min_cores": bounds.min_cores, "max_cores": bounds.max_cores,
            "min_memory": bounds.min_memory_mb, "max_memory": bounds.max_memory_mb,
        }  # fmt: skip
        token = read_token(self.token_file)
        found = await _request(self._client, "POST", url, token, what, MAX_GRANT_BYTES, json=body)
        try:
            cores = float(found.get("recommended_cores", found["cores"]) if shadow else found["cores"])
            memory = float(found.get("recommended_memory", found["memory"]) if shadow else found["memory"])
            grant = Grant(str(found["allocation_id"]), cores, memory, str(found["policy_version"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Unavailable(f"{what} did not send an allocation") from None
        if not (
            is_allocation_id(grant.allocation_id)
            and _POLICY_VERSION.fullmatch(grant.policy_version)
            and math.isfinite(cores)
            and math.isfinite(memory)
        ):
            raise Unavailable(f"{what} sent an invalid allocation")
        return grant

    async def close(self) -> None:
        await self._client.aclose()
