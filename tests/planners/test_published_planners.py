"""The planners that others published since EPLB: legality, invariants, and instances worked by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, Placement, Simulator
from clustergym.planners.eplb import balance
from clustergym.planners.flashlb import FlashLB, match_gpus
from clustergym.planners.groups import spectral_groups
from clustergym.planners.recorded import LoadInterval, interval_from_statistics
from clustergym.planners.registry import make_planner, planners_on_loads
from instances import Instance, random_instance, random_placement

ON_LOADS = ["round-robin", "flashlb", "swift", "hot-everywhere"]
ON_TOKENS = ["co-occurrence", "affinity-groups"]


def simulator(nodes: int, per_node: int, n_experts: int, n_slots: int, top_k: int = 1) -> Simulator:
    return Simulator(ModelSpec("tiny", 1, n_experts, top_k, 64, 32), ClusterSpec("tiny", nodes, per_node, n_slots))


def loads_interval(*loads: list[int]) -> LoadInterval:
    """One pass with these loads in each layer."""
    return LoadInterval(np.array(loads, np.int64), sum(loads[0]))


def tokens_interval(n_gpus: int, *tokens: tuple[tuple[int, ...], int]) -> Interval:
    """One pass of one layer, all on rank 0: the experts of a token, and how many tokens use them."""
    rows = [experts for experts, count in tokens for _ in range(count)]
    starts = np.full((1, n_gpus + 1), len(rows), np.int32)
    starts[0, 0] = 0
    return Interval(np.array([rows], np.int16), np.arange(len(rows), dtype=np.int32)[None], starts)


def sets(layer: npt.NDArray[np.int16]) -> list[set[int]]:
    """The experts on each GPU."""
    return [{int(e) for e in gpu if e >= 0} for gpu in layer]


def placement_of(*gpus: list[int]) -> Placement:
    return np.array([gpus], np.int16)


def peaks(loads: npt.NDArray[np.float64], placement: Placement) -> list[float]:
    """Load of the busiest GPU in each layer, by hand."""
    found = []
    for load, layer in zip(loads, placement, strict=True):
        copies = np.bincount(layer[layer >= 0], minlength=len(load))
        found.append(max(sum(load[e] / copies[e] for e in gpu if e >= 0) for gpu in layer))
    return found


@st.composite
def problems(draw: st.DrawFn) -> Instance:
    return random_instance(
        draw(st.integers(0, 2**32 - 1)),
        nodes=draw(st.integers(1, 3)),
        per_node=draw(st.integers(1, 3)),
        n_experts=draw(st.integers(1, 14)),
        top_k=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([1, 4, 16])),
        passes=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 3)),
        spare_slots=draw(st.integers(0, 3)),
        fill=draw(st.sampled_from([0.0, 0.5, 1.0])),
        pads=draw(st.sampled_from([0.0, 0.3, 0.9])),
    )


# What holds for every planner


@pytest.mark.parametrize("name", [*ON_LOADS, *ON_TOKENS])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_published_plans_are_legal_and_reproducible(name: str, problem: Instance) -> None:
    sim, before = problem.simulator(), problem.placement.copy()
    planner = make_planner(name, sim, seed=5)
    first = planner.plan([problem.interval], before)
    second = planner.plan([problem.interval, problem.interval], first)
    assert (before == problem.placement).all(), "the planner changed its input"
    for plan in (first, second):
        assert plan.dtype == np.int16
        sim.check(plan)
    planner.reset()
    for fresh in (planner, make_planner(name, sim, seed=5)):
        np.testing.assert_array_equal(fresh.plan([problem.interval], before), first)


@pytest.mark.parametrize("name", ON_LOADS)
@settings(max_examples=20, deadline=None)
@given(problem=problems())
def test_planners_on_loads_need_no_tokens(name: str, problem: Instance) -> None:
    sim = problem.simulator()
    counts = LoadInterval(problem.interval.pass_loads(sim.n_experts), problem.interval.n_tokens)
    sim.check(make_planner(name, sim).plan([counts], problem.placement))


def test_which_published_planners_need_tokens() -> None:
    assert set(ON_LOADS) <= set(planners_on_loads())
    assert not set(ON_TOKENS) & set(planners_on_loads())


def test_plans_with_room_for_every_expert_on_every_gpu() -> None:
    sim, interval = simulator(1, 3, 2, 2), tokens_interval(3, ((0,), 5), ((1,), 3))
    for name in [*ON_LOADS, *ON_TOKENS]:
        plan = make_planner(name, sim).plan([interval], placement_of([0, -1], [1, -1], [-1, -1]))
        if name in ("round-robin", "flashlb", "co-occurrence", "affinity-groups"):
            assert sets(sim.check(plan)[0]) == [{0, 1}] * 3, name


# Round robin


def test_round_robin_deals_experts_and_spare_copies_in_turn() -> None:
    interval = loads_interval([1] * 6)
    plan = make_planner("round-robin", simulator(1, 3, 6, 3)).plan([interval], placement_of(*[[-1] * 3] * 3))
    # Experts 0–5 in turn. GPU 0 already holds expert 0, so its spare slot gets 1; GPUs 1 and 2 continue with 2 and 3.
    assert plan.tolist() == [[[0, 3, 1], [1, 4, 2], [2, 5, 3]]]
    plan = make_planner("round-robin", simulator(1, 2, 5, 3)).plan([loads_interval([1] * 5)], placement_of([0], [1]))
    assert plan.tolist() == [[[0, 2, 4], [1, 3, 0]]]


# Hot everywhere


def test_hot_everywhere_by_hand() -> None:
    """Two GPUs of four slots, six experts: one spare slot per GPU, so one hot expert."""
    sim = simulator(1, 2, 6, 4)
    plan = make_planner("hot-everywhere", sim).plan(
        [loads_interval([9, 50, 8, 7, 5, 1])], placement_of([0] * 4, [1] * 4)
    )
    # Expert 1 is everywhere. 0 → GPU 0 (9), 2 → GPU 1 (8), 3 → GPU 1 (15), 4 → GPU 0 (14), 5 → GPU 0 (15).
    assert plan.tolist() == [[[1, 0, 4, 5], [1, 2, 3, -1]]]


def test_hot_everywhere_keeps_the_plan_while_the_hot_set_is_the_same() -> None:
    sim = simulator(1, 2, 6, 4)
    planner, start = make_planner("hot-everywhere", sim), placement_of([0] * 4, [1] * 4)
    first = planner.plan([loads_interval([9, 50, 8, 7, 5, 1])], start)
    same = planner.plan([loads_interval([1, 50, 2, 20, 5, 40])], first)
    np.testing.assert_array_equal(same, first)
    other = planner.plan([loads_interval([1, 50, 2, 20, 5, 60])], first)
    assert all(5 in gpu for gpu in sets(other[0]))
    assert sum(1 in gpu for gpu in sets(other[0])) == 1


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_hot_experts_are_on_every_gpu(problem: Instance) -> None:
    sim = problem.simulator()
    n_hot = sim.n_slots - -(-sim.n_experts // sim.n_gpus)
    plan = make_planner("hot-everywhere", sim).plan([problem.interval], problem.placement)
    for load, layer in zip(problem.interval.loads(sim.n_experts), plan, strict=True):
        copies = np.bincount(layer[layer >= 0], minlength=sim.n_experts)
        if sim.n_gpus > 1:
            assert sorted(copies.tolist()) == [1] * (sim.n_experts - n_hot) + [sim.n_gpus] * n_hot
            everywhere = copies == sim.n_gpus
            assert n_hot == 0 or load[everywhere].min() >= load[~everywhere].max(initial=0)


# SwiftBalancer


def test_swift_by_hand() -> None:
    """Two GPUs of three slots, four experts: GPU 0 holds 0, 1 and a copy of 2, GPU 1 holds 2, 3 and a copy of 0."""
    sim = simulator(1, 2, 4, 3)
    before = placement_of([0, 1, 2], [2, 3, 0])
    # The first copies of 0, 1 and 2 are on GPU 0, so GPU 1 has two free slots. Expert 1 has the most load and takes the
    # only transfer from GPU 0 to GPU 1. Expert 0 comes next and was there before. The peak falls from 61.5 to 32.
    plan = make_planner("swift", sim).plan([loads_interval([2, 60, 1, 1])], before)
    assert sets(plan[0]) == [{0, 1, 2}, {0, 1, 3}]


def test_swift_swaps_between_the_busiest_and_the_lightest() -> None:
    """No spare slots: 10 + 8 against 1 + 2. 10 for 2 and 8 for 1 both give a peak of 11; the first wins."""
    plan = make_planner("swift", simulator(1, 2, 4, 2)).plan(
        [loads_interval([10, 8, 1, 2])], placement_of([0, 1], [2, 3])
    )
    assert sets(plan[0]) == [{1, 3}, {0, 2}]


@pytest.mark.parametrize(("light", "changed"), [(40, False), (39, True)])
def test_swift_needs_a_fall_of_more_than_five_percent_of_the_summed_peaks(light: int, changed: bool) -> None:
    """Layer 0 stays at a peak of 100; a swap lowers layer 1 from 100 to 50 + light. 95 % of 200 is 190."""
    before = np.repeat(placement_of([0, 1], [2, 3]), 2, axis=0)
    interval = loads_interval([50, 50, 50, 50], [50, 50, light, light])
    plan = make_planner("swift", simulator(1, 2, 4, 2)).plan([interval], before)
    assert sum(peaks(interval.loads(4).astype(float), plan)) == (189 if changed else 200)
    assert (plan != before).any() == changed


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), n_gpus=st.integers(1, 6), n_experts=st.integers(1, 14), spare=st.integers(0, 3),
    layers=st.integers(1, 3), fill=st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_swift_transfers_once_per_ordered_pair_and_only_for_a_gain(
    seed: int, n_gpus: int, n_experts: int, spare: int, layers: int, fill: float
) -> None:
    rng = np.random.default_rng(seed)
    sim = simulator(1, n_gpus, n_experts, min(-(-n_experts // n_gpus) + spare, n_experts))
    before = random_placement(rng, layers, n_gpus, sim.n_slots, n_experts, fill)
    counts = (rng.pareto(1.0, (layers, n_experts)) * 20).astype(np.int64)
    plan = sim.check(make_planner("swift", sim).plan([LoadInterval(counts, 100)], before))
    if (plan == before).all():
        return
    assert sum(peaks(counts.astype(float), plan)) < 0.95 * sum(peaks(counts.astype(float), before))
    for old, new in zip(before, plan, strict=True):
        holders = sets(old)
        for g, here in enumerate(sets(new)):
            # Every expert that arrives needs a sender of its own among the GPUs that held it.
            arrived = sorted(here - holders[g])
            senders = np.array([[e in holders[h] for h in range(n_gpus)] for e in arrived], bool).reshape(-1, n_gpus)
            matched = maximum_bipartite_matching(csr_array(senders), perm_type="column")
            assert (matched >= 0).all(), (g, arrived)


# FlashLB


def test_flashlb_by_hand() -> None:
    """Two GPUs of two slots, three experts, one sample: the spare slot goes to the heaviest, then heaviest first."""
    planner = make_planner("flashlb", simulator(1, 2, 3, 2))
    plan = planner.plan([loads_interval([60, 20, 20])], placement_of([0, 1], [2, -1]))
    # Balance before is 50 / 80, below 0.85. Expert 0 is split 30 : 30, and 1 and 2 go to different GPUs.
    assert sets(plan[0]) == [{0, 1}, {0, 2}]


def test_flashlb_separates_experts_that_peak_together() -> None:
    """Means are equal, so only the covariance tells 0 and 1 (and 2 and 3) apart."""
    planner = make_planner("flashlb", simulator(1, 2, 4, 2))
    history = [loads_interval([30, 30, 10, 10]), loads_interval([10, 10, 30, 30])]
    plan = planner.plan(history, placement_of([0, 1], [2, 3]))
    assert all(len(gpu & {0, 1}) == 1 for gpu in sets(plan[0]))


def test_flashlb_keeps_layers_whose_balance_did_not_fall() -> None:
    planner, sim = make_planner("flashlb", simulator(1, 2, 4, 2)), simulator(1, 2, 4, 2)
    before = np.repeat(placement_of([0, 1], [2, 3]), 2, axis=0)
    # Layer 0 has a balance of 19.5 / 20, layer 1 of 20 / 38.
    plan = planner.plan([loads_interval([10, 10, 10, 9], [19, 19, 1, 1])], before)
    np.testing.assert_array_equal(plan[0], before[0])
    assert sim.check(plan)[1].tolist() != before[1].tolist()
    assert isinstance(planner, FlashLB)
    np.testing.assert_allclose(planner.past, [0, 1])
    # Now layer 1 has a balance of 20 / 22.5 = 0.889: above 0.85, but below 0.9 of the past value, which was 1.
    heavy = [[10.0] * 4, [10.0] * 4]
    for e in sets(plan[1])[0]:
        heavy[1][e] = 11.25
    for e in sets(plan[1])[1]:
        heavy[1][e] = 8.75
    loads = [[int(100 * x) for x in layer] for layer in heavy]
    again = planner.plan([loads_interval(*loads)], plan)
    np.testing.assert_array_equal(again[0], plan[0])
    assert sets(again[1]) != sets(plan[1])
    # A planner that never planned this layer only knows the floor of 0.85.
    np.testing.assert_array_equal(make_planner("flashlb", sim).plan([loads_interval(*loads)], plan), plan)


def test_flashlb_takes_every_pass_as_a_sample() -> None:
    """The loads of the two passes are those of the two intervals above; only together do they tell 0 and 1 apart."""
    planner, before = make_planner("flashlb", simulator(1, 2, 4, 2)), placement_of([0, 1], [2, 3])
    passes = LoadInterval(np.array([[[30, 30, 10, 10]], [[10, 10, 30, 30]]]), 80)
    # The loads of both passes together are even, so the planner is told to plan whatever the balance.
    planner.floor = 2.0  # type: ignore[attr-defined]
    plan = planner.plan([passes], before)
    assert all(len(gpu & {0, 1}) == 1 for gpu in sets(plan[0]))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n_gpus=st.integers(1, 5), n_experts=st.integers(1, 20), spare=st.integers(0, 3))
def test_flashlb_is_at_least_as_balanced_as_greedy_budgets(seed: int, n_gpus: int, n_experts: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    sim = simulator(1, n_gpus, n_experts, min(-(-n_experts // n_gpus) + spare, n_experts))
    samples = rng.pareto(1.0, (1, n_experts)) * 20 + 0.1
    wide, greedy = (FlashLB(sim, width=width).search(samples)[None] for width in (8, 0))
    assert balance(samples, sim.check(wide))[0] >= balance(samples, sim.check(greedy))[0] - 1e-12
    assert balance(samples, wide)[0] == pytest.approx(samples.sum() / n_gpus / peaks(samples, wide)[0])


def test_matching_gpus_keeps_groups_in_place() -> None:
    before, new = np.array([[0, 1], [2, 3], [4, 5]], np.int16), np.array([[4, 5], [0, 3], [1, 2]], np.int16)
    # Group {4, 5} stays on GPU 2. {0, 3} and {1, 2} share one expert with each of GPUs 0 and 1: both ways fetch two.
    matched = match_gpus(new, before)
    assert matched[2].tolist() == [4, 5]
    assert sorted(matched[:2].tolist()) == [[0, 3], [1, 2]]


# Co-occurrence


def test_co_occurrence_by_hand() -> None:
    """Two GPUs of five slots, ten experts: four slots by co-activation, the last for balance."""
    sim = simulator(1, 2, 10, 5, top_k=2)
    interval = tokens_interval(
        sim.n_gpus, ((0, 2), 10), ((4, 6), 9), ((1, 3), 8), ((5, 7), 7), ((0, 4), 2), ((1, 5), 2), ((8, 9), 3)
    )
    plan = make_planner("co-occurrence", sim).plan([interval], sim.static(1))
    # Loads 12 10 10 8 11 9 9 7 3 3, mean 41, limit 32.8.
    # GPU 0: 0 is the heaviest, 2 is used with it most (22). 4 comes next but makes 33. No other expert is used with
    # them, so the first that fits: 1 (32). Then nothing fits.
    # GPU 1: 4 is the heaviest, then 6 (20). The first that fits: 3 (28), then 8 (31). Four slots are filled.
    # Rest: 5 to GPU 1 (31 < 32), which is now full; 7 and 9 to GPU 0.
    assert sets(plan[0]) == [{0, 1, 2, 7, 9}, {3, 4, 5, 6, 8}]


# Affinity groups


def test_affinity_groups_by_hand() -> None:
    """Two nodes of two GPUs: pairs are used together, and pairs of pairs sometimes."""
    sim = simulator(2, 2, 8, 2, top_k=2)
    pairs = [((0, 5), 50), ((3, 6), 45), ((1, 7), 40), ((2, 4), 35)]
    between = [((5, 1), 9), ((0, 7), 8), ((3, 2), 9), ((6, 4), 8), ((0, 3), 1)]
    plan = make_planner("affinity-groups", sim).plan([tokens_interval(sim.n_gpus, *pairs, *between)], sim.static(1))
    nodes = {frozenset(map(frozenset, sets(plan[0])[i : i + 2])) for i in (0, 2)}
    assert nodes == {
        frozenset({frozenset({0, 5}), frozenset({1, 7})}),
        frozenset({frozenset({3, 6}), frozenset({2, 4})}),
    }


def test_affinity_groups_replicate_the_hottest_expert_on_the_other_node() -> None:
    """Four GPUs of two slots, six experts: two spare slots."""
    sim = simulator(2, 2, 6, 2, top_k=2)
    plan = make_planner("affinity-groups", sim).plan(
        [tokens_interval(sim.n_gpus, ((0, 1), 30), ((0, 2), 30), ((0, 1), 20), ((3, 4), 30), ((4, 5), 10))],
        sim.static(1),
    )
    copies = np.bincount(plan.ravel())
    gpus = [g for g, here in enumerate(sets(plan[0])) if 0 in here]
    # Loads: 80 50 30 30 40 10. The spare slots go to 0 (80 per copy) and then 1 (50 per copy).
    assert copies.tolist() == [2, 2, 1, 1, 1, 1]
    assert {g // 2 for g in gpus} == {0, 1}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 20), n_groups=st.integers(1, 6))
def test_spectral_groups_have_equal_sizes(seed: int, n: int, n_groups: int) -> None:
    rng = np.random.default_rng(seed)
    together = np.triu(rng.poisson(0.5, (30, 30))).astype(float)
    experts = np.sort(rng.permutation(30)[:n])
    groups = spectral_groups(together + together.T, experts, n_groups, rng)
    assert sorted(np.concatenate(groups).tolist()) == experts.tolist()
    sizes = [len(group) for group in groups]
    assert len(sizes) == n_groups
    assert max(sizes) - min(sizes) <= 1


# Statistics instead of tokens


def correlated_interval(seed: int, layers: int, n_experts: int, top_k: int, tokens: int) -> Interval:
    """Experts of one group are used together; some experts are hot."""
    rng = np.random.default_rng(seed)
    groups, heat = n_experts // 4, rng.normal(0, 1, (layers, n_experts))
    near = np.arange(n_experts) % groups == rng.integers(0, groups, (layers, tokens, 1))
    scores = rng.gumbel(size=(layers, tokens, n_experts)) + heat[:, None] + 3.0 * near
    experts = np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.int16)
    return Interval.even(np.ascontiguousarray(experts), np.arange(tokens)[None], 4)


def pairs_of(interval: Interval, n_experts: int) -> npt.NDArray[np.float64]:
    """(L, E, E) without the loads."""
    pairs = np.stack([interval.coactivation(l, n_experts) for l in range(interval.n_layers)])
    pairs[:, np.arange(n_experts), np.arange(n_experts)] = 0.0
    return pairs


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_made_up_tokens_have_the_recorded_statistics(scale: float) -> None:
    recorded = correlated_interval(0, layers=2, n_experts=32, top_k=4, tokens=2048)
    loads, pairs = recorded.loads(32), pairs_of(recorded, 32)
    made = interval_from_statistics(loads, pairs, 4, 8, tokens=int(512 * scale), passes=4, seed=1)
    assert made.rows.shape == (4, 512 * scale)
    assert made.rank_start.shape == (4, 9)
    assert np.abs(made.loads(32) - scale * loads).max() < 1  # rounded
    error = np.abs(pairs_of(made, 32) - scale * pairs).sum() / (scale * pairs).sum()
    # Tokens of the same traffic differ by about √n from the recorded ones: the made-up ones must be nearer.
    assert error < 0.5 * (np.sqrt(scale * pairs).sum() / (scale * pairs).sum())
    blind = interval_from_statistics(loads, None, 4, 8, tokens=int(512 * scale), passes=4, seed=1)
    assert np.abs(blind.loads(32) - scale * loads).max() < 1
    assert np.abs(pairs_of(blind, 32) - scale * pairs).sum() / (scale * pairs).sum() > 0.3


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), n_experts=st.integers(1, 12), top_k=st.integers(1, 4), n_gpus=st.integers(1, 4),
    passes=st.integers(1, 3), share=st.integers(1, 20),
)  # fmt: skip
def test_made_up_tokens_are_legal(seed: int, n_experts: int, top_k: int, n_gpus: int, passes: int, share: int) -> None:
    rng, top_k = np.random.default_rng(seed), min(top_k, n_experts)
    loads, half = rng.integers(0, 50, (2, n_experts)), rng.integers(0, 9, (2, n_experts, n_experts))
    arguments = (loads, half + half.transpose(0, 2, 1), top_k, n_gpus, share * n_gpus, passes)
    made = interval_from_statistics(*arguments)
    for token in made.experts.reshape(-1, top_k):
        used = token[token >= 0]
        assert len(set(used.tolist())) == len(used)
    np.testing.assert_array_equal(made.experts, interval_from_statistics(*arguments).experts)


def test_annealing_on_statistics_beats_annealing_on_loads_alone() -> None:
    """Served on the tokens that the statistics are of."""
    recorded = correlated_interval(3, layers=2, n_experts=32, top_k=4, tokens=2048)
    sim = Simulator(ModelSpec("m", 2, 32, 4, 4096, 512), ClusterSpec("2x2", 2, 2, 10), passes_per_interval=10**12)
    loads, pairs = recorded.loads(32), pairs_of(recorded, 32)
    seen = [interval_from_statistics(loads, known, 4, 4, tokens=1024, passes=2) for known in (pairs, None)]
    plans = [
        make_planner("anneal", sim, iterations=4000).plan([interval], sim.static(2)) for interval in (recorded, *seen)
    ]
    on_tokens, on_pairs, on_loads = (float(sim.evaluate(recorded, plan).time_us.mean()) for plan in plans)
    assert on_pairs < 0.97 * on_loads
    assert on_pairs == pytest.approx(on_tokens, rel=0.01)  # most steps read loads and pairs only


def test_eplb_serves_with_dispatch_by_a_linear_program() -> None:
    """SGLang's lp: the same placement, the tokens of each pass split so that the busiest GPU has least."""
    recorded = correlated_interval(4, layers=2, n_experts=32, top_k=4, tokens=1024)
    model, cluster = ModelSpec("m", 2, 32, 4, 64, 64), ClusterSpec("1x4", 1, 4, 12)
    program, plain = Simulator(model, cluster, "sglang-lp"), Simulator(model, cluster, "sglang-prefill")
    plan = make_planner("eplb", program).plan([recorded], program.static(2))
    np.testing.assert_array_equal(plan, make_planner("eplb", plain).plan([recorded], plain.static(2)))
    split, nearest = (sim.evaluate(recorded, plan).pairs.max(2).sum() for sim in (program, plain))
    assert recorded.loads(32).sum() / 4 <= split < nearest
