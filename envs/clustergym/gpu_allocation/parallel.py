"""PettingZoo API of the allocation task: several edge nodes, one agent per node."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from clustergym.common.choices import config_from
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.environment import Rendering, episode_info, outcome_info, shorten, single_spaces
from clustergym.gpu_allocation.specs import AllocationConfig
from clustergym.gpu_allocation.state import Floats


class GPUAllocationParallelEnv(Rendering, ParallelEnv[str, Floats, Floats]):  # type: ignore[misc]  # untyped
    """Edge nodes with one GPU and one agent each: ``gpu_allocation_v0.parallel_env(n_nodes=N)``.

    Agent `node_i` decides for the pods of node i. The nodes do not influence each other. Each node has its own mix of
    applications and its own degree of over-asking (:func:`edge_mixes`). These stay the same in all episodes, while
    owners and pods are drawn for each episode. With `n_nodes=1` it is the single-GPU task on one fixed node.
    Observations, actions and rewards are those of :class:`GPUAllocationEnv`. `state()` is the concatenation of all
    observations. Pictures show node 0.

    Trainers that step many copies of each node can use ``AllocationBatch.for_nodes(n_nodes, envs_per_node, config)``.

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

    def __init__(
        self, n_nodes: int = 2, render_mode: str | None = None, max_cycles: int | None = None, **options: Any
    ) -> None:
        self._choose_render_mode(render_mode)
        config = shorten(config_from(AllocationConfig, options), max_cycles, "max_cycles")
        if config.mix is not None:
            raise ValueError("mix is for a single node: the nodes here have their own mixes (edge_mixes)")
        self.n_nodes = n_nodes
        self.batch = AllocationBatch.for_nodes(n_nodes, 1, config)
        self.possible_agents = [f"node_{i}" for i in range(n_nodes)]
        self.agents: list[str] = []
        self.observation_spaces = dict.fromkeys(self.possible_agents, single_spaces(self.batch.n_features)[0])
        # One action space per agent: seeding one must not seed the others.
        self.action_spaces = {agent: single_spaces(self.batch.n_features)[1] for agent in self.possible_agents}
        self.state_space = spaces.Box(0.0, 1.0, (n_nodes * self.batch.n_features,), np.float32)
        self._seeded = False

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def _observe(self) -> dict[str, Floats]:
        return {agent: self.batch.obs[i].copy() for i, agent in enumerate(self.possible_agents)}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, dict[str, Any]]]:
        if seed is not None or not self._seeded:
            first = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(2)
            self.batch.seed(np.int64(first) + np.arange(self.n_nodes))
            self._seeded = True
        self.agents = self.possible_agents[:]
        self._reset()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Floats]
    ) -> tuple[dict[str, Floats], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        missing = [agent for agent in self.agents if agent not in actions]
        if missing:
            raise ValueError(f"no action for {missing[0]!r}: every node decides at every step")
        done = self._step(np.stack([np.asarray(actions[agent], np.float32) for agent in self.possible_agents]))
        agents = self.agents
        infos = {agent: outcome_info(self.batch.outcome[i]) for i, agent in enumerate(agents)}
        rewards = dict(zip(agents, self.batch.reward.tolist(), strict=True))
        if done:
            for agent, sums in zip(agents, self.batch.state.sums, strict=True):
                infos[agent] |= episode_info(sums)
            self.agents = []
        return self._observe(), rewards, dict.fromkeys(agents, False), dict.fromkeys(agents, done), infos

    def state(self) -> Floats:
        """All observations in one vector, for a centralised critic."""
        return self.batch.obs.ravel().copy()
