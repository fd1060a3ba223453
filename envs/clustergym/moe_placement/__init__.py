"""MoE expert and GPU placement driven by token traces."""

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
