"""Does it help to look ahead? Train the allocation policy with several discount factors, and compare them.

All runs have the same settings, but for the discount factor and the seed. The value change is not clipped, because
values grow with the discount factor. Finished runs in the output folder are not repeated. ``waits`` is the mean room
term: what the waiting time of pods costs per decision.

    python benchmarks/allocation/allocation_discount.py
    python benchmarks/allocation/allocation_discount.py --reward seed
"""

from __future__ import annotations

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
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, play_policy
from clustergym.gpu_allocation.policy import AllocationPolicy

TRAINER = Path(__file__).resolve().parents[2] / "cleanrl_ppo" / "ppo_gpu_alloc.py"
SEED = HELD_OUT_SEED + 2**31
"""Streams of their own: neither those of learning curves nor those of the final tables."""


@dataclass
class Args:
    gammas: tuple[float, ...] = (0.0, 0.5, 0.9)
    """Discount factors."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the runs."""
    reward: Literal["room", "seed"] = "room"
    """Reward of the task."""
    timesteps: int = 3_000_000
    """Decisions per run."""
    streams: int = 1024
    """Number of held-out streams."""
    output: Path = Path("runs/allocation_discount")
    """Folder for runs and results."""


def train(gamma: float, seed: int, args: Args) -> Path:
    """The checkpoint of a run, which is trained or resumed if it is not finished."""
    folder = args.output / f"{args.reward}-{gamma:g}-{seed}"
    if not (folder / "result.json").exists():
        command = [
            sys.executable, str(TRAINER), "--gamma", str(gamma), "--seed", str(seed), "--reward", args.reward,
            "--no-clip-vloss", "--total-timesteps", str(args.timesteps), "--eval-streams", "0",
            "--copies", "1", "--run-dir", str(folder), "--resume",
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        write_atomically(folder / "result.json", done.stdout.splitlines()[-1].removeprefix("result ") + "\n")
    return folder / "checkpoint.pt"


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console(width=120)
    batch = AllocationBatch(AllocationConfig(history=True, reward=args.reward), args.streams)
    rows: dict[float, list[dict[str, Any]]] = {gamma: [] for gamma in args.gammas}
    for seed in args.seeds:
        for gamma in args.gammas:
            result = play_policy(batch, AllocationPolicy.load(train(gamma, seed, args)), SEED)
            rows[gamma].append(result)
            console.print(f"gamma {gamma:g}, seed {seed}: {result['reward']:.4f}, waits {result['room']:.4f}")
    table = Table(
        "gamma", "reward", "difference to the first", "QoS met", "OOM kills", "waits", "wait, s",
        title=f"reward {args.reward}; {args.streams} held-out streams; ± 95 % over {len(args.seeds)} seeds",
    )  # fmt: skip
    first = [r["reward"] for r in rows[args.gammas[0]]]
    for gamma, runs in rows.items():
        better = [r["reward"] - low for r, low in zip(runs, first, strict=True)]
        means = {key: float(np.mean([r[key] for r in runs])) for key in ("reward", "qos", "oom", "room", "wait_s")}
        table.add_row(
            f"{gamma:g}", f"{means['reward']:.4f} ± {ci95([r['reward'] for r in runs]):.4f}",
            f"{np.mean(better):+.4f} ± {ci95(better):.4f}", f"{means['qos']:.4f}", f"{means['oom']:.4f}",
            f"{means['room']:.4f}", f"{means['wait_s']:.0f}",
        )  # fmt: skip
    console.print(table)
    document = {"reward": args.reward, "runs": {f"{gamma:g}": runs for gamma, runs in rows.items()}}
    write_atomically(args.output / f"{args.reward}.json", json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
