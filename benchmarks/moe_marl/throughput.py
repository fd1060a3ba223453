"""Compare the training throughput with one environment per process and numpy observations through pipes.

    python benchmarks/moe_marl/throughput.py

Both ways use the same networks and the same update. Four rounds each, in turns.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import CONSOLE, Args, load_trainer, model_of, run, sources
from rich.table import Table

from clustergym.moe_placement import PlacementBatch, PlacementConfig
from clustergym.moe_placement.policy.view import LAYER_KEYS, STEP_KEYS, PolicyView


@dataclass
class ThroughputArgs(Args):
    threads: int = os.cpu_count() or 1
    """Torch threads of both updates."""


def _serve(pipe: Any, config: PlacementConfig, settings: tuple[str, int], seed: int) -> None:
    """One environment in a process of its own: numpy in, numpy out."""
    torch.set_num_threads(1)
    view = PolicyView(PlacementBatch(config, 1), *settings)
    view.batch.seed(np.array([seed]))
    view.reset()
    while True:
        command, *arguments = pipe.recv()
        if command == "inputs":
            pipe.send({key: each.numpy() for key, each in view.inputs().items()})
        elif command == "look":
            expert = torch.tensor(arguments)
            pipe.send((view.look(expert).numpy(), view.legal(expert).numpy()))
        elif command == "step":
            expert, node = (torch.tensor([each]) for each in arguments)
            reward, layer_end = view.step(expert, node)
            done = bool(view.batch.done)
            if done:
                view.reset()
            pipe.send((float(reward), bool(layer_end) or done, done))
        else:
            return


class PlainView:
    """The plain way: one environment a process behind pipes, observations stacked from numpy at every step."""

    def __init__(self, config: PlacementConfig, size: int, settings: tuple[str, int], same_node: torch.Tensor) -> None:
        self.same_node = same_node
        self.pipes, self.processes = [], []
        context = multiprocessing.get_context("spawn")
        for seed in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, config, settings, seed), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, *messages: tuple[Any, ...]) -> list[Any]:
        for pipe, message in zip(self.pipes, messages, strict=True):
            pipe.send(message)
        return [pipe.recv() for pipe in self.pipes]

    def inputs(self) -> dict[str, torch.Tensor]:
        found = self.ask(*[("inputs",)] * len(self.pipes))
        return {key: torch.from_numpy(np.concatenate([each[key] for each in found])) for key in found[0]}

    def look(self, expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ask(*(("look", int(e)) for e in expert))
        parts, legal = (np.concatenate(each) for each in zip(*found, strict=True))
        return torch.from_numpy(parts), torch.from_numpy(legal)

    def step(self, expert: torch.Tensor, node: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ask(*(("step", int(e), int(n)) for e, n in zip(expert, node, strict=True)))
        rewards, ends, _ = zip(*found, strict=True)
        return torch.tensor(rewards), torch.tensor(ends)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(("end",))
        for process in self.processes:
            process.join(timeout=10)


def plain_collect(marl: Any, view: PlainView, agent: Any, ppo: Any) -> Any:
    """The trainer's rollout on the plain view: every observation is kept whole, and any steps make a minibatch."""
    size = len(view.pipes)
    seen: dict[str, list[torch.Tensor]] = {key: [] for key in (*STEP_KEYS, *LAYER_KEYS)}
    taken = []
    with torch.no_grad():
        for _ in range(ppo.num_steps):
            inputs = view.inputs()
            for key, each in inputs.items():
                seen[key].append(each)
            encoded = agent.encode(inputs, view.same_node)
            expert, first = marl.sample(agent.expert_logits(inputs, encoded))
            values = agent.values(inputs, encoded, view.same_node).mean(-1)
            parts, legal = view.look(expert)
            node, second = marl.sample(agent.node_logits(inputs, encoded, view.same_node, expert, parts, legal))
            reward, end = view.step(expert, node)
            taken.append((expert, node, parts, legal, first + second, values, reward, end))
    expert, node, parts, legal, logprobs, values, rewards, ends = (
        torch.stack(each) for each in zip(*taken, strict=True)
    )
    advantages, returns = marl.compute_gae(
        rewards, values, ends, ends, torch.zeros(size), torch.zeros_like(values), ppo.gamma, ppo.gae_lambda
    )
    return marl.Batch(
        *({key: torch.stack(seen[key]).flatten(0, 1) for key in keys} for keys in (STEP_KEYS, LAYER_KEYS)),
        *(each.flatten(0, 1) for each in (expert, node, parts, legal, logprobs, advantages, returns, values)),
    )


def main(args: ThroughputArgs) -> None:
    """Steps/s of the same networks and update: the trainer, and one environment a process. Four rounds each, in turns."""
    marl, model = load_trainer(), args.models[0]
    common = {
        "trace": tuple(sources(args, model)), "model": model_of(args, model), "cluster": args.clusters[0],
    }  # fmt: skip
    ours = marl.Args(**common, threads=args.threads)
    plain = marl.Args(**common, ppo=marl.PPOArgs(num_envs=8, num_steps=512))  # as many steps per update
    world = marl.World()
    rounds: dict[str, list[dict[str, float]]] = {"batched": [], "one process each": []}
    task = marl.make_task(ours)
    torch.manual_seed(1)
    agent = marl.make_agent(ours)
    optimizer = marl.make_optimizer(agent, 1e-4)
    rollouts = marl.Rollouts(ours, agent, task, world.device)
    rollouts.restart(1)
    view = PlainView(
        task.config, plain.ppo.num_envs, (ours.task.homes, ours.task.lookahead_norm), rollouts.view.same_node
    )
    try:
        marl.iterate(agent, optimizer, rollouts, marl.ReturnStatistics(), ours, world)
        plain_collect(marl, view, agent, plain.ppo)
        for _ in range(4):
            found = marl.iterate(agent, optimizer, rollouts, marl.ReturnStatistics(), ours, world)
            rounds["batched"].append({key: found[key] for key in found if key.startswith(("time/", "charts/SPS"))})
            began = time.perf_counter()
            batch = plain_collect(marl, view, agent, plain.ppo)
            collected = time.perf_counter()
            torch.set_num_threads(args.threads)
            marl.update(agent, optimizer, batch, view.same_node, plain, world)
            torch.set_num_threads(1)
            ended = time.perf_counter()
            rounds["one process each"].append(
                {"charts/SPS": len(batch) / (ended - began), "time/update": (ended - collected) / (ended - began)}
            )
    finally:
        view.close()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "throughput.json").write_text(json.dumps(rounds, indent=1) + "\n")
    table = Table("way", "steps/s", "simulator and look-ahead", "policy", "update", title="training throughput")
    for name, each in rounds.items():
        row = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
        table.add_row(
            name, f"{row['charts/SPS']:.0f}", *(f"{row[key]:.0%}" if key in row else "" for key in ("time/simulator", "time/policy", "time/update"))
        )  # fmt: skip
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, ThroughputArgs, __doc__)
