"""Export of a placement policy for programs that do not have this package: ONNX, safetensors and JSON.

``export_onnx`` writes four files to a folder:

* ``expert_actor.onnx``: observation → a score per expert, and the embeddings that the GPU actor starts from.
* ``gpu_actor.onnx``: embeddings, the chosen expert and its look-ahead → a score per GPU for PLACE, ADD and DELETE.
* ``policy.safetensors``: the same weights by parameter name.
* ``policy.json``: sizes, task settings, and the name, type and shape of every input and output.

Numbers of layers, experts and GPUs are free: one file works for any model and cluster. The inputs are the columns of
the environment's observation (:mod:`.inputs`), the look-ahead is that of :class:`PlacementBatch`, in per cent.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_placement.kernels.observation import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.kernels.state import MEMORY_GAIN, MEMORY_LOOKED, N_PARTS
from clustergym.planners.policy.export import read_policy
from clustergym.planners.policy.inputs import PER_CENT, PROGRESS
from clustergym.planners.policy.network import PolicyNetwork

L, E, G, NODES = "layers", "experts", "gpus", "3*gpus"
_EXAMPLE = {L: 2, E: 6, G: 4, NODES: 12}
"""Sizes of the example that the networks are traced with. All differ, so that none is mistaken for another."""


class ExpertActor(nn.Module):
    """The first actor as one function of tensors."""

    outputs: ClassVar[tuple[str, ...]] = ("logits", "expert_embeddings", "gpu_embeddings", "near", "near_node")

    def __init__(self, network: PolicyNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        experts: Tensor,
        memory: Tensor,
        gpus: Tensor,
        traffic: Tensor,
        placement: Tensor,
        progress: Tensor,
        expert_mask: Tensor,
        coactivation: Tensor,
        similar: Tensor,
        same_node: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs = {
            "experts": experts, "memory": memory, "gpus": gpus, "traffic": traffic, "placement": placement,
            "progress": progress, "expert_mask": expert_mask, "coactivation": coactivation, "similar": similar,
            "same_node": same_node,
        }  # fmt: skip
        found = self.network.encode(inputs)
        logits = self.network.expert_logits(inputs, found)
        return logits, found["experts"], found["gpus"], found["near"], found["near_node"]


class GPUActor(nn.Module):
    """The second actor as one function of tensors."""

    outputs: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(self, network: PolicyNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        gpus: Tensor,
        traffic: Tensor,
        placement: Tensor,
        same_node: Tensor,
        expert_embeddings: Tensor,
        gpu_embeddings: Tensor,
        near: Tensor,
        near_node: Tensor,
        expert: Tensor,
        parts: Tensor,
        legal: Tensor,
    ) -> Tensor:
        inputs = {"gpus": gpus, "traffic": traffic, "placement": placement, "same_node": same_node, "gpu_mask": legal}
        encoded = {"experts": expert_embeddings, "gpus": gpu_embeddings, "near": near, "near_node": near_node}
        return self.network.node_logits(inputs, encoded, expert, parts, legal)


def shapes(hidden: int) -> dict[str, tuple[int | str, ...]]:
    """Shape of every input and output of the actors. Names are sizes that may vary."""
    return {
        "experts": (L, E, N_EXPERT_FEATURES),
        "memory": (L, E, MEMORY_LOOKED + 1),
        "gpus": (L, NODES, N_GPU_FEATURES),
        "traffic": (L, G, G),
        "placement": (L, E, G),
        "progress": (L, len(PROGRESS)),
        "expert_mask": (L, E),
        "coactivation": (L, E, E),
        "similar": (L, E, E),
        "same_node": (G, G),
        "expert_embeddings": (L, E, hidden),
        "gpu_embeddings": (L, G, hidden),
        "near": (L, E, G),
        "near_node": (L, E, G),
        "expert": (L,),
        "parts": (L, NODES, N_PARTS),
        "legal": (L, NODES),
    }


_TYPES = {"expert_mask": torch.bool, "legal": torch.bool, "expert": torch.int64}


def input_names(actor: nn.Module) -> list[str]:
    return list(inspect.signature(actor.forward).parameters)


def export_onnx(source: str | Path, folder: Path) -> dict[str, Any]:
    """Write the files of a policy (a policy.pt, a run folder or ``pretrained``). Returns the content of policy.json."""
    for package in ("onnx", "onnxscript"):
        require(package, "onnx")
    content = read_policy(source)
    network = PolicyNetwork.from_state(content["network"], content["weights"])
    folder.mkdir(parents=True, exist_ok=True)
    described = {}
    for name, actor in (("expert_actor", ExpertActor(network)), ("gpu_actor", GPUActor(network))):
        _write_actor(actor, folder / f"{name}.onnx", network.config.hidden)
        sizes = shapes(network.config.hidden)
        described[name] = {
            "inputs": {key: {"shape": sizes[key], "type": _type_name(key)} for key in input_names(actor)},
            "outputs": list(actor.outputs),
        }
    _write_weights(network.state_dict(), folder / "policy.safetensors")
    text = {
        "network": asdict(network.config),
        "settings": content["view"],
        "actors": described,
        "progress_columns": list(PROGRESS),
        "scaled_by_100": ["parts", f"memory column {MEMORY_GAIN}"],
        "look_ahead_per_cent": PER_CENT,
        "about": content["about"],
    }
    write_atomically(folder / "policy.json", json.dumps(text, indent=1, default=str) + "\n")
    return text


def _type_name(key: str) -> str:
    return str(_TYPES.get(key, torch.float32)).removeprefix("torch.")


def _write_actor(actor: ExpertActor | GPUActor, path: Path, hidden: int) -> None:
    gpus = torch.export.Dim(G, min=2)
    free = {L: torch.export.Dim(L, min=1), E: torch.export.Dim(E, min=2), G: gpus, NODES: 3 * gpus}
    sizes, names = shapes(hidden), input_names(actor)
    example = tuple(
        torch.zeros([_EXAMPLE[n] if isinstance(n, str) else n for n in sizes[key]], dtype=_TYPES.get(key))
        for key in names
    )
    dynamic = tuple({i: free[n] for i, n in enumerate(sizes[key]) if isinstance(n, str)} for key in names)
    # The exporter prints its steps and warns about packages that it could use: nothing that a user can act on.
    quiet = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx._internal.exporter._registration")
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                actor.eval(), example, dynamo=True, dynamic_shapes=dynamic, input_names=names,
                output_names=list(actor.outputs), verbose=False,
            )  # fmt: skip
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)
    assert program is not None
    with atomic_file(path) as file:
        file.write(program.model_proto.SerializeToString())


def _write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    with atomic_file(path) as file:
        file.write(
            require("safetensors.torch", "onnx").save({name: value.contiguous() for name, value in weights.items()})
        )
