"""What operators do today, on a batch of nodes: rules that an agent has to beat, and an oracle that none can.

A rule sees what the environment's observation shows, and gets the same feedback as an agent. Where owners are visible
(``GPUAllocationHistory-v0``) rules with a memory keep one for each owner; where they are not, one for the node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from clustergym.gpu_allocation import dynamics
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.space import MAX_CORES, MAX_MEMORY_MB, MIN_CORES, MIN_MEMORY_MB

Doubles = npt.NDArray[np.float64]


class Rule(ABC):
    """Acts for the waiting pod of every environment."""

    sees_need = False
    """Whether it knows what no agent can."""

    def __init__(self, batch: AllocationBatch) -> None:
        self.batch = batch

    @abstractmethod
    def act(self) -> torch.Tensor:
        """(B, 2) actions."""

    def learn(self) -> None:
        """Hear what the last decisions came to: ``batch.outcome``."""


class Amounts(Rule):
    """A rule that says how many cores and how much memory."""

    def __init__(self, batch: AllocationBatch) -> None:
        super().__init__(batch)
        self.rows = np.arange(batch.num_envs)
        self.groups = batch.config.owners if batch.config.history else 1

    def requests(self) -> tuple[Doubles, Doubles]:
        """(B,) requested cores, %, and memory, MB."""
        ask = self.batch.state["ask"].numpy()
        return ask[:, dynamics.ASK_CORES].astype(float), ask[:, dynamics.ASK_MEMORY].astype(float)

    def group(self, column: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Whose memory a pod belongs to: its owner's, where owners are visible."""
        return column.astype(np.int64) if self.groups > 1 else np.zeros(len(column), np.int64)

    def waiting(self) -> npt.NDArray[np.int64]:
        return self.group(self.batch.state["ask"].numpy()[:, dynamics.ASK_OWNER])

    @abstractmethod
    def decide(self) -> tuple[Doubles, Doubles]:
        """(B,) cores, %, and memory, MB, for the pods that wait."""

    def act(self) -> torch.Tensor:
        cores, memory = self.decide()
        action = np.stack(
            [(cores - MIN_CORES) / (MAX_CORES - MIN_CORES), (memory - MIN_MEMORY_MB) / (MAX_MEMORY_MB - MIN_MEMORY_MB)],
            1,
        )
        return torch.from_numpy(np.clip(action, 0.0, 1.0).astype(np.float32))


class Grant(Amounts):
    """Everyone gets what they ask for: Kubernetes without an agent."""

    def decide(self) -> tuple[Doubles, Doubles]:
        return self.requests()


class Cut(Amounts):
    """0.8 of the cores asked for, all of the memory."""

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        # In whole units, and never rounded below the rule's own 0.8.
        return _round_up(0.8 * cores, self.batch.config.unit_percent), memory


class FairShare(Amounts):
    """At most an equal share of the GPU: 100 / pods, the new one included."""

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        pods = self.batch.state["counters"].numpy()[:, 1] + 1
        return np.minimum(cores, MAX_CORES / pods), memory


class VPA(Amounts):
    """Kubernetes' Vertical Pod Autoscaler: 1.15 × the 90th percentile of a decaying histogram of usage.

    Buckets grow by 5 %, a sample's weight halves in 24 h. Memory likewise, and after an OOM kill the larger of 1.2 × and
    + 100 MB counts as used. Without samples the request is granted. It recommends absolute amounts, as the original does.
    """

    per_request = False
    """Whether usage is counted as a part of the request instead."""
    percentile, margin, half_life_s, growth, n_buckets = 0.9, 1.15, 24 * 3600.0, 1.05, 150

    def __init__(self, batch: AllocationBatch) -> None:
        super().__init__(batch)
        shape = (batch.num_envs, self.groups, self.n_buckets)
        self.cores, self.memory = np.zeros(shape), np.zeros(shape)
        self.smallest = {"cores": 0.005, "memory": 0.005} if self.per_request else {"cores": 0.5, "memory": 50.0}

    def _bucket(self, amount: Doubles, smallest: float) -> npt.NDArray[np.int64]:
        place = np.ceil(np.log(np.maximum(amount, smallest) / smallest) / np.log(self.growth))
        return np.clip(place, 0, self.n_buckets - 1).astype(np.int64)

    def _percentile(self, histogram: Doubles, smallest: float) -> Doubles:
        """Upper end of the bucket that the percentile falls into; NaN without samples."""
        cumulative = histogram.cumsum(1)
        total = cumulative[:, -1]
        bucket = (cumulative >= self.percentile * total[:, None]).argmax(1)
        return np.where(total > 0, smallest * self.growth**bucket, np.nan)

    def decide(self) -> tuple[Doubles, Doubles]:
        ask_cores, ask_memory = self.requests()
        who = self.waiting()
        decided = []
        for key, histogram, ask in (("cores", self.cores, ask_cores), ("memory", self.memory, ask_memory)):
            amount = self.margin * self._percentile(histogram[self.rows, who], self.smallest[key])
            amount = amount * ask if self.per_request else amount
            decided.append(np.where(np.isnan(amount), ask, np.minimum(amount, ask)))
        return decided[0], decided[1]

    def learn(self) -> None:
        out = self.batch.outcome.numpy().astype(float)
        who = self.group(out[:, dynamics.O_OWNER].astype(np.float32))
        # Instead of fading all buckets, newer samples weigh more: the ratio is what counts.
        weight = 2.0 ** (out[:, dynamics.O_TIME] / self.half_life_s)
        oom = out[:, dynamics.O_OOM] > 0.5
        used_mb = out[:, dynamics.O_USED_MB]
        used_mb = np.where(oom, np.maximum(1.2 * used_mb, used_mb + 100.0), used_mb)
        used_cores = out[:, dynamics.O_USAGE]
        if self.per_request:
            used_cores, used_mb = used_cores / out[:, dynamics.O_REQUEST], used_mb / out[:, dynamics.O_REQUEST_MB]
        ran = ~oom
        self.cores[self.rows[ran], who[ran], self._bucket(used_cores, self.smallest["cores"])[ran]] += weight[ran]
        self.memory[self.rows, who, self._bucket(used_mb, self.smallest["memory"])] += weight


class FractionalVPA(VPA):
    """VPA on usage as a part of the request: a stronger rule than the original where an owner's pods differ in size."""

    per_request = True


class Proportional(Amounts):
    """GSLICE's way: each owner's share follows its utilisation towards 90 %, unless it is within 10 % of that.

    A pod that missed its objective counts as fully utilised, so that its owner's next one gets more.
    """

    target, dead_band = 0.9, 0.1

    def __init__(self, batch: AllocationBatch) -> None:
        super().__init__(batch)
        self.share = np.full((batch.num_envs, self.groups), np.nan)

    def decide(self) -> tuple[Doubles, Doubles]:
        cores, memory = self.requests()
        share = self.share[self.rows, self.waiting()]
        return np.where(np.isnan(share), cores, np.minimum(share, cores)), memory

    def learn(self) -> None:
        out = self.batch.outcome.numpy().astype(float)
        who = self.group(out[:, dynamics.O_OWNER].astype(np.float32))
        given = out[:, dynamics.O_CORES]
        busy = np.where(out[:, dynamics.O_MET] > 0.5, out[:, dynamics.O_USAGE] / given, 1.0)
        # 1 itself lies just outside the band, so that a miss always raises the share.
        outside = np.abs(busy / self.target - 1) > self.dead_band
        self.share[self.rows, who] = np.where(outside | (busy >= 1.0), given * busy / self.target, given)


class Oracle(Rule):
    """The best decision for the pod that waits, knowing what it needs: a bound for all that decide one pod at a time."""

    sees_need = True

    def act(self) -> torch.Tensor:
        return self.batch.oracle()


RULES: dict[str, Callable[[AllocationBatch], Rule]] = {
    "grant": Grant,
    "cut-0.8": Cut,
    "fair-share": FairShare,
    "vpa": VPA,
    "vpa-fraction": FractionalVPA,
    "proportional": Proportional,
    "oracle": Oracle,
}


def _round_up(cores: Doubles, unit: float) -> Doubles:
    return np.ceil(cores / unit - 1e-9) * unit if unit > 0 else cores
