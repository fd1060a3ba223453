"""TensorRT-LLM: the expert statistics that it writes to the folder ``EXPERT_STATISTIC_PATH``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.extras import require
from clustergym.traces.load_trace import LoadTrace
from clustergym.traces.readers.base import ReadOptions, expand, parse_json, slot_counts_to_logical
from clustergym.traces.readers.slot_plans import read_tensorrt_llm_plan
from clustergym.traces.token_trace import MAX_EXPERTS

_KEY = re.compile(r"(\d+)_(\d+)")


def read(paths: Sequence[Path], options: ReadOptions) -> LoadTrace:
    """Read ``meta_info.json`` and ``rank*.safetensors`` of one folder. Counts are summed over ranks."""
    files = [f for f in expand(paths, "rank*.safetensors", "meta_info.json") if not f.stem.endswith("_raw")]
    ranks = [f for f in files if f.suffix == ".safetensors"]
    if not ranks:
        raise ValueError("no rank*.safetensors among the files: give the folder of EXPERT_STATISTIC_PATH")
    meta = [f for f in files if f.name == "meta_info.json"]
    meta = meta or [f.with_name("meta_info.json") for f in ranks[:1] if f.with_name("meta_info.json").is_file()]
    slots = _slots(options)
    n_experts, top_k = _sizes(meta[0] if meta else None, slots, options)
    if not n_experts:
        raise ValueError(f"no meta_info.json next to {ranks[0]}: give it, --model, or --n-experts")
    counts: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
    for path in ranks:
        for (step, layer), recorded in _recorded(path):
            logical = _logical(recorded, layer, n_experts, slots, path)
            key = (step, layer)
            counts[key] = counts[key] + logical if key in counts else logical
    steps, layers = sorted({s for s, _ in counts}), sorted({l for _, l in counts})
    for step in steps:
        for layer in layers:
            if (step, layer) not in counts:
                raise ValueError(f"iteration {step} has no counts for layer {layer} in any rank: is a file truncated?")
    whole = np.array([[counts[step, layer] for layer in layers] for step in steps], np.int64)
    whole = whole[whole.any((1, 2))]
    if not len(whole):
        raise ValueError("every iteration is empty: nothing to import")
    options.check_moe_layers(layers)
    return LoadTrace(whole, np.array(layers), top_k, options.model_name, options.name)


Slots = dict[int, npt.NDArray[np.int64]]
"""Global layer → (P,) logical expert of each slot."""


def _sizes(path: Path | None, slots: Slots | None, options: ReadOptions) -> tuple[int, int]:
    """(logical experts, experts per token), 0 if unknown. With a slot plan, ``meta_info.json`` counts slots."""
    counted, top_k = _meta(path) if path else (0, 0)
    expected = options.expected_experts
    if slots is None:
        if counted and expected and counted != expected:
            hint = ": with its load balancer on, TensorRT-LLM counts slots: give --slot-plan" * (counted > expected)
            raise ValueError(f"{path}: {counted} experts recorded, expected {expected}{hint}")
        experts = counted or expected
    else:
        planned = len(next(iter(slots.values())))
        experts = expected or 1 + max(int(row.max()) for row in slots.values())
        if counted not in (0, planned, experts):
            raise ValueError(f"{path}: {counted} slots recorded, but the slot plan has {planned}")
    if top_k and options.expected_top_k not in (0, top_k):
        raise ValueError(f"{path}: {top_k} experts per token recorded, expected {options.expected_top_k}")
    return experts, top_k or options.expected_top_k


def _meta(path: Path) -> tuple[int, int]:
    """(experts or slots, experts per token) in ``meta_info.json``."""
    document = parse_json(path.read_bytes(), str(path))
    found = [document.get(k) if isinstance(document, dict) else None for k in ("num_experts", "num_experts_per_token")]
    values = [v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    if len(values) < 2:
        raise ValueError(f"{path}: expected positive num_experts and num_experts_per_token, found {found}")
    return values[0], values[1]


def _recorded(path: Path) -> list[tuple[tuple[int, int], npt.NDArray[Any]]]:
    """((iteration, layer), counts) of every tensor in the file."""
    safetensors = require("safetensors", "engines")
    found = []
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for key in sorted(file.keys()):
                match = _KEY.fullmatch(key)
                if match is None:
                    raise ValueError(f"{path}: tensor {key!r}: expected ITERATION_LAYER")
                found.append(((int(match[1]), int(match[2])), file.get_tensor(key)))
    except (safetensors.SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"{path}: not a complete .safetensors file: {error}") from error
    return found


def _slots(options: ReadOptions) -> Slots | None:
    if options.slot_plan is None:
        return None
    if not options.slot_plan.is_file():
        raise ValueError(f"no slot plan at {options.slot_plan}")
    plan = read_tensorrt_llm_plan(options.slot_plan)
    limit = options.expected_experts or MAX_EXPERTS
    for layer, row in plan.items():
        if not row or min(row) < 0 or max(row) >= limit:
            raise ValueError(f"{options.slot_plan}: layer {layer}: slots hold experts 0 … {limit - 1}, found {row[:8]}")
    return {layer: np.array(row, np.int64) for layer, row in plan.items()}


def _logical(
    recorded: npt.NDArray[Any], layer: int, n_experts: int, slots: Slots | None, path: Path
) -> npt.NDArray[np.int64]:
    if recorded.ndim != 1 or recorded.dtype.kind not in "iu":
        raise ValueError(f"{path}: layer {layer} has {recorded.dtype} of shape {recorded.shape}: expected counts")
    if slots is None:
        if len(recorded) != n_experts:
            raise ValueError(
                f"{path}: layer {layer} has {len(recorded)} counts for {n_experts} experts. With its load balancer on, "
                "TensorRT-LLM counts tokens per slot: give --slot-plan with the plan that it ran with"
            )
        return recorded.astype(np.int64)
    if layer not in slots:
        raise ValueError(f"{path}: layer {layer} was recorded, but the slot plan has no such layer")
    planned = len(slots[layer])
    if planned != len(recorded):
        raise ValueError(f"{path}: layer {layer} has {len(recorded)} counts, but {planned} slots in the slot plan")
    return slot_counts_to_logical(recorded, slots[layer], n_experts)
