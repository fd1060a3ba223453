"""Run a trainer with several seeds as one run of a sweep: ``python -m clustergym.sweeping.seeds 1,2,3 PROGRAM FLAGS…``.

A search that draws the seed like any other parameter picks lucky seeds. The sweep files start trainers with this module
instead, so that every configuration runs with the same seeds and is ranked by their mean. All seeds run at the same
time, and early stopping sees the mean of their curves. ``--run-dir`` and ``--resume`` are passed on, with one folder
per seed. The last line is ``result {json}`` with the means of the numbers in the result lines of the seeds. In a wandb
sweep, one wandb run gets the means of all scalars.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from clustergym.common.files import write_atomically
from clustergym.sweeping.processes import CHECKPOINT, OUTPUT, die_with_parent, tail
from clustergym.sweeping.scores import Scores, last_result, tags_of

RESULT = "result.json"
_POLL_S = 0.2
_LOG_S = 10.0
_WANDB_RUN = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
"""Variables that the wandb agent sets for its run. The trainers must not write to that run themselves."""


def mean_result(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of the finite numbers that every result has, and the values of each seed under ``NAME/seeds``."""
    found: dict[str, Any] = {}
    for key in results[0]:
        values = [result.get(key) for result in results]
        if all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values):
            found[key] = math.fsum(values) / len(values)  # type: ignore[arg-type]
            found[f"{key}/seeds"] = values
    return found


def split_flags(flags: Sequence[str]) -> tuple[list[str], Path | None, bool]:
    """(other flags, ``--run-dir``, ``--resume``)"""
    rest, folder, resume = [], None, False
    for flag in flags:
        if flag.startswith("--run-dir="):
            folder = Path(flag.partition("=")[2])
        elif flag == "--resume":
            resume = True
        elif flag.startswith("--seed=") or flag == "--seed":
            raise SystemExit("error: seed is a parameter of the sweep: remove it, because this command sets the seeds")
        else:
            rest.append(flag)
    return rest, folder, resume


def start(program: Sequence[str], seed: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start the trainer with one seed, from its checkpoint if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    resume = ["--resume"] if any(folder.rglob(CHECKPOINT)) else []
    environment = {key: value for key, value in os.environ.items() if key not in _WANDB_RUN}
    with open(folder / OUTPUT, "ab") as output:
        return subprocess.Popen(
            [sys.executable, *program, f"--seed={seed}", f"--run-dir={folder}", *resume],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with_parent(os.getpid()),
        )


class WandbMeans:
    """Logs the means over seeds to the run of a wandb sweep, step by step as all seeds reach a step."""

    def __init__(self, folders: Sequence[Path]) -> None:
        import wandb

        self.folders, self.run = folders, wandb.init()
        self.done = -1
        self.scores: dict[str, Scores] = {}

    def update(self) -> None:
        """Log the steps that all seeds have reached since the last call."""
        if not self.scores:
            names = [tags_of(folder) for folder in self.folders]
            self.scores = {tag: Scores(self.folders[0].parent, tag) for tag in sorted(set.intersection(*names))}
        curves = {tag: scores.curve(len(self.folders)) for tag, scores in self.scores.items()}
        for step in sorted({step for curve in curves.values() for step in curve if step > self.done}):
            self.run.log({tag: curve[step] for tag, curve in curves.items() if step in curve}, step=step)
            self.done = step

    def finish(self, result: Mapping[str, Any]) -> None:
        self.update()
        self.run.summary.update({key: value for key, value in result.items() if not key.endswith("/seeds")})
        self.run.finish()


def run_seeds(seeds: Sequence[int], program: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run all seeds that have no result yet, at the same time. Returns the means.

    Raises:
        RuntimeError: the trainer failed with some seed.
    """
    folders = {seed: folder / f"seed-{seed}" for seed in seeds}
    running = {seed: start(program, seed, folders[seed]) for seed in seeds if not (folders[seed] / RESULT).is_file()}
    means = WandbMeans(list(folders.values())) if os.environ.get("WANDB_SWEEP_ID") else None
    logged = time.monotonic()
    try:
        while running:
            for seed, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[seed]
                output = folders[seed] / OUTPUT
                if code != 0:
                    raise RuntimeError(f"seed {seed}: exit code {code}: {tail(output)}")
                write_atomically(folders[seed] / RESULT, json.dumps(last_result(output) or {}))
            if means is not None and time.monotonic() - logged > _LOG_S:
                logged = time.monotonic()
                means.update()
            time.sleep(_POLL_S)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    result = mean_result([json.loads((folders[seed] / RESULT).read_text()) for seed in seeds])
    if means is not None:
        means.finish(result)
    return result


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or not all(part.isdigit() for part in argv[0].split(",")):
        print(f"usage: python -m clustergym.sweeping.seeds 1,2,3 PROGRAM FLAGS…, found {list(argv)}", file=sys.stderr)
        return 2
    seeds = [int(part) for part in argv[0].split(",")]
    flags, folder, _ = split_flags(argv[2:])
    if folder is None:
        folder = Path("runs") / f"seeds-{os.environ.get('WANDB_RUN_ID', os.getpid())}"
    signal.signal(signal.SIGTERM, _stop)
    try:
        result = run_seeds(seeds, [argv[1], *flags], folder)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print("result " + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
