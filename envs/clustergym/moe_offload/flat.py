"""The offloading task with one number per action: for libraries that know ``Discrete`` actions and their masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clustergym.moe_offload.batch import ObsDict, OffloadBatch
from clustergym.moe_offload.environment import LIMIT, MoEOffloadEnv
from clustergym.moe_offload.vector import MoEOffloadVectorEnv

PARTS = ("experts", "gpus", "pairs", "context")
"""Arrays of the full observation that are in the vector, one after another."""


def flat_spaces(batch: OffloadBatch) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """(observation space, action space) of one environment."""
    size = sum(int(np.prod(batch.shapes[name])) for name in PARTS)
    return spaces.Box(-LIMIT, LIMIT, (size,), np.float32), spaces.Discrete(batch.n_rows * batch.n_nodes)


def flatten(arrays: ObsDict) -> npt.NDArray[np.float32]:
    """(N, features) the observation as vectors."""
    return np.concatenate([arrays[name].reshape(len(arrays[name]), -1) for name in PARTS], axis=1)


class MoEOffloadFlatEnv(MoEOffloadEnv):
    """
    :class:`MoEOffloadEnv` for agents with one number per action.

    ## Action Space
    `Discrete(R·3·G)`: row · 3·G + node. The mask is exact and is in `info["action_mask"]` (int8, as Gymnasium's
    `sample` takes it) and `action_masks()` (bool, as sb3-contrib wants it).

    ## Observation Space
    `Box`: `experts`, `gpus`, `pairs` and `context` of :class:`MoEOffloadEnv` in one vector.

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:MoEOffloadFlat-v0", max_tokens=4)
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample(info["action_mask"]))

    ```
    """

    _mask: npt.NDArray[np.int8]

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return flat_spaces(self.batch)

    def _observe(self) -> Any:
        arrays = self.batch.observe()
        self._mask = arrays["action_mask"][0].reshape(-1)
        return flatten(arrays)[0]

    def _pair(self, action: Any) -> tuple[int, int]:
        return divmod(int(action), self.batch.n_nodes)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"action_mask": self._mask}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, info | {"action_mask": self._mask}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(R·3·G,) legal actions."""
        return super().action_masks().reshape(-1)


class MoEOffloadFlatVectorEnv(MoEOffloadVectorEnv):
    """Many copies of :class:`MoEOffloadFlatEnv` in one batch; otherwise as :class:`MoEOffloadVectorEnv`."""

    _mask: npt.NDArray[np.int8]

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return flat_spaces(self.batch)

    def _observe(self) -> Any:
        arrays = self.batch.observe()
        self._mask = arrays["action_mask"].reshape(self.num_envs, -1)
        return flatten(arrays)

    def _of(self, observation: Any, i: int) -> Any:
        return observation[i].copy()

    def _pairs(self, actions: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        chosen = np.asarray(actions, np.int64)
        if chosen.shape != (self.num_envs,):
            raise ValueError(f"actions have shape {chosen.shape}: expected ({self.num_envs},)")
        return chosen // self.batch.n_nodes, chosen % self.batch.n_nodes

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, infos = super().reset(seed=seed, options=options)
        return observation, infos | {"action_mask": self._mask, "_action_mask": self._present}

    def step(self, actions: Any) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        observation, rewards, terminated, truncated, infos = super().step(actions)
        infos |= {"action_mask": self._mask, "_action_mask": self._present}
        return observation, rewards, terminated, truncated, infos

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(num_envs, R·3·G) legal actions."""
        return super().action_masks().reshape(self.num_envs, -1)
