"""Decisions on pods and bindings, as pure functions without network access.

The pod webhook is called when a pod is created. The node is not known yet, so there is no agent to ask. It makes each
managed container read its limits from annotations (``fieldRef``) and sets these annotations to the request. The binding
webhook is called when the pod is bound to a node. It asks the agent of that node and overwrites the annotations through
the Binding. If the binding webhook or the agent is down, the annotations keep the request, and the pod runs with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clustergym.webhook import names
from clustergym.webhook.names import BACKENDS, Backend
from clustergym.webhook.patches import Operation, add_annotations, add_variables, apply_patch

Pod = dict[str, Any]
Container = dict[str, Any]

MAX_MEMORY_MB = 1 << 20
MAX_OWNER_LENGTH = 200

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_SUFFIX = {
    None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """The answer to a review: an outcome for the metrics, a patch, and warnings for the user."""

    outcome: str
    patch: list[Operation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Share:
    """Cores (% of the GPU) and memory of one container."""

    container: str
    cores: float
    memory_mb: float


@dataclass(frozen=True)
class GpuRequest:
    """Cores (% of the GPU) and memory that a pod requests, in total and per container."""

    owner: str
    cores: float
    memory_mb: float
    qos_class: str
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Grant:
    """The answer of an agent."""

    allocation_id: str
    cores: float
    memory_mb: float
    policy_version: str


class PodContainer(NamedTuple):
    """A container of a pod. Ordinary init containers are not ``concurrent``: they run alone, before the others."""

    path: str
    """JSON pointer."""
    spec: Container
    concurrent: bool

    @property
    def name(self) -> str:
        return str(self.spec["name"])


class NotManageable(ValueError):
    """The pod opted in, but its request is missing or invalid. The message is for the author of the pod."""


def annotations_of(pod: Pod) -> dict[str, str]:
    return (pod.get("metadata") or {}).get("annotations") or {}


def opted_in(pod: Pod, namespace: str) -> bool:
    """Whether the pod has the label. Pods of the control plane are always excluded."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return namespace not in names.PROTECTED_NAMESPACES and labels.get(names.LABEL) == "true"


def quantity(value: Any, what: str) -> float:
    """Parse a Kubernetes quantity such as 3000, "3k" or "4Ki"."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise NotManageable(f"{what} is {value!r}: expected a number such as 3000 or 3k")
    return float(match[1]) * _SUFFIX[match[2]]


def containers_of(pod: Pod) -> Iterator[PodContainer]:
    """All containers of a pod, init containers first."""
    spec = pod.get("spec") or {}
    for i, container in enumerate(spec.get("initContainers") or []):
        yield PodContainer(f"/spec/initContainers/{i}", container, container.get("restartPolicy") == "Always")
    for i, container in enumerate(spec.get("containers") or []):
        yield PodContainer(f"/spec/containers/{i}", container, True)


def limit(container: Container, resource: str) -> float | None:
    """The limit (or request: for extended resources they are equal) of a container, None if it is not set."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        value = (resources.get(kind) or {}).get(resource)
        if value is not None:
            return quantity(value, f"{resource} of container {container.get('name')!r}")
    return None


def field_ref(variable: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}}


def injected_variables(name: str, backend: Backend) -> list[dict[str, Any]]:
    """The variables through which the container of this name reads its limits."""
    return [
        field_ref(backend.cores_variable, names.cores_key(name)),
        field_ref(backend.memory_variable, names.memory_key(name)),
    ]


def is_injected(container: Container, backend: Backend) -> bool:
    """Whether the container already reads its limits from our annotations."""
    # Compare the paths only: the API server adds apiVersion to a fieldRef.
    paths = {
        variable.get("name"): ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        for variable in container.get("env") or []
    }
    return all(
        paths.get(wanted["name"]) == wanted["valueFrom"]["fieldRef"]["fieldPath"]
        for wanted in injected_variables(container["name"], backend)
    )


def owner_of(pod: Pod, namespace: str) -> str:
    """Name of the workload of a pod. It starts with the namespace, so tenants cannot change each other's history."""
    metadata = pod.get("metadata") or {}
    chosen = annotations_of(pod).get(names.OWNER)
    if not chosen:
        references = metadata.get("ownerReferences") or []
        controller = next((r for r in references if r.get("controller")), None)
        if controller is not None:
            kind, name = str(controller.get("kind")), str(controller.get("name"))
            revision = (metadata.get("labels") or {}).get("pod-template-hash")
            if kind == "ReplicaSet" and revision and name.endswith(f"-{revision}"):
                # Each rollout of a Deployment makes a new ReplicaSet, but the pods usually need the same.
                kind, name = "Deployment", name.removesuffix(f"-{revision}")
            chosen = f"{kind}/{name}"
        else:
            chosen = f"Pod/{metadata.get('name') or metadata.get('generateName') or 'unnamed'}"
    return f"{namespace}/{chosen}"[:MAX_OWNER_LENGTH]


def selected_containers(pod: Pod) -> tuple[list[PodContainer], bool]:
    """The containers to manage, and whether the user selected them by name. By default, those that request a GPU."""
    containers = list(containers_of(pod))
    listed = annotations_of(pod).get(names.CONTAINERS)
    if listed is None:
        return [container for container in containers if limit(container.spec, names.GPU)], False
    selected = {name.strip() for name in listed.split(",") if name.strip()}
    unknown = selected - {container.name for container in containers}
    if unknown:
        raise NotManageable(
            f"annotation {names.CONTAINERS} names {', '.join(sorted(unknown))}, "
            f"but the pod has {', '.join(container.name for container in containers)}"
        )
    return [container for container in containers if container.name in selected], True


def _split(
    containers: list[PodContainer], total: float | None, resource: str, unit: str, key: str
) -> tuple[float, dict[str, float]]:
    """The pod's request of one resource, and the part of each container.

    Concurrent containers share the total in proportion to their limits. Other init containers run alone and can use all
    of it. The scheduler computes the total in the same way: the sum of the containers, or the largest init container.
    """
    limits = {container.name: limit(container.spec, resource) for container in containers}
    concurrent = [container.name for container in containers if container.concurrent]
    alone = [container.name for container in containers if not container.concurrent]
    if total is None:
        known = {name: value for name, value in limits.items() if value is not None}
        if len(known) < len(limits):
            raise NotManageable(
                f"the request is unknown: set annotation {key} ({unit}) or limit {resource} on every GPU container"
            )
        total = max(sum(known[name] for name in concurrent), *(known[name] for name in alone), 0.0)
    weights = [limits[name] for name in concurrent]
    if None in weights:
        weights = [1.0] * len(concurrent)
    weight_sum = math.fsum(weight or 0.0 for weight in weights) or 1.0
    parts = {name: total * (weight or 0.0) / weight_sum for name, weight in zip(concurrent, weights, strict=True)}
    for name in alone:
        own = limits[name]
        parts[name] = total if own is None else min(total, own)
    return total, parts


def gpu_request(pod: Pod, namespace: str, containers: list[PodContainer]) -> GpuRequest:
    """The request of a pod for these containers."""
    for container in containers:
        devices = limit(container.spec, names.GPU)
        if devices is not None and devices > 1:
            raise NotManageable(f"container {container.name!r} requests {devices:g} GPUs: expected 1")
    annotations = annotations_of(pod)

    def annotated(key: str) -> float | None:
        return quantity(annotations[key], f"annotation {key}") if key in annotations else None

    cores, cores_parts = _split(containers, annotated(names.CORES), names.GPU_CORES, "% of one GPU", names.CORES)
    memory, memory_parts = _split(containers, annotated(names.MEMORY), names.GPU_MEMORY, "MB", names.MEMORY)
    if not 1 <= cores <= 100:
        raise NotManageable(f"the pod requests {cores:g} % of a GPU: expected 1 to 100")
    if not 1 <= memory <= MAX_MEMORY_MB:
        raise NotManageable(f"the pod requests {memory:g} MB of GPU memory: expected 1 to {MAX_MEMORY_MB}")
    shares = tuple(Share(name, cores_parts[name], memory_parts[name]) for name in cores_parts)
    qos_class = annotations.get(names.QOS_CLASS, "latency-sensitive")[:32]
    return GpuRequest(owner_of(pod, namespace), cores, memory, qos_class, shares)


def limit_annotations(shares: tuple[Share, ...], backend: Backend) -> dict[str, str]:
    """The annotations that the injected variables read."""
    cores = {names.cores_key(share.container): backend.cores_value(share.cores) for share in shares}
    return cores | {names.memory_key(share.container): backend.memory_value(share.memory_mb) for share in shares}


def admit_pod(pod: Pod, namespace: str, backend: Backend) -> Decision:
    """The pod webhook: make managed containers read their limits from annotations. A second call changes nothing."""
    if not opted_in(pod, namespace):
        return Decision("not-opted-in")
    annotations = annotations_of(pod)
    try:
        candidates, by_name = selected_containers(pod)
        injected: list[PodContainer] = []
        ready: list[PodContainer] = []
        warnings: list[str] = []
        for container in candidates:
            if is_injected(container.spec, backend):
                injected.append(container)
            elif (conflict := _conflict(container, annotations, backend, by_name)) is not None:
                warnings.append(f"{conflict}, so container {container.name} is not managed")
            else:
                ready.append(container)
        if not candidates:
            warnings.append(f"no container requests {names.GPU}, and annotation {names.CONTAINERS} names none")
        if not ready:
            return Decision("already-injected" if injected else "left-alone", warnings=as_warnings(warnings))
        request = gpu_request(pod, namespace, injected + ready)
    except NotManageable as reason:
        return Decision("refused", warnings=as_warnings([f"{reason}; the pod is not right-sized"]))
    operations: list[Operation] = []
    for container in ready:
        operations += add_variables(container.spec, container.path, injected_variables(container.name, backend))
    wanted = {names.BACKEND: backend.name, **limit_annotations(request.shares, backend)}
    operations += add_annotations(pod, {key: value for key, value in wanted.items() if key not in annotations})
    apply_patch(pod, operations)
    summary = (
        f"{', '.join(container.name for container in ready)}: {' and '.join(backend.variables)} will be set to what "
        f"the node's agent grants, at most the requested {request.cores:g} % and {request.memory_mb:g} MB"
    )
    return Decision("injected", operations, as_warnings([summary, *warnings]))


def _conflict(container: PodContainer, annotations: dict[str, str], backend: Backend, by_name: bool) -> str | None:
    """Why a container must not be changed: settings of the user are never overridden."""
    name, spec = container.name, container.spec
    variables = sorted({variable.get("name") for variable in spec.get("env") or []} & set(backend.variables))
    if variables:
        return f"{name} sets {', '.join(variables)} itself"
    keys = sorted({names.cores_key(name), names.memory_key(name)} & set(annotations))
    if keys:
        return f"the pod sets annotation {', '.join(keys)} itself"
    if spec.get("envFrom") and not by_name:
        # The variables of a ConfigMap or Secret are not visible here, and ours would override them.
        return f"{name} uses envFrom and annotation {names.CONTAINERS} does not name it"
    return None


def managed_request(pod: Pod, namespace: str) -> tuple[GpuRequest, Backend] | None:
    """The request that the binding webhook sends to the agent, or None if the pod is not managed."""
    annotations = annotations_of(pod)
    backend = BACKENDS.get(annotations.get(names.BACKEND, ""))
    if backend is None or not opted_in(pod, namespace) or names.ALLOCATION_ID in annotations:
        return None
    containers = [container for container in containers_of(pod) if is_injected(container.spec, backend)]
    if not containers:
        return None
    try:
        return gpu_request(pod, namespace, containers), backend
    except NotManageable:
        return None


def grant_decision(binding: dict[str, Any], request: GpuRequest, backend: Backend, grant: Grant) -> Decision:
    """The binding webhook with an answer: divide the grant among the containers and annotate the Binding."""
    if not (0 < grant.cores <= request.cores and 0 < grant.memory_mb <= request.memory_mb):
        return request_decision(
            binding,
            "bad-grant",
            f"the agent granted {grant.cores:g} % and {grant.memory_mb:g} MB of the requested "
            f"{request.cores:g} % and {request.memory_mb:g} MB",
        )
    shares = tuple(
        Share(
            share.container,
            share.cores * grant.cores / request.cores,
            share.memory_mb * grant.memory_mb / request.memory_mb,
        )
        for share in request.shares
    )
    annotations = {
        names.ALLOCATION_ID: grant.allocation_id,
        names.POLICY_VERSION: grant.policy_version,
        names.GRANTED_CORES: f"{grant.cores:g}",
        names.GRANTED_MEMORY: f"{grant.memory_mb:g}",
        names.STATUS: "granted",
        **limit_annotations(shares, backend),
    }
    summary = f"granted {grant.cores:g} % of {request.cores:g} % and {grant.memory_mb:g} of {request.memory_mb:g} MB"
    return _annotate(binding, "granted", annotations, summary)


def request_decision(binding: dict[str, Any], outcome: str, reason: str) -> Decision:
    """The binding webhook without an answer: the pod runs with its request, and its status says why."""
    message = f"the pod runs with its request: {reason}"
    return _annotate(binding, outcome, {names.STATUS: message[:200]}, message)


def _annotate(binding: dict[str, Any], outcome: str, annotations: dict[str, str], warning: str) -> Decision:
    operations = add_annotations(binding, annotations)
    apply_patch(binding, operations)
    return Decision(outcome, operations, as_warnings([warning]))


def as_warnings(messages: list[str]) -> list[str]:
    """Say who warns, and cut at 250 characters: an API server cuts warnings after 256."""
    return [f"clustergym: {message}"[:250] for message in messages]
