"""Batched episodes: traffic, rewards, times, look-ahead, masks and memory against the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement import (
    PROFILES,
    ClusterSpec,
    EngineProfile,
    Interval,
    IntervalStream,
    ModelSpec,
    Placement,
    PlacementBatch,
    PlacementConfig,
    Simulator,
)
from clustergym.moe_placement.environment import episode_info
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.observation import EXPERT_LOAD, N_PAIR_FEATURES, PAIR_HOLDS
from clustergym.moe_placement.kernels.operations import resolve
from clustergym.moe_placement.kernels.state import (
    CLOCK_INTERVAL,
    CLOCK_LAYER,
    CLOCK_REUSE,
    OP_ILLEGAL,
    OP_NOTHING,
    PART_MIGRATION,
    PART_SMOOTH,
    PART_TRUE,
    SCHEDULES,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
    SimulationState,
)
from instances import made_profile, random_trace

EXPERTS, GPUS, SLOTS, LAYERS, OPS = 8, 4, 3, 2, 3
MODEL = ModelSpec("tiny", LAYERS, EXPERTS, 2, 512, 256, kernel_start_us=4, kernel_expert_us=1, kernel_pair_us=0.2)
CLUSTER = ClusterSpec("tiny", 2, 2, SLOTS, intra_gb_s=4, inter_gb_s=1, intra_latency_us=1, inter_latency_us=2)
TRACE = random_trace(np.random.default_rng(0), [20 + i % 30 for i in range(60)], EXPERTS, 2, LAYERS, pads=0.1)
OTHERS = [
    made_profile(dispatch, transport, phase)
    for dispatch, transport, phase in (
        ("random", "dedup", "decode"), ("local-hash", "dedup", "prefill"),
        ("local-hash", "per-expert", "prefill"), ("round-robin", "allgather", "prefill"),
    )
]  # fmt: skip
EVERY_PROFILE = [*(profile for profile in PROFILES.values() if profile.dispatch != "lp"), *OTHERS]


def name_of(profile: EngineProfile) -> str:
    return f"{profile.name}, {profile.dispatch}, {profile.transport}, {profile.phase}"


every_profile = pytest.mark.parametrize("profile", EVERY_PROFILE, ids=name_of)


def config(**options: Any) -> PlacementConfig:
    sizes = {"tokens_per_rank": 6, "sampled_passes": 2, "ops_per_layer": OPS, "passes_per_interval": 50, "intervals": 2}
    return PlacementConfig(TRACE, cluster=CLUSTER, model=MODEL, split="all", **(sizes | options))


def started(task: PlacementConfig, seeds: list[int]) -> PlacementBatch:
    batch = PlacementBatch(task, len(seeds))
    batch.seed(np.array(seeds))
    batch.reset()
    return batch


def streams(task: PlacementConfig, seeds: list[int]) -> list[list[Interval]]:
    """The intervals that environments with these seeds observe first, and serve then."""
    return [IntervalStream(TRACE, GPUS, task.traffic, seed).take(task.intervals + 1) for seed in seeds]


def random_actions(
    batch: PlacementBatch, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Mostly legal, sometimes out of range."""
    choices = []
    for mask in batch.obs["action_mask"]:
        choices.append(rng.choice(np.argwhere(mask)) if rng.random() < 0.85 else rng.integers(-2, 40, 2))
    expert, node = np.array(choices, dtype=np.int64).T
    return expert, node


def play(batch: PlacementBatch, rng: np.random.Generator) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """A whole episode with random actions: the sum of rewards (B,), and the placement of each interval (B, L, G, S)."""
    placements, total = [batch.episode["slots"].copy()], np.zeros(batch.num_envs)
    while not batch.done.all():
        before = int(batch.episode["clock"][0, CLOCK_INTERVAL])
        _, reward, _ = batch.step(*random_actions(batch, rng))
        total += reward
        if batch.episode["clock"][0, CLOCK_INTERVAL] > before:
            placements.append(batch.episode["slots"].copy())
    return total, placements


def eplb(interval: Interval) -> Placement:
    """EPLB for each layer of an interval."""
    slots = np.zeros((LAYERS, GPUS, SLOTS), np.int16)
    for layer, loads in zip(slots, interval.loads(EXPERTS).astype(np.float64), strict=True):
        eplb_slots(layer, loads, 1, 0, np.zeros((3, EXPERTS), np.int32), np.zeros(EXPERTS + GPUS))
    return slots


@every_profile
@pytest.mark.parametrize("migration", ["blocking", "async"])
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    schedule=st.sampled_from(SCHEDULES),
    start=st.sampled_from(["static", "eplb"]),
    imbalance=st.sampled_from([0.0, 0.7]),
    intervals=st.integers(1, 3),
    share=st.floats(0, 1),
)
def test_rewards_add_up_to_the_time_saved_against_the_start(
    profile: EngineProfile, migration: str, seed: int, schedule: str, start: str, imbalance: float, intervals: int,
    share: float,
) -> None:  # fmt: skip
    """And every time that an episode reports is what the simulator computes from the stream of its seed."""
    task = config(
        profile=profile, migration=migration, schedule=schedule, start=start, rank_imbalance=imbalance,
        intervals=intervals, background_share=share, illegal_penalty=0.0, compare_eplb=True,
    )  # fmt: skip
    seeds = [seed, seed + 1]
    batch, simulator = started(task, seeds), Simulator(MODEL, CLUSTER, profile, 50, migration, share)
    total, placements = play(batch, np.random.default_rng(seed))
    assert len(placements) == intervals + 1
    static_us = batch.rules_host.static_us
    for b, stream in enumerate(streams(task, seeds)):
        first = placements[0][b]
        np.testing.assert_array_equal(first, eplb(stream[0]) if start == "eplb" else simulator.static(LAYERS))
        served_us = migration_us = start_us = eplb_us = 0.0
        eplb_before = first
        for k in range(1, intervals + 1):
            served = simulator.evaluate(stream[k], placements[k][b], placements[k - 1][b])
            served_us += served.time_us.sum()
            migration_us += served.migration_us.sum()
            start_us += simulator.evaluate(stream[k], first).time_us.sum()
            eplb_now = eplb(stream[k - 1])
            eplb_us += simulator.evaluate(stream[k], eplb_now, eplb_before).total_us.sum()
            eplb_before = eplb_now
        saved = (start_us - served_us - migration_us) / (static_us * intervals)
        assert total[b] == pytest.approx(100 * LAYERS * intervals * saved, rel=1e-9, abs=1e-9)
        assert float(batch.saved[b]) == pytest.approx(saved, rel=1e-9, abs=1e-12)
        info, per = {name: values[b] for name, values in episode_info(batch).items()}, LAYERS * intervals
        known = {
            "time_us": served_us + migration_us, "served_us": served_us, "migration_us": migration_us,
            "start_us": start_us, "eplb_us": eplb_us,
        }  # fmt: skip
        for name, value in known.items():
            assert info[name] == pytest.approx(value / per, rel=1e-9, abs=1e-12), name
        assert info["saved_vs_start"] == pytest.approx(saved, rel=1e-9, abs=1e-12)
        assert info["saved_vs_eplb"] == pytest.approx(
            (eplb_us - served_us - migration_us) / (static_us * intervals), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("profile", ["sglang-decode", "sglang-prefill"])
def test_an_environment_serves_the_stream_of_its_seed_whatever_the_batch(profile: str, schedule: str) -> None:
    task, seeds = config(profile=profile, schedule=schedule, intervals=4, ops_per_layer=1), [100, 7, 102]
    batch, known, nothing = started(task, seeds), streams(task, seeds), np.zeros(3, np.int64)
    for step in range(4 * LAYERS):
        for b in range(3):
            for part, interval in enumerate(known[b][step // LAYERS : step // LAYERS + 2]):
                passes = slice(2 * part, 2 * part + 2)
                np.testing.assert_array_equal(batch.sim["rows"][b, passes], interval.rows)
                np.testing.assert_array_equal(batch.sim["rank_start"][b, passes], interval.rank_start)
        batch.step(nothing, nothing)
    assert batch.done.all()
    # The next episode has another stream.
    rows = batch.sim["rows"].copy()
    batch.reset()
    assert (batch.sim["rows"] != rows).any()


@pytest.mark.parametrize("profile", ["sglang-decode", "sglang-prefill"])
def test_mixed_observations_are_the_served_tokens_in_another_order(profile: str) -> None:
    task, seeds = config(profile=profile, schedule="drift", intervals=3, ops_per_layer=1, mix_observed=True), [5, 9]
    batch, known, nothing = started(task, seeds), streams(task, seeds), np.zeros(2, np.int64)
    orders = []
    for step in range(3 * LAYERS):
        for b in range(2):
            observed, following = known[b][step // LAYERS], known[b][step // LAYERS + 1]
            rows = batch.sim["rows"][b]
            assert sorted(rows[:2].ravel()) == sorted(observed.rows.ravel())
            assert (rows[:2] != observed.rows).mean() > 0.5
            np.testing.assert_array_equal(rows[2:], following.rows)  # what is rewarded is served as it comes
            orders.append(tuple(np.argsort(rows[:2].ravel(), kind="stable")))
        batch.step(nothing, nothing)
    assert len(set(orders)) == 3 * 2  # another order in every interval and environment, the same for all layers


@pytest.mark.parametrize("start", ["static", "eplb"])
def test_renumbered_experts_are_the_same_traffic_under_other_names(start: str) -> None:
    task, seeds = config(profile="sglang-prefill", start=start), [5, 9, 11]
    plain, other = started(task, seeds), started(replace(task, renumber=True), seeds)
    first = other.episode["names"].copy()
    for b, names in enumerate(first):
        assert sorted(names) == list(range(EXPERTS))
        assert plain.episode["names"][b].tolist() == list(range(EXPERTS))
        np.testing.assert_array_equal(other.sim["load"][b][:, names], plain.sim["load"][b])
        np.testing.assert_array_equal(other.obs["expert_graph"][b][np.ix_(names, names)], plain.obs["expert_graph"][b])
    assert len({tuple(names) for names in first}) == 3
    if start == "eplb":  # the same plan, up to ties
        np.testing.assert_allclose(*(batch.episode["times_us"][:, TIME_OBSERVED] for batch in (plain, other)), rtol=0.1)
    other.reset()
    assert (other.episode["names"] != first).any(1).all()


def test_what_is_learned_by_heart_says_nothing_about_renumbered_experts() -> None:
    """An agent that knows only the number of an expert knows its load in the next episode, or nothing."""
    spread = {}
    for renumber in (False, True):
        batch = started(PlacementConfig(tokens_per_rank=16, renumber=renumber), list(range(64)))
        loads = batch.obs["experts"][:, :, EXPERT_LOAD]
        memorized, new = loads[:32].mean(0), loads[32:].mean(0)
        spread[renumber] = np.corrcoef(memorized, new)[0, 1]
    assert spread[False] > 0.9
    assert abs(spread[True]) < 0.5


def everything(batch: PlacementBatch, b: int) -> dict[str, npt.NDArray[Any]]:
    parts = {"sim": batch.sim, "episode": batch.episode, "stream": batch.stream, "obs": batch.obs}
    found = {}
    for part, named in parts.items():
        found |= {f"{part}/{name}": array[b].copy() for name, array in named.items()}
    return found


@every_profile
def test_a_batch_equals_single_environments(profile: EngineProfile) -> None:
    task = config(profile=profile, schedule="drift", start="eplb", lookahead=profile.name == "vllm")
    seeds = [40, 41, 42]
    batch, singles = started(task, seeds), [started(task, [seed]) for seed in seeds]
    rng = np.random.default_rng(1)
    while not batch.done.all():
        expert, node = random_actions(batch, rng)
        looked = rng.integers(0, EXPERTS, (3, 2))
        parts = batch.lookahead(looked)
        _, reward, _ = batch.step(expert, node)
        for b, single in enumerate(singles):
            np.testing.assert_array_equal(single.lookahead(looked[b : b + 1]), parts[b : b + 1])
            assert single.step(expert[b : b + 1], node[b : b + 1])[1][0] == reward[b]
            mine, theirs = everything(batch, b), everything(single, 0)
            for name, array in mine.items():
                np.testing.assert_array_equal(theirs[name], array, err_msg=name)


def test_an_episode_that_is_over_does_not_change() -> None:
    batch = started(config(intervals=1), [3])
    play(batch, np.random.default_rng(0))
    before = everything(batch, 0)
    _, reward, done = batch.step(np.array([1]), np.array([2]))
    assert reward[0] == 0
    assert done[0]
    for name, array in everything(batch, 0).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_reuse_is_noted_only_when_a_token_was_served_twice() -> None:
    """60 sequences hold 497 decode pieces of four tokens; an interval of the task needs 24."""
    pieces = len(config(profile="sglang-decode", sampled_passes=4).traffic.cut(TRACE).piece_row)
    fits = pieces // (6 * GPUS)
    for intervals, reused in ((fits - 1, 0), (fits, 1)):
        task = config(profile="sglang-decode", sampled_passes=4, intervals=intervals, ops_per_layer=1, allow_reuse=True)
        batch = started(task, [1])
        play(batch, np.random.default_rng(0))
        assert batch.episode["clock"][0, CLOCK_REUSE] == episode_info(batch)["reused"][0] == reused


def test_the_unit_of_rewards_is_the_static_placement_s_time() -> None:
    task = config(profile="tensorrt-llm")
    simulator = Simulator(MODEL, CLUSTER, "tensorrt-llm", 50)
    times = np.mean(
        [
            simulator.evaluate(interval, simulator.static(LAYERS)).time_us
            for interval in IntervalStream(TRACE, GPUS, task.traffic).take(4)
        ],
        axis=0,
    )
    batch = PlacementBatch(task, 1)
    assert batch.rules_host.static_us == pytest.approx(times.sum(), rel=1e-12)
    assert [batch.static_layer_us(layer) for layer in range(LAYERS)] == pytest.approx(times.tolist(), rel=1e-12)


# What the agents see


def observed(batch: PlacementBatch, b: int) -> Interval:
    n = batch.rules_host.n_passes
    pieces = batch.traffic.cut(TRACE)
    return Interval(pieces.experts, batch.sim["rows"][b, :n], batch.sim["rank_start"][b, :n])


def state_of(batch: PlacementBatch) -> SimulationState:
    return SimulationState(**batch.sim)


def after_operation(
    slots: npt.NDArray[np.int16], e: int, source: int, target: int, victim: int
) -> npt.NDArray[np.int16]:
    """The slots (G, S) with an operation applied, from sets."""
    held = [{int(x) for x in gpu if x >= 0} for gpu in slots]
    for x, leaves, enters in ((e, source, target), (victim, target, source)):
        if x >= 0:
            if leaves >= 0:
                held[leaves].discard(x)
            if enters >= 0:
                held[enters].add(x)
    return np.array([[*sorted(gpu), *[-1] * (SLOTS - len(gpu))] for gpu in held], np.int16)


def times_of_layer(
    simulator: Simulator, interval: Interval, placement: Placement, before: Placement, layer: int
) -> tuple[float, float]:
    """(served, migration)"""
    found = simulator.evaluate(interval, placement, before)
    return float(found.time_us[layer]), float(found.migration_us[layer])


@every_profile
def test_look_ahead_is_the_difference_that_the_operation_makes(profile: EngineProfile) -> None:
    """Of the observed interval: in the smooth norm, in true time, and in migration."""
    batch, rng = started(config(profile=profile), [5]), np.random.default_rng(2)
    blind = started(config(profile=profile), [5])
    simulator = batch.simulator
    for _ in range(2 * OPS + 1):
        layer = int(batch.episode["clock"][0, CLOCK_LAYER])
        start_us = float(batch.episode["times_us"][0, TIME_OBSERVED_START])
        placement, before = batch.episode["slots"][0].copy(), batch.episode["slots"][0].copy()
        placement[layer] = batch.sim["slots"][0]
        interval, sim = observed(batch, 0), state_of(batch)
        n = interval.n_passes

        now = times_of_layer(simulator, interval, placement, before, layer)
        assert float(batch.episode["times_us"][0, TIME_OBSERVED]) == pytest.approx(now[0], rel=1e-12)
        e = int(rng.integers(EXPERTS))
        parts = batch.lookahead(np.array([[e]]))[0, 0]
        for node in range(3 * GPUS):
            kind, *operation = (int(x) for x in resolve(sim, 0, e, node, n))
            if kind in (OP_NOTHING, OP_ILLEGAL):
                assert (parts[node] == 0).all()
                continue
            whole = placement.copy()
            whole[layer] = after_operation(placement[layer], e, *operation)
            then = times_of_layer(simulator, interval, whole, before, layer)
            for part, which in ((PART_TRUE, 0), (PART_MIGRATION, 1)):
                saved = max(-100.0, 100 * (now[which] - then[which]) / start_us)
                assert parts[node, part] == pytest.approx(saved, rel=1e-5, abs=1e-4)
        # Looking leaves no trace.
        action = random_actions(batch, rng)
        rewards = [one.step(*action)[1][0] for one in (batch, blind)]
        assert rewards[0] == rewards[1]
        mine, theirs = everything(batch, 0), everything(blind, 0)
        for name in (
            "sim/visits", "sim/copies", "sim/kernel_us", "sim/received", "episode/times_us", *(f"obs/{key}" for key in
            batch.obs),
        ):  # fmt: skip
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    assert simulator.profile == profile


def test_look_ahead_columns_of_pairs_are_the_answers_of_the_method() -> None:
    batch, rng = started(config(lookahead=True), [1, 2]), np.random.default_rng(0)
    for _ in range(OPS + 1):
        parts = batch.lookahead(np.tile(np.arange(EXPERTS), (2, 1))).reshape(2, EXPERTS, 3, GPUS, 3)
        columns = batch.obs["pairs"][..., N_PAIR_FEATURES:].reshape(2, EXPERTS, GPUS, 3, 3).swapaxes(2, 3)
        assert np.array_equal(columns, parts)
        assert (parts[..., PART_SMOOTH] > 0).any()
        batch.step(*random_actions(batch, rng))
    assert started(config(), [1]).obs["pairs"].shape[-1] == N_PAIR_FEATURES


@every_profile
def test_masks_are_exact(profile: EngineProfile) -> None:
    """With full and with empty slots."""
    roomy = ClusterSpec("roomy", 2, 2, 5, intra_gb_s=4, inter_gb_s=1)
    for cluster in (CLUSTER, roomy):
        task = PlacementConfig(
            TRACE, cluster=cluster, model=MODEL, split="all", profile=profile, tokens_per_rank=6, sampled_passes=2,
            ops_per_layer=4,
        )  # fmt: skip
        batch, rng = started(task, [1, 2]), np.random.default_rng(3)
        while not batch.done.all():
            sim = state_of(batch)
            for b in range(2):
                kinds = np.array([[resolve(sim, b, e, node, 2)[0] for node in range(3 * GPUS)] for e in range(EXPERTS)])
                np.testing.assert_array_equal(batch.obs["action_mask"][b], kinds != OP_ILLEGAL)
                no_ops = kinds[:, :GPUS] == OP_NOTHING
                np.testing.assert_array_equal(batch.obs["pairs"][b, :, :, PAIR_HOLDS], no_ops)
            batch.step(*random_actions(batch, rng))


def test_a_state_is_restored_bit_for_bit() -> None:
    batch, rng = started(config(schedule="drift"), [1, 2]), np.random.default_rng(0)
    batch.step(*random_actions(batch, rng))
    kept, actions = batch.get_state(), [random_actions(batch, rng) for _ in range(2 * OPS * LAYERS)]
    first = [batch.step(*action)[1].copy() for action in actions]
    end = [everything(batch, b) for b in range(2)]
    other = started(config(schedule="drift"), [8, 9])
    other.set_state(kept)
    assert all(np.array_equal(other.step(*action)[1], reward) for action, reward in zip(actions, first, strict=True))
    for b in range(2):
        for name, array in everything(other, b).items():
            np.testing.assert_array_equal(array, end[b][name], err_msg=name)


def test_linear_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="profile 'sglang-lp' splits tokens by a linear program, which is only for"):
        PlacementBatch(config(profile="sglang-lp"), 1)
