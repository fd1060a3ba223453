"""Every number of an observation, computed again in plain Python."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_offload.kernels import state
from clustergym.moe_offload.kernels.episode import advance
from clustergym.moe_offload.kernels.observation import (
    CONTEXT_FEATURES,
    EXPERT_FEATURES,
    GPU_FEATURES,
    NEAR,
    new_observation,
    observe,
)
from clustergym.moe_offload.kernels.state import new_state
from offload_reference import Reference, random_task, streams_of


def expert_features(reference: Reference, l: int, e: int, chosen: bool) -> dict[str, float]:
    """Features of an expert, from the routing so far."""
    task, token, here, layers = reference.task, reference.token, reference.layer, reference.n_layers
    resident = reference.residents.get((l, e))
    ready = reference.now + reference.stalls[-1]
    served = token if l <= here else token - 1
    uses = reference.uses.get((l, e), [-state.NEVER])
    distance = (l - here - 1) % layers + 1
    found = dict.fromkeys(EXPERT_FEATURES, 0.0) | {
        "can be chosen": chosen,
        "resident": resident is not None,
        "in flight": resident is not None and resident.arrives > ready,
        "prefetched, not used yet": resident is not None and resident.prefetched,
        "used by this visit": l == here and uses[-1] == token,
        "used by the previous token": uses[-1] == served,
        "recency": 1 / (1 + token - uses[-1]),
        "popularity": 0.3 * float(task.logit[l, e]),
        "distance": distance / layers,
    }
    for decay in state.DECAYS:
        found[f"decayed count {decay}"] = 0.5 * math.log(reference.count((l, e), decay) + 0.02) + 1
    if distance <= NEAR:
        found[f"distance {distance}"] = 1.0
        for back in range(4):
            visit = token * layers + here - back
            if visit >= 0:
                found[f"transition from {back} visits ago"] = transition(reference, visit, distance + back, e)
    if served >= 0:
        found["transition from the previous token"] = transition(reference, served * layers + l, state.N_LAGS, e)
    return {name: float(value) for name, value in found.items()}


def transition(reference: Reference, visit: int, lag: int, e: int) -> float:
    """0.3 times the lift by what a visit has used, mean over the sequences."""
    token, layer = divmod(visit, reference.n_layers)
    lifts = [
        sum(float(reference.task.lift[lag - 1, layer, a, e]) for a in stream[token][layer] if a >= 0)
        for stream in reference.streams
        if token < len(stream)
    ]
    return 0.3 * sum(lifts) / len(lifts) if lifts else 0.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_features_graphs_and_context(seed: int) -> None:
    draw = random.Random(seed)
    task, _ = random_task(draw)
    group = draw.randrange(len(task.groups))
    s, reference = new_state(task, 1), Reference(task, streams_of(task, group))
    s.random[0], s.clock[0, state.GROUP] = seed, group
    advance(task, s, 0, True, 0, 0)
    mode, experts = reference.settle(), s.where.shape[2]
    o = new_observation(task, s.rows.shape[1], 1)
    while mode != "over":
        if draw.random() < 0.3:
            observe(task, s, 0, o)
            check_observation(task, s, reference, o, mode)
        n = int(s.n_rows[0])
        keys = [divmod(int(flat), experts) for flat in s.rows[0, :n]]
        pairs = [(r, node) for r in range(n) for node in range(3 * task.gpus)]
        row, node = draw.choice([(r, node) for r, node in pairs if reference.legal(mode, keys[r], node)])
        mode = reference.act(mode, keys[row], node)
        advance(task, s, 0, False, row, node)
    observe(task, s, 0, o)
    assert not o.experts.any()
    assert np.argwhere(o.action_mask[0]).tolist() == [[0, g] for g in range(task.gpus)]


def check_observation(task: Any, s: Any, reference: Reference, o: Any, mode: str) -> None:
    layers, experts, rows, n = *s.where.shape[1:], s.rows.shape[1], int(s.n_rows[0])
    keys = [divmod(int(flat), experts) if flat >= 0 else None for flat in s.rows[0]]
    graph = np.zeros((rows, rows))
    for r, key in enumerate(keys):
        if key is None:
            assert not o.experts[0, r].any()
            assert not o.pairs[0, r].any()
            assert not o.action_mask[0, r].any()
            continue
        expected = expert_features(reference, *key, r < n)
        assert o.experts[0, r] == pytest.approx(list(expected.values()), abs=1e-3), expected
        where = reference.residents[key].gpu if key in reference.residents else -1
        assert o.pairs[0, r, :, 0].tolist() == [float(g == where) for g in range(task.gpus)]
        legal = [r < n and reference.legal(mode, key, node) for node in range(3 * task.gpus)]
        assert o.action_mask[0, r].astype(bool).tolist() == legal
        for i in range(rows - task.context_rows, rows):
            if r < n and (past := keys[i]) is not None:
                lag = (key[0] - reference.layer - 1) % layers + 1 + (reference.layer - past[0]) % layers
                if lag <= 6:
                    graph[r, i] = graph[i, r] = task.chance[lag - 1, past[0], past[1], key[1]]
                elif lag == layers:
                    assert key[0] == past[0]
                    graph[r, i] = graph[i, r] = task.chance[6, past[0], past[1], key[1]]
    assert o.expert_graph[0] == pytest.approx(graph if task.context_rows else np.zeros((0, 0)))
    ready, load = reference.now + reference.stalls[-1], task.load_ms
    for node in range(3 * task.gpus):
        kind, g = divmod(node, task.gpus)
        there = [l for (l, _), r in reference.residents.items() if r.gpu == g]
        busy = reference.link_free(reference.host_links, g, reference.now)
        values = (
            kind == 0,
            kind == 1,
            kind == 2,
            np.clip((busy - ready) / load, -4, 4),
            np.clip((reference.following - busy) / load, -4, 4),
            np.clip(0.5 * (task.slots - reference.held(g, reference.pool)), -4, 4),
            1 / task.gpus,
            mode == "evict" and reference.over_full() == g,
            there.count(reference.layer) / experts,
            there.count((reference.layer + 1) % layers) / experts,
        )
        assert o.gpus[0, node] == pytest.approx([float(v) for v in values], abs=1e-4), GPU_FEATURES
    left = sum(max(reference.held(g, reference.pool) - task.slots, 0) for g in range(task.gpus))
    values = (
        mode == "evict",
        mode == "load",
        reference.layer / layers,
        reference.layer == 0,
        float(s.time[0, state.MISSES]),
        min((reference.following - ready) / load, 10),
        min(left, 10) / 2,
        math.log(1 + reference.token) / 5,
        sum(reference.token < len(stream) for stream in reference.streams) / s.starts.shape[1],
        task.slots * task.pools * task.gpus / (layers * experts),
    )
    assert o.context[0] == pytest.approx([float(v) for v in values], abs=1e-4), CONTEXT_FEATURES
    assert o.gpu_graph[0].tolist() == (1 - np.eye(task.gpus)).tolist()
