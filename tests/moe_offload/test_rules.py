"""Rules against plain Python, Belady against exhaustive search, and the search that tunes them."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from clustergym import TokenTrace
from clustergym.moe_offload.kernels import rules as kernel
from clustergym.moe_offload.kernels.state import LOADS, PREFETCHES, Task
from clustergym.moe_offload.rules import (
    OFF,
    RULES,
    Rule,
    Vector,
    Workload,
    allocate_slots,
    miss_curves,
    search,
    start_values,
    tune,
    tune_all,
)  # fmt: skip
from clustergym.moe_offload.scores import LIFT_WEIGHT
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables
from offload_reference import Expert, Reference, random_task, random_trace, streams_of

PLAYED = ("static-popular", "lru", "lfu", "decayed-lfu", "decayed-lfu-shares", "lru+transitions",
          "decayed-lfu+transitions", "belady", "next-3-layers", "clairvoyant")  # fmt: skip


class SlowRule:
    """A rule by its definition: everything is computed anew from the uses so far, in loops."""

    def __init__(self, task: Task, streams: list[list[list[list[int]]]], rule: Rule, z: Vector, tables: Tables) -> None:
        self.world = Reference(task, streams)
        self.task, self.rule, self.z, self.tables = task, rule, z.astype(np.float32), tables
        self.n_layers, self.n_experts = task.prior.shape
        self.own_layer = task.pools > 1 or rule.shares

    def uses(self, layer: int) -> list[list[int]]:
        """What each visit of a layer used so far."""
        n = self.world.token + (layer <= self.world.layer)
        return [self.world.routed(t, layer) for t in range(n)]

    def keep(self, layer: int, e: int) -> float:
        uses, z = self.uses(layer), self.z
        if self.rule.keep == kernel.FIXED:
            return float(self.task.prior[layer, e])
        if self.rule.keep == kernel.GIVEN:
            return -self.next_visit(layer, e)
        used = [t for t, experts in enumerate(uses) if e in experts]
        if self.rule.keep == kernel.RECENT:
            return used[-1] * self.n_layers + layer + 1 if used else 0.5 * float(self.task.prior[layer, e])
        score = sum(float(z[kernel.DECAY]) ** (len(uses) - 1 - t) for t in used)
        score += float(z[kernel.PRIOR]) * float(self.task.prior[layer, e])
        return score + float(z[kernel.RECENCY]) / (len(uses) - (used[-1] if used else kernel.LONG_AGO)) * bool(uses)

    def next_visit(self, layer: int, e: int) -> float:
        first = self.world.token + (layer <= self.world.layer)
        for t in range(first, max(map(len, self.world.streams))):
            if e in self.world.routed(t, layer):
                return t * self.n_layers + layer
        return 1e7

    def later(self, layer: int) -> int:
        return (layer - self.world.layer - 1) % self.n_layers

    def victim(self, gpu: int, layers: list[int], gain: dict[int, float] | None = None) -> tuple[float, Expert] | None:
        """The lowest score. Ties: the layer that comes last, then the first expert."""
        bonus = 0.0 if self.own_layer else float(self.z[kernel.DISTANCE]) / self.n_layers
        found = [
            (self.keep(l, e) + (gain or {}).get(e, 0.0) - bonus * self.later(l), -self.later(l), e, l)
            for l in layers
            for e in range(self.n_experts)
            if (l, e) in self.world.residents and self.world.residents[l, e].gpu == gpu
        ]
        return None if not found else (min(found)[0], (min(found)[3], min(found)[2]))

    def chance(self, h: int, t: int, layer: int, e: int) -> float:
        """Of use at a visit to come, as known h visits before."""
        if self.rule.ahead_source == "truth":
            return float(e in self.world.routed(t, layer))
        miss = 1.0
        visit = t * self.n_layers + layer - h
        for stream in self.world.streams:
            if t >= len(stream):
                continue
            prior = float(self.tables.prior()[layer, e])
            odds = np.log(prior / (1 - prior))
            if visit >= 0:
                source = visit % self.n_layers
                lifts = self.tables.lifts[h - 1, source]
                odds += LIFT_WEIGHT * sum(float(lifts[a, e]) for a in stream[visit // self.n_layers][source] if a >= 0)
            miss *= 1 - 1 / (1 + np.exp(-odds))
        return 1 - miss

    def free_gpu(self) -> int:
        ends = [links[-1][1] if links else 0.0 for links in self.world.host_links]
        return ends.index(min(ends))

    def visits_ahead(self, n: int) -> list[tuple[int, int, int]]:
        now = self.world.token * self.n_layers + self.world.layer
        end = max(map(len, self.world.streams)) * self.n_layers
        return [(v - now, v // self.n_layers, v % self.n_layers) for v in range(now + 1, min(end, now + n))]

    def prefetch_likely(self) -> None:
        world, z = self.world, self.z
        for h, t, layer in self.visits_ahead(4):
            if h >= self.n_layers or z[kernel.THRESHOLD + h - 1] >= 1:
                continue
            while world.window(gpu := self.free_gpu()) > 0:
                waiting = world.link_free(world.host_links, gpu, world.now) - (world.now + world.stalls[-1])
                threshold = float(z[kernel.THRESHOLD + h - 1]) + float(z[kernel.BACKLOG]) * waiting / self.task.load_ms
                missing = [(self.chance(h, t, layer, e), -e) for e in range(self.n_experts)]
                missing = [found for found in missing if (layer, -found[1]) not in world.residents]
                if not missing or max(missing)[0] <= threshold:
                    break
                likely, e = max(missing)[0], -max(missing)[1]
                gain = float(z[kernel.GAIN])
                if self.own_layer:
                    gains = {i: gain * self.chance(h, t, layer, i) for i in range(self.n_experts)}
                    found = self.victim(gpu, [layer], gains)
                else:
                    spared = [(world.layer + i) % self.n_layers for i in range(1, min(4, self.n_layers))]
                    found = self.victim(gpu, [l for l in range(self.n_layers) if l not in spared])
                if found is None or gain * likely + self.keep(layer, e) <= found[0]:
                    break
                world.evict(found[1])
                world.prefetch((layer, e), gpu)

    def prefetch_clairvoyant(self) -> None:
        world = self.world
        for _, t, layer in self.visits_ahead(10 * self.n_layers):
            for e in world.routed(t, layer):
                gpu = self.free_gpu()
                if world.window(gpu) <= 0:
                    return
                if (layer, e) in world.residents:
                    continue
                found = self.victim(gpu, [layer] if self.own_layer else list(range(self.n_layers)))
                if found is None or -found[0] <= t * self.n_layers + layer:
                    if self.own_layer:
                        break
                    return
                world.evict(found[1])
                world.prefetch((layer, e), gpu)

    def play(self) -> Reference:
        world = self.world
        while world.next_visit():
            while (gpu := world.over_full()) >= 0:
                found = self.victim(gpu, [world.layer] if self.own_layer else list(range(self.n_layers)))
                assert found is not None
                world.evict(found[1])
            if self.rule.mode == kernel.LIKELY:
                self.prefetch_likely()
            elif self.rule.mode == kernel.CLAIRVOYANT:
                self.prefetch_clairvoyant()
        return world


@pytest.mark.parametrize("name", PLAYED)
def test_rules_equal_plain_python(name: str) -> None:
    prefetched = 0
    for seed in range(60):
        draw = random.Random(seed)
        gpus = {} if name != "decayed-lfu-shares" else {"gpus": 1}
        task, trace = random_task(draw, max_tokens=None, **gpus)
        tables = Tables.count(trace)
        rule = RULES[name]
        if name == "next-3-layers":
            rule = Rule(name, "", "bound", keep=kernel.COUNTS, ahead_source="truth", fixed=rule.fixed)
        z = start_values(rule)
        for i, low, high in (
            (kernel.DECAY, 0.8, 1.0), (kernel.PRIOR, 0.1, 5), (kernel.RECENCY, 0, 2), (kernel.DISTANCE, 0, 2),
            (kernel.BACKLOG, 0, 0.3),
        ):  # fmt: skip
            z[i] = draw.uniform(low, high)
        if rule.keep in (kernel.GIVEN, kernel.RECENT):
            z[kernel.DISTANCE] = 0
        if rule.mode == kernel.LIKELY:
            z[kernel.GAIN] = draw.uniform(0, 20)
            z[kernel.THRESHOLD : kernel.THRESHOLD + 3] = [draw.choice((OFF, draw.random())) for _ in range(3)]
        workload = Workload(task, trace, tables)
        outcome = workload.run(rule, z)
        if rule.shares:
            task = task._replace(home=workload.shares_home())
        for group in range(len(task.groups)):
            world = SlowRule(task, streams_of(task, group), rule, z, tables).play()
            assert outcome.stall_ms[group] == pytest.approx(sum(world.stalls), abs=1e-9), seed
            assert outcome.stats[group, LOADS] == world.numbers.get("loads", 0), seed
            assert outcome.stats[group, PREFETCHES] == world.numbers.get("prefetches", 0), seed
            prefetched += world.numbers.get("prefetches", 0)
    assert bool(prefetched) == (RULES[name].mode != kernel.NO_PREFETCH)


def fewest_loads(task: Task, streams: list[list[list[list[int]]]]) -> int:
    """By trying every set of residents that a visit can leave behind."""
    world = Reference(task, streams)
    n_layers = task.prior.shape[0]
    n_visits = max(map(len, streams)) * n_layers

    @cache
    def best(visit: int, residents: frozenset[Expert]) -> int:
        if visit == n_visits:
            return 0
        t, l = divmod(visit, n_layers)
        needed = {(l, e) for e in world.routed(t, l)}
        missing = len(needed - residents)
        held = residents | needed
        if task.pools > 1:
            movable = {key for key in held if key[0] == l}
            n = min(task.slots, len(movable))
        else:
            movable, n = held, min(task.slots, len(held))
        rest = frozenset(held - movable)
        if not missing:
            return best(visit + 1, residents)
        return missing + min(best(visit + 1, rest | frozenset(kept)) for kept in combinations(sorted(movable), n))

    return best(0, frozenset(world.residents))


@pytest.mark.parametrize("per_layer", [False, True])
def test_belady_needs_the_fewest_loads(per_layer: bool) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        trace = random_trace(draw, padding=False)
        trace = TokenTrace(trace.experts[:6, :2, :2], trace.n_experts)
        config = OffloadConfig(trace, "all", slots=draw.uniform(0.2, 0.6), per_layer=per_layer, link=50.0)
        tables = Tables.count(trace)
        task = build_task(config, tables)
        outcome = Workload(task, trace, tables).run(RULES["belady"], start_values(RULES["belady"]))
        assert outcome.stats[0, LOADS] == fewest_loads(task, streams_of(task, 0)), seed
        # The link is free when the router result comes, so every load costs its time.
        assert outcome.stall_ms[0] == pytest.approx(outcome.stats[0, LOADS] * task.load_ms)


def workload(n_tokens: int = 2400, **options: object) -> Workload:
    from clustergym import SyntheticConfig, synthetic_trace

    config = SyntheticConfig(n_tokens=n_tokens, n_layers=6, n_experts=16, top_k=2, mean_seq_len=100, seq_len_spread=0.3)
    trace = synthetic_trace(config)
    tables = Tables.count(trace)
    return Workload(build_task(OffloadConfig(trace, "all", **options), tables), trace, tables)  # type: ignore[arg-type]


def test_scores_in_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["nearest-sequence"]
    z = start_values(rule)
    z[kernel.THRESHOLD : kernel.THRESHOLD + 3] = 0.3
    whole = workload(batch=2).run(rule, z)
    monkeypatch.setattr("clustergym.moe_offload.rules.CHUNK_TOKENS", 300)
    parts = workload(batch=2)
    assert len(parts.chunks) > 3
    assert np.array_equal(parts.run(rule, z).stall_ms, whole.stall_ms)
    assert whole.stats[:, PREFETCHES].sum() > 0


def test_nothing_that_a_rule_knows_comes_from_the_future() -> None:
    """Another continuation of a sequence does not change what was done before, except in bounds."""
    from clustergym.moe_offload.scores import scores_of

    first = workload()
    trace, tables = first.trace.select(sequences=[0]), first.tables
    t = 40
    changed = trace.experts.copy()
    changed[t:] = (changed[t:] + 5) % 16
    other = TokenTrace(changed, 16)
    groups = np.array([[0]])
    for source in ("transitions", "frequency-transitions", "nearest"):
        a, b = (scores_of(source, x, groups, tables, None) for x in (trace, other))
        for h in (1, 2, 3):
            # Token t in layer l is seen h visits before, when layer l - h (or a layer of token t - 1) was visited.
            assert np.array_equal(a.ahead[h - 1, : t + 1, :h], b.ahead[h - 1, : t + 1, :h])
            assert np.array_equal(a.ahead[h - 1, :t], b.ahead[h - 1, :t])
        if source == "nearest":
            assert np.array_equal(a.keep[: t + 1], b.keep[: t + 1])


def test_more_slots_never_cost_belady_a_load() -> None:
    loads = []
    for slots in (0.1, 0.3, 0.5, 1.0):
        outcome = workload(slots=slots).run(RULES["belady"], start_values(RULES["belady"]))
        loads.append(int(outcome.stats[:, LOADS].sum()))
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] == 0


def test_slots_go_where_they_save_most() -> None:
    curves = np.array([[10.0, 4, 1, 0], [9.0, 8, 7, 6]])
    assert allocate_slots(curves, 2).tolist() == [2, 0]
    assert allocate_slots(curves, 4).tolist() == [3, 1]
    assert allocate_slots(curves, 99).tolist() == [3, 3]


def test_miss_curves_by_hand() -> None:
    # One layer, two experts. Expert 0 is the more popular one: only the uses of expert 1 miss with one slot, unless
    # its decayed count has passed that of expert 0.
    trace = TokenTrace(np.array([[[0]], [[0]], [[0]], [[1]]], np.int16), n_experts=2)
    assert miss_curves(trace, Tables.count(trace)).tolist() == [[4, 1, 0]]


def test_the_search_finds_the_minimum_of_a_bowl_inside_its_limits() -> None:
    def cost(x: Vector) -> float:
        return float(np.round(((x - [0.3, 5.0]) ** 2).sum(), 4))

    bounds = np.zeros(2), np.array([1.0, 4.0])
    best, least = search(cost, np.array([0.9, 0.5]), np.array([0.1, 0.5]), *bounds, 400, 0)
    assert best == pytest.approx([0.3, 4.0], abs=0.03)
    assert least == cost(best)


def test_tuning_never_makes_a_rule_worse_than_its_start() -> None:
    train = workload()
    train.reuse = True
    names = ["decayed-lfu", "decayed-lfu+transitions", "next-layer"]
    tuned = tune_all(train, names, evaluations=6)
    stall = {name: train.run(*tuned[name]).stall_ms_per_token for name in names}
    untuned = train.run(RULES["decayed-lfu"], start_values(RULES["decayed-lfu"])).stall_ms_per_token
    assert stall["decayed-lfu"] <= untuned
    assert stall["next-layer"] < stall["decayed-lfu+transitions"] < stall["decayed-lfu"]
    again = tune(train, RULES["decayed-lfu"], evaluations=6)
    assert np.array_equal(again, tuned["decayed-lfu"][1])
