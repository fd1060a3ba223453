"""Sizes of a mixture-of-experts model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a mixture-of-experts model, and how long its expert kernel takes on one H100."""

    name: str
    n_layers: int
    """MoE layers, without dense and MTP layers."""
    n_experts: int
    """Routed experts in each layer."""
    top_k: int
    """Experts that a token uses in each layer."""
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
    """Start of the expert kernel on an H100. If one of the three constants is given, they replace the measured ones."""
    kernel_expert_us: float = 0.0
    """Each expert with at least one token adds this."""
    kernel_pair_us: float = 0.0
    """Each token-expert pair adds this."""
    n_groups: int = 1
    """Expert groups of the router, which hierarchical EPLB keeps on one node."""
    n_dense: int = 0
    """Dense layers before the first MoE layer."""
    group_limit: int = 0
    """Groups that the experts of one token may come from. 0: no limit."""
    layers: tuple[int, ...] = ()
    """Global indices of the MoE layers, if dense layers lie between them. Empty: the ``n_layers`` after the dense."""
    n_hidden_layers: int = 0
    """Layers that engines count, dense ones included, MTP layers not. 0: no dense layer follows the last MoE layer."""
    n_mtp: int = 0
    """Multi-token prediction layers. They follow the other layers and have experts of the same sizes."""
    n_shared: int = 0
    """Shared experts, which every token uses. Every GPU has them, so they are not placed."""
    matrices: int = 3
    """Weight matrices of an expert: gate, up and down projections, or 2 without a gate."""
    kv_bytes: float = 0.0
    """Bytes of KV cache per token, all layers together. 0: unknown."""
    architecture: str = ""
    """Class of the model in Transformers and the engines, as in ``config.json``. Empty: unknown."""
    source: str = field(default="", compare=False)
    """Where the sizes come from."""

    def __post_init__(self) -> None:
        for key in ("n_layers", "n_experts", "top_k", "hidden", "intermediate", "n_groups", "matrices"):
            if getattr(self, key) < 1:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected at least 1")
        for key in ("n_dense", "group_limit", "n_hidden_layers", "n_mtp", "n_shared"):
            if getattr(self, key) < 0:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected 0 or more")
        for key in ("weight_bytes", "dispatch_bytes", "combine_bytes"):
            if not getattr(self, key) > 0:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected more than 0")
        for key in ("kernel_start_us", "kernel_expert_us", "kernel_pair_us", "kv_bytes"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"model {self.name!r}: {key} is {getattr(self, key)}: expected 0 or more")
        if self.top_k > self.n_experts:
            raise ValueError(f"model {self.name!r}: top_k is {self.top_k}, but there are only {self.n_experts} experts")
        if self.n_experts % self.n_groups:
            raise ValueError(f"model {self.name!r}: {self.n_experts} experts do not divide into {self.n_groups} groups")
        self._check_group_limit()
        self._check_layers()

    def _check_group_limit(self) -> None:
        if self.group_limit > self.n_groups:
            raise ValueError(
                f"model {self.name!r}: group_limit is {self.group_limit}, but there are {self.n_groups} groups"
            )
        if self.group_limit and self.group_limit * (self.n_experts // self.n_groups) < self.top_k:
            raise ValueError(
                f"model {self.name!r}: {self.group_limit} groups of {self.n_experts // self.n_groups} experts are too "
                f"few for top-{self.top_k}"
            )

    def _check_layers(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.layers and (len(self.layers) != self.n_layers or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(
                f"model {self.name!r}: layers has {len(self.layers)} entries: expected {self.n_layers} distinct "
                "indices in ascending order"
            )
        if self.layers and self.layers[0] < 0:
            raise ValueError(f"model {self.name!r}: layer {self.layers[0]} given: indices are 0 or more")
        if self.n_hidden_layers and self.n_hidden_layers <= self.layer_ids[-1]:
            raise ValueError(
                f"model {self.name!r}: n_hidden_layers is {self.n_hidden_layers}, but layer {self.layer_ids[-1]} is an "
                "MoE layer"
            )

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights in one layer."""
        return self.matrices * self.hidden * self.intermediate * self.weight_bytes

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global index of each MoE layer, as engines count layers."""
        return self.layers or tuple(range(self.n_dense, self.n_dense + self.n_layers))

    @property
    def total_layers(self) -> int:
        """Layers that engines count, dense ones included, MTP layers not."""
        return self.n_hidden_layers or self.layer_ids[-1] + 1

    @property
    def mtp_layer_ids(self) -> tuple[int, ...]:
        """Global index of each MTP layer."""
        return tuple(range(self.total_layers, self.total_layers + self.n_mtp))
