"""PettingZoo AEC API of the offloading task, in which the second agent sees the row that the first has picked."""

from __future__ import annotations

from typing import Any, ClassVar

from clustergym.common.aec import PairAECEnv
from clustergym.moe_offload.parallel import MoEOffloadParallelEnv


class MoEOffloadAECEnv(PairAECEnv):
    """The offloading task for two agents in turn: `expert` picks a row, then `gpu`, which sees it, a node.

    Made by ``moe_offload_v0.env()``. Observations are those of :class:`MoEOffloadParallelEnv`, and `gpu` has one more
    key, `chosen` (R,): 1 for the row that was picked (all 0 while `expert` is to move). Its `action_mask` is exact
    then. Both agents get the reward of the pair.

    ```python
    >>> from clustergym import moe_offload_v0
    >>> env = moe_offload_v0.env(max_tokens=4)
    >>> env.reset(seed=1)
    >>> for agent in env.agent_iter(4):
    ...     observation, reward, termination, truncation, info = env.last()
    ...     env.step(env.action_space(agent).sample(observation["action_mask"]))

    ```
    """

    parallel = MoEOffloadParallelEnv
    metadata: ClassVar[dict[str, Any]] = parallel.metadata | {"is_parallelizable": False}
    possible_agents: ClassVar[list[str]] = parallel.possible_agents
