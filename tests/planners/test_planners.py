"""Planners: invariants on random instances, plans worked out by hand, the oracle as reference."""

from __future__ import annotations

import time
from itertools import product

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
from clustergym.planners.eplb import EPLB, EPLBOnce, Static, balance
from clustergym.planners.evaluation import Protocol, compare
from clustergym.planners.greedy import Bottleneck, SwapGreedy
from clustergym.planners.heuristics import Grouping, Incremental
from clustergym.planners.oracle import Forecast, Oracle
from clustergym.planners.registry import PLANNERS, make_planner
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace
from even_instances import (
    SERVED,
    cost_us,
    costs_of_all,
    even_instance,
    even_simulator,
    held,
    instances,
    interval_of,
    random_interval,
)
from instances import Instance

WITHOUT_POLICY = [name for name in PLANNERS if not name.startswith("policy")]
QUICK: dict[str, dict[str, object]] = {
    name: {"iterations": 150}
    for name in ("anneal", "anneal-max", "anneal-4", "anneal-robust", "anneal-learned", "forecast", "oracle")
}


# What holds for every planner


def check_planner(name: str, instance: Instance, profile: str | EngineProfile) -> None:
    sim, interval, current = instance.simulator(profile), instance.interval, instance.placement
    options = QUICK.get(name, {})
    history = [Interval(interval.experts, interval.rows[::-1].copy(), interval.rank_start[::-1].copy()), interval]
    given_placement = current.copy()
    past = TokenTrace(interval.experts.transpose(1, 0, 2).copy(), n_experts=sim.n_experts, model=None, name="past")
    planner = make_planner(name, sim, seed=3, **options)
    if planner.needs_training:
        planner.learn(past)
    first = planner.plan(history, given_placement)
    second = planner.plan(history, first)

    assert (given_placement == current).all(), "the planner changed its input"
    for plan in (first, second):
        assert plan.shape == current.shape
        assert plan.dtype == np.int16
        sim.check(plan)
    again = make_planner(name, sim, seed=3, **options)
    if again.needs_training:
        again.learn(past)
    for fresh in (again, planner):  # a new planner, and one after a reset
        fresh.reset()
        np.testing.assert_array_equal(fresh.plan(history, current), first)
        np.testing.assert_array_equal(fresh.plan(history, first), second)


@pytest.mark.parametrize("profile", SERVED)
@pytest.mark.parametrize("name", [name for name in WITHOUT_POLICY if name != "exact"])
@settings(max_examples=12, deadline=None)
@given(instance=instances())
def test_plans_are_legal_and_reproducible(name: str, profile: str, instance: Instance) -> None:
    check_planner(name, instance, SERVED[profile])


@pytest.mark.parametrize("profile", PROFILES)
@settings(max_examples=8, deadline=None)
@given(instance=instances(small=True))
def test_plans_for_every_engine_are_legal_and_reproducible(profile: str, instance: Instance) -> None:
    # A linear program for each of all placements would take minutes.
    for name in ("eplb", "anneal", "swap-greedy", *(("exact",) if profile != "sglang-lp" else ())):
        check_planner(name, instance, profile)


def test_unknown_planner_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown planner 'eplbb'; the planners are: static, .*eplb-hierarchical.*exact"
    ):
        make_planner("eplbb", even_simulator(1, 2, 4, 1, 2))


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


def test_eplb_threshold_keeps_balanced_layers() -> None:
    sim = even_simulator(1, 2, 4, 1, 2)
    # Layer 0 uses all experts equally. In layer 1 all tokens use experts 0 and 1, which share a GPU.
    experts = np.array([[[0], [1], [2], [3]] * 3, [[0], [1], [0], [1]] * 3], np.int16)
    interval = Interval.even(experts, np.arange(12)[None], 2)
    current = np.array([[[3, 0], [2, 1]], [[1, 0], [3, 2]]], np.int16)
    plan = EPLB(sim, threshold=1.3).plan([interval], current)
    np.testing.assert_array_equal(plan[0], current[0])
    np.testing.assert_array_equal(plan[1], EPLB(sim).plan([interval], current)[1])
    assert {0, 1} not in [set(gpu.tolist()) for gpu in plan[1]]
    # The imbalance of layer 1 is exactly 2, which a threshold of 2 allows.
    np.testing.assert_array_equal(EPLB(sim, threshold=2.0).plan([interval], current), current)


def test_eplb_averages_loads_over_intervals() -> None:
    rng = np.random.default_rng(3)
    sim = even_simulator(2, 2, 8, 2, 3)
    intervals = [random_interval(rng, sim, 60) for _ in range(3)]
    loads, start = [w.loads(8).astype(float) for w in intervals], sim.static(1)
    planners = {ema: EPLB(sim, ema=ema) for ema in (1.0, 0.25)}
    plans = {ema: [p.plan(intervals[: i + 1], start) for i in range(3)] for ema, p in planners.items()}
    for i in range(3):
        np.testing.assert_array_equal(plans[1.0][i], EPLB(sim).pack(loads[i]))
    average = 0.25 * loads[2] + 0.75 * (0.25 * loads[1] + 0.75 * loads[0])
    np.testing.assert_allclose(planners[0.25].average, average)  # type: ignore[arg-type]
    np.testing.assert_array_equal(plans[0.25][2], EPLB(sim).pack(average))
    planners[0.25].reset()
    np.testing.assert_array_equal(planners[0.25].plan(intervals[2:], start), EPLB(sim).pack(loads[2]))
    with pytest.raises(ValueError, match="ema is 0"):
        EPLB(sim, ema=0.0)


def test_eplb_once_plans_once() -> None:
    rng = np.random.default_rng(4)
    sim = even_simulator(2, 2, 8, 2, 3)
    intervals, planner = [random_interval(rng, sim, 60) for _ in range(2)], EPLBOnce(sim)
    plans = [EPLB(sim).pack(w.loads(8).astype(float)) for w in intervals]
    assert (plans[0] != plans[1]).any()
    np.testing.assert_array_equal(planner.plan(intervals[:1], sim.static(1)), plans[0])
    np.testing.assert_array_equal(planner.plan(intervals, plans[0]), plans[0])
    planner.reset()
    np.testing.assert_array_equal(planner.plan(intervals, sim.static(1)), plans[1])


# The other heuristics


@settings(max_examples=60, deadline=None)
@given(instance=instances(), moves=st.integers(0, 4))
def test_incremental_keeps_its_budget_and_never_lowers_the_balance(instance: Instance, moves: int) -> None:
    sim, interval, current = instance.simulator(), instance.interval, instance.placement
    planner = Incremental(sim, moves=moves)
    plan = planner.plan([interval], current)
    assert ((plan != current).sum((1, 2)) <= 2 * moves).all()
    loads = planner.loads(interval)
    assert (balance(loads, plan) >= balance(loads, current) * (1 - 1e-12)).all()


def test_incremental_matches_a_swap_worked_out_by_hand() -> None:
    """Loads 8, 4, 1 | 2, 0, 0: swapping 8 and 2 turns 13 | 2 into 7 | 8, the best that one swap can do."""
    sim = even_simulator(1, 2, 6, 1, 3)
    interval = interval_of([(0,)] * 8 + [(1,)] * 4 + [(2,)] + [(3,)] * 2, [0] * 15, 2)
    plan = Incremental(sim, moves=1).plan([interval], np.array([[[0, 1, 2], [3, 4, 5]]], np.int16))
    assert plan.tolist() == [[[3, 1, 2], [0, 4, 5]]]


def test_static_planner_keeps_the_placement() -> None:
    sim, interval, current = even_instance(0, 2, 2, 8, 2, 3)
    np.testing.assert_array_equal(Static(sim).plan([interval], current), current)


def test_grouping_recovers_known_groups() -> None:
    rng = np.random.default_rng(6)
    sim = even_simulator(2, 2, 12, 3, 3)
    groups = rng.permutation(12).reshape(4, 3)
    tokens = np.stack([rng.permutation(groups[g]) for g in rng.integers(0, 4, 200)])
    interval = Interval.even(tokens[None].astype(np.int16), np.arange(200)[None], 4)
    plan = Grouping(sim).plan([interval], sim.static(1))
    assert {frozenset(gpu.tolist()) for gpu in plan[0]} == {frozenset(g.tolist()) for g in groups}
    assert sim.evaluate(interval, plan).gpus_per_token[0] == 1.0
    assert sim.evaluate(interval, sim.static(1)).gpus_per_token[0] > 1.5


def test_grouping_gives_spare_slots_to_the_hottest_experts() -> None:
    sim = even_simulator(1, 2, 4, 2, 3)
    interval = interval_of([(0, 2)] * 5 + [(1, 3)] * 2, [0] * 7, 2)
    plan = Grouping(sim).plan([interval], sim.static(1))
    # {0, 2} and {1, 3} are grouped. The lighter GPU {1, 3} chooses first and takes 0; then 1 and 3 (2 each) are tied.
    assert [set(gpu.tolist()) for gpu in plan[0]] == [{0, 2, 1}, {1, 3, 0}]


# Searches


@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode"])
@pytest.mark.parametrize("candidates", [0, 1, 8])
@settings(max_examples=25, deadline=None)
@given(instance=instances(), operations=st.integers(0, 3))
def test_bottleneck_keeps_its_budget_and_never_increases_the_time(
    profile: str, candidates: int, instance: Instance, operations: int
) -> None:
    sim, interval, current = instance.simulator(profile), instance.interval, instance.placement
    plan = Bottleneck(sim, operations=operations, candidates=candidates).plan([interval], current)
    for l in range(interval.n_layers):
        now, then = held(current[l : l + 1]), held(plan[l : l + 1])
        added, dropped = len(then - now), len(now - then)
        assert max(added, dropped) <= 2 * operations
        if operations == 1:  # nothing, add, delete, move or swap
            assert (added, dropped) in {(0, 0), (1, 0), (0, 1), (1, 1), (2, 2)}
    before = sim.evaluate(interval, current).time_us
    assert (cost_us(sim, interval, plan, current) <= before * (1 + 1e-12)).all()


def test_bottleneck_moves_the_heaviest_expert() -> None:
    """GPU 0 has all the work, but the tokens come from GPU 1: the heavy expert 0 moves there, into an empty slot."""
    sim = even_simulator(1, 2, 2, 1, 2)
    interval = interval_of([(0,)] * 9 + [(1,)] * 3, [1] * 12, 2)
    plan = Bottleneck(sim, operations=1).plan([interval], np.array([[[0, 1], [-1, -1]]], np.int16))
    assert held(plan) == {(0, 0, 1), (0, 1, 0)}


def test_more_candidates_beat_random_operations() -> None:
    totals = {"random-best": 0.0, "bottleneck-8": 0.0}
    for seed in range(20):
        sim, interval, current = even_instance(seed, 2, 2, 12, 2, 4)
        for name in totals:
            plan = make_planner(name, sim, operations=1).plan([interval], current)
            totals[name] += float(cost_us(sim, interval, plan, current).sum())
    assert totals["bottleneck-8"] < 0.98 * totals["random-best"]


def every_swap_and_move(placement: Placement) -> list[Placement]:
    """The placement, and all that differ from it by one swap of two replicas or one move to an empty slot."""
    n_gpus, n_slots = placement.shape
    found = [placement]
    for (g, s), (h, t) in product(np.ndindex(n_gpus, n_slots), repeat=2):
        e, v = placement[g, s], placement[h, t]
        if g == h or e < 0 or e in placement[h] or (v >= 0 and v in placement[g]):
            continue
        other = placement.copy()
        other[g, s], other[h, t] = v, e
        found.append(other)
    return found


@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode"])
@pytest.mark.parametrize("shape", [(2, 2, 6, 2, 4), (1, 2, 6, 2, 4), (3, 1, 8, 2, 3)])
def test_swap_greedy_applies_the_best_of_all_swaps_and_moves(
    profile: str, shape: tuple[int, int, int, int, int]
) -> None:
    for seed in range(25):
        sim, interval, current = even_instance(seed, *shape, profile)
        plan = SwapGreedy(sim, operations=1).plan([interval], current)
        least = costs_of_all(sim, interval, every_swap_and_move(current[0]), current).min()
        assert cost_us(sim, interval, plan, current)[0] == pytest.approx(least, rel=1e-12)


# Oracle and forecast


@pytest.mark.parametrize("schedule", ["stationary", "drift", "switch", "replay"])
def test_oracle_serves_faster_than_every_other_planner(schedule: str) -> None:
    trace = synthetic_trace(
        SyntheticConfig(n_tokens=12000, n_layers=2, n_experts=16, top_k=2, mean_seq_len=40, popularity_skew=0.6), seed=1
    )
    model = ModelSpec("small", 2, 16, 2, 2048, 1024)
    sim = Simulator(model, ClusterSpec("2x2", 2, 2, 5))
    names = [name for name in WITHOUT_POLICY if name not in ("exact", "anneal-learned")]
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
