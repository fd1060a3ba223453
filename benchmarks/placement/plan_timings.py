"""Time and memory of the whole ``clustergym plan`` command at the sizes that people run.

    python benchmarks/placement/plan_timings.py                     # all cases, three runs each
    python benchmarks/placement/plan_timings.py --cases v3-eplb v3-greedy --repeats 5 --json timings.json

Traces are synthetic, with the sizes and the routing groups of the model. A run is a new process: start of Python,
imports, reading the trace, planning, measuring on held-out passes under all profiles of the engine, and writing the
plan. The first run of a case may compile kernels; it is not counted. Times are those of the wall clock, so the machine
should be idle; CPU seconds are shown beside them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tyro

from clustergym.moe_placement.specs import get_model
from clustergym.traces import SyntheticConfig, synthetic_trace


class Case(NamedTuple):
    model: str
    cluster: str
    tokens: int
    flags: tuple[str, ...]
    most_s: float | None = None
    """Seconds that the whole command may take"""


CASES = {
    "v3-eplb": Case("deepseek-v3", "h800-4x8", 60_000, ("--planner", "eplb"), 4.0),
    "v3-greedy": Case("deepseek-v3", "h800-4x8", 60_000, ("--planner", "greedy"), 8.0),
    "v3-decode-eplb": Case("deepseek-v3", "h800-4x8", 60_000, ("--planner", "eplb", "--phase", "decode"), 4.0),
    "v3-decode-greedy": Case("deepseek-v3", "h800-4x8", 60_000, ("--planner", "greedy", "--phase", "decode"), 8.0),
    "kimi-128": Case("kimi-k2", "h800-16x8", 60_000, ("--planner", "eplb", "--phase", "decode")),
    "kimi-128-anneal": Case(
        "kimi-k2", "h800-16x8", 60_000, ("--planner", "anneal", "--iterations", "200", "--phase", "decode")
    ),
    "v3-320": Case("deepseek-v3", "h800-40x8", 60_000, ("--planner", "eplb", "--phase", "decode")),
    "v3-320-anneal": Case(
        "deepseek-v3", "h800-40x8", 60_000, ("--planner", "anneal", "--iterations", "200", "--phase", "decode")
    ),
}
MOST_MB = 2000.0
CODE = "import sys; from clustergym.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Args:
    """Time and memory of ``clustergym plan``."""

    cases: list[str] = field(default_factory=lambda: list(CASES))
    """Cases to run."""
    repeats: int = 3
    """Runs of each case that are counted."""
    json: Path | None = None
    """Write the results to this JSON file."""


def run(case: Case, trace: Path, folder: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, MB at most) of one command."""
    words = ["plan", str(trace), "--cluster", case.cluster, *case.flags, "-o", str(folder / "plan.json")]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", CODE, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    taken = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"clustergym {' '.join(words)} failed")
    return taken, used.ru_utime + used.ru_stime, used.ru_maxrss * 1.024e-3


def main(args: Args) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label in args.cases:
            case = CASES[label]
            trace = folder / f"{case.model}-{case.tokens}.npz"
            if not trace.exists():
                config = SyntheticConfig.for_model(get_model(case.model), n_tokens=case.tokens)
                synthetic_trace(config, seed=0).save(trace)
            runs = [run(case, trace, folder) for _ in range(args.repeats + 1)][1:]
            seconds, cpu, memory = (list(column) for column in zip(*runs, strict=True))
            rows.append({
                "case": label, "cluster": case.cluster, "tokens": case.tokens, "seconds": seconds, "cpu_s": cpu,
                "mb": memory, "most_s": case.most_s,
            })  # fmt: skip
            bar = "" if case.most_s is None else f" (bar {case.most_s:g})"
            print(
                f"{label}: median {statistics.median(seconds):.2f} s{bar} of {min(seconds):.2f} … {max(seconds):.2f}, "
                f"CPU {statistics.median(cpu):.2f} s, {max(memory):.0f} MB (bar {MOST_MB:.0f})",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
