"""From counts to µs: dispatch, expert kernels, combine and migration.

``norm_log2`` = −1 gives the true time, set by the busiest GPU. d ≥ 0 replaces that maximum by the smooth 2^d-norm over GPUs,
which suits planners.
"""

from __future__ import annotations

import math

from clustergym.moe_placement.kernels.compile import device, index
from clustergym.moe_placement.kernels.state import (
    FROM_OTHER_NODE,
    FROM_OWN_NODE,
    MODE_PER_EXPERT,
    MODE_STAY,
    RECEIVED_INTER,
    RECEIVED_INTRA,
    SENT_INTER,
    SENT_INTRA,
)


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


@device
def count_copies(copies, visits, node_visits, network):
    """Write to ``copies`` (4, G) what each GPU sends and receives, inside its node and between nodes.

    A copy goes once to each other node, to the GPU of the same rank there, which forwards it to its neighbours.
    """
    n_gpus, per_node = visits.shape[0], network.gpus_per_node
    for i in range(copies.shape[0]):
        for g in range(n_gpus):
            copies[i, g] = 0
    for home in range(n_gpus):
        here = network.node_of[home]
        if network.mode == MODE_PER_EXPERT:
            for g in range(n_gpus):
                if g != home:
                    near = network.node_of[g] == here
                    copies[SENT_INTRA if near else SENT_INTER, home] += visits[home, g]
                    copies[RECEIVED_INTRA if near else RECEIVED_INTER, g] += visits[home, g]
            continue
        g = 0
        for node in range(node_visits.shape[1]):
            relay = home + (node - here) * per_node
            for _ in range(per_node):
                count = visits[home, index(g)] * (g != relay)
                copies[SENT_INTRA, index(relay)] += count
                copies[RECEIVED_INTRA, index(g)] += count
                g += 1
            count = node_visits[home, node] * (node != here)
            copies[SENT_INTER, home] += count
            copies[RECEIVED_INTER, index(relay)] += count


@device
def _copies_time(copies, intra_us, inter_us, norm_log2):
    """µs that the busiest GPU needs for its copies: inside the node, plus between nodes."""
    intra, inter = 0.0, 0.0
    for g in range(copies.shape[1]):
        intra = _accumulate(intra, copies[SENT_INTRA, g] * intra_us, norm_log2)
        intra = _accumulate(intra, copies[RECEIVED_INTRA, g] * intra_us, norm_log2)
        inter = _accumulate(inter, copies[SENT_INTER, g] * inter_us, norm_log2)
        inter = _accumulate(inter, copies[RECEIVED_INTER, g] * inter_us, norm_log2)
    return _root(intra, norm_log2) + _root(inter, norm_log2)


@device
def _exchange_time(sim, b, visits, node_visits, intra_us, inter_us, network, norm_log2):
    """µs that the busiest GPU needs to send or receive its copies."""
    count_copies(sim.copies[b], visits, node_visits, network)
    return _copies_time(sim.copies[b], intra_us, inter_us, norm_log2)


@device
def link_copies(visits, node_visits, network, links):
    """Write to ``links`` (G, G) the copies dispatched from row to column."""
    n_gpus, node_of, per_node = visits.shape[0], network.node_of, network.gpus_per_node
    for g in range(n_gpus):
        for h in range(n_gpus):
            links[g, h] = 0
    for home in range(n_gpus):
        for g in range(n_gpus):
            relay = home + (node_of[g] - node_of[home]) * per_node
            sender = home if network.mode == MODE_PER_EXPERT else relay
            if g != sender:
                links[sender, g] += visits[home, g]
        if network.mode != MODE_PER_EXPERT:
            for node in range(node_visits.shape[1]):
                if node != node_of[home]:
                    links[home, home + (node - node_of[home]) * per_node] += node_visits[home, node]


@device
def _compute_time(sim, b, w, costs, norm_log2, scale):
    """µs of the slowest GPU's expert kernel."""
    longest = 0.0
    for g in range(sim.slots.shape[1]):
        pairs, active = 0, 0
        for s in range(sim.slots.shape[2]):
            e = sim.slots[b, g, s]
            if e >= 0 and sim.pairs[b, w, e, g] > 0:
                pairs += sim.pairs[b, w, e, g]
                active += 1
        longest = _accumulate(longest, costs.expert_us * active + costs.pair_us * pairs * scale, norm_log2)
    return costs.kernel_us + _root(longest, norm_log2)


@device
def layer_time(sim, b, w, costs, network, norm_log2, scale):
    """Dispatch + compute + combine of window ``w``, µs.

    ``scale`` weighs each token: 1/n if the window is n windows joined.
    """
    visits, node_visits = sim.visits[b, w], sim.node_visits[b, w]
    time = costs.dispatch_us + costs.combine_us + _compute_time(sim, b, w, costs, norm_log2, scale)
    intra_us, inter_us = costs.dispatch_intra_us * scale, costs.dispatch_inter_us * scale
    if network.mode == MODE_STAY:
        time += _exchange_time(sim, b, visits, node_visits, intra_us, inter_us, network, norm_log2)
        visits, node_visits = sim.return_visits[b, w], sim.return_node_visits[b, w]
        intra_us, inter_us = costs.combine_intra_us * scale, costs.combine_inter_us * scale
        return time + _exchange_time(sim, b, visits, node_visits, intra_us, inter_us, network, norm_log2)
    # The combine is the dispatch in reverse: one count serves both.
    intra_us += costs.combine_intra_us * scale
    inter_us += costs.combine_inter_us * scale
    return time + _exchange_time(sim, b, visits, node_visits, intra_us, inter_us, network, norm_log2)


@device
def smooth_and_true_time(sim, b, w, costs, network, norm_log2):
    """:func:`layer_time` in the smooth norm and the true one, from one count of the copies."""
    if network.mode == MODE_STAY:
        smooth = layer_time(sim, b, w, costs, network, norm_log2, 1.0)
        return smooth, layer_time(sim, b, w, costs, network, -1, 1.0)
    fixed = costs.dispatch_us + costs.combine_us
    intra_us = costs.dispatch_intra_us + costs.combine_intra_us
    inter_us = costs.dispatch_inter_us + costs.combine_inter_us
    copies = sim.copies[b]
    count_copies(copies, sim.visits[b, w], sim.node_visits[b, w], network)
    smooth = (
        fixed + _compute_time(sim, b, w, costs, norm_log2, 1.0) + _copies_time(copies, intra_us, inter_us, norm_log2)
    )
    return smooth, fixed + _compute_time(sim, b, w, costs, -1, 1.0) + _copies_time(copies, intra_us, inter_us, -1)


@device
def layer_times(sim, b, w, costs, network):
    """True (dispatch, compute, combine, migration) µs of window ``w``, for reports."""
    visits, node_visits = sim.visits[b, w], sim.node_visits[b, w]
    intra_us, inter_us = costs.dispatch_intra_us, costs.dispatch_inter_us
    dispatch = _exchange_time(sim, b, visits, node_visits, intra_us, inter_us, network, -1)
    if network.mode == MODE_STAY:
        visits, node_visits = sim.return_visits[b, w], sim.return_node_visits[b, w]
    intra_us, inter_us = costs.combine_intra_us, costs.combine_inter_us
    combine = _exchange_time(sim, b, visits, node_visits, intra_us, inter_us, network, -1)
    compute = _compute_time(sim, b, w, costs, -1, 1.0)
    return costs.dispatch_us + dispatch, compute, costs.combine_us + combine, migration_time(sim, b, costs)


@device
def migration_time(sim, b, costs):
    """µs per pass until the GPU that receives most experts has them, spread over the passes of a window."""
    longest = 0.0
    for g in range(sim.slots.shape[1]):
        intra_us = sim.received[b, g, FROM_OWN_NODE] * costs.receive_intra_us
        longest = max(longest, intra_us + sim.received[b, g, FROM_OTHER_NODE] * costs.receive_inter_us)
    return longest
