"""Load and memory size of the GPUs of a node, read from NVML."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clustergym.common.extras import require
from clustergym.gpu_allocation.space import MAX_MEMORY_MB

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuLoad:
    """Utilisation of a GPU and of its memory (0 to 1), the number of processes on it, and the size of its memory."""

    gpu_util: float = 0.0
    mem_util: float = 0.0
    pods: int = 0
    memory_mb: float = MAX_MEMORY_MB


class Telemetry:
    """Samples all GPUs, or those of ``indices``.

    Without a GPU, or if NVML fails, it reports one idle GPU of 32 GB, and ``problem`` says why. If only some GPUs fail,
    the others are used.
    """

    RETRY_S = 30.0

    def __init__(self, indices: Sequence[int], interval_s: float, enabled: bool = True) -> None:
        self.indices, self.interval_s, self.enabled = tuple(indices), interval_s, enabled
        self.problem: str | None = None
        self.loads: dict[int, GpuLoad] = self._idle()
        self._handles: dict[int, Any] = {}
        self._retry_at = 0.0
        self.sample()
        self._stop = threading.Event()
        if enabled and interval_s > 0:
            threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def _idle(self) -> dict[int, GpuLoad]:
        return {index: GpuLoad() for index in self.indices or (0,)}

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.sample()

    def stop(self) -> None:
        self._stop.set()

    def sample(self) -> None:
        """Read the loads now. After a failure, NVML is not called again for ``RETRY_S`` seconds."""
        if not self.enabled or (not self._handles and time.monotonic() < self._retry_at):
            return
        loads, problems = {}, []
        try:
            nvml = require("pynvml", "agent")
            if not self._handles:
                nvml.nvmlInit()
                indices = self.indices or range(nvml.nvmlDeviceGetCount())
                self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
                if not self._handles:
                    raise RuntimeError("NVML finds no GPU")
        except Exception as error:  # NVML errors, a driver that was unloaded, no package: decisions continue without it
            problems.append(f"{type(error).__name__}: {error}")
        for index, handle in self._handles.items():
            try:
                loads[index] = read_load(nvml, handle)
            except Exception as error:
                problems.append(f"GPU {index}: {type(error).__name__}: {error}")
        problem = "; ".join(problems) or None
        if problem is not None and problem != self.problem:
            log.warning("no GPU telemetry, decisions use the requests only: %s", problem)
        self.problem = problem
        if not loads:
            self._handles = {}
            self._retry_at = time.monotonic() + self.RETRY_S
        self.loads = loads or self._idle()

    def current(self, gpu: int | None = None) -> tuple[int, GpuLoad]:
        """Index and load of a GPU; by default of the one with the fewest pods, then with the lowest utilisation.

        Raises:
            ValueError: there is no such GPU.
        """
        if self.interval_s <= 0:
            self.sample()
        loads = self.loads
        if gpu is None:
            gpu = min(loads, key=lambda index: (loads[index].pods, loads[index].gpu_util, index))
        elif gpu not in loads:
            raise ValueError(f"there is no GPU {gpu}: the GPUs of this node are {', '.join(map(str, sorted(loads)))}")
        return gpu, loads[gpu]


def read_load(nvml: Any, handle: Any) -> GpuLoad:
    """Ask NVML for the load of one GPU."""
    busy_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    # With MPS, the driver lists the clients separately from the MPS server process.
    processes = nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    if not processes:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    used = memory.used / memory.total if memory.total else 0.0
    pods = len({process.pid for process in processes})
    return GpuLoad(min(busy_percent / 100.0, 1.0), min(used, 1.0), pods, memory.total / (1 << 20) or MAX_MEMORY_MB)
