"""The ladder of scores on the placement ids: simple agents, planners and a bound that sees the next interval.

    python benchmarks/placement/reference_scores.py [--ids MoEPlacement-v0] [--agents 'anneal*'] [--episodes 64]

Every score is the time saved in percent of the static placement's time on ``gymnasium.make(id, split="test")``, against
serving with the start placement. All are measured on the episodes of the seeds 0, 1, …. They draw from the same test
sequences, so the interval shows how episodes differ; other sequences would differ more.

* ``no-op`` changes nothing: 0 by definition. ``random``: uniform over the legal pairs. ``random-candidate`` and
  ``first-candidate``: choices among the candidates of the flat form.
* ``best-candidate`` and ``greedy-observed``: the operation that saves most on the observed interval (smooth time and
  migration), of the candidates or of all pairs, with the agents' budget of operations.
* Planners plan after every observed interval, with any number of operations.
* ``clairvoyant``: annealing that sees the next interval. Better placements may exist. ``optimum``, on the small task:
  the proven best placement for the next interval.

The results go to ``envs/clustergym/reference_scores.json`` and, as a table, to a CSV file. What has a result is
measured again only with ``--again``. An id belongs to the registered ones if its best planner is at least two points
above the best of no-op, random and first-candidate; the command says which are not.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import tyro

from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.ids import REFERENCE_SCORES, placement_ids
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.candidates import MIGRATION, N_CANDIDATE_FEATURES, SAVED_SMOOTH
from clustergym.moe_placement.kernels.observation import N_PAIR_FEATURES
from clustergym.moe_placement.kernels.state import N_SAVED_PARTS, PART_MIGRATION, PART_SMOOTH
from clustergym.moe_placement.streams import IntervalStream
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB
from clustergym.planners.registry import make_planner

PLANNERS = ("eplb", "flashlb", "swift", "greedy", "anneal")
BOUNDS = {"clairvoyant": "anneal", "optimum": "exact"}
"""Bounds → the planner that sees the next interval."""
BLIND = ("no-op", "random", "first-candidate")
AGENTS = ("no-op", "random", "random-candidate", "first-candidate", "best-candidate", "greedy-observed")


@dataclass
class Args:
    """Measure the reference scores of the placement ids."""

    ids: tuple[str, ...] = ("MoEPlacement*",)
    """Patterns of ids. Ids with one discrete action are the same tasks, and are left out"""
    agents: tuple[str, ...] = ("*",)
    """Patterns of agents and planners"""
    episodes: int = 64
    """Episodes of the seeds 0, 1, …"""
    planner_episodes: int = 16
    """Of these, the episodes that planners and bounds play, which takes longer"""
    out: Path = REFERENCE_SCORES
    """File for the results"""
    csv: Path = Path("docs/results/data/placement-ladder.csv")
    """Table of all results"""
    again: bool = False
    """Measure what has a result, too"""


def greedy_pairs(obs: dict[str, npt.NDArray[Any]], noop: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(N, 2) the pairs that save most on the observed interval, or ``noop`` where none saves anything."""
    n, n_experts, n_gpus, _ = obs["pairs"].shape
    parts = obs["pairs"][..., N_PAIR_FEATURES:].reshape(n, n_experts, n_gpus, 3, N_SAVED_PARTS)
    saved = (parts[..., PART_SMOOTH] + parts[..., PART_MIGRATION]).transpose(0, 1, 3, 2).reshape(n, -1)
    saved = np.where(obs["action_mask"].reshape(n, -1) == 1, saved, -np.inf)
    best = np.stack(np.divmod(saved.argmax(1), 3 * n_gpus), axis=1)
    return np.where((saved.max(1) > 0)[:, None], best, noop)


def play(arguments: dict[str, Any], agent: str, episodes: int) -> npt.NDArray[np.float64]:
    """(episodes,) percent of the time that a simple agent saves."""
    flat = agent.endswith("candidate")
    more = {"lookahead": True} if agent == "greedy-observed" else {}
    envs: Any = gymnasium.make_vec(
        "MoEPlacementFlat-v0" if flat else "MoEPlacement-v0",
        num_envs=episodes,
        **{**arguments, "split": "test"},
        **more,
    )
    obs, infos = envs.reset(seed=0)
    rng = np.random.default_rng(0)
    while True:
        if agent == "no-op":
            actions = envs.noop_actions()
        elif agent == "greedy-observed":
            actions = greedy_pairs(obs, envs.noop_actions())
        elif agent == "random":
            chosen = (rng.random(obs["action_mask"].shape) * obs["action_mask"]).reshape(episodes, -1).argmax(1)
            actions = np.stack(np.divmod(chosen, obs["action_mask"].shape[2]), axis=1)
        elif agent == "random-candidate":
            actions = (rng.random(infos["action_mask"].shape) * infos["action_mask"]).argmax(1)
        else:
            n = infos["action_mask"].shape[1] - 1
            features = obs[:, : n * N_CANDIDATE_FEATURES].reshape(episodes, n, -1)
            saved = features[..., SAVED_SMOOTH] + features[..., MIGRATION]
            saved = np.where(infos["action_mask"][:, 1:] == 1, saved, -np.inf)
            best = saved.argmax(1) if agent == "best-candidate" else np.zeros(episodes, np.int64)
            actions = np.where(saved[np.arange(episodes), best] > 0, best + 1, 0)
        obs, _, ended, _, infos = envs.step(actions)
        if ended.all():
            saved_percent: npt.NDArray[np.float64] = 100 * infos["saved_vs_start"]
            return saved_percent


def plan(batch: PlacementBatch, planner: Planner, seed: int, sees_future: bool) -> float:
    """Percent of the time that a planner saves in one episode."""
    sim, config = batch.simulator, batch.config
    intervals = IntervalStream(batch.trace, batch.n_gpus, batch.traffic, seed).take(config.intervals + 1)
    placement = sim.static(batch.n_layers)
    if config.start == "eplb":
        eplb = EPLB(sim)
        placement = eplb.pack(eplb.loads(intervals[0]))
    start = placement
    planner.reset()
    history, saved_us = [intervals[0]], 0.0
    for interval in intervals[1:]:
        chosen = planner.plan([*history, interval] if sees_future else history, placement)
        saved_us += float(sim.evaluate(interval, start).time_us.sum())
        saved_us -= float(sim.evaluate(interval, chosen, placement).total_us.sum())
        placement = chosen
        history.append(interval)
    return 100 * saved_us / config.intervals / batch.rules_host.static_us


def measure(arguments: dict[str, Any], name: str, args: Args) -> npt.NDArray[np.float64]:
    """Percent of the time that an agent, planner or bound saves in each episode."""
    if name in AGENTS:
        return play(arguments, name, args.episodes)
    batch = PlacementBatch(PlacementConfig(**{**arguments, "split": "test"}))
    planner = make_planner(BOUNDS.get(name, name), batch.simulator, seed=0)
    return np.array([plan(batch, planner, seed, name in BOUNDS) for seed in range(args.planner_episodes)])


def file_of(results: dict[str, Any]) -> str:
    """The file with the results: one line per id."""
    lines = [f"{json.dumps(env_id)}: {json.dumps(results[env_id])}" for env_id in sorted(results)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(args: Args) -> None:
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for env_id, (kind, task) in placement_ids().items():
        if kind != "MoEPlacement" or not any(fnmatch(env_id, pattern) for pattern in args.ids):
            continue
        bounds = BOUNDS if "small" in env_id else ["clairvoyant"]
        found = results.setdefault(env_id, {})
        for name in (*AGENTS, *PLANNERS, *bounds):
            if not any(fnmatch(name, pattern) for pattern in args.agents) or (name in found and not args.again):
                continue
            began = time.perf_counter()
            saved = measure(task.arguments, name, args)
            found[name] = {
                "mean": round(float(saved.mean()), 2) + 0.0, "ci95": round(float(ci95(saved.tolist())), 2),
                "episodes": len(saved),
            }  # fmt: skip
            print(f"{env_id} {name} {found[name]} {time.perf_counter() - began:.0f} s", flush=True)
            write_atomically(args.out, file_of(results))
    write_table(results, args.csv)
    for env_id, gap in gaps(results).items():
        print(f"{env_id}: the best planner is {gap:.1f} points above the best blind agent", "" if gap >= 2 else "DROP")


def write_table(results: dict[str, Any], path: Path) -> None:
    rows = ["id,agent,saved_percent,ci95,episodes"]
    for env_id in sorted(results):
        rows += [f"{env_id},{name},{s['mean']},{s['ci95']},{s['episodes']}" for name, s in results[env_id].items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(rows) + "\n")


def gaps(results: dict[str, Any]) -> dict[str, float]:
    """Points between the best planner and the best of the agents that do not look, of the ids that have both."""
    found = {}
    for env_id, scores in results.items():
        groups = [[scores[name]["mean"] for name in names if name in scores] for names in (PLANNERS, BLIND)]
        if all(groups):
            found[env_id] = max(groups[0]) - max(groups[1])
    return found


if __name__ == "__main__":
    main(tyro.cli(Args))
