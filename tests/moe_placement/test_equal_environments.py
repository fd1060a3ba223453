"""Single, vector and PettingZoo environments and their copies play the same from the same seed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from clustergym import moe_placement_v0
from clustergym.moe_placement.environment import STEP_INFO, MoEPlacementEnv
from clustergym.moe_placement.profiles import TRANSPORTS
from clustergym.moe_placement.vector import MoEPlacementVectorEnv
from instances import made_profile
from placement_task import EXPERTS, GPUS, LAYERS, OPS, TINY, legal_action, same


def play(env: gymnasium.Env[Any, Any], seed: int, episodes: int = 2) -> Iterator[tuple[Any, ...]]:
    """Whole episodes with actions that hang on the seed of the actions alone; later resets are not seeded."""
    rng = np.random.default_rng(0)
    for i in range(episodes):
        yield env.reset(seed=seed if i == 0 else None)
        done = False
        while not done:
            result = env.step(rng.integers(0, [EXPERTS, 3 * GPUS]))
            done = result[2]
            yield result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_same_seed_same_everything(transport: str) -> None:
    profile = made_profile(transport=transport)
    options = TINY | {"intervals": 2, "schedule": "drift", "profile": profile, "lookahead": True}
    first, second = (list(play(MoEPlacementEnv(**options), 11)) for _ in range(2))
    other = list(play(MoEPlacementEnv(**options), 12))
    # Steps and reset of two episodes: the second is another one.
    assert len(first) == len(second) == len(other) == 2 * (2 * LAYERS * OPS + 1)
    assert all(same(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert not same(first[0][0], other[0][0])
    assert not same(first[0][0], first[len(first) // 2][0])


@pytest.mark.parametrize(
    "options",
    [
        {"intervals": 2, "schedule": "drift", "lookahead": True},
        {"intervals": 1, "profile": made_profile("local-hash"), "start": "eplb", "compare_eplb": True},
        {"intervals": 3, "profile": "sglang-decode", "schedule": "switch", "migration": "async"},
    ],
)
def test_vectorised_equals_single_environments(options: dict[str, Any]) -> None:
    options = TINY | options
    vector = gymnasium.make_vec("MoEPlacement-v0", 3, autoreset_mode=AutoresetMode.SAME_STEP, **options)
    assert isinstance(vector, MoEPlacementVectorEnv)
    assert vector.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    singles = [MoEPlacementEnv(**options) for _ in range(3)]
    obs, info = vector.reset(seed=40)
    mine = [env.reset(seed=40 + i)[0] for i, env in enumerate(singles)]
    assert info == {}
    rng = np.random.default_rng(0)
    length, ended = options["intervals"] * LAYERS * OPS, 0
    returns = np.zeros(3)
    for step in range(2 * length + 5):
        assert obs in vector.observation_space
        for i in range(3):
            assert same({name: array[i] for name, array in obs.items()}, mine[i])
        actions = np.array([legal_action(m, rng) if rng.random() < 0.8 else rng.integers(-2, 40, 2) for m in mine])
        obs, rewards, terminated, truncated, infos = vector.step(actions)
        assert not truncated.any()
        for i, env in enumerate(singles):
            last, reward, done, _, info = env.step(actions[i])
            assert rewards[i] == reward
            assert terminated[i] == done == ((step + 1) % length == 0)
            mine[i] = last
            returns[i] += reward
            for name in STEP_INFO:
                assert infos[f"_{name}"][i]
                assert infos[name][i] == info[name]
            if done:
                assert infos["_final_obs"][i]
                assert infos["_final_info"][i]
                assert same(infos["final_obs"][i], last)
                for_cleanrl = info.pop("final_info")["episode"]  # its loop runs single environments
                assert for_cleanrl == {"r": pytest.approx(returns[i]), "l": length}
                returns[i] = 0
                assert {name: infos["final_info"][name][i] for name in info} == info
                assert {"time_us", "served_us", "migration_us", "saved_vs_start", "legal"} <= info.keys()
                assert ("saved_vs_eplb" in info) == options.get("compare_eplb", False)
                assert infos["final_info"]["legal"].dtype == bool
                mine[i] = env.reset()[0]
                ended += 1
        if not terminated.any():
            assert "final_obs" not in infos
    assert ended == 6


def test_vector_env_never_writes_into_what_somebody_holds() -> None:
    vector = MoEPlacementVectorEnv(4, autoreset_mode="SameStep", **(TINY | {"intervals": 2}))
    rng = np.random.default_rng(0)
    held: list[tuple[Any, Any]] = []

    def hold(obs: dict[str, np.ndarray]) -> None:
        for array in obs.values():
            # The array itself, a view of a view, a tensor's view (torch warns of read-only arrays), or nothing.
            way = int(rng.integers(4))
            if way == 0:
                held.append((array, array.copy()))
            elif way == 1:
                held.append((array[1:][0], array[1].copy()))
            elif way == 2 and array.flags.writeable:
                held.append((torch.from_numpy(array)[2], torch.from_numpy(array[2].copy())))

    hold(vector.reset(seed=1)[0])
    for _ in range(3 * 2 * LAYERS * OPS):
        obs, *_, infos = vector.step(rng.integers(0, [EXPERTS, 3 * GPUS], (4, 2)))
        hold(obs)
        held += [(array, array.copy()) for last in infos.get("final_obs", ()) for array in last.values()]
        assert all((kept == copy).all() for kept, copy in held)
        if rng.random() < 0.3:
            held.clear()


def test_vector_env_gives_out_memory_again() -> None:
    vector = MoEPlacementVectorEnv(2, **TINY)
    vector.reset(seed=1)
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for _ in range(2 * LAYERS * OPS):
        obs = vector.step(rng.integers(0, [EXPERTS, 3 * GPUS], (2, 2)))[0]
        seen.add(obs["gpus"].ctypes.data)
    # One that the caller holds, and one that is being written.
    assert len(seen) == 2


@pytest.mark.parametrize("copy", [deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [MoEPlacementEnv, moe_placement_v0.parallel_env])
def test_a_copy_continues_bit_for_bit(make: Any, copy: Any) -> None:
    env = make(**(TINY | {"intervals": 2, "schedule": "drift"}))
    env.reset(seed=4)
    rng = np.random.default_rng(0)

    def act(one: Any, choice: np.ndarray) -> Any:
        return one.step(choice if make is MoEPlacementEnv else {"expert": choice[0], "gpu": choice[1]})

    for choice in rng.integers(0, [EXPERTS, 3 * GPUS], (5, 2)):
        act(env, choice)
    twin, kept = copy(env), env.get_state()
    choices = rng.integers(0, [EXPERTS, 3 * GPUS], (2 * LAYERS * OPS - 5, 2))
    first = [act(env, choice) for choice in choices]
    second = [act(twin, choice) for choice in choices]
    env.set_state(kept)
    third = [act(env, choice) for choice in choices]
    for results in zip(first, second, third, strict=True):
        for a, b, c in zip(*results, strict=True):
            assert same(a, b)
            assert same(a, c)


def test_vector_env_takes_a_list_of_seeds() -> None:
    vector = MoEPlacementVectorEnv(3, **TINY)
    obs, _ = vector.reset(seed=[7, 3, 7])
    for i, seed in enumerate((7, 3, 7)):
        assert same({name: array[i] for name, array in obs.items()}, MoEPlacementEnv(**TINY).reset(seed=seed)[0])


def test_vector_env_of_one_equals_the_single_environment() -> None:
    vector, single = MoEPlacementVectorEnv(1, **TINY), MoEPlacementEnv(**TINY)
    rng = np.random.default_rng(0)
    obs, mine = vector.reset(seed=9)[0], single.reset(seed=9)[0]
    for _ in range(LAYERS * OPS):
        assert same({name: array[0] for name, array in obs.items()}, mine)
        action = legal_action(mine, rng)
        (obs, rewards, *_), (mine, reward, *_) = vector.step(action[None]), single.step(action)
        assert rewards[0] == reward


def test_parallel_env_is_the_gymnasium_one_split_in_two() -> None:
    options = TINY | {"intervals": 2, "lookahead": True}
    single, parallel = MoEPlacementEnv(**options), moe_placement_v0.parallel_env(**options)
    obs, _ = single.reset(seed=3)
    seen, infos = parallel.reset(seed=3)
    assert infos == {"expert": {}, "gpu": {}}
    rng = np.random.default_rng(0)
    done = False
    while not done:
        assert parallel.agents == ["expert", "gpu"]
        joint = obs.pop("action_mask")
        for agent, own in (("expert", joint.any(1)), ("gpu", joint.any(0))):
            assert same(seen[agent], obs | {"joint_mask": joint, "action_mask": own.astype(np.int8)})
        state = np.concatenate([array.ravel() for array in obs.values()])
        assert np.array_equal(parallel.state(), state)
        assert parallel.state() in parallel.state_space
        action = rng.integers(0, [EXPERTS, 3 * GPUS])
        obs, reward, done, _, info = single.step(action)
        info.pop("final_info", None)  # for CleanRL's loop over single environments
        seen, rewards, ends, cuts, infos = parallel.step({"gpu": action[1], "expert": action[0]})
        assert rewards == {"expert": reward, "gpu": reward}
        assert ends == {"expert": done, "gpu": done}
        assert cuts == {"expert": False, "gpu": False}
        info.pop("final_info", None)  # only Gymnasium's form has it
        assert infos == {"expert": info, "gpu": info}
    assert parallel.agents == []


@pytest.mark.parametrize("kind", ["single", "vector", "parallel"])
def test_returned_arrays_are_never_written_again(kind: str) -> None:
    options = TINY | {"intervals": 2, "lookahead": True}
    rng = np.random.default_rng(0)
    env: Any
    if kind == "single":
        env, sample = MoEPlacementEnv(**options), lambda: rng.integers(0, [EXPERTS, 3 * GPUS])
    elif kind == "vector":
        env, sample = MoEPlacementVectorEnv(2, **options), lambda: rng.integers(0, [EXPERTS, 3 * GPUS], (2, 2))
    else:
        env = moe_placement_v0.parallel_env(**options)
        sample = lambda: {"expert": rng.integers(EXPERTS), "gpu": rng.integers(3 * GPUS)}  # noqa: E731
    kept = [env.reset(seed=0)]
    copies = [deepcopy(kept[0])]
    for _ in range(2 * LAYERS * OPS):
        kept.append(env.step(sample()) + ((env.state(),) if kind == "parallel" else ()))
        copies.append(deepcopy(kept[-1]))
    env.reset(seed=1)
    for old, copy in zip(kept, copies, strict=True):
        for a, b in zip(old, copy, strict=True):
            assert same(a, b)
