"""What owners used before the agent came: metrics of a DCGM exporter or HAMi, and of kube-state-metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict

from clustergym.agent.collector.usage import CORES_METRICS, MEMORY_METRICS, PodName, pod_of
from clustergym.agent.owners import CREDIT_S, GuardSettings, OwnerState
from clustergym.agent.store import Store
from clustergym.kubernetes.clients import Client, Unavailable

log = logging.getLogger(__name__)

DAY_S = 86_400.0
MAX_BYTES = 256 << 20
REQUESTS = (
    ("cores", 'kube_pod_container_resource_limits{resource="nvidia_com_gpucores"}'),
    ("memory", 'kube_pod_container_resource_limits{resource="nvidia_com_gpumem"}'),
)
ANNOTATIONS = (("cores", "annotation_clustergym_io_cores"), ("memory", "annotation_clustergym_io_memory"))


class Past:
    """Reads one day after the other, in steps of the running time that counts like a pod."""

    def __init__(self, url: str) -> None:
        self.url, self.client = url.rstrip("/"), Client(timeout_s=60.0, max_bytes=MAX_BYTES)

    async def series(self, query: str, begin_s: float) -> list[tuple[dict[str, str], dict[float, float]]]:
        """Labels, and time → value, of one day."""
        data = {"query": query, "start": begin_s, "end": begin_s + DAY_S - CREDIT_S, "step": CREDIT_S}
        found = await self.client.json("POST", f"{self.url}/api/v1/query_range", "Prometheus", data=data)
        try:
            return [
                (one["metric"], {float(t): float(v) for t, v in one["values"] if math.isfinite(float(v))})
                for one in found["data"]["result"]
            ]
        except (KeyError, TypeError, ValueError):
            raise Unavailable("Prometheus sent an unexpected response") from None

    async def owners(self, begin_s: float) -> dict[PodName, str]:
        """The workload of each pod, named as the webhook names it."""
        deployments = {
            (labels.get("namespace"), labels.get("replicaset")): labels.get("owner_name")
            for labels, _ in await self.series('kube_replicaset_owner{owner_kind="Deployment"}', begin_s)
        }
        found = {}
        for labels, _ in await self.series('kube_pod_owner{owner_is_controller="true"}', begin_s):
            namespace, kind, name = (labels.get(key, "") for key in ("namespace", "owner_kind", "owner_name"))
            deployment = deployments.get((namespace, name)) if kind == "ReplicaSet" else None
            owner = f"{kind}/{name}" if deployment is None else f"Deployment/{deployment}"
            found[namespace, labels.get("pod", "")] = f"{namespace}/{owner}"
        return found

    async def requests(self, begin_s: float) -> dict[PodName, dict[str, float]]:
        """Requested cores (%) and memory (MB) of each pod: the annotations, or the sum of the limits."""
        found: dict[PodName, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, query in REQUESTS:
            for labels, values in await self.series(query, begin_s):
                found[pod_of(labels)][name] += max(values.values(), default=0.0)
        for labels, _ in await self.series("kube_pod_annotations", begin_s):
            for name, label in ANNOTATIONS:
                try:
                    found[pod_of(labels)][name] = float(labels[label])
                except (KeyError, ValueError):
                    continue
        return found

    async def usage(self, metrics: dict[str, float], begin_s: float) -> dict[PodName, dict[float, tuple[float, float]]]:
        """Pod → time → mean and maximum, by the first metric that there is."""
        for metric, factor in metrics.items():
            found: dict[PodName, dict[float, tuple[float, float]]] = defaultdict(dict)
            step = f"[{CREDIT_S:.0f}s]"
            most = {
                tuple(sorted(labels.items())): values
                for labels, values in await self.series(f"max_over_time({metric}{step})", begin_s)
            }
            for labels, values in await self.series(f"avg_over_time({metric}{step})", begin_s):
                of_pod, peaks = found[pod_of(labels)], most.get(tuple(sorted(labels.items())), {})
                for at, value in values.items():
                    mean, peak = of_pod.get(at, (0.0, 0.0))
                    of_pod[at] = mean + factor * value, peak + factor * max(peaks.get(at, value), value)
            found.pop(("", ""), None)
            if found:
                return found
        return {}

    async def day(self, begin_s: float) -> list[tuple[float, str, float, float, float, float]]:
        """Time, owner, mean and peak share of the requested cores, peak memory in MB and its share of the request."""
        owners, requests = await self.owners(begin_s), await self.requests(begin_s)
        cores, memory = await self.usage(CORES_METRICS, begin_s), await self.usage(MEMORY_METRICS, begin_s)
        rows: list[tuple[float, str, float, float, float, float]] = []
        for pod, samples in cores.items():
            requested = requests.get(pod, {})
            if pod not in owners or not 1 <= requested.get("cores", 0) <= 100 or requested.get("memory", 0) < 1:
                continue
            for at, (mean, peak) in samples.items():
                used_mb = memory.get(pod, {}).get(at, (0.0, requested["memory"]))[1]  # unknown: as requested
                shares = [min(one / requested["cores"], 1.0) for one in (mean, peak)]
                rows.append((at, owners[pod], shares[0], shares[1], used_mb, used_mb / requested["memory"]))
        return sorted(rows)


def read_past(store: Store, url: str, days: int, guard: GuardSettings) -> int:
    """Give owners of whom nothing is known what Prometheus knows of them. Returns how many.

    Every ten minutes of a pod count like one pod that met its objective: it had its whole request.

    Raises:
        Unavailable: Prometheus does not answer as expected. Then nothing is stored.
    """
    states: dict[str, OwnerState] = defaultdict(OwnerState)

    async def read() -> None:
        past, now = Past(url), time.time()
        for back in range(days, 0, -1):
            for at, owner, mean, peak, used_mb, share in await past.day(now - back * DAY_S + CREDIT_S):
                states[owner].measure(at, 1.0, peak, mean, used_mb, share, oom=False)
        await past.client.close()

    asyncio.run(read())
    known = {owner for (owner,) in store.connection.execute("SELECT owner FROM owners")}
    new = {owner: state for owner, state in states.items() if owner not in known}
    with store.transaction() as execute:
        for owner, state in new.items():
            state.judge(sensitive=True, met=True, credit=0.0, settings=guard)
            store.save_owner(execute, owner, time.time(), state)
    log.info("%d owners begin with what they used in the last %d days", len(new), days)
    return len(new)
