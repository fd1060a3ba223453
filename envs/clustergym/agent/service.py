"""Decisions on requests and feedback, without HTTP."""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clustergym.agent import hindsight
from clustergym.agent.connections import ConnectionPool
from clustergym.agent.credentials import Access
from clustergym.agent.learner import LearnerProcess
from clustergym.agent.messages import DEFAULT_OWNER, AllocateRequest, FeedbackRequest, FeedbackStatus
from clustergym.agent.metrics import Metrics
from clustergym.agent.owners import LEVELS, OwnerState
from clustergym.agent.rails import Bounds, bound, limit
from clustergym.agent.settings import ServerSettings
from clustergym.agent.status import Status
from clustergym.agent.store import Allocation, Experience, Feedback, Store, needed_memory_mb
from clustergym.agent.telemetry import GpuLoad, Telemetry
from clustergym.agent.versions import SequentialTest, request_rollback, write_champion
from clustergym.common.tls import CertificateReloader
from clustergym.gpu_allocation import space
from clustergym.gpu_allocation.history import features
from clustergym.gpu_allocation.reward import score
from clustergym.gpu_allocation.space import scale_state

log = logging.getLogger(__name__)

BEST_EFFORT_CLASSES = {"be", "besteffort", "burstable"}
MAX_LAST_SHARES = 50_000


class Policy(Protocol):
    """One version of the policy, as the server uses it."""

    version: int
    obs_size: int
    levels: int
    """Number of shares of the request that it chooses from."""

    def logits(self, obs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits (2, levels) of the shares of cores and memory."""

    def evaluate(self, obs: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
        """Logits (2, levels) and V(obs)."""

    def choose(self, logits: NDArray[np.float32], rng: np.random.Generator | None) -> tuple[NDArray[np.int64], float]:
        """Indices (2,) of sampled shares and their log-probability; of the most probable shares if ``rng`` is None."""

    def shares(self, chosen: NDArray[np.int64]) -> tuple[float, float]:
        """The shares of the requested cores and memory with these indices (2,)."""


class Refused(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status code."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def is_latency_sensitive(qos_class: str) -> bool:
    """True for every class that is not known to be best-effort."""
    return re.sub(r"[^a-z]", "", qos_class.lower()) not in BEST_EFFORT_CLASSES


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that waits for a decision."""

    owner: str
    requested_cores: float
    requested_memory_mb: float
    sensitive: bool
    state: OwnerState
    """What is known about the owner."""


class Service:
    """Decides on requests and scores feedback. All methods run on the event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        store: Store,
        telemetry: Telemetry,
        policy: Policy,
        learner: LearnerProcess | None,
        access: Access,
        pool: ConnectionPool,
        seed: int,
    ) -> None:
        self.settings, self.store, self.telemetry = settings, store, telemetry
        self.policy, self.learner, self.access, self.pool = policy, learner, access, pool
        self.certificate: CertificateReloader | None = None
        self.task_problems: dict[str, str] = {}
        """Background tasks that failed, and why."""
        # The time is part of the seed: a restarted server must not repeat the noise of the last run.
        self.rng = np.random.default_rng([seed, time.time_ns()])
        self.rails = settings.rail_settings
        self._last_shares: dict[str, tuple[float, float]] = {}
        self.champion: Policy | None = None
        """The last version that passed the test against its predecessor."""
        self.test = SequentialTest()
        self.metrics = Metrics(self)
        self.status = Status()

    def problems(self) -> list[str]:
        """Why the service is degraded; empty if it is not."""
        found = [f"{task}: {problem}" for task, problem in self.task_problems.items()]
        if self.telemetry.problem is not None:
            found.append(f"no GPU telemetry, decisions use the requests only ({self.telemetry.problem})")
        if self.learner is not None and not self.learner.alive:
            found.append("the learner process is not running")
        certificate = None if self.certificate is None else self.certificate.problem
        found += [problem for problem in (*self.access.problems, self.store.clock.problem, certificate) if problem]
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
        state = scale_state(cores, memory, load.gpu_util, load.mem_util, load.pods)
        if self.policy.obs_size > len(state):
            return np.array([*state, *features(self.store.history(owner), *state[:2], sensitive)], np.float32)
        return np.array(state, np.float32)

    def allocate(self, request: AllocateRequest) -> Allocation:
        """Decide what a pod gets, and store the decision before it is answered."""
        if request.request_id is not None:
            earlier = self.store.find_request(request.request_id)
            if earlier is not None:
                return earlier
        try:
            gpu, load = self.telemetry.current(request.gpu)
        except ValueError as error:
            raise Refused(422, str(error)) from None
        explore = self.settings.explore
        sensitive = is_latency_sensitive(request.qos_class)
        sampled = explore == "all" or (explore == "best-effort" and not sensitive)
        # In shadow mode, exploration has no effect on pods.
        sampled |= explore != "off" and (self.settings.shadow or request.shadow)
        obs = self.observe(request.owner, request.cores, request.memory, sensitive, load)
        logits, value = self.policy.evaluate(obs)
        chosen, log_prob = self.policy.choose(logits, self.rng if sampled else None)
        owner = self.store.owner_state(request.owner)
        pod = Pod(request.owner, request.cores, request.memory, sensitive, owner)
        advised_cores, advised_memory = self.advise(pod, self.policy.shares(chosen))
        best_cores, best_memory, decided_by = self.recommend(pod, advised_cores, advised_memory, bounds_of(request))
        cores, memory = best_cores, best_memory
        if self.settings.shadow or request.shadow:
            cores, memory, decided_by = request.cores, request.memory, "shadow"
        allocation = Allocation(
            seq=self.store.next_seq, token=secrets.token_hex(16), created_s=self.store.clock.now(),
            owner=request.owner, requested_cores=request.cores, requested_memory_mb=request.memory,
            sensitive=sensitive, cores=cores, memory_mb=memory, version=self.policy.version, learnable=sampled,
            gpu=gpu, advised_cores=advised_cores, advised_memory_mb=advised_memory,
            recommended_cores=best_cores, recommended_memory_mb=best_memory, decided_by=decided_by,
            champion=self.compare(pod, obs, logits),
        )  # fmt: skip
        self.store.add(allocation, Experience(obs, chosen, log_prob, value), request.request_id)
        self._last_shares[request.owner] = best_cores / request.cores, best_memory / request.memory
        if len(self._last_shares) > MAX_LAST_SHARES:
            self._last_shares.pop(next(iter(self._last_shares)))
        return allocation

    def advise(self, pod: Pod, shares: tuple[float, float]) -> tuple[float, float]:
        """What shares of its request give to a pod, within the rails."""
        return self.limit(pod, *share_amounts(shares, pod.requested_cores, pod.requested_memory_mb))

    def limit(self, pod: Pod, cores: float, memory_mb: float) -> tuple[float, float]:
        """Apply the rails."""
        if not self.settings.rails:
            return cores, memory_mb
        last = self._last_shares.get(pod.owner, (0.0, 0.0))
        return limit(
            cores, memory_mb, pod.requested_cores, pod.requested_memory_mb, pod.sensitive, pod.state, *last, self.rails
        )

    def vpa(self, pod: Pod) -> tuple[float, float]:
        """What the VPA rule gives to a pod, within the rails."""
        return self.limit(pod, *vpa_amounts(pod.state, pod.requested_cores, pod.requested_memory_mb))

    def recommend(
        self, pod: Pod, advised_cores: float, advised_memory: float, bounds: Bounds
    ) -> tuple[float, float, str]:
        """Cores, memory and who decides, by the level of the owner."""
        level = LEVELS[int(pod.state.level)] if self.settings.rails else "policy"
        if level == "policy":
            cores, memory = advised_cores, advised_memory
        elif level == "vpa":
            cores, memory = self.vpa(pod)
        else:
            cores, memory = pod.requested_cores, pod.requested_memory_mb
        return *bound(cores, memory, pod.requested_cores, pod.requested_memory_mb, bounds), level

    def compare(
        self, pod: Pod, obs: NDArray[np.float32], logits: NDArray[np.float32]
    ) -> tuple[float, float, float, float] | None:
        """What this version and the last good one advise for the same pod, without exploration."""
        champion = self.champion
        if champion is None or champion.version == self.policy.version or champion.obs_size != len(obs):
            return None
        shares, good = (
            policy.shares(policy.choose(scores, None)[0])
            for policy, scores in ((self.policy, logits), (champion, champion.logits(obs)))
        )
        return *self.advise(pod, shares), *self.advise(pod, good)

    def find_allocation(self, request: FeedbackRequest, now_s: float) -> Allocation | None:
        """The allocation that feedback is about. Without an id it is the only open allocation of the owner."""
        if request.allocation_id is not None:
            found = self.store.find(request.allocation_id)
            # A pod may carry the id of another one, for example in a copied annotation.
            return None if found is not None and request.owner not in (None, found.owner) else found
        waiting = self.store.open_of(request.owner or DEFAULT_OWNER, now_s - self.settings.ttl_s)
        if len(waiting) > 1:
            raise Refused(409, "the owner has more than one open allocation: send allocation_id")
        return waiting[0] if waiting else None

    def feedback(self, request: FeedbackRequest) -> tuple[FeedbackStatus, float | None]:
        """Status and reward.

        Only the first feedback on an allocation has an effect, and only before it expires. But a later one that says
        that the pod missed its objective or ran out of memory replaces one that does not say so.
        """
        now = self.store.clock.now()
        allocation = self.find_allocation(request, now)
        if allocation is None:
            status: FeedbackStatus = "unknown"
        elif now - allocation.created_s > self.settings.ttl_s:
            status = "expired"
        elif allocation.feedback is not None:
            missed = (request.oom or not request.qos_met) and allocation.qos_met
            status = "corrected" if missed or (request.oom and not allocation.oom) else "duplicate"
        elif not request.final:
            status = "sample"
        elif now - allocation.created_s < self.settings.min_run_s:
            status = "early"
        else:
            lag = self.policy.version - allocation.version
            status = "accepted" if lag <= self.settings.max_policy_lag else "stale"
        if allocation is None or status in ("expired", "duplicate", "early"):
            self.store.count(f"feedback:{status}")
            return status, None
        difference, outcome = self.score(allocation, request, now)
        if status == "sample":
            self.store.add_sample(allocation, outcome.needed, outcome.usage, outcome.memory_used_mb, bool(outcome.oom))
            return status, None
        correction = status == "corrected"
        stored = str(allocation.feedback) if correction else status
        change = self.store.add_feedback(
            allocation, stored, outcome, allocation.learnable and stored == "accepted", correction
        )
        # From here on, the feedback is stored.
        if change is not None:
            self.report_level(allocation.owner, change)
        if difference is not None and not correction:
            self.test_version(allocation.version, difference)
        self.metrics.add(allocation, outcome)
        self.status.add(allocation, outcome)
        return status, outcome.reward

    def report_level(self, owner: str, reason: str) -> None:
        """Log that the level of an owner has changed, and count it."""
        level = LEVELS[int(self.store.owner_state(owner).level)]
        log.info("the pods of %s are now decided by %s: %s", owner, level, reason)
        self.metrics.level_changes.labels(level).inc()

    def score(self, allocation: Allocation, request: FeedbackRequest, now_s: float) -> tuple[float | None, Feedback]:
        """How much better this version is than the last good one, if both were asked, and what is stored.

        What is stored are the rewards of the allocation and of the alternatives, and what the owner's history needs.
        """
        a = allocation
        qos_met = request.qos_met and not request.oom
        usage = min(request.actual_usage, a.cores)
        pods = max(request.pods, 1)
        used_mb = a.memory_mb if request.memory_used is None else request.memory_used
        # The cores that the pod needed: what it used, or what the measured pressure says it would have used.
        needed = usage
        if request.pressure is not None:
            needed = min(request.pressure * a.cores, a.requested_cores)
        elif not qos_met and not request.oom:
            needed = min(hindsight.MISS_GROWTH * a.cores, a.requested_cores)
        reward = sum(score(a.cores, usage, qos_met, pods))
        needed_mb = needed_memory_mb(a, used_mb, request.oom)
        measured = hindsight.Measured(a.requested_cores, usage, needed, needed_mb, pods)

        def would_be(cores: float, memory_mb: float) -> tuple[float, bool]:
            if (cores, memory_mb) == (a.cores, a.memory_mb):
                return reward, qos_met
            return hindsight.would_be(measured, cores, memory_mb)

        advised_reward, advised_qos = would_be(a.advised_cores, a.advised_memory_mb)
        recommended_reward, recommended_qos = would_be(a.recommended_cores, a.recommended_memory_mb)
        owner = self.store.owner_state(a.owner)
        pod = Pod(a.owner, a.requested_cores, a.requested_memory_mb, bool(a.sensitive), owner)
        vpa_reward, _ = would_be(*self.vpa(pod))
        difference = None
        if a.champion is not None:
            cores, memory, champion_cores, champion_memory = a.champion
            difference = would_be(cores, memory)[0] - would_be(champion_cores, champion_memory)[0]
        return difference, Feedback(
            received_s=now_s, usage=usage, qos_met=qos_met, pods=request.pods, memory_used_mb=used_mb,
            oom=request.oom, reward=reward, needed=needed / a.requested_cores, advised_reward=advised_reward,
            advised_qos=advised_qos, recommended_reward=recommended_reward, recommended_qos=recommended_qos,
            vpa_reward=vpa_reward, regret=max(hindsight.best_reward(measured) - recommended_reward, 0.0),
            next_obs=self.next_obs(a).tobytes(), done=False,
        )  # fmt: skip

    def test_version(self, version: int, difference: float) -> None:
        """Add a comparison of a version with the last good one, and act on the result of the sequential test."""
        champion = self.champion
        if champion is None or version <= champion.version:
            return
        verdict = self.test.add(difference)
        if verdict is None:
            return
        test, self.test = self.test, SequentialTest()
        text = f"{test.samples} pods, mean difference {test.mean:+.3f}"
        if verdict == "fine":
            log.info("version %d is as good as version %d: %s", self.policy.version, champion.version, text)
            self.accept_version()
        elif self.settings.auto_rollback:
            log.warning("versions after %d are worse: %s; rolling back", champion.version, text)
            self.metrics.rollbacks.inc()
            request_rollback(self.settings.store, champion.version, f"automatic, {text}")
            self.champion = None  # no test until the policy has been replaced

    def accept_version(self) -> None:
        """Make the version in use the last good one."""
        self.champion, self.test = self.policy, SequentialTest()
        write_champion(self.settings.store, self.policy.version)

    def next_obs(self, allocation: Allocation) -> NDArray[np.float32]:
        """The observation of the same request now."""
        load = self.telemetry.loads.get(allocation.gpu, GpuLoad())
        return self.observe(
            allocation.owner, allocation.requested_cores, allocation.requested_memory_mb, allocation.sensitive, load
        )


def share_amounts(
    shares: tuple[float, float], requested_cores: float, requested_memory_mb: float
) -> tuple[float, float]:
    """Cores (%) and memory (MB) of shares of a request, in whole units, as in the simulator."""
    share_of_cores, share_of_memory = shares
    cores = max(share_of_cores * requested_cores, space.MIN_CORES)
    memory_mb = max(share_of_memory * requested_memory_mb, space.MIN_MEMORY_MB)
    return space.limit_grant(cores, memory_mb, requested_cores, requested_memory_mb, space.UNIT_PERCENT)


def bounds_of(request: AllocateRequest) -> Bounds:
    """The limits that the workload sets for itself."""
    return Bounds(
        request.min_cores or 0.0, request.max_cores or math.inf, request.min_memory or 0.0,
        request.max_memory or math.inf,
    )  # fmt: skip


def vpa_amounts(owner: OwnerState, requested_cores: float, requested_memory_mb: float) -> tuple[float, float]:
    """Cores (%) and memory (MB) of the VPA rule."""
    return (
        min(float(math.ceil(owner.cores.recommend() * requested_cores)), requested_cores),
        min(float(math.ceil(owner.memory.recommend() * requested_memory_mb)), requested_memory_mb),
    )
