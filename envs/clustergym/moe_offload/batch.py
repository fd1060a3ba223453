"""N episodes of the offloading task: the base of all environments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import warn_while_compiling
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
    PREFETCHES,
    STALL,
    USEFUL,
    State,
    new_state,
)
from clustergym.moe_offload.launchers import cpu
from clustergym.moe_offload.simulator import Foresight, build_task, stream_keys
from clustergym.moe_offload.specs import OffloadConfig

ObsDict = dict[str, npt.NDArray[Any]]
Flags = npt.NDArray[np.bool_]
CREDIT = {EVENT_MISS: -1.0, EVENT_HIT: 1.0, EVENT_AGAIN: -0.7}
"""Value of an event for the earlier decision on the same expert. Loading it again ahead of time is a little better than
missing it; were it free, dropping and loading the same experts again and again would cost nothing."""
CREDIT_DECAY = {EVENT_MISS: 0.9, EVENT_HIT: 0.5, EVENT_AGAIN: 0.9}
"""The value falls by this factor with every token since the decision. That of a hit falls faster: an expert that waits
for its use takes a slot, and could have been loaded later."""
SCRATCH = ("scores", "found")
"""Arrays of the state that do not matter between two calls."""
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
        state: the arrays that change. On a CUDA device (``device="cuda"``, the extra ``clustergym[cuda]``) they are the
            host's copies; of large ones, the copy is up to date after :meth:`get_state` only.
        n_rows, n_nodes: the numbers of rows and nodes that an action chooses from.
    """

    def __init__(self, config: OffloadConfig, num_envs: int = 1, device: str = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config, self.num_envs, self.device = config, num_envs, device
        self._build()
        self.seed(np.arange(num_envs))
        self.ended = np.ones(num_envs, bool)

    def _build(self) -> None:
        self.task = build_task(self.config)
        self._foresight = Foresight(self.config, self.task)
        self.state: State = new_state(self.task, self.num_envs)
        self._launcher = self._make_launcher()
        self.n_rows, self.n_nodes = self.state.rows.shape[1], 3 * self.task.gpus
        self.n_layers, self.n_experts = self.task.prior.shape
        first: Observation = new_observation(self.task, self.n_rows, self.num_envs)
        self.shapes = {name: array.shape[1:] for name, array in first._asdict().items()}
        self._recycled = {name: _Recycled(array) for name, array in first._asdict().items()}
        self._all, self._nothing = np.ones(self.num_envs, bool), np.zeros(self.num_envs, np.int64)
        self._seen: ObsDict = {}
        self._given, self._first = False, True
        self._bytes_per_load = self.config.megabytes(self._foresight.trace) * 1e6

    def _make_launcher(self) -> Any:
        if self.device == "cpu":
            return cpu.Launcher(self.task, self.state)
        if not self.device.startswith("cuda"):
            raise ValueError(f"device is {self.device!r}: expected 'cpu' or 'cuda'")
        try:
            from clustergym.moe_offload.launchers import cuda
        except ImportError as error:
            raise ImportError("environments on a GPU need numba-cuda: pip install 'clustergym[cuda]'") from error
        return cuda.Launcher(self.task, self.state, self.device)

    @property
    def tensors(self) -> dict[str, Any]:
        """On a CUDA device: the last observation as torch tensors there."""
        seen: dict[str, Any] = self._launcher.seen
        return seen

    def seed(self, seeds: npt.ArrayLike, where: Flags | None = None) -> None:
        """Set the seed of each environment (N,), or of those in ``where``. Call :meth:`reset` afterwards."""
        keys = stream_keys(np.asarray(seeds, np.int64))
        self._launcher.download("random")
        self.state.random[...] = keys if where is None else np.where(where, keys, self.state.random)
        self._launcher.upload("random")

    def reset(self, where: Flags | None = None, groups: npt.ArrayLike | None = None) -> None:
        """Begin new episodes in all environments, or in those of ``where`` (N,).

        Their sequences are drawn, or given: ``groups`` are rows of ``task.groups``.
        """
        where = self._all if where is None else where
        with warn_while_compiling() if self._first else nullcontext():
            if groups is None:
                self._launcher.draw(where)
            else:
                given = np.broadcast_to(np.asarray(groups, np.int64), (self.num_envs,))
                n = len(self.task.groups)
                wrong = where & ((given < 0) | (given >= n))
                if wrong.any():
                    raise ValueError(f"group is {given[wrong][0]}: expected 0 … {n - 1}")
                self.state.clock[where, GROUP] = given[where]
            self._foresight.prepare(np.unique(self.state.clock[where, GROUP]))
            self._launcher.upload("clock")
            self._run(True, self._nothing, self._nothing, where)
        self._first = False
        self.ended = self.ended & ~where

    def _run(self, begins: bool, rows: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64], where: Flags) -> None:
        """Begin episodes or apply pairs where ``where`` is true, and observe all whose observation is not up to date.

        What was observed is written over as long as nobody has got it.
        """
        renew = self._given or not self._seen
        if renew:
            self._seen = {}  # now these arrays can be used again, if nobody else holds them
            self._seen = {name: recycled.take() for name, recycled in self._recycled.items()}
            self._given = False
        self._launcher.run(begins, Observation(**self._seen), rows, nodes, where, renew)

    def observe(self) -> ObsDict:
        """What the agents see, in arrays that are not written again while anybody holds them."""
        if not self._seen:
            self._run(False, self._nothing, self._nothing, ~self._all)
        self._given = True
        return self._seen.copy()

    def step(
        self, rows: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64], where: Flags | None = None
    ) -> tuple[npt.NDArray[np.float64], Flags]:
        """Apply a pair in every environment, or in those of ``where``. Returns rewards (N,) and what has ended (N,)."""
        where = self._all if where is None else where
        self._run(False, rows, nodes, where)
        ended: Flags = (self.state.clock[:, MODE] == MODE_OVER) & where
        self.ended = self.ended | ended
        return np.where(where, self.state.reward, 0.0), ended

    def step_info(self, where: Flags | None = None) -> dict[str, Any]:
        """Results of the last step, arrays (N,): no-op, illegal, expert and visits that have passed; and its events."""
        expert, no_op, illegal, visits = self.state.outcome.T.copy()
        info = {"no_op": no_op > 0, "illegal": illegal > 0, "expert": expert.astype(np.int64)}
        info["elapsed"] = visits.astype(np.float64)
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
        stats, stall_ms, compute_ms = self.state.stats.T.copy(), *self.state.time.T[[STALL, COMPUTE]]
        return {
            "group": self.state.clock[:, GROUP].copy(),
            "stall_ms": stall_ms,
            "tokens": stats[GENERATED],
            "tokens_per_s": 1e3 * stats[GENERATED] / np.maximum(stall_ms + compute_ms, 1e-9),
            "hit_rate": stats[HITS] / np.maximum(stats[NEEDED], 1),
            "loads": stats[LOADS],
            "prefetches": stats[PREFETCHES],
            "useful_prefetches": stats[USEFUL],
            "moves": stats[MOVES],
            "bytes": (stats[LOADS] + stats[PREFETCHES]) * self._bytes_per_load,
        }

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays. :meth:`set_state` continues from it bit for bit."""
        self._launcher.download()
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
        self._launcher.upload()
        self._seen = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": (self.config, self.num_envs, self.device), "state": self.get_state()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(*content["arguments"])  # type: ignore[misc]
        self.set_state(content["state"])


_EVENT_TYPES: dict[str, Any] = {
    "env": np.int64,
    "expert": np.int64,
    "kind": np.int32,
    "tokens": np.int64,
    "age": np.int64,
    "value": np.float64,
}
