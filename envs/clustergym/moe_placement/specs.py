"""Models and clusters by name or file."""

from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.moe_placement.presets.clusters import CLUSTERS, get_cluster
from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.models import MODELS, get_model

__all__ = ["CLUSTERS", "MODELS", "ClusterSpec", "ModelSpec", "get_cluster", "get_model"]
