"""What a step of the placement environment does, pays and shows, compared with slow references."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest

from clustergym import TokenTrace
from clustergym.moe_placement import ClusterSpec, Interval, IntervalStream, PlacementBatch, Simulator
from clustergym.moe_placement.environment import MoEPlacementEnv
from clustergym.moe_placement.kernels import state as kernel_state
from clustergym.moe_placement.profiles import TRANSPORTS
from clustergym.moe_placement.vector import MoEPlacementVectorEnv
from instances import made_profile
from placement_task import (
    CLUSTER,
    EXPERTS,
    GPUS,
    IDS,
    LAYERS,
    MODEL,
    OPS,
    TINY,
    held_by,
    interval_of,
    legal_action,
    same,
)
from reference import PassResult, kernel_us, migration_us, serve, times_us

# Actions


def test_illegal_actions_change_nothing_and_are_marked() -> None:
    env = MoEPlacementEnv(**TINY, intervals=2, lookahead=True)
    obs, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    state = env.batch
    outside = [
        (-1, 0),
        (EXPERTS, 0),
        (0, -1),
        (0, 3 * GPUS),
        (2**31 - 1, 2**31 - 1),
        (-(2**31), 5),
        (2**40, 0),
        (0, 2**33),
    ]
    tried: Counter[str] = Counter()
    for _ in range(2 * LAYERS):
        for i in range(OPS):
            before = {name: t.copy() for name, t in {**state.sim, "placement": state.episode["slots"]}.items()}
            forbidden = np.argwhere(obs["action_mask"] == 0)
            kind = ["outside", "forbidden", "legal"][(i + tried.total() // OPS) % 3]
            choices = {"outside": outside, "forbidden": forbidden}
            action = legal_action(obs, rng) if kind == "legal" else rng.choice(choices[kind])
            old, (obs, reward, _, _, info) = obs, env.step(action)
            tried[kind] += 1
            assert info["legal"] == (kind == "legal")
            assert (info["operation"] == kernel_state.OP_ILLEGAL) == (kind != "legal")
            assert (info["no_op"], info["elapsed"]) == (False, 1.0)
            e = int(action[0])
            assert info["expert"] == (tried.total() - 1) // OPS % LAYERS * EXPERTS + e if 0 <= e < EXPERTS else -1
            if kind != "legal" and i < OPS - 1:
                assert reward == -1.0  # the penalty
                # Scratch totals aside, nothing moved; only the clock did.
                assert all(bool((before[name] == t).all()) for name, t in state.sim.items() if name != "copies")
                assert bool((before["placement"] == state.episode["slots"]).all())
                assert all(np.array_equal(old[name], obs[name]) for name in obs if name != "context")
            elif kind == "legal" and i < OPS - 1:
                assert not np.array_equal(held_by(old), held_by(obs))
    assert min(tried[kind] for kind in ("outside", "forbidden", "legal")) > 3


def test_place_where_the_expert_lies_is_the_no_op() -> None:
    env = MoEPlacementEnv(**TINY)
    obs, _ = env.reset(seed=0)
    e, g = np.argwhere(held_by(obs) == 1)[3]
    assert obs["action_mask"][e, g] == 1
    after, reward, _, _, info = env.step([e, g])
    assert (reward, info["legal"], info["operation"]) == (0.0, True, kernel_state.OP_NOTHING)
    assert (info["no_op"], info["expert"]) == (True, e)
    assert all(np.array_equal(obs[name], after[name]) for name in obs if name != "context")


@pytest.mark.parametrize("profile", ["sglang-decode", "vllm"])
def test_noop_actions_change_nothing(profile: Any) -> None:
    """A whole episode of them serves with the start placement, and saves exactly nothing."""
    options = TINY | {"intervals": 2, "schedule": "drift", "profile": profile}
    env, vector = MoEPlacementEnv(**options), MoEPlacementVectorEnv(2, **options)
    env.reset(seed=3)
    vector.reset(seed=3)
    done = False
    while not done:
        _, reward, done, _, info = env.step(env.noop_action())
        _, rewards, *_ = vector.step(vector.noop_actions())
        assert reward == rewards[0] == rewards[1] == 0
        assert info["operation"] == kernel_state.OP_NOTHING
    assert info["migration_us"] == info["saved_vs_start"] == 0
    assert info["time_us"] == info["start_us"]


def test_one_gpu_leaves_a_choice_of_no_ops() -> None:
    env = MoEPlacementEnv(**(TINY | {"cluster": ClusterSpec("one", 1, 1)}))
    obs, _ = env.reset(seed=0)
    assert (obs["action_mask"] == [1, 0, 0]).all()
    _, reward, _, _, info = env.step([2, 0])
    assert (reward, info["legal"]) == (0.0, True)


# Rewards


def test_each_reward_is_what_its_operation_saves() -> None:
    env = MoEPlacementEnv(**TINY)
    batch, simulator = env.batch, Simulator(MODEL, CLUSTER, passes_per_interval=5)
    obs, _ = env.reset(seed=2)
    rng = np.random.default_rng(1)
    interval, first = interval_of(batch, 1), batch.episode["slots"][0].copy()
    placement = first.copy()
    for step in range(LAYERS * OPS):
        layer = step // OPS
        before = simulator.evaluate(interval, placement, first).total_us
        old_slots = batch.sim["slots"][0].copy()
        np.testing.assert_array_equal(np.sort(old_slots), np.sort(placement[layer]))
        obs, reward, done, _, _ = env.step(legal_action(obs, rng))
        at_end = (step + 1) % OPS == 0
        placement[layer] = batch.episode["slots"][0, layer] if at_end else batch.sim["slots"][0]
        saved = (before - simulator.evaluate(interval, placement, first).total_us).sum()
        assert reward == pytest.approx(100 * LAYERS * saved / batch.rules_host.static_us, rel=1e-9, abs=1e-10)
    assert done


@pytest.mark.parametrize("schedule", ["drift", "switch"])
def test_a_visit_earns_what_it_saves_in_the_rest_of_the_episode(schedule: str) -> None:
    """Each operation its own saving on the next interval; the last one also all that the visit saves later.

    So it does not matter what the visits before and after have done.
    """
    intervals = 3
    env = MoEPlacementEnv(**(TINY | {"intervals": intervals, "schedule": schedule}))
    batch, simulator = env.batch, Simulator(MODEL, CLUSTER, passes_per_interval=5)
    obs, _ = env.reset(seed=6)
    stream = IntervalStream(batch.trace, GPUS, batch.traffic, 6).take(intervals + 1)
    rng, later = np.random.default_rng(0), []
    for served, layer in product(range(1, intervals + 1), range(LAYERS)):
        before = batch.episode["slots"][0].copy()
        now = before.copy()
        for op in range(OPS):
            old = now.copy()
            obs, reward, *_ = env.step(legal_action(obs, rng))
            last = op == OPS - 1
            now[layer] = batch.episode["slots"][0, layer] if last else batch.sim["slots"][0]
            old_us, now_us = (simulator.evaluate(stream[served], one, before).total_us.sum() for one in (old, now))
            saved = old_us - now_us
            if last:
                future = [
                    [simulator.evaluate(i, one).time_us.sum() for i in stream[served + 1 :]] for one in (before, now)
                ]
                later.append(sum(future[0]) - sum(future[1]))
                saved += later[-1]
            assert reward == pytest.approx(100 * LAYERS * saved / batch.rules_host.static_us, rel=1e-9, abs=1e-9)
    assert np.count_nonzero(later[:-LAYERS]) == len(later) - LAYERS
    assert not np.any(later[-LAYERS:])


@pytest.mark.parametrize("env_id", IDS)
def test_the_end_of_an_episode_in_numbers(env_id: str) -> None:
    """The return is the time saved against the start placement; all times are means of a layer and pass."""
    env = gymnasium.make(env_id, compare_eplb=True, **TINY)
    obs, _ = env.reset(seed=21)
    rng, total, done = np.random.default_rng(1), 0.0, False
    while not done:
        obs, reward, done, _, info = env.step(legal_action(obs, rng))
        total += reward
    static_us = env.unwrapped.batch.rules_host.static_us / LAYERS
    assert info["time_us"] == info["served_us"] + info["migration_us"]
    assert info["migration_us"] > 0
    assert 100 * LAYERS * env.unwrapped.batch.config.intervals * info["saved_vs_start"] == pytest.approx(
        total, rel=1e-9
    )
    assert info["saved_vs_start"] == pytest.approx((info["start_us"] - info["time_us"]) / static_us, rel=1e-9)
    assert info["saved_vs_eplb"] == pytest.approx((info["eplb_us"] - info["time_us"]) / static_us, rel=1e-9)
    assert info["reused"] == 0.0


# Observations


def tokens_of(interval: Interval, layer: int) -> list[set[int]]:
    """Experts of each token of all passes."""
    return [{int(e) for e in interval.experts[layer, row] if e >= 0} for row in interval.rows.ravel()]


def reference_layer(batch: PlacementBatch, interval: Interval, transport: str, layer: int) -> list[PassResult]:
    """Each pass of the observed interval on a layer, under the placement as it is now."""
    placement = batch.episode["slots"][0].copy()
    placement[layer] = batch.sim["slots"][0]
    return serve(interval, placement, 2, "rank-nearest", transport)[layer]


def reference_pairs(here: np.ndarray, held: list[set[int]], sources: list[int], together: np.ndarray) -> np.ndarray:
    """(E, G, 8) from ``here`` (E, G): the load of each replica relative to the mean load of a GPU."""
    load, found = here.sum(0), np.zeros((EXPERTS, GPUS, 8))
    near = np.array([[sum(together[e, x] for x in held[g]) for g in range(GPUS)] for e in range(EXPERTS)])
    for e, source in enumerate(sources):
        holders = [g for g in range(GPUS) if e in held[g]]
        for g in range(GPUS):
            row = found[e, g]
            row[2] = source // 2 == g // 2
            before = load[[source, g]].max()
            if g in holders:
                row[0] = 1
                others = [h for h in holders if h != g]
                if others:
                    more = here[e, g] / len(others)
                    then = max(load[g] - here[e, g], *(load[h] + more for h in others))
                    row[7] = load[holders].max() - then
                continue
            back = 0.0
            victims = sorted(held[g] - held[source], key=lambda v: (here[v, g], v))
            if len(held[g]) == 3 and victims:
                back = here[victims[0], g]
                row[5] = near[victims[0], source] - near[victims[0], g]
            row[1] = near[e, g] - near[e, source]
            at_target, at_source = load[g] + here[e, source] - back, load[source] - here[e, source] + back
            row[3:5] = at_target - load.max(), at_source - load.max()
            row[6] = before - max(at_target, at_source)
            share = here[e].sum() / (len(holders) + 1)
            row[7] = before - max(load[g] + share, load[source] - here[e, source] + share)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_observations_mean_what_the_table_says(transport: str) -> None:
    env = MoEPlacementEnv(**(TINY | {"intervals": 2, "profile": made_profile(transport=transport)}))
    obs, _ = env.reset(seed=8)
    rng = np.random.default_rng(2)
    average: dict[int, np.ndarray] = {}
    batch = env.batch
    costs = batch.simulator.costs(24)
    for step in range(2 * LAYERS * OPS):
        interval_index, layer, op = step // (LAYERS * OPS), step // OPS % LAYERS, step % OPS
        interval = interval_of(batch, 0)
        tokens = tokens_of(interval, layer)
        count = np.array([sum(e in t for t in tokens) for e in range(EXPERTS)])
        share = count / count.sum()
        truth = reference_layer(batch, interval, transport, layer)
        time_us = np.mean([sum(times_us(one, GPUS, 2, costs, transport)) for one in truth])
        if op == 0:
            known = average.get(layer)
            drift = np.zeros(EXPERTS) if known is None else share - known
            average[layer] = share if known is None else (known + share) / 2
            start_us = time_us
        held = [{int(e) for e in gpu if e >= 0} for gpu in batch.sim["slots"][0]]
        replicas = np.array([[e in held[g] for g in range(GPUS)] for e in range(EXPERTS)])
        np.testing.assert_array_equal(held_by(obs), replicas)
        pairs = np.zeros((2, EXPERTS, GPUS))
        for w, one in enumerate(truth):
            for (e, g), n in one.pairs.items():
                pairs[w, e, g] = n
        load, mean = pairs.sum((0, 1)), count.sum() / GPUS
        kernels = np.mean([kernel_us(one, GPUS, costs, transport) for one in truth], axis=0)
        slowest = int(np.argmax(kernels))

        both = np.array([[sum(i in t and j in t for t in tokens) for j in range(EXPERTS)] for i in range(EXPERTS)])
        together = both / np.maximum(count, 1)[:, None]
        np.fill_diagonal(together, 0)
        np.testing.assert_allclose(obs["expert_graph"], together, rtol=1e-6)

        old = batch.episode["slots"][0, layer]
        experts = {
            0: share * EXPERTS,
            1: average[layer] * EXPERTS,
            2: drift * EXPERTS,
            3: replicas.sum(1) / GPUS,
            4: pairs.sum(0).max(1) / np.maximum(count, 1),
            5: [sum(e in held[g] and e not in old[g] for g in range(GPUS)) for e in range(EXPERTS)],
            6: [
                np.mean([sum(together[e, x] for x in held[g]) for g in range(GPUS) if e in held[g]])
                for e in range(EXPERTS)
            ],
            7: [e in held[slowest] for e in range(EXPERTS)],
        }
        sources = [max((g for g in range(GPUS) if e in held[g]), key=lambda g: load[g]) for e in range(EXPERTS)]
        np.testing.assert_array_equal(obs["experts"][:, 8:], obs["gpus"][sources, 3:12])
        for column, known in experts.items():
            np.testing.assert_allclose(obs["experts"][:, column], known, rtol=1e-5, atol=1e-6, err_msg=f"{column}")

        copy_bytes = MODEL.hidden * MODEL.dispatch_bytes
        link_us = np.array(
            [[copy_bytes / (4e3 if g // 2 == h // 2 else 1e3) for h in range(GPUS)] for g in range(GPUS)]
        )
        traffic = np.zeros((GPUS, GPUS))
        for one in truth:
            for (g, h), n in one.links.items():
                traffic[g, h] += n * link_us[g, h] / time_us / 2
        np.testing.assert_allclose(obs["gpu_graph"], traffic, rtol=1e-5)
        # All-gather costs the same on every link.
        traffic *= transport != "allgather"
        near = np.array([[g // 2 == h // 2 for h in range(GPUS)] for g in range(GPUS)])
        hot = np.argsort(-count, kind="stable")[:8]
        gpus = {
            3: load / mean,
            4: kernels / time_us,
            5: [1 - len(held[g]) / 3 for g in range(GPUS)],
            6: (traffic * near).sum(1),
            7: (traffic * near).sum(0),
            8: (traffic * ~near).sum(1),
            9: (traffic * ~near).sum(0),
            10: np.repeat(load.reshape(2, 2).mean(1), 2) / mean,
            11: np.arange(GPUS) == slowest,
            12: (pairs > 0).sum((0, 1)) / (2 * 3),
            13: [sum(together[e, x] for e in hot for x in held[g]) / 8 for g in range(GPUS)],
            14: [len(held[g] - set(old[g].tolist())) / 3 for g in range(GPUS)],
            15: [min(pairs[:, e, g].sum() for e in held[g]) / mean * (len(held[g]) == 3) for g in range(GPUS)],
            16: np.full(GPUS, 0.25),
        }
        for kind in range(3):
            rows = obs["gpus"][kind * GPUS : (kind + 1) * GPUS]
            np.testing.assert_array_equal(rows[:, :3], np.tile(np.eye(3)[kind], (GPUS, 1)))
            for column, known in gpus.items():
                np.testing.assert_allclose(rows[:, column], known, rtol=1e-5, atol=1e-6, err_msg=f"{column}")
        here = pairs.sum(0) / mean
        known = reference_pairs(here, held, sources, together)
        np.testing.assert_allclose(obs["pairs"], known, rtol=1e-5, atol=2e-6)
        context = [
            layer / LAYERS, op / OPS, interval_index / 2, time_us / start_us, kernels.max() / time_us,
            migration_us(batch.sim["slots"][0].tolist(), old.tolist(), 2, costs) / time_us,
        ]  # fmt: skip
        np.testing.assert_allclose(obs["context"], context, rtol=1e-5)
        obs = env.step(legal_action(obs, rng))[0]


def test_coactivation_of_many_tokens_comes_from_a_sample() -> None:
    """Every second token of 1200: at most 1024."""
    env = MoEPlacementEnv(**(TINY | {"tokens_per_rank": 150, "ops_per_layer": 1, "allow_reuse": True}))
    env.reset(seed=0)
    obs = env.step([0, 0])[0]
    interval = interval_of(env.batch, 0)
    here = tokens_of(interval, 1)
    assert len(here) == 1200
    for i in range(EXPERTS):
        users = [t for t in here[::2] if i in t]
        known = [sum(j in t for t in users) / len(users) * (i != j) for j in range(EXPERTS)]
        np.testing.assert_allclose(obs["expert_graph"][i], known, rtol=1e-6)


def test_the_next_interval_is_never_seen() -> None:
    """Two traces that agree on the first interval only: the agents see the same until the second is served."""
    seed, rng = 4, np.random.default_rng(0)
    first, second = (np.argsort(rng.random((640, LAYERS, EXPERTS)), axis=2)[:, :, :2] for _ in range(2))
    options = TINY | {
        "intervals": 2,
        "schedule": "replay",
        "lookahead": True,
    }

    def environment(experts: np.ndarray) -> MoEPlacementEnv:
        trace = TokenTrace(experts, EXPERTS, seq_lens=np.full(10, 64))
        env = MoEPlacementEnv(**(options | {"trace": trace}))
        env.reset(seed=seed)
        return env

    seen_rows = interval_of(environment(first).batch, 0).rows
    second[seen_rows] = first[seen_rows]
    pair = [environment(first), environment(second)]
    seen = [env.reset(seed=seed)[0] for env in pair]
    actions = np.random.default_rng(1)
    paid = []
    for _ in range(LAYERS * OPS):
        assert same(*seen)
        results = [env.step(action) for action in [legal_action(seen[0], actions)] for env in pair]
        seen = [result[0] for result in results]
        paid.append([result[1] * env.batch.rules_host.static_us for result, env in zip(results, pair, strict=True)])
    # The next interval paid, and now that it has been served it is seen.
    assert np.ptp(paid, axis=1).max() > 0
    assert not same(*seen)
