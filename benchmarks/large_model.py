"""What learning adds at the size people run: 256 experts, top-8 of at most 4 of 8 groups, 32 and 64 GPUs.

    python benchmarks/large_model.py                 # 15 minutes on two idle cores; run again to resume
    python benchmarks/large_model.py --tables        # print what has been measured
    python benchmarks/large_model.py --quick         # one trace, one cluster

Traffic of synthetic traces with drift (profile sglang-prefill, balanced ranks, default sizes of passes), migration
included. Learned planners learn from one half of the sequences; the other half is served, and no token is served twice.
A plan must be made in so many milliseconds of one core per layer, reading the traffic included. The intervals are over
traces, which share nothing but their parameters. The best annealer is the one with the lowest mean on a cluster.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numba import config

from clustergym.common.statistics import ci95
from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.evaluation import Protocol, compile_on, evaluate_planner
from clustergym.planners.registry import make_planner
from clustergym.traces import SyntheticConfig, synthetic_trace
from learned_traffic import ANNEALERS, LEARNED, SEARCHES, learn
from placement import read_lines
from search_curve import SLOTS

RULES = ("eplb", "eplb-hierarchical", "flashlb", "swift", "hot-everywhere", "affinity-groups")


@dataclass
class Args:
    clusters: tuple[str, ...] = ("8x8", "4x8")
    budgets_ms: tuple[float, ...] = (3, 10, 30, 100)
    """Milliseconds of one core per layer."""
    traces: int = 6
    """Synthetic traces with different seeds."""
    layers: int = 8
    intervals: int = 4
    tables: bool = False
    """Print the tables of what has been measured, and stop."""
    quick: bool = False
    output: Path = Path("runs/large_model.jsonl")
    """File of JSON lines. What it has is not measured again: after a change to a planner, give another file."""


def measure(args: Args, cluster: str, seed: int, lines: list[dict[str, Any]]) -> None:
    nodes, per_node = map(int, cluster.split("x"))
    traffic = Traffic("prefill", schedule="drift")
    n_gpus = nodes * per_node
    served_tokens = (args.intervals + 2) * traffic.interval_tokens(n_gpus)
    layout = SyntheticConfig(
        n_tokens=2 * max(65_536, served_tokens), n_layers=args.layers, n_experts=256, top_k=8, n_groups=8,
        group_limit=4, n_domains=8,
    )  # fmt: skip
    past, served = synthetic_trace(layout, seed=seed).split(0.5, seed=seed)
    model = ModelSpec("large", args.layers, 256, 8, 7168, 2048, weight_bytes=1, n_groups=8)
    sim = Simulator(model, ClusterSpec("large", nodes, per_node, SLOTS[n_gpus]), "sglang-prefill")
    protocol = Protocol(traffic, args.intervals, 1, seed, "all")
    runs: list[tuple[str, float | None]] = [(name, None) for name in (*RULES, "policy")]
    runs += [(name, ms) for ms in args.budgets_ms for name in (*ANNEALERS, *LEARNED, *SEARCHES)]
    key = {"cluster": cluster, "seed": seed, "layers": args.layers, "intervals": args.intervals}
    done = {(line["planner"], line["budget_ms"]) for line in lines if key.items() <= line.items()}
    for name, ms in runs:
        if (name, ms) in done:
            continue
        options: dict[str, Any] = {"seed": seed}
        if ms is not None:
            options["seconds"] = ms / 1e3 * args.layers / min(int(config.NUMBA_NUM_THREADS), args.layers)
        planner = make_planner(name.partition(",")[0], sim, **options)
        learn(planner, name, past)
        planner.plan([compile_on(served, sim)], sim.static(args.layers))
        result = evaluate_planner(planner, name, past, served, protocol)
        lines.append({**key, "planner": name, "budget_ms": ms, "result": result.as_dict()})
        with open(args.output, "a") as file:
            file.write(json.dumps(lines[-1]) + "\n")


def table(lines: list[dict[str, Any]]) -> str:
    """Shares of EPLB's time, and what the learned planners add to the best annealer."""
    times: dict[tuple[str, str, float | None], dict[int, float]] = {}
    for line in lines:
        key = (line["cluster"], line["planner"], line["budget_ms"])
        times.setdefault(key, {})[line["seed"]] = line["result"]["total_us"]

    def difference(one: dict[int, float], other: dict[int, float]) -> str:
        found = [100 * (one[s] / other[s] - 1) for s in one if s in other]
        return f"{np.mean(found):+.2f} ± {ci95(found):.2f}" if len(found) > 1 else f"{np.mean(found):+.2f}"

    text = [
        "| cluster | planner | ms per layer | compared with EPLB, % | compared with the best annealer, % | traces |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for cluster in dict.fromkeys(key[0] for key in times):
        eplb = times[cluster, "eplb", None]
        for ms in sorted({key[2] for key in times if key[0] == cluster}, key=lambda ms: ms or 0):
            here = {key[1]: found for key, found in times.items() if (key[0], key[2]) == (cluster, ms)}
            best = min((found for name, found in here.items() if name in ANNEALERS), key=_mean, default=None)
            for name, found in sorted(here.items(), key=lambda item: -_mean(item[1])):
                shown = difference(found, best) if best is not None and found is not best else ""
                budget = "" if ms is None else f"{ms:g}"
                text.append(f"| {cluster} | {name} | {budget} | {difference(found, eplb)} | {shown} | {len(found)} |")
    return "\n".join(text)


def _mean(times: dict[int, float]) -> float:
    return float(np.mean(list(times.values())))


def main(args: Args) -> None:
    torch.set_num_threads(1)
    if args.quick:
        args = replace(args, clusters=args.clusters[:1], traces=1, layers=2, budgets_ms=(30,))
    lines = read_lines(args.output)
    if not args.tables:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        for seed in range(args.traces):
            for cluster in args.clusters:
                measure(args, cluster, seed, lines)
                print(f"{cluster}, trace {seed} done", flush=True)
    print(table([line for line in lines if line["layers"] == args.layers]))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
