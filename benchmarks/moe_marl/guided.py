"""Compare guided search with annealing at equal time per layer; swap-greedy takes the time that it needs.

    python benchmarks/moe_marl/guided.py --streams 10

Run train.py first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from common import (
    CONSOLE,
    Args,
    cached,
    halves,
    interval,
    measure,
    measure_all,
    run,
    seed_folder,
    stage_policy,
)
from rich.table import Table

from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.policy.planner import PolicyGuided


@dataclass
class GuidedArgs(Args):
    budgets_ms: tuple[float, ...] = (3.0, 10.0, 30.0)
    """Time budgets per layer."""


def main(args: GuidedArgs) -> None:
    for model in args.models:
        _, test = halves(args, model, args.layers)
        simulator = args.simulator(model, args.clusters[0])
        folder = args.output / "guided" / model
        policy = stage_policy(seed_folder(args, args.seeds[0]), args.seeds[0], "policy")
        table = Table(
            "planner", "budget ms", "total µs", "÷ anneal (streams)", "spent ms", title=f"{model}, equal time"
        )
        for budget in args.budgets_ms:
            seconds = budget / 1000 * test.n_layers
            planners = {
                f"anneal-{budget}": partial(make_planner, "anneal", simulator, seconds=seconds),
                f"policy-guided-{budget}": partial(PolicyGuided, simulator, policy=policy, seconds=seconds),
            }
            found = measure_all(folder, planners, test, args.protocol())
            anneal = np.array(found[f"anneal-{budget}"]["streams"])
            for name, item in found.items():
                streams = np.array(item["streams"])
                ratio = interval(streams / anneal)
                spent = f"{item['decision_ms']:.1f}"
                table.add_row(name.removesuffix(f"-{budget}"), f"{budget:g}", f"{streams.mean():.1f}", ratio, spent)
        few = args.protocol(streams=min(4, args.streams))
        for norm in (0, 16):
            make = partial(make_planner, "swap-greedy", simulator, norm=norm)
            item = cached(folder / f"swap-greedy-{norm}.json", partial(measure, make, "swap-greedy", test, few))
            name = f"swap-greedy, norm {norm}, {len(item['streams'])} streams"
            table.add_row(name, "", f"{item['total_us']:.1f}", "", f"{item['decision_ms']:.1f}")
        CONSOLE.print(table)


if __name__ == "__main__":
    run(main, GuidedArgs, __doc__)
