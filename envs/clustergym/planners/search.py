"""Base of planners that search with the exact incremental simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.simulator import Placement, norm_log2
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.kernels.launch import Objective, pass_times, recount
from clustergym.planners.topics import topics_of
from clustergym.planners.traffic_model import TrafficModel
from clustergym.traces.token_trace import TokenTrace

MOST_TOKENS = 16384
"""Most tokens to plan on if there is a traffic model."""


@dataclass(eq=False, kw_only=True)
class Search(Planner):
    """Counts the observed passes once, then works on all layers."""

    norm: int = 0
    """0 minimizes the true time, set by the busiest GPU. p = 2 … 32 minimizes the smooth p-norm over GPUs."""
    intervals: int = 1
    """Number of the last intervals to plan on, joined."""
    mix_tokens: int = 0
    """Plan on one large pass with so many of the observed tokens, dealt over the ranks at random, instead of the passes
    as they were (see :meth:`Interval.mixed`). 0 plans on the passes."""
    migration_weight: float = 1.0
    """Weight of the migration time. Less than 1 if a move helps for longer than the interval that pays for it."""

    spread: float = 0.0
    """How much the mixture of topics may change until the next plan: standard deviation of the logarithms of their
    shares (see :mod:`.topics`). 0 plans for the observed mixture."""

    def __post_init__(self) -> None:
        if self.spread < 0:
            raise ValueError(f"spread is {self.spread}: expected 0 or more")
        if self.intervals < 1:
            raise ValueError(f"intervals is {self.intervals}: expected at least 1")
        if self.mix_tokens < 0:
            raise ValueError(f"mix_tokens is {self.mix_tokens}: expected 0 or more")
        self.norm_log2 = norm_log2(self.norm)
        self.reset()

        self.traffic: TrafficModel | None = None

    def reset(self) -> None:
        self.calls = 0

    def learn(self, trace: TokenTrace) -> None:
        self.traffic = TrafficModel.learn(trace, self.simulator.n_experts, seed=self.seed)

    def observe(self, history: Sequence[Interval], mix_tokens: int | None = None) -> Interval:
        """The passes to plan on; ``mix_tokens`` instead of the planner's own."""
        tokens, seen = self.mix_tokens if mix_tokens is None else mix_tokens, self.seen(history)
        if self.traffic is not None:
            return self.traffic.extend(seen, self.simulator.n_experts, tokens or MOST_TOKENS, self.seed)
        return seen.mixed(tokens, self.seed) if tokens else seen

    def seen(self, history: Sequence[Interval]) -> Interval:
        """The passes of the last intervals."""
        return history[-1] if self.intervals == 1 else Interval.join(history[-self.intervals :])

    def topics(self, history: Sequence[Interval], hurry: bool = False) -> npt.NDArray[np.int8]:
        """Topic of each row of the observed tokens; all 0 if their mixture is taken as certain.

        A model of the traffic has topics. If it knows the traffic, or in a ``hurry``, none are looked for.
        """
        seen = self.seen(history)
        known = self.spread == 0
        if self.traffic is not None:
            self.traffic.check(seen.n_layers, seen.experts.shape[2])
            known = known or hurry or self.traffic.knows(seen.loads(self.simulator.n_experts).astype(np.float64))
        if known:
            return np.zeros(seen.experts.shape[1], np.int8)
        return topics_of(seen, self.simulator.n_experts, self.seed)

    def objective(self, interval: Interval, before: SimulationState | None) -> Objective:
        """What to minimize, for an interval that begins with the placement counted in ``before``.

        Blocking migration does not depend on that placement: then ``before`` may be None.
        """
        simulator = self.simulator
        costs, before_us = simulator.interval_costs(interval), np.zeros(interval.n_layers)
        if simulator.background_share >= 0:
            assert before is not None
            pass_times(0, interval.n_layers, before, simulator.topology, costs, self.norm_log2, before_us)
        return Objective(costs, simulator.topology, self.norm_log2, float(self.migration_weight), before_us)

    def random_keys(self, layers: int) -> npt.NDArray[np.int64]:
        """(L,) state of one random number generator per layer. Every call gives different ones."""
        self.calls += 1
        seeds = np.random.SeedSequence([self.seed, self.calls]).generate_state(layers).astype(np.int64)
        return np.maximum(seeds, 1)

    def each_layer(
        self, interval: Interval, sim: SimulationState, search: Callable[[int, int], None], chosen: Placement
    ) -> None:
        """Run ``search(first, last)`` on all layers at once, or in order if a layer depends on the previous one.

        The search leaves its placement in ``chosen``, which may be ``sim.slots``.
        """
        if not self.simulator.stay:
            search(0, interval.n_layers)
            return
        arguments = (interval.experts, self.simulator.topology, self.simulator.interval_costs(interval))
        for b in range(interval.n_layers):
            recount(sim, b, chosen[b], *arguments)
            search(b, b + 1)
            # The next layer starts where the chosen placement leaves the tokens, not the last one tried.
            recount(sim, b, chosen[b], *arguments)
