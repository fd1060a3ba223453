"""B shared GPUs as arrays: the base of the environments, the rules and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from clustergym.common.threads import parallel_for
from clustergym.gpu_allocation import simulator
from clustergym.gpu_allocation.fitted import NEED_LOGIT, POPULARITY
from clustergym.gpu_allocation.history import N_FEATURES, N_HISTORY
from clustergym.gpu_allocation.space import MAX_PODS, N_STATE
from clustergym.gpu_allocation.specs import APPS, FIRST_SEEDS, AllocationConfig, NodeMix, edge_mixes
from clustergym.gpu_allocation.state import (
    COUNT_DECISIONS,
    JOB_LIFE,
    JOB_SENSITIVE,
    N_ASK,
    N_COUNTS,
    N_HABIT,
    N_OUTCOME,
    N_POD,
    N_SUMS,
    OUTCOME_REWARD,
    Constants,
    Doubles,
    Flags,
    Floats,
    State,
)
from clustergym.gpu_allocation.workload import load_workload

# With fewer environments than this, a second thread costs more time than it saves.
MIN_ENVS_FOR_THREADS = 512


class AllocationBatch:
    """B allocation episodes. All results are written in place: copy what must survive the next call.

    Attributes:
        obs: (B, 5 or 19) float32.
        state: everything else that changes (:class:`clustergym.gpu_allocation.state.State`).

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
        self.mixes: list[NodeMix | None] = [config.mix] * num_envs if mixes is None else list(mixes)
        if len(self.mixes) != num_envs:
            raise ValueError(f"mixes has {len(self.mixes)} entries for {num_envs} environments")
        self.workload = load_workload(config.workload)
        self.n_features = N_STATE + (N_FEATURES if config.history else 0)
        self.obs: Floats = np.zeros((num_envs, self.n_features), np.float32)
        self.state = State(
            random=simulator.stream_keys(np.arange(num_envs)),
            counters=np.zeros((num_envs, N_COUNTS), np.int32),
            time_s=np.zeros(num_envs),
            pods=np.zeros((num_envs, MAX_PODS, N_POD), np.float32),
            ask=np.zeros((num_envs, N_ASK), np.float32),
            habits=np.zeros((num_envs, config.owners, N_HABIT), np.float32),
            history=np.zeros((num_envs, config.owners, N_HISTORY), np.float32),
            outcome=np.zeros((num_envs, N_OUTCOME), np.float32),
            sums=np.zeros((num_envs, N_SUMS)),
        )
        self._constants = self._make_constants()
        self._all = np.ones(num_envs, bool)

    @classmethod
    def for_nodes(cls, n_nodes: int, envs_per_node: int = 1, config: AllocationConfig | None = None) -> AllocationBatch:
        """N edge nodes, each with its own mix. Environment k is a copy of node k // envs_per_node."""
        mixes = [mix for mix in edge_mixes(n_nodes) for _ in range(envs_per_node)]
        return cls(config, n_nodes * envs_per_node, mixes)

    def _make_constants(self) -> Constants:
        config, jobs = self.config, self.workload.jobs()
        popularity = np.cumsum((1.0 + np.arange(config.owners)) ** -POPULARITY)
        weights = np.array([(1.0,) * len(APPS) if mix is None else mix.apps for mix in self.mixes])
        cumulative = np.cumsum(weights, axis=1)
        return Constants(
            apps=np.array(list(APPS.values()), dtype=np.float64),
            jobs=jobs,
            n_best_effort=int((jobs[:, JOB_SENSITIVE] < 0.5).sum()),
            owner_weights=popularity / popularity[-1],
            app_weights=cumulative / cumulative[:, -1:],
            over_ask=np.array([np.nan if mix is None else mix.over_ask for mix in self.mixes]),
            mean_gap_s=float(jobs[:, JOB_LIFE].mean() / config.load),
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
            function(0, self.num_envs, self.state, self._constants, *arguments)
        else:
            parallel_for(function, self.num_envs, self.state, self._constants, *arguments)

    @property
    def outcome(self) -> Floats:
        """(B, 19) results of the last decisions; columns ``state.OUTCOME_*``."""
        return self.state.outcome

    @property
    def reward(self) -> Doubles:
        """(B,) rewards of the last decisions."""
        return self.state.outcome[:, OUTCOME_REWARD].astype(np.float64)

    @property
    def ended(self) -> Flags:
        """(B,) whether an episode has had all its decisions. It is over then only because of its length."""
        ended: Flags = self.state.counters[:, COUNT_DECISIONS] >= self.config.arrivals
        return ended

    def seed(self, seeds: npt.ArrayLike, where: Flags | None = None) -> None:
        """Set the seed of each environment (B,), or where ``where`` is true. Call :meth:`reset` afterwards."""
        keys = np.asarray(seeds, dtype=np.int64)
        if keys.shape != (self.num_envs,):
            raise ValueError(f"seeds has shape {keys.shape}: expected ({self.num_envs},)")
        chosen = self._all if where is None else where
        self.state.random[chosen] = simulator.stream_keys(keys + FIRST_SEEDS[self.config.split])[chosen]

    def reset(self, where: Flags | None = None) -> Floats:
        """Begin new episodes in all environments, or where ``where`` (B,) is true. Returns ``obs``."""
        self._run(simulator.begin_range, self.obs, self._all if where is None else where)
        return self.obs

    def step(self, action: npt.ArrayLike, where: Flags | None = None) -> tuple[Floats, Doubles, Flags]:
        """Decide for the waiting pod of every environment, or where ``where`` (B,) is true.

        Actions (B, 2) are cores and memory, clipped to 0 … 1. Nothing begins by itself where an episode has ended.

        Returns:
            (obs, reward, ended)
        """
        chosen = np.ascontiguousarray(action, dtype=np.float32)
        if chosen.shape != (self.num_envs, 2):
            raise ValueError(f"actions have shape {chosen.shape}: expected ({self.num_envs}, 2): cores, memory")
        if not np.isfinite(chosen).all():
            bad = int(np.flatnonzero(~np.isfinite(chosen).all(1))[0])
            raise ValueError(
                f"action of environment {bad} is {chosen[bad].tolist()}: expected two finite numbers, 0 … 1"
            )
        self._run(simulator.step_range, chosen, self.obs, self._all if where is None else where)
        return self.obs, self.reward, self.ended

    def copy_first(self, copies: int) -> Floats:
        """Continue each group of ``copies`` consecutive environments from the state of its first one. Returns ``obs``.

        The copies then see the same pod in the same situation, so their next rewards differ only by their actions.
        """
        for array in (*self.state, self.obs):
            groups = array.reshape(-1, copies, *array.shape[1:])
            groups[:, 1:] = groups[:, :1]
        return self.obs

    def oracle(self) -> Floats:
        """(B, 2) actions with the highest reward for the waiting pods, given their hidden needs."""
        action = np.zeros((self.num_envs, 2), np.float32)
        self._run(simulator.oracle_range, action)
        return action

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        # Random numbers are signed here: checkpoints hold tensors, and torch can do little with unsigned ones.
        return self.state._asdict() | {"random": self.state.random.view(np.int64), "obs": self.obs}

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of everything that changes, for :meth:`set_state`."""
        return {name: array.copy() for name, array in self._arrays().items()}

    def set_state(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go back to a :meth:`get_state` of a batch with the same configuration and size: it goes on bit for bit."""
        for name, array in self._arrays().items():
            if name not in saved or saved[name].shape != array.shape:
                found = "nothing" if name not in saved else f"shape {saved[name].shape}"
                raise ValueError(f"saved environments have {found} for {name!r}: expected shape {array.shape}")
            array[:] = saved[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": (self.config, self.num_envs, self.mixes), "state": self.get_state()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(*content["arguments"])  # type: ignore[misc]
        self.set_state(content["state"])
