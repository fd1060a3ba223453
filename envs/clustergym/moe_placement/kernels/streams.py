"""Streams of windows drawn from a trace: which sequences are served next, and on which GPU each one lives.

Random numbers are counter-based (a key and a counter per environment), so a stream depends only on its seed.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.replicas import MASK31, hash31
from clustergym.moe_placement.kernels.state import (
    AT_DOMAIN,
    AT_RANK,
    AT_SEQUENCE,
    AT_TOKEN,
    DRIFT,
    RANDOM_COUNTER,
    RANDOM_KEY,
    REPLAY,
    STATIONARY,
    SWITCH,
    TraceTables,
)
from clustergym.traces.token_trace import TokenTrace

# Spread of the logits of a drifting mixture.
DRIFT_STD = 1.5


@lru_cache(maxsize=8)
def trace_tables(trace: TokenTrace) -> TraceTables:
    """The trace as the kernels read it."""
    names = trace.domain_names
    domain = np.searchsorted(names, trace.domains)
    return TraceTables(
        experts=np.ascontiguousarray(trace.experts.transpose(1, 0, 2)),
        sequence_start=trace.seq_starts.astype(np.int32),
        sequence_length=trace.seq_lens.astype(np.int32),
        domain_start=np.concatenate([[0], np.cumsum(np.bincount(domain, minlength=len(names)))]).astype(np.int32),
        domain_sequences=np.argsort(domain, kind="stable").astype(np.int32),
    )


def stream_keys(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(B, 2) key and counter for B seeds of any size. A seed gives the same stream in every batch."""
    folded = (seeds & MASK31) ^ ((seeds >> 31) & MASK31)
    mixed = (folded ^ (folded >> 16)) * 0x45D9F3B & MASK31
    return np.stack([mixed ^ (mixed >> 15), np.zeros_like(seeds)], axis=1)


@device
def uniform(state, b):
    """A random number in [0, 1)."""
    state.random[b, RANDOM_COUNTER] += 1
    counter = state.random[b, RANDOM_COUNTER] & MASK31
    return hash31(hash31(state.random[b, RANDOM_KEY]) ^ hash31(counter ^ 0x2545F491)) / 2147483648.0


@device
def _normal(state, b, std):
    """A normal random number with mean 0."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(state, b)))
    return std * radius * math.cos(2.0 * math.pi * uniform(state, b))


@device
def permuted(i, n, key):
    """Image of ``i`` under a permutation of 0 … n−1 given by ``key``: rounds of bijections on the next power of two."""
    mask, bits = 1, 1
    while mask < n - 1:
        mask = mask * 2 + 1
        bits += 1
    half = bits // 2 + 1
    x = i
    while True:
        for r in range(4):
            mixed = hash31((key + r * 0x3C6EF35F) & MASK31)
            x = (x * (2 * mixed + 1) + (mixed >> 7)) & mask
            x = x ^ (x >> half)
        if x < n:
            return x


@device
def begin_stream(state, b, trace, schedule):
    """Start a new stream. The random number generator continues."""
    n_domains = state.drawn.shape[1]
    state.position[b, AT_SEQUENCE] = -1
    state.position[b, AT_TOKEN] = 0
    state.position[b, AT_RANK] = 0
    state.position[b, AT_DOMAIN] = int(uniform(state, b) * n_domains)
    for d in range(n_domains):
        # A random start: the permutation of a domain's sequences depends on how many have been drawn.
        n = trace.domain_start[d + 1] - trace.domain_start[d]
        state.drawn[b, d] = int(uniform(state, b) * 1024) * n
        # A drifting mixture starts in favour of a few domains.
        state.logits[b, d] = _normal(state, b, DRIFT_STD)
    if schedule == REPLAY:
        state.position[b, AT_DOMAIN] = int(uniform(state, b) * trace.sequence_length.shape[0])


@device
def _choose_domain(state, b, trace, schedule):
    n_domains = state.drawn.shape[1]
    if schedule == SWITCH:
        return state.position[b, AT_DOMAIN]
    total, top = 0.0, -1e300
    for d in range(n_domains):
        top = max(top, state.logits[b, d])
    for d in range(n_domains):
        size = trace.domain_start[d + 1] - trace.domain_start[d]
        total += size if schedule == STATIONARY else math.exp(state.logits[b, d] - top)
    left = uniform(state, b) * total
    for d in range(n_domains):
        size = trace.domain_start[d + 1] - trace.domain_start[d]
        left -= size if schedule == STATIONARY else math.exp(state.logits[b, d] - top)
        if left < 0:
            return d
    return n_domains - 1


@device
def _next_sequence(state, b, trace, schedule):
    if schedule == REPLAY:
        sequence = state.position[b, AT_DOMAIN]
        state.position[b, AT_DOMAIN] = (sequence + 1) % trace.sequence_length.shape[0]
        return sequence
    d = _choose_domain(state, b, trace, schedule)
    n = int(trace.domain_start[d + 1] - trace.domain_start[d])
    i = int(state.drawn[b, d])
    state.drawn[b, d] = i + 1
    key = hash31(state.random[b, RANDOM_KEY] ^ hash31(i // n * 7919 + d))
    return trace.domain_sequences[trace.domain_start[d] + permuted(i % n, n, key)]


@device
def draw_window(state, b, trace, schedule, rate, n_gpus, rows, home):
    """Fill ``rows`` (T,) and ``home`` (T,) with the next window. A sequence cut by the end of a window continues in the next.

    ``rate`` is the step of the mixture walk (drift) or the probability of another domain (switch).
    """
    n_domains = state.drawn.shape[1]
    if schedule == DRIFT:
        for d in range(n_domains):
            step = _normal(state, b, rate)
            # The factor pulls the walk back a little: it keeps its spread instead of staying on one domain.
            shrink = math.sqrt(max(0.0, 1.0 - rate * rate / (DRIFT_STD * DRIFT_STD)))
            state.logits[b, d] = shrink * state.logits[b, d] + step
    elif schedule == SWITCH and n_domains > 1 and uniform(state, b) < rate:
        other = int(uniform(state, b) * (n_domains - 1))
        state.position[b, AT_DOMAIN] = other + 1 if other >= state.position[b, AT_DOMAIN] else other
        state.position[b, AT_SEQUENCE] = -1
    n_tokens = rows.shape[0]
    filled = 0
    while filled < n_tokens:
        if state.position[b, AT_SEQUENCE] < 0:
            state.position[b, AT_SEQUENCE] = _next_sequence(state, b, trace, schedule)
            state.position[b, AT_TOKEN] = 0
            state.position[b, AT_RANK] = (state.position[b, AT_RANK] + 1) % n_gpus
        sequence, position = state.position[b, AT_SEQUENCE], state.position[b, AT_TOKEN]
        take = min(trace.sequence_length[sequence] - position, n_tokens - filled)
        rank = (state.position[b, AT_RANK] + n_gpus - 1) % n_gpus
        for i in range(take):
            rows[filled + i] = trace.sequence_start[sequence] + position + i
            home[filled + i] = rank
        filled += take
        state.position[b, AT_TOKEN] = position + take
        if position + take == trace.sequence_length[sequence]:
            state.position[b, AT_SEQUENCE] = -1
