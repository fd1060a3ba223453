"""Random changes of a placement that a search tries."""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.replicas import holds, slot_of
from clustergym.planners.kernels.launch import draw

# Shares of the kinds of steps; EMPTY is the part of the first kind that empties a slot.
SPARE, TOGETHER, BUSY, EMPTY = range(4)

SAMPLE = 1024
"""Tokens from which experts that are used together are drawn: few enough to stay in the fastest cache."""


@device
def draw_samples(first, last, sample, experts, rows):
    """Write the experts (L, tokens, K) of evenly spaced ``rows`` of ``experts`` (L, rows, K) to ``sample``."""
    for b in range(first, last):
        for i in range(sample.shape[1]):
            row = rows[i * len(rows) // sample.shape[1]]
            for k in range(sample.shape[2]):
                sample[b, i, k] = experts[b, row, k]


@inlined
def _draw_use(b, key, sample):
    """(token of the sample, place among its experts) of a random use of an expert: busy experts come more often."""
    return int(draw(key, b) * sample.shape[0]), int(draw(key, b) * sample.shape[1])


@inlined
def _replica_of(sim, b, key, e):
    """GPU of a random replica."""
    return int(sim.replicas[b, e, int(draw(key, b) * sim.n_replicas[b, e])])


@inlined
def _busiest(sim, b, w):
    best = 0
    for g in range(sim.slots.shape[1]):
        if sim.kernel_us[b, w, g] > sim.kernel_us[b, w, best]:
            best = g
    return best


@inlined
def propose(sim, b, key, sample, shares, per_node):
    """A random legal change: (e, from, to, v, from, to), or e = −1 if the draw is not legal.

    A replica of e moves, and one of v in exchange; a GPU of −1 means none. ``shares`` are of the kinds: replace a spare
    replica (or fill or empty a slot), move an expert to the node of another that a token uses too, move an expert off
    the busiest GPU of a pass; the others swap two slots. ``sample`` (tokens, K): experts of some tokens.
    """
    n_gpus, n_slots, kind = sim.slots.shape[1], sim.slots.shape[2], draw(key, b)
    g, s = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    if kind < shares[SPARE]:
        here = int(sim.slots[b, g, s])
        if here >= 0 and sim.n_replicas[b, here] < 2:
            return -1, -1, -1, -1, -1, -1
        if shares[EMPTY] > 0.0 and draw(key, b) < shares[EMPTY]:
            return (here, g, -1, -1, -1, -1) if here >= 0 else (-1, -1, -1, -1, -1, -1)
        token, k = _draw_use(b, key, sample)
        e = int(sample[token, k])
        if e < 0 or holds(sim, b, e, g):
            return -1, -1, -1, -1, -1, -1
        return e, -1, g, here, g, -1
    h, t = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    if kind < shares[SPARE] + shares[TOGETHER]:
        token, k = _draw_use(b, key, sample)
        other, wanted = int(sample[token, int(draw(key, b) * sample.shape[1])]), int(sample[token, k])
        if wanted < 0 or other < 0 or wanted == other:
            return -1, -1, -1, -1, -1, -1
        h = _replica_of(sim, b, key, other)
        if draw(key, b) < 0.5:
            h += int(draw(key, b) * per_node) - h % per_node
        g = _replica_of(sim, b, key, wanted)
        s = slot_of(sim, b, wanted, g)
    elif kind < shares[SPARE] + shares[TOGETHER] + shares[BUSY]:
        g = _busiest(sim, b, int(draw(key, b) * sim.rows.shape[1]))
    here, there = int(sim.slots[b, g, s]), int(sim.slots[b, h, t])
    if g == h or here == there:
        return -1, -1, -1, -1, -1, -1
    if here < 0:
        here, there, g, h = there, here, h, g
    if holds(sim, b, here, h) or (there >= 0 and holds(sim, b, there, g)):
        return -1, -1, -1, -1, -1, -1
    return here, g, h, there, h, g
