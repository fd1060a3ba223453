"""The simulator as a library: windows of tokens, placements of all layers, and what serving them costs.

A placement is an int16 array (L, G, S): the expert in each slot of each GPU and layer, −1 for an empty slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt
import torch

from clustergym.common.choices import one_of
from clustergym.moe_placement.kernels.index import LONGEST_PIECE, TokenIndex
from clustergym.moe_placement.kernels.replicas import static_slots
from clustergym.moe_placement.kernels.state import (
    MODE_DEDUP,
    MODE_PER_EXPERT,
    MODE_STAY,
    N_POSITIONS,
    SCHEDULES,
    SimulationState,
    StreamState,
    TraceTables,
)
from clustergym.moe_placement.kernels.streams import begin_stream, draw_window, stream_keys, trace_tables
from clustergym.moe_placement.launchers import cpu
from clustergym.moe_placement.specs import ClusterSpec, Costs, ModelSpec, Network, get_cluster, get_model
from clustergym.traces.token_trace import TokenTrace

COMM_MODES = {"dedup": MODE_DEDUP, "per-expert": MODE_PER_EXPERT, "stay": MODE_STAY}

Placement = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Window:
    """T tokens that are served together: rows of a trace, and the GPU on which each one lives."""

    experts: npt.NDArray[np.int16]
    """(L, rows, K) the trace, layer first"""
    rows: npt.NDArray[np.int32]
    """(T,)"""
    home: npt.NDArray[np.int16]
    """(T,)"""

    @property
    def n_tokens(self) -> int:
        return len(self.rows)

    @property
    def n_layers(self) -> int:
        return len(self.experts)

    def loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        """(L, E) tokens routed to each expert."""
        ids = self.experts[:, self.rows].reshape(self.n_layers, -1).astype(np.int64)
        flat = (ids + np.arange(self.n_layers)[:, None] * n_experts)[ids >= 0]
        return np.bincount(flat, minlength=self.n_layers * n_experts).reshape(self.n_layers, n_experts)

    @staticmethod
    def join(windows: Sequence[Window]) -> Window:
        """Several windows of one trace as one."""
        return Window(
            windows[0].experts,
            np.concatenate([w.rows for w in windows]),
            np.concatenate([w.home for w in windows]),
        )

    @classmethod
    def whole(cls, trace: TokenTrace, n_gpus: int) -> Window:
        """All tokens of a trace as one window, its sequences dealt round robin to the GPUs."""
        home = np.repeat(np.arange(trace.n_sequences) % n_gpus, trace.seq_lens)
        return cls(trace_tables(trace).experts, np.arange(trace.n_tokens, dtype=np.int32), home.astype(np.int16))


class Stream:
    """An endless stream of windows from a trace, the same that an environment with this seed serves.

    Args:
        trace: where the sequences come from; each is drawn once before any comes again.
        n_gpus: sequences are dealt round robin to this many GPUs.
        window_tokens: T.
        schedule: ``stationary``, ``drift``, ``switch`` or ``replay``.
        rate: step of the mixture walk (drift) or chance of another domain (switch).
        seed: any integer.
    """

    def __init__(
        self,
        trace: TokenTrace,
        n_gpus: int,
        window_tokens: int = 2048,
        schedule: str = "stationary",
        rate: float = 0.5,
        seed: int = 0,
    ) -> None:
        if window_tokens < 1:
            raise ValueError(f"window_tokens is {window_tokens}: expected at least 1")
        self.trace: TraceTables = trace_tables(trace)
        self.n_gpus, self.window_tokens, self.rate = n_gpus, window_tokens, float(rate)
        self.schedule = one_of(schedule, SCHEDULES, "schedule")
        domains = len(trace.domain_names)
        self.state = StreamState(
            random=stream_keys(np.array([seed], dtype=np.int64)),
            position=np.zeros((1, N_POSITIONS), np.int32),
            drawn=np.zeros((1, domains), np.int32),
            logits=np.zeros((1, domains)),
        )
        begin_stream(self.state, 0, self.trace, self.schedule)

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        rows, home = np.zeros(self.window_tokens, np.int32), np.zeros(self.window_tokens, np.int16)
        draw_window(self.state, 0, self.trace, self.schedule, self.rate, self.n_gpus, rows, home)
        return Window(self.trace.experts, rows, home)

    def take(self, n: int) -> list[Window]:
        return [next(self) for _ in range(n)]


def zeros_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of zeros. On the CPU numpy allocates it, which asks for huge pages: thousands of environments lie far apart."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    array = np.empty(shape, torch.empty(0, dtype=dtype).numpy().dtype)
    array.fill(0)
    return torch.from_numpy(array)


def norm_log2(norm: int) -> int:
    """The base-2 logarithm of a norm's order; −1 for norm 0, which is the maximum."""
    if norm == 0:
        return -1
    if norm < 2 or norm > 64 or norm & (norm - 1):
        raise ValueError(f"a norm is 0 (the max over GPUs) or a power of two from 2 to 64, found {norm}")
    return norm.bit_length() - 1


def allocate_simulation(
    batch: int,
    windows: int,
    tokens: int,
    *,
    experts: int,
    top_k: int,
    slots: int,
    network: Network,
    index: TokenIndex | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Zeroed tensors for a :class:`SimulationState` of ``batch`` simulations with ``windows`` windows of ``tokens`` each.

    If ``index`` is given they share it; else each window has room for an index of its own rows.
    """
    gpus, stay = len(network.node_of), network.mode == MODE_STAY
    nodes = gpus // network.gpus_per_node
    by_sets = index is not None and network.mode == MODE_DEDUP
    sets = ceil(tokens / 64)
    # Thousands of environments do not fit into the caches: the arrays that an operation touches use the smallest dtypes.
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "rows": ((batch, windows, tokens), torch.int32),
        "origin": ((batch, windows, tokens), torch.uint8),
        "destination": ((batch, windows, tokens if stay else 1), torch.uint8),
        "load": ((batch, windows, experts), torch.int32),
        "slot_tokens": ((batch, windows, gpus, slots, sets) if by_sets else (batch, 1, 1, 1, 1), torch.uint64),
        "token_masks": ((batch, windows, gpus + nodes + 1, sets) if by_sets else (batch, 1, 1, 1), torch.uint64),
        "moved_tokens": ((batch, windows, 2, sets) if by_sets else (batch, 1, 1, 1), torch.uint64),
        "visitors": ((batch, 2, sets) if by_sets else (batch, 1, 1), torch.uint64),
        "block_users": ((batch, experts + 1) if by_sets else (batch, 1), torch.uint64),
        "touched": ((batch, gpus), torch.int8),
        "gpu_uses": ((batch, windows, 1 if by_sets else tokens, network.n_words), torch.int64),
        "visits": ((batch, windows, gpus, gpus), torch.int32),
        "node_visits": ((batch, windows, gpus, nodes), torch.int32),
        "return_visits": ((batch, windows, gpus, gpus) if stay else (batch, windows, 1, 1), torch.int32),
        "return_node_visits": ((batch, windows, gpus, nodes) if stay else (batch, windows, 1, 1), torch.int32),
        "copies": ((batch, 4, gpus), torch.int32),
        "pairs": ((batch, windows, experts, gpus), torch.int32),
        "slots": ((batch, gpus, slots), torch.int16),
        "replicas": ((batch, experts, gpus), torch.int16),
        "n_replicas": ((batch, experts), torch.int16),
        "replica_choice": ((batch, experts, gpus), torch.int32),
        "previous": ((batch, 2, 3, gpus), torch.int32),
        "window_uses": ((batch, tokens + 1), torch.int32),
        "only_gpu": ((batch, experts + 1), torch.int64),
        "held_before": ((batch, experts, gpus), torch.int8),
        "received": ((batch, gpus, 2), torch.int32),
    }
    pieces = ceil(tokens / LONGEST_PIECE)
    if index is None:
        shapes |= {
            "use_starts": ((batch * windows, pieces, experts + 1), torch.int32),
            "uses": ((batch * windows, tokens * top_k), torch.uint16),
            "user_bits": ((1, 1, 1), torch.uint64),
        }
    segments = pieces if index is None else tokens
    shapes |= {
        "segments": ((batch, windows, segments + 1, 3), torch.int32),
        "index_plane": ((batch, windows), torch.int32),
    }
    tensors = {name: zeros_of(shape, dtype, device) for name, (shape, dtype) in shapes.items()}
    tensors["own_index"] = torch.tensor([index is None], dtype=torch.int8, device=device)
    if index is None:
        starts = np.minimum(np.arange(pieces + 1) * LONGEST_PIECE, tokens).astype(np.int32)
        tensors["piece_starts"] = torch.from_numpy(starts).to(device)
        tensors["index_plane"] += torch.arange(batch * windows, dtype=torch.int32, device=device).view(batch, windows)
    else:
        tensors |= {name: torch.from_numpy(array).to(device) for name, array in index._asdict().items()}
    return tensors


@dataclass(frozen=True)
class Served:
    """What serving one window on one placement costs, layer by layer. Times are µs of one forward pass."""

    time_us: npt.NDArray[np.float64]
    """(L,) dispatch + compute + combine"""
    migration_us: npt.NDArray[np.float64]
    """(L,) fetching the experts that the placement before did not hold, spread over the window's passes"""
    dispatch_us: npt.NDArray[np.float64]
    compute_us: npt.NDArray[np.float64]
    combine_us: npt.NDArray[np.float64]
    pairs: npt.NDArray[np.int64]
    """(L, G) token-expert pairs computed on each GPU"""
    copies: npt.NDArray[np.int64]
    """(L, G, G) activations dispatched from row to column"""
    gpus_per_token: npt.NDArray[np.float64]
    """(L,) distinct GPUs that compute for a token, mean"""
    inter_node_bytes: npt.NDArray[np.float64]
    """(L,) dispatched between nodes"""
    moves: npt.NDArray[np.int64]
    """(L,) replicas that some GPU must receive"""

    @cached_property
    def balancedness(self) -> npt.NDArray[np.float64]:
        """(L,) mean over max of the GPUs' pairs: 1 is perfect balance."""
        return self.pairs.mean(1) / np.maximum(self.pairs.max(1), 1)


def uses_of(sim: SimulationState, network: Network, gpu: int) -> npt.NDArray[np.int64]:
    """(B, W, T) number of each token's experts that run on the GPU."""
    field = (1 << network.field_bits) - 1
    uses: npt.NDArray[np.int64] = sim.gpu_uses[..., network.word_of[gpu]] >> network.shift_of[gpu] & field
    return uses


class Simulator:
    """Exact cost of serving windows of tokens on placements, for one model on one cluster.

    Args:
        model: preset name or :class:`ModelSpec`.
        cluster: preset name or :class:`ClusterSpec`.
        comm: ``dedup``, ``per-expert`` or ``stay``.
        passes_per_window: forward passes over which a migration is spread.
    """

    def __init__(
        self,
        model: str | ModelSpec,
        cluster: str | ClusterSpec,
        comm: str = "dedup",
        passes_per_window: int = 100,
    ) -> None:
        self.model, self.cluster = get_model(model), get_cluster(cluster)
        self.comm, self.mode = comm, list(COMM_MODES.values())[one_of(comm, list(COMM_MODES), "comm")]
        self.n_experts, self.n_gpus = self.model.n_experts, self.cluster.n_gpus
        self.n_slots = self.cluster.slots_for(self.n_experts)
        self.passes_per_window = passes_per_window
        self.costs = Costs.of(self.model, self.cluster, passes_per_window)
        self.network = Network.of(self.cluster, self.model.top_k, self.mode)
        self._identity = (self.model, self.cluster, comm, passes_per_window)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Simulator) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

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
                f"layer {l}, GPU {g} holds expert {placement[l, g, s]}: ids are 0 … {self.n_experts - 1}, and -1 for an empty slot"
            )
        ordered = np.sort(placement, axis=2)
        twins = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0))
        if len(twins):
            l, g, s = twins[0]
            raise ValueError(
                f"layer {l}, GPU {g} holds expert {ordered[l, g, s]} twice: one copy a GPU is all it can use"
            )
        present = np.zeros((len(placement), self.n_experts + 1), bool)
        np.put_along_axis(present, placement.reshape(len(placement), -1).astype(np.int64), True, axis=1)
        missing = np.argwhere(~present[:, : self.n_experts])
        if len(missing):
            l, e = missing[0]
            raise ValueError(f"layer {l}: expert {e} is on no GPU: every expert needs a slot")
        return placement.astype(np.int16)

    def count(self, window: Window, placement: Placement, before: Placement | None = None) -> SimulationState:
        """The ``SimulationState`` of all layers (b = layer) under ``placement``, with ``before`` as the window's beginning."""
        layers, top_k = window.n_layers, window.experts.shape[2]
        if top_k > self.model.top_k:
            raise ValueError(f"the window is top-{top_k}, but model {self.model.name!r} is top-{self.model.top_k}")
        tensors = allocate_simulation(
            layers, 1, window.n_tokens, experts=self.n_experts, top_k=top_k, slots=self.n_slots, network=self.network
        )
        sim = SimulationState(**{name: tensor.numpy() for name, tensor in tensors.items()})
        sim.rows[:, 0] = window.rows
        sim.origin[:, 0] = window.home
        sim.slots[:] = placement if before is None else before
        cpu.count(sim, np.ascontiguousarray(placement, dtype=np.int16), window.experts, self.network)
        return sim

    def evaluate(
        self, window: Window, placement: Placement, before: Placement | None = None, *, check: bool = True
    ) -> Served:
        """Serve ``window`` on ``placement`` after moving there from ``before`` (by default nothing moves).

        ``check=False`` trusts both placements to be legal: compiled code would read past the end of an illegal one.
        """
        if check:
            for slots in (placement,) if before is None else (placement, before):
                if len(self.check(slots)) != window.n_layers:
                    raise ValueError(f"placement has {len(slots)} layers, but the window has {window.n_layers}")
        sim = self.count(window, placement, before)
        times = np.zeros((window.n_layers, 4))
        copies = np.zeros((window.n_layers, self.n_gpus, self.n_gpus), np.int64)
        cpu.times(sim, self.costs, self.network, times, copies)
        node = self.network.node_of
        between = copies[:, node[:, None] != node[None, :]].sum(1)
        return Served(
            time_us=times[:, :3].sum(1),
            migration_us=times[:, 3],
            dispatch_us=times[:, 0],
            compute_us=times[:, 1],
            combine_us=times[:, 2],
            pairs=sim.pairs[:, 0].sum(1, dtype=np.int64),
            copies=copies,
            gpus_per_token=sum((uses_of(sim, self.network, g)[:, 0] > 0).mean(1) for g in range(self.n_gpus)),
            inter_node_bytes=between * self.model.hidden * self.model.dispatch_bytes,
            moves=sim.received.sum((1, 2)).astype(np.int64),
        )

    def lower_bound(self, window: Window) -> npt.NDArray[np.float64]:
        """(L,) a proven lower bound on ``time_us``: no copies at all, and pairs spread evenly over all GPUs.

        The pairs of some GPU are at least the mean, and at least one GPU has ceil(active experts / G) active experts
        or more; the two need not be the same GPU, so each is bounded alone.
        """
        loads = window.loads(self.n_experts)
        mean_pairs = np.ceil(loads.sum(1) / self.n_gpus)
        experts = np.ceil((loads > 0).sum(1) / self.n_gpus)
        both = (
            self.model.kernel_pair_us * loads.sum(1) / self.n_gpus
            + self.model.kernel_expert_us * (loads > 0).sum(1) / self.n_gpus
        )
        least = np.maximum(
            np.maximum(
                self.model.kernel_pair_us * mean_pairs + self.model.kernel_expert_us * (loads.sum(1) > 0),
                self.model.kernel_expert_us * experts,
            ),
            both,
        )
        return np.asarray(
            self.costs.dispatch_us + self.costs.combine_us + self.model.kernel_start_us + least, dtype=np.float64
        )

    def traffic_bytes(self, served: Served) -> npt.NDArray[np.float64]:
        """(L, G, G) bytes dispatched from row to column."""
        return served.copies * np.float64(self.model.hidden * self.model.dispatch_bytes)
