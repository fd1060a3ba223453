"""Sizes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf

MAX_GPUS = 32_767
"""A GPU is a 16-bit integer in the simulator."""


@dataclass(frozen=True)
class ClusterSpec:
    """GPUs, the links between them, and how many experts of a layer each GPU can hold.

    A node is a group of GPUs with fast links: a server, or a rack whose GPUs are all joined by NVLink (GB200 NVL72).
    """

    name: str
    n_nodes: int
    gpus_per_node: int
    slots_per_gpu: int | None = None
    """Experts of one layer that a GPU holds; None gives about a quarter more than needed, and at least one spare."""
    intra_gb_s: float = 160.0
    """Bandwidth of a GPU to its own node, GB/s per direction."""
    inter_gb_s: float = 40.0
    """Bandwidth of a GPU to other nodes, GB/s per direction."""
    intra_latency_us: float = 0.0
    """Added to the start of every exchange, µs."""
    inter_latency_us: float = 10.0
    """Fixed cost of an exchange between nodes (not paid on one node)."""
    memory_gb: float = 80.0
    """Memory of a GPU, GB."""
    hbm_gb_s: float = 3350.0
    """Bandwidth of the memory, GB/s. An expert kernel reads weights faster or slower than on an H100 by this ratio."""
    bf16_tflops: float = 989.0
    """Dense bf16 peak, TFLOPS. An expert kernel computes faster or slower than on an H100 by this ratio."""
    link_gb_s: tuple[tuple[float, ...], ...] = ()
    """(G, G) measured bandwidth from each GPU (row) to each other one, GB/s; the diagonal is ignored. Empty: all links
    inside a node are equal, and all between nodes."""
    source: str = field(default="", compare=False)
    """Where the figures come from."""

    def __post_init__(self) -> None:
        for key in ("n_nodes", "gpus_per_node"):
            if getattr(self, key) < 1:
                raise ValueError(f"cluster {self.name!r}: {key} is {getattr(self, key)}: expected at least 1")
        if self.n_gpus > MAX_GPUS:
            raise ValueError(f"cluster {self.name!r} has {self.n_gpus} GPUs: the simulator takes at most {MAX_GPUS}")
        if self.slots_per_gpu is not None and self.slots_per_gpu < 1:
            raise ValueError(f"cluster {self.name!r}: slots_per_gpu is {self.slots_per_gpu}: expected at least 1")
        for key in ("intra_gb_s", "inter_gb_s", "hbm_gb_s"):
            if not getattr(self, key) > 0:
                raise ValueError(
                    f"cluster {self.name!r}: {key} is {getattr(self, key)}: a bandwidth must be more than 0 GB/s"
                )
        object.__setattr__(self, "link_gb_s", tuple(tuple(map(float, row)) for row in self.link_gb_s))
        if self.link_gb_s:
            self._check_links()
        for key in ("memory_gb", "bf16_tflops"):
            if not getattr(self, key) > 0:
                raise ValueError(f"cluster {self.name!r}: {key} is {getattr(self, key)}: expected more than 0")
        for key in ("intra_latency_us", "inter_latency_us"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"cluster {self.name!r}: {key} is {getattr(self, key)}: expected 0 µs or more")

    def _check_links(self) -> None:
        if {len(self.link_gb_s), *map(len, self.link_gb_s)} != {self.n_gpus}:
            raise ValueError(f"cluster {self.name!r}: link_gb_s is not {self.n_gpus} × {self.n_gpus}: one row per GPU")
        for i, row in enumerate(self.link_gb_s):
            for j, value in enumerate(row):
                if i != j and not 0 < value < inf:
                    raise ValueError(
                        f"cluster {self.name!r}: link_gb_s from GPU {i} to GPU {j} is {value}: expected more than 0"
                    )

    @property
    def n_gpus(self) -> int:
        return self.n_nodes * self.gpus_per_node

    def slots_for(self, n_experts: int) -> int:
        """Slots per GPU and layer for a model with ``n_experts``; refuses a cluster that cannot hold them all."""
        if self.slots_per_gpu is None:
            needed = ceil(n_experts / self.n_gpus)
            return min(max(needed + 1, int(needed * 1.25)), n_experts)
        if self.slots_per_gpu * self.n_gpus < n_experts:
            raise ValueError(
                f"cluster {self.name!r} has too few slots: {self.n_gpus} GPUs × {self.slots_per_gpu} slots = "
                f"{self.n_gpus * self.slots_per_gpu} for {n_experts} experts; "
                f"at least {ceil(n_experts / self.n_gpus)} slots per GPU are needed"
            )
        # An expert never lies twice on a GPU, so more slots than experts would stay empty.
        return min(self.slots_per_gpu, n_experts)
