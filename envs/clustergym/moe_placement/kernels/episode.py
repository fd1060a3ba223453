"""One environment's episode: intervals, the walk over the layers, operations and rewards.

The reward is aligned with the result: the rewards of an episode add up to the time that it saved against serving with
its start placement. The unit is one percent of the mean time of a layer under the static placement. An operation earns what it saves on the next
interval. When a layer is reached, what earlier operations save on it in the new interval is credited.
"""

from __future__ import annotations

import numpy as np

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time, with_migration
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.observation import observe_layer, observe_step, update_group_coactivation
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.passes import count_users, write_users, write_users_from_sets
from clustergym.moe_placement.kernels.replicas import MASK31, hash31, set_first_placement, set_placement, static_slots
from clustergym.moe_placement.kernels.state import (
    AT_REUSE,
    CLOCK_DONE,
    CLOCK_INTERVAL,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    CLOCK_REUSE,
    LAST_EXPERT,
    LAST_FROM,
    LAST_KIND,
    LAST_LAYER,
    LAST_NODE,
    LAST_TO,
    LAST_VICTIM,
    N_LAST,
    N_TIMES,
    OP_ILLEGAL,
    OP_NOTHING,
    RANDOM_COUNTER,
    RANDOM_KEY,
    TIME_EPLB,
    TIME_MIGRATED,
    TIME_NEXT,
    TIME_NEXT_START,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
    TIME_SAVED,
    TIME_SERVED,
    TIME_START,
)
from clustergym.moe_placement.kernels.streams import begin_stream, draw_interval, permuted, write_order
from clustergym.moe_placement.kernels.token_sets import clear, copy_set, count_common
from clustergym.moe_placement.profiles import STAY


@device
def copy_slots(source, target):
    for g in range(target.shape[0]):
        for s in range(target.shape[1]):
            target[g, s] = source[g, s]


@device
def locate(sim, b, w, layer):
    """With transport ``stay``: tokens begin on their rank, and each layer where the layer before left them.

    The layer before must have been counted.
    """
    for g in range(sim.slots.shape[1]):
        if layer > 0:
            copy_set(sim.destinations[b, w, g], sim.origins[b, w, g])
            continue
        clear(sim.origins[b, w, g])
        for t in range(sim.rank_start[b, w, g], sim.rank_start[b, w, g + 1]):
            sim.origins[b, w, g, t >> 6] |= np.uint64(1) << np.uint64(t & 63)


@device
def _draw(episode, sim, stream, b, trace, rules):
    """Draw the sampled passes of the next interval."""
    first, last = rules.n_passes, 2 * rules.n_passes
    draw_interval(
        stream, b, trace, rules.phase, rules.schedule, rules.rate, rules.rank_imbalance, sim.rows[b, first:last],
        sim.rank_start[b, first:last],
    )  # fmt: skip
    episode.clock[b, CLOCK_REUSE] |= stream.position[b, AT_REUSE]


@device
def _keep_observed(sim, stream, b, rules):
    """Let the interval that was drawn last be the observed one; with ``mix_observed``, deal its tokens at random."""
    n_passes, n_tokens = rules.n_passes, sim.rows.shape[2]
    order = stream.orders[b, stream.drawn.shape[1]]
    key = hash31(stream.random[b, RANDOM_KEY] ^ hash31(stream.random[b, RANDOM_COUNTER] & MASK31))
    write_order(order, n_passes * n_tokens, key)
    for w in range(n_passes):
        for t in range(n_tokens):
            if rules.mix_observed:
                j = permuted(w * n_tokens + t, order)
                sim.rows[b, j // n_tokens, j % n_tokens] = sim.rows[b, n_passes + w, t]
            else:
                sim.rows[b, w, t] = sim.rows[b, n_passes + w, t]
    for w in range(n_passes):
        for g in range(sim.rank_start.shape[2]):
            sim.rank_start[b, w, g] = sim.rank_start[b, n_passes + w, g]


@device
def _count(sim, b, first, last, trace, rules, layer):
    for w in range(first, last):
        if rules.topology.transport == STAY:
            locate(sim, b, w, layer)
        _write_users(sim, b, w, trace, layer)
        count_users(sim, b, w, trace.experts[layer], rules.topology, rules.costs)


@device
def _write_users(sim, b, w, trace, layer):
    """Write the tokens of a pass that use each expert of a layer."""
    if 64 * trace.expert_sets.shape[2] >= sim.replicas.shape[1]:
        write_users_from_sets(sim, b, w, trace.expert_sets[layer])
    else:
        write_users(sim, b, w, trace.experts[layer])


@device
def _next_time(sim, b, rules):
    """Mean time of a pass of the next interval, without migration, µs."""
    n_passes = sim.rows.shape[1]
    return mean_pass_time(sim, b, n_passes - rules.n_passes, n_passes, rules.topology, rules.costs, -1)


@device
def _next_total_time(episode, sim, b, rules):
    """The same with migration: the time whose decrease is rewarded."""
    before_us, migration_us = episode.times_us[b, TIME_NEXT_START], migration_time(sim, b, rules.costs)
    return with_migration(_next_time(sim, b, rules), migration_us, before_us, rules.costs)


@device
def _write_start_times(episode, sim, b, trace, rules):
    """Write the time of each layer in the next interval under the start placement."""
    n_passes = rules.n_passes
    for layer in range(episode.slots.shape[1]):
        copy_slots(episode.first_slots[b, layer], sim.slots[b])
        set_first_placement(sim, b, rules.topology)
        _count(sim, b, n_passes, 2 * n_passes, trace, rules, layer)
        episode.start_us[b, layer] = _next_time(sim, b, rules)
        episode.times_us[b, TIME_START] += episode.start_us[b, layer]


@device
def _write_eplb(episode, sim, b, trace, rules, layer, slots):
    """Fill ``slots`` (G, S) with EPLB's placement for the observed loads of a layer."""
    n_experts, load = sim.replicas.shape[1], episode.float_scratch[b]
    for e in range(n_experts):
        load[e] = 0.0
    for w in range(rules.n_passes):
        _write_users(sim, b, w, trace, layer)
        for e in range(n_experts):
            load[e] += count_common(sim.users[b, e], sim.users[b, e])
    eplb_slots(slots, load[:n_experts], 1, 0, episode.int_scratch[b], load)


@device
def _serve_eplb(episode, sim, b, trace, rules):
    """Serve the next interval with EPLB's placement for the observed one, migration included."""
    n_passes, costs = rules.n_passes, rules.costs
    for layer in range(episode.slots.shape[1]):
        slots = episode.eplb_slots[b, layer]
        copy_slots(slots, sim.slots[b])
        set_first_placement(sim, b, rules.topology)
        before_us = 0.0
        if costs.background_share >= 0.0:
            _count(sim, b, n_passes, 2 * n_passes, trace, rules, layer)
            before_us = _next_time(sim, b, rules)
        _write_eplb(episode, sim, b, trace, rules, layer, slots)
        set_placement(sim, b, slots, rules.topology)
        _count(sim, b, n_passes, 2 * n_passes, trace, rules, layer)
        time = _next_time(sim, b, rules)
        episode.times_us[b, TIME_EPLB] += with_migration(time, migration_time(sim, b, costs), before_us, costs)


@device
def _still_at_start(episode, b, rules):
    """No operation so far can have changed a layer that the agents have not reached."""
    return episode.clock[b, CLOCK_INTERVAL] == 0 and rules.topology.transport != STAY


@device
def begin_layer(episode, sim, obs, b, trace, rules, layer):
    """Go to a layer. Returns what the operations so far save on it in the next interval, µs."""
    n_passes, times = rules.n_passes, episode.times_us[b]
    copy_slots(episode.slots[b, layer], sim.slots[b])
    set_first_placement(sim, b, rules.topology)
    _count(sim, b, 0, sim.rows.shape[1], trace, rules, layer)
    episode.clock[b, CLOCK_LAYER] = layer
    episode.clock[b, CLOCK_OPERATION] = 0
    times[TIME_OBSERVED] = mean_pass_time(sim, b, 0, n_passes, rules.topology, rules.costs, -1)
    times[TIME_OBSERVED_START] = times[TIME_OBSERVED]
    times[TIME_NEXT_START] = _next_time(sim, b, rules)
    times[TIME_NEXT] = times[TIME_NEXT_START]
    if _still_at_start(episode, b, rules):
        episode.start_us[b, layer] = times[TIME_NEXT]
        times[TIME_START] += times[TIME_NEXT_START]
    observe_layer(episode, sim, obs, b, trace, rules, layer)
    return episode.start_us[b, layer] - times[TIME_NEXT]


@device
def _begin_interval(episode, sim, stream, obs, b, trace, rules):
    """Draw the next interval; the observed one is set. Returns what the first layer is credited with, µs."""
    _draw(episode, sim, stream, b, trace, rules)
    if not _still_at_start(episode, b, rules):
        _write_start_times(episode, sim, b, trace, rules)
    if rules.compare_eplb:
        _serve_eplb(episode, sim, b, trace, rules)
    return begin_layer(episode, sim, obs, b, trace, rules, 0)


@device
def begin_episode(episode, sim, stream, obs, b, trace, rules):
    """Start a new stream: its first interval is the observed one. Write the placement that the episode starts from."""
    n_layers, n_experts = episode.slots.shape[1], sim.replicas.shape[1]
    begin_stream(stream, b, trace, rules.schedule)
    episode.clock[b, CLOCK_REUSE] = 0
    _draw(episode, sim, stream, b, trace, rules)
    _keep_observed(sim, stream, b, rules)
    for layer in range(n_layers):
        slots = episode.slots[b, layer]
        for e in range(n_experts):
            episode.load_average[b, layer, e] = -1.0
        if rules.start_eplb:
            _write_eplb(episode, sim, b, trace, rules, layer, slots)
        else:
            static_slots(slots, n_experts)
        copy_slots(slots, episode.first_slots[b, layer])
        if rules.compare_eplb:
            copy_slots(slots, episode.eplb_slots[b, layer])
    for i in range(N_TIMES):
        episode.times_us[b, i] = 0.0
    for i in range(N_LAST):
        episode.last_operation[b, i] = -1
    episode.clock[b, CLOCK_INTERVAL] = 0
    episode.clock[b, CLOCK_DONE] = 0
    _begin_interval(episode, sim, stream, obs, b, trace, rules)
    observe_step(episode, sim, obs, b, rules)


@device
def operate(episode, sim, obs, b, rules, expert, node):
    """Apply one operation to the current layer; returns what it saves on the next interval, µs."""
    times, last, n_passes = episode.times_us[b], episode.last_operation[b], rules.n_passes
    kind, source, target, victim = resolve(sim, b, expert, node, n_passes)
    saved = 0.0
    if kind != OP_NOTHING and kind != OP_ILLEGAL:
        apply_operation(sim, b, expert, source, target, victim, rules.topology, rules.costs, sim.rows.shape[1])
        after = _next_total_time(episode, sim, b, rules)
        saved = times[TIME_NEXT] - after
        times[TIME_NEXT] = after
        times[TIME_OBSERVED] = mean_pass_time(sim, b, 0, n_passes, rules.topology, rules.costs, -1)
        if source >= 0:
            update_group_coactivation(episode, sim, obs, b, source)
        if target >= 0:
            update_group_coactivation(episode, sim, obs, b, target)
    last[LAST_KIND] = kind
    last[LAST_EXPERT] = expert
    last[LAST_NODE] = node
    last[LAST_FROM] = source
    last[LAST_TO] = target
    last[LAST_VICTIM] = victim
    last[LAST_LAYER] = episode.clock[b, CLOCK_LAYER]
    return saved


@device
def step(episode, sim, stream, obs, b, trace, rules, expert, node):
    """Apply one operation and go on to the next state; returns the reward. An episode that is over does not change."""
    if episode.clock[b, CLOCK_DONE]:
        return 0.0
    times = episode.times_us[b]
    saved = operate(episode, sim, obs, b, rules, expert, node)
    episode.clock[b, CLOCK_OPERATION] += 1
    if episode.clock[b, CLOCK_OPERATION] == rules.ops_per_layer:
        saved += _end_layer(episode, sim, stream, obs, b, trace, rules)
    observe_step(episode, sim, obs, b, rules)
    times[TIME_SAVED] += saved
    illegal = episode.last_operation[b, LAST_KIND] == OP_ILLEGAL
    return saved * rules.reward_per_us - (rules.illegal_penalty if illegal else 0.0)


@device
def _end_layer(episode, sim, stream, obs, b, trace, rules):
    """Keep the layer's placement and go to the next layer or interval. Returns what that layer is credited with, µs."""
    layer, times = int(episode.clock[b, CLOCK_LAYER]), episode.times_us[b]
    copy_slots(sim.slots[b], episode.slots[b, layer])
    served, migration_us = _next_time(sim, b, rules), migration_time(sim, b, rules.costs)
    times[TIME_SERVED] += served
    times[TIME_MIGRATED] += with_migration(served, migration_us, times[TIME_NEXT_START], rules.costs) - served
    if layer + 1 < episode.slots.shape[1]:
        return begin_layer(episode, sim, obs, b, trace, rules, layer + 1)
    episode.clock[b, CLOCK_INTERVAL] += 1
    if episode.clock[b, CLOCK_INTERVAL] == rules.n_intervals:
        episode.clock[b, CLOCK_DONE] = 1
        return 0.0
    _keep_observed(sim, stream, b, rules)
    return _begin_interval(episode, sim, stream, obs, b, trace, rules)
