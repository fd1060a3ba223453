"""Gymnasium and PettingZoo faces of the batched allocation environment."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from pettingzoo import ParallelEnv

from clustergym.gpu_allocation import dynamics
from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig

Obs = npt.NDArray[np.float32]

# What info tells of the last decision: its name there, and its column of the outcome.
INFO = {
    "efficiency": dynamics.O_EFFICIENCY,
    "qos": dynamics.O_QOS,
    "monopoly": dynamics.O_MONOPOLY,
    "under_allocation": dynamics.O_UNDER,
    "allocated_cores": dynamics.O_CORES,
    "allocated_memory_mb": dynamics.O_MEMORY,
    "actual_usage": dynamics.O_USAGE,
    "qos_met": dynamics.O_MET,
    "oom": dynamics.O_OOM,
    "running_pods": dynamics.O_PODS,
    "latency_ms": dynamics.O_LATENCY,
    "wait_s": dynamics.O_WAIT,
    "time_s": dynamics.O_TIME,
}
FLAGS = ("qos_met", "oom")
EPISODE = {
    "mean_reward": dynamics.S_RETURN,
    "mean_qos": dynamics.S_MET,
    "mean_efficiency": dynamics.S_EFFICIENCY,
    "mean_oom": dynamics.S_OOM,
    "mean_monopoly": dynamics.S_MONOPOLY,
    "mean_wait_s": dynamics.S_WAIT,
}


def config_from(options: dict[str, Any]) -> AllocationConfig:
    """The configuration behind an environment's keyword arguments; an unknown one is refused by name."""
    known = {f.name for f in fields(AllocationConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r}; the environment takes: {', '.join(sorted(known))}")
    return AllocationConfig(**options)


def single_spaces(n_features: int) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """(observation space, action space) of one environment."""
    return spaces.Box(0.0, 1.0, (n_features,), np.float32), spaces.Box(0.0, 1.0, (2,), np.float32)


def outcome_info(outcome: npt.NDArray[np.float32]) -> dict[str, Any]:
    """What one decision came to, as plain numbers."""
    values = outcome.tolist()
    info: dict[str, Any] = {name: values[column] for name, column in INFO.items()}
    for name in FLAGS:
        info[name] = info[name] > 0.5
    info["running_pods"] = int(info["running_pods"])
    return info


def episode_info(sums: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Means over a finished episode (..., 7): reward, QoS met, efficiency, OOM kills, monopolies, wait."""
    steps = sums[..., dynamics.S_STEPS]
    return {name: sums[..., column] / steps for name, column in EPISODE.items()}


class _Picture:
    """Rendering that the Gymnasium and PettingZoo environments share: the GPU of node 0."""

    batch: AllocationBatch
    render_mode: str | None = None
    _recorder: Any = None
    _screen: Any = None

    def _choose_render_mode(self, render_mode: str | None) -> None:
        if render_mode not in (None, "human", "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; expected None, 'human' or 'rgb_array'")
        self.render_mode = render_mode

    def _start_recording(self) -> None:
        """Only who is asked for pictures loads the painter and remembers what it needs."""
        if self.render_mode is None:
            return
        from clustergym.gpu_allocation.viewer import Recorder

        self._recorder = Recorder(self.batch)
        self._show()

    def _step(self, action: npt.NDArray[np.float32]) -> tuple[float, bool]:
        """A step of the batch without autoreset, noted for the picture; reward of node 0 and whether the episode ended."""
        before = None if self._recorder is None else self._recorder.before()
        _, reward, ended = self.batch.step(action, autoreset=False)
        if self._recorder is not None:
            self._recorder.after(before)
            self._show()
        return float(reward[0]), bool(ended[0])

    def _show(self) -> None:
        if self.render_mode == "human":
            self._render()

    def _render(self) -> npt.NDArray[np.uint8] | None:
        if self.render_mode is None:
            gymnasium.logger.warn(
                "render() does nothing without a render_mode: make the environment with render_mode='rgb_array'"
            )
            return None
        from clustergym.gpu_allocation.viewer import draw, open_window

        snapshots = [] if self._recorder is None else self._recorder.snapshots
        if self.render_mode == "rgb_array":
            return draw(snapshots)
        if self._screen is None:
            self._screen = open_window()
        self._screen.show(snapshots)
        return None

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None


class GPUAllocationEnv(_Picture, gymnasium.Env[Obs, npt.NDArray[np.float32]]):
    """
    ## Description
    Pods that serve a neural network come to an edge node with one GPU (a V100 with 32 GB, shared through MPS). Each asks
    for a share of the SMs and for memory, and asks for too much: that is what users do. For each pod the agent decides what it
    gets. Too much is wasted, and crowds out others; too little and the pod misses its objective.

    A pod runs one of four networks at a rate of requests that its owner knows and the agent does not. Its latency follows from
    its share, its batch, the cache and power that its neighbours take, and the scheduling delay among them (fits of a
    public V100 profile: see `clustergym.gpu_allocation.specs`). Pods hold what they got until their life is over. A pod comes
    to the node once its request fits what is free there.

    What repeats, and can be learned: a node's owners over-ask by similar factors (a node is another one in each episode); an
    owner's pods come in three sizes, and need about the same part of what they ask for.

    `GPUAllocation-v0` shows five numbers. `GPUAllocationHistory-v0` adds what the owner's earlier pods really used and needed.

    ## Action Space
    `Box(0, 1, (2,))`: cores = a₀ · 90 + 10 (%), memory = a₁ · 32256 + 512 (MB). Cores are rounded to `unit_percent`, memory to a MB;
    then `min(allocated, requested)`. Finite values outside 0 … 1 are clipped; NaN and infinity raise an error.

    ## Observation Space
    `Box(0, 1, (5,))`, or `(19,)` with `history=True`:

    | index | content |
    | --- | --- |
    | 0, 1 | requested cores / 100, requested memory / 32768 MB |
    | 2, 3 | GPU utilisation, memory used / total |
    | 4 | running pods / 10 |
    | 5 | the owner's earlier pods: n / (n + 4) |
    | 6, 7 | part of the requested cores that they needed (used, or would have had to use to meet the objective): running mean, mean deviation |
    | 8, 9, 10 | how often they missed their objective (running mean), whether the last one did, how often memory killed them |
    | 11 | whether the pod that waits is latency-sensitive |
    | 12 – 14 | cores / 100 that this pod would need if it were like them: mean, most (slowly forgotten), last |
    | 15 | cores / 100 that this pod would get if it got the part of its request that the last one got |
    | 16, 17 | likewise, the largest part that missed and the smallest part that met the objective (both slowly forgotten) |
    | 18 | memory / 32768 MB that this pod would use if it used the largest part of its request that they did |

    ## Rewards
    `0.5 · usage / allocation`, +1 where the pod meets its objective and −0.5 where not, −0.3 where it holds more than 1.5 times the
    fair share 100 / pods, −0.2 below 10 %: `clustergym.gpu_allocation.compute_reward`. Each term is in `info`. A
    pod meets its objective when it keeps up with its requests, its latency is within half its SLO (latency-sensitive
    pods) and its memory suffices; with too little memory it is killed at once, having used nothing. The pod is
    measured beside the neighbours it finds.

    ## Starting State
    An empty GPU, owners nobody has met, the first pod waiting.

    ## Episode End
    Truncated after `arrivals` decisions: a node runs on, so bootstrap from the last observation. `info` then holds the
    episode's `mean_reward`, `mean_qos`, `mean_efficiency`, `mean_oom`, `mean_monopoly` and `mean_wait_s`.

    ## Arguments
    The fields of `clustergym.gpu_allocation.AllocationConfig`: `history`, `arrivals`, `load`, `owners`, `workload`, `unit_percent`,
    `node_spread`, `owner_spread`, `pod_spread`, `mix`; and `render_mode` (`"rgb_array"`, `"human"`).

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:GPUAllocation-v0", load=2.0)
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
    >>> abs(reward - sum(info[k] for k in ("efficiency", "qos", "monopoly", "under_allocation"))) < 1e-6
    True

    ```

    ## Version History
    * v0: initial version
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._choose_render_mode(render_mode)
        self.batch = AllocationBatch(config_from(options), 1)
        self.observation_space, self.action_space = single_spaces(self.batch.n_features)
        self._obs, self._outcome = self.batch.obs.numpy()[0], self.batch.outcome.numpy()[0]
        self._seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self.batch.seed(np.array([self.np_random.integers(2**62) if seed is None else seed], dtype=np.int64))
            self._seeded = True
        self.batch.reset()
        self._start_recording()
        return self._obs.copy(), {}

    def step(self, action: npt.NDArray[np.float32]) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        reward, done = self._step(np.asarray(action, np.float32)[None])
        info = outcome_info(self._outcome)
        if done:
            sums = self.batch.final_sums.numpy()[0]
            info |= {name: float(value) for name, value in episode_info(sums).items()}
        return self._obs.copy(), reward, False, done, info

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()


class GPUAllocationVectorEnv(gymnasium.vector.VectorEnv[Obs, npt.NDArray[np.float32], npt.NDArray[Any]]):
    """`num_envs` copies of :class:`GPUAllocationEnv` in one simulator: ``gymnasium.make_vec("GPUAllocation-v0", num_envs=N)``.

    Environment i, seeded with s + i, plays exactly what a single environment seeded with s + i plays. Autoreset is
    SAME_STEP: where an episode ends, the observation returned is the next episode's first, and ``info["final_obs"]`` and
    ``info["final_info"]`` hold the last of the old one. Returned arrays are never written again.

    Trainers that keep everything in torch use ``self.batch`` (:class:`AllocationBatch`) and its tensors directly.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        **options: Any,
    ) -> None:
        if max_episode_steps is not None:
            raise ValueError("episodes have a fixed length: set arrivals, and not max_episode_steps")
        if render_mode is not None:
            raise ValueError(f"render_mode is {render_mode!r}: pictures come from the single environment")
        self.render_mode = None
        self.batch = AllocationBatch(config_from(options), num_envs)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = single_spaces(self.batch.n_features)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._obs, self._outcome = self.batch.obs.numpy(), self.batch.outcome.numpy()
        self._never = np.zeros(num_envs, bool)
        self._always = np.ones(num_envs, bool)
        self._always.setflags(write=False)
        self._seeded = False

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        if isinstance(seed, list):
            seeds = [int(self.np_random.integers(2**62)) if s is None else s for s in seed]
            self.batch.seed(np.array(seeds, dtype=np.int64))
        elif seed is not None or not self._seeded:
            first = int(self.np_random.integers(2**62)) if seed is None else seed
            self.batch.seed(first + np.arange(self.num_envs))
        self._seeded = True
        self.batch.reset()
        return self._obs.copy(), {}

    def step(
        self, actions: npt.NDArray[np.float32]
    ) -> tuple[Obs, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        _, reward, ended = self.batch.step(actions)
        truncated = ended.numpy().copy()
        infos = _vector_infos(self._outcome.copy(), self._always)
        if truncated.any():
            infos = self._finish(truncated, infos)
        return self._obs.copy(), reward.numpy().copy(), self._never.copy(), truncated, infos

    def _finish(self, ended: npt.NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        """What an ended episode's last step came to goes to final_info; a fresh episode has no decision yet."""
        final_obs = np.full(self.num_envs, None, dtype=object)
        last = self.batch.last_obs.numpy().copy()
        for i in np.flatnonzero(ended):
            final_obs[i] = last[i]
        totals = {n: np.where(ended, v, 0.0) for n, v in episode_info(self._steps_so_far()).items()}
        final_info: dict[str, Any] = {}
        for name in INFO:
            final_info[name] = np.where(ended, infos[name], 0).astype(infos[name].dtype)
            infos[name] = np.where(ended, 0, infos[name]).astype(infos[name].dtype)
            infos[f"_{name}"] = ~ended
        final_info |= totals
        final_info |= {f"_{name}": ended.copy() for name in list(final_info)}
        return infos | {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": final_info,
            "_final_info": ended.copy(),
        }

    def _steps_so_far(self) -> npt.NDArray[np.float64]:
        """Sums of the last finished episodes, with a step where there is none yet so that means exist."""
        sums = self.batch.final_sums.numpy().copy()
        sums[:, dynamics.S_STEPS] = np.maximum(sums[:, dynamics.S_STEPS], 1.0)
        return sums


def _vector_infos(outcome: npt.NDArray[np.float32], always: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Arrays (B,) that tell what the decisions came to: columns of one copy, nothing computed for them."""
    infos: dict[str, Any] = {}
    for name, column in INFO.items():
        values = outcome[:, column]
        infos[name] = values > 0.5 if name in FLAGS else values
        infos[f"_{name}"] = always
    infos["running_pods"] = infos["running_pods"].astype(np.int64)
    return infos


class GPUAllocationParallelEnv(_Picture, ParallelEnv[str, Obs, npt.NDArray[np.float32]]):
    """Edge nodes with one GPU each and an agent on each: ``gpu_allocation_v0.parallel_env(n_nodes=N)``.

    Agent `node_i` decides for the pods that come to node i. Nodes share nothing but the clockwork of the game: each has its
    own mix of applications and its own habit of over-asking (:func:`edge_mixes`), which stay the same from episode to
    episode, while owners and pods are drawn anew. With `n_nodes=1` it is the single-GPU task on one fixed node. Observations,
    actions and rewards are those of :class:`GPUAllocationEnv`. `state()` is all observations in a row. Pictures show node 0.

    Trainers that step many copies of each node at once use ``AllocationBatch.for_nodes(n_nodes, envs_per_node, config)``.

    ```python
    >>> from clustergym import gpu_allocation_v0
    >>> env = gpu_allocation_v0.parallel_env(n_nodes=3, history=True)
    >>> observations, infos = env.reset(seed=1)
    >>> actions = {agent: env.action_space(agent).sample() for agent in env.agents}
    >>> observations, rewards, terminations, truncations, infos = env.step(actions)

    ```
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "gpu_allocation_v0",
        "render_modes": ["human", "rgb_array"],
        "is_parallelizable": True,
        "render_fps": 4,
    }

    def __init__(self, n_nodes: int = 2, render_mode: str | None = None, **options: Any) -> None:
        self._choose_render_mode(render_mode)
        config = config_from(options)
        if config.mix is not None:
            raise ValueError("mix belongs to a single node: the nodes here have mixes of their own (edge_mixes)")
        self.n_nodes = n_nodes
        self.batch = AllocationBatch.for_nodes(n_nodes, 1, config)
        self.possible_agents = [f"node_{i}" for i in range(n_nodes)]
        self.agents: list[str] = []
        self.observation_spaces = dict.fromkeys(self.possible_agents, single_spaces(self.batch.n_features)[0])
        # Each agent its own: seeding one agent's sampler must not seed the others'.
        self.action_spaces = {agent: single_spaces(self.batch.n_features)[1] for agent in self.possible_agents}
        self.state_space = spaces.Box(0.0, 1.0, (n_nodes * self.batch.n_features,), np.float32)
        self._obs, self._outcome = self.batch.obs.numpy(), self.batch.outcome.numpy()
        self._seeded = False

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def _observe(self) -> dict[str, Obs]:
        return {agent: self._obs[i].copy() for i, agent in enumerate(self.possible_agents)}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Obs], dict[str, dict[str, Any]]]:
        if seed is not None or not self._seeded:
            first = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(2)
            self.batch.seed(np.int64(first) + np.arange(self.n_nodes))
            self._seeded = True
        self.agents = self.possible_agents[:]
        self.batch.reset()
        self._start_recording()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, npt.NDArray[np.float32]]
    ) -> tuple[dict[str, Obs], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        missing = [agent for agent in self.agents if agent not in actions]
        if missing:
            raise ValueError(f"no action for {missing[0]!r}: every node decides at every step")
        chosen = np.stack([np.asarray(actions[agent], np.float32) for agent in self.possible_agents])
        _, done = self._step(chosen)
        reward, agents = self.batch.reward, self.agents
        infos = {agent: outcome_info(self._outcome[i]) for i, agent in enumerate(agents)}
        if done:
            for i, agent in enumerate(agents):
                totals = episode_info(self.batch.final_sums.numpy()[i])
                infos[agent] |= {name: float(value) for name, value in totals.items()}
            self.agents = []
        return (
            self._observe(),
            {agent: float(reward[i]) for i, agent in enumerate(agents)},
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, done),
            infos,
        )

    def state(self) -> npt.NDArray[np.float32]:
        """All observations in a row, for a centralised critic."""
        return self._obs.ravel().copy()

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
