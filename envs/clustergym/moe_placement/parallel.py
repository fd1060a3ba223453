"""PettingZoo API of the placement task."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import ParallelEnv

from clustergym.moe_placement.environment import PlacementTask, observation_spaces


class MoEPlacementParallelEnv(PlacementTask, ParallelEnv[str, Any, int]):  # type: ignore[misc]
    """The placement task for two agents that act at the same time: `expert` picks an expert, `gpu` one of 3·G nodes.

    Everything else is as in :class:`MoEPlacementEnv`, which documents the task. Both agents get the same reward.

    Both agents see all arrays of :class:`MoEPlacementEnv`, where `joint_mask` (E, 3·G) says which pairs are legal.
    `action_mask` is the agent's own: the experts (E,) or nodes (3·G,) that are legal with at least one choice of the
    other. So a pair of allowed choices can be illegal. In ``moe_placement_v0.env()`` `gpu` sees what `expert` has
    chosen, and both masks are exact. `state()` is one vector for a centralised critic. `max_cycles` truncates episodes.

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

    def __init__(self, render_mode: str | None = None, max_cycles: int | None = None, **options: Any) -> None:
        if max_cycles is not None and max_cycles < 1:
            raise ValueError(f"max_cycles is {max_cycles}: expected at least 1")
        self._begin(render_mode, options)
        self.max_cycles, self._cycles = max_cycles, 0
        sizes = {"expert": self.batch.n_experts, "gpu": 3 * self.batch.n_gpus}
        shared = observation_spaces(self.batch)
        shared["joint_mask"] = shared.pop("action_mask")
        self.observation_spaces = {
            agent: spaces.Dict({**shared, "action_mask": spaces.Box(0, 1, (size,), np.int8)})
            for agent, size in sizes.items()
        }
        self.action_spaces = {agent: spaces.Discrete(size) for agent, size in sizes.items()}
        boxes: list[Any] = [shared[key] for key in self._state_keys()]
        low, high = (np.concatenate([getattr(box, end).ravel() for box in boxes]) for end in ("low", "high"))
        self.state_space = spaces.Box(low, high, low.shape)
        self.agents: list[str] = []

    def _state_keys(self) -> list[str]:
        return [key for key in self._views if key != "action_mask"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def observation(self, agent: str) -> dict[str, npt.NDArray[Any]]:
        """What an agent sees."""
        seen = {key: view.copy() for key, view in self._views.items()}
        joint = seen.pop("action_mask")
        return seen | {"joint_mask": joint, "action_mask": joint.max(1 if agent == "expert" else 0)}

    def _observe(self) -> dict[str, Any]:
        return {agent: self.observation(agent) for agent in self.possible_agents}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        if seed is None:
            seed = -1 if self._seeded else int(np.random.SeedSequence().generate_state(1)[0])
        self.agents = self.possible_agents[:]
        self._cycles = 0
        self._reset(seed)
        return self._observe(), {agent: {} for agent in self.agents}

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
            {agent: dict(info) for agent in agents},
        )

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"cycles": self._cycles, "agents": list(self.agents)}

    def set_state(self, state: dict[str, Any]) -> None:
        mine = ("cycles", "agents")
        super().set_state({name: value for name, value in state.items() if name not in mine})
        self._cycles, self.agents = state["cycles"], list(state["agents"])

    def state(self) -> npt.NDArray[np.float32]:
        """All arrays that both agents see, but the mask, as one vector."""
        return np.concatenate([self._views[key].ravel() for key in self._state_keys()])

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
