"""Candidates of a batch on the CPU. A module of its own, so that environments without candidates do not compile it."""

from __future__ import annotations

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels import candidates
from clustergym.moe_placement.kernels.compile import device

_propose = candidates.propose


@device
def _propose_range(first, last, operations, mask, score, compact, episode, sim, obs, rules):
    for b in range(first, last):
        _propose(episode, sim, obs, b, rules, operations[b], mask[b], score[b], compact[b])


def propose(operations, mask, score, compact, state):
    """The k most promising operations; writes (B, k + 1, 2), (B, k + 1), scratch and (B, features)."""
    episode, sim, _, obs, _, rules = state
    spread(_propose_range, len(mask), operations, mask, score, compact, episode, sim, obs, rules)
