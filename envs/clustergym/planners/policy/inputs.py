"""What the policy's networks read: tensors made from the environment's observation.

The trainer and the ``policy`` planner use the same functions, so a network sees the same inputs in training and in
use. The environment must be made with ``memory=True``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clustergym.moe_placement.kernels.observation import (
    PROGRESS_MIGRATION,
    PROGRESS_OPERATION,
    PROGRESS_SLOWEST_KERNEL,
    PROGRESS_TIME,
)
from clustergym.moe_placement.kernels.state import MEMORY_GAIN, PART_MIGRATION, PART_SMOOTH
from clustergym.moe_placement.specs import ClusterSpec

# Columns of the environment's progress that mean the same in every task. Layer and interval numbers do not.
PROGRESS = [PROGRESS_OPERATION, PROGRESS_TIME, PROGRESS_SLOWEST_KERNEL, PROGRESS_MIGRATION]
# Look-aheads are shares of a layer's time, mostly below a hundredth. Networks learn better from numbers near one.
PER_CENT = 100.0
# Inputs that stay the same while the agents work on a layer, and those that change with each operation.
LAYER_KEYS = ("coactivation", "similar")
STEP_KEYS = ("experts", "memory", "gpus", "traffic", "placement", "progress", "expert_mask", "gpu_mask")

Inputs = dict[str, Tensor]


def same_node_weights(cluster: ClusterSpec, device: torch.device | str = "cpu") -> Tensor:
    """(G, G): which GPUs share a node; rows sum to 1."""
    node = torch.arange(cluster.n_gpus, device=device) // cluster.gpus_per_node
    return (node[:, None] == node[None, :]).float() / cluster.gpus_per_node


def similar_experts(affinity: Tensor) -> Tensor:
    """(B, E, E): experts that follow the same experts of the layer before; rows sum to 1 (0 in the first layer)."""
    similar = affinity.transpose(1, 2) @ affinity
    return similar / similar.sum(-1, keepdim=True).clamp(min=1e-6)


def policy_inputs(obs: Mapping[str, Tensor], similar: Tensor, same_node: Tensor) -> Inputs:
    """The networks' inputs. Most share memory with the observation, which the next step overwrites."""
    memory = obs["memory"].clone()
    memory[..., MEMORY_GAIN] *= PER_CENT
    return {
        "experts": obs["experts"],
        "memory": memory,
        "gpus": obs["gpus"],
        "traffic": obs["traffic"],
        "placement": obs["placement"],
        "progress": obs["progress"][:, PROGRESS],
        "expert_mask": obs["expert_mask"].bool(),
        "gpu_mask": obs["gpu_mask"].bool(),
        "coactivation": obs["coactivation"],
        "similar": similar,
        "same_node": same_node,
    }


def gains(parts: Tensor) -> Tensor:
    """What an operation is worth: smooth time saved minus migration, (…, parts) → (…)."""
    return parts[..., PART_SMOOTH] + parts[..., PART_MIGRATION]
