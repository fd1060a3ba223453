"""The messages between webhook, agents and collector. Who sends and who receives uses the same classes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_REQUEST_MB = float(1 << 20)
DEFAULT_OWNER = "default"
BEST_EFFORT_CLASSES = {"be", "besteffort", "burstable"}
ALLOCATION_ID = r"^[0-9a-f]{1,15}-[0-9a-f]{32}$"
"""Number and a random part, so that ids cannot be guessed."""
Text = Annotated[str, Field(min_length=1, max_length=256)]
# 1 % and 1 MB are the smallest amounts: a share of a request is then always a number of ordinary size.
Cores = Annotated[float, Field(ge=1, le=100)]
Memory = Annotated[float, Field(ge=1, le=MAX_REQUEST_MB)]
DecidedBy = Literal["request", "rule", "policy", "shadow"]
FeedbackStatus = Literal["accepted", "corrected", "duplicate", "unknown", "expired", "early", "sample"]


def is_latency_sensitive(qos_class: str) -> bool:
    """True for every class that is not known to be best-effort."""
    return re.sub(r"[^a-z]", "", qos_class.lower()) not in BEST_EFFORT_CLASSES


def is_allocation_id(text: object) -> bool:
    """Whether this can be the id of an allocation."""
    return isinstance(text, str) and re.fullmatch(ALLOCATION_ID, text) is not None


class Message(BaseModel):
    """NaN and infinity are refused."""

    model_config = ConfigDict(allow_inf_nan=False)


class AllocateRequest(Message):
    """A pod that is about to start."""

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
    min_cores: float = Field(default=0.0, ge=0, le=100, description="The grant is at least this")
    max_cores: Cores = Field(default=100.0, description="The grant is at most this")
    min_memory: float = Field(default=0.0, ge=0, le=MAX_REQUEST_MB, description="The grant is at least this")
    max_memory: Memory = Field(default=MAX_REQUEST_MB, description="The grant is at most this")


class AllocateResponse(Message):
    """What the pod gets: never more than it requested."""

    allocation_id: str = Field(pattern=ALLOCATION_ID)
    cores: Cores
    memory: Memory
    policy_version: int = Field(ge=0)
    gpu: int = Field(ge=0, description="Index of the GPU whose load and memory size were used")
    decided_by: DecidedBy = Field(description="What determined the grant")
    why: Annotated[str, Field(max_length=500)] = Field(description="The rule, rails and bounds that led to it")
    recommended_cores: Cores = Field(description="What would be granted without shadow mode")
    recommended_memory: Memory = Field(description="What would be granted without shadow mode")
    vpa_cores: Cores = Field(description="What the VPA rule alone would give")
    vpa_memory: Memory = Field(description="What the VPA rule alone would give")


class FeedbackRequest(Message):
    """The outcome of an allocation."""

    allocation_id: Text | None = Field(default=None, description="Default: the only open allocation of the owner")
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
        default=True, description="False for a sample during the life of the pod: it counts by the running time"
    )
    oom: bool = Field(default=False, description="Whether the pod ran out of GPU memory and was killed")
    pressure: float | None = Field(
        default=None, ge=0, le=1000, description="max(load, latency / objective), if measured"
    )


class FeedbackResponse(Message):
    """What happened to the feedback. The reward is set if it was accepted or corrected."""

    status: FeedbackStatus
    reward: float | None
