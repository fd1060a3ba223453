"""The engines' own code: replica choice equals theirs, and readers read what their recorders write.

Each test needs the source of one engine, without its dependencies, and skips where it is absent:

    pip install --no-deps --target /tmp/engines sglang
    PYTHONPATH=/tmp/engines pytest tests/test_engine_rules.py
"""

from __future__ import annotations

import ast
import logging
import random
import time
from abc import ABC
from collections import Counter, defaultdict, deque
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
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.readers import ReadOptions, read_trace
from engine_files import routing, slot_map, to_physical
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
    """Functions and classes of a source file, and the names that they use."""
    tree = ast.parse(text)
    defined = (ast.FunctionDef, ast.ClassDef)
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, defined) and node.name in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]
    assert {node.name for node in tree.body if isinstance(node, defined)} == names
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


# Recordings of SGLang: 2 dense layers and 3 of experts, passes of 7 prefill and 3 decode tokens.
DENSE, LAYERS, TOP_K = 2, 3, 4
PASSES = ((1, 7, [4, 3]), (2, 3, None))
LOGICAL = routing(10, LAYERS, TOP_K, EXPERTS)


def sglang_recording(mode: str, gatherer: str, accumulator: str, folder: Path, monkeypatch: Any) -> Path:
    """The file that SGLang's recorder writes on one rank."""
    stub = SimpleNamespace
    slots = torch.from_numpy(slot_map(DENSE + LAYERS, EXPERTS, 4))
    location = stub(
        num_layers=DENSE + LAYERS, num_physical_experts=16, num_logical_experts=EXPERTS, physical_to_logical_map=slots
    )
    names = {
        "_SinglePassGatherer", "_DetailSinglePassGatherer", "_LayerBasedGpuSinglePassGatherer",
        "_SelectExpertsSinglePassGatherer", "_Accumulator", "_UtilizationRateAccumulatorMixin", "_DequeCollection",
        "_DetailAccumulator", "_StatAccumulator", "_Buffer", "_CircularBuffer", "_InfiniteBuffer", "_dump_to_file",
        "_convert_per_token_to_global_physical_count", "_convert_global_physical_count_to_logical_count",
    }  # fmt: skip
    settings = stub(moe=stub(expert_distribution_recorder_mode=mode, expert_distribution_recorder_buffer_size=4),
                    overlap=stub(enable_two_batch_overlap=False))  # fmt: skip
    engine = functions(
        source("sglang", "srt/eplb/expert_distribution.py"), names, torch=torch, ABC=ABC, deque=deque, time=time,
        Path=Path, logger=logging.getLogger(), get_exec=lambda: settings, get_device=lambda: "cpu",
        get_schedule=lambda: stub(chunked_prefill_size=2), get_device_namespace=lambda: stub(device="cpu"),
        reports_expert_balancedness=lambda: False, _SINGLE_PASS_GATHERER_KEY_PRIMARY="primary",
        envs=stub(SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=stub(get=lambda: str(folder))),
    )  # fmt: skip
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: None)  # one rank
    monkeypatch.setattr(torch, "get_device_module", lambda: stub(empty_cache=lambda: None))
    gather, record = getattr(engine, gatherer)(location, 0), getattr(engine, accumulator)(location, 0)
    physical, first = torch.from_numpy(to_physical(LOGICAL, slots[DENSE:].numpy())), 0
    for i, (forward_mode, n, lens) in enumerate(PASSES):
        gather.reset()
        ids = torch.arange(first, first + n)
        gather.on_forward_pass_start(
            stub(input_ids=ids, positions=ids, extend_seq_lens_cpu=lens, forward_mode=stub(value=forward_mode))
        )
        for layer in range(LAYERS):
            gather.on_select_experts(DENSE + layer, physical[first : first + n, layer])
        record.append(i, "primary", gather.collect(), {})
        first += n
    record.dump("file")
    return next(folder.glob("expert_distribution_recorder_*.pt"))


def test_recorded_tokens_of_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sglang_recording("per_token", "_DetailSinglePassGatherer", "_DetailAccumulator", tmp_path, monkeypatch)
    trace = read_trace([path], None, ReadOptions())
    assert isinstance(trace, TokenTrace)
    np.testing.assert_array_equal(trace.experts, LOGICAL)
    assert trace.layer_ids.tolist() == [2, 3, 4]
    assert trace.seq_lens.tolist() == [4, 3, 1, 1, 1]
    assert trace.domains.tolist() == ["prefill"] * 2 + ["decode"] * 3


@pytest.mark.parametrize(("mode", "accumulator"), [("per_pass", "_DetailAccumulator"), ("stat", "_StatAccumulator")])
def test_recorded_loads_of_sglang(mode: str, accumulator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sglang_recording(mode, "_SelectExpertsSinglePassGatherer", accumulator, tmp_path, monkeypatch)
    trace = read_trace([path], None, ReadOptions())
    assert isinstance(trace, LoadTrace)
    assert trace.layer_ids.tolist() == [2, 3, 4]
    expected = [
        [np.bincount(LOGICAL[part, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)]
        for part in (slice(0, 7), slice(7, 10))
    ]
    np.testing.assert_array_equal(trace.counts, expected)
