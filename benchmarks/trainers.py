"""Steps per second of the trainers and of well-known training loops: one torch thread, the same network.

Each comparison is a function that returns the steps/s of every repetition by name, the baseline first. The loops run in
turns, so that a slow machine affects both.

    python benchmarks/trainers.py
    python benchmarks/trainers.py --comparisons classic --repeats 5
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributions import Categorical

from clustergym.training import World

TRAINERS = Path(__file__).resolve().parents[1] / "cleanrl_ppo"

Rates = dict[str, list[float]]
"""Name → steps/s of every repetition. The first is the baseline."""


def trainer(name: str) -> ModuleType:
    """The module of ``cleanrl_ppo/<name>.py``."""
    spec = importlib.util.spec_from_file_location(name, TRAINERS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(TRAINERS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take_turns(runs: dict[str, Callable[[], float]], repeats: int) -> Rates:
    """Run each function ``repeats`` times in turns, after one round that is not measured."""
    rates: Rates = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            rate = run()
            if repeat:
                rates[name].append(rate)
    return rates


def reference_loop(agent: nn.Module, env_id: str, iterations: int, num_envs: int = 4, num_steps: int = 128) -> float:
    """Steps/s of the loop of CleanRL's ppo.py (4 environments, 128 steps, 4 minibatches, 4 epochs) without logging."""
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(env_id)] * num_envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    batch_size, minibatch_size = num_envs * num_steps, num_envs * num_steps // 4
    size = int(np.prod(envs.single_observation_space.shape))
    obs = torch.zeros(num_steps, num_envs, size)
    actions = torch.zeros(num_steps, num_envs)
    logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(4))

    def act(x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits, value = agent(x)
        distribution = Categorical(logits=logits)
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), value

    first, _ = envs.reset(seed=1)
    next_obs, next_done = torch.Tensor(first), torch.zeros(num_envs)
    began = time.perf_counter()
    for _ in range(iterations):
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[step], _, values[step] = act(next_obs)
            actions[step] = action
            following, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.Tensor(following), torch.Tensor(np.logical_or(terminations, truncations))
        with torch.no_grad():
            next_value = agent(next_obs)[1]
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(num_envs)
            for t in reversed(range(num_steps)):
                live = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
                ahead = next_value if t == num_steps - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * ahead * live - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * live * last
            returns = advantages + values
        flat = [x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, returns, values)]
        b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values = flat
        rows = np.arange(batch_size)
        for _ in range(4):
            np.random.default_rng().shuffle(rows)
            for start in range(0, batch_size, minibatch_size):
                mb = rows[start : start + minibatch_size]
                _, new_logprobs, entropy, new_values = act(b_obs[mb], b_actions.long()[mb])
                ratio = (new_logprobs - b_logprobs[mb]).exp()
                advantage = b_advantages[mb]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                clipped = b_values[mb] + (new_values - b_values[mb]).clamp(-0.2, 0.2)
                errors = torch.max((new_values - b_returns[mb]) ** 2, (clipped - b_returns[mb]) ** 2)
                loss = pg_loss - 0.01 * entropy.mean() + 0.25 * errors.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    rate = iterations * batch_size / (time.perf_counter() - began)
    envs.close()
    return rate


def classic(repeats: int) -> Rates:
    """``ppo.py`` on CartPole, including logs and checkpoints, compared with the reference loop."""
    ppo = trainer("ppo")

    def ours(**changes: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            args = ppo.Args(run_dir=Path(folder) / "run", eval_episodes=0, **changes)
            return float(ppo.train(args, World())["steps_per_s"])

    return take_turns(
        {
            "reference loop, 4 environments": lambda: reference_loop(ppo.Agent(4, 2), "CartPole-v1", 30),
            "ppo.py, defaults (32 environments × 64 steps)": lambda: ours(total_timesteps=102_400),
            "ppo.py, 4 environments × 128 steps": lambda: ours(total_timesteps=20_480, num_envs=4, num_steps=128),
        },
        repeats,
    )


def allocation(repeats: int) -> Rates:
    """``ppo_gpu_alloc.py`` compared with PPO of Stable-Baselines3: same environment, networks, batch size and epochs.

    Stable-Baselines3 runs with one environment and with the same number of environments in its DummyVecEnv.
    """
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    gpu = trainer("ppo_gpu_alloc")
    defaults = gpu.Args()
    num_envs, steps = defaults.num_envs, defaults.num_envs * defaults.num_steps

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            args = gpu.Args(run_dir=Path(folder) / "run", eval_streams=0, total_timesteps=50 * steps)
            return float(gpu.train(args, World())["steps_per_s"])

    def theirs(num_envs: int) -> float:
        envs = make_vec_env(defaults.env_id, n_envs=num_envs, seed=1)
        layers = [defaults.hidden] * 2
        network = {"net_arch": {"pi": layers, "vf": layers}, "activation_fn": nn.ReLU}
        model = PPO(
            "MlpPolicy", envs, n_steps=steps // num_envs, batch_size=steps // defaults.num_minibatches,
            n_epochs=defaults.update_epochs, policy_kwargs=network, device="cpu", seed=1,
        )  # fmt: skip
        began = time.perf_counter()
        model.learn(2 * steps)
        rate = 2 * steps / (time.perf_counter() - began)
        envs.close()
        return rate

    return take_turns(
        {
            f"Stable-Baselines3 PPO, {num_envs} environments": lambda: theirs(num_envs),
            "Stable-Baselines3 PPO, 1 environment": lambda: theirs(1),
            f"ppo_gpu_alloc.py, defaults ({num_envs} environments × {defaults.num_steps} steps)": ours,
        },
        repeats,
    )


COMPARISONS: dict[str, Callable[[int], Rates]] = {"classic": classic, "allocation": allocation}


@dataclass
class Args:
    comparisons: tuple[str, ...] = tuple(COMPARISONS)
    """Comparisons to run."""
    repeats: int = 3
    """Measured repetitions of each loop. The table has the medians."""
    output: Path = Path("runs/trainers.json")
    """File for the results."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    table = Table("comparison", "loop", "steps/s, median (range)", "× the first")
    results: dict[str, Rates] = {}
    for name in args.comparisons:
        if name not in COMPARISONS:
            raise SystemExit(f"no comparison {name!r}: expected some of {', '.join(COMPARISONS)}")
        rates = results[name] = COMPARISONS[name](args.repeats)
        base = float(np.median(next(iter(rates.values()))))
        for what, values in rates.items():
            middle = float(np.median(values))
            table.add_row(
                name, what, f"{middle:,.0f} ({min(values):,.0f} … {max(values):,.0f})", f"{middle / base:.1f}"
            )
    Console().print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
