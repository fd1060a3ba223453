"""What a pod requests: its containers, limits, owner, mode and bounds. Pure functions without network access."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from clustergym.kubernetes import names
from clustergym.kubernetes.names import Backend, Mode

Pod = dict[str, Any]
Container = dict[str, Any]

MAX_MEMORY_MB = 1 << 20
MAX_OWNER_LENGTH = 200

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_SUFFIX = {
    None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


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
class Bounds:
    """Least and most cores (%) and memory that a pod may be granted: minAllowed and maxAllowed, within the request."""

    min_cores: float
    max_cores: float
    min_memory_mb: float
    max_memory_mb: float

    def clamp(self, cores: float, memory_mb: float) -> tuple[float, float]:
        return (
            max(self.min_cores, min(cores, self.max_cores)),
            max(self.min_memory_mb, min(memory_mb, self.max_memory_mb)),
        )


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
            # A generated name is not known yet when the pod is created, and pods with one prefix belong together.
            chosen = f"Pod/{metadata.get('generateName') or metadata.get('name') or 'unnamed'}"
    return f"{namespace}/{chosen}"[:MAX_OWNER_LENGTH]


def node_of(pod: Pod) -> str | None:
    """The node that a new pod names: by its name, by a selector, or as the controller of a DaemonSet does."""
    spec = pod.get("spec") or {}
    found = spec.get("nodeName") or (spec.get("nodeSelector") or {}).get("kubernetes.io/hostname")
    if found:
        return str(found)
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms") or []
    fields = [field for term in terms for field in term.get("matchFields") or []]
    if len(terms) == len(fields) == 1 and fields[0].get("key") == "metadata.name" and fields[0].get("operator") == "In":
        values = fields[0].get("values") or []
        return str(values[0]) if len(values) == 1 else None
    return None


def selected_containers(pod: Pod, backend: Backend) -> tuple[list[PodContainer], bool]:
    """The containers to manage, and whether the user selected them by name. By default, those that request a GPU."""
    containers, annotations = list(containers_of(pod)), annotations_of(pod)
    key, listed = names.CONTAINERS, annotations.get(names.CONTAINERS)
    if listed is None and backend.scheduler == "kai" and kai_requests(pod):
        # KAI gives the fraction to the first container, or to the one that its annotation names.
        key, listed = names.KAI_CONTAINER, annotations.get(names.KAI_CONTAINER)
        if listed is None:
            return [next(one for one in containers if one.path == "/spec/containers/0")], False
    if listed is None:
        return [container for container in containers if limit(container.spec, names.GPU)], False
    selected = {name.strip() for name in listed.split(",") if name.strip()}
    unknown = selected - {container.name for container in containers}
    if unknown:
        raise NotManageable(
            f"annotation {key} names {', '.join(sorted(unknown))}, "
            f"but the pod has {', '.join(container.name for container in containers)}"
        )
    return [container for container in containers if container.name in selected], key == names.CONTAINERS


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


def annotated(annotations: dict[str, str], *keys: str) -> float | None:
    """The value of the first of these annotations that is set."""
    for key in keys:
        if key in annotations:
            return quantity(annotations[key], f"annotation {key}")
    return None


def kai_requests(pod: Pod) -> dict[str, float]:
    """What the pod requests in KAI's annotations: a part of a GPU, or memory in MiB."""
    found = {key: annotated(annotations_of(pod), key) for key in (names.KAI_FRACTION, names.KAI_MEMORY)}
    return {key: value for key, value in found.items() if value is not None}


def gpu_request(pod: Pod, namespace: str, containers: list[PodContainer]) -> GpuRequest:
    """The request of a pod for these containers. What the webhook noted when the pod was created counts first."""
    for container in containers:
        devices = limit(container.spec, names.GPU)
        if devices is not None and devices > 1:
            raise NotManageable(f"container {container.name!r} requests {devices:g} GPUs: expected 1")
    annotations, kai = annotations_of(pod), kai_requests(pod)
    fraction = kai.get(names.KAI_FRACTION)
    total_cores = annotated(annotations, names.CORES, names.REQUESTED_CORES)
    if total_cores is None and fraction is not None:
        total_cores = 100.0 * fraction
    total_memory = annotated(annotations, names.MEMORY, names.REQUESTED_MEMORY)
    if total_memory is None:
        total_memory = kai.get(names.KAI_MEMORY)
    cores, cores_parts = _split(containers, total_cores, names.GPU_CORES, "% of one GPU", names.CORES)
    memory, memory_parts = _split(containers, total_memory, names.GPU_MEMORY, "MB", names.MEMORY)
    if not 1 <= cores <= 100:
        raise NotManageable(f"the pod requests {cores:g} % of a GPU: expected 1 to 100")
    if not 1 <= memory <= MAX_MEMORY_MB:
        raise NotManageable(f"the pod requests {memory:g} MB of GPU memory: expected 1 to {MAX_MEMORY_MB}")
    shares = tuple(Share(name, cores_parts[name], memory_parts[name]) for name in cores_parts)
    qos_class = annotations.get(names.QOS_CLASS, "latency-sensitive")[:32]
    return GpuRequest(owner_of(pod, namespace), cores, memory, qos_class, shares)


def bounds_of(pod: Pod, request: GpuRequest) -> Bounds:
    """The bounds that the author of the pod set. The request is always an upper bound."""
    annotations = annotations_of(pod)

    def pair(least_key: str, most_key: str, requested: float) -> tuple[float, float]:
        least, most = annotated(annotations, least_key), annotated(annotations, most_key)
        if least is not None and most is not None and least > most:
            raise NotManageable(f"annotation {least_key} is {least:g}, more than {most_key}, which is {most:g}")
        most = requested if most is None else max(1.0, min(most, requested))
        return min(least or 0.0, most), most

    return Bounds(
        *pair(names.MIN_CORES, names.MAX_CORES, request.cores),
        *pair(names.MIN_MEMORY, names.MAX_MEMORY, request.memory_mb),
    )


def mode_of(pod: Pod, namespace_mode: Mode) -> Mode:
    """The mode of a pod: its annotation, or the mode of its namespace."""
    chosen = annotations_of(pod).get(names.MODE, namespace_mode)
    for mode in names.MODES:
        if mode == chosen:
            return mode
    gone = "; Auto went with the binding webhook: use Initial" if chosen == "Auto" else ""
    raise NotManageable(f"annotation {names.MODE} is {chosen!r}: expected {', '.join(names.MODES)}{gone}")
