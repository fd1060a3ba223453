"""Expert offloading: the environments in every form play the same game, and show nothing of the future."""

from __future__ import annotations

import pickle
import random
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

from clustergym import TokenTrace, moe_offload_v0
from clustergym.ids import OFFLOADING
from clustergym.moe_offload.batch import OffloadBatch
from clustergym.moe_offload.environment import MoEOffloadEnv
from clustergym.moe_offload.kernels import state
from clustergym.moe_offload.kernels.observation import EXPERT_FEATURES, N_EXPERT_FEATURES
from clustergym.moe_offload.predictor import Predictions
from clustergym.moe_offload.simulator import groups_of, served_part
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables
from clustergym.moe_offload.uses import HORIZON, WITHIN
from clustergym.moe_offload.vector import MoEOffloadVectorEnv
from offload_reference import random_trace

IDS = [f"MoEOffload{variant}{form}-v0" for variant in OFFLOADING for form in ("", "Flat")]
TINY = {"max_tokens": 2}
SAME = AutoresetMode.SAME_STEP


def legal_pair(mask: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """A legal pair, drawn evenly."""
    pairs = np.argwhere(mask)
    row, node = pairs[rng.integers(len(pairs))]
    return int(row), int(node)


def legal_pairs(masks: np.ndarray, rngs: list[np.random.Generator]) -> np.ndarray:
    return np.array([legal_pair(mask, rng) for mask, rng in zip(masks, rngs, strict=True)])


def same(a: Any, b: Any) -> bool:
    """Whether two observations are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_checker_raises_no_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(name, **TINY, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("options", [{}, {"gpus": 2, "batch": 2}])
def test_pettingzoo_api_tests_pass(options: dict[str, Any]) -> None:
    parallel_api_test(moe_offload_v0.parallel_env(**TINY, **options), num_cycles=200)
    parallel_seed_test(lambda: moe_offload_v0.parallel_env(**TINY, **options))
    api_test(moe_offload_v0.env(**TINY, **options), num_cycles=200)
    seed_test(lambda: moe_offload_v0.env(**TINY, **options))


@pytest.mark.parametrize("variant", OFFLOADING)
def test_all_forms_play_the_same_game(variant: str) -> None:
    """Single, vector, flat, flat vector, parallel and AEC environments, step for step, with the same actions."""
    n, options = 3, OFFLOADING[variant].arguments | TINY
    singles = [gymnasium.make(f"MoEOffload{variant}-v0", **TINY) for _ in range(n)]
    flats = [gymnasium.make(f"MoEOffload{variant}Flat-v0", **TINY) for _ in range(n)]
    parallels = [moe_offload_v0.parallel_env(**options) for _ in range(n)]
    turns = [moe_offload_v0.env(**options) for _ in range(n)]
    vector = gymnasium.make_vec(f"MoEOffload{variant}-v0", num_envs=n, **TINY)
    flat_vector = gymnasium.make_vec(f"MoEOffload{variant}Flat-v0", num_envs=n, **TINY)
    obs, _ = vector.reset(seed=5)
    flat_obs, flat_info = flat_vector.reset(seed=5)
    for i in range(n):
        single_obs, _ = singles[i].reset(seed=5 + i)
        assert same(single_obs, {name: array[i] for name, array in obs.items()})
        assert singles[i].observation_space.contains(single_obs)
        assert same(flats[i].reset(seed=5 + i)[0], flat_obs[i])
        parallels[i].reset(seed=5 + i)
        turns[i].reset(seed=5 + i)
    rngs = [np.random.default_rng(i) for i in range(n)]
    nodes, done = obs["gpus"].shape[1], np.zeros(n, bool)
    total, stall = np.zeros(n), np.zeros(n)
    while not done.all():
        pairs = legal_pairs(obs["action_mask"], rngs)
        obs, rewards, ended, _, info = vector.step(pairs)
        flat_obs, flat_rewards, _, _, flat_info = flat_vector.step(pairs[:, 0] * nodes + pairs[:, 1])
        assert np.array_equal(rewards, flat_rewards)
        assert np.array_equal(flat_info["action_mask"], obs["action_mask"].reshape(n, -1))
        for i in np.flatnonzero(~done):
            row, node = pairs[i].tolist()
            single_obs, reward, terminated, truncated, single_info = singles[i].step((row, node))
            assert same(single_obs, {name: array[i] for name, array in obs.items()})
            assert (reward, terminated, truncated) == (rewards[i], ended[i], False)
            assert not single_info["illegal"]
            for name, value in single_info.items():
                if name != "events":
                    assert value == info[name][i], name
            mine = info["events"]["env"] == i
            for name in ("expert", "kind", "tokens", "age", "value"):
                assert np.array_equal(single_info["events"][name], info["events"][name][mine])
            assert same(flats[i].step(row * nodes + node)[0], flat_obs[i])
            seen, paid, over, _, _ = parallels[i].step({"expert": row, "gpu": node})
            assert same(seen["gpu"]["joint_mask"], single_obs["action_mask"])
            assert same(seen["expert"]["action_mask"], single_obs["action_mask"].max(1))
            assert same(seen["expert"]["experts"], single_obs["experts"])
            assert paid == {"expert": reward, "gpu": reward}
            assert over["gpu"] == terminated
            turns[i].step(row)
            shown = turns[i].observe("gpu")
            assert shown["chosen"].argmax() == row
            assert shown["action_mask"][node] == 1
            turns[i].step(node)
            assert turns[i].rewards["gpu"] == reward
            total[i] += reward
            stall[i] = single_info["stall_ms"]
        done |= ended
    # In units of one load.
    assert total * vector.batch.task.load_ms == pytest.approx(-stall)
    assert (stall > 0).all()


@pytest.mark.parametrize("variant", OFFLOADING)
def test_the_mask_is_exact(variant: str) -> None:
    """Every legal pair does what it says; every illegal pair is refused."""
    env: Any = gymnasium.make(f"MoEOffload{variant}-v0", **TINY).unwrapped
    obs, _ = env.reset(seed=1)
    rng, done, checked = np.random.default_rng(0), False, 0
    gpus = obs["gpu_graph"].shape[0]
    while not done and checked < 12:
        if rng.random() < 0.15:
            checked += 1
            before = env.get_state()
            where = before["where"][0].ravel()
            picked = rng.permutation(obs["action_mask"].size)[:150]
            for row, node in np.stack(np.unravel_index(picked, obs["action_mask"].shape), 1).tolist():
                _, _, _, _, info = env.step((row, node))
                assert info["illegal"] == (not obs["action_mask"][row, node])
                after, expert = env.batch.state.where[0].ravel(), before["rows"][0, row]
                acted = not info["no_op"]
                assert info["illegal"] <= info["no_op"]
                if acted and info["elapsed"] == 0:
                    assert after[expert] == (-1 if node // gpus == 2 else node % gpus)
                    assert (np.delete(after, expert) == np.delete(where, expert)).all()
                if info["illegal"] and obs["context"][0]:
                    assert np.array_equal(after, where)
                env.set_state(before)
        obs, _, done, _, _ = env.step(legal_pair(obs["action_mask"], rng))
    assert checked >= 5


def test_numbers_outside_of_the_action_space_are_refused() -> None:
    env = MoEOffloadEnv(**TINY)
    env.reset(seed=0)
    for action in ((-1, 0), (0, -1), (10_000, 0), (0, 99)):
        assert env.step(action)[4]["illegal"]


def test_events_name_the_decision_that_they_are_about() -> None:
    """A hit, a miss or a second prefetch belongs to the step that evicted or prefetched the expert last."""
    env = MoEOffloadEnv(max_tokens=25)
    obs, _ = env.reset(seed=3)
    rng, done, acted, tokens = np.random.default_rng(0), False, [], [0]
    kinds = np.zeros(3, int)
    while not done:
        row, node = legal_pair(obs["action_mask"], rng)
        evicts = obs["context"][0] == 1
        obs, _, done, _, info = env.step((row, node))
        acted.append((info["expert"], None if info["no_op"] else evicts))
        tokens.append(tokens[-1] + info["elapsed"] / env.batch.n_layers)
        for expert, kind, age, value, after in zip(
            *(info["events"][name] for name in ("expert", "kind", "age", "value", "tokens")), strict=True
        ):
            subject, evicted = acted[len(acted) - 1 - age]
            assert subject == expert
            assert evicted == (kind != state.EVENT_HIT)
            worth, decay = {
                state.EVENT_MISS: (-1.0, 0.9), state.EVENT_HIT: (1.0, 0.5), state.EVENT_AGAIN: (-0.7, 0.9),
            }[kind]  # fmt: skip
            assert value == pytest.approx(worth * decay**after)
            # No decision about the expert in between, except the prefetch that the event is about.
            between = [who for who, what in acted[len(acted) - age :] if what is not None and who == expert]
            assert between in ([], [expert]) if kind == state.EVENT_AGAIN else between == []
            kinds[kind] += 1
    assert kinds[state.EVENT_HIT] == info["useful_prefetches"]
    assert (kinds > 0).all()
    assert tokens[-1] <= 25


def test_the_observation_never_contains_the_future() -> None:
    """Another future of the trace, the same actions: the same observations, with a predictor, too."""
    draw, rng = random.Random(1), np.random.default_rng(1)
    trace = random_trace(draw, padding=False)
    while trace.n_layers < 3 or trace.n_experts < 6 or trace.seq_lens.max() < 9:
        trace = random_trace(draw, padding=False)
    sequence = int(trace.seq_lens.argmax())
    first, length = int(trace.seq_starts[sequence]), int(trace.seq_lens[sequence])
    tables, compared = Tables.count(trace), 0
    for token in range(length - 1):
        for layer in range(trace.n_layers):
            routing = trace.experts.copy()
            visits = routing[first : first + length].reshape(-1, trace.top_k)
            later = visits[token * trace.n_layers + layer + 1 :]
            later[...] = np.argsort(rng.random((len(later), trace.n_experts)), 1)[:, : trace.top_k]
            other = TokenTrace(routing, n_experts=trace.n_experts, seq_lens=trace.seq_lens)
            config = {"split": "all", "slots": 0.4, "gpus": 2, "link": 120.0, "predictor": PastUse()}
            envs = [MoEOffloadEnv(trace=t, fit_on=tables, **config) for t in (trace, other)]
            observations = [env.reset(seed=0, options={"group": sequence})[0] for env in envs]
            done = False
            while not done:
                clock = envs[0].batch.state.clock[0, [state.TOKEN, state.LAYER]].tolist()
                if clock > [token, layer]:
                    break
                assert same(*observations)
                compared += 1
                pair = legal_pair(observations[0]["action_mask"], rng)
                results = [env.step(pair) for env in envs]
                observations, done = [result[0] for result in results], results[0][2]
    assert compared > 300


class PastUse:
    """Predicts that what was used by the last token will be used: a predictor that a test can know by heart."""

    def check(self, trace: TokenTrace) -> None:
        pass

    def predict(self, trace: TokenTrace) -> Predictions:
        used = np.zeros((trace.n_tokens, trace.n_layers, trace.n_experts), np.float32)
        np.put_along_axis(used, trace.experts.astype(np.int64), 1.0, axis=2)
        keep = np.stack([0.1 + 0.1 * k + 0.2 * used for k in range(len(WITHIN))], -1)
        before = np.concatenate([np.zeros_like(used[:1]), used[:-1]])
        ahead = np.stack([0.05 * (h + 1) + 0.5 * before for h in range(HORIZON)])
        return Predictions(ahead, keep)


def logit(p: Any) -> Any:
    return np.log(p / (1 - p))


@pytest.mark.parametrize("batch", [1, 2])
def test_columns_of_a_predictor(batch: int) -> None:
    """``keep`` as of the layer's last visit, ``ahead`` for its next one; of a batch, the chance that any uses it."""
    env = MoEOffloadEnv(max_tokens=12, predictor=PastUse(), batch=batch)
    trace = served_part(env.batch.config)
    predicted = [PastUse().predict(trace.select(sequences=[q])) for q in env.batch.task.groups[7]]
    obs, _ = env.reset(seed=0, options={"group": 7})
    rng, done, seen = np.random.default_rng(0), False, set()
    first = N_EXPERT_FEATURES
    while not done:
        s = env.batch.state
        token, here = s.clock[0, [state.TOKEN, state.LAYER]].tolist()
        for r in np.flatnonzero(s.rows[0] >= 0):
            l, e = divmod(int(s.rows[0, r]), trace.n_experts)
            served = token if l <= here else token - 1
            distance = (l - here - 1) % trace.n_layers + 1
            expected = np.zeros(len(WITHIN) + HORIZON)
            if served >= 0:
                unused = np.prod([1 - p.keep[served, l, e] for p in predicted], axis=0)
                expected[: len(WITHIN)] = logit(1 - unused)
            if distance <= HORIZON and served + 1 < 12:
                unused = np.prod([1 - p.ahead[distance - 1, served + 1, l, e] for p in predicted])
                expected[len(WITHIN) + distance - 1] = logit(1 - unused)
                seen.add(distance)
            if served + 1 < 12:
                assert np.abs(obs["experts"][r, first:] * 4 - expected).max() < 0.05 * batch
        obs, _, done, _, _ = env.step(legal_pair(obs["action_mask"], rng))
    assert seen >= {1, 2, 3}


@pytest.mark.parametrize("variant", OFFLOADING)
def test_states_continue_bit_for_bit(variant: str) -> None:
    """Vector, parallel and AEC environments; also in another environment, and after pickling."""
    options = OFFLOADING[variant].arguments | {"max_tokens": 3}
    rngs = [np.random.default_rng(i) for i in range(4)]
    vector = MoEOffloadVectorEnv(4, autoreset_mode=SAME, **options)
    obs, _ = vector.reset(seed=2)
    for _ in range(40):
        obs = vector.step(legal_pairs(obs["action_mask"], rngs))[0]
    saved, now = vector.get_state(), obs
    copy = MoEOffloadVectorEnv(4, autoreset_mode=SAME, **options)
    copy.reset(seed=99)
    pickled = pickle.loads(pickle.dumps(vector.batch))
    played = []
    for _ in range(60):
        pairs = legal_pairs(obs["action_mask"], rngs)
        obs, rewards, ended, _, info = vector.step(pairs)
        played.append((pairs, obs, rewards, ended, info))
    copy.set_state(saved)
    assert same(copy.batch.observe(), now)
    assert same(pickled.observe(), now)
    vector.set_state(saved)
    for pairs, obs, rewards, ended, info in played:
        for env in (copy, vector):
            again = env.step(pairs)
            assert same(again[0], obs)
            assert np.array_equal(again[1], rewards)
            assert np.array_equal(again[2], ended)
            assert same(again[4]["events"], info["events"])
    parallel, turns = moe_offload_v0.parallel_env(**options), moe_offload_v0.raw_env(**options)
    rng = np.random.default_rng(0)
    seen, _ = parallel.reset(seed=4)
    turns.reset(seed=4)
    kept, kept_turns = parallel.get_state(), turns.get_state()
    first = []
    for again in (False, True):
        if again:
            parallel.set_state(kept)
            turns.set_state(kept_turns)
            seen = {agent: parallel.observation(agent) for agent in parallel.agents}
        for i in range(20):
            if not again:
                first.append((seen["gpu"], legal_pair(seen["gpu"]["joint_mask"], rng)))
            assert same(seen["gpu"], first[i][0])
            row, node = first[i][1]
            turns.step(row)
            turns.step(node)
            seen, rewards, _, _, _ = parallel.step({"expert": row, "gpu": node})
            assert rewards["gpu"] == turns.rewards["gpu"]


def test_a_state_of_another_task_is_refused() -> None:
    saved = MoEOffloadEnv(**TINY).get_state()
    with pytest.raises(ValueError, match="'link': expected shape"):
        MoEOffloadEnv(gpus=2, **TINY).set_state(saved)


def test_returned_arrays_do_not_change() -> None:
    env = MoEOffloadVectorEnv(2, **TINY)
    rngs = [np.random.default_rng(i) for i in range(2)]
    obs, _ = env.reset(seed=0)
    kept = []
    for _ in range(30):
        kept.append((obs, {name: array.copy() for name, array in obs.items()}))
        obs = env.step(legal_pairs(obs["action_mask"], rngs))[0]
    assert all(same(a, b) for a, b in kept)


def test_autoreset_modes_play_the_same_episodes() -> None:
    results = []
    for mode in AutoresetMode:
        env = MoEOffloadVectorEnv(3, autoreset_mode=mode, max_tokens=1)
        rngs = [np.random.default_rng(i) for i in range(3)]
        obs, _ = env.reset(seed=1)
        over, sums = np.zeros(3, bool), [[] for _ in range(3)]
        rewards_of = np.zeros(3)
        for _ in range(400):
            if over.any() and mode == AutoresetMode.DISABLED:
                with pytest.raises(gymnasium.error.ResetNeeded):
                    env.step(np.zeros((3, 2), np.int64))
                obs, _ = env.reset(options={"reset_mask": over})
                over[:] = False
            pairs = np.zeros((3, 2), np.int64)
            for i in np.flatnonzero(~over):
                pairs[i] = legal_pair(obs["action_mask"][i], rngs[i])
            again = over
            obs, rewards, over, truncated, info = env.step(pairs)
            rewards_of += rewards
            assert not truncated.any()
            assert (rewards[again] == 0).all()
            assert info["no_op"][again].all()
            if mode == SAME:
                for i in np.flatnonzero(over):
                    last = info["final_obs"][i]
                    assert last["action_mask"].sum() == 1
                    assert info["final_info"]["tokens"][i] == 1
                    assert info["tokens"][i] <= 1
            for i in np.flatnonzero(over):
                sums[i].append(rewards_of[i])
                rewards_of[i] = 0
            if mode == SAME:
                over = np.zeros(3, bool)
        results.append([s[:4] for s in sums])
    assert results[0] == results[1] == results[2]
    assert all(len(s) == 4 for s in results[0])


def test_every_sequence_is_in_one_group() -> None:
    lengths = np.array([5, 2, 9, 2, 7, 3, 8])
    groups = groups_of(lengths, 3)
    assert sorted(groups[groups >= 0].tolist()) == list(range(7))
    assert [lengths[g[g >= 0]].tolist() for g in groups] == [[2, 2, 3], [5, 7, 8], [9]]
    assert groups_of(lengths, 1).ravel().tolist() == list(range(7))
    batch = OffloadBatch(OffloadConfig(batch=3), 2)
    batch.reset(groups=[1, 0])
    assert batch.state.clock[:, state.GROUP].tolist() == [1, 0]
    with pytest.raises(ValueError, match="group is 99999: expected 0 … "):
        batch.reset(groups=[0, 99999])


def test_features_have_names_and_bounds() -> None:
    env = gymnasium.make("MoEOffloadNode-v0", **TINY)
    obs, _ = env.reset(seed=0)
    rng, done = np.random.default_rng(0), False
    assert obs["experts"].shape[1] == len(EXPERT_FEATURES)
    while not done:
        obs, _, done, _, _ = env.step(legal_pair(obs["action_mask"], rng))
        assert max(np.abs(array).max(initial=0) for array in obs.values()) < 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"link": "usb"}, "link is 'usb': expected one of pcie4, pcie5, or a number of GB/s"),
        ({"slots": 0}, "slots is 0: expected a share"),
        ({"batch": 0}, "batch is 0: expected at least 1"),
        ({"split": "training"}, "unknown split 'training'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"fit_on": "tiny_moe"}, "tables were counted"),
    ],
)
def test_wrong_arguments_are_explained(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoEOffloadEnv(**options)
