"""Steps per second of the batched environment, of Gymnasium's Sync and Async vector wrappers, and of one environment.

All are measured in one run, in turns, with random actions and full observations, by the wall clock and by CPU time (all
threads together, which other work on the machine hardly changes). Every round is whole episodes, because their ends
cost more than other steps. The growth with passes, tokens, experts, GPUs and layers is measured on the batched
environment, in CPU time. Writes a JSON file and a plot.

    python benchmarks/speed/env_throughput.py
    python benchmarks/speed/env_throughput.py --kinds --batches 1024        # only the CPU time by kind of step
    python benchmarks/speed/env_throughput.py --against ../other-checkout   # only the ratio of speeds of two revisions
    python benchmarks/speed/env_throughput.py --against ../other-checkout --only allocation --rounds 21
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from clustergym import SyntheticConfig, synthetic_trace
from clustergym.moe_placement import ClusterSpec, ModelSpec
from clustergym.moe_placement.batch import load_cached
from clustergym.traces.token_trace import DEFAULT_TRACE

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Args:
    batches: tuple[int, ...] = (1, 64, 1024, 4096)
    """Batch sizes to compare at."""
    rounds: int = 5
    """Number of measurements; the median and the spread are reported."""
    steps: int = 64
    """Steps per round at the smallest batches, rounded up to whole episodes; large batches take fewer."""
    profile: str = "sglang-decode"
    """Engine profile of the comparison."""
    trace: str = DEFAULT_TRACE
    """Trace of the comparison, of 64 experts."""
    sizes: bool = True
    """Also measure the growth with passes, tokens, experts, GPUs and layers."""
    kinds: bool = False
    """Only: CPU time of the batched environment by kind of step."""
    largest_wrapper: int = 1024
    """Largest batch for the wrappers, which need one Python object per environment."""
    largest_async: int = 64
    """Largest batch for the Async wrapper, which needs one process per environment."""
    output: Path = Path("runs/env_throughput")
    """Prefix of the .json and .png files."""
    against: Path | None = None
    """Folder of another checkout: measure both revisions in turns, in CPU time of one thread, and print the ratios."""
    only: str = ""
    """With --against: only the cases whose name contains this."""


def actions(env: Any, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    experts, nodes = env.single_action_space.nvec
    return [
        np.stack([rng.integers(0, experts, env.num_envs), rng.integers(0, nodes // 3, env.num_envs)], 1)
        for _ in range(n)
    ]


def rate(env: Any, steps: int, rng: np.random.Generator) -> tuple[float, float]:
    """Environment steps per second of the wall clock, and per CPU second of this process."""
    chosen = actions(env, steps, rng)
    began, began_cpu = time.perf_counter(), time.process_time()
    for action in chosen:
        env.step(action)
    taken, taken_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return env.num_envs * steps / taken, env.num_envs * steps / taken_cpu


def single_rate(options: dict[str, Any], steps: int, rng: np.random.Generator) -> float:
    """Steps per second of one environment without a vector wrapper."""
    env = gymnasium.make("MoEPlacement-v0", disable_env_checker=True, **options)
    env.reset(seed=0)
    experts, nodes = env.action_space.nvec  # type: ignore[attr-defined]
    began, done = time.perf_counter(), False
    for expert, node in rng.integers(0, [experts, nodes // 3], (steps, 2)):
        if done:
            env.reset()
        done = env.step(np.array([expert, node]))[2]
    return steps / (time.perf_counter() - began)


def tokens_counted(batch: Any) -> int:
    """Tokens whose counts a step updates: those of the observed and of the next interval's sampled passes."""
    return math.prod(batch.sim["rows"][0].shape)


def whole_episodes(batch: Any, steps: int) -> int:
    """The least number of steps, from ``steps`` on, that is whole episodes."""
    episode = batch.n_layers * batch.config.ops_per_layer * batch.config.intervals
    return -(-steps // episode) * episode


def compare(batch: int, options: dict[str, Any], args: Args) -> dict[str, Any]:
    modes = {"batched": "vector_entry_point"}
    if batch <= args.largest_wrapper:
        modes["sync"] = "sync"
    if 1 < batch <= args.largest_async:
        modes["async"] = "async"
    envs = {
        name: gymnasium.make_vec("MoEPlacement-v0", num_envs=batch, vectorization_mode=mode, **options)
        for name, mode in modes.items()
    }
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in envs}
    cpu_rates: dict[str, list[float]] = {name: [] for name in envs}
    steps = whole_episodes(envs["batched"].batch, args.steps // max(1, batch // 64))
    for env in envs.values():
        env.reset(seed=0)
        rate(env, steps if env is envs["batched"] else 8, rng)
        env.reset(seed=0)
    for _ in range(args.rounds):
        for name, env in envs.items():
            wall, cpu = rate(env, steps, rng)
            rates[name].append(wall)
            cpu_rates[name].append(cpu)
    task = envs["batched"].batch
    result = {
        "batch": batch, "rates": rates, "cpu_rates": cpu_rates, "state_bytes": task.bytes_allocated,
        "tokens": tokens_counted(task),
    }  # fmt: skip
    for env in envs.values():
        env.close()
    if batch == 1:
        single_rate(options, 8, rng)
        rates["single"] = [single_rate(options, args.steps, rng) for _ in range(args.rounds)]
    return result


def step_kinds(batch: int, options: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """CPU µs of the batched environment by kind of step, per step of the whole episode: they add up to its mean."""
    env = gymnasium.make_vec("MoEPlacement-v0", num_envs=batch, vectorization_mode="vector_entry_point", **options)
    env.reset(seed=0)
    rng, steps, per_layer = np.random.default_rng(0), whole_episodes(env.batch, 1), env.batch.config.ops_per_layer
    found: dict[str, list[float]] = {"on a layer": [], "next layer": [], "next episode": []}
    for i in range(rounds + 1):
        spent = dict.fromkeys(found, 0.0)
        for n, action in enumerate(actions(env, steps, rng), start=1):
            began = time.process_time()
            env.step(action)
            kind = "next episode" if n == steps else "next layer" if n % per_layer == 0 else "on a layer"
            spent[kind] += 1e6 * (time.process_time() - began) / steps / batch
        for kind, us in spent.items():
            found[kind] += [us] if i > 0 else []  # the first round takes new memory
    return found


GROWTH = {
    "passes": (1, 2, 4, 8, 16),
    "tokens": (8, 16, 32, 64, 128),
    "experts": (16, 32, 64, 128, 256),
    "GPUs": (4, 8, 16, 32),
    "layers": (2, 8, 26),
}
BASE = {"passes": 4, "tokens": 32, "experts": 64, "GPUs": 16, "layers": 8}


def growth(args: Args) -> list[dict[str, Any]]:
    """Steps per CPU second of the batched environment as one size at a time differs from ``BASE``."""
    rows = []
    for what, value in [(what, value) for what, values in GROWTH.items() for value in values]:
        size = BASE | {what: value}
        trace = synthetic_trace(
            SyntheticConfig(n_tokens=12_000, n_layers=size["layers"], n_experts=size["experts"]), seed=0
        )
        env = gymnasium.make_vec(
            "MoEPlacement-v0", num_envs=128, vectorization_mode="vector_entry_point", trace=trace, split="all",
            model=ModelSpec("bench", size["layers"], size["experts"], trace.top_k, 2048, 1408),
            cluster=ClusterSpec("bench", size["GPUs"] // 4, 4), profile=args.profile, tokens_per_rank=size["tokens"],
            sampled_passes=size["passes"], allow_reuse=True,
        )  # fmt: skip
        env.reset(seed=0)
        rng = np.random.default_rng(0)
        steps = whole_episodes(env.batch, 1)
        rate(env, steps, rng)
        median = float(np.median([rate(env, steps, rng)[1] for _ in range(3)]))
        rows.append(
            {
                "what": what,
                "value": value,
                "rate": median,
                "tokens": tokens_counted(env.batch),
                "bytes_per_env": env.batch.bytes_allocated // 128,
            }
        )
    return rows


# Two revisions

# Case → (batch, arguments). Both revisions play the same task, whatever their defaults are.
SAME = {"trace": DEFAULT_TRACE, "ops_per_layer": 16, "compare_eplb": False, "autoreset_mode": "SameStep"}
DRIFT = {"profile": "sglang-prefill", "schedule": "drift", "intervals": 4, "start": "eplb", "tokens_per_rank": 64}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    f"{batch} environments, {name}": (batch, {**SAME, **arguments, "allow_reuse": True})
    for batch in (1, 256)
    for name, arguments in {
        "dedup": {"profile": "sglang-prefill"},
        "per-expert": {"profile": "sglang-decode"},
        "drift": DRIFT,
    }.items()
}
ANNEAL = "anneal, one plan"
ALLOCATION = "allocation, 1024 environments"


def work() -> None:
    """Measure the cases named on standard input, one per line.

    Writes the CPU seconds of each, per token that a step counts (allocation: per step), to standard output.
    """
    envs: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for line in sys.stdin:
        case = line.strip()
        if case == ANNEAL:
            print(anneal_seconds(), flush=True)
            continue
        if case == ALLOCATION:
            if case not in envs:
                envs[case] = gymnasium.make_vec("GPUAllocation-v0", 1024, "vector_entry_point")
                envs[case].reset(seed=0)
            print(allocation_seconds(envs[case], rng), flush=True)
            continue
        if case not in envs:
            envs.clear()
            batch, options = CASES[case]
            envs[case] = gymnasium.make_vec("MoEPlacement-v0", batch, "vector_entry_point", **options)
            envs[case].reset(seed=0)
        env = envs[case]
        chosen = actions(env, whole_episodes(env.batch, 1024 // env.num_envs), rng)
        began = time.process_time()
        for action in chosen:
            env.step(action)
        steps = len(chosen) * env.num_envs
        print((time.process_time() - began) / steps / tokens_counted(env.batch), flush=True)


def allocation_seconds(env: Any, rng: np.random.Generator) -> float:
    """CPU seconds per step of one environment of the allocation task, with random actions."""
    space = env.action_space
    chosen = [rng.random(space.shape).astype(space.dtype) for _ in range(200)]
    began = time.process_time()
    for action in chosen:
        env.step(action)
    return (time.process_time() - began) / len(chosen) / env.num_envs


def anneal_seconds() -> float:
    """CPU seconds of one plan, per token of what it plans on."""
    from clustergym.moe_placement import IntervalStream, Simulator, Traffic
    from clustergym.planners.registry import make_planner

    simulator, trace = Simulator("tiny-moe", "h800-4x4"), load_cached(DEFAULT_TRACE)
    seen = IntervalStream(trace, simulator.n_gpus, Traffic("prefill")).take(1)
    planner = make_planner("anneal", simulator, iterations=1500)
    began = time.process_time()
    planner.plan(seen, simulator.static(seen[0].n_layers))
    return (time.process_time() - began) / seen[0].rows.size


def against(other: Path, rounds: int, only: str) -> None:
    """Print the ratio of the other revision's CPU time to this one's. Above 1, this one is faster."""
    workers = []
    for tree in (ROOT, other):
        environment = os.environ | {"PYTHONPATH": str(tree / "envs"), "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        workers.append(
            subprocess.Popen(
                [sys.executable, __file__, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )

    def measure(worker: subprocess.Popen[str], case: str) -> float:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(case, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    table = Table("case", "this, ns", "other, ns", "speed ratio", "quartiles", title=f"this checkout against {other}")
    for case in (case for case in (*CASES, ANNEAL, ALLOCATION) if only in case):
        for worker in workers:
            measure(worker, case)  # compiles
        pairs = []
        for i in range(rounds):
            order = (0, 1) if i % 2 == 0 else (1, 0)
            found = {which: measure(workers[which], case) for which in order}
            pairs.append((found[0], found[1]))
        this, that = np.array(pairs).T * 1e9
        low, middle, high = np.quantile(that / this, (0.25, 0.5, 0.75))
        table.add_row(
            case, f"{np.median(this):.2f}", f"{np.median(that):.2f}", f"{middle:.3f}", f"{low:.3f} … {high:.3f}"
        )
    Console(width=130).print(table)
    for worker in workers:
        worker.communicate()


# Output


def plot(results: list[dict[str, Any]], rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, colour, marker in (("batched", "#228833", "o"), ("sync", "#EE6677", "s"), ("async", "#4477AA", "^")):
        points = [(r["batch"], np.median(r["rates"][name])) for r in results if name in r["rates"]]
        if points:
            axes[0].loglog(*zip(*points, strict=True), color=colour, marker=marker, label=name)
    axes[0].set(
        xlabel="environments", ylabel="environment steps per second", title="batched simulator and vector wrappers"
    )
    axes[0].legend()
    for what, colour, marker in (
        ("passes", "#CCBB44", "v"),
        ("tokens", "#4477AA", "o"),
        ("experts", "#EE6677", "s"),
        ("GPUs", "#228833", "^"),
        ("layers", "#AA3377", "D"),
    ):
        points = [(r["value"] / BASE[what], 1e6 / r["rate"]) for r in rows if r["what"] == what]
        label = f"{what} per GPU ({BASE[what]})" if what == "tokens" else f"{what} ({BASE[what]})"
        if points:
            axes[1].loglog(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    axes[1].set(
        xlabel="size / size in brackets",
        ylabel="µs of CPU time per step",
        title="growth of the cost of a step, 128 environments",
    )
    if rows:
        for axis in (axes[1].xaxis, axes[1].yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
        axes[1].set_xticks([1 / 4, 1 / 2, 1, 2, 4])
        axes[1].set_xticks([], minor=True)
        axes[1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(args: Args) -> None:
    if args.against is not None:
        against(args.against.resolve(), args.rounds, args.only)
        return
    console = Console(width=130)
    options = {"profile": args.profile, "trace": args.trace, "allow_reuse": True}
    if args.kinds:
        kinds = Table("environments", "kind of step", "CPU µs per step of the episode, median", "range")
        for batch in sorted(args.batches):
            for kind, values in step_kinds(batch, options, args.rounds).items():
                kinds.add_row(str(batch), kind, f"{np.median(values):.1f}", f"{min(values):.1f} … {max(values):.1f}")
        console.print(kinds)
        return
    results = []
    table = Table(title=f"environment steps per second: {args.trace}, {args.profile}, 64 experts, 16 GPUs")
    for column in ("environments", "batched", "sync", "async", "single", "batched / sync", "the same per\nCPU second",
                   "µs per step", "ns per token\ncounted", "state MB"):  # fmt: skip
        table.add_column(column, justify="right")
    for batch in sorted(args.batches):
        result = compare(batch, options, args)
        results.append(result)
        median = {name: float(np.median(values)) for name, values in result["rates"].items()}
        spread = {name: (max(values) - min(values)) / 2 for name, values in result["rates"].items()}
        cells = [
            f"{median[n]:,.0f} ± {spread[n]:,.0f}" if n in median else ""
            for n in ("batched", "sync", "async", "single")
        ]
        ratios = ["", ""]
        if "sync" in median:
            per_cpu = [float(np.median(result["cpu_rates"][name])) for name in ("batched", "sync")]
            ratios = [f"{median['batched'] / median['sync']:.1f}", f"{per_cpu[0] / per_cpu[1]:.1f}"]
        table.add_row(
            str(batch), *cells, *ratios, f"{1e6 / median['batched']:.1f}",
            f"{1e9 / median['batched'] / result['tokens']:.2f}", f"{result['state_bytes'] / 1e6:.0f}",
        )  # fmt: skip
        console.print(f"{batch} environments: batched {median['batched']:,.0f} steps/s")
    console.print(table)
    rows = growth(args) if args.sizes else []
    sizes = Table("what", "value", "steps per CPU second", "ns per token counted", "kB per environment",
                  title="growth, batched, 128 environments, CPU time")  # fmt: skip
    for row in rows:
        per_token = 1e9 / row["rate"] / row["tokens"]
        kilobytes = row["bytes_per_env"] / 1e3
        sizes.add_row(row["what"], str(row["value"]), f"{row['rate']:,.0f}", f"{per_token:.2f}", f"{kilobytes:.0f}")
    if rows:
        console.print(sizes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"peak memory of this process: {peak:,.0f} MB; {platform.processor() or platform.machine()}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(
        json.dumps({"results": results, "growth": rows, "peak_mb": peak}, indent=2) + "\n"
    )
    plot(results, rows, args.output.with_suffix(".png"))
    console.print(f"figures: {args.output.with_suffix('.json')}, plot: {args.output.with_suffix('.png')}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:  # started by against()
        work()
    else:
        main(tyro.cli(Args, description=__doc__))
