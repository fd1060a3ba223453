"""Gymnasium API of the allocation task, and what the vector and the PettingZoo form share with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clustergym.common.choices import config_from
from clustergym.gpu_allocation import state
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.specs import AllocationConfig
from clustergym.gpu_allocation.state import Doubles, Floats

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
"""Entries of `info`: name and column of the outcome."""
TYPES: dict[str, type] = {"qos_met": bool, "oom": bool, "running_pods": int}
"""Entries that are no floating-point numbers."""
EPISODE_INFO = {
    "mean_reward": state.SUM_REWARD,
    "mean_qos": state.SUM_MET,
    "mean_efficiency": state.SUM_EFFICIENCY,
    "mean_oom": state.SUM_OOM,
    "mean_monopoly": state.SUM_MONOPOLY,
    "mean_wait_s": state.SUM_WAIT,
    "mean_room": state.SUM_ROOM,
}
"""Entries of `info` at the end of an episode: name and column of the sums."""


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
    return {name: TYPES.get(name, float)(values[column]) for name, column in INFO.items()}


def episode_info(sums: Doubles) -> dict[str, float]:
    """Means over the decisions of one episode."""
    values = (sums / sums[state.SUM_STEPS]).tolist()
    return {name: values[column] for name, column in EPISODE_INFO.items()}


class Rendering:
    """Pictures of environment 0, and states, for the Gymnasium and the PettingZoo environment."""

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

    def _reset(self) -> None:
        self.batch.reset()
        if self.render_mode is not None:
            from clustergym.gpu_allocation.viewer import Recorder

            self._recorder = Recorder()
        if self.render_mode == "human":
            self.render()

    def _step(self, action: Floats) -> bool:
        """Step the batch and record the step. Returns whether the episodes ended."""
        if self._recorder is not None:
            self._recorder.before(self.batch.state)
        self.batch.step(action)
        if self._recorder is not None:
            self._recorder.after(self.batch.state)
        if self.render_mode == "human":
            self.render()
        return bool(self.batch.ended[0])

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

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays."""
        return self.batch.get_state()

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self.batch.set_state(state)

    def __getstate__(self) -> dict[str, Any]:
        # A window stays with the original.
        return {name: value for name, value in self.__dict__.items() if name != "_window"}


class GPUAllocationEnv(Rendering, gymnasium.Env[Floats, Floats]):
    """
    ## Description
    A contextual bandit: a decision hardly changes what comes after it.

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
        self.batch = AllocationBatch(config_from(AllocationConfig, options))
        self.observation_space, self.action_space = single_spaces(self.batch.n_features)
        self._seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self.batch.seed([int(self.np_random.integers(2**62)) if seed is None else seed])
            self._seeded = True
        self._reset()
        return self.batch.obs[0].copy(), {}

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        done = self._step(np.asarray(action, np.float32)[None])
        info = outcome_info(self.batch.outcome[0])
        if done:
            info |= episode_info(self.batch.state.sums[0])
        return self.batch.obs[0].copy(), float(self.batch.reward[0]), False, done, info
