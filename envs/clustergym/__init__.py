"""Reinforcement-learning environments for GPU clusters.

Importing the package registers ``MoEPlacement-v0`` and ``MoEPlacementDrift-v0`` with Gymnasium and ``moe_placement_v0`` with
PettingZoo's registry, where the installed version has one.
"""

import gymnasium
import pettingzoo

from clustergym import moe_placement, moe_placement_v0, traces
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

__version__ = "0.1.0"
__all__ = [
    "SyntheticConfig",
    "TokenTrace",
    "moe_placement",
    "moe_placement_v0",
    "synthetic_trace",
    "traces",
]

_ENTRY = "clustergym.moe_placement.environment"

for _id, _kwargs in (
    ("MoEPlacement-v0", {}),
    ("MoEPlacementDrift-v0", {"windows": 8, "schedule": "drift", "start": "eplb"}),
):
    if _id not in gymnasium.registry:
        gymnasium.register(
            _id,
            entry_point=f"{_ENTRY}:MoEPlacementEnv",
            vector_entry_point=f"{_ENTRY}:MoEPlacementVectorEnv",
            kwargs=_kwargs,
        )

if hasattr(pettingzoo, "register") and "moe_placement-v0" not in pettingzoo.parallel_registry:
    pettingzoo.register("parallel", "moe_placement_v0", "clustergym.moe_placement_v0:parallel_env")
    pettingzoo.register("aec", "moe_placement_v0", "clustergym.moe_placement_v0:env")
