"""Independent streams: splits that share no sequence, and intervals that contain the truth as often as they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clustergym import TokenTrace
from clustergym.common.statistics import ci95, ci95_of_blocks, ci95_of_deals, ci95_of_resamples
from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator
from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic
from clustergym.planners.evaluation import (
    Protocol,
    Result,
    compare,
    deal_sequences,
    deal_streams,
    reused_share,
)
from clustergym.traces import split_trace
from clustergym.traces.splits import DOMAINS_TO_SPLIT, SHARES
from recorders import (
    N_EXPERTS,
    N_GPUS,
    N_LAYERS,
    protocol,
)
from recorders import sim as sim  # a fixture
from recorders import trace as trace  # a fixture

# The split


def numbered_trace(lengths: Sequence[int], domains: Sequence[str] | None = None) -> TokenTrace:
    """Every sequence uses an expert of its own, which identifies its tokens."""
    labels: Any = None if domains is None else np.array(domains)
    return TokenTrace(np.repeat(np.arange(len(lengths)), lengths)[:, None], seq_lens=np.array(lengths), domains=labels)


def sequences_in(trace: TokenTrace) -> set[int]:
    return set(trace.experts.ravel().tolist())


@pytest.mark.parametrize("holdout", [0.25, 0.5, 0.75])
def test_planning_and_held_out_part_share_no_sequence(holdout: float) -> None:
    trace = numbered_trace(np.random.default_rng(0).integers(3, 12, 40).tolist())
    train, test = Protocol(Traffic(), holdout=holdout, seed=4).parts(trace)
    assert not sequences_in(train) & sequences_in(test)
    assert sequences_in(train) | sequences_in(test) == set(range(40))
    assert train.n_tokens + test.n_tokens == trace.n_tokens
    assert test.n_tokens / trace.n_tokens == pytest.approx(holdout, abs=12 / trace.n_tokens)
    assert train.n_tokens >= test.n_tokens or holdout > 0.5


def test_single_sequence_is_refused(sim: Simulator) -> None:
    trace = TokenTrace(np.zeros((200, N_LAYERS), int), n_experts=N_EXPERTS, name="single")
    with pytest.raises(ValueError, match="single: the trace has one sequence, so nothing can be held out"):
        compare(trace, sim, ["static"], protocol("stationary"))


@pytest.mark.parametrize("n_domains", [1, 3, DOMAINS_TO_SPLIT, 20])
def test_splits_are_disjoint_and_complete(n_domains: int) -> None:
    rng = np.random.default_rng(n_domains)
    trace = numbered_trace(rng.integers(5, 60, 120).tolist(), [f"d{i % n_domains}" for i in range(120)])
    parts = {name: split_trace(trace, name) for name in SHARES}
    found = [sequences_in(part) for part in parts.values()]
    assert set.union(*found) == set(range(120))
    assert sum(map(len, found)) == 120
    domains = [set(part.domain_names) for part in parts.values()]
    if n_domains >= DOMAINS_TO_SPLIT:
        assert sum(map(len, domains)) == n_domains  # disjoint by domain
        assert min(map(len, domains)) >= 2
    else:
        assert all(len(d) == n_domains for d in domains)
        for name, part in parts.items():
            assert part.n_tokens / trace.n_tokens == pytest.approx(SHARES[name], abs=0.05)
    # The same for everybody who asks, and the same object, because caches know traces by their identity.
    assert split_trace(trace, "test") is parts["test"]
    assert split_trace(trace, "all") is trace
    assert sequences_in(split_trace(trace, "test", seed=1)) != sequences_in(parts["test"])


def test_splits_of_few_sequences() -> None:
    parts = [sequences_in(split_trace(numbered_trace([5, 5, 5], ["a", "b", "c"]), name)) for name in SHARES]
    assert sorted(len(part) for part in parts) == [1, 1, 1]
    with pytest.raises(ValueError, match=r"2 sequence.* cannot be split into train, validation, test"):
        split_trace(numbered_trace([5, 5]), "test")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        Protocol(split="dev")


# Independent streams


def test_sequences_are_dealt_to_disjoint_groups() -> None:
    trace = numbered_trace([5] * 31, [f"d{i % 5}" for i in range(31)])
    for groups in (1, 2, 4, 7):
        dealt = deal_sequences(trace, groups, seed=2)
        found = [sequences_in(part) for part in dealt]
        assert len(dealt) == groups
        assert set.union(*found) == set(range(31))
        assert sum(map(len, found)) == 31
        assert max(map(len, found)) - min(map(len, found)) <= 1
        for domain in trace.domain_names:  # each group has its share of each domain
            sizes = [(part.domains == domain).sum() for part in dealt]
            assert max(sizes) - min(sizes) <= 2
    again = [sequences_in(part) for part in deal_sequences(trace, 2, seed=3)]
    assert again[0] not in [sequences_in(part) for part in deal_sequences(trace, 2, seed=2)]


def test_streams_share_no_sequence_if_there_is_enough_data(trace: TokenTrace) -> None:
    """4000 tokens fill 61 intervals of 64 tokens, so 10 streams of 4 intervals are independent."""
    p = protocol("drift", streams=10)
    deals = deal_streams(trace, N_GPUS, p)
    assert (len(deals.parts), deals.groups) == (10, 10)
    assert sum(part.n_tokens for part in deals.parts) == trace.n_tokens
    longer = deal_streams(trace, N_GPUS, replace(p, intervals=15))
    assert 2 <= longer.groups <= 3
    assert len(longer.parts) == 10
    first = longer.parts[: longer.groups]
    assert sum(part.n_tokens for part in first) == trace.n_tokens
    for part in longer.parts:
        intervals = IntervalStream(part, N_GPUS, p.traffic).take(16)
        assert reused_share(intervals) == 0.0


def test_too_little_data_is_an_error_that_says_what_fits(trace: TokenTrace, sim: Simulator) -> None:
    p = protocol("drift", streams=2)
    with pytest.raises(ValueError, match=r"fills 61 intervals, but 82 are needed .*tokens_per_rank=\d would fit"):
        compare(trace, sim, ["static"], replace(p, intervals=40))
    reusing = replace(p, intervals=40, traffic=replace(p.traffic, allow_reuse=True))
    (result,) = compare(trace, sim, ["static"], reusing)
    assert result.groups == 2
    # 41 intervals of 64 tokens from half of the 4000 tokens.
    assert result.reused == pytest.approx(1 - 2000 / (41 * 64), abs=0.06)


def sequences_with_favourites(rng: np.random.Generator, n: int) -> TokenTrace:
    """Random routing in which no expert is special, but each sequence has its favourites."""
    lengths = rng.integers(20, 60, n)
    scores = np.repeat(rng.normal(0, 1, (n, N_EXPERTS)), lengths, axis=0)
    chosen = np.argsort(-(scores + rng.gumbel(size=scores.shape)), axis=1)[:, None, :2]
    return TokenTrace(chosen.astype(np.int16), n_experts=N_EXPERTS, seq_lens=lengths)


def difference(trace: TokenTrace, sim: Simulator, p: Protocol) -> tuple[float, float, float]:
    """Relative difference of two placements that are equally good, its interval, and the naive interval."""
    deals, placements = deal_streams(trace, N_GPUS, p), (np.arange(8), np.arange(8).reshape(2, 4).T)
    times = []
    for seed, part in enumerate(deals.parts, p.seed):
        passes = Interval.join(IntervalStream(part, N_GPUS, p.traffic, seed).take(p.intervals))
        times.append([
            sim.evaluate(passes, slots.reshape(1, 4, 2).astype(np.int16), check=False).time_us[0]
            for slots in placements
        ])  # fmt: skip
    relative = [a / b - 1 for a, b in times]
    return float(np.mean(relative)), ci95_of_deals(relative, deals.groups), ci95(relative)


@pytest.fixture(scope="module")
def two_slots() -> Simulator:
    return Simulator(ModelSpec("one", 1, N_EXPERTS, 2, 2048, 1024), ClusterSpec("2x2", 2, 2, 2), "sglang-decode")


def test_intervals_cover_no_difference_95_percent_of_the_time(two_slots: Simulator) -> None:
    """On random routing, where the true difference is 0. The naive interval misses it when streams share tokens."""
    traffic = Traffic("decode", 8, 2, "stationary", allow_reuse=True)
    covered = {}
    for streams, n_sequences in ((4, 40), (12, 8)):
        found = [
            difference(
                sequences_with_favourites(np.random.default_rng(seed), n_sequences), two_slots,
                Protocol(traffic, 4, streams, seed),
            )
            for seed in range(120)
        ]  # fmt: skip
        covered[streams] = [np.mean([abs(f[0]) <= f[i] for f in found]) for i in (1, 2)]
    # Four independent streams: both intervals are the same.
    assert covered[4][0] == covered[4][1]
    assert 0.9 <= covered[4][0] <= 0.99
    # Twelve streams of two halves of the same eight sequences.
    assert covered[12][0] >= 0.93
    assert covered[12][1] < 0.8


def test_more_streams_or_passes_of_the_same_tokens_do_not_shrink_the_interval(two_slots: Simulator) -> None:
    trace = sequences_with_favourites(np.random.default_rng(0), 8)
    traffic = Traffic("decode", 8, 2, "stationary", allow_reuse=True)
    few, many = (difference(trace, two_slots, Protocol(traffic, 4, streams)) for streams in (10, 160))
    assert many[2] < 0.35 * few[2]  # naive: a quarter
    assert many[1] > 0.6 * few[1]
    long = difference(trace, two_slots, Protocol(traffic, 64, 10))
    assert long[1] > 0.5 * few[1]


# Intervals of known numbers


def test_ci95_of_deals_of_known_numbers() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert ci95_of_deals(values, 4) == pytest.approx(ci95(values))
    # Two deals of two: squares within the deals sum to 0.5 + 0.5 with 2 degrees, so the variance is 0.5, of a mean of
    # two independent values 0.25, and t(2) = 4.30265.
    assert ci95_of_deals(values, 2) == pytest.approx(4.30265 * 0.5, abs=1e-5)
    # The same deal again and again: only Student's factor changes.
    assert ci95_of_deals(values * 1000, 2) == pytest.approx(1.96 * 0.5, rel=1e-3)
    # A last deal that is not complete.
    assert ci95_of_deals([1.0, 2.0, 9.0], 2) == pytest.approx(stats.t.ppf(0.975, 1) * 0.5)
    assert ci95_of_deals([7.0], 1) == ci95_of_deals([7.0], 5) == ci95_of_deals([1.0, 2.0], 1) == 0.0


def test_ci95_of_resamples_of_known_numbers() -> None:
    # Draws whose two passes agree: all of the spread is of the sequences. Variance 1 of the draws, 5/4 of it for a new
    # sample of 5 sequences, t(4) = 2.77645. The passes of the mean add nothing.
    means = np.array([-1.0, 0.0, 1.0])
    same = np.stack([means, means], axis=1)
    t2 = stats.t.ppf(0.975, 2)
    assert ci95_of_resamples(same, 5, 0.1, 7) == pytest.approx(t2 * np.sqrt(5 / 4))
    # Passes that differ by ±1 around the same mean: variance 2 of a pass. Nothing is left for the sequences but what
    # independent tokens give (2 · 0.1), and 4 passes leave 2 / 4 · (1 − 0.4) to chance.
    apart = np.array([[-1.0, 1.0]] * 100)
    t49 = stats.t.ppf(0.975, 49)
    assert ci95_of_resamples(apart, 50, 0.1, 4) == pytest.approx(t49 * np.sqrt(0.2 * 50 / 49 + 0.3))
    # Passes of all tokens leave nothing to chance, however many there are.
    assert ci95_of_resamples(apart, 50, 0.1, 10) == ci95_of_resamples(apart, 50, 0.1, 1000)
    assert ci95_of_resamples(apart, 1.0, 0.1, 10) == 0.0


def test_resamples_estimate_both_parts_of_the_variance() -> None:
    """Sequences with variance 4, passes with variance 1: the mean of 10 passes of 30 sequences has 4 / 30 + 1 / 10."""
    rng = np.random.default_rng(0)
    half = []
    for _ in range(200):
        sequences = rng.normal(0, 2, 30)
        drawn = sequences[rng.integers(0, 30, (40, 30))].mean(1)
        values = drawn[:, None] + rng.normal(0, 1, (40, 2))
        half.append(ci95_of_resamples(values, 30, 0.0, 10))
    variance = np.mean(np.square(half)) / stats.t.ppf(0.975, 29) ** 2
    assert variance == pytest.approx(4 / 30 + 1 / 10, rel=0.15)


def test_ci95_of_blocks_of_known_numbers() -> None:
    # Nine steps in three blocks with means 1, 2 and 3.
    assert ci95_of_blocks(np.repeat([1.0, 2.0, 3.0], 3)) == pytest.approx(ci95([1.0, 2.0, 3.0]))
    assert ci95_of_blocks(np.array([1.0, 3.0])) == pytest.approx(ci95([1.0, 3.0]))
    assert ci95_of_blocks(np.array([1.0])) == 0.0
    # A slow walk has a wider interval than the same values in random order.
    rng = np.random.default_rng(0)
    walk = np.sin(np.linspace(0, 6, 400))
    assert ci95_of_blocks(walk) > 3 * ci95_of_blocks(rng.permutation(walk))


def test_stationary_results_have_an_interval_from_resampled_sequences(trace: TokenTrace, sim: Simulator) -> None:
    """Also with one stream. More streams do not make it shorter, and it survives a JSON file."""
    reusing = replace(protocol("stationary").traffic, allow_reuse=True)
    one, some, many = (
        compare(trace, sim, ["static", "eplb"], replace(protocol("stationary", streams=n), traffic=reusing))
        for n in (1, 12, 120)
    )
    for results in (one, some, many):
        half = results[0].versus(results[1])[1]
        assert half > 0
        again = [Result(**json.loads(json.dumps(result.as_dict()))) for result in results]
        assert again[0].versus(again[1]) == pytest.approx(results[0].versus(results[1]))
        assert again[0].total_ci95_us > 0
    assert one[0].versus(one[1])[1] > some[0].versus(some[1])[1]  # few passes leave more to chance
    assert many[0].versus(many[1])[1] > 0.7 * some[0].versus(some[1])[1]  # independent streams would leave 0.32
    assert compare(trace, sim, ["static"], protocol("drift", streams=1))[0].resampled is None


def test_ci95_of_known_numbers() -> None:
    # Mean 2.5, standard deviation 1.29099, t(3) = 3.18245: 3.18245 · 1.29099 / √4.
    assert ci95([1.0, 2.0, 3.0, 4.0]) == pytest.approx(2.05426, abs=1e-5)
    values = [3.0, 1.5, 8.0, 2.0, 2.5]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert ci95(values) == pytest.approx((high - low) / 2)
    assert ci95([7.0]) == 0.0
    assert ci95([7.0, 7.0]) == 0.0
