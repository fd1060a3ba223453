"""Learning across nodes: pods per node until a policy is good, with one learner per node and one for the cluster.

Eight nodes, each with its own owners, start with the same untrained policy, to which all shares are equally probable.
"alone": each node learns from its own pods. "cluster": all nodes send their experiences to one learner (agents with
--leader) and use its policy. Both use the agent's own update after every 32 experiences, and as many updates per
learner. Without rails.

The rewards of the pods themselves are too noisy to compare. So after every second update, the most probable actions of
the policies are played on an exam: new pods of the same owners, the same ones every time. A level is a part of the way
from the untrained policy to the shipped one. It is reached at the first of two exams in a row above it.

    python benchmarks/agent_cluster.py
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.agent.learner import Experiences
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.policy import share_actions

SCRIPT = Path(__file__).resolve().parents[1] / "cleanrl_ppo" / "ppo_gpu_alloc_online.py"
FIRST_NODE = 2**45
EXAM_SEED = 2**46


LEVELS = (0.25, 0.5, 0.75)
"""Parts of the way from the untrained to the shipped policy. The one in the middle is the measure."""
BATCH_SIZE = 32


@dataclass
class Args:
    nodes: int = 8
    """Number of nodes."""
    updates: int = 128
    """Updates of each learner, at most. It stops after the highest level."""
    seeds: int = 5
    """Number of repetitions with other nodes and weights."""
    exam_streams: int = 48
    """Streams of each node in an exam."""
    exam_pods: int = 96
    """Pods per stream of an exam."""
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
        # All shares are equally probable: from the agent's own start, granting the request, the way is short.
        self.state["agent"]["actor.4.bias"].zero_()
        self.waiting: list[tuple[np.ndarray, np.ndarray, float, float]] = []
        self._prepare()

    def _prepare(self) -> None:
        self.policy = self.program.Policy(self.state)

    def act(self, obs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        chosen, log_prob = self.policy.choose(self.policy.logits(obs), rng)
        return chosen, log_prob

    def learn(self) -> None:
        """Update if there are enough experiences."""
        if len(self.waiting) < BATCH_SIZE:
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


class Exam:
    """New pods of the owners of the nodes."""

    def __init__(self, args: Args, seeds: np.ndarray) -> None:
        config = AllocationConfig(history=True, arrivals=args.exam_pods + 1, reward="seed")
        self.args, self.batch = args, AllocationBatch(config, args.nodes * args.exam_streams)
        self.seeds = seeds.repeat(args.exam_streams)

    def reward(self, policies: list[Any]) -> float:
        """Mean reward of the most probable actions; one policy, or one per node."""
        # A reset draws the owners. Then other seeds: the same owners with other pods in each stream.
        self.batch.seed(self.seeds)
        self.batch.reset()
        self.batch.seed(EXAM_SEED + np.arange(len(self.seeds)))
        total = 0.0
        for _ in range(self.args.exam_pods):
            parts = np.split(self.batch.obs.numpy(), len(policies))
            best = [policy.logits(part).argmax(-1) for policy, part in zip(policies, parts, strict=True)]
            chosen = torch.from_numpy(np.concatenate(best))
            self.batch.step(share_actions(self.batch.obs, chosen, policies[0].levels), autoreset=False)
            total += float(self.batch.reward.mean())
        return total / self.args.exam_pods


def play(program: Any, args: Args, seed: int, shared: bool, exam: Exam, top: float) -> list[float]:
    """Reward in the exam before learning and after every second update, until it is above ``top`` twice."""
    rng = np.random.default_rng(seed)
    learners = [Learner(program, seed) for _ in range(1 if shared else args.nodes)]
    pods = args.updates * BATCH_SIZE * len(learners) // args.nodes
    batch = AllocationBatch(AllocationConfig(history=True, arrivals=pods + 1, reward="seed"), args.nodes)
    batch.seed(exam.seeds[:: args.exam_streams])
    batch.reset()
    found = [exam.reward([learner.policy for learner in learners])]
    for t in range(pods):
        obs = batch.obs.numpy().copy()
        acted = [learners[i % len(learners)].act(obs[i], rng) for i in range(args.nodes)]
        chosen = torch.from_numpy(np.stack([one for one, _ in acted]))
        batch.step(share_actions(batch.obs, chosen, learners[0].policy.levels), autoreset=False)
        rewards = batch.reward.tolist()
        for i, (action, log_prob) in enumerate(acted):
            learners[i % len(learners)].waiting.append((obs[i], action, log_prob, rewards[i]))
        for learner in learners:
            learner.learn()
        if (t + 1) % (2 * BATCH_SIZE * len(learners) // args.nodes) == 0:
            found.append(exam.reward([learner.policy for learner in learners]))
            if min(found[-2:]) >= top:
                break
    return found


def reached(rewards: list[float], level: float) -> int | None:
    """Number of updates at the first of two exams in a row that reach the level; None if there is none."""
    return next((2 * i for i, pair in enumerate(pairwise(rewards)) if min(pair) >= level), None)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    program, rows = load_agent(), []
    console = Console(width=130)
    shipped = program.Policy(program.initial_state(program.Args(init_checkpoint=Path("pretrained"))))
    for seed in range(args.seeds):
        exam = Exam(args, FIRST_NODE + seed * args.nodes + np.arange(args.nodes))
        start = exam.reward([Learner(program, seed).policy])
        goal = exam.reward([shipped])
        levels = [start + part * (goal - start) for part in LEVELS]
        row: dict[str, Any] = {"seed": seed, "untrained": start, "shipped": goal}
        for name, shared in (("cluster", True), ("alone", False)):
            row[name] = play(program, args, seed, shared, exam, levels[-1])
            # An update of the cluster's learner takes 32 / nodes pods of each node.
            pods = BATCH_SIZE // args.nodes if shared else BATCH_SIZE
            row[f"{name}_pods"] = [None if n is None else n * pods for n in (reached(row[name], x) for x in levels)]
        rows.append(row)
        console.print(
            f"seed {seed}: untrained {start:.3f}, shipped {goal:.3f}; last exam: cluster {row['cluster'][-1]:.3f}, "
            f"alone {row['alone'][-1]:.3f}; pods per node {row['cluster_pods']}, {row['alone_pods']}"
        )
    table = Table(
        "part of the way", "pods per node, cluster", "pods per node, alone", "times faster, each seed", "mean"
    )
    for k, part in enumerate(LEVELS):
        both = [(row["cluster_pods"][k], row["alone_pods"][k]) for row in rows]
        most = args.updates * BATCH_SIZE
        # A level that nodes alone did not reach counts with all the pods that they played.
        ratios = [(alone or most) / cluster for cluster, alone in both if cluster]
        if len(ratios) < len(rows):
            console.print(f"level {part:g}: the cluster did not reach it with {len(rows) - len(ratios)} seeds")
            continue
        logs = np.log(ratios)
        spread = np.exp([np.mean(logs) - ci95(logs.tolist()), np.mean(logs) + ci95(logs.tolist())])
        table.add_row(
            f"{part:g}", ", ".join(str(cluster) for cluster, _ in both), ", ".join(str(alone) for _, alone in both),
            ", ".join(f"{'' if alone else '> '}{ratio:.1f}" for (_, alone), ratio in zip(both, ratios, strict=True)),
            f"{np.exp(np.mean(logs)):.1f} ({spread[0]:.1f} … {spread[1]:.1f})",
        )  # fmt: skip
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rows": rows}, indent=1) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main()
