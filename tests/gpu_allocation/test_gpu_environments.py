"""The allocation task: environments, compiled code and the picture."""

from __future__ import annotations

import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, render_test, seed_test
from pettingzoo.test.max_cycles_test import max_cycles_test

from clustergym import gpu_allocation_v0
from clustergym.common.canvas import ORANGE, pygame
from clustergym.common.compiling import imported_sources, source_fingerprint
from clustergym.gpu_allocation import (
    AllocationBatch,
    AllocationConfig,
    compute_reward,
    edge_mixes,
    history,
    simulator,
    state,
)
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, play
from clustergym.gpu_allocation.space import N_STATE
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

IDS = ("GPUAllocation-v0", "GPUAllocationHistory-v0")


# Environments


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_checker_raises_no_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(name, render_mode="rgb_array").unwrapped)


def test_pettingzoo_api_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    parallel_api_test(gpu_allocation_v0.parallel_env(n_nodes=3), num_cycles=300)
    api_test(gpu_allocation_v0.env(n_nodes=2), num_cycles=300)
    parallel_seed_test(gpu_allocation_v0.parallel_env)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_test(gpu_allocation_v0.env, num_cycles=50)
        render_test(gpu_allocation_v0.env)
    max_cycles_test(gpu_allocation_v0)


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
        results.append(batch.get_state())
    assert all(np.array_equal(results[0][key], results[1][key]) for key in results[0])


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
    env = gymnasium.make("GPUAllocation-v0", arrivals=64, reward="seed")
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
    """room = −0.5 · wait / (wait + 440 s). The reward "seed" has only the other terms, and its monopoly can differ."""
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
        assert plain == pytest.approx(reward - room - info["monopoly"] + plain_info["monopoly"], abs=1e-6)
        assert plain_info == info | {"room": 0.0, "monopoly": plain_info["monopoly"]}
        waits.append(info["wait_s"])
    assert sum(wait > 0 for wait in waits) > 10


def test_memory_matters() -> None:
    """Too little memory is an OOM kill, too much keeps others out: enough is better than both, over whole episodes."""
    batch = AllocationBatch(AllocationConfig(), 256)
    rewards = []
    for part in (0.3, 1.0, None):

        def act(part: float | None = part) -> np.ndarray:
            action = batch.oracle()
            if part is not None:
                action[:, 1] = (part * batch.state.ask[:, state.ASK_MEMORY] - 512) / (32768 - 512)
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
        asked = batch.state.ask[0].tolist()
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
            history.FEATURE_SENSITIVE: batch.state.ask[0, state.ASK_SENSITIVE].item(),
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
    habits = batch.state.habits.reshape(4, 256, 6, state.N_HABIT)
    for i in range(4):
        assert (habits[i, :, :, state.HABIT_APP] == i).mean() == pytest.approx(0.7, abs=0.05)
        assert np.median(habits[i, :, :, state.HABIT_NEED]) == pytest.approx(mixes[i].over_ask, abs=0.15)


def test_a_restored_state_continues_bit_for_bit() -> None:
    batch = AllocationBatch(AllocationConfig(history=True, arrivals=10), 3)
    batch.seed([1, 2, 3])
    batch.reset()
    rng = np.random.default_rng(0)
    actions = rng.random((25, 3, 2)).astype(np.float32)
    for action in actions[:7]:
        batch.step(action)
    saved = batch.get_state()
    other = AllocationBatch(AllocationConfig(history=True, arrivals=10), 3)
    other.set_state(saved)
    for action in actions[7:]:
        a, b = batch.step(action), other.step(action)
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match="saved environments have shape"):
        AllocationBatch(AllocationConfig(history=True), 4).set_state(saved)


def test_a_change_in_a_formula_renews_all_compiled_code() -> None:
    """numba only notices changes in the file of a function itself."""
    sources = imported_sources(Path(simulator.__file__))
    functions = [f for f in vars(simulator).values() if hasattr(f, "py_func")]
    assert len(functions) > 20
    for function in functions:
        assert function._cache.fingerprint == source_fingerprint(sources), function
        assert Path(function.py_func.__code__.co_filename) in sources, function


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


def stream(split: str, seed: int, **options: object) -> list[float]:
    """Requests of an episode that grants everything."""
    env = gymnasium.make("GPUAllocation-v0", split=split, arrivals=12, **options)
    rows, ended = [env.reset(seed=seed)[0]], False
    while not ended:
        obs, _, terminated, truncated, _ = env.step(np.ones(2, np.float32))
        rows.append(obs)
        ended = terminated or truncated
    return np.concatenate(rows).tolist()


def test_splits_have_other_pods() -> None:
    streams = {split: stream(split, 3) for split in ("train", "validation", "test")}
    assert stream("test", 3) == streams["test"]
    assert len({tuple(rows) for rows in streams.values()}) == 3
    batch = AllocationBatch(AllocationConfig(arrivals=12))
    batch.seed(np.array([HELD_OUT_SEED + 3]))  # the streams of clustergym eval
    assert batch.reset()[0].tolist() == streams["test"][: batch.n_features]
    with pytest.raises(ValueError, match="split is 'all': expected one of train, validation, test"):
        gymnasium.make("GPUAllocation-v0", split="all")


def test_vector_episodes_can_be_shorter() -> None:
    """As Gymnasium's TimeLimit makes them."""
    single = gymnasium.make("GPUAllocation-v0", max_episode_steps=5)
    vector = gymnasium.make_vec("GPUAllocation-v0", 2, max_episode_steps=5)
    obs, _ = single.reset(seed=0)
    many, _ = vector.reset(seed=0)
    for step in range(5):
        np.testing.assert_array_equal(many[0], obs)
        obs, reward, *ends, _ = single.step(np.ones(2, np.float32))
        many, rewards, *all_ends, _ = vector.step(np.ones((2, 2), np.float32))
        assert rewards[0] == pytest.approx(reward)
        assert any(ends) == any(bool(each[0]) for each in all_ends) == (step == 4)
    with pytest.raises(ValueError, match="max_episode_steps is 0: expected at least 1"):
        gymnasium.make_vec("GPUAllocation-v0", 2, max_episode_steps=0)


def test_parallel_episodes_can_be_shorter() -> None:
    env = gpu_allocation_v0.parallel_env(n_nodes=2, max_cycles=4)
    env.reset(seed=0)
    steps = 0
    while env.agents:
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        steps += 1
    assert steps == 4
