"""FlashLB for one layer: tries replica budgets, and scores each by a placement on mean and variance of the loads."""

from __future__ import annotations

import math

from clustergym.common.compiling import device

BLOCKS = 4


@device
def _replicate(value, order, first, last, spare, n_gpus, copies):
    """One copy of each expert in ``order[first:last]``, then ``spare`` more, always to the most value per copy."""
    for i in range(first, last):
        copies[order[i]] = 1
    for _ in range(spare):
        best = -1
        for i in range(first, last):
            e = order[i]
            if copies[e] < n_gpus and (best < 0 or value[e] * copies[best] > value[best] * copies[e]):
                best = e
        if best < 0:
            return
        copies[best] += 1


@device
def _pack(slots, copies, value, mean, covariance, z, order, queue, gpu_mean, gpu_variance, filled, newest):
    """Heaviest copy first, onto the GPU whose mean + z · deviation is least with it. Unplaceable copies are dropped."""
    n_gpus, n_slots = slots.shape
    for g in range(n_gpus):
        gpu_mean[g], gpu_variance[g], filled[g], newest[g] = 0.0, 0.0, 0, -1
        for s in range(n_slots):
            slots[g, s] = -1
    for i in range(len(order)):  # insertion sort: stable, and nearly sorted already
        e, j = order[i], i
        while j > 0 and value[queue[j - 1]] * copies[e] < value[e] * copies[queue[j - 1]]:
            queue[j] = queue[j - 1]
            j -= 1
        queue[j] = e
    for i in range(len(order)):
        e = queue[i]
        share, placed = 1.0 / copies[e], 0
        for _ in range(copies[e]):
            best, least, best_variance = -1, 0.0, 0.0
            for g in range(n_gpus):
                if filled[g] == n_slots or newest[g] == e:
                    continue
                together = 0.0
                for s in range(filled[g]):
                    together += covariance[e, slots[g, s]] / copies[slots[g, s]]
                variance = gpu_variance[g] + share * (share * covariance[e, e] + 2.0 * together)
                height = gpu_mean[g] + share * mean[e] + z * math.sqrt(max(variance, 0.0))
                if best < 0 or height < least:
                    best, least, best_variance = g, height, variance
            if best < 0:
                break
            slots[best, filled[best]] = e
            filled[best] += 1
            newest[best] = e
            gpu_mean[best] += share * mean[e]
            gpu_variance[best] = best_variance
            placed += 1
        copies[e] = placed


@device
def _score(slots, copies, samples):
    """Mean over the samples (T, E) of the load of the busiest GPU over the mean GPU."""
    n_gpus, n_slots = slots.shape
    score = 0.0
    for t in range(samples.shape[0]):
        total, peak = 0.0, 0.0
        for g in range(n_gpus):
            load = 0.0
            for s in range(n_slots):
                e = slots[g, s]
                if e >= 0:
                    load += samples[t, e] / copies[e]
            total += load
            peak = max(peak, load)
        score += peak * n_gpus / total if total > 0.0 else 1.0
    return score / samples.shape[0]


@device
def flashlb_slots(best, samples, value, order, mean, covariance, z, width, slots, ints, floats):
    """Fill ``best`` (G, S) for loads ``samples`` (T, E).

    ``order`` (E,) sorts the experts by ``value`` and is cut into four blocks. Block after block, all budgets of spare
    copies within ``width`` of the greedy one are tried; the blocks behind share the rest greedily.
    Scratch: ``slots`` (G, S) int16, ``ints`` (2, E + 2 G) int32, ``floats`` (2, G) float64.
    """
    n_gpus, n_slots = best.shape
    n_experts = len(order)
    copies, queue = ints[0, :n_experts], ints[1, :n_experts]
    filled, newest = ints[0, n_experts : n_experts + n_gpus], ints[1, n_experts : n_experts + n_gpus]
    budget = ints[0, n_experts + n_gpus :]  # spare copies of each block; ints has room for at least four
    left, lowest = n_gpus * n_slots - n_experts, -1.0
    for block in range(BLOCKS - 1):
        first, last = n_experts * block // BLOCKS, n_experts * (block + 1) // BLOCKS
        _replicate(value, order, first, n_experts, left, n_gpus, copies)
        greedy = 0
        for i in range(first, last):
            greedy += copies[order[i]] - 1
        chosen, least = greedy, -1.0
        for trial in range(2 * width + 1):  # 0, −1, +1, −2, +2 …: the nearest to greedy wins a tie
            spare = greedy + ((trial + 1) // 2 if trial % 2 == 0 else -((trial + 1) // 2))
            if spare < 0 or spare > min(left, (last - first) * (n_gpus - 1)):
                continue
            for before in range(block):
                _replicate(
                    value, order, n_experts * before // BLOCKS, n_experts * (before + 1) // BLOCKS,
                    budget[before], n_gpus, copies,
                )  # fmt: skip
            _replicate(value, order, first, last, spare, n_gpus, copies)
            _replicate(value, order, last, n_experts, left - spare, n_gpus, copies)
            _pack(
                slots, copies, value, mean, covariance, z, order, queue, floats[0], floats[1], filled, newest
            )  # fmt: skip
            score = _score(slots, copies, samples)
            if least < 0.0 or score < least:
                chosen, least = spare, score
            if lowest < 0.0 or score < lowest:
                lowest = score
                for g in range(n_gpus):
                    for s in range(n_slots):
                        best[g, s] = slots[g, s]
        budget[block] = chosen
        left -= chosen
