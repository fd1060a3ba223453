"""What a step of annealing costs, by the number of tokens of the pass that it plans on.

    python benchmarks/speed/anneal_cost.py
    python benchmarks/speed/anneal_cost.py --against ../other-checkout    # the same steps of another revision, in turns

CPU time of one thread on synthetic tokens of one layer, 64 experts, top-6, 16 GPUs. A step is measured as the
difference between a long and a short plan on the same tokens, so what a plan does before its first step does not count.
All revisions plan on the same array of tokens, spread evenly over the GPUs, and follow the true time of the pass.
``growth`` is the cost per step divided by that with the fewest tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("sglang-prefill", "sglang-decode")
# Kind of step → (steps of the short plan, steps of the long plan).
STEPS = {"exact": (1000, 6000), "estimate": (100_000, 400_000)}


@dataclass
class Args:
    tokens: tuple[int, ...] = (1024, 4096, 16384, 32768)
    """Tokens of the pass."""
    rounds: int = 5
    """Number of measurements; median and range are reported."""
    against: Path | None = None
    """Folder of another checkout, which is measured in turns with this one."""
    seed: int = 0


class Task:
    """Annealing one interval."""

    def __init__(self, profile: str, experts: npt.NDArray[np.int16], rows: npt.NDArray[np.int32]) -> None:
        from clustergym.moe_placement import Interval, Simulator

        self.simulator = Simulator("deepseek-v2-lite", "h800-4x4", profile)
        self.seen = Interval.even(experts, rows[None], self.simulator.n_gpus)

    def planner(self, exact: int, estimate: int) -> Any:
        from clustergym.planners.registry import make_planner

        return make_planner("anneal", self.simulator, norm=0, mix_tokens=0, iterations=exact, estimate_steps=estimate)


def step_us(task: Task, kind: str) -> float:
    """CPU time of an annealing step, µs."""
    static = task.simulator.static(1)

    def seconds(steps: int) -> float:
        planner = task.planner(steps, 0) if kind == "exact" else task.planner(1, steps)
        began = time.process_time()
        planner.plan([task.seen], static)
        return time.process_time() - began

    seconds(10)  # compiles
    short, long = STEPS[kind]
    return 1e6 * (seconds(long) - seconds(short)) / (long - short)


def work(path: str) -> None:
    """Measure the cases named on standard input: profile, kind and tokens. Writes µs per step to standard output."""
    experts = np.load(path)
    for line in sys.stdin:
        profile, kind, tokens = line.split()
        rows = np.random.default_rng(0).permutation(experts.shape[1])[: int(tokens)].astype(np.int32)
        print(step_us(Task(profile, experts, rows), kind), flush=True)


def measure(args: Args, path: str) -> dict[tuple[str, str, int], list[npt.NDArray[np.float64]]]:
    """Case → for each checkout the µs per step of every round."""
    workers = []
    for tree in (ROOT, *([args.against.resolve()] if args.against else [])):
        environment = os.environ | {"PYTHONPATH": str(tree / "envs"), "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", path]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        workers.append(subprocess.Popen(command, text=True, env=environment, **pipes))

    def ask(worker: subprocess.Popen[str], case: tuple[str, str, int]) -> float:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(*case, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    found: dict[tuple[str, str, int], list[npt.NDArray[np.float64]]] = {}
    for case in [(profile, kind, tokens) for profile in PROFILES for kind in STEPS for tokens in sorted(args.tokens)]:
        rounds = [[ask(worker, case) for worker in workers] for _ in range(args.rounds)]
        found[case] = list(np.array(rounds).T)
    for worker in workers:
        worker.communicate()
    return found


def main(args: Args) -> None:
    from clustergym.traces import SyntheticConfig, synthetic_trace

    trace = synthetic_trace(SyntheticConfig(n_tokens=2 * max(args.tokens), n_layers=1), seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "experts.npy")
        np.save(path, np.ascontiguousarray(trace.experts.transpose(1, 0, 2)))
        found = measure(args, path)
    names = ["this checkout", *([str(args.against)] if args.against else [])]
    table = Table("profile", "step", "tokens", title="µs of CPU per annealing step, median (range); growth")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("growth", justify="right")
    for (profile, kind, tokens), checkouts in found.items():
        cells = []
        for i, values in enumerate(checkouts):
            median, fewest = np.median(values), np.median(found[profile, kind, min(args.tokens)][i])
            cells += [f"{median:.2f} ({values.min():.2f} … {values.max():.2f})", f"{median / fewest:.2f}"]
        table.add_row(profile, kind, f"{tokens:,}", *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:  # started by measure()
        work(sys.argv[2])
    else:
        main(tyro.cli(Args, description=__doc__))
