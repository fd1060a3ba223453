"""Gymnasium API of many placement environments in one batch."""

from __future__ import annotations

import sys
from collections.abc import Collection
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from clustergym.common.choices import config_from
from clustergym.moe_placement.batch import REMOVED_ARGUMENTS, PlacementBatch, PlacementConfig
from clustergym.moe_placement.environment import (
    LAYER_KEY,
    STEP_INFO,
    ObsDict,
    episode_info,
    episode_steps,
    frame_of,
    noop_actions,
    observation_spaces,
    product_masks,
    step_info,
)
from clustergym.moe_placement.kernels.state import CLOCK_INTERVAL, CLOCK_LAYER, CLOCK_OPERATION
from clustergym.moe_placement.viewer import draw

Flags = npt.NDArray[np.bool_]
# Experts and nodes (num_envs,).
Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
# One piece of memory: the array that is returned, and the view of it that the kernels write.
Shared = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class _Recycled:
    """Arrays of one shape for observations. An array without other references is used again: new memory costs more
    than filling it."""

    def __init__(self, like: npt.NDArray[Any], read_only: bool) -> None:
        self.shape, self.dtype, self.read_only = like.shape, like.dtype, read_only
        self.all: list[Shared] = []

    def take(self) -> Shared:
        for shared in self.all:
            # References: the tuple, the view, and the argument. Any other view or tensor made of it would add one.
            if sys.getrefcount(shared[0]) == 3:
                return shared
        array = np.empty(self.shape, self.dtype)
        view = array[...]
        array.setflags(write=not self.read_only)
        self.all.append((array, view))
        return self.all[-1]


class MoEPlacementVectorEnv(gymnasium.vector.VectorEnv[Any, npt.NDArray[np.int64], npt.NDArray[Any]]):
    """Many copies of :class:`MoEPlacementEnv` in one batch: ``gymnasium.make_vec("MoEPlacement-v0", num_envs=N)``.

    Environment i, seeded with s + i, plays exactly what a single environment seeded with s + i plays. Returned arrays
    are never written again while anybody holds them.

    ``autoreset_mode`` is one of Gymnasium's. ``"NextStep"`` (default): the step after the end of an episode begins a
    new one and ignores its action. ``"SameStep"``: where an episode ends, the observation returned is the next
    episode's first, and ``info["final_obs"]`` and ``info["final_info"]`` hold the last of the old one; what ``info``
    says about an operation is always about the step that was made. ``"Disabled"``: call
    ``reset(options={"reset_mask": ended})``. ``max_episode_steps`` truncates episodes, as for a single environment.

    With a CUDA ``device``, environments step there, and what is returned is copied to NumPy arrays.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4, "autoreset_mode": AutoresetMode.NEXT_STEP}
    _spec: Any = None
    _returns_batch_obs = True

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        device: str = "cpu",
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"max_episode_steps is {max_episode_steps}: expected at least 1")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(
                f"unknown render_mode {render_mode!r}; the vectorised environment has None and 'rgb_array'"
            )
        self.render_mode, self.max_episode_steps = render_mode, max_episode_steps
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = self.metadata | {"autoreset_mode": self.autoreset_mode}
        self.batch = PlacementBatch(config_from(PlacementConfig, options, REMOVED_ARGUMENTS), num_envs, device)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = self._spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._make_recycled()
        self._step_keys = [name for name in self.batch.obs if name != LAYER_KEY]
        self._copies: ObsDict = {}
        self._steps = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, bool)
        self._seeded = False

    def _make_recycled(self) -> None:
        # On a GPU observations are copied to the host; here the kernels write into the arrays that are returned.
        on_host = self.batch.obs if self.batch.on_host and self._returns_batch_obs else {}
        self._recycled = {name: _Recycled(array, name == LAYER_KEY) for name, array in on_host.items()}
        self._current: dict[str, Shared] = {}

    @property
    def spec(self) -> Any:
        """Gymnasium's spec. Its ``max_episode_steps`` is the length of an episode with this environment's options."""
        return self._spec

    @spec.setter
    def spec(self, spec: Any) -> None:
        self._spec = deepcopy(spec)
        if spec is not None:
            self._spec.max_episode_steps = self.max_episode_steps or episode_steps(self.batch)

    # What an environment with other actions or observations changes

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """(observation space, action space) of one environment."""
        action = spaces.MultiDiscrete([self.batch.n_experts, 3 * self.batch.n_gpus])
        return spaces.Dict(observation_spaces(self.batch)), action

    def _operations(self, actions: npt.NDArray[np.int64]) -> Pairs:
        """Experts and nodes (num_envs,) that the actions stand for."""
        chosen = np.asarray(actions, np.int64)
        if chosen.shape != (self.num_envs, 2):
            raise ValueError(f"actions have shape {chosen.shape}: expected ({self.num_envs}, 2): expert, node")
        return chosen[:, 0], chosen[:, 1]

    def _mask_info(self) -> dict[str, Any]:
        """What ``info`` has about the next actions."""
        return {}

    def action_masks(self) -> Flags:
        """(num_envs, E + 3·G) what each component of an action may be; see :func:`product_masks`."""
        return product_masks(self.batch.host(self.batch.obs["action_mask"]))

    def noop_actions(self) -> npt.NDArray[np.int64]:
        """(num_envs, 2) actions that change nothing."""
        return noop_actions(self.batch)

    # Observations

    def _renew(self, names: Collection[str], keep: bool) -> None:
        """Let the next observation go to arrays without references; ``keep`` what the kernels need not write again."""
        fresh = {name: self._recycled[name].take() for name in names if name in self._recycled}
        for name, (_, view) in fresh.items():
            if keep:
                view[:] = self.batch.obs[name]
        self._current |= fresh
        self.batch.observe_into({name: view for name, (_, view) in fresh.items()})

    def _observe(self, layer_changed: bool) -> Any:
        if self._recycled:
            return {name: self._current[name][0] for name in self.batch.obs}
        names = [name for name in self.batch.obs if layer_changed or name != LAYER_KEY]
        self._copies |= {name: self.batch.host(self.batch.obs[name]) for name in names}
        self._copies[LAYER_KEY].setflags(write=False)
        return dict(self._copies)

    def _rows(self, where: Flags) -> list[Any]:
        """The observation of each environment where ``where`` is true."""
        arrays = {name: array[where] for name, array in self._observe(True).items()}
        return [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]

    def _final_observations(self, ended: Flags) -> npt.NDArray[Any]:
        """(num_envs,) the observation of each ended episode, None for the others."""
        final = np.full(self.num_envs, None, dtype=object)
        for i, row in zip(np.flatnonzero(ended), self._rows(ended), strict=True):
            final[i] = row
        return final

    # Episodes

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        where = self._where(options)
        self._seed(seed, where)
        self._renew(self.batch.obs, keep=not where.all())
        self._begin(where)
        return self._observe(True), self._mask_info()

    def _where(self, options: dict[str, Any] | None) -> Flags:
        """The environments to reset: all, or those of Gymnasium's option ``reset_mask``."""
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return np.ones(self.num_envs, bool)
        if not isinstance(mask, np.ndarray) or mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise ValueError(f"reset_mask is {mask!r}: expected a bool array ({self.num_envs},) with at least one True")
        return mask

    def _seed(self, seed: int | list[int | None] | None, where: Flags) -> None:
        if seed is None and self._seeded:
            return
        if isinstance(seed, list):
            seeds = np.array([self.np_random.integers(2**62) if s is None else s for s in seed], dtype=np.int64)
        else:
            seeds = np.arange(self.num_envs) + (int(self.np_random.integers(2**62)) if seed is None else seed)
        self._seeded = True
        self.batch.seed(seeds, where)

    def _begin(self, where: Flags) -> None:
        """Begin new episodes."""
        self.batch.reset(where)
        self._steps[where] = 0
        self._ended = self._ended & ~where

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        expert, node = self._operations(actions)
        again = self._ended.copy()
        any_again = bool(again.any())
        if any_again and self.autoreset_mode == AutoresetMode.DISABLED:
            raise gymnasium.error.ResetNeeded(
                "an episode is over and autoreset is disabled: call reset(options={'reset_mask': ended})"
            )
        changed = self._prepare(any_again)
        _, reward, done = self.batch.step(expert, node)
        self._steps += 1
        infos: dict[str, Any] = dict(step_info(self.batch))
        rewards, terminated = self.batch.host(reward).copy(), self.batch.host(done).copy()
        truncated = np.zeros(self.num_envs, bool)
        if self.max_episode_steps is not None:
            truncated = self._steps >= self.max_episode_steps
        infos |= {f"_{name}": ~again for name in STEP_INFO}
        if any_again:
            for array in (rewards, terminated, truncated, *(infos[name] for name in STEP_INFO)):
                array[again] = 0
            self._begin(again)
        ended = terminated | truncated
        if ended.any():
            changed = self._end(ended, terminated, infos, changed)
        return self._observe(changed), rewards, terminated, truncated, infos | self._mask_info()

    def _prepare(self, any_again: bool) -> bool:
        """Let the step write into new arrays. Returns whether what belongs to a layer changes."""
        clock = self.batch.host(self.batch.episode["clock"])
        goes_on = clock[:, CLOCK_OPERATION] == self.batch.config.ops_per_layer - 1
        if goes_on.any():
            # The last observation of an episode is about the layer that it ended on.
            goes_on &= (clock[:, CLOCK_LAYER] < self.batch.n_layers - 1) | (
                clock[:, CLOCK_INTERVAL] < self.batch.config.intervals - 1
            )
        changed = any_again or bool(goes_on.any())
        self._renew(self._step_keys, keep=False)
        if changed:
            self._renew([LAYER_KEY], keep=not goes_on.all())
        return changed

    def _end(self, ended: Flags, terminated: Flags, infos: dict[str, Any], changed: bool) -> bool:
        """Add what is known about ended episodes to ``infos``. Returns whether what belongs to a layer has changed."""
        results: dict[str, Any] = {}
        for name in STEP_INFO:
            results |= {name: infos[name].copy(), f"_{name}": ended.copy()}
        if terminated.any():
            for name, values in episode_info(self.batch).items():
                results |= {name: np.where(terminated, values, 0.0), f"_{name}": terminated.copy()}
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            self._ended = ended.copy()
            infos |= {name: value for name, value in results.items() if name.lstrip("_") not in STEP_INFO}
            return changed
        infos |= {"final_obs": self._final_observations(ended), "final_info": results}
        infos |= {"_final_obs": ended.copy(), "_final_info": ended.copy()}
        if not changed:
            self._renew([LAYER_KEY], keep=not ended.all())
        self._begin(ended)
        return True

    def get_state(self) -> dict[str, Any]:
        """Everything that changes. :meth:`set_state` continues from it bit for bit."""
        return self.batch.get_state() | {"steps": self._steps.copy(), "ended": self._ended.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state of :meth:`get_state`. Arrays that were returned before stay as they are."""
        self._renew(self.batch.obs, keep=False)
        self.batch.set_state({name: array for name, array in state.items() if name not in ("steps", "ended")})
        self._steps, self._ended = state["steps"].copy(), state["ended"].copy()
        self._seeded = True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_recycled", "_current")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_recycled()
        self._renew(self.batch.obs, keep=True)

    def render(self) -> tuple[npt.NDArray[np.uint8], ...] | None:
        """A picture of each environment."""
        if self.render_mode is None:
            return None
        return tuple(draw(frame_of(self.batch, [], i)) for i in range(self.num_envs))
