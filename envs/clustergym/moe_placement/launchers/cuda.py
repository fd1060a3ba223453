"""Batches on a CUDA device: one thread of the grid an environment, on torch's current stream, without copies or syncs."""

from __future__ import annotations

import torch
from numba import config, cuda

from clustergym.moe_placement import episode

THREADS = 64

_begin, _step, _look, _look_all = episode.begin_episode, episode.step, episode.look_ahead_one, episode.look_ahead_all


@cuda.jit
def _reset(where, env, sim, stream, obs, corpus, rules):
    b = cuda.grid(1)
    if b < where.shape[0] and where[b]:
        _begin(env, sim, stream, obs, b, corpus, rules)


@cuda.jit
def _advance(expert, node, reward, env, sim, stream, obs, corpus, rules):
    b = cuda.grid(1)
    if b < expert.shape[0]:
        reward[b] = _step(env, sim, stream, obs, b, corpus, rules, expert[b], node[b])


@cuda.jit
def _look_ahead(expert, result, env, sim, corpus, rules):
    b = cuda.grid(1)
    if b < expert.shape[0]:
        _look(env, sim, b, corpus, rules, expert[b], result[b])


@cuda.jit
def _look_ahead_all(result, env, sim, corpus, rules):
    b = cuda.grid(1)
    if b < result.shape[0]:
        _look_all(env, sim, b, corpus, rules, result[b])


def _launch(kernel, n, *arguments):
    if config.ENABLE_CUDASIM:
        kernel[(n + THREADS - 1) // THREADS, THREADS](*arguments)
        return
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    kernel[(n + THREADS - 1) // THREADS, THREADS, stream](*arguments)


def reset(where, env, sim, stream, obs, corpus, rules):
    """Begin new episodes where ``where`` (B,) is true."""
    _launch(_reset, where.shape[0], where, env, sim, stream, obs, corpus, rules)


def step(expert, node, reward, env, sim, stream, obs, corpus, rules):
    """One operation in every environment; writes ``reward`` (B,)."""
    _launch(_advance, expert.shape[0], expert, node, reward, env, sim, stream, obs, corpus, rules)


def look_ahead(expert, result, env, sim, corpus, rules):
    """What each operation on ``expert`` (B,) would save; writes ``result`` (B, 3·G)."""
    _launch(_look_ahead, expert.shape[0], expert, result, env, sim, corpus, rules)


def look_ahead_all(result, env, sim, corpus, rules):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    _launch(_look_ahead_all, result.shape[0], result, env, sim, corpus, rules)
