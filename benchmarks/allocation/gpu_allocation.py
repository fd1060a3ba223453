"""Compare trained allocation policies with the rules that operators use, on held-out streams of pods.

Trains PPO with the history of owners (Gaussian, categorical, and categorical with a penalty for missed objectives), PPO
on five numbers, and PPO with an LSTM on five numbers, with five seeds each.

Finished runs in the output folder are not repeated, and several processes can share the work. Prints a table, and
writes JSON and a plot of the learning curves.

    python benchmarks/allocation/gpu_allocation.py
    python benchmarks/allocation/gpu_allocation.py --only lstm --seeds 1 2        # a part; run it again for the rest
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.common.files import write_atomically
from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, gap_closed, play_policy, play_rules
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.training.logs import read_scalars

TRAINERS = Path(__file__).resolve().parents[2] / "cleanrl_ppo"
STUDIES: dict[str, tuple[str, ...]] = {
    "levels": ("ppo_gpu_alloc.py",),
    "qos": ("ppo_gpu_alloc.py", "--qos-penalty", "2"),
    "v0": ("ppo_gpu_alloc.py", "--env-id", "GPUAllocation-v0"),
    "lstm": ("ppo_gpu_alloc_lstm.py", "--env-id", "GPUAllocation-v0", "--learning-rate", "0.003"),
}
"""Trainer and flags of each study; all other flags have their defaults. The flags with history were chosen on streams
that are not used for the tables."""
DECISIONS_PER_ITERATION = {"ppo_gpu_alloc.py": 8192, "ppo_gpu_alloc_lstm.py": 4096}
# Not the streams from HELD_OUT_SEED on: those were used for learning curves and during development.
FINAL_SEED = HELD_OUT_SEED + 2**30
NAMES = {
    "levels": "PPO with history",
    "qos": "PPO with history, QoS penalty",
    "v0": "PPO, five numbers",
    "lstm": "PPO + LSTM, five numbers",
}
HISTORY = ("levels", "qos")
"""Studies with the history of owners."""


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of the runs of each study."""
    only: tuple[Literal["levels", "qos", "v0", "lstm"], ...] = ("levels", "qos", "v0", "lstm")
    """Studies to run."""
    history_timesteps: int = 16_000_000
    """Decisions per run with history."""
    v0_timesteps: int = 10_000_000
    """Decisions per run on five numbers."""
    lstm_timesteps: int = 1_200_000
    """Decisions per run with an LSTM. Each decision takes about ten times as long."""
    evaluations: int = 20
    """Number of points of a learning curve."""
    streams: int = 512
    """Number of held-out streams in the final comparison."""
    output: Path = Path("runs/gpu_allocation")
    """Folder for runs and results."""


def train(study: str, seed: int, args: Args) -> dict[str, Any]:
    """Train in a subprocess and return the result. A saved result is returned without training."""
    trainer, *flags = STUDIES[study]
    folder = args.output / f"{study}-{seed}"
    saved = folder / "result.json"
    if saved.exists():
        result: dict[str, Any] = json.loads(saved.read_text())
        return result
    steps = {"v0": args.v0_timesteps, "lstm": args.lstm_timesteps}.get(study, args.history_timesteps)
    every = max(1, steps // DECISIONS_PER_ITERATION[trainer] // args.evaluations)
    command = [
        sys.executable, str(TRAINERS / trainer), *flags, "--seed", str(seed), "--total-timesteps", str(steps),
        "--eval-interval", str(every), "--run-dir", str(folder), "--resume",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("result "))
    write_atomically(saved, json.dumps(result) + "\n")
    return result


def final(study: str, seed: int, batch: AllocationBatch, args: Args) -> dict[str, Any]:
    """Evaluate a saved policy on the held-out streams."""
    policy = AllocationPolicy.load(args.output / f"{study}-{seed}" / "checkpoint.pt")
    return play_policy(batch, policy, FINAL_SEED)


def curve(study: str, seed: int, args: Args) -> tuple[list[int], list[float]]:
    """(decisions, rewards) of a learning curve."""
    return read_scalars(args.output / f"{study}-{seed}", "eval/reward")


def plot(rules: dict[str, dict[str, Any]], plain_rules: dict[str, dict[str, Any]], args: Args, path: Path) -> None:
    """Plot the learning curves, with the rewards of the rules as horizontal lines."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
    panels = (
        (axes[0], HISTORY, rules, "with the history of owners"),
        (axes[1], ("v0", "lstm"), plain_rules, "five numbers"),
    )
    colours = {"levels": "#EE6677", "qos": "#66CCEE", "v0": "#4477AA", "lstm": "#AA3377"}
    shown = ("grant", "cut-0.9", "cut-0.8", "vpa", "vpa-fraction", "oracle")
    for axis, studies, lines, title in panels:
        for study in (s for s in studies if s in args.only):
            curves = [curve(study, seed, args) for seed in args.seeds]
            steps = np.array(curves[0][0]) / 1e6
            values = np.array([c[1] for c in curves])
            half = [ci95(column.tolist()) for column in values.T]
            axis.plot(steps, values.mean(0), color=colours[study], lw=2, label=NAMES[study])
            axis.fill_between(
                steps, values.mean(0) - half, values.mean(0) + half, color=colours[study], alpha=0.25, lw=0
            )
        for name, style in zip(shown, (":", "--", "-.", "--", "-.", "-"), strict=True):
            axis.axhline(lines[name]["reward"], ls=style, lw=1.1, color="#000000" if name == "oracle" else "#888888")
            # Labels of neighbouring lines are at opposite ends.
            left = name in ("grant", "cut-0.8")
            axis.annotate(
                name,
                (0.3 if left else 0.99, lines[name]["reward"]),
                xycoords=("axes fraction", "data"),
                fontsize=8,
                ha="left" if left else "right",
                va="top" if name in ("grant", "vpa-fraction") else "bottom",
            )
        axis.set(xlabel="million decisions", title=title)
        if any(study in args.only for study in studies):
            axis.legend(loc="lower center", fontsize=9)
    axes[0].set(ylabel="mean reward per decision, held-out streams")
    axes[0].set_ylim(bottom=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console(width=120)
    args.output.mkdir(parents=True, exist_ok=True)
    runs = [(study, seed) for seed in args.seeds for study in args.only]
    # First the runs that no other process is working on, then the results of the others.
    for wait in (False, True):
        for study, seed in runs:
            with (args.output / f"{study}-{seed}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    continue
                result = train(study, seed, args)
            if wait:
                console.print(f"{study} seed {seed}: reward {result['reward']:.4f}, QoS {result['qos']:.4f}")
    batches = {history: AllocationBatch(AllocationConfig(history=history), args.streams) for history in (True, False)}
    rules = {history: play_rules(batch, seed=FINAL_SEED) for history, batch in batches.items()}
    rows: list[dict[str, Any]] = []
    for study in args.only:
        history = study in HISTORY
        found = [final(study, seed, batches[history], args) for seed in args.seeds]
        row: dict[str, Any] = {"policy": NAMES[study], "seeds": len(found)}
        for key in ("reward", "qos", "efficiency", "oom", "monopoly", "wait_s"):
            row[key], row[f"{key}_ci95"] = float(np.mean([r[key] for r in found])), ci95([r[key] for r in found])
        gaps = [gap_closed(r["reward"], rules[history]) for r in found]
        row["gap_closed"], row["gap_closed_ci95"] = float(np.mean(gaps)), ci95(gaps)
        row["runs"] = found
        rows.append(row)
    table = Table(title=f"{args.streams} held-out streams of 128 pods; ± 95 % over {len(args.seeds)} seeds")
    for column in ("policy", "reward", "QoS met", "efficiency", "gap best rule → oracle"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for history in (True, False):
        for name, r in rules[history].items():
            label = f"{name} ({'history' if history else 'five numbers'})"
            gap = gap_closed(r["reward"], rules[history])
            table.add_row(
                label, f"{r['reward']:.4f}", f"{r['qos']:.4f}", f"{r['efficiency']:.3f}", f"{100 * gap:.0f} %"
            )
    for row in rows:
        table.add_row(
            row["policy"], f"{row['reward']:.4f} ± {row['reward_ci95']:.4f}",
            f"{row['qos']:.4f} ± {row['qos_ci95']:.4f}", f"{row['efficiency']:.3f} ± {row['efficiency_ci95']:.3f}",
            f"{100 * row['gap_closed']:.1f} ± {100 * row['gap_closed_ci95']:.1f} %", style="bold",
        )  # fmt: skip
    console.print(table)
    document = {
        "policies": rows,
        "rules": {"history": rules[True], "five_numbers": rules[False]},
        "streams": args.streams,
    }
    write_atomically(args.output / "figures.json", json.dumps(document, indent=2) + "\n")
    plot(rules[True], rules[False], args, args.output / "learning_curves.png")
    console.print(f"results: {args.output / 'figures.json'}, plot: {args.output / 'learning_curves.png'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
