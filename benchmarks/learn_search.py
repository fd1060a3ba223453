"""Can the numbers inside annealing be learned? Optuna tunes them on synthetic traces; fresh random seeds judge.

    python benchmarks/learn_search.py --profile sglang-prefill --seconds 240

Learned are the two numbers of the estimate of deduplication, the shares of the kinds of steps, and both temperatures.
Five tasks (32 to 64 GPUs, 64 to 256 experts), each with 4,000 and 20,000 steps. A trial is scored by the time of the
plans on sequences that they were not made on. The last lines compare the best numbers with the defaults on the same
tasks with other seeds of the search. If that shows nothing, there is no need to look at other traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import optuna
import tyro

from clustergym.common.statistics import ci95
from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, Placement, Simulator
from clustergym.moe_placement.streams import layer_first
from clustergym.planners.anneal import Anneal
from clustergym.planners.evaluation import PASSES_OF_A_PERMANENT_PLAN
from clustergym.planners.kernels.surrogate import DEFAULT_SHAPE
from clustergym.planners.registry import make_planner
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

TASKS = [
    # nodes, GPUs per node, slots, experts, top-k, groups, hidden, intermediate, tokens per pass
    (8, 8, 5, 256, 8, 8, 7168, 2048, 4096),
    (4, 8, 9, 256, 8, 8, 7168, 2048, 4096),
    (4, 4, 5, 64, 6, 1, 2048, 1408, 2048),
    (2, 8, 9, 128, 8, 1, 4096, 1536, 2048),
    (4, 8, 5, 128, 4, 1, 2880, 2880, 2048),
]
STEPS = (4000, 20000)
NAMES = ("a", "b", "spare", "together", "same_gpu")
Numbers = tuple[tuple[float, ...], tuple[float, float]]


@dataclass
class Args:
    profile: str = "sglang-prefill"
    seconds: float = 240
    """Time for the trials."""
    seeds: tuple[int, ...] = (11, 12, 13, 14)
    """Seeds of the searches in the comparison at the end."""


@dataclass
class Task:
    simulator: Simulator
    seen: Interval
    served: Interval
    eplb: Placement
    eplb_us: npt.NDArray[np.float64]


def make_tasks(profile: str) -> list[Task]:
    found = []
    for seed, (nodes, per_node, slots, experts, top_k, groups, hidden, intermediate, tokens) in enumerate(TASKS, 101):
        layout = SyntheticConfig(
            n_tokens=65_536,
            n_layers=1,
            n_experts=experts,
            top_k=top_k,
            n_groups=groups,
            group_limit=max(1, groups // 2),
        )
        parts = synthetic_trace(layout, seed=seed).split(0.5, seed=seed)
        model = ModelSpec("m", 1, experts, top_k, hidden, intermediate, weight_bytes=1, n_groups=groups)
        cluster = ClusterSpec("c", nodes, per_node, slots)
        simulator = Simulator(model, cluster, profile, PASSES_OF_A_PERMANENT_PLAN)
        seen, served = (passes(part, tokens, simulator.n_gpus) for part in parts)
        eplb = make_planner("eplb", simulator).plan([seen], simulator.static(1))
        found.append(Task(simulator, seen, served, eplb, simulator.evaluate(served, eplb).time_us))
    return found


def passes(trace: TokenTrace, tokens: int, n_gpus: int) -> Interval:
    """Passes of 16,384 random tokens in all, on balanced ranks."""
    rows = np.random.default_rng(0).permutation(trace.n_tokens)[:16384].reshape(-1, tokens)
    return Interval.even(layer_first(trace), rows.astype(np.int32), n_gpus)


def scores(tasks: list[Task], numbers: Numbers, seeds: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """(tasks, steps, seeds) logarithm of the time of the plan, relative to EPLB's."""
    found = np.empty((len(tasks), len(STEPS), len(seeds)))
    for (i, j, k), _ in np.ndenumerate(found):
        task = tasks[i]
        planner = Anneal(
            task.simulator, seeds[k], estimate_steps=STEPS[j], shape=numbers[0], estimate_heat=numbers[1], restart=False
        )
        plan = planner.search_estimate([task.seen], task.eplb)
        found[i, j, k] = np.log(task.simulator.evaluate(task.served, plan).time_us / task.eplb_us).mean()
    return found


def main(args: Args) -> None:
    tasks = make_tasks(args.profile)
    default: Numbers = (DEFAULT_SHAPE, Anneal.estimate_heat)

    def objective(trial: optuna.Trial) -> float:
        ranges = ((0.3, 1.0), (-0.05, 0.2), (0.02, 0.5), (0.0, 0.9), (0.0, 1.0))
        shape = tuple(trial.suggest_float(name, *span) for name, span in zip(NAMES, ranges, strict=True))
        heat = trial.suggest_float("first_heat", 5e-5, 2e-3, log=True)
        return float(
            scores(tasks, (shape, (heat, trial.suggest_float("last_heat", 1e-6, 5e-5, log=True))), (1, 2)).mean()
        )

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True, n_startup_trials=15))
    start = dict(zip(NAMES, default[0], strict=True)) | {"first_heat": default[1][0], "last_heat": default[1][1]}
    study.enqueue_trial(start)
    study.optimize(objective, timeout=args.seconds)
    best = study.best_params
    learned: Numbers = (tuple(best[name] for name in NAMES), (best["first_heat"], best["last_heat"]))
    print(f"{len(study.trials)} trials; best: " + ", ".join(f"{name} {value:.3g}" for name, value in best.items()))
    gain = 100 * np.expm1(study.best_value - study.trials[0].value)
    print(f"on the seeds of the trials: {gain:+.2f} % of the time with the defaults")
    difference = scores(tasks, learned, args.seeds) - scores(tasks, default, args.seeds)
    for steps, share in zip(STEPS, 100 * np.expm1(difference.mean((0, 2))), strict=True):
        print(f"on fresh seeds, {steps:,} steps: {share:+.2f} %")
    per_task = 100 * np.expm1(difference.mean((1, 2)))
    print(f"on fresh seeds, all: {per_task.mean():+.2f} ± {ci95(per_task.tolist()):.2f} % (over the tasks)")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
