"""A second implementation of the allocation task in plain Python, one pod at a time, to test the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from clustergym.gpu_allocation import fitted, specs
from clustergym.gpu_allocation.batch import AllocationConfig, load_workload
from clustergym.gpu_allocation.specs import APPS, LATENCY_CV

MASK = 2**64 - 1


class Generator:
    """splitmix64. The seed is hashed with its finaliser."""

    def __init__(self, seed: int) -> None:
        self.state = self._mix((seed + 0x9E3779B97F4A7C15) & MASK)

    @staticmethod
    def _mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def bits(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return self._mix(self.state)

    def uniform(self) -> float:
        return (self.bits() >> 11) / 2**53

    def normal(self) -> float:
        bits = self.bits()
        total = sum(bits >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        return (total - 131070.0) * math.sqrt(3) / 65535.5


@dataclass
class Pod:
    app: str
    batch: int
    rate_per_ms: float
    slo_ms: float
    need_mb: float
    jitter: float
    life_s: float
    owner: int
    cores: float
    """requested, until the pod is allocated"""
    memory: float
    end_s: float = 0.0


@dataclass
class Owner:
    app: str
    batch: int
    need: float
    memory: float
    """need and memory: logits"""
    load: float
    templates: list[int]


@dataclass
class Outcome:
    reward: float
    cores: float
    memory: float
    usage: float
    met: bool
    oom: bool
    pods: int
    time_s: float
    wait_s: float


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def quantile(table: tuple[float, ...], u: float) -> float:
    """Linear interpolation in a table of equally spaced quantiles."""
    return float(np.interp(u, np.linspace(0, 1, len(table)), table))


def solo_latency_ms(app: str, batch: float, share_percent: float) -> float:
    """Latency of a batch without other pods on the GPU."""
    spec = APPS[app]
    return (spec.k1 * batch**2 + spec.k2 * batch + spec.k3) / (share_percent + spec.k4) + spec.k5


def corun_latency_ms(
    apps: list[str], batches: list[float], shares_percent: list[float], rates_per_s: list[float] | None = None
) -> list[float]:
    """Latency of a batch of each pod when they share the GPU, at full speed or at the given rates of items."""
    solo = [solo_latency_ms(app, b, r) for app, b, r in zip(apps, batches, shares_percent, strict=True)]
    full = [1000.0 * b / t for b, t in zip(batches, solo, strict=True)]
    rates = full if rates_per_s is None else [min(a, b) for a, b in zip(full, rates_per_s, strict=True)]
    l2 = [max(0.0, APPS[app].l2_slope * x + APPS[app].l2_base) for app, x in zip(apps, rates, strict=True)]
    watts = specs.IDLE_W + sum(
        APPS[app].watt_slope * x + APPS[app].watt_base for app, x in zip(apps, rates, strict=True)
    )
    clock = specs.CLOCK_MHZ / (specs.CLOCK_MHZ - specs.CLOCK_PER_WATT * max(0.0, watts - specs.POWER_CAP_W))
    n = min(len(apps), specs.SCHEDULE_PODS)
    delay_ms = specs.SCHEDULE_SLOPE_MS * n - specs.SCHEDULE_BASE_MS if n > 1 else 0.0
    result = []
    for app, t, own in zip(apps, solo, l2, strict=True):
        crowded = (t * (1 + APPS[app].cache_sensitivity * (sum(l2) - own)) + APPS[app].kernels * delay_ms) * clock
        result.append(t * (1 + specs.INTERFERENCE_SCALE * (crowded / t - 1)))
    return result


def granted(amount: float, low: float, high: float, unit: float, requested: float) -> float:
    """What a part of an action, 0 … 1, gives to a pod: in whole units, at most what was requested."""
    wanted = low + amount * (high - low)
    if unit > 0:
        wanted = math.floor(wanted / unit + 0.5) * unit
    return min(wanted, requested)


def reward_of(cores: float, usage: float, met: bool, pods: int) -> float:
    """The table of the task: efficiency, QoS, monopoly above 1.5 fair shares, under-allocation below 10 %."""
    reward = 0.5 * usage / cores + (1.0 if met else -0.5)
    if cores > 1.5 * 100 / pods:
        reward -= 0.3
    if cores < 10:
        reward -= 0.2
    return reward


class Node:
    """One GPU, empty at the start."""

    def __init__(self, seed: int, config: AllocationConfig | None = None) -> None:
        self.config = config or AllocationConfig()
        self.rows = load_workload(self.config.workload).jobs().tolist()
        self.random = Generator(seed)
        self.time_s = 0.0
        self.pods: list[Pod] = []
        self.mean_gap_s = sum(row[1] for row in self.rows) / len(self.rows) / self.config.load
        node = fitted.NEED_LOGIT + self.config.node_spread * self.random.normal()
        self.owners = [self._draw_owner(node) for _ in range(self.config.owners)]
        self._await_pod()

    def _draw_owner(self, node: float) -> Owner:
        need = node + self.config.owner_spread * self.random.normal()
        memory = fitted.MEMORY_LOGIT + fitted.MEMORY_OWNER_SPREAD * self.random.normal()
        app = list(APPS)[int(4 * self.random.uniform())]
        batch = 4 * 2 ** int(4 * self.random.uniform())
        load = 0.8 + 0.2 * self.random.uniform()
        templates = [int(self.random.uniform() * len(self.rows)) for _ in range(3)]
        return Owner(app, batch, need, memory, load, templates)

    def _draw_pod(self) -> Pod:
        weights = [(i + 1) ** -1.37 for i in range(self.config.owners)]
        u, index, below = self.random.uniform() * sum(weights), 0, 0.0
        while index < len(weights) - 1 and u >= below + weights[index]:
            below += weights[index]
            index += 1
        owner = self.owners[index]
        row = self.rows[owner.templates[int(self.random.uniform() * 3)]]
        lives = [other[1] for other in self.rows if other[2] == row[2]]
        life_s = lives[int(self.random.uniform() * len(lives))]
        more_cores = self.config.pod_spread * quantile(fitted.NEED_POD_QUANTILES, self.random.uniform())
        more_memory = self.config.pod_spread * quantile(fitted.MEMORY_POD_QUANTILES, self.random.uniform())
        idle, z_latency = self.random.uniform() < self.config.idle_share, self.random.normal()
        latency = solo_latency_ms(owner.app, owner.batch, row[0] * min(sigmoid(owner.need + more_cores), 0.85))
        sensitive = row[2] > 0.5
        memory = max(math.floor(row[0] / 100 * 32768), 512.0)
        return Pod(
            app=owner.app,
            batch=owner.batch,
            rate_per_ms=0.0 if idle else owner.batch / latency * (owner.load if sensitive else 1.0),
            slo_ms=latency if sensitive and not idle else math.inf,
            need_mb=memory * sigmoid(owner.memory + more_memory),
            jitter=1 + LATENCY_CV * z_latency,
            life_s=life_s,
            owner=index,
            cores=row[0],
            memory=memory,
        )

    def _await_pod(self) -> None:
        self.waiting = self._draw_pod()
        arrived = self.time_s - self.mean_gap_s * math.log(1 - self.random.uniform())
        self.time_s = arrived
        self._expire()
        while not self._fits(self.waiting):
            self.time_s = min(pod.end_s for pod in self.pods)
            self._expire()
        self.wait_s = self.time_s - arrived

    def _expire(self) -> None:
        self.pods = [pod for pod in self.pods if pod.end_s > self.time_s]

    def _fits(self, new: Pod) -> bool:
        everyone = [*self.pods, new]
        return (
            len(everyone) <= 10 and sum(p.cores for p in everyone) <= 100 and sum(p.memory for p in everyone) <= 32768
        )

    def _latencies(self) -> list[float]:
        plain = corun_latency_ms(
            [p.app for p in self.pods],
            [p.batch for p in self.pods],
            [p.cores for p in self.pods],
            [1000 * p.rate_per_ms for p in self.pods],
        )
        return [t * p.jitter for t, p in zip(plain, self.pods, strict=True)]

    def observation(self) -> list[float]:
        """The five numbers of the state."""
        usages = [
            min(1, p.rate_per_ms * t / p.batch) * p.cores for p, t in zip(self.pods, self._latencies(), strict=True)
        ]
        used_mb = sum(p.need_mb for p in self.pods)
        return [
            self.waiting.cores / 100,
            self.waiting.memory / 32768,
            sum(usages) / 100,
            used_mb / 32768,
            len(self.pods) / 10,
        ]

    def step(self, action: list[float]) -> Outcome:
        pod = self.waiting
        pod.cores = granted(action[0], 10.0, 100.0, self.config.unit_percent, pod.cores)
        pod.memory = granted(action[1], 512.0, 32768.0, 1.0, pod.memory)
        pod.end_s = self.time_s + pod.life_s
        self.pods.append(pod)
        latency = self._latencies()[-1]
        busy = pod.rate_per_ms * latency / pod.batch
        oom = pod.memory < pod.need_mb
        met = busy < 1 and latency <= pod.slo_ms and not oom
        usage = 0.0 if oom else min(1.0, busy) * pod.cores
        sharing = len(self.pods) if self.config.reward == "room" else max(len(self.pods) - 1, 1)
        reward = reward_of(pod.cores, usage, met, sharing)
        outcome = Outcome(reward, pod.cores, pod.memory, usage, met, oom, len(self.pods), self.time_s, self.wait_s)
        if oom:
            self.pods.pop()
        self._await_pod()
        if self.config.reward == "room":
            outcome.reward -= 0.5 * self.wait_s / (self.wait_s + 440)
        return outcome
