"""B shared GPUs as tensors: the base of the environments, the rules and the trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
import numpy.typing as npt
import torch

from clustergym.common.threads import spread
from clustergym.gpu_allocation import dynamics
from clustergym.gpu_allocation.fitted import IDLE_SHARE, NEED_LOGIT, NEED_OWNER_SPREAD, POPULARITY
from clustergym.gpu_allocation.history import N_FEATURES, N_HISTORY
from clustergym.gpu_allocation.space import MAX_PODS, N_STATE, UNIT_PERCENT
from clustergym.gpu_allocation.specs import APPS
from clustergym.gpu_allocation.state import (
    JOB_LIFE,
    JOB_SENSITIVE,
    N_ASK,
    N_COUNTS,
    N_HABIT,
    N_OUTCOME,
    N_POD,
    N_SUMS,
    Rules,
    State,
)
from clustergym.gpu_allocation.workload import NodeMix, Workload, edge_mixes, read_openb, synthetic_workload

# With fewer environments than this, a second thread costs more time than it saves.
MIN_ENVS_FOR_THREADS = 512


FIRST_SEEDS = {"train": 0, "validation": 2**41, "test": 2**40}
"""Seeds of a split begin here. Splits share no stream for seeds below 2**40."""


@dataclass(frozen=True)
class AllocationConfig:
    """Configuration of the allocation task. The environments take these fields as keyword arguments."""

    history: bool = False
    """Observe what the owner's earlier pods used (``GPUAllocationHistory-v0``)."""
    arrivals: int = 128
    """Number of decisions per episode."""
    load: float = 3.0
    """Mean number of running pods if there were always room: mean life / mean time between arrivals."""
    owners: int = 6
    """Number of owners per episode. The first ones send the most pods."""
    workload: str | Path | Workload | None = None
    """Requests and lives of pods: None (synthetic), a CSV file in the format of openb, or a ``Workload``."""
    unit_percent: float = UNIT_PERCENT
    """Cores are allocated in multiples of this. MPS takes whole percents; 2.5 are two of a V100's 80 SMs; 0 means any
    number."""
    reward: Literal["room", "seed"] = "room"
    """room: efficiency, QoS and penalties, minus a penalty for the time that the next pod waits for room. seed: without
    the waiting time, so that an allocation has hardly any effect on later rewards; fair shares as in compute_reward."""
    node_spread: float = 0.0
    """How much nodes differ in over-asking: standard deviation of the logit of the needed part of a request. The public
    traces say nothing about it: schedulers do not sort pods by what they need."""
    owner_spread: float = NEED_OWNER_SPREAD
    """How much the owners of one node differ in over-asking (the same unit)."""
    pod_spread: float = 1.0
    """How much the pods of one owner differ in cores and memory: factor on the measured differences."""
    idle_share: float = IDLE_SHARE
    """Share of pods that hold memory but never use the GPU."""
    mix: NodeMix | None = None
    """A fixed node. By default, every episode draws a new node."""
    split: str = "train"
    """Streams of pods: ``train``, ``validation`` or ``test``. ``test`` has the streams of ``clustergym eval``."""

    def __post_init__(self) -> None:
        for key, low, high in (("arrivals", 1, 10**9), ("owners", 1, 64)):
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key} is {getattr(self, key)}: expected {low} … {high}")
        if not 0 < self.load <= MAX_PODS:
            raise ValueError(f"load is {self.load}: expected more than 0, up to {MAX_PODS} pods")
        if not 0 <= self.unit_percent <= 10:
            raise ValueError(f"unit_percent is {self.unit_percent}: expected 0 … 10")
        if self.split not in FIRST_SEEDS:
            raise ValueError(f"split is {self.split!r}: expected one of {', '.join(FIRST_SEEDS)}")
        if self.reward not in ("room", "seed"):
            raise ValueError(f"reward is {self.reward!r}: expected 'room' or 'seed'")
        if not 0 <= self.idle_share <= 1:
            raise ValueError(f"idle_share is {self.idle_share}: expected 0 … 1")
        for key in ("node_spread", "owner_spread", "pod_spread"):
            if not 0 <= getattr(self, key) <= 5:
                raise ValueError(f"{key} is {getattr(self, key)}: expected 0 … 5")


@lru_cache(maxsize=8)
def _read_once(path: str, modified_ns: int) -> Workload:
    return read_openb(path)


@lru_cache(maxsize=1)
def _synthetic_once() -> Workload:
    return synthetic_workload()


def load_workload(source: str | Path | Workload | None) -> Workload:
    """The workload of a configuration. A file is read once for all environments."""
    if isinstance(source, Workload):
        return source
    if source is None:
        return _synthetic_once()
    return _read_once(str(source), Path(source).stat().st_mtime_ns)


class AllocationBatch:
    """B allocation episodes as tensors. All results are written in place: copy what must survive the next call.

    Attributes:
        obs: (B, 5 or 19) float32.
        reward: (B,) float64.
        ended: (B,) bool.
        last_obs: (B, 5 or 19) float32, the last observation of an ended episode.
        outcome: (B, 19) float32, results of the last decisions; columns ``state.OUTCOME_*``.
        final_sums: (B, 8) float64, sums over the last finished episodes; columns ``state.SUM_*``.

    Args:
        config: the task.
        num_envs: B.
        mixes: the node of each environment (B of them); by default ``config.mix`` for all.
    """

    def __init__(
        self, config: AllocationConfig | None = None, num_envs: int = 1, mixes: Sequence[NodeMix] | None = None
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config = config = config or AllocationConfig()
        self.num_envs = num_envs
        self.workload = load_workload(config.workload)
        self.n_features = N_STATE + (N_FEATURES if config.history else 0)
        if mixes is None:
            self.mixes: list[NodeMix | None] = [config.mix] * num_envs
        elif len(mixes) == num_envs:
            self.mixes = list(mixes)
        else:
            raise ValueError(f"mixes has {len(mixes)} entries for {num_envs} environments")
        self._allocate()
        self._rules = self._make_rules()

    @classmethod
    def for_nodes(cls, n_nodes: int, envs_per_node: int = 1, config: AllocationConfig | None = None) -> AllocationBatch:
        """N edge nodes, each with its own mix. Environment k is a copy of node k // envs_per_node."""
        mixes = [mix for mix in edge_mixes(n_nodes) for _ in range(envs_per_node)]
        return cls(config, n_nodes * envs_per_node, mixes)

    def _allocate(self) -> None:
        batch, owners = self.num_envs, self.config.owners

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((batch, *shape), dtype=dtype)

        self.state = {
            "random": torch.from_numpy(dynamics.stream_keys(np.arange(batch)).view(np.int64)),
            "counters": zeros(N_COUNTS, dtype=torch.int32),
            "time_s": zeros(dtype=torch.float64),
            "pods": zeros(MAX_PODS, N_POD),
            "ask": zeros(N_ASK),
            "habits": zeros(owners, N_HABIT),
            "history": zeros(owners, N_HISTORY),
            "outcome": zeros(N_OUTCOME),
            "sums": zeros(N_SUMS, dtype=torch.float64),
            "final_sums": zeros(N_SUMS, dtype=torch.float64),
        }
        self.outcome, self.final_sums = self.state["outcome"], self.state["final_sums"]
        self.obs, self.last_obs = zeros(self.n_features), zeros(self.n_features)
        self.reward, self.ended = zeros(dtype=torch.float64), zeros(dtype=torch.bool)
        arrays = {name: tensor.numpy() for name, tensor in self.state.items()}
        arrays["random"] = arrays["random"].view(np.uint64)
        self._state = State(**arrays)
        self._obs, self._last = self.obs.numpy(), self.last_obs.numpy()
        self._reward, self._ended = self.reward.numpy(), self.ended.numpy()

    def _make_rules(self) -> Rules:
        config, jobs = self.config, self.workload.jobs()
        popularity = np.cumsum((1.0 + np.arange(config.owners)) ** -POPULARITY)
        weights = np.array([(1.0,) * len(APPS) if mix is None else mix.apps for mix in self.mixes])
        cumulative = np.cumsum(weights, axis=1)
        return Rules(
            apps=np.array(list(APPS.values()), dtype=np.float64),
            jobs=jobs,
            n_best_effort=int((jobs[:, JOB_SENSITIVE] < 0.5).sum()),
            owner_weights=popularity / popularity[-1],
            app_weights=cumulative / cumulative[:, -1:],
            over_ask=np.array([np.nan if mix is None else mix.over_ask for mix in self.mixes]),
            mean_gap_s=float(jobs[:, JOB_LIFE].mean() / config.load),
            n_arrivals=int(config.arrivals),
            unit_percent=float(config.unit_percent),
            with_room=config.reward == "room",
            idle_share=float(config.idle_share),
            mean_logit=NEED_LOGIT,
            node_spread=float(config.node_spread),
            owner_spread=float(config.owner_spread),
            pod_spread=float(config.pod_spread),
        )

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a kernel over all environments; with threads if there are enough environments."""
        if self.num_envs < MIN_ENVS_FOR_THREADS or numba.config.NUMBA_NUM_THREADS == 1:
            function(0, self.num_envs, *arguments)
        else:
            spread(function, self.num_envs, *arguments)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return self.state | {"obs": self.obs, "last_obs": self.last_obs, "reward": self.reward, "ended": self.ended}

    @property
    def bytes_allocated(self) -> int:
        """Memory of all state and observation tensors."""
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def seed(self, seeds: npt.ArrayLike) -> None:
        """Set the seed of each environment (B,). Call :meth:`reset` afterwards."""
        keys = np.asarray(seeds, dtype=np.int64)
        if keys.shape != (self.num_envs,):
            raise ValueError(f"seeds has shape {keys.shape}: expected ({self.num_envs},)")
        self._state.random[:] = dynamics.stream_keys(keys + FIRST_SEEDS[self.config.split])

    def reset(self, where: torch.Tensor | None = None) -> torch.Tensor:
        """Begin new episodes in all environments, or where ``where`` (B,) is true. Returns ``obs``."""
        chosen = np.ones(self.num_envs, bool) if where is None else where.numpy()
        self._run(dynamics.begin_range, self._state, self._rules, self._obs, chosen)
        return self.obs

    def step(self, action: torch.Tensor | npt.ArrayLike, autoreset: bool = True) -> tuple[torch.Tensor, ...]:
        """Decide for the waiting pod of every environment. Actions (B, 2): cores and memory, clipped to 0 … 1.

        With autoreset, a new episode begins where one ended: ``last_obs`` then holds the last observation of the old
        episode, and ``final_sums`` its sums. Episodes only end because of their length, so trainers should bootstrap
        from ``last_obs``.

        Returns:
            (obs, reward, ended)
        """
        given = action.detach().numpy() if isinstance(action, torch.Tensor) else np.asarray(action)
        chosen = np.ascontiguousarray(given, dtype=np.float32)
        if chosen.shape != (self.num_envs, 2):
            raise ValueError(f"actions have shape {chosen.shape}: expected ({self.num_envs}, 2): cores, memory")
        if not np.isfinite(chosen).all():
            bad = int(np.flatnonzero(~np.isfinite(chosen).all(1))[0])
            raise ValueError(
                f"action of environment {bad} is {chosen[bad].tolist()}: expected two finite numbers, 0 … 1"
            )
        outputs = (self._obs, self._last, self._reward, self._ended)
        self._run(dynamics.step_range, self._state, self._rules, chosen, *outputs, autoreset)
        return self.obs, self.reward, self.ended

    def copy_first(self, copies: int) -> None:
        """Continue each group of ``copies`` consecutive environments from the state of its first one.

        The copies then see the same pod in the same situation, so their next rewards differ only by their actions.
        """
        for tensor in (*self.state.values(), self.obs):
            groups = tensor.view(-1, copies, *tensor.shape[1:])
            groups[:, 1:] = groups[:, :1]

    def oracle(self) -> torch.Tensor:
        """(B, 2) actions with the highest reward for the waiting pods, given their hidden needs."""
        action = np.zeros((self.num_envs, 2), np.float32)
        self._run(dynamics.oracle_range, self._state, self._rules, action)
        return torch.from_numpy(action)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of all tensors, for :meth:`load_state_dict`."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore a :meth:`state_dict` of a batch with the same configuration and size."""
        for name, tensor in self._tensors().items():
            if name not in saved or saved[name].shape != tensor.shape:
                found = "nothing" if name not in saved else f"shape {tuple(saved[name].shape)}"
                raise ValueError(f"saved environments have {found} for {name!r}: expected shape {tuple(tensor.shape)}")
            tensor.copy_(saved[name])

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": (self.config, self.num_envs, self.mixes), "state": self.state_dict()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(*content["arguments"])  # type: ignore[misc]
        self.load_state_dict(content["state"])
