"""Streams of intervals: what is drawn, in which order, and on which rank."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import TokenTrace
from clustergym.moe_placement import Interval, IntervalStream, Traffic
from clustergym.moe_placement.kernels.state import N_ROUNDS, ORDER_ROUNDS, SCHEDULES, StreamState
from clustergym.moe_placement.kernels.streams import _uniform, permuted, stream_keys, write_order
from clustergym.moe_placement.profiles import PHASES
from clustergym.moe_placement.streams import cut_trace, sample_passes

GPUS = 3
every_kind = pytest.mark.parametrize(("phase", "schedule"), list(product(PHASES, SCHEDULES)))


def make_trace(sequences: dict[str, list[int]], seed: int = 0) -> TokenTrace:
    """A trace with sequences of the given lengths in each domain."""
    lengths = [n for lens in sequences.values() for n in lens]
    labels = [name for name, lens in sequences.items() for _ in lens]
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((sum(lengths), 2, 4)), axis=2)[:, :, :2]
    return TokenTrace(experts, n_experts=4, seq_lens=np.array(lengths), domains=np.array(labels), name="made")


# Domain b has about twice as many sequences as a, and c four times.
TRACE = make_trace({"a": [50, 90, 20], "b": [70, 10, 120, 40, 60, 30], "c": [80] * 12})


def sequence_of(trace: TokenTrace, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(trace.seq_starts, rows, side="right") - 1


def domains_of(trace: TokenTrace, interval: Interval) -> np.ndarray:
    return trace.domains[sequence_of(trace, interval.rows)]


def shares(trace: TokenTrace, intervals: list[Interval]) -> np.ndarray:
    """(intervals, domains) share of the tokens."""
    names = trace.domain_names
    return np.array([[(domains_of(trace, i) == name).mean() for name in names] for i in intervals])


@every_kind
def test_same_seed_same_stream_other_seed_another(phase: str, schedule: str) -> None:
    traffic = Traffic(phase, 4, 2, schedule, rank_imbalance=0.5, allow_reuse=True)
    one, two, other = (IntervalStream(TRACE, GPUS, traffic, seed).take(30) for seed in (5, 5, 6))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.rank_start, b.rank_start)
    assert any((a.rows != b.rows).any() for a, b in zip(one, other, strict=True))


@every_kind
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4)),
    seed=st.integers(0, 2**40),
    imbalance=st.sampled_from([0.0, 1.0]),
)
def test_no_token_is_served_twice_and_the_promised_intervals_can_be_drawn(
    phase: str, schedule: str, lengths: list[list[int]], sizes: tuple[int, int, int], seed: int, imbalance: float
) -> None:
    trace = make_trace(dict(zip("abc", lengths, strict=False)))
    n_gpus, tokens, passes = sizes
    traffic = Traffic(phase, tokens, passes, schedule, rank_imbalance=imbalance)
    capacity = traffic.capacity(trace, n_gpus)
    traffic.check(trace, n_gpus, capacity)
    if capacity == 0:
        with pytest.raises(ValueError, match="made: "):
            IntervalStream(trace, n_gpus, traffic, seed)
        return
    stream = IntervalStream(trace, n_gpus, traffic, seed)
    intervals = stream.take(capacity)
    served = np.concatenate([interval.rows.ravel() for interval in intervals])
    assert len(np.unique(served)) == len(served) == capacity * n_gpus * tokens * passes
    with pytest.raises(ValueError, match=r"allow_reuse|tokens, one for each sampled pass"):
        traffic.check(trace, n_gpus, capacity + 1)
    if phase == "decode":
        # All pieces are drawn, or too few are left for another interval.
        with pytest.raises(ValueError, match=f"made: the trace is used up after {capacity} intervals"):
            stream.take(1)


@pytest.mark.parametrize("phase", PHASES)
def test_every_token_is_served_before_one_is_served_again(phase: str) -> None:
    """Without a remainder: 12 sequences of 8 tokens are exactly 4 intervals, three times."""
    trace = make_trace({"a": [8] * 4, "b": [8] * 8})
    traffic = Traffic(phase, 4, 2, allow_reuse=True)
    rows = [interval.rows.ravel() for interval in IntervalStream(trace, GPUS, traffic).take(12)]
    orders = [np.concatenate(rows[i : i + 4]) for i in (0, 4, 8)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(96))
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_decode_gives_the_next_token_of_each_sequence_to_each_pass() -> None:
    """A sequence stays on its rank: the same column holds the same sequence in all passes of an interval."""
    for interval in IntervalStream(TRACE, GPUS, Traffic("decode", 7, 5)).take(5):
        for earlier, later in pairwise(interval.rows):
            np.testing.assert_array_equal(later, earlier + 1)
        np.testing.assert_array_equal(sequence_of(TRACE, interval.rows[0]), sequence_of(TRACE, interval.rows[-1]))
        assert (interval.rank_start == interval.rank_start[0]).all()
        # Sequences begin at different positions.
        assert len(np.unique(interval.rows[0] - TRACE.seq_starts[sequence_of(TRACE, interval.rows[0])])) > 3


@pytest.mark.parametrize("imbalance", [0.0, 1.0])
def test_prefill_gives_each_rank_whole_pieces_one_after_another(imbalance: float) -> None:
    """Over passes and intervals, a rank goes through pieces of at most 16 tokens that begin at multiples of 16."""
    traffic = Traffic("prefill", 16, 2, rank_imbalance=imbalance)
    intervals = IntervalStream(TRACE, GPUS, traffic, seed=2).take(12)
    for rank in range(GPUS):
        rows = np.concatenate(
            [
                rows[starts[rank] : starts[rank + 1]]
                for interval in intervals
                for rows, starts in zip(interval.rows, interval.rank_start, strict=True)
            ]
        )
        # Where a piece ends and another begins; two neighbours in the trace look like one.
        begins = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1)]
        for i, (first, last) in enumerate(pairwise([*begins, len(rows)])):
            offset = rows[first] - TRACE.seq_starts[sequence_of(TRACE, rows[first])]
            assert offset % 16 == 0
            if i < len(begins) - 1:
                end = rows[last - 1] + 1
                assert end in TRACE.seq_starts or (end - TRACE.seq_starts[sequence_of(TRACE, end)]) % 16 == 0


@pytest.mark.parametrize("phase", PHASES)
def test_ranks_are_balanced_unless_asked_otherwise(phase: str) -> None:
    even = next(IntervalStream(TRACE, GPUS, Traffic(phase, 10, 2)))
    np.testing.assert_array_equal(np.diff(even.rank_start), 10)
    traffic = Traffic(phase, 100, 2, rank_imbalance=0.5, allow_reuse=True)
    starts = np.stack([i.rank_start for i in IntervalStream(TRACE, GPUS, traffic).take(400)])
    assert (starts[:, :, 0] == 0).all()
    assert (starts[:, :, -1] == 300).all()
    assert (starts == starts[:, :1]).all()
    tokens = np.diff(starts[:, 0])
    assert (tokens >= 0).all()
    # Log-normal weights with standard deviation 0.5 of the logarithm: ratios of two ranks have 0.5·√2.
    ratios = np.log(tokens[:, 0] / tokens[:, 1])
    assert abs(ratios.mean()) < 0.15
    assert ratios.std() == pytest.approx(0.5 * np.sqrt(2), rel=0.15)


# Domains

LONG = {name: [12] * 4000 for name in "abcd"}


def test_stationary_proportions_are_those_of_the_pieces() -> None:
    trace = make_trace({"a": [4] * 1000, "b": [8] * 1000, "c": [28] * 1000})
    found = shares(trace, IntervalStream(trace, 4, Traffic("decode", 250, 4), seed=4).take(3))
    # 1000 sequences per interval: 4 standard deviations are 0.06.
    np.testing.assert_allclose(found, np.tile([0.1, 0.2, 0.7], (3, 1)), atol=0.06)


@pytest.mark.parametrize("phase", PHASES)
def test_switch_serves_one_domain_at_a_time_and_does_switch(phase: str) -> None:
    trace = make_trace(LONG)
    intervals = IntervalStream(trace, GPUS, Traffic(phase, 4, 2, "switch", rate=0.3), seed=2).take(300)
    names = []
    for interval in intervals:
        found = set(domains_of(trace, interval).ravel().tolist())
        # In prefill a rank first ends the piece that it works on.
        assert len(found) == 1 or phase == "prefill"
        names.append(domains_of(trace, interval)[-1, -1])
    switches = sum(a != b for a, b in pairwise(names))
    # Binomial(299, 0.3): 90 ± 8.
    assert 55 < switches < 125
    assert set(names) == set("abcd")


def test_switch_rate_0_never_and_1_always() -> None:
    trace = make_trace(LONG)
    for rate, different in ((0.0, 0), (1.0, 49)):
        intervals = IntervalStream(trace, GPUS, Traffic("decode", 4, 2, "switch", rate)).take(50)
        names = [domains_of(trace, interval)[0, 0] for interval in intervals]
        assert sum(a != b for a, b in pairwise(names)) == different


def test_switch_goes_on_with_other_domains_when_one_is_used_up() -> None:
    trace = make_trace({"a": [2] * 30, "b": [2] * 30})
    rows = [i.rows.ravel() for i in IntervalStream(trace, 2, Traffic("decode", 5, 2, "switch", rate=0.0)).take(6)]
    names = [set(trace.domains[sequence_of(trace, r)].tolist()) for r in rows]
    assert names[0] == names[1] == names[2] != names[3] == names[4] == names[5]


def test_drift_moves_but_stays_mixed() -> None:
    trace = make_trace({name: [1] * 40_000 for name in "abcd"})
    options = Traffic("decode", 50, 1, "drift", 0.5, allow_reuse=True)
    drift = shares(trace, IntervalStream(trace, 4, options).take(500))
    # A mixture walk: neighbours are alike, distant intervals are not, and no domain dies out or takes over.
    near = np.abs(drift[1:] - drift[:-1]).sum(1).mean() / 2
    far = np.abs(drift[100:] - drift[:-100]).sum(1).mean() / 2
    assert near < 0.6 * far
    assert far > 0.3
    np.testing.assert_allclose(drift.mean(0), 0.25, atol=0.2)
    for half in (drift[:250], drift[250:]):
        assert (half.max(0) > 0.6).all()
        assert (half.min(0) < 0.05).all()
    # With a fixed mixture (rate 0) the shares are the softmax of the log weights, but for sampling noise.
    frozen = IntervalStream(trace, 4, replace(options, rate=0.0))
    weights = np.exp(frozen.state.logits[0])
    found = shares(trace, frozen.take(100))
    assert found.std(0).max() < 0.05
    np.testing.assert_allclose(found.mean(0), weights / weights.sum(), atol=0.01)


@pytest.mark.parametrize("phase", PHASES)
def test_replay_follows_the_trace_and_wraps(phase: str) -> None:
    traffic = Traffic(phase, 4, 2, "replay", allow_reuse=True)
    pieces = traffic.cut(TRACE)
    firsts = set()
    for seed in range(12):
        intervals = IntervalStream(TRACE, 1, traffic, seed).take(150)
        if phase == "decode":
            rows = np.concatenate([i.rows[0] for i in intervals])
            order = pieces.piece_row
        else:
            rows = np.concatenate([i.rows.ravel() for i in intervals])
            order = np.arange(TRACE.n_tokens)
        start = int(np.flatnonzero(order == rows[0])[0])
        np.testing.assert_array_equal(rows, order[(start + np.arange(len(rows))) % len(order)])
        firsts.add(start)
    assert len(firsts) > 5


# Pieces, capacity and errors


def test_decode_pieces_have_a_token_for_each_pass() -> None:
    pieces = cut_trace(make_trace({"b": [9, 3], "a": [4]}), "decode", 4, 99)
    assert pieces.piece_row.tolist() == [0, 4, 12]
    assert pieces.piece_tokens.tolist() == [4, 4, 4]
    # Domains are in alphabetical order.
    assert pieces.domain_start.tolist() == [0, 1, 3]
    assert pieces.domain_pieces.tolist() == [2, 0, 1]


def test_prefill_pieces_have_at_most_the_tokens_of_a_rank() -> None:
    pieces = cut_trace(make_trace({"b": [9, 3], "a": [4]}), "prefill", 99, 4)
    assert pieces.piece_row.tolist() == [0, 4, 8, 9, 12]
    assert pieces.piece_tokens.tolist() == [4, 4, 1, 3, 4]
    assert pieces.domain_start.tolist() == [0, 1, 5]
    assert pieces.domain_pieces.tolist() == [4, 0, 1, 2, 3]
    np.testing.assert_array_equal(pieces.experts[1, 7], make_trace({"b": [9, 3], "a": [4]}).experts[7, 1])


def test_capacity_by_hand() -> None:
    trace = make_trace({"a": [10, 10, 10, 3]})
    # Pieces of 4: two in each of three sequences. An interval needs three: one token per rank.
    assert Traffic("decode", 1, 4).capacity(trace, 3) == 2
    # 33 tokens, minus 2 · 3 that ranks may be in the middle of: three intervals of 2 · 4.
    assert Traffic("prefill", 4, 1).capacity(trace, 2) == 3


@pytest.mark.parametrize(
    ("traffic", "intervals", "message"),
    [
        (
            Traffic("decode", 4, 4),
            3,
            "made: 24 tokens fit the decode phase, which fills 0 intervals, but 3 are needed (4 passes of 4 tokens on "
            "2 ranks each): tokens_per_rank=1 would fit; or serve tokens again with allow_reuse",
        ),
        (
            Traffic("decode", 1, 4),
            4,
            "which fills 3 intervals, but 4 are needed (4 passes of 1 tokens on 2 ranks each): give a longer trace, or "
            "serve tokens again with allow_reuse",
        ),
        (
            Traffic("decode", 1, 11),
            1,
            "made: the decode phase needs sequences of at least 11 tokens, one for each sampled pass, but the longest "
            "has 10: lower sampled_passes, or use a prefill profile",
        ),
        (
            Traffic("prefill", 8, 2),
            1,
            "33 tokens fit the prefill phase, which fills 0 intervals, but 1 are needed (2 passes of 8 tokens on 2 "
            "ranks each): tokens_per_rank=5 would fit",
        ),
    ],
)
def test_too_short_traces_say_what_would_fit(traffic: Traffic, intervals: int, message: str) -> None:
    trace = make_trace({"a": [10, 10, 10, 3]})
    with pytest.raises(ValueError, match=re.escape(message)):
        traffic.check(trace, 2, intervals)
    reused = replace(traffic, allow_reuse=True)
    if traffic.sizes[0] <= 10:
        reused.check(trace, 2, 1000)
        assert len(IntervalStream(trace, 2, reused).take(50)) == 50
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            reused.check(trace, 2, 1000)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(PHASES),
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_what_an_error_says_would_fit_does_fit(
    phase: str, lengths: list[int], n_gpus: int, passes: int, intervals: int
) -> None:
    trace, traffic = make_trace({"a": lengths}), Traffic(phase, 1000, passes)
    with pytest.raises(ValueError, match="made: ") as error:
        traffic.check(trace, n_gpus, intervals)
    found = re.search(r"tokens_per_rank=(\d+) would fit", str(error.value))
    if found:
        Traffic(phase, int(found[1]), passes).check(trace, n_gpus, intervals)
        # And it is the most that does.
        assert Traffic(phase, int(found[1]) + 1, passes).capacity(trace, n_gpus) < intervals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phase": "train"}, "unknown phase 'train'; expected one of: decode, prefill"),
        ({"schedule": "random"}, "unknown schedule 'random'; expected one of: stationary, drift, switch, replay"),
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0: expected at least 1"),
        ({"sampled_passes": -1}, "sampled_passes is -1: expected at least 1"),
        ({"rate": 1.5}, "rate is 1.5: expected 0 … 1"),
        ({"rank_imbalance": -0.1}, "rank_imbalance is -0.1: expected 0 or more"),
        ({"rank_imbalance": float("nan")}, "rank_imbalance is nan: expected 0 or more"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Traffic(**options)


def test_default_sizes_depend_on_the_phase() -> None:
    assert Traffic("decode").sizes == (4, 32)
    assert Traffic("prefill").sizes == (2, 128)
    assert Traffic("decode").interval_tokens(16) == 4 * 512


@pytest.mark.parametrize("phase", PHASES)
def test_sampled_passes_of_a_trace(phase: str) -> None:
    """As many as fit without repeating a token, at most as many as asked for, of all domains."""
    traffic = Traffic(phase, 8, 4, "switch", rate=0.0)
    capacity = traffic.capacity(TRACE, GPUS) * 4
    assert capacity > 10
    for asked, known in ((3, 3), (10, 10), (10_000, capacity)):
        passes = sample_passes(TRACE, GPUS, traffic, asked)
        assert passes.rows.shape == (known, 8 * GPUS)
        assert passes.rank_start.shape == (known, GPUS + 1)
        assert len(np.unique(passes.rows)) == passes.rows.size
    assert set(domains_of(TRACE, passes).ravel().tolist()) == {"a", "b", "c"}
    # A trace that is too short for one interval still gives something to plan on.
    assert sample_passes(make_trace({"a": [9]}), GPUS, traffic, 10).n_passes == 1


# Intervals


def made_interval() -> Interval:
    return next(IntervalStream(TRACE, GPUS, Traffic("prefill", 5, 3)))


def test_loads_and_coactivation_of_an_interval() -> None:
    experts = np.array([[[0, 1], [1, -1], [1, 2]], [[3, 0], [3, 1], [-1, -1]]], np.int16)
    interval = Interval.even(experts, np.array([[0, 1], [2, 2]], np.int32), 2)
    assert interval.pass_loads(4).tolist() == [[[1, 2, 0, 0], [1, 1, 0, 2]], [[0, 2, 2, 0], [0, 0, 0, 0]]]
    assert interval.loads(4).tolist() == [[1, 4, 2, 0], [1, 1, 0, 2]]
    assert interval.coactivation(0, 4).tolist() == [[1, 1, 0, 0], [1, 4, 2, 0], [0, 2, 2, 0], [0, 0, 0, 0]]
    assert (interval.n_passes, interval.n_tokens, interval.n_layers) == (2, 2, 2)


def test_intervals_are_cut_and_joined() -> None:
    interval = made_interval()
    both = Interval.join([interval, interval.first_passes(1)])
    assert both.n_passes == 4
    np.testing.assert_array_equal(both.rows[3], interval.rows[0])
    np.testing.assert_array_equal(both.rank_start[3], interval.rank_start[0])
    np.testing.assert_array_equal(both.loads(4), interval.loads(4) + interval.first_passes(1).loads(4))


def test_even_intervals() -> None:
    even = Interval.even(made_interval().experts, np.zeros((2, 6), np.int32), 3)
    assert even.rank_start.tolist() == [[0, 2, 4, 6]] * 2
    with pytest.raises(ValueError, match="6 tokens per pass cannot be shared equally among 4 ranks"):
        Interval.even(made_interval().experts, np.zeros((2, 6), np.int32), 4)


# Random numbers


def order_of(n: int, key: int) -> np.ndarray:
    order = np.zeros(ORDER_ROUNDS + N_ROUNDS, np.int64)
    write_order(order, n, key)
    return order


def test_permuted_is_a_permutation() -> None:
    rng = np.random.default_rng(0)
    for n in [*range(1, 70), 127, 128, 129, 1000, 1024, 1025]:
        for key in rng.integers(0, 2**31, 6).tolist():
            order = order_of(n, key)
            assert sorted(permuted(i, order) for i in range(n)) == list(range(n))


def test_permutations_send_each_place_everywhere() -> None:
    """Over 8000 keys each of 16 × 16 (place, image) pairs comes 500 ± 22 times; 6 standard deviations are allowed."""
    n = 16
    counts = np.zeros((n, n), int)
    for key in np.random.default_rng(1).integers(0, 2**31, 8000).tolist():
        order = order_of(n, key)
        for i in range(n):
            counts[i, permuted(i, order)] += 1
    assert np.abs(counts - 500).max() < 6 * 22


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**40])
def test_uniform_is_uniform(seed: int) -> None:
    state = IntervalStream(TRACE, GPUS, Traffic("decode", 1, 1), seed).state
    assert isinstance(state, StreamState)
    draws = np.array([_uniform(state, 0) for _ in range(20_000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, 50, (0, 1))[0]
    # χ² with 49 degrees of freedom: mean 49, standard deviation 10.
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 5 * 10
    pairs = np.histogram2d(draws[:-1], draws[1:], 10, ((0, 1), (0, 1)))[0]
    assert ((pairs - 200) ** 2 / 200).sum() < 99 + 5 * 14
    assert len(np.unique(draws)) == len(draws)


def test_keys_differ_between_seeds_and_ignore_the_batch() -> None:
    seeds = np.concatenate([np.arange(10_000), 2**31 + np.arange(0, 100, 2) * 2**33, [-1, -(2**62)]])
    keys = stream_keys(seeds)
    assert len(np.unique(keys[:10_000, 0])) == 10_000
    assert ((keys >= 0) & (keys < 2**31)).all()
    np.testing.assert_array_equal(stream_keys(seeds[17:18]), keys[17:18])


# One large pass instead of many


@settings(max_examples=60, deadline=None)
@given(passes=st.integers(1, 4), tokens=st.integers(1, 5), most=st.integers(1, 70))
def test_mixed_passes_have_every_token_equally_often(passes: int, tokens: int, most: int) -> None:
    rows = np.arange(passes * tokens * GPUS, dtype=np.int32).reshape(passes, -1)
    mixed = Interval.even(np.zeros((1, rows.size, 1), np.int16), rows, GPUS).mixed(most)
    assert mixed.n_passes == 1
    assert mixed.stands_for == tokens * GPUS
    # As many copies of all tokens as fit; some of the last copy are left out so that every rank has equally many.
    copies = max(1, most // rows.size)
    kept = min(most, copies * rows.size)
    repeated = GPUS if kept < GPUS else 1
    kept = kept if kept < GPUS else kept // GPUS * GPUS
    assert mixed.n_tokens == kept * repeated
    ids, times = np.unique(mixed.rows, return_counts=True)
    assert len(ids) == min(kept, rows.size)
    assert times.max() == copies * repeated
    assert (times < copies * repeated).sum() < GPUS
    assert (np.diff(mixed.rank_start[0]) == kept * repeated // GPUS).all()


def test_mixed_passes_with_few_tokens_show_each_on_several_ranks() -> None:
    interval = Interval.even(np.zeros((1, 63, 1), np.int16), np.arange(63, dtype=np.int32)[None], GPUS)
    mixed = interval.mixed(16384)
    _, times = np.unique(mixed.rows, return_counts=True)
    assert set(times.tolist()) == {4096 // 63}
    for first, last in pairwise(mixed.rank_start[0]):
        assert len(np.unique(mixed.rows[0, first:last])) > 48, "a rank sees most of the tokens"


def test_mixed_passes_are_a_large_sample_of_all_tokens() -> None:
    interval = Interval.even(np.zeros((1, 6000, 1), np.int16), np.arange(6000, dtype=np.int32).reshape(10, 600), GPUS)
    one, again, other = (interval.mixed(3000, seed=seed).rows for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    per_pass = np.bincount(one[0] // 600, minlength=10)
    assert np.abs(per_pass - 300).max() < 60  # 5 standard deviations
