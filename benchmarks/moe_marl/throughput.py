"""Compare the training throughput with one environment per process and numpy observations through pipes.

    taskset -c 0 python benchmarks/moe_marl/throughput.py --threads 1      # one core for everything

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
from rich.table import Table

from clustergym.common.files import write_atomically
from clustergym.moe_placement import PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.state import CLOCK_OPERATION
from clustergym.planners.policy.inputs import (
    LAYER_KEYS,
    PER_CENT,
    STEP_KEYS,
    policy_inputs,
    same_node_weights,
    similar_experts,
)
from common import CONSOLE, Args, interval, load_trainer, model_of, run, sources


@dataclass
class ThroughputArgs(Args):
    threads: int = os.cpu_count() or 1
    """Torch threads of both updates."""


def serve(pipe: Any, config: PlacementConfig, seed: int) -> None:
    """One environment in its own process: numpy in, numpy out."""
    torch.set_num_threads(1)
    batch = PlacementBatch(config, 1)
    batch.seed(np.array([seed]))
    obs, same_node = batch.reset(), same_node_weights(batch.cluster)
    while True:
        command, *arguments = pipe.recv()
        if command == "inputs":
            inputs = policy_inputs(obs, similar_experts(obs["affinity"]), same_node)
            pipe.send({key: x.numpy() for key, x in inputs.items()})
        elif command == "look":
            expert = arguments[0]
            parts = batch.lookahead(torch.tensor([[expert]]))[:, 0] * PER_CENT
            pipe.send((parts.numpy(), obs["joint_mask"][:, expert].bool().numpy()))
        elif command == "step":
            expert, node = (torch.tensor([choice]) for choice in arguments)
            _, reward, _ = batch.step(expert, node)
            done = bool(batch.done)
            visit_end = done or int(batch.episode["clock"][0, CLOCK_OPERATION]) == 0
            if done:
                batch.reset()
            pipe.send((float(reward), visit_end))
        else:
            return


class ProcessPerEnvironment:
    """One environment per process behind pipes. Observations are stacked from numpy arrays at every step."""

    def __init__(self, config: PlacementConfig, size: int) -> None:
        self.pipes, self.processes = [], []
        context = multiprocessing.get_context("spawn")
        for seed in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, config, seed), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, *messages: tuple[Any, ...]) -> list[Any]:
        for pipe, message in zip(self.pipes, messages, strict=True):
            pipe.send(message)
        return [pipe.recv() for pipe in self.pipes]

    def inputs(self) -> dict[str, torch.Tensor]:
        found = self.ask(*[("inputs",)] * len(self.pipes))
        stacked = {key: np.concatenate([inputs[key] for inputs in found]) for key in (*STEP_KEYS, *LAYER_KEYS)}
        return {key: torch.from_numpy(x) for key, x in (stacked | {"same_node": found[0]["same_node"]}).items()}

    def look(self, expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ask(*(("look", int(e)) for e in expert))
        parts, legal = (np.concatenate(x) for x in zip(*found, strict=True))
        return torch.from_numpy(parts), torch.from_numpy(legal)

    def step(self, expert: torch.Tensor, node: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ask(*(("step", int(e), int(n)) for e, n in zip(expert, node, strict=True)))
        rewards, ends = zip(*found, strict=True)
        return torch.tensor(rewards), torch.tensor(ends)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(("end",))
        for process in self.processes:
            process.join(timeout=10)


@torch.no_grad()
def collect(marl: Any, envs: ProcessPerEnvironment, agent: Any, ppo: Any) -> Any:
    """The rollout of the trainer with plain observations: every step keeps its graphs and is a visit of its own."""
    seen: list[dict[str, torch.Tensor]] = []
    taken = []
    for _ in range(ppo.num_steps):
        inputs = envs.inputs()
        seen.append(inputs)
        encoded = agent.encode(inputs)
        expert, expert_logprob = marl.sample(agent.expert_logits(inputs, encoded))
        values = agent.values(inputs, encoded)[:, 0]
        parts, legal = envs.look(expert)
        node, node_logprob = marl.sample(agent.node_logits(inputs, encoded, expert, parts, legal))
        reward, end = envs.step(expert, node)
        taken.append((expert, node, parts, legal, torch.stack([expert_logprob, node_logprob], -1), values, reward, end))
    expert, node, parts, legal, logprobs, values, rewards, ends = (torch.stack(x) for x in zip(*taken, strict=True))
    last, final = torch.zeros(len(envs.pipes)), torch.zeros_like(values)
    advantages, returns = marl.compute_gae(rewards, values, ends, ends, last, final, ppo.gamma, ppo.gae_lambda)
    steps, graphs = (
        {key: torch.stack([inputs[key] for inputs in seen]).flatten(0, 1) for key in keys}
        for keys in (STEP_KEYS, LAYER_KEYS)
    )
    critic = (x[..., None] for x in (advantages, returns, values))
    columns = (expert, node, parts, legal, logprobs, *critic)
    return marl.Batch(steps, graphs, seen[0]["same_node"], *(x.flatten(0, 1) for x in columns))


def main(args: ThroughputArgs) -> None:
    marl, model = load_trainer(), args.models[0]
    task = {"trace": tuple(sources(args, model)), "model": model_of(args, model), "cluster": args.clusters[:1]}
    batched = marl.Args(**task)
    plain = marl.Args(**task, ppo=marl.PPOArgs(num_envs=8, num_steps=512))  # as many steps per update
    (made,) = marl.load_tasks(batched.task, batched.trace, (), batched.model, batched.cluster)
    trainer_update = marl.update

    def update(*arguments: Any) -> Any:
        torch.set_num_threads(args.threads)
        metrics = trainer_update(*arguments)
        torch.set_num_threads(1)
        return metrics

    marl.update = update
    torch.manual_seed(1)
    agent, world = marl.make_agent(batched), marl.World()
    optimizer = marl.make_optimizer(agent, 1e-4)
    rollouts = marl.Rollouts(batched, agent, made, world.device)
    rollouts.restart(1)
    config = PlacementConfig(**marl.environment_options(batched.task, made))
    envs = ProcessPerEnvironment(config, plain.ppo.num_envs)
    rounds: dict[str, list[dict[str, float]]] = {"batched": [], "one process each": []}
    try:
        for i in range(5):
            started = time.perf_counter()
            found = marl.iterate(agent, optimizer, rollouts, marl.ReturnStatistics(), batched, world)
            ended = time.perf_counter()
            steps = batched.ppo.num_envs * batched.ppo.num_steps
            shares = {key: value for key, value in found.items() if key.startswith("time/")}
            if i:  # the first round compiles
                rounds["batched"].append({"steps_per_s": steps / (ended - started)} | shares)
            started = time.perf_counter()
            batch = collect(marl, envs, agent, plain.ppo)
            collected = time.perf_counter()
            marl.update(agent, optimizer, batch, plain, world)
            seconds = time.perf_counter() - started
            if i:
                share = {"time/update": 1 - (collected - started) / seconds}
                rounds["one process each"].append({"steps_per_s": len(batch) / seconds} | share)
    finally:
        envs.close()
    write_atomically(args.output / "throughput.json", json.dumps(rounds, indent=1) + "\n")
    table = Table("way", "steps/s", "simulator and look-ahead", "policy", "update", title="training throughput")
    for name, items in rounds.items():
        row = {key: float(np.mean([item[key] for item in items])) for key in items[0]}
        shares = (f"{row[key]:.0%}" if key in row else "" for key in ("time/simulator", "time/policy", "time/update"))
        table.add_row(name, f"{row['steps_per_s']:.0f}", *shares)
    CONSOLE.print(table)
    one, other = ([item["steps_per_s"] for item in items] for items in rounds.values())
    CONSOLE.print(f"ratio {interval([a / b for a, b in zip(one, other, strict=True)])} (mean of rounds, 95 %)")


if __name__ == "__main__":
    run(main, ThroughputArgs, __doc__)
