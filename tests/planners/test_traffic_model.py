"""The learned model of the traffic: topics, their share in an interval, and plans that use them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator
from clustergym.moe_placement.streams import Interval, Traffic, layer_first
from clustergym.planners.anneal import SHORTEST_SECONDS, Anneal
from clustergym.planners.evaluation import Protocol, compare
from clustergym.planners.registry import make_planner
from clustergym.planners.traffic_model import TrafficModel
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.traces.splits import split_trace

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 16, 2, 10


def trace_of_topics(seed: int, sequences: int = 40) -> tuple[TokenTrace, np.ndarray]:
    """Sequences of two topics: one uses experts 0 … 7, the other 8 … 15. Every fourth sequence is of the second."""
    rng, topic = np.random.default_rng(seed), np.arange(sequences) % 4 == 3
    experts = np.stack(
        [
            np.stack([rng.permutation(8)[:TOP_K] for _ in range(LAYERS)]) + 8 * topic[s]
            for s in range(sequences)
            for _ in range(TOKENS)
        ]
    )
    lengths = np.full(sequences, TOKENS)
    return TokenTrace(experts.astype(np.int16), n_experts=EXPERTS, model=None, name="topics", seq_lens=lengths), topic


def interval_of(trace: TokenTrace, sequences: np.ndarray, n_gpus: int) -> Interval:
    rows = (trace.seq_starts[sequences][:, None] + np.arange(TOKENS)).ravel()
    return Interval.even(layer_first(trace), rows[None, : len(rows) // n_gpus * n_gpus], n_gpus)


def test_topics_of_sequences_are_found() -> None:
    trace, topic = trace_of_topics(0)
    model = TrafficModel.learn(trace, EXPERTS, topics=2)
    found = {frozenset(rows.tolist()) for rows in model.rows}
    of_second = np.repeat(topic, TOKENS)
    assert found == {frozenset(np.flatnonzero(of_second == t).tolist()) for t in (False, True)}
    np.testing.assert_allclose(np.sort(model.shares), [0.25, 0.75])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_mixture_follows_the_loads(share: float) -> None:
    trace, _ = trace_of_topics(0)
    model = TrafficModel.learn(trace, EXPERTS, topics=2)
    loads = np.concatenate([np.full((LAYERS, 8), 100 * (1 - share)), np.full((LAYERS, 8), 100 * share)], axis=1)
    second = int(model.profiles[:, 8:EXPERTS].sum(1).argmax())
    # The topics do not overlap, so the loads show the share almost exactly; the rest is the share of the training.
    expected = model.inertia * share + (1 - model.inertia) * 0.25
    assert model.mixture(model.fit(loads))[second] == pytest.approx(expected, abs=0.01)
    assert model.mixture(model.fit(loads)).sum() == pytest.approx(1)


def test_an_extended_interval_has_the_shares_of_both_sources() -> None:
    past, _ = trace_of_topics(0, 400)
    now, topic = trace_of_topics(1, 400)
    seen = interval_of(now, np.flatnonzero(topic), 8)  # the second topic alone: 1000 tokens
    model = TrafficModel.learn(past, EXPERTS, topics=2)
    extended = model.extend(seen, EXPERTS, 16384, seed=0)
    assert extended.n_passes == 1
    assert extended.stands_for == seen.n_tokens
    assert (np.diff(extended.rank_start) == extended.n_tokens // 8).all()
    observed = extended.rows < now.n_tokens
    own = seen.n_tokens / (seen.n_tokens + model.worth)
    assert observed.mean() == pytest.approx(own, abs=0.01)
    assert set(extended.rows[observed].tolist()) == set(seen.rows.ravel().tolist())
    # Training tokens: the second topic has 0.7 · 1 + 0.3 · 0.25 of them.
    from_second = (extended.experts[0, extended.rows[~observed], 0] >= 8).mean()
    assert from_second == pytest.approx(0.775, abs=0.01)
    assert model.extend(seen, EXPERTS, 512, seed=0).n_tokens <= 512


def test_plans_serve_the_next_passes_better() -> None:
    """An interval of few tokens says little about the next one. A model of much traffic says more."""
    layout = SyntheticConfig(n_tokens=24_000, n_layers=2, n_experts=32, top_k=4)
    past, rest = synthetic_trace(layout, seed=3).split(0.6, seed=0)
    sim = Simulator("gpt-oss-20b", "h800-2x4", "sglang-prefill")
    rng = np.random.default_rng(0)
    plain, learned = make_planner("anneal", sim), make_planner("anneal", sim)
    learned.learn(past)
    times = {"plain": 0.0, "learned": 0.0}
    eplb = sim.static(2)
    for _ in range(3):
        rows = rng.permutation(rest.n_tokens)
        seen = Interval.even(layer_first(rest), rows[None, :128], sim.n_gpus)
        served = Interval.even(layer_first(rest), rows[None, 128 : 128 + 4096], sim.n_gpus)
        times["plain"] += sim.evaluate(served, plain.plan([seen], eplb)).time_us.mean()
        times["learned"] += sim.evaluate(served, learned.plan([seen], eplb)).time_us.mean()
    assert times["learned"] < 0.98 * times["plain"]


def test_same_seed_same_plan() -> None:
    trace, _ = trace_of_topics(0, 80)
    past, now = trace.split(0.5, seed=0)
    sim = Simulator("gpt-oss-20b", "h800-2x4", "sglang-prefill")
    plans = []
    for _ in range(2):
        planner = make_planner("anneal", sim, iterations=50, estimate_steps=500)
        planner.learn(past)
        plans.append(planner.plan([interval_of(now, np.arange(8), sim.n_gpus)], sim.static(LAYERS)))
    np.testing.assert_array_equal(*plans)


def test_comparison_teaches_with_the_train_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TokenTrace] = []
    learn = TrafficModel.learn.__func__  # type: ignore[attr-defined]

    def spy(cls: type[TrafficModel], trace: TokenTrace, *args: object, **options: object) -> TrafficModel:
        seen.append(trace)
        result: TrafficModel = learn(cls, trace, *args, **options)
        return result

    monkeypatch.setattr(TrafficModel, "learn", classmethod(spy))
    trace = TokenTrace.load("tiny_moe").select(layers=[0])
    sim = Simulator("tiny-moe", "h800-2x2", "sglang-prefill")
    traffic = Traffic("prefill", tokens_per_rank=16, sampled_passes=1, schedule="drift")
    protocol = Protocol(traffic, intervals=1, streams=1, split="test")
    options = {"anneal": {"iterations": 10, "estimate_steps": 100}}
    (result,) = compare(trace, sim, ["anneal"], protocol, options=options)
    assert result.total_us > 0
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0].experts, split_trace(trace, "train").experts)


def test_traffic_of_another_model_is_refused() -> None:
    trace, _ = trace_of_topics(0)
    sim = Simulator("gpt-oss-20b", "h800-2x4", "sglang-prefill")
    planner = make_planner("anneal", sim)
    planner.learn(trace.select(layers=[0]))
    with pytest.raises(ValueError, match="learned from 1 layers"):
        planner.plan([interval_of(trace, np.arange(8), sim.n_gpus)], sim.static(LAYERS))


def test_traffic_unlike_all_topics_gets_few_training_tokens() -> None:
    """A training sequence uses experts 0 … 7 or 8 … 15. The new tokens use even experts only, which no mix explains."""
    past, _ = trace_of_topics(0, 400)
    model = TrafficModel.learn(past, EXPERTS, topics=2)
    rng = np.random.default_rng(1)
    experts = np.stack([[2 * rng.permutation(8)[:TOP_K] for _ in range(LAYERS)] for _ in range(1000)]).astype(np.int16)
    strange = TokenTrace(experts, n_experts=EXPERTS, model=None, name="strange")
    seen = Interval.even(layer_first(strange), np.arange(1000)[None], 8)
    extended = model.extend(seen, EXPERTS, 16384, seed=0)
    assert (extended.rows < 1000).mean() > 0.99
    usual = interval_of(trace_of_topics(2, 400)[0], np.arange(100), 8)
    assert (model.extend(usual, EXPERTS, 16384, seed=0).rows < 4000).mean() == pytest.approx(1000 / 5096, abs=0.1)


@pytest.mark.parametrize("pairs", [True, False])
def test_counts_of_a_topic_are_those_of_its_tokens(pairs: bool) -> None:
    trace, _ = trace_of_topics(0)
    model = TrafficModel.learn(trace, EXPERTS, topics=2)
    counts = model.counts(pairs)
    assert model.counts(pairs) is counts
    for layer, (t, rows) in product(range(LAYERS), enumerate(model.rows)):
        uses = np.zeros((len(rows), EXPERTS))
        np.put_along_axis(uses, trace.experts[rows, layer].astype(np.int64), 1.0, axis=1)
        np.testing.assert_allclose(counts.loads[layer, t], uses.mean(0), rtol=1e-5)
        if pairs:
            both = uses.T @ uses / len(rows)
            np.testing.assert_allclose(counts.pairs[layer, t], both - np.diag(np.diag(both)), rtol=1e-5)
    assert pairs or counts.pairs.size == LAYERS * model.n_topics


def test_the_estimate_counts_observed_tokens_and_past_topics() -> None:
    """The same counts from a list of tokens that has both in the right shares."""
    past, _ = trace_of_topics(0, 400)
    now, topic = trace_of_topics(1, 400)
    seen = interval_of(now, np.flatnonzero(topic), 8)
    cluster = ClusterSpec("c", 2, 4, 3, 160, 40, 2.0, 4.0)
    sim = Simulator(ModelSpec("m", LAYERS, EXPERTS, TOP_K, 64, 64), cluster, "sglang-prefill")
    planner = Anneal(sim, robustness=0.5)
    planner.traffic = TrafficModel.learn(past, EXPERTS, topics=2)
    own, shares = planner.traffic.blend(seen.loads(EXPERTS).astype(float), seen.rows.size)
    assert own + shares.sum() == pytest.approx(1)
    observed = np.zeros(now.n_tokens, np.int8)
    state, _ = planner.prepare_estimate([seen], sim.static(LAYERS), observed)
    for layer in range(LAYERS):
        expected, both, by_topic = np.zeros(EXPERTS), np.zeros((EXPERTS, EXPERTS)), []
        sources = [(now, seen.rows.ravel(), own)]
        sources += [(past, rows, share) for rows, share in zip(planner.traffic.rows, shares, strict=True)]
        for trace, rows, share in sources:
            uses = np.zeros((len(rows), EXPERTS))
            np.put_along_axis(uses, trace.experts[rows, layer].astype(np.int64), 1.0, axis=1)
            by_topic.append(state.n_tokens * share * uses.mean(0))
            expected += by_topic[-1]
            both += state.n_tokens * share * (uses.T @ uses) / len(rows)
        np.testing.assert_allclose(state.load[layer], expected, rtol=1e-4)
        np.testing.assert_allclose(state.pairs[layer], both - np.diag(np.diag(both)), rtol=1e-4, atol=1e-3)
        for t, share in enumerate([own, *shares]):
            varies = 0.5 * (by_topic[t] - share * expected)
            np.testing.assert_allclose(state.deviation[layer, :, t], varies, rtol=1e-3, atol=1e-3)
    # The proposals are drawn from both: the first topic is only in past traffic.
    from_first = (state.sample[0, :, 0] < 8).mean()
    assert from_first == pytest.approx(shares[int(planner.traffic.profiles[:, :8].sum(1).argmax())], abs=0.01)


@pytest.mark.parametrize(("known", "seconds", "looked"), [(True, None, 0), (False, None, 1), (False, 0.004, 0)])
def test_topics_of_the_interval_are_looked_for_if_traffic_is_new_and_there_is_time(
    monkeypatch: pytest.MonkeyPatch, known: bool, seconds: float | None, looked: int
) -> None:
    past, _ = trace_of_topics(0)
    # New traffic uses the same experts in other pairs of topics: 4 … 11, and the others.
    new = TokenTrace(
        ((past.experts + 4) % EXPERTS).astype(np.int16),
        n_experts=EXPERTS,
        model=None,
        name="new",
        seq_lens=past.seq_lens,
    )
    calls = []

    def counted(seen: Interval, n_experts: int, seed: int) -> np.ndarray:
        calls.append(seen)
        return np.zeros(seen.experts.shape[1], np.int8)

    monkeypatch.setattr("clustergym.planners.search.topics_of", counted)
    sim = Simulator(ModelSpec("two", LAYERS, EXPERTS, TOP_K, 512, 128), ClusterSpec("2x2", 2, 2, 5), "sglang-prefill")
    planner = make_planner("anneal", sim, iterations=10, seconds=seconds)
    planner.learn(past)
    sim.check(planner.plan([interval_of(past if known else new, np.arange(40), 4)], sim.static(LAYERS)))
    assert len(calls) == looked


PAIRS_MODEL = ModelSpec("pairs", 1, 8, 2, 1024, 256)


def trace_of_pairs(partner: int) -> TokenTrace:
    """Every token uses an expert e of 0 … 3 and expert 4 + (e + partner) mod 4."""
    first = np.tile(np.arange(4), 256)
    experts = np.stack([first, 4 + (first + partner) % 4], 1)[:, None]
    lengths = np.full(32, 32)
    return TokenTrace(experts.astype(np.int16), n_experts=8, model=None, name="pairs", seq_lens=lengths)


def united(placement: np.ndarray, partner: int) -> bool:
    """Every pair is on one GPU."""
    return {frozenset(slots.tolist()) for slots in placement[0]} == {
        frozenset((e, 4 + (e + partner) % 4)) for e in range(4)
    }


def test_learning_makes_a_plan_for_past_traffic_that_searches_start_from() -> None:
    sim = Simulator(PAIRS_MODEL, ClusterSpec("2x2", 2, 2, 2), "sglang-prefill")
    planner = make_planner("anneal", sim, seconds=SHORTEST_SECONDS)
    past, apart = trace_of_pairs(1), np.arange(8).reshape(1, 4, 2).astype(np.int16)
    planner.learn(past)
    past_plan = planner.past_plan
    assert united(sim.check(past_plan), 1)
    # The time is too short for any step, so the start is the plan. Other traffic: the current placement is better.
    for partner, current in ((1, apart), (2, np.array([[[0, 6], [1, 7], [2, 4], [3, 5]]], np.int16))):
        seen = Interval.even(layer_first(trace_of_pairs(partner)), np.arange(1024, dtype=np.int32)[None], 4)
        plan = planner.plan([seen], current)
        np.testing.assert_array_equal(plan, past_plan if partner == 1 else current)
        assert united(plan, partner)


@pytest.mark.parametrize("profile", ["sglang-lp", "sglang-prefill"])
def test_only_searches_with_an_estimate_have_a_plan_for_past_traffic(profile: str) -> None:
    planner = make_planner("anneal", Simulator(PAIRS_MODEL, ClusterSpec("2x2", 2, 2, 2), profile))
    planner.learn(trace_of_pairs(1))
    assert (planner.past_plan is None) == (profile == "sglang-lp")


def test_a_search_with_a_plan_for_past_traffic_begins_cooler(monkeypatch: pytest.MonkeyPatch) -> None:
    heats: list[object] = []

    def noted(*arguments: object) -> int:
        heats.append(arguments[4])
        return 0

    sim = Simulator(PAIRS_MODEL, ClusterSpec("2x2", 2, 2, 2), "sglang-prefill")
    planner = make_planner("anneal", sim)
    planner.learn(trace_of_pairs(1))
    monkeypatch.setattr(Anneal, "_run", noted)
    seen = Interval.even(layer_first(trace_of_pairs(1)), np.arange(1024, dtype=np.int32)[None], 4)
    for heat in ((1e-2, 1e-3), (1e-3, 5e-4)):
        planner.estimate_heat = heat
        planner.search_estimate([seen], sim.static(1))
    planner.past_plan = None
    planner.search_estimate([seen], sim.static(1))
    # Not below the last temperature.
    assert heats == [(pytest.approx(3e-3), 1e-3), (5e-4, 5e-4), (1e-3, 5e-4)]


@pytest.mark.parametrize(("learned", "ms", "exact"), [
    (False, 20, False), (False, 50, True), (True, 50, False), (True, 200, True), (True, None, True),
])  # fmt: skip
def test_exact_steps_need_time_and_more_with_past_traffic(
    monkeypatch: pytest.MonkeyPatch, learned: bool, ms: float | None, exact: bool
) -> None:
    calls, refine = [], Anneal.refine

    def counted(*arguments: Any) -> np.ndarray:
        calls.append(arguments)
        return refine(*arguments)

    monkeypatch.setattr(Anneal, "refine", counted)
    sim = Simulator(PAIRS_MODEL, ClusterSpec("2x2", 2, 2, 2), "sglang-prefill")
    search = make_planner("anneal", sim, iterations=10, seconds=None if ms is None else ms / 1e3)
    if learned:
        search.learn(trace_of_pairs(1))
    seen = Interval.even(layer_first(trace_of_pairs(1)), np.arange(1024, dtype=np.int32)[None], 4)
    sim.check(search.plan([seen], sim.static(1)))
    assert bool(calls) == exact
