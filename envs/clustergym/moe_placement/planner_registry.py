"""Every planner by name: where the command line, benchmarks and trainers find them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.exact import Exact
from clustergym.moe_placement.planners.heuristics import EPLB, EPLBOnce, Grouping, Incremental, Static
from clustergym.moe_placement.planners.search import Anneal, Bottleneck, Oracle, SwapGreedy
from clustergym.moe_placement.policy.planner import Policy, PolicyGuided
from clustergym.moe_placement.simulator import Simulator

PLANNERS: dict[str, Callable[..., Planner]] = {
    "static": Static,
    "eplb-once": EPLBOnce,
    "eplb": EPLB,
    "eplb-hierarchical": partial(EPLB, hierarchical=True),
    "eplb-ema": partial(EPLB, ema=0.5),
    "eplb-threshold": partial(EPLB, ema=0.5, threshold=1.3),
    "incremental": Incremental,
    "grouping": Grouping,
    "random-best": partial(Bottleneck, candidates=0),
    "bottleneck": Bottleneck,
    "bottleneck-8": partial(Bottleneck, candidates=8),
    "swap-greedy": SwapGreedy,
    "anneal-max": partial(Anneal, norm=0),
    "anneal": Anneal,
    "anneal-4": partial(Anneal, windows=4),
    "anneal-even": partial(Anneal, norm=4, homes="even", migration_weight=0.5),
    "policy": Policy,
    "policy-guided": PolicyGuided,
    "oracle": Oracle,
    "exact": Exact,
}
"""Every planner by the name that the command line knows. Names with a suffix are one class with other options."""


def make_planner(name: str, simulator: Simulator, **options: object) -> Planner:
    """A planner by name, with its options (``seed``, ``iterations`` …) replaced where given."""
    if name not in PLANNERS:
        raise ValueError(f"unknown planner {name!r}; the planners are: {', '.join(PLANNERS)}")
    return PLANNERS[name](simulator, **options)
