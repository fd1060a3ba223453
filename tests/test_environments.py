"""The Gymnasium and PettingZoo environments: their contracts, what they show, and what they pay."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test

import clustergym
from clustergym import TokenTrace, moe_placement_v0, synthetic_trace
from clustergym.moe_placement import ClusterSpec, Interval, ModelSpec, PlacementBatch, Simulator
from clustergym.moe_placement.environment import STEP_INFO, MoEPlacementEnv
from clustergym.moe_placement.kernels import state as kernel_state
from clustergym.moe_placement.profiles import TRANSPORTS
from clustergym.moe_placement.streams import layer_first
from clustergym.moe_placement.vector import MoEPlacementVectorEnv
from instances import made_profile
from reference import PassResult, kernel_us, migration_us, serve, times_us

MODEL = ModelSpec("tiny", 3, 8, 2, 512, 256, kernel_start_us=4, kernel_expert_us=1, kernel_pair_us=0.2)
CLUSTER = ClusterSpec("tiny", 2, 2, 3, intra_gb_s=4, inter_gb_s=1, intra_latency_us=1, inter_latency_us=2)
EXPERTS, GPUS, LAYERS, OPS = 8, 4, 3, 3


def padded(trace: TokenTrace, share: float) -> TokenTrace:
    """The trace with some of its entries replaced by pads."""
    experts = trace.experts.copy()
    experts[np.random.default_rng(7).random(experts.shape) < share] = -1
    return TokenTrace(experts, trace.n_experts, trace.layer_ids, trace.seq_lens, trace.domains, trace.model, "padded")


TRACE = padded(
    synthetic_trace(n_tokens=600, n_layers=LAYERS, n_experts=EXPERTS, top_k=2, n_domains=3, mean_seq_len=20.0, seed=1),
    0.1,
)
TINY: dict[str, Any] = {
    "trace": TRACE, "split": "all", "model": MODEL, "cluster": CLUSTER, "tokens_per_rank": 6, "sampled_passes": 2,
    "ops_per_layer": OPS, "passes_per_interval": 5,
}  # fmt: skip
IDS = ("MoEPlacement-v0", "MoEPlacementDrift-v0")


def legal_action(obs: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """A random operation that changes something wherever one exists."""
    changes = obs["joint_mask"].astype(bool)
    changes[:, :GPUS] &= obs["placement"] == 0
    return rng.choice(np.argwhere(changes))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and np.array_equal(a, b)


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


# Contracts


@pytest.mark.parametrize("env_id", IDS)
def test_check_env_is_silent(env_id: str) -> None:
    env = gymnasium.make(env_id, **TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
        env.close()


def test_defaults_pass_check_env_too() -> None:
    env = gymnasium.make("MoEPlacement-v0").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    assert isinstance(env, MoEPlacementEnv)
    assert (env.batch.cluster.name, env.batch.n_slots, env.batch.model.name) == ("h800-4x4", 5, "tiny-moe")


def test_drift_id_serves_eight_drifting_intervals_from_eplb() -> None:
    config = gymnasium.make("MoEPlacementDrift-v0", **TINY).unwrapped.batch.config  # type: ignore[attr-defined]
    assert (config.intervals, config.schedule, config.start) == (8, "drift", "eplb")


def test_module_prefix_imports_the_package() -> None:
    program = """
import sys, gymnasium
assert "clustergym" not in sys.modules and "MoEPlacement-v0" not in gymnasium.registry
env = gymnasium.make("clustergym:MoEPlacement-v0", tokens_per_rank=8)
obs, _ = env.reset(seed=1)
print(sorted(obs), env.step([0, 0])[1:4])
"""
    found = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    # Where the kernels have not been compiled yet, a line says so.
    assert [line for line in found.stderr.splitlines() if not line.startswith("compiling the simulator")] == []
    assert found.stdout.strip() == (
        "['affinity', 'coactivation', 'expert_mask', 'experts', 'gpu_mask', 'gpus', 'joint_mask', 'placement', "
        "'progress', 'traffic'] (0.0, False, False)"
    )


def test_pettingzoo_api() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(moe_placement_v0.parallel_env(**TINY), num_cycles=60)
        parallel_seed_test(lambda: moe_placement_v0.parallel_env(**TINY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api_test(moe_placement_v0.env(**TINY), num_cycles=60)
    # PettingZoo remarks on what two different agents with action masks cannot avoid; nothing else may come.
    assert {str(w.message) for w in caught} <= {
        "Observation is not a NumPy array",
        'We recommend agents to be named in the format <descriptor>_<number>, like "player_0"',
        "Observation space for each agent probably should be gymnasium.spaces.box or gymnasium.spaces.discrete",
        "Agents have different observation space sizes",
    }


def test_pettingzoo_registry() -> None:
    parallel = pettingzoo.make("parallel", "moe_placement_v0", **TINY)
    assert parallel.possible_agents == ["expert", "gpu"]
    assert parallel.reset(seed=1)[0]["gpu"]["gpus"].shape == (12, 16)
    aec = pettingzoo.make("aec", "moe_placement_v0", **TINY)
    aec.reset(seed=1)
    assert aec.agent_selection == "expert"


def test_importing_twice_registers_once() -> None:
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(clustergym)


# The same from the same seed


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
        {"intervals": 2, "schedule": "drift", "lookahead": True, "lookahead_norm": 16},
        {"intervals": 1, "profile": made_profile(transport="stay"), "start": "eplb", "memory": True},
        {"intervals": 3, "profile": "sglang-decode", "schedule": "switch", "migration": "async", "compare_eplb": False},
    ],
)
def test_vectorised_equals_single_environments(options: dict[str, Any]) -> None:
    options = TINY | options
    vector = gymnasium.make_vec("MoEPlacement-v0", 3, "vector_entry_point", **options)
    assert isinstance(vector, MoEPlacementVectorEnv)
    singles = [MoEPlacementEnv(**options) for _ in range(3)]
    obs, info = vector.reset(seed=40)
    mine = [env.reset(seed=40 + i)[0] for i, env in enumerate(singles)]
    assert info == {}
    rng = np.random.default_rng(0)
    length, ended = options["intervals"] * LAYERS * OPS, 0
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
            for name in STEP_INFO:
                assert infos[f"_{name}"][i] == (not done)
                assert infos[name][i] == (0 if done else info[name])
            if done:
                assert infos["_final_obs"][i]
                assert infos["_final_info"][i]
                assert same(infos["final_obs"][i], last)
                assert {name: infos["final_info"][name][i] for name in info} == info
                assert {"time_us", "served_us", "migration_us", "saved_vs_start", "legal"} <= info.keys()
                assert ("saved_vs_eplb" in info) == options.get("compare_eplb", True)
                assert infos["final_info"]["legal"].dtype == bool
                mine[i] = env.reset()[0]
                ended += 1
        if not terminated.any():
            assert "final_obs" not in infos
    assert ended == 6


def test_vector_env_never_writes_into_what_somebody_holds() -> None:
    vector = MoEPlacementVectorEnv(4, **(TINY | {"intervals": 2}))
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
        hold(vector.step(rng.integers(0, [EXPERTS, 3 * GPUS], (4, 2)))[0])
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
    # One that the caller holds, one that is being written.
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
        for agent, other in (("expert", "gpu"), ("gpu", "expert")):
            known = {k: obs[k] for k in seen[agent] if k != "action_mask"} | {"action_mask": obs[f"{agent}_mask"]}
            assert same(seen[agent], {k: known[k] for k in seen[agent]})
            assert other not in seen[agent]
        assert "lookahead" in seen["gpu"]
        state = np.concatenate([obs[k].ravel() for k in ("experts", "gpus", "traffic", "placement", "progress")])
        assert np.array_equal(parallel.state(), state)
        assert parallel.state() in parallel.state_space
        action = rng.integers(0, [EXPERTS, 3 * GPUS])
        obs, reward, done, _, info = single.step(action)
        seen, rewards, ends, cuts, infos = parallel.step({"gpu": action[1], "expert": action[0]})
        assert rewards == {"expert": reward, "gpu": reward}
        assert ends == {"expert": done, "gpu": done}
        assert cuts == {"expert": False, "gpu": False}
        assert infos == {"expert": info, "gpu": info}
    assert parallel.agents == []


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
            before = {name: t.clone() for name, t in {**state.sim, "placement": state.episode["slots"]}.items()}
            forbidden = np.argwhere(obs["joint_mask"] == 0)
            kind = ["outside", "forbidden", "legal"][(i + tried.total() // OPS) % 3]
            choices = {"outside": outside, "forbidden": forbidden}
            action = legal_action(obs, rng) if kind == "legal" else rng.choice(choices[kind])
            old, (obs, reward, _, _, info) = obs, env.step(action)
            tried[kind] += 1
            assert info["legal"] == (kind == "legal")
            assert (info["operation"] == kernel_state.OP_ILLEGAL) == (kind != "legal")
            if kind != "legal" and i < OPS - 1:
                assert reward == 0
                # Scratch totals aside, nothing moved; only the clock did.
                assert all(bool((before[name] == t).all()) for name, t in state.sim.items() if name != "copies")
                assert bool((before["placement"] == state.episode["slots"]).all())
                assert all(np.array_equal(old[name], obs[name]) for name in obs if name != "progress")
            elif kind == "legal" and i < OPS - 1:
                assert not np.array_equal(old["placement"], obs["placement"])
    assert min(tried[kind] for kind in ("outside", "forbidden", "legal")) > 3


def test_place_where_the_expert_lies_is_the_no_op() -> None:
    env = MoEPlacementEnv(**TINY)
    obs, _ = env.reset(seed=0)
    e, g = np.argwhere(obs["placement"] == 1)[3]
    assert obs["joint_mask"][e, g] == 1
    after, reward, _, _, info = env.step([e, g])
    assert (reward, info["legal"], info["operation"]) == (0.0, True, kernel_state.OP_NOTHING)
    assert all(np.array_equal(obs[name], after[name]) for name in obs if name != "progress")


@pytest.mark.parametrize("profile", ["sglang-decode", "vllm", made_profile(transport="stay")], ids=str)
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
    assert obs["expert_mask"].all()
    assert obs["gpu_mask"].tolist() == [1, 0, 0]
    _, reward, _, _, info = env.step([2, 0])
    assert (reward, info["legal"]) == (0.0, True)


# Rewards


def interval_of(batch: PlacementBatch, which: int) -> Interval:
    """A copy of the observed (0) or the next (1) interval of environment 0."""
    n = batch.rules_host.n_passes
    passes = slice(which * n, (which + 1) * n)
    arrays = (batch.sim[name][0, passes].numpy().copy() for name in ("rows", "rank_start"))
    return Interval(layer_first(batch.trace), *arrays)


def test_each_reward_is_what_its_operation_saves() -> None:
    env = MoEPlacementEnv(**TINY)
    batch, simulator = env.batch, Simulator(MODEL, CLUSTER, passes_per_interval=5)
    obs, _ = env.reset(seed=2)
    rng = np.random.default_rng(1)
    interval, first = interval_of(batch, 1), batch.episode["slots"][0].numpy().copy()
    placement = first.copy()
    for step in range(LAYERS * OPS):
        layer = step // OPS
        before = simulator.evaluate(interval, placement, first).total_us
        old_slots = batch.sim["slots"][0].numpy().copy()
        np.testing.assert_array_equal(np.sort(old_slots), np.sort(placement[layer]))
        obs, reward, done, _, info = env.step(legal_action(obs, rng))
        at_end = (step + 1) % OPS == 0
        placement[layer] = (batch.episode["slots"][0, layer] if at_end else batch.sim["slots"][0]).numpy()
        saved = (before - simulator.evaluate(interval, placement, first).total_us).sum()
        assert reward == pytest.approx(saved / batch.rules_host.static_us, rel=1e-9, abs=1e-12)
        assert info["operation_reward"] == pytest.approx(reward, rel=1e-12, abs=1e-15)
    assert done


def test_what_earlier_operations_save_is_credited_when_the_layer_is_reached() -> None:
    """In later intervals the first reward of a layer has two parts; ``operation_reward`` is the operation's own."""
    env = MoEPlacementEnv(**(TINY | {"intervals": 3, "schedule": "drift"}))
    obs, _ = env.reset(seed=6)
    rng, credited, done = np.random.default_rng(0), [], False
    while not done:
        obs, reward, done, _, info = env.step(legal_action(obs, rng))
        credited.append(reward - info["operation_reward"])
    found = np.abs(np.array(credited)) > 1e-12
    # A credit comes with the last operation on the layer before, in all intervals but the first.
    reached = np.zeros(3 * LAYERS * OPS, bool)
    reached[LAYERS * OPS - 1 : -1 : OPS] = True
    np.testing.assert_array_equal(found, reached)


@pytest.mark.parametrize("env_id", IDS)
def test_the_end_of_an_episode_in_numbers(env_id: str) -> None:
    """The return is the time saved against the start placement; all times are means of a layer and pass."""
    env = gymnasium.make(env_id, **TINY)
    obs, _ = env.reset(seed=21)
    rng, total, done = np.random.default_rng(1), 0.0, False
    while not done:
        obs, reward, done, _, info = env.step(legal_action(obs, rng))
        total += reward
    static_us = env.unwrapped.batch.rules_host.static_us / LAYERS
    assert info["time_us"] == info["served_us"] + info["migration_us"]
    assert info["migration_us"] > 0
    assert info["saved_vs_start"] == pytest.approx(total, rel=1e-9)
    assert info["saved_vs_start"] == pytest.approx((info["start_us"] - info["time_us"]) / static_us, rel=1e-9)
    assert info["saved_vs_eplb"] == pytest.approx((info["eplb_us"] - info["time_us"]) / static_us, rel=1e-9)
    assert info["reused"] == 0.0


def test_lookahead_agrees_with_the_method() -> None:
    env = MoEPlacementEnv(**TINY, lookahead=True)
    obs, _ = env.reset(seed=2)
    for e in range(EXPERTS):
        parts = env.lookahead(e)
        saved = parts[:, kernel_state.PART_TRUE] + parts[:, kernel_state.PART_MIGRATION]
        np.testing.assert_allclose(saved, obs["lookahead"][e], atol=1e-6)
    assert (obs["lookahead"] != 0).any()
    assert (obs["lookahead"][obs["joint_mask"] == 0] == 0).all()


# Observations


def tokens_of(interval: Interval, layer: int) -> list[set[int]]:
    """Experts of each token of all passes."""
    return [{int(e) for e in interval.experts[layer, row] if e >= 0} for row in interval.rows.ravel()]


def reference_layer(batch: PlacementBatch, interval: Interval, transport: str, layer: int) -> list[PassResult]:
    """Each pass of the observed interval on a layer, under the placement as it is now."""
    placement = batch.episode["slots"][0].numpy().copy()
    placement[layer] = batch.sim["slots"][0].numpy()
    return serve(interval, placement, 2, "rank-nearest", transport)[layer]


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
        held = [{int(e) for e in gpu if e >= 0} for gpu in batch.sim["slots"][0].numpy()]
        replicas = np.array([[e in held[g] for g in range(GPUS)] for e in range(EXPERTS)])
        np.testing.assert_array_equal(obs["placement"], replicas)
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
        np.testing.assert_allclose(obs["coactivation"], together, rtol=1e-6)
        affinity = np.zeros((EXPERTS, EXPERTS))
        if layer > 0:
            past = tokens_of(interval, layer - 1)
            for i in range(EXPERTS):
                users = [t for t, p in zip(tokens, past, strict=True) if i in p]
                affinity[i] = [sum(j in t for t in users) / max(1, len(users)) for j in range(EXPERTS)]
        np.testing.assert_allclose(obs["affinity"], affinity, rtol=1e-6)

        old = batch.episode["slots"][0, layer].numpy()
        experts = {
            0: share * EXPERTS,
            1: average[layer] * EXPERTS,
            2: drift * EXPERTS,
            3: replicas.sum(1) / GPUS,
            4: pairs.sum(0).max(1) / np.maximum(count, 1),
            5: [max(load[g] for g in range(GPUS) if e in held[g]) / mean for e in range(EXPERTS)],
            6: [sum(e in held[g] and e not in old[g] for g in range(GPUS)) for e in range(EXPERTS)],
            7: [
                np.mean([sum(together[e, x] for x in held[g]) for g in range(GPUS) if e in held[g]])
                for e in range(EXPERTS)
            ],
            8: [e in held[slowest] for e in range(EXPERTS)],
        }
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
        np.testing.assert_allclose(obs["traffic"], traffic, rtol=1e-5)
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
            10: (pairs > 0).sum((0, 1)) / (2 * 3),
            11: [sum(together[e, x] for e in hot for x in held[g]) / 8 for g in range(GPUS)],
            12: np.arange(GPUS) == slowest,
            13: np.repeat(load.reshape(2, 2).mean(1), 2) / mean,
            14: [len(held[g] - set(old[g].tolist())) / 3 for g in range(GPUS)],
            15: np.full(GPUS, 0.25),
        }
        for kind in range(3):
            rows = obs["gpus"][kind * GPUS : (kind + 1) * GPUS]
            np.testing.assert_array_equal(rows[:, :3], np.tile(np.eye(3)[kind], (GPUS, 1)))
            for column, known in gpus.items():
                np.testing.assert_allclose(rows[:, column], known, rtol=1e-5, atol=1e-6, err_msg=f"{column}")
        progress = [
            layer / LAYERS, op / OPS, interval_index / 2, time_us / start_us, kernels.max() / time_us,
            migration_us(batch.sim["slots"][0].tolist(), old.tolist(), 2, costs) / time_us,
        ]  # fmt: skip
        np.testing.assert_allclose(obs["progress"], progress, rtol=1e-5)
        obs = env.step(legal_action(obs, rng))[0]


def test_coactivation_and_affinity_of_many_tokens_come_from_samples() -> None:
    """Every second token of 1200 for co-activation (at most 1024), every fifth for affinity (at most 256)."""
    env = MoEPlacementEnv(**(TINY | {"tokens_per_rank": 150, "ops_per_layer": 1, "allow_reuse": True}))
    env.reset(seed=0)
    obs = env.step([0, 0])[0]
    interval = interval_of(env.batch, 0)
    here, past = tokens_of(interval, 1), tokens_of(interval, 0)
    assert len(here) == 1200
    for i in range(EXPERTS):
        users = [t for t in here[::2] if i in t]
        known = [sum(j in t for t in users) / len(users) * (i != j) for j in range(EXPERTS)]
        np.testing.assert_allclose(obs["coactivation"][i], known, rtol=1e-6)
        users = [t for t, p in zip(here[::5], past[::5], strict=True) if i in p]
        known = [sum(j in t for t in users) / len(users) for j in range(EXPERTS)]
        np.testing.assert_allclose(obs["affinity"][i], known, rtol=1e-6)


def test_the_next_interval_is_never_seen() -> None:
    """Two traces that agree on the first interval only: the agents see the same until the second is served."""
    seed, rng = 4, np.random.default_rng(0)
    first, second = (np.argsort(rng.random((640, LAYERS, EXPERTS)), axis=2)[:, :, :2] for _ in range(2))
    options = TINY | {
        "intervals": 2,
        "schedule": "replay",
        "profile": made_profile(transport="stay"),
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


# Pictures


def test_rgb_array_shows_the_last_operation() -> None:
    env = gymnasium.make("MoEPlacement-v0", render_mode="rgb_array", **TINY)
    obs, _ = env.reset(seed=0)
    before = env.render()
    env.step(legal_action(obs, np.random.default_rng(0)))
    after = env.render()
    for picture in (before, after):
        assert isinstance(picture, np.ndarray)
        assert (picture.ndim, picture.shape[2], picture.dtype) == (3, 3, np.uint8)
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10
    assert (before != after).any()
    # An action that names no expert or GPU at all is drawn too.
    for action in ([-5, -7], [99, 99]):
        env.step(action)
        assert np.shape(env.render()) == np.shape(before)


@pytest.mark.parametrize("make", [MoEPlacementEnv, moe_placement_v0.parallel_env])
def test_human_window_opens_and_closes_smoke(make: Any) -> None:
    env = make(render_mode="human", **TINY)
    env.reset(seed=0)
    action = [0, 1] if make is MoEPlacementEnv else {"expert": 0, "gpu": 1}
    env.step(action)
    assert env.render() is None
    assert env._screen is not None
    env.close()
    assert env._screen is None


def test_vector_env_renders_each_environment() -> None:
    env = MoEPlacementVectorEnv(2, render_mode="rgb_array", **TINY)
    env.reset(seed=0)
    pictures = env.render()
    assert pictures is not None
    assert len(pictures) == 2
    assert (pictures[0] != pictures[1]).any()


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "random"}, "unknown schedule 'random'; expected one of: stationary, drift, switch, replay"),
        ({"profile": "fast"}, "unknown profile 'fast'; the profiles are: sglang-prefill, sglang-decode, sglang-lp,"),
        ({"profile": "sglang-lp"}, "splits tokens by a linear program, which is only for evaluation and planning"),
        ({"phase": "train"}, "unknown phase 'train'; expected one of: decode, prefill"),
        ({"split": "half"}, "unknown split 'half'; expected one of: train, validation, test, all"),
        ({"start": "best"}, "unknown start 'best'; expected one of: static, eplb"),
        ({"migration": "lazy"}, "unknown migration 'lazy'; expected one of: blocking, async"),
        ({"intervals": 0}, "intervals is 0: expected at least 1"),
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0: expected at least 1"),
        ({"sampled_passes": -1}, "sampled_passes is -1: expected at least 1"),
        ({"ops_per_layer": -1}, "ops_per_layer is -1: expected at least 1"),
        ({"passes_per_interval": 0}, "passes_per_interval is 0: expected at least 1"),
        ({"drift_rate": 1.5}, "rate is 1.5: expected 0 … 1"),
        ({"background_share": -0.5}, "background_share is -0.5: expected 0 … 1"),
        ({"intervals": 12}, "which fills 12 intervals, but 13 are needed"),
        ({"lookahead_norm": 3}, "a norm is 0 (the max over GPUs) or a power of two from 2 to 32, found 3"),
        ({"reward_norm": 128}, "power of two from 2 to 32, found 128"),
        ({"render_mode": "ansi"}, "unknown render_mode 'ansi'"),
        ({"trace": "nowhere"}, "unknown trace 'nowhere': give a .npz or .npy file, or one of the bundled names:"),
        ({"cluster": "b200"}, "unknown cluster 'b200'; the presets are: h800-1x8,"),
        ({"model": "gpt-9"}, "unknown model 'gpt-9'; the presets are: mixtral-8x7b,"),
        ({"model": "mixtral-8x7b", "trace": "synthetic"},
         "the trace is top-6 of 64 experts, but model 'mixtral-8x7b' is top-2 of 8"),
        ({"model": ModelSpec("short", 2, 8, 2, 8, 8)}, "the trace has 3 layers, but model 'short' has 2"),
        ({"cluster": ClusterSpec("small", 1, 3, 2)}, "too few slots: 3 GPUs × 2 slots = 6 for 8 experts"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    for make in (MoEPlacementEnv, moe_placement_v0.parallel_env, lambda **o: MoEPlacementVectorEnv(2, **o)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**(TINY | options))


def test_unknown_arguments_raise_a_type_error() -> None:
    for make in (MoEPlacementEnv, moe_placement_v0.parallel_env, lambda **o: MoEPlacementVectorEnv(2, **o)):
        with pytest.raises(
            TypeError,
            match="unexpected keyword argument 'token_per_rank'; the environment takes: allow_reuse, background_share,",
        ):
            make(**TINY, token_per_rank=5)


def test_a_trace_without_a_model_asks_for_one_and_names_candidates() -> None:
    trace = TokenTrace(np.argsort(np.random.default_rng(0).random((90, 2, 8)), axis=2)[:, :, :2], name="mine")
    with pytest.raises(
        ValueError, match=r"mine: the trace does not say which model.*; mixtral-8x7b, .* has the trace's 8 experts"
    ):
        MoEPlacementEnv(trace=trace, split="all")
    assert (
        MoEPlacementEnv(trace=trace, split="all", model="mixtral-8x7b", tokens_per_rank=1).batch.model.name
        == "mixtral-8x7b"
    )


def test_vector_env_refuses_wrong_shapes_and_lengths() -> None:
    with pytest.raises(ValueError, match="num_envs is 0: expected at least 1"):
        MoEPlacementVectorEnv(0, **TINY)
    with pytest.raises(ValueError, match="max_episode_steps is 0: expected at least 1"):
        MoEPlacementVectorEnv(2, max_episode_steps=0, **TINY)
    env = MoEPlacementVectorEnv(2, **TINY)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=re.escape("actions have shape (3, 2): expected (2, 2): expert, node")):
        env.step(np.zeros((3, 2), int))
    with pytest.raises(ValueError, match=r"device meta is not supported: expected 'cpu' or 'cuda'"):
        MoEPlacementVectorEnv(2, device="meta", **TINY)
