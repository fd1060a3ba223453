"""The engines' own code: replica choice equals theirs, readers read what they write, and they load our plans.

Each test needs the source of one engine, without its dependencies, and skips where it is absent:

    pip install --no-deps --target /tmp/engines sglang vllm
    PYTHONPATH=/tmp/engines pytest tests/plans/test_engine_rules.py
"""

from __future__ import annotations

import ast
import base64
import inspect
import io
import json
import logging
import os
import random
import time
from abc import ABC
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from enum import Enum, auto
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch

import clustergym.plans.integrations.sglang as for_sglang
from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator
from clustergym.moe_placement.kernels.replicas import _KNUTH
from clustergym.moe_placement.streams import Interval
from clustergym.plans.engines import EnginePlan, write_plan
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.readers import ReadOptions, read_trace
from engine_files import routing, slot_map, to_physical, with_dense_zeros
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


class WithoutImports(ast.NodeTransformer):
    """Drops imports of names that the test gives: to import them would load the engine."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if {alias.name for alias in node.names} <= self.names else node


def with_server_args(function: Any, *given: Any, **server_args: Any) -> Any:
    """Call a function of SGLang. Some versions pass the server's arguments first, others keep them in a global."""
    named = function
    while "args" in inspect.signature(named).parameters:  # *args of a mixin
        named = named.__bases__[0]
    first = next(iter(inspect.signature(named).parameters))
    return function(*([SimpleNamespace(**server_args)] if first == "server_args" else []), *given)


def functions(text: str, names: set[str], **known: Any) -> SimpleNamespace:
    """Functions, methods and classes of a source file, and the names that they use. They import none of these."""
    tree = WithoutImports(set(known)).visit(ast.parse(text))
    defined = (ast.FunctionDef, ast.ClassDef)
    tree.body = [
        node
        for node in ast.walk(tree)
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


def sglang_locations() -> Any:
    """SGLang's functions that choose replicas: of August 2026 and newer, with DeepEP."""
    stub, backend = SimpleNamespace, SimpleNamespace(moe_a2a_backend="deepep")
    return functions(
        source("sglang", "srt/eplb/expert_location.py"),
        {
            "compute_logical_to_rank_dispatch_physical_map", "_logical_to_all_physical_raw", "_find_nearest_expert",
            "_compute_gpu_id_of_physical_expert", "_compute_node_id_of_physical_expert", "_fair_choices",
            "_compute_logical_to_all_physical_map", "_pad_nested_array",
        },
        torch=torch, random=random, _prefer_same_node_experts=lambda: True,
        get_parallel=lambda: stub(ep_size=GPUS, nnodes=NODES), get_exec=lambda: stub(moe=backend),
    )  # fmt: skip


def served_by_sglang(slots: np.ndarray, at_start: bool) -> np.ndarray:
    """(layers, rank, expert) → GPU, from slots (layers, G, S). At its start a rank first keeps only near copies."""
    engine, found = sglang_locations(), []
    for rank in range(GPUS):
        table = engine._compute_logical_to_all_physical_map(
            torch.from_numpy(slots.reshape(len(slots), -1).astype(np.int64)), EXPERTS, GPUS, rank if at_start else None
        )
        places = engine.compute_logical_to_rank_dispatch_physical_map(table, GPUS, GPUS * SLOTS, rank)
        found.append(places.numpy() // SLOTS)
    return np.stack(found, axis=1)


@pytest.mark.parametrize("dispatch", ["rank-nearest", "rank-nearest-dealt"])
@pytest.mark.parametrize("seed", range(10))
def test_rank_nearest_is_sglang_s_static_dispatch_after_a_rebalancing(seed: int, dispatch: str) -> None:
    """Other ranks are dealt over the replicas in random order there, and in order here.

    rank-nearest is the rule before 0.5.16, which differs for experts whose replicas are all on one node.
    """
    slots = full_placement(seed) if seed else replicas_on_one_node()
    theirs, ours = served_by_sglang(slots[None], at_start=False)[0], chosen(dispatch, slots)
    for e in range(EXPERTS):
        holders = np.flatnonzero((slots == e).any(1)).tolist()
        near, dealt = near_and_far(holders)
        if len({g // PER_NODE for g in holders}) == 1 and len(holders) > 1 and dispatch == "rank-nearest":
            first = [g for g in range(GPUS) if g // PER_NODE == holders[0] // PER_NODE and g not in holders]
            assert (ours[first, e] == holders[0]).all()
            continue
        np.testing.assert_array_equal(ours[near, e], theirs[near, e])
        shares = [sorted(Counter(choice[dealt, e].tolist()).values()) for choice in (ours, theirs)]
        assert shares[0] == shares[1]


def near_and_far(holders: list[int]) -> tuple[list[int], list[int]]:
    """Ranks whose replica the holders decide, and the others."""
    nodes = {g // PER_NODE for g in holders}
    near = [g for g in range(GPUS) if g // PER_NODE in nodes]
    if len(nodes) == 1 and len(holders) > 1:
        near = holders
    elif len(holders) == 1:
        near = list(range(GPUS))
    return near, [g for g in range(GPUS) if g not in near]


def test_at_its_start_sglang_draws_as_the_start_profile_does() -> None:
    """Near replicas are the same. The others are random, there and here: how evenly they are dealt is compared."""
    slots = np.stack([full_placement(seed) for seed in range(60)])
    start, rebalanced = served_by_sglang(slots, at_start=True), served_by_sglang(slots, at_start=False)
    uneven: dict[str, list[float]] = {"sglang": [], "start": [], "rebalanced": []}
    for l, placement in enumerate(slots):
        ours = chosen("rank-nearest-start", placement)
        for e in range(EXPERTS):
            holders = np.flatnonzero((placement == e).any(1)).tolist()
            near, far = near_and_far(holders)
            np.testing.assert_array_equal(ours[near, e], start[l, near, e])
            if far:
                for name, served in (("sglang", start[l]), ("start", ours), ("rebalanced", rebalanced[l])):
                    counts = [int((served[far, e] == g).sum()) for g in holders]
                    uneven[name].append(float(np.var(counts)))
    mean = {name: float(np.mean(values)) for name, values in uneven.items()}
    assert mean["start"] == pytest.approx(mean["sglang"], rel=0.15)
    assert mean["rebalanced"] < 0.5 * mean["sglang"]


def test_dead_rank_of_sglang_keeps_every_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 15 of 32 is dead. Our plugin lets SGLang's own elastic function answer, and so no expert is lost."""
    folder, typed = "srt/eplb/eplb_algorithms", {"torch": torch, "Tuple": tuple, "Optional": Optional}
    packing = functions(
        source("sglang", f"{folder}/deepseek.py"),
        {"balanced_packing", "replicate_experts", "rebalance_experts_hierarchical"}, **typed,
    )  # fmt: skip
    elastic = functions(
        source("sglang", f"{folder}/elasticity_aware.py"), {"rebalance_experts"},
        rebalance_experts_hierarchical=packing.rebalance_experts_hierarchical, **typed,
    )  # fmt: skip
    alive = torch.ones(32, dtype=torch.int32)
    alive[15] = 0
    manager = SimpleNamespace(instance=lambda: SimpleNamespace(active_ranks=alive))
    engine = functions(
        source("sglang", f"{folder}/__init__.py"), {"EplbAlgorithm", "rebalance_experts"}, Enum=Enum, auto=auto,
        deepseek=None, deepseek_vec=None, elasticity_aware=elastic, ElasticEPStateManager=manager, **typed,
    )  # fmt: skip
    monkeypatch.setattr(for_sglang, "_of_engine", engine.rebalance_experts)
    given = {"tokens_per_expert": torch.rand(3, 2, 256), "num_physical_experts": 288, "num_local_physical_experts": 9,
             "num_groups": 8, "num_nodes": 4}  # fmt: skip
    ours = for_sglang.rebalance_experts(**given, algorithm=engine.EplbAlgorithm.elasticity_aware)
    for mine, theirs in zip(
        ours, engine.rebalance_experts(**given, algorithm=engine.EplbAlgorithm.elasticity_aware), strict=True
    ):
        assert torch.equal(mine, theirs)
    for row in ours[0].reshape(2, 32, 9):
        assert set(row[alive.bool()].ravel().tolist()) == set(range(256))
    flat = for_sglang.rebalance_experts(**given, algorithm=SimpleNamespace(name="deepseek"))
    lost = [set(range(256)) - set(row[alive.bool()].ravel().tolist()) for row in flat[0].reshape(2, 32, 9)]
    assert all(lost)  # what the elastic function is for


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
    server = {
        "device": "cpu", "enable_two_batch_overlap": False, "expert_distribution_recorder_mode": mode,
        "expert_distribution_recorder_buffer_size": 4, "should_report_expert_balancedness": lambda: False,
        "eplb_min_rebalancing_utilization_threshold": 1.0,
    }  # fmt: skip
    gather, record = (
        with_server_args(getattr(engine, name), location, 0, **server) for name in (gatherer, accumulator)
    )
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


def test_tokens_of_sglang_over_http(tmp_path: Path) -> None:
    """The detokenizer encodes the experts of each request."""
    name = "_b64_encode_per_request"
    engine = functions(source("sglang", "srt/managers/detokenizer_manager.py"), {name}, pybase64=base64)
    dense = torch.from_numpy(with_dense_zeros(LOGICAL, DENSE).astype(np.int32))
    requests = getattr(engine, name)([dense[:6], None, dense[6:]])
    lines = [json.dumps({"meta_info": {"routed_experts": text}}) for text in requests if text is not None]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    trace = read_trace([tmp_path / "r.jsonl"], "sglang", ReadOptions(model=MODEL))
    assert isinstance(trace, TokenTrace)
    np.testing.assert_array_equal(trace.experts, LOGICAL)
    assert trace.seq_lens.tolist() == [6, 4]


def test_tokens_of_vllm_over_http(tmp_path: Path) -> None:
    engine = functions(
        source("vllm", "utils/serial_utils.py"), {"numpy2base64"}, np=np, io=io, pybase64=base64
    )  # fmt: skip
    text = engine.numpy2base64(with_dense_zeros(LOGICAL, DENSE).astype(np.uint8))
    (tmp_path / "r.json").write_text(json.dumps({"choices": [{"routed_experts": text}]}))
    trace = read_trace([tmp_path / "r.json"], "vllm", ReadOptions(model=MODEL))
    assert isinstance(trace, TokenTrace)
    np.testing.assert_array_equal(trace.experts, LOGICAL)


def test_recorded_loads_of_tensorrt_llm(tmp_path: Path) -> None:
    """Two ranks, two iterations; an iteration outside of the range is not recorded."""
    env = SimpleNamespace(get_env=lambda name: str(tmp_path / "statistics"))
    engine = functions(
        source("tensorrt_llm", "_torch/expert_statistic.py"), {"ExpertStatistic"}, torch=torch, os=os, json=json,
        safetensors=SimpleNamespace(torch=pytest.importorskip("safetensors.torch")), envs=env,
        logger=logging.getLogger(),
    )  # fmt: skip
    experts = torch.from_numpy(LOGICAL.astype(np.int64))
    for rank in range(2):
        recorder = engine.ExpertStatistic(rank, 5, 7)
        for i in range(4, 8):
            recorder._set_iter(i)
            for layer in range(LAYERS):
                recorder._set_layer(DENSE + layer)
                recorder._maybe_add_info(EXPERTS, experts[5 * rank : 5 * rank + i - 3, layer])
    trace = read_trace([tmp_path / "statistics"], None, ReadOptions())
    assert isinstance(trace, LoadTrace)
    assert trace.layer_ids.tolist() == [2, 3, 4]
    expected = [
        [
            np.bincount(np.concatenate([LOGICAL[:n, layer], LOGICAL[5 : 5 + n, layer]]).ravel(), minlength=EXPERTS)
            for layer in range(LAYERS)
        ]
        for n in (2, 3)
    ]
    np.testing.assert_array_equal(trace.counts, expected)


# Plans, loaded by the engines

MODEL = ModelSpec("small", LAYERS, EXPERTS, TOP_K, 64, 32, n_dense=DENSE)


def written(name: str, engine: str, folder: Path) -> tuple[Path, np.ndarray]:
    """A plan file, and its placement."""
    placement = np.stack([full_placement(seed) for seed in range(LAYERS)]).astype(np.int16)
    plan = EnginePlan(placement, np.array(MODEL.layer_ids), MODEL)
    write_plan(folder / name, plan, engine)
    return folder / name, placement


@pytest.mark.parametrize("name", ["plan.json", "plan.pt"])
def test_sglang_loads_the_plan(name: str, tmp_path: Path) -> None:
    path, placement = written(name, "sglang", tmp_path)
    stub = SimpleNamespace
    moe = stub(
        init_expert_location=str(path), ep_num_redundant_experts=GPUS * SLOTS - EXPERTS, ep_dispatch_algorithm=None,
        moe_a2a_backend="none",
    )  # fmt: skip
    sizes = stub(num_layers=DENSE + LAYERS, num_logical_experts=EXPERTS, num_groups=None)
    names = {
        "ExpertLocationMetadata", "compute_initial_expert_location_metadata", "_compute_logical_to_all_physical_map",
        "_pad_nested_array",
    }  # fmt: skip
    engine = functions(
        source("sglang", "srt/eplb/expert_location.py"), names, torch=torch, F=torch.nn.functional, json=json,
        Path=Path, dataclass=dataclass, logger=logging.getLogger(), get_exec=lambda: stub(moe=moe),
        get_parallel=lambda: stub(ep_size=GPUS, elastic_ep_initial_size=None),
        get_device=lambda: stub(device="cpu"),
        ModelConfigForExpertLocation=stub(from_model_config=lambda config: sizes),
    )  # fmt: skip
    loaded = with_server_args(
        engine.compute_initial_expert_location_metadata, None, 0, init_expert_location=str(path), device="cpu"
    )
    np.testing.assert_array_equal(loaded.physical_to_logical_map[DENSE:].reshape(LAYERS, GPUS, SLOTS), placement)
    assert loaded.num_local_physical_experts == SLOTS
    assert int(loaded.logical_to_all_physical_map_num_valid.min()) >= 1


def test_vllm_ascend_loads_the_plan(tmp_path: Path) -> None:
    path, placement = written("plan.json", "vllm-ascend", tmp_path)
    engine = functions(
        source("vllm_ascend", "eplb/core/eplb_utils.py"), {"expert_file_to_tensor"}, torch=torch, json=json,
        logger=logging.getLogger(),
    )  # fmt: skip
    for layer in range(LAYERS):
        loaded, slots = engine.expert_file_to_tensor(path, layer)
        np.testing.assert_array_equal(loaded, placement[layer])
        assert slots == GPUS * SLOTS


def test_tensorrt_llm_loads_the_plan(tmp_path: Path) -> None:
    pydantic, yaml = pytest.importorskip("pydantic"), pytest.importorskip("yaml")
    path, placement = written("plan.yaml", "tensorrt-llm", tmp_path)

    class Strict(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config = pydantic.ConfigDict(extra="forbid")

    engine = functions(
        source("tensorrt_llm", "llmapi/llm_args.py"), {"MoeLoadBalancerConfig"}, StrictBaseModel=Strict,
        Field=pydantic.Field, PrivateAttr=pydantic.PrivateAttr,
    )  # fmt: skip
    engine.MoeLoadBalancerConfig.model_rebuild(_types_namespace={"Optional": Optional, "Dict": dict, "List": list})
    loaded = engine.MoeLoadBalancerConfig(**yaml.safe_load(path.read_text()))
    for rank in range(GPUS):
        loaded.setup(rank, GPUS)
        for layer in range(LAYERS):
            row = loaded.get_layer_initial_global_assignments(DENSE + layer)
            assert row[loaded.slot_start : loaded.slot_end] == placement[layer, rank].tolist()
