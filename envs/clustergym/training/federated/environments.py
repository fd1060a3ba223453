"""The environments of one agent: stepped one after the other, with a state that a checkpoint can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray


class ReplayableEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Saves an environment as the number of the current episode and the actions played in it so far.

    Each episode starts from its own seed, ``episode_seed(number)``. Playing the same actions again restores every
    environment that is deterministic given its seed.
    """

    def __init__(self, env: gym.Env[Any, Any], episode_seed: Callable[[int], int]) -> None:
        super().__init__(env)
        self.episode_seed = episode_seed
        self.episode = 0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode += 1
        self.actions = []
        return self.env.reset(seed=self.episode_seed(self.episode), options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self.env.step(action)

    def state(self) -> dict[str, Any]:
        return {"episode": self.episode, "actions": torch.from_numpy(np.array(self.actions))}

    def restore(self, state: dict[str, Any]) -> None:
        self.episode = state["episode"] - 1
        self.reset()
        for action in state["actions"].numpy():
            self.step(action)


def _action_mask(obs: Any, info: dict[str, Any]) -> Any:
    return obs.get("action_mask") if isinstance(obs, dict) and "action_mask" in obs else info.get("action_mask")


class Episode(NamedTuple):
    reward_sum: float
    length: int


class Step(NamedTuple):
    """What one step of all environments returns. The new observations are in :attr:`Environments.obs`."""

    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs: dict[int, NDArray[np.float32]]
    """Last observation of each episode that was truncated, by environment."""
    episodes: list[Episode]
    """Episodes that ended in this step."""


class Environments:
    """Environments of the same kind. An episode that ends is followed by a new one in the same step.

    Observations are flattened to float32 vectors, without ``action_mask``. Actions are indices from 0 for a Discrete
    space. For a Box they are vectors: bounded components are scaled from −1 … 1 to their range, and then clipped to it.
    """

    def __init__(self, envs: Sequence[ReplayableEnv]) -> None:
        self.envs = envs
        self.space, action_space = envs[0].observation_space, envs[0].action_space
        if isinstance(self.space, gym.spaces.Dict):
            self.space = gym.spaces.Dict({key: each for key, each in self.space.items() if key != "action_mask"})
        if not self.space.is_np_flattenable:
            raise TypeError(f"observation space {self.space} is not supported: expected one that can be flattened")
        self.obs_size = gym.spaces.flatdim(self.space)
        self.obs: NDArray[np.float32] = np.zeros((len(envs), self.obs_size), np.float32)
        """Current observations. Where an episode has ended, the first observation of the next one."""
        self.masks: NDArray[np.bool_] | None = None
        """Valid actions (environments, actions) for these observations. None if the environment does not tell."""
        self.episode_return = np.zeros(len(envs))
        self.episode_length = np.zeros(len(envs), np.int64)
        self.continuous = isinstance(action_space, gym.spaces.Box)
        if isinstance(action_space, gym.spaces.Box):
            self.action_shape, self.low, self.high = action_space.shape, action_space.low, action_space.high
            self.action_size = math.prod(action_space.shape)
            bounded = np.isfinite(self.low) & np.isfinite(self.high)
            self.middle = np.where(bounded, (self.low + self.high) / 2, 0.0).astype(np.float32)
            self.half_range = np.where(bounded, (self.high - self.low) / 2, 1.0).astype(np.float32)
        elif isinstance(action_space, gym.spaces.Discrete):
            self.first_action, self.action_size = int(action_space.start), int(action_space.n)
        else:
            raise TypeError(f"action space {action_space} is not supported: expected Discrete or Box")

    def __len__(self) -> int:
        return len(self.envs)

    def reset(self) -> None:
        self._set_observations([env.reset() for env in self.envs])

    def _set_observations(self, results: Sequence[tuple[Any, dict[str, Any]]]) -> None:
        """Set ``obs`` and ``masks`` from the observation and the info of each environment."""
        self.obs = np.stack([self._flatten(obs) for obs, _ in results])
        masks = [_action_mask(obs, info) for obs, info in results]
        self.masks = None if self.continuous or masks[0] is None else np.stack(masks).astype(bool)

    def step(self, actions: NDArray[Any]) -> Step:
        results, final_obs, episodes = [], {}, []
        rewards = np.zeros(len(self), np.float32)
        terminated, truncated = np.zeros(len(self), bool), np.zeros(len(self), bool)
        for i, (env, action) in enumerate(zip(self.envs, self._env_actions(actions), strict=True)):
            obs, rewards[i], terminated[i], truncated[i], info = env.step(action)
            self.episode_return[i] += rewards[i]
            self.episode_length[i] += 1
            if terminated[i] or truncated[i]:
                episodes.append(Episode(float(self.episode_return[i]), int(self.episode_length[i])))
                self.episode_return[i] = self.episode_length[i] = 0
                if not terminated[i]:
                    final_obs[i] = self._flatten(obs)
                obs, info = env.reset()
            results.append((obs, info))
        self._set_observations(results)
        return Step(rewards, terminated, truncated, final_obs, episodes)

    def _env_actions(self, actions: NDArray[Any]) -> list[Any]:
        if not self.continuous:
            return list((actions + self.first_action).tolist())
        scaled = self.middle + self.half_range * actions.reshape(-1, *self.action_shape)
        return list(np.clip(scaled, self.low, self.high))

    def _flatten(self, observation: Any) -> NDArray[np.float32]:
        return np.asarray(gym.spaces.flatten(self.space, observation), np.float32)

    def state(self) -> dict[str, Any]:
        return {
            "envs": [env.state() for env in self.envs],
            "next_obs": torch.from_numpy(self.obs),
            "next_masks": None if self.masks is None else torch.from_numpy(self.masks),
            "episode_return": torch.from_numpy(self.episode_return),
            "episode_length": torch.from_numpy(self.episode_length),
        }

    def restore(self, state: dict[str, Any]) -> None:
        for env, env_state in zip(self.envs, state["envs"], strict=True):
            env.restore(env_state)
        self.obs = state["next_obs"].numpy()
        masks = state.get("next_masks")
        self.masks = None if masks is None else masks.numpy()
        self.episode_return = state["episode_return"].numpy().copy()
        self.episode_length = state["episode_length"].numpy().copy()

    def close(self) -> None:
        for env in self.envs:
            env.close()
