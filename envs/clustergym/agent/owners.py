"""What the agent knows about an owner: the peaks of its pods, the VPA rule, and how far its grants can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

LEVELS = ("policy", "vpa", "request")
"""Who decides about an owner's pods, from the most to the least frugal."""
POLICY, VPA, REQUEST = range(3)


class UsageHistogram:
    """The Vertical Pod Autoscaler's rule on usage / request: 1.15 × the 90th percentile of a decaying histogram.

    The same numbers as :class:`clustergym.gpu_allocation.rules.FractionalVPA`: buckets grow by 5 %, and the weight
    of a sample halves in a day.
    """

    PERCENTILE, MARGIN, HALF_LIFE_S, GROWTH, SMALLEST, BUCKETS = 0.9, 1.15, 86_400.0, 1.05, 0.005, 115

    def __init__(self, weights: Sequence[float] = (), time_s: float = 0.0) -> None:
        self.weights = np.array(weights, np.float64) if len(weights) else np.zeros(self.BUCKETS)
        self.time_s = time_s
        """Time of the last sample; the weights are those of this time."""
        self._recommended: float | None = None
        """The recommendation, until there is a new sample."""

    def add(self, share: float, time_s: float) -> None:
        self._recommended = None
        self.weights *= 0.5 ** (max(time_s - self.time_s, 0.0) / self.HALF_LIFE_S)
        self.time_s = max(time_s, self.time_s)
        bucket = math.ceil(math.log(max(share, self.SMALLEST) / self.SMALLEST) / LOG_GROWTH)
        self.weights[min(bucket, self.BUCKETS - 1)] += 1.0

    def recommend(self) -> float:
        """Share of the request; 1 without samples."""
        if self._recommended is None:
            cumulative = self.weights.cumsum()
            bucket = int(cumulative.searchsorted(self.PERCENTILE * cumulative[-1]))
            share = min(self.MARGIN * self.SMALLEST * self.GROWTH**bucket, 1.0)
            self._recommended = share if cumulative[-1] > 0.0 else 1.0
        return self._recommended


LOG_GROWTH = math.log(UsageHistogram.GROWTH)


@dataclass(frozen=True)
class GuardSettings:
    """When an owner's pods are decided by the policy, by the VPA rule, or get their request."""

    qos: float = 0.97
    """Fall back one level if the running QoS of latency-sensitive pods is lower."""
    qos_best_effort: float = 0.9
    """The same for best-effort pods."""
    warmup_pods: int = 5
    """The first pods of an owner get their request."""
    hold_pods: int = 10
    """Pods on a level before the next one is tried. It doubles with each fall."""
    max_hold_pods: int = 640

    RATE = 0.05
    """Weight of the newest pod in the running QoS."""
    MAX_LOSS = 0.03
    """The VPA rule decides again if the policy's running reward is lower by more than this."""


@dataclass(slots=True)
class OwnerState:
    """State of an owner. All fields are numbers, so that it can be stored as one array."""

    pods: float = 0.0
    level: float = REQUEST
    qos: float = 1.0
    """Running QoS of the owner's pods."""
    advised_qos: float = 1.0
    """Running QoS that the policy's advice would have had."""
    advantage: float = 0.0
    """Running difference between the reward of the policy's advice and that of the VPA rule."""
    hold: float = 0.0
    """Pods until the next level may be tried."""
    next_hold: float = 0.0
    share: float = 1.0
    """Recommended / requested cores of the last pod with feedback. In shadow mode, recommendations have steps too."""
    memory_share: float = 1.0
    peak_need: float = 0.0
    """Largest share of the request that was needed. It fades slowly, because habits may change."""
    peak_memory_mb: float = 0.0
    peak_memory_share: float = 0.0
    """Largest share of the requested memory that was needed. It fades like the other peaks."""
    active: float = 0.0
    """Pods that used cores. An idle pod says nothing about the peak of the others."""
    falls: float = 0.0
    cores: UsageHistogram = field(default_factory=UsageHistogram)
    memory: UsageHistogram = field(default_factory=UsageHistogram)

    FADE = 0.9997

    def to_array(self) -> NDArray[np.float32]:
        numbers = [getattr(self, name) for name in NUMBERS]
        # Seconds do not fit into a float32: two numbers.
        times = [part for one in (self.cores, self.memory) for part in divmod(one.time_s, 65536.0)]
        return np.array([*numbers, *times, *self.cores.weights, *self.memory.weights], np.float32)

    @classmethod
    def from_array(cls, array: NDArray[np.float32]) -> OwnerState:
        """The state that :meth:`to_array` wrote. Raises ValueError for anything else."""
        values = array.astype(float).tolist()
        n, buckets = len(NUMBERS), UsageHistogram.BUCKETS
        if len(values) != n + 4 + 2 * buckets or not np.isfinite(array).all():
            raise ValueError(f"expected {n + 4 + 2 * buckets} finite numbers, got {len(values)}")
        days, seconds, memory_days, memory_seconds = values[n : n + 4]
        weights = values[n + 4 :]
        cores = UsageHistogram(weights[:buckets], 65536.0 * days + seconds)
        memory = UsageHistogram(weights[buckets:], 65536.0 * memory_days + memory_seconds)
        return cls(**dict(zip(NUMBERS, values, strict=False)), cores=cores, memory=memory)

    def remember(
        self, *, time_s: float, share: float, memory_share: float, needed: float, usage_share: float,
        needed_mb: float, needed_memory_share: float, oom: bool,
    ) -> None:  # fmt: skip
        """Add a pod. Shares are parts of the request."""
        self.pods += 1.0
        self.share, self.memory_share = share, memory_share
        self.peak_memory_mb = max(self.FADE * self.peak_memory_mb, needed_mb)
        self.peak_memory_share = max(self.FADE * self.peak_memory_share, needed_memory_share)
        self.memory.add(needed_memory_share, time_s)
        if not oom:  # a pod that was killed has not shown how many cores it needs
            self.active += needed > 0.0
            self.peak_need = max(self.FADE * self.peak_need, needed)
            self.cores.add(usage_share, time_s)

    def sample(self, time_s: float, needed: float, usage_share: float, needed_mb: float, memory_share: float) -> None:
        """Add what was measured of a pod that is still running. Shares are parts of the request."""
        self.peak_memory_mb = max(self.peak_memory_mb, needed_mb)
        self.peak_memory_share = max(self.peak_memory_share, memory_share)
        self.peak_need = max(self.peak_need, needed)
        self.cores.add(usage_share, time_s)
        self.memory.add(memory_share, time_s)

    def judge(
        self, sensitive: bool, met: bool, advised_met: bool, advantage: float, settings: GuardSettings
    ) -> str | None:
        """Update the running QoS and the level. Returns why the level has changed, or None."""
        rate = settings.RATE
        self.qos += rate * (met - self.qos)
        self.advised_qos += rate * (advised_met - self.advised_qos)
        self.advantage += rate * (advantage - self.advantage)
        self.hold -= 1.0
        guard = settings.qos if sensitive else settings.qos_best_effort
        # Between the two thresholds nothing changes, so that an owner does not go back and forth.
        recovered = guard + 0.5 * (1.0 - guard)
        if self.level < REQUEST and self.qos < guard:
            self.level += 1.0
            self.falls += 1.0
            self.next_hold = min(max(2.0 * self.next_hold, settings.hold_pods), settings.max_hold_pods)
            self.hold = self.next_hold
            return f"QoS {self.qos:.2f} is below the guard {guard:g}"
        if self.level == POLICY and self.advantage < -settings.MAX_LOSS:
            self.level, self.hold = VPA, settings.hold_pods
            return f"the VPA rule is better by {-self.advantage:.2f}"
        if self.pods < settings.warmup_pods or self.hold > 0 or self.level == POLICY or self.qos < recovered:
            return None
        if self.level == VPA and (self.advised_qos < recovered or self.advantage < 0.0):
            return None
        self.level -= 1.0
        self.hold = settings.hold_pods
        return f"QoS {self.qos:.2f}, after {self.pods:.0f} pods"


NUMBERS = tuple(one.name for one in fields(OwnerState) if one.name not in ("cores", "memory"))
