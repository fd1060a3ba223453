"""Batches on the CPU: every thread runs a range of environments.

Reset and step are branches of one compiled function, because each compiled entry point is optimized together with all
kernels that it calls: two of them would take twice as long to compile. What few tasks need is compiled on demand.
"""

from __future__ import annotations

import numpy as np

from clustergym.common.compiling import device
from clustergym.common.threads import parallel_for
from clustergym.moe_placement.kernels import candidates, lookahead
from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels.state import CLOCK_OPERATION
from clustergym.moe_placement.launchers.prefetch import NOTHING, memory_of, prefetch, prefetch_part
from clustergym.moe_placement.profiles import DEDUP

_draw_episode, _begin_episode, _step = kernels.draw_episode, kernels.begin_episode, kernels.step
_start_from_eplb = kernels.start_from_eplb
_look_ahead_parts, _propose = lookahead.look_ahead_parts, candidates.propose

_DRAW, _BEGIN, _STEP = range(3)
# Arguments that a command does not use.
_NO_CHOICE, _NO_REWARD, _NO_MASK = np.zeros((0, 0), np.int64), np.zeros(0), np.zeros(0, bool)

# The last blocks of memory that a step prefetches: of these, only the parts that the operation needs.
_SLOT_TOKENS, _EXPERT_GRAPH, _SLOTS, _REPLICAS, _N_REPLICAS = 5, 4, 3, 2, 1


@device
def _prefetch_operation(sim, blocks, b, expert, node):
    """Prefetch what belongs to the GPUs that an operation changes: their tokens, co-activation of their experts."""
    if expert < 0 or expert >= sim.replicas.shape[1] or node < 0:
        return
    _prefetch_gpu(sim, blocks, b, node % sim.slots.shape[1])
    for i in range(sim.n_replicas[b, expert]):
        _prefetch_gpu(sim, blocks, b, int(sim.replicas[b, expert, i]))


@device
def _prefetch_gpu(sim, blocks, b, g):
    n_passes, n_gpus, n_experts = sim.slot_tokens.shape[1], sim.slots.shape[1], sim.replicas.shape[1]
    for w in range(n_passes):
        prefetch_part(blocks, _SLOT_TOKENS, b, w * n_gpus + g, n_passes * n_gpus)
    for s in range(sim.slots.shape[2]):
        if sim.slots[b, g, s] >= 0:
            prefetch_part(blocks, _EXPERT_GRAPH, b, int(sim.slots[b, g, s]), n_experts)


@device
def _prefetch_replicas(sim, blocks, b, expert):
    """Prefetch what :func:`_prefetch_operation` reads."""
    n_experts = sim.replicas.shape[1]
    if expert >= 0 and expert < n_experts:
        prefetch_part(blocks, _REPLICAS, b, expert, n_experts)
        prefetch_part(blocks, _N_REPLICAS, b, expert, n_experts)
        prefetch_part(blocks, _SLOTS, b, 0, 1)


@device
def _run(first, last, command, episode, sim, stream, obs, trace, rules, where, choice, reward, blocks):
    for b in range(first, last):
        if command == _DRAW:
            if where[b]:
                _draw_episode(episode, stream, b, trace, rules)
        elif command == _BEGIN:
            if where[b]:
                _begin_episode(episode, sim, stream, obs, b, trace, rules)
        else:
            if b + 1 < last and blocks.shape[0] > 0:
                # Neighbours mostly leave a layer together.
                leaves = episode.clock[b, CLOCK_OPERATION] + 1 == rules.ops_per_layer
                prefetch(blocks, b + 1, int(leaves))
                if not leaves:
                    _prefetch_operation(sim, blocks, b + 1, choice[0, b + 1], choice[1, b + 1])
                    if b + 2 < last:
                        _prefetch_replicas(sim, blocks, b + 2, choice[0, b + 2])
            reward[b] = _step(episode, sim, stream, obs, b, trace, rules, choice[0, b], choice[1, b])


@device
def _start_range(first, last, where, episode, trace):
    for b in range(first, last):
        if where[b]:
            _start_from_eplb(episode, b, trace)


@device
def _look_ahead_range(first, last, experts, column, result, episode, sim, rules):
    for b in range(first, last):
        for i in range(experts.shape[1]):
            _look_ahead_parts(episode, sim, b, rules, experts[b, i], column, result[b, i])


@device
def _propose_range(first, last, operations, mask, score, compact, episode, sim, obs, rules):
    for b in range(first, last):
        _propose(episode, sim, obs, b, rules, operations[b], mask[b], score[b], compact[b])


def reset(where, state):
    """Begin new episodes where ``where`` (B,) is true. ``state`` is (episode, sim, stream, obs, trace, rules)."""
    episode, _, _, _, trace, rules = state
    parallel_for(_run, len(where), _DRAW, *state, where, _NO_CHOICE, _NO_REWARD, NOTHING)
    if rules.start_eplb:
        parallel_for(_start_range, len(where), where, episode, trace)
    parallel_for(_run, len(where), _BEGIN, *state, where, _NO_CHOICE, _NO_REWARD, NOTHING)


def step(choice, reward, state):
    """One operation in every environment, ``choice`` (2, B) of expert and node; writes ``reward`` (B,)."""
    episode, sim, _, obs, _, rules = state
    # A batch does not fit into the caches: while one environment steps, the data of its neighbour is fetched.
    by_node = rules.topology.transport == DEDUP
    blocks = memory_of(
        [
            sim.slots, sim.n_replicas, sim.replicas, sim.piece_mask, sim.piece_at, sim.slot_pairs, sim.visits,
            sim.copies, sim.kernel_us, sim.moved_tokens, sim.load, sim.held_before, episode.load_features,
            episode.group_coactivation, episode.hot_coactivation, episode.used, episode.int_scratch,
            episode.in_common, episode.accepts, episode.exchange, obs.gpus, obs.experts, obs.action_mask,
            obs.gpu_graph, *([sim.visitors, sim.node_visits] if by_node else []),
        ],
        [sim.slot_tokens, sim.replica_choice, sim.rows, obs.expert_graph],
        [sim.slot_tokens, obs.expert_graph, sim.slots, sim.replicas, sim.n_replicas],
    )  # fmt: skip
    parallel_for(_run, len(reward), _STEP, *state, _NO_MASK, choice, reward, blocks)


def look_ahead(experts, column, result, state):
    """What operations on ``experts`` (B, M) would save; writes ``result`` (B, M, G, …) from ``column`` on."""
    episode, sim, _, _, _, rules = state
    parallel_for(_look_ahead_range, len(experts), experts, column, result, episode, sim, rules)


def propose(operations, mask, score, compact, state):
    """The k most promising operations; writes (B, k + 1, 2), (B, k + 1), scratch and (B, features)."""
    episode, sim, _, obs, _, rules = state
    parallel_for(_propose_range, len(mask), operations, mask, score, compact, episode, sim, obs, rules)
