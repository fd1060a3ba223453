"""What is counted before serving: which sequences are used for what, and the tables of the training sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.traces.token_trace import TokenTrace

AHEAD = 6
"""Transitions are counted to the next 1 … 6 layers, and to the same layer of the next token."""
NEXT_TOKEN = AHEAD
"""Index of the transition to the same layer of the next token in ``Tables.lifts``."""
MIN_TOKENS = 32
OPENING = 64
"""Sequences whose first tokens are routed alike are the same text: only the first of them is kept."""
NGRAM = 4
DISTINCT = 0.5
"""Least share of distinct 4-grams of the first layer's routing. Below it, an answer repeats itself."""
SMOOTHING_TOKENS = 20.0
"""Weight of the popularity in a transition probability."""
FIT_SHARE = 0.6
"""Share of the training sequences that tables and predictor are fitted on. The others tune rules and train policies."""
SHARES = {"train": 0.5, "validation": 0.1, "test": 0.4}
"""Share of the sequences in each part, if the recording defines no splits."""


def clean(
    trace: TokenTrace, min_tokens: int = MIN_TOKENS, opening: int = OPENING, distinct: float = DISTINCT
) -> TokenTrace:
    """The sequences that measure something: not too short, not repetitive, and each opening once.

    Repetitive answers use the same experts again and again, which no cache can miss. An opening that occurs both in the
    training and in the test part gives the test away.
    """
    keep, seen = [], set()
    for s, head in enumerate(_openings(trace, opening)):
        start, length = trace.seq_starts[s], trace.seq_lens[s]
        if length < min_tokens or head in seen or _distinct_share(trace.experts[start : start + length, 0]) < distinct:
            continue
        seen.add(head)
        keep.append(s)
    if not keep:
        raise ValueError(
            f"{trace.name}: none of the {trace.n_sequences} sequences has {min_tokens} tokens and does not repeat "
            "itself: record longer sequences, and give seq_lens"
        )
    return trace if len(keep) == trace.n_sequences else trace.select(sequences=keep)


def _distinct_share(routing: npt.NDArray[np.int16]) -> float:
    """Share of distinct n-grams among those of one layer's routing (tokens, top-k), order of experts ignored."""
    if len(routing) < NGRAM:
        return 1.0
    tokens = np.unique(np.sort(routing, 1), axis=0, return_inverse=True)[1].ravel()
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    return len(np.unique(grams, axis=0)) / len(grams)


def first_tokens(trace: TokenTrace, max_tokens: int, seed: int = 0) -> TokenTrace:
    """Randomly drawn sequences with about so many tokens, or the trace itself if it has no more."""
    if trace.n_tokens <= max_tokens:
        return trace
    order = np.random.default_rng(seed).permutation(trace.n_sequences)
    n = int(np.searchsorted(np.cumsum(trace.seq_lens[order]), max_tokens)) + 1
    return trace.select(sequences=np.sort(order[:n]))


def without(trace: TokenTrace, others: Sequence[TokenTrace], opening: int = OPENING) -> TokenTrace:
    """The sequences of a trace that do not begin like a sequence of the other traces."""
    seen = {head for other in others for head in _openings(other, opening)}
    keep = [s for s, head in enumerate(_openings(trace, opening)) if head not in seen]
    if not keep:
        raise ValueError(f"{trace.name}: all of its sequences are among those that were fitted on")
    return trace if len(keep) == trace.n_sequences else trace.select(sequences=keep)


def _openings(trace: TokenTrace, opening: int) -> list[bytes]:
    """The routing of each sequence's first tokens."""
    ends = np.minimum(trace.seq_starts + opening, trace.seq_starts + trace.seq_lens)
    return [trace.experts[start:end].tobytes() for start, end in zip(trace.seq_starts, ends, strict=True)]


def split_sequences(
    trace: TokenTrace, seed: int = 0, new_domains: Sequence[str] = (), cleaned: bool = True
) -> dict[str, TokenTrace]:
    """Parts of a trace that share no sequence: ``fit``, ``train``, ``validation``, ``test``, perhaps ``new-domain``.

    Tables and predictor are fitted on ``fit``. Rules are tuned and policies are trained on ``train``, because a
    predictor is too good on the sequences that it was fitted on. The splits of the recording are followed if it has
    any; otherwise ``seed`` deals the sequences.

    Args:
        trace: the recording.
        seed: of the deal.
        new_domains: domains that only the part ``new-domain`` has, to show what is learned about other text.
        cleaned: drop what :func:`clean` drops.
    """
    trace = clean(trace) if cleaned else trace
    unknown = sorted(set(new_domains) - set(trace.domain_names))
    if unknown:
        raise ValueError(f"{trace.name}: no domain {unknown[0]!r}; the domains are: {', '.join(trace.domain_names)}")
    rng = np.random.default_rng(seed)
    labels = np.full(trace.n_sequences, "new-domain", dtype="<U32")
    known = np.flatnonzero(~np.isin(trace.domains, list(new_domains)))
    if trace.splits is not None:
        labels[known] = trace.splits[known]
    else:
        labels[known] = _deal(rng.permutation(len(known)), SHARES)
    training = np.flatnonzero(labels == "train")
    labels[training] = _deal(rng.permutation(len(training)), {"fit": FIT_SHARE, "train": 1 - FIT_SHARE})
    parts = {str(name): trace.select(sequences=np.flatnonzero(labels == name)) for name in np.unique(labels)}
    missing = [name for name in ("fit", "train", "test") if name not in parts]
    if missing:
        raise ValueError(
            f"{trace.name}: no sequence is left for {', '.join(missing)}: the {trace.n_sequences} sequences have the "
            f"labels {', '.join(sorted(parts))}"
        )
    return parts


def _deal(order: npt.NDArray[np.int64], shares: dict[str, float]) -> npt.NDArray[np.str_]:
    """A label per unit: the first share of the order, the second, … At least one unit each while there are any."""
    ends = np.cumsum(list(shares.values()))
    place = (order + 0.5) / max(1, len(order))
    return np.array(list(shares))[np.minimum(np.searchsorted(ends, place), len(shares) - 1)]


@dataclass(frozen=True)
class Tables:
    """Counts of the ``fit`` sequences. A visit is one token in one layer; visits follow each other layer by layer.

    Args:
        popularity: (L, E) share of the tokens that use the expert.
        lifts: (7, L, E, E) change of the log-odds that expert e is used, given that expert a of layer l was used:
            ``lifts[h - 1, l, a, e]`` is for h = 1 … 6 visits later, ``lifts[NEXT_TOKEN]`` for the same layer of the
            next token.
        profiles: (S, L, E) shares as in ``popularity`` of each sequence.
    """

    popularity: npt.NDArray[np.float32]
    lifts: npt.NDArray[np.float32]
    profiles: npt.NDArray[np.float32]

    @classmethod
    def count(cls, trace: TokenTrace) -> Tables:
        """Count all sequences of a trace."""
        n_layers, n_experts = trace.n_layers, trace.n_experts
        used = np.zeros((trace.n_tokens, n_layers, n_experts + 1), np.float32)
        # Padding is -1, which sets the column after the last expert.
        np.put_along_axis(used, trace.experts.astype(np.int64), 1, axis=2)
        used = used[:, :, :n_experts]
        profiles = np.add.reduceat(used, trace.seq_starts, axis=0) / trace.seq_lens[:, None, None]
        popularity = used.mean(0, dtype=np.float64)
        first = np.zeros(trace.n_tokens, bool)
        first[trace.seq_starts] = True
        lifts = np.zeros((AHEAD + 1, n_layers, n_experts, n_experts), np.float32)
        for l in range(n_layers):
            total = used[:, l].sum(0)
            for h in range(1, AHEAD + 2):
                later = l + (h if h <= AHEAD else n_layers)
                tokens, layer = divmod(later, n_layers)
                lifts[h - 1, l] = _lift(used[:, l], used[:, layer], first, tokens, total, popularity[layer])
        return cls(popularity.astype(np.float32), lifts, profiles.astype(np.float32))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of layers and experts."""
        return self.popularity.shape[0], self.popularity.shape[1]

    def check(self, trace: TokenTrace) -> None:
        """Raise a ValueError if the tables are of another model than the trace."""
        if self.shape != (trace.n_layers, trace.n_experts):
            raise ValueError(
                f"{trace.name} has {trace.n_layers} layers of {trace.n_experts} experts, but the tables were counted "
                f"on {self.shape[0]} layers of {self.shape[1]}: give --fit-on a trace of the same model"
            )

    def prior(self) -> npt.NDArray[np.float64]:
        """(L, E) popularity kept away from 0 and 1, for log-odds."""
        return self.popularity.astype(np.float64) * 0.98 + 0.002


def _lift(
    used: npt.NDArray[np.float32],
    later: npt.NDArray[np.float32],
    first: npt.NDArray[np.bool_],
    tokens: int,
    total: npt.NDArray[np.float32],
    popularity: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """(E, E) lift of the log-odds of each expert of ``later`` (T, E), ``tokens`` tokens after ``used`` (T, E)."""
    n = max(0, len(used) - tokens)
    apart = np.zeros(n, bool)
    for i in range(1, tokens + 1):
        apart |= first[i : n + i]
    pairs = (used[:n] * ~apart[:, None]).T @ later[len(used) - n :]
    prior = popularity * 0.98 + 0.002
    share = (pairs + SMOOTHING_TOKENS * prior) / (total[:, None] + SMOOTHING_TOKENS)
    share = np.clip(share, 1e-4, 1 - 1e-4)
    lift: npt.NDArray[np.float64] = np.log(share / (1 - share)) - np.log(prior / (1 - prior))
    return lift
