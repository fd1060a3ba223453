"""N episodes of the offloading task: the base of all environments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import warn_while_compiling
from clustergym.common.threads import spread
from clustergym.moe_offload.kernels import episode, observation
from clustergym.moe_offload.kernels.observation import Observation, new_observation
from clustergym.moe_offload.kernels.state import (
    COMPUTE,
    EVENT_AGAIN,
    EVENT_EXPERT,
    EVENT_HIT,
    EVENT_KIND,
    EVENT_MISS,
    EVENT_STEPS,
    EVENT_TOKENS,
    GENERATED,
    GROUP,
    HITS,
    LOADS,
    MODE,
    MODE_OVER,
    MOVES,
    NEEDED,
    OUT_EXPERT,
    OUT_ILLEGAL,
    OUT_NO_OP,
    OUT_VISITS,
    PREFETCHES,
    STALL,
    USEFUL,
    State,
    new_state,
)
from clustergym.moe_offload.simulator import Foresight, build_task, stream_keys
from clustergym.moe_offload.specs import OffloadConfig

ObsDict = dict[str, npt.NDArray[Any]]
Flags = npt.NDArray[np.bool_]
MIN_ENVS_FOR_THREADS = 128
"""With fewer environments, a second thread costs more time than it saves."""
CREDIT = {EVENT_MISS: -1.0, EVENT_HIT: 1.0, EVENT_AGAIN: -0.7}
"""Value of an event for the earlier decision on the same expert. Loading it again ahead of time is a little better than
missing it; were it free, dropping and loading the same experts again and again would cost nothing."""
CREDIT_DECAY = {EVENT_MISS: 0.9, EVENT_HIT: 0.5, EVENT_AGAIN: 0.9}
"""The value falls by this factor with every token since the decision. That of a hit falls faster: an expert that waits
for its use takes a slot, and could have been loaded later."""
SCRATCH = ("scores", "found")
"""Arrays of the state that do not matter between two calls."""
_compiled: set[Any] = set()
"""Kernels that were called before: only the first call may compile."""
_CREDITS = np.array([CREDIT[kind] for kind in range(len(CREDIT))])
_CREDIT_DECAYS = np.array([CREDIT_DECAY[kind] for kind in range(len(CREDIT))])


def _references(arrays: list[npt.NDArray[Any]]) -> int:
    """References to an array that nobody but this list holds, as :class:`_Recycled` counts them."""
    return min(sys.getrefcount(array) for array in arrays)


_FREE = _references([np.empty(0)])


class _Recycled:
    """Arrays of one shape. One that nobody holds any more is used again: new memory costs more than filling it."""

    def __init__(self, like: npt.NDArray[Any]) -> None:
        self.shape, self.dtype = like.shape, like.dtype
        self.arrays: list[npt.NDArray[Any]] = []

    def take(self) -> npt.NDArray[Any]:
        for array in self.arrays:
            if sys.getrefcount(array) <= _FREE:
                return array
        self.arrays.append(np.zeros(self.shape, self.dtype))
        return self.arrays[-1]


class OffloadBatch:
    """N episodes in one simulator.

    Attributes:
        task: the constant arrays.
        state: the arrays that change.
        n_rows, n_nodes: the numbers of rows and nodes that an action chooses from.
    """

    def __init__(self, config: OffloadConfig, num_envs: int = 1) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config, self.num_envs = config, num_envs
        self._build()
        self.seed(np.arange(num_envs))
        self.ended = np.ones(num_envs, bool)

    def _build(self) -> None:
        self.task = build_task(self.config)
        self._foresight = Foresight(self.config, self.task)
        self.state: State = new_state(self.task, self.num_envs)
        self.n_rows, self.n_nodes = self.state.rows.shape[1], 3 * self.task.gpus
        self.n_layers, self.n_experts = self.task.prior.shape
        first: Observation = new_observation(self.task, self.n_rows, self.num_envs)
        self.shapes = {name: array.shape[1:] for name, array in first._asdict().items()}
        self._recycled = {name: _Recycled(array) for name, array in first._asdict().items()}
        self._all = np.ones(self.num_envs, bool)
        self._bytes_per_load = self.config.megabytes(self._foresight.trace) * 1e6

    def _run(self, function: Any, *arguments: Any) -> None:
        """Run a kernel over all environments; with threads if there are enough environments."""
        if function not in _compiled:
            with warn_while_compiling():
                function(0, 0, *arguments)
            _compiled.add(function)
        if self.num_envs < MIN_ENVS_FOR_THREADS or numba.config.NUMBA_NUM_THREADS == 1:
            function(0, self.num_envs, *arguments)
        else:
            spread(function, self.num_envs, *arguments)

    def seed(self, seeds: npt.ArrayLike, where: Flags | None = None) -> None:
        """Set the seed of each environment (N,), or of those in ``where``. Call :meth:`reset` afterwards."""
        keys = stream_keys(np.asarray(seeds, np.int64))
        self.state.random[...] = keys if where is None else np.where(where, keys, self.state.random)

    def reset(self, where: Flags | None = None, groups: npt.ArrayLike | None = None) -> None:
        """Begin new episodes in all environments, or in those of ``where`` (N,).

        Their sequences are drawn, or given: ``groups`` are rows of ``task.groups``.
        """
        where = self._all if where is None else where
        if groups is None:
            self._run(episode.draw_range, self.task, self.state, where)
        else:
            given = np.broadcast_to(np.asarray(groups, np.int64), (self.num_envs,))
            n = len(self.task.groups)
            wrong = where & ((given < 0) | (given >= n))
            if wrong.any():
                raise ValueError(f"group is {given[wrong][0]}: expected 0 … {n - 1}")
            self.state.clock[where, GROUP] = given[where]
        self._foresight.prepare(np.unique(self.state.clock[where, GROUP]))
        self._run(episode.start_range, self.task, self.state, where)
        self.ended = self.ended & ~where

    def observe(self) -> ObsDict:
        """What the agents see, in arrays that are not written again while anybody holds them."""
        arrays = {name: recycled.take() for name, recycled in self._recycled.items()}
        self._run(observation.observe_range, self.task, self.state, Observation(**arrays), self._all)
        return arrays

    def step(
        self, rows: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64], where: Flags | None = None
    ) -> tuple[npt.NDArray[np.float64], Flags]:
        """Apply a pair in every environment, or in those of ``where``. Returns rewards (N,) and what has ended (N,)."""
        where = self._all if where is None else where
        self._run(episode.step_range, self.task, self.state, rows, nodes, where)
        ended: Flags = (self.state.clock[:, MODE] == MODE_OVER) & where
        self.ended = self.ended | ended
        return np.where(where, self.state.reward, 0.0), ended

    def step_info(self, where: Flags | None = None) -> dict[str, Any]:
        """Results of the last step, arrays (N,): no-op, illegal, expert and visits that have passed; and its events."""
        out = self.state.outcome
        info = {
            "no_op": out[:, OUT_NO_OP] > 0,
            "illegal": out[:, OUT_ILLEGAL] > 0,
            "expert": out[:, OUT_EXPERT].astype(np.int64),
            "elapsed": out[:, OUT_VISITS].astype(np.float64),
        }
        if where is not None and not where.all():
            for name, idle in (("no_op", True), ("illegal", False), ("expert", -1), ("elapsed", 0.0)):
                info[name] = np.where(where, info[name], idle)
        return info | {"events": self.events(where)}

    def events(self, where: Flags | None = None) -> dict[str, npt.NDArray[Any]]:
        """What the last step has shown about earlier decisions, in order.

        ``env``, ``expert`` (layer · E + id), ``kind`` (see ``EVENT_NAMES``), ``tokens`` and ``age``: tokens and steps
        since the decision (0: it was this step's), and ``value``, what it is worth.
        """
        n = self.state.n_events if where is None else np.where(where, self.state.n_events, 0)
        total = int(n.sum())
        if not total:
            return {name: np.zeros(0, kind) for name, kind in _EVENT_TYPES.items()}
        env = np.repeat(np.arange(self.num_envs), n)
        rows = self.state.events[env, np.arange(total) - np.repeat(np.cumsum(n) - n, n)]
        kind, tokens = rows[:, EVENT_KIND], rows[:, EVENT_TOKENS].astype(np.int64)
        return {
            "env": env,
            "expert": rows[:, EVENT_EXPERT].astype(np.int64),
            "kind": kind,
            "tokens": tokens,
            "age": rows[:, EVENT_STEPS].astype(np.int64),
            "value": _CREDITS[kind] * _CREDIT_DECAYS[kind] ** tokens,
        }

    def totals(self) -> dict[str, npt.NDArray[Any]]:
        """The sequences served (a row of ``task.groups``) and sums over the episodes so far, arrays (N,)."""
        stats, time = self.state.stats, self.state.time
        served_ms = time[:, STALL] + time[:, COMPUTE]
        return {
            "group": self.state.clock[:, GROUP].copy(),
            "stall_ms": time[:, STALL].copy(),
            "tokens": stats[:, GENERATED].copy(),
            "tokens_per_s": 1e3 * stats[:, GENERATED] / np.maximum(served_ms, 1e-9),
            "hit_rate": stats[:, HITS] / np.maximum(stats[:, NEEDED], 1),
            "loads": stats[:, LOADS].copy(),
            "prefetches": stats[:, PREFETCHES].copy(),
            "useful_prefetches": stats[:, USEFUL].copy(),
            "moves": stats[:, MOVES].copy(),
            "bytes": (stats[:, LOADS] + stats[:, PREFETCHES]) * self._bytes_per_load,
        }

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays. :meth:`set_state` continues from it bit for bit."""
        arrays = {name: array.copy() for name, array in self.state._asdict().items() if name not in SCRATCH}
        return arrays | {"ended": self.ended.copy()}

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go back to a state of :meth:`get_state`."""
        for name, array in (self.state._asdict() | {"ended": self.ended}).items():
            if name in SCRATCH:
                continue
            if name not in state or state[name].shape != array.shape:
                found = "nothing" if name not in state else f"shape {state[name].shape}"
                raise ValueError(f"the saved state has {found} for {name!r}: expected shape {array.shape}")
            array[...] = state[name]
        self._foresight.prepare(np.unique(self.state.clock[:, GROUP]))

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "num_envs": self.num_envs, "state": self.get_state()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(content["config"], content["num_envs"])  # type: ignore[misc]
        self.set_state(content["state"])


_EVENT_TYPES: dict[str, Any] = {
    "env": np.int64,
    "expert": np.int64,
    "kind": np.int32,
    "tokens": np.int64,
    "age": np.int64,
    "value": np.float64,
}
