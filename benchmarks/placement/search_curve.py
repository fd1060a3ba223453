"""What a search finds in how much time, at the size of DeepSeek-V3: 256 experts, top-8, 32 and 64 GPUs.

    python benchmarks/placement/search_curve.py                  # about 20 minutes on two cores; run again to resume
    python benchmarks/placement/search_curve.py --quick          # one cluster, two traces, small budgets
    python benchmarks/placement/search_curve.py --plot curve.png

Plans are made on one half of the sequences of a synthetic trace with DeepSeek-V3's group-limited routing, and serve
passes of 4096 tokens of the other half (profile sglang-prefill, balanced ranks, no migration). The budget is the time
of one core per layer: a plan of 58 layers on two cores takes 29 times as long. ``exact steps`` is annealing without the
steps on the estimate. The interval is over traces, which share nothing but their parameters.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numba import config

from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import ci95
from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, Simulator
from clustergym.moe_placement.streams import layer_first
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN
from clustergym.planners.registry import make_planner
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

EXACT = "anneal, exact steps"
SEARCHES: dict[str, dict[str, Any]] = {"anneal": {}, EXACT: {"estimate_steps": 0}}
PASS_TOKENS = 4096
SLOTS = {32: 9, 64: 5}


@dataclass
class Args:
    clusters: tuple[str, ...] = ("8x8", "4x8")
    budgets_ms: tuple[float, ...] = (3, 10, 30, 70, 170, 500, 2000)
    """Milliseconds of one core per layer."""
    traces: int = 5
    """Synthetic traces with different seeds."""
    layers: int = 4
    output: Path = Path("runs/search_curve.jsonl")
    """File of JSON lines. What it has is not measured again."""
    plot: Path | None = None
    """Write a plot to this file."""
    quick: bool = False


def passes(trace: TokenTrace, n: int, n_gpus: int) -> Interval:
    """``n`` passes of random tokens on balanced ranks."""
    rows = np.random.default_rng(0).permutation(trace.n_tokens)[: n * PASS_TOKENS].reshape(n, PASS_TOKENS)
    return Interval.even(layer_first(trace), rows.astype(np.int32), n_gpus)


def measure(args: Args, cluster: str, seed: int, done: set[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The time of every plan as a share of EPLB's."""
    nodes, per_node = map(int, cluster.split("x"))
    layout = SyntheticConfig(
        n_tokens=65_536, n_layers=args.layers, n_experts=256, top_k=8, n_groups=8, group_limit=4
    )  # fmt: skip
    before, after = synthetic_trace(layout, seed=seed).split(0.5, seed=seed)
    model = ModelSpec("large", args.layers, 256, 8, 7168, 2048, weight_bytes=1, n_groups=8)
    spec = ClusterSpec("large", nodes, per_node, SLOTS[nodes * per_node])
    sim = Simulator(model, spec, "sglang-prefill", PASSES_OF_A_PERMANENT_PLAN)
    seen, served = passes(before, 7, sim.n_gpus), passes(after, 4, sim.n_gpus)
    eplb = make_planner("eplb", sim).plan([seen], sim.static(args.layers))
    reference = sim.evaluate(served, eplb).time_us
    found = []
    for name, options in SEARCHES.items():
        make_planner("anneal", sim, seconds=0.05 * args.layers, **options).plan([seen], eplb)  # compile
        make_planner("anneal", sim, iterations=10, **options).plan([seen], eplb)
        for ms in args.budgets_ms:
            if (cluster, seed, name, ms, args.layers) in done:
                continue
            seconds = ms / 1e3 * args.layers / min(config.NUMBA_NUM_THREADS, args.layers)
            began, cpu = time.perf_counter(), time.process_time()
            plan = make_planner("anneal", sim, seed=seed, seconds=seconds, **options).plan([seen], eplb)
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            share = float((sim.evaluate(served, plan).time_us / reference).mean())
            found.append(
                {
                    "cluster": cluster, "seed": seed, "planner": name, "budget_ms": ms, "layers": args.layers,
                    "share": share, "wall_ms": 1e3 * wall_s / args.layers, "cpu_ms": 1e3 * cpu_s / args.layers,
                }
            )  # fmt: skip
    return found


def table(lines: list[dict[str, Any]]) -> str:
    text = [
        "| cluster | planner | budget, ms per layer | used, CPU ms | share of EPLB's time | against exact steps, % |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    keys = dict.fromkeys((x["cluster"], x["planner"], x["budget_ms"]) for x in lines)
    for cluster, planner, ms in sorted(keys, key=lambda k: (k[0], k[2], k[1])):
        own = {x["seed"]: x for x in lines if (x["cluster"], x["planner"], x["budget_ms"]) == (cluster, planner, ms)}
        plain = {
            x["seed"]: x["share"] for x in lines if (x["cluster"], x["planner"], x["budget_ms"]) == (cluster, EXACT, ms)
        }
        shares = [x["share"] for x in own.values()]
        both = [100 * (own[s]["share"] / plain[s] - 1) for s in own if s in plain]
        gain = f"{np.mean(both):+.1f} ± {ci95(both):.1f}" if planner == "anneal" and both else ""
        cpu = np.mean([x["cpu_ms"] for x in own.values()])
        text.append(
            f"| {cluster} | {planner} | {ms:g} | {cpu:.0f} | {np.mean(shares):.3f} ± {ci95(shares):.3f} | {gain} |"
        )
    return "\n".join(text)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    plt = require_matplotlib()
    clusters = sorted({x["cluster"] for x in lines})
    figure, axes = plt.subplots(1, len(clusters), figsize=(5 * len(clusters), 3.6), sharey=True, squeeze=False)
    for axis, cluster in zip(axes[0], clusters, strict=True):
        for name in SEARCHES:
            own = [x for x in lines if x["cluster"] == cluster and x["planner"] == name]
            budgets = sorted({x["budget_ms"] for x in own})
            shares = [[x["share"] for x in own if x["budget_ms"] == ms] for ms in budgets]
            axis.errorbar(
                budgets, [np.mean(s) for s in shares], [ci95(s) for s in shares], marker="o", capsize=3, label=name
            )
        axis.set(title=f"{cluster} GPUs", xscale="log", xlabel="ms of one core per layer")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("time of a pass / EPLB's")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(args: Args) -> None:
    if args.quick:
        args = replace(args, clusters=args.clusters[:1], traces=2, budgets_ms=(10, 70))
    lines = [json.loads(x) for x in args.output.read_text().splitlines()] if args.output.is_file() else []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    done = {(x["cluster"], x["seed"], x["planner"], x["budget_ms"], x["layers"]) for x in lines}
    for cluster in args.clusters:
        for seed in range(args.traces):
            found = measure(args, cluster, seed, done)
            with open(args.output, "a") as file:
                file.writelines(json.dumps(x) + "\n" for x in found)
            lines += found
            print(f"{cluster}, trace {seed}: {len(found)} plans", flush=True)
    print(table(lines))
    if args.plot is not None:
        plot(lines, args.plot)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
