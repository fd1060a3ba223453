"""Steps per CPU second of the trainers beside CleanRL's loop and Stable-Baselines3, like with like, one torch thread.

For each task there are three comparisons. "own": every loop with the defaults of its own project. "same": all loops
with the number of environments, steps, minibatches and epochs of CleanRL. "default": all loops with those of this
project's trainer. The loops run in turns, and CPU time is counted, so that other programs disturb little.

    python benchmarks/trainers/trainers.py
    python benchmarks/trainers/trainers.py --tasks CartPole-v1 --repeats 5
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from clustergym.training.runs import Run

TRAINERS = Path(__file__).resolve().parents[2] / "cleanrl_ppo"


@dataclass(frozen=True)
class Setting:
    num_envs: int
    num_steps: int
    num_minibatches: int
    update_epochs: int

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    def __str__(self) -> str:
        return f"{self.num_envs} × {self.num_steps}, {self.num_minibatches} minibatches, {self.update_epochs} epochs"


@dataclass(frozen=True)
class Task:
    trainer: str
    cleanrl: Setting
    """Settings of CleanRL's ppo.py and ppo_continuous_action.py."""


TASKS = {
    "CartPole-v1": Task("ppo", Setting(4, 128, 4, 4)),
    "Pendulum-v1": Task("ppo_continuous_action", Setting(1, 2048, 32, 10)),
    "GPUAllocation-v0": Task("ppo_continuous_action", Setting(1, 2048, 32, 10)),
}
STABLE_BASELINES = Setting(1, 2048, 32, 10)
"""Defaults of Stable-Baselines3's PPO."""


def load(name: str) -> ModuleType:
    """The module of ``cleanrl_ppo/<name>.py``."""
    spec = importlib.util.spec_from_file_location(name, TRAINERS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(TRAINERS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# CleanRL


class CleanRLAgent(nn.Module):
    """The network of CleanRL: two MLPs with 64 units, and torch.distributions."""

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__()
        size, space = int(np.prod(envs.single_observation_space.shape)), envs.single_action_space
        self.continuous = isinstance(space, gym.spaces.Box)
        outputs = int(np.prod(space.shape)) if self.continuous else int(space.n)
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, each))
            for each in (outputs, 1)
        )
        self.logstd = nn.Parameter(torch.zeros(1, outputs))

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.continuous:
            mean = self.actor(x)
            probs: Any = Normal(mean, torch.exp(self.logstd.expand_as(mean)))
            action = probs.sample() if action is None else action
            return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def cleanrl_env(env_id: str) -> gym.Env:
    """One environment with the wrappers of CleanRL's ppo.py or ppo_continuous_action.py."""
    env: gym.Env = gym.make(env_id)
    if not isinstance(env.action_space, gym.spaces.Box):
        return gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.RecordEpisodeStatistics(gym.wrappers.FlattenObservation(env))
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
    env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def cleanrl(env_id: str, setting: Setting, iterations: int) -> float:
    """Steps per CPU second of CleanRL's loop, without its logging."""
    num_envs, num_steps = setting.num_envs, setting.num_steps
    envs = gym.vector.SyncVectorEnv([partial(cleanrl_env, env_id)] * num_envs)
    agent = CleanRLAgent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.zeros((num_steps, num_envs, *envs.single_observation_space.shape))
    actions = torch.zeros((num_steps, num_envs, *envs.single_action_space.shape))
    logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(4))
    first, _ = envs.reset(seed=1)
    next_obs, next_done = torch.Tensor(first), torch.zeros(num_envs)
    began = time.process_time()
    for _ in range(iterations):
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            following, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(following), torch.Tensor(np.logical_or(terminations, truncations))
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            last: Any = 0
            for t in reversed(range(num_steps)):
                live = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
                ahead = next_value if t == num_steps - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * ahead * live - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * live * last
            returns = advantages + values
        flat = [each.flatten(0, 1) for each in (obs, actions, logprobs, advantages, returns, values)]
        b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values = flat
        rows = np.arange(setting.batch_size)
        size = setting.batch_size // setting.num_minibatches
        for _ in range(setting.update_epochs):
            np.random.default_rng().shuffle(rows)
            for start in range(0, setting.batch_size, size):
                mb = rows[start : start + size]
                chosen = b_actions[mb] if agent.continuous else b_actions.long()[mb]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], chosen)
                logratio = newlogprob - b_logprobs[mb]
                ratio = logratio.exp()
                with torch.no_grad():
                    _ = (-logratio).mean(), ((ratio - 1) - logratio).mean()
                    _ = ((ratio - 1.0).abs() > 0.2).float().mean().item()
                advantage = b_advantages[mb]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                pg_loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
                newvalue = newvalue.view(-1)
                clipped = b_values[mb] + torch.clamp(newvalue - b_values[mb], -0.2, 0.2)
                errors = torch.max((newvalue - b_returns[mb]) ** 2, (clipped - b_returns[mb]) ** 2)
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * 0.5 * errors.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    rate = iterations * setting.batch_size / (time.process_time() - began)
    envs.close()
    return rate


# Stable-Baselines3


def stable_baselines(env_id: str, setting: Setting, iterations: int) -> float:
    """Steps per CPU second of Stable-Baselines3's PPO, same network, with VecNormalize where CleanRL normalises."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    envs: Any = make_vec_env(env_id, n_envs=setting.num_envs, seed=1)
    if isinstance(envs.action_space, gym.spaces.Box):
        envs = VecNormalize(envs)
    layers = [64, 64]
    model = PPO(
        "MlpPolicy", envs, n_steps=setting.num_steps, batch_size=setting.batch_size // setting.num_minibatches,
        n_epochs=setting.update_epochs, policy_kwargs={"net_arch": {"pi": layers, "vf": layers}}, device="cpu", seed=1,
    )  # fmt: skip
    steps = iterations * setting.batch_size
    began = time.process_time()
    model.learn(steps)
    rate = steps / (time.process_time() - began)
    envs.close()
    return rate


# This project


def ours(module: ModuleType, task: Task, env_id: str, setting: Setting, iterations: int) -> float:
    """Steps per CPU second of all iterations of a run, including logs and checkpoints."""
    spent = 0.0
    plain = Run.iterations

    def timed_iterations(run: Run) -> Iterator[int]:
        nonlocal spent
        began = time.process_time()
        yield from plain(run)
        spent = time.process_time() - began

    with tempfile.TemporaryDirectory() as folder, swapped(Run, "iterations", timed_iterations):
        args = module.Args(
            env_id=env_id, run_dir=Path(folder) / "run", total_timesteps=iterations * setting.batch_size,
            eval_episodes=0, **vars(setting),
        )  # fmt: skip
        module.train(args)
    return iterations * setting.batch_size / spent


@contextmanager
def swapped(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    plain = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def measure(runs: dict[Any, Callable[[], float]], repeats: int) -> dict[Any, list[float]]:
    """Steps per CPU second of each function, ``repeats`` times in turns, after one round that is not measured."""
    rates: dict[Any, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            rate = run()
            if repeat:
                rates[name].append(rate)
    return rates


@dataclass
class Args:
    tasks: tuple[str, ...] = tuple(TASKS)
    """Tasks to run."""
    repeats: int = 3
    """Measured repetitions of each loop. The table has the medians."""
    steps: int = 20_480
    """Environment steps of a repetition, at least; rounded to whole iterations."""
    output: Path = Path("runs/trainers.json")
    """File for the results."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    table = Table("task", "comparison", "loop", "settings", "steps per CPU s, median (range)", "ours / this")
    results: dict[str, Any] = {}
    for env_id in args.tasks:
        if env_id not in TASKS:
            raise SystemExit(f"no task {env_id!r}: expected some of {', '.join(TASKS)}")
        task = TASKS[env_id]
        module = load(task.trainer)
        defaults = module.Args()
        default = Setting(*(getattr(defaults, each) for each in Setting.__dataclass_fields__))
        own = {"this project": default, "CleanRL": task.cleanrl, "Stable-Baselines3": STABLE_BASELINES}
        comparisons = {"own": own, "same": dict.fromkeys(own, task.cleanrl), "default": dict.fromkeys(own, default)}
        loops: dict[str, Callable[..., float]] = {
            "this project": partial(ours, module, task),
            "CleanRL": cleanrl,
            "Stable-Baselines3": stable_baselines,
        }

        def iterations(setting: Setting) -> int:
            return max(1, -(-args.steps // setting.batch_size))

        pairs = dict.fromkeys(pair for settings in comparisons.values() for pair in settings.items())
        rates = measure(
            {(loop, each): partial(loops[loop], env_id, each, iterations(each)) for loop, each in pairs}, args.repeats
        )
        for name, settings in comparisons.items():
            setting = settings["this project"]
            mine = float(np.median(rates["this project", setting]))
            for loop, each in settings.items():
                values = rates[loop, each]
                middle = float(np.median(values))
                spread = f"{middle:,.0f} ({min(values):,.0f} … {max(values):,.0f})"
                table.add_row(env_id, name, loop, str(each), spread, f"{mine / middle:.2f}")
        results[env_id] = {f"{loop}: {each}": values for (loop, each), values in rates.items()}
    Console(width=170).print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
