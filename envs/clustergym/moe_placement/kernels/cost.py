"""From counts to µs: dispatch, expert kernels, combine and migration.

``norm_log2`` = −1 gives the true time, set by the busiest GPU. d ≥ 0 replaces that maximum by the smooth 2^d-norm over
GPUs, which suits planners.
"""

from __future__ import annotations

import math

import numpy as np

from clustergym.common.compiling import device, index, inlined
from clustergym.moe_placement.kernels.state import (
    FROM_OTHER_NODE,
    FROM_OWN_NODE,
    RECEIVED_INTER,
    RECEIVED_INTRA,
    SENT_INTER,
    SENT_INTRA,
)
from clustergym.moe_placement.profiles import ALLGATHER, PER_EXPERT


@device
def _accumulate(total, value, norm_log2):
    """Running maximum (norm_log2 < 0) or sum of 2^norm_log2-th powers."""
    if norm_log2 < 0:
        return max(total, value)
    for _ in range(norm_log2):
        value = value * value
    return total + value


@device
def _root(total, norm_log2):
    for _ in range(norm_log2):
        total = math.sqrt(total)
    return total


@inlined
def gpu_kernel_time(state, b, w, g, topology, costs):
    """µs of the GPU's expert kernel without its start."""
    # Whole numbers first: their sum does not depend on the order of the slots.
    active, blocks, pairs, tokens = 0, 0, 0, 0
    for s in range(state.slots.shape[2]):
        if state.slots[b, g, s] >= 0:
            here = int(state.slot_pairs[b, w, g, s])
            active += here > 0
            pairs += here
            if costs.block_us > 0.0:
                blocks += (here + costs.block_tokens - 1) // costs.block_tokens
    if costs.token_us > 0.0:
        if topology.transport == ALLGATHER:
            tokens = state.rows.shape[2]
        else:
            for home in range(state.slots.shape[1]):
                tokens += state.visits[b, w, home, g]
    return costs.token_us * tokens + costs.expert_us * active + costs.block_us * blocks + costs.pair_us * pairs


@inlined
def _exchange_time(copies, intra_us, inter_us, norm_log2):
    """µs that the busiest GPU needs for its copies: inside the node, plus between nodes."""
    if norm_log2 < 0:
        # The largest count has the largest product, and counts are compared faster.
        most_intra, most_inter = copies[SENT_INTRA, 0], copies[SENT_INTER, 0]
        for g in range(copies.shape[1]):
            most_intra = max(most_intra, max(copies[SENT_INTRA, g], copies[RECEIVED_INTRA, g]))
            most_inter = max(most_inter, max(copies[SENT_INTER, g], copies[RECEIVED_INTER, g]))
        return most_intra * intra_us + most_inter * inter_us
    intra, inter = 0.0, 0.0
    for g in range(copies.shape[1]):
        intra = _accumulate(intra, copies[SENT_INTRA, g] * intra_us, norm_log2)
        intra = _accumulate(intra, copies[RECEIVED_INTRA, g] * intra_us, norm_log2)
        inter = _accumulate(inter, copies[SENT_INTER, g] * inter_us, norm_log2)
        inter = _accumulate(inter, copies[RECEIVED_INTER, g] * inter_us, norm_log2)
    return _root(intra, norm_log2) + _root(inter, norm_log2)


@inlined
def compute_time(state, b, w, costs, norm_log2):
    """µs of the slowest expert kernel."""
    longest = 0.0
    for g in range(state.slots.shape[1]):
        longest = _accumulate(longest, state.kernel_us[b, w, g], norm_log2)
    time = costs.kernel_us + _root(longest, norm_log2)
    # The smooth norm ignores the floor: a search should go on balancing below it.
    return max(costs.kernel_floor_us, time) if norm_log2 < 0 else time


@inlined
def pass_times(state, b, w, topology, costs, norm_log2):
    """(dispatch, compute, combine) of a pass, µs."""
    dispatch, combine = costs.dispatch_us, costs.combine_us
    if topology.transport != ALLGATHER:
        # What is combined is what was dispatched, the other way round.
        copies = state.copies[b, w]
        dispatch += _exchange_time(copies, costs.dispatch_intra_us, costs.dispatch_inter_us, norm_log2)
        combine += _exchange_time(copies, costs.combine_intra_us, costs.combine_inter_us, norm_log2)
    return dispatch, compute_time(state, b, w, costs, norm_log2), combine


@inlined
def pass_time(state, b, w, topology, costs, norm_log2):
    """Dispatch + compute + combine of a pass, µs: the sum of :func:`pass_times`, with one look at the copies."""
    time = costs.dispatch_us + costs.combine_us + compute_time(state, b, w, costs, norm_log2)
    if topology.transport != ALLGATHER:
        intra_us = costs.dispatch_intra_us + costs.combine_intra_us
        inter_us = costs.dispatch_inter_us + costs.combine_inter_us
        time += _exchange_time(state.copies[b, w], intra_us, inter_us, norm_log2)
    return time


@inlined
def mean_pass_time(state, b, first, last, topology, costs, norm_log2):
    """Mean time of the passes ``first`` … ``last``−1, µs. Each is set by its own slowest GPU."""
    total = 0.0
    for w in range(first, last):
        total += pass_time(state, b, w, topology, costs, norm_log2)
    return total / (last - first)


@inlined
def migration_time(state, b, costs):
    """µs per pass until the GPU that receives most experts has them, spread over the passes of the interval."""
    longest = 0.0
    for g in range(state.slots.shape[1]):
        intra = state.received[b, g, FROM_OWN_NODE] * costs.receive_intra_us
        longest = max(longest, intra + state.received[b, g, FROM_OTHER_NODE] * costs.receive_inter_us)
    return longest


@inlined
def with_migration(serve_us, migration_us, before_us, costs):
    """µs per pass of an interval with a migration at its start.

    Blocking: the engine stops until all weights have arrived. In the background: the placement before, which takes
    ``before_us``, serves until then, and a share of the transfer time slows the passes down.
    """
    if costs.background_share < 0.0:
        return serve_us + migration_us
    waiting = min(1.0, migration_us / before_us)
    return waiting * before_us + (1.0 - waiting) * serve_us + costs.background_share * migration_us


@inlined
def add_links(state, b, w, topology, links):
    """Add to ``links`` (G, G) the copies dispatched from row to column in a pass."""
    n_gpus, node_of, per_node = state.slots.shape[1], topology.node_of, topology.gpus_per_node
    if topology.transport == ALLGATHER:
        for home in range(n_gpus):
            for g in range(n_gpus):
                if g != home:
                    links[home, g] += state.rank_start[b, w, home + 1] - state.rank_start[b, w, home]
        return
    if topology.transport == PER_EXPERT:
        visits = state.visits[b, w]
        for i in range(n_gpus):
            home = index(i)
            own = links[home, home]
            for g in range(n_gpus):
                # Counts are exact in float32: no conversion to float64 and back.
                links[home, index(g)] += np.float32(visits[home, index(g)])
            links[home, home] = own
        return
    for home in range(n_gpus):
        for g in range(n_gpus):
            relay = home + (node_of[g] - node_of[home]) * per_node
            if g != relay:
                links[relay, g] += state.visits[b, w, home, g]
        for node in range(state.node_visits.shape[3]):
            if node != node_of[home]:
                links[home, home + (node - node_of[home]) * per_node] += state.node_visits[b, w, home, node]


@device
def exchange_time_on_links(links, slower, node_of, intra_us, inter_us):
    """µs of an exchange with ``links`` (G, G) copies from row to column, where a link takes ``slower`` (G, G) times as
    long per copy as its kind does. As with equal links, the busiest GPU inside a node and the busiest one between nodes
    count, sending and receiving apart.
    """
    near, far = 0.0, 0.0
    for g in range(links.shape[0]):
        sent_near, sent_far, received_near, received_far = 0.0, 0.0, 0.0, 0.0
        for other in range(links.shape[0]):
            sent, received = links[g, other] * slower[g, other], links[other, g] * slower[other, g]
            if node_of[g] == node_of[other]:
                sent_near += sent
                received_near += received
            else:
                sent_far += sent
                received_far += received
        near = max(near, max(sent_near, received_near))
        far = max(far, max(sent_far, received_far))
    return near * intra_us + far * inter_us
