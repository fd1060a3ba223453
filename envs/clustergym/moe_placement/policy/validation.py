"""Compares a policy in training with other planners: on validation streams, and on held-out streams at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clustergym.common.statistics import ci95
from clustergym.moe_placement.evaluation import Protocol, Result, evaluate_planner
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.policy.export import PolicySettings
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.planner import Policy
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.streams import Traffic
from clustergym.traces.token_trace import TokenTrace

EPLB_NAMES = ("eplb-once", "eplb", "eplb-ema", "eplb-threshold")
