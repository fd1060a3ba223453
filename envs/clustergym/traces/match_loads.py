"""A token trace from few recorded tokens and the loads of much traffic.

Loads are cheap to record and tokens are not. The tokens tell which experts are used together; the loads tell how often
each expert is used. Every token of a layer gets a weight, so that the weighted tokens have the recorded loads, and is
drawn as often as its weight says. Of all such weights these are the most even ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustergym.traces.load_trace import LoadTrace
from clustergym.traces.token_trace import TokenTrace

TOKENS = 32_768
"""Tokens to draw."""
ROUNDS = 100
"""Rounds of the scaling of weights."""
LARGEST_WEIGHT = 30.0
"""Largest weight, as a multiple of the mean: a token that nearly alone uses a hot expert must not be everywhere."""
INDEPENDENT_TOKENS = 500
"""The co-activation of few tokens is chance. So many drawn ones, whose experts are independent, are mixed in as if they
had been recorded too."""


def token_weights(
    experts: npt.NDArray[np.integer], loads: npt.NDArray[np.floating], rounds: int = ROUNDS
) -> npt.NDArray[np.float64]:
    """(T,) weights with mean 1, with which the experts (T, K) of a layer have loads in proportion to ``loads`` (E,).

    An expert that no token uses cannot get its load.
    """
    used, n_experts = experts >= 0, len(loads)
    flat, top_k = np.where(used, experts, n_experts).astype(np.int64), np.maximum(used.sum(1), 1)
    seen = np.bincount(flat.ravel(), minlength=n_experts + 1)[:n_experts] > 0
    target = np.where(seen, np.maximum(loads, 0), 0.0)
    if not target.sum():
        return np.ones(len(experts))
    target /= target.sum()
    weights = np.ones(len(experts))
    with np.errstate(divide="ignore"):
        for _ in range(rounds):
            now = np.bincount(flat.ravel(), np.repeat(weights, experts.shape[1]), n_experts + 1)[:n_experts]
            ratio = np.log(np.maximum(target, 1e-9)) - np.log(np.maximum(now / now.sum(), 1e-12))
            step = np.append(np.where(seen, ratio, 0.0), 0.0)[flat].sum(1) / top_k
            weights *= np.exp(step)
            weights = np.minimum(weights / weights.mean(), LARGEST_WEIGHT)
    return np.asarray(weights / weights.mean())


def match_loads(tokens: TokenTrace, loads: LoadTrace, n_tokens: int = TOKENS, seed: int = 0) -> TokenTrace:
    """A trace of about ``n_tokens`` tokens with the co-activation of ``tokens`` and the loads of ``loads``."""
    if loads.layer_ids.tolist() != tokens.layer_ids.tolist() or loads.n_experts > tokens.n_experts:
        raise ValueError(
            f"{loads.name} has layers {_named(loads)} and {loads.n_experts} experts, but {tokens.name} has layers "
            f"{_named(tokens)} and {tokens.n_experts} experts: record both from the same model"
        )
    rng, totals = np.random.default_rng(seed), np.zeros((tokens.n_layers, tokens.n_experts))
    totals[:, : loads.n_experts] = loads.loads()
    independent = n_tokens * INDEPENDENT_TOKENS // (INDEPENDENT_TOKENS + tokens.n_tokens)
    drawn = np.empty((n_tokens, tokens.n_layers, tokens.top_k), np.int16)
    share, positions = np.zeros(tokens.n_tokens), np.arange(n_tokens - independent) + rng.random()
    for l in range(tokens.n_layers):
        weights = token_weights(tokens.experts[:, l], totals[l])
        share += weights
        # In the order of the tokens, so that neighbours stay neighbours.
        ends = np.cumsum(weights)
        rows = np.searchsorted(ends, positions / (n_tokens - independent) * ends[-1], side="right")
        drawn[: n_tokens - independent, l] = tokens.experts[np.minimum(rows, tokens.n_tokens - 1), l]
        scores = np.log(np.maximum(totals[l], 1e-9)) + rng.gumbel(size=(independent, tokens.n_experts))
        drawn[n_tokens - independent :, l] = np.argpartition(-scores, tokens.top_k - 1, axis=1)[:, : tokens.top_k]
    ends = np.cumsum(np.add.reduceat(share, tokens.seq_starts))
    bounds = np.round(ends / ends[-1] * (n_tokens - independent)).astype(np.int64)
    mean = max(1, round(tokens.n_tokens / tokens.n_sequences))
    bounds = np.unique([*bounds, *range(n_tokens - independent, n_tokens, mean), n_tokens])
    lens = np.diff(bounds[bounds > 0], prepend=0)
    return TokenTrace(
        drawn, n_experts=tokens.n_experts, layer_ids=tokens.layer_ids, seq_lens=lens, model=tokens.model,
        name=f"{tokens.name} with the loads of {loads.name}",
    )  # fmt: skip


def _named(trace: LoadTrace | TokenTrace) -> str:
    ids = trace.layer_ids.tolist()
    return f"{ids[0]} … {ids[-1]}"
