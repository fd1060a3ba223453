"""What a search plans on: the observed passes, and past traffic if it has learned it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.simulator import norm_log2
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.kernels.launch import Objective, pass_times
from clustergym.planners.topics import topics_of
from clustergym.planners.traffic_model import TrafficModel
from clustergym.traces.token_trace import TokenTrace

NORM = 16
"""Under an independent judge (``python benchmarks/placement/judge.py``) it is better than 8 and than the true time."""
MOST_TOKENS = 16384
"""Most tokens of the pass to plan on."""
LEARNED_ROBUSTNESS = 1.4


@dataclass(eq=False, kw_only=True)
class Search(Planner):
    """Sees the observed passes, and past traffic if it has learned it."""

    learns = True

    norm: int | None = None
    """0 minimizes the true time, set by the busiest GPU. p = 2 … 32 minimizes the smooth p-norm over GPUs, which
    generalizes better to the next passes. By default 16, and 0 with dispatch ``lp``."""
    mix_tokens: int | None = None
    """Plan on one large pass with so many of the observed tokens, dealt over the ranks at random, instead of the passes
    as they were (see :meth:`Interval.mixed`). 0 plans on the passes, whose ranks had their tokens by chance. By default
    16384, less if there is little time, and 0 with dispatch ``lp``."""
    migration_weight: float = 1.0
    """Weight of the migration time. Less than 1 if a move helps for longer than the interval that pays for it."""
    memory: bool = True
    """Plan on past traffic too, if :meth:`learn` was called."""
    robustness: float | None = None
    """How much the mixture of topics may change until the next plan: standard deviation of the logarithms of their
    shares (see :mod:`.topics`). 0 plans for the observed mixture, which is the default without past traffic. Topics of
    past traffic are better known than those of one interval, so the default is 1.4 with it."""

    def __post_init__(self) -> None:
        if self.robustness is not None and self.robustness < 0:
            raise ValueError(f"robustness is {self.robustness}: expected 0 or more")
        if self.mix_tokens is not None and self.mix_tokens < 0:
            raise ValueError(f"mix_tokens is {self.mix_tokens}: expected 0 or more")
        # The linear program splits the tokens of each pass anew, so a smooth average pass says little about it.
        per_pass = self.simulator.profile.dispatch == "lp"
        self.norm_log2 = norm_log2((0 if per_pass else NORM) if self.norm is None else self.norm)
        self.most_tokens = (0 if per_pass else MOST_TOKENS) if self.mix_tokens is None else self.mix_tokens
        self.traffic: TrafficModel | None = None
        self.reset()

    def reset(self) -> None:
        self.calls = 0

    def learn(self, trace: TokenTrace) -> None:
        if self.memory:
            self.traffic = TrafficModel.learn(trace, self.simulator.n_experts, seed=self.seed)

    @property
    def mixture_std(self) -> float:
        """Standard deviation of the logarithms of the weights of topics: the robustness, or its default."""
        if self.robustness is None:
            return 0.0 if self.traffic is None else LEARNED_ROBUSTNESS
        return self.robustness

    def observe(self, history: Sequence[Interval], tokens: int) -> Interval:
        """One mixed pass of at most so many tokens to plan on. 0: the passes as they were."""
        seen = history[-1]
        if self.traffic is not None:
            return self.traffic.extend(seen, self.simulator.n_experts, tokens or MOST_TOKENS, self.seed)
        return seen.mixed(tokens, self.seed) if tokens else seen

    def topics(self, history: Sequence[Interval], hurry: bool = False) -> npt.NDArray[np.int8]:
        """Topic of each row of the observed tokens; all 0 if their mixture is taken as certain.

        A model of the traffic has topics. If it knows the traffic, or in a ``hurry``, none are looked for.
        """
        seen = history[-1]
        known = self.mixture_std == 0
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
