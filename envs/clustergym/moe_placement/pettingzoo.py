"""PettingZoo API of the placement task."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import ParallelEnv

from clustergym.moe_placement.environment import LIMIT, ObsDict, PlacementTask, observation_spaces


class MoEPlacementParallelEnv(PlacementTask, ParallelEnv[str, ObsDict, int]):  # type: ignore[misc]
    """The placement task for two agents that act at the same time: `expert` picks an expert, `gpu` one of 3·G nodes.

    Everything else is as in :class:`MoEPlacementEnv`, which documents the task. Both agents get the same reward.

    The observation of `expert` has `experts`, `coactivation`, `affinity`, `placement`, `progress`, `action_mask` (E,).
    The observation of `gpu` has `gpus`, `traffic`, `placement`, `progress`, `joint_mask` (E, 3·G) and `action_mask`
    (3·G,). Options add `memory` and `lookahead`. `joint_mask[e]` is what `gpu` may do once `expert` has chosen e: a
    policy that conditions the second choice on the first reads its row. `state()` is one vector for a centralised
    critic.

    ```python
    >>> from clustergym import moe_placement_v0
    >>> env = moe_placement_v0.parallel_env(cluster="h800-2x4")
    >>> observations, infos = env.reset(seed=1)
    >>> actions = {agent: env.action_space(agent).sample(observations[agent]["action_mask"]) for agent in env.agents}
    >>> observations, rewards, terminations, truncations, infos = env.step(actions)

    ```
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "moe_placement_v0",
        "render_modes": ["human", "rgb_array"],
        "is_parallelizable": True,
        "render_fps": 4,
    }
    possible_agents: ClassVar[list[str]] = ["expert", "gpu"]
    _keys: ClassVar[dict[str, tuple[str, ...]]] = {
        "expert": ("experts", "coactivation", "affinity", "placement", "progress", "memory"),
        "gpu": ("gpus", "traffic", "placement", "progress", "joint_mask", "lookahead"),
    }
    _state_keys: ClassVar[tuple[str, ...]] = ("experts", "gpus", "traffic", "placement", "progress")

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._begin(render_mode, options)
        all_spaces = observation_spaces(self.batch)
        self.observation_spaces = {
            agent: spaces.Dict(
                {key: all_spaces[key] for key in keys if key in all_spaces}
                | {"action_mask": all_spaces[f"{agent}_mask"]}
            )
            for agent, keys in self._keys.items()
        }
        self.action_spaces = {
            "expert": spaces.Discrete(self.batch.n_experts),
            "gpu": spaces.Discrete(3 * self.batch.n_gpus),
        }
        size = sum(self._views[key].size for key in self._state_keys)
        self.state_space = spaces.Box(-LIMIT, LIMIT, (size,), np.float32)
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def _observe(self) -> dict[str, ObsDict]:
        return {
            agent: {key: self._views[key].copy() for key in keys if key in self._views}
            | {"action_mask": self._views[f"{agent}_mask"].copy()}
            for agent, keys in self._keys.items()
        }

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, ObsDict], dict[str, dict[str, Any]]]:
        if seed is None:
            seed = -1 if self._seeded else int(np.random.SeedSequence().generate_state(1)[0])
        self.agents = self.possible_agents[:]
        self._reset(seed)
        return self._observe(), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, ObsDict], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        reward, done, info = self._act(int(actions["expert"]), int(actions["gpu"]))
        agents, self.agents = self.agents, ([] if done else self.agents)
        return (
            self._observe(),
            dict.fromkeys(agents, reward),
            dict.fromkeys(agents, done),
            dict.fromkeys(agents, False),
            {agent: dict(info) for agent in agents},
        )

    def state(self) -> npt.NDArray[np.float32]:
        """All that both agents see, without the pair matrices, as one vector."""
        return np.concatenate([self._views[key].ravel() for key in self._state_keys])

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
