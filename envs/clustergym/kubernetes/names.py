"""Names of labels, annotations, environment variables and resources that users see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DOMAIN = "clustergym.io"

LABEL = f"{DOMAIN}/allocate"
"""Opt-in: pods with this label set to "true" are right-sized. Other pods are not changed."""

# Annotations that users can set on a pod.
CORES = f"{DOMAIN}/cores"
"""Requested share of one GPU's streaming multiprocessors, %, for the whole pod."""
MEMORY = f"{DOMAIN}/memory"
"""Requested GPU memory, MB, for the whole pod."""
QOS_CLASS = f"{DOMAIN}/qos-class"
"""best-effort or latency-sensitive (the default)."""
OWNER = f"{DOMAIN}/owner"
"""Key of the agent's history of earlier pods. Default: the workload that made the pod."""
CONTAINERS = f"{DOMAIN}/containers"
"""Comma-separated names of the containers to manage. Default: those that request a GPU."""

MODE = f"{DOMAIN}/mode"
"""Label of a namespace, which opts it in, and annotation of a pod, which overrides the label."""
MIN_CORES, MAX_CORES = f"{DOMAIN}/min-allowed-cores", f"{DOMAIN}/max-allowed-cores"
MIN_MEMORY, MAX_MEMORY = f"{DOMAIN}/min-allowed-memory", f"{DOMAIN}/max-allowed-memory"
"""Bounds of a grant, for the whole pod."""
QOS_QUERY = f"{DOMAIN}/qos-query"
"""Name of a query that the operator of the collector has defined."""
QOS_OBJECTIVE = f"{DOMAIN}/qos-objective"
"""The objective is met while the value of the query is at most this number."""

# Annotations that the webhook sets on a pod.
REQUESTED_CORES, REQUESTED_MEMORY = f"{DOMAIN}/requested-cores", f"{DOMAIN}/requested-memory"
"""What the author of the pod requested."""
RECOMMENDED_CORES, RECOMMENDED_MEMORY = f"{DOMAIN}/recommended-cores", f"{DOMAIN}/recommended-memory"
BACKEND = f"{DOMAIN}/backend"
STATUS = f"{DOMAIN}/status"
ALLOCATION_ID = f"{DOMAIN}/allocation-id"
"""Allocation of the agent that was asked."""
AGENT = f"{DOMAIN}/agent"
"""Which agent was asked: node or recommender."""
DECIDED_BY = f"{DOMAIN}/decided-by"
"""Who decided, the rule or the policy, and why."""
POLICY_VERSION = f"{DOMAIN}/policy-version"
GRANTED_CORES = f"{DOMAIN}/granted-cores"
GRANTED_MEMORY = f"{DOMAIN}/granted-memory"

GPU = "nvidia.com/gpu"
GPU_CORES = "nvidia.com/gpucores"
GPU_MEMORY = "nvidia.com/gpumem"
GPU_MEMORY_PERCENTAGE = "nvidia.com/gpumem-percentage"

# Annotations that the KAI scheduler counts.
KAI_FRACTION = "gpu-fraction"
KAI_MEMORY = "gpu-memory"
KAI_CONTAINER = "gpu-fraction-container-name"

Mode = Literal["Off", "Initial"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""Off: recommend only. Initial: grant when the pod is created."""

PROTECTED_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})


def cores_key(container: str) -> str:
    """Annotation that the cores variable of a container reads. Container names are DNS labels, so the key is valid."""
    return f"cores.{DOMAIN}/{container}"


def memory_key(container: str) -> str:
    return f"memory.{DOMAIN}/{container}"


@dataclass(frozen=True)
class Backend:
    """What enforces a share of a GPU: names and formats of the two variables that the CUDA libraries read."""

    name: str
    cores_variable: str
    memory_variable: str
    memory_format: str
    scheduler: Literal["limits", "kai"] | None = None
    """What the scheduler counts: HAMi's limits, KAI's annotations. With None, limits are set where they exist."""

    def cores_value(self, cores: float) -> str:
        """Whole percent, rounded down, at least 1: the libraries treat 0 as "no limit" or refuse it."""
        return str(max(1, int(cores)))

    def memory_value(self, memory_mb: float) -> str:
        return self.memory_format.format(mb=max(1, int(memory_mb)))

    @property
    def variables(self) -> tuple[str, str]:
        return self.cores_variable, self.memory_variable


MPS_VARIABLES = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0={mb}M")
"""Variables of the NVIDIA Multi-Process Service. "0=3000M" limits the first visible device."""

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("mps", *MPS_VARIABLES),
        # HAMi-core, which HAMi preloads into containers. The index is that of the first visible device.
        Backend("hami", "CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "{mb}m", "limits"),
        # KAI does not enforce shares; MPS does where it runs.
        Backend("kai", *MPS_VARIABLES, "kai"),
    )
}
