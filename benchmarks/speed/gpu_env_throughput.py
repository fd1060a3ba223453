"""Steps per second of the batched allocation environment, compared with Gymnasium's SyncVectorEnv.

Both are measured in turns in one run, with random actions and all observations and infos. Prints a table, writes JSON.

    python benchmarks/speed/gpu_env_throughput.py
"""

from __future__ import annotations

import json
import platform
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
from clustergym.common.files import write_atomically


@dataclass
class Args:
    env_id: str = "GPUAllocation-v0"
    """GPUAllocation-v0 or GPUAllocationHistory-v0."""
    batches: tuple[int, ...] = (1, 64, 1024, 4096)
    """Numbers of parallel environments to measure."""
    rounds: int = 5
    """Number of measurements of each; the table has the median and half the range."""
    steps: int = 128
    """Steps per measurement of the batched environment. SyncVectorEnv takes fewer steps if it has many environments."""
    output: Path = Path("runs/gpu_env_throughput.json")
    """File for the results."""


def rate(env: Any, steps: int, rng: np.random.Generator) -> float:
    """Environment steps per second."""
    actions = rng.random((steps, env.num_envs, 2), dtype=np.float32)
    began = time.perf_counter()
    for action in actions:
        env.step(action)
    return env.num_envs * steps / (time.perf_counter() - began)


def compare(n: int, args: Args) -> dict[str, Any]:
    """Measure both with n environments, in turns."""
    modes = {"batched": "vector_entry_point", "sync": "sync"}
    envs = {name: gymnasium.make_vec(args.env_id, num_envs=n, vectorization_mode=mode) for name, mode in modes.items()}
    # SyncVectorEnv is slow: take only as many steps as need about the same time, but at least three.
    steps = {"batched": args.steps * max(1, 256 // n), "sync": max(3, min(args.steps, 8192 // n))}
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in envs}
    for env in envs.values():
        env.reset(seed=0)
        rate(env, 3, rng)
    for _ in range(args.rounds):
        for name, env in envs.items():
            rates[name].append(rate(env, steps[name], rng))
    state = sum(array.nbytes for array in envs["batched"].unwrapped.get_state().values())
    for env in envs.values():
        env.close()
    return {"environments": n, "rates": rates, "state_bytes": state}


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console(width=120)
    table = Table(title=f"{args.env_id}: environment steps per second, median of {args.rounds} rounds ± half the range")
    for column in ("environments", "batched", "SyncVectorEnv", "batched / sync", "µs per step", "state MB"):
        table.add_column(column, justify="right")
    results = []
    for n in sorted(args.batches):
        result = compare(n, args)
        median = {name: float(np.median(values)) for name, values in result["rates"].items()}
        spread = {name: (max(values) - min(values)) / 2 for name, values in result["rates"].items()}
        result["ratio"] = median["batched"] / median["sync"]
        results.append(result)
        cells = [f"{median[name]:,.0f} ± {spread[name]:,.0f}" for name in ("batched", "sync")]
        table.add_row(
            str(n),
            *cells,
            f"{result['ratio']:.0f}",
            f"{1e6 / median['batched']:.2f}",
            f"{result['state_bytes'] / 1e6:.1f}",
        )
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "env_id": args.env_id,
        "results": results,
        "machine": platform.machine(),
        "version": clustergym.__version__,
    }
    write_atomically(args.output, json.dumps(document, indent=2) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
