"""The planner interface: intervals served so far and the current placement in, the next placement out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.streams import Interval
from clustergym.traces.token_trace import TokenTrace


@dataclass(eq=False)
class Planner(ABC):
    """Chooses placements for the model and cluster of a simulator.

    The class attributes say what a planner needs; the fields are its options.
    """

    needs_tokens: ClassVar[bool] = True
    """The planner looks at which experts each token uses. If False, the load of each expert is enough."""
    needs_future: ClassVar[bool] = False
    """``history[-1]`` has the passes to come, not the last ones served. Such a planner is only good for comparison."""
    needs_mixture: ClassVar[bool] = False
    """``history[-1]`` has other tokens of the domains of the next interval: a perfect forecast of the mixture. Such a
    planner is only good for comparison."""
    keeps_placement: ClassVar[bool] = False
    """The planner never moves an expert, so it is compared from the static placement and not from EPLB's."""
    starts_from_eplb: ClassVar[bool] = False
    """The planner changes little, so ``clustergym plan`` lets it improve EPLB's placement and not the static one."""
    takes_seconds: ClassVar[bool] = False
    """The option ``seconds`` sets a time budget; without it, ``iterations`` limits the search. ``stop`` may end it."""
    small_only: ClassVar[bool] = False
    """The planner refuses all but small instances."""
    learns: ClassVar[bool] = False
    """:meth:`learn` improves the plans. Comparisons call it if the streams come from another split."""

    simulator: Simulator
    """Model, cluster and cost model to plan for."""
    seed: int = 0
    """Seed of planners that draw random numbers."""

    def reset(self) -> None:
        """Forget earlier intervals, because a new stream begins. Planners without state do nothing."""

    def learn(self, trace: TokenTrace) -> None:
        """Learn from past traffic. Most planners have nothing to learn."""

    @abstractmethod
    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        """The placement (L, G, S) for the next interval.

        Args:
            history: intervals served so far, oldest first. At least one; the last is the one just observed.
            placement: the current placement. Fetching an expert that a GPU does not hold costs migration time.
        """

    def loads(self, interval: Interval) -> npt.NDArray[np.float64]:
        """(L, E) tokens routed to each expert in the sampled passes."""
        return interval.loads(self.simulator.n_experts).astype(np.float64)
