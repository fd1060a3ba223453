"""``clustergym clusters``: list the GPU types and clusters, or explain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.moe_placement.presets.clusters import CLUSTERS, GPUS, get_cluster


@dataclass
class Command:
    """List the GPU types with their published figures, or show one cluster.

    Every --cluster takes GPU-NODESxGPUS with any numbers (h800-40x8), a product name (gb200-nvl72), or a YAML file:
    n_nodes, gpus_per_node, and optionally gpu, slots_per_gpu and links (intra_gb_s, inter_gb_s and latencies).
    """

    cluster: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CLUSTER]")] = None
    """A name or a YAML file. Default: list the GPU types."""


def run(args: Command, console: Console, line: str) -> None:
    if args.cluster is None:
        table = Table(
            "GPU", "to its node GB/s", "to others GB/s", "memory GB", "GB/s", "bf16 TFLOPS", "source", box=None
        )
        for gpu in GPUS.values():
            figures = (gpu.intra_gb_s, gpu.inter_gb_s, gpu.memory_gb, gpu.hbm_gb_s, gpu.bf16_tflops)
            table.add_row(gpu.name, *(f"{figure:g}" for figure in figures), escape(gpu.source))
        console.print(table)
        names = f"presets: {', '.join(CLUSTERS)}; any other GPU-NODESxGPUS is a name too, or give a YAML file"
        console.print(escape(names), soft_wrap=True)
        return
    spec = get_cluster(args.cluster)
    table = Table("", escape(spec.name), box=None)
    for name, value in {
        "GPUs": f"{spec.n_gpus}: {spec.n_nodes} node{'s' * (spec.n_nodes > 1)} of {spec.gpus_per_node}",
        "slots per GPU and layer": str(spec.slots_per_gpu or "about a quarter more than needed"),
        "link to the own node": f"{spec.intra_gb_s:g} GB/s per direction, {spec.intra_latency_us:g} µs",
        "link to other nodes": f"{spec.inter_gb_s:g} GB/s per direction, {spec.inter_latency_us:g} µs",
        "memory": f"{spec.memory_gb:g} GB at {spec.hbm_gb_s:g} GB/s",
        "bf16": f"{spec.bf16_tflops:g} TFLOPS",
        "source": spec.source or "unknown",
    }.items():
        table.add_row(name, escape(value))
    console.print(table)
