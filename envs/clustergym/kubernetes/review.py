"""AdmissionReview (admission.k8s.io/v1): requests of the API server and responses to it."""

from __future__ import annotations

import base64
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from clustergym.kubernetes.decisions import Decision

API_VERSION = "admission.k8s.io/v1"
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class BadReview(ValueError):
    """The body is not a valid AdmissionReview."""


class Resource(BaseModel):
    """Such as pods."""

    resource: str = ""


class Review(BaseModel):
    """The fields of a request that the webhook uses."""

    uid: Annotated[str, Field(min_length=1)]
    namespace: str = ""
    name: str = ""
    operation: str = ""
    resource: Resource = Resource()
    subResource: str | None = None
    dryRun: bool | None = None
    object: dict[str, Any]


class Document(BaseModel):
    """An AdmissionReview."""

    apiVersion: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: Review


def parse(body: bytes) -> Review:
    """Parse and check the body of a request. Raises :class:`BadReview`."""
    try:
        return Document.model_validate_json(body).request
    except ValidationError as error:
        first = error.errors()[0]
        raise BadReview(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


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
