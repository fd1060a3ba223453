"""Requests and lives of pods: fitted to a public trace, or read from a file."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.gpu_allocation.fitted import LIFE_SPREAD, MEDIAN_LIFE_S, REQUESTS
from clustergym.gpu_allocation.space import MAX_CORES, MIN_CORES

LONGEST_LIFE_S = 4 * 3600.0
"""Longer lives (4 % in openb) are cut to this: a few pods would hold the GPU for most of an episode."""
COLUMNS = ("num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time")
LATENCY_SENSITIVE = {"LS": True, "Guaranteed": True, "BE": False, "Burstable": False}


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests and lives that pods are drawn from. Compared by identity: arrays cannot be hashed."""

    cores: npt.NDArray[np.float64]
    """(n,) requested % of the GPU, 10 … 100"""
    life_s: npt.NDArray[np.float64]
    """(n,) how long the pod runs"""
    latency_sensitive: npt.NDArray[np.bool_]
    """(n,) whether the pod has a latency objective in addition to its throughput"""
    name: str = "workload"

    def __post_init__(self) -> None:
        n = len(self.cores)
        if n == 0:
            raise ValueError(f"{self.name}: no pods")
        for key in ("life_s", "latency_sensitive"):
            if len(getattr(self, key)) != n:
                raise ValueError(f"{self.name}: {key} has {len(getattr(self, key))} entries, cores has {n}")
        bad = np.flatnonzero(~((self.cores >= MIN_CORES) & (self.cores <= MAX_CORES)))
        if len(bad):
            asked = f"{self.name}: pod {bad[0]} asks for {self.cores[bad[0]]} % of the GPU"
            raise ValueError(f"{asked}: expected {MIN_CORES:g} … {MAX_CORES:g}")
        bad = np.flatnonzero(~((self.life_s > 0) & np.isfinite(self.life_s)))
        if len(bad):
            raise ValueError(f"{self.name}: pod {bad[0]} lives {self.life_s[bad[0]]} s: expected more than 0")

    def jobs(self) -> npt.NDArray[np.float64]:
        """(n, 3) the table that the simulator reads: columns ``state.JOB_*``, best-effort pods first."""
        rows = np.stack([self.cores, np.minimum(self.life_s, LONGEST_LIFE_S), self.latency_sensitive], 1).astype(float)
        return rows[np.argsort(self.latency_sensitive, kind="stable")]


@lru_cache(maxsize=1)
def synthetic_workload() -> Workload:
    """The requests and classes of openb with log-normal lives: quantiles, shuffled, so always the same pods."""
    from scipy.special import ndtri

    rng = np.random.default_rng(0)
    cores, life_s, sensitive = [], [], []
    for kind in (0, 1):
        counts = [int(row[1 + kind]) for row in REQUESTS]
        n = sum(counts)
        cores.append(np.repeat([row[0] for row in REQUESTS], counts))
        quantiles = (np.arange(n) + 0.5) / n
        life_s.append(rng.permutation(MEDIAN_LIFE_S[kind] * np.exp(LIFE_SPREAD[kind] * ndtri(quantiles))))
        sensitive.append(np.full(n, kind == 1))
    return Workload(np.concatenate(cores), np.concatenate(life_s), np.concatenate(sensitive), "synthetic")


def read_openb(path: str | Path) -> Workload:
    """Read a CSV file in the format of Alibaba's openb trace.

    Needs the columns ``num_gpu``, ``gpu_milli`` (thousandths of a GPU), ``qos`` (LS and Guaranteed are
    latency-sensitive, BE and Burstable are not), ``creation_time`` and ``deletion_time`` (s). Only pods that use a part
    of one GPU for some time are kept. Requests below 10 % are raised to 10 %, the smallest allocation.

    Raises:
        ValueError: a malformed row; the message has its line number.
    """
    path = Path(path)
    cores, lives, sensitive = [], [], []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}, line 1: no column {missing[0]!r}; expected {', '.join(COLUMNS)}")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            gpus = _number(row, "num_gpu", where, 0, math.inf)
            milli = _number(row, "gpu_milli", where, 0, 1000)
            created = _number(row, "creation_time", where, 0, math.inf)
            deleted = _number(row, "deletion_time", where, 0, math.inf)
            if row["qos"] not in LATENCY_SENSITIVE:
                raise ValueError(f"{where}: qos is {row['qos']!r}: expected {', '.join(LATENCY_SENSITIVE)}")
            if deleted < created:
                raise ValueError(f"{where}: deletion_time {deleted:g} is before creation_time {created:g}")
            if gpus == 1 and 0 < milli < 1000 and deleted > created:
                cores.append(max(milli / 10, MIN_CORES))
                lives.append(deleted - created)
                sensitive.append(LATENCY_SENSITIVE[row["qos"]])
    if not cores:
        raise ValueError(f"{path}: no pod with a part of one GPU (num_gpu 1, gpu_milli from 1 to 999)")
    return Workload(np.array(cores), np.array(lives), np.array(sensitive), path.name)


def _number(row: dict[str, str | None], key: str, where: str, low: float, high: float) -> float:
    text = row[key]
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{where}: {key} is {text!r}: expected a number") from None
    if not low <= value <= high:
        limit = f"{low:g} or more" if high == math.inf else f"{low:g} … {high:g}"
        raise ValueError(f"{where}: {key} is {text}: expected {limit}")
    return value


@lru_cache(maxsize=8)
def _read_once(path: str, modified_ns: int) -> Workload:
    return read_openb(path)


def load_workload(source: str | Path | Workload | None) -> Workload:
    """The workload of a configuration. A file is read once for all environments."""
    if isinstance(source, Workload):
        return source
    return synthetic_workload() if source is None else _read_once(str(source), Path(source).stat().st_mtime_ns)
