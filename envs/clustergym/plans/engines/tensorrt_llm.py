"""TensorRT-LLM: ``moe_config.load_balancer`` takes a YAML file with the initial assignment of each layer."""

from __future__ import annotations

import json
from pathlib import Path

from clustergym.common.files import write_atomically
from clustergym.moe_placement.profiles import EngineProfile
from clustergym.plans.engines.base import Engine, EnginePlan, Launch
from clustergym.traces.readers.slot_plans import read_tensorrt_llm_plan

BALANCED = frozenset({
    "DeepseekV3ForCausalLM", "MixtralForCausalLM", "Llama4ForConditionalGeneration", "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
})  # fmt: skip
"""Model classes for which TensorRT-LLM creates its load balancer. It ignores the plan of any other."""


def write(path: Path, plan: EnginePlan) -> None:
    """Layers by global index. The engine accepts exactly these keys.

    An MTP layer that was not recorded gets the default placement: without a row, the worker would crash.
    """
    rows = plan.rows() | dict.fromkeys(plan.unplanned_mtp_layers, plan.default_row())
    lines = [f"num_slots: {plan.n_physical}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {layer}: {json.dumps(row)}" for layer, row in sorted(rows.items())]
    write_atomically(path, "\n".join(lines) + "\n")


def launch(path: Path, plan: EnginePlan, profile: EngineProfile, n_nodes: int, both_phases: bool) -> Launch:
    """Settings of the LLM API. Without attention data parallelism every GPU has every token, and nothing is sent."""
    gpus = plan.n_gpus
    command = (
        f"--tp_size {gpus} --ep_size {gpus} --extra_llm_api_options options.yaml, with options.yaml: "
        f"{{enable_attention_dp: true, moe_config: {{backend: WIDEEP, load_balancer: {json.dumps(str(path))}}}}}"
    )
    warnings = []
    name = plan.model.architecture
    if name and name not in BALANCED:
        warnings.append(f"TensorRT-LLM ignores the plan: it has no load balancer for {name}")
    if missing := plan.unplanned_mtp_layers:
        warnings.append(
            f"MTP layers {missing} are not planned, because they were not recorded: they get the default placement. "
            "Record with speculative decoding on"
        )
    return Launch(command, profile, tuple(warnings))


ENGINE = Engine("tensorrt-llm", (".yaml", ".yml"), write, read_tensorrt_llm_plan, launch, counts_dense=True)
