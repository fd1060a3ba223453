"""The proven optimum of small instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from clustergym.moe_placement.kernels.state import MODE_DEDUP, MODE_STAY
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.simulator import Placement, Simulator, Window

MAX_BINARIES = 120
MAX_PLACEMENTS = 300_000


class Exact(Planner):
    """The placement with the least served + migration time on the observed window, proven.

    Without spare slots and with deduplicated copies it solves a mixed-integer program (HiGHS); otherwise it tries every
    placement. Refuses instances that are too large for either.

    Args:
        migration: whether fetching experts counts.
        seconds: limit for the program of one layer; an unproven answer is an error.

    ``optimum_us`` (L,) is the proven time of each layer of the last plan.
    """

    layers_alone = True
    small_only = True

    def __init__(self, simulator: Simulator, seed: int = 0, migration: bool = True, seconds: float = 120.0) -> None:
        super().__init__(simulator, seed)
        self.migration, self.seconds = migration, seconds
        self.optimum_us: npt.NDArray[np.float64] = np.zeros(0)

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        sim, window = self.simulator, history[-1]
        if sim.mode == MODE_STAY:
            raise ValueError(
                "the exact planner treats layers one by one, but with comm='stay' they depend on each other"
            )
        layers: list[npt.NDArray[np.int16]] = []
        times: list[float] = []
        for l in range(window.n_layers):
            one = Window(window.experts[l : l + 1], window.rows, window.home)
            if sim.mode == MODE_DEDUP and sim.n_gpus * sim.n_slots == sim.n_experts:
                slots, time = self._program(one, placement[l])
            else:
                slots, time = self._enumerate(one, placement[l : l + 1])
            layers.append(slots)
            times.append(time)
        self.optimum_us = np.array(times)
        return np.stack(layers).astype(np.int16)

    def _enumerate(self, window: Window, before: Placement) -> tuple[npt.NDArray[np.int16], float]:
        """Every way to fill the GPUs, tried exactly."""
        sim = self.simulator
        ways = sum(comb(sim.n_experts, size) for size in range(sim.n_slots + 1))
        if ways**sim.n_gpus > MAX_PLACEMENTS:
            raise ValueError(
                f"{sim.n_experts} experts in {sim.n_gpus} × {sim.n_slots} slots have about {ways**sim.n_gpus:.1e} placements: "
                f"the exact planner tries at most {MAX_PLACEMENTS}; use annealing, or as many slots as experts (a program then)"
            )
        best, least = before[0], np.inf
        for slots in _placements(sim.n_experts, sim.n_gpus, sim.n_slots):
            served = sim.evaluate(window, slots[None], before, check=False)
            time = float(served.time_us[0] + (served.migration_us[0] if self.migration else 0.0))
            if time < least:
                best, least = slots, time
        return best, least

    def _program(self, window: Window, before: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], float]:
        """One copy of each expert: served time is linear in who lies where, given which GPUs each kind of token visits."""
        sim = self.simulator
        experts, gpus, nodes = sim.n_experts, sim.n_gpus, sim.cluster.n_nodes
        if experts * gpus > MAX_BINARIES:
            raise ValueError(
                f"{experts} experts × {gpus} GPUs are {experts * gpus} binary choices: the exact planner takes at most {MAX_BINARIES}"
            )
        node_of, per_node = sim.network.node_of, sim.cluster.gpus_per_node
        ids = window.experts[0, window.rows]
        kinds = Counter(
            (int(h), frozenset(int(e) for e in row if e >= 0)) for h, row in zip(window.home, ids, strict=True)
        )
        load = window.loads(experts)[0]
        n_x, n_y, n_z = experts * gpus, len(kinds) * gpus, len(kinds) * nodes
        near, far, compute, moved = n_x + n_y + n_z, n_x + n_y + n_z + 1, n_x + n_y + n_z + 2, n_x + n_y + n_z + 3
        n_vars = moved + 1
        rows: list[dict[int, float]] = []
        lower: list[float] = []
        upper: list[float] = []

        def add(row: dict[int, float], low: float, high: float) -> None:
            rows.append(row)
            lower.append(low)
            upper.append(high)

        for e in range(experts):
            add({e * gpus + g: 1.0 for g in range(gpus)}, 1, 1)
        for g in range(gpus):
            add({e * gpus + g: 1.0 for e in range(experts)}, 0, sim.n_slots)
        sends = [
            [Counter[int]() for _ in range(gpus)] for _ in range(4)
        ]  # near out, near in, far out, far in: variable → copies
        for t, ((home, used), count) in enumerate(kinds.items()):
            for g in range(gpus):
                y = n_x + t * gpus + g
                for e in used:
                    add({y: 1.0, e * gpus + g: -1.0}, 0, np.inf)
                relay = home + (int(node_of[g]) - int(node_of[home])) * per_node
                if g != relay:
                    sends[0][relay][y] += count
                    sends[1][g][y] += count
            for n in range(nodes):
                if n == node_of[home]:
                    continue
                z = n_x + n_y + t * nodes + n
                for g in range(n * per_node, (n + 1) * per_node):
                    add({z: 1.0, n_x + t * gpus + g: -1.0}, 0, np.inf)
                sends[2][home][z] += count
                sends[3][home + (n - int(node_of[home])) * per_node][z] += count
        costs = sim.costs
        intra_us, inter_us = (
            costs.dispatch_intra_us + costs.combine_intra_us,
            costs.dispatch_inter_us + costs.combine_inter_us,
        )
        us = [intra_us, intra_us, inter_us, inter_us]
        for which, longest in ((0, near), (1, near), (2, far), (3, far)):
            for g in range(gpus):
                row = {var: -us[which] * count for var, count in sends[which][g].items()}
                add(row | {longest: 1.0}, 0, np.inf)
        held = np.zeros((experts, gpus), bool)
        for g in range(gpus):
            held[before[g][before[g] >= 0], g] = True
        near_copy = np.stack([held[:, node_of == n].any(1) for n in range(nodes)], axis=1)
        for g in range(gpus):
            time = {e * gpus + g: -(costs.pair_us * load[e] + costs.expert_us * (load[e] > 0)) for e in range(experts)}
            add(time | {compute: 1.0}, 0, np.inf)
            fetch = {
                e * gpus + g: -(costs.receive_intra_us if near_copy[e, node_of[g]] else costs.receive_inter_us)
                for e in range(experts)
                if not held[e, g]
            }
            add(fetch | {moved: 1.0}, 0, np.inf)
        matrix = csr_array(
            (
                [value for row in rows for value in row.values()],
                ([i for i, row in enumerate(rows) for _ in row], [var for row in rows for var in row]),
            ),
            shape=(len(rows), n_vars),
        )
        objective = np.zeros(n_vars)
        objective[[near, far, compute]] = 1.0
        objective[moved] = 1.0 if self.migration else 0.0
        top = np.full(n_vars, np.inf)
        top[: n_x + n_y + n_z] = 1.0
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, lower, upper),
            integrality=np.arange(n_vars) < n_x,
            bounds=Bounds(np.zeros(n_vars), top),
            options={"time_limit": self.seconds, "mip_rel_gap": 0.0},
        )
        if result.status != 0:
            raise ValueError(f"the exact planner did not prove an optimum within {self.seconds} s: {result.message}")
        x = np.rint(result.x[:n_x]).reshape(experts, gpus).astype(bool)
        slots = np.full((gpus, sim.n_slots), -1, np.int16)
        for g in range(gpus):
            found = np.flatnonzero(x[:, g])
            slots[g, : len(found)] = found
        return slots, float(result.fun + costs.dispatch_us + costs.combine_us + costs.kernel_us)


def _placements(n_experts: int, n_gpus: int, n_slots: int) -> Iterator[npt.NDArray[np.int16]]:
    """Every (G, S) placement that covers all experts, up to the order of slots."""
    fillings = [list(c) for size in range(n_slots + 1) for c in combinations(range(n_experts), size)]
    padded = np.array([filling + [-1] * (n_slots - len(filling)) for filling in fillings], dtype=np.int16)
    masks = [sum(1 << e for e in filling) for filling in fillings]
    full = (1 << n_experts) - 1

    def fill(g: int, covered: int, chosen: list[int]) -> Iterator[npt.NDArray[np.int16]]:
        if g == n_gpus:
            if covered == full:
                yield padded[chosen]
            return
        # Experts still missing must fit into the GPUs that are left.
        for i, mask in enumerate(masks):
            if (full & ~(covered | mask)).bit_count() <= (n_gpus - g - 1) * n_slots:
                yield from fill(g + 1, covered | mask, [*chosen, i])

    yield from fill(0, 0, [])
