"""Every registered placement id: rewards, data, splits, copies and the libraries' checker."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from clustergym.ids import INTERVAL_TOKENS, KINDS, REFERENCE_SCORES, TASKS, placement_ids
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig, load_cached
from clustergym.moe_placement.environment import frame_of
from clustergym.moe_placement.kernels.state import CLOCK_INTERVAL
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.streams import IntervalStream
from clustergym.planners.exact import Exact
from clustergym.traces.splits import split_trace
from placement_task import same

IDS = placement_ids()
SMALL = "MoEPlacement-small-sglang-decode-stationary-v0"


def test_ids_are_few_and_say_why_they_exist() -> None:
    registered = [name for name in gymnasium.registry if name.startswith(tuple(f"{kind}-" for kind in KINDS))]
    assert {name for name in registered if "Flat" not in name or name in IDS} <= IDS.keys()
    assert len(IDS) <= 34
    assert len({task.why for task in TASKS.values()}) == len(TASKS)
    for name, (_, task) in IDS.items():
        spec = gymnasium.spec(name)
        assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()) == spec
        assert task.why.endswith((".", "?"))


def test_the_spec_names_the_steps_of_an_episode() -> None:
    assert gymnasium.make("MoEPlacement-v0").spec.max_episode_steps == 4 * 16
    assert gymnasium.make("MoEPlacement-v0", intervals=3, ops_per_layer=2).spec.max_episode_steps == 3 * 4 * 2
    assert gymnasium.make("MoEPlacement-v0", max_episode_steps=5).spec.max_episode_steps == 5
    assert gymnasium.make_vec("MoEPlacement-v0", 2).spec.max_episode_steps == 64


def test_reference_scores_make_sense() -> None:
    """No score is above the bound by more than the intervals, and doing nothing saves nothing."""
    for name, scores in json.loads(REFERENCE_SCORES.read_text()).items():
        assert name in IDS
        assert scores["no-op"]["mean"] == 0.0
        bound = scores.get("clairvoyant")
        for score in scores.values():
            assert bound is None or score["mean"] <= bound["mean"] + bound["ci95"] + score["ci95"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_task_fits_every_split_without_serving_a_token_twice(split: str) -> None:
    seen = set()
    for name, task in TASKS.items():
        config = PlacementConfig(**task.arguments)
        n_gpus, traffic = get_cluster(config.cluster).n_gpus, config.traffic
        tokens = traffic.interval_tokens(n_gpus)
        assert tokens == INTERVAL_TOKENS or not name
        assert not traffic.allow_reuse
        key = (config.trace, n_gpus, traffic)
        if key in seen:
            continue
        seen.add(key)
        trace = split_trace(load_cached(config.trace), split)
        assert traffic.capacity(trace, n_gpus) > config.intervals
        rows = [i.rows.ravel() for i in IntervalStream(trace, n_gpus, traffic, 3).take(config.intervals + 1)]
        assert len(np.unique(np.concatenate(rows))) == len(rows) * tokens


@pytest.mark.parametrize("name", IDS)
def test_the_sum_of_rewards_is_what_is_reported_and_what_the_simulator_says(name: str) -> None:
    """With random actions, on the test split. ``ops_per_layer`` is small to save time."""
    env: Any = gymnasium.make(name, split="test", ops_per_layer=2, compare_eplb=True).unwrapped
    batch, rng = env.batch, np.random.default_rng(0)
    env.action_space.seed(0)
    obs, info = env.reset(seed=5)
    placements, total, done = [batch.episode["slots"][0].copy()], 0.0, False
    while not done:
        if "Flat" in name:
            action = rng.choice(np.flatnonzero(info["action_mask"]))
        else:
            action = rng.choice(np.argwhere(obs["action_mask"]))
        obs, reward, done, _, info = env.step(action)
        total += reward
        if batch.episode["clock"][0, CLOCK_INTERVAL] == len(placements):
            placements.append(batch.episode["slots"][0].copy())
    sim, served_us, start_us = batch.simulator, [], []
    stream = IntervalStream(batch.trace, batch.n_gpus, batch.traffic, 5).take(batch.config.intervals + 1)
    for interval, before, after in zip(stream[1:], placements[:-1], placements[1:], strict=True):
        served_us.append(sim.evaluate(interval, after, before).total_us.mean())
        start_us.append(sim.evaluate(interval, placements[0]).time_us.mean())
    unit = batch.rules_host.static_us / batch.n_layers
    assert info["time_us"] == pytest.approx(np.mean(served_us), rel=1e-9)
    assert info["start_us"] == pytest.approx(np.mean(start_us), rel=1e-9)
    assert info["saved_vs_start"] == pytest.approx((np.mean(start_us) - np.mean(served_us)) / unit, abs=1e-9)
    per_cent = 100 * batch.n_layers * batch.config.intervals
    assert total == pytest.approx(per_cent * info["saved_vs_start"], abs=1e-7)
    assert info["saved_vs_eplb"] == pytest.approx((info["eplb_us"] - info["time_us"]) / unit, abs=1e-9)
    assert (info["reused"], info["illegal_actions"]) == (0.0, 0)
    # The picture shows what each interval saved.
    frame = frame_of(batch, env._saved)
    assert np.mean(frame.saved) == pytest.approx(info["saved_vs_start"], abs=1e-12)
    assert frame.layer_time_us == info["layer_time_us"]


@pytest.mark.parametrize("name", ["MoEPlacementDrift-v0", "MoEPlacementFlatDrift-v0", SMALL])
def test_ids_pass_the_checker_and_their_copies_continue(name: str) -> None:
    env: Any = gymnasium.make(name).unwrapped
    check_env(env, skip_render_check=True)
    env.reset(seed=1)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(12)]
    env.step(actions[0])
    others, state = [deepcopy(env), pickle.loads(pickle.dumps(env))], env.get_state()
    expected = [env.step(action) for action in actions]
    env.set_state(state)
    for other in (*others, env):
        for action, result in zip(actions, expected, strict=True):
            assert all(same(a, b) for a, b in zip(other.step(action), result, strict=True))


def test_the_optimum_of_the_small_task_is_proven() -> None:
    """No placement of the next interval is better than the proven one: neither of a swap, nor a random one."""
    batch = PlacementBatch(PlacementConfig(**{**IDS[SMALL][1].arguments, "split": "test"}))
    sim, start = batch.simulator, batch.simulator.static(batch.n_layers)
    interval = IntervalStream(batch.trace, batch.n_gpus, batch.traffic, 0).take(2)[1]
    planner, rng = Exact(sim), np.random.default_rng(0)
    plan = planner.plan([interval], start)
    served = sim.evaluate(interval, plan, start).total_us
    np.testing.assert_allclose(planner.optimum_us, served, rtol=1e-12)
    for _ in range(300):
        other = plan.reshape(batch.n_layers, -1).copy()
        for slots in other:
            if rng.random() < 0.5:
                i, j = rng.integers(0, 16, 2)
                slots[[i, j]] = slots[[j, i]]
            else:
                slots[:] = rng.permutation(16)
        assert (sim.evaluate(interval, other.reshape(plan.shape), start).total_us >= served - 1e-9).all()
    assert (served < 0.95 * sim.evaluate(interval, start).total_us).all()
