"""What a change of a live plan saves if only a few experts may move: ``clustergym plan --from --max-moves``.

    python benchmarks/placement/plan_moves.py                  # bundled trace; limits of 20, 80, 320 moves and none
    python benchmarks/placement/plan_moves.py --traces tiny_moe other.npz --moves 50 200 --seeds 0 1 2 3 4

The live plan is EPLB's for the same part of the trace. Times are those of held-out passes, compared with the live plan.
The number of steps is fixed, so the plans do not depend on the machine; a seed sets the split and the search.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from clustergym.common.statistics import ci95

CODE = "import sys; from clustergym.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Args:
    traces: tuple[str, ...] = ("tiny_moe",)
    """Token traces that name their model."""
    profiles: tuple[str, ...] = ("sglang-prefill", "sglang-decode")
    moves: tuple[int, ...] = (20, 80, 320)
    """Limits to compare with a change without a limit."""
    seeds: tuple[int, ...] = (0, 1, 2)
    planner: str | None = None
    """By default that of the profile."""
    cluster: str = "h800-4x4"
    iterations: int = 20_000
    """Annealing steps per layer."""


def plan(folder: Path, *words: str) -> dict[str, Any]:
    """Results of one ``clustergym plan``."""
    results = folder / "results.json"
    words = ("plan", *words, "--force", "--json", str(results))
    subprocess.run([sys.executable, "-c", CODE, *words], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def main(args: Args) -> None:
    print("| trace | profile | most moves | moves made | time compared with the live plan, % | seconds to plan |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for trace in args.traces:
            for profile in args.profiles:
                rows: dict[str, list[tuple[float, float, float]]] = {}
                for seed in args.seeds:
                    common = (trace, "--cluster", args.cluster, "--profile", profile, "--seed", str(seed))
                    live = str(folder / "live.json")
                    plan(folder, *common, "--planner", "eplb", "-o", live)
                    for limit in (*args.moves, None):
                        flags = () if limit is None else ("--max-moves", str(limit))
                        flags += () if args.planner is None else ("--planner", args.planner)
                        found = plan(
                            folder, *common, *flags, "--from", live, "--iterations", str(args.iterations),
                            "-o", str(folder / "next.json"),
                        )  # fmt: skip
                        chosen = next(row for row in found["planners"] if row["planner"] == found["planner"])
                        rows.setdefault("no limit" if limit is None else str(limit), []).append(
                            (found["change"]["moves"], 100 * found["versus"]["live"]["mean"], chosen["decision_s"])
                        )
                for label, values in rows.items():
                    moves, saved, seconds = np.array(values).T
                    print(
                        f"| {trace} | {profile} | {label} | {moves.mean():.0f} | "
                        f"{saved.mean():+.1f} ± {ci95(saved):.1f} | {np.median(seconds):.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main(tyro.cli(Args))
