"""Engines: launch lines, warnings, plans read back for a model, memory, differences, ``verify`` and ``diff``."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clustergym import cli
from clustergym.moe_placement.profiles import PROFILES, profiles_of
from clustergym.moe_placement.specs import MODELS, ClusterSpec, ModelSpec, get_model
from clustergym.plans.engines import (
    ENGINES,
    EnginePlan,
    PlanError,
    compare_plans,
    detect_engine,
    launch,
    load_plan,
    memory_use,
    write_plan,
)
from clustergym.plans.engines.sglang import HOOKED

TOY = ModelSpec("toy", 3, 8, 2, 1000, 10, n_dense=2, kv_bytes=3000, architecture="DeepseekV3ForCausalLM")
CLUSTER = ClusterSpec("c", 2, 2, intra_gb_s=100, inter_gb_s=10)
SUFFIX = {name: engine.suffixes[0] for name, engine in ENGINES.items()}


def plan_of(
    model: ModelSpec = TOY, n_gpus: int = 4, slots: int = 3, layers: tuple[int, ...] = (), seed: int = 0
) -> Any:
    """A legal plan: a random permutation, then replicas that a GPU does not hold yet."""
    rng = np.random.default_rng(seed)
    layer_ids = layers or model.layer_ids
    placement = np.full((len(layer_ids), n_gpus, slots), -1, np.int16)
    for layer in placement:
        # Expert i of the permutation goes to GPU i mod G, so every GPU has room for all of its share.
        for i, e in enumerate(rng.permutation(model.n_experts)):
            layer[i % n_gpus, i // n_gpus] = e
        for g, s in np.argwhere(layer < 0):
            layer[g, s] = rng.choice(np.setdiff1d(np.arange(model.n_experts), layer[g]))
    return EnginePlan(placement, np.array(layer_ids), model)


class TestLaunch:
    def test_sglang_prints_the_mode_that_the_plan_assumes(self) -> None:
        start = launch(Path("plan.json"), plan_of(), "sglang", "sglang-decode", n_nodes=2)
        assert start.command == (
            "--init-expert-location plan.json --ep-num-redundant-experts 4 --tp-size 4 --dp-size 4 --ep-size 4 "
            "--nnodes 2 --enable-dp-attention --moe-a2a-backend deepep --deepep-mode low_latency "
            "--ep-dispatch-algorithm static"
        )
        assert start.warnings == ()
        newer = launch(Path("plan.json"), plan_of(), "sglang", "sglang-decode-0.5.16", n_nodes=2)
        assert newer.command == start.command
        prefill = launch(Path("plan.json"), plan_of(), "sglang", "sglang-prefill")
        assert "--deepep-mode normal" in prefill.command
        assert prefill.profile.name == "sglang-prefill"

    def test_tensorrt_llm_needs_attention_data_parallelism(self) -> None:
        start = launch(Path("plan.yaml"), plan_of(), "tensorrt-llm")
        settings = yaml.safe_load(start.command.split("options.yaml: ", 1)[1])
        assert settings == {
            "enable_attention_dp": True,
            "moe_config": {"backend": "WIDEEP", "load_balancer": "plan.yaml"},
        }
        assert "--tp_size 4 --ep_size 4" in start.command

    def test_vllm_and_vllm_ascend(self) -> None:
        start = launch(Path("p.json"), plan_of(), "vllm", n_nodes=2)
        assert "--data-parallel-size 4 --data-parallel-size-local 2 --enable-expert-parallel" in start.command
        assert "--all2all-backend allgather_reducescatter" in start.command
        assert json.loads(re.search(r"--eplb-config '(.*?)'", start.command)[1]) == {"num_redundant_experts": 4}  # type: ignore[index]
        assert "deepep_low_latency" in launch(Path("p.json"), plan_of(), "vllm", "vllm-deepep").command
        ascend = launch(Path("p.json"), plan_of(), "vllm-ascend")
        config = json.loads(re.search(r"--additional-config '(.*?)'", ascend.command)[1])  # type: ignore[index]
        assert config == {"eplb_config": {"expert_map_path": "p.json"}}
        assert any("v0.25.1" in warning for warning in ascend.warnings)
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in ascend.command

    def test_a_shell_reads_every_path_as_it_is(self) -> None:
        path = "my plan's $(touch x): #1.json"
        words = {engine: shlex.split(launch(Path(path), plan_of(), engine).command) for engine in ENGINES}
        assert words["sglang"][:2] == ["--init-expert-location", path]
        assert words["vllm"][-1] == f"CLUSTERGYM_EPLB_PLAN={path}"
        ascend = words["vllm-ascend"][words["vllm-ascend"].index("--additional-config") + 1]
        assert json.loads(ascend.removesuffix(",")) == {"eplb_config": {"expert_map_path": path}}
        settings = launch(Path(path), plan_of(), "tensorrt-llm").command.split("options.yaml: ", 1)[1]
        assert yaml.safe_load(settings)["moe_config"]["load_balancer"] == path
        static = shlex.split(launch(Path(path), plan_of(), "vllm").warnings[1])[-1]
        assert json.loads(static) == {"num_redundant_experts": 4, "initial_expert_map_path": path}

    @pytest.mark.parametrize("model", ["mixtral-8x7b", "olmoe-1b-7b", "llama-4-maverick"])
    def test_models_without_the_hook_are_warned_about(self, model: str) -> None:
        spec = replace(TOY, architecture=get_model(model).architecture)
        warnings = launch(Path("plan.json"), plan_of(spec), "sglang").warnings
        assert len(warnings) == 1
        assert warnings[0].startswith(f"SGLang ignores the plan: its class {spec.architecture}")

    def test_models_with_the_hook_are_not(self) -> None:
        unhooked = {"mixtral-8x7b", "mixtral-8x22b", "olmoe-1b-7b", "llama-4-maverick", "tiny-moe", "small-moe"}
        for name in set(MODELS) - unhooked:
            assert MODELS[name].architecture in HOOKED

    def test_every_engine_has_a_profile_and_others_are_refused(self) -> None:
        assert {profile.name for engine in ENGINES for profile in profiles_of(engine)} == set(PROFILES)
        with pytest.raises(
            ValueError, match="vllm does not serve with profile 'sglang-decode'; its profiles are: vllm"
        ):
            launch(Path("p.json"), plan_of(), "vllm", "sglang-decode")
        with pytest.raises(ValueError, match="4 GPUs do not divide over 3 nodes"):
            launch(Path("p.json"), plan_of(), "vllm", n_nodes=3)


class TestMTP:
    MODEL = replace(TOY, n_mtp=1)

    def test_tensorrt_llm_gets_a_row_even_if_the_layer_was_not_recorded(self, tmp_path: Path) -> None:
        plan = plan_of(self.MODEL)
        write_plan(tmp_path / "p.yaml", plan, "tensorrt-llm")
        rows = yaml.safe_load((tmp_path / "p.yaml").read_text())["initial_global_assignments"]
        assert list(rows) == [2, 3, 4, 5]
        assert rows[5] == [i % 8 for i in range(12)]
        assert any(
            "MTP layers [5]" in warning for warning in launch(tmp_path / "p.yaml", plan, "tensorrt-llm").warnings
        )

    def test_a_recorded_mtp_layer_is_planned(self, tmp_path: Path) -> None:
        plan = plan_of(self.MODEL, layers=(2, 3, 4, 5))
        write_plan(tmp_path / "p.yaml", plan, "tensorrt-llm")
        rows = yaml.safe_load((tmp_path / "p.yaml").read_text())["initial_global_assignments"]
        assert rows[5] == plan.placement[3].ravel().tolist()
        assert not launch(tmp_path / "p.yaml", plan, "tensorrt-llm").warnings
        # The other engines place a draft model on their own.
        for engine, count in (("sglang", 5), ("vllm", 3), ("vllm-ascend", 3)):
            path = tmp_path / f"{engine}.json"
            write_plan(path, plan, engine)
            assert len(ENGINES[engine].read(path)) == count

    def test_layers_beyond_the_mtp_layers_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match="layer 5 is not an MoE layer of toy"):
            write_plan(tmp_path / "p.yaml", plan_of(TOY, layers=(2, 3, 4, 5)), "tensorrt-llm")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [TOY, replace(TOY, n_dense=1, layers=(1, 3, 5), n_hidden_layers=8)])
def test_written_plans_are_loaded_again(engine: str, model: ModelSpec, tmp_path: Path) -> None:
    plan = plan_of(model)
    path = tmp_path / f"p{SUFFIX[engine]}"
    write_plan(path, plan, engine)
    assert detect_engine(path) == engine
    loaded = load_plan(path, engine, model, 4)
    np.testing.assert_array_equal(loaded.placement, plan.placement)
    assert loaded.layer_ids.tolist() == list(model.layer_ids)
    with pytest.raises(PlanError, match="12 slots per layer do not divide over 5 GPUs"):
        load_plan(path, engine, model, 5)


def test_plans_of_more_than_254_gpus(tmp_path: Path) -> None:
    model = get_model("deepseek-v3")
    plan = plan_of(replace(model, n_layers=2), 320, 1)
    write_plan(tmp_path / "p.json", plan, "sglang")
    loaded = load_plan(tmp_path / "p.json", "sglang", plan.model, 320)
    np.testing.assert_array_equal(loaded.placement, plan.placement)


def test_vllm_ascend_takes_devices_in_the_order_of_the_list(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_plan(path, plan_of(), "vllm-ascend")
    document = json.loads(path.read_text())
    document["layer_list"][1]["device_list"].reverse()
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="not listed in the order 0, 1, 2"):
        load_plan(path, "vllm-ascend", TOY, 4)


def test_memory_by_hand() -> None:
    """3 layers × 3 slots × 60 kB per expert; 12 − 8 = 4 redundant slots on 4 GPUs: one per GPU and layer."""
    use = memory_use(plan_of())
    assert use.experts_gb == pytest.approx(9 * 60e3 / 1e9)
    assert use.redundant_gb == pytest.approx(3 * 60e3 / 1e9)
    assert use.kv_tokens_lost == 60  # 180 kB / 3 kB
    assert memory_use(plan_of(replace(TOY, kv_bytes=0))).kv_tokens_lost is None


class TestDifference:
    def change(self, old: list[Any], new: list[Any]) -> Any:
        model = replace(TOY, n_layers=1)
        plans = [EnginePlan(np.array([rows], np.int16), np.array([2]), model) for rows in (old, new)]
        return compare_plans(*plans, CLUSTER)

    START = [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]

    def test_reordered_slots_do_not_move(self) -> None:
        assert self.change(self.START, [row[::-1] for row in self.START]).moves == 0

    def test_by_hand(self) -> None:
        """GPU 0 gets 3 from GPU 1 (same node); GPU 3 gets 4 and 5 from the other node: 120 kB at 10 GB/s = 12 µs."""
        change = self.change(self.START, [[0, 1, 3], [3, 4, 5], [6, 7, 0], [4, 2, 5]])
        assert (change.moves, change.between_nodes, change.layers, change.slots) == (3, 2, 1, 12)
        assert change.n_bytes == 3 * 60e3
        assert change.seconds == pytest.approx(120e3 / 10e9)
        text = (
            "3 of 12 experts move (2 of them between nodes), in 1 layer: 0.00 GB, 0.012 ms if all GPUs receive at once"
        )
        assert change.describe() == text
        assert replace(change, seconds=2.345).duration == "2.35 s"

    def test_from_the_own_node_if_possible(self) -> None:
        """Expert 0 lies on both nodes: GPU 1 gets it from GPU 0."""
        change = self.change(self.START, [[0, 1, 2], [3, 4, 0], [6, 7, 5], [1, 2, 3]])
        assert (change.moves, change.between_nodes) == (2, 1)

    def test_refused(self) -> None:
        with pytest.raises(PlanError, match="a plan holds expert 8"):
            self.change(self.START, [[0, 1, 8], [3, 4, 5], [6, 7, 0], [1, 2, 3]])
        with pytest.raises(PlanError, match="plans of 4 and 2 GPUs"):
            self.change(self.START, [[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model, a cluster and two plans."""
    fields = {"n_layers": 3, "n_experts": 8, "top_k": 2, "hidden": 1000, "intermediate": 10, "n_dense": 2}
    (tmp_path / "toy.yaml").write_text(
        yaml.safe_dump(fields | {"architecture": "MixtralForCausalLM", "kv_bytes": 3000})
    )
    (tmp_path / "c.yaml").write_text("n_nodes: 2\ngpus_per_node: 2\nlinks: {intra_gb_s: 100, inter_gb_s: 10}\n")
    write_plan(tmp_path / "a.json", plan_of(seed=1), "sglang")
    write_plan(tmp_path / "b.yaml", plan_of(seed=2), "tensorrt-llm")
    return tmp_path


def run(*words: Any) -> int:
    return cli.main([str(word) for word in words])


def test_verify_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", files / "toy.yaml", "--cluster", files / "c.yaml")
    assert run("verify", files / "a.json", *model) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is a legal plan of sglang for toy on c: 3 layers, 4 GPUs × 3 slots, 4 redundant experts per layer" in said
    assert "(room for the KV cache of 60 tokens)" in said
    assert "--moe-a2a-backend deepep" in said
    assert "profile: sglang-prefill" in said
    assert "warning: SGLang ignores the plan" in said
    assert run("verify", files / "b.yaml", *model) == 0
    assert "plan of tensorrt-llm" in capsys.readouterr().out
    document = json.loads((files / "a.json").read_text())
    document["physical_to_logical_map"][3][1] = document["physical_to_logical_map"][3][0]
    (files / "a.json").write_text(json.dumps(document))
    assert run("verify", files / "a.json", *model) == 2
    assert re.search(r"rule '(once per GPU|every expert somewhere)'.*layer 3", capsys.readouterr().err)
    assert run("verify", files / "absent.json", *model) == 2
    assert "no plan at" in capsys.readouterr().err
    assert run("verify", files / "toy.yaml", *model) == 2
    assert "expected exactly the keys" in capsys.readouterr().err


def test_verify_refuses_a_plan_that_does_not_fit_into_memory(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(files / "c.yaml", "a") as file:
        file.write("memory_gb: 0.0005\n")
    assert run("verify", files / "a.json", "--model", files / "toy.yaml", "--cluster", files / "c.yaml") == 2
    assert "more than the 0.0005 GB of a GPU of c" in " ".join(capsys.readouterr().err.split())


def test_verify_warns_about_missing_mtp_rows(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(files / "toy.yaml", "a") as file:
        file.write("n_mtp: 1\n")
    assert run("verify", files / "b.yaml", "--model", files / "toy.yaml", "--cluster", files / "c.yaml") == 0
    assert "the file has no row for MTP layers [5]" in " ".join(capsys.readouterr().out.split())


def test_diff_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", files / "toy.yaml", "--cluster", files / "c.yaml")
    assert run("diff", files / "a.json", files / "a.json", *model) == 0
    assert "0 of 36 experts move" in capsys.readouterr().out
    assert run("diff", files / "a.json", files / "b.yaml", *model, "--json", files / "d.json") == 0
    found = json.loads((files / "d.json").read_text())
    expected = compare_plans(plan_of(seed=1), plan_of(seed=2), CLUSTER)
    assert (found["moves"], found["seconds"]) == (expected.moves, expected.seconds)
    assert expected.moves > 0
    (files / "x.json").write_text("{}")
    assert run("diff", files / "a.json", files / "x.json", *model) == 2
    assert "not a plan of sglang" in capsys.readouterr().err


def test_models_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in MODELS)
    assert run("models", "llama-4-maverick") == 0
    assert "24 (1–47, every 2) of 48" in capsys.readouterr().out
    assert run("models", "deepseek-v3") == 0
    said = capsys.readouterr().out
    assert "58 (3–60) of 61" in said
    assert "8, a token uses at most 4" in said
    assert run("models", files / "toy.yaml") == 0
    assert "MixtralForCausalLM" in capsys.readouterr().out
    assert run("models", "nope") == 2


def test_clusters_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clusters") == 0
    said = capsys.readouterr().out
    for gpu in ("h20", "h200", "b200", "gb200", "mi300x", "ascend910c"):
        assert gpu in said
    assert run("clusters", "gb200-nvl72") == 0
    assert "72: 1 node of 72" in capsys.readouterr().out
    assert run("clusters", files / "c.yaml") == 0
    assert "10 GB/s per direction" in capsys.readouterr().out


@pytest.mark.skipif("CLUSTERGYM_SGLANG_SOURCE" not in os.environ, reason="needs SGLang's sources")
def test_hooked_classes_are_those_of_the_sources() -> None:
    """CLUSTERGYM_SGLANG_SOURCE=…/python/sglang: fails when SGLang adds or removes the hook of a class."""
    bases: dict[str, set[str]] = {}
    hooked: set[str] = set()
    for path in Path(os.environ["CLUSTERGYM_SGLANG_SOURCE"]).rglob("srt/models/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8-sig"))):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(b.id for b in node.bases if isinstance(b, ast.Name))
                methods = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
                hooked |= {node.name} if "get_model_config_for_expert_location" in methods else set()
    while grown := {name for name, parents in bases.items() if parents & hooked} - hooked:
        hooked |= grown
    assert hooked >= HOOKED
    assert not {"MixtralForCausalLM", "OlmoeForCausalLM", "Llama4ForConditionalGeneration"} & hooked
