"""The applications that share the GPU and the constants of the GPU itself.

Latency, cache and power constants are fits of a public profile of a V100 under MPS (iGniter, Xu et al., 2022). How the four
models' memory grows with the batch is our assumption.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class AppSpec:
    """An inference application: how long a batch takes on a share of the SMs, and what it does to its neighbours."""

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    """Solo latency, ms, of a batch of b items on r % of the SMs: (k1·b² + k2·b + k3) / (r + k4) + k5."""
    cache_sensitivity: float
    """Relative slowdown for each % of the L2 cache that the others use."""
    kernels: float
    """Kernels in a batch; each waits for the scheduler where pods share the GPU."""
    l2_slope: float
    l2_base: float
    """% of the L2 cache used, linear in items a second."""
    watt_slope: float
    watt_base: float
    """Power drawn, linear in items a second."""
    memory_base_mb: float
    memory_item_mb: float
    """Memory used: base + item · batch."""

    def solo_latency_ms(self, batch: float, share_percent: float) -> float:
        """Latency of a batch with the GPU's caches, clock and scheduler to itself."""
        work = self.k1 * batch**2 + self.k2 * batch + self.k3
        return work / (share_percent + self.k4) + self.k5


APPS = {
    "alexnet": AppSpec(0.0157, 13.2, 32.9, 7.39, 0.321, 0.0024, 20, 0.00309, 2.03, 0.0239, 37.1, 1000, 12),
    "resnet50": AppSpec(0.0659, 61.17, -0.485, 1.80, 1.67, 0.0022, 80, 0.02196, -0.19, 0.1623, 4.63, 1300, 45),
    "vgg19": AppSpec(0.0728, 163.4, 44.9, 1.09, 0.746, 0.0020, 29, 0.04522, 2.72, 0.5367, 2.08, 1900, 60),
    "ssd": AppSpec(-0.0387, 271.0, -0.589, 2.74, 1.89, 0.0023, 93, 0.08863, -0.13, 0.6449, 2.34, 1700, 90),
}
BATCHES = (1, 2, 4, 8, 16, 32)

CLOCK_MHZ, CLOCK_PER_WATT, POWER_CAP_W, IDLE_W = 1530.0, 1.025, 300.0, 53.5
SCHEDULE_SLOPE_MS, SCHEDULE_BASE_MS, SCHEDULE_PODS = 0.00475, 0.00902, 5
"""Scheduling delay of a kernel among n pods: slope · n − base, fitted for 2 to 5 pods and held at 5 beyond."""
INTERFERENCE_SCALE = 2.41
"""The formula gives a mean slowdown of 1.040 over pairs that hold half of the GPU each; 1,500 measured pairs have 1.097.
Slowdowns are scaled to that mean; their 95th percentile (1.171) and maximum (1.234) then follow to within a hundredth."""
LATENCY_CV = 0.013
"""Measured run-to-run spread of a latency."""


def apps_table() -> npt.NDArray[np.float64]:
    """(applications, 13) constants in the order of :class:`AppSpec`'s fields."""
    return np.array([astuple(app) for app in APPS.values()], dtype=np.float64)


def corun_latency_ms(
    apps: list[str], batches: list[float], shares_percent: list[float], rates_per_s: list[float] | None = None
) -> list[float]:
    """Latency of a batch of each pod when they share the GPU; at full speed, or at the given rates of items.

    >>> solo = APPS["resnet50"].solo_latency_ms(16, 50)
    >>> corun_latency_ms(["resnet50"], [16], [50]) == [solo]
    True
    >>> together, _ = corun_latency_ms(["resnet50", "vgg19"], [16, 16], [50, 50])
    >>> round(together / solo, 2)
    1.17
    """
    specs = [APPS[name] for name in apps]
    solo = [spec.solo_latency_ms(b, r) for spec, b, r in zip(specs, batches, shares_percent, strict=True)]
    full = [1000.0 * b / t for b, t in zip(batches, solo, strict=True)]
    rates = full if rates_per_s is None else [min(a, b) for a, b in zip(full, rates_per_s, strict=True)]
    l2 = [max(0.0, spec.l2_slope * x + spec.l2_base) for spec, x in zip(specs, rates, strict=True)]
    watts = IDLE_W + sum(spec.watt_slope * x + spec.watt_base for spec, x in zip(specs, rates, strict=True))
    clock = CLOCK_MHZ / (CLOCK_MHZ - CLOCK_PER_WATT * max(0.0, watts - POWER_CAP_W))
    n = min(len(apps), SCHEDULE_PODS)
    delay_ms = SCHEDULE_SLOPE_MS * n - SCHEDULE_BASE_MS if n > 1 else 0.0
    result = []
    for spec, t, own in zip(specs, solo, l2, strict=True):
        crowded = (t * (1 + spec.cache_sensitivity * (sum(l2) - own)) + spec.kernels * delay_ms) * clock
        result.append(t * (1 + INTERFERENCE_SCALE * (crowded / t - 1)))
    return result
