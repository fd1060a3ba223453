"""Suites: versioned lists of frozen tasks, in JSON files under ``frozen/``.

A task defines everything that affects a result: data with their hash, split, model, cluster, profile, schedule, sizes,
seeds, and the time and memory that a decision may take. A published suite is never changed; a better one gets a new
version.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import clustergym  # noqa: F401  registers the environments
from clustergym.gpu_allocation.batch import AllocationConfig, load_workload
from clustergym.gpu_allocation.workload import Workload
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster, model_for
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.evaluation import Protocol
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN
from clustergym.traces import SyntheticConfig, synthetic_trace
from clustergym.traces.token_trace import TokenTrace

FOLDER = Path(__file__).parent / "frozen"


@dataclass(frozen=True)
class Limits:
    """What one decision of a submitted function may take."""

    seconds: float = 10.0
    """Maximum wall time of a decision. A slower one is discarded, and the current placement stays."""
    memory_mb: int = 4096
    """Address space of the process."""
    start_seconds: float = 60.0
    """Wall time for starting the process and importing the function."""


@dataclass(frozen=True)
class PlacementTask:
    """Plan after every interval, serve the next one."""

    name: str
    trace: str
    """Name of a bundled trace, or ``synthetic`` for one that is generated from ``synthetic``."""
    data_sha256: str
    cluster: str
    profile: str
    schedule: str
    tokens_per_rank: int
    sampled_passes: int
    intervals: int
    """Intervals per stream that are served and counted."""
    streams: int
    """Streams, drawn from disjoint sequences with the seeds ``seed``, ``seed`` + 1, …: the runs of the task."""
    seed: int = 0
    split: str = "test"
    model: str | None = None
    synthetic: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    """Positions of the layers that are used; empty means all."""
    slots_per_gpu: int | None = None
    drift_rate: float = 0.5
    passes_per_interval: int = 1000
    ops_per_layer: int = 8
    """Operations of an agent on each layer between two intervals."""
    limits: Limits = field(default_factory=Limits)
    kind: str = "placement"

    @property
    def protocol(self) -> Protocol:
        traffic = Traffic(
            self.simulator.profile.phase, self.tokens_per_rank, self.sampled_passes, self.schedule, self.drift_rate
        )
        return Protocol(traffic, self.intervals, self.streams, self.seed, self.split)

    @property
    def simulator(self) -> Simulator:
        slots = {} if self.slots_per_gpu is None else {"slots_per_gpu": self.slots_per_gpu}
        cluster = get_cluster(self.cluster, **slots)
        passes = PASSES_OF_A_PERMANENT_PLAN if self.schedule == "stationary" else self.passes_per_interval
        return Simulator(model_for(self.load(), self.model), cluster, self.profile, passes)

    def load(self) -> TokenTrace:
        """The trace.

        Raises:
            ValueError: the data are not those of the suite.
        """
        trace = _load(self.trace, json.dumps(self.synthetic, sort_keys=True), self.layers)
        found = trace_sha256(trace)
        if self.data_sha256 and found != self.data_sha256:
            raise ValueError(
                f"task {self.name}: the trace {trace.name} has sha256 {found[:12]}…, but the suite was frozen with "
                f"{self.data_sha256[:12]}…: results would not be comparable"
            )
        return trace


@dataclass(frozen=True)
class AllocationTask:
    """Allocate cores and memory to a stream of pods."""

    name: str
    env_id: str
    streams: int
    """Episodes, with the seeds ``seed``, ``seed`` + 1, …: the runs of the task."""
    seed: int = 2**40
    """First seed. Trainers use 31-bit seeds, so they never see these streams."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    data_sha256: str = ""
    """Hash of the workload that pods are drawn from."""
    limits: Limits = field(default_factory=Limits)
    kind: str = "allocation"

    @property
    def config(self) -> AllocationConfig:
        """The configuration of the environment.

        Raises:
            ValueError: the workload is not that of the suite.
        """
        spec = gymnasium.spec(self.env_id)
        config = AllocationConfig(**{**spec.kwargs, **self.options})
        found = workload_sha256(load_workload(config.workload))
        if self.data_sha256 and found != self.data_sha256:
            raise ValueError(
                f"task {self.name}: the workload has sha256 {found[:12]}…, but the suite was frozen with "
                f"{self.data_sha256[:12]}…: results would not be comparable"
            )
        return config


Task = PlacementTask | AllocationTask
_KINDS: dict[str, type[PlacementTask] | type[AllocationTask]] = {
    "placement": PlacementTask,
    "allocation": AllocationTask,
}


@dataclass(frozen=True)
class Suite:
    """A versioned list of tasks."""

    name: str
    about: str
    tasks: tuple[Task, ...]
    quick_tasks: tuple[str, ...]
    """Tasks of ``--quick``, with fewer streams and intervals."""
    reference: str
    """Entry that scores are compared with."""

    def quick(self) -> Suite:
        """A small version to try things out. Its results are not for the leaderboard."""
        tasks = [_smaller(task) for task in self.tasks if task.name in self.quick_tasks]
        return replace(self, name=f"{self.name}-quick", tasks=tuple(tasks))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sha256(self) -> str:
        return sha256_of(self.as_dict())


def _smaller(task: Task) -> Task:
    if isinstance(task, PlacementTask):
        return replace(task, streams=min(2, task.streams), intervals=min(2, task.intervals))
    return replace(task, streams=min(16, task.streams))


def sha256_of(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def task_sha256(task: Task) -> str:
    """Hash of the definition of a task."""
    return sha256_of(asdict(task))


def suite_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_suite(name: str) -> Suite:
    """A suite by name, such as ``placement-v1``."""
    path = FOLDER / f"{name}.json"
    if name not in suite_names():
        raise ValueError(f"unknown suite {name!r}; the suites are: {', '.join(suite_names())}")
    document = json.loads(path.read_text())
    tasks = tuple(_task(each) for each in document["tasks"])
    return Suite(document["name"], document["about"], tasks, tuple(document["quick_tasks"]), document["reference"])


def _task(document: dict[str, Any]) -> Task:
    kind = _KINDS[document["kind"]]
    values = {f.name: document[f.name] for f in fields(kind) if f.name in document}
    values["limits"] = Limits(**values.get("limits", {}))
    if "layers" in values:
        values["layers"] = tuple(values["layers"])
    return kind(**values)


@lru_cache(maxsize=8)
def _load(name: str, synthetic: str, layers: tuple[int, ...]) -> TokenTrace:
    if name == "synthetic":
        options = json.loads(synthetic)
        seed = options.pop("seed", 0)
        trace = synthetic_trace(SyntheticConfig(**options), seed=seed)
    else:
        trace = TokenTrace.load(name)
    return trace.select(layers=list(layers)) if layers else trace


@lru_cache(maxsize=8)
def trace_sha256(trace: TokenTrace) -> str:
    """Hash of the content of a trace, whatever file it came from."""
    digest = hashlib.sha256(f"{trace.experts.shape} {trace.n_experts} {trace.model}".encode())
    digest.update(np.ascontiguousarray(trace.experts, "<i2").tobytes())
    digest.update(trace.layer_ids.astype("<i8").tobytes() + trace.seq_lens.astype("<i8").tobytes())
    digest.update("\n".join(trace.domains.tolist()).encode())
    return digest.hexdigest()


def workload_sha256(workload: Workload) -> str:
    """Hash of the requests and lives of pods."""
    arrays = (workload.cores.astype("<f8"), workload.life_s.astype("<f8"), workload.latency_sensitive)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
