"""Batches on the CPU: every thread runs a range of environments."""

from __future__ import annotations

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels import lookahead
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.state import CLOCK_LAYER, CLOCK_OPERATION
from clustergym.moe_placement.launchers.prefetch import memory_of, prefetch

_begin_episode, _step, _load_layer = kernels.begin_episode, kernels.step, kernels.load_layer
_operate, _copy_slots = kernels.operate, kernels.copy_slots
_look_ahead_parts, _look_ahead_all = lookahead.look_ahead_parts, lookahead.look_ahead_all


@device
def _reset_range(first, last, where, episode, sim, stream, obs, trace, rules):
    for b in range(first, last):
        if where[b]:
            _begin_episode(episode, sim, stream, obs, b, trace, rules)


@device
def _step_range(first, last, expert, node, reward, episode, sim, stream, obs, trace, rules, blocks):
    for b in range(first, last):
        if b + 1 < last:
            # Neighbours mostly leave a layer together.
            prefetch(blocks, b + 1, int(episode.clock[b, CLOCK_OPERATION] + 1 == rules.ops_per_layer))
        reward[b] = _step(episode, sim, stream, obs, b, trace, rules, expert[b], node[b])


@device
def _look_ahead_range(first, last, experts, result, episode, sim, obs, rules):
    for b in range(first, last):
        for i in range(experts.shape[1]):
            _look_ahead_parts(episode, sim, obs, b, rules, experts[b, i], result[b, i])


@device
def _look_ahead_all_range(first, last, result, episode, sim, rules):
    for b in range(first, last):
        _look_ahead_all(episode, sim, b, rules, result[b])


@device
def _load_range(first, last, slots, rows, rank_start, episode, sim, obs, trace, rules):
    for b in range(first, last):
        layer = b % episode.slots.shape[1]
        _load_layer(episode, sim, obs, b, trace, rules, layer, slots[layer], rows, rank_start)


@device
def _finish_range(first, last, expert, node, episode, sim, obs, rules):
    for b in range(first, last):
        _operate(episode, sim, obs, b, rules, expert[b], node[b])
        _copy_slots(sim.slots[b], episode.slots[b, episode.clock[b, CLOCK_LAYER]])


def reset(where, episode, sim, stream, obs, trace, rules):
    """Begin new episodes where ``where`` (B,) is true."""
    spread(_reset_range, len(where), where, episode, sim, stream, obs, trace, rules)


def step(expert, node, reward, episode, sim, stream, obs, trace, rules):
    """One operation in every environment; writes ``reward`` (B,)."""
    # A batch does not fit into the caches: while one environment steps, the data of its neighbour is fetched.
    blocks = memory_of(
        [
            sim.slot_tokens, sim.slot_pairs, sim.visits, sim.node_visits, sim.visitors, sim.replica_choice,
            sim.replicas, sim.slots, sim.held_before, sim.load, episode.load_features, obs.gpus, obs.experts,
            obs.placement, obs.joint_mask, obs.traffic,
        ],
        [sim.rows, obs.coactivation, obs.affinity],
    )  # fmt: skip
    spread(_step_range, len(expert), expert, node, reward, episode, sim, stream, obs, trace, rules, blocks)


def look_ahead(experts, result, episode, sim, obs, rules):
    """What each operation on ``experts`` (B, M) would save; writes ``result`` (B, M, 3·G, parts)."""
    spread(_look_ahead_range, len(experts), experts, result, episode, sim, obs, rules)


def look_ahead_all(result, episode, sim, rules):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    spread(_look_ahead_all_range, len(result), result, episode, sim, rules)


def load_placement(slots, rows, rank_start, episode, sim, obs, trace, rules):
    """Environment b begins a visit to layer b mod L with ``slots`` (L, G, S), after these passes (P, T), (P, G + 1)."""
    n = len(episode.clock)
    spread(_load_range, n, slots, rows, rank_start, episode, sim, obs, trace, rules)


def finish_layer(expert, node, episode, sim, obs, rules):
    """The last operation on the layer of every environment: ``episode.slots`` is up to date, no other layer begins."""
    spread(_finish_range, len(expert), expert, node, episode, sim, obs, rules)
