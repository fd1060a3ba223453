"""The public EPLB evolution benchmark (abmfy/eplb-openevolve): plan on one window of loads, score on the next.

Scores are computed as its evaluator does: balancedness of the slots, 0.02 s / decision time (at most 1), and the mean
of both. Its setting is 288 slots on 32 GPUs in 4 nodes, 8 groups, and windows of 100 steps. Loads say nothing about
communication: the task ``v3-4x8-prefill-drift`` of ``placement-v1`` has these sizes and tokens. Migration is counted
here from the slots that change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.bench.entries import Entry
from clustergym.bench.limited import CallFailed, LimitedFunction
from clustergym.bench.play import evolution_speed
from clustergym.bench.suites import Limits
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster, get_model
from clustergym.planners.evaluation import slot_balancedness
from clustergym.planners.recorded import LoadInterval
from clustergym.planners.registry import make_planner, planners_on_loads
from clustergym.traces import LoadTrace, load_any_trace
from clustergym.traces.readers import load_history
from clustergym.traces.readers.base import ReadOptions

MODEL, CLUSTER = "deepseek-v3", "h800-4x8"
"""What the public load history was recorded from, and a cluster of its size: for named planners and bytes."""
Loads = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """Sizes of the benchmark."""

    num_replicas: int = 288
    num_groups: int = 8
    num_nodes: int = 4
    num_gpus: int = 32


@dataclass(frozen=True)
class EvolutionScore:
    """Means over the windows."""

    entry: str
    balancedness: float
    speed: float
    decision_s: float
    """Seconds per decision for all layers, without starting the process"""
    moves: float
    """Replicas per layer that some GPU must receive"""
    migration_gb: float
    """Weights that move per decision, all layers, with the experts of DeepSeek-V3"""
    failed: float
    """Share of the decisions that failed. They count as a balancedness of 0, as in the public evaluator."""

    @property
    def combined(self) -> float:
        return (self.balancedness + self.speed) / 2

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"combined": self.combined}


def load_windows(path: Path, steps: int = 100) -> list[Loads]:
    """(L, E) loads of consecutive windows of so many steps. The last one may be shorter, as in the public evaluator."""
    if steps < 1:
        raise ValueError(f"--window is {steps}: expected at least 1")
    if not path.is_file():
        raise ValueError(f"no load history at {path}")
    trace = load_history.read([path], ReadOptions()) if path.suffix == ".json" else load_any_trace(str(path))
    if not isinstance(trace, LoadTrace):
        raise ValueError(f"{path} is a token trace: the evolution benchmark needs a load history")
    windows = [trace.counts[i : i + steps].sum(0) for i in range(0, trace.n_steps, steps)]
    if len(windows) < 2:
        raise ValueError(f"{path}: {trace.n_steps} steps are less than two windows of {steps}: use a smaller --window")
    return windows


def evaluate_on_loads(
    entry: Entry, windows: Sequence[Loads], setting: Setting | None = None, limits: Limits | None = None
) -> EvolutionScore:
    """Plan on each window but the last, and score on the next one."""
    setting, limits = setting or Setting(), limits or Limits()
    balances, times, moves, failed = [], [], [], 0
    before: npt.NDArray[np.bool_] | None = None
    with _decider(entry, setting, limits) as decide:
        decide(windows[0])  # not timed: imports and compiles
        for seen, served in pairwise(windows):
            try:
                slots, seconds = decide(seen)
                balances.append(slot_balancedness(served, slots))
            except CallFailed:
                failed += 1
                balances.append(0.0)
                continue
            times.append(seconds)
            held = _held(slots, setting, served.shape[1])
            if before is not None:
                moves.append((held & ~before).sum() / len(slots))
            before = held
    seconds = float(np.mean(times)) if times else limits.seconds
    moved = float(np.mean(moves)) if moves else 0.0
    return EvolutionScore(
        entry=entry.name,
        balancedness=float(np.mean(balances)),
        speed=evolution_speed(seconds),
        decision_s=seconds,
        moves=moved,
        migration_gb=moved * len(windows[0]) * get_model(MODEL).expert_bytes / 1e9,
        failed=failed / (len(windows) - 1),
    )


Decide = Callable[[Loads], tuple[npt.NDArray[np.int64], float]]


@contextmanager
def _decider(entry: Entry, setting: Setting, limits: Limits) -> Iterator[Decide]:
    """A function from loads to the expert in each slot (L, slots), and the seconds that it took."""
    if entry.kind == "named":
        yield _named(entry.target, setting)
    elif entry.kind == "function":
        with LimitedFunction(entry.target, "placement", asdict(setting), limits) as function:

            def decide(loads: Loads) -> tuple[npt.NDArray[np.int64], float]:
                answer = function({"weight": loads})
                if answer.shape != (len(loads), setting.num_replicas) or answer.dtype.kind not in "iu":
                    raise CallFailed(f"the answer is {answer.dtype} {answer.shape}: expected one expert per slot")
                if answer.min() < 0 or answer.max() >= loads.shape[1] or not _complete(answer, loads.shape[1]):
                    raise CallFailed("the answer names an expert that does not exist, or gives an expert no slot")
                return answer.astype(np.int64), function.seconds

            try:
                if function.start() != "loads":
                    raise ValueError(f"{entry.target}: expected a function with the arguments of rebalance_experts")
                yield decide
            except CallFailed as error:
                raise ValueError(f"{entry.target}: {error}") from error
    else:
        raise ValueError(f"{entry.name}: a load history can score planners only, not a {entry.kind}")


def _named(name: str, setting: Setting) -> Decide:
    if name not in planners_on_loads():
        raise ValueError(f"{name} needs tokens; planners on loads are: {', '.join(planners_on_loads())}")
    cluster = get_cluster(CLUSTER, slots_per_gpu=setting.num_replicas // setting.num_gpus)
    simulator = Simulator(MODEL, cluster)
    planner = make_planner(name, simulator)
    placement = None

    def decide(loads: Loads) -> tuple[npt.NDArray[np.int64], float]:
        nonlocal placement
        if loads.shape[1] != simulator.n_experts:
            raise ValueError(f"{loads.shape[1]} experts: named planners need the {simulator.n_experts} of {MODEL}")
        interval = LoadInterval(loads[None], max(1, int(loads[0].sum()) // simulator.model.top_k))
        placement = simulator.static(len(loads)) if placement is None else placement
        began = time.perf_counter()
        placement = planner.plan([interval], placement)
        seconds = time.perf_counter() - began
        return placement.reshape(len(loads), -1).astype(np.int64), seconds

    return decide


def _complete(slots: npt.NDArray[np.integer[Any]], n_experts: int) -> bool:
    return all(len(np.unique(layer)) == n_experts for layer in slots)


def _held(slots: npt.NDArray[np.int64], setting: Setting, n_experts: int) -> npt.NDArray[np.bool_]:
    """(L, G, E) whether a GPU holds an expert."""
    held = np.zeros((len(slots), setting.num_gpus, n_experts + 1), bool)
    np.put_along_axis(
        held, np.where(slots < 0, n_experts, slots).reshape(len(slots), setting.num_gpus, -1), True, axis=2
    )
    return held[:, :, :-1]
