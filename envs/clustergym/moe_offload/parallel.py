"""PettingZoo API of the offloading task."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import ParallelEnv

from clustergym.common.choices import config_from
from clustergym.moe_offload.batch import ObsDict, OffloadBatch
from clustergym.moe_offload.environment import LIMIT, Rendering, first_of, observation_space
from clustergym.moe_offload.specs import OffloadConfig

STATE_PARTS = ("experts", "gpus", "pairs", "context")


class MoEOffloadParallelEnv(Rendering, ParallelEnv[str, Any, int]):  # type: ignore[misc]
    """The offloading task for two agents that act at the same time: `expert` picks a row, `gpu` one of 3·G nodes.

    Everything else is as in :class:`MoEOffloadEnv`, which documents the task. Both agents see its arrays and get its
    reward. The pairs' mask is `joint_mask`, and each agent has an `action_mask` of its own, (R,) or (3·G,): choices
    with at least one partner. With one GPU every pair of allowed choices is legal. In ``moe_offload_v0.env()``, `gpu`
    acts second, sees the row, and its mask is exact. `state()` is one vector for a centralised critic. `max_cycles`
    truncates episodes.

    ```python
    >>> from clustergym import moe_offload_v0
    >>> env = moe_offload_v0.parallel_env(max_tokens=4)
    >>> observations, infos = env.reset(seed=1)
    >>> actions = {agent: env.action_space(agent).sample(observations[agent]["action_mask"]) for agent in env.agents}
    >>> observations, rewards, terminations, truncations, infos = env.step(actions)

    ```
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "moe_offload_v0",
        "render_modes": ["human", "rgb_array"],
        "is_parallelizable": True,
        "render_fps": 4,
    }
    possible_agents: ClassVar[list[str]] = ["expert", "gpu"]

    def __init__(self, render_mode: str | None = None, max_cycles: int | None = None, **options: Any) -> None:
        if max_cycles is not None and max_cycles < 1:
            raise ValueError(f"max_cycles is {max_cycles}: expected at least 1")
        self._choose_render_mode(render_mode)
        self.batch = OffloadBatch(config_from(OffloadConfig, options), 1)
        self.max_cycles, self._cycles = max_cycles, 0
        known = dict(observation_space(self.batch).spaces)
        known["joint_mask"] = known.pop("action_mask")
        sizes = {"expert": self.batch.n_rows, "gpu": self.batch.n_nodes}
        self.observation_spaces = {
            agent: spaces.Dict(known | {"action_mask": spaces.Box(0, 1, (n,), np.int8)}) for agent, n in sizes.items()
        }
        self.action_spaces = {agent: spaces.Discrete(n) for agent, n in sizes.items()}
        size = sum(int(np.prod(self.batch.shapes[name])) for name in STATE_PARTS)
        self.state_space = spaces.Box(-LIMIT, LIMIT, (size,), np.float32)
        self.agents: list[str] = []
        self._arrays: ObsDict = {}
        self._seeded = False

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def _look(self) -> None:
        arrays = {name: array[0] for name, array in self.batch.observe().items()}
        arrays["joint_mask"] = arrays.pop("action_mask")
        self._arrays = arrays

    def observation(self, agent: str) -> ObsDict:
        """What an agent sees now."""
        axis = 1 if agent == "expert" else 0
        mine: npt.NDArray[np.int8] = self._arrays["joint_mask"].max(axis)
        return {name: array.copy() for name, array in self._arrays.items()} | {"action_mask": mine}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        if seed is not None or not self._seeded:
            first = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
            self.batch.seed([first])
            self._seeded = True
        self.agents, self._cycles = self.possible_agents[:], 0
        self.batch.reset(groups=(options or {}).get("group"))
        self._look()
        self._record(begin=True)
        info = first_of(self.batch.totals())
        return {agent: self.observation(agent) for agent in self.agents}, {agent: dict(info) for agent in self.agents}

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        rewards, ended = self.batch.step(np.array([int(actions["expert"])]), np.array([int(actions["gpu"])]))
        self._cycles += 1
        done, cut = bool(ended[0]), self._cycles == self.max_cycles
        self._look()
        self._record(begin=False)
        info = first_of(self.batch.step_info() | self.batch.totals())
        agents, self.agents = self.agents, ([] if done or cut else self.agents)
        return (
            {agent: self.observation(agent) for agent in agents},
            dict.fromkeys(agents, float(rewards[0])),
            dict.fromkeys(agents, done),
            dict.fromkeys(agents, cut),
            {agent: dict(info) for agent in agents},
        )

    def state(self) -> npt.NDArray[np.float32]:
        """All that both agents see, without the graphs, as one vector."""
        return np.concatenate([self._arrays[name].ravel() for name in STATE_PARTS])

    def get_state(self) -> dict[str, Any]:
        """Everything that changes."""
        return self.batch.get_state() | {"cycles": self._cycles, "agents": list(self.agents)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self.batch.set_state({name: value for name, value in state.items() if name not in ("cycles", "agents")})
        self._cycles, self.agents = state["cycles"], list(state["agents"])
        self._look()
