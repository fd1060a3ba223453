"""Models by name, from a Hugging Face ``config.json``, or from a YAML file."""

from __future__ import annotations

from pathlib import Path

from clustergym.moe_placement.presets.huggingface import read_config
from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.spec_files import is_spec_file, read_model

_HUB = "config.json on the Hugging Face hub: "

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            "mixtral-8x7b", 32, 8, 2, 4096, 14336,
            kv_bytes=131_072, architecture="MixtralForCausalLM", source=_HUB + "mistralai/Mixtral-8x7B-v0.1",
        ),
        ModelSpec(
            "mixtral-8x22b", 56, 8, 2, 6144, 16384,
            kv_bytes=229_376, architecture="MixtralForCausalLM", source=_HUB + "mistralai/Mixtral-8x22B-v0.1",
        ),
        ModelSpec(
            "qwen3-30b-a3b", 48, 128, 8, 2048, 768,
            kv_bytes=98_304, architecture="Qwen3MoeForCausalLM", source=_HUB + "Qwen/Qwen3-30B-A3B",
        ),
        ModelSpec(
            "qwen3-235b-a22b", 94, 128, 8, 4096, 1536,
            kv_bytes=192_512, architecture="Qwen3MoeForCausalLM", source=_HUB + "Qwen/Qwen3-235B-A22B",
        ),
        ModelSpec(
            "qwen3-next-80b-a3b", 48, 512, 10, 2048, 512, n_shared=1,
            kv_bytes=24_576, architecture="Qwen3NextForCausalLM", source=_HUB + "Qwen/Qwen3-Next-80B-A3B-Instruct",
        ),
        ModelSpec(
            "deepseek-v2-lite", 26, 64, 6, 2048, 1408, n_dense=1, n_shared=2,
            kv_bytes=31_104, architecture="DeepseekV2ForCausalLM", source=_HUB + "deepseek-ai/DeepSeek-V2-Lite",
        ),
        ModelSpec(
            "deepseek-v2", 59, 160, 6, 5120, 1536, n_groups=8, group_limit=3, n_dense=1, n_shared=2,
            kv_bytes=69_120, architecture="DeepseekV2ForCausalLM", source=_HUB + "deepseek-ai/DeepSeek-V2",
        ),
        ModelSpec(
            "deepseek-v3", 58, 256, 8, 7168, 2048, weight_bytes=1, dispatch_bytes=1,
            n_groups=8, group_limit=4, n_dense=3, n_mtp=1, n_shared=1,
            kv_bytes=70_272, architecture="DeepseekV3ForCausalLM",
            source=_HUB + "deepseek-ai/DeepSeek-V3 (R1, V3.1 and V3.2 have the same experts)",
        ),
        ModelSpec(
            "deepseek-v4-flash", 43, 256, 6, 4096, 2048, weight_bytes=0.53125, dispatch_bytes=1, n_mtp=1, n_shared=1,
            architecture="DeepseekV4ForCausalLM", source=_HUB + "deepseek-ai/DeepSeek-V4-Flash",
        ),
        ModelSpec(
            "deepseek-v4-pro", 61, 384, 6, 7168, 3072, weight_bytes=0.53125, dispatch_bytes=1, n_mtp=1, n_shared=1,
            architecture="DeepseekV4ForCausalLM", source=_HUB + "deepseek-ai/DeepSeek-V4-Pro",
        ),
        ModelSpec(
            "kimi-k2", 60, 384, 8, 7168, 2048, weight_bytes=1, dispatch_bytes=1, n_dense=1, n_shared=1,
            kv_bytes=70_272, architecture="DeepseekV3ForCausalLM", source=_HUB + "moonshotai/Kimi-K2-Instruct",
        ),
        ModelSpec(
            "glm-4.5", 89, 160, 8, 5120, 1536, n_dense=3, n_mtp=1, n_shared=1,
            kv_bytes=376_832, architecture="Glm4MoeForCausalLM", source=_HUB + "zai-org/GLM-4.5",
        ),
        ModelSpec(
            "glm-4.5-air", 45, 128, 8, 4096, 1408, n_dense=1, n_mtp=1, n_shared=1,
            kv_bytes=188_416, architecture="Glm4MoeForCausalLM", source=_HUB + "zai-org/GLM-4.5-Air",
        ),
        ModelSpec(
            "minimax-m2", 62, 256, 8, 3072, 1536, weight_bytes=1, dispatch_bytes=1, n_mtp=3,
            kv_bytes=253_952, architecture="MiniMaxM2ForCausalLM", source=_HUB + "MiniMaxAI/MiniMax-M2",
        ),
        ModelSpec(
            "llama-4-maverick", 24, 128, 1, 5120, 8192, n_dense=1, layers=tuple(range(1, 48, 2)), n_shared=1,
            kv_bytes=196_608, architecture="Llama4ForConditionalGeneration",
            source=_HUB + "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        ),
        ModelSpec(
            "gpt-oss-20b", 24, 32, 4, 2880, 2880, weight_bytes=0.53125,
            kv_bytes=24_576, architecture="GptOssForCausalLM", source=_HUB + "openai/gpt-oss-20b",
        ),
        ModelSpec(
            "gpt-oss-120b", 36, 128, 4, 2880, 2880, weight_bytes=0.53125,
            kv_bytes=36_864, architecture="GptOssForCausalLM", source=_HUB + "openai/gpt-oss-120b",
        ),
        ModelSpec(
            "olmoe-1b-7b", 16, 64, 8, 2048, 1024,
            kv_bytes=131_072, architecture="OlmoeForCausalLM", source=_HUB + "allenai/OLMoE-1B-7B-0924",
        ),
        # For quick tests of agents. The costs make placement matter with a few tokens per GPU.
        ModelSpec(
            "small-moe", 2, 16, 2, 2048, 1408, kernel_start_us=5.0, kernel_expert_us=1.0, kernel_pair_us=0.5,
            source="made up for the smallest environments",
        ),
        # The model of the bundled traces (traces/tiny_moe.py) as if it had DeepSeek-V2-Lite's widths: at its
        # own (96 and 16) every placement would cost the same, because latency and kernel start are all that there is.
        ModelSpec("tiny-moe", 4, 64, 4, 2048, 1408, source="the model of the bundled traces, with larger experts"),
    )
}  # fmt: skip


def get_model(name: str | ModelSpec) -> ModelSpec:
    """A model: the name of a preset, a ``config.json`` (or its folder), or a YAML file. A spec is returned as it is."""
    if isinstance(name, ModelSpec):
        return name
    if name in MODELS:
        return MODELS[name]
    if is_spec_file(name):
        return read_model(Path(name))
    if name.endswith(".json"):
        return read_config(Path(name))
    if Path(name).is_dir():
        return read_config(Path(name) / "config.json")
    raise ValueError(
        f"unknown model {name!r}; the presets are: {', '.join(MODELS)}; "
        "or give a config.json of Hugging Face, or a YAML file"
    )
