"""Models, clusters and what a layer costs on them: the numbers behind the simulator."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# What the fits of measured H100 expert kernels share, used for models that were not measured: time of one more active
# expert = 0.92 of the time that reading its weights takes at the reached HBM bandwidth (3350 GB/s × 0.8), time of one more token-expert
# pair = its FLOPs at 0.45 of the bf16 peak (fp8 twice that), and a fixed start.
_HBM_BYTES_PER_US = 3350e3 * 0.8 / 0.92
_FLOPS_PER_US = {1: 0.45 * 1978e6, 2: 0.45 * 989e6}
_KERNEL_START_US = 40.0
MAX_GPUS = 254  # a GPU is a byte in the simulator, and one value marks a pad


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
    """a of a + m·active_experts + c·pairs; 0 derives a, m and c from the sizes."""
    kernel_expert_us: float = 0.0
    """m: each expert with at least one token adds this."""
    kernel_pair_us: float = 0.0
    """c: each token-expert pair adds this."""
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
        if self.kernel_start_us == self.kernel_expert_us == self.kernel_pair_us == 0:
            flops = _FLOPS_PER_US[1 if self.weight_bytes == 1 else 2]
            object.__setattr__(self, "kernel_start_us", _KERNEL_START_US)
            object.__setattr__(self, "kernel_expert_us", self.expert_bytes / _HBM_BYTES_PER_US)
            object.__setattr__(self, "kernel_pair_us", 6 * self.hidden * self.intermediate / flops)

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
    intra_latency_us: float = 5.0
    """Fixed cost of an exchange inside the nodes."""
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
        ModelSpec("mixtral-8x7b", 32, 8, 2, 4096, 14336, kernel_start_us=93, kernel_expert_us=97.7, kernel_pair_us=0.67),
        ModelSpec("qwen3-30b-a3b", 48, 128, 8, 2048, 768, kernel_start_us=37.5, kernel_expert_us=3.23, kernel_pair_us=0.0235),
        ModelSpec("qwen3-235b-a22b", 94, 128, 8, 4096, 1536, kernel_start_us=44.7, kernel_expert_us=12.8, kernel_pair_us=0.0676),
        ModelSpec("deepseek-v2-lite", 26, 64, 6, 2048, 1408, n_dense=1),
        ModelSpec("deepseek-v3", 58, 256, 8, 7168, 2048, weight_bytes=1, dispatch_bytes=1, n_groups=8, n_dense=3),
        ModelSpec("kimi-k2", 60, 384, 8, 7168, 2048, weight_bytes=1, dispatch_bytes=1, n_dense=1),
        ModelSpec(
            "gpt-oss-20b", 24, 32, 4, 2880, 2880, weight_bytes=0.53125,
            kernel_start_us=78, kernel_expert_us=3.38, kernel_pair_us=0.084,
        ),
        # The same expert as gpt-oss-20b's, so the same kernel constants.
        ModelSpec(
            "gpt-oss-120b", 36, 128, 4, 2880, 2880, weight_bytes=0.53125,
            kernel_start_us=78, kernel_expert_us=3.38, kernel_pair_us=0.084,
        ),
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


class Costs(NamedTuple):
    """Everything that turns counts into µs."""

    dispatch_us: float
    """Start of the dispatch exchange"""
    dispatch_intra_us: float
    """One copy of an activation to a GPU of the same node"""
    dispatch_inter_us: float
    """One copy to another node"""
    combine_us: float
    """Start of the combine exchange"""
    combine_intra_us: float
    combine_inter_us: float
    kernel_us: float
    """Start of the expert kernel"""
    expert_us: float
    """One more active expert"""
    pair_us: float
    """One more token-expert pair"""
    receive_intra_us: float
    """Receiving one expert's weights from the same node, spread over the passes of a window"""
    receive_inter_us: float
    """Receiving one expert's weights from another node, spread over the passes of a window"""

    @classmethod
    def of(cls, model: ModelSpec, cluster: ClusterSpec, passes_per_window: int) -> Costs:
        if passes_per_window < 1:
            raise ValueError(f"passes_per_window is {passes_per_window}: expected at least 1")
        intra_us_per_byte, inter_us_per_byte = 1e-3 / cluster.intra_gb_s, 1e-3 / cluster.inter_gb_s
        latency_us = cluster.intra_latency_us * (cluster.gpus_per_node > 1) + cluster.inter_latency_us * (
            cluster.n_nodes > 1
        )
        values = (
            latency_us,
            model.hidden * model.dispatch_bytes * intra_us_per_byte,
            model.hidden * model.dispatch_bytes * inter_us_per_byte,
            latency_us,
            model.hidden * model.combine_bytes * intra_us_per_byte,
            model.hidden * model.combine_bytes * inter_us_per_byte,
            model.kernel_start_us,
            model.kernel_expert_us,
            model.kernel_pair_us,
            model.expert_bytes * intra_us_per_byte / passes_per_window,
            model.expert_bytes * inter_us_per_byte / passes_per_window,
        )
        return cls(*map(float, values))

    def weigh_tokens(self, scale: float) -> Costs:
        """The same costs with each token weighed by ``scale``; latencies, active experts and migration are unchanged."""
        per_token = ("dispatch_intra_us", "dispatch_inter_us", "combine_intra_us", "combine_inter_us", "pair_us")
        return self._replace(**{name: getattr(self, name) * scale for name in per_token})


class Network(NamedTuple):
    """The topology as the kernels read it, and how the counts of a token's experts are packed into integers.

    How many of a token's experts run on each GPU is packed into a few 63-bit words, one bit field per GPU. Changing one
    count, and testing a GPU or a whole node for zero, then takes a handful of instructions for any K. The fields of a node
    share one word, or fill words of their own. Lookup tables replace integer division, which would dominate the run time.
    """

    node_of: npt.NDArray[np.int64]
    """(G,) node of each GPU"""
    word_of: npt.NDArray[np.int64]
    """(G,) word that holds the GPU's field"""
    shift_of: npt.NDArray[np.int64]
    """(G,) lowest bit of the GPU's field in that word"""
    node_mask: npt.NDArray[np.int64]
    """(G,) bits of all fields of the GPU's node, if they lie in one word"""
    gpus_per_node: int
    field_bits: int
    """Width of a field: enough to count K"""
    words_per_node: int
    """Words over which the fields of one node are spread"""
    n_words: int
    mode: int
    """How tokens travel: MODE_DEDUP, MODE_PER_EXPERT or MODE_STAY"""

    @classmethod
    def of(cls, cluster: ClusterSpec, top_k: int, mode: int) -> Network:
        field_bits, per_node = top_k.bit_length(), cluster.gpus_per_node
        fields_per_word = 63 // field_bits  # 63, so that a word is never negative
        gpu = np.arange(cluster.n_gpus, dtype=np.int64)
        node, rank = gpu // per_node, gpu % per_node
        if per_node <= fields_per_word:
            nodes_per_word = fields_per_word // per_node
            word, field = node // nodes_per_word, node % nodes_per_word * per_node + rank
            mask = ((1 << per_node * field_bits) - 1) << (field - rank) * field_bits
        else:
            word, field = node * ceil(per_node / fields_per_word) + rank // fields_per_word, rank % fields_per_word
            mask = np.full(len(gpu), -1)
        return cls(
            node_of=node,
            word_of=word,
            shift_of=field * field_bits,
            node_mask=mask,
            gpus_per_node=per_node,
            field_bits=field_bits,
            words_per_node=int(word[per_node - 1] - word[0]) + 1,
            n_words=int(word[-1]) + 1,
            mode=mode,
        )
