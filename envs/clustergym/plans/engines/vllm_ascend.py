"""vllm-ascend: ``eplb_config.expert_map_path`` takes a JSON file with the experts of each device, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from clustergym.common.files import write_atomically
from clustergym.moe_placement.profiles import EngineProfile
from clustergym.plans.engines.base import Engine, EnginePlan, Launch, read_json
from clustergym.traces.readers.slot_plans import PlanError, SlotRows, checked_rows


def write(path: Path, plan: EnginePlan) -> None:
    """MoE layers are counted from 0, without dense layers. The engine gives the MTP layer a placement of its own."""
    slots = plan.n_slots
    layers = [
        {
            "layer_id": i,
            "device_count": plan.n_gpus,
            "device_list": [
                {"device_id": g, "device_expert": row[g * slots : (g + 1) * slots]} for g in range(plan.n_gpus)
            ],
        }
        for i, row in enumerate(plan.moe_rows().values())
    ]
    write_atomically(path, json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n")


def read(path: Path) -> SlotRows:
    """The engine takes devices in the order of the list, so another order than that of their ids is refused."""
    document = read_json(path)
    try:
        layers = [layer["device_list"] for layer in document["layer_list"]]
        rows = {i: [expert for device in layer for expert in device["device_expert"]] for i, layer in enumerate(layers)}
        sizes = {len(device["device_expert"]) for layer in layers for device in layer}
        if document["moe_layer_count"] != len(layers) or len(sizes) != 1:
            raise PlanError(f"{path}: moe_layer_count or the number of slots per device does not match the lists")
        if any([device["device_id"] for device in layer] != list(range(len(layer))) for layer in layers):
            raise PlanError(f"{path}: the devices of a layer are not listed in the order 0, 1, 2, …")
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path}: not an expert map of vllm-ascend: {error!r}") from error
    return checked_rows(rows, path)


def launch(path: Path, plan: EnginePlan, profile: EngineProfile, n_nodes: int, both_phases: bool) -> Launch:
    config = json.dumps({"eplb_config": {"expert_map_path": str(path)}})
    command = (
        f"--data-parallel-size {plan.n_gpus} --data-parallel-size-local {plan.n_gpus // n_nodes} "
        f"--enable-expert-parallel --additional-config {quote(config)}, "
        "with the environment variable VLLM_USE_V2_MODEL_RUNNER=0"
    )
    warnings = [
        "vllm-ascend loads a static map only with model runner v1, and removes it in v0.25.1: use an earlier version"
    ]
    if plan.model.n_mtp > 1:
        warnings.append(f"vllm-ascend accepts one MTP layer beside the map, {plan.model.name} has {plan.model.n_mtp}")
    return Launch(command, profile, tuple(warnings))


ENGINE = Engine("vllm-ascend", (".json",), write, read, launch, counts_dense=False)
