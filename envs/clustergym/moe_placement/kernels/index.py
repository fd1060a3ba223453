"""Where each expert is used: an index of a trace, cut into pieces of consecutive rows.

For each piece the index lists the uses of each expert, so that an operation only visits the tokens that use the expert.
Environments share the index of their trace, and a window is a few ranges of it (``segments``). A window of arbitrary rows
gets an index of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.kernels.compile import device, index
from clustergym.moe_placement.kernels.replicas import hash31, upper_half
from clustergym.moe_placement.kernels.state import SEGMENT_OFFSET, SEGMENT_PIECE, SEGMENT_TOKEN
from clustergym.moe_placement.kernels.streams import trace_tables
from clustergym.traces.token_trace import TokenTrace

# Longest piece: the offset of a token in it fits, with one flag, into 16 bits.
LONGEST_PIECE = 1 << 15
# Longest piece of a trace's own index.
PIECE_TOKENS = 512


class TokenIndex(NamedTuple):
    """The index of a trace, as :class:`~.state.SimulationState` holds it. A piece has tokens of one sequence only."""

    piece_starts: npt.NDArray[np.int32]
    """(pieces + 1,)"""
    use_starts: npt.NDArray[np.int32]
    """(L, pieces, E + 1)"""
    uses: npt.NDArray[np.uint16]
    """(L, rows·K)"""
    user_bits: npt.NDArray[np.uint64]
    """(L, blocks, E + 1): one block before the rows and one after them"""


@lru_cache(maxsize=8)
def token_index(trace: TokenTrace, n_experts: int) -> TokenIndex | None:
    """The index of a trace, or None if its sequences are so short that the index would be larger than the trace."""
    n = -(-trace.seq_lens // PIECE_TOKENS)
    if n.sum() * (n_experts + 1) > trace.n_tokens * trace.top_k:
        return None
    # A long sequence is cut into equal pieces.
    which = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    starts = np.repeat(trace.seq_starts, n) + which * np.repeat(trace.seq_lens, n) // np.repeat(n, n)
    found = TokenIndex(
        piece_starts=np.append(starts, trace.n_tokens).astype(np.int32),
        use_starts=np.zeros((trace.n_layers, len(starts), n_experts + 1), np.int32),
        uses=np.zeros((trace.n_layers, trace.n_tokens * trace.top_k), np.uint16),
        user_bits=np.zeros((trace.n_layers, (trace.n_tokens + 63) // 64 + 2, n_experts + 1), np.uint64),
    )
    _index_layers(trace_tables(trace).experts, np.arange(trace.n_tokens, dtype=np.int32), *found)
    return found


@device
def _index_layers(experts, rows, piece_starts, use_starts, uses, user_bits):
    for layer in range(use_starts.shape[0]):
        _index_bits(experts[layer], user_bits[layer])
        for piece in range(use_starts.shape[1]):
            first, last = piece_starts[piece], piece_starts[piece + 1]
            _index_piece(experts[layer], rows, use_starts[layer, piece], uses[layer], first, last)


@device
def _index_piece(experts, rows, use_starts, uses, first, last):
    """Index the piece of tokens ``first`` … ``last``−1, which are the given ``rows`` of ``experts``."""
    n_experts, top_k = use_starts.shape[0] - 1, experts.shape[1]
    for e in range(n_experts + 1):
        use_starts[e] = 0
    for t in range(first, last):
        row = index(rows[t])
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                use_starts[index(e + 1)] += 1
    use_starts[0] = first * top_k
    for e in range(n_experts):
        use_starts[e + 1] += use_starts[e]
    for t in range(first, last):
        row = index(rows[t])
        entry = (t - first) << 1 | 1
        for k in range(top_k):
            e = experts[row, k]
            if e >= 0:
                at = use_starts[index(e)]
                use_starts[index(e)] = at + 1
                uses[index(at)] = entry
                entry &= -2
    for e in range(n_experts, 0, -1):
        use_starts[e] = use_starts[e - 1]
    use_starts[0] = first * top_k


@device
def _index_bits(experts, user_bits):
    """Write ``user_bits`` of one layer, ``experts`` (rows, K)."""
    for row in range(experts.shape[0]):
        one, block = np.uint64(1) << np.uint64(row & 63), index((row >> 6) + 1)
        for k in range(experts.shape[1]):
            e = int(experts[row, k])
            if e >= 0:
                user_bits[block, index(e)] |= one
        if upper_half(hash31(row)):
            user_bits[block, index(user_bits.shape[1] - 1)] |= one


@device
def index_window(sim, b, w, experts):
    """Index the rows of the window itself, in the window's own plane of the index."""
    plane, n_pieces = sim.index_plane[b, w], sim.use_starts.shape[1]
    for piece in range(n_pieces):
        first, last = sim.piece_starts[piece], sim.piece_starts[piece + 1]
        _index_piece(experts, sim.rows[b, w], sim.use_starts[plane, piece], sim.uses[plane], first, last)
        sim.segments[b, w, piece, SEGMENT_PIECE] = piece
        sim.segments[b, w, piece, SEGMENT_OFFSET] = 0
        sim.segments[b, w, piece, SEGMENT_TOKEN] = first
    sim.segments[b, w, n_pieces, SEGMENT_TOKEN] = sim.rows.shape[2]


@device
def find_segments(rows, origin, piece_starts, segments):
    """Write the ranges of the trace's index that the ``rows`` (T,) of a window consist of.

    Returns whether tokens of one range have different origins (T,).
    """
    n, t, n_tokens, mixed = 0, 0, rows.shape[0], 0
    while t < n_tokens:
        row = int(rows[index(t)])
        # Usually nothing has changed since the layer before.
        piece = int(segments[n, SEGMENT_PIECE])
        if row < piece_starts[piece] or row >= piece_starts[piece + 1]:
            piece, high = 0, piece_starts.shape[0] - 1
            while piece + 1 < high:
                middle = (piece + high) // 2
                if piece_starts[middle] <= row:
                    piece = middle
                else:
                    high = middle
        last = min(n_tokens, t + int(piece_starts[piece + 1]) - row)
        # A loop without an early exit can be vectorised.
        broken, home = 0, int(origin[index(t)])
        for i in range(t, last):
            broken |= int(rows[index(i)]) ^ (row - t + i)
            mixed |= int(origin[index(i)]) ^ home
        if broken:
            # Tokens of other ranges were compared too: report mixed, which is slower but always correct.
            mixed, last = 1, t + 1
            while rows[index(last)] == row - t + last:
                last += 1
        segments[n, SEGMENT_PIECE] = piece
        segments[n, SEGMENT_OFFSET] = row - piece_starts[piece]
        segments[n, SEGMENT_TOKEN] = t
        n += 1
        t = last
    segments[n, SEGMENT_TOKEN] = n_tokens
    return mixed != 0


@device
def gather_uses(sim, b, w, e):
    """Write to ``window_uses`` the tokens that use ``e``, << 1 | whether it is their first expert. Returns their number."""
    found, segments, n_tokens = sim.window_uses[b], sim.segments[b, w], sim.rows.shape[2]
    use_starts, uses = sim.use_starts[sim.index_plane[b, w]], sim.uses[sim.index_plane[b, w]]
    n, s = 0, 0
    while segments[s, SEGMENT_TOKEN] < n_tokens:
        piece, first = segments[s, SEGMENT_PIECE], int(segments[s, SEGMENT_TOKEN])
        last = int(segments[s + 1, SEGMENT_TOKEN])
        start = (first - int(segments[s, SEGMENT_OFFSET])) << 1
        s += 1
        begin, end = use_starts[piece, e], use_starts[piece, e + 1]
        if last - first == sim.piece_starts[piece + 1] - sim.piece_starts[piece]:
            for i in range(begin, end):
                found[index(n)] = start + int(uses[index(i)])
                n += 1
            continue
        for i in range(begin, end):
            use = start + int(uses[index(i)])
            found[index(n)] = use
            n += int(use >> 1 >= first) & int(use >> 1 < last)
    return n
