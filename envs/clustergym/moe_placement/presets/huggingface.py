"""Sizes of a model from its Hugging Face ``config.json``.

The families name the same thing differently. Each size has a list of keys, tried in order; rules that differ by family,
such as which layers have experts, are functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.spec_files import read_text

Config = dict[str, Any]

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_top_k", "moe_topk",
          "top_k_experts")  # fmt: skip
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_hidden_dim", "expert_dim")
_DENSE_WIDTH = ("intermediate_size", "ffn_dim")
"""The width of experts too, in families without dense layers."""
_LATENT = ("routed_expert_hidden_size", "moe_latent_size")
"""Size of the tokens that routed experts get, if it is not the hidden size."""
_OTHER = ("expert_capacity", "expert_layer_period", "expert_layer_offset", "zero_expert_num")
"""Other numbers about experts."""
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
                 "moe_shared_expert_intermediate_size")  # fmt: skip
_DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_modules")
_GROUPS = ("n_group", "num_expert_group")
_GROUP_LIMIT = ("topk_group", "num_limited_groups")
_INNER = ("text_config", "language_config", "llm_config", "thinker_config")
_NO_CACHE = ("sliding", "chunked", "linear", "mamba")
_SCALED_4_BIT = 0.5 + 1 / 32  # mxfp4: one byte of scale for 32 weights
_NVFP4 = 0.5 + 1 / 16


def read_config(path: Path) -> ModelSpec:
    """The model of a ``config.json``. A ValueError says which size is missing or makes no sense."""
    config = _load(path)
    beside = path.with_name("hf_quant_config.json")  # ModelOpt writes the quantisation here
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _load(beside).get("quantization", {})
    try:
        return from_config(config, _name_of(config, path), str(path))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:  # any value may have any type
        raise ValueError(f"{path}: {error}") from error


def _load(path: Path) -> Config:
    try:
        document = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: contains a {type(document).__name__}: expected the object of a config.json")
    return document


def _name_of(config: Config, path: Path) -> str:
    given = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    if given:
        return given.lower()
    if path.stem != "config":
        return path.stem.removesuffix("_config").lower()
    return (path.resolve().parent.name or str(config.get("model_type", "model"))).lower()


def from_config(config: Config, name: str, source: str = "") -> ModelSpec:
    """The model that the object of a ``config.json`` describes."""
    text = _text_model(config)
    n_experts = _number(text, _EXPERTS, 0)
    if n_experts < 2:
        raise ValueError(f"{text.get('model_type', 'the model')!r} has no routed experts: is it a dense model?")
    kinds = text.get("layers_block_type")  # Nemotron-H
    total = _number(text, _LAYERS, len(kinds) if isinstance(kinds, list) else None)
    layers = _moe_layers(text, total)
    if not layers:
        raise ValueError("no layer has routed experts")
    groups = max(_number(text, _GROUPS, 1), 1)
    limited = groups > 1 and text.get("topk_method") != "greedy"
    quantisation = config.get("quantization_config") or text.get("quantization_config") or {}
    weight_bytes = _weight_bytes(text, config, quantisation)
    contiguous = layers == list(range(layers[0], layers[-1] + 1))
    architectures = config.get("architectures") or text.get("architectures") or [""]
    width, hidden = _width(text), _expert_hidden(text)
    return ModelSpec(
        name,
        len(layers),
        n_experts,
        _number(text, _TOP_K),
        hidden,
        width,
        weight_bytes=weight_bytes,
        dispatch_bytes=1.0 if _is_fp8(quantisation) else 2.0,
        n_groups=groups,
        group_limit=_number(text, _GROUP_LIMIT, 0) if limited else 0,
        n_dense=layers[0],
        layers=() if contiguous else tuple(layers),
        n_hidden_layers=0 if layers[-1] == total - 1 else total,
        n_mtp=_number(text, _MTP, 0),
        n_shared=_shared(text),
        matrices=2 if text.get("mlp_hidden_act") == "relu2" else 3,
        kv_bytes=_kv_bytes(text, total),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        source=source,
    )


def _text_model(config: Config) -> Config:
    """The part of the config that describes the language model: multimodal models nest it."""
    for key in _INNER:
        inner = config.get(key)
        if isinstance(inner, dict):
            return _text_model(inner) if any(k in inner for k in _INNER) else _flat(inner)
    return _flat(config)


def _flat(config: Config) -> Config:
    """The config with the nested sizes of DBRX at the top."""
    inner = config.get("ffn_config")
    if not isinstance(inner, dict):
        return config
    known = {"moe_num_experts": "num_experts", "moe_top_k": "num_experts_per_tok", "ffn_hidden_size": "ffn_dim"}
    return config | {new: inner[old] for old, new in known.items() if old in inner}


def _number(config: Config, keys: tuple[str, ...], default: int | None = None) -> int:
    """The first of the keys that is set. A list, one value per layer or modality, gives its first value."""
    for key in keys:
        value = config.get(key)
        value = value[0] if isinstance(value, list) and value else value
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int):
            raise ValueError(f"{key} is {value!r}: expected an integer")
        return value
    if default is None:
        raise ValueError(f"none of {', '.join(keys)} is set")
    return default


def _integers(value: Any, key: str) -> list[int]:
    if isinstance(value, str):
        value = [int(part) if part.strip().isdigit() else None for part in value.split(",")]
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise ValueError(f"{key} is {str(value)[:60]}: expected a list of integers")
    return value


def _moe_layers(config: Config, total: int) -> list[int]:
    """Global indices of the layers with routed experts."""
    if not 0 < total <= 10_000:
        raise ValueError(f"{total} layers")
    return [layer for layer in range(total) if all(rule(layer) for rule in _rules(config, total))]


def _rules(config: Config, total: int) -> list[Callable[[int], bool]]:
    """Conditions that a layer with experts fulfils, whatever the family."""
    first = _number(config, _DENSE_FIRST, 0)
    rules: list[Callable[[int], bool]] = [lambda layer: layer >= first]
    last = config.get("moe_layer_end_index")  # ERNIE
    if isinstance(last, int) and last >= 0:
        rules.append(lambda layer: layer <= last)
    for key in ("moe_layers", "moe_layers_enum"):  # Llama 4, Step
        if config.get(key):
            listed = set(_integers(config[key], key))
            rules.append(listed.__contains__)
    if config.get("mlp_only_layers"):  # Qwen
        dense = set(_integers(config["mlp_only_layers"], "mlp_only_layers"))
        rules.append(lambda layer: layer not in dense)
    for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_frequency"):
        step = _number(config, (key,), 1)
        if step > 1:  # every step-th layer, the last of each step
            rules.append(lambda layer, step=step: (layer + 1) % step == 0)  # type: ignore[misc]
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, (list, str)):
        flags = _integers(frequency, "moe_layer_freq")
        if len(flags) < total:
            raise ValueError(f"moe_layer_freq has {len(flags)} entries for {total} layers")
        rules.append(lambda layer: flags[layer] != 0)
    elif isinstance(frequency, int) and frequency > 1:  # DeepSeek
        rules.append(lambda layer: layer % frequency == 0)
    period = _number(config, ("expert_layer_period",), 1)  # Jamba
    if period > 1:
        offset = _number(config, ("expert_layer_offset",), 0)
        rules.append(lambda layer: layer % period == offset)
    blocks = config.get("mlp_layer_types")  # transformers 5: GLM, Kimi Linear and others
    if isinstance(blocks, list) and "sparse" in blocks:
        rules.append(lambda layer: blocks[layer : layer + 1] == ["sparse"])
    kinds = config.get("layers_block_type")  # Nemotron-H
    if isinstance(kinds, list) and "moe" in kinds:
        rules.append(lambda layer: kinds[layer : layer + 1] == ["moe"])
    pattern = config.get("hybrid_override_pattern")  # the same as a string: E is a layer of experts
    if isinstance(pattern, str):
        rules.append(lambda layer: pattern[layer : layer + 1] == "E")
    return rules


def _width(config: Config) -> int:
    """Inner size of a routed expert."""
    width = _number(config, _WIDTH, 0)
    if not width:
        _refuse_unknown(config, _DENSE_WIDTH[0], "expert")
    return width or _number(config, _DENSE_WIDTH)


def _expert_hidden(config: Config) -> int:
    """Size of the tokens that routed experts get."""
    latent = _number(config, _LATENT, 0)
    if not latent:
        _refuse_unknown(config, _HIDDEN[0], r"expert.*(size|dim|width|hidden|latent|rank)|moe.*latent")
    return latent or _number(config, _HIDDEN)


def _refuse_unknown(config: Config, fallback: str, pattern: str) -> None:
    """Raise a ValueError if a key that we do not know may be the size for which ``fallback`` would be taken."""
    known = {*_EXPERTS, *_TOP_K, *_WIDTH, *_GROUPS, *_OTHER}
    for key, value in config.items():
        first = value[0] if isinstance(value, list) and value else value
        number = isinstance(first, (int, float)) and not isinstance(first, bool)
        if number and key not in known and "share" not in key and re.search(pattern, key):
            raise ValueError(
                f"unknown key {key!r} ({str(value)[:40]}): it may be a size of the experts, so {fallback!r} is not "
                "taken: describe the model in a YAML file"
            )


def _shared(config: Config) -> int:
    if config.get("model_type") in ("llama4", "llama4_text"):
        return 1  # always, without a key
    return _number(config, _SHARED, 1 if _number(config, _SHARED_WIDTH, 0) > 0 else 0)


def _is_fp8(quantisation: Any) -> bool:
    """Whether activations are sent in fp8, as engines do for such weights."""
    if not isinstance(quantisation, dict):
        return False
    return "fp8" in (str(quantisation.get("quant_method", "")) + str(quantisation.get("quant_algo", ""))).lower()


def _weight_bytes(text: Config, config: Config, quantisation: Any) -> float:
    """Bytes of one weight of an expert, scales included where they matter."""
    if str(text.get("expert_dtype", "")).startswith("fp4"):  # DeepSeek V4: fp4 experts in an fp8 model
        return _SCALED_4_BIT
    if isinstance(quantisation, dict) and quantisation:
        return _quantised_bytes(quantisation)
    dtype = str(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or config.get("dtype"))
    return 4.0 if dtype == "float32" else 2.0


def _quantised_bytes(quantisation: Config) -> float:
    method = str(quantisation.get("quant_method", "")).lower()
    algorithm = str(quantisation.get("quant_algo", "")).lower()
    if "nvfp4" in algorithm:
        return _NVFP4
    if method == "mxfp4" or "mxfp4" in algorithm:
        return _SCALED_4_BIT
    if "fp8" in algorithm or method in ("fp8", "fbgemm_fp8"):
        return 1.0
    if method == "quark":  # AMD
        weight = quantisation.get("global_quant_config", {}).get("weight", {})
        return _SCALED_4_BIT if "fp4" in str(weight) else 1.0
    if method == "bitsandbytes":
        return 0.5 if quantisation.get("load_in_4bit") else 1.0
    groups = quantisation.get("config_groups")
    if isinstance(groups, dict) and groups:  # compressed-tensors
        weights = next(iter(groups.values())).get("weights", {})
        return _grouped_bytes(weights.get("num_bits"), weights.get("group_size"), str(weights.get("type")))
    bits = quantisation.get("bits") or quantisation.get("w_bit")
    if bits is None:
        raise ValueError(f"unknown quantisation {method or algorithm or quantisation!r}: give a YAML with weight_bytes")
    return _grouped_bytes(bits, quantisation.get("group_size"), "int")  # AWQ, GPTQ


def _grouped_bytes(bits: Any, group: Any, kind: str) -> float:
    if not isinstance(bits, int) or not 1 <= bits <= 32:
        raise ValueError(f"quantised to {bits!r} bits: expected 1 … 32")
    scale = 1.0 if kind == "float" else 2.0  # bytes: fp8 or e8m0 for floats, bf16 for integers
    return bits / 8 + (scale / group if isinstance(group, int) and group > 0 and bits < 8 else 0.0)


def _kv_bytes(config: Config, total: int) -> float:
    """Bytes of KV cache per token in bf16. Layers with a window or a state are left out: they do not grow."""
    if "compress_ratios" in config:  # DeepSeek V4 compresses the cache layer by layer
        return 0.0
    kinds = config.get("layer_types")
    linear = config.get("linear_attn_config")  # Kimi
    full = total
    if isinstance(kinds, list) and kinds:
        full = sum(not str(kind).startswith(_NO_CACHE) for kind in kinds)
    elif isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        full = len(linear["full_attn_layers"])
    elif isinstance(config.get("full_attention_interval"), int) and config["full_attention_interval"] > 0:
        full = total // config["full_attention_interval"]
    elif isinstance(config.get("hybrid_layer_pattern"), list):
        full = config["hybrid_layer_pattern"].count(0)
    elif isinstance(config.get("hybrid_override_pattern"), str):
        full = config["hybrid_override_pattern"].count("*")
    rank = _number(config, ("kv_lora_rank",), 0)
    if rank:  # multi-head latent attention
        return 2.0 * full * (rank + _number(config, ("qk_rope_head_dim",), 0))
    heads = _number(config, ("num_attention_heads", "n_head", "n_heads"), 0)
    if not heads:
        return 0.0
    width = _number(config, ("head_dim",), 0) or _number(config, _HIDDEN) // heads
    return 2.0 * full * 2 * _number(config, ("num_key_value_heads",), heads) * width
