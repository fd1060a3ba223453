"""Fit the workload of the allocation task to public data. Run once, before any training; the task is not tuned later.

Prints the constants of ``clustergym/gpu_allocation/fitted.py`` with their quality, and draws data and fit. Needs two
public data sets in the folder ``gpu`` of CLUSTERGYM_DATA:

* ``openb/openb_pod_list_default.csv``: Alibaba's GPU trace of 2023 (kubernetes-scheduler-simulator): requests, lives,
  classes.
* ``gentd26/gentd26_pod_usage.csv.gz``: Alibaba's GenAI trace of 2026 (clusterdata): 57 s samples of 143 containers.

The third source is published: shares of 3,033,232 instances of Alibaba's PAI trace of 2020 by their mean utilisation
(an analysis at affinode.io, not the paper of the trace).

    python benchmarks/calibration/fit_workload.py
    python benchmarks/calibration/fit_workload.py --check      # error if the constants in the package differ
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit, ndtr, ndtri

from clustergym.common.files import write_atomically
from clustergym.common.plotting import require_matplotlib
from clustergym.gpu_allocation import fitted
from clustergym.gpu_allocation.workload import read_openb

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_file

Doubles = npt.NDArray[np.float64]

PAI_IDLE, PAI_MEAN = 0.345, 0.105
PAI_SHARE_BELOW = {0.015: 0.5, 0.1: 0.754, 0.5: 0.95}
"""Share of PAI's instances whose mean utilisation over their life is below a value; 34.5 % are at exactly 0."""
CARD_MIB = 48 * 1024
"""Memory of the GPUs in gentd26: the largest sample is 48,478 MiB."""
WINDOW = 10
"""Samples of 57 s in a window: 9.5 minutes, about the median life of a pod in openb. A window stands for a pod."""
ACTIVE_PERCENT = 1.0
"""A window without any sample above this is idle."""


@dataclass
class Args:
    check: bool = False
    """Compare the constants in the package with the fit, and exit with an error if they differ."""
    output: Path = Path("runs/fit_workload")
    """Folder for the table and the plot."""


class Windows(NamedTuple):
    """Windows of containers of gentd26."""

    container: npt.NDArray[np.int64]
    mean: Doubles
    """Mean duty, 0 … 1."""
    peak: Doubles
    """Largest duty of a sample, 0 … 1."""
    memory: Doubles
    """Largest memory of a sample / memory of the GPU."""


def read_windows(path: Path) -> Windows:
    with gzip.open(path, "rt", newline="") as file:
        rows = [
            (int(row["container"]), int(row["t"]), float(row["gpu_duty_pct"]), float(row["gpu_mem_mib"]))
            for row in csv.DictReader(file)
        ]
    table = np.array(rows)
    key = table[:, 0] * 1e6 + table[:, 1] // (57 * WINDOW)
    found = []
    for window in np.split(table, np.flatnonzero(np.diff(key)) + 1):
        if len(window) >= 0.8 * WINDOW:
            duty, memory = window[:, 2] / 100.0, window[:, 3] / CARD_MIB
            found.append((window[0, 0], duty.mean(), duty.max(), memory.max()))
    container, mean, peak, memory = np.array(found).T
    return Windows(container.astype(np.int64), mean, peak, memory)


QUANTILES = (0.005, *(i / 20 for i in range(1, 20)), 0.995)


def spreads(values: Doubles, container: npt.NDArray[np.int64]) -> tuple[float, Doubles]:
    """(deviation between containers, differences to the container's median); containers with at least ten windows."""
    groups = [values[container == c] for c in np.unique(container)]
    groups = [group for group in groups if len(group) >= 10]
    medians = [float(np.median(group)) for group in groups]
    within = np.concatenate([group - median for group, median in zip(groups, medians, strict=True)])
    return float(np.std(medians, ddof=1)), within


def quantiles(values: Doubles) -> tuple[float, ...]:
    """21 quantiles, between which the simulator interpolates: the data are far from normal."""
    return tuple(round(float(q), 3) for q in np.quantile(values, QUANTILES))


def fit_usage() -> tuple[float, float]:
    """Mean and deviation of the logit of the mean utilisation of active instances in PAI: a line through three points.

    If the logits are normal, the normal quantiles of the shares are a linear function of the logits.
    """
    shares = [(below - PAI_IDLE) / (1 - PAI_IDLE) for below in PAI_SHARE_BELOW.values()]
    slope, offset = np.polyfit(logit(list(PAI_SHARE_BELOW)), ndtri(shares), 1)
    return float(-offset / slope), float(1 / slope)


def fit_popularity(counts: list[int]) -> float:
    """Exponent a of pods per owner ∝ rank^−a, by maximum likelihood."""
    sizes, ranks = np.sort(counts)[::-1], np.arange(1, len(counts) + 1)

    def loss(a: float) -> float:
        return float((sizes * (a * np.log(ranks) + np.log((ranks**-a).sum()))).sum())

    return float(minimize_scalar(loss, bounds=(0.0, 3.0), method="bounded").x)


def identical_requests(path: Path) -> list[int]:
    """Pods per identical request (CPU, memory, share, class) in openb, which has no column of owners."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(
            Counter(
                (row["cpu_milli"], row["memory_mib"], row["gpu_milli"], row["qos"])
                for row in csv.DictReader(file)
                if int(row["num_gpu"]) == 1 and 0 < int(row["gpu_milli"]) < 1000
            ).values()
        )


def distance(values: Doubles, cumulative: Doubles) -> float:
    """Kolmogorov-Smirnov distance of sorted values to the fitted cumulative probabilities at these values."""
    steps = np.arange(len(values) + 1) / len(values)
    return float(max(np.abs(cumulative - steps[1:]).max(), np.abs(cumulative - steps[:-1]).max()))


def fit() -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """(constants, quality, data for the plot)."""
    path = data_file("gpu/openb/openb_pod_list_default.csv")
    openb, windows = read_openb(path), read_windows(data_file("gpu/gentd26/gentd26_pod_usage.csv.gz"))
    cores = Counter(zip(openb.cores.tolist(), openb.latency_sensitive.tolist(), strict=True))
    lives = {kind: np.log(openb.life_s[openb.latency_sensitive == kind]) for kind in (False, True)}
    usage_mean, usage_spread = fit_usage()
    active = windows.peak >= ACTIVE_PERCENT / 100
    peak_factor = float(np.median(windows.peak[active] / windows.mean[active]))
    need_logit = logit(windows.peak[active].clip(0.001, 0.995))
    need_between, need_within = spreads(need_logit, windows.container[active])
    holds = windows.memory > 0.02
    memory_logit = logit(windows.memory[holds].clip(0.001, 0.995))
    memory_between, memory_within = spreads(memory_logit, windows.container[holds])
    constants = {
        "REQUESTS": tuple((c, cores[c, False], cores[c, True]) for c in sorted({c for c, _ in cores})),
        "MEDIAN_LIFE_S": tuple(round(float(np.exp(np.median(lives[kind])))) for kind in (False, True)),
        "LIFE_SPREAD": tuple(round(float(lives[kind].std()), 2) for kind in (False, True)),
        "POPULARITY": round(fit_popularity(identical_requests(path)), 2),
        "IDLE_SHARE": PAI_IDLE,
        "NEED_LOGIT": round(float(logit(expit(usage_mean) * peak_factor)), 2),
        "NEED_OWNER_SPREAD": round(math.sqrt(usage_spread**2 - float(need_within.var())), 2),
        "NEED_POD_QUANTILES": quantiles(need_within),
        "MEMORY_LOGIT": round(float(np.median(memory_logit)), 2),
        "MEMORY_OWNER_SPREAD": round(memory_between, 2),
        "MEMORY_POD_QUANTILES": quantiles(memory_within),
    }
    z = np.sqrt(2) * np.linspace(-3, 3, 2001) * usage_spread
    weights = np.exp(-0.5 * (z / usage_spread) ** 2)
    mean_usage = (1 - PAI_IDLE) * float((expit(usage_mean + z) * weights).sum() / weights.sum())
    quality = {
        "pods in openb": len(openb.cores),
        "latency-sensitive pods in openb": float(openb.latency_sensitive.mean()),
        "distance of lives, best-effort": distance(
            np.sort(lives[False]), ndtr((np.sort(lives[False]) - np.median(lives[False])) / lives[False].std())
        ),
        "distance of lives, latency-sensitive": distance(
            np.sort(lives[True]), ndtr((np.sort(lives[True]) - np.median(lives[True])) / lives[True].std())
        ),
        "mean utilisation in PAI (published)": PAI_MEAN,
        "mean utilisation of the fit": mean_usage,
        "largest error of the three shares in PAI": max(
            abs(PAI_IDLE + (1 - PAI_IDLE) * float(ndtr((logit(x) - usage_mean) / usage_spread)) - share)
            for x, share in PAI_SHARE_BELOW.items()
        ),
        "windows in gentd26": len(windows.peak),
        "idle windows in gentd26 (PAI: 0.345)": float(1 - active.mean()),
        "peak / mean duty of a window, median": peak_factor,
        "between containers of gentd26 (logit of need; not used: one fleet)": need_between,
        "deviation within containers (logit of need)": float(need_within.std()),
        "deviation within containers (logit of memory)": float(memory_within.std()),
    }
    drawn = {
        "openb": openb, "usage": (usage_mean, usage_spread), "need": need_within, "memory": memory_within,
    }  # fmt: skip
    return constants, quality, drawn


def plot(constants: dict[str, Any], drawn: dict[str, Any], path: Path) -> None:
    """Data (blue) and fit (orange)."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    data, line = {"color": "#4477AA", "label": "data"}, {"color": "#EE7733", "label": "fit", "lw": 2}
    requests, openb = np.array(constants["REQUESTS"]), drawn["openb"]
    axes[0, 0].bar(requests[:, 0], requests[:, 1] / requests[:, 1:].sum(), 2.2, color="#4477AA", label="best-effort")
    bottom = requests[:, 1] / requests[:, 1:].sum()
    axes[0, 0].bar(requests[:, 0], requests[:, 2] / requests[:, 1:].sum(), 2.2, bottom, color="#AA3377",
                   label="latency-sensitive")  # fmt: skip
    axes[0, 0].set(title="requests in openb (taken as they are)", xlabel="% of a GPU", ylabel="share of pods")
    for axis, kind, name in ((axes[0, 1], False, "best-effort"), (axes[0, 2], True, "latency-sensitive")):
        life = np.sort(openb.life_s[openb.latency_sensitive == kind])
        axis.step(life, np.arange(1, len(life) + 1) / len(life), **data)
        median, spread = constants["MEDIAN_LIFE_S"][kind], constants["LIFE_SPREAD"][kind]
        axis.plot(life, ndtr(np.log(life / median) / spread), **line)
        axis.set(xscale="log", title=f"lives in openb, {name}", xlabel="s", ylabel="share of pods below")
    mean, spread = drawn["usage"]
    x = np.geomspace(0.001, 0.99, 300)
    share = PAI_IDLE + (1 - PAI_IDLE) * ndtr((logit(x) - mean) / spread)
    axes[1, 0].plot(list(PAI_SHARE_BELOW), list(PAI_SHARE_BELOW.values()), "o", ms=8, **data)
    axes[1, 0].plot(x, share, **line)
    axes[1, 0].set(xscale="log", title="mean utilisation of instances in PAI", xlabel="utilisation",
                   ylabel="share of instances below")  # fmt: skip
    for axis, name, what in ((axes[1, 1], "need", "need of cores"), (axes[1, 2], "memory", "memory")):
        values = np.sort(drawn[name])
        axis.step(values, np.arange(1, len(values) + 1) / len(values), **data)
        axis.plot(constants[f"{name.upper()}_POD_QUANTILES"], np.linspace(0, 1, len(QUANTILES)), **line)
        axis.set(title=f"{what} of a container over time, gentd26", ylabel="share of windows below",
                 xlabel="logit, difference to the container's median")  # fmt: skip
    for axis in axes.flat:
        axis.legend(fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(args: Args) -> int:
    constants, quality, drawn = fit()
    console = Console(width=120)
    for title, entries in (("constants of fitted.py", constants), ("quality of the fit", quality)):
        table = Table("name", "value", title=title)
        for name, value in entries.items():
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
        console.print(table)
    args.output.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output / "fit.json", json.dumps({"constants": constants, "quality": quality}, indent=2))
    plot(constants, drawn, args.output / "workload_fit.png")
    if args.check:
        differ = [name for name, value in constants.items() if getattr(fitted, name, None) != value]
        console.print(f"differ from the package: {', '.join(differ)}" if differ else "the package has these constants")
        return int(bool(differ))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
