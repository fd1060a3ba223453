"""One environment's episode: intervals, the walk over the layers, operations and rewards.

An operation earns what it saves on the next interval. The last operation of a visit to a layer also earns what the
visit saves on the later intervals of the episode, as far as nobody changes the layer again. So nothing is paid for what
others did, and the rewards of an episode add up to the time that it saved against serving with its start placement. The
unit is one percent of the mean time of a layer under the static placement.
"""

from __future__ import annotations

from clustergym.common.compiling import device
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time, with_migration
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.observation import observe_layer, observe_step, update_group_coactivation
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.passes import count_users, write_users, write_users_from_sets
from clustergym.moe_placement.kernels.replicas import MASK31, hash31, set_first_placement, static_slots
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


@device
def copy_slots(source, target):
    for g in range(target.shape[0]):
        for s in range(target.shape[1]):
            target[g, s] = source[g, s]


@device
def draw_episode(episode, stream, b, trace, rules):
    """Draw all intervals of an episode: the one that is observed first, and those that are served."""
    begin_stream(stream, b, trace, rules.schedule)
    for i in range(rules.n_intervals + 1):
        draw_interval(
            stream, b, trace, rules.phase, rules.schedule, rules.rate, rules.rank_imbalance, episode.rows[b, i],
            episode.rank_start[b, i],
        )  # fmt: skip
    episode.clock[b, CLOCK_REUSE] = stream.position[b, AT_REUSE]
    names, order = episode.names[b], stream.orders[b, stream.drawn.shape[1]]
    write_order(order, names.shape[0], hash31(stream.random[b, RANDOM_KEY] ^ 0x5BD1E995))
    for e in range(names.shape[0]):
        names[e] = permuted(e, order) if rules.renumber else e


@device
def start_from_eplb(episode, b, trace):
    """Let the episode start from EPLB's placement for the loads of the first interval."""
    load, rows = episode.float_scratch[b], episode.rows[b, 0]
    n_experts = episode.int_scratch.shape[2]
    for layer in range(episode.slots.shape[1]):
        for e in range(n_experts):
            load[e] = 0.0
        for w in range(rows.shape[0]):
            for t in range(rows.shape[1]):
                for k in range(trace.experts.shape[2]):
                    e = trace.experts[layer, rows[w, t], k]
                    if e >= 0:
                        load[episode.names[b, e]] += 1.0
        eplb_slots(episode.slots[b, layer], load[:n_experts], 1, 0, episode.int_scratch[b], load)


@device
def _let_interval(episode, sim, b, i, first):
    """Let the passes of interval ``i`` be those from ``first`` on."""
    rows, rank_start = episode.rows[b, i], episode.rank_start[b, i]
    for w in range(rows.shape[0]):
        for t in range(rows.shape[1]):
            sim.rows[b, first + w, t] = rows[w, t]
        for g in range(rank_start.shape[1]):
            sim.rank_start[b, first + w, g] = rank_start[w, g]


@device
def _mix_observed(episode, sim, stream, b, rules, interval):
    """Deal the tokens of the observed passes over their places at random."""
    n_passes, n_tokens, rows = rules.n_passes, sim.rows.shape[2], episode.rows[b, interval]
    order = stream.orders[b, stream.drawn.shape[1]]
    key = hash31(stream.random[b, RANDOM_KEY] ^ hash31(stream.random[b, RANDOM_COUNTER] + interval & MASK31))
    write_order(order, n_passes * n_tokens, key)
    for w in range(n_passes):
        for t in range(n_tokens):
            j = permuted(w * n_tokens + t, order)
            sim.rows[b, j // n_tokens, j % n_tokens] = rows[w, t]


@device
def _renumber(sim, b, names):
    """Give the sets of ``users`` to the experts with other numbers, cycle by cycle."""
    users = sim.users[b]
    for start in range(names.shape[0]):
        e = int(names[start])
        while e > start:
            e = int(names[e])
        if e < start:  # a cycle that is done
            continue
        e = int(names[start])
        while e != start:
            for word in range(users.shape[1]):
                kept = users[start, word]
                users[start, word] = users[e, word]
                users[e, word] = kept
            e = int(names[e])


@device
def _count(episode, sim, b, first, last, trace, rules, layer):
    for w in range(first, last):
        if 64 * trace.expert_sets.shape[2] >= sim.replicas.shape[1]:
            write_users_from_sets(sim, b, w, trace.expert_sets[layer])
        else:
            write_users(sim, b, w, trace.experts[layer])
        if rules.renumber:
            _renumber(sim, b, episode.names[b])
        count_users(sim, b, w, rules.topology, rules.costs)


@device
def _next_time(sim, b, rules):
    """Mean time of a pass of the next interval, without migration, µs."""
    return mean_pass_time(sim, b, rules.n_passes, 2 * rules.n_passes, rules.topology, rules.costs, -1)


@device
def _next_total_time(episode, sim, b, rules):
    """The same with migration: the time whose decrease is rewarded."""
    before_us, migration_us = episode.times_us[b, TIME_NEXT_START], migration_time(sim, b, rules.costs)
    return with_migration(_next_time(sim, b, rules), migration_us, before_us, rules.costs)


@device
def _serve_later(episode, sim, b, trace, rules, layer, first):
    """Serve the intervals from ``first`` on with the layer's placement as it is now.

    Returns how much less time that takes than with the placement of the last call, µs. The passes of the next interval
    are used for it, and are not as they were.
    """
    saved, future = 0.0, episode.future_us[b, layer]
    for i in range(first, rules.n_intervals + 1):
        _let_interval(episode, sim, b, i, rules.n_passes)
        _count(episode, sim, b, rules.n_passes, 2 * rules.n_passes, trace, rules, layer)
        now = _next_time(sim, b, rules)
        saved += future[i - 1] - now
        future[i - 1] = now
    return saved


@device
def _begin_layer(episode, sim, obs, b, trace, rules, layer):
    """Go to a layer."""
    n_passes, times, interval = rules.n_passes, episode.times_us[b], int(episode.clock[b, CLOCK_INTERVAL])
    copy_slots(episode.slots[b, layer], sim.slots[b])
    set_first_placement(sim, b, rules.topology)
    if interval == 0:
        # Nobody has changed this layer: it still has the start placement.
        _serve_later(episode, sim, b, trace, rules, layer, 2)
    _let_interval(episode, sim, b, interval + 1, n_passes)
    _count(episode, sim, b, 0, 2 * n_passes, trace, rules, layer)
    episode.clock[b, CLOCK_LAYER] = layer
    episode.clock[b, CLOCK_OPERATION] = 0
    times[TIME_OBSERVED] = mean_pass_time(sim, b, 0, n_passes, rules.topology, rules.costs, -1)
    times[TIME_OBSERVED_START] = times[TIME_OBSERVED]
    times[TIME_NEXT_START] = _next_time(sim, b, rules)
    times[TIME_NEXT] = times[TIME_NEXT_START]
    if interval == 0:
        times[TIME_START] += times[TIME_NEXT_START]
        for i in range(1, rules.n_intervals):
            times[TIME_START] += episode.future_us[b, layer, i]
    observe_layer(episode, sim, obs, b, trace, rules, layer)


@device
def _begin_interval(episode, sim, stream, obs, b, trace, rules):
    """Let the interval that was served last be the observed one, and go to the first layer."""
    interval = int(episode.clock[b, CLOCK_INTERVAL])
    _let_interval(episode, sim, b, interval, 0)
    if rules.mix_observed:
        _mix_observed(episode, sim, stream, b, rules, interval)
    _begin_layer(episode, sim, obs, b, trace, rules, 0)


@device
def begin_episode(episode, sim, stream, obs, b, trace, rules):
    """Go to the first layer after :func:`draw_episode`, which may be followed by :func:`start_from_eplb`."""
    n_layers, n_experts = episode.slots.shape[1], sim.replicas.shape[1]
    for layer in range(n_layers):
        for e in range(n_experts):
            episode.load_average[b, layer, e] = -1.0
        if not rules.start_eplb:
            static_slots(episode.slots[b, layer], n_experts)
        copy_slots(episode.slots[b, layer], episode.first_slots[b, layer])
    for i in range(N_TIMES):
        episode.times_us[b, i] = 0.0
    for i in range(N_LAST):
        episode.last_operation[b, i] = -1
    episode.clock[b, CLOCK_INTERVAL] = 0
    episode.clock[b, CLOCK_DONE] = 0
    _begin_interval(episode, sim, stream, obs, b, trace, rules)
    observe_step(episode, sim, obs, b, rules)


@device
def _operate(episode, sim, obs, b, rules, expert, node):
    """Apply one operation to the current layer; returns what it saves on the next interval, µs."""
    times, last, n_passes = episode.times_us[b], episode.last_operation[b], rules.n_passes
    kind, source, target, victim = resolve(sim, b, expert, node, n_passes)
    saved = 0.0
    if kind != OP_NOTHING and kind != OP_ILLEGAL:
        apply_operation(sim, b, expert, source, target, victim, rules.topology, rules.costs, 2 * n_passes)
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
    saved = _operate(episode, sim, obs, b, rules, expert, node)
    penalty = rules.illegal_penalty if episode.last_operation[b, LAST_KIND] == OP_ILLEGAL else 0.0
    episode.clock[b, CLOCK_OPERATION] += 1
    if episode.clock[b, CLOCK_OPERATION] == rules.ops_per_layer:
        saved += _end_layer(episode, sim, stream, obs, b, trace, rules)
    observe_step(episode, sim, obs, b, rules)
    episode.times_us[b, TIME_SAVED] += saved
    return saved * rules.reward_per_us - penalty


@device
def _changed(before, now):
    for g in range(now.shape[0]):
        for s in range(now.shape[1]):
            if before[g, s] != now[g, s]:
                return True
    return False


@device
def _end_layer(episode, sim, stream, obs, b, trace, rules):
    """Keep the layer's placement and go to the next layer or interval.

    Returns what the visit saves on the intervals after the next, µs.
    """
    layer, interval = int(episode.clock[b, CLOCK_LAYER]), int(episode.clock[b, CLOCK_INTERVAL])
    times = episode.times_us[b]
    served, migration_us, later = _next_time(sim, b, rules), migration_time(sim, b, rules.costs), 0.0
    times[TIME_SERVED] += served
    times[TIME_MIGRATED] += with_migration(served, migration_us, times[TIME_NEXT_START], rules.costs) - served
    if _changed(episode.slots[b, layer], sim.slots[b]):
        copy_slots(sim.slots[b], episode.slots[b, layer])
        if interval + 1 < rules.n_intervals:
            later = _serve_later(episode, sim, b, trace, rules, layer, interval + 2)
            # The observation of the operation is about the observed passes alone, which are as they were.
    if layer + 1 < episode.slots.shape[1]:
        _begin_layer(episode, sim, obs, b, trace, rules, layer + 1)
        return later
    episode.clock[b, CLOCK_INTERVAL] += 1
    if episode.clock[b, CLOCK_INTERVAL] == rules.n_intervals:
        episode.clock[b, CLOCK_DONE] = 1
    else:
        _begin_interval(episode, sim, stream, obs, b, trace, rules)
    return later
