"""TensorRT-LLM: ``moe_config.load_balancer`` takes a YAML file with the initial assignment of each layer."""

from __future__ import annotations

import json
from pathlib import Path

from clustergym.common.files import write_atomically
from clustergym.moe_placement.engines.base import Engine, EnginePlan
from clustergym.traces.readers.slot_plans import read_tensorrt_llm_plan


def write(path: Path, plan: EnginePlan) -> None:
    """Layers by global index. The engine accepts exactly these keys."""
    lines = [f"num_slots: {plan.n_physical}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {layer}: {json.dumps(row)}" for layer, row in plan.rows().items()]
    write_atomically(path, "\n".join(lines) + "\n")


ENGINE = Engine(
    "tensorrt-llm",
    (".yaml", ".yml"),
    write,
    read_tensorrt_llm_plan,
    "moe_config.load_balancer: {path} (moe_expert_parallel_size: {gpus})",
)
