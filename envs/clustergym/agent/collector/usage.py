"""GPU usage of pods: from a metrics page (DCGM exporter or HAMi), or from NVML."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from clustergym.agent.collector.pods import ManagedPod
from clustergym.common.extras import require
from clustergym.kubernetes.clients import Client

# Metrics in the order of preference, and the factor that makes them % of the GPU or MB.
CORES_METRICS = {
    "Device_utilization_desc_of_container": 1.0,  # HAMi: of one container
    "DCGM_FI_PROF_SM_ACTIVE": 100.0,  # DCGM: share of cycles in which an SM is busy, of one GPU
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 100.0,
    "DCGM_FI_DEV_GPU_UTIL": 1.0,  # share of time with any kernel: counts a small kernel as a full GPU
}
MEMORY_METRICS = {
    "vGPU_device_memory_usage_in_bytes": 2.0**-20,
    "DCGM_FI_DEV_FB_USED": 1.0,
}
POD_LABELS = (("namespace", "pod"), ("exported_namespace", "exported_pod"), ("podnamespace", "podname"))
GPU_LABELS = ("UUID", "deviceuuid", "gpu")
# DCGM reports fields without a value as numbers near 2^63.
MAX_MEMORY_MB = 1 << 24


@dataclass(frozen=True)
class Usage:
    """What a pod uses now."""

    cores: float
    """% of the GPU."""
    memory_mb: float | None
    pods: int = 1
    """Number of pods on the GPU."""
    exact: bool = True
    """False if only the whole GPU was measured and pods share it: then these are upper bounds."""


class UsageSource(Protocol):
    async def read(self, pods: list[ManagedPod]) -> dict[str, Usage]:
        """Usage by uid of the pod. Pods that are not on a GPU are left out."""


class MetricsPage:
    """A page in the text format of Prometheus: that of a DCGM exporter, or of HAMi's monitor."""

    def __init__(self, client: Client, url: str) -> None:
        self.client, self.url = client, url

    async def read(self, pods: list[ManagedPod]) -> dict[str, Usage]:
        by_name = parse_metrics(
            (await self.client.content("GET", self.url, "the metrics page")).decode(errors="replace")
        )
        found = {pod.uid: by_name.get((pod.namespace, pod.name)) for pod in pods}
        return {uid: usage for uid, usage in found.items() if usage is not None}


PodName = tuple[str, str]
"""Namespace and name."""


def pod_of(labels: dict[str, str]) -> PodName:
    """The pod that a series is about, in the labels of DCGM exporter, Prometheus or HAMi; empty if there is none."""
    found = [(labels.get(a, ""), labels[b]) for a, b in POD_LABELS if labels.get(b)]
    return found[-1] if found else ("", "")


Series = dict[str, dict[tuple[PodName, str], float]]
"""Metric → (pod, GPU) → value."""


def _read_series(text: str) -> Series:
    series: Series = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        factor = CORES_METRICS.get(family.name) or MEMORY_METRICS.get(family.name)
        if factor is None:
            continue
        limit = 100.0 if family.name in CORES_METRICS else MAX_MEMORY_MB
        for sample in family.samples:
            labels, value = sample.labels, sample.value * factor
            pod = pod_of(labels)
            gpu = next((labels[key] for key in GPU_LABELS if key in labels), "")
            if pod[1] and 0 <= value <= limit:
                # Containers of one pod on one GPU add up; DCGM has one series for each pod.
                key = pod, gpu
                series[family.name][key] = min(series[family.name][key] + value, limit)
    return series


def parse_metrics(text: str) -> dict[PodName, Usage]:
    """Usage by namespace and name of the pod.

    DCGM measures GPUs. A pod that has a GPU for itself used what the GPU did; pods that share one used at most that.
    """
    series = _read_series(text)
    cores_name = next((name for name in CORES_METRICS if name in series), None)
    if cores_name is None:
        return {}
    memory_name = next((name for name in MEMORY_METRICS if name in series), None)
    on_gpu: dict[str, set[PodName]] = defaultdict(set)
    for pod, gpu in series[cores_name]:
        on_gpu[gpu].add(pod)
    of_gpu = cores_name.startswith("DCGM_")
    result: dict[PodName, Usage] = {}
    for (pod, gpu), cores in series[cores_name].items():
        memory = None if memory_name is None else series[memory_name].get((pod, gpu))
        neighbours = len(on_gpu[gpu])
        result[pod] = Usage(cores, memory, neighbours, exact=neighbours == 1 or not of_gpu)
    return result


_POD_UID = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


def pod_uid(proc: Path, pid: int) -> str | None:
    """The uid of the pod of a process, from its control group. Needs the process namespace of the host."""
    try:
        match = _POD_UID.search((proc / str(pid) / "cgroup").read_text())
    except OSError:
        return None
    return None if match is None else match[1].replace("_", "-")


class Simulated:
    """For a demo on nodes without GPUs: every pod uses 22 % of the cores that it requests, and 1,000 MB."""

    async def read(self, pods: list[ManagedPod]) -> dict[str, Usage]:
        return {
            pod.uid: Usage(
                min(0.22 * pod.requested_cores, pod.granted_cores), min(1000.0, pod.granted_memory_mb or 1000.0)
            )
            for pod in pods
        }


class Nvml:
    """Processes on the GPUs of this node: their memory, and the SM utilisation that the driver attributes to them."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.nvml = require("pynvml", "agent")
        self.nvml.nvmlInit()
        count = self.nvml.nvmlDeviceGetCount()
        self.devices = [self.nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self._seen_us = [0] * count

    async def read(self, pods: list[ManagedPod]) -> dict[str, Usage]:
        wanted = {pod.uid for pod in pods}
        found = await asyncio.to_thread(self._read)
        return {uid: usage for uid, usage in found.items() if uid in wanted}

    def _read(self) -> dict[str, Usage]:
        cores: dict[str, float] = defaultdict(float)
        memory: dict[str, float] = defaultdict(float)
        neighbours: dict[str, int] = {}
        for index, device in enumerate(self.devices):
            uids: dict[int, str] = {}
            for process in self._processes(device):
                uid = pod_uid(self.proc, process.pid)
                if uid is not None:
                    uids[process.pid] = uid
                    memory[uid] += (process.usedGpuMemory or 0) / 2**20
            for pid, percent in self._utilisation(index, device).items():
                if pid in uids:
                    cores[uids[pid]] += percent
            neighbours |= dict.fromkeys(uids.values(), len(set(uids.values())))
        return {uid: Usage(min(cores[uid], 100.0), memory[uid], neighbours[uid]) for uid in memory}

    def _processes(self, device: Any) -> list[Any]:
        # With MPS, the driver lists the clients separately from the MPS server process.
        found = [
            *self.nvml.nvmlDeviceGetComputeRunningProcesses(device),
            *self.nvml.nvmlDeviceGetMPSComputeRunningProcesses(device),
        ]
        return list({process.pid: process for process in found}.values())

    def _utilisation(self, index: int, device: Any) -> dict[int, float]:
        """% of the SMs by process: the mean of the driver's samples since the last call."""
        try:
            samples = self.nvml.nvmlDeviceGetProcessUtilization(device, self._seen_us[index])
        except self.nvml.NVMLError_NotFound:
            return {}
        values: dict[int, list[int]] = defaultdict(list)
        for sample in samples:
            self._seen_us[index] = max(self._seen_us[index], sample.timeStamp)
            values[sample.pid].append(sample.smUtil)
        return {pid: sum(percents) / len(percents) for pid, percents in values.items()}
