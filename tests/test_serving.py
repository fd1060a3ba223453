"""The serving model against a slow reference written from its definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import TokenTrace
from clustergym.moe_placement import ClusterSpec, ModelSpec
from clustergym.moe_placement.kernels.replicas import hash31
from clustergym.moe_placement.serving.cost import mean_pass_time, migration_time
from clustergym.moe_placement.serving.passes import change
from clustergym.moe_placement.serving.profiles import DISPATCHES, PROFILES, TRANSPORTS, EngineProfile, get_profile
from clustergym.moe_placement.serving.simulator import Interval, IntervalStream, ServingSimulator

# The reference


def serving_gpu(
    dispatch: str,
    holders: list[int],
    per_node: int,
    n_gpus: int,
    *,
    e: int,
    row: int,
    position: int,
    rank: int,
    before: int,
) -> int:
    """GPU whose replica of expert ``e`` serves a token: the rules of the engines, one line each."""
    n, node = len(holders), rank // per_node
    near = [g for g in holders if g // per_node == node]
    if n == 1:
        return holders[0]
    if dispatch == "token-hash":
        return holders[position * 2654435761 % 2**32 % n]
    if dispatch == "round-robin":
        return holders[(before + rank) % n]
    if dispatch == "rank-mod":
        return holders[rank % n]
    if dispatch == "random":
        return holders[hash31(row) * n >> 31]
    if dispatch == "local-hash":
        open_to = [rank] if rank in holders else near or holders
        return open_to[hash31(row) * len(open_to) >> 31]
    if rank in holders or near:
        return rank if rank in holders else near[0]
    far = [g for g in range(n_gpus) if not any(h // per_node == g // per_node for h in holders)]
    return holders[(e + far.index(rank)) % n]


class Reference:
    """Counts of one pass of one layer, token by token."""

    def __init__(
        self, simulator: ServingSimulator, slots: npt.NDArray[np.int16], experts: npt.NDArray[np.int16],
        rows: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], origin: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        n_gpus, per_node = simulator.n_gpus, simulator.cluster.gpus_per_node
        transport, dispatch = simulator.profile.transport, simulator.profile.dispatch
        holders = {e: [g for g in range(n_gpus) if e in slots[g]] for e in range(simulator.n_experts)}
        home = np.repeat(np.arange(n_gpus), np.diff(starts))
        origin = home if origin is None else origin
        self.pairs = np.zeros((simulator.n_experts, n_gpus), int)
        self.copies, self.returns = np.zeros((4, n_gpus), int), np.zeros((4, n_gpus), int)
        self.after = np.zeros(len(rows), int)
        used: dict[tuple[int, int], int] = {}
        for t, row in enumerate(rows):
            source, gpus = int(origin[t]), []
            for e in (int(e) for e in experts[row] if e >= 0):
                before = used.get((source, e), 0)
                used[source, e] = before + 1
                g = serving_gpu(
                    dispatch, holders[e], per_node, n_gpus, e=e, row=int(row), position=t - int(starts[home[t]]),
                    rank=source, before=before,
                )  # fmt: skip
                self.pairs[e, g] += 1
                gpus.append(g)
            self.after[t] = gpus[0] if gpus else source
            self._send(self.copies, source, gpus, per_node, transport)
            self._send(self.returns, int(self.after[t]), gpus, per_node, transport)

    @staticmethod
    def _send(copies: npt.NDArray[np.int64], source: int, gpus: list[int], per_node: int, transport: str) -> None:
        if transport == "allgather":
            return
        if transport == "per-expert":
            for g in gpus:
                if g != source:
                    far = 2 if g // per_node != source // per_node else 0
                    copies[far, source] += 1
                    copies[far + 1, g] += 1
            return
        for node in {g // per_node for g in gpus}:
            relay = node * per_node + source % per_node
            if relay != source:
                copies[2, source] += 1
                copies[3, relay] += 1
            for g in {g for g in gpus if g // per_node == node} - {relay}:
                copies[0, relay] += 1
                copies[1, g] += 1


def assert_counts(simulator: ServingSimulator, state: object, b: int, w: int, expected: Reference) -> None:
    slots, pairs = state.slots[b], np.zeros_like(expected.pairs)
    for g, s in np.argwhere(slots >= 0):
        pairs[slots[g, s], g] = state.slot_pairs[b, w, g, s]
    np.testing.assert_array_equal(pairs, expected.pairs)
    if simulator.profile.transport != "allgather":
        np.testing.assert_array_equal(state.copies[b, w], expected.copies)
    if simulator.profile.transport == "stay":
        np.testing.assert_array_equal(state.return_copies[b, w], expected.returns)


# Instances


def random_placement(rng: np.random.Generator, n_experts: int, n_gpus: int, n_slots: int) -> npt.NDArray[np.int16]:
    """Every expert once, then random replicas in most of the other slots."""
    slots = np.full((n_gpus, n_slots), -1, np.int16)
    for i, e in enumerate([*rng.permutation(n_experts), *rng.integers(0, n_experts, n_gpus * n_slots)]):
        free = [g for g in range(n_gpus) if (slots[g] < 0).any() and e not in slots[g]]
        if free and (i < n_experts or rng.random() < 0.7):
            g = rng.choice(free)
            slots[g, np.flatnonzero(slots[g] < 0)[0]] = e
    return slots


def random_change(rng: np.random.Generator, slots: npt.NDArray[np.int16]) -> tuple[int, ...] | None:
    """A legal change of a placement in the form that ``change`` takes."""
    n_gpus = len(slots)
    e = int(rng.choice(slots[slots >= 0]))
    holders = [g for g in range(n_gpus) if e in slots[g]]
    free = [g for g in range(n_gpus) if e not in slots[g] and (slots[g] < 0).any()]
    kind = rng.integers(4)
    if kind == 0 and free:
        return e, int(rng.choice(holders)), int(rng.choice(free)), -1, -1, -1
    if kind == 1 and free:
        return e, -1, int(rng.choice(free)), -1, -1, -1
    if kind == 2 and len(holders) > 1:
        return e, int(rng.choice(holders)), -1, -1, -1, -1
    source, target = int(rng.choice(holders)), int(rng.integers(n_gpus))
    victims = [int(v) for v in slots[target] if v >= 0 and v not in slots[source]]
    return (e, source, target, victims[0], target, source) if victims and e not in slots[target] else None


def undone(one: tuple[int, ...]) -> tuple[int, ...]:
    e, e_from, e_to, v, v_from, v_to = one
    return e, e_to, e_from, v, v_to, v_from


@st.composite
def instances(draw: st.DrawFn) -> tuple[ServingSimulator, Interval, npt.NDArray[np.int16], np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_gpus, n_experts = nodes * per_node, draw(st.integers(2, 8))
    n_slots = min(n_experts, -(-n_experts // n_gpus) + draw(st.integers(0, 2)))
    profile = EngineProfile(
        "test", "decode", draw(st.sampled_from(DISPATCHES)), draw(st.sampled_from(TRANSPORTS)), "drawn by a test"
    )
    top_k = draw(st.integers(1, min(4, n_experts)))
    model = ModelSpec(
        "test", 4, n_experts, top_k, 64, 32, kernel_start_us=5.0, kernel_expert_us=2.0, kernel_pair_us=0.1
    )
    simulator = ServingSimulator(model, ClusterSpec("test", nodes, per_node, slots_per_gpu=n_slots), profile)
    layers, passes = 2, 2
    experts = np.array([[rng.permutation(n_experts)[:top_k] for _ in range(100)] for _ in range(layers)], np.int16)
    experts[rng.random(experts.shape) < 0.1] = -1
    sizes = (
        rng.integers(0, 40, (passes, n_gpus)) if draw(st.booleans()) else np.full((passes, n_gpus), rng.integers(1, 70))
    )
    # Passes of an interval have the same number of tokens.
    sizes[1] = rng.permutation(sizes[0])
    n_tokens = max(1, int(sizes[0].sum()))
    sizes[:, 0] += n_tokens - sizes.sum(1)
    starts = np.concatenate([np.zeros((passes, 1), int), np.cumsum(sizes, 1)], 1).astype(np.int32)
    interval = Interval(experts, rng.integers(0, 100, (passes, n_tokens)).astype(np.int32), starts)
    placement = np.stack([random_placement(rng, n_experts, n_gpus, n_slots) for _ in range(layers)])
    return simulator, interval, placement, rng


@settings(max_examples=200, deadline=None)
@given(instances())
def test_counts_equal_the_reference(
    instance: tuple[ServingSimulator, Interval, npt.NDArray[np.int16], np.random.Generator],
) -> None:
    simulator, interval, placement, _ = instance
    state = simulator.count(interval, placement)
    for w in range(interval.n_passes):
        origin = None
        for b in range(interval.n_layers):
            expected = Reference(
                simulator, placement[b], interval.experts[b], interval.rows[w], interval.rank_start[w], origin
            )
            assert_counts(simulator, state, b, w, expected)
            origin = expected.after if simulator.profile.transport == "stay" else None


@settings(max_examples=150, deadline=None)
@given(instances())
def test_incremental_counts_equal_the_reference(
    instance: tuple[ServingSimulator, Interval, npt.NDArray[np.int16], np.random.Generator],
) -> None:
    """After random changes, of which some touch only the first pass and are undone."""
    simulator, interval, placement, rng = instance
    state, costs = simulator.count(interval, placement), simulator.costs(interval.rows.shape[1])
    for _ in range(8):
        one = random_change(rng, state.slots[0])
        if one is None:
            continue
        if rng.random() < 0.4:
            change(state, 0, *one, simulator.topology, costs, 1)
            change(state, 0, *undone(one), simulator.topology, costs, 1)
        else:
            change(state, 0, *one, simulator.topology, costs, interval.n_passes)
        for w in range(interval.n_passes):
            expected = Reference(
                simulator, state.slots[0], interval.experts[0], interval.rows[w], interval.rank_start[w]
            )
            assert_counts(simulator, state, 0, w, expected)
        fresh = simulator.count(interval, np.stack([state.slots[0], placement[1]]), before=placement)
        for norm in (-1, 4):
            times = [
                mean_pass_time(s, 0, 0, interval.n_passes, simulator.topology, costs, norm) for s in (state, fresh)
            ]
            assert times[0] == times[1]
        assert migration_time(state, 0, costs) == migration_time(fresh, 0, costs)


def test_time_of_a_pass_by_hand() -> None:
    """Two nodes of one GPU each. Rank 0 has three tokens for expert 0 (at home) and one for expert 1 (far)."""
    model = ModelSpec("hand", 1, 2, 1, 1000, 10, kernel_start_us=5.0, kernel_expert_us=2.0, kernel_pair_us=0.5)
    cluster = ClusterSpec("hand", 2, 1, slots_per_gpu=1)
    experts = np.array([[[0], [0], [0], [1]]], np.int16)
    interval = Interval(experts, np.array([[0, 1, 2, 3]], np.int32), np.array([[0, 4, 4]], np.int32))
    placement = np.array([[[0], [1]]], np.int16)
    simulator = ServingSimulator(model, cluster, "sglang-prefill")
    served = simulator.evaluate(interval, placement)
    costs = simulator.costs(4)
    compute = 5.0 + 2.0 + 0.5 * 3
    exchange = costs.dispatch_inter_us + costs.combine_inter_us
    assert served.time_us[0] == pytest.approx(costs.dispatch_us + costs.combine_us + compute + exchange)
    # All-gather moves all tokens, wherever the experts are.
    gathered = ServingSimulator(model, cluster, "vllm")
    swapped = np.array([[[1], [0]]], np.int16)
    times = [gathered.evaluate(interval, p) for p in (placement, swapped)]
    np.testing.assert_array_equal(times[0].pass_us[..., 0], times[1].pass_us[..., 0])


def test_the_slowest_gpu_of_each_pass_counts() -> None:
    """Two passes whose busiest GPUs differ: the mean of the maxima, not the maximum of the means."""
    model = ModelSpec("hand", 1, 2, 1, 10, 10, kernel_start_us=1.0, kernel_expert_us=1.0, kernel_pair_us=1.0)
    experts = np.array([[[0]] * 8 + [[1]] * 8], np.int16)
    rows = np.array([np.arange(8), np.arange(8, 16)], np.int32)
    simulator = ServingSimulator(model, ClusterSpec("hand", 1, 2, slots_per_gpu=1), "vllm")
    served = simulator.evaluate(Interval.even(experts, rows, 2), np.array([[[0], [1]]], np.int16))
    np.testing.assert_array_equal(served.pass_us[0, :, 1], [10.0, 10.0])


# Streams


def made_trace(n_sequences: int = 60, seed: int = 0) -> TokenTrace:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 400, n_sequences)
    experts = np.stack([rng.permutation(8)[:2] for _ in range(lengths.sum())])[:, None].astype(np.int16)
    domains = np.array([f"d{i % 3}" for i in range(n_sequences)])
    return TokenTrace(experts, n_experts=8, seq_lens=lengths, domains=domains, name="made")


@pytest.mark.parametrize("profile", ["sglang-decode", "sglang-prefill"])
@pytest.mark.parametrize("schedule", ["stationary", "drift", "switch", "replay"])
def test_no_token_is_served_twice_and_the_promised_intervals_can_be_drawn(profile: str, schedule: str) -> None:
    trace = made_trace()
    for seed in range(3):
        stream = IntervalStream(trace, 4, profile, tokens_per_rank=24, schedule=schedule, seed=seed)
        assert stream.capacity >= 10
        served = np.concatenate([interval.rows.ravel() for interval in stream.take(stream.capacity)])
        assert len(np.unique(served)) == len(served)


@pytest.mark.parametrize("profile", ["sglang-decode", "sglang-prefill"])
def test_a_stream_depends_only_on_its_seed(profile: str) -> None:
    trace = made_trace()
    one, same, other = (
        np.stack([interval.rows for interval in IntervalStream(trace, 4, profile, seed=seed).take(5)])
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_decode_gives_the_next_token_of_each_sequence_to_each_pass() -> None:
    interval = next(IntervalStream(made_trace(), 4, "sglang-decode", sampled_passes=5))
    for earlier, later in pairwise(interval.rows):
        np.testing.assert_array_equal(later, earlier + 1)


def test_prefill_gives_each_rank_contiguous_chunks() -> None:
    trace = made_trace()
    starts = set(trace.seq_starts.tolist())
    interval = next(IntervalStream(trace, 4, "sglang-prefill", tokens_per_rank=64))
    for rows, ranks in zip(interval.rows, interval.rank_start, strict=True):
        for first, last in pairwise(ranks):
            breaks = np.flatnonzero(np.diff(rows[first:last]) != 1)
            # A chunk begins where a sequence begins, or where an earlier chunk of it ended.
            assert len(breaks) <= 8
            assert all(int(row) in starts or (row - trace.seq_starts[trace.seq_starts <= row].max()) % 64 == 0
                       for row in rows[first:last][breaks + 1])  # fmt: skip


def test_ranks_are_balanced_unless_asked_otherwise() -> None:
    even = next(IntervalStream(made_trace(), 4, tokens_per_rank=10))
    np.testing.assert_array_equal(np.diff(even.rank_start), 10)
    uneven = next(IntervalStream(made_trace(), 4, tokens_per_rank=10, rank_imbalance=1.0))
    assert np.diff(uneven.rank_start).max() > 10
    assert (uneven.rank_start[:, -1] == 40).all()


def test_drift_follows_the_mixture() -> None:
    """With a fixed mixture (rate 0) the shares of the domains are the softmax of the log weights."""
    trace = made_trace(600)
    stream = IntervalStream(trace, 4, "sglang-decode", tokens_per_rank=512, schedule="drift", rate=0.0, seed=5)
    weights = np.exp(stream.state.logits[0])
    domain = np.repeat(np.arange(600) % 3, trace.seq_lens)
    found = np.bincount(domain[next(stream).rows[0]], minlength=3) / 2048
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.04)


def test_too_short_traces_say_what_would_fit() -> None:
    trace = made_trace(3)
    with pytest.raises(ValueError, match=r"made: \d+ tokens fit the decode phase, but an interval needs 8192"):
        IntervalStream(trace, 16, tokens_per_rank=128)
    stream = IntervalStream(trace, 2, tokens_per_rank=8)
    stream.take(stream.capacity)
    with pytest.raises(ValueError, match=f"used up after {stream.capacity} intervals"):
        stream.take(2)
    IntervalStream(trace, 16, tokens_per_rank=128, allow_reuse=True).take(3)


def test_profiles_are_found_by_name() -> None:
    assert get_profile("vllm").transport == "allgather"
    assert get_profile(PROFILES["sglang-decode"]).dispatch == "rank-nearest"
    with pytest.raises(ValueError, match="unknown profile 'sglang'; the profiles are: sglang-prefill"):
        get_profile("sglang")
