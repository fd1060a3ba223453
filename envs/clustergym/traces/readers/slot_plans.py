"""Slot plans: which logical expert each physical slot of each layer holds.

The TensorRT-LLM reader needs such a plan to turn counts per slot into counts per expert, and
:mod:`clustergym.plans.engines` reads back the plans that it writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustergym.common.yaml_files import parse_yaml
from clustergym.traces.token_trace import MAX_EXPERTS

SlotRows = dict[int, list[int]]
"""Layer, as the engine counts layers → the logical expert in each slot."""

_MAX_SLOTS = 50_000_000
_TENSORRT_LLM_KEYS = {"num_slots", "layer_updates_per_iter", "initial_global_assignments"}


class PlanError(ValueError):
    """A plan that an engine would refuse or misread. The message names the rule or file, and the layer and GPU."""


def checked_rows(rows: Any, path: Path) -> SlotRows:
    """``rows`` itself if it maps layers to lists of expert ids of equal length, else a :class:`PlanError`."""
    if not isinstance(rows, dict) or not rows:
        raise PlanError(f"{path}: the plan has no layers")
    if sum(len(row) for row in rows.values() if isinstance(row, list)) > _MAX_SLOTS:
        raise PlanError(f"{path}: more than {_MAX_SLOTS} slots in {len(rows)} layers")
    for layer, row in rows.items():
        if isinstance(layer, bool) or not isinstance(layer, int) or not isinstance(row, list):
            raise PlanError(f"{path}: layer {layer!r}: expected an integer layer with a list of experts")
        if any(type(expert) is not int or not -1 <= expert <= MAX_EXPERTS for expert in row):
            raise PlanError(f"{path}: layer {layer} contains something other than expert ids")
    if len({len(row) for row in rows.values()}) > 1:
        raise PlanError(f"{path}: layers have different numbers of slots")
    return rows


def read_tensorrt_llm_plan(path: Path) -> SlotRows:
    """The initial assignments in a load balancer config of TensorRT-LLM, by global layer index."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not valid YAML: {error}") from error
    except ValueError as error:
        raise PlanError(str(error)) from error
    if not isinstance(document, dict) or set(document) != _TENSORRT_LLM_KEYS:
        raise PlanError(f"{path}: expected exactly the keys {', '.join(sorted(_TENSORRT_LLM_KEYS))}")
    rows = checked_rows(document["initial_global_assignments"], path)
    for layer, row in rows.items():
        if len(row) != document["num_slots"]:
            raise PlanError(f"{path}: layer {layer} has {len(row)} slots, but num_slots is {document['num_slots']}")
    return rows
