"""Streams of windows drawn from a trace: which sequences are served next, and on which GPU each one lives.

Device functions like those of :mod:`.dynamics`: the same draw serves one environment and ten thousand, on CPU and CUDA.
Randomness is counter-based (a key and a counter an environment), so that a stream depends on its seed alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.dynamics import _MASK31, device, hash31, list_bits, list_uses
from clustergym.traces.token_trace import TokenTrace

SCHEDULES = ("stationary", "drift", "switch", "replay")
PIECE = 512
STATIONARY, DRIFT, SWITCH, REPLAY = 0, 1, 2, 3


class Corpus(NamedTuple):
    """A trace laid out for drawing."""

    experts: np.ndarray
    """(L, rows, K) int16: layer first, because layers are walked one at a time"""
    seq_start: np.ndarray
    """(sequences,) int32"""
    seq_len: np.ndarray
    """(sequences,) int32"""
    dom_off: np.ndarray
    """(D + 1,) int32: ``dom_seq[dom_off[d] : dom_off[d + 1]]`` are the sequences of domain d"""
    dom_seq: np.ndarray
    """(sequences,) int32"""


class Index(NamedTuple):
    """Where each expert is used in a trace, for :class:`~.dynamics.Sim`: pieces of at most ``PIECE`` tokens of one sequence."""

    pieces: npt.NDArray[np.int32]
    """(pieces + 1,) first row of each, and the number of rows"""
    off: npt.NDArray[np.int32]
    """(L, pieces, E + 1)"""
    lst: npt.NDArray[np.uint16]
    """(L, rows·K)"""
    bits: npt.NDArray[np.uint64]
    """(L, blocks, E + 1): one block before the rows and one after them"""


class StreamState(NamedTuple):
    """Where B streams stand."""

    key: np.ndarray
    """(B, 2) int64: key and counter of the generator"""
    at: np.ndarray
    """(B, 4) int32: current sequence (−1: none), next token in it, next rank, current domain"""
    drawn: np.ndarray
    """(B, D) int32: sequences drawn from each domain so far; each is drawn once before any comes again"""
    logit: np.ndarray
    """(B, D) float64: log weights of the mixture"""


@lru_cache(maxsize=8)
def corpus_of(trace: TokenTrace) -> Corpus:
    names = trace.domain_names
    of = np.searchsorted(names, trace.domains)
    order = np.argsort(of, kind="stable")
    return Corpus(
        experts=np.ascontiguousarray(trace.experts.transpose(1, 0, 2)),
        seq_start=trace.seq_starts.astype(np.int32),
        seq_len=trace.seq_lens.astype(np.int32),
        dom_off=np.concatenate([[0], np.cumsum(np.bincount(of, minlength=len(names)))]).astype(np.int32),
        dom_seq=order.astype(np.int32),
    )


@lru_cache(maxsize=8)
def index_of(trace: TokenTrace, n_experts: int) -> Index | None:
    """The trace's index, or None where its sequences are so short that the index would be larger than the trace."""
    n = -(-trace.seq_lens // PIECE)
    if n.sum() * (n_experts + 1) > trace.n_tokens * trace.top_k:
        return None
    # A long sequence is cut into equal pieces.
    which = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    starts = np.repeat(trace.seq_starts, n) + which * np.repeat(trace.seq_lens, n) // np.repeat(n, n)
    index = Index(
        pieces=np.append(starts, trace.n_tokens).astype(np.int32),
        off=np.zeros((trace.n_layers, len(starts), n_experts + 1), np.int32),
        lst=np.zeros((trace.n_layers, trace.n_tokens * trace.top_k), np.uint16),
        bits=np.zeros((trace.n_layers, (trace.n_tokens + 63) // 64 + 2, n_experts + 1), np.uint64),
    )
    _index_layers(corpus_of(trace).experts, np.arange(trace.n_tokens, dtype=np.int32), *index)
    return index


@device
def _index_layers(experts, rows, pieces, off, lst, bits):
    for layer in range(off.shape[0]):
        list_bits(experts[layer], bits[layer])
        for piece in range(off.shape[1]):
            list_uses(experts[layer], rows, off[layer, piece], lst[layer], pieces[piece], pieces[piece + 1])


def stream_keys(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(B, 2) generator keys for B seeds of any size: the same seed gives the same stream whatever the batch."""
    folded = (seeds & _MASK31) ^ ((seeds >> 31) & _MASK31)
    mixed = (folded ^ (folded >> 16)) * 0x45D9F3B & _MASK31
    return np.stack([mixed ^ (mixed >> 15), np.zeros_like(seeds)], axis=1)


@device
def uniform(state, b):
    """A number in [0, 1)."""
    state.key[b, 1] += 1
    counter = state.key[b, 1] & _MASK31
    return hash31(hash31(state.key[b, 0]) ^ hash31(counter ^ 0x2545F491)) / 2147483648.0


@device
def permuted(i, n, key):
    """Place of ``i`` in a permutation of 0 … n−1 given by ``key``: rounds of bijections on the next power of two."""
    mask, bits = 1, 1
    while mask < n - 1:
        mask = mask * 2 + 1
        bits += 1
    half = bits // 2 + 1
    x = i
    while True:
        for r in range(4):
            mixed = hash31((key + r * 0x3C6EF35F) & _MASK31)
            x = (x * (2 * mixed + 1) + (mixed >> 7)) & mask
            x = x ^ (x >> half)
        if x < n:
            return x


@device
def begin_stream(state, b, corpus, schedule):
    """Forget where the stream stood; the generator goes on."""
    n_domains = state.drawn.shape[1]
    # Which permutation of its sequences each domain follows hangs on the counter at the start.
    state.at[b, 0] = -1
    state.at[b, 1] = 0
    state.at[b, 2] = 0
    state.at[b, 3] = int(uniform(state, b) * n_domains)
    for d in range(n_domains):
        n = corpus.dom_off[d + 1] - corpus.dom_off[d]
        state.drawn[b, d] = int(uniform(state, b) * 1024) * n
        # A standard normal, so that a drifting mixture starts in favour of a few domains.
        radius = math.sqrt(-2.0 * math.log(1.0 - uniform(state, b)))
        state.logit[b, d] = 1.5 * radius * math.cos(2.0 * math.pi * uniform(state, b))
    if schedule == REPLAY:
        state.at[b, 3] = int(uniform(state, b) * corpus.seq_len.shape[0])


@device
def _pick_domain(state, b, corpus, schedule):
    n_domains = state.drawn.shape[1]
    if schedule == SWITCH:
        return state.at[b, 3]
    total, top = 0.0, -1e300
    for d in range(n_domains):
        top = max(top, state.logit[b, d])
    for d in range(n_domains):
        size = corpus.dom_off[d + 1] - corpus.dom_off[d]
        total += size if schedule == STATIONARY else math.exp(state.logit[b, d] - top)
    left = uniform(state, b) * total
    for d in range(n_domains):
        size = corpus.dom_off[d + 1] - corpus.dom_off[d]
        left -= size if schedule == STATIONARY else math.exp(state.logit[b, d] - top)
        if left < 0:
            return d
    return n_domains - 1


@device
def _next_sequence(state, b, corpus, schedule):
    if schedule == REPLAY:
        seq = state.at[b, 3]
        state.at[b, 3] = (seq + 1) % corpus.seq_len.shape[0]
        return seq
    d = _pick_domain(state, b, corpus, schedule)
    n = int(corpus.dom_off[d + 1] - corpus.dom_off[d])
    i = int(state.drawn[b, d])
    state.drawn[b, d] = i + 1
    key = hash31(state.key[b, 0] ^ hash31(i // n * 7919 + d))
    return corpus.dom_seq[corpus.dom_off[d] + permuted(i % n, n, key)]


@device
def draw_window(state, b, corpus, schedule, rate, n_gpus, tok, home):
    """Fill ``tok`` (T,) and ``home`` (T,) with the next window. A sequence cut by a window's end goes on in the next one.

    ``rate`` is the step of the mixture walk (drift) or the chance of another domain (switch).
    """
    n_domains = state.drawn.shape[1]
    if schedule == DRIFT:
        for d in range(n_domains):
            radius = math.sqrt(-2.0 * math.log(1.0 - uniform(state, b)))
            step = rate * radius * math.cos(2.0 * math.pi * uniform(state, b))
            # Pulled back a little, so that the walk keeps its spread (1.5) instead of freezing on one domain.
            state.logit[b, d] = math.sqrt(max(0.0, 1.0 - rate * rate / 2.25)) * state.logit[b, d] + step
    elif schedule == SWITCH and n_domains > 1 and uniform(state, b) < rate:
        other = int(uniform(state, b) * (n_domains - 1))
        state.at[b, 3] = other + 1 if other >= state.at[b, 3] else other
        state.at[b, 0] = -1
    n_tokens = tok.shape[0]
    filled = 0
    while filled < n_tokens:
        if state.at[b, 0] < 0:
            state.at[b, 0] = _next_sequence(state, b, corpus, schedule)
            state.at[b, 1] = 0
            state.at[b, 2] = (state.at[b, 2] + 1) % n_gpus
        seq, pos = state.at[b, 0], state.at[b, 1]
        take = min(corpus.seq_len[seq] - pos, n_tokens - filled)
        rank = (state.at[b, 2] + n_gpus - 1) % n_gpus
        for i in range(take):
            tok[filled + i] = corpus.seq_start[seq] + pos + i
            home[filled + i] = rank
        filled += take
        state.at[b, 1] = pos + take
        if pos + take == corpus.seq_len[seq]:
            state.at[b, 0] = -1
