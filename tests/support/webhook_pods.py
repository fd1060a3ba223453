"""Pods for the webhook tests, and what the webhooks make of them."""

from __future__ import annotations

from typing import Any

from clustergym.kubernetes import BACKENDS, Decision, plan_pod
from clustergym.kubernetes import admit_pod as admit_planned
from clustergym.kubernetes.messages import AllocateResponse
from clustergym.kubernetes.patches import apply_patch
from clustergym.kubernetes.requests import containers_of

MPS, HAMI, KAI = BACKENDS["mps"], BACKENDS["hami"], BACKENDS["kai"]


def container(name: str = "main", gpu: int | None = 1, **extra: Any) -> dict[str, Any]:
    limits = {} if gpu is None else {"nvidia.com/gpu": str(gpu)}
    return {"name": name, "image": "cuda", "resources": {"limits": limits}, **extra}


def pod(
    *containers: dict[str, Any],
    name: str = "train",
    label: str | None = "true",
    annotations: dict[str, str] | None = None,
    init: list[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """A labelled pod that requests 80 % and 4000 MB, as in the example of the documentation."""
    requested = {"clustergym.io/cores": "80", "clustergym.io/memory": "4000"}
    found: dict[str, Any] = {"name": name, **metadata}
    found["labels"] = dict(labels or {}) | ({} if label is None else {"clustergym.io/allocate": label})
    found["annotations"] = requested if annotations is None else annotations
    for key in ("labels", "annotations"):
        if not found[key]:
            del found[key]
    spec: dict[str, Any] = {"containers": list(containers) or [container()]}
    if init is not None:
        spec["initContainers"] = init
    return {"apiVersion": "v1", "kind": "Pod", "metadata": found, "spec": spec}


def admit_pod(
    subject: dict[str, Any], namespace: str, backend: Any, mode: Any = "Initial", grant: AllocateResponse | None = None
) -> Decision:
    """The decision of the webhook if the agent answers with this grant."""
    plan = plan_pod(subject, namespace, backend, mode)
    return plan if isinstance(plan, Decision) else admit_planned(subject, plan, grant)


def admitted(
    subject: dict[str, Any],
    backend: Any = MPS,
    namespace: str = "team",
    mode: Any = "Initial",
    grant: AllocateResponse | None = None,
) -> dict[str, Any]:  # fmt: skip
    return apply_patch(subject, admit_pod(subject, namespace, backend, mode, grant).patch)


def variables(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Values of the variables per container; a fieldRef is replaced by the annotation that it reads."""
    annotations = found["metadata"].get("annotations", {})
    result: dict[str, dict[str, str]] = {}
    for one in containers_of(found):
        for variable in one.spec.get("env") or []:
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = variable["value"] if path is None else annotations[path.split("'")[1]]
            result.setdefault(one.name, {})[variable["name"]] = value
    return result


def answer(cores: float, memory: float, **changes: Any) -> AllocateResponse:
    """What an agent answers that grants this."""
    return AllocateResponse(
        **{
            "allocation_id": "1-" + "0" * 32, "cores": cores, "memory": memory, "policy_version": 7, "gpu": 0,
            "decided_by": "rule", "why": "VPA rule", "recommended_cores": cores, "recommended_memory": memory,
            "vpa_cores": cores, "vpa_memory": memory, **changes,
        }
    )  # fmt: skip


def limits(name: str, cores: int, memory: int, **extra: Any) -> dict[str, Any]:
    one = container(name, **extra)
    one["resources"]["limits"] |= {"nvidia.com/gpucores": str(cores), "nvidia.com/gpumem": str(memory)}
    return one
