"""The policy planners: their observations, plans, policy files and the pretrained policy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from clustergym import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.moe_placement import ClusterSpec, ModelSpec, PlacementBatch, PlacementConfig, Simulator, Stream, Window
from clustergym.moe_placement.evaluation import Protocol, compare
from clustergym.moe_placement.kernels.cost import layer_time, migration_time
from clustergym.moe_placement.kernels.operations import apply_operation, resolve
from clustergym.moe_placement.kernels.state import CLOCK_LAYER, OP_ILLEGAL, OP_NOTHING, TIME_OBSERVED_START
from clustergym.moe_placement.planners.anneal import Anneal
from clustergym.moe_placement.planners.search import with_even_homes
from clustergym.moe_placement.policy.export import (
    NETWORK_VERSION,
    PRETRAINED,
    PolicySettings,
    load_policy,
    read_policy,
    save_policy,
)
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.planner import Policy, PolicyGuided
from clustergym.moe_placement.policy.view import UNIT, PolicyView
from clustergym.training import CheckpointError, save_checkpoint
from test_ppo_moe_marl import exported, make_args, marl

MODEL = ModelSpec("small", 2, 12, 3, 1024, 256)
CLUSTER = ClusterSpec("2x2", 2, 2, 4)


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    return synthetic_trace(SyntheticConfig(n_tokens=3000, n_layers=2, n_experts=12, top_k=3, mean_seq_len=40), seed=2)


def view_of(trace: TokenTrace, envs: int = 3, homes: str = "even", norm: int = 4) -> PolicyView:
    config = PlacementConfig(
        trace=trace, cluster=CLUSTER, model=MODEL, windows=2, window_tokens=128, ops_per_layer=3, start="eplb"
    )
    view = PolicyView(PlacementBatch(config, envs), homes, norm)
    view.batch.seed(np.arange(envs))
    view.reset()
    return view


def random_steps(view: PolicyView, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        expert = torch.multinomial(view.inputs()["expert_mask"].float(), 1, generator=generator).squeeze(-1)
        view.look(expert)
        view.step(expert, torch.multinomial(view.legal(expert).float(), 1, generator=generator).squeeze(-1))


def test_even_homes_change_the_observed_window_only(trace: TokenTrace) -> None:
    even, served = view_of(trace, homes="even"), view_of(trace, homes="served")
    for _ in range(4):  # into the second layer
        homes = even.batch.sim["origin"][:, 0].numpy()
        assert (homes == np.arange(128) % 4).all()
        np.testing.assert_array_equal(even.batch.sim["rows"], served.batch.sim["rows"])
        # The next window, and so the reward, does not change.
        np.testing.assert_array_equal(even.batch.sim["origin"][:, 1], served.batch.sim["origin"][:, 1])
        nothing = even.batch.obs["placement"][:, 0].argmax(-1)
        for view in (even, served):
            view.step(torch.zeros(3, dtype=torch.int64), nothing)
    assert (served.batch.sim["origin"][:, 0].numpy() != np.arange(128) % 4).any()


@pytest.mark.parametrize("norm", [0, 4])
def test_look_ahead_equals_the_effect_of_each_operation(trace: TokenTrace, norm: int) -> None:
    view = view_of(trace, envs=1, norm=norm)
    random_steps(view, 2)
    batch = view.batch
    sim, costs, network = batch._sim, batch.rules_host.costs, batch.rules_host.network
    unit = float(batch.episode["times_us"][0, TIME_OBSERVED_START])
    for e in range(batch.n_experts):
        parts = view.look_many(torch.tensor([[e]]))[0, 0].numpy() / UNIT

        def times() -> np.ndarray:
            smooth, true = (layer_time(sim, 0, 0, costs, network, d, 1.0) for d in (view.norm_log2, -1))
            return np.array([smooth, true, migration_time(sim, 0, costs)])

        before = times()
        for node in range(12):
            kind, source, target, victim = resolve(sim, 0, e, node)
            if kind in (OP_NOTHING, OP_ILLEGAL):
                assert (parts[node] == 0).all()
                continue
            apply_operation(sim, 0, e, source, target, victim, network, 1)
            np.testing.assert_allclose(parts[node], (before - times()) / unit, atol=1e-6)
            apply_operation(sim, 0, e, target, source, victim, network, 1)


def test_an_expert_without_operation_is_masked_until_the_placement_changes(trace: TokenTrace) -> None:
    view = view_of(trace, envs=2)
    expert = view.inputs()["expert_mask"].int().argmax(-1)
    stay = view.batch.obs["placement"][view.rows, expert].argmax(-1)
    view.look(expert)
    view.step(expert, stay)
    assert not bool(view.inputs()["expert_mask"][view.rows, expert].any())
    assert bool((view.memory[view.rows, expert, 1] == 1).all())
    other = view.inputs()["expert_mask"].int().argmax(-1)
    legal = view.legal(other).clone()
    legal[:, :4] &= view.batch.obs["placement"][view.rows, other] == 0
    view.step(other, legal.int().argmax(-1))
    assert bool(view.inputs()["expert_mask"][view.rows, expert].all())


def seen(launcher: str) -> dict[str, np.ndarray]:
    """Observations of a few steps that cross the end of a layer, on the given launcher."""
    from clustergym.moe_placement.launchers import cpu, cuda

    made = synthetic_trace(n_tokens=120, n_layers=2, n_experts=6, top_k=2, n_domains=2, mean_seq_len=12.0, seed=3)
    model = ModelSpec("tiny", 2, 6, 2, 64, 64, kernel_start_us=4, kernel_expert_us=1, kernel_pair_us=0.2)
    config = PlacementConfig(
        made, ClusterSpec("tiny", 2, 2, 2), model, windows=1, window_tokens=16, ops_per_layer=2, start="eplb"
    )
    batch = PlacementBatch(config, 2)
    batch.launcher = {"cpu": cpu, "cuda": cuda}[launcher]
    view = PolicyView(batch)
    batch.seed(np.array([5, 6]))
    view.reset()
    arrays = {}
    for step in range(3):
        expert = view.inputs()["expert_mask"].int().argmax(-1)
        arrays[f"look{step}"] = view.look(expert).numpy().copy()
        reward, _ = view.step(expert, view.legal(expert).int().argmax(-1))
        arrays[f"reward{step}"] = reward.numpy().copy()
        arrays |= {f"{key}{step}": each.numpy().copy() for key, each in view.inputs().items()}
    window = Stream(made, 4, 16, seed=1).take(1)[0]
    view.seat(batch.simulator.static(2), window)
    return arrays | {f"seated {key}": each.numpy().copy() for key, each in view.inputs().items()}


SIMULATE = """
import sys
import numpy as np
from test_policy_planner import seen
np.savez(sys.argv[1], **seen("cuda"))
"""


def test_the_cuda_launcher_gives_the_observations_of_the_cpu(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "NUMBA_ENABLE_CUDASIM": "1"}
    subprocess.run([sys.executable, "-c", SIMULATE, str(tmp_path / "cuda.npz")], check=True, env=environment)
    with np.load(tmp_path / "cuda.npz") as simulated:
        for name, array in seen("cpu").items():
            np.testing.assert_allclose(simulated[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_settle_applies_the_last_operation_without_a_next_layer(trace: TokenTrace) -> None:
    ended, settled = view_of(trace), view_of(trace)
    for view in (ended, settled):
        random_steps(view, 2)  # of three
    expert = ended.inputs()["expert_mask"].float().argmax(-1)
    node = ended.legal(expert).float().argmax(-1)
    ended.step(expert, node)
    settled.settle(expert, node)
    np.testing.assert_array_equal(settled.batch.episode["slots"][:, 0], ended.batch.episode["slots"][:, 0])
    assert (settled.batch.episode["clock"][:, CLOCK_LAYER] == 0).all()
    assert (ended.batch.episode["clock"][:, CLOCK_LAYER] == 1).all()


# Planners


def windows(trace: TokenTrace, n: int = 3) -> list[Window]:
    return Stream(trace, 4, 128, seed=1).take(n)


def untrained(operations: int = 6) -> tuple[PolicyNetwork, PolicySettings]:
    args = make_args(hidden=8)
    torch.manual_seed(0)
    return exported(marl.Agent(args), args), PolicySettings(operations=operations)


def test_a_plan_is_not_worse_than_the_placement_on_the_observed_window(trace: TokenTrace) -> None:
    """In the norm that the policy plans with, no layer is worse and at least one is better."""
    sim = Simulator(MODEL, CLUSTER)
    planner = Policy(sim, policy=untrained())
    static = sim.static(2)
    window = windows(trace)[0]
    plan = planner.plan([window], static)
    sim.check(plan)
    even = with_even_homes(window, 4)
    costs = Simulator(sim.model, sim.cluster, passes_per_window=planner.settings.passes(sim.passes_per_window)).costs

    def smooth(placement: np.ndarray) -> np.ndarray:
        counted = sim.count(even, placement, static)
        return np.array(
            [
                layer_time(counted, b, 0, costs, sim.network, 2, 1.0) + migration_time(counted, b, costs)
                for b in range(2)
            ]
        )

    assert (smooth(plan) <= smooth(static) + 1e-6).all()
    assert (smooth(plan) < smooth(static)).any()


def test_more_samples_are_never_worse_on_the_observed_window(trace: TokenTrace) -> None:
    sim, window = Simulator(MODEL, CLUSTER), windows(trace)[0]
    one, many = (Policy(sim, seed=4, samples=k, policy=untrained()) for k in (1, 8))
    for planner in (one, many):
        planner.plan([window], sim.static(2))
    assert len(many.view_of(window).rows) == 16
    even = with_even_homes(window, 4)
    plans = [planner.plan([window], sim.static(2)) for planner in (one, many)]
    costs = Simulator(sim.model, sim.cluster, passes_per_window=one.settings.passes(sim.passes_per_window)).costs
    totals = []
    for plan in plans:
        counted = sim.count(even, plan, sim.static(2))
        totals.append(
            [layer_time(counted, b, 0, costs, sim.network, 2, 1.0) + migration_time(counted, b, costs) for b in (0, 1)]
        )
    assert (np.array(totals[1]) <= np.array(totals[0]) + 1e-3).all()


def test_guided_search_is_never_worse_than_the_policy(trace: TokenTrace) -> None:
    sim, window = Simulator(MODEL, CLUSTER), windows(trace)[0]
    policy = untrained()
    alone, guided = Policy(sim, policy=policy), PolicyGuided(sim, policy=policy, iterations=300)
    static, even = sim.static(2), with_even_homes(window, 4)
    judge = Anneal(sim, norm=4, homes="even", migration_weight=1 / policy[1].horizon)

    def cost_of(plan: np.ndarray) -> np.ndarray:
        counted = sim.count(even, plan, static)
        weight = judge.migration_weight
        return np.array(
            [
                layer_time(counted, b, 0, sim.costs, sim.network, 2, 1.0)
                + weight * migration_time(counted, b, sim.costs)
                for b in range(2)
            ]
        )

    assert (cost_of(guided.plan([window], static)) <= cost_of(alone.plan([window], static)) + 1e-6).all()


def test_guided_search_keeps_its_time_budget(trace: TokenTrace) -> None:
    sim, window = Simulator(MODEL, CLUSTER), windows(trace)[0]
    planner = PolicyGuided(sim, policy=untrained(), seconds=0.2)
    planner.plan([window], sim.static(2))
    began = time.perf_counter()
    planner.plan([window], sim.static(2))
    assert 0.15 < time.perf_counter() - began < 3


def test_one_network_plans_for_any_model_and_cluster(trace: TokenTrace) -> None:
    policy = untrained()
    for nodes, gpus, experts, top_k, layers in ((1, 3, 5, 1, 1), (4, 2, 40, 4, 3)):
        model = ModelSpec("other", layers, experts, top_k, 512, 128)
        sim = Simulator(model, ClusterSpec("other", nodes, gpus))
        made = synthetic_trace(
            SyntheticConfig(n_tokens=800, n_layers=layers, n_experts=experts, top_k=top_k, mean_seq_len=20), seed=3
        )
        window = Stream(made, sim.n_gpus, 64, seed=0).take(1)
        sim.check(Policy(sim, policy=policy).plan(window, sim.static(layers)))


def test_reset_clears_the_history_of_the_policy(trace: TokenTrace) -> None:
    sim, history = Simulator(MODEL, CLUSTER), windows(trace)
    planner = Policy(sim, policy=untrained())
    first = planner.plan(history[:1], sim.static(2))
    planner.plan(history[:2], first)
    planner.reset()
    np.testing.assert_array_equal(planner.plan(history[:1], sim.static(2)), first)


# Policy files


def save_untrained(path: Path) -> None:
    network, settings = untrained()
    save_policy(path, asdict(network.config), network.state_dict(), settings, {"made": "here"})


def test_a_saved_policy_is_loaded_unchanged(tmp_path: Path) -> None:
    network, settings = untrained()
    save_untrained(tmp_path / "policy.pt")
    loaded, loaded_settings = load_policy(tmp_path)
    assert (loaded_settings, loaded.config) == (settings, network.config)
    assert read_policy(tmp_path)["about"] == {"made": "here"}
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_policy_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    save_untrained(path)
    content = read_policy(path)
    save_checkpoint(path, "moe-policy", content | {"features": [1, 2, 3]})
    with pytest.raises(CheckpointError, match=r"reads \[1, 2, 3\] features.*train it again"):
        load_policy(path)
    save_checkpoint(path, "moe-policy", content | {"network_version": NETWORK_VERSION - 1})
    with pytest.raises(CheckpointError, match=r"earlier clustergym.*train it again"):
        load_policy(path)
    del content["weights"]["look_scale"]
    save_checkpoint(path, "moe-policy", content)
    with pytest.raises(RuntimeError, match="look_scale"):
        load_policy(path)
    save_checkpoint(path, "ppo", {})
    with pytest.raises(CheckpointError, match="belongs to 'ppo'"):
        load_policy(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_policy(tmp_path / "nowhere.pt")


def test_the_pretrained_policy_is_small_and_names_its_origin() -> None:
    assert PRETRAINED.stat().st_size < 2_000_000
    assert read_policy("pretrained")["about"]["steps"] > 0
    card = (PRETRAINED.parent / "README.md").read_text()
    assert "ppo_moe_marl.py" in card


PLAN_WITHOUT_TORCH_GEOMETRIC = """
import sys
sys.modules["torch_geometric"] = None  # importing it raises ImportError
from clustergym import TokenTrace
from clustergym.moe_placement import Simulator, Stream
from clustergym.moe_placement.planner_registry import make_planner
simulator, trace = Simulator("deepseek-v2-lite", "h800-4x4"), TokenTrace.load("synthetic").select(layers=[0])
planner = make_planner("policy", simulator)
simulator.check(planner.plan(Stream(trace, 16, 256, seed=0).take(1), simulator.static(1)))
"""


def test_the_policy_planner_works_without_torch_geometric() -> None:
    subprocess.run([sys.executable, "-c", PLAN_WITHOUT_TORCH_GEOMETRIC], check=True)


def test_the_pretrained_policy_beats_every_eplb_on_the_bundled_trace() -> None:
    """It was trained on recorded routing. This trace is synthetic and was not used for training."""
    trace = TokenTrace.load("synthetic").select(layers=[0, 2])
    sim = Simulator("deepseek-v2-lite", "h800-4x4")
    names = ["eplb-once", "eplb", "eplb-ema", "eplb-threshold", "policy"]
    results = {r.planner: r.total_us for r in compare(trace, sim, names, Protocol(windows=3, streams=2))}
    assert results.pop("policy") < 0.97 * min(results.values())
