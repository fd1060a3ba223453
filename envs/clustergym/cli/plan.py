"""``clustergym plan``: choose a placement, measure it on held-out traffic, and write it for an engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from clustergym.cli.common import prepare_files
from clustergym.cli.profiles import chosen_profile
from clustergym.common.files import write_atomically
from clustergym.moe_placement.engines import EnginePlan, check_layers, check_path, launch, memory_use, write_plan
from clustergym.moe_placement.planner_registry import PLANNERS, planner_class
from clustergym.moe_placement.planning import Plan, Sizes, default_planner, make_plan, model_of
from clustergym.moe_placement.report.html import write_report
from clustergym.moe_placement.report.tables import gain_sentence, plan_table, profiles_table
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.streams import Traffic
from clustergym.traces import load_any_trace


@dataclass
class Command:
    """Choose a placement on one part of a trace, measure it on the rest, and write a plan file for an engine.

    All rules of the engine are checked, so it does not refuse the plan. Slots that the planner leaves empty are filled
    with the replicas that help most.

    Example: clustergym plan trace.npz --cluster h800-4x4 --engine sglang --phase decode -o plan.json
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")]
    """A token trace (.npz, .npy or bundled name), or a load trace, which has only counts."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Plan file to write: .json or .pt for sglang, .yaml for tensorrt-llm, .json for vllm-ascend and vllm."""
    engine: str = "sglang"
    """Engine to write the plan for: sglang, tensorrt-llm, vllm-ascend or vllm."""
    profile: str | None = None
    """How the engine serves: sglang-prefill, sglang-decode, sglang-lp, vllm, vllm-deepep, tensorrt-llm or
    vllm-ascend; by default the first profile of the engine (of --phase, if given)."""
    phase: Literal["decode", "prefill"] | None = None
    """Plan for this phase instead of the profile's."""
    planner: str | None = None
    """A planner of ``clustergym eval``, for example anneal, eplb or flashlb; by default the one that is best for the
    profile in our measurements (for counts: eplb)."""
    checkpoint: Path | None = None
    """Policy of the planners 'policy' and 'policy-guided': a policy.pt file or a run folder; by default the pretrained
    policy."""
    model: str | None = None
    """Model preset; by default the model that the trace names."""
    cluster: str = "h800-4x4"
    """Cluster preset GPU-NODESxGPUS, for example h800-4x4."""
    slots: int | None = None
    """Experts per layer that a GPU can hold; by default about a quarter more than needed."""
    share: float = 0.75
    """Share of the trace to plan on: sequences drawn at random, or the first steps of counts. The rest is held out."""
    seconds: float = 30.0
    """Time budget in seconds of planners that take one: the anneal planners and policy-guided."""
    tokens_per_rank: int | None = None
    """Tokens that each GPU contributes to a pass; by default 32 (decode) or 128 (prefill)."""
    plan_passes: int = 32
    """Maximum number of passes to plan on, for planners that look at tokens."""
    observe_tokens: int | None = None
    """Plan on so many tokens of these passes, drawn at random; by default all."""
    passes: int = 20
    """Number of held-out passes to measure on. More do not make the interval shorter: it comes from the sequences."""
    force: bool = False
    """Write the planner's plan even if no gain over EPLB is shown. By default EPLB's plan is written then."""
    seed: int = 0
    """Seed of the passes and of planners that draw random numbers."""
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


def check_arguments(args: Command, name: str) -> None:
    """Raise a ValueError for arguments that cannot work, before the work is done."""
    check_path(args.output, args.engine)
    planner = planner_class(name)
    if planner.needs_future or planner.needs_mixture or planner.small_only:
        raise ValueError(f"planner {name!r} is for comparison only: it makes no plan to load")
    if args.checkpoint is not None and not planner.takes_checkpoint:
        takers = " and ".join(other for other in PLANNERS if planner_class(other).takes_checkpoint)
        raise ValueError(f"--checkpoint is for the planners {takers}, not for {name!r}")
    if args.report is not None and args.report.suffix not in (".html", ".htm"):
        raise ValueError(f"--report {args.report}: expected a file that ends in .html")
    prepare_files(args.output, args.report, args.json)


def results(plan: Plan, args: Command, line: str) -> dict[str, Any]:
    def versus(planner: str, profile: str | None = None) -> dict[str, dict[str, float]]:
        found = {other: plan.versus(other, planner, profile) for other in ("static", "eplb")}
        return {other: {"mean": mean, "ci95": half} for other, (mean, half) in found.items()}

    return {
        "planner": plan.planner,
        "written": plan.chosen,
        "engine": args.engine,
        "profile": plan.simulator.profile.name,
        "plan": str(args.output),
        "model": plan.model.name,
        "cluster": plan.simulator.cluster.name,
        "slots_per_gpu": plan.simulator.n_slots,
        "trace": plan.trace,
        "planned_on": plan.planned_on,
        "held_out": plan.held_out,
        "reused": plan.reused,
        "exact": plan.exact,
        "versus": versus(plan.planner),
        "gain_shown": plan.gain_shown(),
        "other_profiles": {profile: versus(plan.planner, profile) for profile in plan.other_profiles},
        "planners": [
            {
                "planner": o.planner, "served_us": o.served_us, "pass_us": o.samples.pass_us.tolist(),
                "other_profiles_us": {name: samples.mean_us for name, samples in o.other_profiles.items()},
                "balancedness": o.balancedness,
                "gpus_per_token": o.gpus_per_token, "inter_node_mb": o.inter_node_mb, "decision_s": o.decision_s,
                "filled_slots": o.filled,
            }
            for o in plan.outcomes.values()
        ],
        "command": line,
    }  # fmt: skip


def explain(plan: Plan, console: Console) -> None:
    """Say what the plan is worth, and which one is written."""
    console.print(plan_table(plan))
    if plan.other_profiles:
        console.print(profiles_table(plan))
    if plan.outcomes[plan.planner].filled:
        filled = plan.outcomes[plan.planner].filled
        console.print(f"{plan.planner} left {filled} slots empty: filled with the replicas that help most")
    if plan.reused > 0:
        console.print(
            f"[yellow]the held-out part is smaller than asked: {100 * plan.reused:.0f} % of the tokens of the passes "
            "were served before (the interval allows for it)[/]"
        )
    if plan.planner == "eplb":
        return
    console.print(f"{gain_sentence(plan)}, profile {plan.simulator.profile.name}", highlight=False)
    if not plan.gain_shown():
        written = "its plan is written anyway (--force)" if plan.force else "EPLB's plan is written"
        remedy = "" if plan.force else "; --force writes the other one"
        console.print(f"[yellow]no gain over EPLB is shown: {written}{remedy}, a longer trace shows more[/]")


def run(args: Command, console: Console, line: str) -> None:
    trace = load_any_trace(args.trace)
    model = model_of(trace, args.model)
    cluster = get_cluster(args.cluster, **({} if args.slots is None else {"slots_per_gpu": args.slots}))
    profile = chosen_profile(args.profile, args.engine, args.phase)
    if profile.engine != args.engine:
        raise ValueError(f"profile {profile.name!r} is of engine {profile.engine!r}, not of {args.engine!r}")
    simulator = Simulator(model, cluster, profile)
    planner = args.planner or default_planner(profile, trace)
    sizes = Sizes(args.share, args.plan_passes, args.observe_tokens, args.passes, seed=args.seed)
    traffic = Traffic(profile.phase, args.tokens_per_rank)
    check_layers(trace.layer_ids, model)
    check_arguments(args, planner)
    with progress_bar(console) as shown:
        plan = make_plan(
            trace, simulator, planner, traffic=traffic, sizes=sizes, seconds=args.seconds, force=args.force,
            progress=shown.begin, options={} if args.checkpoint is None else {"checkpoint": args.checkpoint},
        )  # fmt: skip
    chosen = EnginePlan(plan.best.placement, trace.layer_ids, model)
    write_plan(args.output, chosen, args.engine)
    explain(plan, console)
    # A profile of another phase is started like the one it is made from.
    start = launch(args.output, chosen, args.engine, profile.name.split(" (")[0], cluster.n_nodes)
    console.print(escape(f"plan of {plan.chosen}: {args.output} ({memory_use(chosen).describe()})"), soft_wrap=True)
    console.print(escape(f"load it with: {start.command}"), highlight=False, soft_wrap=True)
    for warning in start.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False, soft_wrap=True)
    if args.report is not None:
        write_report(args.report, plan, args.engine, start.command, line)
        console.print(escape(f"report: {args.report}"))
    if args.json is not None:
        write_atomically(args.json, json.dumps(results(plan, args, line), indent=2) + "\n")
        console.print(escape(f"results: {args.json}"))
