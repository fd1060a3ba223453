"""Batches on the CPU: every thread runs a range of environments (or layers)."""

from __future__ import annotations

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels import lookahead
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.cost import layer_times, link_copies
from clustergym.moe_placement.kernels.counting import count_window
from clustergym.moe_placement.kernels.replicas import set_first_placement, set_placement
from clustergym.moe_placement.kernels.state import CLOCK_OPERATION, MODE_STAY
from clustergym.moe_placement.launchers.prefetch import memory_of, prefetch

_begin_episode, _step = kernels.begin_episode, kernels.step
_look_ahead_one, _look_ahead_all = lookahead.look_ahead_one, lookahead.look_ahead_all


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
def _look_ahead_range(first, last, expert, result, episode, sim, rules):
    for b in range(first, last):
        _look_ahead_one(episode, sim, b, rules, expert[b], result[b])


@device
def _look_ahead_all_range(first, last, result, episode, sim, rules):
    for b in range(first, last):
        _look_ahead_all(episode, sim, b, rules, result[b])


@device
def _count_range(first, last, sim, placement, experts, network):
    for b in range(first, last):
        if network.mode == MODE_STAY and b > 0:
            for t in range(sim.origin.shape[2]):
                sim.origin[b, 0, t] = sim.destination[b - 1, 0, t]
        set_first_placement(sim, b, network)
        set_placement(sim, b, placement[b], network)
        count_window(sim, b, 0, experts, b, network)


def reset(where, episode, sim, stream, obs, trace, rules):
    """Begin new episodes where ``where`` (B,) is true."""
    spread(_reset_range, len(where), where, episode, sim, stream, obs, trace, rules)


def step(expert, node, reward, episode, sim, stream, obs, trace, rules):
    """One operation in every environment; writes ``reward`` (B,)."""
    # A batch does not fit into the caches: while one environment steps, the data of its neighbour is fetched from memory.
    blocks = memory_of(
        [
            sim.gpu_uses, sim.slot_tokens, sim.token_masks, sim.origin, sim.pairs, sim.visits, sim.node_visits,
            sim.replica_choice, sim.replicas, sim.slots, sim.held_before, sim.load, episode.load_features, obs.gpus,
            obs.experts, obs.placement, obs.joint_mask, obs.traffic,
        ],
        [sim.rows, obs.coactivation, obs.affinity],
    )  # fmt: skip
    spread(_step_range, len(expert), expert, node, reward, episode, sim, stream, obs, trace, rules, blocks)


def look_ahead(expert, result, episode, sim, rules):
    """What each operation on ``expert`` (B,) would save; writes ``result`` (B, 3·G)."""
    spread(_look_ahead_range, len(expert), expert, result, episode, sim, rules)


def look_ahead_all(result, episode, sim, rules):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    spread(_look_ahead_all_range, len(result), result, episode, sim, rules)


def count(sim, placement, experts, network):
    """Count window 0 of every layer b under ``placement`` (B, G, S); ``sim.slots`` holds the placement before.

    ``experts`` is (B, rows, K).
    """
    if network.mode == MODE_STAY:
        # A layer begins where the one before left its tokens: layers are counted in order.
        _count_range(0, len(placement), sim, placement, experts, network)
    else:
        spread(_count_range, len(placement), sim, placement, experts, network)


def times(sim, costs, network, result, copies):
    """Write dispatch, compute, combine and migration µs of every layer b to ``result`` (B, 4), and its copies (B, G, G)."""
    for b in range(len(result)):
        result[b] = layer_times(sim, b, 0, costs, network)
        link_copies(sim.visits[b, 0], sim.node_visits[b, 0], network, copies[b])
