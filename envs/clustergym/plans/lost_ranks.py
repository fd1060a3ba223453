"""A plan for the ranks that are left when some are lost, from the live plan with few moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.specs import ClusterSpec
from clustergym.moe_placement.streams import Interval, Traffic
from clustergym.planners.eplb import EPLB
from clustergym.planners.heldout import SequencePasses
from clustergym.plans.transition import keep_in_place
from clustergym.traces import TokenTrace

_NORM = 8
"""Loads of the GPUs are compared in this norm: the busiest one counts most, but not alone."""


def parse_ranks(text: str, n_gpus: int) -> list[int]:
    """``15,16`` → [15, 16]"""
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--without-ranks {text}: expected ranks separated by commas, as in 15,16") from None
    if ranks[0] < 0 or ranks[-1] >= n_gpus or len(ranks) == n_gpus:
        raise ValueError(f"--without-ranks {text}: expected some of the ranks 0 … {n_gpus - 1}, not all of them")
    return ranks


def renumbered(n_gpus: int, lost: list[int]) -> str:
    """Which rank becomes which, in runs: ``0–14 stay, 16–31 → 15–30``"""
    left = [rank for rank in range(n_gpus) if rank not in lost]
    runs: list[list[int]] = []
    for new, old in enumerate(left):
        if runs and old == runs[-1][1] + 1:
            runs[-1][1] = old
        else:
            runs.append([old, old, new])
    return ", ".join(
        f"{first}–{last} stay" if first == new else f"{first}–{last} → {new}–{new + last - first}"
        for first, last, new in runs
    )


def cluster_left(cluster: ClusterSpec, lost: list[int]) -> ClusterSpec:
    """The cluster without the lost ranks: one node if the nodes have not equally many left."""
    left = np.setdiff1d(np.arange(cluster.n_gpus), lost) // cluster.gpus_per_node
    sizes = np.bincount(left, minlength=cluster.n_nodes)
    sizes = sizes[sizes > 0]
    even = (sizes == sizes[0]).all()
    name = f"{cluster.name} without ranks {','.join(map(str, lost))}"
    shape = (len(sizes), int(sizes[0])) if even else (1, len(left))
    return replace(cluster, name=name, n_nodes=shape[0], gpus_per_node=shape[1])


def restore(
    live: Placement, lost: list[int], loads: npt.NDArray[np.float64], max_moves: int | None = None
) -> tuple[Placement, int]:
    """((L, ranks left, S) placement, experts that were lost): lost experts replace spare copies, all others stay.

    Args:
        loads: (L, E) load of each expert.
        max_moves: moves over all layers; those beyond the lost experts are made where they balance most. By default
            there are none.
    """
    kept = np.delete(live, lost, axis=1)
    n_experts = loads.shape[1]
    if kept.shape[1] * kept.shape[2] < n_experts:
        raise ValueError(
            f"{kept.shape[1]} ranks × {kept.shape[2]} slots are left for {n_experts} experts: start the engine again "
            f"with {-(-n_experts // kept.shape[1])} slots per GPU, and plan without --from"
        )
    layers = [_Layer(slots, load) for slots, load in zip(kept.copy(), loads, strict=True)]
    n_lost = 0
    for layer in layers:
        missing = np.flatnonzero(layer.copies == 0)
        n_lost += len(missing)
        for e in missing[np.argsort(-layer.loads[missing], kind="stable")]:
            layer.move(layer.best([int(e)])[1:])
    if max_moves is not None and max_moves < n_lost:
        raise ValueError(f"--max-moves is {max_moves}, but {n_lost} experts are lost and have to be placed")
    more_moves = 0 if max_moves is None else max_moves - n_lost
    best = [layer.improvement() for layer in layers] if more_moves else []
    for _ in range(more_moves):
        l = int(np.argmax([gain for gain, _ in best]))
        gain, step = best[l]
        if gain <= 0:
            break
        layers[l].move(step)
        best[l] = layers[l].improvement()
    return np.stack([layer.slots for layer in layers]), n_lost


class _Layer:
    """One layer: its slots (G, S), and what each GPU has to compute if replicas share the load evenly."""

    def __init__(self, slots: npt.NDArray[np.int16], loads: npt.NDArray[np.float64]) -> None:
        self.slots, self.loads = slots, loads / max(loads.sum(), 1e-9)
        self.holds = np.zeros((len(slots), len(loads)), bool)
        np.put_along_axis(self.holds, slots.astype(np.int64), True, axis=1)
        self.copies = np.bincount(slots.ravel(), minlength=len(loads))

    def work(self) -> npt.NDArray[np.float64]:
        return np.asarray((self.holds * (self.loads / np.maximum(self.copies, 1))).sum(1))

    def best(self, experts: list[int]) -> tuple[float, int, int, int]:
        """(norm, GPU, slot, expert) of the best replacement of a spare copy by one of the experts."""
        found, work = (np.inf, -1, -1, -1), self.work()
        for e in experts:
            free = ~self.holds[:, e]
            spots = np.argwhere((self.copies[self.slots] > 1) & free[:, None])
            if not len(spots):
                continue
            out, g = self.slots[spots[:, 0], spots[:, 1]].astype(np.int64), spots[:, 0]
            share, fewer = self.loads[out] / self.copies[out], self.loads[out] / (self.copies[out] - 1)
            old = self.loads[e] / max(self.copies[e], 1) if self.copies[e] else 0.0
            new = self.loads[e] / (self.copies[e] + 1)
            after = work + self.holds[:, out].T * (fewer - share)[:, None] + self.holds[:, e] * (new - old)
            after[np.arange(len(g)), g] += new - fewer
            norms = (after**_NORM).sum(1)
            if norms.min() < found[0]:
                spot = spots[norms.argmin()]
                found = (float(norms.min()), int(spot[0]), int(spot[1]), e)
        return found

    def improvement(self) -> tuple[float, tuple[int, int, int]]:
        """(how much the best further copy of an expert of the busiest GPU lowers the norm relatively, that move)"""
        work = self.work()
        norm, *step = self.best(self.slots[work.argmax()].tolist())
        return 1 - norm / float((work**_NORM).sum()), (step[0], step[1], step[2])

    def move(self, step: tuple[int, int, int]) -> None:
        g, s, e = step
        out = self.slots[g, s]
        self.holds[g, out], self.holds[g, e] = False, True
        self.copies[out] -= 1
        self.copies[e] += 1
        self.slots[g, s] = e


@dataclass(frozen=True)
class Restored:
    """Placements for the ranks that are left, and their times on held-out passes of these ranks."""

    placement: Placement
    """(L, ranks left, S)"""
    lost_experts: int
    """Experts without a copy, over all layers"""
    moves: int
    us: float
    full_us: float
    """Of the live plan on all ranks"""
    eplb_us: float
    eplb_moves: int
    """EPLB's flat plan for the ranks left, with GPUs named so that few experts move"""


def plan_without(
    trace: TokenTrace, simulator: Simulator, traffic: Traffic, live: Placement, lost: list[int],
    max_moves: int | None = None, passes: int = 8, share: float = 0.75, seed: int = 0,
) -> Restored:  # fmt: skip
    """Plan on one part of the trace, measure on the rest. Lost ranks hold nothing and have no tokens."""
    before, after = trace.split(share, seed=seed)
    loads = before.loads().astype(np.float64)
    placement, n_lost = restore(live, lost, loads, max_moves)
    left = np.setdiff1d(np.arange(simulator.n_gpus), lost)
    small = Simulator(simulator.model, replace(simulator.cluster, n_nodes=1, gpus_per_node=len(left)))
    kept = live[:, left]
    eplb = keep_in_place(EPLB(small).pack(loads), kept, len(left))

    def us(slots: Placement, ranks: npt.NDArray[np.int64]) -> float:
        drawn = SequencePasses(after, len(ranks), traffic).draw(passes, np.random.default_rng(seed))
        tokens = np.zeros(simulator.n_gpus + 1, np.int32)
        tokens[ranks + 1] = np.diff(drawn.rank_start[0])
        starts = np.tile(np.cumsum(tokens, dtype=np.int32), (passes, 1))
        whole = np.full((len(slots), simulator.n_gpus, slots.shape[2]), -1, np.int16)
        whole[:, ranks] = slots
        return float(simulator.pass_times(Interval(drawn.experts, drawn.rows, starts), whole).mean())

    return Restored(
        placement=placement, lost_experts=n_lost, moves=int((placement != kept).sum()), us=us(placement, left),
        full_us=us(live, np.arange(simulator.n_gpus)), eplb_us=us(eplb, left), eplb_moves=int((eplb != kept).sum()),
    )  # fmt: skip
