"""How much of the gap between the best rule and the oracle can be learned at all, and how close does PPO come to it?

The oracle knows what the next pod needs. Nobody can know that: pods of one owner differ, and a third never use the GPU.
Two supervised fits bound what a policy can learn. In training they see the reward of every action for every pod, which
no agent could measure: 120 copies of each simulated GPU take one action each. The probabilities of the actions are
fitted to the largest expected reward, and the policy takes the most probable action.

    fit on the observation     sees what PPO sees
    fit on owners' habits      also sees the hidden habits of the owner

The fits are made on streams of their own, in rounds: later rounds collect data with the policy of the round before.

    python benchmarks/allocation/allocation_bound.py
    python benchmarks/allocation/allocation_bound.py --checkpoint runs/x/checkpoint.pt
    python benchmarks/allocation/allocation_bound.py --qos-penalty 2 --no-habits
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig, state
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, play, play_policy, play_rules
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.gpu_allocation.space import MAX_CORES, MAX_MEMORY_MB, action_for

FINAL_SEED = HELD_OUT_SEED + 2**30
FIT_SEED = HELD_OUT_SEED + 2**36
CORES = torch.linspace(0.1, 1.0, 24)
MEMORY = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6])
SHARES = torch.cartesian_prod(CORES, MEMORY)
"""(120, 2) actions that are tried for every pod, as parts of the requested cores and memory."""
FULL = len(SHARES) - len(MEMORY)
"""The action that grants the request."""
BOUND = "fit on the observation"


@dataclass
class Args:
    checkpoint: tuple[Path, ...] = ()
    """Checkpoints of ppo_gpu_alloc.py with history to compare with."""
    streams: int = 512
    """Number of held-out streams."""
    fit_streams: int = 1024
    """Number of streams per round of a fit, 128 pods each."""
    rounds: int = 4
    """Rounds of collecting data. A fit uses the data of all rounds."""
    qos_penalty: float = 0.0
    """Subtracted from the rewards of pods that miss their objective, in the fits. The table shows plain rewards."""
    habits: bool = True
    """Whether to fit on the owners' habits too."""
    epochs: int = 8
    """Epochs over the data of all rounds so far."""
    output: Path = Path("runs/allocation_bound.json")
    """JSON file for the results."""


def actions(obs: npt.NDArray[np.float32], shares: Tensor) -> npt.NDArray[np.float32]:
    """The actions that grant these parts of the requests, which are the first two numbers of an observation."""
    amounts = obs[:, :2].astype(float) * shares.double().numpy()
    cores, memory = action_for(MAX_CORES * amounts[:, 0], MAX_MEMORY_MB * amounts[:, 1])
    return np.clip(np.stack([cores, memory], -1), 0.0, 1.0).astype(np.float32)


class Fit:
    """Probabilities of all actions that maximise the expected reward; the policy takes the most probable one."""

    def __init__(self, habits: bool, qos_penalty: float = 0.0) -> None:
        self.habits, self.qos_penalty = habits, qos_penalty
        self.network: nn.Module | None = None
        self.seen: list[Tensor] = []
        self.rewards: list[Tensor] = []

    def observe(self, batch: AllocationBatch, copies: int = 1) -> Tensor:
        """(B / copies, features) what the policy may see."""
        obs = torch.from_numpy(batch.obs[::copies].copy())
        if not self.habits:
            return obs
        owner = batch.state.ask[::copies, state.ASK_OWNER].astype(int)
        habits = batch.state.habits[::copies][np.arange(len(obs)), owner]
        return torch.cat([obs, torch.from_numpy(habits[:, : state.HABIT_TEMPLATE])], 1)

    def choose(self, seen: Tensor) -> Tensor:
        """(B, 2) parts of the requests; all of them before the first fit."""
        if self.network is None:
            return torch.ones(len(seen), 2)
        with torch.inference_mode():
            return SHARES[self.network((seen - self.mean) / self.std).argmax(1)]

    def collect(self, streams: int, seed: int) -> None:
        """Play one episode per stream. The first copy takes the policy's action, the others one of all actions each."""
        copies = 1 + len(SHARES)
        batch = AllocationBatch(AllocationConfig(history=True), streams * copies)
        batch.seed(seed + np.arange(batch.num_envs) // copies)
        batch.reset()
        for _ in range(batch.config.arrivals):
            seen = self.observe(batch, copies)
            shares = torch.cat([self.choose(seen)[:, None], SHARES.expand(streams, -1, -1)], 1)
            batch.step(actions(batch.obs, shares.flatten(0, 1)))
            missed = 1.0 - batch.outcome[:, state.OUTCOME_MET]
            rewards = torch.from_numpy(batch.reward - self.qos_penalty * missed).view(streams, copies)[:, 1:]
            self.seen.append(seen)
            self.rewards.append((rewards - rewards[:, FULL, None]).float())
            batch.copy_first(copies)

    def fit(self, epochs: int, batch_size: int = 2048, learning_rate: float = 3e-3) -> None:
        """Train a new network to everything that was collected."""
        torch.manual_seed(0)
        seen, rewards = torch.cat(self.seen), torch.cat(self.rewards)
        self.mean, self.std = seen.mean(0), seen.std(0) + 1e-6
        layers = [nn.Linear(seen.shape[1], 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, len(SHARES))]
        network = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(network.parameters(), learning_rate)
        steps = epochs * len(seen) // batch_size
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for step in range(steps):
            rows = torch.randint(len(seen), (batch_size,))
            log_probs = network((seen[rows] - self.mean) / self.std).log_softmax(1)
            probs = log_probs.exp()
            # The entropy bonus falls to 0: without it, the first good action would be taken for ever.
            bonus = 0.1 * max(0.0, 1 - step / (0.8 * steps))
            loss = (probs * (bonus * log_probs - rewards[rows])).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.network = network

    def play(self, batch: AllocationBatch, seed: int) -> dict[str, Any]:
        return play(batch, lambda: actions(batch.obs, self.choose(self.observe(batch))), seed=seed)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console(width=140)
    batch = AllocationBatch(AllocationConfig(history=True), args.streams)
    rows = play_rules(batch, seed=FINAL_SEED)
    low = max(row["reward"] for name, row in rows.items() if name != "oracle")
    for name, habits in ((BOUND, False), *((("fit on owners' habits", True),) if args.habits else ())):
        fit = Fit(habits, args.qos_penalty)
        for i in range(args.rounds):
            fit.collect(args.fit_streams, FIT_SEED + i * args.fit_streams)
            fit.fit(args.epochs)
            rows[name] = fit.play(batch, FINAL_SEED)
            console.print(f"{name}, round {i + 1}: {rows[name]['reward']:.4f}, QoS {rows[name]['qos']:.4f}")
    rows |= {str(path): play_policy(batch, AllocationPolicy.load(path), FINAL_SEED) for path in args.checkpoint}
    table = Table(
        "policy", "reward", "QoS met", "efficiency", "OOM kills", "wait, s", "best rule → oracle",
        f"best rule → {BOUND}", title=f"{args.streams} held-out streams, ± 95 % over streams",
    )  # fmt: skip
    for name, row in rows.items():
        for key, top in (("gap_to_oracle", "oracle"), ("gap_to_bound", BOUND)):
            row[key] = (row["reward"] - low) / (rows[top]["reward"] - low)
        table.add_row(
            name, f"{row['reward']:.4f} ± {row['reward_ci95']:.4f}", f"{row['qos']:.4f}", f"{row['efficiency']:.3f}",
            f"{row['oom']:.4f}", f"{row['wait_s']:.0f}", f"{100 * row['gap_to_oracle']:.1f} %",
            f"{100 * row['gap_to_bound']:.1f} %",
        )  # fmt: skip
    console.print(table)
    for key in ("reward", "gap_to_oracle", "gap_to_bound"):
        values = [rows[str(path)][key] for path in args.checkpoint]
        if len(values) > 1:
            console.print(
                f"checkpoints, {key}: {np.mean(values):.4f} ± {ci95(values):.4f} (95 % over {len(values)} runs)"
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output, json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
