"""Batches on a CUDA device: one thread per environment, on torch's current stream, without copies or syncs."""

from __future__ import annotations

import torch
from numba import config, cuda

from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels import lookahead
from clustergym.moe_placement.kernels.state import CLOCK_LAYER

THREADS = 64

_begin_episode, _one_step, _load_layer = kernels.begin_episode, kernels.step, kernels.load_layer
_operate, _copy_slots = kernels.operate, kernels.copy_slots
_look_ahead_parts, _look_ahead_every = lookahead.look_ahead_parts, lookahead.look_ahead_all


@cuda.jit
def _reset(where, episode, sim, stream, obs, trace, rules):
    b = cuda.grid(1)
    if b < where.shape[0] and where[b]:
        _begin_episode(episode, sim, stream, obs, b, trace, rules)


@cuda.jit
def _step(choice, reward, episode, sim, stream, obs, trace, rules):
    b = cuda.grid(1)
    if b < choice.shape[1]:
        reward[b] = _one_step(episode, sim, stream, obs, b, trace, rules, choice[0, b], choice[1, b])


@cuda.jit
def _look_ahead(experts, result, episode, sim, obs, rules):
    b = cuda.grid(1)
    if b < experts.shape[0]:
        for i in range(experts.shape[1]):
            _look_ahead_parts(episode, sim, obs, b, rules, experts[b, i], result[b, i])


@cuda.jit
def _look_ahead_all(result, episode, sim, rules):
    b = cuda.grid(1)
    if b < result.shape[0]:
        _look_ahead_every(episode, sim, b, rules, result[b])


@cuda.jit
def _load(slots, rows, rank_start, episode, sim, obs, trace, rules):
    b = cuda.grid(1)
    if b < episode.clock.shape[0]:
        layer = b % episode.slots.shape[1]
        _load_layer(episode, sim, obs, b, trace, rules, layer, slots[layer], rows, rank_start)


@cuda.jit
def _finish(choice, episode, sim, obs, rules):
    b = cuda.grid(1)
    if b < choice.shape[1]:
        _operate(episode, sim, obs, b, rules, choice[0, b], choice[1, b])
        _copy_slots(sim.slots[b], episode.slots[b, episode.clock[b, CLOCK_LAYER]])


def _launch(kernel, n, *arguments):
    if config.ENABLE_CUDASIM:
        kernel[(n + THREADS - 1) // THREADS, THREADS](*arguments)
        return
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    kernel[(n + THREADS - 1) // THREADS, THREADS, stream](*arguments)


def reset(where, state):
    """Begin new episodes where ``where`` (B,) is true."""
    _launch(_reset, where.shape[0], where, *state)


def step(choice, reward, state):
    """One operation in every environment, ``choice`` (2, B) of expert and node; writes ``reward`` (B,)."""
    _launch(_step, choice.shape[1], choice, reward, *state)


def look_ahead(experts, parts, state):
    """What each operation on ``experts`` (B, M) would save; writes ``parts`` (B, M, 3·G, parts)."""
    episode, sim, _, obs, _, rules = state
    _launch(_look_ahead, experts.shape[0], experts, parts, episode, sim, obs, rules)


def look_ahead_all(result, state):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    episode, sim, _, _, _, rules = state
    _launch(_look_ahead_all, result.shape[0], result, episode, sim, rules)


def load_placement(slots, rows, rank_start, state):
    """Environment b begins a visit to layer b mod L with ``slots`` (L, G, S), after these passes (P, T), (P, G + 1)."""
    episode, sim, _, obs, trace, rules = state
    _launch(_load, episode.clock.shape[0], slots, rows, rank_start, episode, sim, obs, trace, rules)


def finish_layer(choice, state):
    """The last operation ``choice`` (2, B) on the layer of every environment: ``episode.slots`` is up to date."""
    episode, sim, _, obs, _, rules = state
    _launch(_finish, choice.shape[1], choice, episode, sim, obs, rules)
