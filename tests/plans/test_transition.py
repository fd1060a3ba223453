"""Changes of a live placement: legal, within the limit, and where they save most."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement import ClusterSpec, ModelSpec, Placement
from clustergym.planners.eplb import balance
from clustergym.plans.engines import EnginePlan, compare_plans
from clustergym.plans.transition import Limit, Transition, keep_in_place, layer_steps

EXPERTS, GPUS, SLOTS = 8, 4, 3
CLUSTER = ClusterSpec("2x2", 2, 2, SLOTS)
MODEL = ModelSpec("toy", n_layers=2, n_experts=EXPERTS, top_k=2, hidden=64, intermediate=32)


def random_layer(rng: np.random.Generator) -> npt.NDArray[np.int16]:
    """A legal placement: every expert once, then replicas, no expert twice on a GPU."""
    layer = np.full((GPUS, SLOTS), -1, np.int16)
    for e in rng.permutation(EXPERTS):
        g = rng.choice(np.flatnonzero((layer < 0).any(1)))
        layer[g, np.flatnonzero(layer[g] < 0)[0]] = e
    for g, s in np.argwhere(layer < 0):
        layer[g, s] = rng.choice(np.setdiff1d(np.arange(EXPERTS), layer[g]))
    return layer


def random_placement(seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    return np.stack([random_layer(rng) for _ in range(MODEL.n_layers)])


def check_legal(placement: Placement) -> None:
    for layer in placement:
        assert set(layer.ravel().tolist()) == set(range(EXPERTS))
        assert all(len(set(gpu.tolist())) == SLOTS for gpu in layer)


def transition(seed: int, limit: Limit) -> Transition:
    loads = np.random.default_rng(seed).integers(1, 100, (MODEL.n_layers, EXPERTS)).astype(float)
    return Transition(random_placement(seed), limit, loads, CLUSTER, MODEL, lambda placed: 1 / balance(loads, placed))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_steps_with_what_they_need_are_legal(seed: int) -> None:
    live, target = random_placement(seed), random_placement(seed + 1)
    target = keep_in_place(target, live, CLUSTER.gpus_per_node)
    rng = np.random.default_rng(seed)
    for before, after in zip(live, target, strict=True):
        steps, needed = layer_steps(before, after, rng.random(EXPERTS))
        chosen = set().union(*(needed[i] for i in range(len(steps)) if rng.random() < 0.4), set())
        placed = before.copy()
        for i in chosen:
            placed[steps[i].gpu, steps[i].slot] = steps[i].expert
        check_legal(placed[None])
        assert set().union(*needed, set()) == set(range(len(steps)))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_renamed_gpus_hold_the_same_sets_and_move_least(seed: int) -> None:
    live, target = random_placement(seed), random_placement(seed + 1)
    kept = keep_in_place(target, live, 2)
    check_legal(kept)
    for l, node in itertools.product(range(2), (slice(0, 2), slice(2, 4))):
        sets = [frozenset(gpu.tolist()) for gpu in kept[l, node]]
        assert sorted(map(sorted, sets)) == sorted(sorted(gpu.tolist()) for gpu in target[l, node])
        moves = [
            sum(len(set(new.tolist()) - set(old.tolist())) for new, old in zip(order, live[l, node], strict=True))
            for order in itertools.permutations(target[l, node])
        ]
        assert int((kept[l, node] != live[l, node]).sum()) == min(moves)  # whoever stays, stays in its slot


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), moves=st.integers(0, 24))
def test_moves_stay_within_the_limit(seed: int, moves: int) -> None:
    change = transition(seed, Limit(moves=moves))
    target = random_placement(seed + 1)
    found = change.towards(target)
    check_legal(found)
    plans = [EnginePlan(placed, np.arange(2), MODEL) for placed in (change.live, found)]
    assert compare_plans(*plans, CLUSTER).moves <= moves
    if not change.allowed(change.keep_in_place(target)):
        assert change.times(found).mean() <= change.times(change.live).mean() + 1e-12
    whole = Transition(change.live, Limit(), change.loads, CLUSTER, MODEL, change.times).towards(target)
    np.testing.assert_array_equal(np.sort(whole.reshape(2, -1)), np.sort(target.reshape(2, -1)))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_seconds_are_those_of_diff(share: float) -> None:
    """The limit is the time that ``clustergym diff`` shows."""
    whole = transition(3, Limit())
    target = whole.towards(random_placement(4))
    before = EnginePlan(whole.live, np.arange(2), MODEL)
    seconds = compare_plans(before, EnginePlan(target, np.arange(2), MODEL), CLUSTER).seconds
    found = transition(3, Limit(seconds=share * seconds * (1 + 1e-9))).towards(target)
    taken = compare_plans(before, EnginePlan(found, np.arange(2), MODEL), CLUSTER).seconds
    assert taken <= share * seconds * (1 + 1e-6)
    if share == 1.0:
        np.testing.assert_array_equal(found, target)


def test_the_one_move_that_helps_is_made() -> None:
    """All load is on expert 0 of layer 0: its second copy helps, nothing else does."""
    live = np.array([[[0, 1, 2], [3, 4, 5], [6, 7, 1], [2, 3, 4]]] * 2, np.int16)
    target = live.copy()
    target[0, 3, 0] = 0
    target[0, 2, 2] = 5
    target[1, 3, 0] = 5
    loads = np.ones((2, EXPERTS))
    loads[0, 0] = 100
    change = Transition(live, Limit(moves=1), loads, CLUSTER, MODEL, lambda placed: 1 / balance(loads, placed))
    found = change.towards(target)
    assert np.argwhere(found != live).tolist() == [[0, 3, 0]]
    assert found[0, 3, 0] == 0


def test_search_finds_the_price_of_a_move() -> None:
    """A planner that moves one more expert per power of ten of passes: three moves are allowed."""
    live = random_placement(0)
    target = keep_in_place(random_placement(1), live, 2)
    where = np.argwhere(live != target)
    asked = []

    def plan(passes: int) -> Placement:
        asked.append(passes)
        placed = live.copy()
        for l, g, s in where[: int(np.log10(passes))]:
            placed[l, g, s] = target[l, g, s]
        return placed

    def times(placed: Placement) -> npt.NDArray[np.float64]:
        return 100.0 - (placed != live).sum((1, 2))

    change = Transition(live, Limit(moves=3), np.ones((2, EXPERTS)), CLUSTER, MODEL, times)
    found = change.search(plan, 5)
    assert int((found != live).sum()) == 3
    assert len(asked) == 5


@pytest.mark.parametrize("moves", [1, 4])
def test_search_goes_towards_other_placements_too(moves: int) -> None:
    """The search finds nothing. The other placement moves more than the limit allows."""
    change = transition(3, Limit(moves=moves))
    other = random_placement(4)
    found = change.search(lambda passes: change.live, 2, [other])
    np.testing.assert_array_equal(found, change.towards(other))
    assert 0 < int((found != change.live).sum()) <= moves
    assert change.times(found).mean() < change.times(change.live).mean()


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="--max-moves is -1"):
        Limit(moves=-1)
    with pytest.raises(ValueError, match="--migration-budget is nan"):
        Limit(seconds=float("nan"))
