"""Load of the GPU, read from NVML."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from clustergym.common.extras import require

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuLoad:
    """Utilisation of the GPU and of its memory (0 to 1), and the number of processes on it."""

    gpu_util: float = 0.0
    mem_util: float = 0.0
    pods: int = 0


class Telemetry:
    """Samples the GPU load. Without a GPU, or if NVML fails, it reports an idle GPU and ``problem`` says why."""

    RETRY_S = 30.0

    def __init__(self, gpu_index: int, interval_s: float) -> None:
        self.gpu_index, self.interval_s = gpu_index, interval_s
        self.problem: str | None = None
        self.load = GpuLoad()
        self._handle: Any = None
        self._retry_at = 0.0
        self.sample()
        self._stop = threading.Event()
        if interval_s > 0:
            threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.sample()

    def stop(self) -> None:
        self._stop.set()

    def sample(self) -> None:
        """Read the load now. After a failure, NVML is not called again for ``RETRY_S`` seconds."""
        if self._handle is None and time.monotonic() < self._retry_at:
            return
        try:
            nvml = require("pynvml", "agent")
            if self._handle is None:
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByIndex(self.gpu_index)
            busy_percent = nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            # With MPS, the driver lists the clients separately from the MPS server process.
            processes = nvml.nvmlDeviceGetMPSComputeRunningProcesses(self._handle)
            if not processes:
                processes = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            used = memory.used / memory.total if memory.total else 0.0
            pods = len({process.pid for process in processes})
            self.load = GpuLoad(min(busy_percent / 100.0, 1.0), min(used, 1.0), pods)
            self.problem = None
        except Exception as error:  # NVML errors, a driver that is gone, no package: decisions continue without it
            if self.problem is None:
                log.warning("no GPU telemetry, decisions use the requests only: %s", error)
            self.problem = f"{type(error).__name__}: {error}"
            self.load, self._handle = GpuLoad(), None
            self._retry_at = time.monotonic() + self.RETRY_S

    def current(self) -> GpuLoad:
        """The latest sample, or a new one if there is no sampling interval."""
        if self.interval_s <= 0:
            self.sample()
        return self.load
