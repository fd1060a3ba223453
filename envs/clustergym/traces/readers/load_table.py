"""Tables of expert loads as CSV.

Long form: one row per layer and expert (``layer``, ``expert``, ``num_tokens``). Wide form: one row per layer, with one
list of all experts (``layer``, ``num_tokens_per_expert``). A column ``step`` may tell steps apart.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.traces.load_trace import LoadTrace
from clustergym.traces.readers.base import ReadOptions, expand
from clustergym.traces.token_trace import MAX_EXPERTS

STEP = ("step", "iter", "iteration", "window", "forward_pass_id")
LAYER = ("layer", "layer_id", "layer_idx", "moe_layer")
EXPERT = ("expert", "expert_id", "expert_idx", "logical_expert")
COUNT = ("num_tokens", "count", "tokens", "token_count", "load", "expert_load")
LISTS = ("num_tokens_per_expert", "tokens_per_expert", "expert_loads", "logical_count")
SHARE_TOKENS = 1_000_000
"""Loads that are shares, not counts, are multiplied by this."""
_MAX_LAYERS = 10_000
_SMALL_CELLS = 1 << 24

Rows = npt.NDArray[np.float64]
"""(rows, 4) step, layer, expert, load."""


def read(paths: Sequence[Path], options: ReadOptions) -> LoadTrace:
    """The loads of all files. Layers keep the numbers of the table, which should be the global ones."""
    parts = [_rows(_columns(path), path) for path in expand(paths, "*.csv")]
    rows = np.concatenate(parts) if parts else np.empty((0, 4))
    if not len(rows):
        raise ValueError("no loads in the files: nothing to import")
    if not np.isfinite(rows).all() or (rows < 0).any() or (rows[:, :3] != np.floor(rows[:, :3])).any():
        raise ValueError("a step, layer, expert or load is negative, not finite or no integer")
    if rows[:, 1].max() > _MAX_LAYERS or rows[:, 2].max() >= MAX_EXPERTS or rows[:, 3].max() > 1e15:
        raise ValueError(f"layer {rows[:, 1].max():.0f}, expert {rows[:, 2].max():.0f} or load out of range")
    steps, step = np.unique(rows[:, 0], return_inverse=True)
    layers, layer = np.unique(rows[:, 1].astype(np.int64), return_inverse=True)
    n_experts = max(options.expected_experts, int(rows[:, 2].max()) + 1)
    if options.expected_experts and n_experts != options.expected_experts:
        raise ValueError(f"expert {n_experts - 1} recorded, expected {options.expected_experts} experts")
    cells = len(steps) * len(layers) * n_experts
    if cells > _SMALL_CELLS and cells > 64 * len(rows):
        raise ValueError(f"{len(rows)} rows for {len(steps)} steps × {len(layers)} layers × {n_experts} experts")
    loads = np.zeros((len(steps), len(layers), n_experts))
    np.add.at(loads, (step.ravel(), layer.ravel(), rows[:, 2].astype(np.int64)), rows[:, 3])
    if (loads != np.floor(loads)).any():
        loads *= SHARE_TOKENS
    options.check_moe_layers(layers.tolist())
    counts = np.rint(loads).astype(np.int64)
    return LoadTrace(counts, layers, options.expected_top_k, options.model_name, options.name)


def _pick(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    known = {name.strip().lower(): name for name in names}
    return next((known[name] for name in wanted if name in known), None)


def _roles(names: Sequence[str], path: Path) -> dict[str, str]:
    """Role → column of the table."""
    found = {"step": _pick(names, STEP), "layer": _pick(names, LAYER), "expert": _pick(names, EXPERT)}
    lists = _pick(names, LISTS)
    found |= {"lists": lists} if lists else {"count": _pick(names, COUNT)}
    roles = {role: name for role, name in found.items() if name is not None}
    if "layer" not in roles or not ("lists" in roles or {"expert", "count"} <= set(roles)):
        raise ValueError(
            f"{path}: columns {', '.join(names[:12])[:200]}: expected {LAYER[0]}, {EXPERT[0]} and {COUNT[0]}, or "
            f"{LAYER[0]} and {LISTS[0]}"
        )
    return roles


def _columns(path: Path) -> dict[str, list[str]]:
    """Role → its values, as text."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file: {error}") from error
    if not table:
        raise ValueError(f"{path}: the file is empty")
    names, rows = table[0], [row for row in table[1:] if row]
    roles = _roles(names, path)
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"{path}, row {number}: {len(row)} values for {len(names)} columns")
    return {role: [row[names.index(name)] for row in rows] for role, name in roles.items()}


def _rows(columns: dict[str, list[str]], path: Path) -> Rows:
    layers = _numbers(columns["layer"], "layer", path)
    steps = _numbers(columns["step"], "step", path) if "step" in columns else np.zeros(len(layers))
    if "lists" not in columns:
        experts, counts = (_numbers(columns[role], role, path) for role in ("expert", "count"))
        return np.stack([steps, layers, experts, counts], axis=1)
    lists = [_list(value, path) for value in columns["lists"]]
    lengths = np.array([len(one) for one in lists], np.int64)
    counts = np.concatenate(lists) if lists else np.empty(0)
    experts = np.concatenate([np.arange(n) for n in lengths]) if lists else np.empty(0)
    return np.stack([np.repeat(steps, lengths), np.repeat(layers, lengths), experts, counts], axis=1)


def _numbers(values: Any, what: str, path: Path) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(values).astype(np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: column of the {what}: {error}") from error
    if numbers.ndim != 1:
        raise ValueError(f"{path}: column of the {what} holds lists: expected numbers")
    return numbers


def _list(text: str, path: Path) -> npt.NDArray[np.float64]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {text[:40]!r} is not a list of loads") from error
    return _numbers(value if isinstance(value, list) else [value], "loads", path)
