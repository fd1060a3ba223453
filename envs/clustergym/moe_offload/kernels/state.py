"""Arrays that the simulator reads and writes, and names for their columns.

Letters in shapes: N environments, S sequences, B sequences at a time, T tokens of the trace, L layers, E experts per
layer, K experts per token, G GPUs, P pools (1, or L with fixed shares), R rows of the table, H half-lives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

DECAYS = (0.6, 0.85, 0.95, 0.985)
"""Factor per token of the decayed counts: half-lives of 1.4, 4.3, 14 and 46 tokens."""
N_DECAYS = len(DECAYS)
LOG_STEPS = 1024
MAX_AGE = 600
"""Older uses count as this old (0.985^599 is 0.0001)."""
NEVER = 50
"""Tokens before the episode at which experts count as used last."""
N_LAGS = 7
"""Transitions are counted for 1 … 6 visits ahead, and (the last table) for the same layer of the next token."""
LAG_TOKEN = N_LAGS - 1

# Columns of State.clock. MODE says what the next decision is about. STEP counts the decisions of the episode.
TOKEN, LAYER, GROUP, TOKENS, MODE, POOL, OVER, STEP = range(8)
N_CLOCK = 8
MODE_OVER, MODE_EVICT, MODE_LOAD = range(3)
"""Episode over; evict from GPU ``clock[OVER]``; prefetch, move or end the visit."""
# Columns of State.time, ms: router result, last needed expert has arrived, next router result; sums; MISSES is a
# running mean of the demand loads per visit; UNPAID is stall that no reward has counted yet.
NOW, READY, NEXT, STALL, COMPUTE, MISSES, UNPAID = range(7)
N_TIME = 7
# Columns of State.stats: numbers of this episode.
(
    VISITS, GENERATED, NEEDED, HITS, LOADS, PREFETCHES, USEFUL, WASTED, MOVES, EVICTIONS,
) = range(10)  # fmt: skip
N_STATS = 10
# Columns of State.outcome: flat id of the expert in the chosen row (−1: empty row), flags, visits since the last step.
OUT_EXPERT, OUT_NO_OP, OUT_ILLEGAL, OUT_VISITS = range(4)
N_OUTCOME = 4
# Operations: node = operation · G + GPU.
PLACE, ADD, DELETE = range(3)
# Kinds of events.
EVENT_MISS, EVENT_HIT, EVENT_AGAIN = range(3)
EVENT_NAMES = ("demand miss", "hit", "prefetched again")
# Columns of State.events.
EVENT_EXPERT, EVENT_KIND, EVENT_TOKENS, EVENT_STEPS = range(4)
N_EVENT = 4


class Task(NamedTuple):
    """Everything that stays the same."""

    experts: npt.NDArray[np.int16]
    """(T, L, K) of the split"""
    starts: npt.NDArray[np.int64]
    """(S,) first token of each sequence"""
    lengths: npt.NDArray[np.int64]
    """(S,)"""
    groups: Ints
    """(episodes, B) sequences that are served together; −1 is none"""
    max_tokens: int
    prior: Floats
    """(L, E) chance that a visit uses the expert, by the training split"""
    logit: Floats
    """(L, E) its log-odds"""
    home: npt.NDArray[np.int8]
    """(L, E) GPU of each expert at the start, −1: host memory only"""
    lift: Floats
    """(N_LAGS, L, E, E) how much an expert of layer l changes the log-odds of an expert some visits ahead"""
    chance: Floats
    """(N_LAGS, L, E, E) the same as a probability"""
    decay: Floats
    """(H, MAX_AGE) powers of DECAYS"""
    pools: int
    slots: int
    """of a GPU in one pool"""
    gpus: int
    load_ms: float
    peer_ms: float
    layer_ms: float
    expert_ms: float
    horizon: int
    """layers ahead from which experts may be prefetched"""
    low_rows: int
    """eviction table: residents of other layers with the lowest counts, at least"""
    own_rows: int
    """eviction table: residents of the current layer"""
    load_rows: int
    """prefetch table: missing experts"""
    move_rows: int
    """prefetch table: residents that a GPU can take over from another"""
    context_rows: int
    """experts of the last visits"""
    foresight: Bytes
    """(T, L, E, F) predicted probabilities as bytes; F is 0 without a predictor"""
    reuse: int
    """of F, how many are about a layer's own next uses; the others are about a visit 1, 2 … visits before it"""
    byte_logit: Floats
    """(256,) what a byte of foresight means: log-odds"""
    logs: Floats
    """(LOG_STEPS + 2,) the feature of a decayed count of 0, 1 / LOG_STEPS … 1"""


class State(NamedTuple):
    """What changes: N environments."""

    random: npt.NDArray[np.uint64]
    """(N,)"""
    clock: Ints
    """(N, N_CLOCK)"""
    time: Doubles
    """(N, N_TIME)"""
    link: Doubles
    """(N, G) when the link from the host is free"""
    peer: Doubles
    """(N, G) when the link from the peers is free"""
    where: npt.NDArray[np.int8]
    """(N, L, E) GPU, or −1"""
    arrives: Doubles
    """(N, L, E) when a resident can be used"""
    fetched: npt.NDArray[np.bool_]
    """(N, L, E) prefetched and not used yet"""
    last: Ints
    """(N, L, E) token of the last use"""
    counts: Floats
    """(N, L, E, H) decayed counts as of ``last``; before the first use, those of the training split as of token −1"""
    decided: Ints
    """(N, L, E) token of the last eviction or prefetch since the last use, or −1"""
    decided_step: Ints
    """(N, L, E) its step"""
    held: Ints
    """(N, P, G) residents"""
    starts: npt.NDArray[np.int64]
    """(N, B) first row of each sequence in ``Task.experts``"""
    lengths: npt.NDArray[np.int64]
    """(N, B) tokens of each sequence; 0 if there is none"""
    stats: npt.NDArray[np.int64]
    """(N, N_STATS)"""
    events: Ints
    """(N, L·E + 1, N_EVENT) of the last step"""
    n_events: Ints
    """(N,)"""
    rows: Ints
    """(N, R) flat ids of the table's experts, −1: empty"""
    places: Ints
    """(N, R, 2) layer and id of the table's experts"""
    n_rows: Ints
    """(N,) rows that can be chosen: they come first"""
    found: Ints
    """(N, L·E) scratch"""
    scores: Floats
    """(N, L·E + E) scratch"""
    reward: Doubles
    """(N,) of the last step"""
    outcome: Ints
    """(N, N_OUTCOME) of the last step"""


def new_state(task: Task, n: int) -> State:
    """Arrays for n environments; :func:`~clustergym.moe_offload.kernels.memory.begin` fills them."""
    (_, layers, _), experts = task.experts.shape, task.prior.shape[1]
    streams, cells = task.groups.shape[1], (n, layers, experts)
    rows = table_rows(task)

    def zeros(*shape: int, dtype: Any = np.int32) -> Any:
        return np.zeros(shape, dtype)

    return State(
        random=zeros(n, dtype=np.uint64),
        clock=zeros(n, N_CLOCK),
        time=zeros(n, N_TIME, dtype=np.float64),
        link=zeros(n, task.gpus, dtype=np.float64),
        peer=zeros(n, task.gpus, dtype=np.float64),
        where=zeros(*cells, dtype=np.int8),
        arrives=zeros(*cells, dtype=np.float64),
        fetched=zeros(*cells, dtype=np.bool_),
        last=zeros(*cells),
        counts=zeros(*cells, N_DECAYS, dtype=np.float32),
        decided=zeros(*cells),
        decided_step=zeros(*cells),
        held=zeros(n, task.pools, task.gpus),
        starts=zeros(n, streams, dtype=np.int64),
        lengths=zeros(n, streams, dtype=np.int64),
        stats=zeros(n, N_STATS, dtype=np.int64),
        events=zeros(n, layers * experts + 1, N_EVENT),
        n_events=zeros(n),
        rows=zeros(n, rows),
        places=zeros(n, rows, 2),
        n_rows=zeros(n),
        found=zeros(n, layers * experts),
        scores=zeros(n, (layers + 1) * experts, dtype=np.float32),
        reward=zeros(n, dtype=np.float64),
        outcome=zeros(n, N_OUTCOME),
    )


def choice_rows(task: Task) -> int:
    """Rows of the table that can be chosen, at most."""
    return max(task.low_rows + task.own_rows, max(task.load_rows, task.horizon) + task.move_rows)


def table_rows(task: Task) -> int:
    """R: rows that can be chosen and rows of context."""
    return choice_rows(task) + task.context_rows
