"""Batches on the CPU: one iteration of ``prange`` an environment.

A batch of one calls the per-environment function itself: no threads to wake, and safe to fork.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, prange

from clustergym.moe_placement import episode
from clustergym.moe_placement.dynamics import (
    MODE_STAY,
    begin_window,
    count_window,
    layer_times,
    link_copies,
    take_slots,
)

_begin, _step, _look = episode.begin_episode, episode.step, episode.look_ahead_one


def _plain(function):
    return function


_parallel: Any = _plain if config.ENABLE_CUDASIM else njit(cache=True, nogil=True, parallel=True)


@_parallel
def _reset_many(where, env, sim, stream, obs, corpus, rules):
    for b in prange(where.shape[0]):
        if where[b]:
            _begin(env, sim, stream, obs, np.int64(b), corpus, rules)


@_parallel
def _step_many(expert, node, reward, env, sim, stream, obs, corpus, rules):
    for b in prange(expert.shape[0]):
        reward[b] = _step(env, sim, stream, obs, np.int64(b), corpus, rules, expert[b], node[b])


@_parallel
def _look_many(expert, result, env, sim, corpus, rules):
    for b in prange(expert.shape[0]):
        _look(env, sim, np.int64(b), corpus, rules, expert[b], result[b])


def reset(where, env, sim, stream, obs, corpus, rules):
    """Begin new episodes where ``where`` (B,) is true."""
    if len(where) > 1:
        _reset_many(where, env, sim, stream, obs, corpus, rules)
    elif where[0]:
        _begin(env, sim, stream, obs, 0, corpus, rules)


def step(expert, node, reward, env, sim, stream, obs, corpus, rules):
    """One operation in every environment; writes ``reward`` (B,)."""
    if len(expert) > 1:
        _step_many(expert, node, reward, env, sim, stream, obs, corpus, rules)
    else:
        reward[0] = _step(env, sim, stream, obs, 0, corpus, rules, expert[0], node[0])


def look_ahead(expert, result, env, sim, corpus, rules):
    """What each operation on ``expert`` (B,) would save; writes ``result`` (B, 3·G)."""
    if len(expert) > 1:
        _look_many(expert, result, env, sim, corpus, rules)
    else:
        _look(env, sim, 0, corpus, rules, expert[0], result[0])


@_parallel
def _count_layers(sim, placement, trace, net, mode):
    for i in prange(placement.shape[0]):
        b = np.int64(i)
        begin_window(sim, b, net)
        take_slots(sim, b, placement[b], net)
        count_window(sim, b, 0, trace, b, net, mode)


def count(sim, placement, trace, net, mode):
    """Count window 0 of every layer b under ``placement`` (B, G, S); ``sim.slots`` holds the placement before."""
    if mode == MODE_STAY:
        # A layer begins where the one before left its tokens: one after the other.
        for b in range(len(placement)):
            if b:
                sim.src[b] = sim.loc[b - 1]
            begin_window(sim, b, net)
            take_slots(sim, b, placement[b], net)
            count_window(sim, b, 0, trace, b, net, mode)
    else:
        _count_layers(sim, placement, trace, net, mode)


def times(sim, cost, net, mode, result, copies):
    """Write dispatch, compute, combine and migration µs of every layer b to ``result`` (B, 4), and its copies (B, G, G)."""
    for b in range(len(result)):
        result[b] = layer_times(sim, b, 0, cost, net, mode)
        link_copies(sim, b, 0, net, mode, copies[b])
