"""``clustergym eval``: compare planners on held-out traffic."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from clustergym.cli.common import prepare_outputs
from clustergym.common.files import write_atomically
from clustergym.moe_placement.batch import DEFAULT_TRACE, model_for
from clustergym.moe_placement.evaluation import Protocol, compare
from clustergym.moe_placement.planner_registry import PLANNERS
from clustergym.moe_placement.report.plots import plot_results
from clustergym.moe_placement.report.tables import results_table
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.traces import load_traces


@dataclass
class Command:
    """Compare planners on held-out traffic: time to serve and to migrate, balance, traffic between nodes, moves.

    Example: clustergym eval --trace tiny_moe --cluster h800-4x4 --schedule drift --planner eplb anneal oracle
    """

    task: Literal["moe-placement", "gpu-allocation"] = "moe-placement"
    """Compare planners of MoE placement, or policies of GPU allocation (which has flags of its own)."""
    trace: list[str] = field(default_factory=lambda: [DEFAULT_TRACE])
    """A .npz or .npy file, or the name of a bundled trace. Several traces are joined, each as its own domain."""
    cluster: str = "h800-4x4"
    """Cluster preset GPU-NODESxGPUS, for example h800-4x4, h800-2x8 or h100-4x8."""
    model: str | None = None
    """Model preset; by default the model that the trace names."""
    planner: list[str] = field(default_factory=lambda: ["all"])
    """One or more of static, round-robin, eplb-once, eplb, eplb-hierarchical, eplb-ema, eplb-threshold, incremental,
    flashlb, swift, hot-everywhere, grouping, co-occurrence, affinity-groups, random-best, bottleneck, bottleneck-8,
    swap-greedy, anneal-max, anneal, anneal-4, anneal-even, policy, policy-guided, oracle (sees the next window) and
    exact (small instances only); 'all' means all but exact."""
    checkpoint: str = "pretrained"
    """Policy of the planners 'policy' and 'policy-guided': a policy.pt file, a run folder, or 'pretrained'."""
    schedule: str = "drift"
    """stationary: plan once on one part of the trace, serve the rest. drift, switch, replay: plan after each window."""
    window_tokens: int = 2048
    """Number of tokens that the cluster serves in one pass."""
    windows: int = 7
    """Number of windows served per stream."""
    streams: int = 1
    """Number of independent streams. Two or more give a 95 % confidence interval."""
    drift_rate: float = 0.5
    """Step of the mixture walk (drift) or probability of another domain (switch), per window."""
    holdout: float = 0.5
    """Share of the tokens of each domain that is served and never planned on."""
    passes_per_window: int = 100
    """Number of forward passes per window. The time of a migration is divided by it."""
    comm: str = "dedup"
    """dedup: one copy per GPU and node. per-expert: low-latency mode. stay: tokens stay at their first expert."""
    slots: int | None = None
    """Experts per layer that a GPU can hold; by default about a quarter more than needed."""
    layers: list[int] | None = None
    """Positions of the layers of the trace to use; by default all layers."""
    seed: int = 0
    """Seed of the split into planning and held-out part, of the streams, and of planners that draw random numbers."""
    json: Path | None = None
    """Write the results to this JSON file."""
    plot: Path | None = None
    """Write a plot to this file (.png, .svg or .pdf)."""


def planner_names(args: Command) -> list[str]:
    if args.planner == ["all"]:
        return [
            name
            for name, (planner, _) in PLANNERS.items()
            if not planner.small_only and not (planner.layers_alone and args.comm == "stay")
        ]
    for name in args.planner:
        if name not in PLANNERS:
            raise ValueError(f"unknown planner {name!r}; expected 'all' or some of: {', '.join(PLANNERS)}")
    return args.planner


def run(args: Command, console: Console, line: str) -> None:
    trace = load_traces(args.trace)
    if args.layers is not None:
        trace = trace.select(layers=args.layers)
    names = planner_names(args)
    cluster = get_cluster(args.cluster, **({} if args.slots is None else {"slots_per_gpu": args.slots}))
    simulator = Simulator(model_for(trace, args.model), cluster, args.comm, args.passes_per_window)
    protocol = Protocol(
        args.schedule, args.windows, args.window_tokens, args.drift_rate, args.streams, args.seed, args.holdout
    )
    prepare_outputs(args.json, args.plot)
    console.print(
        f"[bold]{escape(trace.name)}[/]: {trace.n_tokens} tokens, {trace.n_layers} layers, "
        f"top-{trace.top_k} of {trace.n_experts}; "
        f"{cluster.n_nodes} × {cluster.gpus_per_node} GPUs with {simulator.n_slots} slots per layer; "
        f"{args.schedule}, {args.streams} stream(s) × {args.windows} windows of {args.window_tokens} tokens"
    )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:18s}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    options: dict[str, dict[str, object]] = {
        name: {"checkpoint": args.checkpoint} for name in names if PLANNERS[name].planner.takes_checkpoint
    }
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=len(names))
        results = compare(
            trace, simulator, names, protocol, options=options,
            progress=lambda name: bar.update(task, description=name, completed=names.index(name)),
        )  # fmt: skip
    title = f"{trace.name} on {cluster.name}, {args.schedule}"
    console.print(results_table(results, title))
    if args.plot is not None:
        plot_results(results, title, args.plot)
        console.print(escape(f"plot: {args.plot}"))
    if args.json is not None:
        document = {
            "planners": [result.as_dict() for result in results],
            "trace": trace.name,
            "model": simulator.model.name,
            "cluster": cluster.name,
            "schedule": args.schedule,
            "window_tokens": args.window_tokens,
            "windows": args.windows,
            "streams": args.streams,
            "seed": args.seed,
            "command": line,
        }
        write_atomically(args.json, json.dumps(document, indent=2) + "\n")
        console.print(escape(f"results: {args.json}"))
