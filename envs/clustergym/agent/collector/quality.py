"""Whether a pod meets its objective: a PromQL query of the operator, or a rule that fits every pod."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from clustergym.agent.collector.pods import ManagedPod
from clustergym.agent.collector.usage import Usage
from clustergym.kubernetes.clients import Client, Unavailable, checked_name

SATURATED = 0.95
"""A pod that uses this part of a reduced grant is limited by it."""


def read_queries(folder: Path) -> dict[str, str]:
    """The queries of the operator by name: each file of the folder, such as a mounted ConfigMap, holds one."""
    return {path.name: path.read_text().strip() for path in sorted(folder.iterdir()) if path.is_file()}


class Prometheus:
    """Evaluates the queries of the operator. Pods can only choose one by its name."""

    def __init__(self, client: Client, url: str, queries: Mapping[str, str], timeout_s: float = 5.0) -> None:
        self.client, self.url, self.queries, self.timeout_s = client, url.rstrip("/"), queries, timeout_s

    async def value(self, pod: ManagedPod) -> float | None:
        """The value of the pod's query; None without data. $namespace and $pod are replaced."""
        if pod.qos_query is None:
            return None
        if pod.qos_query not in self.queries:
            raise Unavailable(f"pod {pod.namespace}/{pod.name} asks for query {pod.qos_query[:64]!r}, which is unknown")
        place = {"namespace": checked_name(pod.namespace, "the namespace"), "pod": checked_name(pod.name, "the pod")}
        query = Template(self.queries[pod.qos_query]).safe_substitute(place)
        parameters = {"query": query, "timeout": f"{self.timeout_s:g}s"}
        found = await self.client.json("POST", f"{self.url}/api/v1/query", "Prometheus", data=parameters)
        return read_value(found)


def read_value(response: Any) -> float | None:
    """The number in a response of Prometheus: a scalar, or a vector with one element."""
    try:
        data = response["data"]
        if data["resultType"] == "scalar":
            pairs = [data["result"]]
        elif data["resultType"] == "vector":
            pairs = [one["value"] for one in data["result"]]
        else:
            raise Unavailable(f"Prometheus sent a {data['resultType']}: expected an expression with one value")
        values = [float(value) for _, value in pairs]
    except (KeyError, TypeError, ValueError):
        raise Unavailable("Prometheus sent an unexpected response") from None
    if len(values) > 1:
        raise Unavailable(f"the expression has {len(values)} values: expected one, aggregate it")
    return None if not values or math.isnan(values[0]) else values[0]


@dataclass(frozen=True)
class Quality:
    """Whether the objective is met, and needed / granted cores if that is known."""

    met: bool
    pressure: float | None = None


def judge(pod: ManagedPod, usage: Usage | None, value: float | None, disturbed: bool, was_ready: bool) -> Quality:
    """Judge a pod.

    With a value of its query, the objective decides: the value must not be above ``clustergym.io/qos-objective``,
    or not be 0 without one (``latency < bool 0.2``). Otherwise a pod meets its objective if it stays ready and, if it
    is latency-sensitive, does not use all of a grant that is less than its request.

    Args:
        pod: the pod.
        usage: what it uses now.
        value: the value of its query.
        disturbed: whether a container was killed or failed since the last call.
        was_ready: whether the pod was ready before.
    """
    if disturbed or pod.failed:
        return Quality(False)
    load = None if usage is None or not usage.exact else usage.cores / pod.granted_cores
    if value is not None:
        if pod.qos_objective is None:
            return Quality(value != 0)
        ratio = max(value, 0.0) / pod.qos_objective
        return Quality(value <= pod.qos_objective, min(max(ratio, load or 0.0), 1000.0))
    if was_ready and not pod.ready and not pod.finished:
        return Quality(False)
    reduced = pod.granted_cores < pod.requested_cores
    return Quality(not (pod.latency_sensitive and reduced and load is not None and load >= SATURATED))
