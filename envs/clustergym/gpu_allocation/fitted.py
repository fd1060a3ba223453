"""Constants of the workload, fitted to public data by ``benchmarks/calibration/fit_workload.py``, before any training.

``python benchmarks/calibration/fit_workload.py --data folder --check`` compares them with data. Sources: openb
(Alibaba's GPU trace of 2023), gentd26 (Alibaba's GenAI trace of 2026), and published statistics of PAI (Alibaba's GPU
trace of 2020; Weng et al., NSDI 2022, describes it; the shares by utilisation are from an analysis at affinode.io).
"""

from __future__ import annotations

REQUESTS = (
    (10.0, 7, 0), (11.0, 23, 1), (14.0, 1, 0), (16.0, 74, 0), (22.0, 62, 0), (23.0, 139, 0), (27.0, 4, 0),
    (29.0, 1, 0), (32.0, 328, 0), (33.0, 7, 0), (35.0, 6, 0), (37.0, 45, 2), (44.0, 1, 1), (46.0, 0, 128),
    (47.0, 360, 390), (48.0, 19, 0), (55.0, 72, 0), (59.0, 75, 0), (65.0, 16, 237), (81.0, 1078, 0),
)  # fmt: skip
"""Requested % of a GPU, and how many best-effort and latency-sensitive pods ask for it: the 3,077 pods of openb that
use a part of a GPU."""
MEDIAN_LIFE_S = (388, 592)
LIFE_SPREAD = (2.0, 1.86)
"""Lives in openb, best-effort and latency-sensitive: median, and standard deviation of the logarithm."""
POPULARITY = 1.37
"""Pods per owner ∝ rank^−1.37: identical requests in openb, which does not name owners."""
IDLE_SHARE = 0.345
"""Share of instances in PAI that never use the GPU. In gentd26, 37 % of 9.5-minute windows are idle."""
NEED_LOGIT = -1.31
"""Median logit of the needed part of a request of a pod that is not idle. PAI's mean utilisation of such instances has
the logit −2.75 (6 %) in the median; the largest 57 s sample of a window in gentd26 is 3.68 times the window's mean."""
NEED_OWNER_SPREAD = 1.76
"""Standard deviation of that logit between owners: what is left of PAI's 1.95 after the spread within owners."""
NEED_POD_QUANTILES = (
    -3.142, -1.663, -0.763, -0.578, -0.39, -0.267, -0.176, -0.122, -0.08, -0.041, 0.0, 0.046, 0.114, 0.192, 0.267,
    0.351, 0.447, 0.565, 0.823, 1.267, 2.483,
)  # fmt: skip
"""Differences within an owner: quantiles 0, 5, …, 100 % (the ends are 0.5 and 99.5 %) over windows of a container in
gentd26."""
MEMORY_LOGIT = 0.02
MEMORY_OWNER_SPREAD = 0.23
MEMORY_POD_QUANTILES = (
    -0.919, -0.296, -0.198, -0.18, -0.156, -0.114, -0.06, -0.016, -0.004, -0.001, 0.0, 0.0, 0.003, 0.005, 0.008, 0.012,
    0.022, 0.082, 0.207, 0.488, 1.659,
)  # fmt: skip
"""Largest memory in a window / memory of the GPU in gentd26: median logit, spread between containers, differences
within a container."""
