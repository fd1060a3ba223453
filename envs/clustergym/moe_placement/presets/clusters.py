"""Clusters by name: GPU types with their published figures, and any number of nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.moe_placement.presets.spec_files import is_spec_file, read_cluster


@dataclass(frozen=True)
class GpuType:
    """Published figures of a GPU and of the nodes that it is sold in."""

    name: str
    intra_gb_s: float
    """Bandwidth to its own node, GB/s per direction."""
    inter_gb_s: float
    """Bandwidth to other nodes, GB/s per direction."""
    memory_gb: float
    hbm_gb_s: float
    bf16_tflops: float
    """Dense peak."""
    source: str

    def cluster(self, name: str, n_nodes: int, gpus_per_node: int) -> ClusterSpec:
        return ClusterSpec(
            name,
            n_nodes,
            gpus_per_node,
            intra_gb_s=self.intra_gb_s,
            inter_gb_s=self.inter_gb_s,
            memory_gb=self.memory_gb,
            hbm_gb_s=self.hbm_gb_s,
            bf16_tflops=self.bf16_tflops,
            source=self.source,
        )


GPUS: dict[str, GpuType] = {
    gpu.name: gpu
    for gpu in (
        GpuType(
            "h800", 160, 40, 80, 3350, 989,
            "NVIDIA H800 SXM; links as DeepEP reaches them: 153–158 GB/s on a node, 43–58 GB/s between nodes",
        ),
        GpuType(
            "h100", 450, 50, 80, 3350, 989,
            "NVIDIA H100 SXM data sheet; NVLink 4 (900 GB/s both ways), 400 Gb/s ConnectX-7 per GPU",
        ),
        GpuType(
            "h200", 450, 50, 141, 4800, 989,
            "NVIDIA H200 SXM data sheet; NVLink 4 (900 GB/s both ways), 400 Gb/s ConnectX-7 per GPU",
        ),
        GpuType(
            "h20", 450, 50, 96, 4000, 148,
            "published H20 figures: 96 GB at 4.0 TB/s, 148 TFLOPS, NVLink 4 (900 GB/s both ways); 400 Gb/s per GPU",
        ),
        GpuType(
            "b200", 900, 50, 180, 8000, 2250,
            "NVIDIA DGX B200 data sheet: 1440 GB at 64 TB/s on 8 GPUs, NVLink 5 (1.8 TB/s both ways), "
            "400 Gb/s ConnectX-7 per GPU",
        ),
        GpuType(
            "gb200", 900, 50, 186, 8000, 2500,
            "NVIDIA GB200 NVL72 data sheet: 13.4 TB at 576 TB/s on 72 GPUs, NVLink 5 (130 TB/s per rack); a node is a "
            "rack, 400 Gb/s per GPU between racks",
        ),
        GpuType(
            "mi300x", 448, 50, 192, 5300, 1307,
            "AMD Instinct MI300X data sheet: 7 Infinity Fabric links of 128 GB/s both ways; 400 Gb/s per GPU",
        ),
        GpuType(
            "ascend910c", 392, 50, 128, 3200, 752,
            "CloudMatrix384 paper (arXiv 2506.12708): 392 GB/s per NPU on the UB plane, which joins up to 384 NPUs "
            "into one node, 400 Gb/s per NPU between supernodes",
        ),
    )
}  # fmt: skip
"""GPU types by name."""

_SERVERS = ((1, 8), (2, 4), (2, 8), (4, 4), (4, 8))
_SHAPES = dict.fromkeys(GPUS, ((1, 8), (2, 8), (4, 8))) | {
    "h800": _SERVERS,
    "h100": _SERVERS,
    "gb200": ((1, 72), (2, 72)),
    "ascend910c": ((1, 16), (1, 64), (1, 384)),
}
_NAMES = {"gb200-nvl72": "gb200-1x72", "cloudmatrix384": "ascend910c-1x384"}
"""Product name → name of the cluster."""


def _of_shape(name: str) -> ClusterSpec | None:
    """The cluster GPU-NODESxGPUS, or None if the name has another form."""
    shape = re.fullmatch(
        rf"({'|'.join(GPUS)})-([1-9][0-9]{{0,4}})x([1-9][0-9]{{0,4}})", _NAMES.get(name, name), re.ASCII
    )
    return None if shape is None else GPUS[shape[1]].cluster(name, int(shape[2]), int(shape[3]))


def _presets() -> dict[str, ClusterSpec]:
    names = [f"{gpu}-{nodes}x{gpus}" for gpu, shapes in _SHAPES.items() for nodes, gpus in shapes]
    return {name: spec for name in [*names, *_NAMES] if (spec := _of_shape(name)) is not None}


CLUSTERS: dict[str, ClusterSpec] = _presets()


def get_cluster(name: str | ClusterSpec, **overrides: Any) -> ClusterSpec:
    """A cluster by name or from a YAML file, with fields replaced where given (``slots_per_gpu=6``).

    Beside the presets any ``GPU-NODESxGPUS`` is a name: ``h800-3x8`` is three nodes of eight.
    """
    if not isinstance(name, ClusterSpec):
        spec = read_cluster(Path(name), _of_gpu) if is_spec_file(name) else _of_shape(name)
        if spec is None:
            raise ValueError(
                f"unknown cluster {name!r}; the presets are: {', '.join(CLUSTERS)}; other shapes are named "
                f"GPU-NODESxGPUS with GPU one of {', '.join(GPUS)}, as in h800-3x8; or give a YAML file"
            )
        name = spec
    unknown = set(overrides) - {f.name for f in fields(ClusterSpec)}
    if unknown:
        raise ValueError(
            f"a cluster has no field {sorted(unknown)[0]!r}; it has {', '.join(f.name for f in fields(ClusterSpec))}"
        )
    return replace(name, **overrides) if overrides else name


def _of_gpu(gpu: str, name: str, n_nodes: int, gpus_per_node: int) -> ClusterSpec:
    if gpu not in GPUS:
        raise ValueError(f"unknown gpu {gpu!r}; the types are: {', '.join(GPUS)}")
    return GPUS[gpu].cluster(name, n_nodes, gpus_per_node)
