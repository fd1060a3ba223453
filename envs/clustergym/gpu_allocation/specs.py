"""The applications that share the GPU, and the constants of the GPU.

The constants of latency, cache and power are fits of a public profile of a V100 under MPS (iGniter, Xu et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
