"""The command line: ``clustergym trace synth|info`` and ``clustergym eval``."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from clustergym.evaluation import Protocol, Result, compare
from clustergym.moe_placement.batch import model_for
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.planners import PLANNERS
from clustergym.traces import SyntheticConfig, TokenTrace, bundled_traces, synthetic_trace

DEFAULT_PLANNERS = [name for name in PLANNERS if name != "exact"]
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass
class Eval:
    """Compare planners on traffic that they have not seen: served, migration and total time, balance, traffic, moves.

    Example: clustergym eval --trace synthetic --cluster h800-4x4 --schedule drift --planner eplb anneal oracle
    """

    trace: list[str] = field(default_factory=lambda: ["synthetic"])
    """A .npz or .npy file or the name of a bundled trace. Several are joined, each as a domain of its own."""
    cluster: str = "h800-4x4"
    """Cluster preset: gpu-NODESxGPUS, such as h800-4x4, h800-2x8, h100-4x8."""
    model: str | None = None
    """Model preset; by default the one that the trace names."""
    planner: list[str] = field(default_factory=lambda: ["all"])
    """'all', or one or more planners by name."""
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


@dataclass
class TraceInfo:
    """What a trace holds: size, domains, load skew, co-activation, predictability, drift."""

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")]
    """A .npz or .npy file or the name of a bundled trace."""
    gpus: int = 16
    """GPUs for the statistics that need some."""


@dataclass
class TraceSynth:
    """Generate a synthetic trace whose statistics resemble a real model's."""

    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """The .npz file to write."""
    config: Annotated[SyntheticConfig, tyro.conf.arg(name="")] = field(default_factory=SyntheticConfig)
    seed: int = 0
    """Of all draws: the same seed and parameters give the same trace."""


@dataclass
class Trace:
    """Look at traces and make synthetic ones."""

    command: Annotated[
        Annotated[TraceInfo, tyro.conf.subcommand("info", prefix_name=False)]
        | Annotated[TraceSynth, tyro.conf.subcommand("synth", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def load_traces(sources: list[str]) -> TokenTrace:
    """One trace, or several joined with one domain each."""
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if twice:
        raise ValueError(f"trace {twice[0]!r} is given twice: what is held out of one would be planned on in the other")
    traces = [TokenTrace.load(source) for source in sources]
    if len(traces) == 1:
        return traces[0]
    names = [t.name for t in traces]
    # Files of the same name in different folders are still domains of their own.
    return TokenTrace.concat(traces, domains=names if len(set(names)) == len(names) else sources)


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def results_table(results: list[Result], title: str) -> Table:
    """The comparison for a person: best total of those without hindsight in bold, and everything relative to EPLB."""
    table = Table(
        title=escape(title), caption="µs of one layer in one forward pass; moves and decision per layer and window"
    )
    for column, justify in (
        ("planner", "left"), ("served", "right"), ("migration", "right"), ("total", "right"), ("vs eplb", "right"),
        ("balance", "right"), ("GPUs/token", "right"), ("inter-node MB", "right"), ("moves", "right"), ("decision ms", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
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
    for bar, r in zip(served, ordered, strict=True):
        bars.text(
            r.total_us + max(errors) + 1,
            bar.get_y() + bar.get_height() / 2,
            f"{r.total_us:.1f}",
            va="center",
            fontsize=8,
        )
    low = 0.8 * min(r.served_us for r in ordered)
    bars.set(xlabel=f"µs a layer and pass (axis starts at {low:.0f})", title=title)
    bars.set_xlim(left=low, right=max(r.total_us for r in ordered) * 1.05)
    bars.legend(loc="upper right")
    shown = [
        r for r in ordered if r.planner in ("static", "eplb", "eplb-threshold", "bottleneck-8", "anneal", "oracle")
    ] or ordered[:6]
    palette = ["#BBBBBB", "#EE6677", "#CCBB44", "#66CCEE", "#228833", "#AA3377"]
    for r, colour, marker in zip(shown, palette, "osv^DP", strict=False):
        lines.plot(
            range(1, len(r.window_totals_us) + 1),
            r.window_totals_us,
            color=colour,
            marker=marker,
            ms=4,
            label=r.planner,
        )
    lines.set(xlabel="window", ylabel="total µs", title="as traffic goes on")
    lines.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def prepare_outputs(args: Eval) -> None:
    """Refuse what cannot be written before the planners run, not after."""
    if args.plot is not None and args.plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {args.plot}: expected a file that ends in {', '.join(PLOT_SUFFIXES)}")
    for path in (args.json, args.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                raise ValueError(f"cannot write {path}: it is a folder, or its folder is not writable")


def run_eval(args: Eval, console: Console, command: str) -> None:
    trace = load_traces(args.trace)
    if args.layers is not None:
        trace = trace.select(layers=args.layers)
    names = DEFAULT_PLANNERS if args.planner == ["all"] else args.planner
    for name in names:
        if name not in PLANNERS:
            raise ValueError(f"unknown planner {name!r}; expected 'all' or some of: {', '.join(PLANNERS)}")
    overrides = {} if args.slots is None else {"slots_per_gpu": args.slots}
    cluster = get_cluster(args.cluster, **overrides)
    simulator = Simulator(model_for(trace, args.model), cluster, args.comm, args.passes_per_window)
    protocol = Protocol(
        args.schedule, args.windows, args.window_tokens, args.drift_rate, args.streams, args.seed, args.holdout
    )
    prepare_outputs(args)
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

        results = compare(trace, simulator, names, protocol, announce)
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
            "command": command,
        }
        write_atomically(args.json, json.dumps(document, indent=2) + "\n")
        console.print(escape(f"figures: {args.json}"))


def run_info(args: TraceInfo, console: Console) -> None:
    trace = TokenTrace.load(args.trace)
    console.print(trace)
    table = Table("statistic", "value", title=escape(f"{trace.name}, for {args.gpus} GPUs"))
    for name, value in trace.statistics(args.gpus).items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)


def run_synth(args: TraceSynth, console: Console) -> None:
    path = synthetic_trace(args.config, seed=args.seed).save(args.output)
    console.print(escape(f"wrote {path}: {TokenTrace.load(path)}"))


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``clustergym``. Wrong input ends with a sentence and status 2, not with a traceback."""
    # Piped output has no width of its own: leave room for the whole table.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    line = shlex.join(["clustergym", *(sys.argv[1:] if argv is None else argv)])
    try:
        command: Eval | Trace = tyro.extras.subcommand_cli_from_dict(
            {"eval": Eval, "trace": Trace},
            description=f"Placement of MoE experts on GPUs, planned and compared. Bundled traces: {', '.join(bundled_traces())}.",
            args=argv,
            prog="clustergym",
        )
        if isinstance(command, Eval):
            run_eval(command, console, line)
        elif isinstance(command.command, TraceInfo):
            run_info(command.command, console)
        else:
            run_synth(command.command, console)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    return 0
