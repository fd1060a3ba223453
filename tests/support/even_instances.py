"""Placement problems for the tests of planners: random ones, and small ones in which every kind of cost matters."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from clustergym.moe_placement import (
    ClusterSpec,
    EngineProfile,
    Interval,
    ModelSpec,
    Placement,
    Simulator,
)
from instances import Instance, random_instance, random_placement

# SGLang's two, one that hashes tokens and gathers all of them, and ExFlow, where layers depend on each other.
SERVED: dict[str, str | EngineProfile] = {
    **{name: name for name in ("sglang-prefill", "sglang-decode", "vllm")},
}


def even_simulator(
    nodes: int,
    per_node: int,
    n_experts: int,
    top_k: int,
    slots: int,
    profile: str | EngineProfile = "sglang-prefill",
    expert_us: float = 2.0,
    migration: str = "blocking",
) -> Simulator:
    """A copy, a pair, an active expert and a fetched expert all cost a few µs, so that each of them matters."""
    model = ModelSpec("even", 4, n_experts, top_k, 1000, 1, weight_bytes=0.5, dispatch_bytes=1, combine_bytes=0.5,
        kernel_start_us=3, kernel_expert_us=expert_us, kernel_pair_us=1.7,
    )  # fmt: skip
    cluster = ClusterSpec("even", nodes, per_node, slots, 2.0, 1.0, 0.5, 1.0)
    return Simulator(model, cluster, profile, passes_per_interval=2, migration=migration)


def random_interval(
    rng: np.random.Generator, sim: Simulator, tokens: int, layers: int = 1, pads: float = 0.1, passes: int = 1
) -> Interval:
    """Skewed routing: low ids are popular. The ranks have ``tokens`` tokens per pass, shared at random."""
    scores = rng.gumbel(size=(layers, passes * tokens, sim.n_experts)) - 0.4 * np.arange(sim.n_experts)
    experts = np.argsort(-scores, axis=2)[:, :, : sim.model.top_k].astype(np.int16)
    experts[rng.random(experts.shape) < pads] = -1
    rows = np.arange(passes * tokens, dtype=np.int32).reshape(passes, tokens)
    cuts = np.sort(rng.integers(0, tokens + 1, (passes, sim.n_gpus - 1)), axis=1)
    starts = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens)))
    return Interval(np.ascontiguousarray(experts), rows, starts.astype(np.int32))


def even_instance(
    seed: int,
    nodes: int,
    per_node: int,
    n_experts: int,
    top_k: int,
    slots: int,
    profile: str | EngineProfile = "sglang-prefill",
    passes: int = 1,
    migration: str = "blocking",
) -> tuple[Simulator, Interval, Placement]:
    rng = np.random.default_rng(seed)
    sim = even_simulator(nodes, per_node, n_experts, top_k, slots, profile, migration=migration)
    interval = random_interval(rng, sim, int(rng.integers(4, 16)), passes=passes)
    return sim, interval, random_placement(rng, 1, sim.n_gpus, sim.n_slots, n_experts, 0.5)


def cost_us(
    sim: Simulator, interval: Interval, plan: Placement, before: Placement, migration: bool = True
) -> npt.NDArray[np.float64]:
    """(L,) served time and, if counted, migration time."""
    served = sim.evaluate(interval, plan, before)
    return served.total_us if migration else served.time_us


def costs_of_all(
    sim: Simulator, interval: Interval, plans: list[Placement], before: Placement, migration: bool = True
) -> npt.NDArray[np.float64]:
    """Costs of many one-layer plans (G, S) at once: each is a layer with the same traffic."""
    n = len(plans)
    same = Interval(np.repeat(interval.experts, n, axis=0), interval.rows, interval.rank_start)
    return cost_us(sim, same, np.stack(plans).astype(np.int16), np.repeat(before, n, axis=0), migration)


@lru_cache
def every_placement(n_experts: int, n_gpus: int, n_slots: int) -> list[Placement]:
    """All (G, S) placements, by brute force."""
    ways = [c for size in range(n_slots + 1) for c in combinations(range(n_experts), size)]
    return [
        np.array([list(c) + [-1] * (n_slots - len(c)) for c in chosen], np.int16)
        for chosen in product(ways, repeat=n_gpus)
        if len(set().union(*chosen)) == n_experts
    ]


def held(placement: Placement) -> set[tuple[int, int, int]]:
    """{(layer, GPU, expert)}: a placement without the order of slots."""
    return {(int(l), int(g), int(placement[l, g, s])) for l, g, s in np.argwhere(placement >= 0)}


def interval_of(tokens: list[tuple[int, ...]], ranks: list[int], n_gpus: int) -> Interval:
    """One pass of one layer: the experts and the rank of each token."""
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    starts = np.searchsorted(np.array(ranks)[order], np.arange(n_gpus + 1)).astype(np.int32)
    return Interval(np.array([tokens], np.int16), order[None], starts[None])


@st.composite
def instances(draw: st.DrawFn, small: bool = False) -> Instance:
    return random_instance(
        draw(st.integers(0, 2**32 - 1)),
        nodes=draw(st.integers(1, 2 if small else 3)),
        per_node=draw(st.integers(1, 2)),
        n_experts=draw(st.integers(2, 4 if small else 9)),
        top_k=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 3 if small else 9)),
        passes=draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 3)),
        spare_slots=draw(st.integers(0, 0 if small else 2)),
        fill=draw(st.sampled_from([0.0, 0.5, 1.0])),
        pads=draw(st.sampled_from([0.0, 0.3, 0.9])),
    )
