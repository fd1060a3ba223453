"""Classic control with ``ppo.py`` and ``ppo_continuous_action.py``: several seeds, a table, JSON and learning curves.

The score of a seed is the mean return of the last 100 training episodes, with sampled actions. The table also has the
mean return of held-out episodes with greedy actions, what CleanRL publishes for its ppo.py after 500,000 steps and its
ppo_continuous_action.py after a million (training, mean ± standard deviation of 3 seeds,
docs.cleanrl.dev/rl-algorithms/ppo), and what the RL Zoo of Stable-Baselines3 publishes (one run, greedy actions, mean ±
standard deviation over episodes, benchmark.md of rl-baselines3-zoo). CartPole must reach 475 on every seed.

    python benchmarks/trainers/classic.py
    python benchmarks/trainers/classic.py --envs CartPole-v1 --seeds 1 2 3
    python benchmarks/trainers/classic.py --envs HalfCheetah-v4 --seeds 1 2 3      # needs gymnasium[mujoco]
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.common.statistics import ci95
from clustergym.training.logs import read_scalars

TRAINERS = Path(__file__).resolve().parents[2] / "cleanrl_ppo"


@dataclass(frozen=True)
class Task:
    """The return at which an environment counts as solved (CleanRL's result if there is none), and flags to train."""

    solved: float
    flags: tuple[str, ...] = ()
    trainer: str = "ppo"
    cleanrl: str = ""
    """Result that CleanRL publishes."""
    zoo: str = ""
    """Result that the RL Zoo publishes, and its steps."""


TASKS = {
    "CartPole-v1": Task(475.0, cleanrl="490.04 ± 6.12", zoo="500 ± 0 (100k)"),
    "Acrobot-v1": Task(-100.0, cleanrl="−86.36 ± 1.32", zoo="−73.5 ± 18.2 (1M)"),
    # An episode has 200 steps, and a push matters for about ten of them.
    "Pendulum-v1": Task(
        -200.0,
        ("--total-timesteps", "300000", "--gamma", "0.9"),
        "ppo_continuous_action",
        zoo="−172.2 ± 104.2 (100k)",
    ),
    "HalfCheetah-v4": Task(
        1442.64,
        ("--total-timesteps", "1000000", "--learning-rate", "3e-4"),
        "ppo_continuous_action",
        cleanrl="1442.64 ± 46.03",
    ),
    # The settings of the RL Zoo for LunarLander-v2: 16 environments, minibatches of 64, a constant learning rate. Its
    # value loss has no factor 0.5 and no clip. Returns are in the hundreds: a value clipped at ±0.2 hardly learns.
    "LunarLander-v3": Task(
        200.0,
        (
            *("--total-timesteps", "1000000", "--gamma", "0.999", "--gae-lambda", "0.98", "--num-envs", "16"),
            *("--num-steps", "1024", "--num-minibatches", "256", "--learning-rate", "3e-4", "--no-anneal-lr"),
            *("--no-clip-vloss", "--vf-coef", "1.0"),
        ),
        zoo="242.1 ± 31.8 (1M)",
    ),
}


@dataclass
class Args:
    envs: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3")
    """Environments to train on."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds, one run each."""
    flags: str = ""
    """More flags for the trainer, as one string: --flags="--num-envs 8"."""
    output: Path = Path("runs/classic")
    """Folder of the runs, and prefix of the .json and .png files. Runs that are in the .json file are not repeated."""


def train(env_id: str, seed: int, flags: list[str], folder: Path) -> dict[str, object]:
    """Train in a subprocess, or continue an interrupted run. Returns the result line and the learning curve."""
    trainer = str(TRAINERS / f"{TASKS[env_id].trainer}.py")
    command = [sys.executable, trainer, "--env-id", env_id, "--seed", str(seed), "--run-dir", str(folder), "--resume"]
    command += [*TASKS[env_id].flags, *flags]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, object] = json.loads(output.splitlines()[-1].removeprefix("result "))
    steps, values = read_scalars(folder, "charts/mean_return_100")
    return result | {"curve_steps": steps, "curve": values}


def plot(results: dict[str, list[dict[str, object]]], path: Path) -> None:
    """Mean and range over seeds, one panel per environment."""
    matplotlib.use("Agg")
    figure, panels = plt.subplots(
        1, len(results), figsize=(4.2 * len(results), 3.4), squeeze=False, layout="constrained"
    )
    for panel, (env_id, runs) in zip(panels[0], results.items(), strict=True):
        steps = np.asarray(runs[0]["curve_steps"]) / 1e3
        curves = np.array([run["curve"] for run in runs], float)
        panel.fill_between(steps, curves.min(0), curves.max(0), alpha=0.25, linewidth=0, label="worst to best seed")
        panel.plot(steps, curves.mean(0), label=f"mean of {len(runs)} seeds")
        panel.axhline(
            TASKS[env_id].solved, color="0.4", linestyle="--", linewidth=1, label=f"solved: {TASKS[env_id].solved:g}"
        )
        panel.set(title=env_id, xlabel="thousand environment steps", ylabel="return, last 100 episodes")
        panel.legend(fontsize=8, loc="lower right")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=160)
    table = Table(
        "environment",
        "steps",
        "seeds ≥ solved",
        "return, last 100",
        "held-out, greedy",
        "first solved at, steps",
        "CleanRL",
        "RL Zoo",
    )
    store = args.output.with_suffix(".json")
    results: dict[str, list[dict[str, object]]] = json.loads(store.read_text()) if store.exists() else {}
    store.parent.mkdir(parents=True, exist_ok=True)
    for env_id in args.envs:
        runs = results.setdefault(env_id, [])
        for seed in args.seeds:
            if seed not in [run["seed"] for run in runs]:
                console.print(f"{env_id} seed {seed} …", style="dim")
                runs.append(train(env_id, seed, shlex.split(args.flags), args.output / f"{env_id}-{seed}"))
                store.write_text(json.dumps(results))
        last = [float(str(run["train_return_100"])) for run in runs]
        held_out = [float(str(run["mean_return"])) for run in runs]
        solved = TASKS[env_id].solved
        first = [
            next((step for step, value in zip(run["curve_steps"], run["curve"], strict=True) if value >= solved), None)
            for run in runs
        ]
        table.add_row(
            env_id,
            f"{runs[0]['steps']:,}",
            f"{sum(value >= solved for value in last)} of {len(runs)}",
            f"{np.mean(last):.1f} ± {ci95(last):.1f} (worst {min(last):.1f})",
            f"{np.mean(held_out):.1f} ± {ci95(held_out):.1f}",
            ", ".join("never" if step is None else f"{step:,}" for step in first),
            TASKS[env_id].cleanrl,
            TASKS[env_id].zoo,
        )
    plot(results, args.output.with_suffix(".png"))
    console.print(table)
    console.print(f"wrote {store} and {args.output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
