"""Environment variables of the integrations. Engines start many processes, and all of them see the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.plans.engines import PlanError, detect_engine, read_plan

logger = logging.getLogger(__name__)
ENABLE = "CLUSTERGYM_EPLB"
"""Replace the engine's load balancer: by our EPLB (1), or by the planner of this name (flashlb, swift …)."""
PLAN = "CLUSTERGYM_EPLB_PLAN"
"""A plan file. The load balancer returns it as long as its sizes are those of the model."""


def enabled() -> bool:
    return os.environ.get(ENABLE, "0") not in ("", "0") or bool(os.environ.get(PLAN))


def planner_name() -> str:
    """The planner that the environment asks for."""
    asked = os.environ.get(ENABLE, "")
    return "eplb" if asked in ("", "0", "1") else asked


def fixed_plan(n_layers: int, n_physical: int, n_experts: int, n_gpus: int) -> npt.NDArray[np.int64] | None:
    """(L, P) slots of the plan file, or None if there is none or its sizes differ (a draft model has other sizes)."""
    path = Path(os.environ.get(PLAN, ""))
    if not os.environ.get(PLAN):
        return None
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
