"""Models, clusters and what a layer costs on them: the numbers behind the simulator."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

MAX_GPUS = 4096  # visits are counted for each pair of GPUs


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a mixture-of-experts model, and how long its expert kernel takes on one GPU."""

    name: str
    n_layers: int
    """MoE layers (dense layers are not counted)."""
    n_experts: int
    """Routed experts in each layer."""
    top_k: int
    """Experts a token uses in each layer."""
    hidden: int
    """Width of a token's activation."""
    intermediate: int
    """Width inside an expert."""
    weight_bytes: float = 2.0
    """Bytes of one weight: 2 for bf16, 1 for fp8, about 0.53 for mxfp4 with scales."""
    dispatch_bytes: float = 2.0
    """Bytes of one activation element on its way to an expert (1 where the engine quantises to fp8 first)."""
    combine_bytes: float = 2.0
    """Bytes of one activation element on its way back."""
    kernel_start_us: float = 0.0
    """Start of the expert kernel. If any of the three constants is given, they replace the measured ones."""
    kernel_expert_us: float = 0.0
    """Each expert with at least one token adds this."""
    kernel_pair_us: float = 0.0
    """Each token-expert pair adds this."""
    n_groups: int = 1
    """Expert groups of the router, which hierarchical EPLB keeps on one node."""
    n_dense: int = 0
    """Dense layers before the first MoE layer: engines count them too, so that MoE layer i is their layer n_dense + i."""

    def __post_init__(self) -> None:
        for key in ("n_layers", "n_experts", "top_k", "hidden", "intermediate", "n_groups"):
            if getattr(self, key) < 1:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected at least 1")
        if self.n_dense < 0:
            raise ValueError(f"model {self.name!r}: n_dense is {self.n_dense}: expected 0 or more")
        for key in ("weight_bytes", "dispatch_bytes", "combine_bytes"):
            if not getattr(self, key) > 0:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected more than 0")
        for key in ("kernel_start_us", "kernel_expert_us", "kernel_pair_us"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected 0 or more")
        if self.top_k > self.n_experts:
            raise ValueError(f"model {self.name!r}: top_k is {self.top_k}, but there are only {self.n_experts} experts")
        if self.n_experts % self.n_groups:
            raise ValueError(f"model {self.name!r}: {self.n_experts} experts do not divide into {self.n_groups} groups")

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights in one layer: gate, up and down projections."""
        return 3 * self.hidden * self.intermediate * self.weight_bytes


@dataclass(frozen=True)
class ClusterSpec:
    """GPUs, the links between them, and how many experts of a layer each GPU can hold."""

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

    def __post_init__(self) -> None:
        for key in ("n_nodes", "gpus_per_node"):
            if getattr(self, key) < 1:
                raise ValueError(f"cluster {self.name!r}: {key} is {getattr(self, key)}: expected at least 1")
        if self.n_gpus > MAX_GPUS:
            raise ValueError(f"cluster {self.name!r} has {self.n_gpus} GPUs: the simulator takes at most {MAX_GPUS}")
        if self.slots_per_gpu is not None and self.slots_per_gpu < 1:
            raise ValueError(f"cluster {self.name!r}: slots_per_gpu is {self.slots_per_gpu}: expected at least 1")
        for key in ("intra_gb_s", "inter_gb_s"):
            if not getattr(self, key) > 0:
                raise ValueError(
                    f"cluster {self.name!r}: {key} is {getattr(self, key)}: a bandwidth must be more than 0 GB/s"
                )
        for key in ("intra_latency_us", "inter_latency_us"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"cluster {self.name!r}: {key} is {getattr(self, key)}: expected 0 µs or more")

    @classmethod
    def from_gpus(cls, name: str, n_gpus: int, n_nodes: int, **options: Any) -> ClusterSpec:
        """A cluster of ``n_gpus`` on ``n_nodes`` nodes of equal size."""
        if n_nodes < 1 or n_gpus % n_nodes:
            raise ValueError(
                f"cluster {name!r}: {n_gpus} GPUs do not divide over {n_nodes} nodes: every node has the same number"
            )
        return cls(name, n_nodes, n_gpus // n_nodes, **options)

    @property
    def n_gpus(self) -> int:
        return self.n_nodes * self.gpus_per_node

    def slots_for(self, n_experts: int) -> int:
        """Slots a GPU and layer for a model with ``n_experts``; refuses a cluster that cannot hold them all."""
        if self.slots_per_gpu is None:
            needed = ceil(n_experts / self.n_gpus)
            return min(max(needed + 1, int(needed * 1.25)), n_experts)
        if self.slots_per_gpu * self.n_gpus < n_experts:
            raise ValueError(
                f"cluster {self.name!r} has too few slots: {self.n_gpus} GPUs × {self.slots_per_gpu} slots = "
                f"{self.n_gpus * self.slots_per_gpu} for {n_experts} experts; at least {ceil(n_experts / self.n_gpus)} slots a GPU are needed"
            )
        # An expert never lies twice on a GPU, so more slots than experts would stay empty.
        return min(self.slots_per_gpu, n_experts)


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("mixtral-8x7b", 32, 8, 2, 4096, 14336),
        ModelSpec("qwen3-30b-a3b", 48, 128, 8, 2048, 768),
        ModelSpec("qwen3-235b-a22b", 94, 128, 8, 4096, 1536),
        ModelSpec("deepseek-v2-lite", 26, 64, 6, 2048, 1408, n_dense=1),
        ModelSpec("deepseek-v3", 58, 256, 8, 7168, 2048, weight_bytes=1, dispatch_bytes=1, n_groups=8, n_dense=3),
        ModelSpec("kimi-k2", 60, 384, 8, 7168, 2048, weight_bytes=1, dispatch_bytes=1, n_dense=1),
        ModelSpec("gpt-oss-20b", 24, 32, 4, 2880, 2880, weight_bytes=0.53125),
        ModelSpec("gpt-oss-120b", 36, 128, 4, 2880, 2880, weight_bytes=0.53125),
        ModelSpec("olmoe-1b-7b", 16, 64, 8, 2048, 1024),
        # The model of the bundled traces (clustergym.traces.tiny_moe) as if it had DeepSeek-V2-Lite's widths: at its own (96 and 16)
        # every placement would cost the same, because latency and kernel start are all that there is.
        ModelSpec("tiny-moe", 4, 64, 4, 2048, 1408),
    )
}  # fmt: skip

# GB/s of a GPU to its own node and to other nodes.
LINKS = {"h800": (160.0, 40.0), "h100": (450.0, 50.0)}

CLUSTERS: dict[str, ClusterSpec] = {
    spec.name: spec
    for gpu, links in LINKS.items()
    for nodes, gpus in ((1, 8), (2, 4), (2, 8), (4, 4), (4, 8))
    for spec in (ClusterSpec(f"{gpu}-{nodes}x{gpus}", nodes, gpus, None, *links),)
}


def get_model(name: str | ModelSpec) -> ModelSpec:
    """A model preset by name (a spec is returned as it is)."""
    if isinstance(name, ModelSpec):
        return name
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; the presets are: {', '.join(MODELS)}")
    return MODELS[name]


def get_cluster(name: str | ClusterSpec, **overrides: Any) -> ClusterSpec:
    """A cluster by name, with fields replaced where given (``slots_per_gpu=6``).

    Beside the presets any ``gpu-NODESxGPUS`` is a name: ``h800-3x8`` are three nodes of eight.
    """
    if not isinstance(name, ClusterSpec):
        shape = re.fullmatch(rf"({'|'.join(LINKS)})-([1-9][0-9]{{0,2}})x([1-9][0-9]{{0,2}})", name, re.ASCII)
        if shape is None:
            raise ValueError(
                f"unknown cluster {name!r}; the presets are: {', '.join(CLUSTERS)}; other shapes are named "
                f"GPU-NODESxGPUS with GPU one of {', '.join(LINKS)}, as in h800-3x8"
            )
        name = ClusterSpec(name, int(shape[2]), int(shape[3]), None, *LINKS[shape[1]])
    unknown = set(overrides) - {f.name for f in fields(ClusterSpec)}
    if unknown:
        raise ValueError(
            f"a cluster has no field {sorted(unknown)[0]!r}; it has {', '.join(f.name for f in fields(ClusterSpec))}"
        )
    return replace(name, **overrides) if overrides else name
