"""Expert offloading in plain Python, transfer by transfer: what the compiled simulator must equal, and random tasks."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clustergym import TokenTrace
from clustergym.moe_offload.kernels.state import Task
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables

Expert = tuple[int, int]
"""Layer and id."""


@dataclass
class Resident:
    gpu: int
    arrives: float
    prefetched: bool = False


@dataclass
class Reference:
    """A node that serves the sequences ``streams``: lists of tokens, which are lists of layers, which list experts."""

    task: Task
    streams: list[list[list[list[int]]]]
    residents: dict[Expert, Resident] = field(default_factory=dict)
    host_links: list[list[tuple[float, float]]] = field(default_factory=list)
    peer_links: list[list[tuple[float, float]]] = field(default_factory=list)
    """Per GPU the transfers so far: (begin, end)."""
    token: int = 0
    layer: int = -1
    now: float = 0.0
    following: float = 0.0
    """When the next router result comes."""
    stalls: list[float] = field(default_factory=list)
    uses: dict[Expert, list[int]] = field(default_factory=dict)
    decisions: dict[Expert, tuple[int, int]] = field(default_factory=dict)
    """Token and step of the last eviction or prefetch since the last use."""
    events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    step: int = 0
    pool: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        task = self.task
        self.n_layers, self.n_experts = task.prior.shape
        self.host_links = [[] for _ in range(task.gpus)]
        self.peer_links = [[] for _ in range(task.gpus)]
        for l in range(self.n_layers):
            for e in range(self.n_experts):
                if task.home[l, e] >= 0:
                    self.residents[l, e] = Resident(int(task.home[l, e]), 0.0)

    def add(self, name: str, n: int = 1) -> None:
        self.numbers[name] = self.numbers.get(name, 0) + n

    # ---- memory

    def pool_of(self, layer: int) -> int:
        return layer if self.task.pools > 1 else 0

    def held(self, gpu: int, pool: int) -> int:
        return sum(r.gpu == gpu and self.pool_of(l) == pool for (l, _), r in self.residents.items())

    def link_free(self, links: list[list[tuple[float, float]]], gpu: int, earliest: float) -> float:
        return max(links[gpu][-1][1] if links[gpu] else 0.0, earliest)

    def transfer(self, links: list[list[tuple[float, float]]], gpu: int, begin: float, duration: float) -> float:
        if links[gpu]:
            assert begin >= links[gpu][-1][1], "a link does one transfer at a time"
        links[gpu].append((begin, begin + duration))
        return begin + duration

    def routed(self, token: int, layer: int) -> list[int]:
        """Experts that the running sequences use, each once, in the order of sequences and ranks."""
        found: list[int] = []
        for stream in self.streams:
            if token < len(stream):
                found += [e for e in stream[token][layer] if e >= 0 and e not in found]
        return found

    def next_visit(self) -> bool:
        self.layer += 1
        if self.layer == self.n_layers:
            self.token, self.layer = self.token + 1, 0
        if self.token >= max(map(len, self.streams)):
            self.over = True
            return False
        task, layer = self.task, self.layer
        self.now, self.pool = self.following, self.pool_of(layer)
        needed = self.routed(self.token, layer)
        if layer == 0:
            self.add("generated", sum(self.token < len(stream) for stream in self.streams))
        for e in needed:
            key = (layer, e)
            if key not in self.residents:
                self.report(key, 0)
                order = [(layer + e + i) % task.gpus for i in range(task.gpus)]
                gpu = min(order, key=lambda g: self.link_free(self.host_links, g, self.now))
                begin = self.link_free(self.host_links, gpu, self.now)
                self.residents[key] = Resident(gpu, self.transfer(self.host_links, gpu, begin, task.load_ms))
                self.add("loads")
            elif self.residents[key].prefetched:
                self.report(key, 1)
                self.add("useful")
            self.residents[key].prefetched = False
            self.decisions.pop(key, None)
            self.uses.setdefault(key, []).append(self.token)
        # Wait for one arrival after the other until all are there.
        arrivals = [(self.residents[layer, e].arrives, e) for e in needed]
        heapq.heapify(arrivals)
        clock = self.now
        while arrivals:
            at, _ = heapq.heappop(arrivals)
            if at > clock:
                clock = at
        self.stalls.append(clock - self.now)
        loads = [sum(self.residents[layer, e].gpu == g for e in needed) for g in range(task.gpus)]
        self.following = clock + (task.layer_ms + task.expert_ms * max(loads))
        self.add("visits")
        self.add("needed", len(needed))
        return True

    def over_full(self) -> int:
        full = [g for g in range(self.task.gpus) if self.held(g, self.pool) > self.task.slots]
        return full[0] if full else -1

    def window(self, gpu: int) -> float:
        return self.following - self.link_free(self.host_links, gpu, self.now)

    def report(self, key: Expert, kind: int) -> None:
        if key in self.decisions:
            token, step = self.decisions.pop(key)
            self.events.append((*key, kind, self.token - token, self.step - step))

    def evict(self, key: Expert) -> None:
        if self.residents.pop(key).prefetched:
            self.add("wasted")
        self.add("evictions")
        self.decisions[key] = (self.token, self.step)

    def prefetch(self, key: Expert, gpu: int) -> None:
        assert key not in self.residents
        assert self.window(gpu) > 0
        self.report(key, 2)
        begin = self.link_free(self.host_links, gpu, self.now)
        self.residents[key] = Resident(
            gpu, self.transfer(self.host_links, gpu, begin, self.task.load_ms), prefetched=True
        )
        self.pool = self.pool_of(key[0])
        self.add("prefetches")
        self.decisions[key] = (self.token, self.step)

    def move_begin(self, key: Expert, gpu: int) -> float:
        return max(self.link_free(self.peer_links, gpu, self.now), self.residents[key].arrives)

    def can_move(self, key: Expert, gpu: int) -> bool:
        known = key in self.residents and self.residents[key].gpu != gpu and key[0] != self.layer
        return known and self.move_begin(key, gpu) < self.following

    def move(self, key: Expert, gpu: int) -> None:
        resident = self.residents[key]
        resident.arrives = self.transfer(self.peer_links, gpu, self.move_begin(key, gpu), self.task.peer_ms)
        resident.gpu, self.pool = gpu, self.pool_of(key[0])
        self.add("moves")

    # ---- decisions

    def ahead(self) -> list[tuple[int, int]]:
        """(distance, layer) of the next layers whose visits will come."""
        last = max(map(len, self.streams)) * self.n_layers - 1
        visit = self.token * self.n_layers + self.layer
        return [(h, (self.layer + h) % self.n_layers) for h in range(1, self.task.horizon + 1) if visit + h <= last]

    def missing_ahead(self) -> list[Expert]:
        return [(l, e) for _, l in self.ahead() for e in range(self.n_experts) if (l, e) not in self.residents]

    def settle(self) -> str:
        """Go to the next decision: ``evict``, ``load`` or ``over``."""
        while True:
            if self.over_full() >= 0:
                return "evict"
            free = any(self.window(g) > 0 for g in range(self.task.gpus))
            if self.layer >= 0 and free and self.missing_ahead():
                return "load"
            if not self.next_visit():
                return "over"

    def legal(self, mode: str, key: Expert, node: int) -> bool:
        """Whether a pair is legal, for an expert that is in the table."""
        operation, gpu = divmod(node, self.task.gpus)
        if mode == "evict":
            return operation == 2 and gpu == self.over_full()
        if operation == 0:
            here = key not in self.residents or self.residents[key].gpu == gpu
            return here or self.can_move(key, gpu)
        return operation == 1 and key not in self.residents and self.window(gpu) > 0

    def act(self, mode: str, key: Expert | None, node: int) -> str:
        """Apply a pair (``None``: an illegal one). Returns the next mode."""
        operation, gpu = divmod(node, self.task.gpus)
        self.events = []
        self.step += 1
        legal = key is not None and self.legal(mode, key, node)
        done = False
        if legal and key is not None:
            if mode == "evict":
                self.evict(key)
                done = True
            elif operation == 1:
                self.prefetch(key, gpu)
                done = True
            elif self.can_move(key, gpu):
                self.move(key, gpu)
                done = True
        if mode == "evict" and not legal:
            return mode
        if mode == "load" and not done and not self.next_visit():
            return "over"
        return self.settle()

    def count(self, key: Expert, decay: float) -> float:
        """The decayed count, from all uses."""
        total = float(self.task.prior[key]) * decay ** (self.token + 1)
        return total + sum((1 - decay) * decay ** (self.token - t) for t in self.uses.get(key, []))


def random_trace(draw: random.Random, padding: bool = True) -> TokenTrace:
    """A few short sequences of a tiny model; experts repeat, so that memory matters."""
    layers, experts = draw.randint(1, 4), draw.randint(2, 7)
    top = draw.randint(1, min(3, experts))
    lengths = [draw.randint(7, 10), *(draw.randint(1, 10) for _ in range(draw.randint(0, 3)))]
    draw.shuffle(lengths)
    routing = np.empty((sum(lengths), layers, top), np.int16)
    for t in range(len(routing)):
        for l in range(layers):
            if t and draw.random() < 0.5:
                routing[t, l] = routing[t - 1, l]
            else:
                routing[t, l] = draw.sample(range(experts), top)
            if padding and top > 1 and draw.random() < 0.1:
                routing[t, l, -1] = -1
    return TokenTrace(routing, n_experts=experts, seq_lens=np.array(lengths))


def random_task(draw: random.Random, **options: Any) -> tuple[Task, TokenTrace]:
    """A tiny task of any form."""
    trace = random_trace(draw)
    gpus = draw.choice((1, 1, 2, 3))
    config = OffloadConfig(
        **{
            "trace": trace,
            "split": "all",
            "slots": draw.uniform(0.1, 0.9),
            "per_layer": draw.random() < 0.3,
            "gpus": gpus,
            "batch": draw.choice((1, 1, 2, 3)),
            "link": draw.uniform(15.0, 300.0),
            "peer_gb_s": draw.uniform(60.0, 800.0),
            "layer_ms": draw.uniform(0.0, 0.3),
            "expert_ms": draw.uniform(0.0, 0.1),
            "horizon": draw.randint(1, 4),
            "max_tokens": draw.choice((None, 4)),
            "low_rows": draw.choice((2, 32)),
            "load_rows": draw.choice((3, 24)),
            "context_rows": draw.choice((0, 3, 12)),
        }
        | options
    )
    return build_task(config, Tables.count(trace)), trace


def streams_of(task: Task, group: int) -> list[list[list[list[int]]]]:
    """The routing of the sequences of a group."""
    found = []
    for sequence in task.groups[group]:
        if sequence >= 0:
            first = task.starts[sequence]
            length = min(task.lengths[sequence], task.max_tokens)
            found.append(task.experts[first : first + length].tolist())
    return found
