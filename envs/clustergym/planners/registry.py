"""All planners by name, as the command line, benchmarks and trainers use them."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from clustergym.moe_placement.simulator import Simulator
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB, EPLBOnce, Static
from clustergym.planners.exact import Exact
from clustergym.planners.flashlb import FlashLB
from clustergym.planners.greedy import Bottleneck, SwapGreedy
from clustergym.planners.groups import AffinityGroups, CoOccurrence
from clustergym.planners.heuristics import Grouping, Incremental
from clustergym.planners.hot import HotEverywhere, RoundRobin
from clustergym.planners.learned import AnnealLearned
from clustergym.planners.oracle import Forecast, Oracle
from clustergym.planners.swift import Swift


class Entry(NamedTuple):
    """A planner class and the options that differ from its defaults."""

    planner: type[Planner] | str
    """A name in :mod:`clustergym.planners.policy.planner`, imported on first use because networks load slowly."""
    options: dict[str, Any] = {}


PLANNERS: dict[str, Entry] = {
    "static": Entry(Static),
    "round-robin": Entry(RoundRobin),
    "eplb-once": Entry(EPLBOnce),
    "eplb": Entry(EPLB),
    "eplb-hierarchical": Entry(EPLB, {"hierarchical": True}),
    "eplb-ema": Entry(EPLB, {"ema": 0.5}),
    "eplb-threshold": Entry(EPLB, {"ema": 0.5, "threshold": 1.3}),
    "incremental": Entry(Incremental),
    "flashlb": Entry(FlashLB),
    "swift": Entry(Swift),
    "hot-everywhere": Entry(HotEverywhere),
    "grouping": Entry(Grouping),
    "co-occurrence": Entry(CoOccurrence),
    "affinity-groups": Entry(AffinityGroups),
    "random-best": Entry(Bottleneck, {"candidates": 0}),
    "bottleneck": Entry(Bottleneck),
    "bottleneck-8": Entry(Bottleneck, {"candidates": 8}),
    "swap-greedy": Entry(SwapGreedy),
    "anneal-max": Entry(Anneal, {"norm": 0, "mix_tokens": 0}),
    "anneal": Entry(Anneal),
    "anneal-4": Entry(Anneal, {"intervals": 4}),
    "anneal-robust": Entry(Anneal, {"spread": 0.5}),
    "anneal-learned": Entry(AnnealLearned),
    "policy": Entry("Policy"),
    "policy-guided": Entry("PolicyGuided"),
    "forecast": Entry(Forecast),
    "oracle": Entry(Oracle),
    "exact": Entry(Exact),
}


def planner_class(name: str) -> type[Planner]:
    """The class behind a name: its attributes say what the planner needs."""
    if name not in PLANNERS:
        raise ValueError(f"unknown planner {name!r}; the planners are: {', '.join(PLANNERS)}")
    planner = PLANNERS[name].planner
    if isinstance(planner, str):
        found: type[Planner] = getattr(import_module("clustergym.planners.policy.planner"), planner)
        return found
    return planner


def planners_on_loads() -> list[str]:
    """Names of the planners that need only the load of each expert."""
    plain = ((name, entry.planner) for name, entry in PLANNERS.items() if not isinstance(entry.planner, str))
    return [name for name, planner in plain if not planner.needs_tokens]


def make_planner(name: str, simulator: Simulator, **options: object) -> Planner:
    """A planner by name. ``options`` (``seed``, ``iterations`` …) override the registered ones."""
    return planner_class(name)(simulator, **{**PLANNERS[name].options, **options})
