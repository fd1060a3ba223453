"""PettingZoo AEC API of the placement task, in which the second agent knows what the first has chosen."""

from __future__ import annotations

from typing import Any, ClassVar

from clustergym.common.aec import PairAECEnv
from clustergym.moe_placement.parallel import MoEPlacementParallelEnv


class MoEPlacementAECEnv(PairAECEnv):
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

    parallel = MoEPlacementParallelEnv
    metadata: ClassVar[dict[str, Any]] = parallel.metadata | {"is_parallelizable": False}
    possible_agents: ClassVar[list[str]] = parallel.possible_agents
