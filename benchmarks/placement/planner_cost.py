"""Decision time of the planners at the size of a large deployment, and the memory that they need.

    python benchmarks/placement/planner_cost.py                 # planners on loads: 58 layers × 256 experts × 64 GPUs
    python benchmarks/placement/planner_cost.py --anneal 60        # also planners on 32k tokens; annealing takes 60 s
    python benchmarks/placement/planner_cost.py --repeats 5 --json out.json

Loads are synthetic: a lognormal popularity per layer and expert that changes a little from interval to interval, so
that planners that keep good layers have something to keep. Every planner (``static`` too) starts from EPLB's plan of
the first interval and sees the same intervals. The first decision compiles: not counted. ``balance`` is the mean load
over that of the busiest GPU in the interval after the plan, ``moves`` the replicas that some GPU must fetch per layer
and decision.

Planners on tokens plan on one half of the sequences of a synthetic trace of DeepSeek-V3's size and serve passes of the
other half, profile sglang-prefill. The first plans on a few tokens compile: not counted.
``benchmarks/speed/anneal_cost.py`` has the cost of single annealing steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, Placement, Simulator, Traffic
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.eplb import EPLB, balance
from clustergym.planners.evaluation import compile_on
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN
from clustergym.planners.recorded import LoadInterval
from clustergym.planners.registry import make_planner, planners_on_loads
from clustergym.traces import SyntheticConfig, synthetic_trace

PASSES = 4
TOKENS = 8192
"""Per pass"""


def intervals(layers: int, experts: int, n: int, skew: float, change: float, seed: int) -> list[Interval]:
    """``n`` intervals of counts of four passes with 8 experts per token."""
    rng = np.random.default_rng(seed)
    heat = rng.normal(0, skew, (layers, experts))
    found: list[Interval] = []
    for _ in range(n):
        heat = heat + rng.normal(0, change, heat.shape)
        share = np.exp(heat)
        mean = share / share.sum(1, keepdims=True) * 8 * TOKENS
        found.append(LoadInterval(rng.poisson(mean, (PASSES, layers, experts)), TOKENS))
    return found


def moves(plan: Placement, before: Placement, n_experts: int) -> float:
    """Replicas that some GPU must fetch, mean over layers."""
    held = np.zeros((2, *plan.shape[:2], n_experts + 1), bool)
    for i, placement in enumerate((plan, before)):
        ids = np.where(placement < 0, n_experts, placement).astype(np.int64)
        np.put_along_axis(held[i], ids, True, axis=2)
    return float((held[0] & ~held[1])[..., :-1].sum() / len(plan))


def peak_gb() -> float:
    """The most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_on_loads(sim: Simulator, args: argparse.Namespace) -> list[dict[str, Any]]:
    history = intervals(args.layers, args.experts, args.repeats + 2, args.skew, args.change, args.seed)
    eplb = EPLB(sim)
    start = eplb.pack(eplb.loads(history[0]))
    rows: list[dict[str, Any]] = []
    for name in planners_on_loads():
        make_planner(name, sim).plan(history[:1], sim.static(args.layers))  # compile
        planner, placement = make_planner(name, sim), start
        seconds, balances, fetched = [], [], []
        for i in range(1, args.repeats + 1):
            began = time.perf_counter()
            plan = planner.plan(history[: i + 1], placement)
            seconds.append(time.perf_counter() - began)
            balances.append(float(balance(eplb.loads(history[i + 1]), sim.check(plan)).mean()))
            fetched.append(moves(plan, placement, args.experts))
            placement = plan
        rows.append({"planner": name, "seconds": seconds, "balance": np.mean(balances), "moves": np.mean(fetched)})
    return rows


def measure_on_tokens(sim: Simulator, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan on one half of a synthetic trace, serve the other half."""
    config = SyntheticConfig(n_tokens=4 * args.tokens, n_layers=args.layers, n_experts=args.experts, top_k=8)
    before, after = synthetic_trace(config, seed=args.seed).split(0.5, seed=args.seed)
    sim = sim.spread_migration(PASSES_OF_A_PERMANENT_PLAN)
    traffic = Traffic("prefill", tokens_per_rank=args.tokens // 4 // sim.n_gpus, sampled_passes=2)
    seen = sample_passes(before, sim.n_gpus, traffic, 4, args.seed)
    to_serve = sample_passes(after, sim.n_gpus, traffic, 4, args.seed)
    static = sim.static(args.layers)
    rows: list[dict[str, Any]] = []
    for name in ("eplb", "co-occurrence", "affinity-groups", "anneal"):
        anneals = name == "anneal"
        make_planner(name, sim, **({"iterations": 10} if anneals else {})).plan([compile_on(before, sim)], static)
        planner = make_planner(name, sim, **({"seconds": args.anneal} if anneals else {}))
        began, cpu = time.perf_counter(), time.process_time()
        plan = planner.plan([seen], static)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        time_us = float(sim.evaluate(to_serve, sim.check(plan)).time_us.mean())
        rows.append(
            {"planner": name, "seconds": seconds, "cpu_seconds": cpu_seconds, "time_us": time_us, "peak_gb": peak_gb()}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--slots", type=int, default=5, help="slots per GPU")
    parser.add_argument("--skew", type=float, default=0.8, help="standard deviation of the logarithm of the loads")
    parser.add_argument("--change", type=float, default=0.1, help="the same of its change from interval to interval")
    parser.add_argument("--repeats", type=int, default=3, help="decisions that are measured per planner")
    parser.add_argument("--anneal", type=float, default=0.0, help="seconds for annealing; 0: no planners on tokens")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens that planners on tokens see")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    model = ModelSpec("large", args.layers, args.experts, 8, 7168, 2048, weight_bytes=1, n_groups=8)
    sim = Simulator(model, ClusterSpec("large", args.nodes, args.gpus_per_node, args.slots))
    console, rows = Console(width=110), measure_on_loads(sim, args)
    size = f"{args.layers} layers × {args.experts} experts × {sim.n_gpus} GPUs, {sim.n_gpus * sim.n_slots} slots"
    table = Table(title=f"Decision time for all layers ({args.repeats} decisions)\n{size}")
    for column in ("planner", "median ms", "least ms", "most ms", "balance", "moves per layer"):
        table.add_column(column, justify="left" if column == "planner" else "right")
    for row in rows:
        ms = 1e3 * np.array(row["seconds"])
        table.add_row(
            str(row["planner"]), f"{np.median(ms):.1f}", f"{ms.min():.1f}", f"{ms.max():.1f}",
            f"{row['balance']:.3f}", f"{row['moves']:.1f}",
        )  # fmt: skip
    console.print(table)
    on_tokens = measure_on_tokens(sim, args) if args.anneal > 0 else []
    if on_tokens:
        table = Table(title=f"One plan of all layers on {args.tokens} tokens\n{size}")
        for column in ("planner", "seconds", "seconds of CPU", "time of a pass / EPLB's", "peak memory so far, GB"):
            table.add_column(column, justify="left" if column == "planner" else "right")
        for row in on_tokens:
            table.add_row(
                str(row["planner"]), f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}",
                f"{row['time_us'] / on_tokens[0]['time_us']:.3f}", f"{row['peak_gb']:.2f}",
            )  # fmt: skip
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"size": size, "on_loads": rows, "on_tokens": on_tokens}, indent=1))


if __name__ == "__main__":
    main()
