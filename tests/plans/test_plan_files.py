"""Plan files: the schema and the rules of each engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.moe_placement.specs import ModelSpec
from clustergym.plans.engines import ENGINES, EnginePlan, PlanError, check_plan, launch, read_plan, write_plan
from plans import SUFFIX

MODEL = ModelSpec("toy", n_layers=3, n_experts=8, top_k=2, hidden=64, intermediate=32, n_dense=2)


def small_plan(n_gpus: int = 4, slots: int = 3, seed: int = 0) -> EnginePlan:
    """A legal plan: every expert once, then replicas, no expert twice on a GPU."""
    rng = np.random.default_rng(seed)
    placement = np.full((MODEL.n_layers, n_gpus, slots), -1, np.int16)
    for layer in placement:
        for e in rng.permutation(MODEL.n_experts):
            free = [g for g in range(n_gpus) if (layer[g] < 0).any()]
            g = rng.choice(free)
            layer[g, np.flatnonzero(layer[g] < 0)[0]] = e
        for g, s in np.argwhere(layer < 0):
            layer[g, s] = rng.choice(np.setdiff1d(np.arange(MODEL.n_experts), layer[g]))
    return EnginePlan(placement, np.arange(2, 5), MODEL)


@settings(max_examples=25, deadline=None)
@given(engine=st.sampled_from([*ENGINES, "sglang.pt"]), seed=st.integers(0, 1000), slots=st.integers(2, 8))
def test_written_plans_are_read_back(
    engine: str, seed: int, slots: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine, _, suffix = engine.partition(".")
    plan = small_plan(4, slots, seed)
    path = tmp_path_factory.mktemp("plan") / f"plan{'.' + suffix if suffix else SUFFIX[engine]}"
    write_plan(path, plan, engine)
    rows = read_plan(path, engine)
    # SGLang and TensorRT-LLM count dense layers, the others only MoE layers.
    first = {"sglang": 2, "tensorrt-llm": 2, "vllm-ascend": 0, "vllm": 0}[engine]
    for i, placed in enumerate(plan.placement):
        assert rows[first + i] == placed.reshape(-1).tolist()
    assert len(rows) == (5 if engine == "sglang" else 3)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_sglang_schema(tmp_path: Path) -> None:
    plan = small_plan()
    write_plan(tmp_path / "plan.json", plan, "sglang")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert list(document) == ["physical_to_logical_map"]
    table = document["physical_to_logical_map"]
    assert [len(row) for row in table] == [12] * 5
    assert table[0] == table[1] == [i % 8 for i in range(12)]  # rows of dense layers
    for l, row in enumerate(table[2:]):
        for p, e in enumerate(row):
            assert plan.placement[l, p // 3, p % 3] == e  # slot p is on GPU p // slots
    write_plan(tmp_path / "plan.pt", plan, "sglang")
    loaded = torch.load(tmp_path / "plan.pt", weights_only=True)
    assert isinstance(loaded["physical_to_logical_map"], torch.Tensor)
    assert loaded["physical_to_logical_map"].tolist() == table
    assert launch(Path("plan.json"), plan, "sglang").command.startswith(
        "--init-expert-location plan.json --ep-num-redundant-experts 4 --tp-size 4 "
    )


def test_tensorrt_schema(tmp_path: Path) -> None:
    plan = small_plan()
    write_plan(tmp_path / "plan.yaml", plan, "tensorrt-llm")
    document = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert list(document) == ["num_slots", "layer_updates_per_iter", "initial_global_assignments"]
    assert (document["num_slots"], document["layer_updates_per_iter"]) == (12, 0)
    assert list(document["initial_global_assignments"]) == [2, 3, 4]
    for row in document["initial_global_assignments"].values():
        assert set(row) == set(range(8))


def test_ascend_and_vllm_schema(tmp_path: Path) -> None:
    plan = small_plan()
    write_plan(tmp_path / "a.json", plan, "vllm-ascend")
    document = json.loads((tmp_path / "a.json").read_text())
    assert list(document) == ["moe_layer_count", "layer_list"]
    assert document["moe_layer_count"] == 3
    for i, layer in enumerate(document["layer_list"]):
        assert (layer["layer_id"], layer["device_count"]) == (i, 4)
        assert [d["device_id"] for d in layer["device_list"]] == [0, 1, 2, 3]
        assert [d["device_expert"] for d in layer["device_list"]] == plan.placement[i].tolist()
    write_plan(tmp_path / "v.json", plan, "vllm")
    assert json.loads((tmp_path / "v.json").read_text()) == plan.placement.reshape(3, -1).tolist()


def test_layers_are_written_in_the_order_of_the_engine(tmp_path: Path) -> None:
    plan = small_plan()
    reversed_plan = EnginePlan(plan.placement[::-1], plan.layer_ids[::-1], MODEL)
    for engine in ENGINES:
        for name, one in (("a", plan), ("b", reversed_plan)):
            write_plan(tmp_path / f"{name}{SUFFIX[engine]}", one, engine)
        assert read_plan(tmp_path / f"a{SUFFIX[engine]}", engine) == read_plan(tmp_path / f"b{SUFFIX[engine]}", engine)


def broken(change: str) -> EnginePlan:
    plan = small_plan()
    placement, layers = plan.placement.copy(), plan.layer_ids
    if change == "empty":
        placement[1, 2, 0] = -1
    elif change == "twice":
        placement[1, 2, 0] = placement[1, 2, 1]
    elif change == "unknown":
        placement[1, 2, 0] = 8
    elif change == "missing":
        e = placement[1, 0, 0]
        for g, s in np.argwhere(placement[1] == e):
            placement[1, g, s] = np.setdiff1d(np.arange(8), [*placement[1, g], e])[0]
    elif change == "layer":
        placement, layers = placement[:2], layers[:2]
    elif change == "dense":
        layers = np.array([1, 2, 3])
    elif change == "names":
        layers = layers[:2]
    elif change == "slots":
        placement = placement.reshape(3, -1)
    elif change == "room":
        placement = placement[:, :2]
    return EnginePlan(placement, layers, MODEL)


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("empty", "rule 'no empty slot': layer 3, GPU 2"),
        ("twice", "rule 'once per GPU': layer 3, GPU 2 holds expert"),
        ("unknown", "rule 'known experts': layer 3, GPU 2 holds expert 8"),
        ("missing", r"rule 'every expert somewhere': layer 3: expert \d is on none of GPU 0 … 3"),
        ("layer", r"rule 'every MoE layer': layer 4 has no placement \(1 of 3"),
        ("dense", "rule 'every MoE layer': layer 4"),
        ("names", "rule 'one row per layer'"),
        ("slots", "rule 'slots divide over GPUs'"),
        ("room", "rule 'room for every expert': 6 slots for the 8 experts"),
    ],
)
def test_refused_plan_names_the_rule_and_leaves_no_file(engine: str, change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        write_plan(tmp_path / f"plan{SUFFIX[engine]}", broken(change), engine)
    assert not list(tmp_path.iterdir())
    check_plan(small_plan())


def test_wrong_suffixes_engines_and_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensorrt-llm reads a plan from \.yaml or \.yml, found 'plan.json'"):
        write_plan(tmp_path / "plan.json", small_plan(), "tensorrt-llm")
    with pytest.raises(ValueError, match="unknown engine 'tgi'; the engines are: sglang, tensorrt-llm"):
        write_plan(tmp_path / "plan.json", small_plan(), "tgi")
    with pytest.raises(ValueError, match="no plan at"):
        read_plan(tmp_path / "absent.json", "vllm")


@pytest.mark.parametrize(
    ("engine", "text", "message"),
    [
        ("sglang", '{"physical_to_logical_map": [[0]], "x": 1}', "expected exactly the key"),
        ("sglang", '{"physical_to_logical_map": [[0], [0, 1]]}', "different numbers of slots"),
        ("sglang", '{"physical_to_logical_map": [[0.5]]}', "something other than expert ids"),
        ("sglang", "[", "not valid JSON"),
        ("vllm", "{}", "expected a list of layers"),
        ("vllm", "[]", "no layers"),
        ("vllm-ascend", "{}", "not an expert map"),
        ("vllm-ascend",
         '{"moe_layer_count": 2, "layer_list": [{"device_list": [{"device_id": 0, "device_expert": [0]}]}]}',
         "does not match the lists"),
        ("tensorrt-llm", "a: [", "not valid YAML"),
        ("tensorrt-llm", "num_slots: 1", "expected exactly the key"),
        ("tensorrt-llm", "num_slots: 2\nlayer_updates_per_iter: 0\ninitial_global_assignments: {3: [0]}",
         "layer 3 has 1 slots"),
    ],
)  # fmt: skip
def test_files_that_are_not_plans_are_refused(engine: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{SUFFIX[engine]}"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_plan(path, engine)
