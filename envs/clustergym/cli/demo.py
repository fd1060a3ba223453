"""``clustergym demo``: one HTML page with the traffic of a bundled trace, all planners, and two placements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from clustergym.cli.common import prepare_files
from clustergym.moe_placement.profiles import get_profile
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import model_for
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.evaluation import Protocol, compare
from clustergym.plans.engines import EnginePlan, launch
from clustergym.plans.planning import Sizes, make_plan
from clustergym.plans.report.html import write_report
from clustergym.plans.report.story import Story
from clustergym.plans.report.tables import gain_sentence, results_table
from clustergym.traces import TokenTrace

PLANNERS = (
    "static", "round-robin", "eplb", "eplb-hierarchical", "flashlb", "swift", "hot-everywhere", "co-occurrence",
    "affinity-groups", "greedy", "anneal", "oracle",
)  # fmt: skip
"""Planners of the plot."""


@dataclass
class Command:
    """Write one HTML page: statistics of a trace, all planners, time per layer, the placement before and after.

    Example: clustergym demo -o demo.html
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("demo.html")
    """Page to write. It needs no network and no server."""
    trace: str = "tiny_moe"
    """A token trace: .npz, .npy or the name of a bundled one."""
    cluster: str = "h800-4x4"
    """Cluster GPU-NODESxGPUS, for example h800-4x4."""
    profile: str = "sglang-prefill"
    """How the engine serves."""
    planner: str = "anneal"
    """Planner whose placement is shown beside EPLB's."""
    planners: tuple[str, ...] = PLANNERS
    """Planners of the plot."""
    seconds: float = 10.0
    """Time budget of the planner."""
    tokens_per_rank: int | None = None
    """Tokens that each GPU contributes to a pass; by default 32 (decode) or 128 (prefill)."""
    seed: int = 0
    """Seed of the split into planning and held-out part, and of the planners."""


def run(args: Command, console: Console, line: str) -> None:
    trace, profile = TokenTrace.load(args.trace), get_profile(args.profile)
    simulator = Simulator(model_for(trace, None), args.cluster, profile)
    traffic = Traffic(profile.phase, args.tokens_per_rank, schedule="stationary")
    prepare_files(args.output)
    names = list(dict.fromkeys(["eplb", *args.planners]))
    with console.status("compiling") as status:
        results = compare(
            trace, simulator, names, Protocol(traffic, intervals=4, seed=args.seed),
            progress=lambda name: status.update(f"measuring {name}"),
        )  # fmt: skip
        status.update(f"planning with {args.planner}, {args.seconds:.0f} s")
        plan = make_plan(
            trace,
            simulator,
            args.planner,
            traffic=traffic,
            sizes=Sizes(seed=args.seed),
            seconds=args.seconds,
            force=True,
        )
        status.update("writing the page")
        story = Story(trace, results, simulator.n_gpus)
        chosen = EnginePlan(plan.best.placement, trace.layer_ids, simulator.model)
        start = launch(Path("plan.json"), chosen, profile.engine, profile.name, simulator.cluster.n_nodes)
        write_report(args.output, plan, profile.engine, start.command, line, story=story)
    console.print(results_table(results, f"{trace.name} on {simulator.cluster.name}, {profile.name}, planned once"))
    console.print(gain_sentence(plan), highlight=False)
    console.print(escape(f"page: {args.output}"))
