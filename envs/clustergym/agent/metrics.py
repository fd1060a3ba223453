"""Prometheus metrics of the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from clustergym.agent.store import Allocation, Outcome

if TYPE_CHECKING:
    from clustergym.agent.service import Service

TEXTS = {
    "reward": "Running mean of the rewards",
    "qos": "Share of pods that met their objective",
    "recommended_reward": "Running mean of the rewards of recommendations, estimated in shadow mode",
    "recommended_qos": "Share of pods that would have met their objective with the recommendation",
    "rule_reward": "Running mean of the rewards of the VPA rule within the rails, estimated where it did not decide",
    "rule_qos": "Share of pods that would have met their objective with the VPA rule",
    "policy_reward": "Running mean of the rewards of the policy within the rails, estimated where it did not decide",
    "policy_qos": "Share of pods that would have met their objective with the policy",
    "regret": "Reward of the best allocation in hindsight minus that of the recommendation",
    "granted_share": "Granted cores / requested cores",
    "used_share": "Used cores / granted cores",
}
CLASSES = ("best-effort", "latency-sensitive")
"""Classes of pods; the index says whether they are latency-sensitive."""
RATE = 0.01
"""Weight of the newest pod in the running means."""


class Metrics:
    """All metrics of a service. Counters begin at 0 when the agent starts."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.allocations = counter("clustergym_allocations", "Allocations by who decided", "decided_by")
        self.feedback = counter("clustergym_feedback", "Feedback by status", "status")
        self.refused = counter("clustergym_refused", "Refused requests by status code", "code")
        self.learner_restarts = counter("clustergym_learner_restarts", "Restarts of the learner process")
        self.task_failures = counter("clustergym_task_failures", "Failures of background tasks", "task")
        self.falls = counter(
            "clustergym_owner_falls", "Owners whose pods get their request again, because their QoS was low"
        )
        self.verdicts = counter(
            "clustergym_verdicts", "Tests that gave a class of pods to rule or policy", "qos_class", "arm"
        )
        self.seconds = Histogram(
            "clustergym_request_seconds", "Time of a request", ("path",), registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
        )  # fmt: skip
        self._means = {
            name: Gauge(f"clustergym_{name}_mean", text, ("qos_class",), registry=self.registry)
            for name, text in TEXTS.items()
        }
        self._values = {name: dict.fromkeys(TEXTS, 0.0) for name in CLASSES}
        self._pods = dict.fromkeys(CLASSES, 0)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "clustergym_policy_version": ("Version of the policy in use", lambda: service.policy.version),
            "clustergym_degraded": ("1 if /readyz lists problems", lambda: bool(service.problems())),
            "clustergym_store_unavailable": ("1 if the store cannot be used", lambda: bool(service.store.problem)),
            "clustergym_store_unreadable": ("Reads of damaged rows", lambda: service.store.unreadable),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(value)
        self.registry.register(ServiceCollector(service))

    def add(self, allocation: Allocation, outcome: Outcome) -> None:
        """Count the outcome of an allocation."""
        a, name = allocation, CLASSES[allocation.sensitive]
        row = vars(outcome) | {
            "qos": outcome.qos_met, "granted_share": a.granted.cores / a.requested.cores,
            "used_share": outcome.usage / a.granted.cores,
        }  # fmt: skip
        self._pods[name] += 1
        values = self._values[name]
        for key in TEXTS:
            values[key] += max(RATE, 1.0 / self._pods[name]) * (float(row[key]) - values[key])
            self._means[key].labels(name).set(values[key])


class ServiceCollector:
    """Values that are read when they are asked for."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        decides = GaugeMetricFamily(
            "clustergym_policy_decides", "1 if the policy decides, 0 if the rule does", labels=["qos_class"]
        )
        for name, trial in self.service.trials.items():
            decides.add_metric([name], trial.policy_decides)
        yield decides
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
