"""Submitted planners: the side of the benchmark, and the side of the process that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.bench.limited import CallFailed, LimitedFunction
from clustergym.bench.suites import Limits
from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner

MAX_FAILURES_IN_A_ROW = 3
"""After so many failed decisions in a row the function is not called again."""


def simulator_options(simulator: Simulator) -> dict[str, Any]:
    """What a process must know to make the simulator, and the arguments of DeepSeek's function."""
    return {
        "model": simulator.model.name,
        "cluster": simulator.cluster.name,
        "slots_per_gpu": simulator.n_slots,
        "profile": simulator.profile.name,
        "passes_per_interval": simulator.passes_per_interval,
        "num_replicas": simulator.n_gpus * simulator.n_slots,
        "num_groups": simulator.model.n_groups,
        "num_nodes": simulator.cluster.n_nodes,
        "num_gpus": simulator.n_gpus,
    }


def drop_second_copies(placement: npt.NDArray[np.integer[Any]]) -> Placement:
    """Empty the slots with an expert that the same GPU holds already. DeepSeek's EPLB may give such placements."""
    cleaned = np.array(placement, np.int16)
    for slot in range(1, cleaned.shape[2]):
        column = cleaned[:, :, slot]
        column[(cleaned[:, :, :slot] == column[:, :, None]).any(2)] = -1
    return cleaned


@dataclass(eq=False, kw_only=True)
class Submitted(Planner):
    """Plans with a function in a subprocess. A decision that fails leaves the placement as it is, and is counted."""

    function: LimitedFunction
    failures: list[str] = field(default_factory=list)
    """Messages of the failed decisions."""
    calls: int = 0
    _in_a_row: int = 0

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        self.calls += 1
        if self._in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.failures.append(f"not called after {MAX_FAILURES_IN_A_ROW} failures in a row")
            return placement
        try:
            answer = self.function(self.request(history, placement))
            found = self.simulator.check(drop_second_copies(self._shaped(answer, placement)))
        except (CallFailed, ValueError) as error:
            self._in_a_row += 1
            self.failures.append(str(error))
            return placement
        self._in_a_row = 0
        return found

    @staticmethod
    def _shaped(answer: npt.NDArray[Any], placement: Placement) -> npt.NDArray[Any]:
        if answer.dtype.kind not in "iu" or answer.size != placement.size or len(answer) != len(placement):
            raise ValueError(
                f"the answer has dtype {answer.dtype} and shape {answer.shape}: expected integers of shape "
                f"({placement.shape[0]}, {placement[0].size}), the expert in each slot of each layer"
            )
        return answer.reshape(placement.shape)

    def request(self, history: Sequence[Interval], placement: Placement) -> dict[str, npt.NDArray[Any]]:
        """The arrays that the function gets."""
        return {"weight": history[-1].loads(self.simulator.n_experts)}

    def measured_s(self) -> float:
        return self.function.seconds


class SubmittedOnLoads(Submitted):
    """A function with the arguments of DeepSeek's ``rebalance_experts``."""

    needs_tokens = False


class SubmittedOnTokens(Submitted):
    """A function ``plan(history, placement, simulator)``, or a subclass of ``Planner``."""

    def request(self, history: Sequence[Interval], placement: Placement) -> dict[str, npt.NDArray[Any]]:
        last = history[-1]
        # Only the tokens that were served: the rest of the trace has those to come.
        return {
            "experts": last.experts[:, last.rows.ravel()],
            "rank_start": last.rank_start,
            "placement": placement,
            "first": np.array(len(history) == 1),
        }


def submit(target: str, simulator: Simulator, limits: Limits, seed: int) -> Submitted:
    """Start the process of a submitted function.

    Raises:
        ValueError: the function cannot be imported.
    """
    function = LimitedFunction(target, "placement", simulator_options(simulator), limits)
    try:
        needs = function.start()
    except CallFailed as error:
        function.close()
        raise ValueError(f"--planner {target}: {error}") from error
    kind = SubmittedOnLoads if needs == "loads" else SubmittedOnTokens
    return kind(simulator, seed, function=function)


def call_ours(found: Any, options: dict[str, Any]) -> Callable[[dict[str, npt.NDArray[Any]]], npt.NDArray[Any]]:
    """In the subprocess: call a ``Planner`` class or a function ``plan(history, placement, simulator)``."""
    cluster = get_cluster(options["cluster"], slots_per_gpu=options["slots_per_gpu"])
    simulator = Simulator(options["model"], cluster, options["profile"], options["passes_per_interval"])
    planner: Any = found(simulator) if isinstance(found, type) else None
    history: list[Interval] = []

    def call(arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        passes = len(arrays["rank_start"])
        if arrays["first"]:
            history.clear()
            if planner is not None:
                planner.reset()
        rows = np.arange(arrays["experts"].shape[1], dtype=np.int32).reshape(passes, -1)
        history.append(Interval(arrays["experts"], rows, arrays["rank_start"]))
        placement = arrays["placement"]
        plan = found(history, placement, simulator) if planner is None else planner.plan(history, placement)
        return np.asarray(plan).reshape(len(plan), -1)

    return call
