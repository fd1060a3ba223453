"""MoE expert and GPU placement driven by token traces.

Submodules are imported when one of their names is first used, so commands that only read files start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
    from clustergym.moe_placement.profiles import PROFILES, EngineProfile, get_profile
    from clustergym.moe_placement.simulator import Placement, Served, Simulator
    from clustergym.moe_placement.specs import CLUSTERS, MODELS, ClusterSpec, ModelSpec, get_cluster, get_model
    from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic

__all__ = [
    "CLUSTERS",
    "MODELS",
    "PROFILES",
    "ClusterSpec",
    "EngineProfile",
    "Interval",
    "IntervalStream",
    "ModelSpec",
    "Placement",
    "PlacementBatch",
    "PlacementConfig",
    "Served",
    "Simulator",
    "Traffic",
    "get_cluster",
    "get_model",
    "get_profile",
]

_FROM = (
    dict.fromkeys(("PlacementBatch", "PlacementConfig"), "batch")
    | dict.fromkeys(("PROFILES", "EngineProfile", "get_profile"), "profiles")
    | dict.fromkeys(("Placement", "Served", "Simulator"), "simulator")
    | dict.fromkeys(("Interval", "IntervalStream", "Traffic"), "streams")
    | dict.fromkeys(("CLUSTERS", "MODELS", "ClusterSpec", "ModelSpec", "get_cluster", "get_model"), "specs")
)


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(
            f"module 'clustergym.moe_placement' has no attribute {name!r}; it has: {', '.join(__all__)}"
        )
    return getattr(import_module(f"clustergym.moe_placement.{_FROM[name]}"), name)
