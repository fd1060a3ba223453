"""Steps per second of the batched environment, next to the same environment in Gymnasium's Sync and Async vector wrappers.

All are measured in one run, in turns, with random actions and full observations. The growth with tokens, experts, GPUs and
layers is measured on the batched environment. Writes a JSON file and a plot.

    python benchmarks/env_throughput.py
    python benchmarks/env_throughput.py --against ../other-checkout   # only the ratio of speeds of two revisions
"""

from __future__ import annotations

import json
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
import torch
import tyro
from rich.console import Console
from rich.table import Table

import clustergym
from clustergym import SyntheticConfig, synthetic_trace
from clustergym.moe_placement import ClusterSpec, Simulator, Stream
from clustergym.moe_placement.batch import DEFAULT_TRACE, load_cached

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    batches: tuple[int, ...] = (1, 64, 1024, 4096)
    """Batch sizes to compare at."""
    rounds: int = 5
    """Number of measurements; the median and the spread are reported."""
    steps: int = 64
    """Steps per round at the smallest batches; large batches take fewer."""
    window_tokens: int = 2048
    trace: str = DEFAULT_TRACE
    """Trace of the comparison, of 64 experts; by default the environment's own."""
    sizes: bool = True
    """Also measure the growth with tokens, experts, GPUs and layers."""
    largest_wrapper: int = 1024
    """Largest batch for the wrappers, which need one Python object per environment."""
    largest_async: int = 64
    """Largest batch for the Async wrapper, which needs one process per environment."""
    output: Path = Path("runs/env_throughput")
    """Prefix of the .json and .png files."""
    against: Path | None = None
    """Folder of another checkout: measure both revisions in turns, in CPU time of one thread, and print the ratios."""
    worker: tyro.conf.Suppress[bool] = False


def actions(env: Any, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    experts, nodes = env.single_action_space.nvec
    return [
        np.stack([rng.integers(0, experts, env.num_envs), rng.integers(0, nodes // 3, env.num_envs)], 1)
        for _ in range(n)
    ]


def rate(env: Any, steps: int, rng: np.random.Generator) -> float:
    """Environment steps per second."""
    chosen = actions(env, steps, rng)
    began = time.perf_counter()
    for action in chosen:
        env.step(action)
    return env.num_envs * steps / (time.perf_counter() - began)


def steps_for(batch: int, args: Args) -> int:
    # A multiple of ops_per_layer, so that every round holds its share of layer changes.
    return max(16, args.steps // max(1, batch // 64) // 8 * 8)


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
    for env in envs.values():
        env.reset(seed=0)
        rate(env, 8, rng)
    for _ in range(args.rounds):
        for name, env in envs.items():
            rates[name].append(rate(env, steps_for(batch, args), rng))
    memory = envs["batched"].batch.bytes_allocated
    for env in envs.values():
        env.close()
    return {"batch": batch, "rates": rates, "state_bytes": memory}


def growth(args: Args) -> list[dict[str, Any]]:
    """The batched rate as one size at a time is varied around 64 experts, 16 GPUs, 2048 tokens, 8 layers."""
    base = {"experts": 64, "nodes": 4, "tokens": 2048, "layers": 8}
    cases = [
        *({"what": "tokens", "tokens": t} for t in (512, 1024, 2048, 4096, 8192)),
        *({"what": "experts", "experts": e} for e in (16, 32, 64, 128, 256)),
        *({"what": "GPUs", "nodes": n} for n in (1, 2, 4, 8)),
        *({"what": "layers", "layers": l} for l in (2, 8, 26)),
    ]
    rows = []
    for case in cases:
        size = base | case
        trace = synthetic_trace(
            SyntheticConfig(n_tokens=12_000, n_layers=size["layers"], n_experts=size["experts"]), seed=0
        )
        spec = clustergym.moe_placement.ModelSpec("bench", size["layers"], size["experts"], trace.top_k, 2048, 1408)
        env = gymnasium.make_vec(
            "MoEPlacement-v0", num_envs=128, vectorization_mode="vector_entry_point", trace=trace, model=spec,
            cluster=ClusterSpec("bench", size["nodes"], 4), window_tokens=size["tokens"],
        )  # fmt: skip
        env.reset(seed=0)
        rng = np.random.default_rng(0)
        rate(env, 8, rng)
        values = [rate(env, 32, rng) for _ in range(3)]
        key = {"tokens": "tokens", "experts": "experts", "GPUs": "nodes", "layers": "layers"}[case["what"]]
        value = size[key] * (4 if key == "nodes" else 1)
        rows.append(
            {
                "what": case["what"],
                "value": value,
                "rate": float(np.median(values)),
                "bytes_per_env": env.batch.bytes_allocated // 128,
            }
        )
    return rows


# Two revisions

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    f"{batch} environments, {comm}": (batch, {"comm": comm}) for batch in (1, 1024) for comm in ("dedup", "per-expert")
}
ANNEAL = "anneal, one plan"


def work() -> None:
    """Measure the cases named on standard input, one per line; write the CPU seconds of each to standard output."""
    envs: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for line in sys.stdin:
        case = line.strip()
        if case == ANNEAL:
            seconds = anneal_seconds()
        else:
            if case not in envs:
                batch, options = CASES[case]
                envs[case] = gymnasium.make_vec("MoEPlacement-v0", batch, "vector_entry_point", **options)
                envs[case].reset(seed=0)
            chosen = actions(envs[case], max(16, 512 // envs[case].num_envs), rng)
            began = time.process_time()
            for action in chosen:
                envs[case].step(action)
            seconds = time.process_time() - began
        print(seconds, flush=True)


def anneal_seconds() -> float:
    try:
        from clustergym.moe_placement.planner_registry import make_planner
    except ImportError:  # the place until 0.1
        from clustergym.planners import make_planner
    simulator = Simulator("tiny-moe", "h800-4x4")
    window = Stream(load_cached(DEFAULT_TRACE), simulator.n_gpus, seed=0).take(1)
    static = simulator.static(window[0].n_layers)
    planner = make_planner("anneal", simulator, iterations=1500)
    began = time.process_time()
    planner.plan(window, static)
    return time.process_time() - began


def against(other: Path, rounds: int) -> None:
    """Print the ratio of the other revision's CPU time to this one's: more than 1 means that this one is faster."""
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

    table = Table("case", "this, ms", "other, ms", "speed ratio", "quartiles", title=f"this checkout against {other}")
    for case in (*CASES, ANNEAL):
        for worker in workers:
            measure(worker, case)  # compiles
        pairs = []
        for i in range(rounds):
            order = (0, 1) if i % 2 == 0 else (1, 0)
            found = {which: measure(workers[which], case) for which in order}
            pairs.append((found[0], found[1]))
        this, that = np.array(pairs).T * 1e3
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
        ("tokens", "#4477AA", "o"),
        ("experts", "#EE6677", "s"),
        ("GPUs", "#228833", "^"),
        ("layers", "#AA3377", "D"),
    ):
        points = [(r["value"], 1e6 / r["rate"]) for r in rows if r["what"] == what]
        if points:
            axes[1].loglog(*zip(*points, strict=True), color=colour, marker=marker, label=what)
    axes[1].set(xlabel="size", ylabel="µs per step", title="growth of the cost of a step, 128 environments")
    if rows:
        axes[1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    if args.worker:
        work()
        return
    if args.against is not None:
        against(args.against.resolve(), args.rounds)
        return
    console = Console(width=130)
    options = {"window_tokens": args.window_tokens, "trace": args.trace}
    batches = sorted(args.batches)
    results = []
    table = Table(
        title=f"environment steps per second: {args.trace}, 64 experts, 16 GPUs, {args.window_tokens} tokens, "
        "full observations"
    )
    for column in ("environments", "batched", "sync", "async", "batched / sync", "µs per step", "state MB"):
        table.add_column(column, justify="right")
    for batch in batches:
        result = compare(batch, options, args)
        results.append(result)
        median = {name: float(np.median(values)) for name, values in result["rates"].items()}
        spread = {name: (max(values) - min(values)) / 2 for name, values in result["rates"].items()}
        cells = [f"{median[n]:,.0f} ± {spread[n]:,.0f}" if n in median else "" for n in ("batched", "sync", "async")]
        ratio = median["batched"] / median["sync"] if "sync" in median else float("nan")
        table.add_row(
            str(batch), *cells, "" if np.isnan(ratio) else f"{ratio:.1f}", f"{1e6 / median['batched']:.1f}",
            f"{result['state_bytes'] / 1e6:.0f}",
        )  # fmt: skip
        console.print(f"{batch} environments: batched {median['batched']:,.0f} steps/s")
    console.print(table)
    rows = growth(args) if args.sizes else []
    sizes = Table("what", "value", "steps/s", "kB per environment", title="growth, batched, 128 environments")
    for row in rows:
        sizes.add_row(row["what"], str(row["value"]), f"{row['rate']:,.0f}", f"{row['bytes_per_env'] / 1e3:.0f}")
    if rows:
        console.print(sizes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"peak memory of this process: {peak:,.0f} MB; {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} torch thread"
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(
        json.dumps({"results": results, "growth": rows, "peak_mb": peak}, indent=2) + "\n"
    )
    plot(results, rows, args.output.with_suffix(".png"))
    console.print(f"figures: {args.output.with_suffix('.json')}, plot: {args.output.with_suffix('.png')}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
