"""Environment variables of the integrations. Engines start many processes, and all of them see the environment."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.plans.engines import PlanError, detect_engine, read_plan

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


def fixed_plan(n_layers: int, n_physical: int, n_experts: int) -> npt.NDArray[np.int64] | None:
    """(L, P) slots of the plan file, or None if there is none or its sizes differ (a draft model has other sizes)."""
    path = Path(os.environ.get(PLAN, ""))
    if not os.environ.get(PLAN):
        return None
    rows = list(read_plan(path, detect_engine(path)).values())[-n_layers:]
    if len(rows) != n_layers or len(rows[0]) != n_physical:
        return None
    slots = np.array(rows, np.int64)
    if slots.min() < 0 or any(len(np.unique(row)) != n_experts or row.max() >= n_experts for row in slots):
        raise PlanError(f"{path}: a layer does not hold each of the {n_experts} experts")
    return slots
