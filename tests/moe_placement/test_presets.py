"""Models from Hugging Face configs and YAML files, clusters by name and from YAML files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clustergym.moe_placement.presets.clusters import GPUS
from clustergym.moe_placement.presets.huggingface import from_config
from clustergym.moe_placement.specs import CLUSTERS, MODELS, ClusterSpec, ModelSpec, get_cluster, get_model

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 128}


def sizes(layers: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "torch_dtype": "bfloat16", **more}


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        sizes(
            32, 4096, num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8,
        ),
        {"n_layers": 32, "n_experts": 8, "top_k": 2, "intermediate": 14336, "kv_bytes": 131_072},
    ),
    "qwen2_moe": (
        sizes(
            28, 3584, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560, intermediate_size=18944,
            shared_expert_intermediate_size=20480, decoder_sparse_step=2, mlp_only_layers=[5, 7],
        ),
        {"n_layers": 12, "layers": (1, 3, *range(9, 28, 2)), "n_shared": 1, "total_layers": 28, "intermediate": 2560},
    ),
    "qwen3_moe": (
        sizes(94, 4096, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, intermediate_size=12288,
              decoder_sparse_step=1, mlp_only_layers=[], quantization_config=FP8, **ATTENTION),
        {"n_layers": 94, "layers": (), "weight_bytes": 1, "dispatch_bytes": 1, "kv_bytes": 192_512, "n_shared": 0},
    ),
    "qwen3_next": (
        sizes(48, 2048, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, intermediate_size=5120,
              shared_expert_intermediate_size=512, full_attention_interval=4, num_attention_heads=16,
              num_key_value_heads=2, head_dim=256),
        {"n_layers": 48, "top_k": 10, "n_shared": 1, "kv_bytes": 24_576},
    ),
    "qwen3_5_moe": (
        {"text_config": sizes(40, 2048, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
                              shared_expert_intermediate_size=512, mtp_num_hidden_layers=1,
                              layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10,
                              num_attention_heads=16, num_key_value_heads=2, head_dim=256)},
        {"n_layers": 40, "n_mtp": 1, "mtp_layer_ids": (40,), "kv_bytes": 20_480},
    ),
    "deepseek_v2": (
        sizes(60, 5120, n_routed_experts=160, num_experts_per_tok=6, moe_intermediate_size=1536, n_shared_experts=2,
              first_k_dense_replace=1, moe_layer_freq=1, n_group=8, topk_group=3,
              topk_method="group_limited_greedy", intermediate_size=12288, **MLA),
        {"n_layers": 59, "n_dense": 1, "n_groups": 8, "group_limit": 3, "n_shared": 2, "weight_bytes": 2},
    ),
    "deepseek_v3": (
        sizes(61, 7168, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
              first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, topk_method="noaux_tc",
              num_nextn_predict_layers=1, intermediate_size=18432, quantization_config=FP8, **MLA),
        {"n_layers": 58, "layer_ids": tuple(range(3, 61)), "mtp_layer_ids": (61,), "group_limit": 4,
         "kv_bytes": 70_272, "weight_bytes": 1},
    ),
    "deepseek_v4": (
        sizes(43, 4096, n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048, n_shared_experts=1,
              expert_dtype="fp4", num_nextn_predict_layers=1, quantization_config=FP8, num_attention_heads=64,
              num_key_value_heads=1, head_dim=512, compress_ratios=[0, 0, 4, 128]),
        {"n_layers": 43, "top_k": 6, "weight_bytes": 0.53125, "dispatch_bytes": 1, "n_mtp": 1, "kv_bytes": 0},
    ),
    "kimi_k2": (
        sizes(61, 7168, n_routed_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
              first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1, num_nextn_predict_layers=0,
              quantization_config=FP8, **MLA),
        {"n_layers": 60, "n_experts": 384, "n_dense": 1, "n_groups": 1, "group_limit": 0, "n_mtp": 0},
    ),
    "kimi_k25": (
        {"text_config": sizes(61, 7168, n_routed_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048,
                              n_shared_experts=1, first_k_dense_replace=1, **MLA, quantization_config={
                                  "quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
                                      "num_bits": 4, "type": "int", "group_size": 32}}}})},
        {"n_layers": 60, "weight_bytes": 0.5625, "dispatch_bytes": 2},
    ),
    "glm4_moe": (
        sizes(92, 5120, n_routed_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536, n_shared_experts=1,
              first_k_dense_replace=3, n_group=1, topk_group=1, num_nextn_predict_layers=1, num_attention_heads=96,
              num_key_value_heads=8, head_dim=128),
        {"n_layers": 89, "n_dense": 3, "mtp_layer_ids": (92,), "kv_bytes": 376_832},
    ),
    "minimax_m2": (
        sizes(62, 3072, num_local_experts=256, num_experts_per_tok=8, intermediate_size=1536, num_mtp_modules=3,
              shared_intermediate_size=0, quantization_config=FP8),
        {"n_layers": 62, "intermediate": 1536, "n_mtp": 3, "n_shared": 0},
    ),
    "minimax_m3": (
        sizes(6, 6144, num_local_experts=128, num_experts_per_tok=4, moe_intermediate_size=3072, n_shared_experts=1,
              moe_layer_freq=[0, 0, 0, 1, 1, 1], num_mtp_modules=7, num_nextn_predict_layers=1),
        {"n_layers": 3, "n_dense": 3, "n_mtp": 1},
    ),
    "llama4": (
        {"model_type": "llama4", "text_config": sizes(
            48, 5120, model_type="llama4_text", num_local_experts=128, num_experts_per_tok=1, intermediate_size=8192,
            intermediate_size_mlp=16384, interleave_moe_layer_step=2)},
        {"n_layers": 24, "layers": tuple(range(1, 48, 2)), "n_shared": 1, "top_k": 1, "total_layers": 48},
    ),
    "gpt_oss": (
        sizes(36, 2880, num_local_experts=128, num_experts_per_tok=4, intermediate_size=2880, num_attention_heads=64,
              num_key_value_heads=8, head_dim=64, layer_types=["sliding_attention", "full_attention"] * 18,
              quantization_config={"quant_method": "mxfp4"}),
        {"n_layers": 36, "weight_bytes": 0.53125, "dispatch_bytes": 2, "kv_bytes": 36_864},
    ),
    "olmoe": (
        sizes(16, 2048, num_experts=64, num_experts_per_tok=8, intermediate_size=1024),
        {"n_layers": 16, "n_experts": 64, "top_k": 8, "intermediate": 1024},
    ),
    "granitemoe": (
        sizes(32, 1536, num_local_experts=40, num_experts_per_tok=8, intermediate_size=512),
        {"n_layers": 32, "n_experts": 40, "intermediate": 512},
    ),
    "ernie4_5_moe": (
        sizes(54, 8192, moe_num_experts=64, moe_k=8, moe_intermediate_size=3584, moe_layer_start_index=3,
              moe_layer_end_index=53, moe_layer_interval=1, moe_num_shared_experts=0),
        {"n_layers": 51, "n_dense": 3, "n_experts": 64},
    ),
    "jamba": (
        sizes(32, 4096, num_experts=16, num_experts_per_tok=2, intermediate_size=14336, expert_layer_period=2,
              expert_layer_offset=1),
        {"n_layers": 16, "layers": tuple(range(1, 32, 2))},
    ),
    "nemotron_h": (
        sizes(8, 2688, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
              hybrid_override_pattern="MEMEM*EM", mlp_hidden_act="relu2"),
        {"n_layers": 3, "layers": (1, 3, 6), "matrices": 2, "total_layers": 8, "expert_bytes": 2 * 2688 * 1856 * 2},
    ),
    "dbrx": (
        {"n_layers": 40, "d_model": 6144, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4,
                                                         "ffn_hidden_size": 10752}},
        {"n_layers": 40, "n_experts": 16, "top_k": 4, "hidden": 6144, "intermediate": 10752},
    ),
    "gptq": (
        sizes(32, 4096, num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336,
              quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
        {"weight_bytes": 0.5 + 2 / 128},
    ),
    "nvfp4": (
        sizes(32, 4096, num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336,
              quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        {"weight_bytes": 0.5625},
    ),
    "hunyuan_v3": (
        sizes(80, 4096, num_experts=192, num_experts_per_tok=8, expert_hidden_dim=1536, intermediate_size=13312,
              first_k_dense_replace=1, num_shared_experts=1),
        {"hidden": 4096, "intermediate": 1536},
    ),
    "kimi_k3": (
        sizes(8, 7168, num_experts=896, num_experts_per_token=16, moe_intermediate_size=3072,
              routed_expert_hidden_size=3584, num_shared_experts=2, expert_capacity=64),
        {"hidden": 3584, "intermediate": 3072, "n_shared": 2},
    ),
    "latent": (  # experts get tokens of a smaller size
        sizes(8, 8192, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688, moe_latent_size=2048),
        {"hidden": 2048, "intermediate": 2688},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_config_of_each_family(family: str, tmp_path: Path) -> None:
    config, expected = FAMILIES[family]
    path = tmp_path / "Some-Model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"architectures": ["XForCausalLM"], "model_type": family} | config))
    model = get_model(str(path))
    assert {key: getattr(model, key) for key in expected} == expected
    assert (model.name, model.architecture, model.source) == ("some-model", "XForCausalLM", str(path))
    assert get_model(str(path.parent)) == model


@pytest.mark.parametrize(
    ("preset", "family"), [("deepseek-v3", "deepseek_v3"), ("kimi-k2", "kimi_k2"), ("deepseek-v2", "deepseek_v2"),
                           ("glm-4.5", "glm4_moe"), ("qwen3-next-80b-a3b", "qwen3_next"), ("minimax-m2", "minimax_m2"),
                           ("llama-4-maverick", "llama4"), ("deepseek-v4-flash", "deepseek_v4")],
)  # fmt: skip
def test_presets_agree_with_the_configs(preset: str, family: str) -> None:
    """Both were written from the published config.json; kernel constants, names and the KV cache aside."""
    model = from_config(FAMILIES[family][0], preset)
    same = {"architecture": "", "kv_bytes": 0.0}
    assert replace(model, **same) == replace(MODELS[preset], **same)


TRANSFORMERS: dict[str, dict[str, Any]] = {
    name: {} for name in (
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "deepseek_v4", "glm4_moe",
        "glm4_moe_lite", "glm4v_moe", "glm5_next", "minimax", "minimax_m2", "minimax_m3_vl", "llama4", "gpt_oss",
        "olmoe", "granitemoe", "granitemoeshared", "granitemoehybrid", "ernie4_5_moe", "jamba", "kimi_k25",
        "kimi_linear", "exaone_moe",
    )
} | {"llama4_text": {"interleave_moe_layer_step": 2}, "deepseek_v2": {"num_experts_per_tok": 6}}  # fmt: skip


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_sizes_are_those_of_the_model_that_transformers_builds(family: str, tmp_path: Path) -> None:
    """The config is written by transformers, and the model is built without memory: its weights tell the sizes."""
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if family not in mapping:
        pytest.skip(f"this transformers has no {family}")
    config = mapping[family](**TRANSFORMERS[family])
    config.save_pretrained(tmp_path)
    kind = "AutoModelForCausalLM" if config.get_text_config() is config else "AutoModelForImageTextToText"
    with torch.device("meta"):
        built = getattr(transformers, kind).from_config(config)
    weights = {
        int(found[1]): tuple(weight.shape)
        for name, weight in built.named_parameters()
        if (found := re.search(r"layers\.(\d+)\..*experts\.down_proj$", name)) and "shared" not in name
    }
    model = get_model(str(tmp_path / "config.json"))
    assert model.layer_ids == tuple(weights)
    for n_experts, *sides in weights.values():
        assert (n_experts, sorted(sides)) == (model.n_experts, sorted((model.hidden, model.intermediate)))
    text = config.get_text_config()
    assert model.top_k == (text.moe_k if family == "ernie4_5_moe" else text.num_experts_per_tok)


def test_quantisation_beside_the_config(tmp_path: Path) -> None:
    """ModelOpt writes hf_quant_config.json."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["mixtral"][0]))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert get_model(str(tmp_path)).weight_bytes == 0.5625


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": None}, "has no routed experts: is it a dense model?"),
        ({"num_local_experts": "8"}, "num_local_experts is '8': expected an integer"),
        ({"num_hidden_layers": None}, "none of num_hidden_layers, num_layers, n_layer, n_layers is set"),
        ({"num_hidden_layers": -1}, "-1 layers"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"num_experts_per_tok": 9}, "top_k is 9, but there are only 8 experts"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq has 2 entries for 32 layers"),
        ({"moe_layer_freq": "a,b"}, "expected a list of integers"),
        ({"first_k_dense_replace": 99}, "no layer has routed experts"),
        ({"n_group": 3}, "8 experts do not divide into 3 groups"),
        ({"quantization_config": {"quant_method": "new"}}, "unknown quantisation 'new': give a YAML with weight_bytes"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "quantised to '4' bits"),
        (
            {"expert_inner_dim": 1536},
            "unknown key 'expert_inner_dim' (1536): it may be a size of the experts, so 'intermediate_size'",
        ),
        ({"expert_dims": [1536, 768]}, "unknown key 'expert_dims' ([1536, 768])"),
        (
            {"moe_intermediate_size": 768, "expert_input_dim": 512},
            "unknown key 'expert_input_dim' (512): it may be a size of the experts, so 'hidden_size' is not taken",
        ),
    ],
)
def test_bad_configs_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES["mixtral"][0] | change))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get_model(str(path))
    assert str(path) in str(error.value)


def test_model_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "n_layers: 3\nn_experts: 8\ntop_k: 2\nhidden: 64\nintermediate: 32\nweight_bytes: 1\nlayers: [1, 3, 5]\n"
    )
    assert get_model(str(path)) == ModelSpec("mine", 3, 8, 2, 64, 32, weight_bytes=1, layers=(1, 3, 5))


YAML_MODEL = "n_layers: 3\nn_experts: 8\ntop_k: 2\nhidden: 64\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML_MODEL, "no intermediate; a file needs intermediate"),
        (YAML_MODEL + "intermediate: 32\nexperts: 3", "unknown key 'experts'; the keys are: name, n_layers"),
        (YAML_MODEL + "intermediate: wide", "intermediate is 'wide': expected int"),
        (YAML_MODEL + "intermediate: true", "intermediate is True: expected int"),
        (YAML_MODEL + "intermediate: 0", "intermediate is 0: expected at least 1"),
        ("- 1\n- 2", "expected a mapping of names to values"),
        ("a: [1", "not valid YAML"),
        ("a: &x [1]\nb: *x", "YAML aliases are not allowed"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: " + "[" * 3000, "not valid YAML"),
    ],
)
def test_bad_yaml_models_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get_model(str(path))
    assert str(path) in str(error.value)


def test_missing_and_large_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file at"):
        get_model(str(tmp_path / "config.json"))
    large = tmp_path / "large.yaml"
    with open(large, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match="1073741824 bytes: a file with sizes of a model or cluster is small"):
        get_model(str(large))


@pytest.mark.parametrize(
    ("name", "gpus", "intra", "inter", "memory"),
    [
        ("h20-2x8", 16, 450, 50, 96),
        ("h200-4x8", 32, 450, 50, 141),
        ("b200-1x8", 8, 900, 50, 180),
        ("gb200-nvl72", 72, 900, 50, 186),
        ("gb200-2x72", 144, 900, 50, 186),
        ("mi300x-2x8", 16, 448, 50, 192),
        ("ascend910c-1x64", 64, 392, 50, 128),
        ("cloudmatrix384", 384, 392, 50, 128),
        ("h800-32x8", 256, 160, 40, 80),
        ("h800-40x8", 320, 160, 40, 80),
    ],
)
def test_clusters_by_name(name: str, gpus: int, intra: float, inter: float, memory: float) -> None:
    spec = get_cluster(name)
    assert (spec.name, spec.n_gpus) == (name, gpus)
    assert (spec.intra_gb_s, spec.inter_gb_s, spec.memory_gb) == (intra, inter, memory)


def test_every_gpu_and_model_names_its_source() -> None:
    assert all(spec.source for spec in MODELS.values())
    assert all(spec.source for spec in CLUSTERS.values())
    assert {name.split("-")[0] for name in CLUSTERS} >= set(GPUS)


def test_cluster_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "n_nodes: 5\ngpus_per_node: 4\nlinks:\n  intra_gb_s: 300\n  inter_gb_s: 25\n  inter_latency_us: 15\n"
    )
    expected = ClusterSpec("lab", 5, 4, None, 300, 25, inter_latency_us=15)
    assert get_cluster(str(path)) == expected
    assert get_cluster(str(path), slots_per_gpu=7) == replace(expected, slots_per_gpu=7)
    path.write_text(
        "name: ours\ngpu: h200\nn_nodes: 40\ngpus_per_node: 8\nslots_per_gpu: 1\nlinks: {inter_gb_s: 100}\n"
    )
    assert get_cluster(str(path)) == replace(get_cluster("h200-40x8"), name="ours", inter_gb_s=100.0, slots_per_gpu=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus_per_node: 4", "no n_nodes"),
        ("n_nodes: 2\ngpus_per_node: 4\ngpu: tpu", "unknown gpu 'tpu'; the types are: h800"),
        ("n_nodes: 2\ngpus_per_node: 4\nlinks: fast", "links is 'fast'"),
        ("n_nodes: 2\ngpus_per_node: 4\nlinks: {intra: 4}", "unknown key 'intra'"),
        ("n_nodes: 2\ngpus_per_node: 4\nintra_gb_s: 3\nlinks: {intra_gb_s: 4}", "intra_gb_s is given twice"),
        ("n_nodes: 2\ngpus_per_node: 4\nlinks: {intra_gb_s: -4}", "intra_gb_s is -4: a bandwidth must be more than 0"),
        ("n_nodes: 2\ngpus_per_node: 100000", "has 200000 GPUs"),
    ],
)
def test_bad_yaml_clusters_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get_cluster(str(path))
    assert str(path) in str(error.value)
