"""clustergym export: write a trained placement policy for programs that do not have this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table


@dataclass
class Command:
    """Write a trained placement policy as ONNX (one file per actor), safetensors and JSON.

    An engine process can then run it with onnxruntime, without torch and without this package. policy.json describes
    the inputs.

    Example: clustergym export runs/ppo_moe_marl__tiny_moe__1 --out policy
    """

    checkpoint: Annotated[str, tyro.conf.Positional] = "pretrained"
    """A policy.pt, the folder of a training run, or ``pretrained``."""
    out: Path = Path("policy")
    """Folder for the files."""


def run(args: Command, console: Console, command: str) -> None:
    from clustergym.planners.policy.onnx import export_onnx

    text = export_onnx(args.checkpoint, args.out)
    table = Table("file", "kB", "inputs", box=None)
    for path in sorted(args.out.iterdir()):
        inputs = ", ".join(text["actors"].get(path.stem, {}).get("inputs", ()))
        table.add_row(str(path), f"{path.stat().st_size / 1e3:.0f}", inputs)
    console.print(table)
