"""Replica choice against the engines' own functions.

Each test needs the source of one engine, without its dependencies, and skips where it is absent:

    pip install --no-deps --target /tmp/engines sglang
    PYTHONPATH=/tmp/engines pytest tests/test_engine_rules.py
"""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator
from clustergym.moe_placement.kernels.replicas import _KNUTH
from clustergym.moe_placement.streams import Interval
from instances import made_profile, random_placement

NODES, PER_NODE, SLOTS, EXPERTS = 3, 4, 3, 12
GPUS = NODES * PER_NODE


def source(package: str, path: str) -> str:
    """A source file of a package. Nothing is imported: engines need a GPU for that."""
    found = find_spec(package)
    file = Path(*(found.submodule_search_locations or [""])[:1], path) if found else Path()
    if not file.is_file():
        pytest.skip(f"{package} is not installed")
    return file.read_text()


def functions(text: str, names: set[str], **known: Any) -> SimpleNamespace:
    """Functions of a source file, and the names that they use."""
    tree = ast.parse(text)
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == names
    space: dict[str, Any] = dict(known)
    exec(compile(tree, "<engine>", "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def chosen(dispatch: str, slots: np.ndarray) -> np.ndarray:
    """(rank, expert) → GPU whose replica our simulator takes, for slots (G, S). Every rank has one token per expert."""
    model, cluster = ModelSpec("m", 1, EXPERTS, 1, 8, 8), ClusterSpec("c", NODES, PER_NODE, SLOTS)
    simulator = Simulator(model, cluster, made_profile(dispatch, "per-expert"))
    experts = np.tile(np.arange(EXPERTS, dtype=np.int16), GPUS)[None, :, None].copy()
    interval = Interval.even(experts, np.arange(GPUS * EXPERTS, dtype=np.int32)[None], GPUS)
    visits = np.zeros((GPUS, EXPERTS), int)
    sim = simulator.count(interval, slots[None])
    for g, s in np.argwhere(slots >= 0):
        tokens = np.unpackbits(sim.slot_tokens[0, 0, g, s].view(np.uint8), bitorder="little")[: GPUS * EXPERTS]
        for t in np.flatnonzero(tokens):
            assert t % EXPERTS == slots[g, s]
            visits[t // EXPERTS, slots[g, s]] = g
    return visits


def full_placement(seed: int) -> np.ndarray:
    """Engines have no empty slots."""
    slots = random_placement(np.random.default_rng(seed), 1, GPUS, SLOTS, EXPERTS, 1.0)[0]
    assert (slots >= 0).all()
    return slots


def replicas_on_one_node() -> np.ndarray:
    """Four experts per node, three replicas each."""
    gpu, slot = np.indices((GPUS, SLOTS))
    return (gpu // PER_NODE * 4 + (gpu + slot) % 4).astype(np.int16)


@pytest.mark.parametrize("dispatch", ["rank-nearest", "rank-nearest-dealt"])
@pytest.mark.parametrize("seed", range(10))
def test_rank_nearest_is_sglang_s_static_dispatch(seed: int, dispatch: str) -> None:
    """SGLang 0.5.23. Other ranks are dealt over the replicas in random order there, and in order here.

    rank-nearest is the rule before 0.5.16, which differs for experts whose replicas are all on one node.
    """
    text = source("sglang", "srt/eplb/expert_location.py")
    engine = functions(
        text,
        {
            "compute_logical_to_rank_dispatch_physical_map", "_logical_to_all_physical_raw", "_find_nearest_expert",
            "_compute_gpu_id_of_physical_expert", "_compute_node_id_of_physical_expert", "_fair_choices",
        },
        torch=torch, random=random, _prefer_same_node_experts=lambda: True,
        get_parallel=lambda: SimpleNamespace(ep_size=GPUS, nnodes=NODES),
    )  # fmt: skip
    slots = full_placement(seed) if seed else replicas_on_one_node()
    physical: list[list[int]] = [[] for _ in range(EXPERTS)]
    for place, e in enumerate(slots.ravel().tolist()):
        physical[e].append(place)
    width = max(map(len, physical))
    table = torch.tensor([[places + [-1] * (width - len(places)) for places in physical]])
    theirs = np.stack(
        [
            engine.compute_logical_to_rank_dispatch_physical_map(table, GPUS, GPUS * SLOTS, rank)[0].numpy() // SLOTS
            for rank in range(GPUS)
        ]
    )
    ours = chosen(dispatch, slots)
    for e in range(EXPERTS):
        holders = [place // SLOTS for place in physical[e]]
        nodes = {g // PER_NODE for g in holders}
        near = [g for g in range(GPUS) if g // PER_NODE in nodes]
        if len(nodes) == 1 and len(holders) > 1:
            if dispatch == "rank-nearest":
                first = [g for g in near if g not in holders]
                assert (ours[first, e] == holders[0]).all()
                continue
            near = holders
        elif len(holders) == 1:
            near = list(range(GPUS))
        dealt = [g for g in range(GPUS) if g not in near]
        np.testing.assert_array_equal(ours[near, e], theirs[near, e])
        shares = [sorted(Counter(choice[dealt, e].tolist()).values()) for choice in (ours, theirs)]
        assert shares[0] == shares[1]


@pytest.mark.parametrize("seed", range(5))
def test_rank_mod_is_vllm_ascend_s_map(seed: int) -> None:
    """vllm-ascend, commit 182b75ea, without tensor parallelism."""
    text = source("vllm_ascend", "eplb/core/eplb_utils.py")
    engine = functions(text, {"generate_log2phy_map"}, torch=torch, defaultdict=defaultdict)
    slots = full_placement(seed)
    maps = []
    for gpu in slots:
        local = torch.full((EXPERTS,), -1, dtype=torch.int32)
        local[torch.from_numpy(gpu.astype(np.int64))] = torch.arange(SLOTS, dtype=torch.int32)
        maps.append(local)
    theirs = np.stack([engine.generate_log2phy_map(maps, rank).numpy() // SLOTS for rank in range(GPUS)])
    np.testing.assert_array_equal(chosen("rank-mod", slots), theirs)


def test_token_hash_has_vllm_s_multiplier() -> None:
    """vLLM's rule is a Triton kernel, which does not run here: only its constants are compared (commit a014e35f)."""
    text = source("vllm", "model_executor/layers/fused_moe/router/base_router.py")
    assert f"KNUTH_MULTIPLIER = {_KNUTH}\n" in text
    assert "hashed = (token_idx * KNUTH_MULTIPLIER) & 0xFFFFFFFF\n" in text
    assert "replica_idx = hashed % replica_count\n" in text
