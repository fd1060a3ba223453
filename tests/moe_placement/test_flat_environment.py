"""The flat environment: its candidates, its masks, and the vector environment's modes."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from clustergym import moe_placement_v0
from clustergym.moe_placement.environment import MoEPlacementEnv, product_masks
from clustergym.moe_placement.flat import MoEPlacementFlatEnv, MoEPlacementFlatVectorEnv
from clustergym.moe_placement.kernels.candidates import (
    CANDIDATE_FEATURES,
    COMPACT_GPU_FEATURES,
    N_CANDIDATE_FEATURES,
    SAVED,
)
from clustergym.moe_placement.kernels.state import PART_MIGRATION, PART_TRUE
from clustergym.moe_placement.vector import MoEPlacementVectorEnv
from placement_task import EXPERTS, GPUS, LAYERS, OPS, TINY, held_by, same

STEPS = LAYERS * OPS


def features(env: MoEPlacementFlatEnv, obs: np.ndarray) -> np.ndarray:
    n = env.batch.config.candidates
    return obs[: n * N_CANDIDATE_FEATURES].reshape(n, N_CANDIDATE_FEATURES)


def changes(env: MoEPlacementFlatEnv) -> np.ndarray:
    """(E, 3·G) legal operations that change something."""
    legal = env._views["action_mask"].astype(bool)
    legal[:, : env.batch.n_gpus] &= held_by(env._views) == 0
    return legal


def test_candidates_are_what_the_look_ahead_says_in_no_order_of_worth() -> None:
    """Each candidate is a different legal operation that changes something, with the exact saving of the look-ahead."""
    env = MoEPlacementFlatEnv(**(TINY | {"passes_per_interval": 1000}), candidates=6, intervals=2)
    rng = np.random.default_rng(0)
    obs, info = env.reset(seed=2)
    kinds, experts, sorted_by_worth, done = set(), [], [], False
    while not done:
        rows, mask = features(env, obs), info["action_mask"]
        operations = env.batch.candidates["operations"][0]
        legal = changes(env)
        chosen = [tuple(pair) for pair in operations[1:][mask[1:] == 1].tolist()]
        assert mask[0] == 1
        assert len(set(chosen)) == len(chosen) > 0
        assert chosen == sorted(chosen)
        for (expert, node), row in zip(chosen, rows[mask[1:] == 1], strict=True):
            assert legal[expert, node]
            parts = env.lookahead(expert)[node]
            assert row[SAVED] == pytest.approx(parts[PART_TRUE] + parts[PART_MIGRATION], rel=1e-4, abs=1e-3)
            kinds.add(node // GPUS)
        experts.append(len({expert for expert, _ in chosen}))
        sorted_by_worth.append(bool((np.diff(rows[mask[1:] == 1, SAVED]) <= 0).all()))
        assert not rows[mask[1:] == 0].any()
        obs, _, done, _, info = env.step(rng.choice(np.flatnonzero(mask)))
        assert info["legal"]
        assert info["illegal_actions"] == 0
    assert kinds == {0, 1, 2}
    assert np.mean(experts) > 3
    assert np.mean(sorted_by_worth) < 0.5


def test_with_room_for_all_every_operation_on_the_two_busiest_gpus_is_proposed() -> None:
    """On two GPUs these are all operations."""
    cluster = replace(TINY["cluster"], n_nodes=1, slots_per_gpu=5)
    env = MoEPlacementFlatEnv(**(TINY | {"cluster": cluster}), candidates=120)
    env.reset(seed=0)
    for _ in range(STEPS):
        mask = env.action_masks()
        proposed = env.batch.candidates["operations"][0][1:][mask[1:]]
        assert sorted(map(tuple, proposed.tolist())) == [tuple(pair) for pair in np.argwhere(changes(env)).tolist()]
        env.step(1)


def test_an_absent_candidate_is_illegal_counted_and_paid() -> None:
    env = MoEPlacementFlatEnv(**TINY, candidates=200, illegal_penalty=0.25)
    _, info = env.reset(seed=1)
    absent = int(np.flatnonzero(info["action_mask"] == 0)[0])
    for n in range(1, 4):
        _, reward, _, _, info = env.step(absent)
        assert (info["legal"], info["illegal_actions"], reward) == (False, n, -0.25)
    assert env.step(-1)[4]["illegal_actions"] == 4
    assert env.step(201)[4]["illegal_actions"] == 5
    _, reward, _, _, info = env.step(env.noop_action())
    assert (info["legal"], info["illegal_actions"], info["operation"], reward) == (True, 5, 0, 0.0)
    env.reset()
    assert env.step(0)[4]["illegal_actions"] == 0


def test_observations_are_small_and_in_their_space() -> None:
    flat = gymnasium.make("MoEPlacementFlat-v0")
    size = 32 * len(CANDIDATE_FEATURES) + 16 * len(COMPACT_GPU_FEATURES) + 6
    assert flat.observation_space.shape == (size,) == (454,)
    assert np.isfinite(flat.observation_space.low).all()
    assert np.isfinite(flat.observation_space.high).all()
    obs, info = flat.reset(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(64):
        assert obs in flat.observation_space
        obs, *_, info = flat.step(rng.choice(np.flatnonzero(info["action_mask"])))
    with pytest.raises(ValueError, match="candidates is 0: expected at least 1"):
        MoEPlacementFlatEnv(**TINY, candidates=0)


def test_product_mask_allows_no_illegal_pair() -> None:
    env = MoEPlacementEnv(**TINY, intervals=2)
    rng = np.random.default_rng(0)
    env.reset(seed=3)
    for step in range(2 * STEPS):
        mask = env.action_masks()
        assert mask.shape == (EXPERTS + 3 * GPUS,)
        experts, nodes = np.flatnonzero(mask[:EXPERTS]), np.flatnonzero(mask[EXPERTS:])
        assert env._views["action_mask"][np.ix_(experts, nodes)].all()
        info = env.step((rng.choice(experts), rng.choice(nodes)))[4]
        assert info["illegal_actions"] == 0, step
    # Where no node is legal for all experts, the mask must not be empty.
    assert product_masks(np.eye(2, dtype=np.int8)).tolist() == [True] * 4
    vector = MoEPlacementVectorEnv(2, **TINY)
    vector.reset(seed=[3, 4])
    env.reset(seed=3)
    assert np.array_equal(vector.action_masks()[0], env.action_masks())


def test_vector_equals_single_flat_environments() -> None:
    options: dict[str, Any] = TINY | {"candidates": 5, "illegal_penalty": 0.5}
    vector = gymnasium.make_vec("MoEPlacementFlat-v0", 3, autoreset_mode=AutoresetMode.SAME_STEP, **options)
    assert isinstance(vector, MoEPlacementFlatVectorEnv)
    singles = [MoEPlacementFlatEnv(**options) for _ in range(3)]
    obs, infos = vector.reset(seed=7)
    mine = [env.reset(seed=7 + i) for i, env in enumerate(singles)]
    rng = np.random.default_rng(0)
    for _ in range(2 * STEPS):
        assert obs in vector.observation_space
        assert np.array_equal(vector.action_masks(), infos["action_mask"].astype(bool))
        actions = rng.integers(0, 7, 3)
        for i, (env, (one, info)) in enumerate(zip(singles, mine, strict=True)):
            assert same(obs[i], one)
            assert np.array_equal(infos["action_mask"][i], info["action_mask"])
            assert np.array_equal(env.action_masks(), info["action_mask"].astype(bool))
        obs, rewards, ended, _, infos = vector.step(actions)
        for i, env in enumerate(singles):
            last, reward, done, _, info = env.step(actions[i])
            assert (reward, done) == (rewards[i], ended[i])
            mine[i] = (last, info)
            if done:
                assert same(infos["final_obs"][i], last)
                assert infos["final_info"]["illegal_actions"][i] == info["illegal_actions"]
                mine[i] = env.reset()
    with pytest.raises(ValueError, match=r"actions have shape \(2,\): expected \(3,\)"):
        vector.step(np.zeros(2, int))


@pytest.mark.parametrize("name", ["MoEPlacement-v0", "MoEPlacementFlat-v0"])
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_modes_are_those_of_gymnasium(name: str, mode: AutoresetMode, limit: int | None) -> None:
    """The same arrays, rewards and ends as Gymnasium's SyncVectorEnv of single environments."""
    options = TINY | ({} if limit is None else {"max_episode_steps": limit})
    mine = gymnasium.make_vec(name, 3, autoreset_mode=mode.value, **options)
    theirs = gymnasium.make_vec(name, 3, "sync", vector_kwargs={"autoreset_mode": mode}, **options)
    assert mine.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == mode
    pair = (mine, theirs)
    observed = [env.reset(seed=5)[0] for env in pair]
    assert same(*observed)
    rng, ends = np.random.default_rng(0), 0
    for _ in range(2 * STEPS + 3):
        actions = rng.integers(0, 5, (3,) if "Flat" in name else (3, 2))
        results = [env.step(actions) for env in pair]
        for i in range(4):
            assert same(np.asarray(results[0][i]) if i else results[0][i], results[1][i]), i
        ended = results[0][2] | results[0][3]
        ends += int(ended.sum())
        infos = [result[4] for result in results]
        assert (
            ("final_obs" in infos[0]) == ("final_obs" in infos[1]) == (mode == AutoresetMode.SAME_STEP and ended.any())
        )
        if ended.any() and mode != AutoresetMode.SAME_STEP:
            assert np.array_equal(infos[0]["illegal_actions"], infos[1]["illegal_actions"])
            assert ("time_us" in infos[0]) == ("time_us" in infos[1]) == (limit is None)
        if ended.any() and mode == AutoresetMode.DISABLED:
            with pytest.raises(gymnasium.error.ResetNeeded, match="reset_mask"):
                mine.step(actions)
            again = [env.reset(options={"reset_mask": ended.copy()})[0] for env in pair]
            assert same(*again)
    assert ends >= 3


def test_reset_mask_leaves_the_others_alone() -> None:
    env = MoEPlacementFlatVectorEnv(3, autoreset_mode="Disabled", **TINY)
    env.reset(seed=1)
    obs = env.step(np.array([1, 1, 1]))[0]
    mask = np.array([False, True, False])
    after = env.reset(seed=[8, 9, 10], options={"reset_mask": mask})[0]
    assert np.array_equal(after[~mask], obs[~mask])
    assert np.array_equal(after[1], MoEPlacementFlatEnv(**TINY).reset(seed=9)[0])
    with pytest.raises(ValueError, match="expected a bool array"):
        env.reset(options={"reset_mask": np.zeros(3, bool)})


def copies(env: Any) -> list[Any]:
    return [deepcopy(env), pickle.loads(pickle.dumps(env))]


@pytest.mark.parametrize("make", [MoEPlacementFlatEnv, MoEPlacementFlatVectorEnv])
def test_copies_and_states_of_flat_environments_continue_bit_for_bit(make: Any) -> None:
    env = make(**TINY, intervals=2)
    env.reset(seed=4)
    rng = np.random.default_rng(0)
    shape = () if make is MoEPlacementFlatEnv else (1,)
    for _ in range(5):
        env.step(rng.integers(0, 9, shape))
    twins, kept = copies(env), env.get_state()
    actions = rng.integers(0, 9, (2 * STEPS - 5, *shape))
    first = [env.step(action) for action in actions]
    env.set_state(kept)
    for other in (*twins, env):
        for action, expected in zip(actions, first, strict=True):
            assert all(same(a, b) for a, b in zip(other.step(action), expected, strict=True))


# The AEC environment


def test_aec_env_shows_the_expert_and_its_exact_mask() -> None:
    env, single = moe_placement_v0.raw_env(**TINY), MoEPlacementEnv(**TINY)
    env.reset(seed=6)
    views = single.reset(seed=6)[0]
    rng, total, seen = np.random.default_rng(0), 0.0, 0
    for agent in env.agent_iter():
        obs, reward, ended, _, _ = env.last()
        assert obs in env.observation_space(agent)
        total += reward if agent == "gpu" else 0.0
        if ended:
            env.step(None)
            continue
        if agent == "expert":
            assert not env.observe("gpu")["chosen"].any()
            assert same(obs["action_mask"], views["action_mask"].max(1))
            choice = rng.choice(np.flatnonzero(obs["action_mask"]))
            env.step(choice)
            continue
        assert np.flatnonzero(obs["chosen"]).tolist() == [choice]
        assert same(obs["action_mask"], views["action_mask"][choice])
        node = rng.choice(np.flatnonzero(obs["action_mask"]))
        env.step(node)
        views, expected, _, _, info = single.step((choice, node))
        assert env.rewards == {"expert": expected, "gpu": expected}
        assert info["legal"]
        seen += 1
    assert seen == STEPS
    assert total == pytest.approx(100 * LAYERS * float(single.batch.saved[0]))
    assert info["illegal_actions"] == 0


def test_aec_env_copies_and_states() -> None:
    env = moe_placement_v0.raw_env(**TINY)
    env.reset(seed=6)
    for action in (1, 2, 3):
        env.step(action)  # the gpu agent is next
    twins, kept = copies(env), env.get_state()

    def finish(one: Any) -> list[Any]:
        results = []
        for action in (0, 1, 5, 4, 3, 2):
            one.step(action)
            results.append([*one.last(), one.agent_selection])
        return results

    expected = finish(env)
    env.set_state(kept)
    for other in (*twins, env):
        assert all(same(a, b) for x, y in zip(finish(other), expected, strict=True) for a, b in zip(x, y, strict=True))
    env.reset()
    with pytest.raises(ValueError, match="the choice of expert is 99: expected 0 … 7"):
        env.step(99)
