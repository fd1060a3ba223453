"""A shared GPU: pods request a share of it, and an agent decides how much each pod gets.

The simulator is imported when one of its names is first used, so an agent on a node can import the reward and the
action transform without NumPy and numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clustergym.gpu_allocation.reward import compute_reward
from clustergym.gpu_allocation.space import encode_state, grant, inverse_transform, transform_action

if TYPE_CHECKING:
    from clustergym.gpu_allocation.batch import AllocationBatch
    from clustergym.gpu_allocation.specs import AllocationConfig, NodeMix, edge_mixes
    from clustergym.gpu_allocation.workload import Workload, read_openb, synthetic_workload

__all__ = [
    "AllocationBatch",
    "AllocationConfig",
    "NodeMix",
    "Workload",
    "compute_reward",
    "edge_mixes",
    "encode_state",
    "grant",
    "inverse_transform",
    "read_openb",
    "synthetic_workload",
    "transform_action",
]

_FROM = {
    "AllocationBatch": "batch",
    **dict.fromkeys(("AllocationConfig", "NodeMix", "edge_mixes"), "specs"),
    **dict.fromkeys(("Workload", "read_openb", "synthetic_workload"), "workload"),
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(
            f"module 'clustergym.gpu_allocation' has no attribute {name!r}; it has: {', '.join(__all__)}"
        )
    return getattr(import_module(f"clustergym.gpu_allocation.{_FROM[name]}"), name)
