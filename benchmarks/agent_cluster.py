"""Learning across nodes: pods per node until a policy is good, with one learner per node and one for the cluster.

Eight nodes, each with its own owners, start with the same untrained policy. "alone": each node learns from its own
pods. "cluster": all nodes send their experiences to one learner (agents with --leader) and use its policy. Both use the
agent's own update, after every 32 experiences. The measure is the mean reward of the sampled actions, without rails.
The cluster plays first; then the nodes alone play eight times as long, or until they reach the same reward.

    python benchmarks/agent_cluster.py
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.agent.learner import Experiences
from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig

SCRIPT = Path(__file__).resolve().parents[1] / "cleanrl_ppo" / "ppo_gpu_alloc_online.py"
FIRST_NODE = 2**42


@dataclass
class Args:
    nodes: int = 8
    """Number of nodes."""
    pods: int = 750
    """Pods per node with one learner for the cluster."""
    times: int = 8
    """Nodes alone play at most this many times as long."""
    seeds: int = 3
    """Number of repetitions with other nodes and weights."""
    window: int = 200
    """Rewards are averaged over this many pods per node."""
    output: Path = Path("runs/agent_cluster.json")
    """JSON file for the results."""


def load_agent() -> Any:
    """The agent's program as a module."""
    spec = importlib.util.spec_from_file_location("ppo_gpu_alloc_online", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Learner:
    """One policy and the experiences that it has not learned from."""

    def __init__(self, program: Any, seed: int) -> None:
        self.program, self.args = program, program.Args(seed=seed)
        self.state = program.initial_state(self.args)
        self.waiting: list[tuple[np.ndarray, np.ndarray, float, float]] = []
        self._prepare()

    def _prepare(self) -> None:
        self.policy = self.program.Policy(self.state)

    def act(self, obs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        action, log_prob = self.policy.sample(self.policy.mean(obs), rng)
        return action, log_prob

    def learn(self, batch_size: int = 32) -> None:
        """Update if there are enough experiences."""
        if len(self.waiting) < batch_size:
            return
        obs, actions, logprobs, rewards = zip(*self.waiting, strict=True)
        n = len(obs)
        seen = torch.from_numpy(np.stack(obs).astype(np.float32))
        batch = Experiences(
            obs=seen, actions=torch.from_numpy(np.stack(actions).astype(np.float32)),
            logprobs=torch.tensor(logprobs, dtype=torch.float32), rewards=torch.tensor(rewards, dtype=torch.float32),
            values=torch.zeros(n), next_obs=seen, dones=torch.zeros(n, dtype=torch.bool), through=0,
        )  # fmt: skip
        self.state, _ = self.program.learn_once(self.state, batch, self.args, torch.device("cpu"))
        self.waiting = []
        self._prepare()


def play(program: Any, args: Args, seed: int, pods: int, shared: bool) -> np.ndarray:
    """Mean reward of the nodes in each window of pods (pods − window + 1,)."""
    batch = AllocationBatch(
        AllocationConfig(history=True, arrivals=args.times * args.pods + 1, reward="seed"), args.nodes
    )
    batch.seed([FIRST_NODE + seed * args.nodes + i for i in range(args.nodes)])
    batch.reset()
    rng = np.random.default_rng(seed)
    learners = [Learner(program, seed)] if shared else [Learner(program, seed) for _ in range(args.nodes)]
    rewards = np.zeros((pods, args.nodes))
    for t in range(pods):
        obs = batch.obs.numpy().copy()
        acted = [learners[i % len(learners)].act(obs[i], rng) for i in range(args.nodes)]
        batch.step(np.stack([action for action, _ in acted]).clip(0, 1).astype(np.float32), autoreset=False)
        rewards[t] = batch.reward.numpy()
        for i, (action, log_prob) in enumerate(acted):
            learners[i % len(learners)].waiting.append((obs[i], action, log_prob, float(rewards[t, i])))
        for learner in learners:
            learner.learn()
    return np.convolve(rewards.mean(1), np.ones(args.window) / args.window, "valid")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    program, rows = load_agent(), []
    table = Table(
        "seed", "first reward", "cluster: reward", "pods per node", "alone: reward", "pods per node", "faster"
    )
    for seed in range(args.seeds):
        cluster = play(program, args, seed, args.pods, shared=True)
        alone = play(program, args, seed, args.times * args.pods, shared=False)
        # The first window of the cluster that is as good as its last: it does not get credit for luck on the way.
        level = float(cluster[-1])
        reached = np.flatnonzero(alone >= level)
        until = int(reached[0]) + args.window if len(reached) else None
        row = {
            "seed": seed, "first": float(cluster[0]), "level": level, "cluster_pods": args.pods, "alone_pods": until,
            "alone_end": float(alone[-1]), "alone_played": args.times * args.pods,
        }  # fmt: skip
        rows.append(row)
        faster = f"> {args.times}" if until is None else f"{until / args.pods:.1f}"
        table.add_row(
            str(seed), f"{row['first']:.3f}", f"{level:.3f}", str(args.pods), f"{row['alone_end']:.3f}",
            f"> {row['alone_played']}" if until is None else str(until), faster,
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rows": rows}, indent=1) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main()
