"""What operations would save on the observed passes, tried one by one and undone exactly."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time, smooth_and_true_time, with_migration
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.state import (
    MEMORY_GAIN,
    MEMORY_LOOKED,
    OP_ILLEGAL,
    OP_NOTHING,
    PART_MIGRATION,
    PART_SMOOTH,
    PART_TRUE,
    TIME_OBSERVED_START,
)


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
def look_ahead_parts(episode, sim, obs, b, rules, e, result):
    """Write (3·G, parts): what each operation on ``e`` saves on the observed passes, as shares of their time.

    Migration counts negative. Operations that are illegal or do nothing give 0. Counts are restored exactly. The best
    sum of smooth time and migration is remembered in the observation.
    """
    costs, topology, n_passes = rules.costs, rules.topology, rules.n_passes
    unit = episode.times_us[b, TIME_OBSERVED_START]
    smooth, true = smooth_and_true_time(sim, b, n_passes, topology, costs, rules.norm_log2)
    moved, best = migration_time(sim, b, costs), 0.0
    for node in range(3 * sim.slots.shape[1]):
        for part in range(result.shape[1]):
            result[node, part] = 0.0
        kind, source, target, victim = resolve(sim, b, e, node, n_passes)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            continue
        apply_operation(sim, b, e, source, target, victim, topology, costs, n_passes)
        smooth_then, true_then = smooth_and_true_time(sim, b, n_passes, topology, costs, rules.norm_log2)
        result[node, PART_SMOOTH] = (smooth - smooth_then) / unit
        result[node, PART_TRUE] = (true - true_then) / unit
        result[node, PART_MIGRATION] = (moved - migration_time(sim, b, costs)) / unit
        best = max(best, result[node, PART_SMOOTH] + result[node, PART_MIGRATION])
        apply_operation(sim, b, e, target, source, victim, topology, costs, n_passes)
    if e >= 0 and e < obs.memory.shape[1]:
        obs.memory[b, e, MEMORY_GAIN] = best
        obs.memory[b, e, MEMORY_LOOKED] = 1.0


@device
def look_ahead_all(episode, sim, b, rules, result):
    """Share of the observed time that each of the E × 3·G operations would save, migration included."""
    start_us, n_passes = episode.times_us[b, TIME_OBSERVED_START], rules.n_passes
    for e in range(result.shape[0]):
        look_ahead(sim, b, e, rules.topology, rules.costs, rules.norm_log2, n_passes, start_us, result[e])
        for node in range(result.shape[1]):
            result[e, node] /= start_us
