"""Plans for lost GPUs, against brute force over every GPU, or node, that may be lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator, Traffic
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.anneal import Anneal
from clustergym.planners.eplb import EPLB
from clustergym.planners.heldout import SequencePasses
from clustergym.planners.survive import survivable
from clustergym.plans.lost_ranks import cluster_left, parse_ranks, plan_without, renumbered, restore
from clustergym.traces import SyntheticConfig, synthetic_trace


def experts_left(slots: np.ndarray, lost: np.ndarray) -> set[int]:
    return set(slots[~lost].ravel().tolist()) - {-1}


def survives(slots: np.ndarray, n_experts: int, group_of: np.ndarray) -> bool:
    return all(experts_left(slots, group_of == group) == set(range(n_experts)) for group in np.unique(group_of))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), nodes=st.integers(2, 4), per_node=st.integers(1, 4), n_experts=st.integers(2, 24),
    spare=st.integers(0, 2), node=st.booleans(),
)  # fmt: skip
def test_survivable_placements_lose_no_expert(
    seed: int, nodes: int, per_node: int, n_experts: int, spare: int, node: bool
) -> None:
    n_gpus = nodes * per_node
    n_slots = min(n_experts, -(-2 * n_experts // n_gpus) + spare)
    group_of = np.arange(n_gpus) // (per_node if node else 1)
    loads = np.random.default_rng(seed).gamma(0.5, size=(2, n_experts))
    placement = survivable(loads, n_slots, group_of)
    for slots in placement:
        assert survives(slots, n_experts, group_of)
        for gpu in slots:
            held = gpu[gpu >= 0]
            assert len(np.unique(held)) == len(held)


SIZES = SyntheticConfig(n_tokens=4000, n_layers=2, first_layer=0, n_experts=16, top_k=2, popularity_skew=1.0)
TRACE = synthetic_trace(SIZES, seed=0)
MODEL = ModelSpec("m", 2, 16, 2, 256, 256)


@pytest.mark.parametrize("profile", ["sglang-prefill", "sglang-decode"])
@pytest.mark.parametrize("what", ["rank", "node"])
def test_annealed_plans_survive_and_are_faster_than_where_they_began(what: str, profile: str) -> None:
    simulator = Simulator(MODEL, ClusterSpec("c", 2, 4, 4), profile, 10**12)
    group_of = np.arange(8) if what == "rank" else np.arange(8) // 4
    passes = sample_passes(TRACE, 8, Traffic(simulator.profile.phase), 4)
    plan = Anneal(simulator, survive=what, estimate_steps=5000).plan([passes], simulator.static(2))
    start = survivable(passes.loads(16).astype(float), 4, group_of)
    for slots in simulator.check(plan):
        assert survives(slots, 16, group_of)
    assert simulator.evaluate(passes, plan).time_us.mean() < simulator.evaluate(passes, start).time_us.mean()
    free = Anneal(simulator, estimate_steps=5000).plan([passes], simulator.static(2))
    assert not all(survives(slots, 16, group_of) for slots in free)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n_lost=st.integers(1, 3), more=st.integers(0, 6))
def test_ranks_that_are_left_have_every_expert_after_few_moves(seed: int, n_lost: int, more: int) -> None:
    """Every lost expert costs one move, no other expert moves unless asked, and more moves balance better."""
    rng = np.random.default_rng(seed)
    simulator, loads = Simulator(MODEL, ClusterSpec("c", 2, 4, 4)), rng.gamma(1.0, size=(2, 16))
    live = EPLB(simulator).pack(loads)
    lost = sorted(rng.permutation(8)[:n_lost].tolist())
    kept = np.delete(live, lost, axis=1)
    gone = [set(range(16)) - set(slots.ravel().tolist()) for slots in kept]
    plan, n = restore(live, lost, loads, sum(map(len, gone)) + more)
    assert n == sum(map(len, gone))
    assert n <= (plan != kept).sum() <= n + more
    for slots in plan:
        assert set(slots.ravel().tolist()) == set(range(16))
        assert all(len(set(gpu)) == len(gpu) for gpu in slots.tolist())

    def norm(placement: np.ndarray) -> float:
        total = 0.0
        for slots, load in zip(placement, loads, strict=True):
            share = load / load.sum() / np.maximum(np.bincount(slots.ravel(), minlength=16), 1)
            total += float((share[slots].sum(1) ** 8).sum())
        return total

    assert norm(plan) <= norm(restore(live, lost, loads)[0]) * (1 + 1e-9)


def test_a_lost_expert_goes_where_brute_force_puts_it() -> None:
    """One layer, one lost expert: all legal replacements are tried by hand."""
    loads = np.array([[5.0, 4.0, 3.0, 2.0, 1.0]])
    live = np.array([[[0, 1], [0, 2], [1, 3], [4, 3]]], np.int16)
    plan, lost = restore(live, [3], loads)
    assert lost == 1
    kept, best = live[0, :3], (np.inf, kept_slots := live[0, :3].copy())
    for g in range(3):
        for s in range(2):
            trial = kept.copy()
            trial[g, s] = 4
            copies = np.bincount(trial.ravel(), minlength=5)
            if (copies > 0).all():
                cost = float(((loads[0] / copies)[trial].sum(1) ** 8).sum())
                best = min(best, (cost, trial), key=lambda one: one[0])
    assert np.isfinite(best[0])
    assert (best[1] != kept_slots).sum() == 1
    np.testing.assert_array_equal(plan[0], best[1])


def test_measured_on_the_ranks_that_are_left() -> None:
    """With a whole node lost, times are those of the smaller cluster."""
    simulator = Simulator(MODEL, ClusterSpec("c", 2, 4, 5), "sglang-decode")
    live = EPLB(simulator).pack(TRACE.loads().astype(float))
    found = plan_without(TRACE, simulator, Traffic("decode"), live, [4, 5, 6, 7])
    small = Simulator(MODEL, cluster_left(simulator.cluster, [4, 5, 6, 7]), "sglang-decode")
    _, after = TRACE.split(0.75, seed=0)
    drawn = SequencePasses(after, 4, Traffic("decode")).draw(8, np.random.default_rng(0))
    # The larger cluster still has links between nodes, whose fixed cost is all that differs.
    fixed = simulator.costs(1).dispatch_us + simulator.costs(1).combine_us
    fixed -= small.costs(1).dispatch_us + small.costs(1).combine_us
    assert found.us == pytest.approx(float(small.pass_times(drawn, found.placement).mean()) + fixed)
    assert found.us > found.full_us - fixed
    assert found.moves == found.lost_experts < found.eplb_moves


def test_arguments_are_checked() -> None:
    assert parse_ranks("3,1,3", 4) == [1, 3]
    for text in ("a", "4", "0,1,2,3", "-1"):
        with pytest.raises(ValueError, match="--without-ranks"):
            parse_ranks(text, 4)
    with pytest.raises(ValueError, match="give --slots 4 or more"):
        survivable(np.ones((1, 16)), 3, np.arange(8))
    with pytest.raises(ValueError, match="1 ranks × 5 slots are left for 16 experts"):
        restore(Simulator(MODEL, ClusterSpec("c", 1, 4, 5)).static(1), [0, 1, 2], np.ones((1, 16)))
    assert renumbered(8, [3]) == "0–2 stay, 4–7 → 3–6"
    assert cluster_left(ClusterSpec("c", 2, 4), [1, 6]).gpus_per_node == 3
    assert cluster_left(ClusterSpec("c", 2, 4), [1]).n_nodes == 1
