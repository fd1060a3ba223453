"""Simulated annealing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import config

from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.planners.kernels import anneal as kernels
from clustergym.moe_placement.planners.kernels.launch import Objective, over_layers
from clustergym.moe_placement.planners.kernels.proposals import make_guide
from clustergym.moe_placement.planners.kernels.trial import allocate, prepare
from clustergym.moe_placement.planners.search import Search
from clustergym.moe_placement.profiles import DEDUP
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval

SHORTEST_SECONDS = 1e-4
LAYERS_BETWEEN_STOPS = 16
# Measured with benchmarks/search_curve.py.
_FEWEST_TOKENS, _TOKENS_IN_20_MS = 1024, 4096


@dataclass(eq=False, kw_only=True)
class Anneal(Search):
    """Simulated annealing of every layer, migration included, from the current placement, EPLB's or the static one."""

    takes_seconds = True

    norm: int = 8
    """See :class:`Search`. The 8-norm generalizes better to the next passes than the true time."""
    mix_tokens: int = 16384
    """See :class:`Search`; less if ``seconds`` are few. 0 follows the chance of single passes, which the next ones do
    not share."""
    iterations: int = 20000
    """Number of steps per layer."""
    seconds: float | None = None
    """Time budget for all layers together, instead of ``iterations``. The result then depends on the machine."""
    heat: tuple[float, float] = (1e-3, 1e-5)
    """First and last temperature, as shares of the time of the layer."""
    shares: tuple[float, float, float, float] = (0.3, 0.35, 0.2, 0.0)
    """Share of the steps that replace a spare replica, that move an expert next to one that the same token uses, and
    that move an expert off the busiest GPU of a pass; the others swap random slots. Last: the share of the first kind
    that empties a slot instead; engines need all slots filled."""
    stop: Callable[[], bool] = lambda: False
    """Asked between parts of the search: True ends it with the best placement so far."""
    choices: int | None = None
    """A step tries the best of so many random moves by an estimate. By default 16 where a trial counts tokens
    (deduplicated transport), else 1, because a trial then costs as little as the estimate."""
    restart: bool = True
    """Start each layer from EPLB's or the static placement if that is better, migration included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1 or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(
                "annealing needs at least 1 iteration and more than 0 seconds, "
                f"found {self.iterations} and {self.seconds}"
            )
        if min(self.heat) <= 0:
            raise ValueError(f"heat is {self.heat}: both temperatures must be more than 0")
        if self.choices is None:
            self.choices = 16 if self.simulator.topology.transport == DEDUP else 1
        if self.choices < 1:
            raise ValueError(f"choices is {self.choices}: expected at least 1")

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        began = time.perf_counter()
        interval = self.observe(history, self.tokens_for(len(placement)))
        sim = self.simulator.count(interval, placement)
        objective = self.objective(interval, sim)
        # With transport "stay" the time of a layer depends on the layers before it: layers cannot choose on their own.
        if self.restart and not self.simulator.stay:
            eplb = EPLB(self.simulator)
            least, start = self.objectives(sim, objective), placement
            for other in (self.simulator.static(interval.n_layers), eplb.pack(eplb.loads(interval))):
                found = self.objectives(self.simulator.count(interval, other, placement), objective)
                start = np.where((found < least)[:, None, None], other, start)
                least = np.minimum(found, least)
            sim = self.simulator.count(interval, start, placement)
        left = None if self.seconds is None else max(SHORTEST_SECONDS, self.seconds - (time.perf_counter() - began))
        return self.refine(interval, sim, objective, left)

    def tokens_for(self, layers: int) -> int:
        """Tokens of the mixed pass: with little time, few tokens and more steps are better."""
        if self.seconds is None:
            return self.mix_tokens
        ms = 1e3 * self.seconds / layers * min(config.NUMBA_NUM_THREADS, layers)
        return min(self.mix_tokens, max(_FEWEST_TOKENS, int(_TOKENS_IN_20_MS * math.sqrt(ms / 20))))

    def objectives(self, sim: SimulationState, objective: Objective) -> npt.NDArray[np.float64]:
        """(L,) objective of each layer in the state ``sim``."""
        found = np.empty(len(sim.slots))
        kernels.objectives(sim, objective, found)
        return found

    def refine(
        self,
        interval: Interval,
        sim: SimulationState,
        objective: Objective,
        seconds: float | None = None,
    ) -> Placement:
        """Anneal from the state ``sim``."""
        layers = interval.n_layers
        best, best_cost, key = sim.slots.copy(), np.full(layers, np.inf), self.random_keys(layers)
        scratch = allocate(sim, self.simulator.topology)
        over_layers(prepare, 0, layers, scratch, sim, interval.experts, self.simulator.topology)
        shares = np.array(self.shares)
        assert self.choices is not None
        _, n_gpus, n_slots = sim.slots.shape
        n_experts, n_nodes, top_k = self.simulator.n_experts, self.simulator.cluster.n_nodes, interval.experts.shape[2]
        guide = make_guide(self.choices, layers, top_k, n_experts, n_gpus, n_slots, n_nodes)
        over_layers(kernels.prepare_guides, 0, layers, sim, guide, interval.experts, objective)

        def run(first: int, last: int, heat: tuple[float, float], iterations: int) -> None:
            kernels.anneal(
                first,
                last,
                sim,
                scratch,
                objective,
                key,
                np.array(heat),
                iterations,
                best,
                best_cost,
                shares,
                guide,
            )

        def search(first: int, last: int) -> None:
            if seconds is None:
                # In parts, so that a stop is noticed. Layers that are not reached keep their first placement.
                for part in range(first, last, LAYERS_BETWEEN_STOPS):
                    if not self.stop():
                        run(part, min(part + LAYERS_BETWEEN_STOPS, last), self.heat, self.iterations)
                return
            budget = seconds * (last - first) / layers
            began, done, chunk = time.perf_counter(), 0.0, 50
            low, high = np.log(self.heat[1]), np.log(self.heat[0])
            while done < 1 and not self.stop():
                before = time.perf_counter()
                heat = float(np.exp(high + (low - high) * done))
                run(first, last, (heat, heat), chunk)
                now = time.perf_counter()
                done = (now - began) / budget
                # Each chunk should take about 2 % of the budget.
                chunk = max(10, min(1000, int(chunk * 0.02 * budget / max(now - before, 1e-6))))

        self.each_layer(interval, sim, search, best)
        return best
