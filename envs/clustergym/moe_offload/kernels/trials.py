"""Trials of prefetches: at some decisions, take each of several actions in a copy of the simulator, and compare.

The trace says what the router chooses next, so the copies differ in the action alone. The control goes on after each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import device, inlined
from clustergym.moe_offload.kernels.memory import begin, next_visit, over, window
from clustergym.moe_offload.kernels.observation import observe
from clustergym.moe_offload.kernels.rows import choose_loads, uniform
from clustergym.moe_offload.kernels.rules import (
    DISTANCE,
    GIVEN,
    N_AHEAD,
    _evict_worst,
    _fetch,
    _prefetch_likely,
    _renew,
    _start,
    _victim_layer,
)
from clustergym.moe_offload.kernels.state import LAYER, MODE, MODE_LOAD, STALL, TOKEN, TOKENS, Floats

NO_OP, EMPTY = -1, -2
"""Entries of ``Trials.rows`` that are no row of the table: prefetch nothing; no trial."""


class Trials(NamedTuple):
    """Decisions and what became of them: n decisions of K trials."""

    experts: Floats
    """(n, R, F) the observation of the table"""
    gpu: Floats
    """(n, F) of the first GPU"""
    context: Floats
    """(n, F)"""
    rows: npt.NDArray[np.int16]
    """(n, K) row that was prefetched, NO_OP, or EMPTY"""
    stall: Floats
    """(n, K) discounted stall of the next tokens, in loads"""
    episode: npt.NDArray[np.int32]
    """(n,)"""


@inlined
def _fill(to, values):
    for i in range(len(to)):
        to[i] = values[i]


@inlined
def _copy(s, scratch, f, other):
    """Copy what the control needs to go on."""
    _fill(f.clock[0], s.clock[0])
    _fill(f.time[0], s.time[0])
    _fill(f.link[0], s.link[0])
    _fill(f.stats[0], s.stats[0])
    _fill(f.held[0, 0], s.held[0, 0])
    _fill(f.starts[0], s.starts[0])
    _fill(f.lengths[0], s.lengths[0])
    for l in range(s.where.shape[1]):
        other.lowest[0, l], other.worst[0, l] = scratch.lowest[0, l], scratch.worst[0, l]
        for e in range(s.where.shape[2]):
            f.where[0, l, e], f.arrives[0, l, e] = s.where[0, l, e], s.arrives[0, l, e]
            f.fetched[0, l, e], f.last[0, l, e] = s.fetched[0, l, e], s.last[0, l, e]
            other.score[l, e] = scratch.score[l, e]


@inlined
def _evict_all(task, s, z, scratch, protect):
    """Evict by the control until nothing is held too much."""
    n_layers = s.where.shape[1]
    while over(task, s, 0) >= 0:
        q, _ = _victim_layer(scratch, 0, s.clock[0, LAYER], n_layers, np.float32(z[DISTANCE] / n_layers), protect)
        _evict_worst(task, s, scratch, 0, q)


@inlined
def _load(task, s, z, scratch, l, e):
    _fetch(task, s, scratch, l, e, 0)
    _evict_all(task, s, z, scratch, min(N_AHEAD, s.where.shape[1] - 1))


@inlined
def _serve(task, s, z, scores, episode, scratch):
    """One visit by the control, without prefetching. False if there is none."""
    if not next_visit(task, s, 0):
        return False
    _renew(task, s, GIVEN, z, scores, episode, scratch)
    _evict_all(task, s, z, scratch, 0)
    s.n_events[0] = 0
    return True


@device
def _go_on(task, s, z, scores, episode, scratch, tokens, discount):
    """The control goes on for some tokens. Returns the discounted stall in loads; ``discount`` is per token."""
    n_layers, total, weight = s.where.shape[1], 0.0, 1.0
    for _ in range(tokens * n_layers):
        before = s.time[0, STALL]
        if not _serve(task, s, z, scores, episode, scratch):
            break
        total += weight * (s.time[0, STALL] - before)
        weight *= discount ** (1.0 / n_layers)
        _prefetch_likely(task, s, False, z, scores, episode, scratch)
    return total / task.load_ms


@inlined
def _draw_rows(task, s, ahead, rows):
    """Which actions to try: the no-op, the likeliest expert of each layer, and random rows, likely ones more often."""
    n, n_layers, k = s.n_rows[0], s.where.shape[1], 1
    for i in range(len(rows)):
        rows[i] = EMPTY
    rows[0] = NO_OP
    for h in range(1, task.horizon + 1):
        best = EMPTY
        for r in range(n):
            if (s.places[0, r, 0] - s.clock[0, LAYER] + n_layers) % n_layers == h:
                best = r if best < 0 or ahead[r] > ahead[best] else best
        if best >= 0 and k < len(rows):
            rows[k] = best
            k += 1
    for _ in range(8 * len(rows)):
        if k == min(n + 1, len(rows)):
            break
        # The likelier one of two random rows.
        a, b = int(uniform(s.random, 0) * n), int(uniform(s.random, 0) * n)
        r = a if ahead[a] > ahead[b] else b
        known = False
        for i in range(k):
            known = known or rows[i] == r
        if not known:
            rows[k] = r
            k += 1
    return k


@inlined
def _ahead(s, scores, episode, ahead):
    """The chance of use of the experts in the table."""
    n_layers, t = s.where.shape[1], s.clock[0, TOKEN]
    for r in range(s.n_rows[0]):
        l, e = s.places[0, r, 0], s.places[0, r, 1]
        h = (l - s.clock[0, LAYER] + n_layers) % n_layers
        token = t + (1 if l < s.clock[0, LAYER] else 0)
        ahead[r] = scores.ahead[h - 1, scores.first[episode] + token, l, e] if h <= N_AHEAD else 0.0


@device
def try_prefetches(task, s, f, z, scores, scratch, other, o, chance, tokens, discount, ahead, found):
    """Serve all episodes with the control. At random visits, try prefetches, and take one of them.

    Args:
        task, s, z, scores, scratch: of :func:`~clustergym.moe_offload.kernels.rules.play`, for one GPU.
        f, other: a second state and scratch memory for the copies.
        o: an observation of one environment.
        chance: of a visit to be one of those.
        tokens, discount: how far a trial goes on, and what a later token counts.
        ahead: (R,) scratch.
        found: :class:`Trials`, filled. Returns how many decisions there are.
    """
    n = 0
    for episode in range(task.groups.shape[0]):
        begin(task, s, 0, episode)
        _start(task, s, GIVEN, z, scores, episode, scratch)
        while _serve(task, s, z, scores, episode, scratch):
            if uniform(s.random, 0) >= chance or s.clock[0, TOKEN] + 1 >= s.clock[0, TOKENS]:
                _prefetch_likely(task, s, False, z, scores, episode, scratch)
                continue
            while n < len(found.rows) and window(task, s, 0, 0) > 0 and choose_loads(task, s, 0) > 0:
                s.clock[0, MODE] = MODE_LOAD
                observe(task, s, 0, o)
                for r in range(o.experts.shape[1]):
                    _fill(found.experts[n, r], o.experts[0, r])
                _fill(found.gpu[n], o.gpus[0, 0])
                _fill(found.context[n], o.context[0])
                found.episode[n] = episode
                _ahead(s, scores, episode, ahead)
                rows = found.rows[n]
                k = _draw_rows(task, s, ahead, rows)
                for i in range(k):
                    _copy(s, scratch, f, other)
                    if rows[i] >= 0:
                        _load(task, f, z, other, s.places[0, rows[i], 0], s.places[0, rows[i], 1])
                        _prefetch_likely(task, f, False, z, scores, episode, other)
                    found.stall[n, i] = _go_on(task, f, z, scores, episode, other, tokens, discount)
                row = rows[int(uniform(s.random, 0) * k)]
                n += 1
                if row < 0:
                    break
                _load(task, s, z, scratch, s.places[0, row, 0], s.places[0, row, 1])
    return n
