"""``clustergym trace import``: turn a recording of a serving engine into a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from clustergym.cli.common import check_trace_output


@dataclass
class Import:
    """Turn a recording of a serving engine into a trace.

    If no engine is named, it is detected from the files. A recording without tokens (counts only) becomes a load trace.
    Planners that balance loads can plan on it.

    Example: clustergym trace import sglang expert_distribution_recorder_*.pt --model deepseek-v3 -o trace.npz
    """

    sources: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="[ENGINE] FILE")]
    """sglang, vllm, tensorrt-llm or load-table, then the files or folders of one recording."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The .npz file to write."""
    model: str | None = None
    """A preset, a config.json or a YAML file: the number of layers (dense ones too), experts and top-k. The files are
    checked against it."""
    n_layers: int | None = None
    """Number of layers, dense ones included, if no preset is given."""
    dense_layers: list[int] | None = None
    """Indices of the dense layers, if no preset is given."""
    top_k: int | None = None
    """Experts per token, if neither a preset nor the files say it."""
    n_experts: int | None = None
    """Logical experts per layer, if neither a preset nor the files say it."""
    slot_plan: Path | None = None
    """TensorRT-LLM with its load balancer on: the plan that it ran with, because it then counts slots, not experts."""
    strict: bool = False
    """Refuse files with tokens that the engine did not capture. By default they are dropped and reported."""


def run(args: Import, console: Console, line: str) -> None:
    from clustergym.moe_placement.specs import get_model
    from clustergym.traces.readers import ENGINES, ReadOptions, detect, read_trace

    named = args.sources[0] in ENGINES and not Path(args.sources[0]).exists()
    paths = [Path(source) for source in (args.sources[1:] if named else args.sources)]
    if not paths:
        raise ValueError(f"{args.sources[0]}: give the files to import after the name of the engine")
    check_trace_output(args.output)
    options = ReadOptions(
        model=get_model(args.model) if args.model else None,
        n_layers=args.n_layers,
        dense_layers=None if args.dense_layers is None else tuple(args.dense_layers),
        top_k=args.top_k,
        n_experts=args.n_experts,
        slot_plan=args.slot_plan,
        strict=args.strict,
        name=args.output.stem,
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        engine = args.sources[0] if named else detect(paths)
        task = bar.add_task(f"reading {engine}")
        trace = read_trace(paths, engine, options)
        bar.update(task, description=f"writing {args.output.name}")
        trace.save(args.output)
    console.print(escape(f"{engine}: {trace}"))
    if options.dropped.total:
        console.print(f"[yellow]{escape(options.dropped.describe())}[/]", highlight=False, soft_wrap=True)
    console.print(escape(f"wrote {args.output}"))
