"""Topics of the traffic: tokens of neighbouring positions that use similar experts.

Nobody knows how the mixture of topics will change. A plan that is best for the observed mixture may put the experts of
one topic on one GPU, which is overloaded when the topic grows. A search can prepare for that if it knows the topics: it
can count how much the load of each expert varies with them, or plan on passes with several mixtures.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.streams import Interval

N_TOPICS = 8
_ROUNDS = 30
# Tokens whose positions in the trace are in the same block are taken to be of one topic.
_BLOCK, _MOST_TOKENS, _MOST_LAYERS = 64, 16384, 4


def topics_of(interval: Interval, n_experts: int, seed: int = 0) -> npt.NDArray[np.int8]:
    """Topic of every row of ``interval.experts``, found from the rows that the interval serves. Others get topic 0.

    A few layers are enough to tell topics apart.
    """
    rng, rows = np.random.default_rng(seed), np.unique(interval.rows)
    blocks, block = np.unique(rows // _BLOCK, return_inverse=True)
    if len(rows) > _MOST_TOKENS:
        kept = rng.permutation(len(blocks))[: len(blocks) * _MOST_TOKENS // len(rows)]
        block = np.where(np.isin(block, kept), block, -1)
    layers = np.unique(np.linspace(0, interval.n_layers - 1, min(_MOST_LAYERS, interval.n_layers)).round().astype(int))
    counts = np.zeros((len(blocks), len(layers), n_experts))
    for i, layer in enumerate(layers):
        chosen = interval.experts[layer, rows].astype(np.int64)
        cells = (block[:, None] * n_experts + chosen)[(chosen >= 0) & (block[:, None] >= 0)]
        counts[:, i] = np.bincount(cells, minlength=len(blocks) * n_experts).reshape(-1, n_experts)
    _, topic = group(counts.reshape(len(blocks), -1), N_TOPICS, len(layers), rng)
    found = np.zeros(interval.experts.shape[1], np.int8)
    found[rows] = topic[np.searchsorted(blocks, rows // _BLOCK)]
    return found


def scenarios(interval: Interval, topic: npt.NDArray[np.int8], n: int, mixture_std: float, seed: int) -> Interval:
    """``n`` passes of tokens of the interval, each with another mixture of topics, dealt over the ranks at random.

    The logarithms of the weights of the topics have the standard deviation ``mixture_std``. All passes together have as
    many tokens as the interval.
    """
    rng, rows, ranks = np.random.default_rng(seed), interval.rows.ravel(), interval.rank_start.shape[1] - 1
    n_tokens = max(1, len(rows) // (n * ranks)) * ranks
    passes = np.empty((n, n_tokens), np.int32)
    for each in passes:
        order = rng.permutation(rows)
        bounds = np.cumsum(np.exp(mixture_std * rng.normal(size=int(topic.max()) + 1))[topic[order]])
        # Every token as often as its weight says, rounded up or down by chance.
        drawn = np.searchsorted(bounds, (np.arange(n_tokens) + rng.random()) / n_tokens * bounds[-1], side="right")
        each[:] = rng.permutation(order[np.minimum(drawn, len(order) - 1)])
    made = Interval.even(interval.experts, passes, ranks)
    return replace(made, stands_for=interval.stands_for or interval.n_tokens)


def group(
    counts: npt.NDArray[np.float64], topics: int, layers: int, rng: np.random.Generator
) -> tuple[float, npt.NDArray[np.intp]]:
    """(log-likelihood, topic of each row): a row joins the topic that explains its counts best, until none moves.

    ``counts`` (rows, layers · E) are the uses of each expert.
    """
    topic = rng.integers(0, topics, len(counts))
    for _ in range(_ROUNDS):
        fit = counts @ np.log(profiles_of(counts, topic, topics, layers)).T
        moved, topic = topic, fit.argmax(1)
        if (moved == topic).all():
            break
    return float(fit.max(1).sum()), topic


def profiles_of(
    counts: npt.NDArray[np.float64], topic: npt.NDArray[np.intp], topics: int, layers: int
) -> npt.NDArray[np.float64]:
    """(topics, layers · E) probability of each expert. A little of the overall counts is added, so none is 0."""
    overall = 1e-3 * counts.sum(0) + 1e-3
    sums = np.stack([counts[topic == t].sum(0) + overall for t in range(topics)]).reshape(topics, layers, -1)
    return np.asarray((sums / sums.sum(2, keepdims=True)).reshape(topics, -1))
