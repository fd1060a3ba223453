"""Batches on the CPU: every thread runs a range of environments.

All commands are branches of one compiled function, because each compiled entry point is optimized together with all
kernels that it calls: five of them would take five times as long to compile.
"""

from __future__ import annotations

import numpy as np

from clustergym.common.threads import spread
from clustergym.moe_placement.kernels import episode as kernels
from clustergym.moe_placement.kernels import lookahead
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.state import CLOCK_LAYER, CLOCK_OPERATION
from clustergym.moe_placement.launchers.prefetch import NOTHING, memory_of, prefetch, prefetch_part
from clustergym.moe_placement.profiles import DEDUP, STAY

_begin_episode, _step, _load_layer = kernels.begin_episode, kernels.step, kernels.load_layer
_operate, _copy_slots = kernels.operate, kernels.copy_slots
_look_ahead_parts, _look_ahead_all = lookahead.look_ahead_parts, lookahead.look_ahead_all

_RESET, _STEP, _LOAD, _LOOK, _FINISH = range(5)
# Arguments that a command does not use.
_NO_CHOICE, _NO_REWARD, _NO_MASK = np.zeros((0, 0), np.int64), np.zeros(0), np.zeros(0, bool)
_NO_PARTS, _NO_SLOTS = np.zeros((0, 0, 0, 0), np.float32), np.zeros((0, 0, 0), np.int16)
_NO_ROWS = np.zeros((0, 0), np.int32)


# The last blocks of memory that a step prefetches: of these, only the parts that the operation needs.
_SLOT_TOKENS, _COACTIVATION, _SLOTS, _REPLICAS, _N_REPLICAS = 5, 4, 3, 2, 1


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
            prefetch_part(blocks, _COACTIVATION, b, int(sim.slots[b, g, s]), n_experts)


@device
def _prefetch_replicas(sim, blocks, b, expert):
    """Prefetch what :func:`_prefetch_operation` reads."""
    n_experts = sim.replicas.shape[1]
    if expert >= 0 and expert < n_experts:
        prefetch_part(blocks, _REPLICAS, b, expert, n_experts)
        prefetch_part(blocks, _N_REPLICAS, b, expert, n_experts)
        prefetch_part(blocks, _SLOTS, b, 0, 1)


@device
def _run(
    first, last, command, episode, sim, stream, obs, trace, rules, where, choice, reward, parts, slots, rows,
    rank_start, blocks,
):  # fmt: skip
    for b in range(first, last):
        if command == _RESET:
            if where[b]:
                _begin_episode(episode, sim, stream, obs, b, trace, rules)
        elif command == _STEP:
            if b + 1 < last and blocks.shape[0] > 0:
                # Neighbours mostly leave a layer together.
                leaves = episode.clock[b, CLOCK_OPERATION] + 1 == rules.ops_per_layer
                prefetch(blocks, b + 1, int(leaves))
                if not leaves:
                    _prefetch_operation(sim, blocks, b + 1, choice[0, b + 1], choice[1, b + 1])
                    if b + 2 < last:
                        _prefetch_replicas(sim, blocks, b + 2, choice[0, b + 2])
            reward[b] = _step(episode, sim, stream, obs, b, trace, rules, choice[0, b], choice[1, b])
        elif command == _LOAD:
            layer = b % episode.slots.shape[1]
            _load_layer(episode, sim, obs, b, trace, rules, layer, slots[layer], rows, rank_start)
        elif command == _LOOK:
            for i in range(choice.shape[1]):
                _look_ahead_parts(episode, sim, obs, b, rules, choice[b, i], parts[b, i])
        else:
            _operate(episode, sim, obs, b, rules, choice[0, b], choice[1, b])
            _copy_slots(sim.slots[b], episode.slots[b, episode.clock[b, CLOCK_LAYER]])


@device
def _look_ahead_all_range(first, last, result, episode, sim, rules):
    for b in range(first, last):
        _look_ahead_all(episode, sim, b, rules, result[b])


def _launch(
    command, state, where=_NO_MASK, choice=_NO_CHOICE, reward=_NO_REWARD, parts=_NO_PARTS, slots=_NO_SLOTS,
    rows=_NO_ROWS, rank_start=_NO_ROWS, blocks=NOTHING,
):  # fmt: skip
    """``state`` is (episode, sim, stream, obs, trace, rules)."""
    n = len(state[0].clock)
    spread(_run, n, command, *state, where, choice, reward, parts, slots, rows, rank_start, blocks)


def reset(where, state):
    """Begin new episodes where ``where`` (B,) is true."""
    _launch(_RESET, state, where=where)


def step(choice, reward, state):
    """One operation in every environment, ``choice`` (2, B) of expert and node; writes ``reward`` (B,)."""
    episode, sim, _, obs, _, rules = state
    # A batch does not fit into the caches: while one environment steps, the data of its neighbour is fetched.
    by_node = rules.topology.transport in (DEDUP, STAY)
    blocks = memory_of(
        [
            sim.slots, sim.n_replicas, sim.replicas, sim.piece_mask, sim.piece_at, sim.slot_pairs, sim.visits,
            sim.copies, sim.kernel_us, sim.moved_tokens, sim.load, sim.held_before, episode.load_features,
            episode.local_coactivation, episode.hot_coactivation, episode.float_scratch, episode.int_scratch,
            episode.in_common, episode.accepts, obs.gpus, obs.experts, obs.placement, obs.joint_mask, obs.traffic,
            *([sim.visitors, sim.node_visits] if by_node else []),
        ],
        [sim.slot_tokens, sim.replica_choice, sim.rows, obs.coactivation, obs.affinity],
        [sim.slot_tokens, obs.coactivation, sim.slots, sim.replicas, sim.n_replicas],
    )  # fmt: skip
    _launch(_STEP, state, choice=choice, reward=reward, blocks=blocks)


def look_ahead(experts, parts, state):
    """What each operation on ``experts`` (B, M) would save; writes ``parts`` (B, M, 3·G, parts)."""
    _launch(_LOOK, state, choice=experts, parts=parts)


def look_ahead_all(result, state):
    """What each operation on each expert would save; writes ``result`` (B, E, 3·G)."""
    episode, sim, _, _, _, rules = state
    spread(_look_ahead_all_range, len(result), result, episode, sim, rules)


def load_placement(slots, rows, rank_start, state):
    """Environment b begins a visit to layer b mod L with ``slots`` (L, G, S), after these passes (P, T), (P, G + 1)."""
    _launch(_LOAD, state, slots=slots, rows=rows, rank_start=rank_start)


def finish_layer(choice, state):
    """The last operation ``choice`` (2, B) on the layer of every environment: ``episode.slots`` is up to date."""
    _launch(_FINISH, state, choice=choice)
