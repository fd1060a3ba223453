"""Synthetic token traces with the load skew, co-activation, layer affinity and drift of real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from clustergym.traces.token_trace import MAX_EXPERTS, TokenTrace

MAX_IDS = 2_000_000_000
"""Largest synthetic trace, in expert ids: 4 GB of memory."""


class RoutedModel(Protocol):
    """What a synthetic trace needs to know of a model. :class:`clustergym.moe_placement.ModelSpec` has it."""

    @property
    def name(self) -> str: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def n_groups(self) -> int: ...
    @property
    def group_limit(self) -> int: ...


@dataclass(frozen=True)
class SyntheticConfig:
    """Parameters of :func:`synthetic_trace`. The defaults give the statistics of DeepSeek-V2-Lite.

    Each parameter has its own random stream: with the same seed, changing one parameter does not change the draws for
    the others.
    """

    n_tokens: int = 20_000
    """Tokens in the trace, at least one per domain."""
    n_layers: int = 26
    """Recorded MoE layers, 1 or more."""
    first_layer: int = 1
    """Global index of the first recorded layer, 0 or more. The other ``layer_ids`` follow it."""
    n_experts: int = 64
    """Experts per layer, from ``top_k`` to 32767."""
    top_k: int = 6
    """Experts per token and layer, from 1 to ``n_experts``."""
    layers: tuple[int, ...] = ()
    """Global indices of the recorded layers, if they do not follow each other. Empty: ``n_layers`` from
    ``first_layer``."""
    n_groups: int = 1
    """Groups of consecutive experts, a divisor of ``n_experts``."""
    group_limit: int = 0
    """Groups that the experts of a token may come from, as in DeepSeek-V3 (4 of 8). 0: all."""
    mean_seq_len: float = 103.0
    """Mean tokens per sequence, 1 or more. The last sequence of each domain is cut to fit."""
    seq_len_spread: float = 0.86
    """Standard deviation of the log-normal sequence lengths divided by their mean, 0 … 10. 0: all have equal length."""
    n_domains: int = 4
    """Domains, 1 or more, labelled ``domain0``, ``domain1``, … Each has an equal share of the tokens."""
    popularity_skew: float = 0.18
    """Standard deviation of the popularity of the experts, 0 … 100, relative to the rest of a score. 0: all equal."""
    n_topics: int = 6
    """Dimensions of a topic vector, 1 or more. With fewer dimensions the same experts are used together more often."""
    topic_strength: float = 0.94
    """Share of the variance of a score that the topic explains, 0 … 1. Independent noise explains the rest."""
    topic_persistence: float = 0.37
    """Correlation between the topics of consecutive tokens of a sequence, 0 … 1 (1 excluded)."""
    layer_affinity: float = 0.98
    """Correlation between the topics, and between the noise, of consecutive layers, 0 … 1: how well the experts of one
    layer predict those of the next. At 0 the layers share only the parts of the domain and the sequence."""
    domain_drift: float = 0.16
    """Share of the variance of a topic that the domain explains, 0 … 1: how much the loads of two domains differ."""
    sequence_drift: float = 0.013
    """Share of the variance of a topic that the sequence explains in addition to its domain, 0 … 1 − ``domain_drift``:
    how much the loads of two sequences of one domain differ."""
    model: str = "deepseek-v2-lite"
    """Name of the model preset to write into the trace."""

    def __post_init__(self) -> None:
        _require_integer("n_layers", self.n_layers, 1)
        _require_integer("first_layer", self.first_layer, 0)
        _require_integer("top_k", self.top_k, 1)
        _require_integer("n_experts", self.n_experts, 1, MAX_EXPERTS)
        _require_integer("n_topics", self.n_topics, 1)
        _require_integer("n_domains", self.n_domains, 1)
        _require_integer("n_tokens", self.n_tokens, 1)
        _require_integer("n_groups", self.n_groups, 1)
        _require_integer("group_limit", self.group_limit, 0)
        ids = self.n_tokens * self.n_layers * self.top_k
        if ids > MAX_IDS:
            raise ValueError(
                f"n_tokens × n_layers × top_k is {ids:,}, more than {MAX_IDS:,}: at most "
                f"{MAX_IDS // (self.n_layers * self.top_k):,} tokens for {self.n_layers} layers and top-{self.top_k}"
            )
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k must be at most n_experts = {self.n_experts}, found {self.top_k}")
        if self.n_experts % self.n_groups:
            raise ValueError(f"n_groups must divide n_experts = {self.n_experts}, found {self.n_groups}")
        most = self.group_limit * (self.n_experts // self.n_groups)
        if self.group_limit > self.n_groups or (self.group_limit and most < self.top_k):
            raise ValueError(
                f"group_limit must be at most n_groups = {self.n_groups} and leave top_k = {self.top_k} experts, "
                f"found {self.group_limit}"
            )
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.layers and len(self.layers) != self.n_layers:
            raise ValueError(f"layers must name n_layers = {self.n_layers} layers, found {len(self.layers)}")
        if self.n_tokens < self.n_domains:
            raise ValueError(f"n_tokens must be at least n_domains = {self.n_domains}, found {self.n_tokens}")
        _require_number("mean_seq_len", self.mean_seq_len, 1.0)
        _require_number("seq_len_spread", self.seq_len_spread, 0.0, 10.0)
        _require_number("popularity_skew", self.popularity_skew, 0.0, 100.0)
        for name in ("topic_strength", "topic_persistence", "layer_affinity", "domain_drift", "sequence_drift"):
            _require_number(name, getattr(self, name), 0.0, 1.0)
        if self.topic_persistence == 1.0:
            raise ValueError("topic_persistence must be below 1, found 1.0: use sequence_drift for a fixed topic")
        if self.domain_drift + self.sequence_drift > 1.0:
            raise ValueError(
                "domain_drift + sequence_drift must be at most 1 (they are shares of one variance), "
                f"found {self.domain_drift} + {self.sequence_drift}"
            )
        if not isinstance(self.model, str):
            raise ValueError(f"model must be a string, found {self.model!r}")

    @classmethod
    def deepseek_v2_lite(cls) -> SyntheticConfig:
        """Prefill with DeepSeek-V2-Lite (the defaults): 26 layers, top-6 of 64, even loads, strong topics."""
        return cls()

    @classmethod
    def for_model(cls, model: RoutedModel, **overrides: Any) -> SyntheticConfig:
        """The layers, experts and routing of a model, with the default statistics and the given fields replaced."""
        sizes: dict[str, Any] = {
            "n_layers": len(model.layer_ids),
            "layers": model.layer_ids,
            "first_layer": model.layer_ids[0],
            "n_experts": model.n_experts,
            "top_k": model.top_k,
            "n_groups": model.n_groups,
            "group_limit": model.group_limit,
            "model": model.name,
        }
        if {"n_layers", "first_layer"} & set(overrides):
            sizes["layers"] = ()
        return cls(**(sizes | overrides))

    @classmethod
    def gpt_oss_20b(cls) -> SyntheticConfig:
        """Decoding with gpt-oss-20b: 24 layers, top-4 of 32, uneven loads, long sequences that differ a lot."""
        return cls(
            n_tokens=40_000,
            n_layers=24,
            first_layer=0,
            n_experts=32,
            top_k=4,
            mean_seq_len=287.0,
            seq_len_spread=0.64,
            n_domains=4,
            popularity_skew=0.42,
            n_topics=5,
            topic_strength=0.94,
            topic_persistence=0.42,
            layer_affinity=0.99,
            domain_drift=0.12,
            sequence_drift=0.31,
            model="gpt-oss-20b",
        )


def synthetic_trace(config: SyntheticConfig | None = None, seed: int = 0, **overrides: Any) -> TokenTrace:
    """Draw a trace. The same ``config`` and ``seed`` always give the same trace.

    Every token has a topic vector, the sum of a part of its domain, a part of its sequence, and a part of its own that
    changes from token to token and from layer to layer. Every expert of every layer has a direction in the same vector
    space, and a popularity. The score of an expert for a token is

        popularity + √strength · (direction · topic) + √(1 − strength) · noise

    The token uses the ``top_k`` experts with the highest scores. Experts with similar directions are used together.
    With ``group_limit``, the token first chooses that many groups of experts.

    Args:
        config: the parameters. Default: those of DeepSeek-V2-Lite.
        seed: for all random draws.
        overrides: fields of :class:`SyntheticConfig` to replace: ``synthetic_trace(n_tokens=2048, top_k=2)``.
    """
    known = [f.name for f in fields(SyntheticConfig)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"unknown parameter {name!r} of a synthetic trace; the parameters are: {', '.join(known)}")
    c = replace(config if config is not None else SyntheticConfig(), **overrides)
    # One random stream for each part: changing one parameter does not change the draws of the other parts.
    length_rng, domain_rng, sequence_rng, token_rng, noise_rng, expert_rng = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(6)
    )
    per_domain = np.full(c.n_domains, c.n_tokens // c.n_domains)
    per_domain[: c.n_tokens % c.n_domains] += 1
    lengths = [_sequence_lengths(int(n), c.mean_seq_len, c.seq_len_spread, length_rng) for n in per_domain]
    domain = np.repeat(np.arange(c.n_domains), [len(part) for part in lengths])
    seq_lens = np.concatenate(lengths)

    by_domain = _domain_topics(c.n_domains, c.n_topics, domain_rng)
    by_sequence = sequence_rng.standard_normal((len(seq_lens), c.n_topics))
    shared = np.sqrt(c.domain_drift) * by_domain[domain] + np.sqrt(c.sequence_drift) * by_sequence
    shared_topic = np.repeat(shared, seq_lens, axis=0).astype(np.float32)
    own_share = np.float32(np.sqrt(max(1.0 - c.domain_drift - c.sequence_drift, 0.0)))

    draw_topics = _persistent_topics(seq_lens, c.n_topics, c.topic_persistence, token_rng)
    kept = np.float32(c.layer_affinity)
    fresh = np.float32(np.sqrt(1.0 - c.layer_affinity**2))
    topic_weight, noise_weight = np.sqrt(c.topic_strength), np.float32(np.sqrt(1.0 - c.topic_strength))
    experts = np.empty((c.n_tokens, c.n_layers, c.top_k), dtype=np.int16)
    own_topic = draw_topics()
    noise = noise_rng.standard_normal((c.n_tokens, c.n_experts), dtype=np.float32)
    for l in range(c.n_layers):
        # Each expert continues the noise of a random expert of the previous layer: ids of two layers are unrelated.
        predecessor = expert_rng.permutation(c.n_experts)
        if l > 0:
            own_topic = kept * own_topic + fresh * draw_topics()
            noise = noise[:, predecessor]
            noise *= kept
            noise += fresh * noise_rng.standard_normal(noise.shape, dtype=np.float32)
        directions = expert_rng.standard_normal((c.n_topics, c.n_experts))
        directions /= np.linalg.norm(directions, axis=0)
        popularity = c.popularity_skew * expert_rng.standard_normal(c.n_experts)
        scores = (shared_topic + own_share * own_topic) @ (topic_weight * directions).astype(np.float32)
        scores += noise_weight * noise
        scores += popularity.astype(np.float32)
        if c.group_limit:
            _keep_best_groups(scores, c.n_groups, c.group_limit)
        experts[:, l] = np.argpartition(scores, c.n_experts - c.top_k, axis=1)[:, c.n_experts - c.top_k :]
    # The order of the ids of a token has no meaning, and sorted ids compress better.
    experts.sort(axis=2)
    return TokenTrace(
        experts,
        n_experts=c.n_experts,
        layer_ids=np.array(c.layers) if c.layers else np.arange(c.first_layer, c.first_layer + c.n_layers),
        seq_lens=seq_lens,
        domains=np.array([f"domain{d}" for d in domain]),
        model=c.model or None,
        name="synthetic",
    )


def _keep_best_groups(scores: npt.NDArray[np.float32], n_groups: int, limit: int) -> None:
    """Set the scores (T, E) outside each token's ``limit`` best groups to −∞. A group scores the sum of its best two
    experts, as in DeepSeek-V3."""
    groups = scores.reshape(len(scores), n_groups, -1)
    best = np.partition(groups, groups.shape[2] - min(2, groups.shape[2]), axis=2)[:, :, -2:].sum(2)
    worst = np.argpartition(best, n_groups - limit, axis=1)[:, : n_groups - limit]
    np.put_along_axis(groups, worst[:, :, None], -np.inf, axis=1)


def _sequence_lengths(n_tokens: int, mean: float, variation: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Log-normal lengths of at least 1 that sum to ``n_tokens``. The last one is cut to fit."""
    variance = np.log1p(variation**2)
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < n_tokens:
        count = int(n_tokens / mean) + 16
        drawn = np.exp(np.sqrt(variance) * rng.standard_normal(count) + np.log(mean) - variance / 2)
        lengths = np.concatenate([lengths, np.rint(np.clip(drawn, 1, n_tokens)).astype(np.int64)])
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, n_tokens))
    lengths = lengths[: last + 1]
    lengths[last] -= ends[last] - n_tokens
    return lengths


def _domain_topics(n_domains: int, n_topics: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """(D, n_topics) topic of each domain, with unit variance per dimension; orthogonal if D ≤ n_topics.

    Orthogonal topics are all equally far apart, so the drift hardly depends on the seed.
    """
    drawn = rng.standard_normal((n_domains, n_topics))
    if n_domains <= n_topics:
        return np.asarray(np.linalg.qr(drawn.T)[0].T * np.sqrt(n_topics))
    return np.asarray(drawn * np.sqrt(n_topics) / np.linalg.norm(drawn, axis=1, keepdims=True))


def _persistent_topics(
    seq_lens: npt.NDArray[np.int64], n_topics: int, persistence: float, rng: np.random.Generator
) -> Callable[[], npt.NDArray[np.float32]]:
    """A function that draws (T, n_topics) topics of unit variance, each correlated with the token before it."""
    from scipy.signal import lfilter  # takes a second to import, and most commands draw no trace

    starts = np.cumsum(seq_lens) - seq_lens
    position = np.arange(seq_lens.sum()) - np.repeat(starts, seq_lens)
    decay = (persistence ** (position + 1.0))[:, None]

    def draw() -> npt.NDArray[np.float32]:
        steps = rng.standard_normal((len(position), n_topics))
        steps[position > 0] *= np.sqrt(1.0 - persistence**2)
        if persistence == 0.0:
            return steps.astype(np.float32)
        topics = lfilter([1.0], [1.0, -persistence], steps, axis=0)
        # The filter does not stop at the end of a sequence: subtract what each sequence got from the one before.
        inherited = np.concatenate([np.zeros((1, n_topics)), topics[starts[1:] - 1]])
        topics -= decay * np.repeat(inherited, seq_lens, axis=0)
        return np.asarray(topics, dtype=np.float32)

    return draw


def _require_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, found {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"{low} … {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must be {limits}, found {value}")


def _require_number(name: str, value: Any, low: float, high: float = np.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{name} must be a number, found {value!r}")
    # The comparison is False for nan. Infinite values are refused too.
    if not (low <= value <= high and np.isfinite(value)):
        limits = f"{low:g} … {high:g}" if np.isfinite(high) else f"finite and at least {low:g}"
        raise ValueError(f"{name} must be {limits}, found {value}")
