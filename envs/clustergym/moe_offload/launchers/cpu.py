"""Batches on the CPU: every thread runs a range of environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config

from clustergym.common.compiling import device
from clustergym.common.threads import parallel_for
from clustergym.moe_offload.kernels.episode import advance
from clustergym.moe_offload.kernels.episode import draw as _draw
from clustergym.moe_offload.kernels.observation import Observation, observe
from clustergym.moe_offload.kernels.state import State, Task

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
MIN_ENVS_FOR_THREADS = 128
"""With fewer environments, a second thread costs more time than it saves."""


@device
def _draw_range(first, last, task, s, where):
    for b in range(first, last):
        if where[b]:
            _draw(task, s, b)


@device
def _run_range(first, last, begins, task, s, o, rows, nodes, where, all_observed):
    # An environment is observed while its arrays are still in the caches.
    for b in range(first, last):
        if where[b]:
            advance(task, s, b, begins, rows[b], nodes[b])
        if where[b] or all_observed:
            observe(task, s, b, o)


def _launch(function: Any, n: int, *arguments: Any) -> None:
    if n < MIN_ENVS_FOR_THREADS or config.NUMBA_NUM_THREADS == 1:
        function(0, n, *arguments)
    else:
        parallel_for(function, n, *arguments)


class Launcher:
    """Runs the kernels on the arrays of the host."""

    def __init__(self, task: Task, state: State) -> None:
        self.task, self.state = task, state

    def upload(self, *names: str) -> None:
        """Nothing: there is one copy of each array."""

    def download(self, *names: str) -> None:
        """Nothing: there is one copy of each array."""

    def draw(self, where: Flags) -> None:
        """Draw the sequences of new episodes where ``where`` (N,) is true."""
        _launch(_draw_range, len(where), self.task, self.state, where)

    def run(
        self, begins: bool, o: Observation, rows: Indices, nodes: Indices, where: Flags, all_observed: bool
    ) -> None:
        """Begin the episodes that were drawn, or apply the pairs ``rows``, ``nodes`` (N,), where ``where`` is true.

        Observes these environments, or all.
        """
        _launch(_run_range, len(where), begins, self.task, self.state, o, rows, nodes, where, all_observed)
