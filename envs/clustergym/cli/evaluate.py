"""``clustergym eval``: planners side by side on traffic that they have not seen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from clustergym.cli.common import load_traces, prepare_outputs
from clustergym.common.files import write_atomically
from clustergym.moe_placement.batch import DEFAULT_TRACE, model_for
from clustergym.moe_placement.evaluation import Protocol, Result, compare
from clustergym.moe_placement.planner_registry import PLANNERS
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster

DEFAULT_PLANNERS = [name for name in PLANNERS if name != "exact"]
POLICIES = ("policy", "policy-guided")


@dataclass
class Command:
    """Compare planners on traffic that they have not seen: served, migration and total time, balance, traffic, moves.

    Example: clustergym eval --trace tiny_moe --cluster h800-4x4 --schedule drift --planner eplb anneal oracle
    """

    task: Literal["moe-placement", "gpu-allocation"] = "moe-placement"
    """What is compared: planners of MoE placement, or (with flags of its own) policies that share out one GPU."""
    trace: list[str] = field(default_factory=lambda: [DEFAULT_TRACE])
    """A .npz or .npy file or the name of a bundled trace. Several are joined, each as a domain of its own."""
    cluster: str = "h800-4x4"
    """Cluster preset: gpu-NODESxGPUS, such as h800-4x4, h800-2x8, h100-4x8."""
    model: str | None = None
    """Model preset; by default the one that the trace names."""
    planner: list[str] = field(default_factory=lambda: ["all"])
    """'all', or one or more planners by name."""
    checkpoint: str = "pretrained"
    """Of the planners 'policy' and 'policy-guided': a policy.pt, the folder of a training run, or 'pretrained'."""
    schedule: str = "drift"
    """stationary: plan once on one part of the trace, serve the rest. drift, switch, replay: re-plan after each window."""
    window_tokens: int = 2048
    """Tokens that the cluster serves in one pass."""
    windows: int = 7
    """Windows served in each stream."""
    streams: int = 1
    """Independent streams to average over (with a 95 % interval from 2 on)."""
    drift_rate: float = 0.5
    """Step of the mixture walk (drift) or chance of another domain (switch) at each window."""
    holdout: float = 0.5
    """Share of each domain's tokens that is served and never planned on."""
    passes_per_window: int = 100
    """Forward passes that a window stands for; a migration is spread over them."""
    comm: str = "dedup"
    """dedup (one copy a GPU and node), per-expert (low-latency mode), stay (tokens stay where their first expert ran)."""
    slots: int | None = None
    """Experts of a layer that a GPU holds; by default about a quarter more than needed."""
    layers: list[int] | None = None
    """Only these layers of the trace, by position; by default all."""
    seed: int = 0
    """Of the split into planning and held-out part, the streams, and planners that draw."""
    json: Path | None = None
    """Write the figures to this file."""
    plot: Path | None = None
    """Write a picture (.png, .svg, .pdf) to this file."""


def results_table(results: list[Result], title: str) -> Table:
    """The comparison for a person: best total of those without hindsight in bold, and everything relative to EPLB."""
    table = Table(
        title=escape(title), caption="µs of one layer in one forward pass; moves and decision per layer and window"
    )
    table.add_column("planner")
    for column in (
        "served", "migration", "total", "vs eplb", "balance", "GPUs/token", "inter-node MB", "moves", "decision ms",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    reference = next((r.total_us for r in results if r.planner == "eplb"), None)
    fair = [r.total_us for r in results if r.planner != "oracle"]
    for r in sorted(results, key=lambda r: -r.total_us):
        total = f"{r.total_us:.1f}" + (f" ± {r.total_ci95_us:.1f}" if r.total_ci95_us else "")
        versus = "" if reference is None else f"{100 * (r.total_us / reference - 1):+.1f} %"
        table.add_row(
            r.planner, f"{r.served_us:.1f}", f"{r.migration_us:.1f}", total, versus, f"{r.balancedness:.3f}",
            f"{r.gpus_per_token:.2f}", f"{r.inter_node_mb:.2f}", f"{r.moves:.1f}", f"{r.decision_ms:.2f}",
            style="bold green" if fair and r.total_us == min(fair) else ("dim" if r.planner == "oracle" else None),
        )  # fmt: skip
    return table


def plot_results(results: list[Result], title: str, path: Path) -> None:
    """Bars of served + migration for each planner, and the total window by window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ordered = sorted(results, key=lambda r: -r.total_us)
    names = [r.planner for r in ordered]
    figure, (bars, lines) = plt.subplots(
        1, 2, figsize=(13, 0.36 * len(names) + 2.2), width_ratios=(3, 2), layout="constrained"
    )
    served = bars.barh(names, [r.served_us for r in ordered], color="#4477AA", label="served")
    errors = [r.total_ci95_us for r in ordered]
    bars.barh(
        names, [r.migration_us for r in ordered], left=[r.served_us for r in ordered], color="#EE6677", label="migration",
        xerr=errors if any(errors) else None, error_kw={"elinewidth": 1, "capsize": 2},
    )  # fmt: skip
    low = 0.8 * min(r.served_us for r in ordered)
    right = max(r.total_us + r.total_ci95_us for r in ordered)
    for bar, r in zip(served, ordered, strict=True):
        beside = r.total_us + r.total_ci95_us + 0.01 * (right - low)
        bars.text(beside, bar.get_y() + bar.get_height() / 2, f"{r.total_us:.1f}", va="center", fontsize=8)
    bars.set(xlabel=f"µs a layer and pass (axis starts at {low:.0f})", title=title)
    bars.set_xlim(left=low, right=right + 0.1 * (right - low))
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    told = ("static", "eplb", "eplb-threshold", "bottleneck-8", "anneal", "policy", "oracle")
    shown = [r for r in ordered if r.planner in told] or ordered[:6]
    palette = ["#BBBBBB", "#EE6677", "#CCBB44", "#66CCEE", "#228833", "#AA3377", "#000000"]
    for r, colour, marker in zip(shown, palette, "osv^DPX", strict=False):
        lines.plot(
            range(1, len(r.window_totals_us) + 1),
            r.window_totals_us,
            color=colour,
            marker=marker,
            ms=4,
            label=r.planner,
        )
    lines.set(xlabel="window", ylabel="total µs", title="as traffic goes on")
    lines.xaxis.get_major_locator().set_params(integer=True)
    lines.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run(args: Command, console: Console, line: str) -> None:
    trace = load_traces(args.trace)
    if args.layers is not None:
        trace = trace.select(layers=args.layers)
    names = DEFAULT_PLANNERS if args.planner == ["all"] else args.planner
    if args.planner == ["all"] and args.comm == "stay":
        names = [name for name in names if name not in POLICIES]
    for name in names:
        if name not in PLANNERS:
            raise ValueError(f"unknown planner {name!r}; expected 'all' or some of: {', '.join(PLANNERS)}")
    overrides = {} if args.slots is None else {"slots_per_gpu": args.slots}
    cluster = get_cluster(args.cluster, **overrides)
    simulator = Simulator(model_for(trace, args.model), cluster, args.comm, args.passes_per_window)
    protocol = Protocol(
        args.schedule, args.windows, args.window_tokens, args.drift_rate, args.streams, args.seed, args.holdout
    )
    prepare_outputs(args.json, args.plot)
    console.print(
        f"[bold]{escape(trace.name)}[/]: {trace.n_tokens} tokens, {trace.n_layers} layers, top-{trace.top_k} of {trace.n_experts}; "
        f"{cluster.n_nodes} × {cluster.gpus_per_node} GPUs with {simulator.n_slots} slots a layer; "
        f"{args.schedule}, {args.streams} stream(s) × {args.windows} windows of {args.window_tokens} tokens"
    )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:18s}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=len(names))

        def announce(name: str) -> None:
            bar.update(task, description=name, completed=names.index(name))

        options: dict[str, dict[str, object]] = {name: {"checkpoint": args.checkpoint} for name in POLICIES}
        results = compare(trace, simulator, names, protocol, announce, options)
    title = f"{trace.name} on {cluster.name}, {args.schedule}"
    console.print(results_table(results, title))
    if args.plot is not None:
        plot_results(results, title, args.plot)
        console.print(escape(f"plot: {args.plot}"))
    if args.json is not None:
        document = {
            "planners": [r.as_dict() for r in results],
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
        console.print(escape(f"figures: {args.json}"))
