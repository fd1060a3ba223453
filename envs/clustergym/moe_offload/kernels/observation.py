"""What the agents see of an environment: features of experts, GPUs and pairs, graphs, and the mask of legal pairs.

Only what a serving engine knows at this moment: the routing of visits that have happened, never a later one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import index, inlined
from clustergym.moe_offload.kernels.memory import can_move, distance, window
from clustergym.moe_offload.kernels.state import (
    DECAYS,
    LAG_TOKEN,
    LAYER,
    LOG_STEPS,
    MAX_AGE,
    MISSES,
    MODE,
    MODE_EVICT,
    MODE_LOAD,
    MODE_OVER,
    N_DECAYS,
    NEXT,
    NOW,
    OVER,
    POOL,
    READY,
    TOKEN,
    Floats,
)

LAST_VISITS = 4
"""Transition scores are from the experts of this visit and the three before."""
NEAR = 3
"""Layers at a distance of 1 … 3 have a column each, and transition scores."""
EXPERT_FEATURES = (
    "can be chosen",
    "resident",
    "in flight",
    "prefetched, not used yet",
    "used by this visit",
    "used by the previous token",
    "recency",
    "popularity",
    *(f"decayed count {decay}" for decay in DECAYS),
    "distance",
    *(f"distance {h}" for h in range(1, NEAR + 1)),
    *(f"transition from {j} visits ago" for j in range(LAST_VISITS)),
    "transition from the previous token",
)
"""Columns of ``experts``; predicted log-odds follow."""
N_EXPERT_FEATURES = len(EXPERT_FEATURES)
_COUNTS = 8
_DISTANCE = _COUNTS + N_DECAYS
_VISITS = _DISTANCE + 1 + NEAR
GPU_FEATURES = (
    "is PLACE",
    "is ADD",
    "is DELETE",
    "backlog of its link",
    "window for prefetches",
    "free slots",
    "slots of the node that are its own",
    "must evict",
    "residents of this layer",
    "residents of the next layer",
)
N_GPU_FEATURES = len(GPU_FEATURES)
CONTEXT_FEATURES = (
    "evict",
    "prefetch",
    "layer",
    "first layer",
    "demand loads per visit",
    "loads in a visit's computing time",
    "evictions left",
    "token",
    "sequences",
    "slots",
)
N_CONTEXT_FEATURES = len(CONTEXT_FEATURES)


class Observation(NamedTuple):
    """Arrays with a leading N; see ``MoEOffloadEnv``."""

    experts: Floats
    gpus: Floats
    pairs: Floats
    expert_graph: Floats
    gpu_graph: Floats
    context: Floats
    action_mask: npt.NDArray[np.int8]


@inlined
def observe(task, s, b, o):
    """Write the observation of one environment."""
    experts, pairs = o.experts[b], o.pairs[b]
    for r in range(s.rows.shape[1]):
        for f in range(experts.shape[1]):
            experts[r, f] = 0.0
        for g in range(task.gpus):
            pairs[r, g, 0] = 0.0
        if s.rows[b, r] >= 0:
            _expert(task, s, b, index(r), experts, pairs)
    _mask(task, s, b, o)
    _edges(task, s, b, o)
    for g in range(task.gpus):
        for other in range(task.gpus):
            o.gpu_graph[b, g, other] = 0.0 if g == other else 1.0
    _gpus(task, s, b, o)
    _context(task, s, b, o)


@inlined
def _expert(task, s, b, r, experts, pairs):
    """Features of the expert in row r, in ``experts`` (R, features) and ``pairs`` (R, G, 1)."""
    layers = s.where.shape[1]
    l, e = s.places[b, r, 0], index(s.places[b, r, 1])
    t, here, at, d = s.clock[b, TOKEN], s.clock[b, LAYER], s.where[b, l, e], distance(task, s, b, l)
    served = t if l <= here else t - 1  # the last token that layer l has seen
    last, counts = s.last[b, l, e], s.counts[b, l, e]
    x = experts[r]
    x[0] = 1.0 if r < index(s.n_rows[b]) else 0.0
    if at >= 0:
        x[1] = 1.0
        x[2] = 1.0 if s.arrives[b, l, e] > s.time[b, READY] else 0.0
        pairs[r, at, 0] = 1.0
    x[3] = 1.0 if s.fetched[b, l, e] else 0.0
    x[4] = 1.0 if l == here and last == t else 0.0
    x[5] = 1.0 if last == served else 0.0
    x[6] = 1.0 / (1 + t - last)
    x[7] = 0.3 * task.logit[l, e]
    age = index(min(t - max(last, -1), MAX_AGE - 1))
    for h in range(N_DECAYS):
        place = counts[h] * task.decay[h, age] * LOG_STEPS
        i = index(place)
        x[_COUNTS + h] = task.logs[i] + (place - i) * (task.logs[i + 1] - task.logs[i])
    x[_DISTANCE] = d / layers
    if d <= NEAR:
        x[_DISTANCE + d] = 1.0
        for back in range(LAST_VISITS):
            token, layer = t, here - back
            if layer < 0:
                token, layer = t + layer // layers, layer % layers
            if token >= 0:
                x[_VISITS + back] = _transition(task, s, b, d + back - 1, token, layer, e)
    if served >= 0:
        x[_VISITS + LAST_VISITS] = _transition(task, s, b, LAG_TOKEN, served, l, e)
    _foresight(task, s, b, x, l, e, d, served)


@inlined
def _transition(task, s, b, lag, token, layer, e):
    """How much the experts that a visit has used change the log-odds of expert e; the mean over the sequences."""
    total, streams = 0.0, 0
    lift = task.lift[lag, layer]
    for j in range(s.starts.shape[1]):
        if token < s.lengths[b, j]:
            streams += 1
            used = task.experts[s.starts[b, j] + token, layer]
            for k in range(used.shape[0]):
                if used[k] >= 0:
                    total += lift[index(used[k]), e]
    return 0.3 * total / streams if streams > 0 else 0.0


@inlined
def _foresight(task, s, b, x, l, e, d, served):
    """Predicted log-odds: of use by the layer's next tokens (known since its last visit), and at its next visit."""
    for f in range(task.foresight.shape[3]):
        # A prediction for the visit at distance d is with that visit's token.
        token = served if f < task.reuse else served + 1
        if token < 0 or (f >= task.reuse and f - task.reuse + 1 != d):
            continue
        unused, found, logit = 1.0, 0, 0.0
        for j in range(s.starts.shape[1]):
            if token < s.lengths[b, j]:
                logit = task.byte_logit[task.foresight[s.starts[b, j] + token, l, e, f]]
                if s.starts.shape[1] > 1:
                    unused *= 1.0 / (1.0 + math.exp(logit))
                found += 1
        if found > 1:  # used by any of the sequences
            logit = math.log(max(1.0 - unused, 1e-4) / max(unused, 1e-4))
        x[N_EXPERT_FEATURES + f] = 0.25 * logit


@inlined
def _mask(task, s, b, o):
    """The legal pairs, as :func:`~clustergym.moe_offload.kernels.episode.legal` says."""
    mask, gpus, mode = o.action_mask[b], task.gpus, s.clock[b, MODE]
    for r in range(mask.shape[0]):
        for node in range(mask.shape[1]):
            mask[r, node] = 0
    if mode == MODE_OVER:
        for g in range(gpus):
            mask[0, g] = 1
    for r in range(s.n_rows[b]):
        if mode == MODE_EVICT:
            mask[r, 2 * gpus + s.clock[b, OVER]] = 1
            continue
        l, e = s.places[b, r, 0], s.places[b, r, 1]
        at = s.where[b, l, e]
        for g in range(gpus):
            if at < 0:
                mask[r, g], mask[r, gpus + g] = 1, 1 if window(task, s, b, g) > 0 else 0
            elif at == g or can_move(task, s, b, l, e, g):
                mask[r, g] = 1


@inlined
def _edges(task, s, b, o):
    """Edges between experts of the last visits and those that can be chosen: transition probabilities."""
    layers, rows, here = s.where.shape[1], s.rows.shape[1], s.clock[b, LAYER]
    first, last = rows - task.context_rows, rows
    while last > first and s.rows[b, last - 1] < 0:
        last -= 1
    oldest = (here - s.places[b, last - 1, 0] + layers) % layers if last > first else 0
    # No entry is ever written but those between a choice and the context: the arrays come with zeros.
    for r in range(first):
        for i in range(first, rows):
            o.expert_graph[b, r, i] = 0.0
        if r < s.n_rows[b]:
            l, e = s.places[b, r, 0], s.places[b, r, 1]
            d = distance(task, s, b, l)
            if d <= LAG_TOKEN or d + oldest >= layers:
                for i in range(first, last):
                    layer = s.places[b, i, 0]
                    back = here - layer
                    lag = d + (back if back >= 0 else back + layers)
                    if lag <= LAG_TOKEN:
                        o.expert_graph[b, r, i] = task.chance[lag - 1, layer, s.places[b, i, 1], e]
                    elif lag == layers:  # the same layer, one token later
                        o.expert_graph[b, r, i] = task.chance[LAG_TOKEN, layer, s.places[b, i, 1], e]
    for i in range(first, rows):
        for r in range(first):
            o.expert_graph[b, i, r] = o.expert_graph[b, r, i]


@inlined
def _gpus(task, s, b, o):
    """Features of the 3·G nodes."""
    layers, experts, here, pool = s.where.shape[1], s.where.shape[2], s.clock[b, LAYER], s.clock[b, POOL]
    following = (here + 1) % layers
    for node in range(3 * task.gpus):
        for f in range(N_GPU_FEATURES):
            o.gpus[b, node, f] = 0.0
    for e in range(experts):
        if s.where[b, here, e] >= 0:
            o.gpus[b, s.where[b, here, e], 8] += 1.0
        if s.where[b, following, e] >= 0:
            o.gpus[b, s.where[b, following, e], 9] += 1.0
    for g in range(task.gpus):
        busy = max(s.link[b, g], s.time[b, NOW])
        evicting = s.clock[b, MODE] == MODE_EVICT and s.clock[b, OVER] == g
        o.gpus[b, g, 3] = min(max((busy - s.time[b, READY]) / task.load_ms, -4.0), 4.0)
        o.gpus[b, g, 4] = min(max(window(task, s, b, g) / task.load_ms, -4.0), 4.0)
        o.gpus[b, g, 5] = min(max(0.5 * (task.slots - s.held[b, pool, g]), -4.0), 4.0)
        o.gpus[b, g, 6] = 1.0 / task.gpus
        o.gpus[b, g, 7] = 1.0 if evicting else 0.0
        o.gpus[b, g, 8] /= experts
        o.gpus[b, g, 9] /= experts
        for operation in range(3):
            node = operation * task.gpus + g
            for f in range(3, N_GPU_FEATURES):
                o.gpus[b, node, f] = o.gpus[b, g, f]
            o.gpus[b, node, operation] = 1.0


@inlined
def _context(task, s, b, o):
    """Features of the whole situation."""
    mode, t, layers = s.clock[b, MODE], s.clock[b, TOKEN], s.where.shape[1]
    active, left = 0, 0
    for j in range(s.starts.shape[1]):
        active += 1 if t < s.lengths[b, j] else 0
    for g in range(task.gpus):
        left += max(s.held[b, s.clock[b, POOL], g] - task.slots, 0)
    o.context[b, 0] = 1.0 if mode == MODE_EVICT else 0.0
    o.context[b, 1] = 1.0 if mode == MODE_LOAD else 0.0
    o.context[b, 2] = 0.0 if mode == MODE_OVER else s.clock[b, LAYER] / layers
    o.context[b, 3] = 1.0 if s.clock[b, LAYER] == 0 else 0.0
    o.context[b, 4] = min(s.time[b, MISSES], 10.0)
    o.context[b, 5] = min((s.time[b, NEXT] - s.time[b, READY]) / task.load_ms, 10.0)
    o.context[b, 6] = min(left, 10) / 2.0
    o.context[b, 7] = math.log(1.0 + t) / 5.0
    o.context[b, 8] = active / s.starts.shape[1]
    o.context[b, 9] = task.slots * task.pools * task.gpus / (layers * s.where.shape[2])


def new_observation(task, rows, n):
    """Arrays for the observations of n environments."""
    gpus = task.gpus

    def floats(*shape):
        return np.zeros((n, *shape), np.float32)

    return Observation(
        experts=floats(rows, N_EXPERT_FEATURES + task.foresight.shape[3]),
        gpus=floats(3 * gpus, N_GPU_FEATURES),
        pairs=floats(rows, gpus, 1),
        # Without context there is no edge: an empty graph costs neither memory nor time.
        expert_graph=floats(*(rows if task.context_rows else 0,) * 2),
        gpu_graph=floats(gpus, gpus),
        context=floats(N_CONTEXT_FEATURES),
        action_mask=np.zeros((n, rows, 3 * gpus), np.int8),
    )
