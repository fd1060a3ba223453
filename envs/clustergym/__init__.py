"""Reinforcement-learning environments for GPU clusters.

Importing the package registers its environments with Gymnasium and, if the installed version has a registry, with
PettingZoo. The import is fast: submodules are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium
import pettingzoo

from clustergym.ids import KINDS, OFFLOADING, OFFLOADING_KINDS, placement_ids

if TYPE_CHECKING:
    from clustergym import (
        gpu_allocation,
        gpu_allocation_v0,
        moe_offload,
        moe_offload_v0,
        moe_placement,
        moe_placement_v0,
        traces,
    )
    from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

__version__ = "0.3.0"
__all__ = [
    "SyntheticConfig",
    "TokenTrace",
    "gpu_allocation",
    "gpu_allocation_v0",
    "moe_offload",
    "moe_offload_v0",
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


def _register(env_id: str, single: str, vector: str, **kwargs: Any) -> None:
    """Register a single and a vector environment with Gymnasium."""
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, f"clustergym.{single}", vector_entry_point=f"clustergym.{vector}", kwargs=kwargs)


def _register_with_pettingzoo(name: str) -> None:
    if hasattr(pettingzoo, "register") and name.replace("_v", "-v") not in pettingzoo.parallel_registry:
        pettingzoo.register("parallel", name, f"clustergym.{name}:parallel_env")
        pettingzoo.register("aec", name, f"clustergym.{name}:env")


for _id, (_kind, _task) in placement_ids().items():
    _register(_id, *(f"moe_placement.{entry}" for entry in KINDS[_kind]), **_task.arguments)
for _form, _classes in OFFLOADING_KINDS.items():
    for _variant, _task in OFFLOADING.items():
        _register(f"MoEOffload{_variant}{_form}-v0", *(f"moe_offload.{name}" for name in _classes), **_task.arguments)
_ALLOCATION = ("gpu_allocation.environment:GPUAllocationEnv", "gpu_allocation.vector:GPUAllocationVectorEnv")
_register("GPUAllocation-v0", *_ALLOCATION)
_register("GPUAllocationHistory-v0", *_ALLOCATION, history=True)
_register_with_pettingzoo("moe_placement_v0")
_register_with_pettingzoo("moe_offload_v0")
_register_with_pettingzoo("gpu_allocation_v0")
