"""Vector environments: flat observations, action masks, episode statistics and evaluation episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np


def flat_size(space: gym.Space[Any]) -> int:
    """Size of a flattened observation. Discrete spaces are one-hot encoded, ``action_mask`` is left out."""
    if isinstance(space, gym.spaces.Dict):
        return sum(flat_size(each) for key, each in space.items() if key != "action_mask")
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        return int(np.prod(space.shape))
    raise TypeError(
        f"observation space {space} is not supported: expected Box, Discrete, MultiBinary or a Dict of them"
    )


def flatten(space: gym.Space[Any], obs: Any) -> np.ndarray:
    """Flatten a batch of observations to a float32 array of shape (envs, flat_size)."""
    if isinstance(space, gym.spaces.Dict):
        parts = [flatten(each, obs[key]) for key, each in space.items() if key != "action_mask"]
        return np.concatenate(parts, axis=1)
    if isinstance(space, gym.spaces.Discrete):
        one_hot: np.ndarray = np.eye(int(space.n), dtype=np.float32)[np.asarray(obs) - int(space.start)]
        return one_hot
    return np.asarray(obs, np.float32).reshape(len(obs), -1)


def action_mask(obs: Any, infos: dict[str, Any]) -> np.ndarray | None:
    """The boolean mask of valid actions (envs, actions) from the observations or the infos; None if there is none."""
    mask = obs.get("action_mask") if isinstance(obs, dict) else infos.get("action_mask")
    return None if mask is None else np.asarray(mask, bool)


class EpisodeStatistics:
    """Returns and lengths of the episodes that finish in a vector environment."""

    def __init__(self, num_envs: int) -> None:
        self.last_100_returns: deque[float] = deque(maxlen=100)
        self._num_envs = num_envs
        self._new: list[tuple[float, float]] = []
        self.restart()

    def restart(self) -> None:
        """Forget the episodes that are not finished. Call this when all environments are reset."""
        self._return = np.zeros(self._num_envs)
        self._length = np.zeros(self._num_envs, np.int64)

    def step(self, rewards: np.ndarray, dones: np.ndarray, counts: np.ndarray) -> None:
        """Add one step of all environments. Steps where ``counts`` is False are not part of an episode's length."""
        self._return += rewards
        self._length += counts
        if dones.any():
            self.add(self._return[dones].tolist(), self._length[dones].tolist())
            self._return[dones] = 0.0
            self._length[dones] = 0

    def add(self, returns: Iterable[float], lengths: Iterable[float]) -> None:
        """Add finished episodes."""
        self._new += zip(returns, lengths, strict=True)

    def charts(self) -> dict[str, float]:
        """Mean return and length of the episodes since the last call, and the mean return of the last 100 episodes."""
        returns, lengths = [episode[0] for episode in self._new], [episode[1] for episode in self._new]
        self._new = []
        self.last_100_returns.extend(returns)
        charts = {"charts/mean_return_100": self.mean_return_100}
        if returns:
            charts["charts/episodic_return"] = float(np.mean(returns))
            charts["charts/episodic_length"] = float(np.mean(lengths))
        return charts

    @property
    def mean_return_100(self) -> float:
        """Mean return of the last 100 episodes, NaN if none has finished."""
        return float(np.mean(self.last_100_returns)) if self.last_100_returns else float("nan")


def play_episodes(
    envs: gym.vector.VectorEnv[Any, Any, Any], act: Callable[[Any, dict[str, Any]], np.ndarray], seed: int
) -> list[float]:
    """Play one episode in each environment and close them. Returns the undiscounted returns.

    ``act(observations, infos)`` chooses the actions. Environments whose episode has ended keep running until all have.
    """
    obs, infos = envs.reset(seed=seed)
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    while playing.any():
        obs, rewards, terminations, truncations, infos = envs.step(act(obs, infos))
        returns += rewards * playing
        playing &= ~(terminations | truncations)
    envs.close()
    return [float(each) for each in returns]
