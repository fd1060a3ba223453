"""One shared GPU: pods ask for a share of it, an agent decides how much each one gets.

Light: the simulator behind the environments is loaded when one of its names is first used, so that an agent on a node can
import the reward and the action transform without it.
"""

from __future__ import annotations

from clustergym.gpu_allocation.reward import RewardTerms, compute_reward, reward_terms
from clustergym.gpu_allocation.space import encode_state, grant, inverse_transform, transform_action

__all__ = [
    "RewardTerms",
    "compute_reward",
    "encode_state",
    "grant",
    "inverse_transform",
    "reward_terms",
    "transform_action",
]
