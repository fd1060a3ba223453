"""Measure the time of a decision per layer, for all layers of the model at once. Run it on an idle machine.

    python benchmarks/moe_marl/decision.py

Run train.py first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rich.table import Table

from clustergym import TokenTrace
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import Protocol, evaluate_planner
from clustergym.planners.policy.planner import Policy
from clustergym.planners.registry import make_planner
from common import CONSOLE, Args, cached, halves, run, seed_folder, stage_policy


def decision_ms(make: Callable[[], Planner], name: str, trace: TokenTrace, protocol: Protocol) -> float:
    planner = make()
    evaluate_planner(planner, name, trace, trace, replace(protocol, intervals=1))  # compiles the kernels
    return evaluate_planner(planner, name, trace, trace, protocol).decision_ms


def main(args: Args) -> None:
    model = args.models[0]
    _, test = halves(args, model, 26)
    simulator = args.simulator(model, args.clusters[0])
    policy = stage_policy(seed_folder(args, args.seeds[0]), args.seeds[0], "policy")
    planners: dict[str, Callable[[], Planner]] = {
        "policy": partial(Policy, simulator, policy=policy),
        "anneal": partial(make_planner, "anneal", simulator),
        "swap-greedy": partial(make_planner, "swap-greedy", simulator),
    }
    table = Table("planner", "ms per layer", title=f"decision time, {test.n_layers} layers of {model}")
    for name, make in planners.items():
        found = cached(
            args.output / "decision" / f"{name}.json", partial(decision_ms, make, name, test, args.protocol(streams=1))
        )
        table.add_row(name, f"{found:.2f}")
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, Args, __doc__)
