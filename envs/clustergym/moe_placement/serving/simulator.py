"""The serving model as a library: intervals of traffic on balanced ranks, and what serving them costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import one_of
from clustergym.common.threads import spread
from clustergym.moe_placement.kernels.compile import device
from clustergym.moe_placement.kernels.state import SCHEDULES
from clustergym.moe_placement.kernels.streams import stream_keys
from clustergym.moe_placement.serving.cost import migration_time, pass_times
from clustergym.moe_placement.serving.passes import count_pass
from clustergym.moe_placement.serving.profiles import (
    ALLGATHER,
    DISPATCHES,
    PHASES,
    STAY,
    TRANSPORTS,
    EngineProfile,
    get_profile,
)
from clustergym.moe_placement.serving.replicas import set_first_placement, set_placement
from clustergym.moe_placement.serving.state import (
    AT_REUSE,
    ServingCosts,
    ServingState,
    StreamState,
    Topology,
    TracePieces,
)
from clustergym.moe_placement.serving.streams import begin_stream, draw_interval
from clustergym.moe_placement.serving.token_sets import clear, copy_set
from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.specs import ClusterSpec, Costs, ModelSpec
from clustergym.traces.token_trace import TokenTrace


@dataclass(frozen=True)
class Interval:
    """The sampled passes of an interval: rows of a trace, stored rank by rank."""

    experts: npt.NDArray[np.int16]
    """(L, rows, K) the trace, layer first"""
    rows: npt.NDArray[np.int32]
    """(P, T)"""
    rank_start: npt.NDArray[np.int32]
    """(P, G + 1) first token of each rank, then T"""

    @property
    def n_passes(self) -> int:
        return len(self.rows)

    @property
    def n_layers(self) -> int:
        return len(self.experts)

    def pass_loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        """(P, L, E) tokens routed to each expert in each pass."""
        found = np.zeros((self.n_passes, self.n_layers, n_experts), np.int64)
        for p, rows in enumerate(self.rows):
            for layer, experts in enumerate(self.experts):
                used = experts[rows]
                found[p, layer] = np.bincount(used[used >= 0], minlength=n_experts)
        return found

    @classmethod
    def even(cls, experts: npt.NDArray[np.int16], rows: npt.NDArray[np.int32], n_gpus: int) -> Interval:
        """Passes ``rows`` (P, T) with equal shares of the tokens on every rank; T is a multiple of the ranks."""
        n_tokens = rows.shape[1]
        if n_tokens % n_gpus:
            raise ValueError(f"{n_tokens} tokens per pass cannot be shared equally among {n_gpus} ranks")
        starts = np.arange(n_gpus + 1, dtype=np.int32) * (n_tokens // n_gpus)
        return cls(experts, np.asarray(rows, np.int32), np.tile(starts, (len(rows), 1)))


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
        experts=np.ascontiguousarray(trace.experts.transpose(1, 0, 2)),
        piece_row=(trace.seq_starts[sequence] + place * longest).astype(np.int32),
        piece_tokens=np.minimum(longest, trace.seq_lens[sequence] - place * longest).astype(np.int32),
        domain_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        domain_pieces=np.argsort(domain, kind="stable").astype(np.int32),
    )


class IntervalStream:
    """A stream of intervals from a trace.

    Args:
        trace: where the tokens come from.
        n_gpus: ranks.
        profile: an engine profile; its phase decides how tokens are drawn.
        tokens_per_rank: tokens that each rank contributes to a pass.
        sampled_passes: passes of an interval that are simulated.
        schedule: ``stationary``, ``drift``, ``switch`` or ``replay``.
        rate: step of the mixture walk (drift) or chance of another domain (switch).
        rank_imbalance: spread of the ranks' shares of the tokens; 0 is balanced, as engines are.
        seed: any integer.
        allow_reuse: serve tokens again when the trace is used up, instead of raising an error.
    """

    def __init__(
        self,
        trace: TokenTrace,
        n_gpus: int,
        profile: str | EngineProfile = "sglang-decode",
        tokens_per_rank: int = 32,
        sampled_passes: int = 4,
        schedule: str = "stationary",
        rate: float = 0.5,
        rank_imbalance: float = 0.0,
        seed: int = 0,
        allow_reuse: bool = False,
    ) -> None:
        for name, value in (("tokens_per_rank", tokens_per_rank), ("sampled_passes", sampled_passes)):
            if value < 1:
                raise ValueError(f"{name} is {value}: expected at least 1")
        self.name, self.n_gpus = trace.name, n_gpus
        self.phase = get_profile(profile).phase
        self.tokens_per_rank, self.sampled_passes = tokens_per_rank, sampled_passes
        self.schedule, self.rate = one_of(schedule, SCHEDULES, "schedule"), float(rate)
        self.rank_imbalance, self.allow_reuse = float(rank_imbalance), allow_reuse
        self.trace = cut_trace(trace, self.phase, sampled_passes, tokens_per_rank)
        if self.capacity < 1 and not allow_reuse:
            need = n_gpus * tokens_per_rank * sampled_passes
            raise ValueError(
                f"{trace.name}: {self.trace.piece_tokens.sum()} tokens fit the {self.phase} phase, but an interval "
                f"needs {need} ({sampled_passes} passes of {tokens_per_rank} tokens on {n_gpus} ranks): "
                "lower tokens_per_rank or sampled_passes, or allow reuse"
            )
        domains = len(trace.domain_names)
        self.state = StreamState(
            random=stream_keys(np.array([seed], dtype=np.int64)),
            position=np.zeros((1, 2), np.int32),
            drawn=np.zeros((1, domains), np.int32),
            logits=np.zeros((1, domains)),
            weights=np.zeros((1, domains)),
            rank_piece=np.zeros((1, n_gpus, 2), np.int32),
        )
        begin_stream(self.state, 0, self.trace, self.schedule)

    @property
    def capacity(self) -> int:
        """Intervals that the trace can fill without serving a token twice."""
        tokens = int(self.trace.piece_tokens.sum())
        if self.phase == "prefill":
            # When the last interval ends, every rank may be in the middle of a piece.
            tokens -= self.n_gpus * (self.tokens_per_rank - 1)
        return max(0, tokens) // (self.n_gpus * self.tokens_per_rank * self.sampled_passes)

    def __iter__(self) -> Iterator[Interval]:
        return self

    def __next__(self) -> Interval:
        rows = np.zeros((self.sampled_passes, self.n_gpus * self.tokens_per_rank), np.int32)
        rank_start = np.zeros((self.sampled_passes, self.n_gpus + 1), np.int32)
        draw_interval(
            self.state, 0, self.trace, PHASES.index(self.phase), self.schedule, self.rate, self.rank_imbalance, rows,
            rank_start,
        )  # fmt: skip
        if self.state.position[0, AT_REUSE] and not self.allow_reuse:
            raise ValueError(
                f"{self.name}: the trace is used up after {self.capacity} intervals of "
                f"{self.sampled_passes} × {rows.shape[1]} tokens: give a longer trace, or allow reuse"
            )
        return Interval(self.trace.experts, rows, rank_start)

    def take(self, n: int) -> list[Interval]:
        return [next(self) for _ in range(n)]


@dataclass(frozen=True)
class ServedInterval:
    """What serving an interval on one placement costs, per layer. Times are µs of one forward pass."""

    pass_us: npt.NDArray[np.float64]
    """(L, P, 3) dispatch, compute and combine of every sampled pass"""
    migration_us: npt.NDArray[np.float64]
    """(L,) receiving the experts that the GPUs did not hold before, spread over the passes of the interval"""
    moves: npt.NDArray[np.int64]
    """(L,) replicas that some GPU must receive"""
    pairs: npt.NDArray[np.int64]
    """(L, P, G) token-expert pairs computed on each GPU"""

    @property
    def time_us(self) -> npt.NDArray[np.float64]:
        """(L,) dispatch + compute + combine, the mean over passes"""
        times: npt.NDArray[np.float64] = self.pass_us.sum(2).mean(1)
        return times


class ServingSimulator:
    """Exact cost of serving intervals on placements, for one model on one cluster under an engine profile.

    Args:
        model, cluster: preset names or specs.
        profile: an engine profile or its name.
        passes_per_interval: forward passes over which a migration is spread.
    """

    def __init__(
        self,
        model: str | ModelSpec,
        cluster: str | ClusterSpec,
        profile: str | EngineProfile = "sglang-prefill",
        passes_per_interval: int = 1000,
    ) -> None:
        self.profile = get_profile(profile)
        # Placements are checked, and static ones made, as before.
        self.placements = Simulator(model, cluster, passes_per_window=passes_per_interval)
        self.model, self.cluster = self.placements.model, self.placements.cluster
        self.n_gpus, self.n_slots, self.n_experts = (
            self.placements.n_gpus,
            self.placements.n_slots,
            self.placements.n_experts,
        )
        self.topology = Topology(
            np.arange(self.n_gpus, dtype=np.int64) // self.cluster.gpus_per_node, self.cluster.gpus_per_node,
            TRANSPORTS.index(self.profile.transport), DISPATCHES.index(self.profile.dispatch),
        )  # fmt: skip
        self.passes_per_interval = passes_per_interval

    def costs(self, n_tokens: int) -> ServingCosts:
        """Costs of passes of ``n_tokens`` tokens. All-gather moves all tokens, whatever the placement."""
        base = Costs.of(self.model, self.cluster, self.passes_per_interval)
        dispatch_us, combine_us = base.dispatch_us, base.combine_us
        if self.topology.transport == ALLGATHER:
            # The slowest link class carries the tokens of all other GPUs, or of all other nodes.
            far = self.cluster.n_nodes > 1
            share = n_tokens * (1 - 1 / (self.cluster.n_nodes if far else self.n_gpus))
            dispatch_us += share * (base.dispatch_inter_us if far else base.dispatch_intra_us)
            combine_us += share * (base.combine_inter_us if far else base.combine_intra_us)
        return ServingCosts(
            dispatch_us, base.dispatch_intra_us, base.dispatch_inter_us, combine_us, base.combine_intra_us,
            base.combine_inter_us, base.kernel_us, 0.0, 0.0, base.expert_us, 0.0, 64, base.pair_us,
            base.receive_intra_us, base.receive_inter_us,
        )  # fmt: skip

    def allocate(self, batch: int, n_passes: int, n_tokens: int) -> ServingState:
        """Zeroed arrays for ``batch`` simulations."""
        gpus, slots, experts, nodes = self.n_gpus, self.n_slots, self.n_experts, self.cluster.n_nodes
        words, stay = -(-n_tokens // 64), self.topology.transport == STAY
        shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "rows": ((n_passes, n_tokens), np.int32),
            "rank_start": ((n_passes, gpus + 1), np.int32),
            "load": ((n_passes, experts), np.int32),
            "second_choice": ((n_passes, words), np.uint64),
            "slot_tokens": ((n_passes, gpus, slots, words), np.uint64),
            "slot_pairs": ((n_passes, gpus, slots), np.int32),
            "visitors": ((n_passes, gpus, words), np.uint64),
            "visits": ((n_passes, gpus, gpus), np.int32),
            "node_visits": ((n_passes, gpus, nodes), np.int32),
            "copies": ((n_passes, 4, gpus), np.int32),
            "kernel_us": ((n_passes, gpus), np.float64),
            "slots": ((gpus, slots), np.int16),
            "replicas": ((experts, gpus), np.int16),
            "n_replicas": ((experts,), np.int16),
            "replica_choice": ((experts, gpus), np.int32),
            "held_before": ((experts, gpus), np.int8),
            "received": ((gpus, 2), np.int32),
            "moved_tokens": ((n_passes, 2, words), np.uint64),
            "moved_pairs": ((n_passes, 2), np.int32),
            "node_visitors": ((words,), np.uint64),
            "touched": ((gpus,), np.int8),
            "origins": ((n_passes, gpus if stay else 1, words if stay else 1), np.uint64),
            "first_uses": ((n_passes, experts if stay else 1, words if stay else 1), np.uint64),
            "idle": ((n_passes, words), np.uint64),
            "destinations": ((n_passes, gpus if stay else 1, words if stay else 1), np.uint64),
            "return_copies": ((n_passes, 4, gpus), np.int32),
        }
        return ServingState(**{name: np.zeros((batch, *shape), dtype) for name, (shape, dtype) in shapes.items()})

    def count(self, interval: Interval, placement: Placement, before: Placement | None = None) -> ServingState:
        """The state of all layers (b = layer) under ``placement``, with ``before`` as the interval's beginning."""
        state = self.allocate(interval.n_layers, *interval.rows.shape)
        state.rows[:] = interval.rows
        state.rank_start[:] = interval.rank_start
        state.slots[:] = placement if before is None else before
        arguments = (
            state, np.ascontiguousarray(placement, np.int16), interval.experts, self.topology,
            self.costs(interval.rows.shape[1]),
        )  # fmt: skip
        if self.topology.transport == STAY:
            # A layer begins where the one before left its tokens: layers are counted in order.
            _count_range(0, interval.n_layers, *arguments)
        else:
            spread(_count_range, interval.n_layers, *arguments)
        return state

    def evaluate(self, interval: Interval, placement: Placement, before: Placement | None = None) -> ServedInterval:
        """Serve ``interval`` on ``placement`` after moving there from ``before`` (by default nothing moves)."""
        for slots in (placement,) if before is None else (placement, before):
            if len(self.placements.check(slots)) != interval.n_layers:
                raise ValueError(f"placement has {len(slots)} layers, but the interval has {interval.n_layers}")
        state, costs = self.count(interval, placement, before), self.costs(interval.rows.shape[1])
        times = np.array(
            [
                [pass_times(state, b, w, self.topology, costs, -1) for w in range(interval.n_passes)]
                for b in range(interval.n_layers)
            ]
        )
        held = (state.slots >= 0)[:, None]
        return ServedInterval(
            pass_us=times,
            migration_us=np.array([migration_time(state, b, costs) for b in range(interval.n_layers)]),
            moves=state.received.sum((1, 2)).astype(np.int64),
            pairs=np.where(held, state.slot_pairs, 0).sum(3, dtype=np.int64),
        )


@device
def _count_range(first, last, state, placement, experts, topology, costs):
    for b in range(first, last):
        set_first_placement(state, b, topology)
        set_placement(state, b, placement[b], topology)
        for w in range(state.rows.shape[1]):
            if topology.transport == STAY:
                _place_tokens(state, b, w)
            count_pass(state, b, w, experts[b], topology, costs)


@device
def _place_tokens(state, b, w):
    """Tokens begin on their rank, and each layer where the layer before left them."""
    for g in range(state.slots.shape[1]):
        if b > 0:
            copy_set(state.destinations[b - 1, w, g], state.origins[b, w, g])
            continue
        clear(state.origins[b, w, g])
        for t in range(state.rank_start[b, w, g], state.rank_start[b, w, g + 1]):
            state.origins[b, w, g, t >> 6] |= np.uint64(1) << np.uint64(t & 63)
