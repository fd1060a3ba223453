"""vLLM: a JSON list of slots per MoE layer. Upstream vLLM loads no placement file yet."""

from __future__ import annotations

import json
from pathlib import Path

from clustergym.common.files import write_atomically
from clustergym.moe_placement.engines.base import Engine, EnginePlan, expect_list, read_json
from clustergym.traces.readers.slot_plans import SlotRows, checked_rows


def write(path: Path, plan: EnginePlan) -> None:
    """MoE layers are counted from 0, without dense layers."""
    write_atomically(path, json.dumps(list(plan.rows().values())) + "\n")


def read(path: Path) -> SlotRows:
    return checked_rows(dict(enumerate(expect_list(read_json(path), path))), path)


ENGINE = Engine(
    "vllm",
    (".json",),
    write,
    read,
    "upstream vLLM loads no placement file yet: return these rows from rebalance_experts of an EPLB policy, and set "
    "--eplb-config '{{\"num_redundant_experts\": {redundant}}}' on {gpus} ranks",
)
