"""A short list of promising operations, for agents with one discrete action.

Operations are ranked by a cheap estimate: all on the experts of two GPUs, the one with the slowest kernel and the one
with most traffic, and the best one of every other replica. Only the best of both kinds are tried exactly.
``MoEPlacementFlatEnv`` documents the observation.
"""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time, with_migration
from clustergym.moe_placement.kernels.lookahead import PERCENT, cut_percent
from clustergym.moe_placement.kernels.observation import (
    EXPERT_LOAD,
    EXPERT_LOAD_CHANGE,
    GPU_COMPUTE_TIME,
    GPU_FREE_SLOTS,
    GPU_LOAD,
    GPU_RECEIVED_INTER,
    GPU_RECEIVED_INTRA,
    GPU_SENT_INTER,
    GPU_SENT_INTRA,
    GPU_TO_FETCH,
    N_CONTEXT,
    PAIR_HOLDS,
)
from clustergym.moe_placement.kernels.operations import apply_operation, resolve, slot_pairs
from clustergym.moe_placement.kernels.state import OP_ADD, OP_DELETE, SMOOTH_NORM_LOG2, TIME_OBSERVED_START

# Features of each candidate. Times are in percent of the layer's time: numbers around 1 suit networks without scaling.
CANDIDATE_FEATURES = (
    "exists", "saved", "saved_smooth", "migration", "is_add", "is_delete", "same_node", "expert_load", "load_change",
    "source_load", "target_load",
)  # fmt: skip
EXISTS, SAVED, SAVED_SMOOTH, MIGRATION, IS_ADD, IS_DELETE = range(6)
SAME_NODE, LOAD, LOAD_CHANGE, SOURCE_LOAD, TARGET_LOAD = range(6, 11)
N_CANDIDATE_FEATURES = len(CANDIDATE_FEATURES)
# Columns of the observation ``gpus`` that the compact observation has.
COMPACT_GPU_FEATURES = ("load", "compute_time", "free_slots", "traffic_intra", "traffic_inter", "to_fetch")
N_COMPACT_GPU_FEATURES = len(COMPACT_GPU_FEATURES)
# Columns of ``operations``: the expert, and the node that the second agent chooses (see ``MoEPlacementEnv``).
EXPERT, NODE = range(2)
# In the place of an expert: fewer operations exist.
ABSENT = -1


@inlined
def _work_of_slot(sim, b, g, s, n_passes, work, gpu_pairs):
    """The part of the GPU's work that the slot's expert causes, by its share of the pairs."""
    return work[g] * slot_pairs(sim, b, g, s, n_passes) / max(1, gpu_pairs[g])


@device
def _write_work(sim, obs, b, rules, work, coldest, gpu_pairs):
    """Write the work of each GPU (its kernel and traffic time) and of its coldest slot, which is 0 if one is free.

    Returns the GPU with the slowest kernel, and the one with most traffic of the others.
    """
    gpus, costs, n_passes = obs.gpus[b], rules.costs, rules.n_passes
    # The observation has the dispatch; what was dispatched is combined.
    intra = 1.0 + costs.combine_intra_us / costs.dispatch_intra_us
    inter = 1.0 + costs.combine_inter_us / costs.dispatch_inter_us
    slowest, busiest, most_kernel, most_traffic = 0, 0, -1.0, -1.0
    for g in range(work.shape[0]):
        work[g] = gpus[g, GPU_COMPUTE_TIME]
        if work[g] > most_kernel:
            slowest, most_kernel = g, work[g]
    for g in range(work.shape[0]):
        traffic = intra * max(gpus[g, GPU_SENT_INTRA], gpus[g, GPU_RECEIVED_INTRA])
        traffic += inter * max(gpus[g, GPU_SENT_INTER], gpus[g, GPU_RECEIVED_INTER])
        if g != slowest and traffic > most_traffic:
            busiest, most_traffic = g, traffic
        work[g] += traffic
        coldest[g] = work[g]
        for s in range(sim.slots.shape[2]):
            here = 0.0
            if sim.slots[b, g, s] >= 0:
                here = _work_of_slot(sim, b, g, s, n_passes, work, gpu_pairs)
            coldest[g] = min(coldest[g], here)
    return slowest, busiest


@inlined
def _relief(work, source, target, moved):
    """What moving some work from one GPU to another takes off the busier of the two."""
    return work[source] - max(work[source] - moved, work[target] + moved)


@device
def _estimate(sim, b, e, g, s, node, n_passes, work, coldest, gpu_pairs):
    """Roughly what an operation on expert ``e`` in slot ``s`` of GPU ``g`` saves."""
    n_gpus = sim.slots.shape[1]
    target, moved = node % n_gpus, _work_of_slot(sim, b, g, s, n_passes, work, gpu_pairs)
    if node < n_gpus:
        return _relief(work, g, target, moved - coldest[target])
    if node < 2 * n_gpus:
        return _relief(work, g, target, moved / (sim.n_replicas[b, e] + 1))
    # Its tokens go to the other replicas.
    best = -work[g]
    for i in range(sim.n_replicas[b, e]):
        other = sim.replicas[b, e, i]
        if other != target:
            best = max(best, _relief(work, target, other, moved))
    return best


@inlined
def _is_listed(operations, first, last, e, node):
    """Whether rows ``first`` … ``last``−1 have the operation."""
    for i in range(first, last):
        if operations[i, EXPERT] == e and operations[i, NODE] == node:
            return True
    return False


@device
def _insert(operations, score, first, last, e, node, value):
    """Keep the best operations in rows ``first`` … ``last``−1, best first. Each operation is there once."""
    if first >= last or (value <= score[last - 1] and operations[last - 1, EXPERT] != ABSENT):
        return
    if _is_listed(operations, first, last, e, node):
        return
    i = last - 1
    while i > first and (operations[i - 1, EXPERT] == ABSENT or score[i - 1] < value):
        operations[i, EXPERT], operations[i, NODE] = operations[i - 1, EXPERT], operations[i - 1, NODE]
        score[i] = score[i - 1]
        i -= 1
    operations[i, EXPERT], operations[i, NODE], score[i] = e, node, value


@device
def _coldest_replica(sim, b, n_passes):
    """(expert, GPU) of the replica with fewest tokens that is not the last of its expert; (−1, −1) without one."""
    best, where, least = ABSENT, ABSENT, 0
    for g in range(sim.slots.shape[1]):
        for s in range(sim.slots.shape[2]):
            e = sim.slots[b, g, s]
            if e >= 0 and sim.n_replicas[b, e] > 1:
                pairs = slot_pairs(sim, b, g, s, n_passes)
                if best == ABSENT or pairs < least:
                    best, where, least = e, g, pairs
    return best, where


@device
def _shortlist(episode, sim, obs, b, rules, operations, score, work, coldest):
    """Write operations into rows 1 … k; row 0 is the no-op.

    Half of them are the best by the estimate on the two busiest GPUs. The others are the best one of each replica, on
    all GPUs, of which the best are kept. The last is the deletion of the coldest replica, which makes room: without it
    no replica could ever be replaced.
    """
    n_gpus, k, n_passes = sim.slots.shape[1], operations.shape[0] - 1, rules.n_passes
    gpu_pairs = episode.gpu_pairs[b]
    operations[0, EXPERT], operations[0, NODE] = 0, sim.replicas[b, 0, 0]
    for i in range(1, k + 1):
        operations[i, EXPERT], operations[i, NODE], score[i] = ABSENT, ABSENT, 0.0
    slowest, busiest = _write_work(sim, obs, b, rules, work, coldest, gpu_pairs)
    cold, where = _coldest_replica(sim, b, n_passes)
    last = k + 1
    if cold >= 0 and k > 1:
        last = k
        operations[k, EXPERT], operations[k, NODE] = cold, 2 * n_gpus + where
    middle = 1 + last // 2
    for turn in range(2):
        for g in range(n_gpus):
            if turn == 0 and g != slowest and g != busiest:
                continue
            for s in range(sim.slots.shape[2]):
                e = sim.slots[b, g, s]
                if e < 0:
                    continue
                best, most = ABSENT, 0.0
                for node in range(3 * n_gpus):
                    nothing = node < n_gpus and obs.pairs[b, e, node, PAIR_HOLDS] > 0.0
                    if not obs.action_mask[b, e, node] or nothing or _is_listed(operations, last, k + 1, e, node):
                        continue
                    value = _estimate(sim, b, e, g, s, node, n_passes, work, coldest, gpu_pairs)
                    if turn == 0:
                        _insert(operations, score, 1, middle, e, node, value)
                    elif (best == ABSENT or value > most) and not _is_listed(operations, 1, middle, e, node):
                        best, most = node, value
                if best != ABSENT:
                    _insert(operations, score, middle, last, e, best, most)


@device
def _try(episode, sim, obs, b, rules, e, node, true, smooth, moved, row):
    """Write the features of one operation, which is tried and undone exactly.

    ``true``, ``smooth`` and ``moved`` are the times without it.
    """
    costs, topology, n_passes = rules.costs, rules.topology, rules.n_passes
    for f in range(row.shape[0]):
        row[f] = 0.0
    if e == ABSENT:
        return
    before_us = episode.times_us[b, TIME_OBSERVED_START]
    kind, source, target, victim = resolve(sim, b, e, node, n_passes)
    # Exchanging source and target undoes the operation.
    apply_operation(sim, b, e, source, target, victim, topology, costs, n_passes)
    true_then = mean_pass_time(sim, b, 0, n_passes, topology, costs, -1)
    smooth_then = mean_pass_time(sim, b, 0, n_passes, topology, costs, SMOOTH_NORM_LOG2)
    moved_then = migration_time(sim, b, costs)
    apply_operation(sim, b, e, target, source, victim, topology, costs, n_passes)
    now = with_migration(true, moved, before_us, costs)
    then = with_migration(true_then, moved_then, before_us, costs)
    row[SAVED] = cut_percent((now - then) * PERCENT / before_us)
    row[SAVED_SMOOTH] = cut_percent((smooth - smooth_then) * PERCENT / before_us)
    row[MIGRATION] = cut_percent((moved - moved_then) * PERCENT / before_us)
    row[EXISTS] = 1.0
    row[IS_ADD] = 1.0 if kind == OP_ADD else 0.0
    row[IS_DELETE] = 1.0 if kind == OP_DELETE else 0.0
    row[LOAD] = episode.load_features[b, e, EXPERT_LOAD]
    row[LOAD_CHANGE] = episode.load_features[b, e, EXPERT_LOAD_CHANGE]
    if source >= 0:
        row[SOURCE_LOAD] = obs.gpus[b, source, GPU_LOAD]
    if target >= 0:
        row[TARGET_LOAD] = obs.gpus[b, target, GPU_LOAD]
    if source >= 0 and target >= 0 and topology.node_of[source] == topology.node_of[target]:
        row[SAME_NODE] = 1.0


@device
def _sort(operations):
    """Order rows 1 … k by expert and node, absent ones last: an operation's place says nothing about its worth."""
    for i in range(2, operations.shape[0]):
        j = i
        while j > 1 and _precedes(operations, j, j - 1):
            for c in range(2):
                chosen = operations[j, c]
                operations[j, c] = operations[j - 1, c]
                operations[j - 1, c] = chosen
            j -= 1


@inlined
def _precedes(operations, i, j):
    if operations[i, EXPERT] == ABSENT or operations[j, EXPERT] == ABSENT:
        return operations[i, EXPERT] != ABSENT and operations[j, EXPERT] == ABSENT
    if operations[i, EXPERT] != operations[j, EXPERT]:
        return operations[i, EXPERT] < operations[j, EXPERT]
    return operations[i, NODE] < operations[j, NODE]


@device
def propose(episode, sim, obs, b, rules, operations, mask, score, compact):
    """Write k promising operations into ``operations`` (k + 1, 2), by expert and node, and what is known about them.

    Row 0 is the no-op. A row of −1 is absent: there were fewer operations. ``mask`` (k + 1,) is 1 where there is one.
    ``compact`` has the features of the candidates (k, 11), of the GPUs (G, 6) and the context (6,), one after another.
    ``score`` (k + 1 + 2·G,) is scratch.
    """
    n_gpus, k = sim.slots.shape[1], operations.shape[0] - 1
    work, coldest = score[k + 1 : k + 1 + n_gpus], score[k + 1 + n_gpus :]
    _shortlist(episode, sim, obs, b, rules, operations, score, work, coldest)
    _sort(operations)
    n_passes, topology, costs = rules.n_passes, rules.topology, rules.costs
    true = mean_pass_time(sim, b, 0, n_passes, topology, costs, -1)
    smooth = mean_pass_time(sim, b, 0, n_passes, topology, costs, SMOOTH_NORM_LOG2)
    moved = migration_time(sim, b, costs)
    for i in range(1, k + 1):
        row = compact[(i - 1) * N_CANDIDATE_FEATURES : i * N_CANDIDATE_FEATURES]
        _try(episode, sim, obs, b, rules, operations[i, EXPERT], operations[i, NODE], true, smooth, moved, row)
    for i in range(k + 1):
        mask[i] = operations[i, EXPERT] != ABSENT
    at = k * N_CANDIDATE_FEATURES
    gpus = obs.gpus[b]
    for g in range(n_gpus):
        compact[at] = gpus[g, GPU_LOAD]
        compact[at + 1] = gpus[g, GPU_COMPUTE_TIME]
        compact[at + 2] = gpus[g, GPU_FREE_SLOTS]
        compact[at + 3] = max(gpus[g, GPU_SENT_INTRA], gpus[g, GPU_RECEIVED_INTRA])
        compact[at + 4] = max(gpus[g, GPU_SENT_INTER], gpus[g, GPU_RECEIVED_INTER])
        compact[at + 5] = gpus[g, GPU_TO_FETCH]
        at += N_COMPACT_GPU_FEATURES
    for i in range(N_CONTEXT):
        compact[at + i] = obs.context[b, i]
