"""``clustergym trace import``: what an engine recorded becomes a trace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@dataclass
class Import:
    """Turn what a serving engine recorded into a trace.

    The engine is found out from the files where it is not named. Recordings without tokens (counts only) become a load trace, which
    planners that balance loads can plan on.

    Example: clustergym trace import sglang expert_distribution_recorder_*.pt --model deepseek-v3 -o trace.npz
    """

    sources: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="[ENGINE] FILE")]
    """sglang, vllm, tensorrt-llm, megatron or esft, and then the files or folders of one recording."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The .npz file to write."""
    model: str | None = None
    """Model preset: tells layers (dense ones too), experts and top-k, and is checked against the files."""
    n_layers: int | None = None
    """Layers that the engine counts, dense ones too, where no preset tells."""
    dense_layers: list[int] | None = None
    """Which of them are dense (by index), where no preset tells."""
    top_k: int | None = None
    """Experts a token uses, where no preset and no file tells."""
    n_experts: int | None = None
    """Logical experts in a layer, where no preset and no file tells."""
    slot_plan: Path | None = None
    """TensorRT-LLM with its load balancer on: the plan it ran with, because its counts are then those of slots."""


def run(args: Import, console: Console, line: str) -> None:
    from clustergym.moe_placement.specs import get_model
    from clustergym.traces.readers import ENGINES, ReadOptions, detect, read_trace

    named = args.sources[0] in ENGINES and not Path(args.sources[0]).exists()
    paths = [Path(source) for source in (args.sources[1:] if named else args.sources)]
    if not paths:
        raise ValueError(f"{args.sources[0]}: give the files to import behind the engine's name")
    if args.output.suffix != ".npz":
        raise ValueError(f"traces are saved as .npz, found {args.output.name!r}")
    if args.output.is_dir() or not os.access(args.output.parent, os.W_OK):
        raise ValueError(f"cannot write {args.output}: it is a folder, or its folder is absent or not writable")
    options = ReadOptions(
        model=get_model(args.model) if args.model else None,
        n_layers=args.n_layers,
        dense_layers=None if args.dense_layers is None else tuple(args.dense_layers),
        top_k=args.top_k,
        n_experts=args.n_experts,
        slot_plan=args.slot_plan,
        name=args.output.stem,
    )
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        engine = args.sources[0] if named else detect(paths)
        task = bar.add_task(f"reading {engine}")
        trace = read_trace(paths, engine, options)
        bar.update(task, description=f"writing {args.output.name}")
        trace.save(args.output)
    console.print(escape(f"{engine}: {trace}"))
    console.print(escape(f"wrote {args.output}"))
