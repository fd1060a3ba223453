"""Drawing the sampled passes of an interval from a trace.

The trace is cut into pieces: tokens that follow each other in a sequence. A stream serves a piece at most once, until
all pieces have been served. In the decode phase a piece has one token for each sampled pass: a running sequence gives
its next token to each of them. Hundreds of passes later, in the next interval, another sequence runs in its place,
drawn from the mixture of domains at that time. In the prefill phase a rank works through pieces one after another.

Random numbers are counter-based (one key and counter per stream), so a stream depends only on its seed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import device, index, inlined
from clustergym.moe_placement.kernels.replicas import MASK31, hash31
from clustergym.moe_placement.kernels.state import (
    AT_DOMAIN_OR_PIECE,
    AT_REUSE,
    DRIFT,
    N_ROUNDS,
    ORDER_LENGTH,
    ORDER_MASK,
    ORDER_ROUNDS,
    ORDER_SHIFT,
    PIECE_LEFT,
    PIECE_ROW,
    RANDOM_COUNTER,
    RANDOM_KEY,
    REPLAY,
    SWITCH,
)
from clustergym.moe_placement.profiles import DECODE

# Standard deviation of the log weights of a drifting mixture: a few domains dominate.
MIXTURE_STD = 1.5


def stream_keys(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(B, 2) key and counter for B seeds of any size. A seed gives the same stream in every batch."""
    folded = (seeds & MASK31) ^ ((seeds >> 31) & MASK31)
    mixed = (folded ^ (folded >> 16)) * 0x45D9F3B & MASK31
    return np.stack([mixed ^ (mixed >> 15), np.zeros_like(seeds)], axis=1)


@device
def _uniform(state, b):
    """A number in [0, 1)."""
    state.random[b, RANDOM_COUNTER] += 1
    counter = state.random[b, RANDOM_COUNTER] & MASK31
    return hash31(hash31(state.random[b, RANDOM_KEY]) ^ hash31(counter ^ 0x2545F491)) / 2147483648.0


@device
def _normal(state, b):
    """A standard normal number."""
    radius = math.sqrt(-2.0 * math.log(1.0 - _uniform(state, b)))
    return radius * math.cos(2.0 * math.pi * _uniform(state, b))


@device
def begin_stream(state, b, trace, schedule):
    """Start a new stream. The random numbers continue, so the next one differs."""
    n_domains = state.drawn.shape[1]
    state.random[b, RANDOM_KEY] = hash31(state.random[b, RANDOM_KEY] ^ hash31(state.random[b, RANDOM_COUNTER] & MASK31))
    places = trace.piece_row.shape[0] if schedule == REPLAY else n_domains
    state.position[b, AT_DOMAIN_OR_PIECE] = int(_uniform(state, b) * places)
    state.position[b, AT_REUSE] = 0
    for d in range(n_domains):
        state.drawn[b, d] = 0
        state.logits[b, d] = MIXTURE_STD * _normal(state, b)
    for g in range(state.rank_piece.shape[1]):
        state.rank_piece[b, g, PIECE_LEFT] = 0
    _write_orders(state, b, trace)


@device
def draw_interval(state, b, trace, phase, schedule, rate, imbalance, rows, rank_start):
    """Fill ``rows`` (P, T) and ``rank_start`` (P, G + 1) with the sampled passes of the next interval.

    ``rate`` is the step of the mixture walk (drift) or the chance of another domain (switch). ``imbalance`` is the
    spread of the ranks' shares of the tokens, 0 for equal shares.
    """
    n_domains = state.drawn.shape[1]
    if schedule == DRIFT:
        # Pulled back a little, so that the walk keeps its spread instead of freezing on one domain.
        keep = math.sqrt(max(0.0, 1.0 - (rate / MIXTURE_STD) ** 2))
        for d in range(n_domains):
            state.logits[b, d] = keep * state.logits[b, d] + rate * _normal(state, b)
    elif schedule == SWITCH and n_domains > 1 and _uniform(state, b) < rate:
        other = int(_uniform(state, b) * (n_domains - 1))
        state.position[b, AT_DOMAIN_OR_PIECE] = other + int(other >= state.position[b, AT_DOMAIN_OR_PIECE])
    if schedule != REPLAY:
        _write_weights(state, b, trace, schedule)
    _share_tokens(state, b, imbalance, rank_start, rows.shape[1])
    if phase == DECODE:
        t = 0
        while t < rows.shape[1]:
            if schedule == REPLAY:
                _write_sequence(trace, _next_piece(state, b, trace, schedule), rows, t)
                t += 1
                continue
            if state.weights[b, n_domains - 1] == 0.0:
                _begin_again(state, b, trace, schedule)
            t = _draw_sequences(state, b, trace, rows, t)
            _write_weights(state, b, trace, schedule)
        return
    for p in range(rows.shape[0]):
        for g in range(rank_start.shape[1] - 1):
            _fill_rank(state, b, trace, schedule, g, rows[p], rank_start[p])


@inlined
def _write_sequence(trace, piece, rows, t):
    """Give token ``t`` of each decode pass its row: the next token of one running sequence."""
    row = int(trace.piece_row[piece])
    for p in range(rows.shape[0]):
        rows[p, t] = row + p


@device
def _draw_sequences(state, b, trace, rows, t):
    """Fill the decode passes from token ``t`` on, until they are full or a domain is used up. Returns the next token.

    A function of its own: with the code for used-up domains in the same loop, it takes twice the time.
    """
    used_up, first = False, t
    # First all places in the lists of pieces, then the pieces: what one loop waits for does not hold up the other.
    while t < rows.shape[1] and not used_up:
        rows[0, t], used_up = _draw_place(state, b, trace)
        t += 1
    for i in range(first, t):
        _write_sequence(trace, _piece_at(state, b, trace, int(rows[0, i])), rows, i)
    return t


@device
def _fill_rank(state, b, trace, schedule, g, rows, rank_start):
    """Give rank ``g`` its tokens of a prefill pass."""
    piece, t, last = state.rank_piece[b, g], int(rank_start[g]), int(rank_start[g + 1])
    while t < last:
        if piece[PIECE_LEFT] == 0:
            drawn = _next_piece(state, b, trace, schedule)
            piece[PIECE_ROW] = trace.piece_row[drawn]
            piece[PIECE_LEFT] = trace.piece_tokens[drawn]
        take = min(int(piece[PIECE_LEFT]), last - t)
        for i in range(take):
            rows[t + i] = piece[PIECE_ROW] + i
        piece[PIECE_ROW] += take
        piece[PIECE_LEFT] -= take
        t += take


@device
def _share_tokens(state, b, imbalance, rank_start, n_tokens):
    """Share the tokens of all passes among the ranks: equally, or with log-normal weights."""
    n_gpus, total = rank_start.shape[1] - 1, 0.0
    for g in range(n_gpus):
        total += math.exp(imbalance * _normal(state, b)) if imbalance > 0.0 else 1.0
        # Cumulative weights in fixed point until their sum is known.
        rank_start[0, g + 1] = int(total * 65536.0)
    for g in range(n_gpus):
        rank_start[0, g + 1] = int(rank_start[0, g + 1] / (total * 65536.0) * n_tokens + 0.5)
    rank_start[0, 0] = 0
    rank_start[0, n_gpus] = n_tokens
    for p in range(1, rank_start.shape[0]):
        for g in range(n_gpus + 1):
            rank_start[p, g] = rank_start[0, g]


@device
def _write_weights(state, b, trace, schedule):
    """Write the cumulative weights of the domains that have a piece left; all 0 if none has."""
    total, largest = 0.0, -1e300
    for d in range(state.drawn.shape[1]):
        largest = max(largest, state.logits[b, d])
    for d in range(state.drawn.shape[1]):
        pieces = trace.domain_start[d + 1] - trace.domain_start[d]
        weight = float(pieces)
        if schedule == DRIFT:
            weight = math.exp(state.logits[b, d] - largest)
        elif schedule == SWITCH:
            # Other domains serve only when the current one is used up.
            weight = 1.0 if d == state.position[b, AT_DOMAIN_OR_PIECE] else 1e-9
        total += weight if state.drawn[b, d] < pieces else 0.0
        state.weights[b, d] = total


@device
def _begin_again(state, b, trace, schedule):
    """All pieces have been served: serve them again, in another order."""
    state.position[b, AT_REUSE] = 1
    state.random[b, RANDOM_KEY] = hash31(state.random[b, RANDOM_KEY] + 1)
    for d in range(state.drawn.shape[1]):
        state.drawn[b, d] = 0
    _write_orders(state, b, trace)
    _write_weights(state, b, trace, schedule)


@device
def _write_orders(state, b, trace):
    """Write the order in which the stream serves the pieces of each domain."""
    for d in range(state.drawn.shape[1]):
        key = hash31(state.random[b, RANDOM_KEY] ^ hash31(d + 7919))
        write_order(state.orders[b, d], int(trace.domain_start[d + 1] - trace.domain_start[d]), key)


@device
def _next_piece(state, b, trace, schedule):
    """The next piece of the stream."""
    if schedule == REPLAY:
        n = trace.piece_row.shape[0]
        piece = state.position[b, AT_DOMAIN_OR_PIECE]
        state.position[b, AT_DOMAIN_OR_PIECE] = piece + 1 if piece + 1 < n else 0
        state.drawn[b, 0] += 1
        if state.drawn[b, 0] > n:
            state.position[b, AT_REUSE] = 1
        return piece
    if state.weights[b, state.weights.shape[1] - 1] == 0.0:
        _begin_again(state, b, trace, schedule)
    place, used_up = _draw_place(state, b, trace)
    if used_up:
        _write_weights(state, b, trace, schedule)
    return _piece_at(state, b, trace, int(place))


@inlined
def _draw_place(state, b, trace):
    """(place of a piece, whether it is the last of its domain), from a domain that is drawn by the weights."""
    weights = state.weights[b]
    last = weights.shape[0] - 1
    target = _uniform(state, b) * weights[last]
    # Weights ascend. Counting has no branch to mispredict: faster than a binary search for a few domains.
    low = 0
    for d in range(last):
        low += weights[index(d)] <= target
    place = trace.domain_start[low] + state.drawn[b, low]
    state.drawn[b, low] += 1
    return place, place + 1 >= trace.domain_start[low + 1]


@inlined
def _piece_at(state, b, trace, place):
    """The piece at a place of the lists of all domains, which each stream has in an order of its own."""
    domain = 0
    for d in range(1, trace.domain_start.shape[0] - 1):
        domain += trace.domain_start[index(d)] <= place
    first = int(trace.domain_start[domain])
    return trace.domain_pieces[first + permuted(place - first, state.orders[b, domain])]


@device
def write_order(order, n, key):
    """Write a permutation of 0 … n−1 given by ``key``, for :func:`permuted`."""
    mask, bits = 1, 1
    while mask < n - 1:
        mask = mask * 2 + 1
        bits += 1
    order[ORDER_LENGTH] = n
    order[ORDER_MASK] = mask
    order[ORDER_SHIFT] = bits // 2 + 1
    for r in range(N_ROUNDS):
        order[ORDER_ROUNDS + r] = hash31((key + r * 0x3C6EF35F) & MASK31)


@inlined
def permuted(i, order):
    """Image of ``i`` under the permutation that :func:`write_order` wrote."""
    n, x = order[ORDER_LENGTH], _mixed(i, order)
    # A permutation of a power of two: up to half of the images are too large.
    while x >= n:
        x = _mixed(x, order)
    return x


@inlined
def _mixed(x, order):
    """Image of ``x`` under a permutation of the next power of two: rounds of bijections."""
    mask, shift = order[ORDER_MASK], order[ORDER_SHIFT]
    for r in range(N_ROUNDS):
        mixed = order[ORDER_ROUNDS + r]
        x = (x * (2 * mixed + 1) + (mixed >> 7)) & mask
        x = x ^ (x >> shift)
    return x
