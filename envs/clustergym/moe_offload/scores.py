"""What rules know about sequences: chances of use in the next layers, and how soon an expert is used again.

All of it depends on the routing alone, not on what a rule does, so it is computed for whole sequences at once. Nothing
here looks ahead, except ``truth`` and ``next-visit``, which the bounds use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustergym.moe_offload.kernels.rules import N_AHEAD, Scores
from clustergym.moe_offload.tables import Tables
from clustergym.moe_offload.uses import next_use, recall, use
from clustergym.traces.token_trace import TokenTrace

if TYPE_CHECKING:
    from clustergym.moe_offload.predictor import Predictor

Array = npt.NDArray[np.float32]

LIFT_WEIGHT = 0.6
"""Lifts of experts of the same token are added. They overlap, so each counts less than in full."""
FREQUENCY_DECAY = 0.95
FREQUENCY_PRIOR = 8.0
"""Weight of the popularity beside the decayed count of a sequence, in tokens."""
NEAREST_SHARE = 0.5
"""Weight of the nearest past sequence beside the sequence's own counts."""
NEAREST_EVERY = 4
"""The nearest past sequence is looked up every so many tokens."""

SOURCES = ("none", "transitions", "frequency-transitions", "nearest", "predictor", "truth", "next-visit", "random")


def scores_of(
    source: str, trace: TokenTrace, groups: npt.NDArray[np.integer[Any]], tables: Tables, predictor: Predictor | None
) -> Scores:
    """The scores of one source.

    Args:
        source: one of SOURCES.
        trace: all sequences of the groups, and no others.
        groups: (episodes, B) sequences that are served together; -1 is none.
        tables, predictor: what was fitted.
    """
    n, n_layers, n_experts = trace.n_tokens, trace.n_layers, trace.n_experts
    keep = np.zeros((1, 1, 1, 0), np.float32)
    ahead = np.zeros((1, 1, 1, 1), np.float32)
    if source == "predictor":
        if predictor is None:
            raise ValueError("the control needs a predictor: run clustergym offload fit, and give --predictor")
        predictions = predictor.predict(trace)
        ahead, keep = predictions.ahead, np.insert(predictions.keep, trace.seq_starts, predictor.at_start(), axis=0)
    elif source == "transitions":
        ahead = _with_lifts(trace, tables, np.broadcast_to(tables.prior(), (n, n_layers, n_experts)))
    elif source == "frequency-transitions":
        ahead = _with_lifts(trace, tables, _before(own_shares(trace, tables), trace) * 0.98 + 0.002)
    elif source == "nearest":
        ahead, keep = _nearest(trace, tables)
    elif source == "random":
        rng = np.random.default_rng(0)
        keep = rng.random((n + trace.n_sequences, n_layers, n_experts, 1), np.float32)
    ahead, keep, lengths = merge(ahead, keep, trace, groups)
    if source in ("truth", "next-visit"):
        used = merge(use(trace.experts, n_experts)[None], keep, trace, groups)[0]
        if source == "truth":
            ahead = np.broadcast_to(used, (N_AHEAD, *used.shape[1:]))
        else:
            keep = _next_visit(used[0], lengths)
    return Scores(np.cumsum(lengths) - lengths, np.ascontiguousarray(keep), np.ascontiguousarray(ahead))


def recalls(trace: TokenTrace, tables: Tables, predictor: Predictor) -> dict[str, list[float]]:
    """Share of the used experts among the top-k 1, 2, 3 layers ahead, by what predicts them."""
    alone = np.arange(trace.n_sequences)[:, None]
    popular = np.broadcast_to(tables.popularity, (trace.n_tokens, *tables.shape))
    found = {"popularity": [recall(popular, trace)] * 3}
    for name in ("transitions", "frequency-transitions"):
        found[name] = [recall(ahead, trace) for ahead in scores_of(name, trace, alone, tables, None).ahead]
    return found | {"predictor": predictor.recall(trace)}


def merge(
    ahead: Array, keep: Array, trace: TokenTrace, groups: npt.NDArray[np.integer[Any]]
) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """Scores of sequences that are served together: the chance that one of them uses the expert.

    Returns the scores by episode, one after the other, and the lengths of the episodes in tokens.
    """
    members = [row[row >= 0] for row in groups]
    lengths = np.array([trace.seq_lens[row].max() for row in members])
    if groups.shape[1] == 1 and np.array_equal(groups[:, 0], np.arange(trace.n_sequences)):
        return ahead, keep, lengths
    starts, first = trace.seq_starts, np.cumsum(lengths) - lengths
    rows = int(lengths.sum())
    new_ahead, new_keep = ahead, keep
    if given_ahead := ahead.size > 1:
        new_ahead = np.zeros((ahead.shape[0], rows, *ahead.shape[2:]), np.float32)
    if given_keep := keep.size > 0:
        new_keep = np.zeros((rows + len(members), *keep.shape[1:]), np.float32)
    for episode, row in enumerate(members):
        for s in row:
            n = int(trace.seq_lens[s])
            if given_ahead:
                part = new_ahead[:, first[episode] : first[episode] + n]
                part += (1 - part) * ahead[:, starts[s] : starts[s] + n]
            if given_keep:
                begin = first[episode] + episode
                part = new_keep[begin : begin + n + 1]
                part += (1 - part) * keep[starts[s] + s : starts[s] + s + n + 1]
    return new_ahead, new_keep, lengths


def _before(rows: Array, trace: TokenTrace) -> Array:
    """(T, …) the rows before each token, of (T + S, …)."""
    return rows[np.arange(trace.n_tokens) + np.repeat(np.arange(trace.n_sequences), trace.seq_lens)]


def own_shares(trace: TokenTrace, tables: Tables) -> Array:
    """(T + S, L, E) decayed share of a sequence's tokens that use each expert, mixed with the popularity."""
    used = use(trace.experts, trace.n_experts)
    shares = np.empty((trace.n_tokens + trace.n_sequences, *used.shape[1:]), np.float32)
    for s, (start, length) in enumerate(zip(trace.seq_starts, trace.seq_lens, strict=True)):
        count, weight = FREQUENCY_PRIOR * tables.popularity, FREQUENCY_PRIOR
        total = np.zeros_like(count)
        for t in range(start, start + length + 1):
            shares[t + s] = (total + count) / weight
            if t < start + length:
                total = FREQUENCY_DECAY * total + used[t]
                weight = FREQUENCY_DECAY * (weight - FREQUENCY_PRIOR) + 1 + FREQUENCY_PRIOR
    return shares


def _with_lifts(trace: TokenTrace, tables: Tables, prior: npt.NDArray[np.floating[Any]]) -> Array:
    """(3, T, L, E) chance of use by naive Bayes: the odds of ``prior``, times the lifts of a layer visited before."""
    used = use(trace.experts, trace.n_experts)
    n_layers = trace.n_layers
    odds = np.log(prior / (1 - prior)).astype(np.float32)
    ahead = np.empty((N_AHEAD, *used.shape), np.float32)
    for h in range(1, N_AHEAD + 1):
        for l in range(n_layers):
            source = (l - h) % n_layers
            lift = LIFT_WEIGHT * (used[:, source] @ tables.lifts[h - 1, source])
            if l < h:  # the layers before are those of the last token
                lift = np.concatenate([np.zeros_like(lift[:1]), lift[:-1]])
                lift[trace.seq_starts] = 0
            ahead[h - 1, :, l] = odds[:, l] + lift
    return (1 / (1 + np.exp(-ahead))).astype(np.float32, copy=False)


def _nearest(trace: TokenTrace, tables: Tables) -> tuple[Array, Array]:
    """As MoE-Infinity: the past sequence with the most similar use of experts says what comes."""
    used, n_layers = use(trace.experts, trace.n_experts), trace.n_layers
    own = own_shares(trace, tables)
    profiles = tables.profiles.reshape(len(tables.profiles), -1)
    norms = np.linalg.norm(profiles, axis=1)
    # The profile that is known at each token, from the tokens before.
    near = np.empty_like(used)
    for start, length in zip(trace.seq_starts, trace.seq_lens, strict=True):
        total, best = np.zeros(used.shape[1:], np.float32), tables.popularity
        for t in range(start, start + length):
            if t > start and (t - start) % NEAREST_EVERY == 0:
                best = tables.profiles[int(np.argmax(profiles @ total.ravel() / norms))]
            near[t] = best
            total = FREQUENCY_DECAY * total + used[t]
    before = _before(own, trace)
    ahead = np.empty((N_AHEAD, *used.shape), np.float32)
    late = np.concatenate([near[:1], near[:-1]])
    late[trace.seq_starts] = tables.popularity
    for h in range(1, N_AHEAD + 1):
        for l in range(n_layers):
            known = late if l < h else near
            ahead[h - 1, :, l] = NEAREST_SHARE * known[:, l] + (1 - NEAREST_SHARE) * before[:, l]
    after = np.arange(trace.n_tokens) + np.repeat(np.arange(trace.n_sequences), trace.seq_lens) + 1
    keep = own.copy()
    keep[after] = NEAREST_SHARE * near + (1 - NEAREST_SHARE) * own[after]
    return ahead, keep[..., None]


def _next_visit(used: Array, lengths: npt.NDArray[np.int64]) -> Array:
    """(T + S, L, E, 1) minus the visit of the next use, counted from the start of the episode."""
    n_layers = used.shape[1]
    episode = np.repeat(np.arange(len(lengths)), lengths)
    # One empty row before each episode, so that the row before its first token has a next use, too.
    padded = np.zeros((len(used) + len(lengths), *used.shape[1:]), np.float32)
    padded[np.arange(len(used)) + episode + 1] = used
    starts = np.cumsum(lengths + 1) - (lengths + 1)
    distance = next_use(padded, starts)
    token = np.concatenate([np.arange(-1, n) for n in lengths])
    visit = (token[:, None, None] + distance) * n_layers + np.arange(n_layers)[None, :, None]
    minus: Array = -visit[..., None].astype(np.float32)
    return minus
