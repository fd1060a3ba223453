"""All planners by name, as the command line, benchmarks and trainers use them."""

from __future__ import annotations

from typing import Any, NamedTuple

from clustergym.moe_placement.simulator import Simulator
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB, Static
from clustergym.planners.exact import Exact
from clustergym.planners.flashlb import FlashLB
from clustergym.planners.greedy import Greedy
from clustergym.planners.groups import AffinityGroups, CoOccurrence
from clustergym.planners.hot import HotEverywhere, RoundRobin
from clustergym.planners.oracle import Forecast, Oracle
from clustergym.planners.swift import Swift


class Entry(NamedTuple):
    """A planner class and the options that differ from its defaults."""

    planner: type[Planner]
    options: dict[str, Any] = {}


PLANNERS: dict[str, Entry] = {
    "static": Entry(Static),
    "round-robin": Entry(RoundRobin),
    "eplb": Entry(EPLB),
    "eplb-hierarchical": Entry(EPLB, {"hierarchical": True}),
    "flashlb": Entry(FlashLB),
    "swift": Entry(Swift),
    "hot-everywhere": Entry(HotEverywhere),
    "co-occurrence": Entry(CoOccurrence),
    "affinity-groups": Entry(AffinityGroups),
    "greedy": Entry(Greedy),
    "anneal": Entry(Anneal),
    "forecast": Entry(Forecast),
    "oracle": Entry(Oracle),
    "exact": Entry(Exact),
}
REMOVED = {
    **dict.fromkeys(("eplb-ema", "eplb-threshold", "eplb-once", "incremental"), "eplb"),
    **dict.fromkeys(("bottleneck", "bottleneck-8", "random-best", "swap-greedy"), "greedy"),
    **dict.fromkeys(("anneal-4", "anneal-max", "anneal-robust", "anneal-learned", "policy-guided"), "anneal"),
    "grouping": "affinity-groups",
    "policy": "greedy",
}
"""Names of earlier versions, and what to use instead."""


def planner_class(name: str) -> type[Planner]:
    """The class behind a name: its attributes say what the planner needs."""
    if name in REMOVED:
        raise ValueError(f"planner {name!r} was removed: use {REMOVED[name]!r}")
    if name not in PLANNERS:
        raise ValueError(f"unknown planner {name!r}; the planners are: {', '.join(PLANNERS)}")
    return PLANNERS[name].planner


def planners_on_loads() -> list[str]:
    """Names of the planners that need only the load of each expert."""
    return [name for name, entry in PLANNERS.items() if not entry.planner.needs_tokens]


def make_planner(name: str, simulator: Simulator, **options: object) -> Planner:
    """A planner by name. ``options`` (``seed``, ``iterations`` …) override the registered ones."""
    return planner_class(name)(simulator, **{**PLANNERS[name].options, **options})
