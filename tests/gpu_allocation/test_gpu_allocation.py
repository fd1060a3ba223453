"""The allocation task: calibration, reward, and the simulator against a plain reference."""

from __future__ import annotations

import doctest
import itertools
import math
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.gpu_allocation import (
    AllocationBatch,
    AllocationConfig,
    compute_reward,
    encode_state,
    fitted,
    grant,
    inverse_transform,
    simulator,
    state,
    transform_action,
)
from clustergym.gpu_allocation.evaluation import play_rules
from clustergym.gpu_allocation.specs import APPS, solo_latency_ms
from gpu_reference import Node, corun_latency_ms


def test_examples_in_docstrings_hold() -> None:
    for name in ("history", "reward", "space", "specs"):
        result = doctest.testmod(import_module(f"clustergym.gpu_allocation.{name}"))
        assert result.attempted
        assert not result.failed


# Calibration


def test_solo_latency_equals_the_fitted_formula() -> None:
    """Expected values by hand from the constants: (k1·b² + k2·b + k3) / (r + k4) + k5."""
    expected = {
        ("resnet50", 16, 100): (0.0659 * 256 + 61.17 * 16 - 0.485) / 101.8 + 1.67,
        ("vgg19", 1, 50): (0.0728 + 163.4 + 44.9) / 51.09 + 0.746,
        ("ssd", 8, 25): (-0.0387 * 64 + 271.0 * 8 - 0.589) / 27.74 + 1.89,
        ("alexnet", 32, 10): (0.0157 * 1024 + 13.2 * 32 + 32.9) / 17.39 + 0.321,
    }
    for (app, batch, share), latency in expected.items():
        assert solo_latency_ms(APPS[app], batch, share) == pytest.approx(latency)
        compiled = simulator.solo_latency_ms(np.array(APPS[app]), float(batch), float(share))
        assert compiled == pytest.approx(latency)
    # A V100 serves about 1,400 ResNet-50 images per second at batch size 16.
    assert 16 / expected["resnet50", 16, 100] * 1000 == pytest.approx(1400, rel=0.03)


def simulated_latencies(pods: list[tuple[str, int]], share: float) -> list[float]:
    """Latencies of pods (application, batch size) at full speed on equal shares, from the compiled functions."""
    rows = np.zeros((len(pods), state.N_POD), np.float32)
    for row, (app, batch) in zip(rows, pods, strict=True):
        ask = np.zeros(state.N_ASK, np.float32)
        ask[state.ASK_APP], ask[state.ASK_BATCH] = list(APPS).index(app), batch
        ask[state.ASK_RATE], ask[state.ASK_SLO], ask[state.ASK_JITTER] = 1e9, 1e9, 1.0
        row[state.POD_CORES] = share
        simulator.characterise(row, ask, np.array(list(APPS.values())))
    simulator.measure(rows, len(pods))
    latencies: list[float] = rows[:, state.POD_LATENCY].tolist()
    return latencies


def test_slowdowns_of_pairs_match_the_measurements() -> None:
    """1,500 measured pairs: mean 1.097, 95th percentile 1.171, maximum 1.234, each latency ± 1.3 %."""
    kinds = list(itertools.product(APPS, (1, 2, 4, 8, 16, 32)))
    slowdowns = []
    for one, two in itertools.product(kinds, kinds):
        solo = solo_latency_ms(APPS[one[0]], one[1], 50)
        together = simulated_latencies([one, two], 50.0)[0]
        assert together == pytest.approx(corun_latency_ms([one[0], two[0]], [one[1], two[1]], [50, 50])[0], rel=1e-5)
        slowdowns.append(together / solo)
    assert np.mean(slowdowns) == pytest.approx(1.097, abs=0.001)
    noisy = np.outer(slowdowns, 1 + 0.013 * np.random.default_rng(0).standard_normal(20)).ravel()
    assert np.quantile(noisy, 0.95) == pytest.approx(1.171, abs=0.01)
    assert np.max(slowdowns) == pytest.approx(1.234, abs=0.02)
    assert min(slowdowns) >= 1.0


def test_power_above_the_cap_lowers_the_clock() -> None:
    """Three vgg19 at full speed draw more than 300 W: the clock falls by 1.025 MHz per watt."""
    solo = solo_latency_ms(APPS["vgg19"], 32, 33)
    rate = 32 / solo * 1000
    watts = 53.5 + 3 * (0.5367 * rate + 2.08)
    assert watts > 300
    l2 = 2 * (0.04522 * rate + 2.72)
    formula = (solo * (1 + 0.0020 * l2) + 29 * (0.00475 * 3 - 0.00902)) * 1530 / (1530 - 1.025 * (watts - 300))
    expected = solo * (1 + 2.41 * (formula / solo - 1))
    assert corun_latency_ms(["vgg19"] * 3, [32] * 3, [33] * 3)[0] == pytest.approx(expected)
    assert simulated_latencies([("vgg19", 32)] * 3, 33.0)[0] == pytest.approx(expected, rel=1e-5)


def test_normal_numbers_have_mean_0_deviation_1_and_limits() -> None:
    random = np.zeros(1, np.uint64)
    draws = np.array([simulator.normal(random, 0) for _ in range(20_000)])
    assert abs(draws.mean()) < 0.02
    assert draws.std() == pytest.approx(1, abs=0.02)
    assert np.abs(draws).max() < 3.47


# Reward


@pytest.mark.parametrize(
    ("arguments", "reward"),
    [
        ((50, 1000, 50, True, 1), 1.5),
        ((60, 3000, 55, True, 3), 1.4583),  # the state showed 2 pods: 60 % is at most 1.5 × 50 %
        ((60, 3000, 55, True, 4), 1.1583),
        ((75, 1000, 80, True, 3), 1.5),  # usage counts up to the allocation; exactly 1.5 fair shares: no monopoly
        ((75.1, 1000, 75.1, True, 3), 1.2),
        ((40, 1000, 10, False, 2), 0.125 - 0.5),
        ((9.9, 1000, 9.9, True, 1), 1.3),
        ((10, 1000, 0, False, 1), -0.5),
        ((0, 0, 0, False, 1), -0.7),
    ],
)
def test_rewards_calculated_by_hand(arguments: tuple[float, float, float, bool, int], reward: float) -> None:
    assert compute_reward(*arguments) == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((math.nan, 1000, 50, True, 1), "allocated_cores is nan"),
        ((101, 1000, 50, True, 1), "allocated_cores is 101: expected 0 … 100 %"),
        ((50, -1, 50, True, 1), "allocated_memory_mb is -1: expected a finite number from 0"),
        ((50, 1000, -3, True, 1), "actual_usage is -3"),
        ((50, 1000, 50, True, 0), "running_pods is 0: expected a whole number from 1"),
    ],
)
def test_invalid_feedback_raises(arguments: tuple[float, float, float, bool, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_reward(*arguments)


def test_state_and_action_of_the_example() -> None:
    assert encode_state(80, 4000, 0.45, 0.30, 2) == pytest.approx([0.8, 4000 / 32768, 0.45, 0.3, 0.2])
    cores, memory = transform_action([0.56, 0.08])
    assert (cores, memory) == (pytest.approx(60.4), pytest.approx(3092.48))
    assert grant([0.56, 0.08], 80, 4000) == (60.0, 3092.0)
    assert transform_action([-3.0, 7.0]) == (10.0, 32768.0)
    assert inverse_transform(*transform_action([0.25, 0.75])) == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode_state(5, 4000, 0, 0, 0), "requested cores are 5 %: expected 10 … 100"),
        (lambda: encode_state(50, -4, 0, 0, 0), "requested memory is -4 MB: expected 512 … 32768"),
        (lambda: encode_state(50, 4000, math.nan, 0, 0), "gpu_util is nan"),
        (lambda: encode_state(50, 4000, 0, 0, -1), "running_pods is -1"),
        (lambda: transform_action([math.nan, 0.5]), "expected two finite numbers"),
        (lambda: transform_action([0.5]), "expected two finite numbers"),
    ],
)
def test_invalid_requests_raise(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


# The simulator and the plain reference


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"load": 6.0, "owners": 9},
        {"unit_percent": 0.0, "pod_spread": 0.3},
        {"unit_percent": 10.0, "node_spread": 3.0, "owner_spread": 2.0},
        {"reward": "seed", "idle_share": 0.0},
    ],
    ids=["default", "crowded", "any-share", "coarse", "seed"],
)
def test_simulator_equals_the_plain_reference(options: dict[str, float]) -> None:
    """Every decision of eight streams with random actions, which cause misses, waste and OOM kills."""
    config = AllocationConfig(arrivals=96, **options)  # type: ignore[arg-type]
    streams, rng = 8, np.random.default_rng(3)
    batch = AllocationBatch(config, streams)
    batch.seed(np.arange(streams) * 7919 + 11)
    batch.reset()
    nodes = [Node(7919 * i + 11, config) for i in range(streams)]
    seen = {"oom": 0, "missed": 0, "shared": 0, "waited": 0}
    for _ in range(config.arrivals):
        for i, node in enumerate(nodes):
            assert batch.obs[i].tolist() == pytest.approx(node.observation(), abs=2e-5)
        actions = 0.6 * rng.random((streams, 2)).astype(np.float32)
        part = rng.choice([0.3, 0.6, 1.0], streams, p=[0.1, 0.8, 0.1])
        actions[:, 1] = part * batch.state.ask[:, state.ASK_MEMORY] / 32768
        batch.step(actions)
        for i, node in enumerate(nodes):
            expected, found = node.step(actions[i].tolist()), batch.outcome[i].tolist()
            assert found[state.OUTCOME_REWARD] == pytest.approx(expected.reward, abs=1e-4)
            assert found[state.OUTCOME_CORES] == pytest.approx(expected.cores, rel=1e-5)
            assert found[state.OUTCOME_MEMORY] == expected.memory
            assert found[state.OUTCOME_USAGE] == pytest.approx(expected.usage, rel=1e-4)
            assert (found[state.OUTCOME_MET] > 0.5, found[state.OUTCOME_OOM] > 0.5) == (expected.met, expected.oom)
            assert found[state.OUTCOME_PODS] == expected.pods
            assert found[state.OUTCOME_TIME] == pytest.approx(expected.time_s, rel=1e-5)
            assert found[state.OUTCOME_WAIT] == pytest.approx(expected.wait_s, rel=1e-4, abs=0.05)
            seen["oom"] += expected.oom
            seen["missed"] += not expected.met
            seen["shared"] += expected.pods > 2
            seen["waited"] += expected.wait_s > 0
    assert min(seen.values()) > 20, f"too few cases: {seen}"


def test_streams_of_pods_do_not_depend_on_actions() -> None:
    """Policies can be compared on the same pods."""
    asked = []
    for value in (0.0, 1.0):
        batch = AllocationBatch(AllocationConfig(arrivals=50), 4)
        batch.seed([1, 2, 3, 4])
        batch.reset()
        rows = []
        for _ in range(50):
            rows.append(batch.state.ask[:, : state.ASK_WAIT].copy())
            batch.step(np.full((4, 2), value))
        asked.append(np.stack(rows))
    assert np.array_equal(*asked)


def test_distribution_of_needs() -> None:
    """Needs, memory, idle pods, lives and classes have the fitted distributions, and few requests are too small."""
    batch = AllocationBatch(AllocationConfig(history=True), 4096)
    batch.reset()
    needs, memory = (batch.state.habits[:, :, column] for column in (state.HABIT_NEED, state.HABIT_MEMORY))
    assert needs.mean() == pytest.approx(fitted.NEED_LOGIT, abs=0.05)
    assert needs.std() == pytest.approx(fitted.NEED_OWNER_SPREAD, abs=0.05)
    assert memory.mean() == pytest.approx(fitted.MEMORY_LOGIT, abs=0.01)
    assert memory.std() == pytest.approx(fitted.MEMORY_OWNER_SPREAD, abs=0.01)
    asks = []
    for _ in range(10):
        batch.step(np.ones((4096, 2)))
        asks.append(batch.state.ask.copy())
    ask = np.concatenate(asks)
    idle, sensitive = ask[:, state.ASK_RATE] == 0, ask[:, state.ASK_SENSITIVE] > 0.5
    assert idle.mean() == pytest.approx(fitted.IDLE_SHARE, abs=0.01)
    assert sensitive.mean() == pytest.approx(759 / 3077, abs=0.02)
    for kind, median in zip((~sensitive, sensitive), fitted.MEDIAN_LIFE_S, strict=True):
        assert np.median(ask[kind, state.ASK_LIFE]) == pytest.approx(median, rel=0.1)
    share = ask[:, state.ASK_NEED_MB] / ask[:, state.ASK_MEMORY]
    assert np.median(share) == pytest.approx(0.505, abs=0.01)
    assert (share > 0.75).mean() == pytest.approx(0.02, abs=0.01)
    need = ask[~idle, state.ASK_NEED] / ask[~idle, state.ASK_CORES]
    assert np.median(need) == pytest.approx(1 / (1 + math.exp(1.31)), abs=0.02)
    result = play_rules(batch, ["grant"])["grant"]
    assert result["qos"] > 0.99


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**62), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_allocations_fit_the_gpu_and_rewards_are_in_range(seed: int, actions: list[tuple[float, float]]) -> None:
    batch = AllocationBatch(AllocationConfig(history=True, load=8.0), 1)
    batch.seed([seed])
    batch.reset()
    for action in actions:
        obs, reward, _ = batch.step([action])
        n = int(batch.state.counters[0, state.COUNT_PODS])
        pods = batch.state.pods[0, :n]
        assert pods[:, state.POD_CORES].sum() <= 100 + 1e-3
        assert pods[:, state.POD_MEMORY].sum() <= 32768
        assert (obs >= 0).all()
        assert (obs <= 1).all()
        assert -1.5 <= float(reward[0]) <= 1.5
