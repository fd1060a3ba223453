"""Streams of windows: what is drawn, in which order, and on which GPU it lives."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from clustergym import TokenTrace
from clustergym.moe_placement import ClusterSpec, ModelSpec, PlacementBatch, PlacementConfig, Stream, Window
from clustergym.moe_placement.kernels.state import SCHEDULES, StreamState
from clustergym.moe_placement.kernels.streams import permuted, stream_keys, trace_tables, uniform

GPUS = 3


def make_trace(sequences: dict[str, list[int]], seed: int = 0) -> TokenTrace:
    """A trace with sequences of the given lengths in each domain."""
    lengths = [n for lens in sequences.values() for n in lens]
    labels = [name for name, lens in sequences.items() for _ in lens]
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((sum(lengths), 2, 4)), axis=2)[:, :, :2]
    return TokenTrace(experts, n_experts=4, seq_lens=np.array(lengths), domains=np.array(labels), name="made")


# Domain b is twice as large in sequences as a, and c four times.
TRACE = make_trace({"a": [5, 9, 2], "b": [7, 1, 12, 4, 6, 3], "c": [8] * 12})


def sequence_of(trace: TokenTrace, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(trace.seq_starts, rows, side="right") - 1


def visits(trace: TokenTrace, windows: list[Window]) -> list[tuple[int, int, list[int]]]:
    """(sequence, home, rows) of each stretch in the stream, windows joined."""
    rows = np.concatenate([w.rows for w in windows])
    homes = np.concatenate([w.home for w in windows])
    found: list[tuple[int, int, list[int]]] = []
    for row, home, seq in zip(rows.tolist(), homes.tolist(), sequence_of(trace, rows).tolist(), strict=True):
        if found and found[-1][0] == seq and row == found[-1][2][-1] + 1:
            assert found[-1][1] == home, "a sequence lives on one GPU"
            found[-1][2].append(row)
        else:
            found.append((seq, home, [row]))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_seed_same_stream_other_seed_another(schedule: str) -> None:
    one, two, other = (Stream(TRACE, GPUS, 16, schedule, seed=seed).take(30) for seed in (5, 5, 6))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.home, b.home)
    assert any((a.rows != b.rows).any() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_environment_serves_the_stream_of_its_seed_whatever_the_batch(schedule: str) -> None:
    model, cluster = ModelSpec("m", 2, 4, 2, 8, 8), ClusterSpec("c", 1, GPUS, 2)
    config = PlacementConfig(TRACE, cluster, model, windows=4, window_tokens=16, ops_per_layer=1, schedule=schedule)
    batch = PlacementBatch(config, 3)
    batch.seed(np.array([100, 101, 102]))
    batch.reset()
    streams = [Stream(TRACE, GPUS, 16, schedule, config.drift_rate, seed=100 + b).take(5) for b in range(3)]
    nothing = batch.sim["slots"][:, 0, 0].long()
    for step in range(8):
        served = step // 2
        for b in range(3):
            for w in (0, 1):
                np.testing.assert_array_equal(batch.sim["rows"][b, w], streams[b][served + w].rows)
                np.testing.assert_array_equal(batch.homes[b, w], streams[b][served + w].home)
        batch.step(nothing, nothing * 0)
    assert batch.done.all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("schedule", ["stationary", "drift", "replay"])
def test_sequences_are_whole_and_none_comes_again_before_its_domain_is_exhausted(schedule: str, seed: int) -> None:
    """Windows of 16 tokens cut most sequences: what is cut goes on in the next window."""
    found = visits(TRACE, Stream(TRACE, GPUS, 16, schedule, seed=seed).take(200))[:-1]
    drawn: dict[str, list[int]] = {}
    for seq, _, rows in found:
        start, length = int(TRACE.seq_starts[seq]), int(TRACE.seq_lens[seq])
        # A sequence of its domain's own may follow itself (last of a round, first of the next).
        assert rows == list(range(start, start + length))
        drawn.setdefault(str(TRACE.domains[seq]), []).append(seq)
    assert len(drawn) == 3
    if schedule == "replay":
        return
    rounds = 0
    for name, order in drawn.items():
        members = set(np.flatnonzero(TRACE.domains == name).tolist())
        for i in range(0, len(order) - len(members) + 1, len(members)):
            assert set(order[i : i + len(members)]) == members
            rounds += 1
    assert rounds > 10


def test_rounds_differ_in_order() -> None:
    trace = make_trace({"all": [1] * 12})
    rows = Stream(trace, GPUS, 12, seed=3)
    orders = [tuple(w.rows.tolist()) for w in rows.take(20)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(orders)) >= 19


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_homes_go_round_robin(schedule: str) -> None:
    found = visits(TRACE, Stream(TRACE, GPUS, 16, schedule, seed=1).take(100))
    homes = [home for _, home, _ in found]
    assert homes == [(homes[0] + i) % GPUS for i in range(len(homes))]
    assert homes[0] == 0


def test_switch_is_pure_in_a_window_and_does_switch() -> None:
    windows = Stream(TRACE, GPUS, 16, "switch", rate=0.3, seed=2).take(400)
    domains = []
    for window in windows:
        (name,) = set(TRACE.domains[sequence_of(TRACE, window.rows)].tolist())
        domains.append(name)
    switches = sum(a != b for a, b in pairwise(domains))
    # Binomial(399, 0.3): 120 ± 9.
    assert 80 < switches < 160
    assert min(Counter(domains).values()) > 60
    assert len({Stream(TRACE, GPUS, 16, "switch", rate=0.0, seed=s).take(1)[0].rows[0] for s in range(9)}) > 1


def test_switch_rate_0_never_and_1_always() -> None:
    for rate, different in ((0.0, 0), (1.0, 49)):
        windows = Stream(TRACE, GPUS, 16, "switch", rate=rate, seed=0).take(50)
        names = [TRACE.domains[sequence_of(TRACE, w.rows)[0]] for w in windows]
        assert sum(a != b for a, b in pairwise(names)) == different


def shares(trace: TokenTrace, windows: list[Window]) -> np.ndarray:
    """(windows, domains) share of the window's tokens."""
    names = trace.domain_names
    labels = [np.searchsorted(names, trace.domains[sequence_of(trace, w.rows)]) for w in windows]
    return np.array([np.bincount(x, minlength=len(names)) / len(x) for x in labels])


def test_drift_moves_but_stays_mixed() -> None:
    trace = make_trace({name: [1] * 50 for name in "abcd"})
    drift = shares(trace, Stream(trace, GPUS, 400, "drift", rate=0.5, seed=0).take(600))
    # A mixture walk: neighbours are alike, distant windows are not, and no domain dies out or takes over.
    near = np.abs(drift[1:] - drift[:-1]).sum(1).mean() / 2
    far = np.abs(drift[100:] - drift[:-100]).sum(1).mean() / 2
    assert near < 0.6 * far
    assert far > 0.3
    np.testing.assert_allclose(drift.mean(0), 0.25, atol=0.1)
    for half in (drift[:300], drift[300:]):
        assert (half.max(0) > 0.6).all()
        assert (half.min(0) < 0.05).all()
    # Its counterpart without drift only shows sampling noise: sqrt(0.25·0.75/400) = 0.02.
    steady = shares(trace, Stream(trace, GPUS, 400, "stationary", seed=0).take(600))
    assert np.abs(steady - 0.25).max() < 0.12
    frozen = shares(trace, Stream(trace, GPUS, 400, "drift", rate=0.0, seed=0).take(200))
    assert frozen.std(0).max() < 0.03


def test_stationary_proportions_are_those_of_the_domains() -> None:
    trace = make_trace({"a": [1] * 10, "b": [1] * 20, "c": [1] * 70})
    whole = shares(trace, Stream(trace, GPUS, 10_000, "stationary", seed=4).take(4)).mean(0)
    # 40,000 draws: 4 standard deviations are 0.01.
    np.testing.assert_allclose(whole, [0.1, 0.2, 0.7], atol=0.01)


def test_replay_follows_the_trace_and_wraps() -> None:
    starts = set()
    for seed in range(20):
        rows = np.concatenate([w.rows for w in Stream(TRACE, GPUS, 16, "replay", seed=seed).take(30)])
        assert rows[0] in TRACE.seq_starts
        np.testing.assert_array_equal(rows, (rows[0] + np.arange(480)) % TRACE.n_tokens)
        starts.add(int(rows[0]))
    assert len(starts) > 5


def test_permuted_is_a_permutation() -> None:
    rng = np.random.default_rng(0)
    for n in [*range(1, 70), 127, 128, 129, 1000, 1024, 1025]:
        for key in rng.integers(0, 2**31, 6).tolist():
            assert sorted(permuted(i, n, key) for i in range(n)) == list(range(n))


def test_permutations_send_each_place_everywhere() -> None:
    """Over 8000 keys each of 16 × 16 (place, image) pairs comes 500 ± 22 times; 6 standard deviations are allowed."""
    n = 16
    counts = np.zeros((n, n), int)
    for key in np.random.default_rng(1).integers(0, 2**31, 8000).tolist():
        for i in range(n):
            counts[i, permuted(i, n, key)] += 1
    assert np.abs(counts - 500).max() < 6 * 22


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**40])
def test_uniform_is_uniform(seed: int) -> None:
    state = StreamState(stream_keys(np.array([seed])), *(np.zeros((1, 4), t) for t in (np.int32, np.int32, np.float64)))
    draws = np.array([uniform(state, 0) for _ in range(20_000)])
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


def test_trace_tables_hold_the_trace_layer_first() -> None:
    tables = trace_tables(TRACE)
    np.testing.assert_array_equal(tables.experts[1, 7], TRACE.experts[7, 1])
    assert [
        sorted(tables.domain_sequences[tables.domain_start[d] : tables.domain_start[d + 1]].tolist()) for d in range(3)
    ] == [list(range(3)), list(range(3, 9)), list(range(9, 21))]  # fmt: skip


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"unknown schedule 'random'; expected one of: stationary, drift, switch, replay"
    ):
        Stream(TRACE, GPUS, 16, "random")
    with pytest.raises(ValueError, match="window_tokens is 0: expected at least 1"):
        Stream(TRACE, GPUS, 0)


def test_window_loads_and_whole() -> None:
    window = Window.whole(TRACE, GPUS)
    np.testing.assert_array_equal(window.rows, np.arange(TRACE.n_tokens))
    np.testing.assert_array_equal(window.home, np.arange(TRACE.n_sequences)[sequence_of(TRACE, window.rows)] % GPUS)
    np.testing.assert_array_equal(window.loads(4), TRACE.loads())
    part = Window(window.experts, window.rows[3:5], window.home[3:5])
    known = [Counter(TRACE.experts[3:5, layer].ravel().tolist()) for layer in range(2)]
    assert part.loads(4).tolist() == [[k[e] for e in range(4)] for k in known]
