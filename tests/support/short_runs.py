"""A run of a few updates of each trainer, for tests of what all trainers do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clustergym.training import World, load_checkpoint
from trainers import load_trainer
from update_cases import AtariCase, LLMCase

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


class Federation(Trainer):
    crash_in = 4

    def start(self, args: Any, device: torch.device) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.module, "choose_device", lambda *_: device)
            return self.module.train(args)

    def update(self) -> tuple[Any, str]:
        return self.module.Learner, "learn"

    def checkpoints(self, folder: Path) -> list[Path]:
        return [folder / f"agent_{i}" / "checkpoint.pt" for i in range(2)]


class LanguageModel(Trainer):
    def args(self, folder: Path, **changes: Any) -> Any:
        return replace(LLMCase().run_args(folder, 3, seed=2), batch_size=8, checkpoint_interval=1, **changes)


TRAINERS = [
    Trainer("ppo", env_id="ScriptMasked-v0", total_timesteps=96, eval_episodes=2),
    Trainer("ppo", env_id="ScriptNextStep-v0", total_timesteps=96, eval_episodes=2, target_kl=0.1),
    Trainer("ppo_continuous_action", env_id="ScriptBox-v0", total_timesteps=96, eval_episodes=2),
    Trainer("ppo_recurrent", env_id="ScriptMasked-v0", total_timesteps=96, eval_episodes=2),
    Trainer("ppo_atari", AtariCase().scripted, total_timesteps=24, num_envs=2, num_steps=4, eval_episodes=2),
    Trainer("ppo_gpu_alloc", env_id="GPUAllocation-v0", total_timesteps=96, eval_streams=2, norm_reward=True),
    Trainer("ppo_lstm", env_id="GPUAllocation-v0", total_timesteps=96, eval_streams=2, eval_interval=2),
    Federation("ppo_federated", env_id="CartPole-v1", total_timesteps=96, local_updates=1, eval_episodes=2),
    Federation("ppo_federated", env_id="gpu_allocation_v0", total_timesteps=96, local_updates=1, eval_episodes=2),
    LanguageModel("ppo_llm"),
]
