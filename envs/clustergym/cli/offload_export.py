"""``clustergym offload export``: files for the expert cache of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from clustergym.cli.offload_output import steps_of
from clustergym.moe_offload.export import copy_files, export_cache
from clustergym.moe_offload.simulator import load_once
from clustergym.moe_offload.specs import DEFAULT_TRACE, share


@dataclass
class Export:
    """Write what an engine needs for its expert cache: hot set, transition tables, parameters of a rule, an example.

    Example: clustergym offload export cache --trace tiny_decode
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder for the files."""
    trace: str = DEFAULT_TRACE
    """Trace that tables are counted on and the rule is tuned on."""
    slots: str = "37.5%"
    """Share of all experts that fit on the GPU."""
    link: str = "pcie5"
    """Link to the host memory: pcie4, pcie5, or GB/s."""
    policy: Path | None = None
    """Run folder of a trained policy: its policy.onnx and model.safetensors are copied."""
    predictor: Path | None = None
    """Folder of clustergym offload fit: predictor and shipped policy are copied."""
    evaluations: int = 20
    """Trials per parameter of the search that tunes the rule."""
    seed: int = 0
    """Seed of the split and of the search."""


def run(args: Export, console: Console, line: str) -> None:
    slots = share(args.slots)
    with steps_of(console, 1) as progress:
        settings = (args.evaluations, args.seed, progress)
        files = export_cache(args.folder, load_once(args.trace), slots, args.link, *settings)
    if args.policy is not None:
        files += copy_files(args.policy, args.folder, ("policy.onnx", "model.safetensors", "model.json"))
    if args.predictor is not None:
        files += copy_files(args.predictor, args.folder, ("predictor.safetensors", "predictor.json"))
        if args.policy is None:
            shipped = [name for name in ("policy.safetensors", "policy.onnx") if (args.predictor / name).is_file()]
            files += copy_files(args.predictor, args.folder, shipped) if shipped else []
    table = Table("file", "kB", "content", box=None)
    for name, about in files:
        table.add_row(str(args.folder / name), f"{(args.folder / name).stat().st_size / 1e3:.0f}", about)
    console.print(table)
