"""What engines record instead of tokens: loads always, co-activation sometimes."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.streams import Interval
from clustergym.planners.kernels.launch import over_layers
from clustergym.planners.kernels.pairs import match_layers


class LoadInterval(Interval):
    """An interval of which only the loads are known. Asking for its tokens is an error.

    Args:
        pass_loads: (P, L, E) tokens routed to each expert in each pass, or (L, E) for all passes together.
        n_tokens: tokens of one pass.
    """

    _loads: npt.NDArray[np.int64]
    _n_tokens: int

    def __init__(self, pass_loads: npt.NDArray[np.int64], n_tokens: int) -> None:
        object.__setattr__(self, "_loads", pass_loads if pass_loads.ndim == 3 else pass_loads[None])
        object.__setattr__(self, "_n_tokens", n_tokens)

    def __getattr__(self, name: str) -> NoReturn:
        """Called for the fields of :class:`Interval` that this class does not set."""
        if name not in ("experts", "rows", "rank_start"):
            raise AttributeError(name)
        raise ValueError("only the load of each expert is known, not which experts each token uses")

    @property
    def n_passes(self) -> int:
        return len(self._loads)

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def n_layers(self) -> int:
        return int(self._loads.shape[1])

    def pass_loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        found = np.zeros((*self._loads.shape[:2], n_experts), np.int64)
        found[..., : self._loads.shape[2]] = self._loads
        return found


def interval_from_statistics(
    loads: npt.NDArray[np.number],
    coactivation: npt.NDArray[np.number] | None,
    top_k: int,
    n_gpus: int,
    tokens: int,
    passes: int,
    seed: int = 0,
    sweeps: int = 30,
) -> Interval:
    """Made-up passes with the recorded statistics, so that planners on tokens can plan on what engines record.

    All passes together have the loads, scaled and rounded. Pairs of experts are used together about as often as
    recorded. Tokens are in random order, so that passes and ranks differ by chance alone.

    Args:
        loads: (L, E) tokens routed to each expert.
        coactivation: (L, E, E) tokens that use both experts; None if it was not recorded, then experts are drawn
            independently. The diagonal does not matter.
        tokens: tokens of one pass, a multiple of the GPUs.
        sweeps: exchanges that are tried per token and expert.
    """
    (layers, n_experts), n, rng = loads.shape, tokens * passes, np.random.default_rng(seed)
    made = np.full((layers, top_k * n), -1, np.int16)
    counts = np.stack([_rounded(load, n * top_k, n) for load in loads.astype(np.float64)])
    for l in range(layers):
        # Copies of an expert go to consecutive tokens, so that no token has it twice.
        order = rng.permutation(n_experts)
        made[l, : counts[l].sum()] = np.repeat(order, counts[l][order])
    dealt = np.ascontiguousarray(made.reshape(layers, top_k, n).transpose(0, 2, 1))
    if coactivation is not None:
        excess = np.empty((layers, n_experts, n_experts))
        for l in range(layers):
            recorded = coactivation[l].astype(np.float64)
            np.fill_diagonal(recorded, 0.0)
            now = Interval(dealt[l : l + 1], np.arange(n, dtype=np.int32)[None], np.zeros((1, 2), np.int32))
            pairs = now.coactivation(0, n_experts)
            np.fill_diagonal(pairs, 0.0)
            excess[l] = pairs - recorded * (pairs.sum() / max(recorded.sum(), 1e-12))
        key = rng.integers(1, 2**31, layers)
        over_layers(match_layers, 0, layers, dealt, excess, sweeps, key)
    for l in range(layers):
        dealt[l] = dealt[l, rng.permutation(n)]
    return Interval.even(dealt, np.arange(n, dtype=np.int32).reshape(passes, tokens), n_gpus)


def _rounded(load: npt.NDArray[np.float64], total: int, most: int) -> npt.NDArray[np.int64]:
    """Whole numbers in proportion to ``load`` whose sum is ``total``, none more than ``most``."""
    exact = load * (total / max(load.sum(), 1e-12))
    counts = np.floor(exact).astype(np.int64)
    left = int(min(total, round(exact.sum())) - counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    limited: npt.NDArray[np.int64] = np.minimum(counts, most)
    return limited
