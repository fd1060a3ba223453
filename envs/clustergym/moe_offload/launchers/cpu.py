"""Batches on the CPU: every thread runs a range of environments."""

from __future__ import annotations

from numba import config

from clustergym.common.threads import parallel_for
from clustergym.moe_offload.kernels.compile import device
from clustergym.moe_offload.kernels.episode import advance
from clustergym.moe_offload.kernels.episode import draw as _draw
from clustergym.moe_offload.kernels.observation import observe

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


def _launch(function, n, *arguments):
    if n < MIN_ENVS_FOR_THREADS or config.NUMBA_NUM_THREADS == 1:
        function(0, n, *arguments)
    else:
        parallel_for(function, n, *arguments)


def draw(task, s, where):
    """Draw the sequences of new episodes where ``where`` (N,) is true."""
    _launch(_draw_range, len(where), task, s, where)


def run(begins, task, s, o, rows, nodes, where, all_observed):
    """Where ``where`` (N,) is true: begin the episodes that were drawn, or apply the pairs ``rows``, ``nodes`` (N,).

    Observes these environments, or all.
    """
    _launch(_run_range, len(where), begins, task, s, o, rows, nodes, where, all_observed)
