"""``clustergym plan``: a placement that an engine can load, with the evidence on traffic it was not chosen on."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from clustergym.common.files import write_atomically
from clustergym.moe_placement.engines import EnginePlan, check_path, check_plan, get_engine, how_to_load, write_plan
from clustergym.moe_placement.planner_registry import PLANNERS
from clustergym.moe_placement.planning import Plan, make_plan, model_of
from clustergym.moe_placement.report import write_report
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.traces import load_any_trace


@dataclass
class Command:
    """Choose a placement on the first part of a trace, measure it on the rest, and write it as an engine loads it.

    Every rule of the engine is checked first: a plan that it would refuse is not written. Slots that the planner leaves empty get the
    replicas that help most.

    Example: clustergym plan trace.npz --model deepseek-v2-lite --cluster h800-4x4 --planner anneal --engine sglang -o plan.json
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")]
    """A trace (.npz, .npy, bundled name), or a load trace: counts only."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The plan to write: .json or .pt for sglang, .yaml for tensorrt-llm, .json for vllm-ascend and vllm."""
    engine: str = "sglang"
    """sglang, tensorrt-llm, vllm-ascend or vllm."""
    planner: str = "anneal"
    """anneal, eplb, policy or another planner's name."""
    checkpoint: Path | None = None
    """Of the planner 'policy'."""
    model: str | None = None
    """Model preset; by default the one that the trace names."""
    cluster: str = "h800-4x4"
    """Cluster preset: gpu-NODESxGPUS."""
    slots: int | None = None
    """Experts of a layer that a GPU holds; by default about a quarter more than needed."""
    comm: str = "dedup"
    """dedup (DeepEP's normal mode) or per-expert (its low-latency mode)."""
    share: float = 0.5
    """Share of the trace, from its beginning, to plan on; the rest is held out."""
    seconds: float = 30.0
    """Time that annealing takes."""
    plan_tokens: int = 8192
    """Most tokens in the window that planners on tokens see."""
    window_tokens: int = 2048
    """Tokens that the cluster serves in one pass."""
    windows: int = 8
    """Held-out windows to measure on."""
    seed: int = 0
    """Of the windows and of planners that draw."""
    report: Path | None = None
    """Write a self-contained HTML report to this file."""
    json: Path | None = None
    """Write the figures to this file."""


class Steps:
    """What is going on, with a bar where it is known how long it will take."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.task = bar, bar.add_task("reading", total=None)
        self.began, self.seconds = time.monotonic(), 0.0
        self.done = threading.Event()

    def announce(self, what: str, seconds: float | None) -> None:
        self.began, self.seconds = time.monotonic(), seconds or 0.0
        self.bar.reset(self.task, description=what, total=seconds)

    def tick(self) -> None:
        while not self.done.wait(0.2):
            if self.seconds:
                self.bar.update(self.task, completed=min(time.monotonic() - self.began, self.seconds))


@contextmanager
def steps(console: Console) -> Iterator[Steps]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = Steps(bar)
        # The planners hold no lock while they search, so that a thread can move the bar.
        thread = threading.Thread(target=shown.tick, daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            shown.done.set()
            thread.join()


def prepare(args: Command) -> None:
    """Refuse what cannot come to a good end before the work, not after."""
    get_engine(args.engine)
    check_path(args.output, args.engine)
    if args.planner not in PLANNERS:
        raise ValueError(f"unknown planner {args.planner!r}; the planners are: {', '.join(PLANNERS)}")
    if args.planner in ("oracle", "exact"):
        raise ValueError(
            f"planner {args.planner!r} is for comparison on small or known traffic: it makes no plan to load"
        )
    if args.checkpoint is not None and not args.planner.startswith("policy"):
        raise ValueError(f"--checkpoint is for the planner 'policy', not for {args.planner!r}")
    if args.report is not None and args.report.suffix not in (".html", ".htm"):
        raise ValueError(f"--report {args.report}: expected a file that ends in .html")
    for key in ("windows", "window_tokens", "plan_tokens"):
        if getattr(args, key) < 1:
            raise ValueError(f"{key} is {getattr(args, key)}: expected at least 1")
    for path in (args.output, args.report, args.json):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                raise ValueError(f"cannot write {path}: it is a folder, or its folder is not writable")


def table_of(plan: Plan) -> Table:
    what = (
        "µs of one layer in one forward pass"
        if plan.exact
        else "µs of the expert kernels alone: counts tell no traffic"
    )
    table = Table(
        title=escape(f"{plan.trace} on {plan.simulator.cluster.name}, held out: {plan.held_out}"), caption=what
    )
    for column in ("planner", "time", "vs static", "vs eplb", "balance", "GPUs/token", "inter-node MB", "decision s"):
        table.add_column(column, justify="left" if column == "planner" else "right")
    fastest = min(o.served_us for o in plan.outcomes.values())
    for name, o in plan.outcomes.items():
        table.add_row(
            name,
            f"{o.served_us:.1f}",
            *(f"{100 * (o.served_us / plan.outcomes[other].served_us - 1):+.1f} %" for other in ("static", "eplb")),
            f"{o.balancedness:.3f}",
            "" if o.gpus_per_token is None else f"{o.gpus_per_token:.2f}",
            "" if o.inter_node_mb is None else f"{o.inter_node_mb:.2f}",
            f"{o.decision_s:.3f}",
            style="bold green" if o.served_us == fastest else None,
        )
    return table


def figures(plan: Plan, args: Command, line: str) -> dict[str, Any]:
    against = {other: dict(zip(("mean", "ci95"), plan.versus(other), strict=True)) for other in ("static", "eplb")}
    return {
        "planner": plan.chosen,
        "engine": args.engine,
        "plan": str(args.output),
        "model": plan.model.name,
        "cluster": plan.simulator.cluster.name,
        "slots_per_gpu": plan.simulator.n_slots,
        "trace": plan.trace,
        "planned_on": plan.planned_on,
        "held_out": plan.held_out,
        "exact": plan.exact,
        "versus": against,
        "planners": [
            {
                "planner": o.planner, "served_us": o.served_us, "window_us": o.window_us, "balancedness": o.balancedness,
                "gpus_per_token": o.gpus_per_token, "inter_node_mb": o.inter_node_mb, "decision_s": o.decision_s,
                "filled_slots": o.filled,
            }
            for o in plan.outcomes.values()
        ],
        "command": line,
    }  # fmt: skip


def run(args: Command, console: Console, line: str) -> None:
    trace = load_any_trace(args.trace)
    model = model_of(trace, args.model)
    overrides = {} if args.slots is None else {"slots_per_gpu": args.slots}
    simulator = Simulator(model, get_cluster(args.cluster, **overrides), args.comm)
    # What the engine would refuse whatever the planner does is refused now: the static placement stands in for the plan.
    static = simulator.static(trace.n_layers)
    check_plan(EnginePlan(static, trace.layer_ids, model))
    prepare(args)
    options = {} if args.checkpoint is None else {"checkpoint": args.checkpoint}
    with steps(console) as shown:
        plan = make_plan(
            trace, simulator, args.planner, share=args.share, window_tokens=args.window_tokens, windows=args.windows,
            plan_tokens=args.plan_tokens, seconds=args.seconds, seed=args.seed, options=options, announce=shown.announce,
        )  # fmt: skip
    chosen = EnginePlan(plan.best.placement, trace.layer_ids, model)
    check_plan(chosen)
    console.print(table_of(plan))
    if plan.best.filled:
        console.print(
            f"{plan.best.filled} slots that {args.planner} left empty were filled with the replicas that help most"
        )
    relative, half = plan.versus("eplb")
    if args.planner != "eplb":
        interval = f" ± {100 * half:.1f}" if half else ""
        console.print(
            f"{args.planner} against EPLB on held-out traffic: {100 * relative:+.1f}{interval} % time", highlight=False
        )
        if relative > 0:
            console.print(
                "[yellow]EPLB's plan serves the held-out traffic faster: consider --planner eplb, or a longer trace[/]"
            )
    write_plan(args.output, chosen, args.engine)
    console.print(escape(f"plan: {args.output}"))
    console.print(
        escape(f"load it with: {how_to_load(args.output, chosen, args.engine)}"), highlight=False, soft_wrap=True
    )
    if args.report is not None:
        write_report(args.report, plan, args.engine, how_to_load(args.output, chosen, args.engine), line)
        console.print(escape(f"report: {args.report}"))
    if args.json is not None:
        write_atomically(args.json, json.dumps(figures(plan, args, line), indent=2) + "\n")
        console.print(escape(f"figures: {args.json}"))
