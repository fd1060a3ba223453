"""What PPO learns in expert offloading, against the tuned rules on the same held-out sequences.

    python benchmarks/offload/training.py                                      # the bundled trace
    CLUSTERGYM_DATA=/folder/with/recordings python benchmarks/offload/training.py --tasks gpt-oss gpt-oss-pcie4

Each task is trained with five seeds on the training sequences, and played on test sequences. Predictors are fitted on
sequences of their own. Rules are tuned on training sequences, and the best one is chosen on the test sequences, which
favours it. What is finished stays in the output folder: run the command again to resume.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from clustergym.cli import main as clustergym
from clustergym.common.files import atomic_file
from clustergym.moe_offload.evaluation import Player, change, play_networks, policy_names, stall_interval
from clustergym.moe_offload.kernels.state import LOADS, PREFETCHES
from clustergym.moe_offload.predictor import Predictor
from clustergym.moe_offload.rules import Outcome, Workload, tune_all
from clustergym.moe_offload.simulator import build_task, load_once, parts_of, tables_of
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import first_tokens
from clustergym.training.policies import Policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from public_data import data_file

ROOT = Path(__file__).parents[2]
GPT_OSS = "moe/gpt_oss_20b_decode.npz"
STUDY_RULE = "decayed-lfu+transitions"
"""The best rule of the study that the bars were written from. ``frequency+transitions`` is better."""
COLUMNS = (
    "task", "seed", "steps", "stall_ms_per_token", "stall_low", "stall_high", "loads_per_token",
    "prefetches_per_token", "best_rule", "vs_best_rule_percent", "vs_best_rule_low", "vs_best_rule_high",
    "vs_study_rule_percent", "vs_study_rule_low", "vs_study_rule_high",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Where policies are trained."""

    trace: str
    link: str = "pcie5"
    predictor: bool = False
    steps: int = 1_000_000


TASKS = {
    "bundled": Task("tiny_decode"),
    "bundled-predictor": Task("tiny_decode", predictor=True),
    "gpt-oss": Task(GPT_OSS),
    "gpt-oss-predictor": Task(GPT_OSS, predictor=True),
    "gpt-oss-pcie4": Task(GPT_OSS, link="pcie4"),
}


@dataclass
class Args:
    tasks: tuple[str, ...] = ("bundled",)
    """Names of TASKS."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of the training."""
    steps: int | None = None
    """Decisions of a training. Default: the task's."""
    start: Path | None = None
    """Start all actors from this policy."""
    max_tokens: int = 300
    """Serve only the first tokens of each test sequence."""
    tune_tokens: int = 8_000
    """Tokens to tune rules on."""
    evaluations: int = 20
    """Trials of the search per parameter of a rule."""
    output: Path = Path("runs/offload-training")
    """Folder of the runs and of offload-training.csv."""


def source(task: Task) -> str:
    return str(data_file(task.trace)) if task.trace.startswith("moe/") else task.trace


def fitted(args: Args, task: Task) -> Path | None:
    """The predictor of a task."""
    if not task.predictor:
        return None
    folder = args.output / f"predictor-{Path(task.trace).stem}"
    if not folder.exists():
        clustergym(["offload", "fit", source(task), "-o", str(folder)])
    return folder


def train(args: Args, name: str, task: Task, seed: int) -> Path:
    """The run folder of a finished training."""
    folder = args.output / f"{name}{'-start' if args.start else ''}-{seed}"
    if not (folder / "policy.onnx").exists():
        predictor, steps = fitted(args, task), args.steps or task.steps
        flags = ["--trace", source(task), "--env-args", f"link={task.link}", "--seed", str(seed), "--resume"]
        flags += ["--run-dir", str(folder), "--total-timesteps", str(steps), "--eval-episodes", "0"]
        flags += [] if predictor is None else ["--predictor", str(predictor)]
        flags += [] if args.start is None else ["--start", str(args.start)]
        subprocess.run([sys.executable, str(ROOT / "cleanrl_ppo" / "ppo_moe_marl.py"), *flags], check=True)
    return folder


def rows_of(args: Args, name: str, runs: dict[int, Path]) -> list[dict[str, Any]]:
    """Play the runs of a task and all rules on the same test sequences."""
    task = TASKS[name]
    trace = load_once(source(task))
    parts, tables = parts_of(trace), tables_of(trace)
    config = OffloadConfig(trace=parts["test"], split="all", fit_on=tables, link=task.link, max_tokens=args.max_tokens)
    tuning = first_tokens(parts["train"], args.tune_tokens)
    workload = Workload(build_task(replace(config, trace=tuning, max_tokens=None), tables), tuning, tables, reuse=True)
    tuned = tune_all(workload, policy_names(["rules"], False)[0], args.evaluations)
    folder = fitted(args, task)
    predictor = None if folder is None else Predictor.load(folder)
    test = Workload(build_task(config, tables), parts["test"], tables, predictor)
    rules = dict(zip(tuned, test.run_all(list(tuned.values())), strict=True))
    best = min((key for key in rules if key != "random"), key=lambda key: rules[key].stall_ms_per_token)
    played: dict[str, Outcome] = {key: rules[key] for key in dict.fromkeys((STUDY_RULE, best))}
    trained = {}
    for seed, run in runs.items():
        policy = Policy(run)
        trained[seed] = play_networks(Player.of(policy), config, test)
        played[f"{seed}"] = trained[seed]
    played["mean"] = Outcome.mean(list(trained.values()))
    rows = []
    for key, outcome in played.items():
        low, high = stall_interval(outcome)
        tokens, stats = outcome.tokens.sum(), outcome.stats.sum(0)
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row |= {"task": name, "seed": key, "stall_ms_per_token": outcome.stall_ms_per_token, "stall_low": low}
        row |= {"stall_high": high, "loads_per_token": stats[LOADS] / tokens}
        row |= {"prefetches_per_token": stats[PREFETCHES] / tokens, "best_rule": best}
        if key in map(str, runs):
            row["steps"] = Policy(runs[int(key)]).about["steps"]
        for column, rule in (("vs_best_rule", best), ("vs_study_rule", STUDY_RULE)):
            found, (low, high) = change(outcome, rules[rule])
            row |= {f"{column}_percent": 100 * found, f"{column}_low": 100 * low, f"{column}_high": 100 * high}
        rows.append({column: f"{v:.4g}" if isinstance(v := row[column], float) else v for column in COLUMNS})
    return rows


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"offload-training{'-start' if args.start else ''}.csv"
    console = Console(width=160)
    for name in args.tasks:
        runs = {seed: train(args, name, TASKS[name], seed) for seed in args.seeds}
        known = list(csv.DictReader(file.open())) if file.exists() else []
        rows = [row for row in known if row["task"] != name] + rows_of(args, name, runs)
        with atomic_file(file, "w") as out:
            writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        table = Table(*COLUMNS)
        for row in rows:
            if row["task"] == name:
                table.add_row(*map(str, row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
