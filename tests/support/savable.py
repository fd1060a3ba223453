"""A scripted vector environment that can save its state, as those of clustergym can."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from update_reference import Script

SAVABLE = "ScriptSavable-v0"


class SavableScripts(SyncVectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int) -> None:
        makers = [lambda: Script(gym.spaces.Discrete(4), masked=True)] * num_envs
        super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def get_state(self) -> dict[str, Any]:
        return {name: np.array([getattr(env, name) for env in self.envs]) for name in ("episode", "count")}

    def set_state(self, state: dict[str, Any]) -> None:
        for i, env in enumerate(self.envs):
            env.episode, env.count = int(state["episode"][i]), int(state["count"][i])
            env.journal.append(None)  # type: ignore[attr-defined]


def register() -> None:
    gym.register(SAVABLE, Script, vector_entry_point=SavableScripts, disable_env_checker=True)
