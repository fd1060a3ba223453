"""Gymnasium API of many allocation environments in one simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from clustergym.common.choices import config_from
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.environment import EPISODE_INFO, INFO, TYPES, shorten, single_spaces
from clustergym.gpu_allocation.specs import AllocationConfig
from clustergym.gpu_allocation.state import SUM_STEPS, Flags, Floats


class GPUAllocationVectorEnv(gymnasium.vector.VectorEnv[Floats, Floats, npt.NDArray[Any]]):
    """`num_envs` copies of :class:`GPUAllocationEnv`: ``gymnasium.make_vec("GPUAllocation-v0", num_envs=N)``.

    Environment i of a vector environment with seed s equals a single environment with seed s + i. Returned arrays are
    never modified later.

    ``autoreset_mode`` is one of Gymnasium's. ``"SameStep"`` (default): at the end of an episode, the returned
    observation is the first one of the next episode, and ``info["final_obs"]`` and ``info["final_info"]`` hold the last
    ones of the old episode. ``"NextStep"``: the next step begins a new episode and ignores its action. ``"Disabled"``:
    call ``reset(options={"reset_mask": ended})``.

    Trainers and evaluations can use the simulator directly: ``self.batch`` (:class:`AllocationBatch`).
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
        **options: Any,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"render_mode is {render_mode!r}: only the single environment can draw pictures")
        self.render_mode = None
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = self.metadata | {"autoreset_mode": self.autoreset_mode}
        config = shorten(config_from(AllocationConfig, options), max_episode_steps, "max_episode_steps")
        self.batch = AllocationBatch(config, num_envs)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = single_spaces(self.batch.n_features)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._all = np.ones(num_envs, bool)
        self._all.setflags(write=False)
        self._seeded = False

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        where = (options or {}).get("reset_mask", self._all)
        if (
            not isinstance(where, np.ndarray)
            or where.shape != (self.num_envs,)
            or where.dtype != bool
            or not where.any()
        ):
            raise ValueError(
                f"reset_mask is {where!r}: expected a bool array ({self.num_envs},) with at least one True"
            )
        if isinstance(seed, list):
            self.batch.seed([int(self.np_random.integers(2**62)) if s is None else s for s in seed], where)
        elif seed is not None or not self._seeded:
            first = int(self.np_random.integers(2**62)) if seed is None else seed
            self.batch.seed(first + np.arange(self.num_envs), where)
        self._seeded = True
        return self.batch.reset(where).copy(), {}

    def step(
        self, actions: Floats
    ) -> tuple[Floats, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        over = self.batch.ended
        if over.any() and self.autoreset_mode != AutoresetMode.NEXT_STEP:
            raise gymnasium.error.ResetNeeded(
                "an episode is over and autoreset is disabled: call reset(options={'reset_mask': ended})"
            )
        running = ~over
        obs, rewards, ended = self.batch.step(actions, running)
        truncated, infos = ended & running, self._outcomes(running)
        if truncated.any():
            infos |= self._means(truncated)
        if over.any():
            rewards[over] = 0.0
            self.batch.reset(over)
        elif truncated.any() and self.autoreset_mode == AutoresetMode.SAME_STEP:
            last = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(truncated):
                last[i] = obs[i].copy()
            # The new episodes have no decision yet.
            infos = self._outcomes(~truncated) | {
                "final_obs": last,
                "_final_obs": truncated.copy(),
                "final_info": self._outcomes(truncated) | self._means(truncated),
                "_final_info": truncated.copy(),
            }
            self.batch.reset(truncated)
        return obs.copy(), rewards, np.zeros(self.num_envs, bool), truncated, infos

    def _outcomes(self, where: Flags) -> dict[str, Any]:
        """Results of the last decisions as arrays (B,), 0 elsewhere, each with Gymnasium's mask of who has it."""
        outcome = np.where(where[:, None], self.batch.outcome, 0.0)
        infos: dict[str, Any] = {}
        for name, column in INFO.items():
            infos[name] = outcome[:, column].astype(TYPES.get(name, np.float32))
            infos[f"_{name}"] = where
        return infos

    def _means(self, ended: Flags) -> dict[str, Any]:
        """Means over the episodes that have just ended."""
        sums = np.where(ended[:, None], self.batch.state.sums, 0.0)
        means = sums / np.maximum(sums[:, SUM_STEPS:], 1.0)
        return {name: means[:, column] for name, column in EPISODE_INFO.items()} | {
            f"_{name}": ended.copy() for name in EPISODE_INFO
        }

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays."""
        return self.batch.get_state()

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go back to a state of :meth:`get_state`: the environments continue bit for bit."""
        self.batch.set_state(state)
