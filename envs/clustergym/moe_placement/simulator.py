"""The simulator as a library: what serving an interval on a placement of all layers costs.

A placement is an int16 array (L, G, S): the expert in each slot of each GPU and layer, −1 for an empty slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import index_of_choice
from clustergym.common.compiling import device
from clustergym.common.threads import parallel_for
from clustergym.moe_placement.costs import MIGRATIONS, costs_of
from clustergym.moe_placement.kernels.cost import (
    add_links,
    compute_time,
    exchange_time_on_links,
    migration_time,
    pass_times,
    with_migration,
)
from clustergym.moe_placement.kernels.passes import count_pass
from clustergym.moe_placement.kernels.replicas import set_first_placement, set_placement, static_slots
from clustergym.moe_placement.kernels.state import Costs, SimulationState, Topology
from clustergym.moe_placement.profiles import (
    DEFAULT_PROFILE,
    DISPATCHES,
    LP,
    RANDOM,
    TRANSPORTS,
    EngineProfile,
    get_profile,
)
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec, get_cluster, get_model
from clustergym.moe_placement.streams import Interval

Placement = npt.NDArray[np.int16]
# Parts of the time of a pass: columns of Served.pass_us.
DISPATCH_US, COMPUTE_US, COMBINE_US = range(3)
N_PASS_PARTS = 3


@dataclass(frozen=True)
class Served:
    """What serving an interval on one placement costs, per layer. Times are µs of one forward pass."""

    pass_us: npt.NDArray[np.float64]
    """(L, P, 3) dispatch, compute and combine of every sampled pass: see ``DISPATCH_US``"""
    migration_us: npt.NDArray[np.float64]
    """(L,) what moving there from the placement before adds to a pass"""
    pairs: npt.NDArray[np.int64]
    """(L, P, G) token-expert pairs computed on each GPU"""
    copies: npt.NDArray[np.float64]
    """(L, G, G) activations dispatched from row to column, mean over passes"""
    gpus_per_token: npt.NDArray[np.float64]
    """(L,) distinct GPUs that compute for a token, mean"""
    inter_node_bytes: npt.NDArray[np.float64]
    """(L,) dispatched between nodes in a pass, mean"""
    moves: npt.NDArray[np.int64]
    """(L,) replicas that some GPU must receive"""

    @cached_property
    def time_us(self) -> npt.NDArray[np.float64]:
        """(L,) dispatch + compute + combine, the mean over passes. Each pass is set by its own slowest GPU."""
        times: npt.NDArray[np.float64] = self.pass_us.sum(2).mean(1)
        return times

    @property
    def total_us(self) -> npt.NDArray[np.float64]:
        """(L,) served time plus migration"""
        return self.time_us + self.migration_us

    @cached_property
    def balancedness(self) -> npt.NDArray[np.float64]:
        """(L,) mean over max of the GPUs' pairs, the mean over passes: 1 is perfect balance."""
        balance: npt.NDArray[np.float64] = (self.pairs.mean(2) / np.maximum(self.pairs.max(2), 1)).mean(1)
        return balance


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Like ``np.zeros``, which does not ask for huge pages as ``np.empty`` does: many environments lie far apart."""
    array: npt.NDArray[Any] = np.empty(shape, dtype)
    array.fill(0)
    return array


def norm_log2(norm: int) -> int:
    """The base-2 logarithm of a norm's order; −1 for norm 0, which is the maximum."""
    if norm == 0:
        return -1
    if norm < 2 or norm > 32 or norm & (norm - 1):
        raise ValueError(f"a norm is 0 (the max over GPUs) or a power of two from 2 to 32, found {norm}")
    return norm.bit_length() - 1


class Simulator:
    """Exact cost of serving intervals on placements, for one model on one cluster under an engine profile.

    Args:
        model: a preset name or a spec.
        cluster: a preset name or a spec.
        profile: an engine profile or its name.
        passes_per_interval: forward passes over which a migration is spread (SGLang re-plans every 1000).
        migration: ``blocking`` stops serving while weights move. ``async`` moves them in the background: the placement
            before serves until they have arrived, and ``background_share`` of the transfer time slows the passes down.
        background_share: see ``migration``.

    With the profile ``sglang-lp``, :meth:`evaluate` splits the tokens of every pass by a linear program. It is not
    incremental: searches plan for a random choice of replicas instead, and environments refuse the profile.
    """

    def __init__(
        self,
        model: str | ModelSpec,
        cluster: str | ClusterSpec,
        profile: str | EngineProfile = DEFAULT_PROFILE,
        passes_per_interval: int = 1000,
        migration: str = "blocking",
        background_share: float = 0.1,
    ) -> None:
        if passes_per_interval < 1:
            raise ValueError(f"passes_per_interval is {passes_per_interval}: expected at least 1")
        if not 0 <= background_share <= 1:
            raise ValueError(f"background_share is {background_share}: expected 0 … 1")
        index_of_choice(migration, MIGRATIONS, "migration")
        self.model, self.cluster, self.profile = get_model(model), get_cluster(cluster), get_profile(profile)
        self.n_experts, self.n_gpus = self.model.n_experts, self.cluster.n_gpus
        self.n_slots = self.cluster.slots_for(self.n_experts)
        self.passes_per_interval, self.migration = passes_per_interval, migration
        self.background_share = background_share if migration == "async" else -1.0
        dispatch = DISPATCHES.index(self.profile.dispatch)
        self.topology = Topology(
            node_of=np.arange(self.n_gpus, dtype=np.int64) // self.cluster.gpus_per_node,
            gpus_per_node=self.cluster.gpus_per_node,
            transport=TRANSPORTS.index(self.profile.transport),
            dispatch=RANDOM if dispatch == LP else dispatch,
            deals_one_node=int(self.profile.deals_one_node),
            draws=int(self.profile.draws),
        )
        self._slower = _slower_links(self.cluster) if self.profile.transport != "allgather" else None
        self._identity = (self.model, self.cluster, self.profile, passes_per_interval, self.background_share)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Simulator) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def spread_migration(self, passes_per_interval: int) -> Simulator:
        """The same simulator with another number of passes between two placement decisions."""
        return Simulator(
            self.model, self.cluster, self.profile, passes_per_interval, self.migration, max(0.0, self.background_share)
        )  # fmt: skip

    def costs(self, n_tokens: int) -> Costs:
        """Costs of passes of ``n_tokens`` tokens."""
        passes, share = self.passes_per_interval, self.background_share
        return costs_of(self.model, self.cluster, self.profile, n_tokens, passes, share)

    def interval_costs(self, interval: Interval) -> Costs:
        """Costs of the passes of an interval. A pass that stands for smaller ones is priced as one of those."""
        if interval.stands_for is None:
            return self.costs(interval.n_tokens)
        costs, share = self.costs(interval.stands_for), interval.stands_for / interval.n_tokens
        per_token = ("dispatch_intra_us", "dispatch_inter_us", "combine_intra_us", "combine_inter_us", "token_us")
        return costs._replace(
            **{name: getattr(costs, name) * share for name in per_token},
            # On average the last block of an expert is half full.
            expert_us=costs.expert_us + 0.5 * costs.block_us,
            block_us=0.0,
            pair_us=(costs.pair_us + costs.block_us / costs.block_tokens) * share,
        )

    # Placements

    def static(self, n_layers: int) -> Placement:
        """Experts in order over the slots, beginning again at 0 when all are placed."""
        slots = np.empty((self.n_gpus, self.n_slots), np.int16)
        static_slots(slots, self.n_experts)
        return np.repeat(slots[None], n_layers, axis=0)

    def check(self, placement: Placement) -> Placement:
        """The placement itself, or a ``ValueError`` that names the rule, layer and GPU it breaks."""
        placement = np.asarray(placement)
        if placement.ndim != 3 or placement.shape[1:] != (self.n_gpus, self.n_slots):
            raise ValueError(
                f"placement has shape {placement.shape}: expected (layers, {self.n_gpus} GPUs, {self.n_slots} slots)"
            )
        if placement.dtype.kind not in "iu":
            raise ValueError(f"placement has dtype {placement.dtype}: expected integers")
        outside = np.argwhere((placement < -1) | (placement >= self.n_experts))
        if len(outside):
            l, g, s = outside[0]
            raise ValueError(
                f"layer {l}, GPU {g} holds expert {placement[l, g, s]}: ids are 0 … {self.n_experts - 1}, and -1 for "
                "an empty slot"
            )
        ordered = np.sort(placement, axis=2)
        twice = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0))
        if len(twice):
            l, g, s = twice[0]
            raise ValueError(f"layer {l}, GPU {g} holds expert {ordered[l, g, s]} twice: one copy per GPU is enough")
        present = np.zeros((len(placement), self.n_experts + 1), bool)
        np.put_along_axis(present, placement.reshape(len(placement), -1).astype(np.int64), True, axis=1)
        missing = np.argwhere(~present[:, : self.n_experts])
        if len(missing):
            l, e = missing[0]
            raise ValueError(f"layer {l}: expert {e} is on no GPU: every expert needs a slot")
        return placement.astype(np.int16)

    # Serving

    def allocate(self, batch: int, n_passes: int, n_tokens: int) -> dict[str, npt.NDArray[Any]]:
        """Zeroed arrays for a :class:`SimulationState` of ``batch`` simulations."""
        shapes = self._shapes(n_passes, n_tokens)
        return {name: zeros((batch, *shape), dtype) for name, (shape, dtype) in shapes.items()}

    def _shapes(self, n_passes: int, n_tokens: int) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        """Shape and type of each array of one simulation."""
        gpus, slots, experts, nodes = self.n_gpus, self.n_slots, self.n_experts, self.cluster.n_nodes
        words = -(-n_tokens // 64)
        return {
            "rows": ((n_passes, n_tokens), np.int32),
            "rank_start": ((n_passes, gpus + 1), np.int32),
            "load": ((n_passes, experts), np.int32),
            "piece_mask": ((n_passes, words + gpus), np.uint64),
            "piece_at": ((n_passes, words + gpus, 2), np.int16),
            "n_pieces": ((n_passes,), np.int32),
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
            "by_home": ((gpus,), np.int32),
            "replica_slot": ((gpus,), np.int16),
            "users": ((-(-experts // 64) * 64, words), np.uint64),
            "moved_tokens": ((n_passes, 2, words), np.uint64),
            "moved_pairs": ((n_passes, 2), np.int32),
            "node_visitors": ((words,), np.uint64),
            "touched": ((gpus,), np.int8),
        }

    def count(self, interval: Interval, placement: Placement, before: Placement | None = None) -> SimulationState:
        """The state of all layers (b = layer) under ``placement``, with ``before`` as the interval's beginning."""
        top_k = interval.experts.shape[2]
        if top_k > self.model.top_k:
            raise ValueError(f"the interval is top-{top_k}, but model {self.model.name!r} is top-{self.model.top_k}")
        if interval.rank_start.shape[1] != self.n_gpus + 1:
            raise ValueError(f"the interval has {interval.rank_start.shape[1] - 1} ranks, not {self.n_gpus} GPUs")
        shapes = self._shapes(*interval.rows.shape)
        arrays = {name: np.zeros((interval.n_layers, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        state = SimulationState(**arrays)
        state.rows[:] = interval.rows
        state.rank_start[:] = interval.rank_start
        state.slots[:] = placement if before is None else before
        arguments = (
            state, np.ascontiguousarray(placement, np.int16), interval.experts, self.topology,
            self.interval_costs(interval),
        )  # fmt: skip
        parallel_for(_count_range, interval.n_layers, *arguments)
        return state

    def _served(self, interval: Interval, placement: Placement, before: Placement | None = None) -> SimulationState:
        """As :meth:`count`, but with the linear program of dispatch ``lp``, which planners do without."""
        state = self.count(interval, placement, before)
        if self.profile.dispatch == "lp":
            from clustergym.moe_placement.lp_dispatch import split_by_program  # scipy takes long to import

            split_by_program(state, self.topology, self.interval_costs(interval))
        return state

    def evaluate(
        self, interval: Interval, placement: Placement, before: Placement | None = None, *, check: bool = True
    ) -> Served:
        """Serve ``interval`` on ``placement`` after moving there from ``before`` (by default nothing moves).

        ``check=False`` trusts both placements to be legal: compiled code would read past the end of an illegal one.
        """
        if check:
            for slots in (placement,) if before is None else (placement, before):
                if len(self.check(slots)) != interval.n_layers:
                    raise ValueError(f"placement has {len(slots)} layers, but the interval has {interval.n_layers}")
        state, costs = self._served(interval, placement, before), self.interval_costs(interval)
        layers, gpus = interval.n_layers, self.n_gpus
        times = np.zeros((layers, interval.n_passes, N_PASS_PARTS))
        links, transfer_us = np.zeros((layers, gpus, gpus)), np.zeros(layers)
        for b in range(layers):
            self._write_times(state, b, costs, times[b], links[b])
            transfer_us[b] = migration_time(state, b, costs)
        served_us = times.sum(2).mean(1)
        migration_us = transfer_us
        if self.background_share >= 0 and before is not None and transfer_us.any():
            before_us = self.evaluate(interval, before, check=False).time_us
            migration_us = np.array(
                [
                    with_migration(*layer, costs) - layer[0]
                    for layer in zip(served_us, transfer_us, before_us, strict=True)
                ]
            )
        links /= interval.n_passes
        node = self.topology.node_of
        away = node[:, None] != node[None, :]
        return Served(
            pass_us=times,
            migration_us=migration_us,
            pairs=np.where((state.slots >= 0)[:, None], state.slot_pairs, 0).sum(3, dtype=np.int64),
            copies=links,
            gpus_per_token=_gpus_per_token(state),
            inter_node_bytes=links[:, away].sum(1) * self.model.hidden * self.model.dispatch_bytes,
            moves=state.received.sum((1, 2)).astype(np.int64),
        )

    def pass_times(self, interval: Interval, placement: Placement) -> npt.NDArray[np.float64]:
        """(L, P) time of every pass: that of :meth:`evaluate`, without its other figures. The placement is trusted."""
        state, costs = self._served(interval, placement), self.interval_costs(interval)
        times = np.zeros((interval.n_layers, interval.n_passes, N_PASS_PARTS))
        links = np.zeros((self.n_gpus, self.n_gpus))
        for b in range(interval.n_layers):
            self._write_times(state, b, costs, times[b], links)
        total: npt.NDArray[np.float64] = times.sum(2)
        return total

    def _write_times(self, state: SimulationState, b: int, costs: Costs, times: Any, links: Any) -> None:
        """Write the times of all passes of layer ``b``, and add up its copies."""
        if self._slower is None:
            _write_times(state, b, self.topology, costs, times, links)
        else:
            back, copies = self._slower.T.copy(), np.zeros_like(self._slower)  # what is combined takes the way back
            _write_times_on_links(state, b, self.topology, costs, self._slower, back, copies, times, links)

    def traffic_bytes(self, served: Served) -> npt.NDArray[np.float64]:
        """(L, G, G) bytes dispatched from row to column in a pass."""
        return served.copies * np.float64(self.model.hidden * self.model.dispatch_bytes)


def _gpus_per_token(state: SimulationState) -> npt.NDArray[np.float64]:
    """(L,) distinct GPUs that run an expert of a token, mean."""
    held = (state.slots >= 0)[:, None, :, :, None]
    on_gpu = np.bitwise_or.reduce(np.where(held, state.slot_tokens, np.uint64(0)), axis=3)
    per_token: npt.NDArray[np.float64] = np.bitwise_count(on_gpu).sum((1, 2, 3)) / state.rows[0].size
    return per_token


@device
def _count_range(first: Any, last: Any, state: Any, placement: Any, experts: Any, topology: Any, costs: Any) -> None:
    for b in range(first, last):
        set_first_placement(state, b, topology)
        set_placement(state, b, placement[b], topology)
        for w in range(state.rows.shape[1]):
            count_pass(state, b, w, experts[b], topology, costs)


@device
def _write_times(state: Any, b: Any, topology: Any, costs: Any, times: Any, links: Any) -> None:
    """Write dispatch, compute and combine of every pass (P, 3), and add up the copies from row to column (G, G)."""
    for w in range(state.rows.shape[1]):
        dispatch, compute, combine = pass_times(state, b, w, topology, costs, -1)
        times[w, DISPATCH_US], times[w, COMPUTE_US], times[w, COMBINE_US] = dispatch, compute, combine
        add_links(state, b, w, topology, links)


@device
def _write_times_on_links(
    state: Any, b: Any, topology: Any, costs: Any, slower: Any, back: Any, copies: Any, times: Any, links: Any
) -> None:
    """:func:`_write_times` where every pair of GPUs has a bandwidth of its own."""
    for w in range(state.rows.shape[1]):
        copies[:, :] = 0.0
        add_links(state, b, w, topology, copies)
        times[w, DISPATCH_US] = costs.dispatch_us + exchange_time_on_links(
            copies, slower, topology.node_of, costs.dispatch_intra_us, costs.dispatch_inter_us
        )
        times[w, COMPUTE_US] = compute_time(state, b, w, costs, -1)
        times[w, COMBINE_US] = costs.combine_us + exchange_time_on_links(
            copies, back, topology.node_of, costs.combine_intra_us, costs.combine_inter_us
        )
        for g in range(copies.shape[0]):
            for other in range(copies.shape[1]):
                links[g, other] += copies[g, other]


def _slower_links(cluster: ClusterSpec) -> npt.NDArray[np.float64] | None:
    """(G, G) how many times as long a copy takes on each link as on an equal one; None if all are equal."""
    if not cluster.link_gb_s:
        return None
    node = np.arange(cluster.n_gpus) // cluster.gpus_per_node
    usual = np.where(node[:, None] == node, cluster.intra_gb_s, cluster.inter_gb_s)
    links = np.array(cluster.link_gb_s)
    np.fill_diagonal(links, 1.0)
    slower: npt.NDArray[np.float64] = usual / links
    np.fill_diagonal(slower, 0.0)
    return slower
