"""``clustergym plan``: choose a placement, measure it on held-out traffic, and write it for an engine."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from clustergym.cli.common import prepare_files
from clustergym.cli.profiles import chosen_profile
from clustergym.common.files import write_atomically
from clustergym.common.interrupts import ctrl_c_requests_stop
from clustergym.moe_placement.profiles import phases_of
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec, get_cluster
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.anneal import OtherPhase
from clustergym.planners.registry import planner_class
from clustergym.plans.engines import (
    EnginePlan,
    PlanChange,
    check_layers,
    check_path,
    check_plan,
    compare_plans,
    detect_engine,
    get_engine,
    launch,
    load_plan,
    memory_use,
    write_plan,
)
from clustergym.plans.lost_ranks import cluster_left, parse_ranks, plan_without, renumbered
from clustergym.plans.meta import PlanMeta, read_meta
from clustergym.plans.planning import (
    Plan,
    Sizes,
    decode_share,
    default_planner,
    make_plan,
    model_of,
    serve_both_phases,
)
from clustergym.plans.report.html import write_report
from clustergym.plans.report.slot_curve import slot_table
from clustergym.plans.report.tables import gain_sentence, plan_table, profiles_table
from clustergym.plans.slots import SlotCurve, slot_curve
from clustergym.plans.transition import Limit
from clustergym.traces import LoadTrace, TokenTrace, load_any_trace

DEFAULT_CLUSTER = "h800-4x4"
MOST_TOKENS_PER_RANK = 32_768
"""Engines split longer prompts (chunked prefill)."""


@dataclass
class Command:
    """Choose a placement on one part of a trace, measure it on the rest, and write a plan file for an engine.

    All rules of the engine are checked, so it does not refuse the plan. Slots that the planner leaves empty are filled
    with the replicas that help most.

    Ctrl-C ends a search and writes the best plan so far.

    Example: clustergym plan trace.npz --cluster h800-4x4 --engine sglang --phase decode -o plan.json
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Plan file to write: .json or .pt for sglang, .yaml for tensorrt-llm, .json for vllm-ascend and vllm."""
    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")] = ""
    """A token trace (.npz, .npy or bundled name), or a load trace, which has only counts."""
    loads: str | None = None
    """A load trace of much traffic, for a TRACE (or --tokens) of few tokens: the plan is made for tokens like these,
    with these loads."""
    tokens: str | None = None
    """The same as TRACE."""
    engine: str = "sglang"
    """Engine to write the plan for: sglang, tensorrt-llm, vllm-ascend or vllm."""
    profile: str | None = None
    """Plan for one profile: sglang-prefill, sglang-decode, sglang-lp, vllm, vllm-deepep, tensorrt-llm or vllm-ascend.
    SGLang 0.5.16 and newer: sglang-prefill-start, sglang-decode-start until the first rebalancing, then
    sglang-prefill-0.5.16, sglang-decode-0.5.16."""
    phase: Literal["mixed", "decode", "prefill", "both"] | None = None
    """mixed: one plan for prefill and decode, the default without --profile. decode, prefill: a plan for one phase.
    both: a plan for each, plan-prefill.json and plan-decode.json, for instances that serve only one."""
    decode_share: float | None = None
    """Share of the served tokens that are decoded, for mixed; by default that of the recording if it tells the phases
    apart, else 0.2."""
    planner: str | None = None
    """A planner of ``clustergym eval``, for example anneal, eplb or flashlb; by default the one that is best for the
    profile in our measurements (for counts: eplb)."""
    model: str | None = None
    """Model preset; by default the model that the trace names."""
    cluster: str | None = None
    """Cluster preset GPU-NODESxGPUS, or a YAML file; by default that of the live plan (--from), else h800-4x4."""
    slots: int | Literal["auto"] | None = None
    """Experts per layer that a GPU can hold; by default about a quarter more than needed. auto: as many spare ones as
    are worth their memory, from a curve of time per layer against KV cache."""
    gpu_memory: float | None = None
    """For --slots auto: GB per GPU for experts and KV cache; by default 80 % of the GPU's memory."""
    context: int = 8192
    """For --slots auto: tokens of a request at its end, prompt included."""
    requests: int | None = None
    """For --slots auto: requests that a GPU runs at once if memory allows; by default the tokens of a decode pass."""
    share: float = 0.75
    """Share of the trace to plan on: sequences drawn at random, or the first steps of counts. The rest is held out."""
    seconds: float = 30.0
    """Time budget of anneal in seconds."""
    iterations: int | None = None
    """Steps of anneal per layer instead of --seconds. The same seed then gives the same plan on any machine."""
    live: Annotated[Path | None, tyro.conf.arg(name="from", metavar="PLAN")] = None
    """The plan that is served now. Planners start from it, and it is kept if no gain over it is shown."""
    without_ranks: str | None = None
    """With --from: ranks that are lost, for example 15,16. Writes a plan for the ranks that are left, which are
    numbered anew in their order: experts without a copy replace spare copies, all others stay where they are.
    --max-moves allows more moves, for balance."""
    survive: Literal["1", "node"] | None = None
    """Keep a copy of every expert whatever single rank (1), or node, is lost. The plan without that is shown beside
    it."""
    max_moves: int | None = None
    """With --from: experts that may move, over all layers and GPUs. The moves that save most are made."""
    migration_budget: float | None = None
    """With --from: seconds that the transfer may take if all GPUs receive at once."""
    tokens_per_rank: int | None = None
    """Tokens that each GPU contributes to a pass; by default 32 (decode) or 128 (prefill). With mixed, those of
    prefill: decode has a quarter."""
    plan_passes: int = 32
    """Maximum number of passes to plan on, for planners that look at tokens."""
    observe_tokens: int | None = None
    """Plan on so many tokens of these passes, drawn at random; by default all."""
    passes: int = 20
    """Number of held-out passes to measure on; fewer if the held-out part is small. More do not shorten the interval,
    which comes from the sequences."""
    force: bool = False
    """Write the planner's plan even if no gain over EPLB is shown. By default EPLB's plan is written then (with --from:
    the live plan)."""
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
    if args.live is None and (args.max_moves is not None or args.migration_budget is not None):
        raise ValueError("--max-moves and --migration-budget need the live plan: give --from PLAN")
    if args.without_ranks is not None and (args.live is None or args.survive or args.report or args.json):
        raise ValueError("--without-ranks needs the live plan (--from PLAN), and no --survive, --report or --json")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds is {args.seconds}: expected more than 0")
    if args.tokens_per_rank is not None and not 1 <= args.tokens_per_rank <= MOST_TOKENS_PER_RANK:
        raise ValueError(f"--tokens-per-rank is {args.tokens_per_rank}: expected 1 … {MOST_TOKENS_PER_RANK}")
    if args.iterations is not None and args.iterations < 1:
        raise ValueError(f"--iterations is {args.iterations}: expected at least 1")
    if args.report is not None and args.report.suffix not in (".html", ".htm"):
        raise ValueError(f"--report {args.report}: expected a file that ends in .html")
    prepare_files(args.output, args.report, args.json)


def results(
    plan: Plan, chosen: EnginePlan, change: PlanChange | None, args: Command, line: str, curve: SlotCurve | None = None
) -> dict[str, Any]:
    def versus(planner: str, profile: str | None = None) -> dict[str, dict[str, float]]:
        found = {other: plan.versus(other, planner, profile) for other in (plan.reference, "eplb")}
        return {other: {"mean": mean, "ci95": half} for other, (mean, half) in found.items()}

    return {
        "planner": plan.planner,
        "written": plan.chosen,
        "engine": args.engine,
        "profile": plan.simulator.profile.name,
        "served_as": plan.served_as,
        "plan": str(args.output),
        "model": plan.model.name,
        "cluster": plan.simulator.cluster.name,
        "slots_per_gpu": plan.simulator.n_slots,
        "slot_curve": None if curve is None else asdict(curve),
        "trace": plan.trace,
        "planned_on": plan.planned_on,
        "held_out": plan.held_out,
        "reused": plan.reused,
        "exact": plan.exact,
        "versus": versus(plan.planner),
        "gain_shown": plan.gain_shown(),
        "stopped": plan.stopped,
        "memory": asdict(memory_use(chosen)),
        "change": None if change is None else asdict(change),
        "other_profiles": {profile: versus(plan.planner, profile) for profile in plan.other_profiles},
        "planners": [
            {
                "planner": o.planner, "served_us": o.served_us, "pass_us": o.samples.pass_us.tolist(),
                "other_profiles_us": {name: samples.mean_us for name, samples in (o.phases | o.other_profiles).items()},
                "balancedness": o.balancedness,
                "gpus_per_token": o.gpus_per_token, "inter_node_mb": o.inter_node_mb, "decision_s": o.decision_s,
                "filled_slots": o.filled,
            }
            for o in plan.outcomes.values()
        ],
        "command": line,
    }  # fmt: skip


def explain(plan: Plan, console: Console, survive: str | None = None) -> None:
    """Say what the plan is worth, and which one is written."""
    console.print(plan_table(plan))
    if plan.other_profiles:
        console.print(profiles_table(plan))
    if plan.outcomes[plan.planner].filled:
        filled = plan.outcomes[plan.planner].filled
        console.print(f"{plan.planner} left {filled} slots empty: filled with the replicas that help most")
    served, asked = plan.passes
    if plan.reused > 0 or served < asked:
        console.print(
            f"[yellow]the held-out part is smaller than asked: {served} of {asked} passes are served, and "
            f"{100 * plan.reused:.0f} % of their tokens were served before (the interval takes this into account)[/]"
        )
    for warning in plan.warnings():
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False, soft_wrap=True)
    if plan.stopped:
        console.print("[yellow]stopped by Ctrl-C: this is the best plan so far[/]")
    if plan.planner == plan.fallback:
        return
    console.print(f"{gain_sentence(plan)}, {plan.served_as}", highlight=False)
    if survive is not None:
        explain_survival(plan, "rank" if survive == "1" else survive, console)
    elif not plan.gain_shown():
        other = {"eplb": "EPLB", "live": "the live plan"}[plan.fallback]
        kept = {"eplb": "EPLB's plan is written", "live": "the live plan is kept"}[plan.fallback]
        written = "its plan is written anyway (--force)" if plan.force else kept
        remedy = "" if plan.force else "; --force writes the other one"
        relative, half = plan.versus(plan.fallback)
        why = "a longer trace shows more"
        if half > 0 and relative + half < 0:
            why = f"the interval is not below −{100 * plan.model_margin:.1f} %, which may be an error of the model"
        console.print(f"[yellow]no gain over {other} is shown: {written}{remedy}, {why}[/]")


def explain_survival(plan: Plan, what: str, console: Console) -> None:
    """Say what it costs that no expert is lost."""
    without = next(name for name in plan.outcomes if name not in ("static", "eplb", plan.planner))
    relative, half = plan.versus(without)
    spare = plan.best.placement[0].size - plan.model.n_experts
    console.print(
        f"every expert keeps a copy whatever single {what} is lost. It costs {100 * relative:+.1f} ± {100 * half:.1f} "
        f"% time against {without} without that, with the same {spare} redundant experts per layer",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def run_without_ranks(
    args: Command, console: Console, line: str, trace: TokenTrace | LoadTrace, simulator: Simulator, traffic: Traffic,
    live: EnginePlan | None,
) -> None:  # fmt: skip
    """Write a plan for the ranks that are left."""
    assert live is not None
    assert args.without_ranks is not None
    if not isinstance(trace, TokenTrace):
        raise ValueError("--without-ranks needs a token trace: counts do not show the time on the ranks that are left")
    cluster, lost = simulator.cluster, parse_ranks(args.without_ranks, simulator.n_gpus)
    found = plan_without(
        trace, simulator, traffic, live.placement, lost, args.max_moves, args.passes, args.share, args.seed
    )  # fmt: skip
    left = replace(cluster_left(cluster, lost), slots_per_gpu=live.n_slots)
    chosen = EnginePlan(found.placement, trace.layer_ids, live.model)
    write_plan(args.output, chosen, args.engine)
    profile = simulator.profile.name
    PlanMeta(args.engine, profile, False, live.model, left, profile, trace.name, line).write(args.output)
    # All GPUs receive at once; the first of them that has the expert may be on another node.
    kept = EnginePlan(np.delete(live.placement, lost, axis=1), trace.layer_ids, live.model)
    console.print(
        f"{found.lost_experts} experts have no copy on the {left.n_gpus} ranks that are left. "
        f"{compare_plans(kept, chosen, left).describe()}. Numbered anew: {renumbered(simulator.n_gpus, lost)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"µs per layer and forward pass, {profile}, held out: {found.full_us:.1f} before the loss; {found.us:.1f} now; "
        f"{found.eplb_us:.1f} with EPLB's flat plan for these ranks, which moves {found.eplb_moves:,} experts",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(escape(f"plan: {args.output}"), soft_wrap=True)
    if left.n_nodes == 1 and cluster.n_nodes > 1 and left.n_gpus > cluster.gpus_per_node:
        console.print("[yellow]the nodes have not equally many GPUs left: engines are started with as many on each[/]")
        return
    start = launch(args.output, chosen, args.engine, profile.split(" (")[0], left.n_nodes)
    console.print(escape(f"load it with: {start.command}"), highlight=False, soft_wrap=True)


def explain_change(plan: Plan, change: PlanChange, console: Console) -> None:
    """Say what it costs to change from the live plan, and when that is paid back."""
    console.print(f"change from the live plan: {change.describe()}", highlight=False, soft_wrap=True)
    saved_us = (plan.outcomes["live"].served_us - plan.best.served_us) * len(plan.layer_ids)
    if change.moves and saved_us > 0:
        passes = change.seconds * 1e6 / saved_us
        console.print(f"a pause of {change.duration} is paid back after {passes:,.0f} forward passes", highlight=False)


def live_plan(path: Path, model: ModelSpec, cluster: ClusterSpec, layer_ids: npt.NDArray[np.int64]) -> EnginePlan:
    """The plan of ``--from`` for the layers of the trace. An MTP layer that it lacks is in the default order."""
    plan = load_plan(path, detect_engine(path), model, cluster.n_gpus)
    check_plan(plan)
    rows = dict(zip(plan.layer_ids.tolist(), plan.placement, strict=True))
    default = np.array(plan.default_row(), np.int16).reshape(plan.n_gpus, plan.n_slots)
    placement = np.stack([rows.get(layer, default) for layer in layer_ids.tolist()])
    return EnginePlan(placement, layer_ids, model)


def of_phase(path: Path | None, phase: str) -> Path | None:
    return None if path is None else path.with_stem(f"{path.stem}-{phase}")


def serving(
    args: Command, trace: TokenTrace | LoadTrace, model: ModelSpec, cluster: ClusterSpec
) -> tuple[Simulator, Traffic, list[OtherPhase]]:
    """(simulator, traffic, other phases) that the plan is for. Counts do not tell phases apart."""
    mixed = args.phase == "mixed" or (args.phase is None and args.profile is None)
    if mixed and args.profile is not None:
        raise ValueError(f"--phase mixed serves with the engine's own profiles: leave out --profile {args.profile}")
    if args.decode_share is not None and not mixed:
        raise ValueError("--decode-share needs --phase mixed")
    if mixed and isinstance(trace, TokenTrace):
        share = decode_share(trace) if args.decode_share is None else args.decode_share
        return serve_both_phases(args.engine, model, cluster, share, args.tokens_per_rank)
    if args.profile is None and not mixed:
        profile = next(one for one in phases_of(args.engine) if one.phase == args.phase)
    else:
        profile = chosen_profile(args.profile, args.engine, None if mixed else args.phase)
    if profile.engine != args.engine:
        raise ValueError(f"profile {profile.name!r} is of engine {profile.engine!r}, not of {args.engine!r}")
    return Simulator(model, cluster, profile), Traffic(profile.phase, args.tokens_per_rank), []


def choose_slots(
    args: Command, trace: TokenTrace | LoadTrace, model: ModelSpec, cluster: ClusterSpec, console: Console
) -> SlotCurve:
    """Plan for several numbers of slots on a part of the traffic to plan on: the rest measures the plan only."""
    part = trace.split(args.share, seed=args.seed)[0] if isinstance(trace, TokenTrace) else trace.split(args.share)[0]
    sizes = Sizes(args.share, args.plan_passes, args.observe_tokens, args.passes, seed=args.seed)
    simulator, traffic, other_phases = serving(args, trace, model, cluster)
    name = args.planner or default_planner(simulator.profile, trace)
    check_arguments(args, name)
    decode = [phase.tokens // cluster.n_gpus for phase in other_phases if phase.simulator.profile.phase == "decode"]
    if simulator.profile.phase == "decode":
        decode = [traffic.sizes[1]]
    wanted = args.requests or (decode[0] if decode else 1)

    with progress_bar(console) as shown, ctrl_c_requests_stop(lambda: shown.begin("stopping", None)) as stop:

        def plan_with(cluster: ClusterSpec) -> Plan:
            simulator, traffic, phases = serving(args, trace, model, cluster)
            return make_plan(
                part, simulator, name, traffic=traffic, other_phases=phases, sizes=sizes, iterations=args.iterations,
                seconds=args.seconds / 4, force=True, stop=stop, compare_profiles=False,
                progress=lambda step, seconds: shown.begin(f"{cluster.slots_per_gpu} slots: {step}", seconds),
            )  # fmt: skip

        curve = slot_curve(
            plan_with, model, cluster, len(trace.layer_ids), wanted=wanted, context=args.context,
            memory_gb=args.gpu_memory,
        )  # fmt: skip
    console.print(slot_table(curve))
    console.print(curve.describe(), highlight=False, soft_wrap=True)
    return curve


def run(args: Command, console: Console, line: str) -> None:
    if bool(args.trace) == bool(args.tokens):
        raise ValueError("give one trace: TRACE, or --tokens TRACE")
    args = replace(args, trace=args.trace or args.tokens or "")
    if args.phase != "both":
        run_phase(args, console, line)
        return
    phases: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    for phase in phases:
        output = args.output.with_stem(f"{args.output.stem}-{phase}")
        report, results = of_phase(args.report, phase), of_phase(args.json, phase)
        console.print(f"[bold]{phase}[/]")
        run_phase(replace(args, phase=phase, output=output, report=report, json=results), console, line)


def run_phase(args: Command, console: Console, line: str) -> None:
    trace = load_any_trace(args.trace)
    counts = None if args.loads is None else LoadTrace.load(args.loads)
    if counts is not None and not isinstance(trace, TokenTrace):
        raise ValueError(f"--loads needs tokens, but {args.trace} has counts only")
    model = model_of(trace, args.model)
    check_layers(trace.layer_ids, model)
    slots, curve = args.slots, None
    if isinstance(slots, int) and slots > model.n_experts:
        raise ValueError(
            f"--slots is {slots}, but {model.name} has {model.n_experts} experts: one copy per GPU is enough"
        )
    meta = None if args.live is None or args.cluster is not None else read_meta(args.live)
    known = args.cluster or (meta.cluster if meta else DEFAULT_CLUSTER)
    cluster = get_cluster(known, **({"slots_per_gpu": slots} if isinstance(slots, int) else {}))
    if slots == "auto":
        if args.live is not None:
            raise ValueError("--slots auto chooses the number of slots, but a live plan (--from) has its own")
        curve = choose_slots(args, trace, model, cluster, console)
        cluster, slots = replace(cluster, slots_per_gpu=curve.chosen.slots), curve.chosen.slots
    live = None if args.live is None else live_plan(args.live, model, cluster, trace.layer_ids)
    if live is not None and slots is None:
        cluster = get_cluster(known, slots_per_gpu=live.n_slots)
    get_engine(args.engine)
    simulator, traffic, other_phases = serving(args, trace, model, cluster)
    profile = simulator.profile
    if live is not None and live.n_slots != simulator.n_slots:
        raise ValueError(
            f"{args.live} has {live.n_slots} slots per GPU, but --slots is {slots}: engines cannot change it"
        )
    planner = args.planner or default_planner(profile, trace)
    sizes = Sizes(args.share, args.plan_passes, args.observe_tokens, args.passes, seed=args.seed)
    check_arguments(args, planner)
    if args.without_ranks is not None:
        run_without_ranks(args, console, line, trace, simulator, traffic, live)
        return
    limited = args.max_moves is not None or args.migration_budget is not None
    limit = Limit(args.max_moves, args.migration_budget) if limited else None
    with progress_bar(console) as shown, ctrl_c_requests_stop(lambda: shown.begin("stopping", None)) as stop:
        plan = make_plan(
            trace, simulator, planner, traffic=traffic, other_phases=other_phases, sizes=sizes, seconds=args.seconds,
            iterations=args.iterations, force=args.force, survive="rank" if args.survive == "1" else args.survive,
            live=None if live is None else live.placement, limit=limit, loads=counts, progress=shown.begin, stop=stop,
        )  # fmt: skip
    chosen = EnginePlan(plan.best.placement, trace.layer_ids, model)
    write_plan(args.output, chosen, args.engine)
    meta = PlanMeta(
        args.engine, profile.name, bool(other_phases), model, replace(cluster, slots_per_gpu=chosen.n_slots),
        plan.served_as, trace.name, line,
    )  # fmt: skip
    meta.write(args.output)
    explain(plan, console, args.survive)
    change = None if live is None else compare_plans(live, chosen, cluster)
    if change is not None:
        explain_change(plan, change, console)
    # A profile of another phase is started like the one it is made from.
    start = launch(args.output, chosen, args.engine, profile.name.split(" (")[0], cluster.n_nodes, bool(other_phases))
    console.print(escape(f"plan of {plan.chosen}: {args.output}"), soft_wrap=True)
    console.print(escape(f"load it with: {start.command}"), highlight=False, soft_wrap=True)
    for warning in start.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False, soft_wrap=True)
    try:
        if args.report is not None:
            write_report(args.report, plan, args.engine, start.command, line, change, slots=curve)
            console.print(escape(f"report: {args.report}"))
        if args.json is not None:
            write_atomically(args.json, json.dumps(results(plan, chosen, change, args, line, curve), indent=2) + "\n")
            console.print(escape(f"results: {args.json}"))
    except (OSError, MemoryError) as error:
        raise ValueError(f"{args.output} is written and complete, but not its report: {error}") from error
