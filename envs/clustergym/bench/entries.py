"""What takes part: planners and rules by name, submitted planners, and agents."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from clustergym.bench.suites import Limits
from clustergym.bench.worker_function import CallFailed, WorkerFunction
from clustergym.gpu_allocation.rules import RULES
from clustergym.moe_offload.rules import RULES as OFFLOAD_RULES
from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.registry import PLANNERS, planner_class

RANDOM, SHIPPED = "random-networks", "shipped"
"""Offloading: the trainer's networks without training, and the policy that ``clustergym offload fit`` makes."""
MAX_FAILURES_IN_A_ROW = 3
"""After so many failed decisions in a row the function is not called again."""


@dataclass(frozen=True)
class Entry:
    """One participant."""

    kind: Literal["named", "planner", "agent", "policy"]
    target: str
    """Name of a planner or rule, ``module:function`` or ``file.py:function``, or a run folder with a policy."""
    env_id: str = "MoEPlacement-v0"
    """The form of the environment that an agent acts in."""
    predictor: str = ""
    """Folder of a predictor that an offloading entry reads."""

    @property
    def name(self) -> str:
        return Path(self.target.rpartition("/")[2]).as_posix()

    @property
    def folder(self) -> str:
        """Name of the folder with the results."""
        return re.sub(r"[^A-Za-z0-9._-]+", "_", self.name).strip("._") or "entry"

    @property
    def code_sha256(self) -> str:
        """Hash of what is not part of clustergym: the submitted file, policy and predictor."""
        files = [] if self.kind in ("named", "policy") else [_source(self.target)]
        for folder in [self.target] * (self.kind == "policy") + [self.predictor] * bool(self.predictor):
            known = [path for path in sorted(Path(folder).glob("*")) if path.suffix in (".onnx", ".safetensors")]
            files += known or [Path(folder)]
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name, "code_sha256": self.code_sha256}


def _source(target: str) -> Path:
    """The file of ``module:function``, found without importing it."""
    module = target.rpartition(":")[0]
    path = Path(module)
    if not module.endswith(".py"):
        try:
            spec = importlib.util.find_spec(module)
        except (ModuleNotFoundError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            raise ValueError(f"no module {module!r}: give module:function or file.py:function")
        path = Path(spec.origin)
    if not path.is_file():
        raise ValueError(f"no file at {path}")
    return path


def named_entries(kind: str) -> list[str]:
    """Names of all entries of a kind of task, except planners for small instances only."""
    if kind == "allocation":
        return list(RULES)
    if kind == "offload":
        return [*OFFLOAD_RULES, RANDOM, SHIPPED]
    return [name for name in PLANNERS if not planner_class(name).small_only]


def sees_the_future(entry: Entry, kind: str) -> bool:
    """Whether the entry uses data of the future. It is a bound, not a competitor."""
    if entry.kind != "named":
        return False
    if kind == "allocation":
        return entry.target == "oracle"
    if kind == "offload":
        return entry.target in OFFLOAD_RULES and OFFLOAD_RULES[entry.target].kind == "bound"
    planner = planner_class(entry.target)
    return planner.needs_future or planner.needs_mixture


def parse_entries(
    kind: str, planners: Sequence[str], agents: Sequence[str], env_id: str | None = None, predictor: str = ""
) -> list[Entry]:
    """Entries from the flags of the command line. Without any, every named entry.

    Raises:
        ValueError: a name is unknown, or a file does not exist.
    """
    known = named_entries(kind)
    if list(planners) == ["all"] or not (planners or agents):
        planners = [name for name in known if predictor or not needs_predictor(kind, name)]
    entries: list[Entry] = []
    for name in planners:
        if ":" in name and kind != "placement":
            raise ValueError(f"--planner {name}: this suite takes rules by name, and --agent")
        if kind == "placement" and ":" not in name:
            planner_class(name)  # an error if there is none
        elif ":" not in name and name not in known:
            raise ValueError(f"unknown rule {name!r}; the rules are: {', '.join(known)}")
        if needs_predictor(kind, name) and not predictor:
            raise ValueError(f"--planner {name}: give --predictor DIR, made by clustergym offload fit")
        entries.append(Entry("planner" if ":" in name else "named", name))
    env_id = env_id or ("MoEOffload-v0" if kind == "offload" else "MoEPlacement-v0")
    for target in agents:
        entries.append(Entry("policy" if kind == "offload" and Path(target).exists() else "agent", target, env_id))
    if kind == "offload":
        entries = [replace(entry, env_id=env_id, predictor=predictor) for entry in entries]
    for entry in entries:
        _ = entry.code_sha256
    if len({entry.folder for entry in entries}) < len(entries):
        raise ValueError("two entries have the same name: run them one at a time, with different --folder")
    return entries


def needs_predictor(kind: str, name: str) -> bool:
    """Whether a named entry reads a fitted predictor."""
    return kind == "offload" and (name == SHIPPED or (name in OFFLOAD_RULES and OFFLOAD_RULES[name].kind == "control"))


# Submitted planners


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
class SubmittedPlanner(Planner):
    """Plans with a function in a subprocess. A decision that fails leaves the placement as it is, and is counted."""

    function: WorkerFunction
    sees_loads: bool
    """The function has the arguments of DeepSeek's ``rebalance_experts``."""
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
            found = self.simulator.check(drop_second_copies(_shaped(answer, placement)))
        except (CallFailed, ValueError) as error:
            self._in_a_row += 1
            self.failures.append(str(error))
            return placement
        self._in_a_row = 0
        return found

    def request(self, history: Sequence[Interval], placement: Placement) -> dict[str, npt.NDArray[Any]]:
        """The arrays that the function gets."""
        last = history[-1]
        if self.sees_loads:
            return {"weight": last.loads(self.simulator.n_experts)}
        # Only the tokens that were served: the rest of the trace has those to come.
        return {
            "experts": last.experts[:, last.rows.ravel()],
            "rank_start": last.rank_start,
            "placement": placement,
            "first": np.array(len(history) == 1),
        }


def _shaped(answer: npt.NDArray[Any], placement: Placement) -> npt.NDArray[Any]:
    if answer.dtype.kind not in "iu" or answer.size != placement.size or len(answer) != len(placement):
        raise ValueError(
            f"the answer has dtype {answer.dtype} and shape {answer.shape}: expected integers of shape "
            f"({placement.shape[0]}, {placement[0].size}), the expert in each slot of each layer"
        )
    return answer.reshape(placement.shape)


def start_planner(target: str, simulator: Simulator, limits: Limits) -> SubmittedPlanner:
    """Start the process of a submitted planner.

    Raises:
        ValueError: the code cannot be imported.
    """
    function = WorkerFunction(target, "planner", simulator_options(simulator), limits)
    try:
        sees = function.start()
    except CallFailed as error:
        function.close()
        raise ValueError(f"--planner {target}: {error}") from error
    return SubmittedPlanner(simulator, function=function, sees_loads=sees == "loads")
