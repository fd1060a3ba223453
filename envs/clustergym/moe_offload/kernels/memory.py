"""GPU memory and links of one environment, visit by visit.

A visit is a token and a layer. Its router result says which experts it needs. Missing ones are loaded at once, one
after another over each GPU's link, which finishes what it has begun. The layer computes when all have arrived, and the
next router result comes when it is done. Until then the links are free for prefetches.
"""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_offload.kernels.state import (
    COMPUTE,
    EVENT_AGAIN,
    EVENT_EXPERT,
    EVENT_HIT,
    EVENT_KIND,
    EVENT_MISS,
    EVENT_STEPS,
    EVENT_TOKENS,
    EVICTIONS,
    GENERATED,
    GROUP,
    HITS,
    LAYER,
    LOADS,
    MAX_AGE,
    MISSES,
    MODE,
    MODE_OVER,
    MOVES,
    N_DECAYS,
    N_STATS,
    N_TIME,
    NEEDED,
    NEVER,
    NEXT,
    NOW,
    OVER,
    POOL,
    PREFETCHES,
    READY,
    STALL,
    STEP,
    TOKEN,
    TOKENS,
    UNPAID,
    USEFUL,
    VISITS,
    WASTED,
)

MISS_RATE = 0.04
"""Weight of the last visit in the running mean of demand loads."""


@inlined
def pool_of(task, l):
    """The pool of slots that layer l uses."""
    return l if task.pools > 1 else 0


@inlined
def distance(task, s, b, l):
    """Visits until layer l comes: 1 … L."""
    ahead = l - s.clock[b, LAYER]
    return ahead if ahead > 0 else ahead + s.where.shape[1]


@inlined
def count(task, s, b, l, e, h):
    """Decayed count of an expert's uses with half-life h: about its share of the last tokens."""
    return count_at(task, s, b, l, e, h, s.clock[b, TOKEN])


@inlined
def count_at(task, s, b, l, e, h, t):
    """:func:`count` for callers that have read the token t, once for many experts."""
    return s.counts[b, l, e, h] * task.decay[h, min(t - max(s.last[b, l, e], -1), MAX_AGE - 1)]


@inlined
def begin(task, s, b, group):
    """Begin an episode with the sequences of a group and the experts that the training split uses most."""
    layers, experts = s.where.shape[1], s.where.shape[2]
    longest = 0
    for j in range(s.starts.shape[1]):
        sequence = task.groups[group, j]
        s.starts[b, j], s.lengths[b, j] = 0, 0
        if sequence >= 0:
            s.starts[b, j] = task.starts[sequence]
            s.lengths[b, j] = min(task.lengths[sequence], task.max_tokens)
            longest = max(longest, s.lengths[b, j])
    s.clock[b, TOKEN], s.clock[b, LAYER], s.clock[b, GROUP], s.clock[b, TOKENS] = 0, -1, group, longest
    s.clock[b, MODE], s.clock[b, POOL], s.clock[b, OVER], s.clock[b, STEP] = MODE_OVER, 0, -1, 0
    for i in range(N_TIME):
        s.time[b, i] = 0.0
    for i in range(N_STATS):
        s.stats[b, i] = 0
    for g in range(task.gpus):
        s.link[b, g], s.peer[b, g] = 0.0, 0.0
        for p in range(task.pools):
            s.held[b, p, g] = 0
    for l in range(layers):
        for e in range(experts):
            g = task.home[l, e]
            s.where[b, l, e] = g
            if g >= 0:
                s.held[b, pool_of(task, l), g] += 1
            s.arrives[b, l, e], s.fetched[b, l, e] = 0.0, False
            s.last[b, l, e], s.decided[b, l, e], s.decided_step[b, l, e] = -NEVER, -1, 0
            for h in range(N_DECAYS):
                s.counts[b, l, e, h] = task.prior[l, e]
    s.n_events[b] = 0


@inlined
def report(s, b, l, e, kind):
    """Note that an earlier decision about an expert has had a consequence. There is room for the events of one step."""
    i = s.n_events[b]
    if s.decided[b, l, e] >= 0 and i < s.events.shape[1]:
        s.events[b, i, EVENT_EXPERT], s.events[b, i, EVENT_KIND] = l * s.where.shape[2] + e, kind
        s.events[b, i, EVENT_TOKENS] = s.clock[b, TOKEN] - s.decided[b, l, e]
        s.events[b, i, EVENT_STEPS] = s.clock[b, STEP] - s.decided_step[b, l, e]
        s.n_events[b] = i + 1
        s.decided[b, l, e] = -1


@inlined
def decide(s, b, l, e):
    """Remember when an expert was evicted or prefetched."""
    s.decided[b, l, e], s.decided_step[b, l, e] = s.clock[b, TOKEN], s.clock[b, STEP]


@inlined
def first_free(task, s, b, l, e):
    """The GPU whose link can start first; among equals the expert's own one (l + e mod G) or the next after it."""
    best = (l + e) % task.gpus
    for i in range(1, task.gpus):
        g = (l + e + i) % task.gpus
        if max(s.time[b, NOW], s.link[b, g]) < max(s.time[b, NOW], s.link[b, best]):
            best = g
    return best


@inlined
def next_visit(task, s, b):
    """Go to the next router result, load what is missing and compute. False if there is none."""
    s.clock[b, LAYER] += 1
    if s.clock[b, LAYER] == s.where.shape[1]:
        s.clock[b, LAYER] = 0
        s.clock[b, TOKEN] += 1
    t, l = s.clock[b, TOKEN], s.clock[b, LAYER]
    if t >= s.clock[b, TOKENS]:
        return False
    now = s.time[b, NEXT]
    s.time[b, NOW] = now
    s.clock[b, POOL] = pool_of(task, l)
    ready, missing, needed, busiest = now, 0, 0, 0
    for j in range(s.starts.shape[1]):
        if t >= s.lengths[b, j]:
            continue
        if l == 0:
            s.stats[b, GENERATED] += 1
        for k in range(task.experts.shape[2]):
            e = task.experts[s.starts[b, j] + t, l, k]
            if e < 0 or s.last[b, l, e] == t:
                continue
            needed += 1
            age = min(t - max(s.last[b, l, e], -1), MAX_AGE - 1)
            for h in range(N_DECAYS):
                old = float(s.counts[b, l, e, h] * task.decay[h, age])
                s.counts[b, l, e, h] = old + (1.0 - float(task.decay[h, 1]))
            s.last[b, l, e] = t
            if s.where[b, l, e] < 0:
                missing += 1
                report(s, b, l, e, EVENT_MISS)
                g = first_free(task, s, b, l, e)
                s.link[b, g] = max(now, s.link[b, g]) + task.load_ms
                s.where[b, l, e], s.arrives[b, l, e] = g, s.link[b, g]
                s.held[b, s.clock[b, POOL], g] += 1
            elif s.fetched[b, l, e]:
                s.stats[b, USEFUL] += 1
                report(s, b, l, e, EVENT_HIT)
            s.fetched[b, l, e], s.decided[b, l, e] = False, -1
            ready = max(ready, s.arrives[b, l, e])
    if task.gpus == 1:
        busiest = needed
    else:
        busiest = _busiest(task, s, b, t, l)
    compute = task.layer_ms + task.expert_ms * busiest
    s.time[b, READY], s.time[b, NEXT] = ready, ready + compute
    s.time[b, STALL] += ready - now
    s.time[b, UNPAID] += ready - now
    s.time[b, COMPUTE] += compute
    s.time[b, MISSES] += MISS_RATE * (missing - s.time[b, MISSES])
    s.stats[b, VISITS] += 1
    s.stats[b, NEEDED] += needed
    s.stats[b, HITS] += needed - missing
    s.stats[b, LOADS] += missing
    return True


@device
def _busiest(task, s, b, t, l):
    """The most needed experts that one GPU has: the GPUs compute at the same time."""
    most = 0
    for g in range(task.gpus):
        n = 0
        for e in range(s.where.shape[2]):
            if s.last[b, l, e] == t and s.where[b, l, e] == g:
                n += 1
        most = max(most, n)
    return most


@inlined
def over(task, s, b):
    """The first GPU that holds more than its slots, or −1."""
    found = -1
    for g in range(task.gpus):
        if found < 0 and s.held[b, s.clock[b, POOL], g] > task.slots:
            found = g
    return found


@inlined
def window(task, s, b, g):
    """Time from when the link of a GPU is free to the next router result. A prefetch may begin while it is positive."""
    return s.time[b, NEXT] - max(s.time[b, NOW], s.link[b, g])


@inlined
def evict(task, s, b, l, e):
    """Drop a resident. If it is still on its way, the link goes on until it would have arrived."""
    s.held[b, pool_of(task, l), s.where[b, l, e]] -= 1
    s.where[b, l, e] = -1
    if s.fetched[b, l, e]:
        s.stats[b, WASTED] += 1
        s.fetched[b, l, e] = False
    s.stats[b, EVICTIONS] += 1
    decide(s, b, l, e)


@inlined
def prefetch(task, s, b, l, e, g):
    """Load a missing expert into GPU g."""
    report(s, b, l, e, EVENT_AGAIN)
    s.link[b, g] = max(s.time[b, NOW], s.link[b, g]) + task.load_ms
    s.where[b, l, e], s.arrives[b, l, e], s.fetched[b, l, e] = g, s.link[b, g], True
    s.clock[b, POOL] = pool_of(task, l)
    s.held[b, s.clock[b, POOL], g] += 1
    s.stats[b, PREFETCHES] += 1
    decide(s, b, l, e)


@inlined
def can_move(task, s, b, l, e, g):
    """Whether GPU g can take over an expert: another GPU has it, no layer computes with it, and the link has time."""
    return (
        s.where[b, l, e] >= 0
        and s.where[b, l, e] != g
        and l != s.clock[b, LAYER]
        and max(s.time[b, NOW], s.peer[b, g], s.arrives[b, l, e]) < s.time[b, NEXT]
    )


@inlined
def move(task, s, b, l, e, g):
    """Move an expert from the GPU that has it to GPU g. It cannot be used until it has arrived."""
    pool = pool_of(task, l)
    s.held[b, pool, s.where[b, l, e]] -= 1
    s.held[b, pool, g] += 1
    s.peer[b, g] = max(s.time[b, NOW], s.peer[b, g], s.arrives[b, l, e]) + task.peer_ms
    s.where[b, l, e], s.arrives[b, l, e] = g, s.peer[b, g]
    s.clock[b, POOL] = pool
    s.stats[b, MOVES] += 1
