"""PettingZoo API of the placement task."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import ParallelEnv

from clustergym.common.choices import one_of
from clustergym.moe_placement.environment import (
    LIMIT,
    OBSERVATIONS,
    PlacementTask,
    compact_space,
    observation_spaces,
)
from clustergym.moe_placement.kernels.observation import N_KINDS


class MoEPlacementParallelEnv(PlacementTask, ParallelEnv[str, Any, int]):  # type: ignore[misc]
    """The placement task for two agents that act at the same time: `expert` picks an expert, `gpu` one of 3·G nodes.

    Everything else is as in :class:`MoEPlacementEnv`, which documents the task. Both agents get the same reward.

    The observation of `expert` has `experts`, `coactivation`, `affinity`, `placement`, `progress`, `action_mask` (E,).
    The observation of `gpu` has `gpus`, `traffic`, `placement`, `progress`, `joint_mask` (E, 3·G) and `action_mask`
    (3·G,). Options add `memory` and `lookahead`. `joint_mask[e]` is what `gpu` may do once `expert` has chosen e: a
    policy that conditions the second choice on the first reads its row. Both masks are of choices with at least one
    partner: a pair of allowed choices can be illegal. In ``moe_placement_v0.env(conditional=True)`` `gpu` sees what
    `expert` has chosen, and its mask is exact. `state()` is one vector for a centralised critic.

    With `observation="compact"` both observations are vectors, as SuperSuit wants them: `experts` or the first G rows
    of `gpus` without their kind, then `progress`. The masks are then in `infos[agent]["action_mask"]`. `max_cycles`
    truncates episodes. `illegal_penalty` is the price of an illegal pair.

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

    def __init__(
        self,
        render_mode: str | None = None,
        observation: str = "full",
        max_cycles: int | None = None,
        illegal_penalty: float = 0.0,
        **options: Any,
    ) -> None:
        one_of(observation, OBSERVATIONS, "observation")
        if max_cycles is not None and max_cycles < 1:
            raise ValueError(f"max_cycles is {max_cycles}: expected at least 1")
        self._begin(render_mode, options, illegal_penalty)
        self._compact, self.max_cycles, self._cycles = observation == "compact", max_cycles, 0
        self.observation_spaces = {agent: self._space(agent) for agent in self.possible_agents}
        self.action_spaces = {
            "expert": spaces.Discrete(self.batch.n_experts),
            "gpu": spaces.Discrete(3 * self.batch.n_gpus),
        }
        size = sum(self._views[key].size for key in self._state_keys)
        self.state_space = spaces.Box(-LIMIT, LIMIT, (size,), np.float32)
        self.agents: list[str] = []

    def _space(self, agent: str) -> spaces.Space[Any]:
        if self._compact:
            return compact_space(self._vector(agent).size)
        known = observation_spaces(self.batch)
        mine = {key: known[key] for key in self._keys[agent] if key in known}
        return spaces.Dict(mine | {"action_mask": known[f"{agent}_mask"]})

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def _vector(self, agent: str) -> npt.NDArray[np.float32]:
        """The compact observation of an agent."""
        gpus = self._views["gpus"][: self.batch.n_gpus, N_KINDS:]
        mine = self._views["experts"] if agent == "expert" else gpus
        return np.concatenate([mine.ravel(), self._views["progress"]])

    def _observation(self, agent: str) -> Any:
        if self._compact:
            return self._vector(agent)
        seen = {key: self._views[key].copy() for key in self._keys[agent] if key in self._views}
        return seen | {"action_mask": self._views[f"{agent}_mask"].copy()}

    def _observe(self) -> dict[str, Any]:
        return {agent: self._observation(agent) for agent in self.possible_agents}

    def _infos(self, agents: list[str], info: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if not self._compact:
            return {agent: dict(info) for agent in agents}
        return {agent: info | {"action_mask": self._views[f"{agent}_mask"].copy()} for agent in agents}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        if seed is None:
            seed = -1 if self._seeded else int(np.random.SeedSequence().generate_state(1)[0])
        self.agents = self.possible_agents[:]
        self._cycles = 0
        self._reset(seed)
        return self._observe(), self._infos(self.agents, {})

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        reward, done, info = self._act(int(actions["expert"]), int(actions["gpu"]))
        self._cycles += 1
        cut = self._cycles == self.max_cycles
        agents, self.agents = self.agents, ([] if done or cut else self.agents)
        return (
            self._observe(),
            dict.fromkeys(agents, reward),
            dict.fromkeys(agents, done),
            dict.fromkeys(agents, cut),
            self._infos(agents, info),
        )

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"cycles": self._cycles, "agents": list(self.agents)}

    def set_state(self, state: dict[str, Any]) -> None:
        mine = ("cycles", "agents")
        super().set_state({name: value for name, value in state.items() if name not in mine})
        self._cycles, self.agents = state["cycles"], list(state["agents"])

    def state(self) -> npt.NDArray[np.float32]:
        """All that both agents see, without the pair matrices, as one vector."""
        return np.concatenate([self._views[key].ravel() for key in self._state_keys])

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
