"""The policy's view on a CUDA device: one thread of the grid an environment, like :mod:`clustergym.moe_placement.launchers.cuda`."""

from __future__ import annotations

from typing import Any

from numba import cuda

from clustergym.moe_placement.launchers.cuda import _launch
from clustergym.moe_placement.policy.view_kernels import (
    deal_evenly,
    deal_range,
    look_ahead_parts,
    look_range,
    seat,
    seat_range,
    settle,
    settle_range,
)


@cuda.jit
def _deal(episode: Any, sim: Any, obs: Any, trace: Any, rules: Any) -> None:
    b = cuda.grid(1)
    if b < episode.clock.shape[0]:
        deal_evenly(episode, sim, obs, b, trace, rules)


@cuda.jit
def _seat(episode: Any, sim: Any, obs: Any, trace: Any, rules: Any, slots: Any, rows: Any, home: Any) -> None:
    b = cuda.grid(1)
    if b < episode.clock.shape[0]:
        seat(episode, sim, obs, b, trace, rules, b % episode.slots.shape[1], slots[b], rows, home)


@cuda.jit
def _look(expert: Any, result: Any, episode: Any, sim: Any, rules: Any, norm_log2: Any) -> None:
    b = cuda.grid(1)
    if b < episode.clock.shape[0]:
        for i in range(expert.shape[1]):
            look_ahead_parts(episode, sim, b, rules, expert[b, i], norm_log2, result[b, i])


@cuda.jit
def _settle(expert: Any, node: Any, episode: Any, sim: Any, rules: Any) -> None:
    b = cuda.grid(1)
    if b < episode.clock.shape[0]:
        settle(episode, sim, b, rules, expert[b], node[b])


_KERNELS = {deal_range: _deal, seat_range: _seat, look_range: _look, settle_range: _settle}


def run(kernel: Any, size: int, *arguments: Any) -> None:
    """The grid's version of one of :mod:`.view_kernels`' ranges, over all environments."""
    _launch(_KERNELS[kernel], size, *arguments)
