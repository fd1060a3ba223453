"""Random tiny placement problems, and legal placements for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustergym.moe_placement import ClusterSpec, ModelSpec, Placement, Simulator, Window


@dataclass(frozen=True)
class Instance:
    model: ModelSpec
    cluster: ClusterSpec
    window: Window
    placement: Placement
    before: Placement
    passes: int

    def simulator(self, comm: str) -> Simulator:
        return Simulator(self.model, self.cluster, comm, self.passes)


def random_placement(
    rng: np.random.Generator, n_layers: int, n_gpus: int, n_slots: int, n_experts: int, fill: float
) -> Placement:
    """Every expert in a random slot, then replicas in about ``fill`` of the slots that are left."""
    placement = np.full((n_layers, n_gpus, n_slots), -1, np.int16)
    for layer in placement:
        cells = rng.permutation(n_gpus * n_slots)
        layer.ravel()[cells[:n_experts]] = rng.permutation(n_experts)
        for cell in cells[n_experts:]:
            absent = np.setdiff1d(np.arange(n_experts), layer[cell // n_slots])
            if len(absent) and rng.random() < fill:
                layer.ravel()[cell] = rng.choice(absent)
    return placement


def random_instance(
    seed: int,
    *,
    nodes: int,
    per_node: int,
    n_experts: int,
    top_k: int,
    tokens: int,
    layers: int,
    spare_slots: int,
    fill: float = 0.6,
    pads: float = 0.2,
) -> Instance:
    rng = np.random.default_rng(seed)
    n_gpus, top_k = nodes * per_node, min(top_k, n_experts)
    n_slots = min(-(-n_experts // n_gpus) + spare_slots, n_experts)
    numbers = rng.uniform(0.1, 50, 10)
    model = ModelSpec("random", layers, n_experts, top_k, int(rng.integers(1, 5000)), int(rng.integers(1, 500)),
        weight_bytes=numbers[0], dispatch_bytes=numbers[1], combine_bytes=numbers[2],
        kernel_start_us=numbers[3], kernel_expert_us=numbers[4], kernel_pair_us=numbers[5],
    )  # fmt: skip
    cluster = ClusterSpec("random", nodes, per_node, n_slots, *numbers[6:10])
    n_rows = 2 * tokens
    experts = np.argsort(rng.random((layers, n_rows, n_experts)), axis=2)[:, :, :top_k].astype(np.int16)
    experts[rng.random(experts.shape) < pads] = -1
    window = Window(
        np.ascontiguousarray(experts),
        rng.integers(0, n_rows, tokens).astype(np.int32),
        rng.integers(0, n_gpus, tokens).astype(np.int16),
    )
    placements = [random_placement(rng, layers, n_gpus, n_slots, n_experts, fill) for _ in range(2)]
    return Instance(model, cluster, window, *placements, passes=int(rng.integers(1, 200)))
