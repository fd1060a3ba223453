"""What the placement policy sees beyond the environment's observation: kernels of one environment ``b``.

Two things that :mod:`clustergym.moe_placement.kernels.episode` does not offer:

* :func:`deal_evenly` re-deals the tokens of the OBSERVED window to home GPUs one by one, in place of sequence by sequence.
  Which GPU a sequence lives on is chance that the next window does not repeat; the experts that tokens use together are not.
* :func:`look_ahead_parts` tells what an operation would save in served time and cost in migration apart, because a saving
  lasts and a migration is paid once.
"""

from __future__ import annotations

from typing import Any

from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import layer_time, migration_time, smooth_and_true_time
from clustergym.moe_placement.kernels.counting import count_window
from clustergym.moe_placement.kernels.observation import observe_step
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    OP_ILLEGAL,
    OP_NOTHING,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
)

# Channels of a look-ahead: served time in the smooth norm, true served time, migration.
PART_SMOOTH, PART_TRUE, PART_MIGRATION = 0, 1, 2
N_PARTS = 3

_begin_layer = kernels._begin_layer


@device
def deal_evenly(episode: Any, sim: Any, obs: Any, b: Any, trace: Any, rules: Any) -> None:
    """Where a layer begins, deal the observed window's tokens evenly and observe that in place of the window as served."""
    if episode.clock[b, CLOCK_DONE] or episode.clock[b, CLOCK_OPERATION] != 0:
        return
    n_gpus = sim.slots.shape[1]
    for t in range(sim.rows.shape[2]):
        sim.origin[b, 0, t] = t % n_gpus
    count_window(sim, b, 0, trace.experts, episode.clock[b, CLOCK_LAYER], rules.network)
    episode.times_us[b, TIME_OBSERVED] = layer_time(sim, b, 0, rules.costs, rules.network, -1, 1.0)
    episode.times_us[b, TIME_OBSERVED_START] = episode.times_us[b, TIME_OBSERVED]
    observe_step(episode, sim, obs, b, rules)


@device
def seat(
    episode: Any, sim: Any, obs: Any, b: Any, trace: Any, rules: Any, layer: Any, slots: Any, rows: Any, home: Any
) -> None:
    """Put environment ``b`` at the beginning of a layer with this placement (G, S), after this window (T,), (T,)."""
    for g in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            episode.slots[b, layer, g, s] = slots[g, s]
    for w in range(2):
        for t in range(rows.shape[0]):
            sim.rows[b, w, t] = rows[t]
            sim.origin[b, w, t] = home[t]
            if episode.home.shape[2] == rows.shape[0]:
                episode.home[b, w, t] = home[t]
    episode.clock[b, CLOCK_DONE] = 0
    _begin_layer(episode, sim, obs, b, trace, rules, layer)
    observe_step(episode, sim, obs, b, rules)


@device
def look_ahead_parts(episode: Any, sim: Any, b: Any, rules: Any, e: Any, norm_log2: Any, result: Any) -> None:
    """Write (3·G, parts): what each operation on ``e`` saves on the observed window, as shares of its time; 0 where illegal.

    Migration counts negative: the three parts of an operation add up to no more than what it saves. Counts are restored exactly.
    """
    costs, network = rules.costs, rules.network
    unit = episode.times_us[b, TIME_OBSERVED_START]
    smooth, true = smooth_and_true_time(sim, b, 0, costs, network, norm_log2)
    moved = migration_time(sim, b, costs)
    for node in range(3 * sim.slots.shape[1]):
        for part in range(N_PARTS):
            result[node, part] = 0.0
        kind, source, target, victim = resolve(sim, b, e, node)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            continue
        apply_operation(sim, b, e, source, target, victim, network, 1)
        smooth_then, true_then = smooth_and_true_time(sim, b, 0, costs, network, norm_log2)
        result[node, PART_SMOOTH] = (smooth - smooth_then) / unit
        result[node, PART_TRUE] = (true - true_then) / unit
        result[node, PART_MIGRATION] = (moved - migration_time(sim, b, costs)) / unit
        apply_operation(sim, b, e, target, source, victim, network, 1)


@device
def settle(episode: Any, sim: Any, b: Any, rules: Any, expert: Any, node: Any) -> None:
    """The last operation on a layer: apply it and keep the placement. Nothing is observed and no other layer begins."""
    kind, source, target, victim = resolve(sim, b, expert, node)
    if kind != OP_NOTHING and kind != OP_ILLEGAL:
        apply_operation(sim, b, expert, source, target, victim, rules.network, 2)
    layer = episode.clock[b, CLOCK_LAYER]
    for g in range(sim.slots.shape[1]):
        for s in range(sim.slots.shape[2]):
            episode.slots[b, layer, g, s] = sim.slots[b, g, s]


@device
def deal_range(first: Any, last: Any, episode: Any, sim: Any, obs: Any, trace: Any, rules: Any) -> None:
    for b in range(first, last):
        deal_evenly(episode, sim, obs, b, trace, rules)


@device
def seat_range(
    first: Any, last: Any, episode: Any, sim: Any, obs: Any, trace: Any, rules: Any, slots: Any, rows: Any, home: Any
) -> None:
    """Environment b at layer b mod L: all layers of one window side by side, once or several times."""
    for b in range(first, last):
        seat(episode, sim, obs, b, trace, rules, b % episode.slots.shape[1], slots[b], rows, home)


@device
def settle_range(first: Any, last: Any, expert: Any, node: Any, episode: Any, sim: Any, rules: Any) -> None:
    for b in range(first, last):
        settle(episode, sim, b, rules, expert[b], node[b])


@device
def look_range(
    first: Any, last: Any, expert: Any, result: Any, episode: Any, sim: Any, rules: Any, norm_log2: Any
) -> None:
    """For each environment its chosen experts (B, M): writes (B, M, 3·G, parts)."""
    for b in range(first, last):
        for i in range(expert.shape[1]):
            look_ahead_parts(episode, sim, b, rules, expert[b, i], norm_log2, result[b, i])
