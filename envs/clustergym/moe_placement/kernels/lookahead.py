"""What operations would save on the observed window, tried one by one and undone exactly."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import layer_time, migration_time
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.state import OP_ILLEGAL, OP_NOTHING, TIME_OBSERVED_START


@device
def look_ahead(sim, b, e, costs, network, norm_log2, result):
    """Write the time that each of the 3·G operations on ``e`` would save on window 0 (µs, migration included).

    Operations that are illegal or do nothing give 0. Counts are restored exactly.
    """
    before = layer_time(sim, b, 0, costs, network, norm_log2, 1.0) + migration_time(sim, b, costs)
    for node in range(3 * sim.slots.shape[1]):
        kind, source, target, victim = resolve(sim, b, e, node)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            result[node] = 0.0
            continue
        apply_operation(sim, b, e, source, target, victim, network, 1)
        after = layer_time(sim, b, 0, costs, network, norm_log2, 1.0) + migration_time(sim, b, costs)
        apply_operation(sim, b, e, target, source, victim, network, 1)
        result[node] = before - after


@device
def look_ahead_one(episode, sim, b, rules, e, result):
    """Share of the observed time that each of the 3·G operations on ``e`` would save."""
    look_ahead(sim, b, e, rules.costs, rules.network, rules.norm_log2, result)
    for node in range(result.shape[0]):
        result[node] /= episode.times_us[b, TIME_OBSERVED_START]


@device
def look_ahead_all(episode, sim, b, rules, result):
    """Share of the observed time that each of the E × 3·G operations would save."""
    for e in range(sim.pairs.shape[2]):
        look_ahead_one(episode, sim, b, rules, e, result[e])
