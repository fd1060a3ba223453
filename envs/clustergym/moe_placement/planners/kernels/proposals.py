"""Proposals for a search: random legal changes, and the best of several by an estimate.

Trying a change exactly takes microseconds, because it counts tokens. The estimate takes a fraction of that: it reads
the loads, how often two experts are used by the same token, and which GPUs are busy. Its cost does not depend on the
number of tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clustergym.moe_placement.kernels.compile import device, inlined
from clustergym.moe_placement.kernels.replicas import holds, slot_of
from clustergym.moe_placement.kernels.state import RECEIVED_INTER, RECEIVED_INTRA, SENT_INTER, SENT_INTRA
from clustergym.moe_placement.planners.kernels.launch import draw
from clustergym.moe_placement.profiles import ALLGATHER

# Shares of the kinds of steps; EMPTY is the part of the first kind that empties a slot.
SPARE, TOGETHER, BUSY, EMPTY = range(4)

# Columns of the pressure: what one more µs of a GPU's kernel, and one more copy that it receives, costs.
KERNEL, INTRA, INTER = range(3)

SAMPLE = 1024
"""Tokens from which experts that are used together are drawn: few enough to stay in the fastest cache."""


class Guide(NamedTuple):
    """What proposals read, for B layers."""

    choices: int
    """So many changes are estimated, and the best one is tried exactly."""
    sample: np.ndarray
    """(B, SAMPLE, K) int16: experts of some tokens"""
    pairs: np.ndarray
    """(B, E, E) float32: tokens per pass that use both experts; 0 on the diagonal"""
    near: np.ndarray
    """(B, N, E) float32: the sum of ``pairs`` over the experts of a node"""
    beside: np.ndarray
    """(B, G, E) float32: the sum of ``pairs`` over the experts of a GPU"""
    pressure: np.ndarray
    """(B, G, 3) float64"""
    kernel_us: np.ndarray
    """(B, G) float64: mean over passes"""
    slot_pairs: np.ndarray
    """(B, G, S) float64: mean over passes"""
    change: np.ndarray
    """(B, 6) int64: the best candidate"""


def make_guide(choices: int, layers: int, top_k: int, n_experts: int, n_gpus: int, n_slots: int, n_nodes: int) -> Guide:
    """Tables to be filled by :func:`prepare_guide`."""
    rich = choices > 1
    return Guide(
        choices=choices,
        sample=np.zeros((layers, SAMPLE, top_k), np.int16),
        pairs=np.zeros((layers, n_experts, n_experts) if rich else (layers, 1, 1), np.float32),
        near=np.zeros((layers, n_nodes, n_experts), np.float32),
        beside=np.zeros((layers, n_gpus, n_experts) if rich else (layers, 1, 1), np.float32),
        pressure=np.zeros((layers, n_gpus, 3)),
        kernel_us=np.zeros((layers, n_gpus)),
        slot_pairs=np.zeros((layers, n_gpus, n_slots)),
        change=np.zeros((layers, 6), np.int64),
    )


# Random changes


@inlined
def _draw_use(b, key, guide):
    """(token of the sample, place among its experts) of a random use of an expert: busy experts come more often."""
    return int(draw(key, b) * guide.sample.shape[1]), int(draw(key, b) * guide.sample.shape[2])


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
def propose(sim, b, key, guide, kind, shares, per_node):
    """A random legal change: (e, from, to, v, from, to), or e = −1 if the draw is not legal.

    A replica of e moves, and one of v in exchange; a GPU of −1 means none. ``kind`` in [0, 1) chooses by ``shares``:
    replace a spare replica (or fill or empty a slot), move an expert to the node of another that a token uses too, move
    an expert off the busiest GPU of a pass, or swap two slots.
    """
    n_gpus, n_slots = sim.slots.shape[1], sim.slots.shape[2]
    sample = guide.sample[b]
    g, s = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    if kind < shares[SPARE]:
        here = int(sim.slots[b, g, s])
        if here >= 0 and sim.n_replicas[b, here] < 2:
            return -1, -1, -1, -1, -1, -1
        if shares[EMPTY] > 0.0 and draw(key, b) < shares[EMPTY]:
            return (here, g, -1, -1, -1, -1) if here >= 0 else (-1, -1, -1, -1, -1, -1)
        token, k = _draw_use(b, key, guide)
        e = int(sample[token, k])
        if e < 0 or holds(sim, b, e, g):
            return -1, -1, -1, -1, -1, -1
        return e, -1, g, here, g, -1
    h, t = int(draw(key, b) * n_gpus), int(draw(key, b) * n_slots)
    if kind < shares[SPARE] + shares[TOGETHER]:
        token, k = _draw_use(b, key, guide)
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


# Tables


@inlined
def _slope(x, norm):
    """Derivative of the 8-norm by one of its values."""
    y = x / norm
    y2 = y * y
    return y2 * y2 * y2 * y


@inlined
def _power8(x):
    x *= x
    x *= x
    return x * x


@inlined
def _root8(x):
    return math.sqrt(math.sqrt(math.sqrt(x)))


@device
def watch(sim, b, guide, topology, costs):
    """Write pressure, kernel times and pairs of the current placement.

    A token may be on any rank and enter a node at any of its GPUs, so sending, and receiving from other nodes, count
    with their mean.
    """
    n_gpus, n_passes, per_node = sim.slots.shape[1], sim.rows.shape[1], topology.gpus_per_node
    pressure, kernel_us, slot_pairs = guide.pressure[b], guide.kernel_us[b], guide.slot_pairs[b]
    share, sending_intra, sending_inter = 1.0 / n_passes, 0.0, 0.0
    pressure[:] = 0.0
    kernel_us[:] = 0.0
    slot_pairs[:] = 0.0
    intra_us = costs.dispatch_intra_us + costs.combine_intra_us
    inter_us = costs.dispatch_inter_us + costs.combine_inter_us
    for w in range(n_passes):
        kernel, intra, inter = 0.0, 0.0, 0.0
        for g in range(n_gpus):
            kernel_us[g] += share * sim.kernel_us[b, w, g]
            for s in range(sim.slots.shape[2]):
                slot_pairs[g, s] += share * sim.slot_pairs[b, w, g, s]
            kernel += _power8(sim.kernel_us[b, w, g])
            intra += _power8(float(sim.copies[b, w, SENT_INTRA, g])) + _power8(
                float(sim.copies[b, w, RECEIVED_INTRA, g])
            )
            inter += _power8(float(sim.copies[b, w, SENT_INTER, g])) + _power8(
                float(sim.copies[b, w, RECEIVED_INTER, g])
            )
        kernel, intra, inter = _root8(kernel), _root8(intra), _root8(inter)
        for g in range(n_gpus):
            if kernel > 0.0:
                pressure[g, KERNEL] += share * _slope(sim.kernel_us[b, w, g], kernel)
            if topology.transport == ALLGATHER:
                continue
            if intra > 0.0:
                pressure[g, INTRA] += share * intra_us * _slope(sim.copies[b, w, RECEIVED_INTRA, g], intra)
                sending_intra += share * intra_us * _slope(sim.copies[b, w, SENT_INTRA, g], intra) / n_gpus
            if inter > 0.0:
                pressure[g, INTER] += share * inter_us * _slope(sim.copies[b, w, RECEIVED_INTER, g], inter)
                sending_inter += share * inter_us * _slope(sim.copies[b, w, SENT_INTER, g], inter) / n_gpus
    for first in range(0, n_gpus, per_node):
        mean = 0.0
        for g in range(first, first + per_node):
            mean += pressure[g, INTER] / per_node
        for g in range(first, first + per_node):
            pressure[g, INTER] = mean + sending_inter
            pressure[g, INTRA] += sending_intra


@inlined
def _add_replica(guide, b, x, g, weight, topology):
    near, beside, pairs = guide.near[b, topology.node_of[g]], guide.beside[b, g], guide.pairs[b, x]
    for e in range(pairs.shape[0]):
        near[e] += weight * pairs[e]
        beside[e] += weight * pairs[e]


@device
def add_expert(sim, b, guide, x, sign, topology):
    """Take all replicas of ``x`` into the tables (sign 1) or out of them (−1). They share its uses."""
    n = int(sim.n_replicas[b, x])
    for i in range(n):
        _add_replica(guide, b, x, int(sim.replicas[b, x, i]), np.float32(sign / n), topology)


@device
def prepare_guide(sim, b, guide, experts, topology, costs):
    """Fill the tables for the current placement."""
    n_passes, n_tokens, top_k = sim.rows.shape[1], sim.rows.shape[2], experts.shape[2]
    n_sample = guide.sample.shape[1]
    for i in range(n_sample):
        at = i * n_passes * n_tokens // n_sample
        row = sim.rows[b, at // n_tokens, at % n_tokens]
        for k in range(top_k):
            guide.sample[b, i, k] = experts[b, row, k]
    if guide.choices < 2:
        return
    pairs, share = guide.pairs[b], np.float32(1.0 / n_passes)
    for w in range(n_passes):
        for t in range(n_tokens):
            row = sim.rows[b, w, t]
            for i in range(top_k):
                e = experts[b, row, i]
                if e < 0:
                    continue
                for j in range(i):
                    x = experts[b, row, j]
                    if x >= 0:
                        pairs[e, x] += share
                        pairs[x, e] += share
    for x in range(pairs.shape[0]):
        add_expert(sim, b, guide, x, 1.0, topology)
    watch(sim, b, guide, topology, costs)


# The estimate


@inlined
def _visits(load, common):
    """Tokens of an expert that come to a place because of it, if they use other experts there ``common`` times."""
    if load <= 0.0:
        return 0.0
    x = common / load
    return load / (1.0 + x + 0.5 * x * x)


@inlined
def estimate(sim, b, guide, e, g, h, v, topology, costs):
    """The change of the objective in µs if a replica of ``e`` moves from g to h, and one of ``v`` (or none) back."""
    pressure, near, beside = guide.pressure[b], guide.near[b], guide.beside[b]
    m, n = topology.node_of[g], topology.node_of[h]
    le, lv, common = guide.slot_pairs[b, g, slot_of(sim, b, e, g)], 0.0, 0.0
    if v >= 0:
        lv, common = guide.slot_pairs[b, h, slot_of(sim, b, v, h)], guide.pairs[b, e, v]
    moved_us = (le - lv) * costs.pair_us
    # To the second order: the slope of the 8-norm grows by 7 / kernel time.
    steep = 3.5 * moved_us
    total = moved_us * pressure[h, KERNEL] * (1.0 + steep / max(guide.kernel_us[b, h], 1e-9))
    total -= moved_us * pressure[g, KERNEL] * (1.0 - steep / max(guide.kernel_us[b, g], 1e-9))
    if topology.transport == ALLGATHER:
        return total
    if m != n:
        total += _visits(le, near[n, e] - common) * pressure[h, INTER] - _visits(le, near[m, e]) * pressure[g, INTER]
    total += _visits(le, beside[h, e] - common) * pressure[h, INTRA] - _visits(le, beside[g, e]) * pressure[g, INTRA]
    if v >= 0:
        if m != n:
            total += _visits(lv, near[m, v] - common) * pressure[g, INTER]
            total -= _visits(lv, near[n, v]) * pressure[h, INTER]
        total += _visits(lv, beside[g, v] - common) * pressure[g, INTRA]
        total -= _visits(lv, beside[h, v]) * pressure[h, INTRA]
    return total


@device
def propose_best(sim, b, key, shares, guide, topology, costs):
    """A random change of a spare replica, or the best of several random moves by the estimate; None is e = −1."""
    best, least, kind = guide.change[b], np.inf, draw(key, b)
    if guide.choices < 2 or kind < shares[SPARE]:
        return propose(sim, b, key, guide, kind, shares, topology.gpus_per_node)
    best[0] = -1
    for _ in range(guide.choices):
        e, e_from, e_to, v, v_from, v_to = propose(sim, b, key, guide, kind, shares, topology.gpus_per_node)
        kind = shares[SPARE] + draw(key, b) * (1.0 - shares[SPARE])
        if e < 0:
            continue
        told = estimate(sim, b, guide, e, e_from, e_to, v, topology, costs)
        if told < least:
            least = told
            best[0], best[1], best[2], best[3], best[4], best[5] = e, e_from, e_to, v, v_from, v_to
    return best[0], best[1], best[2], best[3], best[4], best[5]
