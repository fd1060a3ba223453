"""What the collector reads from a pod object: its grants, its objective and what happened to its containers."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clustergym.kubernetes import names
from clustergym.kubernetes.messages import is_allocation_id, is_latency_sensitive
from clustergym.kubernetes.requests import annotations_of, owner_of


@dataclass(frozen=True)
class Ending:
    """A container that ended. Its id makes sure that it is counted once."""

    container_id: str
    finished_s: float
    oom_killed: bool
    failed: bool


@dataclass(frozen=True)
class ManagedPod:
    """A pod with an allocation."""

    uid: str
    namespace: str
    name: str
    owner: str
    allocation_id: str
    agent: str
    """Which agent waits for feedback: ``node`` or ``recommender``."""
    requested_cores: float
    granted_cores: float
    """% of the GPU. In mode Off, what the pod requested."""
    granted_memory_mb: float | None
    latency_sensitive: bool
    started: bool
    """Whether the pod runs or has run."""
    ready: bool
    finished: bool
    failed: bool
    endings: tuple[Ending, ...]
    qos_query: str | None
    qos_objective: float | None


def managed_pod(pod: dict[str, Any]) -> ManagedPod | None:
    """The pod, or None if it has no allocation or its annotations are not those of the webhooks."""
    metadata, status, annotations = pod.get("metadata") or {}, pod.get("status") or {}, annotations_of(pod)
    namespace = str(metadata.get("namespace", ""))
    allocation_id = annotations.get(names.ALLOCATION_ID)
    requested = _number(annotations, names.REQUESTED_CORES, names.CORES, names.GRANTED_CORES)
    if not is_allocation_id(allocation_id) or requested is None:
        return None
    granted = _number(annotations, names.GRANTED_CORES)
    conditions = {one.get("type"): one.get("status") for one in status.get("conditions") or []}
    statuses = list(_container_statuses(status))
    phase = status.get("phase")
    return ManagedPod(
        uid=str(metadata.get("uid", "")),
        namespace=namespace,
        name=str(metadata.get("name", "")),
        owner=owner_of(pod, namespace),
        allocation_id=str(allocation_id),
        agent="node" if annotations.get(names.AGENT) == "node" else "recommender",
        requested_cores=requested,
        granted_cores=requested if granted is None else granted,
        granted_memory_mb=_number(annotations, names.GRANTED_MEMORY, names.REQUESTED_MEMORY, names.MEMORY),
        latency_sensitive=is_latency_sensitive(annotations.get(names.QOS_CLASS, "")),
        started=phase in ("Running", "Succeeded", "Failed"),
        ready=conditions.get("Ready") == "True",
        finished=phase in ("Succeeded", "Failed"),
        failed=phase == "Failed",
        endings=tuple(ending for one in statuses for ending in _endings(one)),
        qos_query=annotations.get(names.QOS_QUERY),
        qos_objective=_number(annotations, names.QOS_OBJECTIVE),
    )


def _container_statuses(status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        yield from status.get(key) or []


def _endings(container: dict[str, Any]) -> Iterator[Ending]:
    """The last two endings of a container: the kubelet keeps no more."""
    for key in ("lastState", "state"):
        ended = (container.get(key) or {}).get("terminated")
        if ended:
            identity = str(ended.get("containerID") or f"{container.get('name')}@{ended.get('finishedAt')}")
            reason, code = ended.get("reason"), ended.get("exitCode")
            yield Ending(identity, _seconds(ended.get("finishedAt")), reason == "OOMKilled", code != 0)


def _seconds(text: Any) -> float:
    try:
        return datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _number(annotations: dict[str, str], *keys: str) -> float | None:
    """The first of these annotations that is a positive number."""
    for key in keys:
        try:
            value = float(annotations[key])
        except (KeyError, ValueError):
            continue
        if math.isfinite(value) and value > 0:
            return value
    return None
