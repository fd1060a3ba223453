"""The table of experts that the agents choose from, and the order of its rows.

The first rows can be chosen and are in random order, so that a position means nothing. The last ``context_rows`` are
the experts of the last visits: neighbours in the graph, not choices.
"""

from __future__ import annotations

import math

import numpy as np

from clustergym.common.compiling import device, index, inlined
from clustergym.moe_offload.kernels.memory import can_move, count_at, pool_of
from clustergym.moe_offload.kernels.state import LAYER, MAX_AGE, OVER, POOL, TOKEN, TOKENS

MIDDLE = 2
"""The half-life that tables are chosen by."""
EMPTY = -1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@device
def uniform(random, b):
    """The environment's next random number in [0, 1): splitmix64."""
    random[b] += _GOLDEN
    z = random[b]
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    z = z ^ (z >> _S31)
    return float(z >> _S11) * (1.0 / 9007199254740992.0)


@device
def keep_lowest(scores, found, first, last, size):
    """Bring the ``size`` lowest scores of entries first … last − 1 to the front (Hoare's selection)."""
    low, high = first, last - 1
    while low < high:
        pivot, i, j = scores[index((low + high) // 2)], low, high
        while i <= j:
            while scores[index(i)] < pivot:
                i += 1
            while scores[index(j)] > pivot:
                j -= 1
            if i <= j:
                one, other = index(i), index(j)
                scores[one], scores[other] = scores[other], scores[one]
                found[one], found[other] = found[other], found[one]
                i += 1
                j -= 1
        # The border lies among low … j or i … high; between them all are equal.
        if first + size <= j:
            high = j
        elif first + size > i:
            low = i
        else:
            return


@inlined
def _select(s, b, first, last, size, n):
    """Add the ``size`` lowest of entries first … last − 1 to the table, which has n rows. Returns its rows."""
    if last - first > size:
        keep_lowest(s.scores[b], s.found[b], first, last, size)
        last = first + size
    for i in range(first, last):
        s.rows[b, n + i - first] = s.found[b, i]
    return n + last - first


@inlined
def choose_evictions(task, s, b):
    """Table of an eviction: residents of the current layer. The lowest counts of all other layers fill it."""
    layers, experts = s.where.shape[1], s.where.shape[2]
    gpu, pool, here = s.clock[b, OVER], s.clock[b, POOL], s.clock[b, LAYER]
    found, scores, decay = s.found[b], s.scores[b], task.decay[MIDDLE]
    n, others, t, own = 0, index(0), s.clock[b, TOKEN], 0
    if pool_of(task, here) == pool:
        for e in range(experts):
            own += 1 if s.where[b, here, e] == gpu else 0
    low = task.low_rows + task.own_rows - min(own, task.own_rows)
    for back in range(layers):
        # The current layer comes last.
        l = (here + back + 1) % layers
        if back == layers - 1:
            n = _select(s, b, 0, np.int64(others), low, 0)
            others = index(0)
        if pool_of(task, l) != pool:
            continue
        where, last, counts, prior = s.where[b, l], s.last[b, l], s.counts[b, l], task.prior[l]
        late = -0.02 * back / layers
        for i in range(experts):
            e = index(i)
            # Of each expert, the entry is written; it stays if the GPU has the expert. A branch would be slower.
            found[others] = l * experts + i
            age = index(min(t - max(last[e], -1), MAX_AGE - 1))
            scores[others] = float(counts[e, MIDDLE] * decay[age]) + 0.15 * float(prior[e]) + late
            others += index(where[e] == gpu)
    _finish(task, s, b, _select(s, b, 0, np.int64(others), task.own_rows, n))


@inlined
def choose_loads(task, s, b):
    """Table of a prefetch: the likeliest missing experts of the next layers, and with several GPUs experts to move.

    Returns how many experts are missing: without any there is nothing to decide.
    """
    layers, experts, top = s.where.shape[1], s.where.shape[2], task.experts.shape[2]
    t, here, scratch = s.clock[b, TOKEN], s.clock[b, LAYER], layers * experts
    found, scores, decay, likely = s.found[b], s.scores[b], task.decay[MIDDLE], s.scores[b, scratch:]
    each = max(task.load_rows // task.horizon, 1)
    n, movable, active = 0, 0, 0
    for j in range(s.starts.shape[1]):
        active += 1 if t < s.lengths[b, j] else 0
    for h in range(1, task.horizon + 1):
        l = (here + h) % layers
        if t + (here + h) // layers >= s.clock[b, TOKENS]:
            break
        for e in range(experts):
            likely[e] = 0.0
        for j in range(s.starts.shape[1]):
            if t < s.lengths[b, j]:
                for k in range(top):
                    a = task.experts[s.starts[b, j] + t, here, k]
                    if a >= 0:
                        lift = task.lift[h - 1, here, a]
                        for e in range(experts):
                            likely[e] += lift[e]
        missing = index(0)
        where, last, counts, prior = s.where[b, l], s.last[b, l], s.counts[b, l], task.prior[l]
        for i in range(experts):
            e = index(i)
            if where[e] < 0:
                age = index(min(t - max(last[e], -1), MAX_AGE - 1))
                often = math.log(float(counts[e, MIDDLE] * decay[age]) + 0.3 * float(prior[e]) + 0.01)
                found[missing] = l * experts + i
                scores[missing] = -often - 0.6 / active * float(likely[e])
                missing += index(1)
        n = _select(s, b, 0, np.int64(missing), each, n)
    if n == 0:
        return 0
    loads = n
    if task.move_rows > 0:
        for h in range(1, task.horizon + 1):
            l = (here + h) % layers
            for e in range(experts):
                possible = False
                for g in range(task.gpus):
                    possible = possible or can_move(task, s, b, l, e, g)
                if possible:
                    s.found[b, movable] = l * experts + e
                    s.scores[b, movable] = -count_at(task, s, b, l, e, MIDDLE, t)
                    movable += 1
        n = _select(s, b, 0, movable, task.move_rows, n)
    _finish(task, s, b, n)
    return loads


@inlined
def clear_rows(task, s, b):
    """The table after the last visit: empty."""
    _finish(task, s, b, 0)


@inlined
def _finish(task, s, b, n):
    """Shuffle the n rows that can be chosen, empty the others, and add the context."""
    choices = s.rows.shape[1] - task.context_rows
    s.n_rows[b] = n
    for i in range(n - 1, 0, -1):
        j = int(uniform(s.random, b) * (i + 1))
        s.rows[b, i], s.rows[b, j] = s.rows[b, j], s.rows[b, i]
    for i in range(n, s.rows.shape[1]):
        s.rows[b, i] = EMPTY
    if n > 0:
        _add_context(task, s, b, choices)
    experts = s.where.shape[2]
    for i in range(s.rows.shape[1]):
        l = s.rows[b, i] // experts
        s.places[b, i, 0], s.places[b, i, 1] = l, s.rows[b, i] - l * experts


@inlined
def _add_context(task, s, b, first):
    """Experts of this visit, the one before … in rows ``first`` and after, at most one visit of each layer."""
    layers, experts, i = s.where.shape[1], s.where.shape[2], first
    for back in range(layers):
        l = s.clock[b, LAYER] - back
        t = s.clock[b, TOKEN]
        if l < 0:
            l, t = l + layers, t - 1
        if t < 0:
            break
        for j in range(s.starts.shape[1]):
            if t >= s.lengths[b, j]:
                continue
            for k in range(task.experts.shape[2]):
                e = task.experts[s.starts[b, j] + t, l, k]
                if e < 0:
                    continue
                known = False
                for r in range(first, i):
                    known = known or s.rows[b, r] == l * experts + e
                if i < s.rows.shape[1] and not known:
                    s.rows[b, i] = l * experts + e
                    i += 1
        if i == s.rows.shape[1]:
            break
