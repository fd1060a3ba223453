"""The loop of the collector: sample the pods of a node, and report to their agents during and after their lives."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from clustergym.agent.collector.pods import ManagedPod, managed_pod
from clustergym.agent.collector.quality import Prometheus, judge
from clustergym.agent.collector.usage import Usage, UsageSource
from clustergym.kubernetes.clients import ApiServer, Client, Unavailable
from clustergym.kubernetes.messages import FeedbackRequest

log = logging.getLogger(__name__)

MEMORY_FULL = 0.95
"""A container that fails with this part of its GPU memory in use is out of memory, although Kubernetes cannot tell."""
MET_SHARE = 0.95
"""Over its life, a pod met its objective if it did in this part of the samples."""
MAX_WAITING = 10_000
"""Last reports that wait for an agent which does not answer. The oldest are dropped first."""


@dataclass
class Window:
    """Samples of a pod since its last report, or of its whole life."""

    samples: int = 0
    cores: float = 0.0
    """Sum over the samples with a known usage."""
    measured: int = 0
    met: int = 0
    pods: int = 1
    pressure: float | None = None
    oom: bool = False

    def add(self, usage: Usage | None, met: bool, pressure: float | None, oom: bool) -> None:
        self.samples += 1
        self.met += met
        self.oom |= oom
        if usage is not None:
            self.measured += 1
            self.cores += usage.cores
            self.pods = max(self.pods, usage.pods)
        if pressure is not None:
            self.pressure = pressure if self.pressure is None else max(self.pressure, pressure)


@dataclass
class Watch:
    """What is known of a pod."""

    pod: ManagedPod
    window: Window = field(default_factory=Window)
    life: Window = field(default_factory=Window)
    peak_memory_mb: float | None = None
    started: bool = False
    """Whether the pod has been seen running. Before, neither its usage nor its end can be meant."""
    was_ready: bool = False
    endings_seen: set[str] = field(default_factory=set)
    reported_s: float = 0.0

    def sample(self, pod: ManagedPod, usage: Usage | None, value: float | None, since_s: float) -> None:
        """Add a sample. Endings of containers before ``since_s`` were counted by an earlier collector."""
        self.pod = pod
        self.started |= pod.started
        if not self.started:
            return
        new = [one for one in pod.endings if one.container_id not in self.endings_seen and one.finished_s >= since_s]
        self.endings_seen.update(one.container_id for one in pod.endings)
        memory = None if usage is None else usage.memory_mb
        if memory is not None:
            limit = pod.granted_memory_mb
            if usage is not None and not usage.exact and limit is not None:
                # Only the whole GPU was measured: the pod used at most its limit of it.
                memory = min(memory, limit)
            self.peak_memory_mb = max(memory, self.peak_memory_mb or 0.0)
        full = (
            pod.granted_memory_mb is not None
            and self.peak_memory_mb is not None
            and self.peak_memory_mb >= MEMORY_FULL * pod.granted_memory_mb
        )
        oom = any(one.oom_killed or (one.failed and full) for one in new)
        disturbed = any(one.failed or one.oom_killed for one in new)
        quality = judge(pod, usage, value, disturbed, self.was_ready)
        for window in (self.window, self.life):
            window.add(usage, quality.met, quality.pressure, oom)
        self.was_ready |= pod.ready

    def report(self, final: bool) -> dict[str, Any] | None:
        """The body of a feedback, or None if nothing was measured: then there is nothing to learn."""
        window = self.life if final else self.window
        if window.measured == 0 and not window.oom:
            return None
        cores = window.cores / max(window.measured, 1)
        message = FeedbackRequest(
            allocation_id=self.pod.allocation_id, owner=self.pod.owner, final=final, actual_usage=min(cores, 100.0),
            qos_met=window.met >= MET_SHARE * window.samples, pods=window.pods, oom=window.oom,
            memory_used=self.peak_memory_mb, pressure=window.pressure,
        )  # fmt: skip
        return message.model_dump()


class Collector:
    """Samples every ``interval_s`` seconds, and reports on each pod every ``report_s`` seconds and when it ends."""

    def __init__(
        self,
        node: str,
        api: ApiServer,
        source: UsageSource,
        prometheus: Prometheus | None,
        client: Client,
        agents: dict[str, str],
        interval_s: float,
        report_s: float,
    ) -> None:
        for name, value in (("interval", interval_s), ("report interval", report_s)):
            if value <= 0:
                raise ValueError(f"{name} is {value} s: expected more than 0")
        self.node, self.api, self.source, self.prometheus = node, api, source, prometheus
        self.client, self.agents, self.interval_s, self.report_s = client, agents, interval_s, report_s
        self.started_s = time.time()
        self.last_step_s = time.monotonic()
        self.silent_agents: set[str] = set()
        """Agents that did not answer in this step. They are asked again in the next one."""
        self.watches: dict[str, Watch] = {}
        self.values: dict[str, float | None] = {}
        """The newest values of the queries by uid of the pod."""
        self._asking: asyncio.Task[None] | None = None
        self.waiting: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        """Last reports by agent and allocation."""
        self.registry = CollectorRegistry()
        self.samples = Counter("clustergym_collector_samples", "Samples of pods", registry=self.registry)
        self.feedback = Counter(
            "clustergym_collector_feedback", "Reports to agents by status", ("agent", "status"), registry=self.registry
        )
        self.errors = Counter("clustergym_collector_errors", "Failures by source", ("source",), registry=self.registry)
        Gauge("clustergym_collector_pods", "Pods with an allocation", registry=self.registry).set_function(
            lambda: len(self.watches)
        )

    async def run(self) -> None:
        """Collect until cancelled."""
        while True:
            started = time.monotonic()
            try:
                await self.step()
                self.last_step_s = time.monotonic()
            except Exception as error:  # a bug or an unexpected response must not end the feedback of all pods
                self._bug(error)
            await asyncio.sleep(max(0.0, self.interval_s - (time.monotonic() - started)))

    async def step(self) -> None:
        """Take one sample of every pod, and send the reports that are due."""
        self.silent_agents.clear()
        try:
            namespaces, found = await asyncio.gather(self.api.namespaces(), self.api.pods_on(self.node))
        except Unavailable as error:
            # Without the list it is unknown which pods ended.
            self._failed("pods", error)
            return
        pods = self._managed(found, namespaces)
        self._ask(list(pods.values()))
        usages = await self._usages(list(pods.values()))
        for uid, pod in pods.items():
            watch = self.watches.get(uid)
            if watch is None:
                if pod.finished:
                    continue
                watch = self.watches[uid] = Watch(pod, reported_s=time.monotonic())
            try:
                watch.sample(pod, usages.get(uid), self.values.get(uid), self.started_s)
            except Exception as error:  # what one pod says must not end the feedback of the others
                self._bug(error)
            self.samples.inc()
        for uid, watch in list(self.watches.items()):
            if uid not in pods or watch.pod.finished:
                del self.watches[uid]
                self._add_final(watch)
            elif time.monotonic() - watch.reported_s >= self.report_s:
                await self._report(watch)
        await self.send_waiting()

    def _managed(self, found: list[dict[str, Any]], namespaces: set[str]) -> dict[str, ManagedPod]:
        """The pods with an allocation, in namespaces that opted in, by uid."""
        pods = {}
        for one in found:
            try:
                pod = managed_pod(one)
            except Exception as error:  # what one pod says must not end the feedback of the others
                self._bug(error)
                continue
            if pod is not None and pod.namespace in namespaces:
                pods[pod.uid] = pod
        return pods

    async def _usages(self, pods: list[ManagedPod]) -> dict[str, Usage]:
        try:
            return await self.source.read(pods)
        except Exception as error:  # no answer, NVML errors, an unloaded driver, a page that cannot be parsed
            self._failed("usage", error)
        return {}

    def _ask(self, pods: list[ManagedPod]) -> None:
        """Ask for the values of the queries in the background: sampling does not wait for Prometheus."""
        if self.prometheus is None or (self._asking is not None and not self._asking.done()):
            return
        groups: dict[str, list[ManagedPod]] = defaultdict(list)
        for pod in pods:
            if pod.qos_query is not None:
                groups[pod.namespace].append(pod)

        async def ask_all() -> None:
            found = await asyncio.gather(*map(self._values, groups.values()))
            self.values = {uid: value for values in found for uid, value in values.items()}

        self._asking = asyncio.create_task(ask_all())

    async def _values(self, pods: list[ManagedPod]) -> dict[str, float | None]:
        """Values for the pods of one namespace by uid: one query at a time, for at most one interval."""
        assert self.prometheus is not None
        found: dict[str, float | None] = {}
        try:
            async with asyncio.timeout(self.interval_s):
                for pod in random.sample(pods, len(pods)):  # none is always the last
                    try:
                        found[pod.uid] = await self.prometheus.value(pod)
                    except Unavailable as error:
                        self._failed("prometheus", error)
        except TimeoutError:
            self._failed("prometheus", TimeoutError(f"the queries of namespace {pods[0].namespace} take too long"))
        return found

    def _bug(self, error: Exception) -> None:
        self.errors.labels("collector").inc()
        log.error("unexpected, and left out: %s", type(error).__name__, exc_info=error)

    def _failed(self, source: str, error: Exception) -> None:
        self.errors.labels(source).inc()
        log.warning("%s: %s", source, error)

    async def _report(self, watch: Watch) -> None:
        """Send a sample to the agent of the pod. If it does not answer, the next report covers this time too."""
        body = self._body(watch, final=False)
        if body is None or await self._send(watch.pod.agent, body):
            watch.window = Window()
            watch.reported_s = time.monotonic()

    def _body(self, watch: Watch, final: bool) -> dict[str, Any] | None:
        try:
            return watch.report(final)
        except ValueError as error:  # what this pod says is no message: it never will be
            self._bug(error)
            return None

    def _add_final(self, watch: Watch) -> None:
        body = self._body(watch, final=True)
        if body is not None:
            self.waiting[watch.pod.agent, watch.pod.allocation_id] = body
        while len(self.waiting) > MAX_WAITING:
            self.waiting.popitem(last=False)

    async def send_waiting(self) -> None:
        """Send the last reports of pods that ended."""
        for key, body in list(self.waiting.items()):
            if await self._send(key[0], body):
                del self.waiting[key]

    async def _send(self, agent: str, body: dict[str, Any]) -> bool:
        """Whether the agent has answered. What it refuses will not be accepted later either."""
        url = self.agents.get(agent)
        if url is None:
            return True
        if agent in self.silent_agents:
            return False
        what = f"the agent ({agent})"
        try:
            status, content = await self.client.send("POST", f"{url}/feedback", what, json=body)
        except Unavailable as error:
            self._failed("feedback", error)
            self.silent_agents.add(agent)
            return False
        except Exception as error:  # what one pod says cannot be sent: it never will be
            self._bug(error)
            return True
        if status in (401, 403, 429) or status > 500:  # 500: a bug for this report, the others may be fine
            self._failed("feedback", Unavailable(f"{what} answered {status}"))
            self.silent_agents.add(agent)
            return False
        self.feedback.labels(agent, str(status) if status != 200 else "ok").inc()
        if status != 200:
            log.warning("%s answered %d to a report: %s", what, status, content[:200].decode(errors="replace"))
        return True

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self.api.close()
        await self.client.close()
