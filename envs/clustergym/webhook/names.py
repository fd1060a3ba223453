"""Every name that the webhooks share with users: labels, annotations, variables, resources."""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "clustergym.io"

LABEL = f"{DOMAIN}/allocate"
"""Opt-in: a pod with this label set to "true" is right-sized; every other pod is left alone."""

# What a user may say on a pod.
CORES = f"{DOMAIN}/cores"
"""Requested share of one GPU's streaming multiprocessors, %, for the whole pod."""
MEMORY = f"{DOMAIN}/memory"
"""Requested GPU memory, MB, for the whole pod."""
QOS_CLASS = f"{DOMAIN}/qos-class"
"""best-effort or latency-sensitive (the default)."""
OWNER = f"{DOMAIN}/owner"
"""What the agent's memory of earlier pods goes by; by default the workload that made the pod."""
CONTAINERS = f"{DOMAIN}/containers"
"""Comma-separated containers to manage; by default those that ask for a GPU."""

# What the webhooks say on a pod.
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
    """The annotation that a container's cores variable reads. A container's name is a DNS label, so it fits as a key's name."""
    return f"cores.{DOMAIN}/{container}"


def memory_key(container: str) -> str:
    return f"memory.{DOMAIN}/{container}"


@dataclass(frozen=True)
class Backend:
    """How a share of a GPU is enforced: two variables that the container's CUDA libraries read, and how they are written."""

    name: str
    cores_variable: str
    memory_variable: str
    memory_format: str

    def cores_value(self, cores: float) -> str:
        """Whole percent, rounded down, never 0: the libraries read 0 as "no limit" or refuse it."""
        return str(max(1, int(cores)))

    def memory_value(self, memory_mb: float) -> str:
        return self.memory_format.format(mb=max(1, int(memory_mb)))

    @property
    def variables(self) -> tuple[str, str]:
        return self.cores_variable, self.memory_variable


BACKENDS = {
    backend.name: backend
    for backend in (
        # NVIDIA's Multi-Process Service; "0=3000M" limits the first visible device.
        Backend("mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0={mb}M"),
        # HAMi-core, the library that HAMi preloads into containers.
        Backend("hami", "CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT", "{mb}m"),
    )
}
