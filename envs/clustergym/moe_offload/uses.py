"""Which experts a trace uses, and when it uses them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.traces.token_trace import TokenTrace

WITHIN = (1, 2, 4, 8, 16, 32)
"""Windows in tokens: the predictor says how likely an expert is used within so many tokens."""
HORIZON = 3
"""The predictor looks 1 … 3 visits ahead."""
NEVER = 1 << 20
"""Tokens until the next use of an expert that is not used again."""


def use(experts: npt.NDArray[np.integer[Any]], n_experts: int) -> npt.NDArray[np.float32]:
    """(…, E) 1 for the experts in ``experts`` (…, K), where -1 is padding."""
    found = np.zeros((*experts.shape[:-1], n_experts + 1), np.float32)
    np.put_along_axis(found, experts.astype(np.int64), 1, axis=-1)
    return found[..., :n_experts]


def next_use(used: npt.NDArray[np.floating[Any]], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """(T, L, E) tokens until an expert is used after this token, and NEVER if it is not used again in its sequence."""
    distance = np.empty(used.shape, np.int32)
    upcoming = np.full(used.shape[1:], NEVER, np.int32)
    last = np.zeros(len(used), bool)
    last[np.append(starts[1:], len(used)) - 1] = True
    for t in range(len(used) - 1, -1, -1):
        if last[t]:
            upcoming[...] = NEVER
        else:
            upcoming += upcoming < NEVER
        distance[t] = upcoming
        upcoming[used[t] > 0] = 0
    return distance


def recall(scores: npt.NDArray[np.floating[Any]], trace: TokenTrace) -> float:
    """Share of the used experts of a trace that are among its top-k largest scores (T, L, E)."""
    best = np.argpartition(-scores, trace.top_k - 1, axis=2)[..., : trace.top_k]
    hits = (best[..., :, None] == trace.experts[..., None, :]).sum()
    return float(hits / (trace.experts >= 0).sum())
