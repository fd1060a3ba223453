"""Names of labels, annotations, environment variables and resources that users see."""

from __future__ import annotations

from dataclasses import dataclass

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

# Annotations that the webhooks set on a pod.
BACKEND = f"{DOMAIN}/backend"
STATUS = f"{DOMAIN}/status"
ALLOCATION_ID = f"{DOMAIN}/allocation-id"
POLICY_VERSION = f"{DOMAIN}/policy-version"
GRANTED_CORES = f"{DOMAIN}/granted-cores"
GRANTED_MEMORY = f"{DOMAIN}/granted-memory"

GPU = "nvidia.com/gpu"
GPU_CORES = "nvidia.com/gpucores"
GPU_MEMORY = "nvidia.com/gpumem"

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

    def cores_value(self, cores: float) -> str:
        """Whole percent, rounded down, at least 1: the libraries treat 0 as "no limit" or refuse it."""
        return str(max(1, int(cores)))

    def memory_value(self, memory_mb: float) -> str:
        return self.memory_format.format(mb=max(1, int(memory_mb)))

    @property
    def variables(self) -> tuple[str, str]:
        return self.cores_variable, self.memory_variable


BACKENDS = {
    backend.name: backend
    for backend in (
        # NVIDIA Multi-Process Service. "0=3000M" limits the first visible device.
        Backend("mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0={mb}M"),
        # HAMi-core, which HAMi preloads into containers.
        Backend("hami", "CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT", "{mb}m"),
    )
}
