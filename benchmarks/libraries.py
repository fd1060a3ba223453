"""Can other people's agents learn the task? Stable-Baselines3 with its default settings, on the flat environments.

    python benchmarks/libraries.py --out libraries.json

Every agent is trained on the training split and played on the test split, next to doing nothing, random legal
operations, and always taking the first candidate. The result is the mean return (time saved against the start
placement, in percent of the static placement's time) with its standard deviation over seeds. Finished runs are kept in
the file and not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro

import clustergym  # noqa: F401  registers the environments
from clustergym.common.files import write_atomically

TASKS = (
    "MoEPlacementFlat-small-sglang-prefill-stationary-v0",
    "MoEPlacementFlat-4x4-sglang-prefill-stationary-v0",
)
ALGORITHMS = ("MaskablePPO", "PPO")
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Args:
    """Train agents of Stable-Baselines3 and compare them with simple policies."""

    out: Path = Path("libraries.json")
    """File for the results"""
    tasks: tuple[str, ...] = TASKS
    """Flat environments to train on"""
    algorithms: tuple[str, ...] = ALGORITHMS
    """Algorithms: MaskablePPO (sb3-contrib) and PPO"""
    seeds: int = 5
    """Number of seeds"""
    steps: int = 100_000
    """Environment steps per run"""
    episodes: int = 64
    """Test episodes per agent"""


def play(env_id: str, policy: Policy, episodes: int = 64, seed: int = 1000) -> tuple[float, int]:
    """Mean return on the test split in percent, and the number of illegal actions. All get the same traffic."""
    envs: Any = gymnasium.make_vec(env_id, num_envs=episodes, split="test", compare_eplb=False)
    obs, infos = envs.reset(seed=seed)
    total, illegal, alive = np.zeros(episodes), 0, True
    while alive:
        obs, rewards, ended, _, infos = envs.step(policy(obs, infos["action_mask"]))
        total += rewards
        alive = not ended.all()
    illegal = int(infos["final_info"]["illegal_actions"].sum())
    return 100 * float(total.mean()), illegal


def do_nothing(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    return np.zeros(len(obs), np.int64)


def random_policy(seed: int) -> Policy:
    rng = np.random.default_rng(seed)
    return lambda obs, masks: (rng.random(masks.shape) * masks).argmax(1)


def first_candidate(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The operation that saves most on the observed interval, if it saves anything."""
    return (obs[:, 1] > 0).astype(np.int64)


def train(algorithm: str, env_id: str, steps: int, seed: int) -> Any:
    """An agent with the default settings of its library."""
    import torch

    torch.set_num_threads(1)
    env = gymnasium.make(env_id, split="train", compare_eplb=False)
    if algorithm == "MaskablePPO":
        from sb3_contrib import MaskablePPO

        return MaskablePPO("MlpPolicy", env, seed=seed, device="cpu").learn(steps)
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", env, seed=seed, device="cpu").learn(steps)


def agent_policy(algorithm: str, model: Any) -> Policy:
    if algorithm == "MaskablePPO":
        return lambda obs, masks: model.predict(obs, action_masks=masks.astype(bool), deterministic=True)[0]
    return lambda obs, masks: model.predict(obs, deterministic=True)[0]


def result(env_id: str, algorithm: str, seed: int, args: Args) -> dict[str, float]:
    """One line of the table."""
    if algorithm in ("no-op", "random", "first candidate"):
        simple = {"no-op": do_nothing, "random": random_policy(seed), "first candidate": first_candidate}
        saved, illegal = play(env_id, simple[algorithm], args.episodes)
        return {"saved_percent": saved, "illegal": illegal}
    began = time.perf_counter()
    model = train(algorithm, env_id, args.steps, seed)
    seconds = time.perf_counter() - began
    saved, illegal = play(env_id, agent_policy(algorithm, model), args.episodes)
    return {"saved_percent": saved, "illegal": illegal, "steps": args.steps, "seconds": round(seconds, 1)}


def main(args: Args) -> None:
    results: dict[str, dict[str, float]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for seed in range(args.seeds):
        for algorithm in ("no-op", "random", "first candidate", *args.algorithms):
            for env_id in args.tasks:
                key = f"{env_id} | {algorithm} | seed {seed}"
                if key not in results:
                    results[key] = result(env_id, algorithm, seed, args)
                    write_atomically(args.out, json.dumps(results, indent=1) + "\n")
                    print(key, results[key], flush=True)
    print(table(results))


def table(results: dict[str, dict[str, float]]) -> str:
    """Mean and standard deviation over seeds."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for key, value in results.items():
        env_id, algorithm, _ = key.split(" | ")
        groups.setdefault((env_id, algorithm), []).append(value)
    lines = ["| environment | agent | time saved, % | seeds | illegal actions |", "| --- | --- | ---: | ---: | ---: |"]
    for (env_id, algorithm), runs in sorted(groups.items()):
        saved, illegal = [run["saved_percent"] for run in runs], sum(run["illegal"] for run in runs)
        spread = np.std(saved, ddof=1) if len(saved) > 1 else 0.0
        lines.append(
            f"| `{env_id}` | {algorithm} | {np.mean(saved):.2f} ± {spread:.2f} | {len(saved)} | {illegal:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args))
