"""Counts that the estimate of :mod:`.surrogate` reads: of observed tokens, and of the topics of past traffic."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import device
from clustergym.planners.kernels.proposals import draw_samples


class TopicCounts(NamedTuple):
    """What a token of each topic of past traffic uses on average."""

    loads: np.ndarray
    """(L, topics, E) float32: share of the tokens that use each expert"""
    pairs: np.ndarray
    """(L, topics, E, E) float32: share of the tokens that use both experts; of size 1 if nobody asks for it"""


@device
def count_topics(first, last, experts, topic, tokens, counts):
    """Write ``counts`` of the rows of ``experts`` (L, rows, K). ``tokens`` (topics,) are the rows of each topic."""
    n_pairs = counts.pairs.shape[3]
    for b in range(first, last):
        for row in range(experts.shape[1]):
            token, t = experts[b, row], topic[row]
            for i in range(len(token)):
                if token[i] < 0:
                    continue
                counts.loads[b, t, token[i]] += np.float32(1.0)
                for j in range(i if n_pairs > 1 else 0):
                    if token[j] >= 0:
                        counts.pairs[b, t, token[i], token[j]] += np.float32(1.0)
                        counts.pairs[b, t, token[j], token[i]] += np.float32(1.0)
        for t in range(len(tokens)):
            one = np.float32(1.0 / max(1, tokens[t]))
            for e in range(counts.loads.shape[2]):
                counts.loads[b, t, e] *= one
            for e in range(n_pairs):
                for other in range(n_pairs):
                    counts.pairs[b, t, e, other] *= one


@device
def count_tokens(first, last, s, experts, all_rows, rows, before, topic, by_topic):
    """Count loads of ``all_rows`` and pairs of ``rows`` of ``experts`` (L, rows, K), as if there were ``s.n_tokens``.

    Counting pairs takes longer, so ``rows`` may be a part. The interval begins with placement ``before``. ``topic`` has
    the topic of each row. ``by_topic`` (L, E, topics) gets the loads of each topic, if it has any.
    """
    draw_samples(first, last, s.sample, experts, rows)
    for b in range(first, last):
        top_k, dedup = experts.shape[2], s.pairs.shape[1] > 1
        one = s.n_tokens / len(all_rows)
        for t in range(len(all_rows)):
            for i in range(top_k):
                e = experts[b, all_rows[t], i]
                if e >= 0:
                    s.load[b, e] += one
                    if by_topic.shape[2] > 0:
                        by_topic[b, e, topic[all_rows[t]]] += one
        both = np.float32(s.n_tokens / len(rows))
        for t in range(len(rows) if dedup else 0):
            token = experts[b, rows[t]]
            for i in range(top_k):
                for j in range(i):
                    if token[i] >= 0 and token[j] >= 0:
                        s.pairs[b, token[i], token[j]] += both
                        s.pairs[b, token[j], token[i]] += both
        for g in range(before.shape[1]):
            for k in range(before.shape[2]):
                if before[b, g, k] >= 0:
                    s.held_before[b, before[b, g, k], g] = 1


@device
def add_topics(first, last, s, own, counts, tokens, experts, rows, by_topic):
    """Multiply what was counted by ``own``, and add ``tokens`` (topics,) tokens of each topic of past traffic.

    The topics come after those of the observed tokens. ``rows`` of past ``experts`` replace the last of the sample.
    """
    n_experts, n_topics, n_varying = s.load.shape[1], len(tokens), by_topic.shape[2]
    for b in range(first, last):
        for e in range(n_experts):
            s.load[b, e] *= own
            for d in range(n_varying):
                by_topic[b, e, d] *= own
            for t in range(n_topics):
                added = tokens[t] * counts.loads[b, t, e]
                s.load[b, e] += added
                if n_varying > 0:
                    by_topic[b, e, n_varying - n_topics + t] += added
        if s.pairs.shape[1] > 1:
            for e in range(n_experts):
                here = s.pairs[b, e]
                for other in range(n_experts):
                    here[other] *= np.float32(own)
                for t in range(n_topics):
                    weight, there = np.float32(tokens[t]), counts.pairs[b, t, e]
                    for other in range(n_experts):
                        here[other] += weight * there[other]
        last_row = s.sample.shape[1] - len(rows)
        for i in range(len(rows)):
            for k in range(s.sample.shape[2]):
                s.sample[b, last_row + i, k] = experts[b, rows[i], k]


def deviations(
    loads: npt.NDArray[np.float64],
    by_topic: npt.NDArray[np.float64],
    shares: npt.NDArray[np.float64],
    mixture_std: float,
    most: int,
) -> npt.NDArray[np.float64]:
    """(L, E, ≤ most): how the loads (L, E) vary with the shares of the topics.

    The logarithms of the shares have the standard deviation ``mixture_std``. ``by_topic`` (L, E, topics) are the loads
    of each topic, ``shares`` their shares of the tokens. Only the sum of the squares over topics matters, so topics are
    replaced by fewer directions, those in which loads vary most.
    """
    # If the share of a topic grows by a factor, all shares are divided by their new sum.
    found = mixture_std * (by_topic - shares * loads[..., None])
    if found.shape[2] > most:
        _, directions = np.linalg.eigh(found.transpose(0, 2, 1) @ found)
        found = found @ directions[..., -most:]
    return np.ascontiguousarray(found)
