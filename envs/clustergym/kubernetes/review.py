"""AdmissionReview (admission.k8s.io/v1): requests of the API server and responses to it."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

from clustergym.kubernetes.decisions import Decision

API_VERSION = "admission.k8s.io/v1"
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class BadReview(ValueError):
    """The body is not a valid AdmissionReview."""


@dataclass(frozen=True)
class Review:
    """The fields of a request that the webhooks use."""

    uid: str
    namespace: str
    name: str
    operation: str
    resource: str
    dry_run: bool
    object: dict[str, Any]


def parse(body: bytes) -> Review:
    """Parse and check the body of a request. Raises :class:`BadReview`."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReview(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("kind") != "AdmissionReview":
        raise BadReview("expected an object of kind AdmissionReview")
    if document.get("apiVersion") != API_VERSION:
        raise BadReview(f"apiVersion is {document.get('apiVersion')!r}: expected {API_VERSION!r}")
    request = document.get("request")
    if not isinstance(request, dict):
        raise BadReview("the review has no request")
    uid, subject = request.get("uid"), request.get("object")
    if not isinstance(uid, str) or not uid:
        raise BadReview("the request has no uid")
    if not isinstance(subject, dict):
        raise BadReview("the request has no object")
    resource = request.get("resource")
    resource_name = resource.get("resource") if isinstance(resource, dict) else None
    parts = [part for part in (resource_name, request.get("subResource")) if isinstance(part, str) and part]

    def text(key: str) -> str:
        value = request.get(key)
        return value if isinstance(value, str) else ""

    return Review(
        uid, text("namespace"), text("name"), text("operation"), "/".join(parts), request.get("dryRun") is True, subject
    )


def make_response(uid: str, decision: Decision) -> dict[str, Any]:
    """The response to a review. Pods are always allowed. ``patch`` and ``patchType`` must be set together."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if decision.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(decision.patch).encode()).decode()
    if decision.warnings:
        response["warnings"] = decision.warnings
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def duration_s(text: str) -> float | None:
    """Seconds of a duration in Go's notation, such as the ``timeout=3s`` in the URL of a webhook call."""
    if not re.fullmatch(rf"(?:{_DURATION.pattern})+", text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
