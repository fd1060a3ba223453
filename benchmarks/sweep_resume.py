"""Kill a sweep of a trainer half-way and resume it: every run happens once, and the best run is the same.

    python benchmarks/sweep_resume.py                                   # ppo_gpu_alloc.py, 8 runs, 2 at a time
    python benchmarks/sweep_resume.py --timesteps 20_000

Runs the sweep once without interruption. Then runs it again in another folder, kills it with SIGKILL when half of the
runs have ended, and repeats the command. Both sweeps must have the same runs, none twice, with the same scores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml

from clustergym.sweeping import Run, Store
from clustergym.sweeping.store import ranked

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    program: str = "cleanrl_ppo/ppo_gpu_alloc.py"
    """The trainer."""
    metric: str = "mean_return"
    """Metric in its result line, or a scalar that it logs."""
    timesteps: int = 65_536
    """Timesteps per run."""
    runs: int = 8
    """Runs of the sweep."""
    jobs: int = 2
    """Runs at the same time."""
    json: Path | None = None
    """Write the results to this file."""


def sweep_file(args: Args, path: Path) -> Path:
    """Write a random search. Its proposals do not depend on scores, so two sweeps can be compared run by run."""
    config: dict[str, Any] = {
        "program": args.program,
        "method": "random",
        "metric": {"name": args.metric, "goal": "maximize"},
        "run_cap": args.runs,
        "parameters": {
            "total-timesteps": {"value": args.timesteps},
            "seed": {"value": 1},
            "learning-rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2},
            "clip-coef": {"values": [0.1, 0.2]},
        },
    }
    path.write_text(yaml.safe_dump(config))
    return path


def start(file: Path, folder: Path, jobs: int) -> subprocess.Popen[bytes]:
    code = "import sys; from clustergym.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["sweep", "run", str(file), "--jobs", str(jobs), "--folder", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )


def runs_of(folder: Path) -> list[Run]:
    if not (folder / "sweep.db").exists():
        return []
    store = Store(folder / "sweep.db")
    try:
        return store.runs()
    finally:
        store.close()


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"the sweep ended with status {process.returncode}")


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = sweep_file(args, folder / "sweep.yaml")
        began = time.perf_counter()
        ended(start(file, folder / "whole", args.jobs))
        whole, whole_s = runs_of(folder / "whole"), time.perf_counter() - began

        process = start(file, folder / "cut", args.jobs)
        while sum(run.done for run in runs_of(folder / "cut")) < args.runs // 2 and process.poll() is None:
            time.sleep(0.5)
        time.sleep(2)  # let the next runs start
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        at_kill = {run.id: run for run in runs_of(folder / "cut")}
        ended(start(file, folder / "cut", args.jobs))
        cut = runs_of(folder / "cut")

    print("| run | learning-rate | clip-coef | whole | killed and resumed | state at the kill | starts |")
    print("| ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for a, b in zip(whole, cut, strict=True):
        state = at_kill[b.id].state if b.id in at_kill else "not proposed"
        p = b.parameters
        print(
            f"| {b.id} | {p['learning-rate']:.2e} | {p['clip-coef']} | {a.metric:.4f} | {b.metric:.4f} | {state} "
            f"| {b.starts} |"
        )
    checks = {
        "same parameters": [r.parameters for r in whole] == [r.parameters for r in cut],
        "same scores": [r.metric for r in whole] == [r.metric for r in cut],
        "all finished": all(r.state == "finished" for r in [*whole, *cut]),
        "ended runs not touched": all(cut[i - 1].starts == 1 for i, r in at_kill.items() if r.done),
        "same best": ranked(whole, True)[0].id == ranked(cut, True)[0].id,
    }
    print(
        f"\nwhole sweep: {whole_s:.0f} s; best: run {ranked(cut, True)[0].id}; "
        + ", ".join(f"{k}: {v}" for k, v in checks.items())
    )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"checks": checks, "whole_s": whole_s, "scores": [r.metric for r in cut]}, indent=2) + "\n"
        )
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))
