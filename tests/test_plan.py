"""Plans: the schema and rules of each engine, planning on one part and measuring on the other, the command."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import TokenTrace, cli
from clustergym.moe_placement import Simulator, Window
from clustergym.moe_placement.engines import (
    ENGINES,
    EnginePlan,
    PlanError,
    check_plan,
    how_to_load,
    read_plan,
    write_plan,
)
from clustergym.moe_placement.evaluation import PASSES_OF_A_PERMANENT_PLAN
from clustergym.moe_placement.planner_registry import make_planner, planners_on_loads
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.planning import LoadWindow, Observed, fill_empty, make_plan, model_of
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.specs import ModelSpec, get_cluster
from clustergym.traces import LoadTrace, SyntheticConfig, synthetic_trace

MODEL = ModelSpec("toy", n_layers=3, n_experts=8, top_k=2, hidden=64, intermediate=32, n_dense=2)
SUFFIX = {name: engine.suffixes[0] for name, engine in ENGINES.items()}


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


# Writers


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
    assert how_to_load(Path("plan.json"), plan, "sglang").startswith(
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


# Planning


def small_trace(**changes: Any) -> TokenTrace:
    options: dict[str, Any] = {
        "n_tokens": 3000, "n_layers": 32, "first_layer": 0, "n_experts": 8, "top_k": 2, "mean_seq_len": 30,
        "popularity_skew": 0.8, "model": "mixtral-8x7b",
    }  # fmt: skip
    return synthetic_trace(SyntheticConfig(**(options | changes)), seed=1)


CLUSTER = get_cluster("h800-2x4", slots_per_gpu=2)
SIMULATOR = Simulator("mixtral-8x7b", CLUSTER, passes_per_window=PASSES_OF_A_PERMANENT_PLAN)


def test_split_without_seed_keeps_the_order_of_each_domain() -> None:
    trace = TokenTrace(
        np.arange(12)[:, None] % 4,
        seq_lens=[1, 2, 3, 1, 2, 3],
        domains=np.array(["a"] * 3 + ["b"] * 3),  # type: ignore[arg-type]
    )
    before, after = trace.split(0.5, seed=None)
    assert before.seq_lens.tolist() == [1, 2, 1, 2]
    assert after.seq_lens.tolist() == [3, 3]
    np.testing.assert_array_equal(before.experts[:, 0, 0], [0, 1, 2, 2, 3, 0])
    with pytest.raises(ValueError, match="one sequence"):
        TokenTrace(np.zeros((4, 1), int)).split(0.5, seed=None)


def test_held_out_traffic_is_not_planned_on() -> None:
    """Other held-out traffic gives the same plans, but other times."""
    trace = small_trace()
    before, after = trace.split(0.5, seed=None)
    other = TokenTrace(
        7 - after.experts.astype(int), n_experts=8, layer_ids=after.layer_ids, seq_lens=after.seq_lens,
        domains=after.domains, model=after.model,
    )  # fmt: skip
    plans = []
    for rest in (after, other):
        joined = TokenTrace.concat([before, rest])
        np.testing.assert_array_equal(joined.split(0.5, seed=None)[1].experts, rest.experts)
        plans.append(make_plan(joined, SIMULATOR, "bottleneck", window_tokens=256, windows=2))
    for name in ("static", "eplb", "bottleneck"):
        np.testing.assert_array_equal(plans[0].outcomes[name].placement, plans[1].outcomes[name].placement)
    assert plans[0].best.served_us != plans[1].best.served_us


def test_results_match_the_simulator() -> None:
    trace = small_trace()
    plan = make_plan(trace, SIMULATOR, "anneal", window_tokens=256, windows=3, seconds=0.5)
    before, _ = trace.split(0.5, seed=None)
    eplb = EPLB(SIMULATOR)
    np.testing.assert_array_equal(plan.outcomes["eplb"].placement, eplb.pack(before.loads().astype(float)))
    for o in plan.outcomes.values():
        assert len(o.window_us) == 3
        assert o.served_us == pytest.approx(o.layer_us.sum(1).mean())
        assert o.pairs.sum(1) == pytest.approx(np.full(32, 512.0))
        assert (o.placement >= 0).all()
    mine, theirs = np.array(plan.best.window_us), np.array(plan.outcomes["eplb"].window_us)
    assert plan.versus("eplb")[0] == pytest.approx((mine.mean() - theirs.mean()) / theirs.mean())
    assert plan.versus("anneal") == (0.0, 0.0)
    assert plan.best.served_us < plan.outcomes["static"].served_us
    assert 0.4 < plan.best.decision_s < 10


def observed_of(trace: TokenTrace, simulator: Simulator) -> Observed:
    return Observed(trace, simulator, 256, 4096, 0)


def test_empty_slot_gets_the_replica_that_helps_most() -> None:
    """One empty slot per layer, compared with brute force over all legal replicas, on the same tokens."""
    trace = small_trace(n_layers=4, n_tokens=600)
    observed = observed_of(trace, SIMULATOR)
    placement = SIMULATOR.static(4)
    placement[:, 3, 1] = -1
    filled = fill_empty(SIMULATOR, observed, placement)
    assert (filled >= 0).all()
    np.testing.assert_array_equal(np.delete(filled.reshape(4, -1), 7, 1), np.delete(placement.reshape(4, -1), 7, 1))
    window = Window.whole(trace, SIMULATOR.n_gpus)
    times = np.full((4, 8), np.inf)
    for e in range(8):
        trial = placement.copy()
        trial[:, 3, 1] = e
        if e != placement[0, 3, 0]:
            times[:, e] = SIMULATOR.evaluate(window, trial).time_us
    chosen = times[np.arange(4), filled[:, 3, 1]]
    np.testing.assert_allclose(chosen, times.min(1))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), empty=st.integers(1, 8), counts=st.booleans())
def test_filled_placements_are_legal(seed: int, empty: int, counts: bool) -> None:
    rng = np.random.default_rng(seed)
    trace = small_trace(n_layers=2, n_tokens=300)
    part = LoadTrace(trace.loads(), trace.layer_ids, 2, "mixtral-8x7b") if counts else trace
    placement: Placement = np.repeat(np.arange(8, dtype=np.int16).reshape(1, 8, 1), 2, axis=0)
    placement = np.concatenate([placement, np.roll(placement, 3, axis=1)], axis=2)
    for l in range(2):
        placement[l, rng.permutation(8)[:empty], 1] = -1
    filled = fill_empty(SIMULATOR, Observed(part, SIMULATOR, 256, 4096, 0), placement)
    assert (filled >= 0).all()
    assert (filled[placement >= 0] == placement[placement >= 0]).all()
    SIMULATOR.check(filled)


def test_planners_of_few_operations_start_from_eplb(tmp_path: Path) -> None:
    trace = small_trace(n_layers=4, n_tokens=1200)
    plan = make_plan(trace, SIMULATOR, "bottleneck", window_tokens=256, windows=2)
    moved = (plan.best.placement != plan.outcomes["eplb"].placement).any(2).sum(1)
    assert (moved < SIMULATOR.n_gpus).all()  # most GPUs keep what EPLB gave them
    policy = make_plan(trace, SIMULATOR, "policy", window_tokens=256, windows=2)
    assert (policy.best.placement >= 0).all()
    with pytest.raises(OSError, match="absent"):
        make_plan(trace, SIMULATOR, "policy", options={"checkpoint": tmp_path / "absent.pt"})


# Counts only


def counts_trace(steps: int = 6) -> LoadTrace:
    counts = np.random.default_rng(4).integers(1, 100, (steps, 32, 8))
    counts[:, :, 0] += 300
    return LoadTrace(counts, np.arange(32), 2, "mixtral-8x7b", "counted")


def test_planners_on_loads_accept_counts_and_others_say_what_is_missing() -> None:
    assert planners_on_loads() == [
        "static", "round-robin", "eplb-once", "eplb", "eplb-hierarchical", "eplb-ema", "eplb-threshold", "incremental",
        "flashlb", "swift", "hot-everywhere",
    ]  # fmt: skip
    for name in ("anneal", "grouping", "bottleneck", "swap-greedy"):
        with pytest.raises(ValueError, match=rf"'{name}' needs to know which experts a token used together.*eplb"):
            make_plan(counts_trace(), SIMULATOR, name)
        # A library user who passes such a window gets the same explanation.
        with pytest.raises(ValueError, match="only the load of each expert is known, not which experts"):
            make_planner(name, SIMULATOR).plan([LoadWindow(counts_trace().loads(), 100)], SIMULATOR.static(32))


def test_times_on_counts_match_a_calculation_by_hand() -> None:
    """Two experts on eight GPUs with one slot each."""
    model = ModelSpec("two", 1, 2, 1, 64, 32, kernel_start_us=10, kernel_expert_us=5, kernel_pair_us=1)
    simulator = Simulator(model, get_cluster("h800-1x8", slots_per_gpu=1))
    trace = LoadTrace(np.array([[[30, 10]], [[60, 20]], [[10, 30]]]), name="two")
    plan = make_plan(trace, simulator, "eplb", share=0.67, window_tokens=80)
    # Planned on 90 : 30, so expert 0 gets six GPUs and expert 1 two. Held out: 20 and 60 of 80 tokens, so 20 / 6 and
    # 60 / 2 per GPU.
    assert np.bincount(plan.best.placement.reshape(-1)).tolist() == [6, 2]
    assert plan.best.window_us == [pytest.approx(10 + 5 + 30)]
    assert not plan.exact
    assert plan.best.copies is None


def test_models_of_load_traces_are_checked() -> None:
    assert model_of(counts_trace(), None).name == "mixtral-8x7b"
    with pytest.raises(ValueError, match="32 layers × 8 experts, but gpt-oss-20b has 24 × 32"):
        model_of(counts_trace(), "gpt-oss-20b")
    with pytest.raises(ValueError, match="do not name their model"):
        model_of(dataclasses.replace(counts_trace(), model=None), None)
    with pytest.raises(ValueError, match="one step of counts cannot be split"):
        make_plan(counts_trace(1), SIMULATOR, "eplb")


def test_load_traces_are_saved_and_checked(tmp_path: Path) -> None:
    trace = counts_trace()
    again = LoadTrace.load(trace.save(tmp_path / "t.npz"))
    np.testing.assert_array_equal(again.counts, trace.counts)
    assert (again.top_k, again.model, again.layer_ids.tolist()) == (2, "mixtral-8x7b", list(range(32)))
    for counts, message in [
        (np.ones((2, 2)) * 0.5, "dtype float64"),
        (np.ones((2, 2, 2, 2), int), "shape"),
        (np.zeros((0, 2, 2), int), "none of them 0"),
        (-np.ones((1, 2, 2), int), "step 0, layer 0, expert 0 has a count of -1"),
        (np.array([[[1, 1], [0, 0]]]), "layer 1 has no token in any step"),
    ]:
        with pytest.raises(ValueError, match=message):
            LoadTrace(counts)
    with pytest.raises(ValueError, match="layer_ids must be distinct"):
        LoadTrace(np.ones((1, 2, 2), int), layer_ids=np.array([1, 1]))


# The command


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_trace().save(tmp_path_factory.mktemp("traces") / "tiny.npz")


SMALL = ["--cluster", "h800-2x4", "--window-tokens", "128", "--windows", "2", "--plan-tokens", "512"]
SMALL += ["--seconds", "0.3"]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_command_writes_what_the_engine_reads(
    engine: str, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, results = tmp_path / "new" / f"plan{SUFFIX[engine]}", tmp_path / "new" / "results.json"
    arguments = ["plan", str(trace_file), *SMALL, "--planner", "anneal", "--engine", engine]
    arguments += ["-o", str(out), "--json", str(results)]
    assert cli.main(arguments) == 0
    rows = read_plan(out, engine)
    assert len(rows) == 32
    for row in rows.values():
        assert set(row) == set(range(8))
        gpus = np.array(row).reshape(8, -1)
        assert all(len(set(gpu)) == len(gpu) for gpu in gpus.tolist())
    document = json.loads(results.read_text())
    assert [p["planner"] for p in document["planners"]] == ["static", "eplb", "anneal"]
    shown = " ".join(capsys.readouterr().out.split())
    mean = document["versus"]["eplb"]["mean"]
    assert f"anneal against EPLB on held-out traffic: {100 * mean:+.1f}" in shown
    assert str(out) in shown.replace(" ", "")
    assert sorted(p.name for p in out.parent.iterdir()) == sorted(["results.json", out.name])


def test_command_plans_on_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = counts_trace().save(tmp_path / "counts.npz")
    report = tmp_path / "report.html"
    arguments = ["plan", str(source), *SMALL, "--planner", "eplb", "--report", str(report)]
    arguments += ["-o", str(tmp_path / "p.json")]
    assert cli.main(arguments) == 0
    assert "counts do not show the traffic" in " ".join(capsys.readouterr().out.split())
    assert '"exact":false' in report.read_text()
    assert cli.main(["plan", str(source), *SMALL, "--planner", "anneal", "-o", str(tmp_path / "q.json")]) == 2
    assert "counts only" in capsys.readouterr().err
    assert not (tmp_path / "q.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--planner", "magic"], "unknown planner 'magic'"),
        (["--planner", "oracle"], "makes no plan to load"),
        (["--engine", "tgi"], "unknown engine 'tgi'"),
        (["--engine", "tensorrt-llm"], r"tensorrt-llm reads a plan from \.yaml or \.yml"),
        (["--checkpoint", "x.pt"], "--checkpoint is for the planners policy and policy-guided, not for 'eplb'"),
        (["--report", "r.pdf"], r"expected a file that ends in \.html"),
        (["--model", "deepseek-v3"], "top-8 of 256"),
        (["--share", "1"], "share is 1.0"),
        (["--windows", "0"], "windows is 0"),
        (["--slots", "0"], "slots_per_gpu is 0"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], message: str, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    base = [] if "--planner" in arguments else ["--planner", "eplb"]
    assert cli.main(["plan", str(trace_file), *SMALL, *base, *arguments, "-o", "plan.json"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_trace_without_all_layers_is_refused_before_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustergym.cli.plan.make_plan", lambda *_, **__: pytest.fail("planned anyway"))
    path = small_trace(n_layers=4).save(tmp_path / "t.npz")
    assert cli.main(["plan", str(path), *SMALL, "--planner", "eplb", "-o", str(tmp_path / "plan.json")]) == 2
    assert "rule 'every MoE layer': layer 4 has no placement (28 of 32" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "plan.json").exists()
