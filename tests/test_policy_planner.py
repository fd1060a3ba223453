"""The policy at work: what it sees, what it may do, that renumbering changes nothing, and the checkpoint that ships."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clustergym import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.moe_placement import ClusterSpec, ModelSpec, PlacementBatch, PlacementConfig, Simulator, Stream, Window
from clustergym.moe_placement.dynamics import OP_ILLEGAL, OP_NOTHING, change, layer_time, migration_time, resolve
from clustergym.moe_placement.evaluation import Protocol, compare
from clustergym.moe_placement.planners.search import Anneal, evenly_dealt
from clustergym.moe_placement.policy.network import ExpertLayer, NetworkConfig, NodeLayer, PlacementPolicy, averaging
from clustergym.moe_placement.policy.planner import (
    NETWORK_VERSION,
    PRETRAINED,
    Policy,
    PolicyGuided,
    ViewSettings,
    load_policy,
    save_policy,
)
from clustergym.moe_placement.policy.view import UNIT, PolicyView
from clustergym.training import CheckpointError, save_checkpoint

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


def test_homes_are_dealt_evenly_and_the_tokens_stay(trace: TokenTrace) -> None:
    even, served = view_of(trace, homes="even"), view_of(trace, homes="served")
    for _ in range(4):  # into the second layer
        homes = even.batch.sim["src"][:, 0].numpy()
        assert (homes == np.arange(128) % 4).all()
        np.testing.assert_array_equal(even.batch.sim["tok"], served.batch.sim["tok"])
        # Only the observed window is dealt anew: what is to come, and so the reward, stays what it is.
        np.testing.assert_array_equal(even.batch.sim["src"][:, 1], served.batch.sim["src"][:, 1])
        nothing = even.batch.obs["placement"][:, 0].argmax(-1)
        for view in (even, served):
            view.step(torch.zeros(3, dtype=torch.int64), nothing)
    assert (served.batch.sim["src"][:, 0].numpy() != np.arange(128) % 4).any()


@pytest.mark.parametrize("norm", [0, 4])
def test_look_ahead_parts_are_what_the_operations_then_do(trace: TokenTrace, norm: int) -> None:
    view = view_of(trace, envs=1, norm=norm)
    random_steps(view, 2)
    batch = view.batch
    sim, cost, net, mode = batch._sim, batch.rules_host.cost, batch.rules_host.net, batch.rules_host.mode
    unit = float(batch.env["time"][0, 1])
    for e in range(batch.n_experts):
        parts = view.look_many(torch.tensor([[e]]))[0, 0].numpy() / UNIT

        def times() -> np.ndarray:
            smooth, true = (layer_time(sim, 0, 0, cost, net, mode, d, 1.0) for d in (view.doublings, -1))
            return np.array([smooth, true, migration_time(sim, 0, cost)])

        before = times()
        for node in range(12):
            kind, source, target, victim = resolve(sim, 0, e, node)
            if kind in (OP_NOTHING, OP_ILLEGAL):
                assert (parts[node] == 0).all()
                continue
            change(sim, 0, e, source, target, victim, target, source, net, mode, 1)
            np.testing.assert_allclose(parts[node], (before - times()) / unit, atol=1e-6)
            change(sim, 0, e, target, source, victim, source, target, net, mode, 1)


def test_an_expert_left_alone_is_not_offered_again_until_something_moves(trace: TokenTrace) -> None:
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
    """What a view shows in a few steps that cross a layer's end, on the given launcher."""
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


def test_the_cuda_launcher_shows_what_the_cpu_shows(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "NUMBA_ENABLE_CUDASIM": "1"}
    subprocess.run([sys.executable, "-c", SIMULATE, str(tmp_path / "cuda.npz")], check=True, env=environment)
    with np.load(tmp_path / "cuda.npz") as simulated:
        for name, array in seen("cpu").items():
            np.testing.assert_allclose(simulated[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


# Networks


def scores(network: PlacementPolicy, inputs: dict[str, torch.Tensor], same: torch.Tensor, **about: torch.Tensor) -> Any:
    with torch.no_grad():
        return network(inputs, same, about["expert"], about["parts"], about["legal"])


def inputs_of(view: PolicyView) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    random_steps(view, 1)
    inputs = {key: each.clone() for key, each in view.inputs().items()}
    # The first layer has none before it: what a later one would show stands in.
    inputs["similar"] = torch.rand((3, 12, 12), generator=torch.Generator().manual_seed(1)).softmax(-1)
    expert = torch.tensor([3, 7, 1])
    return inputs, {"expert": expert, "parts": view.look(expert), "legal": view.legal(expert)}


@pytest.mark.parametrize("config", [NetworkConfig(), NetworkConfig(encoder="mlp"), NetworkConfig(separate_critic=True)])
def test_renumbering_experts_renumbers_scores(trace: TokenTrace, config: NetworkConfig) -> None:
    view = view_of(trace)
    inputs, about = inputs_of(view)
    torch.manual_seed(0)
    network = PlacementPolicy(config)
    order = torch.randperm(12)
    shuffled = dict(inputs)
    for key in ("experts", "memory", "placement", "expert_mask"):
        shuffled[key] = inputs[key][:, order]
    for key in ("coactivation", "similar"):
        shuffled[key] = inputs[key][:, order][:, :, order]
    experts, nodes, values = scores(network, inputs, view.same_node, **about)
    moved = about | {"expert": order.argsort()[about["expert"]]}
    experts2, nodes2, values2 = scores(network, shuffled, view.same_node, **moved)
    torch.testing.assert_close(experts2, experts[:, order], atol=1e-4, rtol=0)
    torch.testing.assert_close(nodes2, nodes, atol=1e-4, rtol=0)
    torch.testing.assert_close(values2, values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 0, 1]])  # within a node; nodes exchanged
def test_renumbering_gpus_with_their_nodes_renumbers_scores(trace: TokenTrace, order: list[int]) -> None:
    view = view_of(trace)
    inputs, about = inputs_of(view)
    torch.manual_seed(0)
    network = PlacementPolicy(NetworkConfig())
    gpus = torch.tensor(order)
    nodes_order = torch.cat([gpus, gpus + 4, gpus + 8])
    shuffled = dict(inputs)
    shuffled["gpus"] = inputs["gpus"][:, nodes_order]
    shuffled["gpu_mask"] = inputs["gpu_mask"][:, nodes_order]
    shuffled["traffic"] = inputs["traffic"][:, gpus][:, :, gpus]
    shuffled["placement"] = inputs["placement"][:, :, gpus]
    experts, nodes, values = scores(network, inputs, view.same_node, **about)
    moved = about | {"parts": about["parts"][:, nodes_order], "legal": about["legal"][:, nodes_order]}
    experts2, nodes2, values2 = scores(network, shuffled, view.same_node, **moved)
    torch.testing.assert_close(experts2, experts, atol=1e-4, rtol=0)
    torch.testing.assert_close(nodes2, nodes[:, nodes_order], atol=1e-4, rtol=0)
    torch.testing.assert_close(values2, values, atol=1e-4, rtol=0)


def test_a_graph_layer_is_the_sum_of_two_torch_geometric_ones() -> None:
    """Evaluated together, by visits and once a GPU, or layer by layer as the library does it: the same."""
    torch.manual_seed(0)
    layer = ExpertLayer(8, True)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    nodes_layer = NodeLayer(8, True)
    nodes_layer.load_state_dict(layer.state_dict())
    visits, steps, experts, gpus = 3, 4, 5, 4
    x, graphs = torch.randn(visits, experts, steps, 8), torch.rand(2, visits, experts, experts) * 2
    ours = layer(x, *(averaging(graph) for graph in graphs))
    for v, t in np.ndindex(visits, steps):
        alone = x[v : v + 1, :, t]
        heard = layer.first(alone, graphs[0, v : v + 1]) + layer.second(alone, graphs[1, v : v + 1])
        torch.testing.assert_close(ours[v : v + 1, :, t], torch.relu(heard) + alone)
    nodes, traffic, same = torch.randn(2, 3, gpus, 8), torch.rand(2, gpus, gpus), torch.eye(gpus) / 2 + 0.125
    ours = nodes_layer(nodes, averaging(traffic, copies=3), same / 3).flatten(1, 2)
    flat = nodes.flatten(1, 2)
    heard = layer.first(flat, traffic.repeat(1, 3, 3)) + layer.second(flat, same.repeat(3, 3)[None] / 3)
    torch.testing.assert_close(ours, torch.relu(heard) + flat)


def test_the_steps_of_a_visit_may_share_their_graphs(trace: TokenTrace) -> None:
    view = view_of(trace)
    (first, about), steps = inputs_of(view), []
    for seed in (5, 6):
        generator = torch.Generator().manual_seed(seed)
        other = {
            key: first[key] + 0.1 * torch.rand(first[key].shape, generator=generator) for key in ("experts", "gpus")
        }
        steps.append(first | other)
    torch.manual_seed(0)
    network = PlacementPolicy(NetworkConfig())
    apart = [scores(network, inputs, view.same_node, **about) for inputs in steps]
    # Rows of a visit are neighbours.
    joined = {key: torch.stack([inputs[key] for inputs in steps], 1).flatten(0, 1) for key in first}
    joined |= {key: first[key] for key in ("coactivation", "similar")}
    together = scores(
        network, joined, view.same_node, **{key: each.repeat_interleave(2, 0) for key, each in about.items()}
    )
    for found, *known in zip(together, *apart, strict=True):
        torch.testing.assert_close(found, torch.stack(known, 1).flatten(0, 1), atol=1e-4, rtol=0)


def test_settling_is_the_last_step_and_no_more(trace: TokenTrace) -> None:
    ended, settled = view_of(trace), view_of(trace)
    for view in (ended, settled):
        random_steps(view, 2)  # of three
    expert = ended.inputs()["expert_mask"].float().argmax(-1)
    node = ended.legal(expert).float().argmax(-1)
    ended.step(expert, node)
    settled.settle(expert, node)
    np.testing.assert_array_equal(settled.batch.env["slots"][:, 0], ended.batch.env["slots"][:, 0])
    assert (settled.batch.env["clock"][:, 0] == 0).all()
    assert (ended.batch.env["clock"][:, 0] == 1).all()


def test_messages_are_what_the_graph_encoder_adds(trace: TokenTrace) -> None:
    """Without messages an expert's score cannot depend on who is co-active with whom beyond its own features."""
    view = view_of(trace)
    inputs, about = inputs_of(view)
    for encoder, hears in (("graph", True), ("mlp", False)):
        torch.manual_seed(0)
        network = PlacementPolicy(NetworkConfig(encoder=encoder))
        other = inputs | {"similar": torch.roll(inputs["similar"], 1, 2)}
        same = scores(network, inputs, view.same_node, **about)[0]
        changed = scores(network, other, view.same_node, **about)[0]
        assert torch.equal(same, changed) != hears


def test_the_simultaneous_actor_knows_nothing_of_the_expert(trace: TokenTrace) -> None:
    view = view_of(trace)
    inputs, about = inputs_of(view)
    network = PlacementPolicy(NetworkConfig(simultaneous=True))
    first = scores(network, inputs, view.same_node, **about)[1]
    other = about | {"expert": torch.tensor([0, 0, 0]), "parts": torch.ones_like(about["parts"])}
    torch.testing.assert_close(scores(network, inputs, view.same_node, **other)[1], first)


# Planners


def windows(trace: TokenTrace, n: int = 3) -> list[Window]:
    return Stream(trace, 4, 128, seed=1).take(n)


def untrained(operations: int = 6) -> tuple[PlacementPolicy, ViewSettings]:
    torch.manual_seed(0)
    return PlacementPolicy(NetworkConfig(hidden=8)), ViewSettings(operations=operations)


def test_a_plan_saves_what_the_look_ahead_promised(trace: TokenTrace) -> None:
    """On the observed window itself, in the norm the policy plans in, no layer is worse than before."""
    sim = Simulator(MODEL, CLUSTER)
    planner = Policy(sim, policy=untrained())
    static = sim.static(2)
    window = windows(trace)[0]
    plan = planner.plan([window], static)
    sim.check(plan)
    even = evenly_dealt(window, 4)
    cost = sim.cost.copy()
    cost[9:] /= planner.settings.horizon

    def smooth(placement: np.ndarray) -> np.ndarray:
        counted = sim.count(even, placement, static)
        return np.array(
            [
                layer_time(counted, b, 0, cost, sim.net, sim.mode, 2, 1.0) + migration_time(counted, b, cost)
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
    even = evenly_dealt(window, 4)
    plans = [planner.plan([window], sim.static(2)) for planner in (one, many)]
    cost = sim.cost.copy()
    cost[9:] /= one.settings.horizon
    totals = []
    for plan in plans:
        counted = sim.count(even, plan, sim.static(2))
        totals.append(
            [
                layer_time(counted, b, 0, cost, sim.net, sim.mode, 2, 1.0) + migration_time(counted, b, cost)
                for b in (0, 1)
            ]
        )
    assert (np.array(totals[1]) <= np.array(totals[0]) + 1e-3).all()


def test_guided_search_never_ends_above_the_policy_it_starts_from(trace: TokenTrace) -> None:
    sim, window = Simulator(MODEL, CLUSTER), windows(trace)[0]
    policy = untrained()
    alone, guided = Policy(sim, policy=policy), PolicyGuided(sim, policy=policy, iterations=300)
    static, even = sim.static(2), evenly_dealt(window, 4)
    judge = Anneal(sim, norm=4, homes="even", migration_weight=1 / policy[1].horizon)

    def cost_of(plan: np.ndarray) -> np.ndarray:
        counted = sim.count(even, plan, static)
        weight = judge.migration_weight
        return np.array(
            [
                layer_time(counted, b, 0, sim.cost, sim.net, sim.mode, 2, 1.0)
                + weight * migration_time(counted, b, sim.cost)
                for b in range(2)
            ]
        )

    assert (cost_of(guided.plan([window], static)) <= cost_of(alone.plan([window], static)) + 1e-6).all()


def test_guided_search_keeps_to_its_time(trace: TokenTrace) -> None:
    sim, window = Simulator(MODEL, CLUSTER), windows(trace)[0]
    planner = PolicyGuided(sim, policy=untrained(), seconds=0.2)
    planner.plan([window], sim.static(2))
    began = time.perf_counter()
    planner.plan([window], sim.static(2))
    assert 0.15 < time.perf_counter() - began < 3


def test_one_network_serves_any_shape(trace: TokenTrace) -> None:
    policy = untrained()
    for nodes, gpus, experts, top_k, layers in ((1, 3, 5, 1, 1), (4, 2, 40, 4, 3)):
        model = ModelSpec("other", layers, experts, top_k, 512, 128)
        sim = Simulator(model, ClusterSpec("other", nodes, gpus))
        made = synthetic_trace(
            SyntheticConfig(n_tokens=800, n_layers=layers, n_experts=experts, top_k=top_k, mean_seq_len=20), seed=3
        )
        window = Stream(made, sim.n_gpus, 64, seed=0).take(1)
        sim.check(Policy(sim, policy=policy).plan(window, sim.static(layers)))


def test_the_policy_forgets_at_reset(trace: TokenTrace) -> None:
    sim, history = Simulator(MODEL, CLUSTER), windows(trace)
    planner = Policy(sim, policy=untrained())
    first = planner.plan(history[:1], sim.static(2))
    planner.plan(history[:2], first)
    planner.reset()
    np.testing.assert_array_equal(planner.plan(history[:1], sim.static(2)), first)


# Checkpoints


def test_a_policy_comes_back_as_it_was_saved(tmp_path: Path, trace: TokenTrace) -> None:
    network, view = untrained()
    save_policy(tmp_path / "policy.pt", network, view, {"made": "here"})
    again, settings, about = load_policy(tmp_path)
    assert (settings, about, again.config) == (view, {"made": "here"}, network.config)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_a_checkpoint_for_other_features_is_refused(tmp_path: Path) -> None:
    network, _ = untrained()
    content = {**network.as_state(), "features": [1, 2, 3], "network_version": NETWORK_VERSION}
    save_checkpoint(tmp_path / "policy.pt", "moe-policy", content)
    with pytest.raises(CheckpointError, match=r"reads \[1, 2, 3\] features.*train it again"):
        load_policy(tmp_path / "policy.pt")
    save_checkpoint(tmp_path / "policy.pt", "moe-policy", network.as_state())
    with pytest.raises(CheckpointError, match=r"earlier clustergym.*train it again"):
        load_policy(tmp_path / "policy.pt")
    save_checkpoint(tmp_path / "policy.pt", "ppo", {})
    with pytest.raises(CheckpointError, match="belongs to 'ppo'"):
        load_policy(tmp_path / "policy.pt")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_policy(tmp_path / "nowhere.pt")


def test_the_pretrained_policy_is_small_and_says_where_it_comes_from() -> None:
    assert PRETRAINED.stat().st_size < 2_000_000
    _, _, about = load_policy("pretrained")
    assert about["steps"] > 0
    card = (PRETRAINED.parent / "README.md").read_text()
    assert "ppo_moe_marl.py" in card


def test_the_pretrained_policy_beats_every_eplb_on_the_bundled_trace() -> None:
    """It was trained on real routing: this trace is synthetic and new to it."""
    trace = TokenTrace.load("synthetic").select(layers=[0, 2])
    sim = Simulator("deepseek-v2-lite", "h800-4x4")
    names = ["eplb-once", "eplb", "eplb-ema", "eplb-threshold", "policy"]
    results = {r.planner: r.total_us for r in compare(trace, sim, names, Protocol(windows=3, streams=2))}
    assert results.pop("policy") < 0.97 * min(results.values())
