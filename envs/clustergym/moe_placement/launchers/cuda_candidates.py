"""Candidates of a batch on a CUDA device."""

from __future__ import annotations

from numba import cuda

from clustergym.moe_placement.kernels import candidates
from clustergym.moe_placement.launchers.cuda import _launch

_propose_one = candidates.propose


@cuda.jit
def _propose(operations, mask, score, compact, episode, sim, obs, rules):
    b = cuda.grid(1)
    if b < mask.shape[0]:
        _propose_one(episode, sim, obs, b, rules, operations[b], mask[b], score[b], compact[b])


def propose(operations, mask, score, compact, state):
    """The k most promising operations; writes (B, k + 1, 2), (B, k + 1), scratch and (B, features)."""
    episode, sim, _, obs, _, rules = state
    _launch(_propose, mask.shape[0], operations, mask, score, compact, episode, sim, obs, rules)
