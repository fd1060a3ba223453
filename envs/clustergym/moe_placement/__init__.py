"""MoE expert and GPU placement driven by token traces."""

from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.simulator import Placement, Served, Simulator, Stream, Window
from clustergym.moe_placement.specs import CLUSTERS, MODELS, ClusterSpec, ModelSpec, get_cluster, get_model

__all__ = [
    "CLUSTERS",
    "MODELS",
    "ClusterSpec",
    "ModelSpec",
    "Placement",
    "PlacementBatch",
    "PlacementConfig",
    "Served",
    "Simulator",
    "Stream",
    "Window",
    "get_cluster",
    "get_model",
]
