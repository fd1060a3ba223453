"""Simulated annealing: first on an estimate of the time that does not look at tokens, then on the exact time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import config

from clustergym.common.choices import index_of_choice
from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.streams import Interval, Traffic
from clustergym.planners.eplb import EPLB
from clustergym.planners.kernels import anneal as kernels
from clustergym.planners.kernels import surrogate
from clustergym.planners.kernels.counts import add_topics, count_tokens, deviations
from clustergym.planners.kernels.launch import Objective, over_layers
from clustergym.planners.kernels.proposals import SAMPLE, draw_samples
from clustergym.planners.kernels.surrogate_steps import anneal_layers
from clustergym.planners.kernels.trial import allocate, prepare
from clustergym.planners.search import Search
from clustergym.planners.survive import COPIES, survivable
from clustergym.planners.topics import scenarios
from clustergym.traces.token_trace import TokenTrace

SHORTEST_SECONDS = 1e-4
LAYERS_BETWEEN_STOPS = 16
# Measured with benchmarks/placement/search_curve.py.
_FEWEST_TOKENS, _TOKENS_IN_20_MS = 1024, 4096
_ESTIMATE_TOKENS, _FEWEST_ESTIMATE_STEPS = 16384, 1000
_SCENARIOS, _MOST_VARYING = 8, 4
_ESTIMATE_SHARE = 0.8
"""Share of the time budget for the estimate, unless there is too little time for exact steps."""
_LEAST_EXACT_MS, _LEARNED_EXACT_MS = 30.0, 150.0
"""With less time per layer and core, all of it is spent on the estimate: without past traffic, and with it. The
estimate has all of the past traffic, the exact steps a few tokens of it."""
_HURRY_MS, _LEARNED_HURRY_MS = 8.0, 20.0
"""With at most so much time per layer and core, the estimate is made from fewer tokens: without past traffic, and with
it. With it, no topics are looked for in the interval either."""
_PAST_PLAN_STEPS, _PAST_PLAN_STEPS_PER_PLACE = 200_000, 20
"""Steps per layer of the plan for past traffic: at least so many, and so many per expert and GPU."""
_WARM = 0.3
"""Share of the first temperature of the estimate for searches that have a plan for past traffic: a high temperature
undoes it. Without such a plan, a lower temperature does not help."""
_LEAST_CHUNK_S = 5e-4
"""Shortest time between two looks at the clock: threads that start and end cost time, too."""


class OtherPhase(NamedTuple):
    """Another phase that the same placement serves."""

    simulator: Simulator
    tokens: int
    """Of a pass."""
    passes: float
    """Passes of it per pass of the planner's own profile."""


@dataclass(eq=False, kw_only=True)
class Anneal(Search):
    """Simulated annealing of every layer, migration included.

    It starts from the best of the current placement, EPLB's, the static one and, if it has learned, its plan for past
    traffic.

    Most steps are made on an estimate from loads and co-activation (:mod:`.kernels.surrogate`), the last ones on the
    exact time of the observed tokens. With dispatch ``lp`` there is no estimate. If the placement serves several
    phases, all steps are made on the estimate, which has the sum of their times.
    """

    takes_seconds = True

    estimate_steps: int = 40000
    """Number of steps per layer on the estimate. 0 anneals on the exact time only."""
    iterations: int = 4000
    """Number of exact steps per layer."""
    seconds: float | None = None
    """Time budget for all layers together, instead of numbers of steps. The result then depends on the machine."""
    heat: tuple[float, float] = (1e-3, 1e-5)
    """First and last temperature of the exact steps, as shares of the time of the layer. After steps on the estimate
    they begin with a tenth."""
    estimate_heat: tuple[float, float] = (3e-4, 3e-6)
    """The same for the steps on the estimate. Searches with a plan for past traffic begin with 0.3 of the first one."""
    shares: tuple[float, float, float, float] = (0.3, 0.35, 0.2, 0.0)
    """Share of the exact steps that replace a spare replica, that move an expert next to one that the same token uses,
    and that move an expert off the busiest GPU of a pass; the others swap random slots. Last: the share of the first
    kind that empties a slot instead; engines need all slots filled."""
    other_phases: Sequence[OtherPhase] = ()
    """Other phases that the placement serves: the search minimizes the time of all passes together."""
    survive: str | None = None
    """Keep a copy of every expert whatever single GPU (``rank``) or ``node`` is lost. All steps are then made on the
    estimate."""
    stop: Callable[[], bool] = lambda: False
    """Asked between parts of the search: True ends it with the best placement so far."""
    restart: bool = True
    """Start each layer from another placement than the current one if that is better, migration included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1 or (self.seconds is not None and self.seconds <= 0) or self.estimate_steps < 0:
            raise ValueError(
                "annealing needs at least 1 iteration, 0 or more steps on the estimate and more than 0 seconds, "
                f"found {self.iterations}, {self.estimate_steps} and {self.seconds}"
            )
        if min(*self.heat, *self.estimate_heat) <= 0:
            raise ValueError(f"heat is {self.heat}, {self.estimate_heat}: all temperatures must be more than 0")
        self.shape: tuple[float, ...] = surrogate.DEFAULT_SHAPE
        if self.survive is not None:
            index_of_choice(self.survive, ("rank", "node"), "survive")
            self.shape = (*self.shape[: surrogate.COPIES], float(COPIES), float(self.survive == "node"))
        served = (self.simulator, *(phase.simulator for phase in self.other_phases))
        if len(served) > 1 and "lp" in {simulator.profile.dispatch for simulator in served}:
            raise ValueError("there is no estimate for dispatch 'lp', so it cannot be one of several phases")
        if self.survive is not None and (self.estimate_steps == 0 or self.simulator.profile.dispatch == "lp"):
            raise ValueError("survive needs the estimate: it cannot be had with dispatch 'lp' or estimate_steps=0")
        self.past_plan: Placement | None = None
        self.estimates = self.estimate_steps > 0 and self.simulator.profile.dispatch != "lp"

    def learn(self, trace: TokenTrace) -> None:
        """Learn the topics of past traffic, and make a plan for all of it, which later searches may start from."""
        super().learn(trace)
        self.past_plan = self._plan_for_past_traffic()

    def _plan_for_past_traffic(self) -> Placement | None:
        """A plan for the past traffic by a long search, migration left out."""
        if self.traffic is None or not self.estimates:
            return None
        simulator = self.simulator
        steps = max(_PAST_PLAN_STEPS, _PAST_PLAN_STEPS_PER_PLACE * simulator.n_experts * simulator.n_gpus)
        search = Anneal(
            simulator, self.seed, norm=self.norm, robustness=self.mixture_std, migration_weight=0.0,
            estimate_steps=steps, other_phases=self.other_phases, survive=self.survive, stop=self.stop,
        )  # fmt: skip
        pass_tokens = Traffic(simulator.profile.phase).sizes[1] * simulator.n_gpus
        interval = self.traffic.all_topics(simulator.n_gpus, _ESTIMATE_TOKENS, pass_tokens)
        return search.search_estimate([interval], simulator.static(interval.n_layers), topic=self.traffic.topic)

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        began, core_ms = time.perf_counter(), self.core_ms(len(placement))
        topic = self.topics(history, hurry=core_ms <= _LEARNED_HURRY_MS)
        least_ms = _LEAST_EXACT_MS if self.traffic is None else _LEARNED_EXACT_MS
        short = core_ms < least_ms or bool(self.other_phases) or self.survive is not None
        starts = []
        if self.estimates:
            elapsed_s, share = time.perf_counter() - began, 1.0 if short else _ESTIMATE_SHARE
            estimated = self.search_estimate(history, placement, share, topic, elapsed_s)
            if short:
                return estimated
            starts.append(estimated)
        interval = self.observe(history, self.tokens_for(len(placement)))
        if self.mixture_std:
            if self.traffic is not None:
                topic = np.concatenate([topic, self.traffic.topic + (topic.max() + 1)])
            interval = scenarios(interval, topic, _SCENARIOS, self.mixture_std, self.seed)
        sim = self.simulator.count(interval, placement)
        objective = self.objective(interval, sim)
        if self.restart:
            eplb = EPLB(self.simulator)
            starts += [self.simulator.static(interval.n_layers), eplb.pack(eplb.loads(interval))]
        least, best = self.objectives(sim, objective), placement
        for other in starts:
            found = self.objectives(self.simulator.count(interval, other, placement), objective)
            best = np.where((found < least)[:, None, None], other, best)
            least = np.minimum(found, least)
        if best is not placement:
            sim = self.simulator.count(interval, best, placement)
        left = None if self.seconds is None else max(SHORTEST_SECONDS, self.seconds - (time.perf_counter() - began))
        return self.refine(interval, sim, objective, left, 0.1 if self.estimates else 1.0)

    def core_ms(self, layers: int) -> float:
        """Milliseconds of one core per layer."""
        if self.seconds is None:
            return math.inf
        return 1e3 * self.seconds / layers * min(int(config.NUMBA_NUM_THREADS), layers)

    def tokens_for(self, layers: int) -> int:
        """Tokens of the mixed pass: with little time, few tokens and more steps are better."""
        if self.seconds is None:
            return self.most_tokens
        ms = self.core_ms(layers)
        return min(self.most_tokens, max(_FEWEST_TOKENS, int(_TOKENS_IN_20_MS * math.sqrt(ms / 20))))

    def objectives(self, sim: SimulationState, objective: Objective) -> npt.NDArray[np.float64]:
        """(L,) objective of each layer in the state ``sim``."""
        found = np.empty(len(sim.slots))
        kernels.objectives(sim, objective, found)
        return found

    def search_estimate(
        self,
        history: Sequence[Interval],
        placement: Placement,
        share: float = 1.0,
        topic: npt.NDArray[np.int8] | None = None,
        elapsed_s: float = 0.0,
    ) -> Placement:
        """Anneal on the estimate, for ``share`` of the time budget if there is one, less the seconds already spent."""
        began = time.perf_counter()
        state, objective = self.prepare_estimate(history, placement, self.topics(history) if topic is None else topic)
        start = self.start_estimate(state, placement, objective)
        left = None
        if self.seconds is not None:
            left = max(SHORTEST_SECONDS, share * self.seconds - elapsed_s - (time.perf_counter() - began))
        best, steps = self.anneal_estimate(state, objective, self.estimate_steps, left)
        # The first steps follow the errors of the estimate: too few of them do harm.
        return start if self.seconds is not None and steps < _FEWEST_ESTIMATE_STEPS else best

    def start_estimate(self, state: surrogate.Surrogate, placement: Placement, objective: Objective) -> Placement:
        """Let the estimate begin with the best placement of each layer: the current one, EPLB's, that for past traffic.

        Returns it.
        """
        if self.survive is not None:
            gpus = np.arange(self.simulator.n_gpus)
            groups = gpus if self.survive == "rank" else self.simulator.topology.node_of
            placement = survivable(state.load, self.simulator.n_slots, groups)
            self.take(state, placement, objective)
            return placement
        start, least = placement, self.take(state, placement, objective)
        others = [] if self.past_plan is None else [self.past_plan]
        for other in [*others, EPLB(self.simulator).pack(state.load)] if self.restart else []:
            found = self.take(state, other, objective)
            start = np.where((found < least)[:, None, None], other, start)
            least = np.minimum(found, least)
        self.take(state, start, objective)
        return start

    def anneal_estimate(
        self, state: surrogate.Surrogate, objective: Objective, steps: int, seconds: float | None = None
    ) -> tuple[Placement, int]:
        """(best placement, steps made): so many steps per layer from where the estimate is, or for some seconds."""
        layers = len(state.slots)
        best, best_cost, key = state.slots.copy(), np.full(layers, np.inf), self.random_keys(layers)

        def run(first: int, last: int, heat: tuple[float, float], steps: int) -> None:
            arguments = (state, objective, key, np.array(heat), steps, best, best_cost)
            over_layers(anneal_layers, first, last, *arguments)

        first, last = self.estimate_heat
        if self.past_plan is not None:
            first = max(_WARM * first, last)
        return best, self._run(run, layers, seconds, (first, last), steps)

    def prepare_estimate(
        self, history: Sequence[Interval], placement: Placement, topic: npt.NDArray[np.int8]
    ) -> tuple[surrogate.Surrogate, Objective]:
        """Count what the estimate reads. ``topic`` has the topic of each row of the observed tokens."""
        simulator, layers, whole = self.simulator, len(placement), history[-1]
        tokens = min(self.most_tokens or _ESTIMATE_TOKENS, _ESTIMATE_TOKENS)
        if self.traffic is None and self.core_ms(layers) <= _HURRY_MS:
            tokens = min(tokens, _ESTIMATE_TOKENS // 2)
        elif self.traffic is not None and self.core_ms(layers) <= _LEARNED_HURRY_MS:
            tokens = min(tokens, _ESTIMATE_TOKENS // 4)
        seen = whole.mixed(tokens, self.seed)
        placement = np.array(placement, np.int16)
        before = None if simulator.background_share < 0 else simulator.count(seen, placement)
        n_topics = int(topic.max()) + 1 + (self.traffic.n_topics if self.traffic is not None else 0)
        n_varying = n_topics if self.mixture_std else 0
        prices = [surrogate.prices_of(simulator.interval_costs(seen), simulator.topology.transport)]
        for other, tokens, passes in self.other_phases:
            costs = other.interval_costs(replace(seen, stands_for=tokens))
            prices.append(surrogate.prices_of(costs, other.topology.transport, passes))
        state = surrogate.allocate(
            self.shape, prices, seen.n_tokens, seen.experts.shape[2], simulator.n_experts, placement.copy(),
            simulator.cluster.n_nodes, min(n_varying, _MOST_VARYING),
        )  # fmt: skip
        rows, by_topic = whole.rows.ravel(), np.zeros((layers, simulator.n_experts, n_varying))
        shares = np.bincount(topic[rows], minlength=n_topics) / len(rows)
        over_layers(count_tokens, 0, layers, state, seen.experts, rows, seen.rows[0], placement, topic, by_topic)
        if self.traffic is not None:
            self._add_past(state, len(rows), shares, by_topic)
        if self.mixture_std:
            state.deviation[:] = deviations(state.load, by_topic, shares, self.mixture_std, _MOST_VARYING)
        return state, self.objective(seen, before)

    def _add_past(
        self,
        state: surrogate.Surrogate,
        observed: int,
        shares: npt.NDArray[np.float64],
        by_topic: npt.NDArray[np.float64],
    ) -> None:
        """Add the topics of the traffic model to the counts of ``observed`` tokens, and to the shares of the topics."""
        assert self.traffic is not None
        self.traffic.check(len(state.slots), state.sample.shape[2])
        counts = self.traffic.counts(state.pairs.shape[1] > 1)
        own, past = self.traffic.blend(state.load * (observed / state.n_tokens), observed)
        shares *= own
        shares[-len(past) :] = past
        sample = self.traffic.draw(past * SAMPLE, self.seed)
        arguments = (state, own, counts, past * state.n_tokens, self.traffic.experts, sample, by_topic)
        over_layers(add_topics, 0, len(state.slots), *arguments)

    @staticmethod
    def take(state: surrogate.Surrogate, placement: Placement, objective: Objective) -> npt.NDArray[np.float64]:
        """Let the estimate begin with ``placement``. Returns its objectives (L,)."""
        found = np.empty(len(placement))
        over_layers(surrogate.take_placements, 0, len(placement), state, placement.astype(np.int16), objective, found)
        return found

    def refine(
        self,
        interval: Interval,
        sim: SimulationState,
        objective: Objective,
        seconds: float | None = None,
        cooler: float = 1.0,
    ) -> Placement:
        """Anneal on the exact time from the state ``sim``. ``cooler`` multiplies the first temperature."""
        heat = (max(self.heat[0] * cooler, self.heat[1]), self.heat[1])
        layers = interval.n_layers
        best, best_cost, key = sim.slots.copy(), np.full(layers, np.inf), self.random_keys(layers)
        scratch = allocate(sim, self.simulator.topology)
        over_layers(prepare, 0, layers, scratch, sim, interval.experts, self.simulator.topology)
        sample = np.zeros((layers, SAMPLE, interval.experts.shape[2]), np.int16)
        over_layers(draw_samples, 0, layers, sample, interval.experts, interval.rows.ravel())
        shares = np.array(self.shares)

        def run(first: int, last: int, heat: tuple[float, float], iterations: int) -> None:
            arguments = (objective, key, np.array(heat), iterations, best, best_cost, shares, sample)
            kernels.anneal(first, last, sim, scratch, *arguments)

        self._run(run, layers, seconds, heat, self.iterations)
        return best

    def _run(
        self,
        run: Callable[[int, int, tuple[float, float], int], None],
        layers: int,
        seconds: float | None,
        heat: tuple[float, float],
        steps: int,
    ) -> int:
        """Run ``steps`` on every layer, or as many as fit into ``seconds``. Returns how many."""
        if seconds is None:
            # In parts, so that a stop is noticed. Layers that are not reached keep their first placement.
            for part in range(0, layers, LAYERS_BETWEEN_STOPS):
                if not self.stop():
                    run(part, min(part + LAYERS_BETWEEN_STOPS, layers), heat, steps)
            return steps
        began, done, chunk, total = time.perf_counter(), 0.0, 50, 0
        low, high = np.log(heat[1]), np.log(heat[0])
        share = min(1.0, max(0.02, _LEAST_CHUNK_S / seconds))
        while done < 1 and not self.stop():
            before = time.perf_counter()
            temperature = float(np.exp(high + (low - high) * done))
            run(0, layers, (temperature, temperature), chunk)
            total += chunk
            now = time.perf_counter()
            done = (now - began) / seconds
            # Each chunk should take so much of the budget, but not more than what is left.
            wanted = min(share, max(1 - done, 0.1 * share)) * seconds
            chunk = max(10, min(20000, int(chunk * wanted / max(now - before, 1e-6))))
        return total
