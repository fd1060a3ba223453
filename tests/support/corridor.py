"""A small environment with known outcomes, and short runs of ``ppo.py`` in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clustergym.training import World
from trainers import load_trainer

ppo = load_trainer("ppo")
CPU = torch.device("cpu")


class Corridor(gym.Env):
    """A small environment whose outcomes follow from the observation (step, episode).

    Episode e has 2 + e % 3 steps; it is truncated if e is odd and terminates otherwise. The reward is 1 + step + 10 ·
    action. With ``masked``, action step % 3 is invalid.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, masked: bool = False) -> None:
        self.masked = masked
        self.episode = -1

    def observe(self) -> tuple[np.ndarray, dict[str, Any]]:
        valid = np.ones(3, np.int8)
        valid[self.step_count % 3] = 0
        return np.array([self.step_count, self.episode], np.float32), {"action_mask": valid} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode = int(self.np_random.integers(3)) if seed is not None else self.episode + 1
        self.step_count = 0
        return self.observe()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.masked:
            assert action != self.step_count % 3, "the action is invalid"
        reward = 1.0 + self.step_count + 10.0 * float(action)
        self.step_count += 1
        ended = self.step_count >= 2 + self.episode % 3
        obs, info = self.observe()
        return obs, reward, ended and self.episode % 2 == 0, ended and self.episode % 2 == 1, info


def next_step_corridors(num_envs: int, masked: bool = False) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Corridor, masked)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


@contextmanager
def registered_corridors() -> Iterator[None]:
    gym.register("Corridor-v0", Corridor)
    gym.register("CorridorMasked-v0", Corridor, kwargs={"masked": True})
    gym.register("CorridorBatched-v0", Corridor, vector_entry_point=next_step_corridors)
    yield
    for name in ("Corridor-v0", "CorridorMasked-v0", "CorridorBatched-v0"):
        del gym.registry[name]


def small(**changes: Any) -> Any:
    return ppo.Args(**({"num_envs": 3, "num_steps": 8, "eval_episodes": 0, "total_timesteps": 72} | changes))


def rollouts(**changes: Any) -> Any:
    args = small(**changes)
    agent = ppo.Agent(2, 3)
    runner = ppo.Rollouts(args, agent, CPU)
    runner.restart(7)
    return runner


def trained(folder: Path, **changes: Any) -> dict[str, Any]:
    return ppo.train(small(env_id="Corridor-v0", run_dir=folder, **changes), World())
