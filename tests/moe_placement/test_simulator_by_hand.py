"""The simulator against numbers worked out by hand, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, Simulator
from clustergym.moe_placement.kernels.state import Costs
from clustergym.moe_placement.profiles import TRANSPORTS, EngineProfile
from instances import Costly, made_profile

# Known numbers

# GPUs 0, 1 on node 0 and 2, 3 on node 1. A dispatched copy has 2000 B, a combined one 4000 B: 0.02 and 0.04 µs inside a
# node (100 GB/s), 0.2 and 0.4 µs between nodes (10 GB/s). Links add 1 + 2 = 3 µs to the start of each exchange.
# Kernel: 10 + 5·experts + 1·pairs.
HAND_MODEL = ModelSpec("hand", 2, 4, 2, 1000, 10, dispatch_bytes=2, combine_bytes=4,
    kernel_start_us=10, kernel_expert_us=5, kernel_pair_us=1,
)  # fmt: skip
HAND_CLUSTER = ClusterSpec("hand", 2, 2, 2, intra_gb_s=100, inter_gb_s=10, intra_latency_us=1, inter_latency_us=2)
HAND_PLACEMENT = np.array([[[0, -1], [1, 3], [2, -1], [3, -1]]] * 2, np.int16)
# Tokens 0 and 1 are of rank 0, token 2 of rank 1, token 3 of rank 3.
HAND_INTERVAL = Interval(
    np.array([[[0, 1], [2, 3], [2, 3], [0, 2]], [[2, 0]] * 4], np.int16),
    np.arange(4, dtype=np.int32)[None],
    np.array([[0, 2, 3, 3, 4]], np.int32),
)
# Layer 0. Experts run: t0 on {0, 1}; t1 on 2 and, because GPU 1 is on its node, on 1; t2 on 2 and 1; t3 on 0 and 2.
# Kernels: GPU 0 10+5+2, GPU 1 10+10+3 = 23, GPU 2 10+5+3.
# dedup: t0 0→1; t1 0→1, 0⇒2; t2 1⇒3 (its rank on node 1), 3→2; t3 3→2, 3⇒1, 1→0.
#   inside: GPU 0 sends 2; between: 1 at most. dispatch 3 + 2·0.02 + 0.2, combine 3 + 2·0.04 + 0.4.
# per-expert: t0 0→1; t1 0⇒2, 0→1; t2 1⇒2; t3 3⇒0, 3→2. inside 2; between: GPU 2 gets 2. 3 + 0.04 + 0.4, 3 + 0.08 + 0.8.
# allgather: each node gets the two tokens of the other: 3 + 2·0.2, 3 + 2·0.4.
# Layer 1, all tokens on GPUs 2 and 0. Kernels 10+5+4 = 19.
# dedup: t0, t1 0⇒2; t2 1→0, 1⇒3, 3→2; t3 3→2, 3⇒1, 1→0. inside 2, between 2: 3 + 0.04 + 0.4, 3 + 0.08 + 0.8.
# per-expert: t0, t1 0⇒2; t2 1→0, 1⇒2; t3 3→2, 3⇒0. inside 1, between: GPU 2 gets 3: 3 + 0.02 + 0.6, 3 + 0.04 + 1.2.
HAND_TIMES = {
    "dedup": [(3.24, 23, 3.48), (3.44, 19, 3.88)],
    "per-expert": [(3.44, 23, 3.88), (3.62, 19, 4.24)],
    "allgather": [(3.4, 23, 3.8), (3.4, 19, 3.8)],
}
# Measured starts of dispatch and combine.
STARTS = {"dedup": (26.7, 39.5), "per-expert": (11.7, 11.4), "allgather": (12.2, 11.0)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hand_worked_example(transport: str) -> None:
    # Before, expert 3 was only on GPU 3: GPU 1 gets 3·1000·10·2 B = 60 kB over 10 GB/s = 6 µs, in 3 passes.
    before = HAND_PLACEMENT.copy()
    before[:, 1, 1] = -1
    simulator = Simulator(HAND_MODEL, HAND_CLUSTER, made_profile(transport=transport), passes_per_interval=3)
    served = simulator.evaluate(HAND_INTERVAL, HAND_PLACEMENT, before)
    out, back = STARTS[transport]
    known = np.array(HAND_TIMES[transport]) + [out, 0, back]
    np.testing.assert_allclose(served.pass_us[:, 0], known, rtol=1e-12)
    np.testing.assert_allclose(served.time_us, known.sum(1), rtol=1e-12)
    np.testing.assert_allclose(served.migration_us, 2.0, rtol=1e-12)
    assert served.pairs[:, 0].tolist() == [[2, 3, 3, 0], [4, 0, 4, 0]]
    np.testing.assert_allclose(served.balancedness, [2 / 3, 0.5])
    np.testing.assert_allclose(served.gpus_per_token, 2.0)
    # From GPU 0 on the same node instead: ten times as fast.
    near = before.copy()
    near[:, 0, 1] = 3
    np.testing.assert_allclose(simulator.evaluate(HAND_INTERVAL, HAND_PLACEMENT, near).migration_us, 0.2, rtol=1e-12)


def test_the_slowest_gpu_of_each_pass_counts() -> None:
    """Two passes whose busiest GPUs differ: the mean of the maxima, not the maximum of the means."""
    model = ModelSpec("hand", 1, 2, 1, 10, 10, kernel_start_us=1.0, kernel_expert_us=1.0, kernel_pair_us=1.0)
    experts = np.array([[[0]] * 8 + [[1]] * 8], np.int16)
    rows = np.array([np.arange(8), np.arange(8, 16)], np.int32)
    simulator = Simulator(model, ClusterSpec("hand", 1, 2, slots_per_gpu=1), "vllm")
    served = simulator.evaluate(Interval.even(experts, rows, 2), np.array([[[0], [1]]], np.int16))
    np.testing.assert_array_equal(served.pass_us[0, :, 1], [10.0, 10.0])
    np.testing.assert_array_equal(served.pairs[0], [[8, 0], [0, 8]])
    np.testing.assert_allclose(served.balancedness, 0.5)


def test_migration_in_the_background_by_hand() -> None:
    """All 8 tokens use expert 0. With one replica a pass takes 23.44 + 10 + 8 µs, with two 23.44 + 10 + 4.

    All-gather: (12.2 + 4·0.02) + (11 + 4·0.04) = 23.44. The transfer takes as long as two of four old passes.
    """
    before_us, after_us = 41.44, 37.44
    model = ModelSpec("hand", 1, 2, 1, 1000, 10, weight_bytes=2 * before_us * 100e3 / (3 * 1000 * 10),
        dispatch_bytes=2, combine_bytes=4, kernel_start_us=10, kernel_pair_us=1,
    )  # fmt: skip
    cluster = ClusterSpec("hand", 1, 2, 2, intra_gb_s=100)
    interval = Interval.even(np.zeros((1, 8, 1), np.int16), np.arange(8, dtype=np.int32)[None], 2)
    before, after = np.array([[[[0, -1], [1, -1]]], [[[0, -1], [1, 0]]]], np.int16)

    def total(passes: int, **options: float | str) -> float:
        simulator = Simulator(model, cluster, "vllm", passes, **options)
        assert simulator.evaluate(interval, before).total_us[0] == pytest.approx(before_us, rel=1e-12)
        served = simulator.evaluate(interval, after, before)
        assert served.time_us[0] == pytest.approx(after_us, rel=1e-12)
        return float(served.total_us[0])

    transfer_us = 2 * before_us / 4
    assert total(4) == pytest.approx(after_us + transfer_us, rel=1e-12)
    background = {"migration": "async", "background_share": 0.3}
    assert total(4, **background) == pytest.approx((before_us + after_us) / 2 + 0.3 * transfer_us, rel=1e-12)
    # The transfer takes longer than the interval: the old placement serves all of it.
    assert total(1, **background) == pytest.approx(before_us + 0.3 * 2 * before_us, rel=1e-12)


def test_floor_blocks_and_tokens_of_the_kernel_by_hand() -> None:
    """GPU 0 has 5 and 4 tokens, GPU 1 has one: blocks of 4 make 2 + 1 and 1."""
    experts = np.array([[[0]] * 5 + [[1]] * 4 + [[2]]], np.int16)
    interval = Interval.even(experts, np.arange(10, dtype=np.int32)[None], 2)
    model, cluster = ModelSpec("hand", 1, 3, 1, 10, 10), ClusterSpec("hand", 1, 2, 2)
    placement = np.array([[[0, 1], [2, -1]]], np.int16)
    one = 0.7 * 9 + 2 * 2.0 + 3 * 1.3 + 9 * 0.11
    times = [
        Costly(model, cluster, made_profile(transport=transport)).evaluate(interval, placement).pass_us[0, 0, 1]
        for transport in ("dedup", "allgather")
    ]
    assert times == [40.0, 40.0]
    assert 3 + one < 40

    class Floorless(Costly):
        def costs(self, n_tokens: int) -> Costs:
            return super().costs(n_tokens)._replace(kernel_floor_us=0.0)

    dedup, gathered = (
        Floorless(model, cluster, made_profile(transport=transport)).evaluate(interval, placement).pass_us[0, 0, 1]
        for transport in ("dedup", "allgather")
    )
    assert dedup == pytest.approx(3 + one)
    # All ten tokens reach every GPU.
    assert gathered == pytest.approx(3 + one + 0.7)


# Mixed passes


def test_a_mixed_pass_costs_what_its_average_pass_costs() -> None:
    """Two GPUs, one expert each, all tokens of both ranks use expert 0: 400 tokens stand for passes of 20."""
    model = ModelSpec("made", 1, 2, 1, 100, 10, kernel_start_us=3.0, kernel_expert_us=5.0, kernel_pair_us=0.25)
    simulator = Simulator(model, ClusterSpec("made", 1, 2, 1, intra_gb_s=1.0), "sglang-decode")
    interval = Interval.even(np.zeros((1, 400, 1), np.int16), np.arange(400, dtype=np.int32).reshape(20, 20), 2)
    placement = np.array([[[0], [1]]], np.int16)
    mixed = interval.mixed(400)
    (small,), (large,) = (simulator.evaluate(i, placement).time_us for i in (interval, mixed))
    # Every pass has 20 pairs on GPU 0 and 10 copies from rank 1, so the average is each of them.
    assert large == pytest.approx(small)
    assert simulator.evaluate(mixed, placement).pass_us[0, 0, 1] == pytest.approx(3.0 + 5.0 + 0.25 * 20)


def test_a_mixed_pass_counts_half_a_block_per_expert() -> None:
    """With blocks, an expert's last one is half full on average."""
    simulator = Simulator("deepseek-v3", "h800-4x8", "sglang-prefill")
    interval = Interval.even(np.zeros((1, 4096, 8), np.int16), np.arange(4096, dtype=np.int32)[None], 32)
    costs, mixed = simulator.costs(4096), simulator.interval_costs(replace(interval, stands_for=2048))
    assert costs.block_us > 0
    assert mixed.block_us == 0
    assert mixed.expert_us == costs.expert_us + 0.5 * costs.block_us
    assert mixed.pair_us == pytest.approx(0.5 * (costs.pair_us + costs.block_us / costs.block_tokens))
    assert mixed.dispatch_inter_us == pytest.approx(0.5 * costs.dispatch_inter_us)


# Placements


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((1, 2, 0, 7), "layer 1, GPU 2 holds expert 7: ids are 0 … 3"),
        ((1, 2, 0, -2), "layer 1, GPU 2 holds expert -2: ids are 0 … 3"),
        ((1, 1, 0, 3), "layer 1, GPU 1 holds expert 3 twice"),
        ((0, 2, 0, -1), "layer 0: expert 2 is on no GPU"),
    ],
)
def test_check_names_rule_layer_and_gpu(change: tuple[int, int, int, int], message: str) -> None:
    simulator = Simulator(HAND_MODEL, HAND_CLUSTER)
    np.testing.assert_array_equal(simulator.check(HAND_PLACEMENT), HAND_PLACEMENT)
    broken = HAND_PLACEMENT.copy()
    layer, gpu, slot, expert = change
    broken[layer, gpu, slot] = expert
    with pytest.raises(ValueError, match=re.escape(message)):
        simulator.check(broken)
    for placements in ((broken, None), (HAND_PLACEMENT, broken)):
        with pytest.raises(ValueError, match=re.escape(message)):
            simulator.evaluate(HAND_INTERVAL, *placements)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (np.zeros((4, 2), np.int16), "shape (4, 2): expected (layers, 4 GPUs, 2 slots)"),
        (np.zeros((1, 4, 3), np.int16), "shape (1, 4, 3): expected (layers, 4 GPUs, 2 slots)"),
        (HAND_PLACEMENT.astype(float), "dtype float64: expected integers"),
    ],
)
def test_check_names_wrong_shapes_and_types(placement: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Simulator(HAND_MODEL, HAND_CLUSTER).check(placement)


def test_what_does_not_fit_together_is_refused() -> None:
    simulator = Simulator(HAND_MODEL, HAND_CLUSTER)
    with pytest.raises(ValueError, match="placement has 1 layers, but the interval has 2"):
        simulator.evaluate(HAND_INTERVAL, HAND_PLACEMENT[:1])
    fewer = Interval(HAND_INTERVAL.experts, HAND_INTERVAL.rows, np.array([[0, 2, 4]], np.int32))
    with pytest.raises(ValueError, match="the interval has 2 ranks, not 4 GPUs"):
        simulator.evaluate(fewer, HAND_PLACEMENT)
    wide = Interval(np.zeros((2, 4, 3), np.int16), HAND_INTERVAL.rows, HAND_INTERVAL.rank_start)
    with pytest.raises(ValueError, match="the interval is top-3, but model 'hand' is top-2"):
        simulator.evaluate(wide, HAND_PLACEMENT)


def test_static_placement_counts_through_the_experts() -> None:
    assert Simulator(HAND_MODEL, HAND_CLUSTER).static(2).tolist() == [[[0, 1], [2, 3], [0, 1], [2, 3]]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "fast"}, "unknown profile 'fast'; the profiles are: sglang-prefill, sglang-decode"),
        ({"passes_per_interval": 0}, "passes_per_interval is 0: expected at least 1"),
        ({"background_share": 1.5}, "background_share is 1.5: expected 0 … 1"),
        ({"migration": "lazy"}, "unknown migration 'lazy'; expected one of: blocking, async"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Simulator(HAND_MODEL, HAND_CLUSTER, **options)


@pytest.mark.parametrize(("field", "value"), [("phase", "train"), ("dispatch", "best"), ("transport", "fast")])
def test_profiles_are_checked(field: str, value: str) -> None:
    good = {"phase": "decode", "dispatch": "random", "transport": "dedup"}
    with pytest.raises(ValueError, match=f"unknown {field} '{value}'; expected one of: "):
        EngineProfile("made", "vllm", kernels=(), about="", **(good | {field: value}))
