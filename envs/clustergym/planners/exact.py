"""The proven optimum of small instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.exact_nodes import NodeSearch, can_search

MAX_BINARIES = 120
MAX_PLACEMENTS = 300_000
BATCH = 1024


@dataclass(eq=False, kw_only=True)
class Exact(Planner):
    """The placement with the least served and migration time on the observed passes, proven.

    Without spare slots it searches node by node if there are at most two nodes of a few GPUs (16 experts on 2 × 4 GPUs
    take about 5 s per layer), and with deduplicated copies it solves a mixed-integer program (HiGHS). Otherwise it
    tries every placement. It refuses instances that are too large. ``optimum_us`` (L,) is the proven time of each layer
    of the last plan.
    """

    layers_alone = True
    small_only = True

    migration: bool = True
    """Whether migration time counts."""
    seconds: float = 120.0
    """Time limit for the program of one layer. If it ends without a proof, the planner raises an error."""

    def __post_init__(self) -> None:
        self.optimum_us: npt.NDArray[np.float64] = np.zeros(0)

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        sim, interval = self.simulator, history[-1]
        if sim.stay:
            raise ValueError(
                "the exact planner plans each layer on its own, but with transport 'stay' layers depend on each other"
            )
        one_copy = sim.profile.transport == "dedup" and sim.n_gpus * sim.n_slots == sim.n_experts
        solve = self._program if one_copy and sim.migration == "blocking" else self._enumerate
        if can_search(sim):
            solve = self._search
        solutions = [
            solve(Interval(interval.experts[l : l + 1], interval.rows, interval.rank_start), placement[l])
            for l in range(interval.n_layers)
        ]
        self.optimum_us = np.array([time_us for _, time_us in solutions])
        return np.stack([slots for slots, _ in solutions]).astype(np.int16)

    def _search(self, interval: Interval, before: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], float]:
        """Search node by node, for placements that are better than one that annealing finds."""
        sim, start = self.simulator, before[None]
        found = Anneal(sim, norm=0, mix_tokens=0).plan([interval], start)
        served = sim.evaluate(interval, found, start)
        found_us = float((served.total_us if self.migration else served.time_us)[0])
        best, best_us = NodeSearch(sim, interval, before, self.migration).run(found_us)
        return (found[0], found_us) if best is None else (best, best_us)

    def _enumerate(self, interval: Interval, before: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], float]:
        """Simulate every placement."""
        sim = self.simulator
        fillings = sum(comb(sim.n_experts, size) for size in range(sim.n_slots + 1))
        if fillings**sim.n_gpus > MAX_PLACEMENTS:
            raise ValueError(
                f"{sim.n_experts} experts in {sim.n_gpus} × {sim.n_slots} slots have about "
                f"{fillings**sim.n_gpus:.1e} placements: the exact planner tries at most {MAX_PLACEMENTS}; "
                "use annealing, or as many slots as experts (then it solves a program)"
            )
        best, least = before, np.inf
        every = _placements(sim.n_experts, sim.n_gpus, sim.n_slots)
        # Many at once: each placement is a layer of its own with the same traffic.
        while some := list(islice(every, BATCH)):
            plans, n = np.stack(some), len(some)
            same = Interval(np.repeat(interval.experts, n, axis=0), interval.rows, interval.rank_start)
            served = sim.evaluate(same, plans, np.repeat(before[None], n, axis=0), check=False)
            times_us = served.total_us if self.migration else served.time_us
            i = int(times_us.argmin())
            if times_us[i] < least:
                best, least = plans[i], float(times_us[i])
        return best, least

    def _program(self, interval: Interval, before: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], float]:
        """Solve a mixed-integer program for one copy per expert.

        Tokens of one pass with the same rank and the same experts are one kind. Binary variables: expert e is on GPU
        g; tokens of kind k visit GPU g; tokens of kind k visit another node n. Continuous variables: for each pass the
        times of the busiest GPU for copies inside nodes, for copies between nodes and for compute; and for migration.
        """
        sim = self.simulator
        experts, gpus, nodes, passes = sim.n_experts, sim.n_gpus, sim.cluster.n_nodes, interval.n_passes
        if experts * gpus > MAX_BINARIES:
            raise ValueError(
                f"{experts} experts × {gpus} GPUs are {experts * gpus} binary choices: the exact planner takes at most "
                f"{MAX_BINARIES}"
            )
        costs, node_of = sim.interval_costs(interval), sim.topology.node_of.tolist()
        per_node = sim.cluster.gpus_per_node
        kinds: Counter[tuple[int, int, frozenset[int]]] = Counter()
        for p, (rows, starts) in enumerate(zip(interval.rows, interval.rank_start, strict=True)):
            ranks = np.repeat(np.arange(gpus), np.diff(starts)).tolist()
            for rank, used in zip(ranks, interval.experts[0, rows].tolist(), strict=True):
                kinds[p, rank, frozenset(e for e in used if e >= 0)] += 1
        loads = interval.pass_loads(experts)[:, 0]
        n_placed, n_binary = experts * gpus, experts * gpus + len(kinds) * (gpus + nodes)
        intra, inter, compute = (range(n_binary + i * passes, n_binary + (i + 1) * passes) for i in range(3))
        migration = n_binary + 3 * passes

        def placed(e: int, g: int) -> int:
            return e * gpus + g

        def visits_gpu(k: int, g: int) -> int:
            return n_placed + k * gpus + g

        def visits_node(k: int, n: int) -> int:
            return n_placed + len(kinds) * gpus + k * nodes + n

        program = _Constraints()
        for e in range(experts):
            program.add({placed(e, g): 1.0 for g in range(gpus)}, 1, 1)
        for g in range(gpus):
            program.add({placed(e, g): 1.0 for e in range(experts)}, 0, sim.n_slots)
        # Copies that each GPU sends or receives, and tokens that visit it, in each pass: variable → number of tokens.
        intra_sent, intra_received, inter_sent, inter_received, visits = (
            [[Counter[int]() for _ in range(gpus)] for _ in range(passes)] for _ in range(5)
        )
        for k, ((p, home, used), tokens) in enumerate(kinds.items()):
            for g in range(gpus):
                for e in used:
                    program.add({visits_gpu(k, g): 1.0, placed(e, g): -1.0}, 0)
                visits[p][g][visits_gpu(k, g)] += tokens
                relay = home + (node_of[g] - node_of[home]) * per_node
                if g != relay:
                    intra_sent[p][relay][visits_gpu(k, g)] += tokens
                    intra_received[p][g][visits_gpu(k, g)] += tokens
            for n in range(nodes):
                if n == node_of[home]:
                    continue
                for g in range(n * per_node, (n + 1) * per_node):
                    program.add({visits_node(k, n): 1.0, visits_gpu(k, g): -1.0}, 0)
                inter_sent[p][home][visits_node(k, n)] += tokens
                inter_received[p][home + (n - node_of[home]) * per_node][visits_node(k, n)] += tokens
        intra_us = costs.dispatch_intra_us + costs.combine_intra_us
        inter_us = costs.dispatch_inter_us + costs.combine_inter_us
        for p in range(passes):
            for copies, copy_us, longest in (
                (intra_sent[p], intra_us, intra[p]), (intra_received[p], intra_us, intra[p]),
                (inter_sent[p], inter_us, inter[p]), (inter_received[p], inter_us, inter[p]),
            ):  # fmt: skip
                for of_gpu in copies:
                    row = {variable: -copy_us * tokens for variable, tokens in of_gpu.items()}
                    program.add(row | {longest: 1.0}, 0)
            program.add({compute[p]: 1.0}, costs.kernel_floor_us - costs.kernel_us)
            blocks = np.ceil(loads[p] / costs.block_tokens)
            work = costs.pair_us * loads[p] + costs.expert_us * (loads[p] > 0) + costs.block_us * blocks
            for g in range(gpus):
                row = {placed(e, g): -work[e] for e in range(experts)}
                row |= {variable: -costs.token_us * tokens for variable, tokens in visits[p][g].items()}
                program.add(row | {compute[p]: 1.0}, 0)
        held = np.zeros((experts, gpus), bool)
        for g in range(gpus):
            held[before[g][before[g] >= 0], g] = True
        held_by_node = np.asarray(held.reshape(experts, nodes, per_node).any(2))
        for g in range(gpus):
            fetch = {
                placed(e, g): -(costs.receive_intra_us if held_by_node[e, node_of[g]] else costs.receive_inter_us)
                for e in range(experts)
                if not held[e, g]
            }
            program.add(fetch | {migration: 1.0}, 0)
        objective = np.zeros(n_binary + 3 * passes + 1)
        objective[n_binary:migration] = 1.0 / passes
        objective[migration] = 1.0 if self.migration else 0.0
        upper = np.full(len(objective), np.inf)
        upper[:n_binary] = 1.0
        result = milp(
            objective,
            constraints=program.build(len(objective)),
            # The visits are integers whenever the placement is.
            integrality=np.arange(len(objective)) < n_placed,
            bounds=Bounds(np.zeros(len(objective)), upper),
            options={"time_limit": self.seconds, "mip_rel_gap": 0.0},
        )
        if result.status != 0:
            raise ValueError(f"the exact planner did not prove an optimum within {self.seconds} s: {result.message}")
        chosen = np.rint(result.x[:n_placed]).reshape(experts, gpus).astype(bool)
        slots = np.full((gpus, sim.n_slots), -1, np.int16)
        for g in range(gpus):
            found = np.flatnonzero(chosen[:, g])
            slots[g, : len(found)] = found
        return slots, float(result.fun + costs.dispatch_us + costs.combine_us + costs.kernel_us)


class _Constraints:
    """Rows of a sparse matrix with bounds."""

    def __init__(self) -> None:
        self.rows: list[dict[int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, row: dict[int, float], lower: float, upper: float = np.inf) -> None:
        self.rows.append(row)
        self.lower.append(lower)
        self.upper.append(upper)

    def build(self, n_variables: int) -> LinearConstraint:
        values = [value for row in self.rows for value in row.values()]
        where = (
            [i for i, row in enumerate(self.rows) for _ in row],
            [variable for row in self.rows for variable in row],
        )
        matrix = csr_array((values, where), shape=(len(self.rows), n_variables))
        return LinearConstraint(matrix, self.lower, self.upper)


def _placements(n_experts: int, n_gpus: int, n_slots: int) -> Iterator[npt.NDArray[np.int16]]:
    """Every (G, S) placement that covers all experts, ignoring the order of slots."""
    fillings = [list(c) for size in range(n_slots + 1) for c in combinations(range(n_experts), size)]
    padded = np.array([filling + [-1] * (n_slots - len(filling)) for filling in fillings], dtype=np.int16)
    masks = [sum(1 << e for e in filling) for filling in fillings]
    full = (1 << n_experts) - 1

    def fill(g: int, covered: int, chosen: list[int]) -> Iterator[npt.NDArray[np.int16]]:
        if g == n_gpus:
            if covered == full:
                yield padded[chosen]
            return
        for i, mask in enumerate(masks):
            # Experts that are still missing must fit into the remaining GPUs.
            if (full & ~(covered | mask)).bit_count() <= (n_gpus - g - 1) * n_slots:
                yield from fill(g + 1, covered | mask, [*chosen, i])

    yield from fill(0, 0, [])
