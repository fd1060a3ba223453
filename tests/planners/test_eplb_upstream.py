"""Our EPLB against the algorithm that engines ship: never less balanced, although no GPU holds an expert twice."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from clustergym import TokenTrace
from clustergym.planners.kernels import loads as kernels
from eplb_reference import balancedness, eplb

# experts, groups, nodes, GPUs, slots per GPU: as people serve these models.
SHAPES = {
    "DeepSeek-V3 4x8": (256, 8, 4, 32, 9),
    "DeepSeek-V3 8x8": (256, 8, 8, 64, 5),
    "DeepSeek-V2 4x8": (160, 8, 4, 32, 6),
    "DeepSeek-V2-Lite 4x4": (64, 64, 4, 16, 5),
    "gpt-oss-20b 4x8": (32, 32, 4, 32, 2),
    "Qwen3 2x8": (128, 128, 2, 16, 9),
    "OLMoE 1x8, global": (64, 1, 2, 8, 9),
}
DRAWS = 25


def ours(loads: npt.NDArray[np.float64], groups: int, nodes: int, gpus: int, slots: int) -> npt.NDArray[np.int16]:
    """(L, G, S)"""
    n_layers, n_experts = loads.shape
    placement = np.empty((n_layers, gpus, slots), np.int16)
    scratch = np.empty((n_layers, 3, n_experts), np.int32), np.empty((n_layers, n_experts + gpus))
    kernels.eplb(placement, np.ascontiguousarray(loads), nodes, 0 if groups % nodes else groups, *scratch)
    return placement


def draw(rng: np.random.Generator, kind: int, n: int) -> npt.NDArray[np.float64]:
    if kind == 0:
        return rng.integers(1, 1000, n).astype(float)
    if kind == 1:
        return np.floor(rng.pareto(1.2, n) * 100) + 1
    if kind == 2:
        return rng.lognormal(0, 0.5, n) * 1000
    if kind == 3:
        return np.where(rng.random(n) < 0.1, 5000.0, 50.0) + rng.integers(0, 20, n)
    return rng.permutation(1e5 / np.arange(1, n + 1))  # Zipf


def legal(placement: npt.NDArray[np.int16], n_experts: int) -> None:
    for layer in placement:
        assert set(layer.ravel().tolist()) == set(range(n_experts))  # and no slot is empty
        assert all(len(set(gpu)) == len(gpu) for gpu in layer.tolist())


@pytest.mark.parametrize("name", SHAPES)
def test_never_below_upstream_on_random_loads(name: str) -> None:
    """7 shapes × 25 loads of five kinds, and 26 real ones below: 201 loads."""
    n_experts, groups, nodes, gpus, slots = SHAPES[name]
    rng = np.random.default_rng(sum(name.encode()))
    loads = np.stack([draw(rng, k % 5, n_experts) for k in range(DRAWS)])
    placement = ours(loads, groups, nodes, gpus, slots)
    legal(placement, n_experts)
    for load, placed in zip(loads, placement, strict=True):
        upstream = balancedness(eplb(load, gpus * slots, groups, nodes, gpus), load)
        assert balancedness(placed, load) >= upstream - 1e-9


@pytest.mark.parametrize(("groups", "nodes", "gpus", "slots"), [(64, 4, 16, 5), (8, 4, 32, 3)])
def test_never_below_upstream_on_real_loads(groups: int, nodes: int, gpus: int, slots: int) -> None:
    trace = TokenTrace.load("tiny_moe")
    parts = [trace.select(domains=domain) for domain in trace.domain_names] + [trace]
    loads = np.concatenate([part.loads() for part in parts]).astype(float)
    placement = ours(loads, groups, nodes, gpus, slots)
    legal(placement, trace.n_experts)
    for load, placed in zip(loads, placement, strict=True):
        upstream = balancedness(eplb(load, gpus * slots, groups, nodes, gpus), load)
        assert balancedness(placed, load) >= upstream - 1e-9


def test_where_upstream_needs_an_expert_twice_on_a_gpu() -> None:
    """On two GPUs upstream can give an expert 2/3 and 1/3 by placing it twice on one. Without that, the optimum counts.

    Every expert is on GPU 0, on GPU 1 or on both: all 3⁸ placements are tried.
    """
    n_experts, slots = 8, 6
    states = np.array(list(itertools.product((0, 1, 2), repeat=n_experts)))
    fits = ((states != 1).sum(1) == slots) & ((states != 0).sum(1) == slots)
    first, second = np.array([1.0, 0.0, 0.5])[states[fits]], np.array([0.0, 1.0, 0.5])[states[fits]]
    rng = np.random.default_rng(0)
    below = 0
    for _ in range(100):
        load = draw(rng, 1, n_experts)
        placed = ours(load[None], 1, 1, 2, slots)
        legal(placed, n_experts)
        found = balancedness(placed[0], load)
        best = load.sum() / 2 / np.maximum(first @ load, second @ load).min()
        upstream = balancedness(eplb(load, 2 * slots, 1, 1, 2), load)
        assert found >= min(upstream, 0.98 * best) - 1e-9
        below += found < upstream - 1e-9
    assert below < 20
