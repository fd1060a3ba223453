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
from clustergym.cli.profiles import chosen_profile
from clustergym.common.files import write_atomically
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster, model_for
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.evaluation import Protocol, Result, compare, deal_streams
from clustergym.planners.registry import PLANNERS, planner_class
from clustergym.plans.report.plots import plot_results
from clustergym.plans.report.tables import results_table
from clustergym.traces.token_trace import DEFAULT_TRACE, load_traces


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
    engine: str = "sglang"
    """Engine that serves: sglang, vllm, tensorrt-llm or vllm-ascend. It sets the default of --profile."""
    profile: str | None = None
    """How the engine serves: sglang-prefill, sglang-decode, sglang-lp, vllm, vllm-deepep, tensorrt-llm or
    vllm-ascend; by default the first profile of the engine. SGLang 0.5.16 changed its static dispatch:
    sglang-prefill-0.5.16 and sglang-decode-0.5.16."""
    phase: Literal["decode", "prefill"] | None = None
    """Serve this phase instead of the profile's."""
    planner: list[str] = field(default_factory=lambda: ["all"])
    """One or more of static, round-robin, eplb, eplb-hierarchical, flashlb, swift, hot-everywhere, co-occurrence,
    affinity-groups, greedy and anneal (with --split validation or test they learn from the train split), forecast (sees
    other tokens of the next domains), oracle (sees the next passes) and exact (small instances only). 'all' means all
    but exact."""
    schedule: str = "drift"
    """stationary: plan once on one part of the trace, serve the rest. drift, switch, replay: plan after each
    interval."""
    passes: int | None = None
    """Forward passes of an interval that are simulated; by default 4 (decode) or 2 (prefill)."""
    tokens_per_rank: int | None = None
    """Tokens that each GPU contributes to a pass; by default 32 (decode) or 128 (prefill)."""
    intervals: int = 7
    """Number of intervals served per stream."""
    streams: int = 1
    """Number of streams. Two or more give a 95 % confidence interval, from disjoint parts of the sequences. With the
    stationary schedule, resampled sequences always give one."""
    drift_rate: float = 0.5
    """Step of the mixture walk (drift) or probability of another domain (switch), per interval."""
    rank_imbalance: float = 0.0
    """Spread of the shares of the tokens that the GPUs contribute. 0 is balanced, as engines are."""
    allow_reuse: bool = False
    """Serve tokens again when a stream has used up its sequences. The table says how many."""
    split: Literal["train", "validation", "test", "all"] = "all"
    """Part of the trace to serve. Planners may learn from 'train'."""
    holdout: float = 0.5
    """Share of the tokens of each domain that is served and never planned on, with the stationary schedule."""
    plan_passes: int = 32
    """Maximum number of passes to plan on with the stationary schedule, for planners that look at tokens."""
    observe_tokens: int | None = None
    """Show planners only so many tokens of what they observe, drawn at random; by default all."""
    passes_per_interval: int = 1000
    """Forward passes between two placement decisions. The time of a migration is divided by it."""
    migration: Literal["blocking", "async"] = "blocking"
    """blocking: serving stops while weights move. async: the old placement serves until they have arrived."""
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
        return [name for name in PLANNERS if not planner_class(name).small_only]
    for name in args.planner:
        planner_class(name)  # an error if there is none
    return args.planner


def run(args: Command, console: Console, line: str) -> None:
    trace = load_traces(args.trace)
    if args.layers is not None:
        trace = trace.select(layers=args.layers)
    cluster = get_cluster(args.cluster, **({} if args.slots is None else {"slots_per_gpu": args.slots}))
    profile = chosen_profile(args.profile, args.engine, args.phase)
    model = model_for(trace, args.model)
    simulator = Simulator(model, cluster, profile, args.passes_per_interval, args.migration)
    names = planner_names(args)
    traffic = Traffic(
        profile.phase, args.tokens_per_rank, args.passes, args.schedule, args.drift_rate, args.rank_imbalance,
        args.allow_reuse,
    )  # fmt: skip
    protocol = Protocol(
        traffic, args.intervals, args.streams, args.seed, args.split, args.holdout, args.plan_passes,
        args.observe_tokens,
    )  # fmt: skip
    # An error of too little data comes before the work.
    deal_streams(protocol.parts(trace)[1], cluster.n_gpus, protocol)
    prepare_outputs(args.json, args.plot)
    passes, tokens = traffic.sizes
    console.print(
        f"[bold]{escape(trace.name)}[/]: {trace.n_tokens} tokens, {trace.n_layers} layers, "
        f"top-{trace.top_k} of {trace.n_experts}; "
        f"{cluster.n_nodes} × {cluster.gpus_per_node} GPUs with {simulator.n_slots} slots per layer; "
        f"profile {escape(profile.name)} ({escape(profile.about)}); {args.schedule}, {args.streams} stream(s) × "
        f"{args.intervals} intervals, of each {passes} passes of {tokens} tokens per GPU"
    )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:18s}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    found: list[Result] = []

    def write_results() -> None:
        assert args.json is not None
        document = {
            "planners": [result.as_dict() for result in found],
            "complete": len(found) == len(names),
            "trace": trace.name,
            "model": simulator.model.name,
            "cluster": cluster.name,
            "profile": profile.name,
            "phase": profile.phase,
            "schedule": args.schedule,
            "migration": args.migration,
            "tokens_per_rank": tokens,
            "sampled_passes": passes,
            "passes_per_interval": args.passes_per_interval,
            "observe_tokens": args.observe_tokens,
            "intervals": args.intervals,
            "streams": args.streams,
            "groups": found[0].groups,
            "reused": found[0].reused,
            "split": args.split,
            "seed": args.seed,
            "command": line,
        }
        write_atomically(args.json, json.dumps(document, indent=2) + "\n")

    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=len(names))

        def done(result: Result) -> None:
            """Show and write each result as it comes."""
            found.append(result)
            bar.update(task, completed=len(found))
            if len(names) > 1:
                bar.console.print(
                    f"[{len(found)}/{len(names)}] {result.planner}: {result.total_us:.1f} µs, decision "
                    f"{result.decision_ms:.2f} ms", markup=False, highlight=False,
                )  # fmt: skip
            if args.json is not None:
                write_results()

        results = compare(
            trace, simulator, names, protocol, done=done,
            progress=lambda name: bar.update(task, description=name),
        )  # fmt: skip
    title = f"{trace.name} on {cluster.name}, {profile.name}, {args.schedule}"
    console.print(results_table(results, title))
    if args.plot is not None:
        plot_results(results, title, args.plot)
        console.print(escape(f"plot: {args.plot}"))
    if args.json is not None:
        console.print(escape(f"results: {args.json}"))
