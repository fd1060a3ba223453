"""Baselines for a batch of nodes: allocation rules that operators use today, and an oracle as an upper bound.

Rules see what the observation shows, and get the same feedback as an agent. With visible owners
(``GPUAllocationHistory-v0``) the rules that learn keep one record per owner, otherwise one per node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from clustergym.gpu_allocation import state
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.space import MAX_CORES, action_for
from clustergym.gpu_allocation.state import Doubles, Floats


class Rule(ABC):
    """Decides for the waiting pod of every environment."""

    def __init__(self, batch: AllocationBatch) -> None:
        self.batch = batch

    @abstractmethod
    def act(self) -> Floats:
        """(B, 2) actions."""

    def learn(self) -> None:
        """Learn from the last decisions (``batch.outcome``)."""


class AmountRule(Rule):
    """A rule that decides on cores in % and memory in MB."""

    def __init__(self, batch: AllocationBatch) -> None:
        super().__init__(batch)
        self.rows = np.arange(batch.num_envs)
        self.groups = batch.config.owners if batch.config.history else 1

    def requests(self) -> tuple[Doubles, Doubles]:
        """(B,) requested cores, %, and memory, MB."""
        ask = self.batch.state.ask
        return ask[:, state.ASK_CORES].astype(float), ask[:, state.ASK_MEMORY].astype(float)

    def group(self, owners: Floats) -> npt.NDArray[np.int64]:
        """Index of the record for pods of these owners (B,); always 0 if owners are not visible."""
        return owners.astype(np.int64) if self.groups > 1 else np.zeros(len(owners), np.int64)

    def waiting_group(self) -> npt.NDArray[np.int64]:
        """(B,) index of the record for the waiting pods."""
        return self.group(self.batch.state.ask[:, state.ASK_OWNER])

    @abstractmethod
    def decide(self) -> tuple[Doubles, Doubles]:
        """(B,) cores, %, and memory, MB, for the waiting pods."""

    def act(self) -> Floats:
        return np.clip(np.stack(action_for(*self.decide()), 1), 0.0, 1.0).astype(np.float32)


class Grant(AmountRule):
    """Grants every request, as Kubernetes does without an agent."""

    def decide(self) -> tuple[Doubles, Doubles]:
        return self.requests()


class Cut(AmountRule):
    """Grants a fixed share of the requested cores, and all of the memory."""

    def __init__(self, batch: AllocationBatch, share: float) -> None:
        super().__init__(batch)
        self.share = share

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        unit = self.batch.config.unit_percent
        # Round up to whole units: rounding down would give less than the share.
        return np.ceil(self.share * cores / unit - 1e-9) * unit if unit > 0 else self.share * cores, memory


class FairShare(AmountRule):
    """Grants at most an equal share of the GPU: 100 / pods, including the new one."""

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        pods = self.batch.state.counters[:, state.COUNT_PODS] + 1
        return np.minimum(cores, MAX_CORES / pods), memory


class VPA(AmountRule):
    """Vertical Pod Autoscaler of Kubernetes: 1.15 × the 90th percentile of a decaying histogram of usage.

    Buckets grow by 5 %; the weight of a sample halves in 24 h. The same for memory; after an OOM kill the larger of
    1.2 × and + 100 MB counts as used. Without samples, the request is granted. Like the original, it recommends
    absolute amounts.
    """

    per_request = False
    """Whether usage is measured relative to the request."""
    percentile, margin, half_life_s, growth, n_buckets = 0.9, 1.15, 24 * 3600.0, 1.05, 150

    def __init__(self, batch: AllocationBatch) -> None:
        super().__init__(batch)
        shape = (batch.num_envs, self.groups, self.n_buckets)
        self.cores, self.memory = np.zeros(shape), np.zeros(shape)
        self.smallest_cores, self.smallest_memory = (0.005, 0.005) if self.per_request else (0.5, 50.0)

    def _bucket(self, amount: Doubles, smallest: float) -> npt.NDArray[np.int64]:
        growths: Doubles = np.log(np.maximum(amount, smallest) / smallest) / np.log(self.growth)
        return np.ceil(growths).clip(0, self.n_buckets - 1).astype(np.int64)

    def _percentile(self, histogram: Doubles, smallest: float) -> Doubles:
        """Upper end of the bucket that holds the percentile; NaN without samples."""
        cumulative = histogram.cumsum(1)
        total = cumulative[:, -1]
        bucket = (cumulative >= self.percentile * total[:, None]).argmax(1)
        return np.where(total > 0, smallest * self.growth**bucket, np.nan)

    def _recommend(self, histogram: Doubles, smallest: float, ask: Doubles) -> Doubles:
        amount = self.margin * self._percentile(histogram[self.rows, self.waiting_group()], smallest)
        amount = amount * ask if self.per_request else amount
        return np.where(np.isnan(amount), ask, np.minimum(amount, ask))

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        return (
            self._recommend(self.cores, self.smallest_cores, cores),
            self._recommend(self.memory, self.smallest_memory, memory),
        )

    def learn(self) -> None:
        out = self.batch.outcome.astype(float)
        group = self.group(self.batch.outcome[:, state.OUTCOME_OWNER])
        # Instead of decaying all buckets, newer samples get a larger weight: only the ratio matters.
        weight = 2.0 ** (out[:, state.OUTCOME_TIME] / self.half_life_s)
        oom = out[:, state.OUTCOME_OOM] > 0.5
        used_mb = out[:, state.OUTCOME_USED_MB]
        used_mb = np.where(oom, np.maximum(1.2 * used_mb, used_mb + 100.0), used_mb)
        used_cores = out[:, state.OUTCOME_USAGE]
        if self.per_request:
            used_cores, used_mb = used_cores / out[:, state.OUTCOME_REQUEST], used_mb / out[:, state.OUTCOME_REQUEST_MB]
        ran = ~oom
        self.cores[self.rows[ran], group[ran], self._bucket(used_cores, self.smallest_cores)[ran]] += weight[ran]
        self.memory[self.rows, group, self._bucket(used_mb, self.smallest_memory)] += weight


class FractionalVPA(VPA):
    """VPA on usage / request. Stronger than the original if the pods of an owner differ in size."""

    per_request = True


class Proportional(AmountRule):
    """The controller of GSLICE: moves each owner's share towards 90 % utilisation, unless it is within 10 % of that.

    A pod that missed its objective counts as fully utilised, so the next pod of its owner gets more.
    """

    target, dead_band = 0.9, 0.1

    def __init__(self, batch: AllocationBatch) -> None:
        super().__init__(batch)
        self.share = np.full((batch.num_envs, self.groups), np.nan)

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        share = self.share[self.rows, self.waiting_group()]
        return np.where(np.isnan(share), cores, np.minimum(share, cores)), memory

    def learn(self) -> None:
        out = self.batch.outcome.astype(float)
        group = self.group(self.batch.outcome[:, state.OUTCOME_OWNER])
        given = out[:, state.OUTCOME_CORES]
        utilisation = np.where(out[:, state.OUTCOME_MET] > 0.5, out[:, state.OUTCOME_USAGE] / given, 1.0)
        # Full utilisation always raises the share, whatever the band: a miss must have an effect.
        outside = np.abs(utilisation / self.target - 1) > self.dead_band
        new = given * utilisation / self.target
        self.share[self.rows, group] = np.where(outside | (utilisation >= 1.0), new, given)


class Oracle(Rule):
    """The best decision for the waiting pod, given its hidden needs: a bound for rules that decide pod by pod."""

    def act(self) -> Floats:
        return self.batch.oracle()


RULES: dict[str, Callable[[AllocationBatch], Rule]] = {
    "grant": Grant,
    "cut-0.9": partial(Cut, share=0.9),
    "cut-0.8": partial(Cut, share=0.8),
    "fair-share": FairShare,
    "vpa": VPA,
    "vpa-fraction": FractionalVPA,
    "proportional": Proportional,
    "oracle": Oracle,
}
