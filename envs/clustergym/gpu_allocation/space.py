"""State and action of the task in physical units. Standard library only, so that an agent on a node can use it alone.

State (5 numbers, 0 … 1): requested cores / 100, requested memory / 32768 MB, GPU utilisation, memory used / total,
running pods / 10. Action (2 numbers, 0 … 1): cores from 10 to 100 % and memory from 512 to 32768 MB.

The simulator compiles the functions without checks: :func:`scale_action`, :func:`action_for`, :func:`limit_grant` and
:func:`scale_state`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Amount = TypeVar("Amount", float, "npt.NDArray[np.float64]")

MIN_CORES, MAX_CORES = 10.0, 100.0
MIN_MEMORY_MB, MAX_MEMORY_MB = 512.0, 32768.0
MAX_PODS = 10
UNIT_PERCENT = 1.0
"""MPS takes whole percents (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)."""

STATE_NAMES = ("requested_cores", "requested_memory", "node_gpu_util", "node_mem_util", "running_pods")
N_STATE = len(STATE_NAMES)


def scale_state(
    requested_cores: float, requested_memory_mb: float, gpu_util: float, mem_util: float, running_pods: int
) -> tuple[float, float, float, float, float]:
    """The five numbers of :func:`encode_state`, without checks."""
    return (
        requested_cores / MAX_CORES,
        requested_memory_mb / MAX_MEMORY_MB,
        min(gpu_util, 1.0),
        min(mem_util, 1.0),
        min(running_pods / MAX_PODS, 1.0),
    )


def encode_state(
    requested_cores: float, requested_memory_mb: float, gpu_util: float, mem_util: float, running_pods: int
) -> list[float]:
    """The five numbers of the state for a request on a node.

    Args:
        requested_cores: % of the GPU, 10 … 100.
        requested_memory_mb: 512 … 32768.
        gpu_util: utilisation of the GPU, 0 … 1.
        mem_util: memory used / total, 0 … 1.
        running_pods: GPU pods that run before this one; more than 10 count as 10.

    >>> [round(x, 2) for x in encode_state(80, 4000, 0.45, 0.30, 2)]
    [0.8, 0.12, 0.45, 0.3, 0.2]
    """
    check_request(requested_cores, requested_memory_mb)
    for name, value in (("gpu_util", gpu_util), ("mem_util", mem_util)):
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"{name} is {value}: expected a share, 0 … 1")
    if running_pods < 0:
        raise ValueError(f"running_pods is {running_pods}: expected 0 or more")
    return list(scale_state(requested_cores, requested_memory_mb, gpu_util, mem_util, running_pods))


def check_request(requested_cores: float, requested_memory_mb: float) -> None:
    """Raise a ValueError for a request outside the limits of an allocation."""
    if not (math.isfinite(requested_cores) and MIN_CORES <= requested_cores <= MAX_CORES):
        raise ValueError(f"requested cores are {requested_cores} %: expected {MIN_CORES:g} … {MAX_CORES:g} %")
    if not (math.isfinite(requested_memory_mb) and MIN_MEMORY_MB <= requested_memory_mb <= MAX_MEMORY_MB):
        raise ValueError(
            f"requested memory is {requested_memory_mb} MB: expected {MIN_MEMORY_MB:g} … {MAX_MEMORY_MB:g} MB"
        )


def scale_action(cores: float, memory: float) -> tuple[float, float]:
    """Two numbers, clipped to 0 … 1, to cores (%) and memory (MB)."""
    return (
        min(max(cores, 0.0), 1.0) * (MAX_CORES - MIN_CORES) + MIN_CORES,
        min(max(memory, 0.0), 1.0) * (MAX_MEMORY_MB - MIN_MEMORY_MB) + MIN_MEMORY_MB,
    )


def transform_action(action: Sequence[float]) -> tuple[float, float]:
    """Two numbers to (cores %, memory MB). Values outside 0 … 1 are clipped; NaN and infinity raise an error.

    >>> cores, memory = transform_action([0.56, 0.08])
    >>> round(cores, 1), round(memory)
    (60.4, 3092)
    """
    if len(action) != 2 or not all(math.isfinite(a) for a in action):
        raise ValueError(f"action is {list(action)}: expected two finite numbers, 0 … 1")
    return scale_action(float(action[0]), float(action[1]))


def action_for(cores_percent: Amount, memory_mb: Amount) -> tuple[Amount, Amount]:
    """Inverse of :func:`scale_action`, without clipping. Takes numbers or arrays."""
    return (
        (cores_percent - MIN_CORES) / (MAX_CORES - MIN_CORES),
        (memory_mb - MIN_MEMORY_MB) / (MAX_MEMORY_MB - MIN_MEMORY_MB),
    )


def inverse_transform(cores_percent: float, memory_mb: float) -> tuple[float, float]:
    """The action that asks for these cores and this memory, clipped to 0 … 1."""
    cores, memory = action_for(cores_percent, memory_mb)
    return min(max(cores, 0.0), 1.0), min(max(memory, 0.0), 1.0)


def limit_grant(
    cores: float, memory_mb: float, requested_cores: float, requested_memory_mb: float, unit_percent: float
) -> tuple[float, float]:
    """Round cores to whole units and memory to whole MB, then limit both to the request."""
    if unit_percent > 0:
        cores = math.floor(cores / unit_percent + 0.5) * unit_percent
    return min(cores, float(requested_cores)), min(float(math.floor(memory_mb + 0.5)), float(requested_memory_mb))


def grant(
    action: Sequence[float], requested_cores: float, requested_memory_mb: float, unit_percent: float = UNIT_PERCENT
) -> tuple[float, float]:
    """What an action gives to a pod: (cores %, memory MB) in whole units, at most what was requested.

    >>> grant([0.56, 0.08], 80, 4000)
    (60.0, 3092.0)
    >>> grant([1.0, 1.0], 47, 4000)
    (47.0, 4000.0)
    """
    cores, memory = transform_action(action)
    return limit_grant(cores, memory, requested_cores, requested_memory_mb, unit_percent)
