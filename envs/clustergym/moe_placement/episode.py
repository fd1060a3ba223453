"""One environment's episode: windows, the walk over the layers, rewards and observations.

Device functions like those of :mod:`.dynamics`; window 0 of the ``Sim`` is the one just served, which the agents see,
window 1 the one to come, which only the reward knows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clustergym.moe_placement.dynamics import (
    COST_DISPATCH_INTER_US,
    COST_DISPATCH_INTRA_US,
    COST_EXPERT_US,
    COST_PAIR_US,
    MODE_STAY,
    OP_ILLEGAL,
    OP_NOTHING,
    begin_window,
    change,
    count_copies,
    count_window,
    device,
    layer_time,
    link_copies,
    look_ahead,
    migration_time,
    resolve,
    static_slots,
    u,
)
from clustergym.moe_placement.eplb import eplb_slots
from clustergym.moe_placement.stream import begin_stream, draw_window

N_EXPERT_FEATURES = 9
N_GPU_FEATURES = 16
N_PROGRESS = 6
HOT_EXPERTS = 8
PAIR_TOKENS = 1024
AFFINITY_TOKENS = 256

# Columns of Env.clock, Env.op and Env.time.
LAYER, OP, WINDOW, DONE = 0, 1, 2, 3
OP_KIND, OP_EXPERT, OP_NODE, OP_FROM, OP_TO, OP_VICTIM = 0, 1, 2, 3, 4, 5
TIME_SEEN, TIME_SEEN_START, TIME_NEXT, SERVED, MIGRATED, SAVED = 0, 1, 2, 3, 4, 5
N_TIMES = 6


class Env(NamedTuple):
    """State of B episodes, beside their ``Sim`` and ``StreamState``."""

    slots: np.ndarray
    """(B, L, G, S) int16: placement of every layer"""
    first: np.ndarray
    """(B, L, G, S) int16: placement that the episode began with"""
    home: np.ndarray
    """(B, 2, T) uint8: home GPU of each token in MODE_STAY; elsewhere ``Sim.src`` is that"""
    ema: np.ndarray
    """(B, L, E) float32: moving average of the load shares, −1 before the first window"""
    base: np.ndarray
    """(B, L) float64: µs of the next window's layers before this window's operations"""
    clock: np.ndarray
    """(B, 4) int32: layer, operation in it, windows served, done"""
    op: np.ndarray
    """(B, 6) int32: kind, expert, node, from, to, victim of the last operation"""
    time: np.ndarray
    """(B, 6) float64 µs: see ``TIME_*``; SERVED … SAVED add up over the episode"""
    ints: np.ndarray
    """(B, 3, E) int32 scratch"""
    shared: np.ndarray
    """(B, G + 1, G) int32 scratch: experts that two GPUs both hold; the last row: pairs that each GPU computes"""
    takes: np.ndarray
    """(B, G + 1, G) int8 scratch: 1 where the column's GPU takes a replica from the row's; the last row: from nowhere"""
    share: np.ndarray
    """(B, E, 3) float32: the first three features of each expert, which stay while the agents work on a layer"""
    company: np.ndarray
    """(B, E) float64: co-activation with the experts on the same GPUs"""
    heat: np.ndarray
    """(B, E) float32: how much each expert fires together with the hottest ones"""
    floats: np.ndarray
    """(B, E + G) float64 scratch"""


class Obs(NamedTuple):
    """Observation buffers, written in place."""

    experts: np.ndarray
    coactivation: np.ndarray
    affinity: np.ndarray
    gpus: np.ndarray
    traffic: np.ndarray
    placement: np.ndarray
    progress: np.ndarray
    expert_mask: np.ndarray
    gpu_mask: np.ndarray
    joint_mask: np.ndarray
    lookahead: np.ndarray


class Rules(NamedTuple):
    """What all environments of a batch share."""

    cost: np.ndarray
    static_us: float
    """Time of a window over all layers under the static placement: the unit of rewards."""
    net: np.ndarray
    """(4·G + 2,) int64: see :mod:`.dynamics`"""
    mode: int
    doublings: int
    """Smooth norm of the look-ahead; −1 is the true time."""
    schedule: int
    rate: float
    n_windows: int
    ops_per_layer: int
    start_eplb: int
    """1 starts from EPLB on the first window, 0 from the static placement."""
    stream_credit: int
    """1 also rewards, at each window boundary, what earlier operations still save."""
    reward_observed: int
    """1 rewards the decrease on the observed window in place of the next one."""
    reward_doublings: int


@device
def _load_slots(env, sim, b, layer, which, net):
    """Put a layer's placement into the ``Sim``: 0 the current one, 1 the episode's first."""
    for g in range(sim.slots.shape[1]):
        for s in range(sim.slots.shape[2]):
            sim.slots[b, g, s] = env.slots[b, layer, g, s] if which == 0 else env.first[b, layer, g, s]
    begin_window(sim, b, net)


@device
def _locate(env, sim, b, w, layer, mode):
    """Set where the window's tokens are before the layer; in MODE_STAY the layer before must have been counted."""
    if mode == MODE_STAY:
        for t in range(sim.tok.shape[2]):
            sim.src[b, w, t] = sim.loc[b, w, t] if layer > 0 else env.home[b, w, t]


@device
def _draw(env, sim, stream, b, w, corpus, rules):
    """Draw window ``w``. Tokens are at home until the walk begins, and in all modes but MODE_STAY they remain there."""
    home = env.home[b, w] if rules.mode == MODE_STAY else sim.src[b, w]
    draw_window(stream, b, corpus, rules.schedule, rules.rate, sim.slots.shape[1], sim.tok[b, w], home)


@device
def _whole_time(env, sim, b, w, corpus, rules, which, write):
    """µs of window ``w`` over all layers under a placement; ``write`` notes each layer's in ``base``."""
    total = 0.0
    for layer in range(env.slots.shape[1]):
        _load_slots(env, sim, b, layer, which, rules.net)
        _locate(env, sim, b, w, layer, rules.mode)
        count_window(sim, b, w, corpus.experts, layer, rules.net, rules.mode)
        time = layer_time(sim, b, w, rules.cost, rules.net, rules.mode, -1, 1.0)
        total += time
        if write:
            env.base[b, layer] = time
    return total


@device
def _reward_time(sim, b, rules):
    """The time whose decrease is rewarded."""
    w = 0 if rules.reward_observed else 1
    return layer_time(sim, b, w, rules.cost, rules.net, rules.mode, rules.reward_doublings, 1.0) + migration_time(
        sim, b, rules.cost
    )


@device
def _begin_layer(env, sim, obs, b, corpus, rules, layer):
    """Walk to a layer. Returns what earlier layers' operations changed in its next-window time (MODE_STAY), µs."""
    _load_slots(env, sim, b, layer, 0, rules.net)
    for w in range(2):
        _locate(env, sim, b, w, layer, rules.mode)
        count_window(sim, b, w, corpus.experts, layer, rules.net, rules.mode)
    env.clock[b, LAYER] = layer
    env.clock[b, OP] = 0
    env.time[b, TIME_SEEN] = layer_time(sim, b, 0, rules.cost, rules.net, rules.mode, -1, 1.0)
    env.time[b, TIME_SEEN_START] = env.time[b, TIME_SEEN]
    env.time[b, TIME_NEXT] = _reward_time(sim, b, rules)
    _observe_layer(env, sim, obs, b, corpus, rules, layer)
    if rules.mode == MODE_STAY and layer > 0 and not rules.reward_observed:
        return env.base[b, layer] - layer_time(sim, b, 1, rules.cost, rules.net, rules.mode, -1, 1.0)
    return 0.0


@device
def _begin_window(env, sim, stream, obs, b, corpus, rules):
    """Draw the window to come; window 0 is in place. Returns what the episode's operations so far save on it, µs."""
    _draw(env, sim, stream, b, 1, corpus, rules)
    kept = 0.0
    if rules.mode == MODE_STAY or rules.stream_credit:
        now = _whole_time(env, sim, b, 1, corpus, rules, 0, True)
        if rules.stream_credit:
            kept = _whole_time(env, sim, b, 1, corpus, rules, 1, False) - now
    _begin_layer(env, sim, obs, b, corpus, rules, 0)
    return kept


@device
def begin_episode(env, sim, stream, obs, b, corpus, rules):
    """A new stream, its first window as the observed one, and the placement that the episode starts from."""
    n_layers, n_experts = env.slots.shape[1], sim.pairs.shape[2]
    begin_stream(stream, b, corpus, rules.schedule)
    _draw(env, sim, stream, b, 0, corpus, rules)
    for layer in range(n_layers):
        for e in range(n_experts):
            env.ema[b, layer, e] = -1.0
        if rules.start_eplb:
            load = env.floats[b]
            for e in range(n_experts):
                load[e] = 0.0
            for t in range(sim.tok.shape[2]):
                for k in range(corpus.experts.shape[2]):
                    e = corpus.experts[layer, sim.tok[b, 0, t], k]
                    if e >= 0:
                        load[e] += 1.0
            eplb_slots(env.slots[b, layer], load[:n_experts], 1, 0, env.ints[b], load)
        else:
            static_slots(env.slots[b, layer], n_experts)
        for g in range(sim.slots.shape[1]):
            for s in range(sim.slots.shape[2]):
                env.first[b, layer, g, s] = env.slots[b, layer, g, s]
    for i in range(N_TIMES):
        env.time[b, i] = 0.0
    for i in range(6):
        env.op[b, i] = -1
    env.clock[b, WINDOW] = 0
    env.clock[b, DONE] = 0
    _begin_window(env, sim, stream, obs, b, corpus, rules)
    _observe_step(env, sim, obs, b, corpus, rules)


@device
def step(env, sim, stream, obs, b, corpus, rules, expert, node):
    """Apply one operation and walk on; returns the reward. Does nothing to an episode that is over."""
    if env.clock[b, DONE]:
        return 0.0
    layer = int(env.clock[b, LAYER])
    kind, source, target, victim = resolve(sim, b, expert, node)
    saved = 0.0
    if kind != OP_NOTHING and kind != OP_ILLEGAL:
        change(
            sim,
            b,
            expert,
            source,
            target,
            victim,
            target,
            source,
            rules.net,
            rules.mode,
            2,
        )
        after = _reward_time(sim, b, rules)
        saved = env.time[b, TIME_NEXT] - after
        env.time[b, TIME_NEXT] = after
        env.time[b, TIME_SEEN] = layer_time(sim, b, 0, rules.cost, rules.net, rules.mode, -1, 1.0)
        # Nobody else has new company.
        _keep_company(env, sim, obs, b, expert)
        for s in range(sim.slots.shape[2]):
            if source >= 0 and sim.slots[b, source, s] >= 0:
                _keep_company(env, sim, obs, b, sim.slots[b, source, s])
            if target >= 0 and sim.slots[b, target, s] >= 0:
                _keep_company(env, sim, obs, b, sim.slots[b, target, s])
    env.op[b, OP_KIND] = kind
    env.op[b, OP_EXPERT] = expert
    env.op[b, OP_NODE] = node
    env.op[b, OP_FROM] = source
    env.op[b, OP_TO] = target
    env.op[b, OP_VICTIM] = victim
    env.clock[b, OP] += 1
    if env.clock[b, OP] == rules.ops_per_layer:
        for g in range(sim.slots.shape[1]):
            for s in range(sim.slots.shape[2]):
                env.slots[b, layer, g, s] = sim.slots[b, g, s]
        env.time[b, SERVED] += layer_time(sim, b, 1, rules.cost, rules.net, rules.mode, -1, 1.0)
        env.time[b, MIGRATED] += migration_time(sim, b, rules.cost)
        if layer + 1 < env.slots.shape[1]:
            saved += _begin_layer(env, sim, obs, b, corpus, rules, layer + 1)
        else:
            env.clock[b, WINDOW] += 1
            if env.clock[b, WINDOW] == rules.n_windows:
                env.clock[b, DONE] = 1
            else:
                for t in range(sim.tok.shape[2]):
                    sim.tok[b, 0, t] = sim.tok[b, 1, t]
                    if rules.mode == MODE_STAY:
                        env.home[b, 0, t] = env.home[b, 1, t]
                    else:
                        sim.src[b, 0, t] = sim.src[b, 1, t]
                saved += _begin_window(env, sim, stream, obs, b, corpus, rules)
    _observe_step(env, sim, obs, b, corpus, rules)
    env.time[b, SAVED] += saved
    return saved / rules.static_us


@device
def _observe_layer(env, sim, obs, b, corpus, rules, layer):
    """What stays the same while the agents work on a layer: co-activation, affinity to the layer before, drift."""
    n_experts, n_tokens, top_k = sim.pairs.shape[2], sim.tok.shape[2], corpus.experts.shape[2]
    together, before, tok = obs.coactivation[b], obs.affinity[b], sim.tok[b, 0]
    # A sample tells these probabilities well enough; where layers depend on each other the affinity is counted in full.
    stride = (n_tokens + PAIR_TOKENS - 1) // PAIR_TOKENS
    before_stride = 1 if rules.mode == MODE_STAY else (n_tokens + AFFINITY_TOKENS - 1) // AFFINITY_TOKENS
    here, past = corpus.experts[layer], corpus.experts[max(0, layer - 1)]
    used, came = env.ints[b, 0], env.ints[b, 1]
    for i in range(n_experts):
        used[i] = 0
        came[i] = 0
        for j in range(n_experts):
            together[i, j] = 0.0
            before[i, j] = 0.0
    for t in range(0, n_tokens, stride):
        row = u(tok[t])
        for k in range(top_k):
            i = here[row, k]
            if i < 0:
                continue
            used[u(i)] += 1
            for m in range(k):
                j = here[row, m]
                if j >= 0:
                    together[u(i), u(j)] += 1.0
    for t in range(0, n_tokens if layer > 0 else 0, before_stride):
        row = u(tok[t])
        for m in range(top_k):
            j = past[row, m]
            if j < 0:
                continue
            came[u(j)] += 1
            for k in range(top_k):
                i = here[row, k]
                if i >= 0:
                    before[u(j), u(i)] += 1.0
    for i in range(n_experts):
        for j in range(i):
            both = together[i, j] + together[j, i]
            together[i, j] = both
            together[j, i] = both
    total = 0
    for i in range(n_experts):
        total += sim.load[b, 0, i]
    total = max(1, total)
    for i in range(n_experts):
        load = sim.load[b, 0, i]
        # In float32 a quotient of counts comes out as it would from float64, rounded.
        uses, uses_before = np.float32(max(1, used[i])), np.float32(max(1, came[i]))
        for j in range(n_experts):
            together[i, j] /= uses
        for j in range(n_experts):
            before[i, j] /= uses_before
        share = load / total
        known = env.ema[b, layer, i]
        drift = 0.0 if known < 0 else (share - known) * n_experts
        env.ema[b, layer, i] = share if known < 0 else 0.5 * known + 0.5 * share
        env.share[b, i, 0] = share * n_experts
        env.share[b, i, 1] = env.ema[b, layer, i] * n_experts
        env.share[b, i, 2] = drift
    # How much each expert fires together with the hottest ones.
    for i in range(n_experts):
        env.heat[b, i] = 0.0
        used[i] = 0
    for _ in range(min(HOT_EXPERTS, n_experts)):
        hot = -1
        for i in range(n_experts):
            if used[i] == 0 and (hot < 0 or env.share[b, i, 0] > env.share[b, hot, 0]):
                hot = i
        used[hot] = 1
        for i in range(n_experts):
            env.heat[b, i] += together[hot, i] / HOT_EXPERTS
    for i in range(n_experts):
        _keep_company(env, sim, obs, b, i)


@device
def _keep_company(env, sim, obs, b, e):
    """Sum up the expert's co-activation with all that lie on its GPUs."""
    company, together = 0.0, obs.coactivation[b, e]
    for i in range(sim.nrep[b, e]):
        slots = sim.slots[b, sim.rep[b, e, i]]
        for s in range(slots.shape[0]):
            if slots[s] >= 0:
                company += together[u(slots[s])]
    env.company[b, e] = company


@device
def _observe_step(env, sim, obs, b, corpus, rules):
    """What an operation changes: placement, load and traffic of the GPUs, masks, progress."""
    n_experts, n_gpus, n_slots = sim.pairs.shape[2], sim.slots.shape[1], sim.slots.shape[2]
    net, per_node, cost = rules.net, rules.net[n_gpus + 1], rules.cost
    total = 0
    for e in range(n_experts):
        total += sim.load[b, 0, e]
    mean = max(1, total) / n_gpus
    time = env.time[b, TIME_SEEN]
    gpus, experts, load, share = obs.gpus[b], obs.experts[b], env.floats[b], env.share[b]
    slots, rep, nrep, pairs, placement = sim.slots[b], sim.rep[b], sim.nrep[b], sim.pairs[b, 0], obs.placement[b]
    intra_us, inter_us = cost[COST_DISPATCH_INTRA_US], cost[COST_DISPATCH_INTER_US]
    intra, inter = intra_us / time, inter_us / time

    count_copies(sim, b, sim.vis[b, 0], sim.nvis[b, 0], net, rules.mode)
    link_copies(sim, b, 0, net, rules.mode, obs.traffic[b])
    tot, traffic, shared, takes = sim.tot[b], obs.traffic[b], env.shared[b], env.takes[b]
    any_gpu = obs.gpu_mask[b]
    busiest, slowest = 0, -1.0
    for g in range(n_gpus):
        for h in range(n_gpus):
            shared[g, h] = 0
            traffic[g, h] *= intra if net[h] == net[g] else inter
    for g in range(n_gpus):
        done, active, held, spares, heat = 0, 0, 0, 0, 0.0
        for s in range(n_slots):
            e = slots[g, s]
            if e < 0:
                continue
            count = pairs[u(e), g]
            done += count
            active += count > 0
            held += 1
            spares += nrep[u(e)] > 1
            heat += env.heat[b, u(e)]
            for i in range(nrep[u(e)]):
                shared[u(rep[u(e), i]), g] += 1
        compute = cost[COST_EXPERT_US] * active + cost[COST_PAIR_US] * done
        if compute > slowest:
            busiest, slowest = g, compute
        load[g] = done / mean
        shared[n_gpus, g] = done
        takes[n_gpus, g] = held < n_slots
        # Leaving an expert where it is, or filling an empty GPU, is a choice everywhere.
        any_gpu[g] = 1
        any_gpu[n_gpus + g] = held < n_slots and held < n_experts
        any_gpu[2 * n_gpus + g] = spares > 0
        gpus[g, 3] = load[g]
        gpus[g, 4] = compute / time
        gpus[g, 5] = (n_slots - held) / n_slots
        gpus[g, 6] = tot[0, g] * intra
        gpus[g, 7] = tot[1, g] * intra
        gpus[g, 8] = tot[2, g] * inter
        gpus[g, 9] = tot[3, g] * inter
        gpus[g, 10] = active / n_slots
        gpus[g, 11] = heat
        gpus[g, 14] = (sim.mig[b, g, 0] + sim.mig[b, g, 1]) / n_slots
        gpus[g, 15] = intra_us / inter_us
    # A full GPU can swap with the source where it holds an expert that the source does not.
    for g in range(n_gpus):
        for h in range(n_gpus):
            takes[g, h] = takes[n_gpus, h] | (shared[g, h] < shared[h, h])

    joint, room = obs.joint_mask[b], takes[n_gpus]
    for e in range(n_experts):
        for g in range(n_gpus):
            placement[e, g] = 0.0
        source, most_done, most, top, moved = rep[e, 0], -1, 0, 0.0, 0
        for i in range(nrep[e]):
            g = u(rep[e, i])
            placement[e, g] = 1.0
            top = max(top, load[g])
            most = max(most, pairs[e, g])
            moved += sim.old[b, e, g] == 0
            if shared[n_gpus, g] > most_done:
                source, most_done = rep[e, i], shared[n_gpus, g]
        for f in range(3):
            experts[e, f] = share[e, f]
        experts[e, 3] = nrep[e] / n_gpus
        experts[e, 4] = most / max(1, sim.load[b, 0, e])
        experts[e, 5] = top
        experts[e, 6] = moved
        experts[e, 7] = env.company[b, e] / nrep[e]
        experts[e, 8] = placement[e, busiest]
        choices, taken = joint[e], takes[source]
        useful = 0
        for g in range(n_gpus):
            choices[g] = taken[g]
            choices[n_gpus + g] = room[g]
            choices[2 * n_gpus + g] = 0
            useful += taken[g]
        for i in range(nrep[e]):
            g = u(rep[e, i])
            useful -= taken[g]
            choices[g] = 1
            choices[u(n_gpus) + g] = 0
            choices[u(2 * n_gpus) + g] = nrep[e] > 1
        obs.expert_mask[b, e] = useful > 0 or nrep[e] > 1

    for g in range(n_gpus):
        first = net[g] * per_node
        node_load = 0.0
        for h in range(first, first + per_node):
            node_load += load[h]
        gpus[g, 12] = 1.0 if g == busiest else 0.0
        gpus[g, 13] = node_load / per_node
        for kind in range(3):
            row = kind * n_gpus + g
            for f in range(3):
                gpus[row, f] = 1.0 if f == kind else 0.0
            if kind > 0:
                for f in range(3, N_GPU_FEATURES):
                    gpus[row, f] = gpus[g, f]
    # On one GPU with every slot taken nothing can be done: leave a choice, all of them no-ops.
    if n_gpus == 1:
        for e in range(n_experts):
            obs.expert_mask[b, e] = 1

    obs.progress[b, 0] = env.clock[b, LAYER] / env.slots.shape[1]
    obs.progress[b, 1] = env.clock[b, OP] / rules.ops_per_layer
    obs.progress[b, 2] = env.clock[b, WINDOW] / rules.n_windows
    obs.progress[b, 3] = time / env.time[b, TIME_SEEN_START]
    obs.progress[b, 4] = slowest / time
    obs.progress[b, 5] = migration_time(sim, b, rules.cost) / time


@device
def look_ahead_all(env, sim, b, corpus, rules, result):
    """Relative time that each of the E × 3·G operations would save on the observed window."""
    for e in range(sim.pairs.shape[2]):
        look_ahead_one(env, sim, b, corpus, rules, e, result[e])


@device
def look_ahead_one(env, sim, b, corpus, rules, e, result):
    """Relative time that each of the 3·G operations on ``e`` would save on the observed window."""
    look_ahead(sim, b, e, rules.cost, rules.net, rules.mode, rules.doublings, result)
    for node in range(result.shape[0]):
        result[node] /= env.time[b, TIME_SEEN_START]
