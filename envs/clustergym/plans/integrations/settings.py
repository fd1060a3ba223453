"""Environment variables of the integrations. Engines start many processes, and all of them see the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import index_of_choice
from clustergym.moe_placement.profiles import PHASES, get_profile
from clustergym.plans.engines import PlanError, detect_engine, read_plan
from clustergym.plans.meta import read_meta

logger = logging.getLogger(__name__)
ENABLE = "CLUSTERGYM_EPLB"
"""Replace the engine's load balancer: by our EPLB (1), or by the planner of this name (flashlb, swift …)."""
PLAN = "CLUSTERGYM_EPLB_PLAN"
"""A plan file. The load balancer returns it as long as its sizes are those of the model. ``{phase}`` in the name stands
for prefill or decode, so that instances of both kinds can have the same environment."""
PHASE = "CLUSTERGYM_EPLB_PHASE"
"""The phase that this instance serves, if the engine does not tell."""
MAX_MOVES = "CLUSTERGYM_EPLB_MAX_MOVES"
"""Experts that may move at one rebalancing, over all layers and GPUs: whole layers, those that gain most first, and at
least one."""


def enabled() -> bool:
    return os.environ.get(ENABLE, "0") not in ("", "0") or bool(os.environ.get(PLAN))


def planner_name() -> str:
    """The planner that the environment asks for."""
    asked = os.environ.get(ENABLE, "")
    return "eplb" if asked in ("", "0", "1") else asked


def max_moves() -> int | None:
    """Experts that may move at one rebalancing; None: any number."""
    asked = os.environ.get(MAX_MOVES, "")
    if asked and not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise ValueError(f"{MAX_MOVES} is {asked!r}: expected a number of experts, at least 1")
    return int(asked) if asked else None


def plan_path(phase: str | None) -> Path | None:
    """The plan file of this instance, which serves ``phase`` as far as the engine tells; None if there is none."""
    name, phase = os.environ.get(PLAN, ""), os.environ.get(PHASE) or phase
    if phase is not None:
        index_of_choice(phase, PHASES, PHASE)
    if "{phase}" in name and phase is None:
        raise PlanError(f"{PLAN} is {name}, but the engine does not tell its phase: set {PHASE} to prefill or decode")
    if not name:
        return None
    path = Path(name.replace("{phase}", phase or ""))
    meta = read_meta(path)
    if meta is not None and phase is not None and not meta.both_phases and get_profile(meta.profile).phase != phase:
        logger.warning("%s was made for %s, but this instance serves %s", path, meta.profile, phase)
    return path


def fixed_plan(
    n_layers: int, n_physical: int, n_experts: int, n_gpus: int, phase: str | None = None
) -> npt.NDArray[np.int64] | None:
    """(L, P) slots of the plan file, or None if there is none or its sizes differ (a draft model has other sizes)."""
    path = plan_path(phase)
    if path is None:
        return None
    meta = read_meta(path)
    if meta is not None and meta.cluster.n_gpus != n_gpus:
        raise PlanError(f"{path} was made for {meta.cluster.n_gpus} GPUs, but the engine has {n_gpus}")
    every = list(read_plan(path, detect_engine(path)).values())
    rows = every[-n_layers:]
    if len(rows) != n_layers or len(rows[0]) != n_physical:
        logger.warning(
            "%s has %d layers of %d slots, but the engine asks for %d of %d: EPLB instead (right for a draft model)",
            path, len(every), len(rows[0]), n_layers, n_physical,
        )  # fmt: skip
        return None
    slots = np.array(rows, np.int64)
    if slots.min() < 0 or any(len(np.unique(row)) != n_experts or row.max() >= n_experts for row in slots):
        raise PlanError(f"{path}: a layer does not hold each of the {n_experts} experts")
    ordered = np.sort(slots.reshape(n_layers, n_gpus, -1), axis=2)
    twice = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(twice) and n_physical // n_gpus <= n_experts:
        layer, gpu, slot = twice[0]
        raise PlanError(
            f"{path}: layer {layer} has expert {ordered[layer, gpu, slot]} twice on GPU {gpu} of {n_gpus}: it was made "
            "for another number of GPUs, or not by clustergym"
        )
    return slots
