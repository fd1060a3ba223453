"""Base of planners that search with the exact incremental simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import one_of
from clustergym.moe_placement.kernels.counting import count_window
from clustergym.moe_placement.kernels.replicas import write_replicas
from clustergym.moe_placement.kernels.state import MODE_STAY, SimulationState
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.simulator import Placement, Window, norm_log2

HOMES = ("served", "even")


def with_even_homes(window: Window, n_gpus: int) -> Window:
    """The same tokens, assigned to the GPUs in turn."""
    return Window(window.experts, window.rows, (np.arange(window.n_tokens) % n_gpus).astype(np.int16))


@dataclass(eq=False, kw_only=True)
class Search(Planner):
    """Counts the observed traffic once, then works on all layers."""

    norm: int = 0
    """0 minimizes the true time, set by the busiest GPU. p = 2 … 64 minimizes the smooth p-norm over GPUs."""
    windows: int = 1
    """Number of the last windows to plan on, joined."""
    homes: str = "served"
    """GPUs that the tokens come from: ``served`` takes those of the observed window. ``even`` assigns the tokens to the
    GPUs in turn, because the home of a sequence is random and different in the next window."""

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ValueError(f"windows is {self.windows}: expected at least 1")
        one_of(self.homes, HOMES, "homes")
        self.norm_log2 = norm_log2(self.norm)
        self.reset()

    def reset(self) -> None:
        self.calls = 0

    def observe(
        self, history: Sequence[Window], placement: Placement, tokens: int | None
    ) -> tuple[Window, SimulationState, float]:
        """(the joined window, its counts, the weight of one of its tokens)."""
        window = Window.join(history[-self.windows :]) if self.windows > 1 else history[-1]
        if self.homes == "even":
            window = with_even_homes(window, self.simulator.n_gpus)
        scale = (tokens or history[-1].n_tokens) / window.n_tokens
        return window, self.simulator.count(window, placement), scale

    def random_keys(self, layers: int) -> npt.NDArray[np.int64]:
        """(L, 2) state of one random number generator per layer. Every call gives different ones."""
        self.calls += 1
        seeds = np.random.SeedSequence([self.seed, self.calls]).generate_state(layers).astype(np.int64)
        return np.stack([seeds & 0x7FFFFFFF, np.zeros(layers, np.int64)], axis=1)

    def each_layer(
        self, window: Window, sim: SimulationState, search: Callable[[int, int], None], chosen: Placement | None = None
    ) -> None:
        """Run ``search(first, last)`` on all layers at once, or in order if a layer depends on the previous one.

        The search leaves its placement in ``chosen``, if given, else in ``sim.slots``.
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
                # The next layer starts where the chosen placement leaves the tokens, not the last one tried.
                sim.slots[b] = chosen[b]
                write_replicas(sim, b, simulator.network)
                count_window(sim, b, 0, window.experts, b, simulator.network)
