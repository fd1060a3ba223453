"""Topics of observed tokens, passes with other mixtures of them, and plans that prepare for them."""

from __future__ import annotations

import numpy as np
import pytest

from clustergym.moe_placement import Simulator
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal
from clustergym.planners.registry import make_planner
from clustergym.planners.topics import scenarios, topics_of

EXPERTS, TOP_K, BLOCK = 16, 2, 64


def two_topics(blocks: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(experts of three layers, topic of each row): the first topic uses experts 0 … 7, the second 8 … 15."""
    rng = np.random.default_rng(seed)
    topic = np.repeat(rng.permutation(np.arange(blocks) < share * blocks), BLOCK)
    chosen = np.argsort(rng.random((3, len(topic), 8)), axis=2)[..., :TOP_K]
    return (chosen + 8 * topic[None, :, None]).astype(np.int16), topic


def interval_of(experts: np.ndarray, rows: np.ndarray, ranks: int = 4) -> Interval:
    return Interval.even(experts, rows[None, : len(rows) // ranks * ranks].astype(np.int32), ranks)


def test_topics_are_those_of_the_tokens() -> None:
    experts, topic = two_topics(20, 0.3)
    served = np.arange(2 * BLOCK, 20 * BLOCK)
    found = topics_of(interval_of(experts, served), EXPERTS)
    assert len(found) == 20 * BLOCK
    assert not found[: 2 * BLOCK].any()  # not served
    pairs = set(zip(found[served].tolist(), topic[served].tolist(), strict=True))
    # No topic has tokens of both kinds. There may be more topics than kinds.
    assert len(pairs) == len({mine for mine, _ in pairs})
    assert {kind for _, kind in pairs} == {False, True}


def test_scenarios_have_mixtures_around_the_observed_one() -> None:
    experts, topic = two_topics(40, 0.25)
    interval = interval_of(experts, np.arange(40 * BLOCK))
    made = scenarios(interval, topic.astype(np.int8), 64, 1.0, seed=0)
    assert made.n_passes == 64
    assert made.n_tokens == 40 * BLOCK // 64
    assert made.stands_for == interval.n_tokens
    assert (np.diff(made.rank_start) == made.n_tokens // 4).all()
    second = np.clip(topic[made.rows].mean(1), 0.01, 0.99)
    odds = np.log(second / (1 - second))
    # Two independent changes of the logarithms add up.
    assert np.mean(odds) == pytest.approx(np.log(0.25 / 0.75), abs=3 * np.sqrt(2 / 64))
    assert np.std(odds) == pytest.approx(np.sqrt(2), rel=0.3)


def test_without_spread_every_token_is_served_as_often_as_observed() -> None:
    experts, topic = two_topics(8, 0.5)
    interval = interval_of(experts, np.arange(8 * BLOCK))
    (made,) = scenarios(interval, topic.astype(np.int8), 1, 0.0, seed=0).rows
    assert sorted(made) == list(range(8 * BLOCK))


@pytest.mark.parametrize("exact", [False, True])
def test_robust_plans_are_better_when_the_mixture_changes(exact: bool) -> None:
    """Tokens of a topic use neighbours: sharing a GPU saves copies, but overloads it when the topic grows."""
    experts, _ = two_topics(64, 0.5)
    sim = Simulator("gpt-oss-20b", "h800-2x4", "sglang-prefill")
    seen = interval_of(experts, np.arange(64 * BLOCK), sim.n_gpus)
    times = {}
    for robustness in (0.0, 0.5):
        planner = make_planner("anneal", sim, robustness=robustness, **({} if exact else {"seconds": 0.06}))
        plan = planner.plan([seen], sim.static(3))
        times[robustness] = [
            sim.evaluate(interval_of(two_topics(64, share, seed=1)[0], np.arange(64 * BLOCK), sim.n_gpus), plan)
            .time_us.mean()
            for share in (0.2, 0.8)
        ]  # fmt: skip
    assert np.mean(times[0.5]) < 0.97 * np.mean(times[0.0])


def test_certain_mixtures_change_nothing() -> None:
    """With one topic there is nothing to prepare for."""
    experts, _ = two_topics(4, 0.0)
    sim = Simulator("gpt-oss-20b", "h800-2x4", "sglang-decode")
    seen = interval_of(experts, np.arange(BLOCK), sim.n_gpus)  # one block
    plans = [
        Anneal(sim, estimate_steps=2000, iterations=1, robustness=robustness).search_estimate([seen], sim.static(3))
        for robustness in (0.0, 0.5)
    ]
    np.testing.assert_array_equal(*plans)
