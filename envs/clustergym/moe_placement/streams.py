"""Traffic: intervals of forward passes drawn from a token trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import index_of_choice
from clustergym.moe_placement.kernels.state import (
    AT_REUSE,
    N_ROUNDS,
    ORDER_ROUNDS,
    SCHEDULES,
    StreamState,
    TracePieces,
)
from clustergym.moe_placement.kernels.streams import begin_stream, draw_interval, stream_keys
from clustergym.moe_placement.profiles import PHASES, SAMPLED_PASSES, TOKENS_PER_RANK
from clustergym.traces.token_trace import TokenTrace

_FEWEST_MIXED_TOKENS = 4096
_NO_SETS = np.zeros((1, 1, 1), np.uint64)


@dataclass(frozen=True)
class Interval:
    """The sampled passes of an interval: rows of a trace, stored rank by rank."""

    experts: npt.NDArray[np.int16]
    """(L, rows, K) the trace, layer first"""
    rows: npt.NDArray[np.int32]
    """(P, T)"""
    rank_start: npt.NDArray[np.int32]
    """(P, G + 1) first token of each rank, then T"""
    stands_for: int | None = None
    """Tokens of the passes that these are an average of (see :meth:`mixed`); by default T."""

    @property
    def n_passes(self) -> int:
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """Tokens of one pass."""
        return int(self.rows.shape[1])

    @property
    def n_layers(self) -> int:
        return len(self.experts)

    def pass_loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        """(P, L, E) tokens routed to each expert in each pass."""
        found = np.zeros((self.n_passes, self.n_layers, n_experts), np.int64)
        offsets = np.arange(self.n_layers)[:, None] * n_experts
        for p, rows in enumerate(self.rows):
            ids = self.experts[:, rows].reshape(self.n_layers, -1).astype(np.int64)
            flat = (ids + offsets)[ids >= 0]
            found[p] = np.bincount(flat, minlength=offsets.size * n_experts).reshape(self.n_layers, n_experts)
        return found

    def loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        """(L, E) tokens routed to each expert in all sampled passes."""
        total: npt.NDArray[np.int64] = self.pass_loads(n_experts).sum(0)
        return total

    def coactivation(self, layer: int, n_experts: int) -> npt.NDArray[np.float64]:
        """(E, E) number of tokens that use both experts. The diagonal has the loads."""
        ids = self.experts[layer, self.rows.ravel()].astype(np.int64)
        table = np.zeros((len(ids), n_experts + 1), dtype=np.float32)
        np.put_along_axis(table, np.where(ids < 0, n_experts, ids), 1.0, axis=1)
        table = table[:, :-1]
        return (table.T @ table).astype(np.float64)

    def first_passes(self, n: int) -> Interval:
        """The same interval with fewer sampled passes."""
        return replace(self, rows=self.rows[:n], rank_start=self.rank_start[:n])

    def mixed(self, most_tokens: int, seed: int = 0) -> Interval:
        """One large pass with the tokens of all passes, dealt over the ranks at random.

        Which rank had a token, and which tokens met in a pass, is chance. A search that sees passes one by one
        overfits to it. The large pass is priced as the average of the passes that it replaces. If there are
        more than ``most_tokens`` tokens, a sample of them is taken. If there are few, each appears several times, on
        different ranks.
        """
        ranks, rng, own = self.rank_start.shape[1] - 1, np.random.default_rng(seed), self.rows.ravel()
        fewest = max(ranks, min(most_tokens, _FEWEST_MIXED_TOKENS))
        rows = np.concatenate([rng.permutation(own) for _ in range(max(1, fewest // len(own)))])[:most_tokens]
        if len(rows) < ranks:  # the same tokens on every rank
            rows = np.tile(rows, ranks)
        rows = rows[: len(rows) // ranks * ranks]
        return replace(Interval.even(self.experts, rows[None], ranks), stands_for=self.stands_for or self.n_tokens)

    @staticmethod
    def join(intervals: Sequence[Interval]) -> Interval:
        """The passes of several intervals of one trace."""
        return Interval(
            intervals[0].experts,
            np.concatenate([interval.rows for interval in intervals]),
            np.concatenate([interval.rank_start for interval in intervals]),
        )

    @classmethod
    def even(cls, experts: npt.NDArray[np.int16], rows: npt.NDArray[np.int32], n_gpus: int) -> Interval:
        """Passes ``rows`` (P, T) with equal shares of the tokens on every rank; T is a multiple of the ranks."""
        n_tokens = rows.shape[1]
        if n_tokens % n_gpus:
            raise ValueError(f"{n_tokens} tokens per pass cannot be shared equally among {n_gpus} ranks")
        starts = np.arange(n_gpus + 1, dtype=np.int32) * (n_tokens // n_gpus)
        return cls(experts, np.asarray(rows, np.int32), np.tile(starts, (len(rows), 1)))


@lru_cache(maxsize=8)
def layer_first(trace: TokenTrace) -> npt.NDArray[np.int16]:
    """(L, rows, K): the experts of a trace, layer first, because everything reads one layer at a time."""
    return np.ascontiguousarray(trace.experts.transpose(1, 0, 2))


@lru_cache(maxsize=16)
@lru_cache(maxsize=8)
def expert_sets(trace: TokenTrace) -> npt.NDArray[np.uint64]:
    """(L, rows, words): bit e mod 64 of word e div 64 is set if the token uses expert e. See :class:`TracePieces`."""
    if trace.n_experts > 128:
        return _NO_SETS
    sets = np.zeros((trace.n_layers, trace.n_tokens, -(-trace.n_experts // 64)), np.uint64)
    for layer, experts in enumerate(layer_first(trace)):
        for chosen in experts.T:
            rows = np.flatnonzero(chosen >= 0)
            used = chosen[rows]
            sets[layer, rows, used >> 6] |= np.uint64(1) << (used & 63).astype(np.uint64)
    return sets


def cut_trace(trace: TokenTrace, phase: str, sampled_passes: int, tokens_per_rank: int) -> TracePieces:
    """Cut a trace into the pieces that streams draw.

    Decode: ``sampled_passes`` tokens each; the rest of a sequence is not used. Prefill: at most ``tokens_per_rank``.
    """
    decode = phase == "decode"
    longest = sampled_passes if decode else tokens_per_rank
    n_pieces = trace.seq_lens // longest if decode else -(-trace.seq_lens // longest)
    sequence = np.repeat(np.arange(trace.n_sequences), n_pieces)
    place = np.arange(len(sequence)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    domain = np.searchsorted(trace.domain_names, trace.domains)[sequence]
    counts = np.bincount(domain, minlength=len(trace.domain_names))
    return TracePieces(
        experts=layer_first(trace),
        expert_sets=_NO_SETS,
        piece_row=(trace.seq_starts[sequence] + place * longest).astype(np.int32),
        piece_tokens=np.minimum(longest, trace.seq_lens[sequence] - place * longest).astype(np.int32),
        domain_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        domain_pieces=np.argsort(domain, kind="stable").astype(np.int32),
    )


@dataclass(frozen=True)
class Traffic:
    """How passes are drawn from a trace: what a stream and an environment share."""

    phase: str = "decode"
    """``decode``: each rank keeps running sequences, and each gives its next token. ``prefill``: each rank processes
    consecutive tokens."""
    tokens_per_rank: int | None = None
    """Tokens that each rank contributes to a pass; by default 32 (decode) or 128 (prefill)."""
    sampled_passes: int | None = None
    """Passes of an interval that are simulated; by default 4 (decode) or 2 (prefill)."""
    schedule: str = "stationary"
    """``stationary``, ``drift`` (random walk of the domain mixture), ``switch`` (one domain at a time) or ``replay``
    (the trace in its order)."""
    rate: float = 0.5
    """Step of the mixture walk (drift) or chance of another domain (switch)."""
    rank_imbalance: float = 0.0
    """Spread of the ranks' shares of the tokens; 0 is balanced, as engines are."""
    allow_reuse: bool = False
    """Serve tokens again when the trace is used up, instead of raising an error."""

    def __post_init__(self) -> None:
        index_of_choice(self.phase, PHASES, "phase")
        index_of_choice(self.schedule, SCHEDULES, "schedule")
        if self.tokens_per_rank is None:
            object.__setattr__(self, "tokens_per_rank", TOKENS_PER_RANK[self.phase])
        if self.sampled_passes is None:
            object.__setattr__(self, "sampled_passes", SAMPLED_PASSES[self.phase])
        for name in ("tokens_per_rank", "sampled_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate is {self.rate}: expected 0 … 1")
        if not self.rank_imbalance >= 0:
            raise ValueError(f"rank_imbalance is {self.rank_imbalance}: expected 0 or more")

    @property
    def sizes(self) -> tuple[int, int]:
        """(sampled passes, tokens per rank)"""
        assert self.sampled_passes is not None
        assert self.tokens_per_rank is not None
        return self.sampled_passes, self.tokens_per_rank

    def interval_tokens(self, n_gpus: int) -> int:
        """Tokens of the sampled passes of an interval."""
        passes, tokens = self.sizes
        return passes * tokens * n_gpus

    def cut(self, trace: TokenTrace) -> TracePieces:
        return cut_trace(trace, self.phase, *self.sizes)

    def capacity(self, trace: TokenTrace, n_gpus: int) -> int:
        """Intervals that the trace can fill without serving a token twice."""
        tokens = int(self.cut(trace).piece_tokens.sum())
        if self.phase == "prefill":
            # When the last interval ends, every rank may be in the middle of a piece.
            tokens -= n_gpus * (self.sizes[1] - 1)
        return max(0, tokens) // self.interval_tokens(n_gpus)

    def check(self, trace: TokenTrace, n_gpus: int, intervals: int) -> None:
        """An error if the trace cannot fill so many intervals."""
        fits = self.capacity(trace, n_gpus)
        if fits >= intervals or (self.allow_reuse and len(self.cut(trace).piece_row)):
            return
        passes, tokens = self.sizes
        longest = int(trace.seq_lens.max(initial=0))
        if self.phase == "decode" and longest < passes:
            raise ValueError(
                f"{trace.name}: the decode phase needs sequences of at least {passes} tokens, one for each sampled "
                f"pass, but the longest has {longest}: lower sampled_passes, or use a prefill profile"
            )
        usable = int(self.cut(trace).piece_tokens.sum())
        # As in capacity().
        most = usable // (intervals * passes * n_gpus)
        if self.phase == "prefill":
            most = (usable + n_gpus) // ((intervals * passes + 1) * n_gpus)
        remedy = f"tokens_per_rank={most} would fit; or" if most else "give a longer trace, or"
        raise ValueError(
            f"{trace.name}: {usable} tokens fit the {self.phase} phase, which fills {fits} intervals, but {intervals} "
            f"are needed ({passes} passes of {tokens} tokens on {n_gpus} ranks each): {remedy} serve tokens again with "
            "allow_reuse"
        )


_DECODE = Traffic()


class IntervalStream:
    """A stream of intervals from a trace, the same that an environment with this seed serves.

    Args:
        trace: where the tokens come from.
        n_gpus: ranks.
        traffic: how passes are drawn.
        seed: any integer.
    """

    def __init__(self, trace: TokenTrace, n_gpus: int, traffic: Traffic = _DECODE, seed: int = 0) -> None:
        self.name, self.n_gpus, self.traffic = trace.name, n_gpus, traffic
        traffic.check(trace, n_gpus, 1)
        self.capacity, self.trace = traffic.capacity(trace, n_gpus), traffic.cut(trace)
        self._schedule = SCHEDULES.index(traffic.schedule)
        domains = len(trace.domain_names)
        self.state = StreamState(
            random=stream_keys(np.array([seed], dtype=np.int64)),
            position=np.zeros((1, 2), np.int32),
            drawn=np.zeros((1, domains), np.int32),
            logits=np.zeros((1, domains)),
            weights=np.zeros((1, domains)),
            rank_piece=np.zeros((1, n_gpus, 2), np.int32),
            orders=np.zeros((1, domains + 1, ORDER_ROUNDS + N_ROUNDS), np.int64),
        )
        begin_stream(self.state, 0, self.trace, self._schedule)

    def __iter__(self) -> Iterator[Interval]:
        return self

    def __next__(self) -> Interval:
        passes, tokens = self.traffic.sizes
        rows = np.zeros((passes, self.n_gpus * tokens), np.int32)
        rank_start = np.zeros((passes, self.n_gpus + 1), np.int32)
        draw_interval(
            self.state, 0, self.trace, PHASES.index(self.traffic.phase), self._schedule, self.traffic.rate,
            self.traffic.rank_imbalance, rows, rank_start,
        )  # fmt: skip
        if self.state.position[0, AT_REUSE] and not self.traffic.allow_reuse:
            raise ValueError(
                f"{self.name}: the trace is used up after {self.capacity} intervals of {passes} × {rows.shape[1]} "
                "tokens: give a longer trace, or allow reuse"
            )
        return Interval(self.trace.experts, rows, rank_start)

    def take(self, n: int) -> list[Interval]:
        return [next(self) for _ in range(n)]


def sample_passes(trace: TokenTrace, n_gpus: int, traffic: Traffic, n_passes: int, seed: int = 0) -> Interval:
    """Passes of the whole trace, for planning once: as many as fit without repeating a token, at most ``n_passes``."""
    passes = max(1, min(n_passes, traffic.capacity(trace, n_gpus) * traffic.sizes[0]))
    stream = IntervalStream(trace, n_gpus, replace(traffic, schedule="stationary", allow_reuse=True), seed)
    found = [next(stream) for _ in range(-(-passes // traffic.sizes[0]))]
    return Interval.join(found).first_passes(passes)
