"""Batches on a CUDA device: one thread per environment, on torch's current stream, without copies or syncs."""

from __future__ import annotations

from numba import cuda

from clustergym.common.cuda_grid import launch
from clustergym.moe_placement.kernels import candidates, lookahead
from clustergym.moe_placement.kernels import episode as kernels

_draw_episode, _begin_episode, _one_step = kernels.draw_episode, kernels.begin_episode, kernels.step
_start_from_eplb = kernels.start_from_eplb
_look_ahead_parts, _propose_one = lookahead.look_ahead_parts, candidates.propose


@cuda.jit
def _reset(where, episode, sim, stream, obs, trace, rules):
    b = cuda.grid(1)
    if b < where.shape[0] and where[b]:
        _draw_episode(episode, stream, b, trace, rules)
        if rules.start_eplb:
            _start_from_eplb(episode, b, trace)
        _begin_episode(episode, sim, stream, obs, b, trace, rules)


@cuda.jit
def _step(choice, reward, episode, sim, stream, obs, trace, rules):
    b = cuda.grid(1)
    if b < choice.shape[1]:
        reward[b] = _one_step(episode, sim, stream, obs, b, trace, rules, choice[0, b], choice[1, b])


@cuda.jit
def _look_ahead(experts, column, result, episode, sim, rules):
    b = cuda.grid(1)
    if b < experts.shape[0]:
        for i in range(experts.shape[1]):
            _look_ahead_parts(episode, sim, b, rules, experts[b, i], column, result[b, i])


@cuda.jit
def _propose(operations, mask, score, compact, episode, sim, obs, rules):
    b = cuda.grid(1)
    if b < mask.shape[0]:
        _propose_one(episode, sim, obs, b, rules, operations[b], mask[b], score[b], compact[b])


def reset(where, state):
    """Begin new episodes where ``where`` (B,) is true. ``state`` is (episode, sim, stream, obs, trace, rules)."""
    launch(_reset, where.shape[0], where, *state)


def step(choice, reward, state):
    """One operation in every environment, ``choice`` (2, B) of expert and node; writes ``reward`` (B,)."""
    launch(_step, choice.shape[1], choice, reward, *state)


def look_ahead(experts, column, result, state):
    """What operations on ``experts`` (B, M) would save; writes ``result`` (B, M, G, …) from ``column`` on."""
    episode, sim, _, _, _, rules = state
    launch(_look_ahead, experts.shape[0], experts, column, result, episode, sim, rules)


def propose(operations, mask, score, compact, state):
    """The k most promising operations; writes (B, k + 1, 2), (B, k + 1), scratch and (B, features)."""
    episode, sim, _, obs, _, rules = state
    launch(_propose, mask.shape[0], operations, mask, score, compact, episode, sim, obs, rules)
