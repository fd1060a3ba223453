"""Reference scores of the ladder of placement ids: what simple agents, planners and bounds reach on each task.

    python benchmarks/reference_scores.py [--tasks '4x4-*'] [--agents 'anneal*']

Every score is the return of ``gymnasium.make(id, split="test")`` in percent: the time saved against the start
placement, per interval, in units of the static placement's time. All are measured on the episodes of the seeds 0, 1, …,
which draw from the same test sequences: the standard deviation over them is a spread, not a confidence interval.

* ``no-op``: changes nothing, so its score is 0 by definition. The file has its time.
* ``random``: uniform over the legal operations of ``MoEPlacement``; ``random-flat``: uniform over the mask of
  ``MoEPlacementFlat``; ``first-candidate``: always the candidate that saves most on the observed interval, if any does.
* planners plan after every observed interval, with no limit on the number of operations and their default settings.
* ``hindsight``: ``anneal`` that sees the next interval, migration included. ``oracle``, on tasks with one interval:
  a longer search that sees it and ignores migration. Better placements may exist. The better of both is the bound.
* ``optimum``: on ``small`` with stationary traffic, the proven best placement for the next interval.

The results go to ``envs/clustergym/reference_scores.json``, from which the tables of the documentation are made, and
the table in the docstring of the environment, which this program writes. What has a result is not measured again: after
a change to a planner, give its name and ``--again``.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro

from clustergym.common.files import write_atomically
from clustergym.ids import REFERENCE_SCORES, ladder
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.streams import IntervalStream
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB
from clustergym.planners.registry import make_planner

BEST = ("eplb", "swift", "flashlb", "greedy", "anneal")
"""Planners among which the best one is named."""
PLANNERS = (*BEST, "hindsight")
HINDSIGHT = {"hindsight": "anneal", "oracle": "oracle", "optimum": "exact"}
"""Bounds → the planner that sees the next interval."""
ORACLE_STEPS = 5000
"""Steps per layer, start and stage."""
ENVIRONMENT = REFERENCE_SCORES.parent / "moe_placement" / "environment.py"
HEAD = """\
    | task | random | random-flat | EPLB | best planner | bound |
    | --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""
"""Begin of the table in the docstring."""


@dataclass
class Args:
    """Measure the reference scores of the ladder."""

    tasks: tuple[str, ...] = ("*",)
    """Patterns of tasks, such as '4x4-*-drift', in the order in which they are measured"""
    agents: tuple[str, ...] = ("*",)
    """Patterns of agents and planners, such as 'anneal*'"""
    streams: int = 4
    """Episodes of a task with one interval; the others have half as many"""
    out: Path = REFERENCE_SCORES
    """File for the results"""
    again: bool = False
    """Measure what has a result, too"""
    docstring: bool = False
    """Measure nothing. Write the docstring from the file"""


def play(task: str, kind: str, streams: int, agent: str) -> list[dict[str, float]]:
    """The information at the end of each episode of a simple agent."""
    envs: Any = gymnasium.make_vec(
        f"{kind}-{task}-v0", num_envs=streams, split="test", observation="compact" if "Flat" in kind else "full"
    )
    obs, infos = envs.reset(seed=0)
    rng = np.random.default_rng(0)
    while True:
        if agent == "no-op":
            actions = envs.noop_actions()
        elif agent == "first-candidate":
            actions = (obs[:, 1] > 0).astype(np.int64)
        elif agent == "random-flat":
            actions = (rng.random(infos["action_mask"].shape) * infos["action_mask"]).argmax(1)
        else:
            legal = obs["joint_mask"].reshape(streams, -1)
            chosen = (rng.random(legal.shape) * legal).argmax(1)
            actions = np.stack(np.divmod(chosen, obs["joint_mask"].shape[2]), axis=1)
        obs, _, ended, _, infos = envs.step(actions)
        if ended.all():
            final = infos["final_info"]
            return [{name: float(final[name][i]) for name in ("time_us", "start_us", "eplb_us", "saved_vs_start")}
                    for i in range(streams)]  # fmt: skip


def plan(batch: PlacementBatch, planner: Planner, seed: int, sees_future: bool) -> float:
    """µs per layer and pass, migration included, of an episode that a planner plays."""
    sim, config = batch.simulator, batch.config
    intervals = IntervalStream(batch.trace, batch.n_gpus, batch.traffic, seed).take(config.intervals + 1)
    placement = sim.static(batch.n_layers)
    if config.start == "eplb":
        eplb = EPLB(sim)
        placement = eplb.pack(eplb.loads(intervals[0]))
    planner.reset()
    history, total = [intervals[0]], 0.0
    for interval in intervals[1:]:
        seen = [*history, interval] if sees_future else history
        chosen = planner.plan(seen, placement)
        total += float(sim.evaluate(interval, chosen, placement).total_us.mean())
        placement = chosen
        history.append(interval)
    return total / config.intervals


SIMPLE = {"no-op": "MoEPlacement", "random": "MoEPlacement", "random-flat": "MoEPlacementFlat",
          "first-candidate": "MoEPlacementFlat"}  # fmt: skip
"""Simple agents → the kind of environment that they play."""


def agents_of(task: str) -> list[str]:
    """Everything that is measured on a task."""
    stationary = task.endswith("-stationary")
    proven = task.startswith("small-") and stationary
    return [*SIMPLE, *PLANNERS, *(["oracle"] if stationary else []), *(["optimum"] if proven else [])]


def measure(task: str, arguments: dict[str, Any], streams: int, agents: list[str]) -> dict[str, Any]:
    """The scores of some agents on a task: mean and standard deviation over streams, in percent."""
    batch = PlacementBatch(PlacementConfig(**{**arguments, "split": "test"}))
    static_us = batch.rules_host.static_us / batch.n_layers
    nothing = play(task, SIMPLE["no-op"], streams, "no-op")
    start_us = [info["start_us"] for info in nothing]
    saved: dict[str, list[float]] = {}
    for name in agents:
        if name in SIMPLE:
            played = nothing if name == "no-op" else play(task, SIMPLE[name], streams, name)
            saved[name] = [100 * info["saved_vs_start"] for info in played]
            continue
        kind = HINDSIGHT.get(name, name)
        options: dict[str, Any] = {"iterations": ORACLE_STEPS} if name == "oracle" else {}
        planner = make_planner(kind, batch.simulator, seed=0, **options)
        times = [plan(batch, planner, seed, name in HINDSIGHT) for seed in range(streams)]
        saved[name] = [100 * (start - took) / static_us for start, took in zip(start_us, times, strict=True)]
    if "eplb" in saved:
        # The environment's own EPLB is the planner's: the same streams, the same simulator.
        own = [100 * (info["start_us"] - info["eplb_us"]) / static_us for info in nothing]
        np.testing.assert_allclose(own, saved["eplb"], atol=1e-6)
    scores = {name: [round(float(np.mean(values)), 3), round(float(np.std(values, ddof=1)), 3)]
              for name, values in saved.items()}  # fmt: skip
    return {"streams": streams, "start_us": round(float(np.mean(start_us)), 2), "saved_percent": scores}


def score_row(task: str, saved: dict[str, list[float]]) -> str:
    """A row of the table in the docstring."""
    planner = max(BEST, key=lambda name: saved[name][0])
    bound = "optimum" if "optimum" in saved else max(saved.keys() & HINDSIGHT.keys(), key=lambda name: saved[name][0])
    text = {name: f"{round(mean, 1) + 0.0:.1f}" for name, (mean, _) in saved.items()}
    proven = " (proven)" if bound == "optimum" else ""
    cells = [
        text["random"],
        text["random-flat"],
        text["eplb"],
        f"{text[planner]} (`{planner}`)",
        text[bound] + proven,
    ]
    return f"    | `{task}` | " + " | ".join(cells) + " |\n"


def docstring_table(results: dict[str, Any]) -> str:
    """The table in the docstring of the environment: all tasks that are measured completely."""
    scores = {task: results.get(task, {}).get("saved_percent", {}) for task, _ in ladder()}
    complete = {task: saved for task, saved in scores.items() if saved.keys() >= {*agents_of(task)}}
    return HEAD + "".join(score_row(task, saved) for task, saved in complete.items())


def write_docstring(results: dict[str, Any]) -> None:
    pattern = re.escape(HEAD) + r"(?:    \|.*\n)*"
    text, found = re.subn(pattern, lambda _: docstring_table(results), ENVIRONMENT.read_text())
    if found != 1:
        raise ValueError(f"{ENVIRONMENT} has {found} tables of reference scores, expected one")
    write_atomically(ENVIRONMENT, text)


def file_of(results: dict[str, Any]) -> str:
    """The file with the results: one line per task."""
    lines = [f"{json.dumps(task)}: {json.dumps(results[task], sort_keys=True)}" for task in sorted(results)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(args: Args) -> None:
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    chosen = {t: a for pattern in args.tasks for t, a in ladder() if fnmatch(t, pattern)}
    for task, arguments in {} if args.docstring else chosen.items():
        found = {} if args.again else results.get(task, {}).get("saved_percent", {})
        wanted = [name for name in agents_of(task) if any(fnmatch(name, pattern) for pattern in args.agents)]
        missing = [name for name in wanted if name not in found]
        if not missing:
            continue
        streams = args.streams if "intervals" not in arguments else max(2, args.streams // 2)
        began = time.perf_counter()
        result = measure(task, arguments, streams, missing)
        scores = results.get(task, {}).get("saved_percent", {}) | result["saved_percent"]
        results[task] = {**result, "saved_percent": scores}
        write_atomically(args.out, file_of(results))
        shown = {name: result["saved_percent"][name][0] for name in missing}
        print(f"{task} ({time.perf_counter() - began:.0f} s)", shown, flush=True)
    if args.out == REFERENCE_SCORES:
        write_docstring(results)


if __name__ == "__main__":
    main(tyro.cli(Args))
