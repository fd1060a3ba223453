"""Measure what a policy of single operations can reach, and what search reaches in the same place.

    python benchmarks/moe_marl/limit.py --streams 6 --layers 2

``greedy`` applies the best of all single operations again and again, on the passes that it has seen: what a policy that
copies the exact look-ahead would do without a mistake. ``greedy in hindsight`` does so on the passes to come: no policy
that is paid for the next operation alone can expect more. Between the two lies all that PPO could add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from common import CONSOLE, Args, halves, interval, measure_all, run
from rich.table import Table

from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.greedy import SwapGreedy


class Hindsight(SwapGreedy):
    """The best single operations for the passes to come."""

    needs_future = True


@dataclass
class LimitArgs(Args):
    clusters: tuple[str, ...] = ("h800-4x4",)
    profiles: tuple[str, ...] = ("sglang-prefill", "sglang-decode", "vllm-deepep")
    operations: int = 16
    """Operations per layer and interval, as in training."""


def main(args: LimitArgs) -> None:
    table = Table("profile", "model", "cluster", "planner", "total ÷ EPLB's", "decision ms", title="single operations")
    for profile in args.profiles:
        own = replace(args, profile=profile)
        for model in args.models:
            _, test = halves(own, model, args.layers)
            for cluster in args.clusters:
                simulator = own.simulator(model, cluster)
                planners: dict[str, Callable[[], Planner]] = {
                    **{name: partial(make_planner, name, simulator) for name in ("eplb", "flashlb", "policy")},
                    "greedy": partial(SwapGreedy, simulator, operations=args.operations),
                    "greedy in hindsight": partial(Hindsight, simulator, operations=args.operations),
                    **{name: partial(make_planner, name, simulator) for name in ("anneal", "anneal-4")},
                    "anneal, exact steps": partial(
                        make_planner, "anneal", simulator, estimate_steps=0, iterations=20000
                    ),
                }
                found = measure_all(
                    args.output / "limit" / f"{profile}-{model}-{cluster}", planners, test, own.protocol()
                )
                base = np.array(found["eplb"]["streams"])
                for name, item in found.items():
                    share = interval(np.array(item["streams"]) / base)
                    table.add_row(profile, model, cluster, name, share, f"{item['decision_ms']:.0f}")
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, LimitArgs, __doc__)
