"""What is counted on a training split: popularity of experts, and transitions between them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from clustergym.moe_offload.kernels.compile import device
from clustergym.moe_offload.kernels.state import LAG_TOKEN, N_LAGS, Floats
from clustergym.traces.token_trace import TokenTrace

PRIOR_WEIGHT = 20.0
"""Transitions are mixed with this many observations of the popularity."""


class Tables(NamedTuple):
    """Counts of a training split; see :func:`count_tables`."""

    popularity: Floats
    """(L, E) share of tokens that use the expert"""
    chance: Floats
    """(N_LAGS, L, E, E) chance that the expert [-1] is used 1 … 6 visits after the expert [-2] of layer [-3] was used; the
    last table is for the same layer of the next token"""
    lift: Floats
    """(N_LAGS, L, E, E) the same as log-odds, minus the log-odds of the popularity"""


@lru_cache(maxsize=4)
def count_tables(trace: TokenTrace) -> Tables:
    """Popularity and transitions in a trace, which should be a training split."""
    layers, experts = trace.n_layers, trace.n_experts
    chance = np.zeros((N_LAGS, layers, experts, experts), np.float32)
    uses = np.zeros((layers, experts), np.float32)
    ends = np.cumsum(trace.seq_lens)
    _count(np.ascontiguousarray(trace.experts), ends - trace.seq_lens, ends, chance, uses)
    popularity = (uses / trace.n_tokens).astype(np.float32)
    lift = np.empty_like(chance)
    for lag in range(N_LAGS):
        # Layer l's transitions lead to layer l + lag + 1 (of the next token, after the last layer).
        base = popularity if lag == LAG_TOKEN else np.roll(popularity, -(lag + 1), axis=0)
        base = (base * 0.98 + 0.002)[:, None, :]
        chance[lag] = np.clip((chance[lag] + PRIOR_WEIGHT * base) / (uses[:, :, None] + PRIOR_WEIGHT), 1e-4, 1 - 1e-4)
        lift[lag] = np.log(chance[lag] / (1 - chance[lag])) - np.log(base / (1 - base))
    return Tables(popularity, chance, lift)


@device
def _count(experts, starts, ends, pairs, uses):  # type: ignore[no-untyped-def]
    layers, top = experts.shape[1], experts.shape[2]
    for q in range(starts.shape[0]):
        for v in range(starts[q] * layers, ends[q] * layers):
            t, l = v // layers, v % layers
            for k in range(top):
                a = experts[t, l, k]
                if a < 0:
                    continue
                uses[l, a] += 1
                for lag in range(N_LAGS):
                    w = v + (layers if lag == LAG_TOKEN else lag + 1)
                    if w < ends[q] * layers:
                        for i in range(top):
                            e = experts[w // layers, w % layers, i]
                            if e >= 0:
                                pairs[lag, l, a, e] += 1
