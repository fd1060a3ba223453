"""Measure what a policy of single operations can reach, and what search reaches in the same place.

    python benchmarks/moe_marl/limit.py --streams 6 --layers 2 --trained runs/ppo_moe_marl__tiny_moe_domains__1

``every operation`` improves the decisions of the policy exhaustively: it simulates all operations on all experts and
takes the best, as often as the policy may act. It does so on three intervals. On the observed one: what a policy would
do that copies the exact look-ahead without a mistake. On other tokens of the next interval's domains: what a policy
would do that also foresees the mixture. On the passes to come, which nobody can foresee. PPO can add at most what lies
between the policy and the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from clustergym.moe_placement import Simulator
from clustergym.planners.base import Planner
from clustergym.planners.policy.export import load_policy
from clustergym.planners.policy.planner import Policy
from clustergym.planners.registry import make_planner
from common import CONSOLE, SIMULATED, Args, halves, interval, measure_all, run


class NextMixture(Policy):
    """Plans on other tokens of the next interval's domains."""

    needs_mixture = True


class NextPasses(Policy):
    """Plans on the passes to come."""

    needs_future = True


def every_operation(kind: type[Policy], simulator: Simulator) -> Policy:
    """A planner that takes the operation with the best look-ahead, of all operations on all experts."""
    network, settings = load_policy("pretrained")
    for part in network.node_head[-1].parameters():  # the rest of a score is the look-ahead
        torch.nn.init.zeros_(part)
    return kind(simulator, policy=(network, settings), candidates=simulator.n_experts, **SIMULATED)


@dataclass
class LimitArgs(Args):
    clusters: tuple[str, ...] = ("h800-4x4",)
    profiles: tuple[str, ...] = ("sglang-prefill", "sglang-decode", "vllm-deepep")
    trained: Path | None = None
    """Folder of a training, to compare the policy before and after PPO."""


def main(args: LimitArgs) -> None:
    table = Table("profile", "model", "cluster", "planner", "total ÷ EPLB's", "decision ms", title="single operations")
    ratios: dict[str, list[float]] = {}
    for profile in args.profiles:
        own = replace(args, profile=profile)
        for model in args.models:
            _, test = halves(own, model, args.layers)
            for cluster in args.clusters:
                simulator = own.simulator(model, cluster)
                planners: dict[str, Callable[[], Planner]] = {
                    name: partial(make_planner, name, simulator) for name in ("eplb", "flashlb", "policy")
                }
                if args.trained is not None:
                    for name, folder in (("before PPO", args.trained / "supervised"), ("after PPO", args.trained)):
                        planners[name] = partial(
                            make_planner, "policy", simulator, checkpoint=folder, candidates=8, **SIMULATED
                        )
                planners |= {
                    "every operation, observed": partial(every_operation, Policy, simulator),
                    "every operation, next mixture": partial(every_operation, NextMixture, simulator),
                    "every operation, next passes": partial(every_operation, NextPasses, simulator),
                    **{name: partial(make_planner, name, simulator) for name in ("anneal", "anneal-4")},
                }
                folder = args.output / "limit" / f"{profile}-{model}-{cluster}"
                found = measure_all(folder, planners, test, own.protocol())
                base = np.array(found["eplb"]["streams"])
                for name, item in found.items():
                    ratio = np.array(item["streams"]) / base
                    ratios.setdefault(name, []).append(float(ratio.mean()))
                    table.add_row(profile, model, cluster, name, interval(ratio), f"{item['decision_ms']:.0f}")
    for name, each in ratios.items():
        table.add_row("mean", "", "", name, interval(each), "")
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, LimitArgs, __doc__)
