"""B shared GPUs side by side: what the environments, the rules and the trainers stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from clustergym.gpu_allocation import dynamics
from clustergym.gpu_allocation.space import MAX_PODS, UNIT_PERCENT
from clustergym.gpu_allocation.specs import APPS, apps_table
from clustergym.gpu_allocation.workload import NodeMix, Workload, edge_mixes, read_openb, synthetic_workload

# Below this many environments a second thread costs more than it brings.
SERIAL = 512


@dataclass(frozen=True)
class AllocationConfig:
    """Everything that makes one allocation task; the environments take these as keyword arguments."""

    history: bool = False
    """Observe what the owner's earlier pods really used (``GPUAllocationHistory-v0``)."""
    arrivals: int = 128
    """Decisions in an episode."""
    load: float = 3.0
    """Pods that run at a time on average, were there always room: mean life / mean gap between arrivals."""
    owners: int = 6
    """Owners whose pods come to a node during an episode; the first come most often."""
    workload: str | Path | Workload | None = None
    """What pods ask for and how long they live: None (synthetic), a CSV file in openb's format, or a ``Workload``."""
    unit_percent: float = UNIT_PERCENT
    """Cores are handed out in multiples of this: whole percents, as MPS takes them. 2.5 is what two of a V100's 80 SMs are;
    0: any number."""
    node_spread: float = 0.75
    """How nodes differ in what their owners over-ask (standard deviation of the logit of the needed part)."""
    owner_spread: float = 0.7
    """How the owners on a node differ, likewise."""
    pod_spread: float = 0.01
    """How an owner's pods differ (standard deviation relative to what the owner's pods need)."""
    mix: NodeMix | None = None
    """A node that stays the same from episode to episode; by default each episode is on another node."""

    def __post_init__(self) -> None:
        for key, low, high in (("arrivals", 1, 10**9), ("owners", 1, 64)):
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key} is {getattr(self, key)}: expected {low} … {high}")
        if not 0 < self.load <= MAX_PODS:
            raise ValueError(f"load is {self.load}: expected more than 0, up to {MAX_PODS} pods")
        if not 0 <= self.unit_percent <= 10:
            raise ValueError(f"unit_percent is {self.unit_percent}: expected 0 … 10")
        for key in ("node_spread", "owner_spread", "pod_spread"):
            if not 0 <= getattr(self, key) <= 5:
                raise ValueError(f"{key} is {getattr(self, key)}: expected 0 … 5")


# With the default spreads the needed part of a request then has the mean and spread of a Beta(2, 2.5): 0.44 and 0.2.
MEAN_LOGIT = 0.2


@lru_cache(maxsize=8)
def _read_once(path: str, modified_ns: int) -> Workload:
    return read_openb(path)


@lru_cache(maxsize=1)
def _synthetic_once() -> Workload:
    return synthetic_workload()


def load_workload(source: str | Path | Workload | None) -> Workload:
    """The workload that a configuration names; a file is read once however many environments ask for it."""
    if isinstance(source, Workload):
        return source
    if source is None:
        return _synthetic_once()
    return _read_once(str(source), Path(source).stat().st_mtime_ns)


def stream_keys(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Seeds to states of the environments' generators: near seeds must not give near streams (splitmix64's finaliser)."""
    z = seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class AllocationBatch:
    """B allocation episodes as tensors; all that is written is written in place: copy what must outlive the next call.

    ``obs`` (B, 5 or 19) float32, ``reward`` (B,) float64, ``ended`` (B,) bool, ``last_obs`` (B, 5 or 19): where an episode
    ended, its last observation. ``outcome`` (B, 18) tells what the last decisions came to (columns ``dynamics.O_*``).

    Args:
        config: the task.
        num_envs: B.
        mixes: what each environment's node is like (B of them); by default ``config.mix`` for all.
    """

    def __init__(
        self, config: AllocationConfig | None = None, num_envs: int = 1, mixes: Sequence[NodeMix] | None = None
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config = config = config or AllocationConfig()
        self.num_envs = num_envs
        self.workload = load_workload(config.workload)
        self.n_features = dynamics.N_STATE + (dynamics.N_HISTORY_FEATURES if config.history else 0)
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
        """N edge nodes, each with its own mix: environment k is a copy of node k // envs_per_node."""
        mixes = [mix for mix in edge_mixes(n_nodes) for _ in range(envs_per_node)]
        return cls(config, n_nodes * envs_per_node, mixes)

    def _allocate(self) -> None:
        batch, owners = self.num_envs, self.config.owners

        def zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((batch, *shape), dtype=dtype)

        self.state = {
            "random": torch.from_numpy(stream_keys(np.arange(batch)).view(np.int64)),
            "counters": zeros((3,), torch.int32),
            "time_s": zeros((), torch.float64),
            "pods": zeros((MAX_PODS, dynamics.N_POD)),
            "ask": zeros((dynamics.N_ASK,)),
            "habits": zeros((owners, dynamics.N_HABIT)),
            "history": zeros((owners, dynamics.N_HISTORY)),
            "outcome": zeros((dynamics.N_OUTCOME,)),
            "sums": zeros((dynamics.N_SUMS,), torch.float64),
            "final_sums": zeros((dynamics.N_SUMS,), torch.float64),
        }
        self.obs = zeros((self.n_features,))
        self.last_obs = zeros((self.n_features,))
        self.reward = zeros((), torch.float64)
        self.ended = zeros((), torch.bool)
        arrays = {name: tensor.numpy() for name, tensor in self.state.items()}
        arrays["random"] = arrays["random"].view(np.uint64)
        self._state = dynamics.State(**arrays)
        self._obs, self._last = self.obs.numpy(), self.last_obs.numpy()
        self._reward, self._ended = self.reward.numpy(), self.ended.numpy()

    def _make_rules(self) -> dynamics.Rules:
        config, rows = self.config, self.workload.rows()
        popularity = np.cumsum((1.0 + np.arange(config.owners)) ** -0.5)
        weights = np.array([(1.0,) * len(APPS) if mix is None else mix.apps for mix in self.mixes])
        cumulative = np.cumsum(weights, axis=1)
        return dynamics.Rules(
            apps=apps_table(),
            rows=rows,
            owner_weights=popularity / popularity[-1],
            app_weights=cumulative / cumulative[:, -1:],
            over_ask=np.array([np.nan if mix is None else mix.over_ask for mix in self.mixes]),
            mean_gap_s=float(rows[:, 1].mean() / config.load),
            n_arrivals=int(config.arrivals),
            unit_percent=float(config.unit_percent),
            mean_logit=MEAN_LOGIT,
            node_spread=float(config.node_spread),
            owner_spread=float(config.owner_spread),
            pod_spread=float(config.pod_spread),
        )

    def _spread(self, function: Any, *arguments: Any) -> None:
        """Run a kernel over all environments, on as many threads as numba may use where there are enough of them."""
        if self.num_envs < SERIAL or numba.config.NUMBA_NUM_THREADS == 1:
            function(0, self.num_envs, *arguments)
            return
        from clustergym.common.threads import spread

        spread(function, self.num_envs, *arguments)

    @property
    def outcome(self) -> torch.Tensor:
        """(B, 18) what the last decision of each environment came to: columns ``dynamics.O_*``."""
        return self.state["outcome"]

    @property
    def final_sums(self) -> torch.Tensor:
        """(B, 7) sums over the last finished episode: columns ``dynamics.S_*``."""
        return self.state["final_sums"]

    @property
    def bytes_allocated(self) -> int:
        """Memory of all state and observation tensors."""
        tensors = [*self.state.values(), self.obs, self.last_obs, self.reward, self.ended]
        return sum(t.numel() * t.element_size() for t in tensors)

    def seed(self, seeds: npt.ArrayLike) -> None:
        """Give each environment (B,) a seed; it takes effect at its next reset."""
        keys = np.asarray(seeds, dtype=np.int64)
        if keys.shape != (self.num_envs,):
            raise ValueError(f"seeds has shape {keys.shape}: expected ({self.num_envs},)")
        self._state.random[:] = stream_keys(keys)

    def reset(self, where: torch.Tensor | None = None) -> torch.Tensor:
        """Begin new episodes, in all environments or where ``where`` (B,) is true. Returns ``obs``."""
        chosen = np.ones(self.num_envs, bool) if where is None else where.numpy()
        self._spread(dynamics.begin_range, self._state, self._rules, self._obs, chosen)
        return self.obs

    def step(self, action: torch.Tensor | npt.ArrayLike, autoreset: bool = True) -> tuple[torch.Tensor, ...]:
        """Decide for the waiting pod of every environment; action (B, 2), 0 … 1 (clipped), cores and memory.

        Returns (obs, reward, ended). With autoreset, a new episode has begun where one ended: ``last_obs`` holds the old
        one's last observation and ``final_sums`` its sums. Episodes end by their length, never by what happens in them:
        a trainer bootstraps from ``last_obs``.
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
        self._spread(
            dynamics.step_range, self._state, self._rules, chosen, self._obs, self._last, self._reward, self._ended, autoreset
        )  # fmt: skip
        return self.obs, self.reward, self.ended

    def oracle(self) -> torch.Tensor:
        """(B, 2) the actions that would earn most right now, found by trying every one with the waiting pod's hidden need."""
        action = np.zeros((self.num_envs, 2), np.float32)
        self._spread(dynamics.oracle_range, self._state, self._rules, action)
        return torch.from_numpy(action)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that a later :meth:`load_state_dict` needs to go on exactly here."""
        extra = {"obs": self.obs, "last_obs": self.last_obs, "reward": self.reward, "ended": self.ended}
        return {name: tensor.clone() for name, tensor in (self.state | extra).items()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on where :meth:`state_dict` was taken, on a batch of the same configuration and size."""
        extra = {"obs": self.obs, "last_obs": self.last_obs, "reward": self.reward, "ended": self.ended}
        for name, tensor in (self.state | extra).items():
            if name not in saved or saved[name].shape != tensor.shape:
                found = "nothing" if name not in saved else f"shape {tuple(saved[name].shape)}"
                raise ValueError(f"saved environments have {found} for {name!r}: expected shape {tuple(tensor.shape)}")
            tensor.copy_(saved[name])
