"""From a live placement towards a better one, with a limited number of moves or a limited transfer time.

The change of a layer is cut into steps: a GPU gives up one expert and receives another. A step may depend on another
one, because every expert must stay somewhere. The steps that save most per move come first, until the limit is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec
from clustergym.planners.flashlb import match_gpus

_STEPS_TRIED = 48
"""Steps per layer that are tried one by one, hottest experts first. The others follow in this order."""


@dataclass(frozen=True)
class Limit:
    """What a change of placement may cost."""

    moves: int | None = None
    """Experts received, over all layers and GPUs"""
    seconds: float | None = None
    """Time of the transfer if all GPUs receive at once"""

    def __post_init__(self) -> None:
        if self.moves is not None and self.moves < 0:
            raise ValueError(f"--max-moves is {self.moves}: expected 0 or more")
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"--migration-budget is {self.seconds}: expected 0 seconds or more")

    def allows(self, moves: int, gpu_seconds: npt.NDArray[np.float64]) -> bool:
        return (self.moves is None or moves <= self.moves) and (
            self.seconds is None or float(gpu_seconds.max()) <= self.seconds
        )


class Step(NamedTuple):
    """A GPU replaces the expert of a slot."""

    gpu: int
    slot: int
    expert: int


def keep_in_place(new: Placement, live: Placement, gpus_per_node: int) -> Placement:
    """``new`` with the GPUs of each node and the slots of each GPU renamed so that few experts move.

    The GPUs of a node are equal, so which of them gets which set of experts is free.
    """
    kept = np.empty_like(new)
    for l in range(len(new)):
        for first in range(0, new.shape[1], gpus_per_node):
            node = slice(first, first + gpus_per_node)
            kept[l, node] = match_gpus(new[l, node], live[l, node])
        for g in range(new.shape[1]):
            kept[l, g] = _same_slots(kept[l, g], live[l, g])
    return kept


def _same_slots(experts: npt.NDArray[np.int16], before: npt.NDArray[np.int16]) -> list[int]:
    """The experts of a GPU, those that it held before in their old slots. An engine may hold an expert twice."""
    left, placed = experts.tolist(), [-1] * len(experts)
    for s, expert in enumerate(before.tolist()):
        if expert in left:
            left.remove(expert)
            placed[s] = expert
    return [expert if expert >= 0 else left.pop(0) for expert in placed]


def layer_steps(
    live: npt.NDArray[np.int16], target: npt.NDArray[np.int16], loads: npt.NDArray[np.float64]
) -> tuple[list[Step], list[set[int]]]:
    """The steps from one placement of a layer (G, S) to another, and for each the steps that it needs, itself included.

    Any union of these sets leaves every expert on some GPU. Slots that differ hold different experts on a GPU.
    """
    steps = [Step(int(g), int(s), int(target[g, s])) for g, s in np.argwhere(live != target)]
    steps.sort(key=lambda step: -loads[step.expert])
    stays = set(live[live == target].tolist())
    placed_by: dict[int, int] = {}
    for i, step in enumerate(steps):
        placed_by.setdefault(step.expert, i)
    needed = []
    for i in range(len(steps)):
        chain, at = {i}, i
        while True:
            removed = int(live[steps[at].gpu, steps[at].slot])
            if removed in stays or (at := placed_by[removed]) in chain:
                break
            chain.add(at)
        needed.append(chain)
    return steps, needed


class Transition:
    """Changes of a live placement.

    Args:
        live: (L, G, S) placement without empty slots.
        limit: what a change may cost.
        loads: (L, E) tokens of each expert.
        times: (L,) time of each layer on a placement.
    """

    def __init__(
        self,
        live: Placement,
        limit: Limit,
        loads: npt.NDArray[np.float64],
        cluster: ClusterSpec,
        model: ModelSpec,
        times: Callable[[Placement], npt.NDArray[np.float64]],
    ) -> None:
        self.live, self.limit, self.loads, self.times = live, limit, loads, times
        self.cluster, self.model = cluster, model

    def keep_in_place(self, target: Placement) -> Placement:
        return keep_in_place(target, self.live, self.cluster.gpus_per_node)

    def allowed(self, target: Placement) -> bool:
        """Whether the limit allows all moves to ``target``, which :meth:`keep_in_place` returned."""
        received = _seconds_to_receive(self.live, target, self.cluster, self.model)
        return self.limit.allows(int((self.live != target).sum()), received.sum((0, 2)))

    def towards(self, target: Placement) -> Placement:
        """As much of the way to ``target`` as the limit allows, where it saves most."""
        target = self.keep_in_place(target)
        if self.allowed(target):
            return target
        received = _seconds_to_receive(self.live, target, self.cluster, self.model)
        layers = zip(self.live, target, self.loads, strict=True)
        found = [layer_steps(before, after, loads) for before, after, loads in layers]
        states = _prefixes(self.live, found, _by_gain(self.live, found, self.times), self.times)
        return _choose(self.live, states, self.limit, received)

    def search(self, plan: Callable[[int], Placement], runs: int, others: Sequence[Placement] = ()) -> Placement:
        """The best change that the limit allows, of a search that weighs moves against time.

        Args:
            plan: the placement for a migration that is spread over so many passes. More passes, more moves.
            runs: how often the search may run, to find the number of passes.
            others: more placements to go towards.
        """
        fewest, most = 0.0, 7.0  # powers of ten
        options, beyond = [self.live, *(self.towards(other) for other in others)], None
        for _ in range(runs):
            middle = (fewest + most) / 2
            found = self.keep_in_place(plan(round(10**middle)))
            if self.allowed(found):
                options.append(found)
                fewest = middle
            else:
                beyond = found
                most = middle
        if beyond is not None:
            options.append(self.towards(beyond))
        return min(options, key=lambda placement: float(self.times(placement).mean()))


def _seconds_to_receive(
    live: Placement, target: Placement, cluster: ClusterSpec, model: ModelSpec
) -> npt.NDArray[np.float64]:
    """(L, G, S) time to receive the expert of each slot that changes, from the node if a GPU there holds it."""
    n_layers, n_gpus, _ = live.shape
    held = np.zeros((n_layers, n_gpus, model.n_experts), bool)
    np.put_along_axis(held, live.astype(np.int64), True, axis=2)
    on_node = held.reshape(n_layers, cluster.n_nodes, cluster.gpus_per_node, -1).any(2)
    on_node = np.repeat(on_node, cluster.gpus_per_node, axis=1)
    near = np.take_along_axis(on_node, target.astype(np.int64), axis=2)
    seconds = model.expert_bytes / 1e9 / np.where(near, cluster.intra_gb_s, cluster.inter_gb_s)
    return np.where(live == target, 0.0, seconds)


def _apply(live: npt.NDArray[np.int16], steps: list[Step], chosen: set[int]) -> npt.NDArray[np.int16]:
    placed = live.copy()
    for i in chosen:
        placed[steps[i].gpu, steps[i].slot] = steps[i].expert
    return placed


Steps = list[tuple[list[Step], list[set[int]]]]


def _by_gain(live: Placement, found: Steps, times: Callable[[Placement], npt.NDArray[np.float64]]) -> list[list[int]]:
    """Of each layer, its steps in the order of the time that they save per move when made alone."""
    start = times(live)
    gains = [np.full(len(steps), -np.inf) for steps, _ in found]
    for i in range(min(_STEPS_TRIED, max(len(steps) for steps, _ in found))):
        trial = live.copy()
        for l, (steps, needed) in enumerate(found):
            if i < len(steps):
                trial[l] = _apply(live[l], steps, needed[i])
        saved = start - times(trial)
        for l, (steps, needed) in enumerate(found):
            if i < len(steps):
                gains[l][i] = saved[l] / len(needed[i])
    return [np.argsort(-gain, kind="stable").tolist() for gain in gains]


class Prefix(NamedTuple):
    """The first steps of a layer."""

    moves: int
    time_us: float
    placement: npt.NDArray[np.int16]


def _prefixes(
    live: Placement, found: Steps, orders: list[list[int]], times: Callable[[Placement], npt.NDArray[np.float64]]
) -> list[list[Prefix]]:
    """Of each layer, the placements after 0, 1, 2, 3, 4, 6, 8, 12, 16 … of its steps in order, then after all."""
    longest = max(len(order) for order in orders)
    counts = sorted({0, 1, longest, *(n for k in range(1, 12) for n in (2**k, 3 * 2 ** (k - 1)) if n < longest)})
    states: list[list[Prefix]] = [[] for _ in found]
    for count in counts:
        trial, moves = live.copy(), []
        for l, (steps, needed) in enumerate(found):
            chosen = set().union(*(needed[i] for i in orders[l][:count]))
            trial[l] = _apply(live[l], steps, chosen)
            moves.append(len(chosen))
        for l, time_us in enumerate(times(trial).tolist()):
            if not states[l] or moves[l] > states[l][-1].moves:
                states[l].append(Prefix(moves[l], time_us, trial[l]))
    return states


def _choose(live: Placement, states: list[list[Prefix]], limit: Limit, received: npt.NDArray[np.float64]) -> Placement:
    """Continue with the layer that saves most per further move, as long as the limit allows it."""
    placement, at = live.copy(), [0] * len(states)
    moves, gpu_seconds = 0, np.zeros(live.shape[1])
    while True:
        options = []
        for l, prefixes in enumerate(states):
            here = prefixes[at[l]]
            for n in range(at[l] + 1, len(prefixes)):
                step = prefixes[n]
                slope = (here.time_us - step.time_us) / (step.moves - here.moves)
                if slope > 0:
                    options.append((-slope, l, n))
        for _, l, n in sorted(options):
            after = states[l][n]
            more = np.where(after.placement != placement[l], received[l], 0.0).sum(1)
            if limit.allows(moves + after.moves - states[l][at[l]].moves, gpu_seconds + more):
                moves += after.moves - states[l][at[l]].moves
                gpu_seconds += more
                placement[l], at[l] = after.placement, n
                break
        else:
            return placement
