"""vllm-ascend: ``eplb_config.expert_map_path`` takes a JSON file with the experts of each device, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path

from clustergym.common.files import write_atomically
from clustergym.moe_placement.engines.base import Engine, EnginePlan, read_json
from clustergym.traces.readers.slot_plans import PlanError, SlotRows, checked_rows


def write(path: Path, plan: EnginePlan) -> None:
    """MoE layers are counted from 0, without dense layers."""
    slots = plan.placement.shape[2]
    layers = [
        {
            "layer_id": i,
            "device_count": plan.n_gpus,
            "device_list": [
                {"device_id": g, "device_expert": row[g * slots : (g + 1) * slots]} for g in range(plan.n_gpus)
            ],
        }
        for i, row in enumerate(plan.rows().values())
    ]
    write_atomically(path, json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n")


def read(path: Path) -> SlotRows:
    document = read_json(path)
    try:
        devices = [sorted(layer["device_list"], key=lambda d: d["device_id"]) for layer in document["layer_list"]]
        rows = {
            i: [expert for device in layer for expert in device["device_expert"]] for i, layer in enumerate(devices)
        }
        sizes = {len(device["device_expert"]) for layer in devices for device in layer}
        if document["moe_layer_count"] != len(devices) or len(sizes) != 1:
            raise PlanError(f"{path}: moe_layer_count or the number of slots per device does not match the lists")
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path}: not an expert map of vllm-ascend: {error!r}") from error
    return checked_rows(rows, path)


ENGINE = Engine(
    "vllm-ascend",
    (".json",),
    write,
    read,
    "additional_config: eplb_config.expert_map_path = {path} ({gpus} devices, {redundant} redundant experts)",
)
