"""Gymnasium API of many offloading environments in one simulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from clustergym.common.choices import config_from
from clustergym.moe_offload.batch import Flags, OffloadBatch
from clustergym.moe_offload.environment import copied, observation_space, pair_space
from clustergym.moe_offload.specs import OffloadConfig


class MoEOffloadVectorEnv(gymnasium.vector.VectorEnv[Any, npt.NDArray[np.int64], npt.NDArray[Any]]):
    """`num_envs` copies of :class:`MoEOffloadEnv`: ``gymnasium.make_vec("MoEOffload-v0", num_envs=N)``.

    Environment i of a vector environment with seed s equals a single environment with seed s + i. Returned arrays are
    not written again while anybody holds them.

    ``autoreset_mode`` is one of Gymnasium's: ``"NextStep"`` (default): the step after an episode's end begins a new
    episode and ignores its action. ``"SameStep"``: the observation returned at an episode's end is the next one's
    first; ``info["final_obs"]`` and ``info["final_info"]`` hold the last observation and the sums of the old one.
    ``"Disabled"``: call ``reset(options={"reset_mask": ended})``. ``options={"group": …}`` chooses sequences.

    With ``device="cuda"`` the environments run on a GPU, and ``batch.tensors`` has the last observation there.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"render_mode is {render_mode!r}: only the single environment can draw pictures")
        self.render_mode = None
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = self.metadata | {"autoreset_mode": self.autoreset_mode}
        self.batch = OffloadBatch(config_from(OffloadConfig, options), num_envs, device)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = self._spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._present = np.ones(num_envs, bool)
        self._present.setflags(write=False)
        self._seeded = False

    # What the flat form changes

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return observation_space(self.batch), pair_space(self.batch)

    def _observe(self) -> Any:
        return self.batch.observe()

    def _of(self, observation: Any, i: int) -> Any:
        """The observation of environment i."""
        return copied({name: array[i] for name, array in observation.items()})

    def _pairs(self, actions: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        chosen = np.asarray(actions, np.int64)
        if chosen.shape != (self.num_envs, 2):
            raise ValueError(f"actions have shape {chosen.shape}: expected ({self.num_envs}, 2): row, node")
        return np.ascontiguousarray(chosen[:, 0]), np.ascontiguousarray(chosen[:, 1])

    # Episodes

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        where = (options or {}).get("reset_mask", self._present)
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
            seeds = np.array([self.np_random.integers(2**62) if s is None else s for s in seed], np.int64)
            self.batch.seed(seeds, where)
        elif seed is not None or not self._seeded:
            first = int(self.np_random.integers(2**62)) if seed is None else seed
            self.batch.seed(first + np.arange(self.num_envs), where)
        self._seeded = True
        self.batch.reset(where, (options or {}).get("group"))
        return self._observe(), self._with_keys(self.batch.totals())

    def step(self, actions: Any) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        rows, nodes = self._pairs(actions)
        again = self.batch.ended.copy()
        if again.any() and self.autoreset_mode != AutoresetMode.NEXT_STEP:
            raise gymnasium.error.ResetNeeded(
                "an episode is over and autoreset is disabled: call reset(options={'reset_mask': ended})"
            )
        running = ~again
        rewards, ended = self.batch.step(rows, nodes, running)
        infos = self.batch.step_info(running)
        if again.any():
            self.batch.reset(again)
        if ended.any() and self.autoreset_mode == AutoresetMode.SAME_STEP:
            infos |= self._finish(ended)
        infos = self._with_keys(infos | self.batch.totals())
        return self._observe(), rewards, ended, np.zeros(self.num_envs, bool), infos

    def _with_keys(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Gymnasium's masks: every environment has every entry."""
        masks = {f"_{name}": self._present for name, value in infos.items() if isinstance(value, np.ndarray)}
        return masks | infos

    def _finish(self, ended: Flags) -> dict[str, Any]:
        """Keep the last observation and the sums of ended episodes, and begin new ones."""
        last, totals = self._observe(), self.batch.totals()
        final = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(ended).tolist():
            final[i] = self._of(last, i)
        sums: dict[str, Any] = {}
        for name, values in totals.items():
            sums |= {name: np.where(ended, values, 0).astype(values.dtype), f"_{name}": ended.copy()}
        self.batch.reset(ended)
        return {"final_obs": final, "_final_obs": ended.copy(), "final_info": sums, "_final_info": ended.copy()}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(num_envs, R, 3·G) legal pairs."""
        mask: npt.NDArray[np.bool_] = self.batch.observe()["action_mask"].astype(bool)
        return mask

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays."""
        return self.batch.get_state()

    def set_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Go back to a state of :meth:`get_state`: the environments continue bit for bit."""
        self.batch.set_state(state)
