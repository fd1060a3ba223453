"""Short Atari runs of ``ppo_atari.py`` beside Stable-Baselines3, with the same settings, on one CPU core.

The score of a run is the mean of the last 100 whole games in training, with unclipped rewards. CleanRL publishes curves
of ten million steps; a short run only shows that both learn alike.

    python benchmarks/trainers/atari.py
    python benchmarks/trainers/atari.py --seeds 1 2 3 --steps 200000

Runs that are in the .json file already are not repeated, so an interrupted benchmark continues.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.training.logs import read_scalars

TRAINER = Path(__file__).resolve().parents[2] / "cleanrl_ppo" / "ppo_atari.py"


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """Game."""
    seeds: tuple[int, ...] = (1,)
    """Seeds, one run of each trainer."""
    steps: int = 102_400
    """Environment steps of a run (four frames each)."""
    output: Path = Path("runs/atari.json")
    """File for the results."""


def this_project(env_id: str, seed: int, steps: int) -> dict[str, Any]:
    """Curve and CPU seconds of ppo_atari.py with its default flags."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        flags = ["--env-id", env_id, "--seed", str(seed), "--total-timesteps", str(steps), "--run-dir", str(folder)]
        command = [sys.executable, str(TRAINER), *flags, "--eval-episodes", "0", "--checkpoint-interval", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        at, scores = read_scalars(folder, "charts/mean_return_100")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"steps": list(at), "scores": list(scores), "cpu_s": spent}


def stable_baselines(env_id: str, seed: int, steps: int) -> dict[str, Any]:
    """Curve and CPU seconds of Stable-Baselines3 with the same settings and its own Atari wrappers."""
    import ale_py
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    torch.set_num_threads(1)
    at: list[int] = []
    scores: list[float] = []

    class Curve(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            games = [episode["r"] for episode in self.model.ep_info_buffer or []]
            at.append(self.num_timesteps)
            scores.append(float(np.mean(games)) if games else float("nan"))

    began = time.process_time()
    envs = VecFrameStack(make_atari_env(env_id, n_envs=8, seed=seed), n_stack=4)
    # ppo_atari.py has half the squared error in its value loss, so a coefficient of 0.5 there is 0.25 here.
    model = PPO(
        "CnnPolicy", envs, n_steps=128, batch_size=256, n_epochs=4, learning_rate=lambda left: 2.5e-4 * left,
        clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01, vf_coef=0.25, device="cpu", seed=seed,
    )  # fmt: skip
    model.learn(steps, callback=Curve())
    envs.close()
    return {"steps": at, "scores": scores, "cpu_s": time.process_time() - began}


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    results: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    marks = [round(args.steps * part / 5) for part in range(1, 6)]
    table = Table("trainer", "seed", *(f"score at {mark:,}" for mark in marks), "steps per CPU s")
    for seed in args.seeds:
        for name, train in (("ppo_atari.py", this_project), ("Stable-Baselines3", stable_baselines)):
            key = f"{name} {args.env_id} seed {seed} steps {args.steps}"
            if key not in results:
                results[key] = train(args.env_id, seed, args.steps)
                args.output.write_text(json.dumps(results))
            run = results[key]
            scores = [run["scores"][int(np.searchsorted(run["steps"], mark, "right")) - 1] for mark in marks]
            rate = run["steps"][-1] / run["cpu_s"]
            table.add_row(name, str(seed), *(f"{score:.2f}" for score in scores), f"{rate:,.0f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
