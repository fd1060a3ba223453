"""Decisions on requests and feedback, without HTTP."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily

from clustergym.agent.learner import LearnerProcess
from clustergym.agent.messages import AllocateRequest, FeedbackRequest, FeedbackStatus
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Allocation, Feedback, Store
from clustergym.agent.telemetry import Telemetry
from clustergym.gpu_allocation import space
from clustergym.gpu_allocation.history import features
from clustergym.gpu_allocation.reward import compute_reward
from clustergym.gpu_allocation.space import encode_state, grant

log = logging.getLogger(__name__)

BEST_EFFORT_CLASSES = {"be", "besteffort", "burstable"}


class Policy(Protocol):
    """One version of the policy, as the server uses it."""

    version: int
    obs_size: int

    def act(self, obs: NDArray[np.float32], rng: np.random.Generator | None) -> tuple[NDArray[np.float64], float]:
        """A sampled action (2,) and its log-probability, or the mean action if ``rng`` is None."""


def is_latency_sensitive(qos_class: str) -> bool:
    """True for every class that is not known to be best-effort."""
    return re.sub(r"[^a-z]", "", qos_class.lower()) not in BEST_EFFORT_CLASSES


class Service:
    """Decides on requests, scores feedback and keeps the metrics. All methods run on the event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        store: Store,
        telemetry: Telemetry,
        policy: Policy,
        learner: LearnerProcess | None,
        seed: int,
    ) -> None:
        self.settings, self.store, self.telemetry = settings, store, telemetry
        self.policy, self.learner = policy, learner
        # The time is part of the seed: a restarted server must not repeat the noise of the last run.
        self.rng = np.random.default_rng([seed, time.time_ns()])
        self.registry = CollectorRegistry()
        self.registry.register(StoreCollector(store))
        self.seconds = Histogram(
            "clustergym_request_seconds",
            "Time from the arrival of a request to its answer",
            ("path",),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
            registry=self.registry,
        )
        self.refused = Counter(
            "clustergym_refused", "Refused requests by status code", ("code",), registry=self.registry
        )
        self.learner_restarts = Counter(
            "clustergym_trainer_restarts", "Restarts of the learner process", registry=self.registry
        )
        self.reward = Gauge("clustergym_reward_mean", "Running mean of the rewards", registry=self.registry)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "clustergym_policy_version": ("Number of updates of the policy in use", lambda: self.policy.version),
            "clustergym_degraded": ("1 without GPU telemetry", lambda: self.telemetry.problem is not None),
            "clustergym_gpu_utilization": ("GPU utilisation, 0 to 1", lambda: self.telemetry.load.gpu_util),
            "clustergym_gpu_memory_used": ("Used GPU memory, 0 to 1", lambda: self.telemetry.load.mem_util),
            "clustergym_gpu_pods": ("Processes on the GPU", lambda: self.telemetry.load.pods),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(value)
        self._mean_reward: float | None = None

    def problems(self) -> list[str]:
        """Why the service is degraded; empty if it is not."""
        found = []
        if self.telemetry.problem is not None:
            found.append(f"no GPU telemetry, decisions use the requests only ({self.telemetry.problem})")
        if self.learner is not None and not self.learner.alive:
            found.append("the learner process is not running")
        return found

    def observe(self, request: AllocateRequest, sensitive: bool) -> NDArray[np.float32]:
        """The observation of ``GPUAllocation-v0``, or of ``GPUAllocationHistory-v0`` if the policy expects it."""
        load = self.telemetry.current()
        # Requests outside the range of the task are observed as its limits.
        cores = min(max(request.cores, space.MIN_CORES), space.MAX_CORES)
        memory = min(max(request.memory, space.MIN_MEMORY_MB), space.MAX_MEMORY_MB)
        state = encode_state(cores, memory, load.gpu_util, load.mem_util, load.pods)
        if self.policy.obs_size > len(state):
            requested_cores, requested_memory, *_ = state
            state += features(self.store.history(request.owner), requested_cores, requested_memory, sensitive)
        return np.array(state, np.float32)

    async def allocate(self, request: AllocateRequest) -> Allocation:
        """Decide what a pod gets, and store the decision before it is answered."""
        if request.request_id is not None:
            earlier = self.store.find_request(request.request_id)
            if earlier is not None:
                await self.store.committed()
                return earlier
        explore = self.settings.explore
        sensitive = is_latency_sensitive(request.qos_class)
        sampled = explore == "all" or (explore == "best-effort" and not sensitive)
        obs = self.observe(request, sensitive)
        action, log_prob = self.policy.act(obs, self.rng if sampled else None)
        cores, memory = grant(action.tolist(), request.cores, request.memory)
        if request.memory > space.MAX_MEMORY_MB:
            # The action cannot express that much memory: grant it in full.
            memory = request.memory
        if self.settings.shadow:
            log.info(
                "shadow: %s would get %g of %g %% and %g of %g MB",
                request.owner, cores, request.cores, memory, request.memory,
            )  # fmt: skip
            cores, memory = request.cores, request.memory
        allocation = Allocation(
            seq=self.store.next_seq, token=secrets.token_hex(16), created_s=time.time(), owner=request.owner,
            requested_cores=request.cores, requested_memory_mb=request.memory, sensitive=sensitive, cores=cores,
            memory_mb=memory, version=self.policy.version, learnable=sampled and not self.settings.shadow,
        )  # fmt: skip
        self.store.next_seq += 1
        self.store.add(allocation, obs, action, log_prob, request.request_id)
        await self.store.committed()
        return allocation

    async def feedback(self, request: FeedbackRequest) -> tuple[FeedbackStatus, float | None]:
        """Status and reward. Only the first feedback on an allocation has an effect, and only before it expires."""
        allocation, now = self.store.find(request.allocation_id), time.time()
        status: FeedbackStatus
        reward = None
        if allocation is None:
            status = "unknown"
        elif allocation.feedback is not None:
            status = "duplicate"
        elif now - allocation.created_s > self.settings.ttl_s:
            status = "expired"
        else:
            lag = self.policy.version - allocation.version
            status = "accepted" if lag <= self.settings.max_policy_lag else "stale"
            outcome = score(allocation, request, now)
            reward = outcome.reward
            self.store.add_feedback(allocation, status, outcome, allocation.learnable and status == "accepted")
            self._mean_reward = reward if self._mean_reward is None else 0.99 * self._mean_reward + 0.01 * reward
            self.reward.set(self._mean_reward)
        self.store.count(f"feedback:{status}")
        await self.store.committed()
        return status, reward


def score(allocation: Allocation, request: FeedbackRequest, now_s: float) -> Feedback:
    """The reward of an allocation, and what its owner's history needs to know."""
    qos_met = request.qos_met and not request.oom
    usage = min(request.actual_usage, allocation.cores)
    # The cores that the pod needed: what it used, or what the measured pressure says it would have used.
    needed = usage
    if request.pressure is not None:
        needed = min(request.pressure * allocation.cores, allocation.requested_cores)
    return Feedback(
        received_s=now_s,
        usage=usage,
        qos_met=qos_met,
        pods=request.pods,
        memory_used_mb=allocation.memory_mb if request.memory_used is None else request.memory_used,
        oom=request.oom,
        reward=compute_reward(allocation.cores, allocation.memory_mb, usage, qos_met, max(request.pods, 1)),
        needed=needed / allocation.requested_cores,
    )


class StoreCollector:
    """Prometheus counters that are kept in the store, so that they continue after a restart."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        counters = self.store.counters()
        allocations = CounterMetricFamily("clustergym_allocations", "Number of allocations")
        allocations.add_metric([], counters.get("allocations", 0))
        yield allocations
        feedback = CounterMetricFamily("clustergym_feedback", "Number of feedbacks by status", labels=["status"])
        for status in get_args(FeedbackStatus):
            feedback.add_metric([status], counters.get(f"feedback:{status}", 0))
        yield feedback
