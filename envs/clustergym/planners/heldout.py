"""Traffic to plan on, and held-out traffic: the time of a placement, with a 95 % interval from resampled sequences.

A trace is a sample of sequences. Tokens of one sequence use similar experts, so neither tokens nor passes are
independent, but sequences are. The block bootstrap asks how the result would differ for other sequences: it draws as
many sequences as there are, with replacement, and serves passes of those. Repeating that gives the spread that comes
from the choice of sequences. Serving more passes of the same sequences does not make it smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from clustergym.common.statistics import ci95_of_blocks, ci95_of_resamples
from clustergym.moe_placement.costs import kernel_costs
from clustergym.moe_placement.simulator import COMPUTE_US, Placement, Simulator
from clustergym.moe_placement.streams import Interval, Traffic, layer_first, sample_passes
from clustergym.planners.base import Planner
from clustergym.planners.recorded import LoadInterval
from clustergym.traces import LoadTrace, TokenTrace

PASSES_OF_A_PERMANENT_PLAN = 10**12
"""Forward passes served by a plan that is loaded at startup: so many that migration costs nothing."""
PLAN_PASSES_OF_LOADS = 256
"""Passes of the planning part that planners on loads see. They take little time."""

RESAMPLES = 40
"""Times that the sequences are drawn again."""
RESAMPLED_PASSES = 2
"""Passes that are served of each draw. Two show how much passes of the same sequences differ."""
RESAMPLED_TOKENS = 1 << 20
"""Tokens × layers that all draws serve. Large models are resampled on a few layers, which widens the interval: the
spread of a mean over few layers is larger than that of the mean over all."""
FEWEST_LAYERS = 6
FEWEST_PASSES = 8
"""Passes to serve even if the held-out part can fill fewer without serving a token twice"""


# Traffic to plan on


def sample_tokens(interval: Interval, n_tokens: int, seed: int) -> Interval:
    """The interval as it looks from ``n_tokens`` of its tokens, drawn at random and repeated to fill the passes."""
    rng, rows = np.random.default_rng(seed), interval.rows.ravel()
    kept = rng.choice(rows, min(n_tokens, len(rows)), replace=False)
    repeated = np.tile(kept, -(-len(rows) // len(kept)))[: len(rows)]
    return Interval(interval.experts, rng.permutation(repeated).reshape(interval.rows.shape), interval.rank_start)


class Observed:
    """The traffic that planners may look at when they plan once."""

    def __init__(
        self,
        part: TokenTrace | LoadTrace,
        simulator: Simulator,
        traffic: Traffic,
        plan_passes: int = 32,
        observe_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.simulator, self.static = simulator, simulator.static(part.n_layers)
        self.tokens: Interval | None = None
        """Passes of the planning part for planners on tokens; None for counts."""
        if isinstance(part, LoadTrace):
            self.loads = LoadInterval(part.counts, traffic.sizes[1] * simulator.n_gpus)
        else:
            passes = sample_passes(part, simulator.n_gpus, traffic, PLAN_PASSES_OF_LOADS, seed)
            self.loads = LoadInterval(passes.pass_loads(simulator.n_experts), passes.n_tokens)
            self.tokens = passes.first_passes(plan_passes)
            if observe_tokens is not None:
                self.tokens = sample_tokens(self.tokens, observe_tokens, seed)

    def interval(self, planner: Planner) -> Interval:
        """The passes for a planner."""
        return self.loads if self.tokens is None or not planner.needs_tokens else self.tokens


# Held-out traffic


def evenly_spaced(n_layers: int, n: int) -> list[int]:
    """Positions of at most ``n`` layers, evenly spaced."""
    positions: list[int] = np.unique(np.linspace(0, n_layers - 1, min(n, n_layers)).round().astype(int)).tolist()
    return positions


class SequencePasses:
    """Draws passes from the sequences of a trace, with or without replacement of sequences."""

    def __init__(self, trace: TokenTrace, n_gpus: int, traffic: Traffic) -> None:
        # In the decode phase the tokens of a pass belong to different sequences, wherever those are.
        pieces = replace(traffic, sampled_passes=1).cut(trace)
        self.trace, self.n_gpus, self.tokens = trace, n_gpus, traffic.sizes[1] * n_gpus
        self.row, self.length = pieces.piece_row.astype(np.int64), pieces.piece_tokens.astype(np.int64)
        sequence = np.searchsorted(trace.seq_starts, self.row, side="right") - 1
        self.count = np.bincount(sequence, minlength=trace.n_sequences)
        self.trace_tokens = int(self.length.sum())
        self.first = np.cumsum(self.count) - self.count  # pieces are in the order of the sequences

    def draw(self, n_passes: int, rng: np.random.Generator, resample: bool = False) -> Interval:
        """Passes of all sequences, or of as many sequences drawn with replacement.

        No token is served twice before all have been served (for a sequence drawn twice: twice).
        """
        n, needed = self.trace.n_sequences, n_passes * self.tokens
        sequences = rng.integers(0, n, n) if resample else np.arange(n)
        count = self.count[sequences]
        pieces = np.repeat(self.first[sequences] - (np.cumsum(count) - count), count) + np.arange(count.sum())
        rows = np.empty(0, np.int64)
        while len(rows) < needed:
            order = rng.permutation(pieces)
            ends = np.cumsum(self.length[order])
            starts = np.repeat(self.row[order] - (ends - self.length[order]), self.length[order])
            rows = np.concatenate([rows, starts + np.arange(ends[-1])])
        shaped = rows[:needed].reshape(n_passes, self.tokens).astype(np.int32)
        return Interval.even(layer_first(self.trace), shaped, self.n_gpus)


@dataclass(frozen=True)
class Resampled:
    """Times of one placement on passes of resampled sequences, the same ones for every placement."""

    us: npt.NDArray[np.float64]
    """(B, 2) of the passes of each draw, means over some of the layers"""
    sequences: float
    """Number of sequences, counting short ones less than long ones"""
    pass_share: float
    """Tokens of a pass over the tokens of all sequences"""

    def ci95_of_ratio(self, other: Resampled, n_passes: int) -> float:
        """Half width of the 95 % interval of a time over another one, both means of ``n_passes`` passes."""
        theirs = float(other.us.mean())
        residual = (self.us - float(self.us.mean()) / theirs * other.us) / theirs
        return ci95_of_resamples(residual, self.sequences, self.pass_share, n_passes)

    def ci95_us(self, mean_us: float, n_passes: int) -> float:
        """Half width of the 95 % interval of the time ``mean_us``, the mean of ``n_passes`` passes and all layers."""
        half = ci95_of_resamples(self.us, self.sequences, self.pass_share, n_passes)
        return half * mean_us / float(self.us.mean())


class Resamples:
    """Passes of resampled sequences, to serve on any placement."""

    def __init__(
        self, source: SequencePasses, simulator: Simulator, seed: int, draws: int = RESAMPLES, together: int = 1
    ) -> None:
        trace = source.trace
        self.simulator, self.together = simulator, together
        self.sequences = float(trace.seq_lens.sum() ** 2 / (trace.seq_lens.astype(float) ** 2).sum())
        self.pass_share = together * source.tokens / source.trace_tokens
        n_passes = RESAMPLED_PASSES * together
        layers = max(FEWEST_LAYERS, RESAMPLED_TOKENS // (draws * n_passes * source.tokens))
        self.layers = evenly_spaced(trace.n_layers, layers)
        # A generator per draw: all phases draw the same sequences.
        rngs = [np.random.default_rng([seed, 1, draw]) for draw in range(draws)]
        passes = Interval.join([source.draw(n_passes, rng, resample=True) for rng in rngs])
        self.passes = Interval(passes.experts[self.layers], passes.rows, passes.rank_start)

    def serve(self, placement: Placement) -> Resampled:
        """Times of a placement of all layers."""
        times = self.simulator.pass_times(self.passes, placement[self.layers])
        us = times.mean(0).reshape(-1, RESAMPLED_PASSES, self.together).mean(2)
        return Resampled(us, self.sequences, self.pass_share)


@lru_cache(maxsize=2)
def resamples_of(trace: TokenTrace, simulator: Simulator, traffic: Traffic, seed: int) -> Resamples:
    """The resampled passes of a trace. Cached, because all planners are measured on the same ones."""
    return Resamples(SequencePasses(trace, simulator.n_gpus, traffic), simulator, seed)


@dataclass(frozen=True)
class Samples:
    """Times of one placement on held-out traffic, the same traffic for every placement."""

    pass_us: npt.NDArray[np.float64]
    """(P,) of each pass of the held-out sequences, or of each step of counts, means over layers"""
    resampled: Resampled | None = None
    """None for counts"""

    @cached_property
    def mean_us(self) -> float:
        return float(self.pass_us.mean())

    def versus(self, other: Samples) -> tuple[float, float]:
        """(relative difference of the time, half width of its 95 % interval), paired by pass.

        The half width is 0 if there is no spread to measure: one sequence, or one step of counts.
        """
        relative = self.mean_us / other.mean_us - 1
        if self.resampled is None or other.resampled is None:
            return relative, ci95_of_blocks((self.pass_us - (1 + relative) * other.pass_us) / other.mean_us)
        return relative, self.resampled.ci95_of_ratio(other.resampled, len(self.pass_us))


def weighted(parts: Sequence[tuple[float, Samples]]) -> Samples:
    """Times of the mean of passes of several phases, each with its share of the passes (all shares together are 1)."""
    us, resampled = sum(share * part.pass_us for share, part in parts), []
    for share, part in parts:
        assert part.resampled is not None
        resampled.append(share * part.resampled.us)
    first = parts[0][1].resampled
    assert first is not None
    return Samples(np.asarray(us), replace(first, us=np.asarray(sum(resampled))))


@dataclass(kw_only=True)
class Measured:
    """One placement on held-out traffic."""

    samples: Samples
    """Times on held-out passes: of the mean pass, if several phases are served"""
    phases: dict[str, Samples] = field(default_factory=dict)
    """Times of each phase, if several are served. The figures below are of the first one."""
    layer_us: npt.NDArray[np.float64]
    """(L, 3) dispatch, compute, combine, means over passes. Counts have only compute."""
    pairs: npt.NDArray[np.float64]
    """(L, G) token-expert pairs per GPU and pass, mean over passes"""
    peak_pairs: npt.NDArray[np.float64]
    """(L,) token-expert pairs of the busiest GPU of a pass, mean over passes"""
    balancedness: float
    copies: npt.NDArray[np.float64] | None = None
    """(L, G, G) activations dispatched from row to column per pass; None for counts"""
    gpus_per_token: float | None = None
    inter_node_mb: float | None = None

    @property
    def served_us(self) -> float:
        return self.samples.mean_us


class HeldOutPasses:
    """Passes of held-out sequences and of resampled ones, to serve on any placement.

    ``together`` passes count as one, so that small passes of one phase pair with a large one of another phase.
    """

    def __init__(
        self,
        trace: TokenTrace,
        simulator: Simulator,
        traffic: Traffic,
        n_passes: int,
        seed: int,
        draws: int = RESAMPLES,
        together: int = 1,
    ) -> None:
        source = SequencePasses(trace, simulator.n_gpus, traffic)
        # Serving the same tokens more often adds little information.
        n_passes = min(n_passes, max(FEWEST_PASSES, -(-source.trace_tokens // (together * source.tokens))))
        self.simulator, self.n_layers, self.n_passes = simulator, trace.n_layers, n_passes
        self.together = together
        self.passes = source.draw(n_passes * together, np.random.default_rng(seed))
        self.reused = 1 - len(np.unique(self.passes.rows)) / self.passes.rows.size
        """Share of the tokens of the passes that were served before"""
        self.resamples = Resamples(source, simulator, seed, draws, together)

    def samples(self, placement: Placement) -> Samples:
        """Times of a placement."""
        return self._samples(self.simulator.pass_times(self.passes, placement), placement)

    def _samples(self, times: npt.NDArray[np.float64], placement: Placement) -> Samples:
        us = times.mean(0).reshape(-1, self.together).mean(1)
        return Samples(us, self.resamples.serve(placement))

    def measure(self, placement: Placement) -> Measured:
        """All figures of a placement."""
        served = self.simulator.evaluate(self.passes, placement, check=False)
        return Measured(
            samples=self._samples(served.pass_us.sum(2), placement),
            layer_us=served.pass_us.mean(1),
            pairs=served.pairs.mean(1),
            peak_pairs=served.pairs.max(2).mean(1),
            balancedness=float(served.balancedness.mean()),
            copies=served.copies,
            gpus_per_token=float(served.gpus_per_token.mean()),
            inter_node_mb=float(served.inter_node_bytes.mean()) / 1e6,
        )


class HeldOutPhases:
    """Held-out passes of several phases that one placement serves.

    Args:
        phases: simulator, traffic and share of the passes of each phase.
    """

    def __init__(
        self, trace: TokenTrace, phases: Sequence[tuple[Simulator, Traffic, float]], n_passes: int, seed: int
    ) -> None:
        largest = max(traffic.sizes[1] for _, traffic, _ in phases)
        shares = [share for _, _, share in phases]
        self.parts = [
            HeldOutPasses(trace, simulator, traffic, n_passes, seed, together=max(1, largest // traffic.sizes[1]))
            for simulator, traffic, _ in phases
        ]
        self.n_passes, self.reused = min(part.n_passes for part in self.parts), max(part.reused for part in self.parts)
        self.shares = [share / sum(shares) for share in shares]

    def measure(self, placement: Placement) -> Measured:
        """All figures of a placement."""
        first = self.parts[0].measure(placement)
        samples = [first.samples, *(part.samples(placement) for part in self.parts[1:])]
        samples = [replace(one, pass_us=one.pass_us[: self.n_passes]) for one in samples]
        found = weighted(list(zip(self.shares, samples, strict=True)))
        names = [part.simulator.profile.name for part in self.parts]
        return replace(first, samples=found, phases=dict(zip(names, samples, strict=True)))


class HeldOutCounts:
    """Held-out steps of counts, scaled to a pass."""

    reused = 0.0

    @property
    def n_passes(self) -> int:
        return len(self.expert_pairs)

    def __init__(self, part: LoadTrace, simulator: Simulator, traffic: Traffic) -> None:
        share = part.counts / np.maximum(part.counts.sum(2, keepdims=True), 1)
        self.simulator, self.n_tokens = simulator, traffic.sizes[1] * simulator.n_gpus
        pass_pairs = self.n_tokens * simulator.model.top_k
        self.expert_pairs = np.zeros((part.n_steps, part.n_layers, simulator.n_experts))
        self.expert_pairs[:, :, : part.n_experts] = share * pass_pairs

    def measure(self, placement: Placement) -> Measured:
        """All figures of a placement. Replicas share an expert's load evenly, and only compute is known."""
        simulator, layers = self.simulator, np.arange(len(placement))
        costs = kernel_costs(simulator.model, simulator.profile, self.n_tokens, simulator.n_slots)
        copies = np.zeros(self.expert_pairs.shape[1:])
        np.add.at(copies, (np.broadcast_to(layers[:, None, None], placement.shape), placement), 1)
        slot_pairs = (self.expert_pairs / copies)[:, layers[:, None, None], placement]  # (W, L, G, S)
        pairs, active = slot_pairs.sum(3), (slot_pairs > 0).sum(3)
        blocks = np.ceil(slot_pairs / costs.block_tokens).sum(3)
        work = costs.expert_us * active + costs.block_us * blocks + costs.pair_us * pairs
        compute = np.maximum(costs.floor_us, costs.start_us + work.max(2))
        layer_us = np.zeros((len(placement), 3))
        layer_us[:, COMPUTE_US] = compute.mean(0)
        return Measured(
            samples=Samples(compute.mean(1)),
            layer_us=layer_us,
            pairs=pairs.mean(0),
            peak_pairs=pairs.max(2).mean(0),
            balancedness=float((pairs.mean(2) / np.maximum(pairs.max(2), 1e-12)).mean()),
        )
