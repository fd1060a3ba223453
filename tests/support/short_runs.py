"""A run of a few updates of each trainer, for tests of what all trainers do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch

from clustergym.training import World, load_checkpoint
from trainers import load_trainer
from update_cases import AtariCase

SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "checkpoint_interval": 1, "hidden": 8}


class Trainer:
    """A short run of one trainer."""

    crash_in = 2
    """The update that a crash interrupts."""
    can_render = True
    evaluation = "eval/reward", 3
    """Metric of an evaluation, and how often a run of two iterations that is extended to three logs it."""

    def __init__(self, name: str, scripted: Any = nullcontext, **settings: Any) -> None:
        self.name, self.settings, self.scripted = name, settings, scripted
        self.module = load_trainer(name)

    def __str__(self) -> str:
        return self.name

    def args(self, folder: Path, **changes: Any) -> Any:
        known = {
            key: value for key, value in (SMALL | self.settings | changes).items() if hasattr(self.module.Args, key)
        }
        return self.module.Args(**known, run_dir=folder)

    def train(self, folder: Path, device: torch.device, **changes: Any) -> dict[str, Any]:
        return self.start(self.args(folder, **changes), device)

    def start(self, args: Any, device: torch.device) -> dict[str, Any]:
        with self.scripted():
            return self.module.train(args, World(device=device))

    def update(self) -> tuple[Any, str]:
        """Owner and name of the function that updates the network."""
        return self.module, "update"

    def checkpoints(self, folder: Path) -> list[Path]:
        return [folder / "checkpoint.pt"]

    def iterations(self, folder: Path) -> list[int]:
        """Number of updates in each checkpoint."""
        return [load_checkpoint(path, self.name)["iteration"] for path in self.checkpoints(folder)]

    def final(self, folder: Path) -> list[dict[str, Any]]:
        """Content of the checkpoints, without the arguments."""
        states = [load_checkpoint(path, self.name) for path in self.checkpoints(folder)]
        return [{key: value for key, value in state.items() if key != "args"} for state in states]


class Placement(Trainer):
    """Simulates in compiled code for CPU or CUDA: a whole run cannot be on the second device of the tests."""

    evaluation = "validation/total_us", 4

    def args(self, folder: Path, **changes: Any) -> Any:
        small = {
            "trace": ("tiny_moe",), "layers": 1, "ops_per_layer": 2, "intervals": 1, "tokens_per_rank": 4,
            "num_envs": 2, "num_steps": 4, "num_minibatches": 2, "hidden": 8, "pretrain_states": 8,
            "eval_planners": ("eplb",), "eval_streams": 1, "total_timesteps": 24, "checkpoint_interval": 1,
            "run_dir": folder,
        }  # fmt: skip
        args = self.module.Args()
        groups = [args, *(value for value in vars(args).values() if is_dataclass(value))]
        for name, value in (small | changes).items():
            setattr(next(group for group in groups if name in vars(group)), name, value)
        return args


TRAINERS = [
    Trainer("ppo", env_id="ScriptMasked-v0", total_timesteps=96, eval_episodes=2),
    Trainer("ppo", env_id="ScriptNextStep-v0", total_timesteps=96, eval_episodes=2, target_kl=0.1),
    Trainer("ppo_continuous_action", env_id="ScriptBox-v0", total_timesteps=96, eval_episodes=2),
    Trainer("ppo_recurrent", env_id="ScriptMasked-v0", total_timesteps=96, eval_episodes=2),
    Trainer("ppo_atari", AtariCase().scripted, total_timesteps=24, num_envs=2, num_steps=4, eval_episodes=2),
    Trainer("ppo_gpu_alloc", env_id="GPUAllocation-v0", total_timesteps=96, eval_streams=2, norm_reward=True),
    Trainer("ppo_lstm", env_id="GPUAllocation-v0", total_timesteps=96, eval_streams=2, eval_interval=2),
]
PLACEMENT = Placement("ppo_moe_marl")
