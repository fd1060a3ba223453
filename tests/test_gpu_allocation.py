"""The allocation task: calibration, reward, simulator and plain reference, environments, rules, errors, picture."""

from __future__ import annotations

import doctest
import itertools
import json
import math
import shutil
import subprocess
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test

from clustergym import gpu_allocation_v0
from clustergym.cli import main
from clustergym.common.canvas import ORANGE, pygame
from clustergym.common.compiling import private_api_available, source_fingerprint
from clustergym.gpu_allocation import (
    AllocationBatch,
    AllocationConfig,
    NodeMix,
    Workload,
    compute_reward,
    dynamics,
    edge_mixes,
    encode_state,
    fitted,
    grant,
    history,
    inverse_transform,
    read_openb,
    reward_terms,
    state,
    synthetic_workload,
    transform_action,
)
from clustergym.gpu_allocation.baselines import RULES, VPA, Proportional
from clustergym.gpu_allocation.environment import GPUAllocationEnv
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, gap_closed, play, play_rules
from clustergym.gpu_allocation.space import N_STATE
from clustergym.gpu_allocation.specs import APPS, solo_latency_ms
from clustergym.gpu_allocation.viewer import (
    OWNERS,
    PodShare,
    Recorder,
    Snapshot,
    chart_area,
    columns,
    dark,
    draw,
    open_window,
)
from gpu_reference import Node, corun_latency_ms

IDS = ("GPUAllocation-v0", "GPUAllocationHistory-v0")
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"


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
        compiled = dynamics.solo_latency_ms(np.array(APPS[app]), float(batch), float(share))
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
        dynamics.characterise(row, ask, np.array(list(APPS.values())))
    dynamics.measure(rows, len(pods))
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
    draws = np.array([dynamics.normal(random, 0) for _ in range(20_000)])
    assert abs(draws.mean()) < 0.02
    assert draws.std() == pytest.approx(1, abs=0.02)
    assert np.abs(draws).max() < 3.47


# Reward


def test_reward_of_the_example_in_the_docstring() -> None:
    """60 % given, 55 % used, QoS met. With three pods, 60 % is more than 1.5 × 33.3 %: a monopoly."""
    terms = reward_terms(60, 3000, 55, True, 3)
    assert terms.efficiency == pytest.approx(0.4583, abs=1e-4)
    assert (terms.qos, terms.monopoly, terms.under_allocation) == (1.0, -0.3, 0.0)
    assert compute_reward(60, 3000, 55, True, 3) == pytest.approx(1.1583, abs=1e-4)
    assert compute_reward(60, 3000, 55, True, 2) == pytest.approx(1.4583, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "reward"),
    [
        ((50, 1000, 50, True, 1), 1.5),
        ((50, 1000, 80, True, 3), 1.5),  # usage counts up to the allocation; exactly 1.5 fair shares: no monopoly
        ((50.1, 1000, 50.1, True, 3), 1.2),
        ((40, 1000, 10, False, 2), 0.125 - 0.5),
        ((9.9, 1000, 9.9, True, 1), 1.3),
        ((10, 1000, 0, False, 1), -0.5),
        ((0, 0, 0, False, 1), -0.7),
    ],
)
def test_rewards_calculated_by_hand(arguments: tuple[float, float, float, bool, int], reward: float) -> None:
    assert compute_reward(*arguments) == pytest.approx(reward)


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
        actions[:, 1] = part * batch.state["ask"].numpy()[:, state.ASK_MEMORY] / 32768
        batch.step(actions, autoreset=False)
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
            rows.append(batch.state["ask"][:, : state.ASK_WAIT].clone())
            batch.step(np.full((4, 2), value), autoreset=False)
        asked.append(torch.stack(rows))
    assert torch.equal(asked[0], asked[1])


def test_distribution_of_needs() -> None:
    """Needs, memory, idle pods, lives and classes have the fitted distributions, and few requests are too small."""
    batch = AllocationBatch(AllocationConfig(history=True), 4096)
    batch.reset()
    needs, memory = (batch.state["habits"][:, :, column] for column in (state.HABIT_NEED, state.HABIT_MEMORY))
    assert float(needs.mean()) == pytest.approx(fitted.NEED_LOGIT, abs=0.05)
    assert float(needs.std()) == pytest.approx(fitted.NEED_OWNER_SPREAD, abs=0.05)
    assert float(memory.mean()) == pytest.approx(fitted.MEMORY_LOGIT, abs=0.01)
    assert float(memory.std()) == pytest.approx(fitted.MEMORY_OWNER_SPREAD, abs=0.01)
    asks = []
    for _ in range(10):
        batch.step(np.ones((4096, 2)))
        asks.append(batch.state["ask"].clone())
    ask = torch.cat(asks)
    idle, sensitive = ask[:, state.ASK_RATE] == 0, ask[:, state.ASK_SENSITIVE] > 0.5
    assert float(idle.float().mean()) == pytest.approx(fitted.IDLE_SHARE, abs=0.01)
    assert float(sensitive.float().mean()) == pytest.approx(759 / 3077, abs=0.02)
    for kind, median in zip((~sensitive, sensitive), fitted.MEDIAN_LIFE_S, strict=True):
        assert float(ask[kind, state.ASK_LIFE].median()) == pytest.approx(median, rel=0.1)
    share = ask[:, state.ASK_NEED_MB] / ask[:, state.ASK_MEMORY]
    assert float(share.median()) == pytest.approx(0.505, abs=0.01)
    assert float((share > 0.75).float().mean()) == pytest.approx(0.02, abs=0.01)
    need = ask[~idle, state.ASK_NEED] / ask[~idle, state.ASK_CORES]
    assert float(need.median()) == pytest.approx(1 / (1 + math.exp(1.31)), abs=0.02)
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
        n = int(batch.state["counters"][0, state.COUNT_PODS])
        pods = batch.state["pods"][0, :n]
        assert pods[:, state.POD_CORES].sum() <= 100 + 1e-3
        assert pods[:, state.POD_MEMORY].sum() <= 32768
        assert (obs >= 0).all()
        assert (obs <= 1).all()
        assert -1.5 <= float(reward[0]) <= 1.5


# Environments


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_checker_raises_no_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(name, render_mode="rgb_array").unwrapped)


def test_pettingzoo_api_tests_pass() -> None:
    parallel_api_test(gpu_allocation_v0.parallel_env(n_nodes=3), num_cycles=300)
    api_test(gpu_allocation_v0.env(n_nodes=2), num_cycles=300)
    parallel_seed_test(gpu_allocation_v0.parallel_env)


@pytest.mark.parametrize("name", IDS)
def test_vector_environment_equals_single_environments(name: str) -> None:
    """Environment i with seed s + i, step by step over two episodes; B = 1 and B = 3."""
    rng = np.random.default_rng(0)
    for n in (1, 3):
        vector = gymnasium.make_vec(name, num_envs=n, vectorization_mode="vector_entry_point", arrivals=20)
        singles = [gymnasium.make(name, arrivals=20) for _ in range(n)]
        obs, _ = vector.reset(seed=5)
        for i, single in enumerate(singles):
            assert np.array_equal(obs[i], single.reset(seed=5 + i)[0])
        for step in range(1, 45):
            actions = rng.random((n, 2)).astype(np.float32)
            obs, rewards, terminated, truncated, infos = vector.step(actions)
            assert not terminated.any()
            for i, single in enumerate(singles):
                one, reward, _, done, info = single.step(actions[i])
                assert rewards[i] == reward
                assert truncated[i] == done == (step % 20 == 0)
                if done:
                    assert np.array_equal(infos["final_obs"][i], one)
                    assert infos["final_info"]["mean_reward"][i] == info["mean_reward"]
                    assert infos["final_info"]["latency_ms"][i] == info["latency_ms"]
                    assert not infos["_latency_ms"][i]
                    one, _ = single.reset()
                else:
                    for key, value in info.items():
                        assert infos[key][i] == value, key
                        assert infos[f"_{key}"][i]
                assert np.array_equal(obs[i], one)


def test_threads_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (10**9, 1):
        monkeypatch.setattr("clustergym.gpu_allocation.batch.MIN_ENVS_FOR_THREADS", limit)
        batch = AllocationBatch(AllocationConfig(history=True), 37)
        batch.seed(np.arange(37))
        batch.reset()
        for _ in range(5):
            batch.step(batch.oracle())
        results.append(batch.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_returned_arrays_are_not_modified_later() -> None:
    vector = gymnasium.make_vec(IDS[1], num_envs=2, vectorization_mode="vector_entry_point")
    kept = [vector.reset(seed=1)[0]]
    copies = [kept[0].copy()]
    for _ in range(3):
        obs, reward, _, _, infos = vector.step(np.full((2, 2), 0.5, np.float32))
        kept += [obs, reward, infos["efficiency"]]
        copies += [each.copy() for each in kept[-3:]]
    assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_info_has_every_reward_term() -> None:
    env = gymnasium.make("GPUAllocation-v0", arrivals=64)
    env.reset(seed=3)
    rng, done = np.random.default_rng(1), False
    rewards = []
    while not done:
        _, reward, _, done, info = env.step(rng.random(2).astype(np.float32))
        terms = [info[key] for key in ("efficiency", "qos", "monopoly", "under_allocation", "room")]
        assert reward == pytest.approx(sum(terms), abs=1e-6)
        again = compute_reward(
            info["allocated_cores"],
            info["allocated_memory_mb"],
            info["actual_usage"],
            info["qos_met"],
            info["running_pods"],
        )
        assert reward - info["room"] == pytest.approx(again, abs=1e-5)
        rewards.append(reward)
    assert info["mean_reward"] == pytest.approx(np.mean(rewards))


def test_the_room_term_is_the_waiting_time_of_the_next_pod() -> None:
    """room = −0.5 · wait / (wait + 440 s); with the reward "seed" it is missing, and everything else is the same."""
    env, seed = gymnasium.make("GPUAllocation-v0"), gymnasium.make("GPUAllocation-v0", reward="seed")
    env.reset(seed=5)
    seed.reset(seed=5)
    rng, room, waits = np.random.default_rng(1), 0.0, []
    for step in range(100):
        action = rng.random(2).astype(np.float32)
        _, reward, _, _, info = env.step(action)
        _, plain, _, _, plain_info = seed.step(action)
        if step:
            assert room == pytest.approx(-0.5 * info["wait_s"] / (info["wait_s"] + 440), abs=1e-6)
        room = info["room"]
        assert plain == pytest.approx(reward - room, abs=1e-6)
        assert plain_info == info | {"room": 0.0}
        waits.append(info["wait_s"])
    assert sum(wait > 0 for wait in waits) > 10


def test_memory_matters() -> None:
    """Too little memory is an OOM kill, too much keeps others out: enough is better than both, over whole episodes."""
    batch = AllocationBatch(AllocationConfig(), 256)
    rewards = []
    for part in (0.3, 1.0, None):

        def act(part: float | None = part) -> torch.Tensor:
            action = batch.oracle()
            if part is not None:
                action[:, 1] = (part * batch.state["ask"][:, state.ASK_MEMORY] - 512) / (32768 - 512)
            return action

        rewards.append(play(batch, act)["reward"])
    little, everything, enough = rewards
    assert little < everything - 0.5
    assert enough > everything + 0.01


def test_history_features_calculated_by_hand() -> None:
    """One owner: its next pod sees the history of all earlier pods."""
    batch = AllocationBatch(AllocationConfig(history=True, owners=1, arrivals=50), 1)
    batch.seed([4])
    obs = batch.reset()
    assert not obs[0, N_STATE:].any() or obs[0, N_STATE + history.FEATURE_SENSITIVE] == 1
    parts, shares, missed, memory = [], [], [], []
    for step in range(1, 13):
        asked = batch.state["ask"][0].tolist()
        batch.step([[0.02 * step, 1.0]])
        out = batch.outcome[0].tolist()
        shares.append(out[state.OUTCOME_CORES] / out[state.OUTCOME_REQUEST])
        load = asked[state.ASK_RATE] * out[state.OUTCOME_LATENCY] / asked[state.ASK_BATCH]
        late = out[state.OUTCOME_LATENCY] / asked[state.ASK_SLO]
        parts.append(min(max(load, late) * shares[-1], 1.0))
        missed.append(out[state.OUTCOME_MET] < 0.5)
        memory.append(asked[state.ASK_NEED_MB] / asked[state.ASK_MEMORY])
        # If the objective is met and latency is not the limit, the need is the usage.
        if load < 1 and late <= load:
            assert parts[-1] == pytest.approx(out[state.OUTCOME_USAGE] / out[state.OUTCOME_REQUEST], rel=1e-4)
        mean, largest, spread, misses, worst, best = parts[0], parts[0], 0.0, 0.0, 0.0, 1.0
        for n, (part, share, miss) in enumerate(zip(parts, shares, missed, strict=True), 1):
            rate = max(1 / n, 0.15)
            spread += rate * (abs(part - mean) - spread)
            mean += rate * (part - mean)
            misses += rate * (miss - misses)
            largest = max(part, 0.97 * largest)
            worst, best = 0.97 * worst, min(1.0, best / 0.97)
            worst, best = (max(worst, share), best) if miss else (worst, min(best, share))
        cores, requested_memory = float(obs[0, 0]), float(obs[0, 1])
        expected = {
            history.FEATURE_COUNT: step / (step + 4),
            history.FEATURE_MEAN: mean,
            history.FEATURE_SPREAD: spread,
            history.FEATURE_MISSED: misses,
            history.FEATURE_LAST_MISSED: float(missed[-1]),
            history.FEATURE_OOM: 0.0,
            history.FEATURE_SENSITIVE: batch.state["ask"][0, state.ASK_SENSITIVE].item(),
            history.FEATURE_MEAN_CORES: mean * cores,
            history.FEATURE_MAX_CORES: largest * cores,
            history.FEATURE_LAST_CORES: parts[-1] * cores,
            history.FEATURE_LAST_SHARE_CORES: shares[-1] * cores,
            history.FEATURE_WORST_SHARE_CORES: worst * cores,
            history.FEATURE_BEST_SHARE_CORES: best * cores,
            history.FEATURE_MAX_MEMORY: max(memory) * requested_memory,
        }
        assert sorted(expected) == list(range(history.N_FEATURES))
        for column, value in expected.items():
            assert obs[0, N_STATE + column] == pytest.approx(value, rel=1e-4, abs=1e-6), column
    assert any(missed)
    assert not all(missed)


def test_a_killed_pod_is_removed_and_in_the_history() -> None:
    batch = AllocationBatch(AllocationConfig(history=True, owners=1), 1)
    batch.seed([2])
    batch.reset()
    batch.step([[1.0, 0.0]])
    assert batch.outcome[0, state.OUTCOME_OOM] == 1
    assert batch.outcome[0, state.OUTCOME_USAGE] == 0
    assert batch.outcome[0, state.OUTCOME_REWARD] <= -0.5
    assert batch.obs[0, 4] == 0, "the pod is removed"
    assert batch.obs[0, N_STATE + history.FEATURE_OOM] == 1, "the next pod of the owner shows the kill"


def test_nodes_differ_and_do_not_depend_on_their_number() -> None:
    mixes = edge_mixes(5)
    assert mixes[:3] == edge_mixes(3)
    assert len({mix.over_ask for mix in mixes}) == 5
    batch = AllocationBatch.for_nodes(4, 256, AllocationConfig(history=True))
    batch.seed(np.arange(1024))
    batch.reset()
    habits = batch.state["habits"].view(4, 256, 6, state.N_HABIT)
    for i in range(4):
        usual = (habits[i, :, :, state.HABIT_APP] == i).float().mean()
        assert float(usual) == pytest.approx(0.7, abs=0.05)
        assert float(habits[i, :, :, state.HABIT_NEED].median()) == pytest.approx(mixes[i].over_ask, abs=0.15)


def test_a_restored_state_continues_bit_for_bit() -> None:
    batch = AllocationBatch(AllocationConfig(history=True, arrivals=10), 3)
    batch.seed([1, 2, 3])
    batch.reset()
    rng = np.random.default_rng(0)
    actions = rng.random((25, 3, 2)).astype(np.float32)
    for action in actions[:7]:
        batch.step(action)
    saved = batch.state_dict()
    other = AllocationBatch(AllocationConfig(history=True, arrivals=10), 3)
    other.load_state_dict(saved)
    for action in actions[7:]:
        a, b = batch.step(action), other.step(action)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match="saved environments have shape"):
        AllocationBatch(AllocationConfig(history=True), 4).load_state_dict(saved)


# Errors


def test_invalid_actions_raise() -> None:
    env = GPUAllocationEnv()
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"action of environment 0 is \[nan, 0.5\]: expected two finite numbers"):
        env.step(np.array([np.nan, 0.5], np.float32))
    with pytest.raises(ValueError, match=r"actions have shape \(1, 3\): expected \(1, 2\)"):
        env.step(np.zeros(3, np.float32))
    parallel = gpu_allocation_v0.parallel_env(n_nodes=2)
    parallel.reset(seed=1)
    with pytest.raises(ValueError, match="no action for 'node_1'"):
        parallel.step({"node_0": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": 0}, "arrivals is 0: expected 1"),
        ({"load": 0.0}, "load is 0.0: expected more than 0"),
        ({"owners": 65}, "owners is 65"),
        ({"unit_percent": -1.0}, "unit_percent is -1.0"),
        ({"pod_spread": math.nan}, "pod_spread is nan"),
        ({"idle_share": 1.5}, "idle_share is 1.5: expected 0 … 1"),
        ({"reward": "profit"}, "reward is 'profit': expected 'room' or 'seed'"),
        ({"render_mode": "ansi"}, "unknown render_mode 'ansi'"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPUAllocationEnv(**options)  # type: ignore[arg-type]


def test_unknown_options_raise_a_type_error() -> None:
    message = "unexpected keyword argument 'speed'; the environment takes: arrivals,"
    vector = {"num_envs": 2, "vectorization_mode": "vector_entry_point"}
    for make in (
        GPUAllocationEnv,
        partial(gymnasium.make, IDS[0]),
        partial(gymnasium.make_vec, IDS[0], **vector),
        gpu_allocation_v0.parallel_env,
    ):
        with pytest.raises(TypeError, match=message):
            make(speed=3)


def test_invalid_mixes_and_workloads_raise() -> None:
    with pytest.raises(ValueError, match="expected 4 weights"):
        NodeMix(0.0, (1.0, 2.0))
    with pytest.raises(ValueError, match="n_nodes is 0"):
        edge_mixes(0)
    with pytest.raises(ValueError, match=r"pod 1 asks for 5.0 % of the GPU: expected 10 … 100"):
        Workload(np.array([50.0, 5.0]), np.ones(2), np.zeros(2, bool))
    with pytest.raises(ValueError, match=r"pod 0 lives -1.0 s"):
        Workload(np.array([50.0]), np.array([-1.0]), np.zeros(1, bool))
    with pytest.raises(ValueError, match="mixes has 2 entries for 3 environments"):
        AllocationBatch(num_envs=3, mixes=edge_mixes(2))


def openb_file(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_read_openb(tmp_path: Path) -> None:
    rows = [
        "a,12000,16384,1,1000,,LS,Running,0,100,0",  # a whole GPU: skipped
        "b,6000,12288,1,460,,LS,Running,10,70,10",
        "c,6000,12288,0,0,,BE,Running,10,70,10",  # no GPU: skipped
        "d,6000,12288,1,50,,BE,Failed,0,30,1",  # raised to 10 %
        "e,6000,12288,1,810,,Burstable,Pending,5,5,",  # no lifetime: skipped
        "f,6000,12288,1,320,V100M16|V100M32,Guaranteed,Running,0,1e9,0",
    ]
    workload = read_openb(openb_file(tmp_path / "pods.csv", *rows))
    assert workload.cores.tolist() == [46.0, 10.0, 32.0]
    assert workload.life_s.tolist() == [60.0, 30.0, 1e9]
    assert workload.latency_sensitive.tolist() == [True, False, True]
    assert workload.jobs()[2, state.JOB_LIFE] == 4 * 3600, "lives are cut to four hours"
    env = gymnasium.make("GPUAllocation-v0", workload=tmp_path / "pods.csv")
    obs, _ = env.reset(seed=1)
    assert round(100 * float(obs[0])) in (46, 10, 32)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b,6000,12288,1,lots,,LS,Running,10,70,10", "line 3: gpu_milli is 'lots': expected a number"),
        ("b,6000,12288,1,1200,,LS,Running,10,70,10", "line 3: gpu_milli is 1200: expected 0 … 1000"),
        ("b,6000,12288,-1,460,,LS,Running,10,70,10", "line 3: num_gpu is -1: expected 0 or more"),
        ("b,6000,12288,1,460,,Best,Running,10,70,10", "line 3: qos is 'Best': expected LS, Guaranteed, BE, Burstable"),
        ("b,6000,12288,1,460,,LS,Running,70,10,10", "line 3: deletion_time 10 is before creation_time 70"),
        ("b,6000,12288,1", "line 3: gpu_milli is None: expected a number"),
        ("b,6000,12288,1,460,,LS,Running,,70,10", "line 3: creation_time is '': expected a number"),
        ("b,6000,12288,1,nan,,LS,Running,10,70,10", "line 3: gpu_milli is nan: expected 0 … 1000"),
    ],
)
def test_errors_in_openb_files_name_the_line(tmp_path: Path, row: str, message: str) -> None:
    path = openb_file(tmp_path / "pods.csv", "a,12000,16384,1,470,,LS,Running,0,100,0", row)
    with pytest.raises(ValueError, match=message):
        read_openb(path)


def test_openb_files_without_columns_or_pods_raise(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("name,gpu\na,1\n")
    with pytest.raises(ValueError, match="line 1: no column 'num_gpu'"):
        read_openb(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="no pod with a part of one GPU"):
        read_openb(openb_file(tmp_path / "y.csv", "a,12000,16384,1,1000,,LS,Running,0,100,0"))
    with pytest.raises(FileNotFoundError):
        AllocationBatch(AllocationConfig(workload=tmp_path / "none.csv"))


def test_distribution_of_the_synthetic_workload() -> None:
    workload = synthetic_workload()
    assert len(workload.cores) == 3077
    assert np.median(workload.cores) == 47.0
    assert workload.latency_sensitive.sum() == 759
    for kind in (False, True):
        life = workload.life_s[workload.latency_sensitive == kind]
        assert np.median(life) == pytest.approx(fitted.MEDIAN_LIFE_S[kind], rel=0.01)
        assert np.log(life).std() == pytest.approx(fitted.LIFE_SPREAD[kind], abs=0.01)
    jobs = workload.jobs()
    assert (np.diff(jobs[:, state.JOB_SENSITIVE]) >= 0).all(), "best-effort pods first"


# Rules


def test_no_action_has_a_higher_reward_than_the_oracle() -> None:
    """Tries every unit of cores in copies of the same state."""
    config = AllocationConfig(history=True, load=5.0, reward="seed")
    batch = AllocationBatch(config, 16)
    batch.seed(np.arange(16))
    batch.reset()
    for _ in range(12):
        batch.step(batch.oracle())
    saved, memory = batch.state_dict(), batch.oracle()[:, 1]
    best = torch.full((16,), -np.inf, dtype=torch.float64)
    for level in range(10, 101):
        batch.load_state_dict(saved)
        action = torch.stack([torch.full((16,), (level - 10) / 90), torch.ones(16)], 1)
        best = torch.maximum(best, batch.step(action)[1].clone())
    batch.load_state_dict(saved)
    assert torch.allclose(batch.step(batch.oracle())[1], best, atol=1e-6)
    assert (memory < 1).all()


def test_vpa_recommends_the_percentile_plus_margin() -> None:
    """Ten samples, 5 % … 50 %: P90 is the upper end of the bucket of 45 %, plus 15 %. OOM kills raise the memory."""
    batch = AllocationBatch(AllocationConfig(history=True, owners=2), 1)
    batch.reset()
    rule = VPA(batch)
    batch.state["ask"][0, state.ASK_CORES], batch.state["ask"][0, state.ASK_MEMORY] = 100.0, 32768.0
    batch.state["ask"][0, state.ASK_OWNER] = 1
    assert rule.decide()[0][0] == 100, "the request of a new owner is granted"
    out = batch.outcome[0]
    out[state.OUTCOME_OWNER], out[state.OUTCOME_USED_MB] = 1, 1000.0
    for usage in range(5, 51, 5):
        out[state.OUTCOME_USAGE] = usage
        rule.learn()
    cores, memory = rule.decide()
    assert 1.15 * 45 <= cores[0] <= 1.15 * 45 * 1.05
    assert 1150 <= memory[0] <= 1150 * 1.05 + 1
    batch.state["ask"][0, state.ASK_OWNER] = 0
    assert rule.decide()[0][0] == 100, "each owner has a histogram"
    killed = VPA(batch)
    out[state.OUTCOME_OWNER], out[state.OUTCOME_OOM] = 0, 1.0
    killed.learn()
    assert 1.15 * 1200 <= killed.decide()[1][0] <= 1.15 * 1200 * 1.05 + 1
    assert killed.decide()[0][0] == 100, "a killed pod adds no sample of cores"


def test_vpa_weights_halve_per_day() -> None:
    batch = AllocationBatch(AllocationConfig(), 1)
    batch.reset()
    rule, out = VPA(batch), batch.outcome[0]
    out[state.OUTCOME_USAGE], out[state.OUTCOME_TIME] = 80.0, 0.0
    rule.learn()
    out[state.OUTCOME_USAGE], out[state.OUTCOME_TIME] = 20.0, 4 * 24 * 3600.0  # four half-lives: 16 times the weight
    rule.learn()
    batch.state["ask"][0, state.ASK_CORES] = 100.0
    assert 1.15 * 20 <= rule.decide()[0][0] <= 1.15 * 20 * 1.05


def test_proportional_controller_and_its_dead_band() -> None:
    batch = AllocationBatch(AllocationConfig(), 1)
    batch.reset()
    rule, out = Proportional(batch), batch.outcome[0]
    batch.state["ask"][0, state.ASK_CORES] = 100.0
    # 42 of 50 are 84 %, within 10 % of 90 %: no change.
    for usage, met, expected in ((42.0, 1.0, 50.0), (28.0, 1.0, 28 / 0.9), (50.0, 0.0, 50 / 0.9)):
        out[state.OUTCOME_CORES], out[state.OUTCOME_USAGE], out[state.OUTCOME_MET] = 50.0, usage, met
        rule.learn()
        assert rule.decide()[0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", IDS)
def test_ranking_of_the_rules(name: str) -> None:
    """The oracle is best, grant rarely misses, and rules that measure usage are more efficient."""
    batch = AllocationBatch(AllocationConfig(history=name == IDS[1]), 64)
    results = play_rules(batch)
    assert set(results) == set(RULES)
    assert max(results, key=lambda rule: results[rule]["reward"]) == "oracle"
    assert results["grant"]["qos"] > 0.99
    assert results["cut-0.8"]["efficiency"] > results["grant"]["efficiency"] + 0.03
    assert results["vpa-fraction"]["efficiency"] > results["cut-0.8"]["efficiency"]
    assert max(gap_closed(results[rule]["reward"], results) for rule in RULES if rule != "oracle") == 0
    assert results["oracle"]["wait_s"] < results["vpa-fraction"]["wait_s"] < results["grant"]["wait_s"]
    assert gap_closed(results["oracle"]["reward"], results) == 1
    again = play(batch, RULES["grant"](batch).act)
    assert again == results["grant"], "all rules see the same streams"


# Compiled code


def test_a_change_in_a_formula_renews_all_compiled_code(tmp_path: Path) -> None:
    """numba only notices changes in the file of a function itself, not in the functions that it calls."""
    stamp = source_fingerprint(dynamics.SOURCES)
    functions = [f for f in vars(dynamics).values() if hasattr(f, "py_func")]
    assert len(functions) > 20
    for function in functions:
        assert function._cache._cache_file._source_stamp == stamp, function
        assert Path(function.py_func.__code__.co_filename) in dynamics.SOURCES, function
    folder = Path(shutil.copytree(Path(dynamics.__file__).parent, tmp_path / "copy"))
    copies = [folder / path.name for path in dynamics.SOURCES]
    assert source_fingerprint(copies) == stamp
    for copy in copies:
        before = source_fingerprint(copies)
        copy.write_text(copy.read_text() + "# changed\n")
        assert source_fingerprint(copies) != before


def test_this_numba_has_the_private_functions() -> None:
    assert private_api_available()
    assert dynamics.step_range.targetoptions["_nrt"] is False


def test_without_the_private_functions_results_are_the_same() -> None:
    code = """
import sys, numpy as np
from clustergym.common import compiling
compiling.private_api_available = lambda: sys.argv[1] == "1"
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig, dynamics
assert ("_nrt" in dynamics.step_range.targetoptions) == (sys.argv[1] == "1")
batch = AllocationBatch(AllocationConfig(history=True), 4)
batch.reset()
for _ in range(20):
    batch.step(batch.oracle())
print(batch.obs.sum().item().hex(), batch.state["sums"].sum().item().hex())
"""
    found = [
        subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True, check=True).stdout
        for flag in ("0", "1")
    ]
    assert found[0] == found[1]


# Command line


def test_eval_writes_a_table_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    command = ["eval", "--task", "gpu-allocation", "--env-id", IDS[0], "--streams", "16", "--seed", "3"]
    assert main([*command, "--json", str(out), "--plot", str(tmp_path / "bars.png")]) == 0
    document = json.loads(out.read_text())
    assert {row["policy"] for row in document["policies"]} == set(RULES)
    for row in document["policies"]:
        assert {"reward", "qos", "efficiency", "oom", "monopoly", "wait_s", "reward_ci95", "gap_closed"} <= row.keys()
    assert (document["env_id"], document["streams"], document["seed"]) == (IDS[0], 16, 3)
    assert (tmp_path / "bars.png").stat().st_size > 5000
    assert "oracle" in capsys.readouterr().out
    direct = play_rules(AllocationBatch(num_envs=16), ["grant"], HELD_OUT_SEED + 3 * 2**20)["grant"]
    assert next(r for r in document["policies"] if r["policy"] == "grant")["reward"] == direct["reward"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env-id", "CartPole-v1"], "unknown --env-id 'CartPole-v1'"),
        (["--policy", "luck"], "unknown policy 'luck'; the rules are: grant"),
        (["--streams", "0"], "--streams is 0"),
        (["--checkpoint", "nowhere.pt"], "no checkpoint at"),
        (["--plot", "bars.txt"], "expected a file that ends in .png"),
    ],
)
def test_eval_reports_invalid_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--task", "gpu-allocation", "--streams", "2", *flags]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_reward_and_history_import_no_heavy_package() -> None:
    """An agent on a node imports them without torch and numba."""
    code = (
        "import sys; from clustergym.gpu_allocation import compute_reward, history, transform_action; "
        "heavy = {'torch', 'numba', 'pygame', 'scipy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Picture


def test_picture_of_two_pods() -> None:
    """The colours are at the positions of the shares, and a miss is orange."""
    half_idle = PodShare(2, 40.0, 20.0, True, 0.0)
    missed = PodShare(0, 30.0, 30.0, False, 60.0)
    shots = [Snapshot(0.0, [half_idle], 1.0, 1.0), Snapshot(60.0, [half_idle, missed], -0.1, 0.5)]
    picture, area = draw(shots), chart_area()
    assert np.array_equal(picture, draw(shots))
    first, second = columns(shots, area)
    assert (first.x, second.right) == (area.x, area.right)

    def at(column: pygame.Rect, percent: float) -> tuple[int, ...]:
        y = area.bottom - round(area.h * percent / 100)
        return tuple(int(c) for c in picture[y, column.centerx])

    assert at(first, 10) == OWNERS[2]
    assert at(first, 30) == dark(OWNERS[2])
    assert at(second, 60) == OWNERS[0]
    assert at(first, 60) not in (OWNERS[0], dark(OWNERS[0]))

    def orange(part: np.ndarray) -> int:
        return int((part == ORANGE).all(-1).sum())

    assert orange(picture[area.top : area.bottom, second.x : second.right]) > 500
    assert orange(picture[area.top : area.bottom, first.x : first.right - 2]) == 0


def test_rendering_in_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    env = gymnasium.make("GPUAllocation-v0", render_mode="rgb_array").unwrapped
    env.reset(seed=1)
    empty = env.render()
    assert empty.shape == (560, 1100, 3)
    for _ in range(60):
        env.step(np.array([0.2, 0.5], np.float32))
    assert not np.array_equal(env.render(), empty)
    recorder = env._recorder
    assert isinstance(recorder, Recorder)
    assert len(recorder.snapshots) == 48, "older snapshots are dropped"
    for shot in recorder.snapshots:
        assert sum(pod.cores for pod in shot.pods) <= 100.01
        assert all(pod.usage <= pod.cores + 1e-3 for pod in shot.pods)
    env.reset()
    assert np.array_equal(env.render(), empty)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    human = gymnasium.make("GPUAllocationHistory-v0", render_mode="human").unwrapped
    human.reset(seed=1)
    human.step(np.array([0.2, 0.5], np.float32))
    human.close()
    window = open_window()
    window.show(recorder.snapshots)
    window.close()
    parallel = gpu_allocation_v0.parallel_env(n_nodes=2, render_mode="rgb_array")
    parallel.reset(seed=1)
    assert parallel.render().shape == (560, 1100, 3)
