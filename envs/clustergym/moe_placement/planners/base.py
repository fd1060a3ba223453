"""What every planner is: observed windows and the current placement in, the next placement out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement, Simulator, Window


class Planner(ABC):
    """Chooses placements for a simulator's model and cluster.

    Args:
        simulator: model, cluster and cost model to plan for.
        seed: of planners that draw.
    """

    name: ClassVar[str]
    sees_future: ClassVar[bool] = False
    """Only the oracle: ``history[-1]`` is then the window to come."""

    def __init__(self, simulator: Simulator, seed: int = 0) -> None:
        self.simulator, self.seed = simulator, seed

    def reset(self) -> None:
        """Forget earlier windows: a new stream begins. Planners without memory have nothing to do."""

    @abstractmethod
    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        """The placement (L, G, S) for the next window.

        Args:
            history: windows served so far, the last one the latest. At least one.
            placement: where experts lie now: fetching others costs migration.
            tokens: tokens in the window to come, where that differs from the last one's.
        """

    def loads(self, window: Window) -> npt.NDArray[np.float64]:
        """(L, E) tokens routed to each expert."""
        return window.loads(self.simulator.n_experts).astype(np.float64)
