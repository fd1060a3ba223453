"""``clustergym diff``: what it takes to change from one plan to another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from clustergym.common.files import write_atomically
from clustergym.plans.engines import compare_plans, detect_engine, load_plan
from clustergym.plans.meta import model_and_cluster


@dataclass
class Command:
    """Show the experts that move, the bytes and the seconds when one plan replaces another.

    The plans may be for different engines. Example: clustergym diff live.json new.json
    """

    old: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OLD")]
    """The plan that is served now."""
    new: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NEW")]
    """The plan to change to."""
    model: str | None = None
    """A preset, a config.json or a YAML file; by default what the file beside NEW says."""
    cluster: str | None = None
    """GPU-NODESxGPUS or a YAML file: nodes, GPUs and links; by default what the file beside NEW says."""
    json: Path | None = None
    """Write the figures to this JSON file."""


def run(args: Command, console: Console, line: str) -> None:
    model, cluster, _ = model_and_cluster(args.new, args.model, args.cluster)
    old, new = (load_plan(path, detect_engine(path), model, cluster.n_gpus) for path in (args.old, args.new))
    change = compare_plans(old, new, cluster)
    console.print(change.describe(), highlight=False, soft_wrap=True)
    if args.json is not None:
        write_atomically(args.json, json.dumps(asdict(change), indent=2) + "\n")
