"""Compare the trained policies and their earlier stages with other planners on held-out streams.

    python benchmarks/moe_marl/holdout.py                                           # two models, 4×4, 2×8 and 4×8
    python benchmarks/moe_marl/holdout.py --clusters h800-2x8 --with-guided

Run train.py first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from clustergym.planners.policy.planner import Policy, PolicyGuided
from common import (
    CONSOLE,
    Args,
    baselines,
    comparison_table,
    halves,
    measure_all,
    run,
    seed_folder,
    stage_planners,
    stage_policy,
)


@dataclass
class HoldoutArgs(Args):
    operations: tuple[int, ...] = ()
    """Also evaluate the trained policy with these numbers of operations per layer."""
    with_guided: bool = False
    """Also evaluate guided search with its default number of steps."""


def main(args: HoldoutArgs) -> None:
    for model in args.models:
        train, test = halves(args, model, args.layers)
        for cluster in args.clusters:
            simulator = args.simulator(model, cluster)
            folder = args.output / "holdout" / f"{model}-{cluster}"
            planners = baselines(args, simulator, train, folder)
            for seed in args.seeds:
                run = seed_folder(args, seed)
                if not (run / "policy.pt").exists():
                    continue
                planners |= stage_planners(simulator, run, seed)
                policy = stage_policy(run, seed, "policy")
                for count in args.operations:
                    planners[f"policy@{count} {seed}"] = partial(Policy, simulator, policy=policy, operations=count)
                if args.with_guided:
                    planners[f"guided {seed}"] = partial(PolicyGuided, simulator, policy=policy)
            found = measure_all(folder, planners, test, args.protocol())
            CONSOLE.print(comparison_table(found, f"{model} on {cluster}, {args.streams} held-out streams"))


if __name__ == "__main__":
    run(main, HoldoutArgs, __doc__)
