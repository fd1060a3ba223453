"""Requests and responses of the HTTP API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_REQUEST_MB = float(1 << 20)
DEFAULT_OWNER = "default"
Text = Annotated[str, Field(min_length=1, max_length=256)]
# 1 % and 1 MB are the smallest amounts: a share of a request is then always a number of ordinary size.
Cores = Annotated[float, Field(ge=1, le=100)]
Memory = Annotated[float, Field(ge=1, le=MAX_REQUEST_MB)]
FeedbackStatus = Literal["accepted", "corrected", "duplicate", "unknown", "expired", "early", "stale", "sample"]


class AllocateRequest(BaseModel):
    """A pod that is about to start."""

    model_config = ConfigDict(allow_inf_nan=False)

    owner: Text = Field(
        default=DEFAULT_OWNER, description="Workload of the pod. The decision uses the feedback on its earlier pods"
    )
    cores: Cores = Field(description="Requested share of the GPU's SMs in %")
    memory: Memory = Field(description="Requested GPU memory in MB")
    qos_class: Annotated[str, Field(max_length=64)] = Field(
        default="latency-sensitive", description="best-effort (also BE, BestEffort, Burstable) or latency-sensitive"
    )
    request_id: Text | None = Field(default=None, description="Requests with the same id get the same allocation")
    gpu: int | None = Field(default=None, ge=0, le=1023, description="Index of the GPU. Default: the least loaded one")
    shadow: bool = Field(default=False, description="Grant the request, and only report what would have been granted")
    min_cores: float | None = Field(default=None, ge=0, le=100, description="The grant is at least this")
    max_cores: Cores | None = Field(default=None, description="The grant is at most this")
    min_memory: float | None = Field(default=None, ge=0, le=MAX_REQUEST_MB, description="The grant is at least this")
    max_memory: Memory | None = Field(default=None, description="The grant is at most this")


class AllocateResponse(BaseModel):
    """What the pod gets: never more than it requested."""

    allocation_id: str
    cores: float
    memory: float
    policy_version: int
    gpu: int = Field(description="Index of the GPU whose load and memory size were used")
    decided_by: str = Field(description="What determined the grant: policy, vpa, request or shadow")
    recommended_cores: float = Field(description="What would be granted without shadow mode")
    recommended_memory: float = Field(description="What would be granted without shadow mode")


class FeedbackRequest(BaseModel):
    """The outcome of an allocation."""

    model_config = ConfigDict(allow_inf_nan=False)

    allocation_id: Text | None = Field(
        default=None,
        description="Default: the only open allocation of the owner",
    )
    owner: Text | None = Field(
        default=None, description="With an id: must be the owner of the allocation. Without one: default is meant"
    )
    actual_usage: float = Field(
        ge=0, le=100, description="Share of the GPU (not of the allocation) that was used, in %"
    )
    qos_met: bool = Field(description="Whether the pod met its objective")
    pods: int = Field(default=1, ge=0, le=10_000, description="Number of pods on the GPU, including this one")
    memory_used: float | None = Field(default=None, ge=0, le=MAX_REQUEST_MB, description="GPU memory used in MB")
    final: bool = Field(
        default=True, description="False for a sample during the life of the pod: it updates the peaks, nothing else"
    )
    restarts: int = Field(default=0, ge=0, le=1_000_000, description="Number of restarts. Not part of the reward")
    oom: bool = Field(default=False, description="Whether the pod ran out of GPU memory and was killed")
    pressure: float | None = Field(
        default=None, ge=0, le=1000, description="max(load, latency / objective), if measured"
    )


class FeedbackResponse(BaseModel):
    """What happened to the feedback. The reward is set if it was accepted, corrected or stale."""

    status: FeedbackStatus
    reward: float | None


class ProblemResponse(BaseModel):
    """Why a request was refused."""

    detail: Any


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemResponse, "description": "The body is not JSON"},
    401: {"model": ProblemResponse, "description": "Missing or wrong bearer token"},
    409: {"model": ProblemResponse, "description": "More than one open allocation: the feedback needs an id"},
    413: {"model": ProblemResponse, "description": "The body is too long"},
    422: {"model": ProblemResponse, "description": "A value in the body is invalid"},
    500: {"model": ProblemResponse, "description": "An error in the agent; nothing was stored"},
    503: {"model": ProblemResponse, "description": "The store cannot be used; nothing was decided"},
}
