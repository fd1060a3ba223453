"""SwiftBalancer for one layer: new redundant copies and a few swaps, with one transfer per ordered pair of GPUs."""

from __future__ import annotations

from clustergym.common.compiling import device
from clustergym.moe_placement.kernels.eplb import _first_free, _gpu_has


@device
def _source(e, g, held, used):
    """A GPU that held ``e`` before and has sent nothing to ``g`` yet. −1 if there is none."""
    for h in range(held.shape[1]):
        if held[e, h] and not used[h, g]:
            return h
    return -1


@device
def _add(slots, e, g, load, copies, weight):
    """Put a copy of ``e`` into a free slot of ``g``. All copies of ``e`` share its load evenly."""
    for h in range(slots.shape[0]):
        if _gpu_has(slots, h, e):
            weight[h] -= load[e] / copies[e] - load[e] / (copies[e] + 1)
    s = _first_free(slots, g)
    slots[g, s] = e
    copies[e] += 1
    weight[g] += load[e] / copies[e]
    return s


@device
def _add_copies(slots, load, held, used, received, copies, weight, closed):
    """Most load per copy first, onto the lightest GPU that can get the expert."""
    n_gpus, n_experts = slots.shape[0], len(load)
    for e in range(n_experts):
        closed[e] = 0
    while True:
        e = -1
        for x in range(n_experts):
            if not closed[x] and (e < 0 or load[x] * copies[e] > load[e] * copies[x]):
                e = x
        if e < 0:
            return
        target = -1
        for g in range(n_gpus):
            if _first_free(slots, g) < 0 or _gpu_has(slots, g, e) or (target >= 0 and weight[g] >= weight[target]):
                continue
            if held[e, g] or _source(e, g, held, used) >= 0:
                target = g
        if target < 0:
            closed[e] = 1  # free slots and unused pairs only become fewer
            continue
        s = _add(slots, e, target, load, copies, weight)
        if not held[e, target]:
            used[_source(e, target, held, used), target] = 1
            received[target, s] = 1


@device
def _swap_once(slots, load, held, used, received, copies, weight, tried):
    """The best swap of the busiest GPU with the lightest GPU that has one that lowers both below the peak."""
    n_gpus, n_slots = slots.shape
    busiest = 0
    for g in range(n_gpus):
        tried[g] = 0
        if weight[g] > weight[busiest]:
            busiest = g
    tried[busiest] = 1
    for _ in range(n_gpus - 1):
        other = -1
        for g in range(n_gpus):
            if not tried[g] and (other < 0 or weight[g] < weight[other]):
                other = g
        tried[other] = 1
        least, best_s, best_t = weight[busiest] * (1 - 1e-9), -1, -1
        for s in range(n_slots):
            e = slots[busiest, s]
            # A copy that was just received has its weights elsewhere: sending it on would need another pair.
            if (
                e < 0
                or received[busiest, s]
                or _gpu_has(slots, other, e)
                or (used[busiest, other] and not held[e, other])
            ):
                continue
            for t in range(n_slots):
                f = slots[other, t]
                if f < 0 or received[other, t] or _gpu_has(slots, busiest, f):
                    continue
                if used[other, busiest] and not held[f, busiest]:
                    continue
                shift = load[e] / copies[e] - load[f] / copies[f]
                peak = max(weight[busiest] - shift, weight[other] + shift)
                if peak < least:
                    least, best_s, best_t = peak, s, t
        if best_s >= 0:
            e, f = slots[busiest, best_s], slots[other, best_t]
            shift = load[e] / copies[e] - load[f] / copies[f]
            weight[busiest] -= shift
            weight[other] += shift
            slots[busiest, best_s], slots[other, best_t] = f, e
            if not held[e, other]:
                used[busiest, other], received[other, best_t] = 1, 1
            if not held[f, busiest]:
                used[other, busiest], received[busiest, best_s] = 1, 1
            return True
    return False


@device
def _weigh(slots, load, copies, weight):
    """Fill ``copies`` (E,) and ``weight`` (G,), the load of each GPU. Returns the peak."""
    n_gpus, n_slots = slots.shape
    for e in range(len(load)):
        copies[e] = 0
    for g in range(n_gpus):
        for s in range(n_slots):
            if slots[g, s] >= 0:
                copies[slots[g, s]] += 1
    peak = 0.0
    for g in range(n_gpus):
        weight[g] = 0.0
        for s in range(n_slots):
            if slots[g, s] >= 0:
                weight[g] += load[slots[g, s]] / copies[slots[g, s]]
        peak = max(peak, weight[g])
    return peak


@device
def swift_slots(slots, before, load, swaps, held, used, received, copies, weight, marks, peaks):
    """Fill ``slots`` (G, S) from ``before`` (G, S) for the loads (E,), and ``peaks`` (2,): before and after.

    Scratch, zeroed: ``held`` (E, G), ``used`` (G, G) and ``received`` (G, S) int8, ``copies`` (E,) and ``marks``
    (E + G,) int32, ``weight`` (G,) float64.
    """
    n_gpus, n_slots = slots.shape
    peaks[0] = _weigh(before, load, copies, weight)
    for e in range(len(load)):
        copies[e] = 0
    for g in range(n_gpus):
        for s in range(n_slots):
            e = before[g, s]
            slots[g, s] = -1
            if e >= 0:
                held[e, g] = 1
                copies[e] += 1
                if copies[e] == 1:
                    slots[g, s] = e
    _weigh(slots, load, copies, weight)
    _add_copies(slots, load, held, used, received, copies, weight, marks)
    for _ in range(swaps):
        if not _swap_once(slots, load, held, used, received, copies, weight, marks):
            break
    peaks[1] = _weigh(slots, load, copies, weight)


@device
def swift_layers(first, last, slots, before, loads, swaps, held, used, received, copies, weight, marks, peaks):
    """:func:`swift_slots` on layers first … last−1."""
    for b in range(first, last):
        swift_slots(
            slots[b], before[b], loads[b], swaps, held[b], used[b], received[b], copies[b], weight[b], marks[b],
            peaks[b],
        )  # fmt: skip
