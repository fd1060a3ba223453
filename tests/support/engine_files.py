"""Recordings in the formats of the engines, made from a known routing that readers must return.

``logical`` is (tokens, MoE layers, K) with unique ids per row. ``n_dense`` dense layers come first, as in DeepSeek's
models.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.integer[Any]]


def routing(tokens: int, layers: int, top_k: int, n_experts: int, seed: int = 0) -> npt.NDArray[np.int16]:
    """Random routing with unique ids per row: each column draws from its own block of ids, in shuffled order."""
    rng = np.random.default_rng(seed)
    block = n_experts // top_k
    ids = rng.integers(0, block, (tokens, layers, top_k), dtype=np.int16)
    ids += rng.permutation(top_k).astype(np.int16) * np.int16(block)
    return ids


def slot_map(layers: int, n_experts: int, redundant: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(layers, P) physical → logical: every expert once, ``redundant`` of them twice, in shuffled order."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.permutation(np.append(np.arange(n_experts), rng.permutation(n_experts)[:redundant])) for _ in range(layers)
    ]
    return np.array(rows, np.int64)


def to_physical(logical: Ids, slots: npt.NDArray[np.int64], seed: int = 0) -> npt.NDArray[np.int32]:
    """(tokens, layers, K) physical slots, with a random replica for every pair."""
    rng = np.random.default_rng(seed)
    physical = np.empty(logical.shape, np.int32)
    for l, row in enumerate(slots):
        order = np.argsort(row, kind="stable")
        first = np.searchsorted(row[order], np.arange(row.max() + 1))
        copies = np.bincount(row)
        ids = logical[:, l]
        physical[:, l] = order[first[ids] + rng.integers(0, 1 << 20, ids.shape) % copies[ids]]
    return physical


def sglang_per_token(
    path: Path,
    logical: Ids,
    n_dense: int,
    slots: npt.NDArray[np.int64],
    passes: Sequence[dict[str, Any]],
    rank: int = 0,
) -> Path:
    """A per_token dump. A pass is ``{"n": tokens, "mode": 1 or 2, "lens": [...] or None, "pad": rows, "id": pass id}``.

    ``slots`` has rows for the dense layers too, as in the engine.
    """
    physical = to_physical(logical, slots[n_dense:])
    records, start = [], 0
    for i, one in enumerate(passes):
        n, pad = one["n"], one.get("pad", 0)
        routed = np.full((len(slots), n + pad, 8), -1, np.int32)
        routed[n_dense:, :n, : logical.shape[2]] = physical[start : start + n].transpose(1, 0, 2)
        positions = np.arange(start, start + n)
        records.append(
            {
                "forward_pass_id": one.get("id", i),
                "rank": rank,
                "gatherer_key": "primary",
                "input_ids": list(range(n)),
                "positions": positions.tolist(),
                "extend_seq_lens": one.get("lens"),
                "forward_mode": one["mode"],
                "topk_ids_of_layer": torch.from_numpy(routed),
                "misc_objects": [],
            }
        )
        start += n
    assert start == len(logical)
    torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(slots)}, path)
    return path


def sglang_per_pass(path: Path, counts: npt.NDArray[Any], slots: npt.NDArray[np.int64], rank: int = 0) -> Path:
    """A per_pass dump of (passes, all layers, P) physical counts."""
    records = [
        {
            "forward_pass_id": i,
            "rank": rank,
            "gatherer_key": "primary",
            "global_physical_count": torch.from_numpy(c.astype(np.int32)),
        }
        for i, c in enumerate(counts)
    ]
    torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(slots)}, path)
    return path


def sglang_stat(path: Path, counts: npt.NDArray[Any], buffer: int) -> Path:
    """A stat dump of (steps, all layers, E) logical counts in a ring buffer with room for ``buffer`` steps."""
    ring = np.zeros((buffer, *counts.shape[1:]), np.int32)
    ring[: len(counts)] = counts
    torch.save(
        {"rank": 0, "logical_count": torch.from_numpy(ring), "average_utilization_rate_over_window": torch.tensor(0.8)},
        path,
    )
    return path


def with_dense_zeros(logical: Ids, n_dense: int) -> npt.NDArray[np.int64]:
    """(tokens, all layers, K): 0 in the dense layers."""
    tokens, _, top_k = logical.shape
    return np.concatenate([np.zeros((tokens, n_dense, top_k), np.int64), logical], axis=1)


def sglang_base64(logical: Ids, n_dense: int) -> str:
    return base64.b64encode(with_dense_zeros(logical, n_dense).astype("<i4").tobytes()).decode()


def vllm_array(logical: Ids, n_dense: int, n_experts: int) -> npt.NDArray[Any]:
    return with_dense_zeros(logical, n_dense).astype(np.uint8 if n_experts <= 256 else np.uint16)


def vllm_base64(logical: Ids, n_dense: int, n_experts: int) -> str:
    file = io.BytesIO()
    np.save(file, vllm_array(logical, n_dense, n_experts))
    return base64.b64encode(file.getvalue()).decode()


def tensorrt_llm(folder: Path, counts: npt.NDArray[Any], n_experts: int, first_layer: int, top_k: int) -> Path:
    """Statistics of (ranks, iterations, MoE layers, E or P) counts."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": n_experts, "num_experts_per_token": top_k}))
    for rank, of_rank in enumerate(counts):
        tensors = {
            f"{i}_{first_layer + l}": np.ascontiguousarray(row.astype(np.int32))
            for i, step in enumerate(of_rank)
            for l, row in enumerate(step)
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
        save_file({"0_3_raw": np.zeros(4, np.int32)}, folder / f"rank{rank}_raw.safetensors")
    return folder


def esft(folder: Path, logical: Ids, seq_lens: Sequence[int], first_layer: int = 1) -> Path:
    """Expert scores of one task: one file per layer, one line per sequence."""
    folder.mkdir(exist_ok=True)
    bounds = np.cumsum([0, *seq_lens])
    for layer in range(logical.shape[1]):
        with open(folder / f"expert_weights_{first_layer + layer}.txt", "w") as file:
            for start, stop in pairwise(bounds):
                ids = logical[start:stop, layer].ravel()
                file.write("\t".join(map(str, ids.tolist())) + "\t\t" + "\t".join(["0.0625"] * len(ids)) + "\n")
    return folder


def tensorrt_llm_plan(path: Path, slots: npt.NDArray[np.int64], first_layer: int) -> Path:
    """The load balancer config of (MoE layers, P) slots."""
    rows = "\n".join(f"  {first_layer + l}: {row.tolist()}" for l, row in enumerate(slots))
    head = f"num_slots: {slots.shape[1]}\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n"
    path.write_text(f"{head}{rows}\n")
    return path


def core12345(path: Path, logical: Ids, layer_ids: Sequence[int], n_layers: int, prompt: int) -> Path:
    """One query of core12345/MoE_expert_selection_trace: the prompt, then one entry per generated token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [logical[:prompt], *np.split(logical[prompt:], len(logical) - prompt)]
    document = [
        {
            str(layer): entry[:, layer_ids.index(layer)].tolist() if layer in layer_ids else None
            for layer in range(n_layers)
        }
        for entry in entries
    ]
    path.write_text(json.dumps(document))
    return path


def load_history(path: Path, counts: npt.NDArray[Any]) -> Path:
    """(steps, layers, E) counts as in abmfy/eplb-openevolve."""
    steps = [{"logical_expert_load": step.tolist(), "step": i} for i, step in enumerate(counts)]
    path.write_text(json.dumps({"load_history": steps, "num_experts": counts.shape[2]}))
    return path


def load_table(path: Path, counts: npt.NDArray[Any], first_layer: int, wide: bool = False) -> Path:
    """(steps, layers, E) loads as a table, one row per expert or (``wide``) one per layer."""
    steps, layers, _ = counts.shape
    if wide:
        names = ["step", "layer", "num_tokens_per_expert"]
        rows = [[s, first_layer + l, counts[s, l].tolist()] for s in range(steps) for l in range(layers)]
    else:
        names = ["step", "layer", "expert", "num_tokens"]
        rows = [[s, first_layer + l, e, counts[s, l, e].item()] for s, l, e in np.ndindex(counts.shape)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path
