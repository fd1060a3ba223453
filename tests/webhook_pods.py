"""Pods for the webhook tests."""

from __future__ import annotations

from typing import Any


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
