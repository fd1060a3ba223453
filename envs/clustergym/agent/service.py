"""Decisions on requests and feedback, without HTTP."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clustergym.agent import hindsight
from clustergym.agent.connections import ConnectionPool
from clustergym.agent.credentials import BearerTokens, FeedbackCredentials
from clustergym.agent.learner import LearnerProcess
from clustergym.agent.messages import AllocateRequest, FeedbackRequest, FeedbackStatus
from clustergym.agent.metrics import Metrics
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Allocation, Experience, Feedback, Store
from clustergym.agent.telemetry import GpuLoad, Telemetry
from clustergym.common.tls import CertificateReloader
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

    def value(self, obs: NDArray[np.float32]) -> float:
        """V(obs)."""


class Refused(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status code."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def is_latency_sensitive(qos_class: str) -> bool:
    """True for every class that is not known to be best-effort."""
    return re.sub(r"[^a-z]", "", qos_class.lower()) not in BEST_EFFORT_CLASSES


class Service:
    """Decides on requests and scores feedback. All methods run on the event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        store: Store,
        telemetry: Telemetry,
        policy: Policy,
        learner: LearnerProcess | None,
        tokens: BearerTokens,
        pool: ConnectionPool,
        seed: int,
    ) -> None:
        self.settings, self.store, self.telemetry = settings, store, telemetry
        self.policy, self.learner, self.tokens, self.pool = policy, learner, tokens, pool
        self.credentials = FeedbackCredentials(store.feedback_key)
        self.certificate: CertificateReloader | None = None
        self.task_problems: dict[str, str] = {}
        """Background tasks that failed, and why."""
        # The time is part of the seed: a restarted server must not repeat the noise of the last run.
        self.rng = np.random.default_rng([seed, time.time_ns()])
        self.metrics = Metrics(self)

    def problems(self) -> list[str]:
        """Why the service is degraded; empty if it is not."""
        found = [f"{task}: {problem}" for task, problem in self.task_problems.items()]
        if self.telemetry.problem is not None:
            found.append(f"no GPU telemetry, decisions use the requests only ({self.telemetry.problem})")
        if self.learner is not None and not self.learner.alive:
            found.append("the learner process is not running")
        certificate = None if self.certificate is None else self.certificate.problem
        found += [problem for problem in (self.tokens.problem, self.store.clock.problem, certificate) if problem]
        return found

    def observe(
        self, owner: str, requested_cores: float, requested_memory_mb: float, sensitive: bool, load: GpuLoad
    ) -> NDArray[np.float32]:
        """The observation of ``GPUAllocation-v0``, or of ``GPUAllocationHistory-v0`` if the policy expects it.

        Requests outside the range of the task are observed as its limits. Memory is relative to that of the GPU.
        """
        cores = min(max(requested_cores, space.MIN_CORES), space.MAX_CORES)
        memory = requested_memory_mb * space.MAX_MEMORY_MB / load.memory_mb
        memory = min(max(memory, space.MIN_MEMORY_MB), space.MAX_MEMORY_MB)
        state = encode_state(cores, memory, load.gpu_util, load.mem_util, load.pods)
        if self.policy.obs_size > len(state):
            state_cores, state_memory, *_ = state
            state += features(self.store.history(owner), state_cores, state_memory, sensitive)
        return np.array(state, np.float32)

    async def allocate(self, request: AllocateRequest) -> Allocation:
        """Decide what a pod gets, and store the decision before it is answered."""
        if request.request_id is not None:
            earlier = self.store.find_request(request.request_id)
            if earlier is not None:
                await self.store.committed()
                return earlier
        try:
            gpu, load = self.telemetry.current(request.gpu)
        except ValueError as error:
            raise Refused(422, str(error)) from None
        explore = self.settings.explore
        sensitive = is_latency_sensitive(request.qos_class)
        sampled = explore == "all" or (explore == "best-effort" and not sensitive)
        obs = self.observe(request.owner, request.cores, request.memory, sensitive, load)
        action, log_prob = self.policy.act(obs, self.rng if sampled else None)
        advised_cores, advised_memory = advise(action, request.cores, request.memory, load.memory_mb)
        cores, memory, decided_by = advised_cores, advised_memory, "policy"
        if self.settings.shadow or request.shadow:
            cores, memory, decided_by = request.cores, request.memory, "shadow"
        allocation = Allocation(
            seq=self.store.next_seq, token=secrets.token_hex(16), created_s=self.store.clock.now(),
            owner=request.owner, requested_cores=request.cores, requested_memory_mb=request.memory,
            sensitive=sensitive, cores=cores, memory_mb=memory, version=self.policy.version, learnable=sampled,
            gpu=gpu, advised_cores=advised_cores, advised_memory_mb=advised_memory, decided_by=decided_by,
        )  # fmt: skip
        self.store.next_seq += 1
        self.store.add(allocation, Experience(obs, action, log_prob, self.policy.value(obs)), request.request_id)
        await self.store.committed()
        return allocation

    def find_allocation(self, request: FeedbackRequest, credential_for: str | None, now_s: float) -> Allocation | None:
        """The allocation that feedback is about.

        Without an id it is that of the feedback token, or the only open allocation of the owner.
        """
        if credential_for is not None and request.allocation_id not in (None, credential_for):
            raise Refused(403, "the feedback token is for another allocation")
        allocation_id = request.allocation_id or credential_for
        if allocation_id is not None:
            return self.store.find(allocation_id)
        waiting = self.store.open_of(request.owner, now_s - self.settings.ttl_s)
        if len(waiting) > 1:
            raise Refused(
                409, "the owner has more than one open allocation: send allocation_id, or the feedback_token as bearer"
            )
        return waiting[0] if waiting else None

    async def feedback(
        self, request: FeedbackRequest, credential_for: str | None = None
    ) -> tuple[FeedbackStatus, float | None]:
        """Status and reward. Only the first feedback on an allocation has an effect, and only before it expires.

        ``credential_for`` is the id of the allocation if the client has only the credential of one.
        """
        now = self.store.clock.now()
        allocation = self.find_allocation(request, credential_for, now)
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
            outcome = score(allocation, request, now, self.next_obs(allocation))
            reward = outcome.reward
            self.store.add_feedback(allocation, status, outcome, allocation.learnable and status == "accepted")
            self.metrics.add(allocation, outcome)
        self.store.count(f"feedback:{status}")
        await self.store.committed()
        return status, reward

    def next_obs(self, allocation: Allocation) -> NDArray[np.float32]:
        """The observation of the same request now."""
        load = self.telemetry.loads.get(allocation.gpu, GpuLoad())
        return self.observe(
            allocation.owner, allocation.requested_cores, allocation.requested_memory_mb, allocation.sensitive, load
        )


def advise(
    action: NDArray[np.float64], requested_cores: float, requested_memory_mb: float, gpu_memory_mb: float
) -> tuple[float, float]:
    """Cores (%) and memory (MB) of an action on a GPU with this much memory, at most what was requested."""
    scale = gpu_memory_mb / space.MAX_MEMORY_MB
    cores, memory = grant(action.tolist(), requested_cores, requested_memory_mb / scale)
    if requested_memory_mb > gpu_memory_mb:
        # The action cannot express that much memory: grant it in full.
        return cores, requested_memory_mb
    return cores, min(float(np.ceil(memory * scale)), requested_memory_mb)


def score(allocation: Allocation, request: FeedbackRequest, now_s: float, next_obs: NDArray[np.float32]) -> Feedback:
    """The reward of an allocation, that of the advised one, and what the owner's history needs to know."""
    qos_met = request.qos_met and not request.oom
    usage = min(request.actual_usage, allocation.cores)
    pods = max(request.pods, 1)
    used_mb = allocation.memory_mb if request.memory_used is None else request.memory_used
    # The cores that the pod needed: what it used, or what the measured pressure says it would have used.
    needed = usage
    if request.pressure is not None:
        needed = min(request.pressure * allocation.cores, allocation.requested_cores)
    elif not qos_met and not request.oom:
        needed = min(hindsight.MISS_GROWTH * allocation.cores, allocation.requested_cores)
    reward = compute_reward(allocation.cores, allocation.memory_mb, usage, qos_met, pods)
    needed_mb = max(hindsight.OOM_GROWTH * allocation.memory_mb, used_mb) if request.oom else used_mb
    measured = hindsight.Measured(allocation.requested_cores, usage, needed, needed_mb, pods)
    if (allocation.advised_cores, allocation.advised_memory_mb) == (allocation.cores, allocation.memory_mb):
        advised_reward, advised_qos = reward, qos_met
    else:
        advised_reward, advised_qos = hindsight.would_be(
            measured, allocation.advised_cores, allocation.advised_memory_mb
        )
    return Feedback(
        received_s=now_s, usage=usage, qos_met=qos_met, pods=request.pods, memory_used_mb=used_mb, oom=request.oom,
        reward=reward, needed=needed / allocation.requested_cores, advised_reward=advised_reward,
        advised_qos=advised_qos, regret=max(hindsight.best_reward(measured) - advised_reward, 0.0),
        next_obs=next_obs.tobytes(), done=False,
    )  # fmt: skip
