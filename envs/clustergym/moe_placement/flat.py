"""The placement task with one discrete action: a choice among a few candidate operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces

from clustergym.moe_placement.environment import MoEPlacementEnv, ObsDict, compact_space, observation_spaces
from clustergym.moe_placement.kernels.candidates import N_CANDIDATE_FEATURES
from clustergym.moe_placement.vector import MoEPlacementVectorEnv

CANDIDATES = 8
"""Candidates that an environment proposes, if it is not told."""


class MoEPlacementFlatEnv(MoEPlacementEnv):
    """
    ## Description
    The task of :class:`MoEPlacementEnv` with an action and an observation that any agent can use. At every step the
    environment proposes `candidates` operations: those on experts of the GPU with the slowest kernel and of the GPU
    with most traffic that promise most by a cheap estimate. Only these are tried, exactly, on the observed interval.

    ## Action Space
    `Discrete(candidates + 1)`: 0 changes nothing, i applies the i-th candidate. Candidates are in the order of the time
    that they would save on the OBSERVED interval, best first. The rewards are for the next interval.

    The mask is exact and is in `info["action_mask"]` (int8, as Gymnasium's `sample` takes it) and `action_masks()`
    (bool, as sb3-contrib wants it). It leaves out candidates that do not exist. Choosing one does nothing, counts in
    `info["illegal_actions"]`, and costs `illegal_penalty` (default 0).

    ## Observation Space
    `Box(11·candidates + 6·G + 6)`, one after another:

    * of each candidate: whether it exists; what it saves on the observed interval, migration included, in percent of
      the layer's time; the same in the smooth 8-norm over GPUs without migration; migration (negative, percent); is an
      ADD; is a DELETE; stays on the node; load of the expert / mean; its change; load / mean of the GPU that it leaves
      and of the one that it goes to
    * of each GPU: load / mean, compute time, free slots, traffic inside the node and between nodes, replicas to receive
    * `progress` of :class:`MoEPlacementEnv`

    With 8 candidates and 16 GPUs these are 190 numbers. `observation="full"` is the `Dict` of :class:`MoEPlacementEnv`
    with two more keys, `candidates` (candidates, 11) and `action_mask` (candidates + 1,).

    ## Rewards, Starting State, Episode End
    As :class:`MoEPlacementEnv`.

    ## Arguments
    `candidates`, and those of :class:`MoEPlacementEnv`.

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:MoEPlacementFlat-v0")
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample(info["action_mask"]))

    ```

    ## Version History
    * v0: initial version
    """

    def __init__(
        self,
        render_mode: str | None = None,
        observation: str = "compact",
        illegal_penalty: float = 0.0,
        candidates: int = CANDIDATES,
        **options: Any,
    ) -> None:
        _check(candidates)
        super().__init__(render_mode, observation, illegal_penalty, candidates=candidates, **options)

    def _look(self) -> None:
        super()._look()
        self._proposed = {name: tensor[0].numpy() for name, tensor in self.batch.candidates.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_proposed"}

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        n, full = self.batch.config.candidates, observation_spaces(self.batch)
        observation = compact_space(self._proposed["compact"].size) if self._compact else _full_space(full, n)
        return observation, spaces.Discrete(n + 1)

    def _observe(self) -> Any:
        if self._compact:
            return self._proposed["compact"].copy()
        return super()._observe() | _more(self._proposed["compact"], self._proposed["mask"])

    def _operation(self, action: Any) -> tuple[int, int]:
        choice, operations = int(action), self._proposed["operations"]
        expert, node = operations[choice].tolist() if 0 <= choice < len(operations) else (-1, -1)
        return expert, node

    def noop_action(self) -> Any:
        """The action that changes nothing."""
        return np.int64(0)

    def _mask_info(self) -> dict[str, Any]:
        return {"action_mask": self._proposed["mask"].copy()}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(candidates + 1,) exact: the choices that exist."""
        mask: npt.NDArray[np.bool_] = self._proposed["mask"].astype(bool)
        return mask


class MoEPlacementFlatVectorEnv(MoEPlacementVectorEnv):
    """Many copies of :class:`MoEPlacementFlatEnv` in one batch; otherwise as :class:`MoEPlacementVectorEnv`."""

    def __init__(
        self, num_envs: int = 1, *, observation: str = "compact", candidates: int = CANDIDATES, **options: Any
    ) -> None:
        _check(candidates)
        super().__init__(num_envs, observation=observation, candidates=candidates, **options)

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        n, full = self.batch.config.candidates, observation_spaces(self.batch)
        observation = compact_space(self._compact_array().shape[1]) if self._compact else _full_space(full, n)
        return observation, spaces.Discrete(n + 1)

    def _compact_array(self) -> npt.NDArray[np.float32]:
        compact: npt.NDArray[np.float32] = self.batch.candidates["compact"].cpu().numpy().copy()
        return compact

    def _more_observations(self) -> ObsDict:
        return _more(self._compact_array(), self.batch.candidates["mask"].cpu().numpy())

    def _operations(self, actions: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        choice = torch.as_tensor(np.asarray(actions, dtype=np.int64), device=self.batch.device)
        if choice.shape != (self.num_envs,):
            raise ValueError(f"actions have shape {tuple(choice.shape)}: expected ({self.num_envs},)")
        return self.batch.operations(choice)

    def noop_actions(self) -> npt.NDArray[np.int64]:
        """(num_envs,) actions that change nothing."""
        return np.zeros(self.num_envs, np.int64)

    def _mask_info(self) -> dict[str, Any]:
        mask = self.batch.candidates["mask"].cpu().numpy().copy()
        return {"action_mask": mask, "_action_mask": np.ones(self.num_envs, bool)}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(num_envs, candidates + 1) exact: the choices that exist."""
        mask: npt.NDArray[np.bool_] = self.batch.candidates["mask"].cpu().numpy().astype(bool)
        return mask


def _check(candidates: int) -> None:
    if candidates < 1:
        raise ValueError(f"candidates is {candidates}: expected at least 1")


def _full_space(full: dict[str, spaces.Space[Any]], candidates: int) -> spaces.Dict:
    features = compact_space(N_CANDIDATE_FEATURES * candidates)
    more: dict[str, spaces.Space[Any]] = {
        "candidates": spaces.Box(features.low.reshape(candidates, -1), features.high.reshape(candidates, -1)),
        "action_mask": spaces.Box(0, 1, (candidates + 1,), np.int8),
    }
    return spaces.Dict(full | more)


def _more(compact: npt.NDArray[np.float32], mask: npt.NDArray[np.int8]) -> ObsDict:
    """What the full observation has besides that of :class:`MoEPlacementEnv`."""
    n = mask.shape[-1] - 1
    features = compact[..., : n * N_CANDIDATE_FEATURES].reshape(*compact.shape[:-1], n, N_CANDIDATE_FEATURES)
    return {"candidates": features.copy(), "action_mask": mask.copy()}
