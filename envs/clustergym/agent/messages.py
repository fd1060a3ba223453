"""Requests and responses of the HTTP API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_REQUEST_MB = float(1 << 20)
Text = Annotated[str, Field(min_length=1, max_length=256)]
FeedbackStatus = Literal["accepted", "duplicate", "unknown", "expired", "stale"]


class AllocateRequest(BaseModel):
    """A pod that is about to start."""

    model_config = ConfigDict(allow_inf_nan=False)

    owner: Text = Field(description="Workload of the pod. The decision uses the feedback on its earlier pods")
    cores: float = Field(gt=0, le=100, description="Requested share of the GPU's SMs in %")
    memory: float = Field(gt=0, le=MAX_REQUEST_MB, description="Requested GPU memory in MB")
    qos_class: Annotated[str, Field(max_length=64)] = Field(
        default="latency-sensitive", description="best-effort (also BE, BestEffort, Burstable) or latency-sensitive"
    )
    request_id: Text | None = Field(default=None, description="Requests with the same id get the same allocation")


class AllocateResponse(BaseModel):
    """What the pod gets: never more than it requested."""

    allocation_id: str
    cores: float
    memory: float
    policy_version: int


class FeedbackRequest(BaseModel):
    """The outcome of an allocation."""

    model_config = ConfigDict(allow_inf_nan=False)

    allocation_id: Text
    actual_usage: float = Field(
        ge=0, le=100, description="Share of the GPU (not of the allocation) that was used, in %"
    )
    qos_met: bool = Field(description="Whether the pod met its objective")
    pods: int = Field(default=1, ge=0, le=10_000, description="Number of pods on the GPU, including this one")
    memory_used: float | None = Field(default=None, ge=0, le=MAX_REQUEST_MB, description="GPU memory used in MB")
    oom: bool = Field(default=False, description="Whether the pod ran out of GPU memory and was killed")
    pressure: float | None = Field(
        default=None, ge=0, le=1000, description="max(load, latency / objective), if measured"
    )


class FeedbackResponse(BaseModel):
    """What happened to the feedback. The reward is set if it was accepted or stale."""

    status: FeedbackStatus
    reward: float | None


class ProblemResponse(BaseModel):
    """Why a request was refused."""

    detail: Any


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemResponse, "description": "The body is not JSON"},
    401: {"model": ProblemResponse, "description": "Missing or wrong bearer token"},
    413: {"model": ProblemResponse, "description": "The body is too long"},
    422: {"model": ProblemResponse, "description": "A value in the body is invalid"},
    503: {"model": ProblemResponse, "description": "The store cannot be written; nothing was decided"},
}
