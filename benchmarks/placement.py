"""Compare planners on real routing traces, with a stationary schedule (plan once) and a drifting one (plan per window).

Looks for DeepSeek-V2-Lite and gpt-oss-20b traces in ``--data``. Without them it uses the bundled synthetic trace. The
threshold of EPLB is tuned on the planning part first, so that the comparison is with the strongest EPLB.

    python benchmarks/placement.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console

from clustergym import TokenTrace
from clustergym.moe_placement import Simulator
from clustergym.moe_placement.evaluation import Protocol, Result, compare, evaluate_planner
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.report.plots import plot_results
from clustergym.moe_placement.report.tables import results_table

EPLB_NAMES = ("eplb-once", "eplb", "eplb-hierarchical", "eplb-ema", "eplb-threshold")
STATIONARY_NAMES = (
    "static", "eplb", "eplb-hierarchical", "incremental", "grouping", "swap-greedy", "anneal-max", "anneal", "oracle",
)  # fmt: skip
DRIFT_NAMES = (
    "static", *EPLB_NAMES, "incremental", "grouping", "random-best", "bottleneck", "bottleneck-8", "swap-greedy",
    "anneal-max", "anneal", "anneal-4", "anneal-even", "oracle",
)  # fmt: skip


@dataclass
class Args:
    data: Path = Path(__file__).resolve().parents[2] / "shared" / "data" / "moe"
    """Folder with deepseek_v2_lite_*.npz and gpt_oss_20b_decode.npz."""
    clusters: tuple[str, ...] = ("h800-4x4", "h800-4x8")
    models: tuple[str, ...] = ("deepseek-v2-lite", "gpt-oss-20b")
    schedules: tuple[str, ...] = ("stationary", "drift")
    streams: int = 4
    windows: int = 7
    window_tokens: int = 2048
    layers: int = 26
    """Number of evenly spaced layers of each trace to use; fewer is faster."""
    iterations: int = 20000
    """Annealing steps per layer on the stationary schedule, where a plan is made once."""
    seed: int = 0
    output: Path = Path("runs/placement")
    """Prefix of the .json and .png files."""


def traces(args: Args) -> dict[str, TokenTrace]:
    found = {}
    parts = sorted(args.data.glob("deepseek_v2_lite_*.npz"))
    if parts and "deepseek-v2-lite" in args.models:
        found["deepseek-v2-lite"] = TokenTrace.concat(
            [TokenTrace.load(p) for p in parts], [p.stem.removeprefix("deepseek_v2_lite_") for p in parts]
        )
    if (args.data / "gpt_oss_20b_decode.npz").is_file() and "gpt-oss-20b" in args.models:
        found["gpt-oss-20b"] = TokenTrace.load(args.data / "gpt_oss_20b_decode.npz")
    return found or {"deepseek-v2-lite": TokenTrace.load("synthetic")}


def tuned_threshold(trace: TokenTrace, simulator: Simulator, protocol: Protocol) -> float:
    """The threshold with the lowest total on streams from the planning part."""
    train, _ = protocol.split(trace)
    tuning = Protocol(
        protocol.schedule, protocol.windows, protocol.window_tokens, protocol.rate, 3, protocol.seed + 1000
    )
    totals = {}
    for threshold in (1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5):
        planner = EPLB(simulator, ema=0.5, threshold=threshold)
        totals[threshold] = evaluate_planner(planner, "eplb-threshold", train, train, tuning).total_us
    return min(totals, key=totals.__getitem__)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console(width=140)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    document: list[dict[str, object]] = []
    summary = []
    for model, whole in traces(args).items():
        picked = np.unique(np.linspace(0, whole.n_layers - 1, min(args.layers, whole.n_layers)).round().astype(int))
        trace = whole.select(layers=picked.tolist())
        for cluster in args.clusters:
            simulator = Simulator(model, cluster)
            for schedule in args.schedules:
                protocol = Protocol(schedule, args.windows, args.window_tokens, streams=args.streams, seed=args.seed)
                names, options = DRIFT_NAMES, dict[str, dict[str, object]]()
                if schedule == "stationary":
                    names = STATIONARY_NAMES
                    for name in ("anneal", "anneal-max"):
                        options[name] = {"iterations": args.iterations, "migration_weight": 0.0}
                else:
                    options["eplb-threshold"] = {"threshold": tuned_threshold(trace, simulator, protocol)}
                results = compare(trace, simulator, names, protocol, options=options)
                title = f"{model} on {cluster}, {schedule}"
                console.print(results_table(results, title))
                plot = args.output.with_name(f"{args.output.name}-{model}-{cluster}-{schedule}.png")
                plot_results(results, title, plot)
                document.append({
                    "model": model, "cluster": cluster, "schedule": schedule, "streams": args.streams,
                    "layers": len(picked), "options": options, "planners": [r.as_dict() for r in results],
                })  # fmt: skip
                summary.append(verdict(results, title))
    for line in summary:
        console.print(line)
    args.output.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"results: {args.output.with_suffix('.json')}")


def verdict(results: list[Result], title: str) -> str:
    anneal = next(r for r in results if r.planner == "anneal")
    best_eplb = min((r for r in results if r.planner in EPLB_NAMES), key=lambda r: r.total_us)
    best = min((r for r in results if r.planner != "oracle"), key=lambda r: r.total_us)
    ratios = [a / b for a, b in zip(anneal.stream_totals_us, best_eplb.stream_totals_us, strict=True)]
    return (
        f"{title}: anneal / best EPLB ({best_eplb.planner}) = {anneal.total_us / best_eplb.total_us:.3f} "
        f"(streams {min(ratios):.3f} … {max(ratios):.3f}); "
        f"lowest total except oracle: {best.planner} {best.total_us:.1f} µs"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
