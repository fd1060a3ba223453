"""PettingZoo AEC API of a task for two agents: `expert` acts first, and `gpu` sees what it has chosen."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import AECEnv

NOBODY = -1


class PairAECEnv(AECEnv[str, Any, int]):  # type: ignore[misc]
    """Turns an environment in which `expert` and `gpu` act at the same time into one in which they take turns.

    Subclasses name that environment in ``parallel``. Its observations have the legal pairs in ``joint_mask``. `gpu`
    sees one more key, ``chosen``: 1 for the choice of `expert`, all 0 before it. Its ``action_mask`` is exact then.
    """

    parallel: ClassVar[type[Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._pair = self.parallel(**options)
        self.batch, self.render_mode = self._pair.batch, self._pair.render_mode
        self._chosen = NOBODY
        self.action_spaces, self.state_space = self._pair.action_spaces, self._pair.state_space
        known: Any = self._pair.observation_space("gpu")
        self._choices = int(self.action_spaces["expert"].n)
        chosen = spaces.Box(0, 1, (self._choices,), np.int8)
        self.observation_spaces: dict[str, spaces.Space[Any]] = {
            "expert": self._pair.observation_space("expert"),
            "gpu": spaces.Dict({**known.spaces, "chosen": chosen}),
        }
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        space: spaces.Discrete = self.action_spaces[agent]
        return space

    def observe(self, agent: str) -> dict[str, npt.NDArray[Any]]:
        seen: dict[str, npt.NDArray[Any]] = self._pair.observation(agent)
        if agent == "gpu":
            seen["chosen"] = np.zeros(self._choices, np.int8)
            if self._chosen != NOBODY:
                seen["chosen"][self._chosen] = 1
                seen["action_mask"] = seen["joint_mask"][self._chosen].copy()
        return seen

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        _, self.infos = self._pair.reset(seed, options)
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.agent_selection, self._chosen = "expert", NOBODY

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        self._cumulative_rewards[agent] = 0.0
        if agent == "expert":
            if not 0 <= int(action) < self._choices:
                raise ValueError(f"the choice of expert is {action}: expected 0 … {self._choices - 1}")
            self._chosen, self.agent_selection = int(action), "gpu"
            self._clear_rewards()
            return
        pair = {"expert": self._chosen, "gpu": int(action)}
        _, self.rewards, self.terminations, self.truncations, self.infos = self._pair.step(pair)
        self._chosen, self.agent_selection = NOBODY, "expert"
        self._accumulate_rewards()

    def get_state(self) -> dict[str, Any]:
        """Everything that changes, as arrays, lists and dictionaries."""
        own = (
            "agents", "agent_selection", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos",
            "_chosen",
        )  # fmt: skip
        return {"pair": self._pair.get_state()} | {
            name: value.copy() if hasattr(value := getattr(self, name), "copy") else value for name in own
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self._pair.set_state(state["pair"])
        for name, value in state.items():
            if name != "pair":
                setattr(self, name, value.copy() if hasattr(value, "copy") else value)

    def state(self) -> npt.NDArray[np.float32]:
        """What both agents see, as one vector."""
        vector: npt.NDArray[np.float32] = self._pair.state()
        return vector

    def render(self) -> npt.NDArray[np.uint8] | None:
        picture: npt.NDArray[np.uint8] | None = self._pair.render()
        return picture

    def close(self) -> None:
        self._pair.close()
