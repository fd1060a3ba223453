"""Vector environments: flat observations, action masks, episode statistics and evaluation episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor


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

    def state_dict(self) -> list[float]:
        """The last returns, for a checkpoint. Environments are reset there, so no episode is unfinished."""
        return list(self.last_100_returns)

    def load_state_dict(self, returns: list[float]) -> None:
        self.last_100_returns.extend(returns)

    @property
    def mean_return_100(self) -> float:
        """Mean return of the last 100 episodes, NaN if none has finished."""
        return float(np.mean(self.last_100_returns)) if self.last_100_returns else float("nan")


class Step(NamedTuple):
    """What one step of all environments returns: tensors on the CPU with one entry per environment."""

    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    """False where the step only reset the environment. Such a step is no experience."""
    final_obs: tuple[Tensor, Tensor]
    """Environments whose episode was truncated, and its last observations (on the device)."""


class VectorEnvs:
    """A vector environment as trainers see it: tensors, and the same behaviour for every autoreset mode.

    Observations are flat float32 vectors. Actions are counted from 0. When an episode ends, ``obs`` is the first
    observation of the next one, and ``Step.final_obs`` the last of the old one. With NEXT_STEP autoreset, ``obs`` is
    the last observation for one more step, which is not ``valid``. With DISABLED autoreset, this class resets.

    Args:
        envs: The vector environment. This class owns it and closes it.
        seed: Seed of the first reset.
        device: Device of observations and masks.
        episodes: Statistics that ended episodes are added to.
        flat: False keeps the shape and type of observations, for pixels.
        recorded: Episodes are those of Gymnasium's RecordEpisodeStatistics, not those between two ends.

    Attributes:
        obs: Observations (envs, features). A new tensor after each step.
        masks: Valid actions (envs, actions), or None if the environment has no ``action_mask``.
    """

    def __init__(
        self,
        envs: gym.vector.VectorEnv[Any, Any, Any],
        seed: int,
        device: torch.device | str = "cpu",
        episodes: EpisodeStatistics | None = None,
        flat: bool = True,
        recorded: bool = False,
    ) -> None:
        self.envs, self.num_envs, self.device = envs, envs.num_envs, device
        self._space, self._flat, self._recorded = envs.single_observation_space, flat, recorded
        self._mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._episodes = EpisodeStatistics(self.num_envs) if episodes is None else episodes
        self._episodes.restart()
        self._action_shape = envs.single_action_space.shape or ()
        # Discrete(3, start=5) has the actions 5, 6 and 7.
        self._first_action = getattr(envs.single_action_space, "start", 0)
        self._ended = np.zeros(self.num_envs, bool)
        self._all = np.ones(self.num_envs, bool)
        self.obs: Tensor
        self.masks: Tensor | None
        self._mask: np.ndarray | None = None
        self._observe(*envs.reset(seed=seed))
        self._no_obs = (torch.empty(0, dtype=torch.int64), self.obs[:0])

    def _observe(self, obs: Any, infos: dict[str, Any], only: np.ndarray | None = None) -> None:
        """Set ``obs`` and ``masks``, the latter for the environments ``only``."""
        mask = action_mask(obs, infos)
        if mask is not None and only is not None and self._mask is not None:
            mask = np.where(only[:, None], mask, self._mask)
        self._mask = mask
        self.obs, self.masks = self._tensor(obs), None if mask is None else torch.from_numpy(mask).to(self.device)

    def _tensor(self, obs: Any) -> Tensor:
        # A copy, because environments may write the next observations into the same memory.
        return torch.from_numpy(np.array(flatten(self._space, obs) if self._flat else obs)).to(self.device)

    def step(self, actions: Tensor) -> Step:
        """Step all environments."""
        valid = ~self._ended if self._mode == AutoresetMode.NEXT_STEP else self._all
        played = actions.cpu().numpy().reshape(self.num_envs, *self._action_shape) + self._first_action
        obs, rewards, terminated, truncated, infos = self.envs.step(played)
        self._ended = terminated | truncated
        self._observe(obs, infos)
        final_obs = self._final_obs(truncated, infos)
        if self._recorded:
            self._add_recorded(infos.get("final_info", infos))
        else:
            self._episodes.step(rewards, self._ended, valid)
        if self._mode == AutoresetMode.DISABLED and self._ended.any():
            self._observe(*self.envs.reset(options={"reset_mask": self._ended}), self._ended)
        flags = [torch.from_numpy(np.array(each)) for each in (terminated, truncated, valid)]
        return Step(torch.from_numpy(np.array(rewards, np.float32)), flags[0], flags[1], flags[2], final_obs)

    def _final_obs(self, truncated: np.ndarray, infos: dict[str, Any]) -> tuple[Tensor, Tensor]:
        cut = truncated.nonzero()[0]
        if not len(cut):
            return self._no_obs
        where = torch.from_numpy(cut)
        if self._mode != AutoresetMode.SAME_STEP:
            return where, self.obs[where]
        items = [infos["final_obs"][env] for env in cut]
        empty: Any = create_empty_array(self._space, len(cut))
        return where, self._tensor(concatenate(self._space, items, empty))

    def _add_recorded(self, infos: dict[str, Any]) -> None:
        if "episode" in infos:
            ended = infos["_episode"]
            self._episodes.add(infos["episode"]["r"][ended].tolist(), infos["episode"]["l"][ended].tolist())

    def close(self) -> None:
        self.envs.close()


def play_episodes(envs: VectorEnvs, act: Callable[[Tensor, Tensor | None], Tensor]) -> list[float]:
    """Play one episode in each environment and close them. Returns the undiscounted returns.

    ``act(obs, masks)`` chooses the actions. Environments whose episode has ended keep running until all have.
    """
    returns = torch.zeros(envs.num_envs, dtype=torch.float64)
    playing = torch.ones(envs.num_envs, dtype=torch.bool)
    with torch.inference_mode():
        while playing.any():
            step = envs.step(act(envs.obs, envs.masks))
            returns += step.rewards * playing
            playing &= ~(step.terminated | step.truncated)
    envs.close()
    found: list[float] = returns.tolist()
    return found


def play_and_record(
    play: Callable[[int, Path | None], list[float]], num_episodes: int, videos: Path | None
) -> list[float]:
    """Returns of an evaluation, none for 0 episodes. With ``videos``, another episode is recorded first.

    ``play(num_envs, videos)`` plays one episode in each environment, for example with :func:`play_episodes`.
    """
    if not num_episodes:
        return []
    if videos is not None:
        play(1, videos)
    return play(num_episodes, None)


ACTION_SPACES = {
    "discrete": (gym.spaces.Discrete, gym.spaces.MultiDiscrete),
    "continuous": (gym.spaces.Box,),
}  # fmt: skip


def make_vector_env(
    env_id: str,
    num_envs: int,
    actions: Literal["discrete", "continuous"],
    videos: Path | None = None,
    same_step: bool = False,
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Create the vectorised version of an environment if it is registered. Otherwise step copies one after another.

    Args:
        env_id: Gymnasium id. ``module:id`` imports the module first, which registers the environment.
        num_envs: Number of environments.
        actions: The actions that the trainer can handle. TypeError if the environment has others.
        videos: Record the first episode of each environment to this folder.
        same_step: Always reset in the step that ends an episode.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    spec = gym.spec(name)
    if spec.vector_entry_point is not None and videos is None and not same_step:
        envs = gym.make_vec(spec, num_envs=num_envs)
    else:
        options: dict[str, Any] = {}
        if videos is not None:
            options = {"render_mode": "rgb_array", "wrappers": [partial(record_video, folder=videos)]}
        # VectorEnvs copies the observations.
        kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, "copy": False}
        envs = gym.make_vec(spec, num_envs=num_envs, vectorization_mode="sync", vector_kwargs=kwargs, **options)
    if not isinstance(envs.single_action_space, ACTION_SPACES[actions]):
        expected = " or ".join(space.__name__ for space in ACTION_SPACES[actions])
        raise TypeError(f"{env_id} has action space {envs.single_action_space}: this trainer needs {expected}")
    return envs


def space_sizes(envs: gym.vector.VectorEnv[Any, Any, Any]) -> tuple[int, int | list[int]]:
    """Size of a flat observation, and the number of actions: a list for MultiDiscrete, components for Box. Closes."""
    space = envs.single_action_space
    envs.close()
    size = flat_size(envs.single_observation_space)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return size, space.nvec.tolist()
    return size, int(space.n) if isinstance(space, gym.spaces.Discrete) else int(np.prod(space.shape or ()))


def record_video(env: gym.Env[Any, Any], folder: Path) -> gym.Env[Any, Any]:
    """Record the first episode of an environment. Its render mode must be rgb_array."""
    return gym.wrappers.RecordVideo(env, str(folder), episode_trigger=lambda number: number == 0, disable_logger=True)
