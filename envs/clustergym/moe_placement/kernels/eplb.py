"""EPLB for one layer: replicate the experts with most load, then pack the heaviest copies first.

This is the algorithm that inference engines ship: greedy replication, then longest-processing-time packing, either
globally or first groups to nodes and then within each node. One rule is added: a GPU never holds the same expert twice,
which would waste the second copy. Where the rule makes the busiest GPU busier than the engines' algorithm would, slots
are changed until it is not.
"""

from __future__ import annotations

import math

from clustergym.common.compiling import device, index, inlined

# How often plans with changed loads are tried where the first plan is worse than the engines'.
_NOISES = 8
# Load of a GPU that can take no more.
FULL = math.inf


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
def _guess(load, e, noise):
    """The load of an expert, changed by up to a tenth if ``noise`` (a seed) is not 0: other plans to choose from."""
    if noise == 0:
        return load[e]
    bits = (int(e) + 1) * 2654435761 + int(noise) * 40503
    bits = (bits ^ (bits >> 15)) * 2246822519 & 0xFFFFFFFF
    return load[e] * (0.9 + 0.2 * ((bits >> 8) & 0xFFFF) / 65536.0)


@device
def _replicate(load, members, n_members, extra, light, most, noise, copies):
    """Copies of each member: one each, then ``extra`` more, each of the member with most load per copy.

    The last ``light`` of them are copies of the members with least load, which fill slots and hardly change the load of
    a GPU. No member gets more than ``most``.
    """
    for i in range(n_members):
        copies[members[i]] = 1
    for k in range(extra):
        best, most_load, most_copies = -1, 0.0, 0
        for i in range(n_members):
            e = members[index(i)]
            has = copies[index(e)]
            if has >= most:
                continue
            own = _guess(load, e, noise)
            if k < extra - light:
                better = best < 0 or own * most_copies > most_load * has
            else:
                better = best < 0 or own < most_load
            if better:
                best, most_load, most_copies = e, own, has
        if best < 0:
            break
        copies[best] += 1


@device
def _sort(load, members, n_members, noise, copies, order):
    """``order``: the members by load per copy, highest first. Insertion sort: stable, and the lists are short."""
    for i in range(n_members):
        e = members[i]
        own, has = _guess(load, e, noise), copies[e]
        j = i
        while j > 0:
            before = order[index(j - 1)]
            if _guess(load, before, noise) * has >= own * copies[index(before)]:
                break
            order[index(j)] = before
            j -= 1
        order[index(j)] = e


@inlined
def _lightest(weight, first, last):
    """The GPU with least load, the first of several."""
    best, least = first, weight[first]
    for g in range(first + 1, last):
        own = weight[index(g)]
        best = g if own < least else best
        least = min(own, least)
    return best


@device
def _pack_without_rule(slots, first, last, load, members, n_members, copies, order, weight):
    """Fill the slots as the engines do, which may put an expert twice on a GPU. Returns the load of the busiest GPU.

    If no expert lies twice on a GPU, :func:`_pack` would find the same slots. Otherwise ``slots[first, 0]`` is −1.
    """
    n_slots, rule_kept, busiest = slots.shape[1], True, 0.0
    n_all = (last - first) * n_slots
    _replicate(load, members, n_members, n_all - n_members, 0, n_all, 0, copies)
    _sort(load, members, n_members, 0, copies, order)
    for g in range(first, last):
        weight[g] = 0.0
        for s in range(n_slots):
            slots[g, s] = -1
    for i in range(n_members):
        e = order[i]
        share = load[e] / copies[e]
        # Where an expert may be on no more GPUs, the rule would give other experts more copies.
        rule_kept = rule_kept and copies[e] < last - first
        for copy in range(copies[e]):
            best = _lightest(weight, first, last)
            rule_kept = rule_kept and not (copy > 0 and _gpu_has(slots, best, e))
            free = _first_free(slots, best)
            slots[best, free] = e
            weight[best] += share
            if free == n_slots - 1:
                busiest = max(busiest, weight[best])
                weight[best] = FULL
    if not rule_kept:
        slots[first, 0] = -1
    return busiest * (1.0 + 1e-12)  # sums in another order may differ in the last digits


@device
def _power(x):
    """x¹⁶. The sum over GPUs is led by the busiest, and still falls when one of two equally busy GPUs is relieved."""
    x = x * x
    x = x * x
    x = x * x
    return x * x


@device
def _share(load, copies, e):
    return load[e] / copies[e] if e >= 0 else 0.0


@device
def _after_replacing(slots, first, last, load, copies, weight, g, e, v):
    """Sum of powers of the GPU loads if ``e`` on GPU ``g`` became ``v``."""
    lose = load[e] / (copies[e] - 1) - load[e] / copies[e] if e >= 0 else 0.0
    gain = load[v] / (copies[v] + 1)
    less = load[v] / copies[v] - gain
    total = 0.0
    for h in range(first, last):
        new = weight[h]
        if h == g:
            new += gain - _share(load, copies, e)
        else:
            if e >= 0 and _gpu_has(slots, h, e):
                new += lose
            if _gpu_has(slots, h, v):
                new -= less
        total += _power(new)
    return total


@device
def _weigh(slots, first, last, load, copies, weight):
    for g in range(first, last):
        weight[g] = 0.0
        for s in range(slots.shape[1]):
            weight[g] += _share(load, copies, slots[g, s])


@device
def _best_replacement(slots, first, last, load, members, n_members, copies, weight, heavy, total):
    """(sum of powers, GPU, slot, expert) of the best change of one slot that relieves GPU ``heavy``."""
    n_slots = slots.shape[1]
    best, best_g, best_s, best_v = total, -1, -1, -1
    for s in range(n_slots):  # another expert instead of one on the busiest GPU
        e = slots[heavy, s]
        if e >= 0 and copies[e] < 2:
            continue
        for i in range(n_members):
            v = members[i]
            if not _gpu_has(slots, heavy, v):
                after = _after_replacing(slots, first, last, load, copies, weight, heavy, e, v)
                if after < best:
                    best, best_g, best_s, best_v = after, heavy, s, v
    for t in range(n_slots):  # one more copy of an expert of the busiest GPU
        v = slots[heavy, t]
        if v < 0:
            continue
        for g in range(first, last):
            if g == heavy or _gpu_has(slots, g, v):
                continue
            for s in range(n_slots):
                e = slots[g, s]
                if e >= 0 and copies[e] < 2:
                    continue
                after = _after_replacing(slots, first, last, load, copies, weight, g, e, v)
                if after < best:
                    best, best_g, best_s, best_v = after, g, s, v
    return best, best_g, best_s, best_v


@device
def _best_swap(slots, first, last, load, copies, weight, heavy, total):
    """(sum of powers, GPU, its slot, slot of ``heavy``) of the best swap with GPU ``heavy``."""
    n_slots = slots.shape[1]
    best, best_g, best_t, best_s = total, -1, -1, -1
    for g in range(first, last):
        if g == heavy:
            continue
        others = total - _power(weight[heavy]) - _power(weight[g])
        for s in range(n_slots):
            e = slots[heavy, s]
            if e < 0 or _gpu_has(slots, g, e):
                continue
            for t in range(n_slots):
                v = slots[g, t]
                shifted = _share(load, copies, e) - _share(load, copies, v)
                after = others + _power(weight[heavy] - shifted) + _power(weight[g] + shifted)
                if after < best and not (v >= 0 and _gpu_has(slots, heavy, v)):
                    best, best_g, best_t, best_s = after, g, t, s
    return best, best_g, best_t, best_s


@device
def _relieve(slots, first, last, load, members, n_members, copies, weight, target):
    """Change slots, the best change first, until no GPU has more load than ``target`` or no change helps.

    Returns the load of the busiest GPU.
    """
    for _ in range(64):
        heavy, total = first, 0.0
        for g in range(first, last):
            total += _power(weight[g])
            if weight[g] > weight[heavy]:
                heavy = g
        if weight[heavy] <= target:
            break
        total *= 1.0 - 1e-9
        swapped, g, t, s = _best_swap(slots, first, last, load, copies, weight, heavy, total)
        replaced, other, slot, v = _best_replacement(
            slots, first, last, load, members, n_members, copies, weight, heavy, total
        )
        if g < 0 and other < 0:
            break
        if g >= 0 and swapped <= replaced:
            slots[heavy, s], slots[g, t] = slots[g, t], slots[heavy, s]
        else:
            e = slots[other, slot]
            if e >= 0:
                copies[e] -= 1
            copies[v] += 1
            slots[other, slot] = v
        _weigh(slots, first, last, load, copies, weight)
    busiest = 0.0
    for g in range(first, last):
        busiest = max(busiest, weight[g])
    return busiest


@device
def _fill(slots, first, last, load, members, n_members, light, noise, copies, order, weight):
    """Replicate the ``members`` until the slots of GPUs first … last−1 are full, then pack them, heaviest first."""
    n_gpus, n_slots = last - first, slots.shape[1]
    _replicate(load, members, n_members, n_gpus * n_slots - n_members, light, n_gpus, noise, copies)
    _sort(load, members, n_members, noise, copies, order)
    for g in range(first, last):
        weight[g] = 0.0
        for s in range(n_slots):
            slots[g, s] = -1
    for i in range(n_members):
        e = order[i]
        share = _guess(load, e, noise) / copies[e]
        for copy in range(copies[e]):
            best, least = -1, FULL
            for g in range(first, last):
                # Slots fill up from the first to the last.
                room = weight[index(g)] < least and slots[index(g), index(n_slots - 1)] < 0
                if room and not (copy > 0 and _gpu_has(slots, g, e)):
                    best, least = g, weight[index(g)]
            if best < 0:
                _make_room(slots, first, last, e)
            else:
                slots[best, _first_free(slots, best)] = e
                weight[best] += share
    # Making room moves experts and may drop a copy: count again.
    for i in range(n_members):
        copies[members[i]] = 0
    for g in range(first, last):
        for s in range(n_slots):
            if slots[g, s] >= 0:
                copies[slots[g, s]] += 1
    _weigh(slots, first, last, load, copies, weight)


@device
def _pack(slots, first, last, load, members, n_members, copies, order, weight, target):
    """Fill the slots of GPUs first … last−1 with the ``members`` so that no GPU gets more load than ``target``.

    If one does, other plans are tried: with fewer copies of heavy members, because two of them on one GPU are worse
    than a larger share of one, and copies of light members instead; then with changed loads. The best one is kept.
    """
    plans = (last - first) * slots.shape[1] - n_members + 1  # number of light copies + 1
    best, best_try = 0.0, -1
    for k in range(_NOISES * plans + 1):
        if k == _NOISES * plans:  # none reached the target
            k = best_try
        _fill(slots, first, last, load, members, n_members, k % plans, k // plans, copies, order, weight)
        busiest = _relieve(slots, first, last, load, members, n_members, copies, weight, target)
        if busiest <= target:
            return
        if best_try < 0 or busiest < best:
            best, best_try = busiest, k


@device
def eplb_slots(slots, load, n_nodes, n_groups, ints, floats):
    """Fill ``slots`` (G, S) for the loads (E,). ``n_groups`` > 0 asks for the hierarchical variant.

    Scratch: ``ints`` (3, E) int32, ``floats`` (E + G,) float64.
    """
    n_gpus, n_experts = slots.shape[0], load.shape[0]
    copies, order, members = ints[0], ints[1], ints[2]
    weight = floats[n_experts:]
    if n_groups == 0:
        for e in range(n_experts):
            members[e] = e
        target = _pack_without_rule(slots, 0, n_gpus, load, members, n_experts, copies, order, weight)
        if slots[0, 0] < 0:
            _pack(slots, 0, n_gpus, load, members, n_experts, copies, order, weight, target)
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
    size, target = n_experts // n_nodes, 0.0
    for node in range(n_nodes):
        first, own = node * gpus_per_node, members[node * size :]
        busiest = _pack_without_rule(slots, first, first + gpus_per_node, load, own, size, copies, order, weight)
        target = max(target, busiest)
    for node in range(n_nodes):
        first, own = node * gpus_per_node, members[node * size :]
        if slots[first, 0] < 0:
            _pack(slots, first, first + gpus_per_node, load, own, size, copies, order, weight, target)
