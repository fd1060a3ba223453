"""Pods for the collector, and what it reads: an API server and usage that a test sets."""

from __future__ import annotations

import hashlib
import http.server
from typing import Any

from clustergym.agent.collector.pods import ManagedPod, managed_pod
from clustergym.agent.collector.usage import Usage
from clustergym.kubernetes.clients import ApiServer, Unavailable

UID = "0a1b2c3d-0000-4000-8000-00000000000"


def allocation_id(name: str) -> str:
    """The id of the allocation of a pod."""
    return f"1-{hashlib.md5(name.encode()).hexdigest()}"


def pod_object(name: str = "p", index: int = 0, **extra: Any) -> dict[str, Any]:
    """A pod that the webhook granted 40 of 80 % and 1000 MB, running and ready."""
    annotations = {
        "clustergym.io/allocation-id": allocation_id(name), "clustergym.io/agent": "node",
        "clustergym.io/requested-cores": "80", "clustergym.io/granted-cores": "40",
        "clustergym.io/granted-memory": "1000",
    } | extra.pop("annotations", {})  # fmt: skip
    status: dict[str, Any] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {
        "name": name, "namespace": "team", "uid": f"{UID}{index}", "annotations": annotations,
        "labels": {"clustergym.io/allocate": "true"},
    }  # fmt: skip
    return {"metadata": metadata, "status": status | extra.pop("status", {})}


def managed(**extra: Any) -> ManagedPod:
    found = managed_pod(pod_object(**extra))
    assert found is not None
    return found


class Pods(ApiServer):
    """An API server whose answer is a list of this test."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None, None)
        self.items: list[dict[str, Any]] | None = []

    async def pods_on(self, node: str) -> list[dict[str, Any]]:
        if self.items is None:
            raise Unavailable("the API server cannot be reached")
        return self.items

    async def namespaces(self) -> set[str]:
        return {"team"}


class Constant:
    def __init__(self) -> None:
        self.usage: Usage | None = Usage(10, 100.0)

    async def read(self, pods: list[ManagedPod]) -> dict[str, Usage]:
        if self.usage is None:
            raise ValueError("broken page")
        return {pod.uid: self.usage for pod in pods}


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
