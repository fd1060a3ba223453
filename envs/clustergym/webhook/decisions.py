"""What to do with a pod and with a binding: pure functions of the objects, no network.

Webhook A sees a pod at CREATE. No node is known yet, so it cannot ask any agent; it makes each managed container read
its limits from annotations (``fieldRef``), and sets those annotations to what the user asked for. Webhook B sees the
binding, hence the node, asks that node's agent, and overwrites the annotations through the Binding. If B or the agent
is down, the annotations still say what the user asked for: the pod runs as if nobody had right-sized it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from clustergym.webhook import names
from clustergym.webhook.names import BACKENDS, Backend
from clustergym.webhook.patches import Operation, add_annotations, add_variables, applied

Pod = dict[str, Any]
Container = dict[str, Any]

MAX_MEMORY_MB = 1 << 20
MAX_OWNER = 200

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_SUFFIX = {
    None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What to answer: operations to apply, sentences for the user, and a word for the metrics."""

    outcome: str
    patch: list[Operation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Share:
    """What one container asks for: % of the GPU and MB."""

    container: str
    cores: float
    memory_mb: float


@dataclass(frozen=True)
class GpuRequest:
    """What a pod asks for, and how it falls to its containers."""

    owner: str
    cores: float
    memory_mb: float
    qos_class: str
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Grant:
    """What an agent answered."""

    allocation_id: str
    cores: float
    memory_mb: float
    policy_version: str


class NotManageable(ValueError):
    """The pod opted in, but says too little or too much; the message is meant for its author."""


def annotations_of(pod: Pod) -> dict[str, str]:
    return (pod.get("metadata") or {}).get("annotations") or {}


def opted_in(pod: Pod, namespace: str) -> bool:
    """Only by label, and never in the control plane's namespaces whatever the label says."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return namespace not in names.PROTECTED_NAMESPACES and labels.get(names.LABEL) == "true"


def quantity(value: Any, what: str) -> float:
    """A Kubernetes quantity such as 3000, "3k" or "4Ki" as a number."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise NotManageable(f"{what} is {value!r}: expected a number such as 3000 or 3k")
    return float(match[1]) * _SUFFIX[match[2]]


def containers_of(pod: Pod) -> Iterator[tuple[str, Container, bool]]:
    """JSON path, container, and whether it runs beside the others (an ordinary init container runs before them)."""
    spec = pod.get("spec") or {}
    for i, container in enumerate(spec.get("initContainers") or []):
        yield f"/spec/initContainers/{i}", container, container.get("restartPolicy") == "Always"
    for i, container in enumerate(spec.get("containers") or []):
        yield f"/spec/containers/{i}", container, True


def limit(container: Container, resource: str) -> float | None:
    """What a container asks of an extended resource; requests equal limits for these."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        value = (resources.get(kind) or {}).get(resource)
        if value is not None:
            return quantity(value, f"{resource} of container {container.get('name')!r}")
    return None


def field_ref(variable: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}}


def injected_variables(container: Container, backend: Backend) -> list[dict[str, Any]]:
    name = container["name"]
    return [
        field_ref(backend.cores_variable, names.cores_key(name)),
        field_ref(backend.memory_variable, names.memory_key(name)),
    ]


def is_injected(container: Container, backend: Backend) -> bool:
    """Whether the container already reads its limits from our annotations (the API server adds apiVersion to a fieldRef)."""
    paths = {
        variable.get("name"): ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        for variable in container.get("env") or []
    }
    return all(
        paths.get(wanted["name"]) == wanted["valueFrom"]["fieldRef"]["fieldPath"]
        for wanted in injected_variables(container, backend)
    )


def owner_of(pod: Pod, namespace: str) -> str:
    """The workload behind a pod. Always inside its namespace: nobody writes into another tenant's history."""
    metadata = pod.get("metadata") or {}
    chosen = annotations_of(pod).get(names.OWNER)
    if not chosen:
        references = metadata.get("ownerReferences") or []
        controller = next((r for r in references if r.get("controller")), None)
        if controller is not None:
            kind, name = str(controller.get("kind")), str(controller.get("name"))
            revision = (metadata.get("labels") or {}).get("pod-template-hash")
            if kind == "ReplicaSet" and revision and name.endswith(f"-{revision}"):
                # A Deployment's ReplicaSets change with every roll-out; its pods' needs seldom do.
                kind, name = "Deployment", name.removesuffix(f"-{revision}")
            chosen = f"{kind}/{name}"
        else:
            chosen = f"Pod/{metadata.get('name') or metadata.get('generateName') or 'unnamed'}"
    return f"{namespace}/{chosen}"[:MAX_OWNER]


def chosen_containers(pod: Pod) -> tuple[list[tuple[str, Container, bool]], bool]:
    """The containers that ask for a GPU or that the user named, and whether he named them."""
    found = list(containers_of(pod))
    listed = annotations_of(pod).get(names.CONTAINERS)
    if listed is None:
        return [entry for entry in found if limit(entry[1], names.GPU)], False
    wanted = {name.strip() for name in listed.split(",") if name.strip()}
    unknown = wanted - {container["name"] for _, container, _ in found}
    if unknown:
        raise NotManageable(
            f"annotation {names.CONTAINERS} names {', '.join(sorted(unknown))}; "
            f"the pod has {', '.join(container['name'] for _, container, _ in found)}"
        )
    return [entry for entry in found if entry[1]["name"] in wanted], True


def _split(
    entries: list[tuple[str, Container, bool]], total: float | None, resource: str, unit: str, key: str
) -> tuple[float, dict[str, float]]:
    """A pod's request of one kind and each container's part of it.

    Containers that run together divide the total in proportion to their limits; an init container runs alone and may
    have all of it. This is how the scheduler adds up a pod: the sum over containers, or the largest init container.
    """
    limits = {container["name"]: limit(container, resource) for _, container, _ in entries}
    together = [container["name"] for _, container, beside in entries if beside]
    before = [container["name"] for _, container, beside in entries if not beside]
    if total is None:
        stated = {name: value for name, value in limits.items() if value is not None}
        if len(stated) < len(limits):
            raise NotManageable(
                f"the request is not known: set annotation {key} ({unit}) or limit {resource} on every GPU container"
            )
        total = max(sum(stated[name] for name in together), *(stated[name] for name in before), 0.0)
    weights = {name: limits[name] for name in together}
    if any(weight is None for weight in weights.values()):
        weights = dict.fromkeys(together, 1.0)
    whole = math.fsum(weight for weight in weights.values() if weight is not None) or 1.0
    parts = {name: total * (weights[name] or 0.0) / whole for name in together}
    for name in before:
        own = limits[name]
        parts[name] = total if own is None else min(total, own)
    return total, parts


def gpu_request(pod: Pod, namespace: str, entries: list[tuple[str, Container, bool]]) -> GpuRequest:
    """What the pod asks for on behalf of these containers."""
    for _, container, _ in entries:
        devices = limit(container, names.GPU)
        if devices is not None and devices > 1:
            raise NotManageable(f"container {container['name']!r} asks for {devices:g} GPUs; shares are of one GPU")
    said = annotations_of(pod)
    cores_total = quantity(said[names.CORES], f"annotation {names.CORES}") if names.CORES in said else None
    memory_total = quantity(said[names.MEMORY], f"annotation {names.MEMORY}") if names.MEMORY in said else None
    cores, cores_parts = _split(entries, cores_total, names.GPU_CORES, "% of one GPU", names.CORES)
    memory, memory_parts = _split(entries, memory_total, names.GPU_MEMORY, "MB", names.MEMORY)
    if not 1 <= cores <= 100:
        raise NotManageable(f"the pod asks for {cores:g} % of a GPU: expected 1 to 100")
    if not 1 <= memory <= MAX_MEMORY_MB:
        raise NotManageable(f"the pod asks for {memory:g} MB of GPU memory: expected 1 to {MAX_MEMORY_MB}")
    shares = tuple(Share(name, cores_parts[name], memory_parts[name]) for name in cores_parts)
    return GpuRequest(
        owner_of(pod, namespace), cores, memory, said.get(names.QOS_CLASS, "latency-sensitive")[:32], shares
    )


def limit_annotations(shares: tuple[Share, ...], backend: Backend) -> dict[str, str]:
    """The annotations that the injected variables read."""
    found = {}
    for share in shares:
        found[names.cores_key(share.container)] = backend.cores_value(share.cores)
        found[names.memory_key(share.container)] = backend.memory_value(share.memory_mb)
    return found


def admit_pod(pod: Pod, namespace: str, backend: Backend) -> Decision:
    """Webhook A: make the managed containers read their limits from annotations. Running it again changes nothing."""
    if not opted_in(pod, namespace):
        return Decision("not-opted-in")
    try:
        candidates, named = chosen_containers(pod)
        warnings: list[str] = []
        ready: list[tuple[str, Container, bool]] = []
        done: list[tuple[str, Container, bool]] = []
        for entry in candidates:
            container = entry[1]
            name = container["name"]
            own = sorted({v.get("name") for v in container.get("env") or []} & set(backend.variables))
            preset = sorted({names.cores_key(name), names.memory_key(name)} & set(annotations_of(pod)))
            if is_injected(container, backend):
                done.append(entry)
            elif own:
                warnings.append(f"container {name} sets {', '.join(own)} itself and is left alone")
            elif preset:
                warnings.append(f"the pod sets annotation {', '.join(preset)} itself; container {name} is left alone")
            elif container.get("envFrom") and not named:
                # A variable of ours would win over one from the ConfigMap or Secret, whose contents are not to be seen here.
                warnings.append(
                    f"container {name} takes variables from envFrom and is left alone; annotation {names.CONTAINERS} can name it"
                )
            else:
                ready.append(entry)
        if not candidates:
            warnings.append(f"no container asks for {names.GPU}, and annotation {names.CONTAINERS} names none")
        if not ready:
            return Decision("already-injected" if done else "left-alone", warnings=_sentences(warnings))
        request = gpu_request(pod, namespace, done + ready)
    except NotManageable as reason:
        return Decision("refused", warnings=_sentences([f"{reason}; the pod is not right-sized"]))
    operations: list[Operation] = []
    for path, container, _ in ready:
        operations += add_variables(container, path, injected_variables(container, backend))
    wanted = {names.BACKEND: backend.name, **limit_annotations(request.shares, backend)}
    operations += add_annotations(pod, {key: value for key, value in wanted.items() if key not in annotations_of(pod)})
    applied(pod, operations)
    listed = ", ".join(container["name"] for _, container, _ in ready)
    warnings.insert(
        0,
        f"{listed}: {' and '.join(backend.variables)} will follow what the node's agent grants, "
        f"at most the requested {request.cores:g} % and {request.memory_mb:g} MB",
    )
    return Decision("injected", operations, _sentences(warnings))


def managed_request(pod: Pod, namespace: str) -> tuple[GpuRequest, Backend] | None:
    """What webhook B should ask for: what webhook A promised on this pod, or None where there is nothing to ask."""
    said = annotations_of(pod)
    backend = BACKENDS.get(said.get(names.BACKEND, ""))
    if backend is None or not opted_in(pod, namespace) or names.ALLOCATION_ID in said:
        return None
    entries = [entry for entry in containers_of(pod) if is_injected(entry[1], backend)]
    if not entries:
        return None
    try:
        return gpu_request(pod, namespace, entries), backend
    except NotManageable:
        return None


def grant_decision(binding: dict[str, Any], request: GpuRequest, backend: Backend, grant: Grant) -> Decision:
    """Webhook B with an answer: divide the grant among the containers and annotate the Binding."""
    if not (0 < grant.cores <= request.cores and 0 < grant.memory_mb <= request.memory_mb):
        return stands_decision(
            binding,
            "bad-grant",
            f"the agent granted {grant.cores:g} % and {grant.memory_mb:g} MB of the requested "
            f"{request.cores:g} % and {request.memory_mb:g} MB",
        )
    scaled = tuple(
        Share(
            share.container,
            share.cores * grant.cores / request.cores,
            share.memory_mb * grant.memory_mb / request.memory_mb,
        )
        for share in request.shares
    )
    operations = add_annotations(
        binding,
        {
            names.ALLOCATION_ID: grant.allocation_id,
            names.POLICY_VERSION: grant.policy_version,
            names.GRANTED_CORES: f"{grant.cores:g}",
            names.GRANTED_MEMORY: f"{grant.memory_mb:g}",
            names.STATUS: "granted",
            **limit_annotations(scaled, backend),
        },
    )
    applied(binding, operations)
    said = f"granted {grant.cores:g} % of {request.cores:g} % and {grant.memory_mb:g} of {request.memory_mb:g} MB"
    return Decision("granted", operations, _sentences([said]))


def stands_decision(binding: dict[str, Any], outcome: str, reason: str) -> Decision:
    """Webhook B without an answer: the request stands, and the pod says why."""
    operations = add_annotations(binding, {names.STATUS: f"request stands: {reason}"[:200]})
    applied(binding, operations)
    return Decision(outcome, operations, _sentences([f"the request stands: {reason}"]))


def _sentences(messages: list[str]) -> list[str]:
    """API servers cut warnings above 256 characters; say who speaks."""
    return [f"clustergym: {message}"[:250] for message in messages]
