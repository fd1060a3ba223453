"""Measure how far search gets without a policy: ``anneal`` with its default steps and with ten times as many.

    python benchmarks/moe_marl/limit.py --clusters h800-2x8

Run holdout.py first: it measures the EPLB variants.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
from common import CONSOLE, Args, cached, halves, interval, measure, run
from rich.table import Table

from clustergym.moe_placement.planner_registry import make_planner


def main(args: Args) -> None:
    table = Table("model", "cluster", "planner", "total µs", "÷ best EPLB (streams)", title="search without a policy")
    for model in args.models:
        _, test = halves(args, model, args.layers)
        for cluster in args.clusters:
            simulator = args.simulator(model, cluster)
            folder = args.output / "holdout" / f"{model}-{cluster}"
            eplbs = [json.loads(path.read_text()) for path in sorted(folder.glob("eplb*.json"))]
            if not eplbs:
                raise SystemExit(f"{folder} has no results of EPLB: run holdout.py first")
            best = np.array(min(eplbs, key=lambda item: item["total_us"])["streams"])
            for iterations in (6000, 60_000):
                path = args.output / "limit" / f"{model}-{cluster}-{iterations}.json"
                make = partial(make_planner, "anneal", simulator, iterations=iterations)
                found = cached(path, partial(measure, make, "anneal", test, args.protocol()))
                streams = np.array(found["streams"])
                name = f"anneal, {iterations:,} steps"
                table.add_row(model, cluster, name, f"{streams.mean():.1f}", interval(streams / best))
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, Args, __doc__)
