"""The networks of the placement trainer, and the exported policy that must give the same logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_policy_planner import Played, played, random_steps
from test_policy_planner import trace as trace  # a fixture
from test_ppo_moe_marl import exported, make_args, marl

from clustergym import TokenTrace


def make_agent(**changes: Any) -> Any:
    torch.manual_seed(0)
    return marl.Agent(make_args(**changes))


def scores(network: Any, inputs: dict[str, torch.Tensor], **about: torch.Tensor) -> Any:
    with torch.no_grad():
        return network(inputs, about["expert"], about["parts"], about["legal"])


def inputs_of(view: Played) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    random_steps(view, 1)
    inputs = {key: each.clone() for key, each in view.inputs().items()}
    # The first layer has no previous layer, so its matrix is empty: use random values.
    inputs["similar"] = torch.rand((3, 12, 12), generator=torch.Generator().manual_seed(1)).softmax(-1)
    expert = torch.tensor([3, 7, 1])
    return inputs, {"expert": expert, "parts": view.look(expert), "legal": view.legal(expert)}


@pytest.mark.parametrize("ablate", [(), ("mlp-encoder",), ("separate-critic",)], ids=str)
def test_renumbering_experts_renumbers_scores(trace: TokenTrace, ablate: tuple[str, ...]) -> None:
    view = played(trace)
    inputs, about = inputs_of(view)
    network = make_agent(ablate=ablate)
    order = torch.randperm(12)
    shuffled = dict(inputs)
    for key in ("experts", "memory", "placement", "expert_mask"):
        shuffled[key] = inputs[key][:, order]
    for key in ("coactivation", "similar"):
        shuffled[key] = inputs[key][:, order][:, :, order]
    experts, nodes, values = scores(network, inputs, **about)
    moved = about | {"expert": order.argsort()[about["expert"]]}
    experts2, nodes2, values2 = scores(network, shuffled, **moved)
    torch.testing.assert_close(experts2, experts[:, order], atol=1e-4, rtol=0)
    torch.testing.assert_close(nodes2, nodes, atol=1e-4, rtol=0)
    torch.testing.assert_close(values2, values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 0, 1]])  # GPUs of a node swapped; nodes swapped
def test_renumbering_gpus_with_their_nodes_renumbers_scores(trace: TokenTrace, order: list[int]) -> None:
    view = played(trace)
    inputs, about = inputs_of(view)
    network = make_agent()
    gpus = torch.tensor(order)
    nodes_order = torch.cat([gpus, gpus + 4, gpus + 8])
    shuffled = dict(inputs)
    shuffled["gpus"] = inputs["gpus"][:, nodes_order]
    shuffled["gpu_mask"] = inputs["gpu_mask"][:, nodes_order]
    shuffled["traffic"] = inputs["traffic"][:, gpus][:, :, gpus]
    shuffled["placement"] = inputs["placement"][:, :, gpus]
    experts, nodes, values = scores(network, inputs, **about)
    moved = about | {"parts": about["parts"][:, nodes_order], "legal": about["legal"][:, nodes_order]}
    experts2, nodes2, values2 = scores(network, shuffled, **moved)
    torch.testing.assert_close(experts2, experts, atol=1e-4, rtol=0)
    torch.testing.assert_close(nodes2, nodes[:, nodes_order], atol=1e-4, rtol=0)
    torch.testing.assert_close(values2, values, atol=1e-4, rtol=0)


def test_a_graph_layer_is_the_sum_of_two_torch_geometric_layers() -> None:
    """Computed together for all steps of a visit and all nodes of a GPU, or one by one as the library does."""
    torch.manual_seed(0)
    layer = marl.ExpertLayer(8, True)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    nodes_layer = marl.NodeLayer(8, True)
    nodes_layer.load_state_dict(layer.state_dict())
    visits, steps, experts, gpus = 3, 4, 5, 4
    x, graphs = torch.randn(visits, experts, steps, 8), torch.rand(2, visits, experts, experts) * 2
    ours = layer(x, *(marl.averaging(graph) for graph in graphs))
    for v, t in np.ndindex(visits, steps):
        alone = x[v : v + 1, :, t]
        received = layer.first(alone, graphs[0, v : v + 1]) + layer.second(alone, graphs[1, v : v + 1])
        torch.testing.assert_close(ours[v : v + 1, :, t], torch.relu(received) + alone)
    nodes, traffic, same = torch.randn(2, 3, gpus, 8), torch.rand(2, gpus, gpus), torch.eye(gpus) / 2 + 0.125
    ours = nodes_layer(nodes, marl.averaging(traffic, copies=3), same / 3).flatten(1, 2)
    flat = nodes.flatten(1, 2)
    received = layer.first(flat, traffic.repeat(1, 3, 3)) + layer.second(flat, same.repeat(3, 3)[None] / 3)
    torch.testing.assert_close(ours, torch.relu(received) + flat)


def test_the_steps_of_a_visit_share_their_graphs(trace: TokenTrace) -> None:
    view = played(trace)
    (first, about), steps = inputs_of(view), []
    for seed in (5, 6):
        generator = torch.Generator().manual_seed(seed)
        other = {
            key: first[key] + 0.1 * torch.rand(first[key].shape, generator=generator) for key in ("experts", "gpus")
        }
        steps.append(first | other)
    network = make_agent()
    apart = [scores(network, inputs, **about) for inputs in steps]
    # The rows of a visit are next to each other.
    joined = {key: torch.stack([inputs[key] for inputs in steps], 1).flatten(0, 1) for key in first}
    joined |= {key: first[key] for key in ("coactivation", "similar", "same_node")}
    together = scores(network, joined, **{key: each.repeat_interleave(2, 0) for key, each in about.items()})
    for found, *known in zip(together, *apart, strict=True):
        torch.testing.assert_close(found, torch.stack(known, 1).flatten(0, 1), atol=1e-4, rtol=0)


def test_only_the_graph_encoder_sends_messages(trace: TokenTrace) -> None:
    """With the MLP encoder the score of an expert depends on its own features only."""
    view = played(trace)
    inputs, about = inputs_of(view)
    for ablate, sends_messages in (((), True), (("mlp-encoder",), False)):
        network = make_agent(ablate=ablate)
        other = inputs | {"similar": torch.roll(inputs["similar"], 1, 2)}
        same = scores(network, inputs, **about)[0]
        changed = scores(network, other, **about)[0]
        assert torch.equal(same, changed) != sends_messages


def test_the_simultaneous_actor_does_not_see_the_expert(trace: TokenTrace) -> None:
    view = played(trace)
    inputs, about = inputs_of(view)
    network = make_agent(ablate=("simultaneous",))
    first = scores(network, inputs, **about)[1]
    other = about | {"expert": torch.tensor([0, 0, 0]), "parts": torch.ones_like(about["parts"])}
    torch.testing.assert_close(scores(network, inputs, **other)[1], first)


@pytest.mark.parametrize(
    ("changes", "graph_layers"),
    [
        ({}, 1),
        ({"hidden": 16}, 2),
        ({"ablate": ("mlp-encoder",)}, 1),
        ({"ablate": ("simultaneous",)}, 1),
        ({"ablate": ("no-lookahead",)}, 1),
        ({"ablate": ("separate-critic", "two-critics")}, 1),
    ],
)
def test_the_exported_network_gives_the_logits_of_the_trainer(
    trace: TokenTrace, changes: dict[str, Any], graph_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marl, "GRAPH_LAYERS", graph_layers)
    args = make_args(**changes)
    view = played(trace)
    inputs, about = inputs_of(view)
    torch.manual_seed(0)
    agent = marl.Agent(args)
    for weight in agent.parameters():  # initial heads are almost 0: every weight must matter
        torch.nn.init.normal_(weight, std=0.3)
    drawn = torch.get_rng_state()
    network = exported(agent, args)
    assert torch.equal(torch.get_rng_state(), drawn), "an export must not draw random numbers"
    experts, nodes, _ = scores(agent, inputs, **about)
    with torch.no_grad():
        encoded = network.encode(inputs)
        assert torch.equal(network.expert_logits(inputs, encoded), experts)
        assert torch.equal(network.node_logits(inputs, encoded, **about), nodes)
    assert not [name for name in network.state_dict() if "critic" in name or "value" in name]
