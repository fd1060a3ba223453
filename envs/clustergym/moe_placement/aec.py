"""PettingZoo AEC API of the placement task, in which the second agent knows what the first has chosen."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import AECEnv

from clustergym.moe_placement.parallel import MoEPlacementParallelEnv

NOBODY = -1


class MoEPlacementAECEnv(AECEnv[str, Any, int]):  # type: ignore[misc]
    """The placement task for two agents in turn: `expert` picks an expert, then `gpu`, which sees it, a node.

    Made by ``moe_placement_v0.env()``. Observations are those of :class:`MoEPlacementParallelEnv`, and `gpu` has one
    more key, `chosen` (E,): 1 for the expert that was chosen (all 0 while `expert` is to move). Its `action_mask` is
    exact then: it has all nodes that are legal with this expert, and no other. An agent that samples from the masks
    never plays an illegal action. Both agents get the reward of the pair.

    ```python
    >>> from clustergym import moe_placement_v0
    >>> env = moe_placement_v0.env(cluster="h800-2x4")
    >>> env.reset(seed=1)
    >>> for agent in env.agent_iter(4):
    ...     observation, reward, termination, truncation, info = env.last()
    ...     env.step(env.action_space(agent).sample(observation["action_mask"]))

    ```
    """

    metadata: ClassVar[dict[str, Any]] = MoEPlacementParallelEnv.metadata | {"is_parallelizable": False}
    possible_agents: ClassVar[list[str]] = MoEPlacementParallelEnv.possible_agents

    def __init__(self, **options: Any) -> None:
        AECEnv.__init__(self)
        self._pair = MoEPlacementParallelEnv(**options)
        self.batch, self.render_mode = self._pair.batch, self._pair.render_mode
        self._chosen = NOBODY
        known: Any = self._pair.observation_space("gpu")
        chosen = spaces.Box(0, 1, (self.batch.n_experts,), np.int8)
        self.observation_spaces = {
            "expert": self._pair.observation_space("expert"),
            "gpu": spaces.Dict({**known.spaces, "chosen": chosen}),
        }
        self.action_spaces = self._pair.action_spaces
        self.state_space = self._pair.state_space
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def observe(self, agent: str) -> dict[str, npt.NDArray[Any]]:
        seen = self._pair.observation(agent, None if self._chosen == NOBODY else self._chosen)
        if agent == "gpu":
            seen["chosen"] = np.zeros(self.batch.n_experts, np.int8)
            if self._chosen != NOBODY:
                seen["chosen"][self._chosen] = 1
        return seen

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        _, infos = self._pair.reset(seed, options)
        self.agents = self.possible_agents[:]
        self.infos = infos
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
            if not 0 <= int(action) < self.batch.n_experts:
                raise ValueError(f"the expert is {action}: expected 0 … {self.batch.n_experts - 1}")
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
        """All arrays that both agents see, but the mask, as one vector."""
        return self._pair.state()

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._pair.render()

    def close(self) -> None:
        self._pair.close()
