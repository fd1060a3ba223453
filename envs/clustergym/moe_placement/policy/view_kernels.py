"""What the placement policy sees beyond the environment's observation: kernels of one environment ``b``.

Two things that :mod:`clustergym.moe_placement.episode` does not offer:

* :func:`deal_evenly` re-deals the tokens of the OBSERVED window to home GPUs one by one, in place of sequence by sequence.
  Which GPU a sequence lives on is chance that the next window does not repeat; the experts that tokens use together are not.
* :func:`look_ahead_parts` tells what an operation would save in served time and cost in migration apart, because a saving
  lasts and a migration is paid once.
"""

from __future__ import annotations

from typing import Any

from clustergym.moe_placement import episode
from clustergym.moe_placement.dynamics import (
    OP_ILLEGAL,
    OP_NOTHING,
    change,
    count_window,
    device,
    layer_time,
    migration_time,
    resolve,
    smooth_and_true,
)
from clustergym.moe_placement.episode import DONE, LAYER, OP, TIME_SEEN, TIME_SEEN_START

# Channels of a look-ahead: served time in the smooth norm, true served time, migration.
PART_SMOOTH, PART_TRUE, PART_MIGRATION = 0, 1, 2
N_PARTS = 3

_begin_layer, _observe_step = episode._begin_layer, episode._observe_step


@device
def deal_evenly(env: Any, sim: Any, obs: Any, b: Any, corpus: Any, rules: Any) -> None:
    """Where a layer begins, deal the observed window's tokens evenly and observe that in place of the window as served."""
    if env.clock[b, DONE] or env.clock[b, OP] != 0:
        return
    n_gpus = sim.slots.shape[1]
    for t in range(sim.tok.shape[2]):
        sim.src[b, 0, t] = t % n_gpus
    count_window(sim, b, 0, corpus.experts, env.clock[b, LAYER], rules.net, rules.mode)
    env.time[b, TIME_SEEN] = layer_time(sim, b, 0, rules.cost, rules.net, rules.mode, -1, 1.0)
    env.time[b, TIME_SEEN_START] = env.time[b, TIME_SEEN]
    _observe_step(env, sim, obs, b, corpus, rules)


@device
def seat(
    env: Any, sim: Any, obs: Any, b: Any, corpus: Any, rules: Any, layer: Any, slots: Any, rows: Any, home: Any
) -> None:
    """Put environment ``b`` at the beginning of a layer with this placement (G, S), after this window (T,), (T,)."""
    for g in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            env.slots[b, layer, g, s] = slots[g, s]
    for w in range(2):
        for t in range(rows.shape[0]):
            sim.tok[b, w, t] = rows[t]
            sim.src[b, w, t] = home[t]
            if env.home.shape[2] == rows.shape[0]:
                env.home[b, w, t] = home[t]
    env.clock[b, DONE] = 0
    _begin_layer(env, sim, obs, b, corpus, rules, layer)
    _observe_step(env, sim, obs, b, corpus, rules)


@device
def look_ahead_parts(env: Any, sim: Any, b: Any, rules: Any, e: Any, doublings: Any, result: Any) -> None:
    """Write (3·G, parts): what each operation on ``e`` saves on the observed window, as shares of its time; 0 where illegal.

    Migration counts negative: the three parts of an operation add up to no more than what it saves. Counts are restored exactly.
    """
    cost, net, mode = rules.cost, rules.net, rules.mode
    unit = env.time[b, TIME_SEEN_START]
    smooth, true = smooth_and_true(sim, b, 0, cost, net, mode, doublings)
    moved = migration_time(sim, b, cost)
    for node in range(3 * sim.slots.shape[1]):
        for part in range(N_PARTS):
            result[node, part] = 0.0
        kind, source, target, victim = resolve(sim, b, e, node)
        if kind == OP_NOTHING or kind == OP_ILLEGAL:
            continue
        change(sim, b, e, source, target, victim, target, source, net, mode, 1)
        smooth_then, true_then = smooth_and_true(sim, b, 0, cost, net, mode, doublings)
        result[node, PART_SMOOTH] = (smooth - smooth_then) / unit
        result[node, PART_TRUE] = (true - true_then) / unit
        result[node, PART_MIGRATION] = (moved - migration_time(sim, b, cost)) / unit
        change(sim, b, e, target, source, victim, source, target, net, mode, 1)


@device
def settle(env: Any, sim: Any, b: Any, rules: Any, expert: Any, node: Any) -> None:
    """The last operation on a layer: apply it and keep the placement. Nothing is observed and no other layer begins."""
    kind, source, target, victim = resolve(sim, b, expert, node)
    if kind != OP_NOTHING and kind != OP_ILLEGAL:
        change(sim, b, expert, source, target, victim, target, source, rules.net, rules.mode, 2)
    layer = env.clock[b, LAYER]
    for g in range(sim.slots.shape[1]):
        for s in range(sim.slots.shape[2]):
            env.slots[b, layer, g, s] = sim.slots[b, g, s]


@device
def deal_range(first: Any, last: Any, env: Any, sim: Any, obs: Any, corpus: Any, rules: Any) -> None:
    for b in range(first, last):
        deal_evenly(env, sim, obs, b, corpus, rules)


@device
def seat_range(
    first: Any, last: Any, env: Any, sim: Any, obs: Any, corpus: Any, rules: Any, slots: Any, rows: Any, home: Any
) -> None:
    """Environment b at layer b mod L: all layers of one window side by side, once or several times."""
    for b in range(first, last):
        seat(env, sim, obs, b, corpus, rules, b % env.slots.shape[1], slots[b], rows, home)


@device
def settle_range(first: Any, last: Any, expert: Any, node: Any, env: Any, sim: Any, rules: Any) -> None:
    for b in range(first, last):
        settle(env, sim, b, rules, expert[b], node[b])


@device
def look_range(first: Any, last: Any, expert: Any, result: Any, env: Any, sim: Any, rules: Any, doublings: Any) -> None:
    """For each environment its chosen experts (B, M): writes (B, M, 3·G, parts)."""
    for b in range(first, last):
        for i in range(expert.shape[1]):
            look_ahead_parts(env, sim, b, rules, expert[b, i], doublings, result[b, i])
