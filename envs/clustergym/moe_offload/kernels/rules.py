"""Rules as loops over the simulator: score what is resident, evict the lowest, prefetch what is likely enough.

Every rule has a *keep score* for each expert, which is renewed when its layer is visited. The resident with the lowest
score is evicted. A rule may also have a probability that an expert is used in one of the next layers; it prefetches
the likeliest missing one if that is above a threshold, and if it is worth more than the resident that must go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import device, inlined
from clustergym.moe_offload.kernels.memory import begin, evict, next_visit, over, prefetch, window
from clustergym.moe_offload.kernels.state import COMPUTE, LAYER, N_STATS, NOW, READY, STALL, TOKEN, TOKENS, Floats

FIXED, RECENT, COUNTS, GIVEN = range(4)
"""Keep score: as at the start; token and layer of the last use; decayed counts; a weighted sum of given arrays."""
NO_PREFETCH, LIKELY, CLAIRVOYANT = range(3)
"""Prefetch nothing; what ``Scores.ahead`` says; what is needed next and missing, which no rule can know."""
# Parameters. DECAY, PRIOR, RECENCY: of COUNTS. DISTANCE: how much sooner an expert goes that is needed a token later,
# in units of the keep score. THRESHOLD: three, by layers ahead. GAIN: what a certain use is worth in units of the keep
# score. BACKLOG: how much the threshold rises per load that waits on the link. WEIGHT: of the given arrays.
DECAY, PRIOR, RECENCY, DISTANCE, THRESHOLD, GAIN, BACKLOG, WEIGHT = 0, 1, 2, 3, 4, 7, 8, 9
N_AHEAD = 3
N_PARAMETERS = WEIGHT + 6
NOTHING = 1e30
LONG_AGO = -1000


class Scores(NamedTuple):
    """What a rule knows about episodes. Rows are tokens of an episode; there is one more row of ``keep``."""

    first: npt.NDArray[np.int64]
    """(episodes,) row of the first token in ``ahead``; in ``keep`` it is this plus the number of the episode"""
    keep: Floats
    """(rows + episodes, L, E, W) for GIVEN: before each token, and after the last one"""
    ahead: Floats
    """(3, rows, L, E) for LIKELY: chance of use as known 1, 2, 3 visits before"""


class Scratch(NamedTuple):
    """Memory of a rule."""

    score: Floats
    """(L, E) keep scores"""
    counts: Floats
    """(L, E) decayed counts"""
    last: npt.NDArray[np.int32]
    """(L, E) token of the last use"""
    lowest: Floats
    """(G, L) lowest keep score of the residents of a layer"""
    worst: npt.NDArray[np.int32]
    """(G, L) the expert that has it"""


@inlined
def _find_lowest(s, scratch, l):
    for g in range(scratch.lowest.shape[0]):
        lowest, worst = np.float32(NOTHING), 0
        for e in range(s.where.shape[2]):
            score = scratch.score[l, e] if s.where[0, l, e] == g else np.float32(NOTHING)
            worst = e if score < lowest else worst
            lowest = score if score < lowest else lowest
        scratch.lowest[g, l], scratch.worst[g, l] = lowest, worst


@inlined
def _start(task, s, kind, z, scores, episode, scratch):
    row = scores.first[episode] + episode
    for l in range(s.where.shape[1]):
        for e in range(s.where.shape[2]):
            scratch.counts[l, e], scratch.last[l, e] = 0.0, LONG_AGO
            score = task.prior[l, e]
            if kind == RECENT:
                score *= 0.5
            elif kind == COUNTS:
                score *= z[PRIOR]
            elif kind == GIVEN:
                score = _given(scores, z, row, l, e)
            scratch.score[l, e] = score
        _find_lowest(s, scratch, l)


@inlined
def _given(scores, z, row, l, e):
    score = np.float32(0.0)
    for w in range(scores.keep.shape[3]):
        score += z[WEIGHT + w] * scores.keep[row, l, e, w]
    return score


@inlined
def _renew(task, s, kind, z, scores, episode, scratch):
    """Keep scores of the layer that was just visited."""
    t, l = s.clock[0, TOKEN], s.clock[0, LAYER]
    n_layers, n_experts = s.where.shape[1], s.where.shape[2]
    if kind == RECENT:
        for e in range(n_experts):
            if s.last[0, l, e] == t:
                scratch.score[l, e] = 1 + t * n_layers + l
    elif kind == COUNTS:
        decay, prior, recency = np.float32(z[DECAY]), np.float32(z[PRIOR]), np.float32(z[RECENCY])
        for e in range(n_experts):
            used = s.last[0, l, e] == t
            scratch.counts[l, e] = decay * scratch.counts[l, e] + used
            if used:
                scratch.last[l, e] = t
            recent = recency / np.float32(1 + t - scratch.last[l, e])
            scratch.score[l, e] = scratch.counts[l, e] + prior * task.prior[l, e] + recent
    elif kind == GIVEN:
        row = scores.first[episode] + episode + t + 1
        for e in range(n_experts):
            scratch.score[l, e] = _given(scores, z, row, l, e)
    _find_lowest(s, scratch, l)


@inlined
def _victim_layer(scratch, g, l, n_layers, bonus, protect):
    """The layer with the resident of GPU g that is evicted first, or −1. The next ``protect`` layers are spared."""
    best, lowest = -1, np.float32(NOTHING / 2)
    q = l + 1 + protect
    if q >= n_layers:
        q -= n_layers
    # The layer at hand comes again last.
    for later in range(protect, n_layers):
        score = scratch.lowest[g, q] - bonus * np.float32(later)
        if score <= lowest:
            best, lowest = q, score
        q += 1
        if q == n_layers:
            q = 0
    return best, lowest


@inlined
def _evict_worst(task, s, scratch, g, q):
    evict(task, s, 0, q, scratch.worst[g, q])
    _find_lowest(s, scratch, q)


@inlined
def _free_gpu(s, task):
    best = 0
    for g in range(1, task.gpus):
        if s.link[0, g] < s.link[0, best]:
            best = g
    return best


@inlined
def _fetch(task, s, scratch, l, e, g):
    prefetch(task, s, 0, l, e, g)
    _find_lowest(s, scratch, l)


@inlined
def _prefetch_likely(task, s, own_layer, z, scores, episode, scratch):
    n_layers, n_experts = s.where.shape[1], s.where.shape[2]
    t, l = s.clock[0, TOKEN], s.clock[0, LAYER]
    bonus = np.float32(z[DISTANCE] / n_layers)
    for h in range(1, N_AHEAD + 1):
        if z[THRESHOLD + h - 1] >= 1 or h >= n_layers:
            continue
        tokens, q = t, l + h
        if q >= n_layers:
            tokens, q = t + 1, q - n_layers
        if tokens >= s.clock[0, TOKENS]:
            return
        row = scores.first[episode] + tokens
        while True:
            g = _free_gpu(s, task)
            left = window(task, s, 0, g)
            if left <= 0:
                return
            waiting = (max(s.time[0, NOW], s.link[0, g]) - s.time[0, READY]) / task.load_ms
            likely, e = np.float32(z[THRESHOLD + h - 1] + z[BACKLOG] * waiting), -1
            for i in range(n_experts):
                if s.where[0, q, i] < 0 and scores.ahead[h - 1, row, q, i] > likely:
                    likely, e = scores.ahead[h - 1, row, q, i], i
            if e < 0:
                break
            worth = z[GAIN] * likely + scratch.score[q, e]
            if own_layer:
                out, lowest = -1, NOTHING
                for i in range(n_experts):
                    value = z[GAIN] * scores.ahead[h - 1, row, q, i] + scratch.score[q, i]
                    if s.where[0, q, i] == g and value < lowest:
                        out, lowest = i, value
                if out < 0 or worth <= lowest:
                    break
                evict(task, s, 0, q, out)
            else:
                layer, lowest = _victim_layer(scratch, g, l, n_layers, bonus, min(N_AHEAD, n_layers - 1))
                if layer < 0 or worth <= lowest:
                    break
                _evict_worst(task, s, scratch, g, layer)
            _fetch(task, s, scratch, q, e, g)


@inlined
def _needed_and_missing(task, s, t, l):
    """An expert that is needed at a visit to come and is not resident, or −1."""
    for j in range(s.starts.shape[1]):
        if t < s.lengths[0, j]:
            for k in range(task.experts.shape[2]):
                e = task.experts[s.starts[0, j] + t, l, k]
                if e >= 0 and s.where[0, l, e] < 0:
                    return e
    return -1


@inlined
def _prefetch_clairvoyant(task, s, own_layer, within, scratch):
    """Load what is needed next and missing, in place of what is needed last; scores are minus the next visit."""
    n_layers = s.where.shape[1]
    now = s.clock[0, TOKEN] * n_layers + s.clock[0, LAYER]
    v, end = now + 1, min(now + within, s.clock[0, TOKENS] * n_layers)
    while v < end:
        g = _free_gpu(s, task)
        if window(task, s, 0, g) <= 0:
            return
        t, l = v // n_layers, v % n_layers
        e = _needed_and_missing(task, s, t, l)
        if e < 0:
            v += 1
            continue
        if own_layer:
            layer, lowest = l, scratch.lowest[g, l]
        else:
            layer, lowest = _victim_layer(scratch, g, s.clock[0, LAYER], n_layers, np.float32(0.0), 0)
        if layer < 0 or -lowest <= v:
            if own_layer:
                v += 1
                continue
            return
        _evict_worst(task, s, scratch, g, layer)
        _fetch(task, s, scratch, l, e, g)


@device
def play(task, s, groups, kind, own_layer, mode, within, z, scores, scratch, stall_ms, compute_ms, stats):
    """Serve groups of sequences one after the other with a rule.

    Args:
        task, s: of the simulator, N = 1.
        groups: (episodes,) rows of ``task.groups``; ``scores`` has these episodes in the same order.
        kind, mode: keep score and prefetching.
        own_layer: evict from the layer that got an expert. Otherwise from any layer.
        within: visits that CLAIRVOYANT looks ahead.
        z: (N_PARAMETERS,)
        scores, scratch: see there.
        stall_ms, compute_ms, stats: (episodes,), (episodes,) and (episodes, N_STATS), the results.
    """
    n_layers = s.where.shape[1]
    bonus = np.float32(z[DISTANCE] / n_layers)
    for episode in range(groups.shape[0]):
        begin(task, s, 0, groups[episode])
        _start(task, s, kind, z, scores, episode, scratch)
        while next_visit(task, s, 0):
            l = s.clock[0, LAYER]
            _renew(task, s, kind, z, scores, episode, scratch)
            while True:
                g = over(task, s, 0)
                if g < 0:
                    break
                q = l
                if not own_layer:
                    q, _ = _victim_layer(scratch, g, l, n_layers, bonus, 0)
                _evict_worst(task, s, scratch, g, q)
            if mode == LIKELY:
                _prefetch_likely(task, s, own_layer, z, scores, episode, scratch)
            elif mode == CLAIRVOYANT:
                _prefetch_clairvoyant(task, s, own_layer, within, scratch)
            s.n_events[0] = 0
        stall_ms[episode], compute_ms[episode] = s.time[0, STALL], s.time[0, COMPUTE]
        for i in range(N_STATS):
            stats[episode, i] = s.stats[0, i]
