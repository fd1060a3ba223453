"""The arrays that the compiled functions read and write, and names for their columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Rows of ServingState.copies.
SENT_INTRA, RECEIVED_INTRA, SENT_INTER, RECEIVED_INTER = range(4)
# Columns of ServingState.received.
FROM_OWN_NODE, FROM_OTHER_NODE = range(2)
# Columns of StreamState.random, StreamState.position and StreamState.rank_piece.
RANDOM_KEY, RANDOM_COUNTER = range(2)
AT_DOMAIN_OR_PIECE, AT_REUSE = range(2)
PIECE_ROW, PIECE_LEFT = range(2)


class Topology(NamedTuple):
    """What all simulations share."""

    node_of: np.ndarray
    """(G,) int64: node of each GPU"""
    gpus_per_node: int
    transport: int
    dispatch: int


class ServingCosts(NamedTuple):
    """Everything that turns counts into µs."""

    dispatch_us: float
    """Start of the dispatch exchange; with all-gather, the whole exchange"""
    dispatch_intra_us: float
    """One copy of an activation to a GPU of the same node"""
    dispatch_inter_us: float
    """One copy to another node"""
    combine_us: float
    combine_intra_us: float
    combine_inter_us: float
    kernel_us: float
    """Start of the expert kernel"""
    kernel_floor_us: float
    """The kernel never takes less"""
    token_us: float
    """One more token that the GPU receives"""
    expert_us: float
    """One more active expert"""
    block_us: float
    """One more block of an expert's tokens"""
    block_tokens: int
    pair_us: float
    """One more token-expert pair"""
    receive_intra_us: float
    """Receiving one expert's weights from the same node, spread over the passes of an interval"""
    receive_inter_us: float

    def weigh_tokens(self, scale: float) -> ServingCosts:
        """The same costs with each token weighed by ``scale``: plan on a pass of another size than the engine's."""
        per_token = (
            "dispatch_intra_us", "dispatch_inter_us", "combine_intra_us", "combine_inter_us", "token_us", "block_us",
            "pair_us",
        )  # fmt: skip
        return self._replace(**{name: getattr(self, name) * scale for name in per_token})


class ServingState(NamedTuple):
    """B simulations, each of one MoE layer under one placement, serving W passes of T tokens.

    Sets of tokens are bits of ``words`` integers of 64 tokens each.
    """

    # Traffic
    rows: np.ndarray
    """(B, W, T) int32: rows of the trace, rank by rank"""
    rank_start: np.ndarray
    """(B, W, G + 1) int32: first token of each rank, then T"""
    load: np.ndarray
    """(B, W, E) int32: tokens that use each expert"""
    second_choice: np.ndarray
    """(B, W, words) uint64: tokens that choose the second of two replicas, for the hashing rules"""

    # What each GPU runs
    slot_tokens: np.ndarray
    """(B, W, G, S, words) uint64: tokens that run the slot's expert there; undefined for an empty slot"""
    slot_pairs: np.ndarray
    """(B, W, G, S) int32: how many; undefined for an empty slot"""
    visitors: np.ndarray
    """(B, W, G, words) uint64: tokens that visit the GPU"""
    visits: np.ndarray
    """(B, W, G, G) int32: tokens of the row's rank that visit the column's GPU (pairs with per-expert transport)"""
    node_visits: np.ndarray
    """(B, W, G, N) int32: tokens of the row's rank that visit the column's node"""
    copies: np.ndarray
    """(B, W, 4, G) int32: copies that each GPU sends and receives inside its node, then between nodes"""
    kernel_us: np.ndarray
    """(B, W, G) float64: time of each GPU's expert kernel without its start"""

    # Placement
    slots: np.ndarray
    """(B, G, S) int16: expert in each slot, −1 for an empty slot"""
    replicas: np.ndarray
    """(B, E, G) int16: GPUs that hold each expert, ascending"""
    n_replicas: np.ndarray
    """(B, E) int16"""
    replica_choice: np.ndarray
    """(B, E, G) int32: a token of rank g chooses among ``choice >> 16`` replicas of e, from
    ``replicas[e, choice & 0xFFFF]`` on"""
    held_before: np.ndarray
    """(B, E, G) int8: 1 if the GPU held the expert when the interval began"""
    received: np.ndarray
    """(B, G, 2) int32: experts that the GPU must receive from its own node and from other nodes"""

    # Scratch
    moved_tokens: np.ndarray
    """(B, W, 2, words) uint64: tokens of the two experts whose replicas change"""
    moved_pairs: np.ndarray
    """(B, W, 2) int32"""
    node_visitors: np.ndarray
    """(B, words) uint64"""
    touched: np.ndarray
    """(B, G) int8: 1 where the set of experts or tokens on the GPU has changed"""

    # Only with transport ``stay``; of size 1 otherwise
    origins: np.ndarray
    """(B, W, G, words) uint64: tokens held by each GPU before the layer"""
    first_uses: np.ndarray
    """(B, W, E, words) uint64: tokens whose first expert this is"""
    idle: np.ndarray
    """(B, W, words) uint64: tokens that use no expert"""
    destinations: np.ndarray
    """(B, W, G, words) uint64: tokens held by each GPU after the layer"""
    return_copies: np.ndarray
    """(B, W, 4, G) int32: as ``copies`` for the way back"""


class TracePieces(NamedTuple):
    """A token trace, cut into pieces that streams draw."""

    experts: np.ndarray
    """(L, rows, K) int16"""
    piece_row: np.ndarray
    """(pieces,) int32: first row"""
    piece_tokens: np.ndarray
    """(pieces,) int32"""
    domain_start: np.ndarray
    """(D + 1,) int32: ``domain_pieces[domain_start[d] : domain_start[d + 1]]`` are the pieces of domain d"""
    domain_pieces: np.ndarray
    """(pieces,) int32"""


class StreamState(NamedTuple):
    """Positions of B streams of intervals."""

    random: np.ndarray
    """(B, 2) int64: key and counter of the random number generator"""
    position: np.ndarray
    """(B, 2) int32: current domain (switch) or next piece (replay); whether a token was served twice"""
    drawn: np.ndarray
    """(B, D) int32: pieces drawn from each domain so far"""
    logits: np.ndarray
    """(B, D) float64: log weights of the mixture of domains"""
    weights: np.ndarray
    """(B, D) float64: cumulative weights of the domains in this interval"""
    rank_piece: np.ndarray
    """(B, G, 2) int32: next row, and tokens left, of the piece that each rank works on (prefill)"""
