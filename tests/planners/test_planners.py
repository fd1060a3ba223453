"""Planners: invariants on random instances, plans worked out by hand, the oracle as reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement import (
    PROFILES,
    ClusterSpec,
    EngineProfile,
    Interval,
    ModelSpec,
    Placement,
    Simulator,
    Traffic,
)
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.anneal import Anneal
from clustergym.planners.eplb import EPLB, Static, balance
from clustergym.planners.evaluation import Protocol, compare
from clustergym.planners.greedy import Greedy
from clustergym.planners.oracle import Forecast, Oracle
from clustergym.planners.registry import PLANNERS, make_planner
from clustergym.traces import SyntheticConfig, synthetic_trace
from even_instances import (
    even_instance,
    even_simulator,
    held,
    instances,
    random_interval,
)
from instances import Instance

QUICK: dict[str, dict[str, object]] = {name: {"iterations": 150} for name in ("anneal", "forecast", "oracle")}


# What holds for every planner


def check_planner(name: str, instance: Instance, profile: str | EngineProfile) -> None:
    sim, interval, current = instance.simulator(profile), instance.interval, instance.placement
    options = QUICK.get(name, {})
    history = [Interval(interval.experts, interval.rows[::-1].copy(), interval.rank_start[::-1].copy()), interval]
    given_placement = current.copy()
    planner = make_planner(name, sim, seed=3, **options)
    first = planner.plan(history, given_placement)
    second = planner.plan(history, first)

    assert (given_placement == current).all(), "the planner changed its input"
    for plan in (first, second):
        assert plan.shape == current.shape
        assert plan.dtype == np.int16
        sim.check(plan)
    again = make_planner(name, sim, seed=3, **options)
    for fresh in (again, planner):  # a new planner, and one after a reset
        fresh.reset()
        np.testing.assert_array_equal(fresh.plan(history, current), first)
        np.testing.assert_array_equal(fresh.plan(history, first), second)


@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode", "vllm"])
@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "exact"])
@settings(max_examples=12, deadline=None)
@given(instance=instances())
def test_plans_are_legal_and_reproducible(name: str, profile: str, instance: Instance) -> None:
    check_planner(name, instance, profile)


@pytest.mark.parametrize("profile", PROFILES)
@settings(max_examples=8, deadline=None)
@given(instance=instances(small=True))
def test_plans_for_every_engine_are_legal_and_reproducible(profile: str, instance: Instance) -> None:
    # A linear program for each of all placements would take minutes.
    for name in ("eplb", "anneal", "greedy", *(("exact",) if profile != "sglang-lp" else ())):
        check_planner(name, instance, profile)


def test_unknown_planner_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown planner 'eplbb'; the planners are: static, .*eplb-hierarchical.*exact"
    ):
        make_planner("eplbb", even_simulator(1, 2, 4, 1, 2))


@pytest.mark.parametrize(("name", "instead"), [("anneal-learned", "anneal"), ("swap-greedy", "greedy")])
def test_a_removed_planner_says_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' was removed: use '{instead}'"):
        make_planner(name, even_simulator(1, 2, 4, 1, 2))


# EPLB


def packed(loads: list[float], nodes: int, per_node: int, slots: int, groups: int = 0) -> list[set[int]]:
    model = ModelSpec("hand", 1, len(loads), 1, 8, 8, n_groups=max(groups, 1))
    sim = Simulator(model, ClusterSpec("hand", nodes, per_node, slots))
    return [set(gpu.tolist()) for gpu in EPLB(sim, hierarchical=groups > 0).pack(np.array([loads]))[0]]


def test_eplb_matches_plans_worked_out_by_hand() -> None:
    # Heaviest first to the lightest GPU with room: 9 | 7, 6 | 9+5, 7+6+4 | 3.
    assert packed([9, 7, 6, 5, 4, 3], 1, 2, 3) == [{0, 3, 5}, {1, 2, 4}]
    # Two spare slots: 10 splits into 5 + 5, then 6 is heaviest and splits into 3 + 3; 2 and 2 fill up.
    assert packed([10, 6, 2, 2], 1, 2, 3) == [{0, 1, 2}, {0, 1, 3}]
    # The original EPLB would put three copies of expert 0 on two GPUs, but only one copy per GPU helps.
    assert packed([100, 1], 1, 2, 2) == [{0, 1}, {0, 1}]
    # Groups (11, 9, 3, 2) to nodes, two each: 11 + 2 and 9 + 3. Globally, the heavy experts would be mixed.
    assert packed([10, 1, 5, 4, 2, 1, 1, 1], 2, 1, 4, groups=4) == [{0, 1, 6, 7}, {2, 3, 4, 5}]


def test_eplb_of_a_large_model_takes_milliseconds() -> None:
    """58 layers × 256 experts in 288 slots on 32 GPUs."""
    sim = Simulator("deepseek-v3", ClusterSpec("4x8", 4, 8, 9))
    loads = np.random.default_rng(0).lognormal(sigma=1.0, size=(58, 256))
    for hierarchical in (False, True):
        planner = EPLB(sim, hierarchical=hierarchical)
        plan = planner.pack(loads)
        sim.check(plan)
        assert (plan >= 0).all()
        took = []
        for _ in range(7):
            began = time.perf_counter()
            planner.pack(loads)
            took.append(time.perf_counter() - began)
        assert min(took) < 0.050
        packed_now, static = balance(loads, plan), balance(loads, sim.static(58))
        assert (static < 0.8 * packed_now).all()
        assert packed_now.mean() > 0.87


def test_eplb_balances_skewed_traffic_better_than_static() -> None:
    rng = np.random.default_rng(0)
    sim = even_simulator(2, 2, 16, 2, 5)
    interval, static = random_interval(rng, sim, 400, layers=3), sim.static(3)
    plan = EPLB(sim).plan([interval], static)
    assert (sim.evaluate(interval, plan).balancedness > sim.evaluate(interval, static).balancedness + 0.1).all()


def test_balance_matches_a_calculation_by_hand() -> None:
    # GPU 0: 6/2 + 2 = 5; GPU 1: 6/2 + 0 = 3; mean 4.
    placement = np.array([[[0, 1], [2, 0]]], np.int16)
    assert balance(np.array([[6.0, 2.0, 0.0]]), placement) == pytest.approx([4 / 5])


# The other heuristics


def test_static_planner_keeps_the_placement() -> None:
    sim, interval, current = even_instance(0, 2, 2, 8, 2, 3)
    np.testing.assert_array_equal(Static(sim).plan([interval], current), current)


# Greedy


def every_operation(placement: Placement, n_experts: int) -> list[Placement]:
    """The placement, and all that differ from it by one operation on one expert."""
    n_gpus, n_slots = placement.shape
    copies, found = np.bincount(placement[placement >= 0], minlength=n_experts), [placement]
    for g, s in np.ndindex(n_gpus, n_slots):
        v = placement[g, s]
        room = (placement[g] < 0).any()
        if v >= 0 and room:
            continue  # an empty slot is taken first
        for e in set(range(n_experts)) - set(placement[g].tolist()):
            if v < 0 or copies[v] > 1:  # another replica of e, in an empty slot or instead of a spare one
                found.append(placement.copy())
                found[-1][g, s] = e
            for h, t in np.argwhere(placement == e):  # a replica of e moves, in exchange for that in the slot
                if v < 0 or v not in placement[h]:
                    found.append(placement.copy())
                    found[-1][g, s], found[-1][h, t] = e, v
    return found


@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode", "vllm"])
@pytest.mark.parametrize("shape", [(2, 2, 6, 2, 4), (1, 2, 6, 2, 4), (3, 1, 8, 2, 3)])
def test_greedy_makes_the_best_of_all_operations(profile: str, shape: tuple[int, int, int, int, int]) -> None:
    """Best by the estimate, made from scratch for each of them."""
    changed = 0
    for seed in range(10):
        sim, interval, current = even_instance(seed, *shape, profile)
        planner = Greedy(sim, operations=1, restart=False)
        plan = planner.plan([interval], current)
        topic = np.zeros(interval.experts.shape[1], np.int8)
        state, objective = planner.search.prepare_estimate([interval], current, topic)

        def estimate(placement: Placement, state: Any = state, objective: Any = objective) -> float:
            return float(Anneal.take(state, placement[None], objective)[0])

        least = min(map(estimate, every_operation(current[0], sim.n_experts)))
        assert estimate(plan[0]) == pytest.approx(least, rel=1e-6)
        changed += (plan != current).any()
    assert changed >= 8


@settings(max_examples=25, deadline=None)
@given(instance=instances(), operations=st.integers(1, 3))
def test_greedy_keeps_its_budget(instance: Instance, operations: int) -> None:
    sim, interval, current = instance.simulator(), instance.interval, instance.placement
    plan = Greedy(sim, operations=operations, restart=False).plan([interval], current)
    for l in range(interval.n_layers):
        now, then = held(current[l : l + 1]), held(plan[l : l + 1])
        assert max(len(then - now), len(now - then)) <= 2 * operations


def test_greedy_is_almost_as_good_as_annealing() -> None:
    trace = synthetic_trace(SyntheticConfig(n_tokens=16384, n_layers=2, n_experts=32, top_k=4), seed=3)
    sim = Simulator("gpt-oss-20b", "h800-4x4", "sglang-prefill")
    interval = sample_passes(trace, sim.n_gpus, Traffic("prefill"), 8)
    names = ("static", "eplb", "greedy", "anneal")
    plans = {name: make_planner(name, sim).plan([interval], sim.static(2)) for name in names}
    static, eplb, greedy, anneal = (sim.evaluate(interval, plans[name]).time_us.mean() for name in names)
    assert anneal < greedy < eplb < static
    assert static - greedy > 0.8 * (static - anneal)


# Oracle and forecast


@pytest.mark.parametrize("schedule", ["stationary", "drift", "switch", "replay"])
def test_oracle_serves_faster_than_every_other_planner(schedule: str) -> None:
    trace = synthetic_trace(
        SyntheticConfig(n_tokens=12000, n_layers=2, n_experts=16, top_k=2, mean_seq_len=40, popularity_skew=0.6), seed=1
    )
    model = ModelSpec("small", 2, 16, 2, 2048, 1024)
    sim = Simulator(model, ClusterSpec("2x2", 2, 2, 5))
    names = [name for name in PLANNERS if name != "exact"]
    traffic = Traffic("prefill", tokens_per_rank=64, sampled_passes=2, schedule=schedule)
    results = compare(trace, sim, names, Protocol(traffic, intervals=3))
    served = {r.planner: r.served_us for r in results}
    oracle = served.pop("oracle")
    assert len(served) == len(names) - 1
    assert oracle < min(served.values()), (oracle, served)


@pytest.mark.parametrize("planner", [Oracle, Forecast])
def test_planners_that_know_more_use_only_the_last_interval(planner: type[Oracle | Forecast]) -> None:
    rng = np.random.default_rng(8)
    sim = even_simulator(2, 2, 8, 2, 3)
    past, future = random_interval(rng, sim, 50), random_interval(rng, sim, 50)
    alone = planner(sim, iterations=500).plan([future], sim.static(1))
    np.testing.assert_array_equal(planner(sim, iterations=500).plan([past, future], sim.static(1)), alone)
