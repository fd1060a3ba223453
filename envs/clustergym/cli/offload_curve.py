"""``clustergym offload curve``: what a training run has learned."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape

from clustergym.cli.common import prepare_outputs
from clustergym.cli.offload_output import players_of, results_table, steps_of
from clustergym.moe_offload.evaluation import Player, evaluate, make_environment, policy_names
from clustergym.moe_offload.picture import plot_curve
from clustergym.moe_offload.simulator import load_once, load_predictor
from clustergym.moe_offload.specs import DEFAULT_TRACE, OffloadConfig
from clustergym.moe_offload.tables import Tables, first_tokens, split_sequences


@dataclass
class Curve:
    """Show what a training run has learned: stall over its steps beside the rules, and a table on all test sequences.

    Example: clustergym offload curve runs/ppo_moe_marl__MoEOffload-v0__1
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder of ppo_moe_marl.py, trained with --eval-interval in an offloading task."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Picture to write. Default: curve.png in the run folder."""
    policy: list[str] = field(default_factory=lambda: ["rules", "bounds"])
    """What to compare with: rules, control, bounds, names of rules, or other run folders."""
    predictor: Path | None = None
    """Folder of a fitted predictor, for the control and for policies that read its columns."""
    tune_tokens: int = 8000
    """Tokens to tune on."""
    evaluations: int = 20
    """Trials per parameter of the search that tunes a rule."""
    num_envs: int = 64
    """Environments in which trained policies are played."""


def run(args: Curve, console: Console, line: str) -> None:
    predictor = load_predictor(args.predictor)
    names, others = policy_names(args.policy, predictor is not None)
    players = players_of([str(args.run), *others])
    run = players[str(args.run)]
    if not run.env_id.startswith("MoEOffload"):
        raise ValueError(f"{args.run} was trained in {run.env_id}: expected an offloading task")
    path = args.output or args.run / "curve.png"
    prepare_outputs(None, path)
    options = {name: value for name, value in run.options.items() if name in OffloadConfig.__dataclass_fields__}
    trace = load_once(options.get("trace", DEFAULT_TRACE))
    source = trace if options.get("fit_on") is None else load_once(options["fit_on"])
    parts, tables = split_sequences(trace), Tables.count(split_sequences(source)["fit"])
    part, tuning = parts["test"], first_tokens(parts["train"], args.tune_tokens)
    config = OffloadConfig(**options | {"trace": part, "split": "all", "fit_on": tables, "predictor": None})
    with steps_of(console, len(names) + len(players) + 1) as progress:
        settings = (args.evaluations, 0, args.num_envs, progress)
        found = evaluate(names, players, config, tuning, tables, predictor, *settings)
    steps, returns, episodes = evaluations_of(args.run, run)
    loads = found.test.task.load_ms * len(episodes) / found.test.lengths[episodes].sum()
    console.print(results_table(found.rows, part.n_layers * part.n_experts, config.megabytes(trace)))
    title = f"{run.env_id} on {trace.name}: {part.n_sequences} test sequences, {part.n_tokens} tokens"
    plot_curve(steps, [-value * loads for value in returns], found.levels(episodes), found.rows, title, path)
    console.print(escape(f"plot: {path}"))


def evaluations_of(run: Path, player: Player) -> tuple[list[int], list[float], Any]:
    """Steps and mean returns of a run's evaluations, and the test episodes that they were played on."""
    from clustergym.training.envs import evaluation_seed
    from clustergym.training.logs import read_scalars

    trained = json.loads((run / "model.json").read_text())["args"]
    if trained["eval_args"] != ["split=test"] or not trained["eval_episodes"]:
        raise ValueError(f"{run} was evaluated with {trained['eval_args']}: expected --eval-args split=test")
    steps, returns = read_scalars(run, "eval/mean_return")
    known = {name: value for name, value in player.options.items() if name in OffloadConfig.__dataclass_fields__}
    env = make_environment(player.env_id, trained["eval_episodes"], **known | {"split": "test"})
    _, infos = env.reset(seed=evaluation_seed(trained["seed"]))
    return steps, returns, infos["group"]
