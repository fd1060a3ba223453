"""One environment's episode: windows, the walk over the layers, operations and rewards."""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import layer_time, migration_time
from clustergym.moe_placement.kernels.counting import count_window
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.observation import observe_layer, observe_step, update_local_coactivation
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.replicas import set_first_placement, static_slots
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    CLOCK_WINDOW,
    LAST_EXPERT,
    LAST_FROM,
    LAST_KIND,
    LAST_NODE,
    LAST_TO,
    LAST_VICTIM,
    MODE_STAY,
    N_LAST,
    N_TIMES,
    OP_ILLEGAL,
    OP_NOTHING,
    TIME_MIGRATED,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
    TIME_REWARDED,
    TIME_SAVED,
    TIME_SERVED,
)
from clustergym.moe_placement.kernels.streams import begin_stream, draw_window


@device
def _copy_slots(source, target):
    for g in range(target.shape[0]):
        for s in range(target.shape[1]):
            target[g, s] = source[g, s]


@device
def _locate(episode, sim, b, w, layer, rules):
    """Set where the window's tokens are before the layer. In MODE_STAY the layer before must have been counted."""
    if rules.network.mode == MODE_STAY:
        for t in range(sim.rows.shape[2]):
            sim.origin[b, w, t] = sim.destination[b, w, t] if layer > 0 else episode.home[b, w, t]


@device
def _draw(episode, sim, stream, b, w, trace, rules):
    """Draw window ``w``. Except in MODE_STAY, the origin of a token is its home in all layers."""
    home = episode.home[b, w] if rules.network.mode == MODE_STAY else sim.origin[b, w]
    draw_window(stream, b, trace, rules.schedule, rules.rate, sim.slots.shape[1], sim.rows[b, w], home)


@device
def _window_time(episode, sim, b, w, trace, rules, slots, write):
    """µs of window ``w`` over all layers under ``slots`` (L, G, S); ``write`` keeps the time of each layer."""
    total = 0.0
    for layer in range(slots.shape[0]):
        _copy_slots(slots[layer], sim.slots[b])
        set_first_placement(sim, b, rules.network)
        _locate(episode, sim, b, w, layer, rules)
        count_window(sim, b, w, trace.experts, layer, rules.network)
        time = layer_time(sim, b, w, rules.costs, rules.network, -1, 1.0)
        total += time
        if write:
            episode.next_window_us[b, layer] = time
    return total


@device
def _rewarded_time(sim, b, rules):
    """The time whose decrease is rewarded."""
    w = 0 if rules.reward_observed else 1
    time = layer_time(sim, b, w, rules.costs, rules.network, rules.reward_norm_log2, 1.0)
    return time + migration_time(sim, b, rules.costs)


@device
def _begin_layer(episode, sim, obs, b, trace, rules, layer):
    """Go to a layer. Returns how earlier layers' operations changed its time in the next window (MODE_STAY), µs."""
    _copy_slots(episode.slots[b, layer], sim.slots[b])
    set_first_placement(sim, b, rules.network)
    for w in range(2):
        _locate(episode, sim, b, w, layer, rules)
        count_window(sim, b, w, trace.experts, layer, rules.network)
    episode.clock[b, CLOCK_LAYER] = layer
    episode.clock[b, CLOCK_OPERATION] = 0
    times = episode.times_us[b]
    times[TIME_OBSERVED] = layer_time(sim, b, 0, rules.costs, rules.network, -1, 1.0)
    times[TIME_OBSERVED_START] = times[TIME_OBSERVED]
    times[TIME_REWARDED] = _rewarded_time(sim, b, rules)
    observe_layer(episode, sim, obs, b, trace, rules, layer)
    if rules.network.mode == MODE_STAY and layer > 0 and not rules.reward_observed:
        return episode.next_window_us[b, layer] - layer_time(sim, b, 1, rules.costs, rules.network, -1, 1.0)
    return 0.0


@device
def _begin_window(episode, sim, stream, obs, b, trace, rules):
    """Draw the next window; window 0 is set. Returns what the episode's operations so far save on the next window, µs."""
    _draw(episode, sim, stream, b, 1, trace, rules)
    saved = 0.0
    if rules.network.mode == MODE_STAY or rules.stream_credit:
        now = _window_time(episode, sim, b, 1, trace, rules, episode.slots[b], True)
        if rules.stream_credit:
            saved = _window_time(episode, sim, b, 1, trace, rules, episode.first_slots[b], False) - now
    _begin_layer(episode, sim, obs, b, trace, rules, 0)
    return saved


@device
def begin_episode(episode, sim, stream, obs, b, trace, rules):
    """Start a new stream, with its first window as the observed one, and the placement that the episode starts from."""
    n_layers, n_experts = episode.slots.shape[1], sim.pairs.shape[2]
    begin_stream(stream, b, trace, rules.schedule)
    _draw(episode, sim, stream, b, 0, trace, rules)
    for layer in range(n_layers):
        slots = episode.slots[b, layer]
        for e in range(n_experts):
            episode.load_average[b, layer, e] = -1.0
        if rules.start_eplb:
            load = episode.float_scratch[b]
            for e in range(n_experts):
                load[e] = 0.0
            for t in range(sim.rows.shape[2]):
                for k in range(trace.experts.shape[2]):
                    e = trace.experts[layer, sim.rows[b, 0, t], k]
                    if e >= 0:
                        load[e] += 1.0
            eplb_slots(slots, load[:n_experts], 1, 0, episode.int_scratch[b], load)
        else:
            static_slots(slots, n_experts)
        _copy_slots(slots, episode.first_slots[b, layer])
    for i in range(N_TIMES):
        episode.times_us[b, i] = 0.0
    for i in range(N_LAST):
        episode.last_operation[b, i] = -1
    episode.clock[b, CLOCK_WINDOW] = 0
    episode.clock[b, CLOCK_DONE] = 0
    _begin_window(episode, sim, stream, obs, b, trace, rules)
    observe_step(episode, sim, obs, b, rules)


@device
def step(episode, sim, stream, obs, b, trace, rules, expert, node):
    """Apply one operation and go on to the next state; returns the reward. An episode that is over does not change."""
    if episode.clock[b, CLOCK_DONE]:
        return 0.0
    times, last = episode.times_us[b], episode.last_operation[b]
    kind, source, target, victim = resolve(sim, b, expert, node)
    saved = 0.0
    if kind != OP_NOTHING and kind != OP_ILLEGAL:
        apply_operation(sim, b, expert, source, target, victim, rules.network, 2)
        after = _rewarded_time(sim, b, rules)
        saved = times[TIME_REWARDED] - after
        times[TIME_REWARDED] = after
        times[TIME_OBSERVED] = layer_time(sim, b, 0, rules.costs, rules.network, -1, 1.0)
        # Only experts on these two GPUs, and the moved one, have new neighbours.
        update_local_coactivation(episode, sim, obs, b, expert)
        for s in range(sim.slots.shape[2]):
            if source >= 0 and sim.slots[b, source, s] >= 0:
                update_local_coactivation(episode, sim, obs, b, sim.slots[b, source, s])
            if target >= 0 and sim.slots[b, target, s] >= 0:
                update_local_coactivation(episode, sim, obs, b, sim.slots[b, target, s])
    last[LAST_KIND] = kind
    last[LAST_EXPERT] = expert
    last[LAST_NODE] = node
    last[LAST_FROM] = source
    last[LAST_TO] = target
    last[LAST_VICTIM] = victim
    episode.clock[b, CLOCK_OPERATION] += 1
    if episode.clock[b, CLOCK_OPERATION] == rules.ops_per_layer:
        saved += _end_layer(episode, sim, stream, obs, b, trace, rules)
    observe_step(episode, sim, obs, b, rules)
    times[TIME_SAVED] += saved
    return saved / rules.static_us


@device
def _end_layer(episode, sim, stream, obs, b, trace, rules):
    """Keep the layer's placement and go to the next layer or window. Returns what that adds to the saved time, µs."""
    layer, times = int(episode.clock[b, CLOCK_LAYER]), episode.times_us[b]
    _copy_slots(sim.slots[b], episode.slots[b, layer])
    times[TIME_SERVED] += layer_time(sim, b, 1, rules.costs, rules.network, -1, 1.0)
    times[TIME_MIGRATED] += migration_time(sim, b, rules.costs)
    if layer + 1 < episode.slots.shape[1]:
        return _begin_layer(episode, sim, obs, b, trace, rules, layer + 1)
    episode.clock[b, CLOCK_WINDOW] += 1
    if episode.clock[b, CLOCK_WINDOW] == rules.n_windows:
        episode.clock[b, CLOCK_DONE] = 1
        return 0.0
    home = episode.home if rules.network.mode == MODE_STAY else sim.origin
    for t in range(sim.rows.shape[2]):
        sim.rows[b, 0, t] = sim.rows[b, 1, t]
        home[b, 0, t] = home[b, 1, t]
    return _begin_window(episode, sim, stream, obs, b, trace, rules)
