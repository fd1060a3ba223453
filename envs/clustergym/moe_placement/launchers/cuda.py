"""Batches on a CUDA device: one thread of the grid per environment, on torch's current stream, without copies or syncs."""

from __future__ import annotations

import torch
from numba import config, cuda

from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels import lookahead

THREADS = 64

_begin_episode, _step = kernels.begin_episode, kernels.step
_look_ahead_one, _look_ahead_every = lookahead.look_ahead_one, lookahead.look_ahead_all


@cuda.jit
def _reset(where, episode, sim, stream, obs, trace, rules):
    b = cuda.grid(1)
    if b < where.shape[0] and where[b]:
        _begin_episode(episode, sim, stream, obs, b, trace, rules)


@cuda.jit
def _advance(expert, node, reward, episode, sim, stream, obs, trace, rules):
    b = cuda.grid(1)
    if b < expert.shape[0]:
        reward[b] = _step(episode, sim, stream, obs, b, trace, rules, expert[b], node[b])


@cuda.jit
def _look_ahead(expert, result, episode, sim, rules):
    b = cuda.grid(1)
    if b < expert.shape[0]:
        _look_ahead_one(episode, sim, b, rules, expert[b], result[b])


@cuda.jit
def _look_ahead_all(result, episode, sim, rules):
    b = cuda.grid(1)
    if b < result.shape[0]:
        _look_ahead_every(episode, sim, b, rules, result[b])


def _launch(kernel, n, *arguments):
    if config.ENABLE_CUDASIM:
        kernel[(n + THREADS - 1) // THREADS, THREADS](*arguments)
        return
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    kernel[(n + THREADS - 1) // THREADS, THREADS, stream](*arguments)


def reset(where, episode, sim, stream, obs, trace, rules):
    """Begin new episodes where ``where`` (B,) is true."""
    _launch(_reset, where.shape[0], where, episode, sim, stream, obs, trace, rules)


def step(expert, node, reward, episode, sim, stream, obs, trace, rules):
    """One operation in every environment; writes ``reward`` (B,)."""
    _launch(_advance, expert.shape[0], expert, node, reward, episode, sim, stream, obs, trace, rules)


def look_ahead(expert, result, episode, sim, rules):
    """What each operation on ``expert`` (B,) would save; writes ``result`` (B, 3·G)."""
    _launch(_look_ahead, expert.shape[0], expert, result, episode, sim, rules)


def look_ahead_all(result, episode, sim, rules):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    _launch(_look_ahead_all, result.shape[0], result, episode, sim, rules)
