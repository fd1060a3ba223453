"""How much of the gap between the best rule and the oracle can be learned at all?

The oracle knows what the next pod needs. Nobody can know that: pods of one owner differ, and a third never use the GPU.
The policy ``known owner`` knows everything else: the hidden habits of the owner and the distribution of its pods. It
grants the cores with the highest expected reward, and the memory that is enough for a given share of pods. What it
does not know exactly is how much neighbours slow a pod down; it takes the factor, and the share of pods with enough
memory, that were best on development streams. A learned policy sees less: it has to infer the habits from the history.

    python benchmarks/allocation_bound.py
    python benchmarks/allocation_bound.py --checkpoint runs/x/checkpoint.pt
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.common.files import write_atomically
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig, state
from clustergym.gpu_allocation.baselines import AmountRule
from clustergym.gpu_allocation.dynamics import MAX_NEED
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, play, play_policy, play_rules
from clustergym.gpu_allocation.fitted import MEMORY_POD_QUANTILES, NEED_POD_QUANTILES
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.gpu_allocation.reward import EFFICIENCY_WEIGHT, MONOPOLY_FACTOR, MONOPOLY_PENALTY, QOS_MET, QOS_MISSED
from clustergym.gpu_allocation.state import Doubles

SLOWDOWNS = (1.05, 1.1, 1.15, 1.2)
ENOUGH = (0.97, 0.99, 0.999)
FINAL_SEED = HELD_OUT_SEED + 2**30


@dataclass
class Args:
    checkpoint: tuple[Path, ...] = ()
    """Checkpoints of ppo_gpu_alloc.py with history to compare with."""
    streams: int = 512
    """Number of held-out streams."""
    output: Path = Path("runs/allocation_bound.json")
    """JSON file for the results."""


def sigmoid(x: Doubles) -> Doubles:
    return 1.0 / (1.0 + np.exp(-x))


class KnownOwner(AmountRule):
    """Grants what is best on average over the pods of the owner, whose habits it knows."""

    def __init__(self, batch: AllocationBatch, slowdown: float, enough: float) -> None:
        super().__init__(batch)
        self.slowdown = slowdown
        points = (np.arange(60) + 0.5) / 60
        grid = np.linspace(0.0, 1.0, len(NEED_POD_QUANTILES))
        self.differences = np.interp(points, grid, NEED_POD_QUANTILES)
        self.memory = float(np.interp(enough, grid, MEMORY_POD_QUANTILES))

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        owner = self.batch.state["ask"].numpy()[:, state.ASK_OWNER].astype(np.int64)
        habits = self.batch.state["habits"].numpy()[self.rows, owner].astype(float)
        pods = self.batch.state["counters"].numpy()[:, state.COUNT_PODS] + 1
        logits = habits[:, state.HABIT_NEED, None] + self.differences
        need = self.slowdown * cores[:, None] * np.minimum(sigmoid(logits), MAX_NEED)
        idle = self.batch.config.idle_share
        best, chosen = np.full(len(cores), -np.inf), cores.copy()
        for level in np.arange(10.0, 101.0):
            share = np.minimum(level, cores)
            # A request that is granted in full counts as enough, as with the rule grant.
            met = (need <= share[:, None]) | (share >= cores)[:, None]
            active = EFFICIENCY_WEIGHT * np.minimum(need, share[:, None]) / share[:, None]
            active = (active + np.where(met, QOS_MET, QOS_MISSED)).mean(1)
            value = idle * QOS_MET + (1 - idle) * active
            value -= np.where(share > MONOPOLY_FACTOR * 100.0 / pods, MONOPOLY_PENALTY, 0.0)
            better = value > best + 1e-9
            best, chosen = np.where(better, value, best), np.where(better, share, chosen)
        return chosen, np.ceil(memory * sigmoid(habits[:, state.HABIT_MEMORY] + self.memory))


def main(args: Args) -> None:
    torch.set_num_threads(1)
    small, batch = (AllocationBatch(AllocationConfig(history=True), n) for n in (128, args.streams))

    def known(on: AllocationBatch, slowdown: float, enough: float, seed: int) -> dict[str, Any]:
        return play(on, KnownOwner(on, slowdown, enough).act, seed=seed)

    tried = {(f, q): known(small, f, q, HELD_OUT_SEED)["reward"] for f in SLOWDOWNS for q in ENOUGH}
    slowdown, enough = max(tried, key=lambda key: tried[key])
    rows = play_rules(batch, seed=FINAL_SEED)
    low = max(row["reward"] for name, row in rows.items() if name != "oracle")
    rows["known owner"] = known(batch, slowdown, enough, FINAL_SEED)
    for path in args.checkpoint:
        rows[str(path)] = play_policy(batch, AllocationPolicy.load(path), FINAL_SEED)
    table = Table(
        "policy", "reward", "QoS met", "efficiency", "OOM kills", "wait, s", "best rule → oracle",
        "best rule → known owner", title=f"{args.streams} held-out streams; slowdown {slowdown}, memory {enough}",
    )  # fmt: skip
    for name, row in rows.items():
        for key, top in (("gap_to_oracle", "oracle"), ("gap_to_known_owner", "known owner")):
            row[key] = (row["reward"] - low) / (rows[top]["reward"] - low)
        table.add_row(
            name, f"{row['reward']:.4f} ± {row['reward_ci95']:.4f}", f"{row['qos']:.4f}", f"{row['efficiency']:.3f}",
            f"{row['oom']:.4f}", f"{row['wait_s']:.0f}", f"{100 * row['gap_to_oracle']:.1f} %",
            f"{100 * row['gap_to_known_owner']:.1f} %",
        )  # fmt: skip
    Console(width=140).print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output, json.dumps({"slowdown": slowdown, "enough": enough, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
