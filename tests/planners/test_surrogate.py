"""The estimate that annealing works on: shares of ranks, sums, and what it finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement import ClusterSpec, EngineProfile, Interval, ModelSpec, Placement, Simulator, Traffic
from clustergym.moe_placement.kernels.cost import mean_pass_time
from clustergym.moe_placement.profiles import DISPATCHES
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.anneal import Anneal, OtherPhase
from clustergym.planners.kernels import surrogate
from clustergym.planners.kernels.counts import count_tokens, deviations
from clustergym.planners.kernels.launch import Objective
from clustergym.planners.kernels.surrogate import ALL, FAR, NEAR, NOW, Surrogate
from clustergym.planners.kernels.surrogate_steps import anneal_layers
from clustergym.traces import SyntheticConfig, synthetic_trace
from instances import Instance, made_profile, random_instance

RULES = [rule for rule in DISPATCHES if rule != "lp"]


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    return random_instance(
        draw(st.integers(0, 2**31)), nodes=draw(st.integers(1, 3)), per_node=draw(st.integers(1, 3)),
        n_experts=draw(st.integers(2, 9)), top_k=draw(st.integers(1, 3)), tokens=draw(st.integers(1, 12)),
        layers=draw(st.integers(1, 2)), spare_slots=draw(st.integers(0, 2)),
    )  # fmt: skip


def simulator(
    nodes: int, per_node: int, n_experts: int, top_k: int, slots: int, profile: str | EngineProfile = "sglang-prefill"
) -> Simulator:
    model = ModelSpec("m", 1, n_experts, top_k, 64, 64, kernel_start_us=5.0, kernel_expert_us=2.0, kernel_pair_us=0.5)
    return Simulator(model, ClusterSpec("c", nodes, per_node, slots, 160, 40, 2.0, 4.0), profile, 100)


def surrogate_of(
    sim: Simulator,
    interval: Interval,
    placement: Placement,
    before: Placement,
    n_topics: int = 0,
    mixture_std: float = 0.5,
) -> Surrogate:
    """The estimate. The rows take turns with the topics."""
    state = surrogate.allocate(
        surrogate.DEFAULT_SHAPE, [surrogate.prices_of(sim.interval_costs(interval), sim.topology.transport)],
        interval.rows.size, interval.experts.shape[2], sim.n_experts, placement.copy(),
        sim.cluster.n_nodes, n_topics,
    )  # fmt: skip
    rows, topic = interval.rows.ravel(), (np.arange(interval.experts.shape[1]) % max(1, n_topics)).astype(np.int8)
    share = np.bincount(topic[rows], minlength=n_topics) / len(rows)
    by_topic = np.zeros((len(placement), sim.n_experts, n_topics))
    count_tokens(0, len(placement), state, interval.experts, rows, rows, before, topic, by_topic)
    state.deviation[:] = deviations(state.load, by_topic, share, mixture_std, n_topics)
    return state


def take(state: Surrogate, placement: Placement, objective: Objective) -> npt.NDArray[np.float64]:
    found = np.empty(len(placement))
    surrogate.take_placements(0, len(placement), state, placement, objective, found)
    return found


@pytest.mark.parametrize(("dispatch", "deals_one_node"), [*((rule, False) for rule in RULES), ("rank-nearest", True)])
@settings(max_examples=60, deadline=None)
@given(instance=instances())
def test_shares_are_those_of_the_ranks_that_choose_a_replica(
    dispatch: str, deals_one_node: bool, instance: Instance
) -> None:
    """Counted from the choices that the simulator writes. Ranks without a near replica are dealt evenly on average."""
    sim = instance.simulator(replace(made_profile(dispatch, "per-expert"), deals_one_node=deals_one_node))
    state = sim.count(instance.interval, instance.placement)
    n_gpus, node_of, shares = sim.n_gpus, sim.topology.node_of, np.zeros((sim.n_gpus, 3), np.float32)
    for e in range(sim.n_experts):
        n, replicas = int(state.n_replicas[0, e]), state.replicas[0, e]
        surrogate.write_shares(replicas, n, shares, sim.topology, n_gpus)
        counted = np.zeros((n, 3))
        for rank in range(n_gpus):
            first, count = int(state.replica_choice[0, e, rank]) & 0xFFFF, int(state.replica_choice[0, e, rank]) >> 16
            for i in range(first, first + count):
                counted[i, ALL] += 1 / count / n_gpus
                near = node_of[replicas[i]] == node_of[rank]
                if rank != replicas[i]:
                    counted[i, NEAR if near else FAR] += 1 / count / n_gpus
        dealt = 1 / n_gpus if dispatch == "rank-nearest" and n > 1 else 0.0  # one rank more or less
        np.testing.assert_allclose(shares[:n], counted, atol=dealt + 1e-6)
        np.testing.assert_allclose(shares[:n].sum(0), counted.sum(0), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(instance=instances())
def test_deviations_are_derivatives_by_the_shares_of_topics(instance: Instance) -> None:
    """Counted again from the tokens, with the weight of one topic a little larger."""
    sim, interval, small = instance.simulator(made_profile("rank-mod", "per-expert")), instance.interval, 1e-6
    state = surrogate_of(sim, interval, instance.placement, instance.before, n_topics=3, mixture_std=0.5)
    rows = interval.rows.ravel()
    for b, t in np.ndindex(interval.n_layers, 3):
        weights = np.where(rows % 3 == t, 1 + small, 1.0)
        weights *= len(rows) / weights.sum()
        loads = np.zeros(sim.n_experts)
        chosen = interval.experts[b, rows]
        np.add.at(loads, chosen[chosen >= 0], np.broadcast_to(weights[:, None], chosen.shape)[chosen >= 0])
        expected = 0.5 * (loads - state.load[b]) / small
        np.testing.assert_allclose(state.deviation[b, :, t], expected, rtol=1e-4, atol=1e-4)


def test_few_directions_keep_most_of_the_variance() -> None:
    """Topics that vary along two directions only: two are enough for any set of experts."""
    rng = np.random.default_rng(0)
    loads, shares = rng.random((3, 12)), np.full(6, 1 / 6)
    by_topic = loads[..., None] / 6 + rng.normal(size=(3, 12, 2)) @ rng.normal(size=(3, 2, 6))
    whole, two = (deviations(loads, by_topic, shares, 0.5, most) for most in (6, 2))
    assert two.shape == (3, 12, 2)
    for _ in range(20):
        uses = rng.random(12)
        squares = [((uses @ found) ** 2).sum(-1) for found in (whole, two)]
        np.testing.assert_allclose(squares[1], squares[0], rtol=1e-9)
    # One direction is the largest part of the sum over experts.
    one = deviations(loads, by_topic, shares, 0.5, 1)
    assert ((one**2).sum((1, 2)) > 0.5 * (whole**2).sum((1, 2))).all()


@settings(max_examples=40, deadline=None)
@given(instance=instances())
def test_uncertain_load_adds_its_standard_deviation_to_the_kernel_time(instance: Instance) -> None:
    """With one replica per expert, the load of a GPU varies with the sum of its experts' deviations."""
    sim, interval = instance.simulator(made_profile("rank-mod", "per-expert")), instance.interval
    objective = Anneal(sim).objective(interval, None)
    certain, varying = (surrogate_of(sim, interval, instance.placement, instance.before, n) for n in (0, 3))
    for state in (certain, varying):
        take(state, instance.placement, objective)
    for b, g in np.ndindex(certain.gpus.shape[0], sim.n_gpus):
        held = [int(e) for e in instance.placement[b, g] if e >= 0]
        if any(varying.n_replicas[b, e] > 1 for e in held):
            continue
        sd, uses = np.linalg.norm(varying.deviation[b, held].sum(0)), certain.gpus[b, NOW, g, 0]
        work = (objective.costs.token_us + objective.costs.pair_us) * uses
        added = varying.times[b, NOW, g, 0] - certain.times[b, NOW, g, 0]
        assert added == pytest.approx(work * sd / uses if uses else 0.0, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("transport", ["dedup", "per-expert", "allgather"])
@settings(max_examples=40, deadline=None)
@given(instance=instances(), dispatch=st.sampled_from(RULES), weight=st.sampled_from([0.0, 1.0]))
def test_sums_follow_the_changes(transport: str, instance: Instance, dispatch: str, weight: float) -> None:
    """After many steps they are those that are made from scratch for the last placement."""
    sim, interval = instance.simulator(made_profile(dispatch, transport)), instance.interval
    planner = Anneal(sim, migration_weight=weight)
    objective, layers = planner.objective(interval, None), interval.n_layers
    state = surrogate_of(sim, interval, instance.placement, instance.before, n_topics=2)
    first = take(state, instance.placement, objective)
    best, cost = instance.placement.copy(), np.full(layers, np.inf)
    heat = np.array([0.5, 0.1])  # accepts most steps
    anneal_layers(0, layers, state, objective, planner.random_keys(layers), heat, 300, best, cost)
    assert (cost <= first).all()
    sim.check(state.slots)
    sim.check(best)
    made = surrogate_of(sim, interval, state.slots, instance.before, n_topics=2)
    take(made, state.slots, objective)
    for name in ("gpus", "deviations", "nodes", "times", "received"):
        now, scratch = getattr(state, name)[:, NOW], getattr(made, name)[:, NOW]
        np.testing.assert_allclose(now, scratch, rtol=1e-4, atol=1e-3, err_msg=name)
    for name in ("beside", "around", "replicas", "n_replicas"):
        held = ... if name != "replicas" else np.arange(sim.n_gpus) < made.n_replicas[..., None]
        found, scratch = getattr(state, name)[held], getattr(made, name)[held]
        np.testing.assert_allclose(found, scratch, rtol=1e-4, atol=1e-3, err_msg=name)
    np.testing.assert_allclose(take(made, best, objective), cost, rtol=1e-6)


@pytest.mark.parametrize("transport", ["dedup", "per-expert", "allgather"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_estimate_is_exact_if_all_ranks_send_the_same_tokens(transport: str, top_k: int) -> None:
    """One replica per expert; with deduplication, no token has two experts on one node."""
    rng = np.random.default_rng(0)
    n_experts, n_gpus, tokens = 8, 4, 60
    sim = simulator(2, 2, n_experts, top_k, 2, made_profile("rank-nearest", transport))
    first = rng.integers(0, n_experts // 2, tokens)
    own = np.stack([first, n_experts // 2 + rng.integers(0, n_experts // 2, tokens)], axis=1)[:, :top_k]
    experts = np.tile(own, (n_gpus, 1))[None].astype(np.int16)
    interval = Interval.even(experts, np.arange(n_gpus * tokens, dtype=np.int32)[None], n_gpus)
    placement = np.arange(n_experts, dtype=np.int16).reshape(1, n_gpus, 2)
    objective = Anneal(sim, norm=8).objective(interval, None)
    told = take(surrogate_of(sim, interval, placement, placement), placement, objective)
    state = sim.count(interval, placement)
    exact = mean_pass_time(state, 0, 0, 1, sim.topology, objective.costs, 3)
    # Kernels do not run in blocks here: the estimate of a mixed pass has none either.
    assert objective.costs.block_us == 0
    assert told[0] == pytest.approx(exact, rel=1e-6)


def test_several_phases_are_the_weighted_sum_of_each() -> None:
    """Prefill and decode of one placement, against one estimate for each: at the start, and after many steps."""
    trace = synthetic_trace(SyntheticConfig(n_tokens=4096, n_layers=2, n_experts=16, top_k=4), seed=3)
    prefill, decode = (simulator(2, 2, 16, 4, 5, f"sglang-{phase}") for phase in ("prefill", "decode"))
    interval = sample_passes(trace, 4, Traffic("prefill"), 8)
    decode_tokens, passes = 4 * 32, 3.0
    both = Anneal(prefill, migration_weight=0.0, other_phases=[OtherPhase(decode, decode_tokens, passes)])
    topic = np.zeros(interval.experts.shape[1], np.int8)
    static = prefill.static(2)
    state, objective = both.prepare_estimate([interval], static, topic)
    both.take(state, static, objective)
    placement, _ = both.anneal_estimate(state, objective, 500)
    assert (placement != static).any()
    alone = []
    for sim, tokens in ((prefill, interval.n_tokens), (decode, decode_tokens)):
        one = Anneal(sim, migration_weight=0.0)
        made, single = one.prepare_estimate([replace(interval, stands_for=tokens)], static, topic)
        alone.append(one.take(made, placement, single))
    np.testing.assert_allclose(both.take(state, placement, objective), alone[0] + passes * alone[1], rtol=1e-6)
    with pytest.raises(ValueError, match="no estimate for dispatch 'lp'"):
        Anneal(prefill, other_phases=[OtherPhase(simulator(2, 2, 16, 4, 5, "sglang-lp"), 64, 1.0)])


def test_visits_of_experts_that_are_always_used_together() -> None:
    """A token with all its three experts on a GPU comes once; with a = 1 that is what 3 / (1 + a·2) says."""
    sim = simulator(1, 2, 6, 3, 3)
    experts = np.repeat([[[0, 1, 2]]], 40, axis=1).astype(np.int16)
    interval = Interval.even(experts, np.arange(40, dtype=np.int32)[None], 2)
    placement = np.arange(6, dtype=np.int16).reshape(1, 2, 3)
    state = surrogate_of(sim, interval, placement, placement)
    state.shape[surrogate.VISIT_A] = 1.0
    take(state, placement, Anneal(sim).objective(interval, None))
    assert state.times[0, NOW, 0, 1] == pytest.approx(40 / 2)  # half are of the other rank
    assert state.times[0, NOW, 1, 1] == 0.0


def test_annealing_on_the_estimate_unites_experts_that_are_used_together() -> None:
    """Each token uses experts 2i and 2i + 1, which lie on different nodes at first."""
    rng = np.random.default_rng(0)
    sim = simulator(2, 2, 8, 2, 2)
    pairs = rng.permutation(np.repeat(np.arange(4), 256))
    experts = np.stack([2 * pairs, 2 * pairs + 1], axis=1).astype(np.int16)[None]
    interval = Interval.even(experts, np.arange(1024, dtype=np.int32)[None], 4)
    before = np.array([[[0, 2], [4, 6], [1, 3], [5, 7]]], np.int16)
    planner = Anneal(sim, estimate_steps=3000, iterations=1, migration_weight=0.0, estimate_heat=(1e-2, 1e-4))
    plan = planner.search_estimate([interval], before, 1.0)
    assert {tuple(sorted(gpu)) for gpu in plan[0].tolist()} == {(0, 1), (2, 3), (4, 5), (6, 7)}


@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode", "vllm-deepep"])
def test_the_estimate_saves_most_of_what_exact_steps_save(profile: str) -> None:
    trace = synthetic_trace(SyntheticConfig(n_tokens=16384, n_layers=2, n_experts=32, top_k=4), seed=3)
    sim = Simulator("gpt-oss-20b", "h800-4x4", profile)
    interval = sample_passes(trace, sim.n_gpus, Traffic(sim.profile.phase), 8)
    static = sim.static(2)
    options = {"migration_weight": 0.0, "seed": 1}
    exact = Anneal(sim, estimate_steps=0, iterations=20000, **options).plan([interval], static)  # type: ignore[arg-type]
    quick = Anneal(sim, **options).search_estimate([interval], static, 1.0)  # type: ignore[arg-type]
    start, best, found = (sim.evaluate(interval, plan).time_us.mean() for plan in (static, exact, quick))
    assert best < 0.95 * start
    assert start - found > 0.85 * (start - best)


def test_profiles_without_an_estimate_are_searched_exactly() -> None:
    for profile, expected in (("sglang-lp", False), ("vllm", True)):
        sim = simulator(2, 2, 8, 2, 3, profile)
        assert Anneal(sim).estimates is expected
    assert not Anneal(sim, estimate_steps=0).estimates
