"""Observations and masks of one environment. ``MoEPlacementEnv`` documents every array and column."""

from __future__ import annotations

import numpy as np

from clustergym.common.compiling import device, index, inlined
from clustergym.moe_placement.kernels.cost import add_links, migration_time
from clustergym.moe_placement.kernels.operations import slot_pairs, victim_on
from clustergym.moe_placement.kernels.replicas import holds, slot_of
from clustergym.moe_placement.kernels.state import (
    CLOCK_INTERVAL,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    FROM_OTHER_NODE,
    FROM_OWN_NODE,
    RECEIVED_INTER,
    RECEIVED_INTRA,
    SENT_INTER,
    SENT_INTRA,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
)

# Columns of the observation ``gpus``. The first three are the kind of the node, one-hot. The next nine are also columns
# of ``experts``, where they are about the GPU whose replica PLACE moves.
GPU_FEATURES = (
    "is_place", "is_add", "is_delete", "load", "compute_time", "free_slots", "sent_intra", "received_intra",
    "sent_inter", "received_inter", "node_load", "is_slowest", "active_experts", "hot_coactivation", "to_fetch",
    "coldest_load", "bandwidth_ratio",
)  # fmt: skip
GPU_IS_PLACE, GPU_IS_ADD, GPU_IS_DELETE = range(3)
GPU_LOAD, GPU_COMPUTE_TIME, GPU_FREE_SLOTS = range(3, 6)
GPU_SENT_INTRA, GPU_RECEIVED_INTRA, GPU_SENT_INTER, GPU_RECEIVED_INTER = range(6, 10)
GPU_NODE_LOAD, GPU_IS_SLOWEST, GPU_ACTIVE_EXPERTS, GPU_HOT_COACTIVATION = range(10, 14)
GPU_TO_FETCH, GPU_COLDEST_LOAD, GPU_BANDWIDTH_RATIO = range(14, 17)
N_GPU_FEATURES, N_KINDS = len(GPU_FEATURES), 3
FIRST_OF_SOURCE, LAST_OF_SOURCE = GPU_LOAD, GPU_IS_SLOWEST

# Columns of the observation ``experts``. The first three stay the same while the agents work on a layer.
EXPERT_FEATURES = (
    "load", "load_average", "load_change", "replicas", "top_share", "to_fetch", "local_coactivation", "on_slowest",
    *(f"source_{name}" for name in GPU_FEATURES[FIRST_OF_SOURCE : LAST_OF_SOURCE + 1]),
)  # fmt: skip
EXPERT_LOAD, EXPERT_LOAD_AVERAGE, EXPERT_LOAD_CHANGE = range(3)
EXPERT_REPLICAS, EXPERT_TOP_SHARE, EXPERT_TO_FETCH, EXPERT_LOCAL_COACTIVATION, EXPERT_ON_SLOWEST = range(3, 8)
EXPERT_SOURCE = 8
N_EXPERT_FEATURES, N_LOAD_FEATURES = len(EXPERT_FEATURES), 3

# Columns of the observation ``pairs``.
PAIR_FEATURES = (
    "holds", "coactivation", "same_node", "target_load", "source_load", "victim_coactivation", "place_relief",
    "replica_relief",
)  # fmt: skip
PAIR_HOLDS, PAIR_COACTIVATION, PAIR_SAME_NODE, PAIR_TARGET_LOAD = range(4)
PAIR_SOURCE_LOAD, PAIR_VICTIM_COACTIVATION, PAIR_PLACE, PAIR_REPLICA = range(4, 8)
N_PAIR_FEATURES = len(PAIR_FEATURES)
# Columns of EpisodeState.exchange.
VICTIM_LOAD, VICTIM_COACTIVATION = range(2)

# Entries of the observation ``context``.
CONTEXT_FEATURES = ("layer", "operation", "interval", "time", "slowest_kernel", "migration")
CONTEXT_LAYER, CONTEXT_OPERATION, CONTEXT_INTERVAL, CONTEXT_TIME, CONTEXT_SLOWEST_KERNEL, CONTEXT_MIGRATION = range(6)
N_CONTEXT = len(CONTEXT_FEATURES)
# Ratios of times without a natural bound are cut here. Agents that play at all do not come near it.
MOST_RATIO = 10.0

# Experts of highest load that ``hot_coactivation`` is about.
HOT_EXPERTS = 8
# Tokens from which co-activation is estimated.
COACTIVATION_TOKENS = 1024
# In float32: a Python float would convert to float64 and back.
ZERO, ONE = np.float32(0), np.float32(1)


@device
def observe_layer(episode, sim, obs, b, trace, rules, layer):
    """Write what stays the same while the agents work on a layer: co-activation and loads."""
    n_experts, n_passes, n_tokens = sim.replicas.shape[1], rules.n_passes, sim.rows.shape[2]
    together, used, top_k = obs.expert_graph[b], episode.used[b], trace.experts.shape[2]
    # A sample estimates these probabilities well enough.
    stride = (n_passes * n_tokens + COACTIVATION_TOKENS - 1) // COACTIVATION_TOKENS
    experts, names = trace.experts[layer], episode.names[b]
    for i in range(n_experts):
        used[i] = ZERO
        for j in range(n_experts):
            together[i, j] = ZERO
    w, t = 0, 0
    while w < n_passes:
        row = index(sim.rows[b, w, t])
        for k in range(top_k):
            i = experts[row, index(k)]
            if i < 0:
                continue
            i = names[index(i)]
            used[index(i)] += ONE
            for m in range(k):
                j = experts[row, index(m)]
                if j >= 0:
                    together[index(i), index(names[index(j)])] += ONE
        # A division would take longer.
        t += stride
        while t >= n_tokens:
            t -= n_tokens
            w += 1
    for i in range(n_experts):
        used[i] = max(ONE, used[i])
        for j in range(i):
            both = together[index(i), index(j)] + together[index(j), index(i)]
            together[index(i), index(j)] = both
            together[index(j), index(i)] = both
    for i in range(n_experts):
        for j in range(n_experts):
            together[index(i), index(j)] /= used[i]
    _write_load_features(episode, sim, b, layer, n_passes)
    _write_hot_coactivation(episode, obs, b)
    for g in range(sim.slots.shape[1]):
        update_group_coactivation(episode, sim, obs, b, g)


@inlined
def expert_load(sim, b, e, n_passes):
    """Tokens that use the expert in the observed passes."""
    total = 0
    for w in range(n_passes):
        total += sim.load[b, w, e]
    return total


@device
def _write_load_features(episode, sim, b, layer, n_passes):
    """Write load, moving average and change of each expert, and advance the moving average."""
    n_experts, total = sim.replicas.shape[1], 0
    for e in range(n_experts):
        total += expert_load(sim, b, e, n_passes)
    total = max(1, total)
    features = episode.load_features[b]
    for e in range(n_experts):
        share = expert_load(sim, b, e, n_passes) / total
        known = episode.load_average[b, layer, e]
        change = 0.0 if known < 0 else (share - known) * n_experts
        episode.load_average[b, layer, e] = share if known < 0 else 0.5 * known + 0.5 * share
        features[e, EXPERT_LOAD] = share * n_experts
        features[e, EXPERT_LOAD_AVERAGE] = episode.load_average[b, layer, e] * n_experts
        features[e, EXPERT_LOAD_CHANGE] = change


@device
def _write_hot_coactivation(episode, obs, b):
    """Write how often each expert is used together with the experts of highest load."""
    features, taken, hot = episode.load_features[b], episode.int_scratch[b, 0], episode.hot_coactivation[b]
    n_experts = hot.shape[0]
    for e in range(n_experts):
        hot[e] = 0.0
        taken[e] = 0
    for _ in range(min(HOT_EXPERTS, n_experts)):
        best = -1
        for e in range(n_experts):
            if taken[e] == 0 and (best < 0 or features[e, EXPERT_LOAD] > features[best, EXPERT_LOAD]):
                best = e
        taken[best] = 1
        for e in range(n_experts):
            hot[e] += obs.expert_graph[b, best, e] / HOT_EXPERTS


@inlined
def update_group_coactivation(episode, sim, obs, b, g):
    """Sum the co-activation of each expert with the experts on a GPU."""
    total, slots, used = episode.group_coactivation[b, g], sim.slots[b, g], episode.used[b]
    for e in range(total.shape[0]):
        total[index(e)] = ZERO
    for s in range(slots.shape[0]):
        if slots[s] >= 0:
            # The row of the GPU's expert lies in one piece. Times its uses, it counts tokens that use both.
            together, uses = obs.expert_graph[b, index(slots[s])], used[index(slots[s])]
            for e in range(total.shape[0]):
                total[index(e)] += together[index(e)] * uses
    for e in range(total.shape[0]):
        total[index(e)] /= used[index(e)]


@device
def observe_step(episode, sim, obs, b, rules):
    """Write what an operation changes: load and traffic of the GPUs, experts, pairs, mask and context."""
    time = episode.times_us[b, TIME_OBSERVED]
    slowest_gpu, slowest, mean = _observe_gpus(episode, sim, obs, b, rules, time)
    _write_exchanges(episode, sim, obs, b, mean, rules.n_passes)
    _observe_experts(episode, sim, obs, b, rules, slowest_gpu, mean)
    context = obs.context[b]
    context[CONTEXT_LAYER] = episode.clock[b, CLOCK_LAYER] / episode.slots.shape[1]
    context[CONTEXT_OPERATION] = episode.clock[b, CLOCK_OPERATION] / rules.ops_per_layer
    context[CONTEXT_INTERVAL] = episode.clock[b, CLOCK_INTERVAL] / rules.n_intervals
    context[CONTEXT_TIME] = min(MOST_RATIO, time / episode.times_us[b, TIME_OBSERVED_START])
    context[CONTEXT_SLOWEST_KERNEL] = slowest / time
    context[CONTEXT_MIGRATION] = min(MOST_RATIO, migration_time(sim, b, rules.costs) / time)


@device
def _observe_gpus(episode, sim, obs, b, rules, time):
    """Write ``gpus`` and ``gpu_graph``, and in scratch what the other functions need.

    Returns the GPU with the slowest expert kernel, the mean µs of that kernel, and the mean pairs of a GPU.
    """
    n_experts, n_gpus, n_slots, n_passes = (
        sim.replicas.shape[1], sim.slots.shape[1], sim.slots.shape[2], rules.n_passes,
    )  # fmt: skip
    topology, costs, per_node = rules.topology, rules.costs, rules.topology.gpus_per_node
    gpus, load, traffic, coldest = obs.gpus[b], episode.gpu_load[b], obs.gpu_graph[b], episode.coldest[b]
    slots, replicas, n_replicas = sim.slots[b], sim.replicas[b], sim.n_replicas[b]
    in_common, accepts = episode.in_common[b], episode.accepts[b]
    # Scratch: tokens of each expert, most of them on one GPU.
    of_expert, most = episode.int_scratch[b, 0], episode.int_scratch[b, 1]
    # Times of one pass, relative to the layer's.
    intra, inter = costs.dispatch_intra_us / time / n_passes, costs.dispatch_inter_us / time / n_passes
    total = 0
    for e in range(n_experts):
        of_expert[index(e)] = 0
        most[index(e)] = 0
    for w in range(n_passes):
        for e in range(n_experts):
            of_expert[index(e)] += sim.load[b, w, index(e)]
    for e in range(n_experts):
        total += of_expert[index(e)]
    mean = max(1, total) / n_gpus
    for g in range(n_gpus):
        for h in range(n_gpus):
            in_common[g, h] = 0
            traffic[g, h] = 0.0
    for w in range(n_passes):
        add_links(sim, b, w, topology, traffic)
    busiest, slowest = 0, -1.0
    for g in range(n_gpus):
        done, active, held, hot, compute, cold, least = 0, 0, 0, 0.0, 0.0, -1, 0
        for s in range(n_slots):
            if slots[g, s] < 0:
                continue
            e, here = index(slots[g, s]), 0
            held += 1
            hot += episode.hot_coactivation[b, e]
            for i in range(n_replicas[e]):
                in_common[index(replicas[e, index(i)]), index(g)] += 1
            for w in range(n_passes):
                pairs = sim.slot_pairs[b, w, g, s]
                here += pairs
                active += pairs > 0
            done += here
            most[e] = max(most[e], here)
            if cold < 0 or here < least or (here == least and slots[g, s] < cold):
                cold, least = int(slots[g, s]), here
        for w in range(n_passes):
            compute += sim.kernel_us[b, w, g] / n_passes
        if compute > slowest:
            busiest, slowest = g, compute
        load[g] = done / mean
        coldest[g] = cold
        episode.gpu_pairs[b, g] = done
        accepts[n_gpus, g] = held < n_slots
        gpus[g, GPU_LOAD] = load[g]
        gpus[g, GPU_COMPUTE_TIME] = compute / time
        gpus[g, GPU_FREE_SLOTS] = (n_slots - held) / n_slots
        for f in range(GPU_SENT_INTRA, GPU_RECEIVED_INTER + 1):
            gpus[g, f] = 0.0
        for w in range(n_passes):
            copies = sim.copies[b, w]
            gpus[g, GPU_SENT_INTRA] += copies[SENT_INTRA, g] * intra
            gpus[g, GPU_RECEIVED_INTRA] += copies[RECEIVED_INTRA, g] * intra
            gpus[g, GPU_SENT_INTER] += copies[SENT_INTER, g] * inter
            gpus[g, GPU_RECEIVED_INTER] += copies[RECEIVED_INTER, g] * inter
        gpus[g, GPU_ACTIVE_EXPERTS] = active / (n_slots * n_passes)
        gpus[g, GPU_HOT_COACTIVATION] = hot
        gpus[g, GPU_TO_FETCH] = (sim.received[b, g, FROM_OWN_NODE] + sim.received[b, g, FROM_OTHER_NODE]) / n_slots
        gpus[g, GPU_COLDEST_LOAD] = 0.0 if held < n_slots else least / mean
        gpus[g, GPU_BANDWIDTH_RATIO] = costs.dispatch_intra_us / costs.dispatch_inter_us
    # A full GPU can swap with the source if it holds an expert that the source does not.
    for g in range(n_gpus):
        for h in range(n_gpus):
            accepts[g, h] = accepts[n_gpus, h] | (in_common[g, h] < in_common[h, h])
            traffic[g, h] *= intra if topology.node_of[h] == topology.node_of[g] else inter
    for g in range(n_gpus):
        first = topology.node_of[g] * per_node
        node_load = 0.0
        for h in range(first, first + per_node):
            node_load += load[h]
        gpus[g, GPU_IS_SLOWEST] = 1.0 if g == busiest else 0.0
        gpus[g, GPU_NODE_LOAD] = node_load / per_node
        for kind in range(N_KINDS):
            row = kind * n_gpus + g
            for f in range(N_KINDS):
                gpus[row, f] = 1.0 if f == kind else 0.0
            if kind > 0:
                for f in range(N_KINDS, N_GPU_FEATURES):
                    gpus[row, f] = gpus[g, f]
    return busiest, slowest, mean


@device
def _write_exchanges(episode, sim, obs, b, mean, n_passes):
    """Write which load a full GPU gives back for a replica from another, and how much closer to its partners it comes.

    Row: the GPU that a replica leaves. Column: the one that it goes to.
    """
    n_gpus, exchange, together = sim.slots.shape[1], episode.exchange[b], episode.group_coactivation[b]
    for g in range(n_gpus):
        full = episode.accepts[b, n_gpus, g] == 0
        for source in range(n_gpus):
            exchange[source, g, VICTIM_LOAD] = ZERO
            exchange[source, g, VICTIM_COACTIVATION] = ZERO
            if not full or source == g:
                continue
            v = int(episode.coldest[b, g])
            if holds(sim, b, v, source):
                v = victim_on(sim, b, g, -1, source, n_passes)
            if v >= 0:
                given = slot_pairs(sim, b, g, slot_of(sim, b, v, g), n_passes)
                exchange[source, g, VICTIM_LOAD] = given / mean
                exchange[source, g, VICTIM_COACTIVATION] = together[source, v] - together[g, v]


@device
def _observe_experts(episode, sim, obs, b, rules, slowest_gpu, mean):
    """Write ``experts``, ``pairs`` and ``action_mask`` after :func:`_observe_gpus` and :func:`_write_exchanges`."""
    n_experts, n_gpus, n_passes = sim.replicas.shape[1], sim.slots.shape[1], rules.n_passes
    replicas, load, node_of = sim.replicas[b], episode.gpu_load[b], rules.topology.node_of
    accepts, has_room = episode.accepts[b], episode.accepts[b, n_gpus]
    exchange, together = episode.exchange[b], episode.group_coactivation[b]
    total, most = episode.int_scratch[b, 0], episode.int_scratch[b, 1]  # see _observe_gpus
    top = load[0]
    for g in range(n_gpus):
        top = max(top, load[g])
    for i in range(n_experts):
        e, n = index(i), sim.n_replicas[b, i]
        source, most_done, moved, near, slowest = index(replicas[e, 0]), -1, 0, ZERO, ZERO
        for r in range(n):
            g = index(replicas[e, index(r)])
            moved += sim.held_before[b, e, g] == 0
            near += together[g, e]
            if g == slowest_gpu:
                slowest = ONE
            if episode.gpu_pairs[b, g] > most_done:
                source, most_done = g, episode.gpu_pairs[b, g]
        features = obs.experts[b, e]
        for f in range(N_LOAD_FEATURES):
            features[f] = episode.load_features[b, e, f]
        features[EXPERT_REPLICAS] = n / n_gpus
        features[EXPERT_TOP_SHARE] = most[e] / max(1, total[e])
        features[EXPERT_TO_FETCH] = moved
        features[EXPERT_LOCAL_COACTIVATION] = near / n
        features[EXPERT_ON_SLOWEST] = slowest
        for f in range(EXPERT_SOURCE, N_EXPERT_FEATURES):
            features[f] = obs.gpus[b, source, f - EXPERT_SOURCE + FIRST_OF_SOURCE]

        # What PLACE and ADD would do to the loads. A new replica takes an equal share of the expert's tokens.
        taken = np.float32(slot_pairs(sim, b, source, slot_of(sim, b, e, source), n_passes) / mean)
        share = np.float32(total[e] / (mean * (n + 1)))
        before, away, node = load[source], together[source, e], node_of[source]
        for j in range(n_gpus):
            g = index(j)
            pair, back = obs.pairs[b, e, g], exchange[source, g, VICTIM_LOAD]
            at_target, at_source, now = load[g] + taken - back, before - taken + back, max(before, load[g])
            pair[PAIR_HOLDS] = ZERO
            pair[PAIR_COACTIVATION] = together[g, e] - away
            pair[PAIR_SAME_NODE] = ONE if node_of[g] == node else ZERO
            pair[PAIR_TARGET_LOAD] = at_target - top
            pair[PAIR_SOURCE_LOAD] = at_source - top
            pair[PAIR_VICTIM_COACTIVATION] = exchange[source, g, VICTIM_COACTIVATION]
            pair[PAIR_PLACE] = now - max(at_target, at_source)
            pair[PAIR_REPLICA] = now - max(load[g] + share, before - taken + share)

        choices, accepted = obs.action_mask[b, e], accepts[source]
        # Three loops: the compiler does not vectorize one loop that writes to three places.
        for g in range(n_gpus):
            choices[index(g)] = accepted[index(g)]
        for g in range(n_gpus):
            choices[index(n_gpus + g)] = has_room[index(g)]
        for g in range(n_gpus):
            choices[index(2 * n_gpus + g)] = 0
        for r in range(n):
            g = index(replicas[e, index(r)])
            choices[g] = 1
            choices[index(n_gpus) + g] = 0
            choices[index(2 * n_gpus) + g] = n > 1
            pair = obs.pairs[b, e, g]
            for f in range(N_PAIR_FEATURES):
                pair[f] = ZERO
            pair[PAIR_HOLDS] = ONE
            pair[PAIR_SAME_NODE] = ONE if node_of[g] == node else ZERO
            if n > 1:
                pair[PAIR_REPLICA] = _relief_of_delete(episode, sim, b, e, g, n, n_passes, mean)


@device
def _relief_of_delete(episode, sim, b, e, gone, n, n_passes, mean):
    """How much lower the highest load of an expert's GPUs is if one replica goes and the others share its tokens."""
    load = episode.gpu_load[b]
    here = np.float32(slot_pairs(sim, b, gone, slot_of(sim, b, e, gone), n_passes) / mean)
    more, now, then = np.float32(here / (n - 1)), load[gone], load[gone] - here
    for r in range(n):
        g = index(sim.replicas[b, e, index(r)])
        if g != gone:
            now = max(now, load[g])
            then = max(then, load[g] + more)
    return now - then
