"""Decisions on requests and feedback, without HTTP."""

from __future__ import annotations

import copy
import logging
import secrets
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustergym.agent import hindsight
from clustergym.agent.credentials import Access
from clustergym.agent.learner import LearnerProcess
from clustergym.agent.metrics import CLASSES, Metrics
from clustergym.agent.owners import CREDIT_S, LARGEST_GAP_S, OwnerState
from clustergym.agent.policy import Policy
from clustergym.agent.rails import Amounts, Limited, apply_bounds, apply_rails
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Allocation, Experience, Outcome, Store
from clustergym.agent.telemetry import GpuLoad, Telemetry
from clustergym.common.tls import CertificateReloader
from clustergym.gpu_allocation import space
from clustergym.gpu_allocation.history import features
from clustergym.gpu_allocation.reward import score
from clustergym.kubernetes.messages import (
    DEFAULT_OWNER,
    AllocateRequest,
    AllocateResponse,
    DecidedBy,
    FeedbackRequest,
    FeedbackResponse,
    FeedbackStatus,
    is_latency_sensitive,
)

log = logging.getLogger(__name__)

OOM_GROWTH, OOM_MORE_MB = 1.2, 100.0


class Refused(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status code."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


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
        seed: int,
    ) -> None:
        self.settings, self.store, self.telemetry = settings, store, telemetry
        self.policy, self.learner, self.access = policy, learner, access
        self.certificate: CertificateReloader | None = None
        self.task_problems: dict[str, str] = {}
        """Background tasks that failed, and why."""
        # The time is part of the seed: a restarted server must not repeat the noise of the last run.
        self.rng = np.random.default_rng([seed, time.time_ns()])
        self.trials = store.trials(CLASSES)
        """Who decides about each class of pods."""
        self.metrics = Metrics(self)

    def problems(self) -> list[str]:
        """Why the service is degraded; empty if it is not."""
        found = [f"{task}: {problem}" for task, problem in self.task_problems.items()]
        if self.telemetry.problem is not None:
            found.append(f"no GPU telemetry, decisions use the requests only ({self.telemetry.problem})")
        if self.learner is not None and not self.learner.alive:
            found.append("the learner process is not running")
        certificate = None if self.certificate is None else self.certificate.problem
        return found + [problem for problem in (*self.access.problems, certificate) if problem]

    def observe(self, requested: Amounts, sensitive: bool, owner: OwnerState, load: GpuLoad) -> NDArray[np.float32]:
        """The observation of ``GPUAllocation-v0``, or of ``GPUAllocationHistory-v0`` if the policy expects it.

        Requests outside the range of the task are observed as its limits. Memory is relative to that of the GPU.
        """
        cores = min(max(requested.cores, space.MIN_CORES), space.MAX_CORES)
        memory = requested.memory_mb * space.MAX_MEMORY_MB / load.memory_mb
        memory = min(max(memory, space.MIN_MEMORY_MB), space.MAX_MEMORY_MB)
        state = space.scale_state(cores, memory, load.gpu_util, load.mem_util, load.pods)
        if self.policy.obs_size > len(state):
            return np.array([*state, *features(owner.history, *state[:2], sensitive)], np.float32)
        return np.array(state, np.float32)

    def allocate(self, request: AllocateRequest) -> AllocateResponse:
        """Decide what a pod gets. The decision is stored before it is answered."""
        found = None if request.request_id is None else self.store.find_request(request.request_id)
        if found is not None and (found.owner, found.requested) != (request.owner, (request.cores, request.memory)):
            raise Refused(409, "request_id was used for another request")
        a = found or self.store.add(*self.decide(request), request.request_id)
        if found is None:
            self.metrics.allocations.labels(a.decided_by).inc()
        return AllocateResponse(
            allocation_id=a.id, cores=a.granted.cores, memory=a.granted.memory_mb, policy_version=a.version, gpu=a.gpu,
            decided_by=a.decided_by, why=a.why, recommended_cores=a.recommended.cores,
            recommended_memory=a.recommended.memory_mb, vpa_cores=a.vpa.cores, vpa_memory=a.vpa.memory_mb,
        )  # fmt: skip

    def decide(self, request: AllocateRequest) -> tuple[Allocation, Experience]:
        """The decision on a request, and what the policy can learn from it."""
        try:
            gpu, load = self.telemetry.current(request.gpu)
        except ValueError as error:
            raise Refused(422, str(error)) from None
        settings, sensitive = self.settings, is_latency_sensitive(request.qos_class)
        owner, requested = self.store.owner(request.owner), Amounts(request.cores, request.memory)
        obs = self.observe(requested, sensitive, owner, load)
        outputs = self.policy.outputs(obs)

        def limited(amounts: Amounts) -> Limited:
            """The amounts within rails and bounds."""
            railed = Limited(amounts, ())
            if settings.rails:
                railed = apply_rails(amounts, requested, sensitive, owner, settings.rail_settings)
            least, most = Amounts(request.min_cores, request.min_memory), Amounts(request.max_cores, request.max_memory)
            bounded = apply_bounds(railed.amounts, requested, least, most)
            return Limited(bounded.amounts, railed.limits + bounded.limits)

        vpa = vpa_amounts(owner, requested)
        rule, policy = limited(vpa), limited(self.policy.amounts(self.policy.best(outputs), obs, requested))
        action, log_prob = self.policy.sample(outputs, self.rng)
        sampled = limited(self.policy.amounts(action, obs, requested))

        by: DecidedBy
        policy_decides = self.trials[CLASSES[sensitive]].policy_decides or not settings.rails
        if settings.rails and not owner.reduced:
            by, recommended = "request", limited(requested)
            why = f"QoS {owner.qos:.2f} of the owner was too low"
            if owner.evidence < settings.warmup_pods:
                # Neither arm would decide, so the trial learns nothing from this pod.
                rule, policy, why = recommended, recommended, "the owner has few pods yet"
        elif not policy_decides:
            by, recommended, why = "rule", rule, f"VPA rule {vpa.cores:g} %, {vpa.memory_mb:g} MB"
        else:
            explored = settings.explore == "all" or (settings.explore == "best-effort" and not sensitive)
            by, recommended = "policy", sampled if explored else policy
            why = f"policy {self.policy.version}, {'a sample' if explored else 'its best action'}"
        why = ", ".join([why, *recommended.limits])
        granted = recommended.amounts
        if settings.shadow or request.shadow:
            by, granted, why = "shadow", requested, f"shadow mode; would be decided by {by}: {why}"
        # While a sample is not granted, exploration has no effect on pods.
        learnable = settings.explore != "off" and (by != "policy" or recommended is sampled)
        allocation = Allocation(
            seq=0, token=secrets.token_hex(16), created_s=time.time(), owner=request.owner, version=self.policy.version,
            learnable=learnable, requested=requested, sensitive=sensitive, gpu=gpu, granted=granted,
            recommended=recommended.amounts, vpa=vpa, rule=rule.amounts, policy=policy.amounts,
            sampled=sampled.amounts, decided_by=by, why=why,
        )  # fmt: skip
        return allocation, Experience(obs, action, log_prob)

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

    def status_of(self, allocation: Allocation | None, request: FeedbackRequest, now_s: float) -> FeedbackStatus:
        """What a report means.

        Only the first report about the whole life of a pod has an effect, and only before it expires. But a later one
        that says that the pod missed its objective or ran out of memory replaces one that does not say so.
        """
        if allocation is None:
            return "unknown"
        if now_s - allocation.created_s > self.settings.ttl_s:
            return "expired"
        if allocation.status is not None:
            missed = (request.oom or not request.qos_met) and allocation.qos_met
            return "corrected" if missed or (request.oom and not allocation.oom) else "duplicate"
        if not request.final:
            return "sample"
        return "early" if now_s - allocation.created_s < self.settings.min_run_s else "accepted"

    def feedback(self, request: FeedbackRequest) -> FeedbackResponse:
        """Score a report, remember it for the owner, and store it. What cannot be stored has no effect."""
        now = time.time()
        a = self.find_allocation(request, now)
        status = self.status_of(a, request, now)
        if a is None or status in ("expired", "duplicate", "early"):
            self.metrics.feedback.labels(status).inc()
            return FeedbackResponse(status=status, reward=None)
        outcome, sampled_reward = judge(a, request)
        owner = self.store.owner(a.owner)
        met, share = outcome.qos_met, a.granted.cores / a.requested.cores
        needed_mb = needed_memory_mb(a, outcome.memory_used_mb, outcome.oom)
        ran_s = min(max(now - a.sampled_s, 0.0), LARGEST_GAP_S)
        credit = ran_s / CREDIT_S if status == "sample" else 1.0
        memory_share = needed_mb / a.requested.memory_mb
        owner.measure(
            now, credit, outcome.needed, outcome.usage / a.requested.cores, needed_mb, memory_share, outcome.oom
        )
        # In shadow mode, the guard judges what would have been granted.
        change = owner.judge(a.sensitive, outcome.recommended_qos, credit, self.settings.guard_settings)
        if status == "sample":
            self.store.add_sample(a, now, owner)
            reward = None
        else:
            owner.finish(
                outcome.needed, share, met, outcome.oom, min(outcome.memory_used_mb / a.requested.memory_mb, 1)
            )
            trials, decider = copy.deepcopy(self.trials), CLASSES[a.sensitive]
            # The pod of a correction was counted already.
            verdict = status == "accepted" and trials[decider].add(outcome.policy_reward - outcome.rule_reward)
            load = self.telemetry.loads.get(a.gpu, GpuLoad())
            next_obs = self.observe(a.requested, a.sensitive, owner, load)
            self.store.add_feedback(a, status, now, outcome, sampled_reward, next_obs, owner, trials)
            self.trials, reward = trials, outcome.reward
            self.metrics.add(a, outcome)
            if verdict:
                arm = "policy" if trials[decider].policy_decides else "rule"
                log.warning("%s pods are decided by the %s from now on: the test says that it is better", decider, arm)
                self.metrics.verdicts.labels(decider, arm).inc()
        if change is not None:
            log.info("the pods of %s get %s: %s", a.owner, "less" if owner.reduced else "their request", change)
            self.metrics.falls.inc(not owner.reduced)
        self.metrics.feedback.labels(status).inc()
        return FeedbackResponse(status=status, reward=reward)


def vpa_amounts(owner: OwnerState, requested: Amounts) -> Amounts:
    """What the VPA rule alone gives, in whole units."""
    shares = owner.cores.recommend(), owner.memory.recommend()
    return Amounts(*(min(float(np.ceil(s * amount)), amount) for s, amount in zip(shares, requested, strict=True)))


def needed_memory_mb(allocation: Allocation, used_mb: float, oom: bool) -> float:
    """Memory that a pod needed. One that ran out of memory needed more than it had; VPA's guess of how much more."""
    had = allocation.granted.memory_mb
    return max(OOM_GROWTH * had, had + OOM_MORE_MB, used_mb) if oom else used_mb


def judge(a: Allocation, request: FeedbackRequest) -> tuple[Outcome, float]:
    """What came of an allocation and would have come of the alternatives, and the reward of the sampled action."""
    qos_met, usage = request.qos_met and not request.oom, min(request.actual_usage, a.granted.cores)
    # The cores that the pod needed: what it used, or what the measured pressure says it would have used.
    needed = usage
    if request.pressure is not None:
        needed = min(request.pressure * a.granted.cores, a.requested.cores)
    elif not qos_met and not request.oom:
        needed = min(hindsight.MISS_GROWTH * a.granted.cores, a.requested.cores)
    pods = max(request.pods, 1)
    reward = sum(score(a.granted.cores, usage, qos_met, pods))
    facts: dict[str, Any] = {
        "usage": usage, "qos_met": qos_met, "oom": request.oom, "pods": request.pods, "reward": reward,
        "memory_used_mb": a.granted.memory_mb if request.memory_used is None else request.memory_used,
        "needed": needed / a.requested.cores,
    }  # fmt: skip
    needed_mb = needed_memory_mb(a, facts["memory_used_mb"], request.oom)
    measured = hindsight.Measured(a.requested.cores, usage, needed, needed_mb, pods)

    def would_be(amounts: Amounts) -> tuple[float, bool]:
        return (reward, qos_met) if amounts == a.granted else hindsight.would_be(measured, *amounts)

    (recommended, recommended_qos), (rule, rule_qos) = would_be(a.recommended), would_be(a.rule)
    policy, policy_qos = would_be(a.policy)
    return Outcome(
        **facts, recommended_reward=recommended, recommended_qos=recommended_qos, rule_reward=rule, rule_qos=rule_qos,
        policy_reward=policy, policy_qos=policy_qos, regret=max(hindsight.best_reward(measured) - recommended, 0.0),
    ), would_be(a.sampled)[0]  # fmt: skip
