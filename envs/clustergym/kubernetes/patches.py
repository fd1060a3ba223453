"""JSON patches (RFC 6902) with ``add`` operations.

An API server answers 500 to a patch that cannot be applied, even with ``failurePolicy: Ignore``, and the pod is
blocked. Therefore every patch is applied here to the same object before it is sent.
"""

from __future__ import annotations

import copy
from typing import Any

Operation = dict[str, Any]


def escape(key: str) -> str:
    """Escape a key for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def add_annotations(document: dict[str, Any], annotations: dict[str, str]) -> list[Operation]:
    """Operations that set annotations, and add the parents that are missing."""
    metadata = document.get("metadata")
    if not annotations:
        return []
    if not metadata:
        return [{"op": "add", "path": "/metadata", "value": {"annotations": annotations}}]
    present = metadata.get("annotations")
    if not present:
        return [{"op": "add", "path": "/metadata/annotations", "value": annotations}]
    return [
        {"op": "add", "path": f"/metadata/annotations/{escape(key)}", "value": value}
        for key, value in annotations.items()
        if present.get(key) != value
    ]


def add_variables(container: dict[str, Any], path: str, variables: list[dict[str, Any]]) -> list[Operation]:
    """Operations that append environment variables to the container at ``path``."""
    if not variables:
        return []
    if not container.get("env"):
        return [{"op": "add", "path": f"{path}/env", "value": variables}]
    return [{"op": "add", "path": f"{path}/env/-", "value": variable} for variable in variables]


def add_resources(container: dict[str, Any], path: str, values: dict[str, str]) -> list[Operation]:
    """Operations that set limits of the container at ``path``, and equal requests: extended resources need both."""
    if not values:
        return []
    resources = container.get("resources")
    if not resources:
        return [{"op": "add", "path": f"{path}/resources", "value": {"limits": values, "requests": values}}]
    operations: list[Operation] = []
    for kind in ("limits", "requests"):
        if not resources.get(kind):
            operations.append({"op": "add", "path": f"{path}/resources/{kind}", "value": values})
        else:
            operations += [
                {"op": "add", "path": f"{path}/resources/{kind}/{escape(name)}", "value": value}
                for name, value in values.items()
            ]
    return operations


def apply_patch(document: dict[str, Any], operations: list[Operation]) -> dict[str, Any]:
    """A patched copy of the document. Raises ValueError for operations that an API server would refuse."""
    result = copy.deepcopy(document)
    for operation in operations:
        if operation["op"] != "add":
            raise ValueError(f"patch operation {operation['op']!r}: expected 'add'")
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].removeprefix("/").split("/")
        ]
        target: Any = result
        for part in parents:
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"patch path {operation['path']}: the object has no {part!r} there") from None
        value = copy.deepcopy(operation["value"])
        if isinstance(target, dict):
            target[last] = value
        elif isinstance(target, list) and last == "-":
            target.append(value)
        else:
            raise ValueError(f"patch path {operation['path']}: its parent is {type(target).__name__}")
    return result
