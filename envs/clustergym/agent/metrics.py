"""Prometheus metrics of the agent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from clustergym.agent.messages import FeedbackStatus
from clustergym.agent.owners import LEVELS
from clustergym.agent.store import Allocation, Feedback

if TYPE_CHECKING:
    from clustergym.agent.service import Service

TEXTS = {
    "reward": "Running mean of the rewards",
    "qos": "Share of pods that met their objective",
    "policy_reward": "Running mean of the rewards of the policy's advice, estimated where it was not granted",
    "policy_qos": "Share of pods that would have met their objective with the policy's advice",
    "recommended_reward": "Running mean of the rewards of recommendations, estimated in shadow mode",
    "recommended_qos": "Share of pods that would have met their objective with the recommendation",
    "regret": "Reward of the best allocation in hindsight minus that of the recommendation",
    "granted_share": "Granted cores / requested cores",
    "used_share": "Used cores / granted cores",
}
CLASSES = {True: "latency-sensitive", False: "best-effort"}


class Seconds:
    """Histogram of durations. All requests run on one thread, so it needs no lock, unlike the client library's."""

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.sum += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and cumulative counts, as Prometheus writes them."""
        return list(zip([*map(str, self.BOUNDS), "+Inf"], accumulate(self.counts), strict=True))


class RunningMeans:
    """Means of the newest rows of values: averages that forget 1 % per row."""

    RATE = 0.01

    def __init__(self, n: int) -> None:
        self.values, self._weight = [0.0] * n, 0.0

    def add(self, *row: float) -> None:
        self._weight = min(self._weight + 1.0, 1.0 / self.RATE)
        rate = 1.0 / self._weight
        self.values = [mean + rate * (value - mean) for mean, value in zip(self.values, row, strict=True)]

    def at(self, i: int) -> float:
        return self.values[i]


class Metrics:
    """All metrics of a service."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ServiceCollector(service))
        self.seconds: dict[str, Seconds] = {}
        """Durations of requests by path."""
        self.refused = Counter(
            "clustergym_refused", "Refused requests by status code", ("code",), registry=self.registry
        )
        self.learner_restarts = Counter(
            "clustergym_trainer_restarts", "Restarts of the learner process", registry=self.registry
        )
        self.task_failures = Counter(
            "clustergym_task_failures", "Failures of background tasks", ("task",), registry=self.registry
        )
        self.level_changes = Counter(
            "clustergym_owner_level_changes", "Changes of the level of an owner", ("level",), registry=self.registry
        )
        self.rollbacks = Counter("clustergym_rollbacks", "Automatic rollbacks of the policy", registry=self.registry)
        self._means = {sensitive: RunningMeans(len(TEXTS)) for sensitive in CLASSES}
        for i, (name, text) in enumerate(TEXTS.items()):
            gauge = Gauge(f"clustergym_{name}_mean", text, ("qos_class",), registry=self.registry)
            for sensitive, means in self._means.items():
                gauge.labels(CLASSES[sensitive]).set_function(partial(means.at, i))
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "clustergym_policy_version": ("Number of updates of the policy in use", lambda: service.policy.version),
            "clustergym_degraded": ("1 if /readyz lists problems", lambda: bool(service.problems())),
            "clustergym_store_unavailable": (
                "1 if the last transaction failed", lambda: service.store.problem is not None,
            ),
            "clustergym_store_unreadable_owners": (
                "Owners whose stored state could not be read", lambda: service.store.unreadable_owners,
            ),
            "clustergym_good_version": (
                "The last version that passed the test", lambda: service.champion.version if service.champion else -1,
            ),
            "clustergym_connections": ("Open connections", lambda: service.pool.open),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(value)

    def add(self, allocation: Allocation, outcome: Feedback) -> None:
        """Count the outcome of an allocation."""
        a, o = allocation, outcome
        # In the order of TEXTS.
        self._means[bool(a.sensitive)].add(
            o.reward, o.qos_met, o.advised_reward, o.advised_qos, o.recommended_reward, o.recommended_qos, o.regret,
            a.cores / a.requested_cores, o.usage / a.cores,
        )  # fmt: skip


class ServiceCollector:
    """Values that are read when they are asked for. Counters of the store continue after a restart."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        counters, pool = self.service.store.counters(), self.service.pool
        allocations = CounterMetricFamily("clustergym_allocations", "Number of allocations")
        allocations.add_metric([], counters.get("allocations", 0))
        yield allocations
        feedback = CounterMetricFamily("clustergym_feedback", "Number of feedbacks by status", labels=["status"])
        for status in get_args(FeedbackStatus):
            feedback.add_metric([status], counters.get(f"feedback:{status}", 0))
        yield feedback
        seconds = HistogramMetricFamily(
            "clustergym_request_seconds", "Time from the arrival of a request to its answer", labels=["path"]
        )
        for path, durations in self.service.metrics.seconds.items():
            seconds.add_metric([path], durations.buckets, durations.sum)
        yield seconds
        levels = GaugeMetricFamily("clustergym_owners", "Owners by who decides about their pods", labels=["level"])
        states = [state for _, state in self.service.store.owner_states(10_000)]
        for number, level in enumerate(LEVELS):
            levels.add_metric([level], sum(state.level == number for state in states))
        yield levels
        closed = CounterMetricFamily("clustergym_connections_closed", "Connections closed by limits", labels=["limit"])
        for limit, count in {"idle": pool.evicted, "refused": pool.refused, "timeout": pool.timed_out}.items():
            closed.add_metric([limit], count)
        yield closed
        texts = {
            "clustergym_gpu_utilization": ("GPU utilisation, 0 to 1", "gpu_util"),
            "clustergym_gpu_memory_used": ("Used GPU memory, 0 to 1", "mem_util"),
            "clustergym_gpu_memory_mb": ("Size of the GPU memory in MB", "memory_mb"),
            "clustergym_gpu_pods": ("Processes on the GPU", "pods"),
        }
        for name, (text, field) in texts.items():
            gauge = GaugeMetricFamily(name, text, labels=["gpu"])
            for index, load in self.service.telemetry.loads.items():
                gauge.add_metric([str(index)], getattr(load, field))
            yield gauge
