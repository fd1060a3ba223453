"""The placement task with one discrete action: a choice among candidate operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clustergym.moe_placement.batch import PlacementBatch
from clustergym.moe_placement.environment import MoEPlacementEnv, observation_bounds
from clustergym.moe_placement.kernels.candidates import CANDIDATE_FEATURES, COMPACT_GPU_FEATURES
from clustergym.moe_placement.kernels.lookahead import MOST_PERCENT
from clustergym.moe_placement.vector import Flags, MoEPlacementVectorEnv, Pairs

CANDIDATES = 32
"""Candidates that an environment proposes, if it is not told."""


def _space(batch: PlacementBatch) -> spaces.Box:
    """The observation space: features of candidates, of GPUs, and the context, one after another."""
    n_experts, n_gpus = float(batch.n_experts), float(batch.n_gpus)
    percent, load = (-MOST_PERCENT, MOST_PERCENT), (0.0, n_gpus)
    candidate = dict.fromkeys(CANDIDATE_FEATURES, (0.0, 1.0)) | {
        "saved": percent, "saved_smooth": percent, "migration": percent, "expert_load": (0.0, n_experts),
        "load_change": (-n_experts, n_experts), "source_load": load, "target_load": load,
    }  # fmt: skip
    gpu = dict.fromkeys(COMPACT_GPU_FEATURES, (0.0, 1.0)) | {"load": load}
    context = list(zip(*observation_bounds(batch)["context"], strict=True))
    columns = [*candidate.values()] * batch.config.candidates + [*gpu.values()] * batch.n_gpus + context
    low, high = np.array(columns, np.float32).T
    return spaces.Box(low.copy(), high.copy(), low.shape)


class MoEPlacementFlatEnv(MoEPlacementEnv):
    """
    ## Description
    The task of :class:`MoEPlacementEnv` with an action and an observation that any agent can use. At every step the
    environment proposes `candidates` operations, chosen by a cheap estimate: half of them on the experts of the GPU
    with the slowest kernel and of the GPU with most traffic, the others for other experts, at most one per replica.
    Only these are tried, exactly, on the observed interval.

    ## Action Space
    `Discrete(candidates + 1)`: 0 changes nothing, i applies the i-th candidate. Candidates are in the order of expert
    and node, which says nothing about their worth.

    The mask is exact and is in `info["action_mask"]` (int8, as Gymnasium's `sample` takes it) and `action_masks()`
    (bool, as sb3-contrib wants it). It leaves out candidates that do not exist. Choosing one does nothing, counts in
    `info["illegal_actions"]`, and costs `illegal_penalty`.

    ## Observation Space
    `Box(11·candidates + 6·G + 6)`, one after another:

    * of each candidate: whether it exists; what it saves on the observed interval, migration included, in percent of
      the layer's time; the same in the smooth 8-norm over GPUs without migration; migration (negative, percent); is an
      ADD; is a DELETE; stays on the node; load of the expert / mean; its change; load / mean of the GPU that it leaves
      and of the one that it goes to
    * of each GPU: load / mean, compute time, free slots, traffic inside the node and between nodes, replicas to receive
    * `context` of :class:`MoEPlacementEnv`

    With 32 candidates and 16 GPUs these are 454 numbers.

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

    def __init__(self, render_mode: str | None = None, candidates: int = CANDIDATES, **options: Any) -> None:
        _check(candidates)
        super().__init__(render_mode, candidates=candidates, **options)

    def _look(self) -> None:
        super()._look()
        self._proposed = {name: array[0] for name, array in self.batch.candidates.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_proposed"}

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return _space(self.batch), spaces.Discrete(self.batch.config.candidates + 1)

    def _observe(self) -> Any:
        return self._proposed["compact"].copy()

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

    _returns_batch_obs = False

    def __init__(self, num_envs: int = 1, *, candidates: int = CANDIDATES, **options: Any) -> None:
        _check(candidates)
        super().__init__(num_envs, candidates=candidates, **options)

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return _space(self.batch), spaces.Discrete(self.batch.config.candidates + 1)

    def _observe(self, layer_changed: bool) -> Any:
        return self.batch.host(self.batch.candidates["compact"]).copy()

    def _rows(self, where: Flags) -> list[Any]:
        return list(self._observe(True)[where])

    def _operations(self, actions: npt.NDArray[np.int64]) -> Pairs:
        choice = np.asarray(actions, dtype=np.int64)
        if choice.shape != (self.num_envs,):
            raise ValueError(f"actions have shape {choice.shape}: expected ({self.num_envs},)")
        return self.batch.operations(choice)

    def noop_actions(self) -> npt.NDArray[np.int64]:
        """(num_envs,) actions that change nothing."""
        return np.zeros(self.num_envs, np.int64)

    def _mask_info(self) -> dict[str, Any]:
        mask = self.batch.host(self.batch.candidates["mask"]).copy()
        return {"action_mask": mask, "_action_mask": np.ones(self.num_envs, bool)}

    def action_masks(self) -> Flags:
        """(num_envs, candidates + 1) exact: the choices that exist."""
        mask: Flags = self.batch.host(self.batch.candidates["mask"]).astype(bool)
        return mask


def _check(candidates: int) -> None:
    if candidates < 1:
        raise ValueError(f"candidates is {candidates}: expected at least 1")
