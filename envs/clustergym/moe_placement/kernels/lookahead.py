"""What operations would save on the observed passes, tried one by one and undone exactly."""

from __future__ import annotations

from clustergym.common.compiling import device, inlined
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time, with_migration
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.state import (
    N_SAVED_PARTS,
    OP_ILLEGAL,
    OP_NOTHING,
    PART_MIGRATION,
    PART_SMOOTH,
    PART_TRUE,
    SMOOTH_NORM_LOG2,
    TIME_OBSERVED_START,
)

# Savings are in percent: numbers around 1 suit networks. What is beyond this is cut: such operations are never close.
PERCENT, MOST_PERCENT = 100.0, 100.0


@inlined
def cut_percent(value):
    return min(MOST_PERCENT, max(-MOST_PERCENT, value))


@device
def look_ahead(sim, b, e, topology, costs, norm_log2, n_passes, before_us, result):
    """Write the time that each of the 3·G operations on ``e`` would save on the first passes (µs, migration included).

    ``before_us`` is the time at the start of the interval. Operations that are illegal or do nothing give 0. Counts are
    restored exactly.
    """
    now = mean_pass_time(sim, b, 0, n_passes, topology, costs, norm_log2)
    now = with_migration(now, migration_time(sim, b, costs), before_us, costs)
    for node in range(3 * sim.slots.shape[1]):
        kind, source, target, victim = resolve(sim, b, e, node, n_passes)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            result[node] = 0.0
            continue
        apply_operation(sim, b, e, source, target, victim, topology, costs, n_passes)
        then = mean_pass_time(sim, b, 0, n_passes, topology, costs, norm_log2)
        result[node] = now - with_migration(then, migration_time(sim, b, costs), before_us, costs)
        apply_operation(sim, b, e, target, source, victim, topology, costs, n_passes)


@device
def look_ahead_parts(episode, sim, b, rules, e, first, result):
    """Write into ``result`` (G, columns), from column ``first`` on, the parts of PLACE, ADD and DELETE on each GPU.

    The parts are what the operation on ``e`` saves on the observed passes. Operations that are illegal or do nothing
    give 0. Counts are restored exactly.
    """
    costs, topology, n_passes, n_gpus = rules.costs, rules.topology, rules.n_passes, sim.slots.shape[1]
    scale = PERCENT / episode.times_us[b, TIME_OBSERVED_START]
    smooth = mean_pass_time(sim, b, 0, n_passes, topology, costs, SMOOTH_NORM_LOG2)
    true, moved = mean_pass_time(sim, b, 0, n_passes, topology, costs, -1), migration_time(sim, b, costs)
    for node in range(3 * n_gpus):
        row, column = result[node % n_gpus], first + N_SAVED_PARTS * (node // n_gpus)
        for part in range(N_SAVED_PARTS):
            row[column + part] = 0.0
        kind, source, target, victim = resolve(sim, b, e, node, n_passes)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            continue
        apply_operation(sim, b, e, source, target, victim, topology, costs, n_passes)
        smooth_then = mean_pass_time(sim, b, 0, n_passes, topology, costs, SMOOTH_NORM_LOG2)
        true_then = mean_pass_time(sim, b, 0, n_passes, topology, costs, -1)
        row[column + PART_SMOOTH] = cut_percent((smooth - smooth_then) * scale)
        row[column + PART_TRUE] = cut_percent((true - true_then) * scale)
        row[column + PART_MIGRATION] = cut_percent((moved - migration_time(sim, b, costs)) * scale)
        apply_operation(sim, b, e, target, source, victim, topology, costs, n_passes)
