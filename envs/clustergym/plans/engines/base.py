"""What the engine formats share: the plan, its rules, and how an engine is described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.profiles import EngineProfile
from clustergym.traces.readers.base import parse_json
from clustergym.traces.readers.slot_plans import PlanError, SlotRows

Placement = npt.NDArray[np.int16]
"""(L, G, S) logical expert in each slot."""


@dataclass(frozen=True)
class EnginePlan:
    """A placement of every MoE layer of a model. MTP layers may follow.

    Args:
        placement: (L, G, S) logical expert in each slot.
        layer_ids: (L,) global index of each layer; dense layers count.
        model: the model that the plan is for.
    """

    placement: Placement
    layer_ids: npt.NDArray[np.int64]
    model: ModelSpec

    @property
    def n_gpus(self) -> int:
        return int(self.placement.shape[1])

    @property
    def n_slots(self) -> int:
        """Slots per GPU and layer."""
        return int(self.placement.shape[2])

    @property
    def n_physical(self) -> int:
        """Slots per layer, all GPUs together."""
        return int(self.placement.shape[1] * self.placement.shape[2])

    @property
    def n_redundant(self) -> int:
        return self.n_physical - self.model.n_experts

    @property
    def unplanned_mtp_layers(self) -> list[int]:
        """MTP layers of the model that the plan does not have."""
        return sorted(set(self.model.mtp_layer_ids) - set(self.layer_ids.tolist()))

    def rows(self) -> SlotRows:
        """Global layer index → the expert in each slot, GPU by GPU, in the order of the layers."""
        rows = zip(self.layer_ids.tolist(), self.placement.reshape(len(self.placement), -1).tolist(), strict=True)
        return dict(sorted(rows))

    def moe_rows(self) -> SlotRows:
        """:meth:`rows` without MTP layers."""
        return {layer: row for layer, row in self.rows().items() if layer not in self.model.mtp_layer_ids}

    def default_row(self) -> list[int]:
        """Slots of a layer without a plan: all experts in order, then the first ones again."""
        return [i % self.model.n_experts for i in range(self.n_physical)]


@dataclass(frozen=True)
class Launch:
    """How to start an engine so that it serves as the plan assumes."""

    command: str
    """Flags or settings."""
    profile: EngineProfile
    """The profile that the plan was made for."""
    warnings: tuple[str, ...] = ()
    """What the engine will not do as planned."""


@dataclass(frozen=True)
class Engine:
    """How one engine reads its plan."""

    name: str
    suffixes: tuple[str, ...]
    write: Callable[[Path, EnginePlan], None]
    read: Callable[[Path], SlotRows]
    launch: Callable[[Path, EnginePlan, EngineProfile, int, bool], Launch]
    """(plan file, plan, profile, nodes, whether it serves both phases) → how to start the engine."""
    counts_dense: bool
    """Layers in the plan file are global indices, so dense layers count. Otherwise they are the MoE layers in order."""


def check_plan(plan: EnginePlan) -> None:
    """Check the rules of the engines. A :class:`PlanError` names the first broken rule, its layer and its GPU."""
    model, placement = plan.model, np.asarray(plan.placement)
    if placement.ndim != 3 or placement.dtype.kind not in "iu" or 0 in placement.shape:
        raise PlanError(
            f"rule 'slots divide over GPUs': the plan has shape {placement.shape} and dtype {placement.dtype}: "
            "expected integers (layers, GPUs, slots), the same number of slots on every GPU"
        )
    if len(plan.layer_ids) != len(placement):
        raise PlanError(f"rule 'one row per layer': {len(placement)} layers planned, but {len(plan.layer_ids)} named")
    if plan.n_physical < model.n_experts:
        raise PlanError(
            f"rule 'room for every expert': {plan.n_physical} slots for the {model.n_experts} experts of {model.name}"
        )
    check_layers(plan.layer_ids, model)
    for layer, gpus in zip(plan.layer_ids.tolist(), placement, strict=True):
        _check_layer(layer, gpus, model.n_experts)


def check_layers(layer_ids: npt.NDArray[np.int64], model: ModelSpec) -> None:
    """Check that a plan or trace has exactly the MoE layers of the model, and perhaps its MTP layers."""
    expected = set(model.layer_ids)
    given = layer_ids.tolist()
    if missing := sorted(expected - set(given)):
        raise PlanError(
            f"rule 'every MoE layer': layer {missing[0]} has no placement ({len(missing)} of {model.n_layers} layers "
            f"of {model.name} are missing): record all layers, because the engine loads all or none"
        )
    unexpected = sorted(set(given) - expected - set(model.mtp_layer_ids))
    if unexpected := unexpected or [layer for layer in given if given.count(layer) > 1]:
        raise PlanError(
            f"rule 'MoE layers only': layer {unexpected[0]} is not an MoE layer of {model.name}, or it appears twice: "
            f"the MoE layers are {model.layer_ids[0]} … {model.layer_ids[-1]}"
        )


def _check_layer(layer: int, gpus: npt.NDArray[Any], n_experts: int) -> None:
    for g, slots in enumerate(gpus):
        where = f"layer {layer}, GPU {g}"
        for s, expert in enumerate(slots):
            if expert == -1:
                raise PlanError(f"rule 'no empty slot': {where}, slot {s} is empty: an engine fills every slot")
            if not 0 <= expert < n_experts:
                raise PlanError(f"rule 'known experts': {where} holds expert {expert}: ids are 0 … {n_experts - 1}")
        ids, times = np.unique(slots, return_counts=True)
        if (times > 1).any():
            raise PlanError(
                f"rule 'once per GPU': {where} holds expert {ids[times > 1][0]} twice: "
                "the engine would leave the second copy unloaded or unused"
            )
    missing = np.setdiff1d(np.arange(n_experts), gpus)
    if len(missing):
        raise PlanError(
            f"rule 'every expert somewhere': layer {layer}: expert {missing[0]} is on none of GPU 0 … {len(gpus) - 1}"
        )


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes(), str(path))
    except ValueError as error:
        raise PlanError(str(error)) from error


def expect_list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{path}: expected a list of layers, found {type(value).__name__}")
    return value
