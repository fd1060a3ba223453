"""What the agent knows about an owner: what its pods used, the VPA rule, and whether its pods may get less."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from clustergym.gpu_allocation.history import N_HISTORY, new_history, remember

CREDIT_S = 600.0
"""A pod that runs counts like one finished pod per ten minutes."""
LARGEST_GAP_S = 300.0
"""Running time between two reports counts up to this much: the collector may have been away."""
BUCKETS = 115
STRICT = ConfigDict(allow_inf_nan=False, extra="forbid")
"""What is read from the store is checked: a file can be damaged."""
NotNegative = Annotated[float, Field(ge=0)]


@dataclass
class UsageHistogram:
    """The Vertical Pod Autoscaler's rule on usage / request: 1.15 × the 90th percentile of a decaying histogram.

    The same numbers as :class:`clustergym.gpu_allocation.rules.FractionalVPA`: buckets grow by 5 %, and the weight
    of a sample halves in a day.
    """

    weights: dict[Annotated[int, Field(ge=0, lt=BUCKETS)], NotNegative] = field(default_factory=dict)
    """Bucket → weight at ``time_s``."""
    time_s: float = 0.0
    """Time of the last sample."""

    PERCENTILE: ClassVar[float] = 0.9
    MARGIN: ClassVar[float] = 1.15
    HALF_LIFE_S: ClassVar[float] = 86_400.0
    GROWTH: ClassVar[float] = 1.05
    SMALLEST: ClassVar[float] = 0.005
    __pydantic_config__ = STRICT

    def add(self, share: float, time_s: float, weight: float = 1.0) -> None:
        decay = 0.5 ** (max(time_s - self.time_s, 0.0) / self.HALF_LIFE_S)
        self.weights = {bucket: decay * one for bucket, one in self.weights.items()}
        self.time_s = max(time_s, self.time_s)
        bucket = math.ceil(math.log(max(share, self.SMALLEST) / self.SMALLEST) / math.log(self.GROWTH))
        bucket = min(bucket, BUCKETS - 1)
        self.weights[bucket] = self.weights.get(bucket, 0.0) + weight

    def recommend(self) -> float:
        """Share of the request; 1 without samples."""
        buckets = sorted(self.weights)
        cumulative = list(accumulate(self.weights[bucket] for bucket in buckets))
        if not cumulative or cumulative[-1] <= 0.0:
            return 1.0
        least = self.PERCENTILE * cumulative[-1]
        bucket = next(one for one, weight in zip(buckets, cumulative, strict=True) if weight >= least)
        return float(min(self.MARGIN * self.SMALLEST * self.GROWTH**bucket, 1.0))


@dataclass(frozen=True)
class GuardSettings:
    """When an owner's pods may get less than their request."""

    qos: float = 0.97
    """The request is granted if the running QoS of latency-sensitive pods is lower."""
    qos_best_effort: float = 0.9
    """The same for best-effort pods."""
    warmup_pods: int = 5
    """The first pods of an owner get their request."""

    RATE = 0.05
    """Weight of the newest pod in the running QoS."""
    HOLD_PODS, MAX_HOLD_PODS = 10.0, 640.0
    """Pods that get their request after a fall. It doubles with each fall."""


@dataclass
class OwnerState:
    """State of an owner. "Evidence" is a number of pods: those that finished, and running time / ten minutes."""

    pods: Annotated[int, Field(ge=0)] = 0
    """Pods that finished."""
    evidence: NotNegative = 0.0
    active: NotNegative = 0.0
    """Evidence of pods that used cores."""
    qos: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Running QoS of the owner's pods."""
    reduced: bool = False
    """Whether its pods may get less than their request."""
    hold: NotNegative = 0.0
    """Evidence that is needed before the next try."""
    next_hold: NotNegative = 0.0
    falls: Annotated[int, Field(ge=0)] = 0
    peak_need: NotNegative = 0.0
    """Largest share of the request that was needed. It fades slowly, because habits may change."""
    peak_memory_mb: NotNegative = 0.0
    peak_memory_share: NotNegative = 0.0
    """Largest share of the requested memory that was needed. It fades like the other peaks."""
    cores: UsageHistogram = field(default_factory=UsageHistogram)
    memory: UsageHistogram = field(default_factory=UsageHistogram)
    history: Annotated[list[float], Field(min_length=N_HISTORY, max_length=N_HISTORY)] = field(
        default_factory=new_history
    )
    """What the policy sees of the owner (:mod:`clustergym.gpu_allocation.history`)."""

    FADE: ClassVar[float] = 0.9997
    __pydantic_config__ = STRICT

    def to_json(self) -> str:
        return OWNER_STATE.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> OwnerState:
        """The state that :meth:`to_json` wrote. Raises ValueError for anything else."""
        content = json.loads(text)
        if not isinstance(content, dict) or set(content) != {one.name for one in fields(OwnerState)}:
            raise ValueError("not the state of an owner")
        return OWNER_STATE.validate_python(content)

    def measure(
        self, time_s: float, credit: float, needed: float, usage: float, needed_mb: float, memory: float, oom: bool
    ) -> None:
        """Add what was measured of a pod, with the weight of ``credit`` pods. Shares are parts of the request.

        Args:
            time_s: when it was measured.
            credit: number of pods that it counts for.
            needed: share of the requested cores that the pod needed.
            usage: share of the requested cores that it used.
            needed_mb: memory that it needed.
            memory: the same as a share of the requested memory.
            oom: whether it was killed: then it has not shown how many cores it needs.
        """
        self.evidence += credit
        fade = self.FADE**credit
        self.peak_memory_mb = max(fade * self.peak_memory_mb, needed_mb)
        self.peak_memory_share = max(fade * self.peak_memory_share, memory)
        self.memory.add(memory, time_s, credit)
        if not oom:
            self.active += credit if needed > 0.0 else 0.0
            self.peak_need = max(fade * self.peak_need, needed)
            self.cores.add(usage, time_s, credit)

    def finish(self, needed: float, share: float, met: bool, oom: bool, memory: float) -> None:
        """Add a pod that finished to what the policy sees."""
        self.pods += 1
        remember(self.history, needed, share, met, oom, memory)

    def judge(self, sensitive: bool, met: bool, credit: float, settings: GuardSettings) -> str | None:
        """Update the running QoS. Returns why its pods get less or their request from now on, or None."""
        self.qos += min(settings.RATE * credit, 1.0) * (met - self.qos)
        self.hold = max(self.hold - credit, 0.0)
        guard = settings.qos if sensitive else settings.qos_best_effort
        if self.reduced and self.qos < guard:
            self.reduced, self.falls = False, self.falls + 1
            self.next_hold = min(max(2.0 * self.next_hold, settings.HOLD_PODS), settings.MAX_HOLD_PODS)
            self.hold = self.next_hold
            return f"QoS {self.qos:.2f} is below the guard {guard:g}"
        # Between the two thresholds nothing changes, so that an owner does not go back and forth.
        recovered = self.qos >= guard + 0.5 * (1.0 - guard)
        if not self.reduced and recovered and self.hold == 0.0 and self.evidence >= settings.warmup_pods:
            self.reduced = True
            return f"QoS {self.qos:.2f} after {self.evidence:.0f} pods"
        return None


OWNER_STATE = TypeAdapter(OwnerState)
