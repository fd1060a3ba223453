"""One valid file of every format that we read, and how to read it: for tests with hostile and with mutated files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import engine_files as files
from clustergym.moe_offload.predictor import NextUseNet, Predictor
from clustergym.moe_placement.specs import ModelSpec, get_cluster, get_model
from clustergym.plans.engines import EnginePlan, check_plan, load_plan, write_plan
from clustergym.traces import LoadTrace, TokenTrace, load_any_trace
from clustergym.traces.readers import ReadOptions, read_trace

TOKENS, LAYERS, TOP_K, EXPERTS, DENSE = 24, 3, 2, 8, 1
MODEL = ModelSpec("small", LAYERS, EXPERTS, TOP_K, 64, 32, n_dense=DENSE)
LOGICAL = files.routing(TOKENS, LAYERS, TOP_K, EXPERTS)
SLOTS = files.slot_map(DENSE + LAYERS, EXPERTS, 4)
COUNTS = np.random.default_rng(0).integers(1, 99, (2, LAYERS, EXPERTS))
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 5, "hidden_size": 64, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "n_shared_experts": 1,
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
        "num_bits": 4, "type": "int", "group_size": 32}}}},
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A file format."""

    path: str
    """Name of the file, in a folder of its own."""
    write: Callable[[Path], Any]
    """Write a valid file there, with the files that belong to it."""
    read: Callable[[Path], Any]
    """Read it. A ValueError refuses it."""


def _import(engine: str, **options: Any) -> Callable[[Path], Any]:
    return lambda path: read_trace([path], engine, ReadOptions(**options))


def _plan(engine: str) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    rows = np.stack([np.concatenate([np.arange(8), (np.arange(4) + 2 * l) % 8]) for l in range(LAYERS)])
    # Slots of one GPU must differ: GPU g gets columns g, g + 4 and g + 8.
    placement = rows.reshape(LAYERS, 3, 4).transpose(0, 2, 1).astype(np.int16)
    placement[:, :, 2] = (placement[:, :, 0] + 2) % 8
    plan = EnginePlan(placement, np.array(MODEL.layer_ids), MODEL)
    return lambda path: write_plan(path, plan, engine), lambda path: check_plan(load_plan(path, engine, MODEL, 4))


def _predictor(path: Path) -> None:
    Predictor(NextUseNet(LAYERS, EXPERTS, 4), np.full((LAYERS, EXPERTS), 0.25, np.float32)).save(path.parent)


def _tensorrt(path: Path) -> None:
    files.tensorrt_llm(path.parent, COUNTS[None], EXPERTS, DENSE, TOP_K)


def _slot_plan(path: Path) -> None:
    files.tensorrt_llm(path.parent / "stats", COUNTS[None], EXPERTS, DENSE, TOP_K)
    files.tensorrt_llm_plan(path, np.tile(np.arange(EXPERTS), (LAYERS, 1)), DENSE)


PASSES = [{"n": 16, "mode": 1, "lens": [10, 6]}, {"n": 8, "mode": 2, "lens": None}]
FORMATS: dict[str, Format] = {
    "sglang-tokens": Format(
        "r.pt", lambda p: files.sglang_per_token(p, LOGICAL, DENSE, SLOTS, PASSES), _import("sglang")
    ),
    "sglang-stat": Format(
        "r.pt",
        lambda p: files.sglang_stat(p, np.concatenate([COUNTS[:, :1] * 0, COUNTS], axis=1), 4),
        _import("sglang"),
    ),
    "sglang-pass": Format(
        "r.pt",
        lambda p: files.sglang_per_pass(p, np.ones((2, DENSE + LAYERS, SLOTS.shape[1])), SLOTS),
        _import("sglang"),
    ),
    "sglang-lines": Format(
        "r.txt", lambda p: p.write_text(files.sglang_base64(LOGICAL, DENSE)), _import("sglang", model=MODEL)
    ),
    "sglang-json": Format(
        "r.json",
        lambda p: p.write_text(json.dumps({"meta_info": {"routed_experts": files.sglang_base64(LOGICAL, DENSE)}})),
        _import("sglang", model=MODEL),
    ),
    "vllm-npy": Format("r.npy", lambda p: np.save(p, files.vllm_array(LOGICAL, DENSE, EXPERTS)), _import("vllm")),
    "vllm-jsonl": Format(
        "r.jsonl",
        lambda p: p.write_text(json.dumps({"routed_experts": files.vllm_base64(LOGICAL, DENSE, EXPERTS)}) + "\n"),
        _import("vllm", model=MODEL),
    ),
    "tensorrt-llm": Format("rank0.safetensors", _tensorrt, _import("tensorrt-llm")),
    "tensorrt-llm-meta": Format(
        "meta_info.json", _tensorrt, lambda p: read_trace([p.parent], "tensorrt-llm", ReadOptions())
    ),
    "tensorrt-llm-slots": Format(
        "plan.yaml",
        _slot_plan,
        lambda p: read_trace([p.parent / "stats"], "tensorrt-llm", ReadOptions(slot_plan=p, model=MODEL)),
    ),
    "load-table-csv": Format("t.csv", lambda p: files.load_table(p, COUNTS, DENSE), _import("load-table")),
    "load-table-wide": Format("t.csv", lambda p: files.load_table(p, COUNTS, DENSE, True), _import("load-table")),
    "token-trace": Format(
        "t.npz", lambda p: TokenTrace(LOGICAL, seq_lens=np.array([10, 14])).save(p), lambda p: load_any_trace(p)
    ),
    "load-trace": Format("t.npz", lambda p: LoadTrace(COUNTS).save(p), lambda p: load_any_trace(p)),
    "plan-sglang": Format("p.json", *_plan("sglang")),
    "plan-sglang-pt": Format("p.pt", *_plan("sglang")),
    "plan-tensorrt-llm": Format("p.yaml", *_plan("tensorrt-llm")),
    "plan-vllm": Format("p.json", *_plan("vllm")),
    "plan-vllm-ascend": Format("p.json", *_plan("vllm-ascend")),
    "model-config": Format("config.json", lambda p: p.write_text(json.dumps(CONFIG)), lambda p: get_model(str(p))),
    "model-yaml": Format(
        "m.yaml",
        lambda p: p.write_text("n_layers: 2\nn_experts: 8\ntop_k: 2\nhidden: 64\nintermediate: 32\nlayers: [1, 3]\n"),
        lambda p: get_model(str(p)),
    ),
    "cluster-yaml": Format(
        "c.yaml",
        lambda p: p.write_text("n_nodes: 2\ngpus_per_node: 4\ngpu: h200\nlinks: {inter_gb_s: 5}\n"),
        lambda p: get_cluster(str(p)),
    ),
    "predictor-config": Format("predictor.json", _predictor, lambda p: Predictor.load(p.parent)),
    "predictor-weights": Format("predictor.safetensors", _predictor, lambda p: Predictor.load(p.parent)),
}  # fmt: skip
