"""``clustergym diff``: what it takes to change from one plan to another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from clustergym.common.files import write_atomically
from clustergym.moe_placement.presets.clusters import get_cluster
from clustergym.moe_placement.presets.models import get_model
from clustergym.plans.engines import compare_plans, detect_engine, load_plan


@dataclass
class Command:
    """Show the experts that move, the bytes and the seconds when one plan replaces another.

    The plans may be for different engines. Example: clustergym diff live.json new.json --model deepseek-v3 --cluster
    h800-4x8
    """

    old: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OLD")]
    """The plan that is served now."""
    new: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NEW")]
    """The plan to change to."""
    model: str
    """A preset, a config.json or a YAML file."""
    cluster: str
    """GPU-NODESxGPUS or a YAML file: nodes, GPUs and links."""
    json: Path | None = None
    """Write the figures to this JSON file."""


def run(args: Command, console: Console, line: str) -> None:
    model, cluster = get_model(args.model), get_cluster(args.cluster)
    old, new = (load_plan(path, detect_engine(path), model, cluster.n_gpus) for path in (args.old, args.new))
    change = compare_plans(old, new, cluster)
    console.print(change.describe(), highlight=False, soft_wrap=True)
    if args.json is not None:
        write_atomically(args.json, json.dumps(asdict(change), indent=2) + "\n")
