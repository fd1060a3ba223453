"""Counting token by token: where the tokens of a window run, and which GPUs and nodes they visit.

:func:`count_window` counts a window from scratch. :func:`update_window` brings the counts up to date after the replicas of
one expert changed, and only visits the tokens that use this expert.
"""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device, index
from clustergym.moe_placement.kernels.index import find_segments, gather_uses, index_window
from clustergym.moe_placement.kernels.replicas import choose, hash31
from clustergym.moe_placement.kernels.state import (
    MODE_DEDUP,
    MODE_PER_EXPERT,
    MODE_STAY,
    PREVIOUS_CHOICE,
    PREVIOUS_COUNT,
    PREVIOUS_REPLICAS,
    SEGMENT_PIECE,
    SEGMENT_TOKEN,
)
from clustergym.moe_placement.kernels.token_sets import count_by_sets


@device
def _clear(matrix):
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            matrix[i, j] = 0


@device
def _add_visits(gpu_uses, origin, sign, visits, node_visits, network):
    """Add (sign 1) or subtract (−1) all visits of a token with these ``gpu_uses`` (words,) that comes from ``origin``."""
    field = (1 << network.field_bits) - 1
    last = -1
    for g in range(visits.shape[0]):
        if gpu_uses[network.word_of[g]] >> int(network.shift_of[g]) & field:
            visits[origin, g] += sign
            if network.node_of[g] != last:
                last = network.node_of[g]
                node_visits[origin, last] += sign


@device
def _count_load(sim, b, w, experts):
    """Write ``load``: from the index if a piece is whole, else token by token."""
    load, rows, segments = sim.load[b, w], sim.rows[b, w], sim.segments[b, w]
    use_starts, n_tokens = sim.use_starts[sim.index_plane[b, w]], sim.rows.shape[2]
    for e in range(load.shape[0]):
        load[e] = 0
    s = 0
    while segments[s, SEGMENT_TOKEN] < n_tokens:
        piece, first, last = segments[s, SEGMENT_PIECE], segments[s, SEGMENT_TOKEN], segments[s + 1, SEGMENT_TOKEN]
        s += 1
        if last - first == sim.piece_starts[piece + 1] - sim.piece_starts[piece]:
            starts = use_starts[piece]
            for e in range(load.shape[0]):
                load[e] += starts[e + 1] - starts[e]
            continue
        for t in range(first, last):
            row = index(rows[t])
            for k in range(experts.shape[1]):
                e = experts[row, k]
                if e >= 0:
                    load[index(e)] += 1


@device
def _count_single(experts, rows, gpu_uses, only_gpu, replicas, network):
    """Write ``gpu_uses`` of the experts that have one replica."""
    if gpu_uses.shape[1] == 1:
        for t in range(gpu_uses.shape[0]):
            row, total = index(rows[t]), 0
            for k in range(experts.shape[1]):
                total += only_gpu[index(experts[row, k] + 1)]
            gpu_uses[t, 0] = total
        return
    for t in range(gpu_uses.shape[0]):
        row = index(rows[t])
        for word in range(gpu_uses.shape[1]):
            gpu_uses[t, word] = 0
        for k in range(experts.shape[1]):
            e = experts[row, k]
            if e >= 0:
                gpu_uses[t, index(network.word_of[index(replicas[index(e), 0])])] += only_gpu[index(e + 1)]


@device
def _count_replicated(sim, b, w, e, network):
    """Add ``gpu_uses`` and ``pairs`` of expert ``e``, which has several replicas."""
    uses, rows, origin, gpu_uses = sim.window_uses[b], sim.rows[b, w], sim.origin[b, w], sim.gpu_uses[b, w]
    pairs, replicas, replica_choice = sim.pairs[b, w, e], sim.replicas[b, e], sim.replica_choice[b, e]
    for i in range(gather_uses(sim, b, w, e)):
        t = index(int(uses[index(i)]) >> 1)
        choice = int(replica_choice[index(origin[t])])
        token_hash = hash31(int(rows[t])) if choice >> 16 > 1 else 0
        gpu = index(choose(replicas, choice, token_hash))
        pairs[gpu] += 1
        gpu_uses[t, index(network.word_of[gpu])] += 1 << int(network.shift_of[gpu])


@device
def _add_fields(total, step, counts, first, last, field):
    """Add the fields of an integer to a row of counts."""
    shift = 0
    for i in range(first, last):
        counts[i] += total >> shift & field
        shift += step


@device
def _count_visits(gpu_uses, origin, visits, node_visits, network):
    """Count which GPUs and nodes the tokens visit, each once per token.

    Neighbouring tokens mostly have one origin: their fields, each reduced to 0 or 1, are summed inside the word until one
    could overflow. There are no branches on what a token visits: adding 0 is cheaper than a wrong branch prediction.
    """
    n_gpus = visits.shape[0]
    width, per_node = network.field_bits, network.gpus_per_node
    field = (1 << width) - 1
    gpu_end, node_end = 0, 0
    for word in range(gpu_uses.shape[1]):
        # GPUs and nodes of this word are consecutive.
        gpu_start, node_start = gpu_end, node_end
        while gpu_end < n_gpus and network.word_of[gpu_end] == word:
            gpu_end += 1
        node_end = node_start + (gpu_end - gpu_start) // per_node
        # ``low``: all bits of a field except the top one. Adding ``low`` carries into the top bit unless they are all 0.
        gpu_top, node_top = 0, 0
        for i in range(gpu_end - gpu_start):
            gpu_top |= 1 << i * width + width - 1
        for i in range(node_end - node_start):
            node_top |= 1 << (i + 1) * per_node * width - 1
        gpu_one, node_one = gpu_top >> width - 1, node_top >> per_node * width - 1
        gpu_low, node_low = gpu_top - gpu_one, node_top - node_one
        gpus, nodes, summed, home = 0, 0, 0, index(0)
        for t in range(gpu_uses.shape[0]):
            if summed == field or index(origin[t]) != home:
                _add_fields(gpus, width, visits[home], gpu_start, gpu_end, field)
                _add_fields(nodes, per_node * width, node_visits[home], node_start, node_end, field)
                gpus, nodes, summed, home = 0, 0, 0, index(origin[t])
            here = int(gpu_uses[t, word])
            gpus += ((here & gpu_low) + gpu_low | here) >> width - 1 & gpu_one
            nodes += ((here & node_low) + node_low | here) >> per_node * width - 1 & node_one
            summed += 1
        _add_fields(gpus, width, visits[home], gpu_start, gpu_end, field)
        _add_fields(nodes, per_node * width, node_visits[home], node_start, node_end, field)


@device
def _count_all_visits(gpu_uses, origin, visits, node_visits, network, dedup):
    """As :func:`_count_visits`, for nodes that span several words and for counting without deduplication."""
    field = (1 << network.field_bits) - 1
    for t in range(gpu_uses.shape[0]):
        home, g = index(origin[t]), 0
        for node in range(node_visits.shape[1]):
            on_node = 0
            for _ in range(network.gpus_per_node):
                word, shift = index(network.word_of[index(g)]), int(network.shift_of[index(g)])
                count = gpu_uses[t, word] >> shift & field
                visits[home, g] += min(count, 1) if dedup else count
                on_node += count
                g += 1
            node_visits[home, node] += min(on_node, 1) if dedup else on_node


@device
def _move_tokens(sim, b, w, experts, network):
    """Write where the tokens are after the layer in MODE_STAY: with their first expert, or unmoved if they use none."""
    rows, origin, destination = sim.rows[b, w], sim.origin[b, w], sim.destination[b, w]
    gpu_uses = sim.gpu_uses[b, w]
    visits, node_visits = sim.return_visits[b, w], sim.return_node_visits[b, w]
    _clear(visits)
    _clear(node_visits)
    for t in range(gpu_uses.shape[0]):
        destination[t] = origin[t]
        for k in range(experts.shape[1]):
            e = experts[rows[t], k]
            if e >= 0:
                choice = int(sim.replica_choice[b, e, origin[t]])
                destination[t] = choose(sim.replicas[b, e], choice, hash31(int(rows[t])))
                break
        _add_visits(gpu_uses[t], destination[t], 1, visits, node_visits, network)


@device
def count_window(sim, b, w, trace_experts, layer, network):
    """Count window ``w`` from scratch for the layer and the current replicas; ``rows`` and ``origin`` must be set.

    ``trace_experts`` is (L, rows, K).
    """
    experts, only_gpu, replicas, n_replicas = trace_experts[layer], sim.only_gpu[b], sim.replicas[b], sim.n_replicas[b]
    gpu_uses, pairs, visits, node_visits = sim.gpu_uses[b, w], sim.pairs[b, w], sim.visits[b, w], sim.node_visits[b, w]
    if sim.own_index[0]:
        index_window(sim, b, w, experts)
    else:
        sim.index_plane[b, w] = layer
        mixed = find_segments(sim.rows[b, w], sim.origin[b, w], sim.piece_starts, sim.segments[b, w])
        if network.mode == MODE_DEDUP:
            count_by_sets(sim, b, w, mixed, network)
            return
    _count_load(sim, b, w, experts)
    only_gpu[0] = 0
    for e in range(n_replicas.shape[0]):
        only_gpu[e + 1] = 1 << int(network.shift_of[replicas[e, 0]]) if n_replicas[e] == 1 else 0
    _count_single(experts, sim.rows[b, w], gpu_uses, only_gpu, replicas, network)
    _clear(pairs)
    for e in range(n_replicas.shape[0]):
        if n_replicas[e] == 1:
            pairs[e, replicas[e, 0]] = sim.load[b, w, e]
        else:
            _count_replicated(sim, b, w, e, network)
    _clear(visits)
    _clear(node_visits)
    if network.mode == MODE_PER_EXPERT or network.words_per_node > 1:
        dedup = network.mode != MODE_PER_EXPERT
        _count_all_visits(gpu_uses, sim.origin[b, w], visits, node_visits, network, dedup)
    else:
        _count_visits(gpu_uses, sim.origin[b, w], visits, node_visits, network)
    if network.mode == MODE_STAY:
        _move_tokens(sim, b, w, experts, network)


@device
def _any_on_node(gpu_uses, first_word, n_words):
    """Non-zero if the token uses the node whose fields fill ``n_words`` words from ``first_word`` on."""
    found = gpu_uses[first_word]
    for word in range(1, n_words):
        found |= gpu_uses[first_word + index(word)]
    return found


@device
def update_window(sim, b, w, e, which, network):
    """Bring window ``w`` up to date after the replicas of ``e`` changed: visits only the tokens that use ``e``.

    ``previous[b, which]`` must hold its choices and replicas before the change. A token leaves GPU ``left`` for ``right``.
    """
    uses, rows, origin, destination = sim.window_uses[b], sim.rows[b, w], sim.origin[b, w], sim.destination[b, w]
    gpu_uses, visits, node_visits = sim.gpu_uses[b, w], sim.visits[b, w], sim.node_visits[b, w]
    pairs, replicas, choice = sim.pairs[b, w, e], sim.replicas[b, e], sim.replica_choice[b, e]
    old_choice, old_replicas = sim.previous[b, which, PREVIOUS_CHOICE], sim.previous[b, which, PREVIOUS_REPLICAS]
    node_of, word_of, shift_of, node_mask = network.node_of, network.word_of, network.shift_of, network.node_mask
    width, per_node, words_per_node = network.field_bits, network.gpus_per_node, network.words_per_node
    counted_each = int(network.mode == MODE_PER_EXPERT)
    # Without replicas all tokens move from one GPU to another; with replicas it depends on the token.
    alike = sim.previous[b, which, PREVIOUS_COUNT, 0] == 1 and sim.n_replicas[b, e] == 1
    left, right = index(old_replicas[0]), index(replicas[0])
    if alike and left == right:
        return
    one_left, one_right = 1 << int(shift_of[left]), 1 << int(shift_of[right])
    field_left, field_right = (one_left << width) - one_left, (one_right << width) - one_right
    mask_left, mask_right = node_mask[left], node_mask[right]
    node_left, node_right = index(node_of[left]), index(node_of[right])
    word_left, word_right = index(word_of[left]), index(word_of[right])
    # Gathered first: the loop over the tokens, which waits for memory, then has few branches.
    for i in range(gather_uses(sim, b, w, e)):
        use = int(uses[index(i)])
        t = index(use >> 1)
        home = index(origin[t])
        if not alike:
            token_hash = hash31(int(rows[t]))
            left = index(choose(old_replicas, int(old_choice[home]), token_hash))
            right = index(choose(replicas, int(choice[home]), token_hash))
            if left == right:
                continue
            one_left, one_right = 1 << int(shift_of[left]), 1 << int(shift_of[right])
            field_left, field_right = (one_left << width) - one_left, (one_right << width) - one_right
            mask_left, mask_right = node_mask[left], node_mask[right]
            node_left, node_right = index(node_of[left]), index(node_of[right])
            word_left, word_right = index(word_of[left]), index(word_of[right])
        if network.mode == MODE_STAY:
            _add_visits(gpu_uses[t], destination[t], -1, sim.return_visits[b, w], sim.return_node_visits[b, w], network)
        uses_left = gpu_uses[t, word_left] - one_left
        gpu_uses[t, word_left] = uses_left
        uses_right = gpu_uses[t, word_right]
        if words_per_node == 1:
            on_left, on_right = uses_left & mask_left, uses_right & mask_right
        else:
            on_left = _any_on_node(gpu_uses[t], index(word_of[node_left * index(per_node)]), words_per_node)
            on_right = _any_on_node(gpu_uses[t], index(word_of[node_right * index(per_node)]), words_per_node)
        gpu_uses[t, word_right] = uses_right + one_right
        pairs[left] -= 1
        pairs[right] += 1
        visits[home, left] -= counted_each | (uses_left & field_left == 0)
        visits[home, right] += counted_each | (uses_right & field_right == 0)
        node_visits[home, node_left] -= counted_each | (on_left == 0)
        node_visits[home, node_right] += counted_each | (on_right == 0)
        if network.mode == MODE_STAY:
            if use & 1:
                destination[t] = right
            _add_visits(gpu_uses[t], destination[t], 1, sim.return_visits[b, w], sim.return_node_visits[b, w], network)
