"""The arrays that the kernels read and write, and names for their columns.

Leading axes: environment (or simulation) ``b``, then window ``w`` where the array depends on traffic. In an episode,
window 0 is the one just served, which the agents see, and window 1 is the next one, which only the reward uses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clustergym.moe_placement.specs import Costs, Network

# How tokens travel.
MODE_DEDUP, MODE_PER_EXPERT, MODE_STAY = range(3)

# What an action did.
OP_NOTHING, OP_ILLEGAL, OP_PLACE, OP_SWAP, OP_ADD, OP_DELETE = range(6)

# Columns of SimulationState.segments.
SEGMENT_PIECE, SEGMENT_OFFSET, SEGMENT_TOKEN = range(3)
# Rows of SimulationState.previous.
PREVIOUS_CHOICE, PREVIOUS_REPLICAS, PREVIOUS_COUNT = range(3)
# Rows of SimulationState.copies.
SENT_INTRA, RECEIVED_INTRA, SENT_INTER, RECEIVED_INTER = range(4)
# Columns of SimulationState.received.
FROM_OWN_NODE, FROM_OTHER_NODE = range(2)

# Columns of EpisodeState.clock.
CLOCK_LAYER, CLOCK_OPERATION, CLOCK_WINDOW, CLOCK_DONE = range(4)
N_CLOCKS = 4
# Columns of EpisodeState.last_operation.
LAST_KIND, LAST_EXPERT, LAST_NODE, LAST_FROM, LAST_TO, LAST_VICTIM = range(6)
N_LAST = 6
# Columns of EpisodeState.times_us. The last three are sums over the episode.
TIME_OBSERVED, TIME_OBSERVED_START, TIME_REWARDED, TIME_SERVED, TIME_MIGRATED, TIME_SAVED = range(6)
N_TIMES = 6

# Columns of StreamState.random.
RANDOM_KEY, RANDOM_COUNTER = range(2)
# Columns of StreamState.position. With the replay schedule the last one holds the next sequence instead of a domain.
AT_SEQUENCE, AT_TOKEN, AT_RANK, AT_DOMAIN = range(4)
N_POSITIONS = 4

SCHEDULES = ("stationary", "drift", "switch", "replay")
STATIONARY, DRIFT, SWITCH, REPLAY = range(4)


class SimulationState(NamedTuple):
    """B simulations, each of one MoE layer under one placement, serving W windows of T tokens.

    All arrays hold counts of whole things (tokens, copies, pairs, experts). Only :mod:`.cost` turns counts into µs.
    """

    # Traffic
    rows: np.ndarray
    """(B, W, T) int32: rows of the trace that make up the window"""
    origin: np.ndarray
    """(B, W, T) uint8: GPU that holds the token before this layer (its home, or where it stayed)"""
    destination: np.ndarray
    """(B, W, T) uint8: GPU that holds the token after this layer"""
    load: np.ndarray
    """(B, W, E) int32: tokens that use each expert"""

    # Index of the traffic (see :mod:`.index`)
    segments: np.ndarray
    """(B, W, segments + 1, 3) int32: ranges of the index that make up the window. Columns: piece, offset of the first token
    in the piece, first token of the window. An entry with token T ends the list."""
    own_index: np.ndarray
    """(1,) int8: 1 if every window has an index of its own, 0 if all share the index of the trace"""
    index_plane: np.ndarray
    """(B, W) int32: plane of the index that holds the window's layer"""
    piece_starts: np.ndarray
    """(pieces + 1,) int32: first row of each piece, then the number of rows"""
    use_starts: np.ndarray
    """(planes, pieces, E + 1) int32: ``uses[use_starts[e] : use_starts[e + 1]]`` are the uses of expert e in the piece"""
    uses: np.ndarray
    """(planes, rows·K) uint16: offset of the token in its piece << 1 | whether the expert is the token's first"""
    user_bits: np.ndarray
    """(planes, blocks, E + 1) uint64: tokens among 64 rows of the trace that use each expert; the last column holds those
    that choose the upper of two replicas. Row r is bit r % 64 of block r // 64 + 1."""

    # Sets of tokens, 64 per integer (see :mod:`.token_sets`)
    slot_tokens: np.ndarray
    """(B, W, G, S, sets) uint64: tokens of the window that run the slot's expert there; undefined for an empty slot"""
    token_masks: np.ndarray
    """(B, W, G + N + 1, sets) uint64: tokens held by each GPU, tokens held by each node, tokens that choose the upper of two
    replicas"""
    moved_tokens: np.ndarray
    """(B, W, 2, sets) uint64 scratch: tokens of the two experts whose replicas change"""
    visitors: np.ndarray
    """(B, 2, sets) uint64 scratch: tokens that visit a GPU and a node"""
    block_users: np.ndarray
    """(B, E + 1) uint64 scratch: ``user_bits`` of 64 tokens of a window"""
    touched: np.ndarray
    """(B, G) int8 scratch: 1 where the set of experts or tokens on the GPU has changed"""

    # Counts of visits
    gpu_uses: np.ndarray
    """(B, W, T, words) int64: how many experts of the token run on each GPU, one bit field per GPU (see :class:`Network`)"""
    visits: np.ndarray
    """(B, W, G, G) int32: tokens held by the row's GPU that visit the column's GPU (token-expert pairs in MODE_PER_EXPERT)"""
    node_visits: np.ndarray
    """(B, W, G, N) int32: tokens held by the row's GPU that visit the column's node"""
    return_visits: np.ndarray
    """(B, W, G, G) int32: as ``visits`` for the way back, in MODE_STAY only; in other modes it mirrors the way out"""
    return_node_visits: np.ndarray
    """(B, W, G, N) int32: as ``node_visits`` for the way back, in MODE_STAY only"""
    copies: np.ndarray
    """(B, 4, G) int32 scratch: copies that each GPU sends and receives inside its node, then between nodes"""
    pairs: np.ndarray
    """(B, W, E, G) int32: tokens of the expert that run on the GPU"""

    # Placement
    slots: np.ndarray
    """(B, G, S) int16: expert in each slot, −1 for an empty slot"""
    replicas: np.ndarray
    """(B, E, G) int16: GPUs that hold each expert, ascending"""
    n_replicas: np.ndarray
    """(B, E) int16"""
    replica_choice: np.ndarray
    """(B, E, G) int32: a token on GPU g chooses among ``choice >> 16`` replicas of e, from
    ``replicas[e, choice & 0xFFFF]`` on"""
    previous: np.ndarray
    """(B, 2, 3, G) int32 scratch: choices, replicas and their number of two experts before their replicas changed"""
    window_uses: np.ndarray
    """(B, T + 1) int32 scratch: tokens of a window that use an expert"""
    only_gpu: np.ndarray
    """(B, 1 + E) int64 scratch: 1 in the bit field of the expert's only GPU, 0 if it has replicas. Entry 0 is for padding."""
    held_before: np.ndarray
    """(B, E, G) int8: 1 if the GPU held the expert when the window began"""
    received: np.ndarray
    """(B, G, 2) int32: experts that the GPU must receive from its own node and from other nodes"""


class EpisodeState(NamedTuple):
    """State of B episodes, besides their :class:`SimulationState` and :class:`StreamState`."""

    slots: np.ndarray
    """(B, L, G, S) int16: placement of every layer"""
    first_slots: np.ndarray
    """(B, L, G, S) int16: placement at the start of the episode"""
    home: np.ndarray
    """(B, 2, T) uint8: home GPU of each token in MODE_STAY; in other modes ``SimulationState.origin`` holds it"""
    load_average: np.ndarray
    """(B, L, E) float32: moving average of the load shares, −1 before the first window"""
    next_window_us: np.ndarray
    """(B, L) float64: time of each layer in the next window, before this window's operations"""
    clock: np.ndarray
    """(B, 4) int32: layer, operation on that layer, windows served, done"""
    last_operation: np.ndarray
    """(B, 6) int32: kind, expert, node, from GPU, to GPU and victim of the last operation"""
    times_us: np.ndarray
    """(B, 6) float64: see ``TIME_*``"""
    int_scratch: np.ndarray
    """(B, 3, E) int32"""
    float_scratch: np.ndarray
    """(B, E + G) float64"""
    in_common: np.ndarray
    """(B, G + 1, G) int32 scratch: experts that two GPUs both hold; the last row holds the pairs that each GPU computes"""
    accepts: np.ndarray
    """(B, G + 1, G) int8 scratch: 1 if the column's GPU can take a replica from the row's; the last row: if it has room"""
    load_features: np.ndarray
    """(B, E, 3) float32: the features of each expert that stay the same while the agents work on a layer"""
    local_coactivation: np.ndarray
    """(B, E) float64: co-activation with the experts on the same GPUs"""
    hot_coactivation: np.ndarray
    """(B, E) float32: co-activation with the experts of highest load"""


class StreamState(NamedTuple):
    """Positions of B streams of windows."""

    random: np.ndarray
    """(B, 2) int64: key and counter of the random number generator"""
    position: np.ndarray
    """(B, 4) int32: current sequence (−1: none), next token in it, next GPU, current domain"""
    drawn: np.ndarray
    """(B, D) int32: sequences drawn from each domain so far; each is drawn once before any is drawn again"""
    logits: np.ndarray
    """(B, D) float64: log weights of the mixture of domains"""


class TraceTables(NamedTuple):
    """A token trace as the kernels read it."""

    experts: np.ndarray
    """(L, rows, K) int16: layer first, because an episode reads one layer at a time"""
    sequence_start: np.ndarray
    """(sequences,) int32: first row"""
    sequence_length: np.ndarray
    """(sequences,) int32"""
    domain_start: np.ndarray
    """(D + 1,) int32: ``domain_sequences[domain_start[d] : domain_start[d + 1]]`` are the sequences of domain d"""
    domain_sequences: np.ndarray
    """(sequences,) int32"""


class Observation(NamedTuple):
    """Observation buffers, written in place. :class:`~clustergym.moe_placement.environment.MoEPlacementEnv` explains them."""

    experts: np.ndarray
    coactivation: np.ndarray
    affinity: np.ndarray
    gpus: np.ndarray
    traffic: np.ndarray
    placement: np.ndarray
    progress: np.ndarray
    expert_mask: np.ndarray
    gpu_mask: np.ndarray
    joint_mask: np.ndarray
    lookahead: np.ndarray


class Rules(NamedTuple):
    """What all environments of a batch share."""

    costs: Costs
    network: Network
    static_us: float
    """Time of a window over all layers under the static placement: the unit of rewards."""
    norm_log2: int
    """Smooth norm of the look-ahead; −1 is the true time."""
    schedule: int
    rate: float
    n_windows: int
    ops_per_layer: int
    start_eplb: int
    """1 starts from EPLB on the first window, 0 from the static placement."""
    stream_credit: int
    """1 also rewards, at each window boundary, what earlier operations still save."""
    reward_observed: int
    """1 rewards the decrease on the observed window instead of the next one."""
    reward_norm_log2: int
