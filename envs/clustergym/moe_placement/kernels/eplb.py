"""EPLB for one layer: replicate the experts with most load, then pack the heaviest copies first.

This is the algorithm that inference engines ship: greedy replication, then longest-processing-time packing, either
globally or first groups to nodes and then within each node. One rule is added: a GPU never holds the same expert twice,
which would waste the second copy.
"""

from __future__ import annotations

from clustergym.moe_placement.kernels.compile import device


@device
def _gpu_has(slots, g, e):
    for s in range(slots.shape[1]):
        if slots[g, s] == e:
            return True
    return False


@device
def _first_free(slots, g):
    for s in range(slots.shape[1]):
        if slots[g, s] < 0:
            return s
    return -1


@device
def _make_room(slots, first, last, e):
    """Put ``e`` on a full GPU by moving one of its experts to a GPU with room. A copy that fits nowhere is dropped."""
    for g in range(first, last):
        free = _first_free(slots, g)
        if free < 0:
            continue
        for h in range(first, last):
            if _gpu_has(slots, h, e):
                continue
            for s in range(slots.shape[1]):
                x = slots[h, s]
                if x >= 0 and not _gpu_has(slots, g, x):
                    slots[g, free] = x
                    slots[h, s] = e
                    return


@device
def _pack(slots, first, last, load, members, n_members, copies, order, weight):
    """Replicate the ``members`` until the slots of GPUs first … last−1 are full, then pack them, heaviest first."""
    n_gpus = last - first
    for i in range(n_members):
        copies[members[i]] = 1
    for _ in range(n_gpus * slots.shape[1] - n_members):
        best = -1
        for i in range(n_members):
            e = members[i]
            if copies[e] < n_gpus and (best < 0 or load[e] * copies[best] > load[best] * copies[e]):
                best = e
        if best < 0:
            break
        copies[best] += 1
    for i in range(n_members):  # insertion sort: stable, and the lists are short
        e = members[i]
        j = i
        while j > 0 and load[order[j - 1]] * copies[e] < load[e] * copies[order[j - 1]]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = e
    for g in range(first, last):
        weight[g] = 0.0
    for i in range(n_members):
        e = order[i]
        for _ in range(copies[e]):
            best = -1
            for g in range(first, last):
                if _first_free(slots, g) >= 0 and not _gpu_has(slots, g, e) and (best < 0 or weight[g] < weight[best]):
                    best = g
            if best < 0:
                _make_room(slots, first, last, e)
            else:
                slots[best, _first_free(slots, best)] = e
                weight[best] += load[e] / copies[e]


@device
def eplb_slots(slots, load, n_nodes, n_groups, ints, floats):
    """Fill ``slots`` (G, S) for the loads (E,). ``n_groups`` > 0 asks for the hierarchical variant.

    Scratch: ``ints`` (3, E) int32, ``floats`` (E + G,) float64.
    """
    n_gpus, n_slots = slots.shape
    n_experts = load.shape[0]
    copies, order, members = ints[0], ints[1], ints[2]
    weight = floats[n_experts:]
    for g in range(n_gpus):
        for s in range(n_slots):
            slots[g, s] = -1
    if n_groups == 0:
        for e in range(n_experts):
            members[e] = e
        _pack(slots, 0, n_gpus, load, members, n_experts, copies, order, weight)
        return
    # Groups go to nodes, heaviest first, the same number to each. Until then copies[] holds the node + 1 of each group.
    group_size, per_node, gpus_per_node = n_experts // n_groups, n_groups // n_nodes, n_gpus // n_nodes
    for group in range(n_groups):
        floats[group] = 0.0
        copies[group] = 0
        for e in range(group * group_size, (group + 1) * group_size):
            floats[group] += load[e]
    for node in range(n_nodes):
        weight[node] = 0.0
        order[node] = 0
    for _ in range(n_groups):
        heaviest = -1
        for group in range(n_groups):
            if copies[group] == 0 and (heaviest < 0 or floats[group] > floats[heaviest]):
                heaviest = group
        lightest = -1
        for node in range(n_nodes):
            if order[node] < per_node and (lightest < 0 or weight[node] < weight[lightest]):
                lightest = node
        copies[heaviest] = lightest + 1
        weight[lightest] += floats[heaviest]
        order[lightest] += 1
    # members[] lists the experts node by node, because packing overwrites copies[] and order[].
    n_members = 0
    for node in range(n_nodes):
        for group in range(n_groups):
            if copies[group] == node + 1:
                for e in range(group * group_size, (group + 1) * group_size):
                    members[n_members] = e
                    n_members += 1
    size = n_experts // n_nodes
    for node in range(n_nodes):
        first = node * gpus_per_node
        _pack(slots, first, first + gpus_per_node, load, members[node * size :], size, copies, order, weight)
