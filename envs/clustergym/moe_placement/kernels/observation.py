"""Observations and masks of one environment. ``MoEPlacementEnv`` documents every array and column."""

from __future__ import annotations

import numpy as np

from clustergym.moe_placement.kernels.compile import device, index, inlined
from clustergym.moe_placement.kernels.cost import add_links, migration_time
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
from clustergym.moe_placement.profiles import STAY

# Columns of the observation ``experts``. The first three stay the same while the agents work on a layer.
EXPERT_FEATURES = (
    "load", "load_average", "load_change", "replicas", "top_share", "top_gpu_load", "to_fetch", "local_coactivation",
    "on_slowest",
)  # fmt: skip
EXPERT_LOAD, EXPERT_LOAD_AVERAGE, EXPERT_LOAD_CHANGE = 0, 1, 2
EXPERT_REPLICAS, EXPERT_TOP_SHARE, EXPERT_TOP_GPU_LOAD = 3, 4, 5
EXPERT_TO_FETCH, EXPERT_LOCAL_COACTIVATION, EXPERT_ON_SLOWEST = 6, 7, 8
N_EXPERT_FEATURES, N_LOAD_FEATURES = len(EXPERT_FEATURES), 3

# Columns of the observation ``gpus``. The first three are the kind of the node, one-hot.
GPU_FEATURES = (
    "is_place", "is_add", "is_delete", "load", "compute_time", "free_slots", "sent_intra", "received_intra",
    "sent_inter", "received_inter", "active_experts", "hot_coactivation", "is_slowest", "node_load", "to_fetch",
    "bandwidth_ratio",
)  # fmt: skip
GPU_IS_PLACE, GPU_IS_ADD, GPU_IS_DELETE = 0, 1, 2
GPU_LOAD, GPU_COMPUTE_TIME, GPU_FREE_SLOTS = 3, 4, 5
GPU_SENT_INTRA, GPU_RECEIVED_INTRA, GPU_SENT_INTER, GPU_RECEIVED_INTER = 6, 7, 8, 9
GPU_ACTIVE_EXPERTS, GPU_HOT_COACTIVATION, GPU_IS_SLOWEST = 10, 11, 12
GPU_NODE_LOAD, GPU_TO_FETCH, GPU_BANDWIDTH_RATIO = 13, 14, 15
N_GPU_FEATURES, N_KINDS = len(GPU_FEATURES), 3

# Entries of the observation ``progress``.
PROGRESS_FEATURES = ("layer", "operation", "interval", "time", "slowest_kernel", "migration")
PROGRESS_LAYER, PROGRESS_OPERATION, PROGRESS_INTERVAL = 0, 1, 2
PROGRESS_TIME, PROGRESS_SLOWEST_KERNEL, PROGRESS_MIGRATION = 3, 4, 5
N_PROGRESS = len(PROGRESS_FEATURES)

# Experts of highest load that ``hot_coactivation`` is about.
HOT_EXPERTS = 8
# Tokens from which co-activation and affinity are estimated.
COACTIVATION_TOKENS = 1024
AFFINITY_TOKENS = 256
# A count in float32: adding a Python float would convert to float64 and back.
ONE = np.float32(1)


@device
def observe_layer(episode, sim, obs, b, trace, rules, layer):
    """Write what stays the same while the agents work on a layer: co-activation, affinity and loads."""
    n_experts, n_passes, n_tokens = sim.replicas.shape[1], rules.n_passes, sim.rows.shape[2]
    together, affinity, top_k = obs.coactivation[b], obs.affinity[b], trace.experts.shape[2]
    total = n_passes * n_tokens
    # A sample estimates these probabilities well enough. If layers depend on each other, affinity counts all tokens.
    stride = (total + COACTIVATION_TOKENS - 1) // COACTIVATION_TOKENS
    affinity_stride = (total + AFFINITY_TOKENS - 1) // AFFINITY_TOKENS
    if rules.topology.transport == STAY:
        affinity_stride = 1
    experts, experts_before = trace.experts[layer], trace.experts[max(0, layer - 1)]
    used, used_before = episode.int_scratch[b, 0], episode.int_scratch[b, 1]
    for i in range(n_experts):
        used[i] = 0
        used_before[i] = 0
        for j in range(n_experts):
            together[i, j] = 0.0
            affinity[i, j] = 0.0
    w, t = 0, 0
    while w < n_passes:
        row = index(sim.rows[b, w, t])
        for k in range(top_k):
            i = experts[row, index(k)]
            if i < 0:
                continue
            used[index(i)] += 1
            for m in range(k):
                j = experts[row, index(m)]
                if j >= 0:
                    together[index(i), index(j)] += ONE
        w, t = _next_token(w, t + stride, n_tokens)
    w, t = 0 if layer > 0 else n_passes, 0
    while w < n_passes:
        row = index(sim.rows[b, w, t])
        for m in range(top_k):
            j = experts_before[row, index(m)]
            if j < 0:
                continue
            used_before[index(j)] += 1
            for k in range(top_k):
                i = experts[row, index(k)]
                if i >= 0:
                    affinity[index(j), index(i)] += ONE
        w, t = _next_token(w, t + affinity_stride, n_tokens)
    for i in range(n_experts):
        for j in range(i):
            both = together[index(i), index(j)] + together[index(j), index(i)]
            together[index(i), index(j)] = both
            together[index(j), index(i)] = both
    for i in range(n_experts):
        # In float32 a quotient of counts is the same as the rounded quotient in float64.
        n_used, n_used_before = np.float32(max(1, used[i])), np.float32(max(1, used_before[i]))
        for j in range(n_experts):
            together[index(i), index(j)] /= n_used
        for j in range(n_experts if layer > 0 else 0):
            affinity[index(i), index(j)] /= n_used_before
    _write_load_features(episode, sim, b, layer, n_passes)
    _write_hot_coactivation(episode, obs, b)
    for i in range(n_experts):
        update_local_coactivation(episode, sim, obs, b, i)
        episode.spent[b, i] = 0
        for f in range(obs.memory.shape[2]):
            obs.memory[b, i, f] = 0.0


@inlined
def _next_token(w, t, n_tokens):
    """Token ``t`` counted from the start of pass ``w``, as (pass, token of that pass). A division would take longer."""
    while t >= n_tokens:
        t -= n_tokens
        w += 1
    return w, t


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
            hot[e] += obs.coactivation[b, best, e] / HOT_EXPERTS


@inlined
def update_local_coactivation(episode, sim, obs, b, e):
    """Sum the expert's co-activation with all experts on its GPUs."""
    total, together = 0.0, obs.coactivation[b, e]
    for i in range(sim.n_replicas[b, e]):
        slots = sim.slots[b, sim.replicas[b, e, i]]
        for s in range(slots.shape[0]):
            if slots[s] >= 0:
                total += together[index(slots[s])]
    episode.local_coactivation[b, e] = total


@device
def observe_step(episode, sim, obs, b, rules):
    """Write what an operation changes: placement, load and traffic of the GPUs, masks, progress."""
    time = episode.times_us[b, TIME_OBSERVED]
    busiest, slowest = _observe_gpus(episode, sim, obs, b, rules, time)
    _observe_experts(episode, sim, obs, b, rules, busiest)
    progress = obs.progress[b]
    progress[PROGRESS_LAYER] = episode.clock[b, CLOCK_LAYER] / episode.slots.shape[1]
    progress[PROGRESS_OPERATION] = episode.clock[b, CLOCK_OPERATION] / rules.ops_per_layer
    progress[PROGRESS_INTERVAL] = episode.clock[b, CLOCK_INTERVAL] / rules.n_intervals
    progress[PROGRESS_TIME] = time / episode.times_us[b, TIME_OBSERVED_START]
    progress[PROGRESS_SLOWEST_KERNEL] = slowest / time
    progress[PROGRESS_MIGRATION] = migration_time(sim, b, rules.costs) / time


@device
def _observe_gpus(episode, sim, obs, b, rules, time):
    """Write ``gpus``, ``traffic``, ``gpu_mask`` and ``placement``, and in scratch what :func:`_observe_experts` needs.

    Returns the slowest GPU and the mean µs of its expert kernel.
    """
    n_experts, n_gpus, n_slots, n_passes = (
        sim.replicas.shape[1], sim.slots.shape[1], sim.slots.shape[2], rules.n_passes,
    )  # fmt: skip
    topology, costs, per_node = rules.topology, rules.costs, rules.topology.gpus_per_node
    gpus, load, any_gpu, traffic = obs.gpus[b], episode.float_scratch[b], obs.gpu_mask[b], obs.traffic[b]
    slots, replicas, n_replicas = sim.slots[b], sim.replicas[b], sim.n_replicas[b]
    in_common, accepts, placement = episode.in_common[b], episode.accepts[b], obs.placement[b]
    # Scratch: tokens of each expert, most of them on one GPU.
    of_expert, most = episode.int_scratch[b, 0], episode.int_scratch[b, 1]
    # Times of one pass, relative to the layer's.
    intra, inter = costs.dispatch_intra_us / time / n_passes, costs.dispatch_inter_us / time / n_passes
    total = 0
    for e in range(n_experts):
        of_expert[index(e)] = 0
        most[index(e)] = 0
        for g in range(n_gpus):
            placement[index(e), index(g)] = 0.0
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
        done, active, held, spares, hot, compute = 0, 0, 0, 0, 0.0, 0.0
        for s in range(n_slots):
            if slots[g, s] < 0:
                continue
            e, here = index(slots[g, s]), 0
            held += 1
            spares += n_replicas[e] > 1
            hot += episode.hot_coactivation[b, e]
            placement[e, index(g)] = 1.0
            for i in range(n_replicas[e]):
                in_common[index(replicas[e, index(i)]), index(g)] += 1
            for w in range(n_passes):
                pairs = sim.slot_pairs[b, w, g, s]
                here += pairs
                active += pairs > 0
            done += here
            most[e] = max(most[e], here)
        for w in range(n_passes):
            compute += sim.kernel_us[b, w, g] / n_passes
        if compute > slowest:
            busiest, slowest = g, compute
        load[g] = done / mean
        episode.gpu_pairs[b, g] = done
        accepts[n_gpus, g] = held < n_slots
        # To leave an expert where it is, or to fill an empty GPU, is possible everywhere.
        any_gpu[g] = 1
        any_gpu[n_gpus + g] = held < n_slots and held < n_experts
        any_gpu[2 * n_gpus + g] = spares > 0
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
    return busiest, slowest


@device
def _observe_experts(episode, sim, obs, b, rules, busiest):
    """Write ``experts``, ``expert_mask`` and ``joint_mask`` after :func:`_observe_gpus`."""
    n_experts, n_gpus = sim.replicas.shape[1], sim.slots.shape[1]
    placement, replicas, load = obs.placement[b], sim.replicas[b], episode.float_scratch[b]
    accepts, has_room = episode.accepts[b], episode.accepts[b, n_gpus]
    # Scratch: see _observe_gpus; how many GPUs can take a replica from each.
    total, most, takers = episode.int_scratch[b, 0], episode.int_scratch[b, 1], episode.in_common[b, 0]
    for g in range(n_gpus):
        can_take = 0
        for h in range(n_gpus):
            can_take += accepts[index(g), index(h)]
        takers[index(g)] = can_take
    fresh = 0
    for i in range(n_experts):
        e, n = index(i), sim.n_replicas[b, i]
        source, most_done, top, moved = index(replicas[e, 0]), -1, 0.0, 0
        for r in range(n):
            g = index(replicas[e, index(r)])
            top = max(top, load[g])
            moved += sim.held_before[b, e, g] == 0
            if episode.gpu_pairs[b, g] > most_done:
                source, most_done = g, episode.gpu_pairs[b, g]
        features = obs.experts[b, e]
        for f in range(N_LOAD_FEATURES):
            features[f] = episode.load_features[b, e, f]
        features[EXPERT_REPLICAS] = n / n_gpus
        features[EXPERT_TOP_SHARE] = most[e] / max(1, total[e])
        features[EXPERT_TOP_GPU_LOAD] = top
        features[EXPERT_TO_FETCH] = moved
        features[EXPERT_LOCAL_COACTIVATION] = episode.local_coactivation[b, e] / n
        features[EXPERT_ON_SLOWEST] = placement[e, busiest]
        choices, accepted, useful = obs.joint_mask[b, e], accepts[source], takers[source]
        # Three loops: the compiler does not vectorize one loop that writes to three places.
        for g in range(n_gpus):
            choices[index(g)] = accepted[index(g)]
        for g in range(n_gpus):
            choices[index(n_gpus + g)] = has_room[index(g)]
        for g in range(n_gpus):
            choices[index(2 * n_gpus + g)] = 0
        for r in range(n):
            g = index(replicas[e, index(r)])
            useful -= accepted[g]
            choices[g] = 1
            choices[index(n_gpus) + g] = 0
            choices[index(2 * n_gpus) + g] = n > 1
        # On one GPU with all slots taken nothing can be done: the choice is then between no-ops.
        useful = useful > 0 or n > 1 or n_gpus == 1
        obs.expert_mask[b, e] = useful
        fresh += useful and not episode.spent[b, e]
    if rules.skip_spent and fresh > 0:
        for e in range(n_experts):
            obs.expert_mask[b, e] = obs.expert_mask[b, e] and not episode.spent[b, e]
