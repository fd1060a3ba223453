"""SGLang: ``--init-expert-location`` takes a JSON or torch file with one row of slots per layer."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_placement.engines.base import Engine, EnginePlan, expect_list, read_json
from clustergym.traces.readers.slot_plans import PlanError, SlotRows, checked_rows
from clustergym.traces.readers.torch_files import load_tensors

KEY = "physical_to_logical_map"


def write(path: Path, plan: EnginePlan) -> None:
    """Dense layers get a row too, ``i % E``, which the engine ignores. Any other key would be a TypeError in SGLang."""
    unused = [i % plan.model.n_experts for i in range(plan.n_physical)]
    rows = plan.rows()
    table = [rows.get(layer, unused) for layer in range(plan.model.n_dense + plan.model.n_layers)]
    if path.suffix == ".pt":
        with atomic_file(path) as file:
            torch.save({KEY: torch.tensor(table)}, file)
    else:
        write_atomically(path, json.dumps({KEY: table}) + "\n")


def read(path: Path) -> SlotRows:
    document = load_tensors(path) if path.suffix == ".pt" else read_json(path)
    if not isinstance(document, dict) or set(document) != {KEY}:
        raise PlanError(f"{path}: expected exactly the key {KEY}")
    table = document[KEY]
    rows = expect_list(table.tolist() if isinstance(table, torch.Tensor) else table, path)
    return checked_rows(dict(enumerate(rows)), path)


ENGINE = Engine(
    "sglang",
    (".json", ".pt"),
    write,
    read,
    "--init-expert-location {path} --ep-num-redundant-experts {redundant} --ep-size {gpus}",
)
