"""Fit a placement to measured links between all pairs of GPUs.

Searches know two kinds of links, inside a node and between nodes. Where every pair has a bandwidth of its own, it
matters which GPU of the search is which one of the cluster, and a few experts may be better elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement

ROUNDS = 200
"""Changes that are tried in each layer."""


def fit_to_links(
    placement: Placement,
    times: Callable[[Placement], npt.NDArray[np.float64]],
    seed: int = 0,
    rounds: int = ROUNDS,
    stop: Callable[[], bool] = lambda: False,
) -> Placement:
    """Exchange the contents of two GPUs, or one expert of each, wherever that makes a layer faster.

    Args:
        placement: (L, G, S) without empty slots.
        times: (L,) time of each layer on a placement.
    """
    rng, best = np.random.default_rng(seed), placement.copy()
    least = times(best)
    layers, n_gpus, n_slots = best.shape
    if n_gpus < 2:
        return best
    for i in range(rounds):
        if stop():
            break
        trial = best.copy()
        for l in range(layers):
            one, other = rng.choice(n_gpus, 2, replace=False)
            if i % 2 == 0:
                trial[l, [one, other]] = trial[l, [other, one]]
                continue
            s, t = rng.integers(0, n_slots, 2)
            first, second = trial[l, one, s], trial[l, other, t]
            if first not in trial[l, other] and second not in trial[l, one]:
                trial[l, one, s], trial[l, other, t] = second, first
        found = times(trial)
        better = found < least
        best[better], least[better] = trial[better], found[better]
    return best
