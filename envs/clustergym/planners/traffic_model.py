"""A model of the traffic of a serving system, learned from its token traces.

The last interval is a small sample of what comes next: a plan that is optimal for its tokens is not for the next ones.
The model knows more tokens. Learning groups the sequences of a training trace into topics by the experts that they
use. In use, the loads of the last interval tell how much of each topic is being served, and tokens of these topics are
added to those of the interval. A planner then plans on both.

New traffic may be unlike all topics. So the model knows how far the loads of training sequences that it did not learn
from are from its topics. The further the loads of an interval are beyond that, the fewer training tokens are added.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.streams import Interval, layer_first
from clustergym.planners.kernels.counts import TopicCounts, count_topics
from clustergym.planners.kernels.launch import over_layers
from clustergym.planners.topics import N_TOPICS, group, profiles_of
from clustergym.traces.token_trace import TokenTrace

MOST_TRAINING_TOKENS = 65536
_FEWEST_TOKENS = 8192
"""Fewest tokens of an extended interval. A token may appear more than once, on different ranks."""
_STARTS, _ROUNDS = 4, 30
_FIT_LAYERS = 8
"""A few layers are enough to tell how much of each topic is served."""
_KNOWN = 0.25
"""Least likeness of traffic that the topics explain: at most twice as far from them as usual."""
_PART_TOKENS = 2048
"""Tokens of a part of the training trace that stands for an interval."""


@dataclass(eq=False)
class TrafficModel:
    """Topics of the training traffic, and their tokens."""

    experts: npt.NDArray[np.int16]
    """(L, rows, K) training tokens, layer first"""
    rows: list[npt.NDArray[np.int64]]
    """Rows of each topic"""
    profiles: npt.NDArray[np.float64]
    """(topics, L·E) probability of each expert in each layer"""
    usual_distance: float = np.inf
    """Distance of the topics from loads of training sequences that were left out, see :meth:`distance`"""
    worth: int = 8192
    """Number of observed tokens that the training tokens are worth: half of the tokens that a planner sees are training
    tokens if the interval has so many."""
    inertia: float = 0.7
    """Weight of the topics that the last interval shows; the rest is their share of the training tokens."""
    _joined: tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]] | None = field(default=None, repr=False)
    _counts: dict[bool, TopicCounts] = field(default_factory=dict, repr=False)

    @classmethod
    def learn(cls, trace: TokenTrace, n_experts: int, topics: int = N_TOPICS, seed: int = 0) -> Self:
        """Learn from the sequences of ``trace``, or from a sample of them if there are many tokens."""
        rng = np.random.default_rng(seed)
        if trace.n_tokens > MOST_TRAINING_TOKENS:
            order = rng.permutation(trace.n_sequences)
            kept = np.searchsorted(np.cumsum(trace.seq_lens[order]), MOST_TRAINING_TOKENS) + 1
            trace = trace.select(sequences=np.sort(order[:kept]))
        counts = _counts(trace, n_experts)
        model = cls._group(trace, counts, topics, rng)
        half = rng.permutation(trace.n_sequences)
        learned_from, left_out = np.sort(half[::2]), half[1::2]
        if len(left_out):
            other = cls._group(trace.select(sequences=learned_from), counts[learned_from], topics, rng)
            parts = np.array_split(left_out, max(1, int(trace.seq_lens[left_out].sum()) // _PART_TOKENS))
            loads = [counts[part].sum(0).reshape(trace.n_layers, n_experts) for part in parts]
            model.usual_distance = float(np.mean([other.distance(each) for each in loads]))
        return model

    @classmethod
    def _group(cls, trace: TokenTrace, counts: npt.NDArray[np.float64], topics: int, rng: np.random.Generator) -> Self:
        """Group the sequences, whose experts have these ``counts``, into topics."""
        sequence = np.repeat(np.arange(trace.n_sequences), trace.seq_lens)
        best = max((group(counts, topics, trace.n_layers, rng) for _ in range(_STARTS)), key=lambda found: found[0])
        _, topic = np.unique(best[1], return_inverse=True)
        rows = [np.flatnonzero(topic[sequence] == t) for t in range(topic.max() + 1)]
        return cls(layer_first(trace), rows, profiles_of(counts, topic, len(rows), trace.n_layers))

    @property
    def topic(self) -> npt.NDArray[np.int8]:
        """(rows,) topic of each training token"""
        found = np.zeros(self.experts.shape[1], np.int8)
        for t, rows in enumerate(self.rows):
            found[rows] = t
        return found

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """(topics,) of the training tokens"""
        sizes = np.array([len(rows) for rows in self.rows], float)
        return np.asarray(sizes / sizes.sum())

    @property
    def n_topics(self) -> int:
        return len(self.rows)

    def counts(self, pairs: bool) -> TopicCounts:
        """What a token of each topic uses on average; ``pairs`` of experts only if asked for. Counted once."""
        if pairs not in self._counts:
            layers, n_experts = len(self.experts), self.profiles.shape[1] // len(self.experts)
            shape = (layers, self.n_topics, n_experts)
            table = np.zeros((*shape, n_experts) if pairs else (layers, self.n_topics, 1, 1), np.float32)
            found = TopicCounts(np.zeros(shape, np.float32), table)
            tokens = np.array([len(rows) for rows in self.rows])
            over_layers(count_topics, 0, layers, self.experts, self.topic, tokens, found)
            self._counts[pairs] = found
        return self._counts[pairs]

    def mixture(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(topics,) share of each topic in the next interval, after one with these shares."""
        return self.inertia * shares + (1 - self.inertia) * self.shares

    def distance(self, loads: npt.NDArray[np.float64], shares: npt.NDArray[np.float64] | None = None) -> float:
        """How far loads (L, E) are from the closest mixture of topics, beyond the noise of independent tokens.

        ``shares`` (topics,) is that mixture, if known.

        The statistic of Pearson's test is about 1 per expert for independent tokens and grows with their number
        otherwise. So 1 is subtracted, and the rest is divided by the number.
        """
        expected = ((self.fit(loads) if shares is None else shares) @ self.profiles).reshape(loads.shape)
        total = loads.sum(1, keepdims=True)
        statistic = ((loads - total * expected) ** 2 / np.maximum(total * expected, 1e-9)).sum(1) / loads.shape[1]
        return float(np.mean(np.maximum(statistic - 1, 0) / np.maximum(total[:, 0], 1)))

    def fit(self, loads: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(topics,) share of each topic in traffic with these loads, by expectation maximization."""
        layers, n_experts = loads.shape
        some = np.unique(np.linspace(0, layers - 1, min(layers, _FIT_LAYERS)).round().astype(int))
        observed = loads[some].ravel()
        profiles = self.profiles.reshape(-1, layers, n_experts)[:, some].reshape(self.n_topics, -1)
        used, weights = observed > 0, self.shares
        observed, profiles = observed[used], profiles[:, used]
        for _ in range(_ROUNDS):
            share = weights[:, None] * profiles
            weights = (share / share.sum(0)) @ observed
            weights /= max(weights.sum(), 1e-12)
        return np.asarray(weights)

    def likeness(self, loads: npt.NDArray[np.float64], shares: npt.NDArray[np.float64] | None = None) -> float:
        """1 if loads (L, E) are as close to the topics as usual; a quarter if they are twice as far."""
        return float(min(1.0, (self.usual_distance / max(self.distance(loads, shares), 1e-12)) ** 2))

    def knows(self, loads: npt.NDArray[np.float64]) -> bool:
        """Whether traffic with these loads is like the training traffic."""
        return self.likeness(loads) >= _KNOWN

    def blend(self, loads: npt.NDArray[np.float64], tokens: int) -> tuple[float, npt.NDArray[np.float64]]:
        """(share of observed tokens, shares of the topics): what to plan on after so many tokens with these loads.

        All shares together are 1.
        """
        shares = self.fit(loads)
        own = tokens / (tokens + self.worth * self.likeness(loads, shares))
        return own, (1 - own) * self.mixture(shares)

    def draw(self, tokens: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.int64]:
        """Rows of so many ``tokens`` (topics,) of each topic, rounded down. A row may appear twice."""
        rng = np.random.default_rng(seed)
        drawn = [rows[rng.integers(len(rows), size=int(n))] for rows, n in zip(self.rows, tokens, strict=True)]
        return np.concatenate(drawn)

    def extend(self, interval: Interval, n_experts: int, most_tokens: int, seed: int) -> Interval:
        """One pass with tokens of the interval and training tokens, priced as a pass of the interval."""
        experts = self._join(interval.experts)
        rng, ranks, seen = np.random.default_rng(seed), interval.rank_start.shape[1] - 1, interval.rows.ravel()
        own, past = self.blend(interval.loads(n_experts).astype(np.float64), len(seen))
        total = min(most_tokens, max(_FEWEST_TOKENS, round(len(seen) / own)))
        offset = interval.experts.shape[1]
        rows = [_draw(seen, round(own * total), rng)]
        rows += [_draw(mine + offset, round(share * total), rng) for mine, share in zip(self.rows, past, strict=True)]
        drawn = rng.permutation(np.concatenate(rows).astype(np.int32))
        if len(drawn) < ranks:
            drawn = np.resize(drawn, ranks)
        drawn = drawn[: len(drawn) // ranks * ranks]
        extended = Interval.even(experts, drawn[None], ranks)
        return replace(extended, stands_for=interval.stands_for or interval.n_tokens)

    def all_topics(self, n_gpus: int, most_tokens: int, stands_for: int) -> Interval:
        """One pass with training tokens of all topics, priced as a pass of ``stands_for`` tokens."""
        rows, rng = np.arange(self.experts.shape[1]), np.random.default_rng(0)
        drawn = _draw(rows, max(n_gpus, min(most_tokens, len(rows)) // n_gpus * n_gpus), rng).astype(np.int32)
        return replace(Interval.even(self.experts, drawn[None], n_gpus), stands_for=stands_for)

    def check(self, layers: int, top_k: int) -> None:
        """An error if the traffic is of another model."""
        learned = self.experts.shape
        if (layers, top_k) != (learned[0], learned[2]):
            raise ValueError(
                f"the traffic model was learned from {learned[0]} layers with top-{learned[2]} routing, but the "
                f"traffic has {layers} and {top_k}"
            )

    def _join(self, experts: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
        """Observed and training tokens in one array. Streams repeat the same observed array."""
        if self._joined is None or self._joined[0] is not experts:
            self.check(experts.shape[0], experts.shape[2])
            self._joined = experts, np.concatenate([experts, self.experts], axis=1)
        return self._joined[1]


def _draw(rows: npt.NDArray[np.integer], n: int, rng: np.random.Generator) -> npt.NDArray[np.integer]:
    """``n`` of the rows, none a second time before all were drawn once."""
    return np.concatenate([rng.permutation(rows) for _ in range(-(-n // len(rows)))] or [rows[:0]])[:n]


def _counts(trace: TokenTrace, n_experts: int) -> npt.NDArray[np.float64]:
    """(sequences, L·E) uses of each expert."""
    counts = np.zeros((trace.n_sequences, trace.n_layers, n_experts))
    sequence = np.repeat(np.arange(trace.n_sequences), trace.seq_lens)[:, None]
    for layer, chosen in enumerate(layer_first(trace)):
        cells = (sequence * n_experts + chosen)[chosen >= 0]
        counts[:, layer] = np.bincount(cells, minlength=trace.n_sequences * n_experts).reshape(-1, n_experts)
    return counts.reshape(trace.n_sequences, -1)
