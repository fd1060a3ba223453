"""Planners inside engines: the interface of DeepSeek's EPLB, of vLLM's policies and of SGLang's algorithms."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clustergym.plans.integrations.sglang as for_sglang
import clustergym.plans.integrations.vllm as for_vllm
from clustergym.moe_placement import ClusterSpec, ModelSpec
from clustergym.plans.integrations.eplb import keep_in_place, plan_slots, rebalance_experts
from clustergym.plans.integrations.planners import check_name, slots_of
from clustergym.plans.meta import PlanMeta
from eplb_reference import balancedness, eplb

SHAPES = [(12, 16, 4, 2, 8), (64, 80, 8, 4, 16), (32, 64, 32, 4, 32), (256, 288, 8, 4, 32), (64, 72, 1, 2, 8)]
"""experts, replicas, groups, nodes, GPUs"""


def loads(n_layers: int, n_experts: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).lognormal(0, 1, (n_layers, n_experts)) * 1000)


def check_maps(result: tuple[torch.Tensor, ...], n_experts: int, n_replicas: int) -> None:
    """The three maps of DeepSeek's interface describe the same placement."""
    slots, where, count = (tensor.numpy() for tensor in result)
    assert {tensor.dtype for tensor in result} == {torch.int64}
    assert slots.shape[1] == n_replicas
    assert (count.sum(1) == n_replicas).all()
    assert (count >= 1).all()
    assert where.shape == (*count.shape, count.max())
    for l in range(len(slots)):
        for e in range(n_experts):
            assert sorted(where[l, e][where[l, e] >= 0]) == np.flatnonzero(slots[l] == e).tolist()
            assert count[l, e] == (slots[l] == e).sum()


@pytest.mark.parametrize(("experts", "replicas", "groups", "nodes", "gpus"), SHAPES)
def test_drop_in_for_deepseeks_eplb(experts: int, replicas: int, groups: int, nodes: int, gpus: int) -> None:
    weight = loads(3, experts)
    result = rebalance_experts(weight, replicas, groups, nodes, gpus)
    check_maps(result, experts, replicas)
    for row, load in zip(result[0].numpy(), weight.float().numpy().astype(float), strict=True):
        placed = row.reshape(gpus, -1)
        assert all(len(set(gpu)) == len(gpu) for gpu in placed.tolist())
        upstream = balancedness(eplb(load, replicas, groups, nodes, gpus), load)
        assert balancedness(placed, load) >= upstream - 1e-6
        if groups % nodes == 0:  # the experts of a group are on one node
            size = experts // groups
            for group in range(groups):
                held = np.isin(placed, np.arange(group * size, (group + 1) * size))
                assert len({g // (gpus // nodes) for g in np.flatnonzero(held.any(1))}) == 1


def test_example_of_deepseeks_readme() -> None:
    """Two layers, 12 experts, 16 replicas, 4 groups, 2 nodes, 8 GPUs. Their packing has busiest GPUs of 165 and 197."""
    weight = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    slots, _, count = rebalance_experts(weight, 16, 4, 2, 8)
    for row, load, copies in zip(slots.numpy(), weight.numpy().astype(float), count.numpy(), strict=True):
        ours = (load / copies)[row].reshape(8, 2).sum(1).max()
        upstream = eplb(load, 16, 4, 2, 8)
        theirs = (load / np.bincount(upstream.ravel(), minlength=12))[upstream].sum(1).max()
        assert ours <= theirs + 1e-9


def test_more_slots_than_experts_on_a_gpu() -> None:
    check_maps(rebalance_experts(loads(2, 4), 16, 1, 1, 2), 4, 16)


def test_zero_and_broken_loads() -> None:
    check_maps(rebalance_experts(torch.zeros(2, 8), 12, 1, 1, 4), 8, 12)
    check_maps(rebalance_experts(torch.full((2, 8), float("nan")), 12, 1, 1, 4), 8, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((13, 1, 1, 4), "num_replicas is 13: expected a multiple of num_gpus = 4"),
        ((4, 1, 1, 4), "num_replicas is 4: .* at least 8 experts"),
        ((12, 1, 3, 4), "num_gpus is 4: expected a multiple of num_nodes = 3"),
        ((12, 0, 1, 4), "num_groups is 0"),
        ((12, 3, 1, 4), "8 experts do not divide into num_groups = 3"),
    ],
)
def test_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebalance_experts(loads(1, 8), *arguments)


def test_few_experts_move() -> None:
    """The same loads give the same slots; a plan whose GPUs are renamed within their nodes moves nothing."""
    weight = loads(4, 64).numpy()
    slots = plan_slots(weight, 80, 8, 4, 16)
    np.testing.assert_array_equal(plan_slots(weight, 80, 8, 4, 16, slots), slots)
    rng = np.random.default_rng(0)
    renamed = slots.reshape(4, 4, 4, 5)[:, :, rng.permutation(4)][..., rng.permutation(5)].reshape(4, 80)
    np.testing.assert_array_equal(keep_in_place(slots, renamed, 4, 16), renamed)
    drifted = weight * rng.lognormal(0, 0.1, weight.shape)
    moved = [
        int((plan != slots).sum())
        for plan in (plan_slots(drifted, 80, 8, 4, 16), plan_slots(drifted, 80, 8, 4, 16, slots))
    ]
    assert moved[1] < 0.8 * moved[0]
    kept = plan_slots(drifted, 80, 8, 4, 16, slots)
    for row, load in zip(kept, drifted, strict=True):
        plain = plan_slots(load[None], 80, 8, 4, 16)[0]
        assert balancedness(row.reshape(16, 5), load) == pytest.approx(balancedness(plain.reshape(16, 5), load))


class TestVLLM:
    def test_policy(self) -> None:
        weight = loads(2, 64)
        old = torch.from_numpy(plan_slots(loads(2, 64, seed=1).numpy(), 80, 8, 4, 16))
        slots = for_vllm.ClusterGymPolicy.rebalance_experts(weight, 80, 8, 4, 16, old)
        assert slots.shape == (2, 80)
        assert (slots == old).sum() > (for_vllm.ClusterGymPolicy.rebalance_experts(weight, 80, 8, 4, 16) == old).sum()

    def test_plan_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        plan = plan_slots(loads(2, 64, seed=2).numpy(), 80, 1, 1, 16)
        (tmp_path / "plan.json").write_text(json.dumps(plan.tolist()))
        monkeypatch.setenv("CLUSTERGYM_EPLB_PLAN", str(tmp_path / "plan.json"))
        slots = for_vllm.ClusterGymPolicy.rebalance_experts(loads(2, 64), 80, 8, 4, 16)
        np.testing.assert_array_equal(slots.numpy(), plan)
        again = for_vllm.ClusterGymPolicy.rebalance_experts(loads(2, 64), 80, 8, 4, 16, slots.flip(1).contiguous())
        assert [set(gpu) for gpu in again.numpy()[0].reshape(16, 5).tolist()] == [
            set(gpu) for gpu in plan[0].reshape(16, 5).tolist()
        ]
        # A draft model has other sizes: it is balanced as usual, and the log says so.
        assert for_vllm.ClusterGymPolicy.rebalance_experts(loads(1, 32), 48, 1, 1, 16).shape == (1, 48)
        assert "2 layers of 80 slots, but the engine asks for 1 of 48: EPLB instead" in caplog.text
        # The same number of slots on fewer GPUs: an expert would be twice on a GPU.
        with pytest.raises(
            ValueError, match=r"layer 0 has expert \d+ twice on GPU \d+ of 8: .* another number of GPUs"
        ):
            for_vllm.ClusterGymPolicy.rebalance_experts(loads(2, 64), 80, 8, 1, 8)
        plan[0, 0] = plan[0, 1]
        (tmp_path / "plan.json").write_text(json.dumps(np.where(plan == 5, 6, plan).tolist()))
        with pytest.raises(ValueError, match="does not hold each of the 64 experts"):
            for_vllm.ClusterGymPolicy.rebalance_experts(loads(2, 64), 80, 8, 4, 16)

    def test_moves_are_paced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A plan file is reached layer by layer, and the layer with the worst balance comes first."""
        plan = plan_slots(loads(3, 64, seed=2).numpy(), 80, 1, 1, 16)
        (tmp_path / "plan.json").write_text(json.dumps(plan.tolist()))
        monkeypatch.setenv("CLUSTERGYM_EPLB_PLAN", str(tmp_path / "plan.json"))
        weight = loads(3, 64, seed=2)
        weight[1] = 0  # a layer without traffic
        served = torch.arange(80).remainder(64).repeat(3, 1)
        rebalance = for_vllm.ClusterGymPolicy.rebalance_experts
        whole = rebalance(weight, 80, 1, 1, 16, served)
        moves = (whole != served).sum(1)
        monkeypatch.setenv("CLUSTERGYM_EPLB_MAX_MOVES", str(int(moves.max()) + 3))
        gain = [
            1 / balancedness(before.reshape(16, 5), load) - 1 / balancedness(after.reshape(16, 5), load)
            for before, after, load in zip(served[[0, 2]].numpy(), whole[[0, 2]].numpy(), weight[[0, 2]].numpy(),
                                           strict=True)
        ]  # fmt: skip
        first = max((0, 2), key=lambda layer: gain[layer // 2] / int(moves[layer]))
        for reached in ([first], sorted([first, 2 - first]), [0, 1, 2]):
            served = rebalance(weight, 80, 1, 1, 16, served)
            assert [layer for layer in range(3) if torch.equal(served[layer], whole[layer])] == reached
        monkeypatch.setenv("CLUSTERGYM_EPLB_MAX_MOVES", "1")  # fewer than any layer needs
        again = rebalance(weight, 80, 1, 1, 16, torch.arange(80).remainder(64).repeat(3, 1))
        assert (again == whole).all(1).sum() == 1
        monkeypatch.setenv("CLUSTERGYM_EPLB_MAX_MOVES", "few")
        with pytest.raises(ValueError, match="CLUSTERGYM_EPLB_MAX_MOVES is 'few': expected a number of experts"):
            rebalance(weight, 80, 1, 1, 16, served)

    def test_each_phase_gets_its_plan(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = ModelSpec("m", 2, 64, 4, 64, 64)
        for seed, phase in enumerate(("prefill", "decode")):
            slots = plan_slots(loads(2, 64, seed=seed).numpy(), 80, 1, 1, 16)
            (tmp_path / f"plan-{phase}.json").write_text(json.dumps(slots.tolist()))
            meta = PlanMeta("sglang", f"sglang-{phase}", False, model, ClusterSpec("c", 4, 4))
            meta.write(tmp_path / f"plan-{phase}.json")
        monkeypatch.setenv("CLUSTERGYM_EPLB_PLAN", str(tmp_path / "plan-{phase}.json"))
        rebalance = for_vllm.ClusterGymPolicy.rebalance_experts
        with pytest.raises(ValueError, match="set CLUSTERGYM_EPLB_PHASE to prefill or decode"):
            rebalance(loads(2, 64), 80, 1, 1, 16)
        for seed, phase in enumerate(("prefill", "decode")):
            monkeypatch.setattr(for_vllm, "phase_of_instance", lambda phase=phase: phase)
            expected = plan_slots(loads(2, 64, seed=seed).numpy(), 80, 1, 1, 16)
            np.testing.assert_array_equal(rebalance(loads(2, 64), 80, 1, 1, 16).numpy(), expected)
        assert caplog.text == ""
        monkeypatch.setenv("CLUSTERGYM_EPLB_PLAN", str(tmp_path / "plan-prefill.json"))
        rebalance(loads(2, 64), 80, 1, 1, 16)
        assert "plan-prefill.json was made for sglang-prefill, but this instance serves decode" in caplog.text
        # 8 GPUs have the same number of slots. The file beside the plan says that it was made for 16.
        with pytest.raises(ValueError, match=r"plan-prefill\.json was made for 16 GPUs, but the engine has 8"):
            rebalance(loads(2, 64), 80, 1, 1, 8)
        monkeypatch.setenv("CLUSTERGYM_EPLB_PHASE", "both")
        with pytest.raises(ValueError, match="CLUSTERGYM_EPLB_PHASE"):
            rebalance(loads(2, 64), 80, 1, 1, 16)

    def test_registers_only_if_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = types.ModuleType("vllm.distributed.eplb.policy")
        policy.EPLB_POLICIES = {"default": object}  # type: ignore[attr-defined]
        parent = types.ModuleType("vllm.distributed.eplb")
        parent.policy = policy  # type: ignore[attr-defined]
        for module in (types.ModuleType("vllm"), types.ModuleType("vllm.distributed"), parent, policy):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.delenv("CLUSTERGYM_EPLB", raising=False)
        monkeypatch.delenv("CLUSTERGYM_EPLB_PLAN", raising=False)
        for_vllm.register()
        assert {"default": object} == policy.EPLB_POLICIES  # type: ignore[attr-defined]
        monkeypatch.setenv("CLUSTERGYM_EPLB", "1")
        for_vllm.register()
        assert {"default": for_vllm.ClusterGymPolicy} == policy.EPLB_POLICIES  # type: ignore[attr-defined]


class TestSGLang:
    def test_algorithm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = torch.stack([loads(2, 64, seed=s) for s in range(3)])
        named = types.SimpleNamespace(name="deepseek_hierarchical")
        arguments = {"tokens_per_expert": counts, "num_physical_experts": 80, "num_local_physical_experts": 5}
        result = for_sglang.rebalance_experts(**arguments, num_groups=8, num_nodes=4, algorithm=named)
        check_maps(result, 64, 80)
        expected = rebalance_experts(counts.sum(0), 80, 8, 4, 16)
        assert torch.equal(result[0], expected[0])
        flat = types.SimpleNamespace(name="deepseek")
        result = for_sglang.rebalance_experts(**arguments, num_groups=None, num_nodes=4, algorithm=flat)
        assert torch.equal(result[0], rebalance_experts(counts.sum(0), 80, 1, 1, 16)[0])

    @pytest.mark.parametrize("plan", [False, True])
    def test_elastic_algorithms_and_lost_ranks_are_the_engine_s_business(
        self, plan: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ours would leave experts without a live copy: it does not know which ranks are dead."""
        module = types.ModuleType("sglang.srt.eplb.eplb_algorithms")
        asked: list[dict[str, Any]] = []
        module.rebalance_experts = lambda **given: asked.append(given) or "the engine's own"  # type: ignore[attr-defined, func-returns-value]
        parent = types.ModuleType("sglang.srt.eplb")
        parent.eplb_algorithms = module  # type: ignore[attr-defined]
        for each in (types.ModuleType("sglang"), types.ModuleType("sglang.srt"), parent, module):
            monkeypatch.setitem(sys.modules, each.__name__, each)
        monkeypatch.setenv("CLUSTERGYM_EPLB", "1")
        if plan:
            slots = plan_slots(loads(2, 64).numpy(), 80, 1, 1, 16)
            (tmp_path / "plan.json").write_text(json.dumps(slots.tolist()))
            monkeypatch.setenv("CLUSTERGYM_EPLB_PLAN", str(tmp_path / "plan.json"))
        for_sglang.register()
        for_sglang.register()  # SGLang may load plugins twice
        given = {"tokens_per_expert": loads(2, 64)[None], "num_physical_experts": 80, "num_local_physical_experts": 5,
                 "num_groups": None, "num_nodes": 4}  # fmt: skip
        elastic, flat = (types.SimpleNamespace(name=name) for name in ("elasticity_aware", "deepseek"))
        ours = module.rebalance_experts
        assert ours(**given, algorithm=elastic) == "the engine's own"
        alive = torch.ones(16, dtype=torch.int32)
        check_maps(ours(**given, algorithm=flat, active_ranks=alive), 64, 80)
        alive[15] = 0
        assert ours(**given, algorithm=flat, active_ranks=alive) == "the engine's own"
        assert [call["algorithm"] for call in asked] == [elastic, flat]
        assert asked[1]["active_ranks"] is alive
        assert "active_ranks" not in asked[0]


class TestOtherPlanners:
    """``CLUSTERGYM_EPLB`` names a planner that needs loads only."""

    @pytest.mark.parametrize("name", ["flashlb", "swift", "hot-everywhere", "eplb-hierarchical", "round-robin"])
    def test_legal_slots_in_both_engines(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CLUSTERGYM_EPLB", name)
        counts = torch.stack([loads(2, 64, seed=s) for s in range(3)])
        flat = types.SimpleNamespace(name="deepseek")
        result = for_sglang.rebalance_experts(counts, 80, 5, None, 4, flat)
        check_maps(result, 64, 80)
        slots = for_vllm.ClusterGymPolicy.rebalance_experts(counts.sum(0), 80, 8, 4, 16, result[0])
        for row in [*result[0].tolist(), *slots.tolist()]:
            assert set(row) == set(range(64))
            assert all(len(set(row[g : g + 5])) == 5 for g in range(0, 80, 5))

    def test_hottest_experts_are_everywhere(self) -> None:
        weight = loads(2, 12).numpy()
        slots = slots_of("hot-everywhere", weight, 20, 1, 1, 4)  # 5 slots for 3 experts: two hot ones
        for row, load in zip(slots.reshape(2, 4, 5), weight, strict=True):
            assert all(set(np.argsort(-load)[:2]) <= set(gpu) for gpu in row.tolist())

    def test_experts_that_stay_on_a_gpu_keep_their_slot(self) -> None:
        old = plan_slots(loads(2, 64, seed=1).numpy(), 80, 1, 1, 16)
        new = slots_of("swift", loads(2, 64).numpy(), 80, 1, 1, 16, old)
        for before, after in zip(old.reshape(32, 5), new.reshape(32, 5), strict=True):
            assert (before == after).sum() == len(set(before) & set(after))

    @pytest.mark.parametrize("name", ["anneal", "static", "nope"])
    def test_others_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"planner '{name}' cannot run inside an engine: give one of round-robin"):
            check_name(name)


def arguments_of(source: Path, function: str) -> list[str]:
    for node in ast.walk(ast.parse(source.read_text("utf-8-sig"))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in node.args.args if argument.arg != "cls"]
    raise AssertionError(f"{source} has no {function}")


def own_arguments(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


@pytest.mark.skipif("CLUSTERGYM_VLLM_SOURCE" not in os.environ, reason="needs vLLM's sources")
def test_interface_of_vllm() -> None:
    """CLUSTERGYM_VLLM_SOURCE=…/vllm, a checkout or an installed wheel: fails when its interface changes."""
    folder = Path(os.environ["CLUSTERGYM_VLLM_SOURCE"]) / "distributed" / "eplb" / "policy"
    mine = own_arguments(for_vllm.ClusterGymPolicy.rebalance_experts)
    for name in ("abstract", "default"):
        assert arguments_of(folder / f"{name}.py", "rebalance_experts") == mine
    assert "EPLB_POLICIES" in (folder / "__init__.py").read_text()
    assert "EPLB_POLICIES[" in (folder.parent / "eplb_state.py").read_text()
    # Their default policy itself, on the same loads.
    package = types.ModuleType("vllm_policy")
    package.__path__ = [str(folder)]
    sys.modules["vllm_policy"] = package
    spec = importlib.util.find_spec("vllm_policy.default")
    assert spec is not None
    assert spec.loader is not None
    default = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(default)
    for experts, replicas, groups, nodes, gpus in SHAPES:
        weight = loads(2, experts)
        theirs = default.DefaultEplbPolicy.rebalance_experts(weight, replicas, groups, nodes, gpus)
        ours = for_vllm.ClusterGymPolicy.rebalance_experts(weight, replicas, groups, nodes, gpus)
        assert theirs.shape == ours.shape
        for one, other, load in zip(ours.numpy(), theirs.numpy(), weight.numpy(), strict=True):
            assert balancedness(one.reshape(gpus, -1), load) >= balancedness(other.reshape(gpus, -1), load) - 1e-6


@pytest.mark.skipif("CLUSTERGYM_SGLANG_SOURCE" not in os.environ, reason="needs SGLang's sources")
def test_interface_of_sglang() -> None:
    """CLUSTERGYM_SGLANG_SOURCE=…/python/sglang: fails when its interface changes."""
    folder = Path(os.environ["CLUSTERGYM_SGLANG_SOURCE"]) / "srt"
    mine = own_arguments(for_sglang.rebalance_experts)
    assert arguments_of(folder / "eplb" / "eplb_algorithms" / "__init__.py", "rebalance_experts") == mine
    assert "eplb_algorithms.rebalance_experts(" in (folder / "eplb" / "expert_location.py").read_text()
    assert '"sglang.srt.plugins"' in (folder / "plugins" / "__init__.py").read_text()


@pytest.mark.skipif("CLUSTERGYM_EPLB_SOURCE" not in os.environ, reason="needs DeepSeek's eplb.py")
def test_interface_of_deepseek() -> None:
    source = Path(os.environ["CLUSTERGYM_EPLB_SOURCE"])
    assert arguments_of(source, "rebalance_experts") == own_arguments(rebalance_experts)
    spec = importlib.util.spec_from_file_location("deepseek_eplb", source)
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    for experts, replicas, groups, nodes, gpus in SHAPES:
        weight = loads(2, experts)
        upstream = theirs.rebalance_experts(weight, replicas, groups, nodes, gpus)
        check_maps(upstream, experts, replicas)
        for row, load in zip(upstream[0].numpy(), weight.numpy(), strict=True):
            # The reference of the tests is their algorithm.
            expected = balancedness(eplb(load, replicas, groups, nodes, gpus), load)
            assert balancedness(row.reshape(gpus, -1), load) == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif("CLUSTERGYM_VLLM_SOURCE" not in os.environ, reason="needs vLLM's sources")
def test_phase_in_vllm() -> None:
    """What the plugin reads to know its phase."""
    folder = Path(os.environ["CLUSTERGYM_VLLM_SOURCE"])
    exported = (folder / "distributed" / "kv_transfer" / "__init__.py").read_text()
    assert "get_kv_transfer_group" in exported
    assert "has_kv_transfer_group" in exported
    connector = (folder / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "base.py").read_text()
    assert "self._kv_transfer_config = vllm_config.kv_transfer_config" in connector
    roles = (folder / "config" / "kv_transfer.py").read_text()
    assert '"kv_producer"' in roles
    assert '"kv_consumer"' in roles


@pytest.mark.skipif("CLUSTERGYM_SGLANG_SOURCE" not in os.environ, reason="needs SGLang's sources")
def test_phase_and_served_slots_in_sglang() -> None:
    """What the plugin reads to know its phase, and what is served."""
    folder = Path(os.environ["CLUSTERGYM_SGLANG_SOURCE"]) / "srt"
    server = (folder / "server_args.py").read_text()
    assert "def get_global_server_args()" in server
    assert 'disaggregation_mode not in ("null", "prefill", "decode")' in server
    location = (folder / "eplb" / "expert_location.py").read_text()
    assert "def get_global_expert_location_metadata()" in location
    assert "physical_to_logical_map: torch.Tensor" in location
