"""SGLang: ``--init-expert-location`` takes a JSON or torch file with one row of slots per layer."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Any

from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_placement.profiles import EngineProfile
from clustergym.plans.engines.base import Engine, EnginePlan, Launch, expect_list, read_json
from clustergym.traces.readers.slot_plans import PlanError, SlotRows, checked_rows

KEY = "physical_to_logical_map"

HOOKED = frozenset({
    "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM",
    "Dots3NoteForCausalLM", "DotsVLMForCausalLM", "ExaoneMoEForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "InternS1ProForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "LongcatFlashForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM",
    "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    "MistralLarge3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "SDARMoeForCausalLM", "SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "Step3VLForConditionalGeneration",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "TransformersMoEForCausalLM",
})  # fmt: skip
"""Model classes with ``get_model_config_for_expert_location``, read from SGLang's sources of August 2026. The others
ignore a plan."""

_DISPATCH = {"rank-nearest": "static", "random": "dynamic", "lp": "lp"}
_DEEPEP = {"dedup": "normal", "per-expert": "low_latency"}


def write(path: Path, plan: EnginePlan) -> None:
    """Dense layers get a row too, ``i % E``, which the engine ignores. Any other key would be a TypeError in SGLang.

    MTP layers are left out: SGLang gives a draft model the default placement.
    """
    rows = plan.rows()
    table = [rows.get(layer, plan.default_row()) for layer in range(plan.model.total_layers)]
    if path.suffix == ".pt":
        torch = require("torch", "engines")
        with atomic_file(path) as file:
            torch.save({KEY: torch.tensor(table)}, file)
    else:
        write_atomically(path, json.dumps({KEY: table}) + "\n")


def read(path: Path) -> SlotRows:
    document = _load_tensors(path) if path.suffix == ".pt" else read_json(path)
    if not isinstance(document, dict) or set(document) != {KEY}:
        raise PlanError(f"{path}: expected exactly the key {KEY}")
    rows = expect_list(document[KEY], path)
    return checked_rows(dict(enumerate(rows)), path)


def _load_tensors(path: Path) -> Any:
    """The dict of a torch file with its tensor as lists."""
    require("torch", "engines")
    from clustergym.traces.readers.torch_files import load_tensors

    document = load_tensors(path)
    if not isinstance(document, dict):
        return document
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in document.items()}


def launch(path: Path, plan: EnginePlan, profile: EngineProfile, n_nodes: int, both_phases: bool) -> Launch:
    """Without an all-to-all backend SGLang would send every token to every GPU, and the plan would have no effect."""
    gpus, mode = plan.n_gpus, "auto" if both_phases else _DEEPEP[profile.transport]
    command = (
        f"--init-expert-location {quote(str(path))} --ep-num-redundant-experts {plan.n_redundant} "
        f"--tp-size {gpus} --dp-size {gpus} --ep-size {gpus} --nnodes {n_nodes} --enable-dp-attention "
        f"--moe-a2a-backend deepep --deepep-mode {mode} "
        f"--ep-dispatch-algorithm {_DISPATCH[profile.dispatch]}"
    )
    warnings = []
    name = plan.model.architecture
    if name and name not in HOOKED:
        warnings.append(
            f"SGLang ignores the plan: its class {name} has no get_model_config_for_expert_location, so experts stay "
            "where they are"
        )
    return Launch(command, profile, tuple(warnings))


ENGINE = Engine("sglang", (".json", ".pt"), write, read, launch, counts_dense=True)
