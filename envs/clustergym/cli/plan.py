"""``clustergym plan``: choose a placement, measure it on held-out traffic, and write it for an engine."""

from __future__ import annotations

import json
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

from clustergym.cli.common import prepare_files
from clustergym.common.files import write_atomically
from clustergym.moe_placement.engines import EnginePlan, check_layers, check_path, how_to_load, write_plan
from clustergym.moe_placement.evaluation import PASSES_OF_A_PERMANENT_PLAN
from clustergym.moe_placement.planner_registry import PLANNERS, planner_class
from clustergym.moe_placement.planning import Plan, make_plan, model_of
from clustergym.moe_placement.report.html import write_report
from clustergym.moe_placement.report.tables import plan_table
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.traces import load_any_trace


@dataclass
class Command:
    """Choose a placement on the first part of a trace, measure it on the rest, and write a plan file for an engine.

    All rules of the engine are checked, so it does not refuse the plan. Slots that the planner leaves empty are filled
    with the replicas that help most.

    Example: clustergym plan trace.npz --cluster h800-4x4 --planner anneal --engine sglang -o plan.json
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")]
    """A token trace (.npz, .npy or bundled name), or a load trace, which has only counts."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Plan file to write: .json or .pt for sglang, .yaml for tensorrt-llm, .json for vllm-ascend and vllm."""
    engine: str = "sglang"
    """Engine to write the plan for: sglang, tensorrt-llm, vllm-ascend or vllm."""
    planner: str = "anneal"
    """A planner of ``clustergym eval``, for example anneal, eplb or policy-guided."""
    checkpoint: Path | None = None
    """Policy of the planners 'policy' and 'policy-guided': a policy.pt file or a run folder; by default the pretrained
    policy."""
    model: str | None = None
    """Model preset; by default the model that the trace names."""
    cluster: str = "h800-4x4"
    """Cluster preset GPU-NODESxGPUS, for example h800-4x4."""
    slots: int | None = None
    """Experts per layer that a GPU can hold; by default about a quarter more than needed."""
    comm: str = "dedup"
    """dedup: DeepEP's normal mode. per-expert: its low-latency mode."""
    share: float = 0.5
    """Share of the trace, from its beginning, to plan on. The rest is held out."""
    seconds: float = 30.0
    """Time budget in seconds of planners that take one: the anneal planners and policy-guided."""
    plan_tokens: int = 8192
    """Maximum number of tokens to plan on, for planners that look at tokens."""
    window_tokens: int = 2048
    """Number of tokens that the cluster serves in one pass."""
    windows: int = 8
    """Number of held-out windows to measure on."""
    seed: int = 0
    """Seed of the windows and of planners that draw random numbers."""
    report: Path | None = None
    """Write a self-contained HTML report to this file."""
    json: Path | None = None
    """Write the results to this JSON file."""


class ProgressBar:
    """The current step, with a bar if its duration is known."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.task = bar, bar.add_task("reading", total=None)
        self.began, self.seconds = time.monotonic(), 0.0
        self.done = threading.Event()

    def begin(self, step: str, seconds: float | None) -> None:
        self.began, self.seconds = time.monotonic(), seconds or 0.0
        self.bar.reset(self.task, description=step, total=seconds)

    def tick(self) -> None:
        while not self.done.wait(0.2):
            if self.seconds:
                self.bar.update(self.task, completed=min(time.monotonic() - self.began, self.seconds))


@contextmanager
def progress_bar(console: Console) -> Iterator[ProgressBar]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = ProgressBar(bar)
        # Planners release the GIL while they search, so a thread can move the bar.
        thread = threading.Thread(target=shown.tick, daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            shown.done.set()
            thread.join()


def check_arguments(args: Command) -> None:
    """Raise a ValueError for arguments that cannot work, before the work is done."""
    check_path(args.output, args.engine)
    planner = planner_class(args.planner)
    if planner.needs_future or planner.small_only:
        raise ValueError(f"planner {args.planner!r} is for comparison only: it makes no plan to load")
    if args.checkpoint is not None and not planner.takes_checkpoint:
        takers = " and ".join(name for name, entry in PLANNERS.items() if entry.planner.takes_checkpoint)
        raise ValueError(f"--checkpoint is for the planners {takers}, not for {args.planner!r}")
    if args.report is not None and args.report.suffix not in (".html", ".htm"):
        raise ValueError(f"--report {args.report}: expected a file that ends in .html")
    for key in ("windows", "window_tokens", "plan_tokens"):
        if getattr(args, key) < 1:
            raise ValueError(f"{key} is {getattr(args, key)}: expected at least 1")
    prepare_files(args.output, args.report, args.json)


def results(plan: Plan, args: Command, line: str) -> dict[str, Any]:
    versus = {other: dict(zip(("mean", "ci95"), plan.versus(other), strict=True)) for other in ("static", "eplb")}
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
        "versus": versus,
        "planners": [
            {
                "planner": o.planner, "served_us": o.served_us, "window_us": o.window_us,
                "balancedness": o.balancedness, "gpus_per_token": o.gpus_per_token,
                "inter_node_mb": o.inter_node_mb, "decision_s": o.decision_s, "filled_slots": o.filled,
            }
            for o in plan.outcomes.values()
        ],
        "command": line,
    }  # fmt: skip


def run(args: Command, console: Console, line: str) -> None:
    trace = load_any_trace(args.trace)
    model = model_of(trace, args.model)
    cluster = get_cluster(args.cluster, **({} if args.slots is None else {"slots_per_gpu": args.slots}))
    simulator = Simulator(model, cluster, args.comm, PASSES_OF_A_PERMANENT_PLAN)
    check_layers(trace.layer_ids, model)
    check_arguments(args)
    with progress_bar(console) as shown:
        plan = make_plan(
            trace, simulator, args.planner, share=args.share, window_tokens=args.window_tokens, windows=args.windows,
            plan_tokens=args.plan_tokens, seconds=args.seconds, seed=args.seed, progress=shown.begin,
            options={} if args.checkpoint is None else {"checkpoint": args.checkpoint},
        )  # fmt: skip
    chosen = EnginePlan(plan.best.placement, trace.layer_ids, model)
    write_plan(args.output, chosen, args.engine)
    console.print(plan_table(plan))
    if plan.best.filled:
        console.print(f"{args.planner} left {plan.best.filled} slots empty: filled with the replicas that help most")
    if args.planner != "eplb":
        relative, half = plan.versus("eplb")
        interval = f" ± {100 * half:.1f}" if half else ""
        console.print(
            f"{args.planner} against EPLB on held-out traffic: {100 * relative:+.1f}{interval} % time", highlight=False
        )
        if relative > 0:
            console.print(
                "[yellow]EPLB's plan serves the held-out traffic faster: try --planner eplb, or a longer trace[/]"
            )
    usage = how_to_load(args.output, chosen, args.engine)
    console.print(escape(f"plan: {args.output}"))
    console.print(escape(f"load it with: {usage}"), highlight=False, soft_wrap=True)
    if args.report is not None:
        write_report(args.report, plan, args.engine, usage, line)
        console.print(escape(f"report: {args.report}"))
    if args.json is not None:
        write_atomically(args.json, json.dumps(results(plan, args, line), indent=2) + "\n")
        console.print(escape(f"results: {args.json}"))
