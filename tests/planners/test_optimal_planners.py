"""The exact planner and annealing: brute-force optima, objectives, time budgets, and options that are refused."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement import (
    PROFILES,
    ClusterSpec,
    Interval,
    ModelSpec,
    Placement,
    Simulator,
)
from clustergym.moe_placement.kernels.passes import change
from clustergym.moe_placement.profiles import DISPATCHES
from clustergym.planners import exact
from clustergym.planners.anneal import Anneal
from clustergym.planners.eplb import EPLB
from clustergym.planners.exact import Exact
from clustergym.planners.kernels.launch import objective_us
from clustergym.planners.kernels.proposals import propose
from clustergym.planners.kernels.trial import allocate, can_try, prepare, try_change
from even_instances import (
    cost_us,
    costs_of_all,
    even_instance,
    even_simulator,
    every_placement,
    instances,
    interval_of,
    random_interval,
)
from instances import Instance, made_profile, random_placement

HOT = {
    "norm": 0, "mix_tokens": 0, "estimate_steps": 0, "iterations": 20_000, "heat": (0.2, 1e-3),
    "shares": (0.3, 0.35, 0.2, 0.1),
}  # fmt: skip
"""Exact annealing for tiny instances, where one step changes a large share of the time."""


# Exact

# (nodes, GPUs per node, experts, top-k, slots): as many slots as experts, so the exact planner searches node by node.
FULL = [(1, 2, 6, 2, 3), (1, 3, 6, 2, 2), (2, 2, 4, 2, 1), (2, 1, 6, 3, 3), (2, 2, 8, 3, 2)]
# With spare slots, so it tries every placement.
SPARE = [(1, 2, 4, 2, 3), (2, 1, 5, 2, 3), (1, 3, 4, 1, 2), (2, 2, 3, 2, 1)]


@pytest.mark.parametrize("migration", [True, False])
@pytest.mark.parametrize("shape", FULL + SPARE)
@pytest.mark.parametrize(("seed", "passes", "profile"), [(0, 1, "sglang-prefill"), (1, 2, "sglang-prefill"),
    (2, 3, "sglang-decode"), (3, 2, "vllm"), (4, 2, "sglang-lp"), (5, 2, "tensorrt-llm")])  # fmt: skip
def test_exact_plan_is_the_best_of_all_placements(
    shape: tuple[int, int, int, int, int], seed: int, passes: int, profile: str, migration: bool
) -> None:
    if profile == "sglang-lp" and shape not in (SPARE[0], SPARE[3]):
        return  # a linear program for every placement
    sim, interval, before = even_instance(seed, *shape, profile, passes)
    planner = Exact(sim, migration=migration)
    plan = planner.plan([interval], before)
    least = costs_of_all(
        sim, interval, every_placement(sim.n_experts, sim.n_gpus, sim.n_slots), before, migration
    ).min()
    assert cost_us(sim, interval, plan, before, migration)[0] == pytest.approx(least, rel=1e-6)
    assert planner.optimum_us == pytest.approx([least], rel=1e-6)


def test_each_layer_is_searched_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    sim = even_simulator(2, 2, 4, 2, 1)
    interval, before = random_interval(rng, sim, 12, layers=3, passes=2), random_placement(rng, 3, 4, 1, 4, 0.0)
    search, enumeration = Exact(sim), Exact(sim)
    search.plan([interval], before)
    monkeypatch.setattr(exact, "can_search", lambda sim: False)
    monkeypatch.setattr(exact, "BATCH", 7)
    enumeration.plan([interval], before)
    assert len(search.optimum_us) == 3
    assert search.optimum_us == pytest.approx(enumeration.optimum_us, rel=1e-12)


def test_exact_planner_weighs_migration() -> None:
    """Two experts on two GPUs, every token uses the one on the other GPU. A swap saves copies but costs migration."""
    interval = interval_of([(1,), (0,)] * 4, [0, 1] * 4, 2)
    before = np.array([[[0], [1]]], np.int16)
    swapped = np.array([[[1], [0]]], np.int16)
    for passes, expected in ((1000, swapped), (1, before)):
        model = ModelSpec("m", 1, 2, 1, 1000, 100, kernel_start_us=1, kernel_expert_us=1, kernel_pair_us=1)
        sim = Simulator(model, ClusterSpec("c", 1, 2, 1, 1.0, 1.0), passes_per_interval=passes)
        np.testing.assert_array_equal(Exact(sim).plan([interval], before), expected)
    np.testing.assert_array_equal(Exact(sim, migration=False).plan([interval], before), swapped)


def test_exact_planner_refuses_large_instances() -> None:
    rng = np.random.default_rng(0)
    spare = even_simulator(1, 4, 8, 1, 3)  # (1 + 8 + 28 + 56)^4 = 74 805 201
    with pytest.raises(
        ValueError, match=r"8 experts in 4 × 3 slots have about 7\.5e\+07 placements: .* at most 300000"
    ):
        Exact(spare).plan([random_interval(rng, spare, 4)], spare.static(1))


# Annealing


@pytest.mark.parametrize("shape", FULL + SPARE)
@pytest.mark.parametrize(("seed", "profile", "migration"), [(10, "sglang-prefill", "blocking"),
    (11, "sglang-decode", "blocking"), (12, "vllm", "blocking"), (13, "sglang-prefill", "async")])  # fmt: skip
def test_annealing_reaches_the_proven_optimum(
    shape: tuple[int, int, int, int, int], seed: int, profile: str, migration: str
) -> None:
    if shape not in SPARE and migration == "async":
        return  # the exact planner would try too many placements
    sim, interval, before = even_instance(seed, *shape, profile, 2, migration)
    proven = Exact(sim)
    proven.plan([interval], before)
    plan = Anneal(sim, seed, **HOT).plan([interval], before)  # type: ignore[arg-type]
    assert cost_us(sim, interval, plan, before) == pytest.approx(proven.optimum_us, rel=1e-6)


def test_annealing_deletes_replicas_that_cost_more_than_they_save() -> None:
    """If an active expert costs far more than a copy, one replica of each is best and slots stay empty."""
    rng = np.random.default_rng(1)
    sim = even_simulator(1, 2, 4, 2, 4, expert_us=500.0)
    interval, before = random_interval(rng, sim, 12, pads=0.0), np.array([[[0, 1, 2, 3]] * 2], np.int16)
    proven = Exact(sim)
    plan = proven.plan([interval], before)
    assert (plan >= 0).sum() == 4
    found = Anneal(sim, 0, **HOT).plan([interval], before)  # type: ignore[arg-type]
    assert cost_us(sim, interval, found, before) == pytest.approx(proven.optimum_us, rel=1e-9)


def own_objective(planner: Anneal, interval: Interval, plan: Placement, before: Placement) -> npt.NDArray[np.float64]:
    objective = planner.objective(interval, planner.simulator.count(interval, before))
    counts = planner.simulator.count(interval, plan, before)
    return np.array([objective_us(counts, l, objective) for l in range(interval.n_layers)])


@pytest.mark.parametrize("migration", ["blocking", "async"])
@settings(max_examples=60, deadline=None)
@given(instance=instances(), weight=st.sampled_from([0.5, 1.0]), profile=st.sampled_from(list(PROFILES)))
def test_the_true_objective_is_the_reported_time(
    migration: str, instance: Instance, weight: float, profile: str
) -> None:
    if profile == "sglang-lp":
        return  # searches plan for a random choice of replicas
    planner = Anneal(instance.simulator(profile, migration=migration), norm=0, migration_weight=weight)
    interval, plan, now = instance.interval, instance.placement, instance.before
    served = planner.simulator.evaluate(interval, plan, now)
    found = own_objective(planner, interval, plan, now)
    if weight == 1.0:
        np.testing.assert_allclose(found, served.total_us)
    elif migration == "blocking":
        np.testing.assert_allclose(found, served.time_us + weight * served.migration_us)


@pytest.mark.parametrize("norm", [0, 16])
@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode"])
@settings(max_examples=25, deadline=None)
@given(instance=instances(), iterations=st.integers(1, 60), weight=st.sampled_from([0.0, 1.0]))
def test_annealing_is_never_worse_than_its_starts(
    norm: int, profile: str, instance: Instance, iterations: int, weight: float
) -> None:
    planner = Anneal(
        instance.simulator(profile), norm=norm, iterations=iterations, heat=(10.0, 1.0), migration_weight=weight
    )
    interval, now = planner.observe([instance.interval], planner.most_tokens), instance.placement
    eplb = EPLB(planner.simulator)
    plans = (
        planner.plan([instance.interval], now), now, planner.simulator.static(interval.n_layers),
        eplb.pack(eplb.loads(interval)),
    )  # fmt: skip
    after, *starts = (own_objective(planner, interval, plan, now) for plan in plans)
    for start in starts:  # the objective includes the migration to the start
        assert (after <= start * (1 + 1e-12)).all()


@pytest.mark.parametrize("transport", ["dedup", "per-expert", "allgather"])
@settings(max_examples=150, deadline=None)
@given(
    instance=instances(), dispatch=st.sampled_from([d for d in DISPATCHES if d != "lp"]),
    norm=st.sampled_from([0, 4, 16]), migration=st.sampled_from(["blocking", "async"]), imbalance=st.booleans(),
)  # fmt: skip
def test_a_trial_tells_what_the_change_then_costs(
    transport: str, instance: Instance, dispatch: str, norm: int, migration: str, imbalance: bool
) -> None:
    """A trial leaves the state alone, and its result is that of counting the changed placement from scratch."""
    sim = instance.simulator(made_profile(dispatch, transport), migration=migration)
    interval, planner = instance.interval, Anneal(sim, norm=norm)
    if imbalance:
        cuts = np.sort(np.random.default_rng(0).integers(0, interval.n_tokens + 1, (interval.n_passes, sim.n_gpus - 1)))
        starts = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, interval.n_tokens)))
        interval = Interval(interval.experts, interval.rows, starts.astype(np.int32))
    state = sim.count(interval, instance.placement, instance.before)
    objective = planner.objective(interval, sim.count(interval, instance.before))
    scratch = allocate(state, sim.topology)
    prepare(0, interval.n_layers, scratch, state, interval.experts, sim.topology)
    key, shares = planner.random_keys(interval.n_layers), np.array([0.3, 0.3, 0.2, 0.3])
    sample = interval.experts[0, interval.rows.ravel()]
    watched = (state.slots, state.n_replicas, state.replica_choice, state.received, state.copies, state.kernel_us)
    for _ in range(25):
        step = propose(state, 0, key, sample, shares, sim.topology.gpus_per_node)
        if step[0] < 0:
            continue
        if can_try(state, 0, *step, sim.topology):
            before = [array.copy() for array in watched]
            told = try_change(state, scratch, 0, *step, objective)
            for array, copy in zip(watched, before, strict=True):
                np.testing.assert_array_equal(array, copy)
            change(state, 0, *step, sim.topology, objective.costs, interval.n_passes)
            assert told == pytest.approx(own_objective(planner, interval, state.slots, instance.before)[0], rel=1e-12)
        else:
            change(state, 0, *step, sim.topology, objective.costs, interval.n_passes)
        sim.check(state.slots)


def test_annealing_keeps_its_time_budget() -> None:
    sim = even_simulator(2, 2, 16, 2, 5)
    rng = np.random.default_rng(2)
    interval, planner = random_interval(rng, sim, 200, layers=4), Anneal(sim, seconds=0.4)
    planner.plan([interval], sim.static(4))  # compile
    began = time.perf_counter()
    plan = planner.plan([interval], sim.static(4))
    elapsed = time.perf_counter() - began
    assert 0.39 < elapsed < 5  # a busy machine may take its time
    assert (cost_us(sim, interval, plan, sim.static(4)) < sim.evaluate(interval, sim.static(4)).time_us).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "at least 1 iteration"),
        ({"seconds": 0.0}, "more than 0 seconds"),
        ({"heat": (0.1, 0.0)}, "temperatures must be more than 0"),
        ({"norm": 3}, "power of two"),
        ({"robustness": -1.0}, "robustness is -1"),
        ({"mix_tokens": -1}, "mix_tokens is -1"),
        ({"estimate_steps": -1}, "0 or more steps on the estimate"),
    ],
)
def test_annealing_refuses_impossible_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Anneal(even_simulator(1, 2, 4, 1, 2), **options)  # type: ignore[arg-type]
