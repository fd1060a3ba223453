"""Planners that search on the exact incremental simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import one_of
from clustergym.moe_placement.kernels.counting import count_window
from clustergym.moe_placement.kernels.replicas import write_replicas
from clustergym.moe_placement.kernels.state import MODE_STAY, SimulationState
from clustergym.moe_placement.planners import kernels
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.simulator import Placement, Simulator, Window, norm_log2

HOMES = ("served", "even")


def evenly_dealt(window: Window, n_gpus: int) -> Window:
    """The same tokens, dealt to the GPUs one by one."""
    return Window(window.experts, window.rows, (np.arange(window.n_tokens) % n_gpus).astype(np.int16))


class _Search(Planner):
    """Shared by the searches: count the observed traffic once, then work on all layers.

    Args:
        norm: 0 plans on the true time, set by the busiest GPU; p = 2 … 64 on the smooth p-norm over GPUs.
        windows: how many of the last windows to plan on, joined.
        homes: ``served`` plans on the tokens where they lived; ``even`` deals them to the GPUs one by one, because where a
            sequence lives is chance that the next window does not repeat.
    """

    def __init__(
        self, simulator: Simulator, seed: int = 0, norm: int = 0, windows: int = 1, homes: str = "served"
    ) -> None:
        super().__init__(simulator, seed)
        if windows < 1:
            raise ValueError(f"windows is {windows}: expected at least 1")
        one_of(homes, HOMES, "homes")
        self.norm_log2, self.windows, self.homes = norm_log2(norm), windows, homes
        self.calls = 0

    def reset(self) -> None:
        self.calls = 0

    def observe(
        self, history: Sequence[Window], placement: Placement, tokens: int | None
    ) -> tuple[Window, SimulationState, float]:
        """The joined window, its counts, and the weight of a token in it."""
        window = Window.join(history[-self.windows :]) if self.windows > 1 else history[-1]
        if self.homes == "even":
            window = evenly_dealt(window, self.simulator.n_gpus)
        scale = (tokens or history[-1].n_tokens) / window.n_tokens
        return window, self.simulator.count(window, placement), scale

    def keys(self, layers: int) -> npt.NDArray[np.int64]:
        """(L, 2) generators, other ones at each call."""
        self.calls += 1
        sequence = np.random.SeedSequence([self.seed, self.calls])
        return np.stack(
            [sequence.generate_state(layers).astype(np.int64) & 0x7FFFFFFF, np.zeros(layers, np.int64)], axis=1
        )

    def each_layer(
        self, window: Window, sim: SimulationState, search: Callable[[int, int], None], chosen: Placement | None = None
    ) -> None:
        """Run ``search(first, last)`` over the layers; where a layer depends on the one before, one after the other.

        ``chosen`` is where the search leaves its placement, if not in ``sim.slots``.
        """
        simulator = self.simulator
        if simulator.mode != MODE_STAY:
            search(0, window.n_layers)
            return
        for b in range(window.n_layers):
            if b:
                sim.origin[b] = sim.destination[b - 1]
                count_window(sim, b, 0, window.experts, b, simulator.network)
            search(b, b + 1)
            if chosen is not None:
                # The search ends elsewhere than at its best; the next layer starts from where the best leaves the tokens.
                sim.slots[b] = chosen[b]
                write_replicas(sim, b, simulator.network)
                count_window(sim, b, 0, window.experts, b, simulator.network)


class Anneal(_Search):
    """Simulated annealing of every layer, migration counted, from the current placement or, where that is better, the static one.

    Args:
        norm, windows, homes: see above; the 16-norm generalises better to the next window than the true time.
        migration_weight: weight of the migration against the served time; below 1 because what a move saves outlives the
            window that pays for it.
        iterations: a layer.
        seconds: time budget in place of ``iterations`` for all layers together (not reproducible to the last bit).
        heat: temperature at the beginning and the end, as shares of the layer's time.
        restart: begin with the static placement where it is better, the way there counted. A placement that sends much between nodes is
            a long way from a good one: few of the moves that lead there pay by themselves.
    """

    takes_seconds = True

    def __init__(
        self,
        simulator: Simulator,
        seed: int = 0,
        norm: int = 16,
        windows: int = 1,
        iterations: int = 6000,
        seconds: float | None = None,
        heat: tuple[float, float] = (3e-4, 1e-5),
        migration_weight: float = 1.0,
        homes: str = "served",
        restart: bool = True,
    ) -> None:
        super().__init__(simulator, seed, norm, windows, homes)
        if iterations < 1 or (seconds is not None and seconds <= 0):
            raise ValueError(
                f"annealing needs at least 1 iteration and more than 0 seconds, found {iterations} and {seconds}"
            )
        if min(heat) <= 0:
            raise ValueError(f"heat is {heat}: both temperatures must be more than 0")
        self.iterations, self.seconds, self.heat, self.migration_weight = iterations, seconds, heat, migration_weight
        self.restart = restart

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        began = time.perf_counter()
        window, sim, scale = self.observe(history, placement, tokens)
        # With comm="stay" a layer's time hangs on the layers before it: there is no choosing layer by layer.
        if self.restart and self.simulator.mode != MODE_STAY:
            static = self.simulator.static(window.n_layers)
            other = self.simulator.count(window, static, before=placement)
            better = self.costs(other, scale) < self.costs(sim, scale)
            if better.any():
                start = np.where(better[:, None, None], static, placement)
                sim = self.simulator.count(window, start, before=placement)
        left = None if self.seconds is None else max(1e-4, self.seconds - (time.perf_counter() - began))
        return self.refine(window, sim, scale, left)

    def costs(self, sim: SimulationState, scale: float) -> npt.NDArray[np.float64]:
        """(L,) of what is to be made small, as ``sim`` stands."""
        found = np.empty(len(sim.slots))
        simulator = self.simulator
        kernels.costs(
            0, len(found), sim, simulator.costs, simulator.network, self.norm_log2, scale,
            self.migration_weight, found,
        )  # fmt: skip
        return found

    def refine(
        self,
        window: Window,
        sim: SimulationState,
        scale: float,
        seconds: float | None = None,
        prior: npt.NDArray[np.float64] | None = None,
        guide: float = 0.0,
    ) -> Placement:
        """Anneal from where ``sim`` stands; a share ``guide`` of the steps concerns experts drawn from ``prior`` (L, E)."""
        best, best_cost = sim.slots.copy(), np.full(window.n_layers, np.inf)
        key = self.keys(window.n_layers)
        weights = np.ones((window.n_layers, 1)) if prior is None else prior
        cumulative = np.cumsum(weights, axis=1) / weights.sum(1, keepdims=True)

        def run(first: int, last: int, heat: tuple[float, float], iterations: int) -> None:
            kernels.anneal(
                first, last, sim, self.simulator.costs, self.simulator.network, self.norm_log2, scale,
                self.migration_weight, key, np.array(heat), iterations, best, best_cost, cumulative, guide,
            )  # fmt: skip

        def search(first: int, last: int) -> None:
            if seconds is None:
                run(first, last, self.heat, self.iterations)
                return
            budget = seconds * (last - first) / window.n_layers
            began, done, chunk = time.perf_counter(), 0.0, 50
            low, high = np.log(self.heat[1]), np.log(self.heat[0])
            while done < 1:
                before = time.perf_counter()
                heat = float(np.exp(high + (low - high) * done))
                run(first, last, (heat, heat), chunk)
                now = time.perf_counter()
                done = (now - began) / budget
                chunk = max(10, min(1000, int(chunk * 0.02 * budget / max(now - before, 1e-6))))

        self.each_layer(window, sim, search, chosen=best)
        return best


class Bottleneck(_Search):
    """The exact best operation on experts of the busiest GPU, a few times a layer.

    Args:
        operations: at most, a layer and window.
        candidates: experts tried for each operation: the busiest GPU's, heaviest first, then random ones.
            0 tries one random expert and ignores the bottleneck.
    """

    starts_from_eplb = True

    def __init__(
        self,
        simulator: Simulator,
        seed: int = 0,
        norm: int = 0,
        windows: int = 1,
        operations: int = 8,
        candidates: int = 1,
    ) -> None:
        super().__init__(simulator, seed, norm, windows)
        self.operations, self.candidates = operations, candidates

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        window, sim, scale = self.observe(history, placement, tokens)
        layers = window.n_layers
        # Looking ahead counts every token once; their weight against migration and active experts goes into the costs.
        costs = self.simulator.costs.weigh_tokens(scale)
        chosen = np.zeros((layers, self.candidates + self.simulator.n_slots + 1), np.int64)
        ahead = np.zeros((layers, 3 * self.simulator.n_gpus))
        key = self.keys(layers)

        def search(first: int, last: int) -> None:
            kernels.bottleneck(
                first, last, sim, costs, self.simulator.network, self.norm_log2,
                self.operations, self.candidates, key, chosen, ahead,
            )  # fmt: skip

        self.each_layer(window, sim, search)
        return sim.slots.copy()


class SwapGreedy(_Search):
    """The best of ALL swaps and moves, each tried exactly, a few times a layer. Slow and strong.

    Args:
        operations: at most, a layer and window.
    """

    starts_from_eplb = True

    def __init__(
        self, simulator: Simulator, seed: int = 0, norm: int = 0, windows: int = 1, operations: int = 8
    ) -> None:
        super().__init__(simulator, seed, norm, windows)
        self.operations = operations

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        window, sim, scale = self.observe(history, placement, tokens)

        def search(first: int, last: int) -> None:
            kernels.swap_greedy(
                first, last, sim, self.simulator.costs, self.simulator.network, self.norm_log2, scale,
                self.operations,
            )  # fmt: skip

        self.each_layer(window, sim, search)
        return sim.slots.copy()


class Oracle(Planner):
    """Annealing on the window to come, migration not counted: what hindsight would give. Not a proven bound.

    From both the current placement and EPLB on that window, first on the smooth norm, then on the true time.
    """

    needs_future = True

    def __init__(self, simulator: Simulator, seed: int = 0, iterations: int = 12000) -> None:
        super().__init__(simulator, seed)
        self.stages = [
            Anneal(simulator, seed, norm=16, heat=(2e-3, 3e-5), iterations=iterations, migration_weight=0.0),
            Anneal(simulator, seed + 1, norm=0, heat=(3e-4, 1e-5), iterations=iterations, migration_weight=0.0),
        ]
        self.eplb = EPLB(simulator)

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        best, least = placement, np.full(len(placement), np.inf)
        for start in (placement, self.eplb.pack(self.eplb.loads(history[-1]))):
            plan = start
            for stage in self.stages:
                plan = stage.plan(history[-1:], plan, tokens)
            times = self.simulator.evaluate(history[-1], plan).time_us
            if self.simulator.mode == MODE_STAY:  # layers depend on each other: a plan is taken whole
                better = np.full(len(best), times.sum() < least.sum())
            else:
                better = times < least
            best, least = np.where(better[:, None, None], plan, best), np.where(better, times, least)
        return best.astype(np.int16)
