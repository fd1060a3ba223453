"""Decisions on pods and bindings, as pure functions without network access.

The pod webhook is called when a pod is created, before it is scheduled. The recommender decides from the history of the
pod's owner. In mode Off, the recommendation is only written into annotations. In the other modes it is granted: what
the scheduler counts is set to it, and each managed container reads its limits from annotations (``fieldRef``).

The binding webhook is called when the pod is bound to a node, in mode Auto only. The agent of that node may grant less:
variables cannot change any more, but the annotations that they read can, through the Binding.

If a service is down, the annotations keep the last decision (at first the request), and the pod runs with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from clustergym.kubernetes import names
from clustergym.kubernetes.names import BACKENDS, Backend, Mode
from clustergym.kubernetes.patches import Operation, add_annotations, add_resources, add_variables, apply_patch
from clustergym.kubernetes.requests import (
    Bounds,
    Container,
    GpuRequest,
    NotManageable,
    Pod,
    PodContainer,
    Share,
    annotated,
    annotations_of,
    bounds_of,
    containers_of,
    gpu_request,
    kai_requests,
    limit,
    mode_of,
    opted_in,
    selected_containers,
)


@dataclass(frozen=True)
class Decision:
    """The answer to a review: an outcome for the metrics, a patch, and warnings for the user."""

    outcome: str
    patch: list[Operation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Grant:
    """The answer of an agent."""

    allocation_id: str
    cores: float
    memory_mb: float
    policy_version: str


@dataclass(frozen=True)
class PodPlan:
    """What the pod webhook will do with a new pod once the recommender has answered."""

    mode: Mode
    backend: Backend
    request: GpuRequest
    bounds: Bounds
    injected: tuple[PodContainer, ...]
    ready: tuple[PodContainer, ...]
    """Containers that get variables. None in mode Off."""
    is_new: bool
    """Whether the recommender has to be asked. A repeated call finds the answer to the first one in the pod."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class BindingPlan:
    """A pod that is being bound, whose grant the agent of the node may still reduce."""

    request: GpuRequest
    bounds: Bounds
    """The maximum is what was granted when the pod was created."""
    backend: Backend
    containers: tuple[PodContainer, ...]


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


def scaled(
    request: GpuRequest, cores: float, memory_mb: float, containers: tuple[PodContainer, ...]
) -> tuple[Share, ...]:
    """A grant, divided among the containers as the request is. No container gets more than its own limits."""
    limits = {one.name: (limit(one.spec, names.GPU_CORES), limit(one.spec, names.GPU_MEMORY)) for one in containers}
    shares = []
    for share in request.shares:
        own_cores, own_memory = limits[share.container]
        part_cores = share.cores * cores / request.cores
        part_memory = share.memory_mb * memory_mb / request.memory_mb
        shares.append(
            Share(
                share.container,
                part_cores if own_cores is None else min(part_cores, own_cores),
                part_memory if own_memory is None else min(part_memory, own_memory),
            )
        )
    return tuple(shares)


def granted_before(annotations: dict[str, str], bounds: Bounds) -> tuple[float, float]:
    """What was granted when the pod was created, or the maximum if nothing was."""
    cores = annotated(annotations, names.GRANTED_CORES)
    memory = annotated(annotations, names.GRANTED_MEMORY)
    return bounds.clamp(
        bounds.max_cores if cores is None else cores, bounds.max_memory_mb if memory is None else memory
    )


def limit_annotations(shares: tuple[Share, ...], backend: Backend) -> dict[str, str]:
    """The annotations that the injected variables read."""
    cores = {names.cores_key(share.container): backend.cores_value(share.cores) for share in shares}
    return cores | {names.memory_key(share.container): backend.memory_value(share.memory_mb) for share in shares}


def plan_pod(pod: Pod, namespace: str, backend: Backend, namespace_mode: Mode) -> PodPlan | Decision:
    """The first half of the pod webhook: what to ask the recommender, or a decision if there is nothing to ask."""
    if not opted_in(pod, namespace):
        return Decision("not-opted-in")
    annotations = annotations_of(pod)
    injected: list[PodContainer] = []
    ready: list[PodContainer] = []
    warnings: list[str] = []
    try:
        mode = mode_of(pod, namespace_mode)
        candidates, by_name = selected_containers(pod, backend)
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
        bounds = bounds_of(pod, request)
    except NotManageable as reason:
        return Decision("refused", warnings=as_warnings([f"{reason}; the pod is not right-sized"]))
    if mode == "Auto" and namespace_mode != "Auto":
        warnings.append(f"mode Auto acts as Initial, because label {names.MODE} of namespace {namespace} is not Auto")
    return PodPlan(
        mode, backend, request, bounds, tuple(injected), tuple(ready),
        is_new=not injected and names.STATUS not in annotations, warnings=tuple(warnings),
    )  # fmt: skip


def admit_pod(pod: Pod, plan: PodPlan, grant: Grant | None = None, problem: str | None = None) -> Decision:
    """The second half of the pod webhook. Without a grant, the pod gets what it requests; ``problem`` says why."""
    if grant is not None and (reason := _invalid(grant, plan.request)) is not None:
        grant, problem = None, reason
    if plan.mode == "Off":
        return _recommend(pod, plan, grant, problem)
    annotations = annotations_of(pod)
    request, all_containers = plan.request, plan.injected + plan.ready
    operations: list[Operation] = []
    wanted: dict[str, str] = {names.MODE: plan.mode, names.BACKEND: plan.backend.name}
    cores, memory = request.cores, request.memory_mb
    if grant is not None:
        cores, memory = plan.bounds.clamp(grant.cores, grant.memory_mb)
        wanted |= _recommendation(request, cores, memory, grant)
        wanted |= {names.GRANTED_CORES: f"{cores:g}", names.GRANTED_MEMORY: f"{memory:g}", names.STATUS: "recommended"}
        if plan.backend.scheduler == "kai":
            operations += add_annotations(pod, _kai_annotations(pod, cores / request.cores, memory / request.memory_mb))
    elif names.GRANTED_CORES in annotations:
        # A repeated call, because another webhook added a container: the first answer stays.
        cores, memory = granted_before(annotations, plan.bounds)
    elif problem is not None:
        wanted[names.STATUS] = f"the pod runs with its request: {problem}"[:200]
    shares = scaled(request, cores, memory, all_containers)
    if (cores, memory) != (request.cores, request.memory_mb):
        for container in plan.ready:
            operations += _scheduler_limits(container, shares, plan.backend)
    for container in plan.ready:
        operations += add_variables(container.spec, container.path, injected_variables(container.name, plan.backend))
    wanted |= limit_annotations(shares, plan.backend)
    operations += add_annotations(pod, {key: value for key, value in wanted.items() if key not in annotations})
    apply_patch(pod, operations)
    outcome = "injected" if problem is None else "recommender-unavailable"
    return Decision("granted" if grant is not None else outcome, operations, _summary(plan, grant, cores, memory))


def _summary(plan: PodPlan, grant: Grant | None, cores: float, memory_mb: float) -> list[str]:
    request, variables = plan.request, " and ".join(plan.backend.variables)
    subject = f"{', '.join(container.name for container in plan.ready)}: {variables} "
    if grant is not None:
        subject += (
            f"set to {cores:g} % of {request.cores:g} % and {memory_mb:g} of {request.memory_mb:g} MB, "
            "from the history of the owner"
        )
    elif plan.mode == "Auto":
        subject += (
            f"will be set to what the node's agent grants, at most the requested {request.cores:g} % and "
            f"{request.memory_mb:g} MB"
        )
    else:
        subject += f"set to the request, {request.cores:g} % and {request.memory_mb:g} MB"
    return as_warnings([subject, *plan.warnings])


def _invalid(grant: Grant, request: GpuRequest) -> str | None:
    """Why a grant cannot be used."""
    if 0 < grant.cores <= request.cores and 0 < grant.memory_mb <= request.memory_mb:
        return None
    return (
        f"the agent granted {grant.cores:g} % and {grant.memory_mb:g} MB of the requested "
        f"{request.cores:g} % and {request.memory_mb:g} MB"
    )


def _recommendation(request: GpuRequest, cores: float, memory_mb: float, grant: Grant) -> dict[str, str]:
    """Annotations that say what was requested and recommended, and by which allocation."""
    return {
        names.RECOMMENDATION_ID: grant.allocation_id,
        names.POLICY_VERSION: grant.policy_version,
        names.REQUESTED_CORES: f"{request.cores:g}",
        names.REQUESTED_MEMORY: f"{request.memory_mb:g}",
        names.RECOMMENDED_CORES: f"{cores:g}",
        names.RECOMMENDED_MEMORY: f"{memory_mb:g}",
    }


def _recommend(pod: Pod, plan: PodPlan, grant: Grant | None, problem: str | None) -> Decision:
    """Mode Off: annotations only. They are for the operator, so the author of the pod gets no warning about them."""
    wanted: dict[str, str] = {names.MODE: plan.mode}
    if grant is None:
        outcome, wanted[names.STATUS] = "off", f"mode Off, no recommendation: {problem or 'not asked'}"[:200]
    else:
        outcome, wanted[names.STATUS] = "recommended", "mode Off: the pod runs with its request"
        cores, memory = plan.bounds.clamp(grant.cores, grant.memory_mb)
        wanted |= _recommendation(plan.request, cores, memory, grant)
    present = annotations_of(pod)
    operations = add_annotations(pod, {key: value for key, value in wanted.items() if key not in present})
    apply_patch(pod, operations)
    return Decision(outcome, operations, as_warnings(list(plan.warnings)))


def _scheduler_limits(container: PodContainer, shares: tuple[Share, ...], backend: Backend) -> list[Operation]:
    """Set the limits that the scheduler counts. HAMi counts them on every container; otherwise only existing ones."""
    (share,) = [share for share in shares if share.container == container.name]
    wanted = {names.GPU_CORES: share.cores, names.GPU_MEMORY: share.memory_mb}
    if limit(container.spec, names.GPU_MEMORY_PERCENTAGE) is not None:
        # HAMi takes either megabytes or a percentage.
        del wanted[names.GPU_MEMORY]
    values = {
        resource: str(max(1, int(value)))
        for resource, value in wanted.items()
        if backend.scheduler == "limits" or limit(container.spec, resource) is not None
    }
    return add_resources(container.spec, container.path, values)


def _kai_annotations(pod: Pod, cores_ratio: float, memory_ratio: float) -> dict[str, str]:
    """KAI's annotations for a grant. A fraction stands for cores and memory: the larger of both counts."""
    kai, wanted = kai_requests(pod), {}
    if names.KAI_FRACTION in kai:
        fraction = kai[names.KAI_FRACTION]
        smaller = math.ceil(100 * fraction * max(cores_ratio, memory_ratio) - 1e-9) / 100
        wanted[names.KAI_FRACTION] = f"{min(smaller, fraction):g}"
    if names.KAI_MEMORY in kai:
        wanted[names.KAI_MEMORY] = f"{math.ceil(kai[names.KAI_MEMORY] * memory_ratio - 1e-9)}"
    return wanted


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


def plan_binding(pod: Pod, namespace: str) -> BindingPlan | None:
    """What the binding webhook asks the agent of the node, or None if the pod is not in mode Auto."""
    annotations = annotations_of(pod)
    backend = BACKENDS.get(annotations.get(names.BACKEND, ""))
    if backend is None or not opted_in(pod, namespace) or names.ALLOCATION_ID in annotations:
        return None
    if annotations.get(names.MODE) != "Auto":
        return None
    containers = tuple(container for container in containers_of(pod) if is_injected(container.spec, backend))
    if not containers:
        return None
    try:
        request = gpu_request(pod, namespace, list(containers))
        bounds = bounds_of(pod, request)
        bounds = bounds.capped(*granted_before(annotations, bounds))
    except NotManageable:
        return None
    return BindingPlan(request, bounds, backend, containers)


def grant_decision(binding: dict[str, Any], plan: BindingPlan, grant: Grant) -> Decision:
    """The binding webhook with an answer: divide the grant among the containers and annotate the Binding."""
    request = plan.request
    if (reason := _invalid(grant, request)) is not None:
        return request_decision(binding, "bad-grant", reason)
    cores, memory = plan.bounds.clamp(grant.cores, grant.memory_mb)
    annotations = {
        names.ALLOCATION_ID: grant.allocation_id,
        names.POLICY_VERSION: grant.policy_version,
        names.GRANTED_CORES: f"{cores:g}",
        names.GRANTED_MEMORY: f"{memory:g}",
        names.STATUS: "granted",
        **limit_annotations(scaled(request, cores, memory, plan.containers), plan.backend),
    }
    summary = f"granted {cores:g} % of {request.cores:g} % and {memory:g} of {request.memory_mb:g} MB"
    return _annotate(binding, "granted", annotations, summary)


def request_decision(binding: dict[str, Any], outcome: str, reason: str) -> Decision:
    """The binding webhook without an answer: what was decided before stands, and the status of the pod says why."""
    message = f"not reduced at binding: {reason}"
    return _annotate(binding, outcome, {names.STATUS: message[:200]}, message)


def _annotate(binding: dict[str, Any], outcome: str, annotations: dict[str, str], warning: str) -> Decision:
    operations = add_annotations(binding, annotations)
    apply_patch(binding, operations)
    return Decision(outcome, operations, as_warnings([warning]))


def as_warnings(messages: list[str]) -> list[str]:
    """Say who warns, and cut at 250 characters: an API server cuts warnings after 256."""
    return [f"clustergym: {message}"[:250] for message in messages]
