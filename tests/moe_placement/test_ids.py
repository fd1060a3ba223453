"""Every registered placement id: rewards, data, splits, copies and the libraries' checker.

``EXAMPLES=2 pytest tests/moe_placement/test_ids.py`` checks all ids, not only a part of them.
"""

from __future__ import annotations

import json
import os
import pickle
from copy import deepcopy
from inspect import cleandoc
from textwrap import dedent
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from clustergym.ids import INTERVAL_TOKENS, KINDS, PHASES, REFERENCE_SCORES, RUNGS, SCHEDULES, ladder, placement_ids
from clustergym.moe_placement import PROFILES
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig, load_cached
from clustergym.moe_placement.environment import MoEPlacementEnv, frame_of
from clustergym.moe_placement.kernels.state import CLOCK_INTERVAL
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.streams import IntervalStream
from clustergym.planners.exact import Exact
from clustergym.traces.splits import split_trace
from placement_task import same
from reference_scores import HINDSIGHT, docstring_table

TASKS = dict(ladder())
EVERY_ID = [(kind, task) for kind in KINDS for task in TASKS] if "EXAMPLES" in os.environ else []
SCORES = json.loads(REFERENCE_SCORES.read_text())


def cases() -> list[tuple[str, str]]:
    """(kind, task): all of the smaller sizes, each schedule of the larger ones. Kinds alternate."""
    if EVERY_ID:
        return EVERY_ID
    found = []
    for i, task in enumerate(TASKS):
        large = task.startswith(("4x8", "deepseek-v3"))
        if not large or i % len(SCHEDULES) == (i // len(SCHEDULES)) % len(PHASES):
            found.append((("MoEPlacement", "MoEPlacementFlat")[len(found) % 2], task))
    return found


def test_profiles_of_the_ladder_are_those_of_the_environments() -> None:
    assert {name: profile.phase for name, profile in PROFILES.items() if profile.dispatch != "lp"} == PHASES
    names = [name for name, _, _ in placement_ids()]
    assert len(names) == len(set(names)) == 2 * (2 + len(RUNGS) * len(PHASES) * len(SCHEDULES))
    for name in names:
        spec = gymnasium.spec(name)
        assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()) == spec


def test_reference_scores_are_in_the_docstring_and_make_sense() -> None:
    """No score is above its bound by more than its spread, and the proven optimum is above all."""
    above = []
    assert dedent(docstring_table(SCORES)) in cleandoc(MoEPlacementEnv.__doc__ or "")
    for task, scores in SCORES.items():
        assert task in TASKS
        saved = scores["saved_percent"]
        best = max(saved[name][0] for name in saved if name not in HINDSIGHT)
        assert saved["no-op"] == [0.0, 0.0]
        bounds = [saved[name] for name in saved if name in HINDSIGHT]
        if best > max(mean + spread for mean, spread in bounds):
            above.append(task)
        if "optimum" in saved:
            assert max(saved[name][0] for name in saved) == saved["optimum"][0]
    assert above == []


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_task_fits_every_split_without_serving_a_token_twice(split: str) -> None:
    seen = set()
    for arguments in TASKS.values():
        config, n_gpus = PlacementConfig(**arguments), get_cluster(arguments["cluster"]).n_gpus
        traffic = config.traffic
        assert traffic.interval_tokens(n_gpus) == INTERVAL_TOKENS
        assert not traffic.allow_reuse
        key = (arguments["trace"], n_gpus, traffic)
        if key in seen:
            continue
        seen.add(key)
        trace = split_trace(load_cached(arguments["trace"]), split)
        assert traffic.capacity(trace, n_gpus) > config.intervals
        rows = [i.rows.ravel() for i in IntervalStream(trace, n_gpus, traffic, 3).take(config.intervals + 1)]
        assert len(np.unique(np.concatenate(rows))) == len(rows) * INTERVAL_TOKENS


@pytest.mark.parametrize(("kind", "task"), cases())
def test_the_sum_of_rewards_is_what_is_reported_and_what_the_simulator_says(kind: str, task: str) -> None:
    """With random actions, on the test split. ``ops_per_layer`` is small to save time."""
    env: Any = gymnasium.make(f"{kind}-{task}-v0", split="test", ops_per_layer=2, compare_eplb=True).unwrapped
    batch, rng = env.batch, np.random.default_rng(0)
    env.action_space.seed(0)
    obs, info = env.reset(seed=5)
    placements, total, done = [batch.episode["slots"][0].numpy().copy()], 0.0, False
    while not done:
        if "Flat" in kind:
            action = rng.choice(np.flatnonzero(info["action_mask"]))
        else:
            action = rng.choice(np.argwhere(obs["action_mask"]))
        obs, reward, done, _, info = env.step(action)
        total += reward
        if batch.episode["clock"][0, CLOCK_INTERVAL] == len(placements):
            placements.append(batch.episode["slots"][0].numpy().copy())
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


CHECKED = ("small-vllm-stationary", "2x8-sglang-decode-switch", "4x4-tensorrt-llm-replay")


@pytest.mark.parametrize(("kind", "task"), EVERY_ID or [(kind, task) for kind in KINDS for task in CHECKED])
def test_ids_pass_the_checker_and_their_copies_continue(kind: str, task: str) -> None:
    env: Any = gymnasium.make(f"{kind}-{task}-v0").unwrapped
    check_env(env, skip_render_check=True)
    assert env.batch.config.profile in task
    assert env.batch.config.schedule in task
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
    batch = PlacementBatch(PlacementConfig(**{**TASKS["small-sglang-prefill-stationary"], "split": "test"}))
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
