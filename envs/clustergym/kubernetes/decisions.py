"""Decisions on pods, as pure functions without network access.

The webhook is called when a pod is created. If the pod names its node, the agent of that node is asked, otherwise the
recommender, because the pod is not scheduled yet. Both decide from the history of the pod's owner. In mode Off, the
recommendation is only written into annotations. In mode Initial it is granted: what the scheduler counts is set to it,
and each managed container reads its limits from annotations (``fieldRef``).

If a service is down, the pod runs with its request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from clustergym.kubernetes import names
from clustergym.kubernetes.messages import AllocateResponse
from clustergym.kubernetes.names import Backend, Mode
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
    gpu_request,
    kai_requests,
    limit,
    mode_of,
    node_of,
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
class PodPlan:
    """What the webhook will do with a new pod once the agent has answered."""

    mode: Mode
    backend: Backend
    request: GpuRequest
    bounds: Bounds
    node: str | None
    """The node that the pod names: its agent is asked. None: the recommender is."""
    injected: tuple[PodContainer, ...]
    ready: tuple[PodContainer, ...]
    """Containers that get variables. None in mode Off."""
    is_new: bool
    """Whether an agent has to be asked. A repeated call finds the answer to the first one in the pod."""
    warnings: tuple[str, ...]


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


def limit_annotations(shares: tuple[Share, ...], backend: Backend) -> dict[str, str]:
    """The annotations that the injected variables read."""
    cores = {names.cores_key(share.container): backend.cores_value(share.cores) for share in shares}
    return cores | {names.memory_key(share.container): backend.memory_value(share.memory_mb) for share in shares}


def plan_pod(pod: Pod, namespace: str, backend: Backend, namespace_mode: Mode) -> PodPlan | Decision:
    """The first half of the webhook: what to ask an agent, or a decision if there is nothing to ask."""
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
        bounds, node = bounds_of(pod, request), node_of(pod)
    except NotManageable as reason:
        return Decision("refused", warnings=as_warnings([f"{reason}; the pod is not right-sized"]))
    return PodPlan(
        mode, backend, request, bounds, node, tuple(injected), tuple(ready),
        is_new=not injected and names.STATUS not in annotations, warnings=tuple(warnings),
    )  # fmt: skip


def admit_pod(pod: Pod, plan: PodPlan, answer: AllocateResponse | None = None, problem: str | None = None) -> Decision:
    """The second half of the webhook. Without an answer, the pod gets what it requests; ``problem`` says why."""
    annotations, request = annotations_of(pod), plan.request
    wanted: dict[str, str] = {names.MODE: plan.mode}
    cores, memory = request.cores, request.memory_mb
    if answer is not None:
        cores, memory = plan.bounds.clamp(answer.cores, answer.memory)
        recommended = plan.bounds.clamp(answer.recommended_cores, answer.recommended_memory)
        if answer.cores > request.cores or answer.memory > request.memory_mb:
            cores, memory, problem = request.cores, request.memory_mb, (
                f"the agent granted {answer.cores:g} % and {answer.memory:g} MB of the requested "
                f"{request.cores:g} % and {request.memory_mb:g} MB"
            )  # fmt: skip
            answer = None
    if answer is not None:
        wanted |= {
            names.ALLOCATION_ID: answer.allocation_id,
            names.AGENT: "recommender" if plan.node is None else "node",
            names.POLICY_VERSION: str(answer.policy_version),
            names.DECIDED_BY: f"{answer.decided_by}: {answer.why}"[:200],
            names.REQUESTED_CORES: f"{request.cores:g}",
            names.REQUESTED_MEMORY: f"{request.memory_mb:g}",
            names.RECOMMENDED_CORES: f"{recommended[0]:g}",
            names.RECOMMENDED_MEMORY: f"{recommended[1]:g}",
        }
    if plan.mode == "Off":
        outcome, status = "recommended", "mode Off: the pod runs with its request"
        if answer is None:
            outcome, status = "off", f"mode Off, no recommendation: {problem or 'not asked'}"[:200]
        return _patched(pod, outcome, [], wanted | {names.STATUS: status}, list(plan.warnings))

    operations: list[Operation] = []
    wanted[names.BACKEND] = plan.backend.name
    if answer is not None:
        wanted |= {names.GRANTED_CORES: f"{cores:g}", names.GRANTED_MEMORY: f"{memory:g}", names.STATUS: "granted"}
        if plan.backend.scheduler == "kai":
            operations += add_annotations(pod, _kai_annotations(pod, cores / request.cores, memory / request.memory_mb))
    elif names.GRANTED_CORES in annotations:
        # A repeated call, because another webhook added a container: the first answer stays.
        first = annotated(annotations, names.GRANTED_CORES), annotated(annotations, names.GRANTED_MEMORY)
        cores, memory = plan.bounds.clamp(first[0] or request.cores, first[1] or request.memory_mb)
    elif problem is not None:
        wanted[names.STATUS] = f"the pod runs with its request: {problem}"[:200]
    shares = scaled(request, cores, memory, plan.injected + plan.ready)
    for container in plan.ready:
        if (cores, memory) != (request.cores, request.memory_mb):
            operations += _scheduler_limits(container, shares, plan.backend)
        operations += add_variables(container.spec, container.path, injected_variables(container.name, plan.backend))
    wanted |= limit_annotations(shares, plan.backend)
    outcome = "granted" if answer is not None else "injected" if problem is None else "agent-unavailable"
    subject = f"{', '.join(container.name for container in plan.ready)}: {' and '.join(plan.backend.variables)} set to "
    if answer is not None:
        subject += f"{cores:g} % of {request.cores:g} % and {memory:g} of {request.memory_mb:g} MB, by the history"
    else:
        subject += f"the request, {request.cores:g} % and {request.memory_mb:g} MB"
    return _patched(pod, outcome, operations, wanted, [subject, *plan.warnings])


def _patched(
    pod: Pod, outcome: str, operations: list[Operation], wanted: dict[str, str], warnings: list[str]
) -> Decision:
    """A decision whose patch is known to apply. Annotations that the pod has already are not changed."""
    present = annotations_of(pod)
    operations = operations + add_annotations(pod, {key: one for key, one in wanted.items() if key not in present})
    apply_patch(pod, operations)
    return Decision(outcome, operations, as_warnings(warnings))


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


def as_warnings(messages: list[str]) -> list[str]:
    """Say who warns, and cut at 250 characters: an API server cuts warnings after 256."""
    return [f"clustergym: {message}"[:250] for message in messages]
