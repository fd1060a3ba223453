"""Gymnasium API of the allocation task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from clustergym.common.choices import config_from
from clustergym.gpu_allocation import state
from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.state import Doubles, Floats

# Entries of `info`: name and column of the outcome.
INFO = {
    "efficiency": state.OUTCOME_EFFICIENCY,
    "qos": state.OUTCOME_QOS,
    "monopoly": state.OUTCOME_MONOPOLY,
    "under_allocation": state.OUTCOME_UNDER_ALLOCATION,
    "room": state.OUTCOME_ROOM,
    "allocated_cores": state.OUTCOME_CORES,
    "allocated_memory_mb": state.OUTCOME_MEMORY,
    "actual_usage": state.OUTCOME_USAGE,
    "qos_met": state.OUTCOME_MET,
    "oom": state.OUTCOME_OOM,
    "running_pods": state.OUTCOME_PODS,
    "latency_ms": state.OUTCOME_LATENCY,
    "wait_s": state.OUTCOME_WAIT,
    "time_s": state.OUTCOME_TIME,
}
FLAGS = ("qos_met", "oom")
# Entries of `info` at the end of an episode: name and column of the sums.
EPISODE_INFO = {
    "mean_reward": state.SUM_REWARD,
    "mean_qos": state.SUM_MET,
    "mean_efficiency": state.SUM_EFFICIENCY,
    "mean_oom": state.SUM_OOM,
    "mean_monopoly": state.SUM_MONOPOLY,
    "mean_wait_s": state.SUM_WAIT,
    "mean_room": state.SUM_ROOM,
}


def shorten(config: AllocationConfig, steps: int | None, name: str) -> AllocationConfig:
    """The configuration with episodes of at most ``steps`` decisions. Episodes only end because of their length."""
    if steps is None:
        return config
    if steps < 1:
        raise ValueError(f"{name} is {steps}: expected at least 1")
    return replace(config, arrivals=min(config.arrivals, steps))


def single_spaces(n_features: int) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """(observation space, action space) of one environment."""
    return spaces.Box(0.0, 1.0, (n_features,), np.float32), spaces.Box(0.0, 1.0, (2,), np.float32)


def outcome_info(outcome: Floats) -> dict[str, Any]:
    """The result of one decision as plain numbers."""
    values = outcome.tolist()
    info: dict[str, Any] = {name: values[column] for name, column in INFO.items()}
    for name in FLAGS:
        info[name] = info[name] > 0.5
    info["running_pods"] = int(info["running_pods"])
    return info


def episode_info(sums: Doubles) -> dict[str, Any]:
    """Means over finished episodes, from their sums (..., 8)."""
    steps = sums[..., state.SUM_STEPS]
    return {name: sums[..., column] / steps for name, column in EPISODE_INFO.items()}


class Copying:
    """States and copies of environments: arrays that share memory with the batch are made again."""

    batch: AllocationBatch
    _obs: Floats
    _outcome: Floats

    def _look(self) -> None:
        self._obs, self._outcome = self.batch.obs.numpy(), self.batch.outcome.numpy()

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays."""
        return {name: tensor.numpy() for name, tensor in self.batch.state_dict().items()}

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self.batch.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})

    def __getstate__(self) -> dict[str, Any]:
        # A window stays with the original.
        return {name: value for name, value in self.__dict__.items() if name not in ("_obs", "_outcome", "_window")}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__dict__.update(content)
        self._look()


class Rendering:
    """Pictures of environment 0, for the Gymnasium and the PettingZoo environment."""

    batch: AllocationBatch
    render_mode: str | None = None
    _recorder: Any = None
    _window: Any = None

    def _choose_render_mode(self, render_mode: str | None) -> None:
        if render_mode not in (None, "human", "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; expected None, 'human' or 'rgb_array'")
        if render_mode is not None:
            import clustergym.gpu_allocation.viewer  # noqa: F401  raises an error now if pygame is missing
        self.render_mode = render_mode

    def _start_recording(self) -> None:
        if self.render_mode is not None:
            from clustergym.gpu_allocation.viewer import Recorder

            self._recorder = Recorder(self.batch)
            self._show()

    def _step(self, action: Floats) -> bool:
        """Step the batch without autoreset and record the step. Returns whether the episodes ended."""
        if self._recorder is None:
            self.batch.step(action, autoreset=False)
        else:
            before = self._recorder.before()
            self.batch.step(action, autoreset=False)
            self._recorder.after(before)
            self._show()
        return bool(self.batch.ended[0])

    def _show(self) -> None:
        if self.render_mode == "human":
            self.render()

    def render(self) -> npt.NDArray[np.uint8] | None:
        if self.render_mode is None:
            gymnasium.logger.warn(
                "render() does nothing without a render_mode: make the environment with render_mode='rgb_array'"
            )
            return None
        from clustergym.gpu_allocation.viewer import draw, open_window

        snapshots = [] if self._recorder is None else self._recorder.snapshots
        if self.render_mode == "rgb_array":
            return draw(snapshots)
        if self._window is None:
            self._window = open_window()
        self._window.show(snapshots)
        return None

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None


class GPUAllocationEnv(Copying, Rendering, gymnasium.Env[Floats, Floats]):
    """
    ## Description
    An edge node has one GPU (a V100 with 32 GB, shared through MPS). Pods that serve a neural network arrive one after
    another. Each requests a share of the SMs and some memory, usually more than it needs, as real users do. For each
    pod the agent decides how much it gets. Too much is wasted and keeps the next pods waiting. With too few cores, the
    pod misses its objective; with too little memory, it is killed.

    A pod runs one of four networks at a rate of requests that is hidden from the agent. Its latency depends on its
    share, its batch size, the cache and power that its neighbours use, and the scheduling delay (fits of a public V100
    profile: see `clustergym.gpu_allocation.specs`). A pod keeps its resources until its life is over. It arrives at the
    node when its request fits into the free resources.

    Requests, lives and classes are those of a public trace, and so is the part of a request that is used: it differs
    much between owners, less between the pods of an owner, and a third of the pods never use the GPU
    (`clustergym.gpu_allocation.fitted`). So the earlier pods of an owner tell something about the next one. They come
    in three sizes.

    `GPUAllocation-v0` shows five numbers. `GPUAllocationHistory-v0` adds what the owner's earlier pods used and needed.

    ## Action Space
    `Box(0, 1, (2,))`: cores = a₀ · 90 + 10 (%), memory = a₁ · 32256 + 512 (MB). Cores are rounded to `unit_percent`,
    memory to whole MB, and both are limited to the request. Finite values outside 0 … 1 are clipped; NaN and infinity
    raise an error.

    ## Observation Space
    `Box(0, 1, (5,))`, or `(19,)` with `history=True`. Indices 5 and higher describe the earlier pods of the owner,
    except for 11:

    | index | content |
    | --- | --- |
    | 0, 1 | requested cores / 100, requested memory / 32768 MB |
    | 2, 3 | GPU utilisation, memory used / total |
    | 4 | running pods / 10 |
    | 5 | n / (n + 4) for n earlier pods |
    | 6, 7 | part of the requested cores that they needed to meet the objective: running mean, mean deviation |
    | 8, 9, 10 | rate of missed objectives (running mean), whether the last pod missed it, rate of OOM kills |
    | 11 | whether the waiting pod is latency-sensitive |
    | 12, 13, 14 | cores / 100 that this pod needs if it is like them: mean, largest (fades slowly), last |
    | 15 | cores / 100 that this pod gets with the last pod's allocated part of the request |
    | 16, 17 | the same with the largest part that missed and the smallest that met the objective (both fade slowly) |
    | 18 | memory / 32768 MB that this pod uses if it uses the largest part of its request that they used |

    ## Rewards
    The sum of five terms, each also in `info`:

    * efficiency: `0.5 · usage / allocation`
    * QoS: +1 if the pod meets its objective, −0.5 if not
    * monopoly: −0.3 if the pod gets more than 1.5 times the fair share 100 / pods, this pod included
    * under-allocation: −0.2 below 10 %
    * room: `−0.5 · wait / (wait + 440 s)`, where `wait` is how long the next pod waits until its request fits

    With `reward="seed"`, the last term is left out, and the fair share is that of the pods that the state shows, as in
    `compute_reward`. Then memory only matters if there is too little of it, and a decision has hardly any effect on
    later rewards.

    A pod meets its objective if it keeps up with its requests, has enough memory and, if it is latency-sensitive, its
    latency is at most half its SLO. A pod with too little memory is killed at once, without any usage. The pod is
    measured once, together with the pods that run when it starts.

    ## Starting State
    An empty GPU, owners without history, and the first pod waiting.

    ## Episode End
    The episode is truncated after `arrivals` decisions. The node would run on, so bootstrap from the last observation.
    `info` then has the means over the episode: `mean_reward`, `mean_qos`, `mean_efficiency`, `mean_oom`,
    `mean_monopoly`, `mean_wait_s` and `mean_room`.

    ## Arguments
    The fields of `clustergym.gpu_allocation.AllocationConfig`: `history`, `arrivals`, `load`, `owners`, `workload`,
    `unit_percent`, `reward`, `node_spread`, `owner_spread`, `pod_spread`, `idle_share`, `mix`; and `render_mode`
    (`"rgb_array"`, `"human"`).

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:GPUAllocation-v0", load=2.0)
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
    >>> terms = ("efficiency", "qos", "monopoly", "under_allocation", "room")
    >>> abs(reward - sum(info[term] for term in terms)) < 1e-6
    True

    ```

    ## Version History
    * v0: initial version
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._choose_render_mode(render_mode)
        self.batch = AllocationBatch(config_from(AllocationConfig, options), 1)
        self.observation_space, self.action_space = single_spaces(self.batch.n_features)
        self._look()
        self._seeded = False

    def _look(self) -> None:
        self._obs, self._outcome = self.batch.obs.numpy()[0], self.batch.outcome.numpy()[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self.batch.seed(np.array([self.np_random.integers(2**62) if seed is None else seed], dtype=np.int64))
            self._seeded = True
        self.batch.reset()
        self._start_recording()
        return self._obs.copy(), {}

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        done = self._step(np.asarray(action, np.float32)[None])
        info = outcome_info(self._outcome)
        if done:
            sums = self.batch.final_sums.numpy()[0]
            info |= {name: float(value) for name, value in episode_info(sums).items()}
        return self._obs.copy(), float(self.batch.reward[0]), False, done, info


class GPUAllocationVectorEnv(Copying, gymnasium.vector.VectorEnv[Floats, Floats, npt.NDArray[Any]]):
    """`num_envs` copies of :class:`GPUAllocationEnv` in one simulator.

    Make it with ``gymnasium.make_vec("GPUAllocation-v0", num_envs=N)``. Environment i of a vector environment with seed
    s equals a single environment with seed s + i. Returned arrays are never modified later.

    ``autoreset_mode`` is one of Gymnasium's. ``"SameStep"`` (default): at the end of an episode, the returned
    observation is the first one of the next episode, and ``info["final_obs"]`` and ``info["final_info"]`` hold the last
    ones of the old episode. ``"NextStep"``: the next step begins a new episode and ignores its action. ``"Disabled"``:
    call ``reset(options={"reset_mask": ended})``.

    Trainers can use the tensors of ``self.batch`` (:class:`AllocationBatch`) directly.
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
        self.batch = AllocationBatch(
            shorten(config_from(AllocationConfig, options), max_episode_steps, "max_episode_steps"), num_envs
        )
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = single_spaces(self.batch.n_features)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._look()
        self._all_true = np.ones(num_envs, bool)
        self._all_true.setflags(write=False)
        self._ended = np.zeros(num_envs, bool)
        self._seeded = False

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        where = (options or {}).get("reset_mask", self._all_true)
        if (
            not isinstance(where, np.ndarray)
            or where.shape != (self.num_envs,)
            or where.dtype != bool
            or not where.any()
        ):
            raise ValueError(
                f"reset_mask is {where!r}: expected a bool array ({self.num_envs},) with at least one True"
            )
        keys = self.batch.state["random"].clone()
        if isinstance(seed, list):
            seeds = [int(self.np_random.integers(2**62)) if s is None else s for s in seed]
            self.batch.seed(np.array(seeds, dtype=np.int64))
        elif seed is not None or not self._seeded:
            first = int(self.np_random.integers(2**62)) if seed is None else seed
            self.batch.seed(first + np.arange(self.num_envs))
        others = torch.from_numpy(~where)
        self.batch.state["random"][others] = keys[others]
        self._seeded = True
        self.batch.reset(~others)
        self._ended &= ~where
        return self._obs.copy(), {}

    def step(
        self, actions: Floats
    ) -> tuple[Floats, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            return self._step_without_reset(actions)
        _, reward, ended = self.batch.step(actions)
        truncated = ended.numpy().copy()
        infos = self._infos()
        if truncated.any():
            infos = self._finish(truncated, infos)
        return self._obs.copy(), reward.numpy().copy(), np.zeros(self.num_envs, bool), truncated, infos

    def _step_without_reset(
        self, actions: Floats
    ) -> tuple[Floats, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """A step with NEXT_STEP or DISABLED. Where an episode was over before, a new one begins and nothing is done."""
        again = self._ended
        if again.any() and self.autoreset_mode == AutoresetMode.DISABLED:
            raise gymnasium.error.ResetNeeded(
                "an episode is over and autoreset is disabled: call reset(options={'reset_mask': ended})"
            )
        over = torch.from_numpy(again)
        kept = {name: tensor[over] for name, tensor in self.batch.state.items()}
        _, reward, ended = self.batch.step(actions, autoreset=False)
        for name, tensor in self.batch.state.items():
            tensor[over] = kept[name]
        self.batch.reset(over)
        rewards, truncated = np.where(again, 0.0, reward.numpy()), ended.numpy() & ~again
        infos = self._infos()
        for name in INFO:
            infos[name] = np.where(again, 0, infos[name]).astype(infos[name].dtype)
            infos[f"_{name}"] = ~again
        if truncated.any():
            sums = np.where(truncated[:, None], self.batch.final_sums.numpy(), 1.0)
            means = {name: np.where(truncated, mean, 0.0) for name, mean in episode_info(sums).items()}
            infos |= means | {f"_{name}": truncated.copy() for name in means}
        self._ended = truncated.copy()
        return self._obs.copy(), rewards, np.zeros(self.num_envs, bool), truncated, infos

    def _infos(self) -> dict[str, Any]:
        """Results of the last decisions as arrays (B,): columns of one copy."""
        outcome = self._outcome.copy()
        infos: dict[str, Any] = {}
        for name, column in INFO.items():
            infos[name] = outcome[:, column] > 0.5 if name in FLAGS else outcome[:, column]
            infos[f"_{name}"] = self._all_true
        infos["running_pods"] = infos["running_pods"].astype(np.int64)
        return infos

    def _finish(self, ended: npt.NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        """Move the results of ended episodes to final_info: the new episodes have no decision yet."""
        final_obs = np.full(self.num_envs, None, dtype=object)
        last = self.batch.last_obs.numpy().copy()
        for i in np.flatnonzero(ended):
            final_obs[i] = last[i]
        final_info: dict[str, Any] = {}
        for name in INFO:
            final_info[name] = np.where(ended, infos[name], 0).astype(infos[name].dtype)
            infos[name] = np.where(ended, 0, infos[name]).astype(infos[name].dtype)
            infos[f"_{name}"] = ~ended
        sums = self.batch.final_sums.numpy().copy()
        sums[~ended, state.SUM_STEPS] = 1.0  # may be 0 before the first end of an episode
        final_info |= {name: np.where(ended, mean, 0.0) for name, mean in episode_info(sums).items()}
        final_info |= {f"_{name}": ended.copy() for name in list(final_info)}
        return infos | {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": final_info,
            "_final_info": ended.copy(),
        }
