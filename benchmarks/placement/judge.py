"""Planners under the judge of tests/support/independent_judge.py with the same time: some layers, several splits.

    python benchmarks/placement/judge.py                                   # greedy and annealing; six minutes
    python benchmarks/placement/judge.py --models gpt-oss-20b --phases decode --layers 8

Plans are made on one half of the sequences and judged on the other half, on 4x4 GPUs. 2.25 s of one core per layer are
what 30 s on two cores are for 26 layers. The last column has the kernel time without reading weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from numba import config

from clustergym import TokenTrace
from clustergym.moe_placement import Simulator, Traffic, get_cluster
from clustergym.planners.evaluation import compile_on
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN, Observed, evenly_spaced
from clustergym.planners.registry import make_planner, planner_class
from clustergym.plans.planning import fill_empty

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import independent_judge as judge  # noqa: E402

SIZES = {"deepseek-v2-lite": (2048, 5), "gpt-oss-20b": (2880, 3)}
"""Hidden size and slots per GPU"""


@dataclass
class Args:
    models: tuple[str, ...] = tuple(SIZES)
    phases: tuple[str, ...] = ("prefill", "decode")
    planners: tuple[str, ...] = ("greedy", "anneal")
    splits: tuple[int, ...] = (0, 1, 2)
    layers: int = 4
    seconds: float = 2.25
    """Of one core, per layer."""


def shares(args: Args, trace: TokenTrace, model: str, phase: str, split: int) -> list[list[float]]:
    """(planner, kernel): time divided by that of EPLB's plan."""
    seen, unseen = trace.split(0.5, seed=split)
    cluster = get_cluster("h800-4x4", slots_per_gpu=judge.SLOTS)
    simulator = Simulator(model, cluster, f"sglang-{phase}").spread_migration(PASSES_OF_A_PERMANENT_PLAN)
    before = seen.split(0.75, seed=0)[0]
    observed = Observed(before, simulator, Traffic(phase, schedule="stationary"))
    planner = make_planner("eplb", simulator)
    eplb = planner.plan([observed.interval(planner)], observed.static)
    reference = [judge.judge(eplb, unseen, phase, kernel) for kernel in judge.KERNELS]
    found = []
    for name in args.planners:
        limited = planner_class(name).takes_seconds
        warm_up = make_planner(name, simulator, **({"iterations": 1} if limited else {}))
        warm_up.plan([compile_on(before, simulator)], observed.static)
        seconds = args.seconds * args.layers / min(config.NUMBA_NUM_THREADS, args.layers)
        planner = make_planner(name, simulator, **({"seconds": seconds} if limited else {}))
        plan = fill_empty(simulator, observed, planner.plan([observed.interval(planner)], eplb))
        times = [judge.judge(plan, unseen, phase, kernel) for kernel in judge.KERNELS]
        found.append([own / eplb_us for own, eplb_us in zip(times, reference, strict=True)])
    return found


def main(args: Args) -> None:
    print("| model | phase | planner | of EPLB's time | by split | without weights |")
    print("| --- | --- | --- | ---: | --- | ---: |")
    for model in args.models:
        files = data_files(f"moe/{model.replace('-', '_')}_*.npz")
        trace = TokenTrace.concat([TokenTrace.load(file) for file in files])
        trace = trace.select(layers=evenly_spaced(trace.n_layers, args.layers))
        judge.HIDDEN, judge.SLOTS = SIZES[model]
        for phase in args.phases:
            found = np.array([shares(args, trace, model, phase, split) for split in args.splits])
            for i, name in enumerate(args.planners):
                whole, without = found[:, i].T
                by_split = ", ".join(f"{share:.3f}" for share in whole)
                print(f"| {model} | {phase} | {name} | {whole.mean():.3f} | {by_split} | {without.mean():.3f} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
