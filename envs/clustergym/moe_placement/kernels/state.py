"""The arrays that the kernels read and write, and names for their columns.

Leading axes: environment (or simulation) ``b``, then pass ``w`` where the array depends on traffic. In an episode with
P sampled passes, passes 0 … P−1 are of the interval that just ended, which the agents see. Passes P … 2P−1 are of the
next interval, which only the reward uses. (A planner has no next interval: then there are only P passes.)

Names: E experts, G GPUs on N nodes, S slots per GPU, K experts per token, T tokens per pass, L layers, D domains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# What an action did.
OP_NOTHING, OP_ILLEGAL, OP_PLACE, OP_SWAP, OP_ADD, OP_DELETE = range(6)

# Rows of SimulationState.copies.
SENT_INTRA, RECEIVED_INTRA, SENT_INTER, RECEIVED_INTER = range(4)
# Columns of SimulationState.received.
FROM_OWN_NODE, FROM_OTHER_NODE = range(2)

# Columns of EpisodeState.clock.
CLOCK_LAYER, CLOCK_OPERATION, CLOCK_INTERVAL, CLOCK_DONE, CLOCK_REUSE = range(5)
N_CLOCKS = 5
# Columns of EpisodeState.last_operation.
LAST_KIND, LAST_EXPERT, LAST_NODE, LAST_FROM, LAST_TO, LAST_VICTIM, LAST_LAYER = range(7)
N_LAST = 7
# Columns of EpisodeState.times_us. Of the layer that the agents work on: the observed interval now and at the start of
# the visit; the next interval at the start of the visit, and now with migration.
TIME_OBSERVED, TIME_OBSERVED_START, TIME_NEXT_START, TIME_NEXT = range(4)
# Sums over the layers and intervals of the episode: served, migration, the start placement's time, the rewards.
TIME_SERVED, TIME_MIGRATED, TIME_START, TIME_SAVED = range(4, 8)
N_TIMES = 8

# Columns of StreamState.random, StreamState.position and StreamState.rank_piece.
RANDOM_KEY, RANDOM_COUNTER = range(2)
AT_DOMAIN_OR_PIECE, AT_REUSE = range(2)
PIECE_ROW, PIECE_LEFT = range(2)
# Columns of StreamState.orders: the number of things, the next power of two minus 1, a shift, a number for each round.
ORDER_LENGTH, ORDER_MASK, ORDER_SHIFT, ORDER_ROUNDS = range(4)
N_ROUNDS = 4
# Columns of SimulationState.piece_at.
PIECE_WORD, PIECE_RANK = range(2)

SCHEDULES = ("stationary", "drift", "switch", "replay")
STATIONARY, DRIFT, SWITCH, REPLAY = range(4)

# What a look-ahead tells about an operation: time saved in the smooth norm, true time saved, migration (negative).
# All in percent of the layer's time at the start of the visit.
PART_SMOOTH, PART_TRUE, PART_MIGRATION = range(3)
N_SAVED_PARTS = 3
# The smooth norm of look-aheads is of order 2^3: it also sees what brings no time yet.
SMOOTH_NORM_LOG2 = 3


class Topology(NamedTuple):
    """What all simulations share."""

    node_of: np.ndarray
    """(G,) int64: node of each GPU"""
    gpus_per_node: int
    transport: int
    dispatch: int
    deals_one_node: int
    draws: int


class Costs(NamedTuple):
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
    background_share: float
    """Share of the transfer time by which a transfer in the background slows the passes down; −1 for blocking
    migration, which stops serving for the whole transfer"""


class SimulationState(NamedTuple):
    """B simulations, each of one MoE layer under one placement, serving W passes of T tokens.

    Sets of tokens are bits of ``words`` integers of 64 tokens each. All arrays but ``kernel_us`` hold counts of whole
    things (tokens, copies, pairs, experts). Only :mod:`.cost` turns counts into µs.
    """

    # Traffic
    rows: np.ndarray
    """(B, W, T) int32: rows of the trace, rank by rank"""
    rank_start: np.ndarray
    """(B, W, G + 1) int32: first token of each rank, then T"""
    load: np.ndarray
    """(B, W, E) int32: tokens that use each expert"""
    piece_mask: np.ndarray
    """(B, W, words + G) uint64: the tokens of a pass, cut where a rank or a word ends, as bits of a word"""
    piece_at: np.ndarray
    """(B, W, words + G, 2) int16: word and rank of each piece"""
    n_pieces: np.ndarray
    """(B, W) int32"""
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
    by_home: np.ndarray
    """(B, G) int32: tokens of a set that each GPU holds"""
    replica_slot: np.ndarray
    """(B, G) int16: slots of an expert's replicas"""
    users: np.ndarray
    """(B, E rounded up to whole words, words) uint64: tokens of a pass that use each expert"""
    moved_tokens: np.ndarray
    """(B, W, 2, words) uint64: tokens of the two experts whose replicas change"""
    moved_pairs: np.ndarray
    """(B, W, 2) int32"""
    node_visitors: np.ndarray
    """(B, words) uint64"""
    touched: np.ndarray
    """(B, G) int8: 1 where the set of experts or tokens on the GPU has changed"""


class EpisodeState(NamedTuple):
    """State of B episodes, besides their :class:`SimulationState` and :class:`StreamState`."""

    rows: np.ndarray
    """(B, intervals + 1, P, T) int32: tokens of all intervals of the episode, first the one that is only observed"""
    rank_start: np.ndarray
    """(B, intervals + 1, P, G + 1) int32: first token of each rank, then T"""
    slots: np.ndarray
    """(B, L, G, S) int16: placement of every layer"""
    first_slots: np.ndarray
    """(B, L, G, S) int16: placement at the start of the episode"""
    future_us: np.ndarray
    """(B, L, intervals) float64: time of each layer in each interval under the placement that it was left with"""
    load_average: np.ndarray
    """(B, L, E) float32: moving average of the load shares, −1 before the first interval"""
    clock: np.ndarray
    """(B, 5) int32: layer, operation on that layer, intervals served, done, whether a token was served twice"""
    last_operation: np.ndarray
    """(B, 7) int32: kind, expert, node, from GPU, to GPU, victim and layer of the last operation"""
    times_us: np.ndarray
    """(B, 8) float64: see ``TIME_*``"""
    int_scratch: np.ndarray
    """(B, 3, E) int32"""
    float_scratch: np.ndarray
    """(B, E + G) float64"""
    in_common: np.ndarray
    """(B, G, G) int32 scratch: experts that two GPUs both hold"""
    gpu_load: np.ndarray
    """(B, G) float32 scratch: token-expert pairs of each GPU in the observed passes, relative to the mean"""
    coldest: np.ndarray
    """(B, G) int16 scratch: the expert with fewest tokens on each GPU, -1 on an empty one"""
    exchange: np.ndarray
    """(B, G, G, 2) float32 scratch: what the column's GPU gives to the row's for a replica; see ``_write_exchanges``"""
    gpu_pairs: np.ndarray
    """(B, G) int32 scratch: token-expert pairs that each GPU computes in the observed passes"""
    accepts: np.ndarray
    """(B, G + 1, G) int8 scratch: 1 if the column's GPU can take a replica from the row's; last row: if it has room"""
    load_features: np.ndarray
    """(B, E, 3) float32: the features of each expert that stay the same while the agents work on a layer"""
    used: np.ndarray
    """(B, E) float32: tokens that use each expert, of those from which co-activation is estimated; at least 1"""
    group_coactivation: np.ndarray
    """(B, G, E) float32: co-activation of each expert with the experts on each GPU"""
    hot_coactivation: np.ndarray
    """(B, E) float32: co-activation with the experts of highest load"""
    names: np.ndarray
    """(B, E) int16: number that each expert of the trace has in this episode"""


class TracePieces(NamedTuple):
    """A token trace, cut into pieces that streams draw."""

    experts: np.ndarray
    """(L, rows, K) int16"""
    expert_sets: np.ndarray
    """(L, rows, words) uint64: the same experts as bits; (1, 1, 1) with more than 128 experts, whose sets would take
    more memory and not be faster, and where nothing is counted"""
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
    orders: np.ndarray
    """(B, D + 1, 7) int64: the order of the pieces of each domain; last row: scratch. See ``ORDER_*``"""


class Observation(NamedTuple):
    """Observation buffers, written in place. ``MoEPlacementEnv`` documents them."""

    experts: np.ndarray
    gpus: np.ndarray
    pairs: np.ndarray
    expert_graph: np.ndarray
    gpu_graph: np.ndarray
    context: np.ndarray
    action_mask: np.ndarray


class Rules(NamedTuple):
    """What all environments of a batch share."""

    costs: Costs
    topology: Topology
    static_us: float
    """Mean time of all layers under the static placement."""
    reward_per_us: float
    illegal_penalty: float
    n_passes: int
    """Sampled passes of an interval."""
    phase: int
    schedule: int
    rate: float
    rank_imbalance: float
    n_intervals: int
    ops_per_layer: int
    start_eplb: int
    """1 starts from EPLB on the first interval, 0 from the static placement."""
    mix_observed: int
    renumber: int
    """1 gives experts other numbers in every episode."""
    """1 deals the observed tokens over passes and ranks at random."""
