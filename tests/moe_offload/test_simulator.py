"""The compiled simulator of expert offloading equals plain Python, to the last microsecond."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import TokenTrace
from clustergym.moe_offload.kernels import state
from clustergym.moe_offload.kernels.episode import advance
from clustergym.moe_offload.kernels.memory import begin, count, evict, next_visit, over, prefetch, window
from clustergym.moe_offload.kernels.observation import new_observation, observe
from clustergym.moe_offload.kernels.state import State, Task, choice_rows, new_state
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables
from offload_reference import Reference, random_task, streams_of

EPSILON_MS = 1e-9
MODES = {"over": state.MODE_OVER, "evict": state.MODE_EVICT, "load": state.MODE_LOAD}
STATS = {
    "visits": state.VISITS,
    "generated": state.GENERATED,
    "needed": state.NEEDED,
    "loads": state.LOADS,
    "prefetches": state.PREFETCHES,
    "useful": state.USEFUL,
    "wasted": state.WASTED,
    "moves": state.MOVES,
    "evictions": state.EVICTIONS,
}


def begun(task: Task, group: int, seed: int = 0) -> State:
    """One environment at its first decision."""
    s = new_state(task, 1)
    s.random[0], s.clock[0, state.GROUP] = seed, group
    advance(task, s, 0, True, 0, 0)
    return s


def assert_equal(task: Task, s: State, reference: Reference, mode: str) -> None:
    assert s.clock[0, state.MODE] == MODES[mode]
    assert abs(s.time[0, state.STALL] - sum(reference.stalls)) < EPSILON_MS
    assert {name: int(s.stats[0, column]) for name, column in STATS.items()} == {
        name: reference.numbers.get(name, 0) for name in STATS
    }
    if mode != "over":
        assert (s.clock[0, state.TOKEN], s.clock[0, state.LAYER]) == (reference.token, reference.layer)
        assert abs(s.time[0, state.NOW] - reference.now) < EPSILON_MS
        assert abs(s.time[0, state.NEXT] - reference.following) < EPSILON_MS
    where = np.full(s.where.shape[1:], -1)
    for key, resident in reference.residents.items():
        where[key] = resident.gpu
        assert abs(s.arrives[0][key] - resident.arrives) < EPSILON_MS
        assert s.fetched[0][key] == resident.prefetched
    assert np.array_equal(s.where[0], where)
    for gpu in range(task.gpus):
        assert abs(s.link[0, gpu] - reference.link_free(reference.host_links, gpu, 0.0)) < EPSILON_MS
        assert abs(s.peer[0, gpu] - reference.link_free(reference.peer_links, gpu, 0.0)) < EPSILON_MS
    events = [tuple(divmod(row[0], where.shape[1])) + tuple(row[1:]) for row in s.events[0, : s.n_events[0]].tolist()]
    assert events == reference.events


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**40))
def test_every_step_equals_plain_python(seed: int) -> None:
    draw = random.Random(seed)
    task, _ = random_task(draw)
    group = draw.randrange(len(task.groups))
    s, reference = begun(task, group, seed), Reference(task, streams_of(task, group))
    mode, rewards, steps = reference.settle(), 0.0, 0
    events, reference.events = reference.events, []
    assert not events
    experts, o = s.where.shape[2], new_observation(task, s.rows.shape[1], 1)
    while mode != "over":
        assert_equal(task, s, reference, mode)
        n = int(s.n_rows[0])
        keys = [divmod(int(flat), experts) for flat in s.rows[0, :n]]
        pairs = [(r, node) for r in range(n) for node in range(3 * task.gpus)]
        allowed = [reference.legal(mode, keys[r], node) for r, node in pairs]
        observe(task, s, 0, o)
        assert allowed == o.action_mask[0, :n].astype(bool).ravel().tolist()
        assert not o.action_mask[0, n:].any()
        assert any(allowed)
        wanted = [pair for pair, ok in zip(pairs, allowed, strict=True) if ok != (draw.random() < 0.03)]
        row, node = draw.choice(wanted or pairs)
        ok = reference.legal(mode, keys[row], node)
        mode = reference.act(mode, keys[row], node)
        advance(task, s, 0, False, row, node)
        assert s.outcome[0, state.OUT_ILLEGAL] == (not ok)
        rewards += s.reward[0]
        steps += 1
        assert steps < 3000
    assert_equal(task, s, reference, mode)
    if steps:
        assert rewards * task.load_ms == pytest.approx(-sum(reference.stalls), abs=1e-6)


def likelihood(reference: Reference, key: tuple[int, int], distance: int) -> float:
    """What prefetches are chosen by: the logarithm of the count, and the transitions from this visit's experts."""
    task, token, here = reference.task, reference.token, reference.layer
    running = [stream[token][here] for stream in reference.streams if token < len(stream)]
    lift = sum(float(task.lift[distance - 1, here, a, key[1]]) for used in running for a in used if a >= 0)
    count_ = reference.count(key, state.DECAYS[2]) + 0.3 * float(task.prior[key]) + 0.01
    return math.log(count_) + 0.6 * lift / len(running)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**40))
def test_tables_of_experts(seed: int) -> None:
    """Evictions: all residents of the current layer, then the lowest counts. Prefetches: what the next layers lack."""
    draw = random.Random(seed)
    task, _ = random_task(draw)
    group = draw.randrange(len(task.groups))
    s, reference = begun(task, group, seed), Reference(task, streams_of(task, group))
    mode, experts = reference.settle(), s.where.shape[2]
    layers = s.where.shape[1]
    while mode != "over":
        n = int(s.n_rows[0])
        keys = [divmod(int(flat), experts) for flat in s.rows[0, :n]]
        assert len(set(keys)) == n
        if mode == "evict":
            gpu = reference.over_full()
            inside = [
                key
                for key, r in reference.residents.items()
                if r.gpu == gpu and reference.pool_of(key[0]) == reference.pool
            ]
            own = [key for key in inside if key[0] == reference.layer]
            score = {
                key: reference.count(key, state.DECAYS[2])
                + 0.15 * float(task.prior[key])
                - 0.02 * ((key[0] - reference.layer - 1) % layers) / layers
                for key in inside
            }
            shown_own = [key for key in keys if key[0] == reference.layer]
            shown_low = [key for key in keys if key[0] != reference.layer]
            assert len(shown_own) == min(len(own), task.own_rows)
            rest_of_table = task.low_rows + task.own_rows - len(shown_own)
            assert len(shown_low) == min(len(inside) - len(own), rest_of_table)
            for shown, rest in ((shown_own, own), (shown_low, [key for key in inside if key not in own])):
                hidden = [score[key] for key in rest if key not in shown]
                if shown and hidden:
                    assert max(score[key] for key in shown) <= min(hidden) + 1e-5
        else:
            missing = [key for key in keys if key not in reference.residents]
            each = max(task.load_rows // task.horizon, 1)
            for distance, l in reference.ahead():
                there = [key for key in reference.missing_ahead() if key[0] == l]
                shown = [key for key in missing if key[0] == l]
                assert len(shown) == min(len(there), each)
                likely = {key: likelihood(reference, key, distance) for key in there}
                hidden = [likely[key] for key in there if key not in shown]
                assert not (shown and hidden) or min(likely[key] for key in shown) >= max(hidden) - 1e-4
            assert set(missing) <= set(reference.missing_ahead())
            movable = [key for key in keys if key in reference.residents]
            assert all(any(reference.can_move(key, g) for g in range(task.gpus)) for key in movable)
        assert (s.rows[0, n : choice_rows(task)] == -1).all()
        context = [divmod(int(flat), experts) for flat in s.rows[0, choice_rows(task) :] if flat >= 0]
        recent: list[tuple[int, int]] = []
        for back in range(layers):
            visit = reference.token * layers + reference.layer - back
            if visit >= 0:
                token, l = divmod(visit, layers)
                recent += [(l, e) for e in reference.routed(token, l)]
        assert context == recent[: task.context_rows]
        for key in draw.sample(list(np.ndindex(task.prior.shape)), 1):
            for h, decay in enumerate(state.DECAYS):
                assert count(task, s, 0, *key, h) == pytest.approx(reference.count(key, decay), abs=1e-5)
        pairs = [(r, node) for r in range(n) for node in range(3 * task.gpus) if reference.legal(mode, keys[r], node)]
        row, node = draw.choice(pairs)
        mode = reference.act(mode, keys[row], node)
        advance(task, s, 0, False, row, node)


def test_two_tokens_by_hand() -> None:
    """Two layers of three experts, two slots, loads of 1 ms, layers of 1.5 ms."""
    # Token 0 uses experts 0 and 1 of layer 0 and expert 0 of layer 1; token 1 uses expert 1 of layer 0, then 2.
    trace = TokenTrace(np.array([[[0, 1], [0, -1]], [[1, -1], [2, -1]]]), n_experts=3)
    tables = Tables(
        popularity=np.array([[0.5, 0.4, 0.3], [0.5, 0.1, 0.1]], np.float32),
        lifts=np.zeros((state.N_LAGS, 2, 3, 3), np.float32),
        profiles=np.zeros((1, 2, 3), np.float32),
    )
    config = OffloadConfig(trace=trace, split="all", slots=1 / 3, expert_mb=10, link=10.0, layer_ms=1.5, expert_ms=0)
    task = build_task(config, tables)
    assert (task.slots, task.home.tolist()) == (2, [[0, -1, -1], [0, -1, -1]])
    s = new_state(task, 1)
    times = [state.NOW, state.READY, state.NEXT, state.STALL]
    begin(task, s, 0, 0)
    assert next_visit(task, s, 0)
    # Expert 1 is missing: the link loads it from 0 to 1 ms; the layer computes until 2.5 ms.
    assert s.time[0, times].tolist() == [0.0, 1.0, 2.5, 1.0]
    assert over(task, s, 0) == 0
    evict(task, s, 0, 0, 1)
    assert over(task, s, 0) == -1
    assert window(task, s, 0, 0) == 1.5
    # A prefetch of expert 2 of layer 1 takes from 1 to 2 ms; another one may begin then, and ends at 3 ms.
    prefetch(task, s, 0, 1, 2, 0)
    assert window(task, s, 0, 0) == 0.5
    prefetch(task, s, 0, 0, 1, 0)
    assert window(task, s, 0, 0) == -0.5
    evict(task, s, 0, 0, 0)
    evict(task, s, 0, 1, 0)
    assert next_visit(task, s, 0)
    # Expert 0 of layer 1 was dropped: it is loaded after the prefetch, from 3 to 4 ms.
    assert s.time[0, times].tolist() == [2.5, 4.0, 5.5, 2.5]
    evict(task, s, 0, 1, 0)
    assert next_visit(task, s, 0)
    assert next_visit(task, s, 0)
    # Both prefetched experts have arrived long ago.
    assert s.time[0, times].tolist() == [7.0, 7.0, 8.5, 2.5]
    assert not next_visit(task, s, 0)
    assert s.stats[0, [state.LOADS, state.PREFETCHES, state.USEFUL, state.WASTED]].tolist() == [2, 2, 2, 0]
    assert s.time[0, state.COMPUTE] == 6.0
