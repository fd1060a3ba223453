"""Suites: versioned lists of frozen tasks, in JSON files under ``frozen/``.

A task defines everything that affects a result: data with their hash, model, cluster, profile, schedule, sizes, and the
time and memory that a decision may take. A published suite is never changed; a better one gets a new version.

There are two tracks. The validation track serves the validation split with public seeds, so anyone can run it, and
tune on it. The test track serves the test split. Its streams, the numbers of the experts and generated traces follow
from a secret that only the maintainer who runs it has.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import clustergym  # noqa: F401  registers the environments
from clustergym.gpu_allocation.specs import AllocationConfig
from clustergym.gpu_allocation.workload import Workload, load_workload
from clustergym.moe_offload.simulator import parts_of, tables_of
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster, model_for
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.evaluation import Protocol
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN
from clustergym.traces import SyntheticConfig, synthetic_trace
from clustergym.traces.token_trace import TokenTrace

FOLDER = Path(__file__).parent / "frozen"
VALIDATION_STREAMS = 2
"""Streams of a placement task on the validation track, which has less data."""


@dataclass(frozen=True)
class Limits:
    """What one decision of submitted code may take."""

    seconds: float = 10.0
    """Maximum wall time of a decision. A slower one is discarded, and the current placement stays."""
    memory_mb: int = 4096
    """Address space of the process."""
    start_seconds: float = 60.0
    """Wall time for starting the process and importing the code."""


def seed_of(secret: bytes, what: str) -> int:
    """A seed that nobody can guess without the secret."""
    return int.from_bytes(hmac.digest(secret, what.encode(), "sha256")[:7], "little")


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
    split: str = "validation"
    model: str | None = None
    synthetic: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    """Positions of the layers that are used; empty means all."""
    slots_per_gpu: int | None = None
    drift_rate: float = 0.5
    passes_per_interval: int = 1000
    ops_per_layer: int = 16
    """Operations of an agent on each layer between two intervals."""
    limits: Limits = field(default_factory=Limits)
    renumber: int | None = None
    """Seed of new numbers for the experts of a recorded trace, so that it is not recognized."""
    kind: str = "placement"

    def on_track(self, secret: bytes | None) -> PlacementTask:
        """The task of the test track for a secret, or else that of the validation track."""
        if secret is None:
            return replace(self, split="validation", streams=min(self.streams, VALIDATION_STREAMS))
        task = replace(self, split="test", seed=seed_of(secret, self.name) >> 8)
        if self.trace != "synthetic":
            return replace(task, renumber=seed_of(secret, f"{self.name} experts"))
        synthetic = self.synthetic | {"seed": seed_of(secret, f"{self.name} trace")}
        return replace(task, synthetic=synthetic, data_sha256="")

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
        """The trace. Raises a ValueError if the data are not those of the suite."""
        trace = _load(self.trace, json.dumps(self.synthetic, sort_keys=True), self.layers)
        check_data(self.name, trace_sha256(trace), self.data_sha256)
        return trace if self.renumber is None else _renumbered(trace, self.renumber)


@dataclass(frozen=True)
class BudgetedPlacementTask(PlacementTask):
    """A placement task in which planners have the budget of agents: ``ops_per_layer`` operations on each layer."""

    same_budget: bool = True


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

    def on_track(self, secret: bytes | None) -> AllocationTask:
        return self if secret is None else replace(self, seed=2**41 + (seed_of(secret, self.name) >> 8))

    @property
    def config(self) -> AllocationConfig:
        """The configuration of the environment. Raises a ValueError if the workload is not that of the suite."""
        spec = gymnasium.spec(self.env_id)
        config = AllocationConfig(**{**spec.kwargs, **self.options})
        check_data(self.name, workload_sha256(load_workload(config.workload)), self.data_sha256)
        return config


@dataclass(frozen=True)
class OffloadTask:
    """Serve sequences with the experts that fit into GPU memory."""

    name: str
    env_id: str
    """The form of the environment that gives ``options``; agents may act in another one."""
    trace: str
    """Name of a bundled trace."""
    data_sha256: str
    streams: int
    """Episodes, which are drawn from the split with ``seed``: the runs of the task."""
    max_tokens: int
    """Tokens that are served of each sequence, at most."""
    seed: int = 0
    split: str = "validation"
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of :class:`OffloadConfig` that say what is served."""
    evaluations: int = 20
    """Trials per parameter with which rules are tuned on the training split."""
    limits: Limits = field(default_factory=Limits)
    kind: str = "offload"

    def on_track(self, secret: bytes | None) -> OffloadTask:
        """The task of the test track for a secret, or else that of the validation track. Agents see no expert ids."""
        if secret is None:
            return self
        return replace(self, split="test", seed=seed_of(secret, self.name) >> 8)

    def load(self) -> TokenTrace:
        """The trace. Raises a ValueError if the data are not those of the suite."""
        trace = _load(self.trace, "{}", ())
        check_data(self.name, trace_sha256(trace), self.data_sha256)
        return trace

    @property
    def config(self) -> OffloadConfig:
        """What is served: sequences of the split, drawn without replacement."""
        trace = self.load()
        part, batch = parts_of(trace)[self.split], int(self.options["batch"])
        n = self.streams * batch
        if n > part.n_sequences:
            raise ValueError(f"task {self.name} needs {n} sequences, but {self.split} has {part.n_sequences}")
        chosen = np.random.default_rng(self.seed).permutation(part.n_sequences)[:n]
        served = part.select(sequences=np.sort(chosen))
        return OffloadConfig(
            trace=served, split="all", fit_on=tables_of(trace), max_tokens=self.max_tokens, **self.options
        )


Task = PlacementTask | AllocationTask | OffloadTask
_KINDS: dict[str, type[Task]] = {"placement": PlacementTask, "allocation": AllocationTask, "offload": OffloadTask}


@dataclass(frozen=True)
class Suite:
    """A versioned list of tasks."""

    name: str
    about: str
    tasks: tuple[Task, ...]
    quick_tasks: tuple[str, ...]
    """Tasks of ``--quick``, with fewer streams and intervals."""

    def quick(self) -> Suite:
        """A small version to try things out."""
        tasks = [_smaller(task) for task in self.tasks if task.name in self.quick_tasks]
        return replace(self, name=f"{self.name}-quick", tasks=tuple(tasks))

    def with_budget(self) -> Suite:
        """The suite in which planners, and EPLB that they are compared with, may do as many operations as agents."""
        if not all(isinstance(task, PlacementTask) for task in self.tasks):
            raise ValueError(f"{self.name}: only placement suites have a track with the same budget for all")
        tasks = tuple(BudgetedPlacementTask(**vars(task)) for task in self.tasks)
        return replace(self, name=f"{self.name}-budget", tasks=tasks)

    def on_track(self, secret: bytes | None) -> Suite:
        """The test track for a secret, or else the validation track."""
        return replace(self, tasks=tuple(task.on_track(secret) for task in self.tasks))

    def only(self, names: list[str]) -> Suite:
        """The suite with some tasks; without names, all."""
        known = [task.name for task in self.tasks]
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"{self.name} has no task {unknown[0]!r}; it has: {', '.join(known)}")
        return replace(self, tasks=tuple(task for task in self.tasks if not names or task.name in names))

    @property
    def sha256(self) -> str:
        return sha256_of(asdict(self))


def _smaller(task: Task) -> Task:
    if isinstance(task, PlacementTask):
        return replace(task, streams=min(2, task.streams), intervals=min(2, task.intervals))
    if isinstance(task, OffloadTask):
        return replace(task, streams=min(6, task.streams), max_tokens=32, evaluations=2)
    return replace(task, streams=min(16, task.streams))


def sha256_of(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def suite_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_suite(name: str) -> Suite:
    """A suite by name, such as ``placement-v2``."""
    if name not in suite_names():
        raise ValueError(f"unknown suite {name!r}; the suites are: {', '.join(suite_names())}")
    document = json.loads((FOLDER / f"{name}.json").read_text())
    tasks = tuple(_task(each) for each in document["tasks"])
    return Suite(document["name"], document["about"], tasks, tuple(document["quick_tasks"]))


def _task(document: dict[str, Any]) -> Task:
    kind = _KINDS[document["kind"]]
    values = {f.name: document[f.name] for f in fields(kind) if f.name in document}
    values["limits"] = Limits(**values.get("limits", {}))
    if "layers" in values:
        values["layers"] = tuple(values["layers"])
    return kind(**values)


# Data


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
def _renumbered(trace: TokenTrace, seed: int) -> TokenTrace:
    """The trace with the experts of each layer in another order."""
    rng = np.random.default_rng(seed)
    experts = trace.experts.copy()
    for layer in range(trace.n_layers):
        order = np.append(rng.permutation(trace.n_experts), -1).astype(experts.dtype)  # −1 stays: no expert
        experts[:, layer] = order[experts[:, layer]]
    return replace(trace, experts=experts)


def check_data(task: str, found: str, expected: str) -> None:
    if expected and found != expected:
        raise ValueError(
            f"task {task}: the data have sha256 {found[:12]}…, but the suite was frozen with {expected[:12]}…: results "
            "would not be comparable"
        )


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
