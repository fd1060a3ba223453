"""Batches on the CPU: every thread runs a range of environments (or layers)."""

from __future__ import annotations

from clustergym.common.threads import spread
from clustergym.moe_placement import episode
from clustergym.moe_placement.dynamics import (
    MODE_STAY,
    begin_window,
    count_window,
    device,
    layer_times,
    link_copies,
    take_slots,
)
from clustergym.moe_placement.launchers.prefetch import memory_of, prefetch

_begin, _step, _look, _look_all = episode.begin_episode, episode.step, episode.look_ahead_one, episode.look_ahead_all


@device
def _reset_range(first, last, where, env, sim, stream, obs, corpus, rules):
    for b in range(first, last):
        if where[b]:
            _begin(env, sim, stream, obs, b, corpus, rules)


@device
def _step_range(first, last, expert, node, reward, env, sim, stream, obs, corpus, rules, blocks):
    for b in range(first, last):
        if b + 1 < last:
            # Neighbours mostly leave a layer together.
            prefetch(blocks, b + 1, int(env.clock[b, episode.OP] + 1 == rules.ops_per_layer))
        reward[b] = _step(env, sim, stream, obs, b, corpus, rules, expert[b], node[b])


@device
def _look_range(first, last, expert, result, env, sim, corpus, rules):
    for b in range(first, last):
        _look(env, sim, b, corpus, rules, expert[b], result[b])


@device
def _look_all_range(first, last, result, env, sim, corpus, rules):
    for b in range(first, last):
        _look_all(env, sim, b, corpus, rules, result[b])


@device
def _count_range(first, last, sim, placement, trace, net, mode):
    for b in range(first, last):
        if mode == MODE_STAY and b > 0:
            for t in range(sim.src.shape[2]):
                sim.src[b, 0, t] = sim.loc[b - 1, 0, t]
        begin_window(sim, b, net)
        take_slots(sim, b, placement[b], net)
        count_window(sim, b, 0, trace, b, net, mode)


def reset(where, env, sim, stream, obs, corpus, rules):
    """Begin new episodes where ``where`` (B,) is true."""
    spread(_reset_range, len(where), where, env, sim, stream, obs, corpus, rules)


def step(expert, node, reward, env, sim, stream, obs, corpus, rules):
    """One operation in every environment; writes ``reward`` (B,)."""
    # A batch does not fit into the caches: while one environment is stepped, what its neighbour needs is on its way from memory.
    blocks = memory_of(
        [
            *(
                sim.met,
                sim.run,
                sim.masks,
                sim.src,
                sim.pairs,
                sim.vis,
                sim.nvis,
                sim.pick,
                sim.rep,
                sim.slots,
                sim.old,
                sim.load,
                env.share,
            ),
            *(obs.gpus, obs.experts, obs.placement, obs.joint_mask, obs.traffic),
        ],
        [sim.tok, obs.coactivation, obs.affinity],
    )
    spread(_step_range, len(expert), expert, node, reward, env, sim, stream, obs, corpus, rules, blocks)


def look_ahead(expert, result, env, sim, corpus, rules):
    """What each operation on ``expert`` (B,) would save; writes ``result`` (B, 3·G)."""
    spread(_look_range, len(expert), expert, result, env, sim, corpus, rules)


def look_ahead_all(result, env, sim, corpus, rules):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    spread(_look_all_range, len(result), result, env, sim, corpus, rules)


def count(sim, placement, trace, net, mode):
    """Count window 0 of every layer b under ``placement`` (B, G, S); ``sim.slots`` holds the placement before."""
    if mode == MODE_STAY:
        # A layer begins where the one before left its tokens: one after the other.
        _count_range(0, len(placement), sim, placement, trace, net, mode)
    else:
        spread(_count_range, len(placement), sim, placement, trace, net, mode)


def times(sim, cost, net, mode, result, copies):
    """Write dispatch, compute, combine and migration µs of every layer b to ``result`` (B, 4), and its copies (B, G, G)."""
    for b in range(len(result)):
        result[b] = layer_times(sim, b, 0, cost, net, mode)
        link_copies(sim, b, 0, net, mode, copies[b])
