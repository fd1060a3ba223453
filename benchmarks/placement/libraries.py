"""What agents of Stable-Baselines3 learn on the flat placement environments, with published hyper-parameters.

    python benchmarks/placement/libraries.py                       # trains, tests, writes CSV, curves and the table
    python benchmarks/placement/libraries.py --zoo zoo             # also saves the policy of the first seed of each
    python benchmarks/placement/libraries.py --speed               # only the speed of one environment

Agents train on the training split of one batched simulator (``clustergym.sb3``). Their curves are greedy play on the
validation split. They are tested after the last step on the test split, beside doing nothing, random legal choices,
always the first candidate, and the candidate that saves most on the observed interval (greedy). The test sequences are
dealt into disjoint groups. All agents play the same episodes. A result is the time saved against the start placement,
in percent of the static placement's time, mean over seeds and groups; its 95 % interval comes from a bootstrap that
resamples seeds and groups. Finished runs are kept in ``--out`` and not repeated.
"""

from __future__ import annotations

import csv
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
from clustergym.moe_placement.kernels.candidates import MIGRATION, N_CANDIDATE_FEATURES, SAVED_SMOOTH
from clustergym.planners.evaluation import Protocol, deal_streams
from clustergym.traces.token_trace import TokenTrace

TASKS = ("MoEPlacementFlat-v0", "MoEPlacementFlatDrift-v0")
AGENTS = {
    "PPO, MlpPolicy": ("PPO", "MlpPolicy"),
    "MaskablePPO, MlpPolicy": ("MaskablePPO", "MlpPolicy"),
    "PPO, CandidatePolicy": ("PPO", "CandidatePolicy"),
    "MaskablePPO, CandidatePolicy": ("MaskablePPO", "MaskableCandidatePolicy"),
}
"""Agent → algorithm and policy class. ``CandidatePolicy`` scores all candidates with the same weights."""
HYPERPARAMETERS: dict[str, Any] = {
    "n_steps": 64, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9, "gae_lambda": 0.9,
    "ent_coef": 0.005,
}  # fmt: skip
"""The same for all agents and tasks; all others are the defaults of Stable-Baselines3."""
N_ENVS = 32
SIMPLE = ("no-op", "random", "first candidate", "greedy")
MOST_GROUPS = 16
RESAMPLES = 10_000
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Args:
    """Train agents of Stable-Baselines3 and compare them with simple policies."""

    out: Path = Path("runs/libraries.json")
    """File for the results of each run"""
    csv: Path = Path("docs/results/data/placement-sb3.csv")
    """Table with all results"""
    picture: Path = Path("docs/results/images/placement-sb3.png")
    """Training curves"""
    tasks: tuple[str, ...] = TASKS
    """Flat environments to train on"""
    agents: tuple[str, ...] = tuple(AGENTS)
    """Agents to train"""
    seeds: int = 3
    """Number of seeds"""
    steps: int = 100_000
    """Environment steps per run"""
    points: int = 10
    """Points of a training curve"""
    episodes: int = 8
    """Test episodes per group of sequences"""
    zoo: Path | None = None
    """Folder for the trained policies"""
    speed: bool = False
    """Train nothing. Measure steps per second of single environments"""


@lru_cache(maxsize=4)
def groups(env_id: str, split: str) -> list[TokenTrace]:
    """Disjoint parts of the sequences of a split, each long enough for an episode."""
    batch = PlacementBatch(PlacementConfig(**{**gymnasium.spec(env_id).kwargs, "split": split}))
    stationary = batch.config.schedule == "stationary"
    protocol = Protocol(batch.traffic, batch.config.intervals + stationary, MOST_GROUPS)
    deals = deal_streams(batch.trace, batch.n_gpus, protocol)
    return deals.parts[: deals.groups]


def play(envs: Any, policy: Policy, seed: int = 1000) -> tuple[float, int]:
    """Mean percent of time saved in one episode of each environment, and the number of illegal actions."""
    obs, infos = envs.reset(seed=seed)
    while True:
        obs, _, ended, _, infos = envs.step(policy(obs, infos["action_mask"]))
        if ended.all():
            return 100 * float(infos["saved_vs_start"].mean()), int(infos["illegal_actions"].sum())


def test(env_id: str, policy: Policy, episodes: int) -> dict[str, Any]:
    """Results on each group of test sequences."""
    found = [
        play(gymnasium.make_vec(env_id, episodes, trace=part, split="all"), policy) for part in groups(env_id, "test")
    ]
    return {"saved_percent": [saved for saved, _ in found], "illegal": sum(illegal for _, illegal in found)}


def do_nothing(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    return np.zeros(len(obs), np.int64)


def random_policy(seed: int) -> Policy:
    rng = np.random.default_rng(seed)
    return lambda obs, masks: (rng.random(masks.shape) * masks).argmax(1)


def first_candidate(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    return masks[:, 1].astype(np.int64)


def greedy(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The candidate that saves most on the observed interval (smooth time and migration), if it saves anything."""
    n = masks.shape[1] - 1
    features = obs[:, : n * N_CANDIDATE_FEATURES].reshape(len(obs), n, -1)
    saved = np.where(masks[:, 1:] == 1, features[..., SAVED_SMOOTH] + features[..., MIGRATION], -np.inf)
    return np.where(saved.max(1) > 0, saved.argmax(1) + 1, 0)


def agent_policy(model: Any, masks_known: bool) -> Policy:
    if masks_known:
        return lambda obs, masks: model.predict(obs, action_masks=masks.astype(bool), deterministic=True)[0]
    return lambda obs, masks: model.predict(obs, deterministic=True)[0]


def train(agent: str, env_id: str, seed: int, args: Args) -> dict[str, Any]:
    """Train one agent and test it."""
    import sb3_contrib
    import stable_baselines3
    import torch

    from clustergym import sb3

    torch.set_num_threads(1)
    algorithm, policy = AGENTS[agent]
    maskable = algorithm == "MaskablePPO"
    make: Any = sb3_contrib.MaskablePPO if maskable else stable_baselines3.PPO
    envs = sb3.BatchedVecEnv(env_id, N_ENVS, split="train")
    model = make(getattr(sb3, policy, policy), envs, seed=seed, device="cpu", **HYPERPARAMETERS)
    validation = gymnasium.make_vec(env_id, N_ENVS, split="validation")
    plays, curve, began = agent_policy(model, maskable), [], time.process_time()
    curve.append([0, play(validation, plays)[0]])
    rollout = N_ENVS * HYPERPARAMETERS["n_steps"]
    while model.num_timesteps < args.steps:
        target = args.steps * len(curve) // args.points
        more = min(target, args.steps - args.steps % rollout + rollout) - model.num_timesteps
        model.learn(max(1, more), reset_num_timesteps=len(curve) == 1)
        curve.append([model.num_timesteps, play(validation, plays)[0]])
    seconds = time.process_time() - began
    if args.zoo is not None and seed == 0:
        save(model, agent, env_id, curve, args.zoo)
    more_known = {"steps": model.num_timesteps, "cpu_seconds": round(seconds), "curve": curve}
    return test(env_id, plays, args.episodes) | more_known


def save(model: Any, agent: str, env_id: str, curve: list[list[float]], folder: Path) -> None:
    """Save a policy without pickle: weights as safetensors, and a JSON file that says how it was trained."""
    from safetensors.torch import save_file

    name = f"{env_id}-{agent}".replace(", ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.contiguous() for key, value in model.policy.state_dict().items()}, folder / f"{name}.safetensors"
    )
    about = {"env_id": env_id, "agent": agent, "seed": 0, "hyperparameters": HYPERPARAMETERS, "n_envs": N_ENVS}
    write_atomically(folder / f"{name}.json", json.dumps(about | {"validation_curve": curve}, indent=2) + "\n")


def result(env_id: str, agent: str, seed: int, args: Args) -> dict[str, Any]:
    """One run."""
    simple = {"no-op": do_nothing, "random": random_policy(seed), "first candidate": first_candidate, "greedy": greedy}
    return test(env_id, simple[agent], args.episodes) if agent in simple else train(agent, env_id, seed, args)


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
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for env_id in args.tasks:
        for seed in range(args.seeds):
            for agent in (*SIMPLE, *args.agents):
                key = f"{env_id} | {agent} | seed {seed}"
                if key not in results:
                    results[key] = result(env_id, agent, seed, args)
                    write_atomically(args.out, json.dumps(results) + "\n")
                    print(key, np.mean(results[key]["saved_percent"]).round(2), flush=True)
    rows = summary(results)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plot(results, args.picture)
    print(table(rows))


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean of ``values`` (seeds, groups) and its 95 % interval."""
    rng = np.random.default_rng(0)
    seeds, chosen = (rng.integers(0, n, (RESAMPLES, n)) for n in values.shape)
    means = values[seeds[:, :, None], chosen[:, None, :]].mean((1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return round(float(values.mean()), 2), round(float(low), 2), round(float(high), 2)


def by_agent(results: dict[str, dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, value in results.items():
        env_id, agent, _ = key.split(" | ")
        runs.setdefault((env_id, agent), []).append(value)
    return runs


def summary(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds and groups of sequences, one row per task and agent."""
    runs, rows = by_agent(results), []
    for (env_id, agent), found in runs.items():
        saved = np.array([run["saved_percent"] for run in found])
        # Random play of all seeds: its own luck must not decide the comparison with one seed.
        random, best = (
            np.mean([run["saved_percent"] for run in runs[env_id, name]], 0) for name in ("random", "greedy")
        )
        mean, low, high = interval(saved)
        rows.append(
            {
                "environment": env_id, "agent": agent, "saved_percent": mean, "low": low, "high": high,
                "way_from_random_to_greedy": round(float((saved.mean() - random.mean()) / (best - random).mean()), 2),
                "less_greedy": interval(saved - best)[0], "less_greedy_low": interval(saved - best)[1],
                "less_greedy_high": interval(saved - best)[2],
                "seeds": saved.shape[0], "groups": saved.shape[1],
                "illegal_actions": sum(run["illegal"] for run in found),
                "steps": found[0].get("steps", 0), "cpu_seconds": found[0].get("cpu_seconds", 0),
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for the documentation."""
    lines = [
        "| environment | agent | time saved, % [95 %] | less greedy [95 %] | way from random to greedy | illegal |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{row['environment']}` | {row['agent']} | "
        f"{row['saved_percent']:.2f} [{row['low']:.2f}, {row['high']:.2f}] | "
        f"{row['less_greedy']:+.2f} [{row['less_greedy_low']:+.2f}, {row['less_greedy_high']:+.2f}] | "
        f"{row['way_from_random_to_greedy']:.2f} | {row['illegal_actions']} |"
        for row in rows
    ]
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Validation curves: mean and range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = by_agent(results)
    tasks = [task for task in TASKS if any(task == env_id and agent in AGENTS for env_id, agent in runs)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.5 * len(tasks), 4), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for agent in AGENTS:
            if (task, agent) in runs:
                curves = np.array([run["curve"] for run in runs[task, agent]])
                steps, saved = curves[0, :, 0], curves[..., 1]
                axis.plot(steps, saved.mean(0), label=agent)
                axis.fill_between(steps, saved.min(0), saved.max(0), alpha=0.2)
        validation = gymnasium.make_vec(task, N_ENVS, split="validation")
        for name, policy, style in (("greedy", greedy, "--"), ("random", random_policy(0), ":")):
            axis.axhline(play(validation, policy)[0], color="black", linestyle=style, label=name)
        axis.set(xlabel="environment steps", ylabel="time saved on validation streams, %", title=task)
    axes[0, 0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Args))
