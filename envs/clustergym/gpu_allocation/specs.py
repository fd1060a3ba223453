"""Specifications: the applications that share the GPU, the GPU, nodes, and the configuration of the task.

The constants of latency, cache and power are fits of a public profile of a V100 under MPS (iGniter, Xu et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from clustergym.gpu_allocation.fitted import IDLE_SHARE, NEED_LOGIT, NEED_OWNER_SPREAD
from clustergym.gpu_allocation.space import MAX_PODS, UNIT_PERCENT
from clustergym.gpu_allocation.workload import Workload


class AppSpec(NamedTuple):
    """An inference application: the latency of a batch on a share of the SMs, and its effect on its neighbours."""

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    """k1 … k5: constants of :func:`solo_latency_ms`."""
    cache_sensitivity: float
    """Relative slowdown for each % of the L2 cache that the other pods use."""
    kernels: float
    """Kernels per batch. On a shared GPU, each waits for the scheduler."""
    l2_slope: float
    l2_base: float
    """% of the L2 cache used: slope · items per second + base."""
    watt_slope: float
    watt_base: float
    """Power in watts: slope · items per second + base."""


# Columns of a table of applications: the fields of AppSpec.
(
    K1, K2, K3, K4, K5, CACHE_SENSITIVITY, KERNELS, L2_SLOPE, L2_BASE, WATT_SLOPE, WATT_BASE,
) = range(11)  # fmt: skip

APPS = {
    "alexnet": AppSpec(0.0157, 13.2, 32.9, 7.39, 0.321, 0.0024, 20, 0.00309, 2.03, 0.0239, 37.1),
    "resnet50": AppSpec(0.0659, 61.17, -0.485, 1.80, 1.67, 0.0022, 80, 0.02196, -0.19, 0.1623, 4.63),
    "vgg19": AppSpec(0.0728, 163.4, 44.9, 1.09, 0.746, 0.0020, 29, 0.04522, 2.72, 0.5367, 2.08),
    "ssd": AppSpec(-0.0387, 271.0, -0.589, 2.74, 1.89, 0.0023, 93, 0.08863, -0.13, 0.6449, 2.34),
}

CLOCK_MHZ, CLOCK_PER_WATT, POWER_CAP_W, IDLE_W = 1530.0, 1.025, 300.0, 53.5
SCHEDULE_SLOPE_MS, SCHEDULE_BASE_MS, SCHEDULE_PODS = 0.00475, 0.00902, 5
"""Scheduling delay of a kernel among n pods: slope · n − base. Fitted for 2 to 5 pods; more pods count as 5."""
INTERFERENCE_SCALE = 2.41
"""Factor on slowdowns. For pairs of pods with half of the GPU each, the formula gives a mean slowdown of 1.040, but
1,500 measured pairs have 1.097. Scaled to that mean, the 95th percentile (1.171) and the maximum (1.234) agree within
0.01."""
LATENCY_CV = 0.013
"""Measured spread of a latency between runs (coefficient of variation)."""


def solo_latency_ms(app: Sequence[float], batch: float, share_percent: float) -> float:
    """Latency of a batch without other pods on the GPU; ``app`` is an :class:`AppSpec` or a row of the table.

    >>> round(solo_latency_ms(APPS["resnet50"], 16, 50), 2)
    20.88
    """
    return (app[K1] * batch * batch + app[K2] * batch + app[K3]) / (share_percent + app[K4]) + app[K5]


@dataclass(frozen=True)
class NodeMix:
    """A fixed edge node: which applications run there, and how much their owners over-ask."""

    over_ask: float
    """Mean of log(used / unused) of the requests. At 0, half of a request is needed; below 0, less."""
    apps: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """Weights of alexnet, resnet50, vgg19 and ssd."""

    def __post_init__(self) -> None:
        if len(self.apps) != len(APPS) or min(self.apps) < 0 or not 0 < sum(self.apps) < math.inf:
            raise ValueError(
                f"apps is {self.apps}: expected {len(APPS)} weights ({', '.join(APPS)}), 0 or more, not all 0"
            )
        if not math.isfinite(self.over_ask):
            raise ValueError(f"over_ask is {self.over_ask}: expected a finite number")


def edge_mixes(n_nodes: int) -> list[NodeMix]:
    """The mixes of N edge nodes. They differ in over-asking, and each has a main application.

    Node i does not depend on N, so a federation can grow.
    """
    if n_nodes < 1:
        raise ValueError(f"n_nodes is {n_nodes}: expected at least 1")
    golden = (math.sqrt(5) - 1) / 2
    mixes = []
    for i in range(n_nodes):
        weights = [0.1] * len(APPS)
        weights[i % len(APPS)] = 0.7
        # The golden ratio spreads any number of nodes evenly around the fitted mean.
        mixes.append(NodeMix(NEED_LOGIT - 1.0 + 2.0 * ((i + 0.5) * golden % 1.0), tuple(weights)))
    return mixes


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
    """Streams of pods: ``train``, ``validation`` or ``test``, which has the streams of ``clustergym eval``."""

    def __post_init__(self) -> None:
        if not 0 < self.load <= MAX_PODS:
            raise ValueError(f"load is {self.load}: expected more than 0, up to {MAX_PODS} pods")
        if self.split not in FIRST_SEEDS:
            raise ValueError(f"split is {self.split!r}: expected one of {', '.join(FIRST_SEEDS)}")
        if self.reward not in ("room", "seed"):
            raise ValueError(f"reward is {self.reward!r}: expected 'room' or 'seed'")
        for key, low, high in (
            ("arrivals", 1, 10**9), ("owners", 1, 64), ("unit_percent", 0, 10), ("idle_share", 0, 1),
            ("node_spread", 0, 5), ("owner_spread", 0, 5), ("pod_spread", 0, 5),
        ):  # fmt: skip
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key} is {getattr(self, key)}: expected {low} … {high}")
