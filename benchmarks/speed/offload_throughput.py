"""Steps per second of the offloading environments with observations, and visits per second of its rules.

Everything is CPU time of one thread: other work on the machine changes it less than the time of the wall clock. The
pairs are random legal ones: an eviction of any row, a prefetch in three of ten other steps. Rules are not tuned, and
what they prepare before they play is not counted.

    python benchmarks/speed/offload_throughput.py
    python benchmarks/speed/offload_throughput.py --against ../other-checkout   # the ratio of speeds of two revisions
"""

from __future__ import annotations

import json
import os
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

import clustergym  # noqa: F401  registers the environments
from clustergym.ids import OFFLOADING

ROOT = Path(__file__).resolve().parents[2]
RULES = ("lru", "lfu", "decayed-lfu")


@dataclass
class Args:
    num_envs: tuple[int, ...] = (64, 256)
    """Numbers of environments: the trainer's, and a large one."""
    rounds: int = 9
    """Number of measurements; median and range are reported."""
    output: Path = Path("runs/offload_throughput.json")
    """File of the figures."""
    against: Path | None = None
    """Folder of another checkout: measure both in turns."""


def random_pairs(obs: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """(N, 2) legal pairs, or one that ends the visit."""
    mask, n = obs["action_mask"], len(obs["context"])
    gpus = mask.shape[2] // 3
    row = (rng.random(n) * np.maximum(mask.any(2).sum(1), 1)).astype(np.int64)
    ends_visit = np.where(rng.random(n) < 0.3, gpus + rng.integers(0, gpus, n), 0)
    return np.stack(
        [row, np.where(obs["context"][:, 0] > 0, 2 * gpus + mask[:, 0, 2 * gpus :].argmax(1), ends_visit)], 1
    )


def step_seconds(env: Any, obs: dict[str, np.ndarray], rng: np.random.Generator) -> tuple[dict[str, np.ndarray], float]:
    """The last observations, and CPU seconds per step of one environment, in about 10,000 steps."""
    steps, spent = max(40, 10_000 // env.num_envs), 0.0
    for _ in range(steps):
        pairs = random_pairs(obs, rng)
        began = time.process_time()
        obs = env.step(pairs)[0]
        spent += time.process_time() - began
    return obs, spent / steps / env.num_envs


def rule_seconds(name: str) -> float:
    """CPU seconds per visit of a rule on the bundled trace."""
    from clustergym.moe_offload.rules import RULES as known
    from clustergym.moe_offload.rules import Workload, start_values
    from clustergym.moe_offload.simulator import build_task, load_once, parts_of, tables_of
    from clustergym.moe_offload.specs import OffloadConfig

    config = OffloadConfig()
    trace = load_once(config.trace)
    part, tables = parts_of(trace)["train"], tables_of(trace)
    workload, rule = Workload(build_task(config, tables), part, tables, reuse=True), known[name]
    workload.run(rule, start_values(rule))
    began = time.process_time()
    for _ in range(5):
        workload.run(rule, start_values(rule))
    return (time.process_time() - began) / 5 / part.n_tokens / part.n_layers


def work() -> None:
    """For each line of standard input, "id N" or the name of a rule, write the seconds to standard output."""
    running: dict[str, Any] = {}
    for line in sys.stdin:
        case = line.strip()
        if case in RULES:
            print(rule_seconds(case), flush=True)
            continue
        if case not in running:
            env_id, num_envs = case.split()
            env = gymnasium.make_vec(env_id, int(num_envs), "vector_entry_point", autoreset_mode="SameStep")
            rng = np.random.default_rng(0)
            running = {case: [env, env.reset(seed=0)[0], rng]}
            running[case][1] = step_seconds(*running[case])[0]  # compiles
        running[case][1], seconds = step_seconds(*running[case])
        print(seconds, flush=True)


def start(tree: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(tree / "envs"), "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(worker: subprocess.Popen[str], case: str) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(case, file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


def main(args: Args) -> None:
    trees = [ROOT] if args.against is None else [ROOT, args.against.resolve()]
    workers = [start(tree) for tree in trees]
    cases = [f"MoEOffload{variant}-v0 {n}" for variant in OFFLOADING for n in args.num_envs] + list(RULES)
    table = Table("case", "steps or visits per CPU second", "range", title="offloading, one thread")
    if args.against is not None:
        table.add_column("other checkout")
        table.add_column("speed ratio, median")
    found = {}
    for case in cases:
        seconds = np.array([[ask(worker, case) for worker in workers] for _ in range(args.rounds)])
        rates = 1 / seconds
        found[case] = rates.T.tolist()
        row = [case, f"{np.median(rates[:, 0]):,.0f}", f"{rates[:, 0].min():,.0f} … {rates[:, 0].max():,.0f}"]
        if args.against is not None:
            row += [f"{np.median(rates[:, 1]):,.0f}", f"{np.median(seconds[:, 1] / seconds[:, 0]):.2f}"]
        table.add_row(*row)
    Console(width=120).print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=2) + "\n")
    for worker in workers:
        worker.communicate()


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main(tyro.cli(Args, description=__doc__))
