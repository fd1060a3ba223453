"""Can other people's agents learn the task? Stable-Baselines3 with its default settings, on the flat environments.

    python benchmarks/placement/libraries.py --out libraries.json
    python benchmarks/placement/libraries.py --speed   # only the speed of one environment, with and without look-ahead

Every agent is trained on the training split and played on the test split, next to doing nothing, random legal
operations (uniform over the mask, as ``action_space.sample(mask)``), and always the candidate that saves most on the
observed interval. The test sequences are dealt into disjoint groups, as many as can each fill an episode. All agents
play the same episodes. A result is the time saved against the start placement, in percent of the static placement's
time, mean over seeds and groups. Its 95 % interval, and that of the difference to random play, come from a bootstrap
that resamples seeds and groups. Finished runs are kept in the file and not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro

import clustergym  # noqa: F401  registers the environments
from clustergym.common.files import write_atomically
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.candidates import N_CANDIDATE_FEATURES, SAVED
from clustergym.planners.evaluation import Protocol, deal_streams
from clustergym.traces.token_trace import TokenTrace

TASKS = ("MoEPlacementFlat-v0", "MoEPlacementFlatDrift-v0")
ALGORITHMS = ("MaskablePPO", "PPO")
SIMPLE = ("no-op", "random", "best candidate")
MOST_GROUPS = 16
RESAMPLES = 10_000
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
    episodes: int = 8
    """Test episodes per group of sequences"""
    speed: bool = False
    """Train nothing. Measure steps per second of single environments"""


@lru_cache(maxsize=4)
def test_groups(env_id: str) -> list[TokenTrace]:
    """Disjoint parts of the test sequences, each long enough for an episode."""
    batch = PlacementBatch(PlacementConfig(**{**gymnasium.spec(env_id).kwargs, "split": "test"}))
    stationary = batch.config.schedule == "stationary"
    protocol = Protocol(batch.traffic, batch.config.intervals + stationary, MOST_GROUPS)
    deals = deal_streams(batch.trace, batch.n_gpus, protocol)
    return deals.parts[: deals.groups]


def play(env_id: str, policy: Policy, episodes: int, seed: int = 1000) -> tuple[list[float], int]:
    """Mean return in percent on each group of test sequences, and the number of illegal actions."""
    saved, illegal = [], 0
    for part in test_groups(env_id):
        envs: Any = gymnasium.make_vec(env_id, num_envs=episodes, trace=part, split="all")
        obs, infos = envs.reset(seed=seed)
        alive = True
        while alive:
            obs, _, ended, _, infos = envs.step(policy(obs, infos["action_mask"]))
            alive = not ended.all()
        saved.append(100 * float(infos["saved_vs_start"].mean()))
        illegal += int(infos["illegal_actions"].sum())
    return saved, illegal


def do_nothing(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    return np.zeros(len(obs), np.int64)


def random_policy(seed: int) -> Policy:
    rng = np.random.default_rng(seed)
    return lambda obs, masks: (rng.random(masks.shape) * masks).argmax(1)


def best_candidate(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The operation that saves most on the observed interval, if it saves anything."""
    n = masks.shape[1] - 1
    saved = obs[:, : n * N_CANDIDATE_FEATURES].reshape(len(obs), n, -1)[..., SAVED]
    return np.where(saved.max(1) > 0, saved.argmax(1) + 1, 0)


def train(algorithm: str, env_id: str, steps: int, seed: int) -> Any:
    """An agent with the default settings of its library."""
    import torch

    torch.set_num_threads(1)
    env = gymnasium.make(env_id, split="train")
    if algorithm == "MaskablePPO":
        from sb3_contrib import MaskablePPO

        return MaskablePPO("MlpPolicy", env, seed=seed, device="cpu").learn(steps)
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", env, seed=seed, device="cpu").learn(steps)


def agent_policy(algorithm: str, model: Any) -> Policy:
    if algorithm == "MaskablePPO":
        return lambda obs, masks: model.predict(obs, action_masks=masks.astype(bool), deterministic=True)[0]
    return lambda obs, masks: model.predict(obs, deterministic=True)[0]


def result(env_id: str, algorithm: str, seed: int, args: Args) -> dict[str, Any]:
    """One run."""
    if algorithm in SIMPLE:
        simple = {"no-op": do_nothing, "random": random_policy(seed), "best candidate": best_candidate}
        saved, illegal = play(env_id, simple[algorithm], args.episodes)
        return {"saved_percent": saved, "illegal": illegal}
    began = time.perf_counter()
    model = train(algorithm, env_id, args.steps, seed)
    seconds = time.perf_counter() - began
    saved, illegal = play(env_id, agent_policy(algorithm, model), args.episodes)
    return {"saved_percent": saved, "illegal": illegal, "steps": args.steps, "seconds": round(seconds, 1)}


SPEED = {
    "MoEPlacement-v0, full observation": ("MoEPlacement-v0", {}),
    "MoEPlacementFlat-v0, 32 candidates tried exactly": ("MoEPlacementFlat-v0", {}),
    "MoEPlacement-v0, lookahead=True: every operation tried exactly": ("MoEPlacement-v0", {"lookahead": True}),
}


def measure_speed(rounds: int = 5, seconds: float = 1.0) -> None:
    """Steps per second with random actions: median, smallest and largest of the rounds, which take turns."""
    envs = {name: gymnasium.make(env_id, **options) for name, (env_id, options) in SPEED.items()}
    found: dict[str, list[float]] = {name: [] for name in envs}
    for round_ in range(rounds + 1):
        for name, env in envs.items():
            env.reset(seed=round_)
            env.action_space.seed(round_)
            steps, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                if env.step(env.action_space.sample())[2]:
                    env.reset()
                steps += 1
            if round_:  # the first one compiles
                found[name].append(steps / (time.perf_counter() - began))
    for name, values in found.items():
        print(f"{name}: {np.median(values):,.0f} steps/s ({min(values):,.0f} to {max(values):,.0f})")


def main(args: Args) -> None:
    if args.speed:
        measure_speed()
        return
    results: dict[str, dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for seed in range(args.seeds):
        for algorithm in (*SIMPLE, *args.algorithms):
            for env_id in args.tasks:
                key = f"{env_id} | {algorithm} | seed {seed}"
                if key not in results:
                    results[key] = result(env_id, algorithm, seed, args)
                    write_atomically(args.out, json.dumps(results) + "\n")
                    print(key, np.mean(results[key]["saved_percent"]).round(2), flush=True)
    print(table(results))


def interval(values: np.ndarray) -> str:
    """Mean of ``values`` (seeds, groups) and its 95 % interval, as text."""
    rng = np.random.default_rng(0)
    seeds, groups = (rng.integers(0, n, (RESAMPLES, n)) for n in values.shape)
    means = values[seeds[:, :, None], groups[:, None, :]].mean((1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Means over seeds and groups of sequences."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, value in results.items():
        env_id, algorithm, _ = key.split(" | ")
        runs.setdefault((env_id, algorithm), []).append(value)
    lines = [
        "| environment | agent | time saved, % [95 %] | more than random [95 %] | seeds | groups | illegal actions |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (env_id, algorithm), found in sorted(runs.items()):
        saved = np.array([run["saved_percent"] for run in found])
        # Random play of all seeds: its own luck must not decide the comparison with one seed.
        random = np.mean([run["saved_percent"] for run in runs[env_id, "random"]], axis=0)
        more = "" if algorithm == "random" else interval(saved - random)
        illegal = sum(run["illegal"] for run in found)
        lines.append(f"| `{env_id}` | {algorithm} | {interval(saved)} | {more} | {saved.shape[0]} | {saved.shape[1]} | "
                     f"{illegal} |")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args))
