"""Reinforcement-learning environments for GPU clusters.

Importing the package registers its environments with Gymnasium and, where the installed version has a registry, with
PettingZoo. It is light: what is named here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium

if TYPE_CHECKING:
    from clustergym import gpu_allocation, gpu_allocation_v0, moe_placement, moe_placement_v0, traces
    from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

__version__ = "0.1.0"
__all__ = [
    "SyntheticConfig",
    "TokenTrace",
    "gpu_allocation",
    "gpu_allocation_v0",
    "moe_placement",
    "moe_placement_v0",
    "synthetic_trace",
    "traces",
]

_FROM = dict.fromkeys(("SyntheticConfig", "TokenTrace", "synthetic_trace"), "clustergym.traces")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'clustergym' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_FROM[name]), name) if name in _FROM else import_module(f"clustergym.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


_PLACEMENT = "clustergym.moe_placement.environment"
_ALLOCATION = "clustergym.gpu_allocation.environment"

for _id, _module, _single, _vector, _kwargs in (
    ("MoEPlacement-v0", _PLACEMENT, "MoEPlacementEnv", "MoEPlacementVectorEnv", {}),
    (
        "MoEPlacementDrift-v0", _PLACEMENT, "MoEPlacementEnv", "MoEPlacementVectorEnv",
        {"windows": 8, "schedule": "drift", "start": "eplb"},
    ),
    ("GPUAllocation-v0", _ALLOCATION, "GPUAllocationEnv", "GPUAllocationVectorEnv", {}),
    ("GPUAllocationHistory-v0", _ALLOCATION, "GPUAllocationEnv", "GPUAllocationVectorEnv", {"history": True}),
):  # fmt: skip
    if _id not in gymnasium.registry:
        gymnasium.register(
            _id, entry_point=f"{_module}:{_single}", vector_entry_point=f"{_module}:{_vector}", kwargs=_kwargs
        )


def _register_with_pettingzoo(name: str) -> None:
    import pettingzoo

    if hasattr(pettingzoo, "register") and name.replace("_v", "-v") not in pettingzoo.parallel_registry:
        pettingzoo.register("parallel", name, f"clustergym.{name}:parallel_env")
        pettingzoo.register("aec", name, f"clustergym.{name}:env")


for _name in ("moe_placement_v0", "gpu_allocation_v0"):
    _register_with_pettingzoo(_name)
