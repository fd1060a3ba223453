"""The exported placement policy: both actors in plain torch, for inference only.

The trainer ``cleanrl_ppo/ppo_moe_marl.py`` defines the same networks with torch-geometric layers and writes their
weights under the same parameter names. The critic is not part of an exported policy. A test checks that both give equal
logits.

* Expert actor: a graph encoder over the E experts and an MLP that scores each expert.
* GPU actor: a graph encoder over 3·G nodes (PLACE, ADD and DELETE on each GPU) that also reads the chosen expert and
  its exact look-ahead, and an MLP that scores each node.

The networks accept any number of experts, GPUs and layers. Renumbering experts, or GPUs together with their nodes,
renumbers the scores in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from clustergym.common.choices import one_of
from clustergym.moe_placement.kernels.observation import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.kernels.state import N_PARTS
from clustergym.planners.policy.inputs import PROGRESS, Inputs, gains

MASKED_LOGIT = -1e8
ENCODERS = ("graph", "mlp")
N_DERIVED_FEATURES = 6
"""Features that the encoder adds to each expert: co-activation with its own and the best other GPU and node, memory."""
N_CHOSEN_FEATURES = 4
"""Features of each node that describe the chosen expert there: placed, co-activation with GPU and node, legal."""


@dataclass(frozen=True)
class NetworkConfig:
    """Shape of the actors; stored with the weights."""

    hidden: int = 32
    graph_layers: int = 1
    encoder: str = "graph"
    """``graph``, or ``mlp``: nodes do not exchange messages."""
    simultaneous: bool = False
    """Both actors choose at the same time: the GPU actor sees neither the chosen expert nor a look-ahead."""
    lookahead: bool = True
    """The GPU actor sees the look-ahead."""

    def __post_init__(self) -> None:
        one_of(self.encoder, ENCODERS, "encoder")
        if self.hidden < 1 or self.graph_layers < 1:
            raise ValueError(f"hidden is {self.hidden} and graph_layers {self.graph_layers}: expected at least 1")


def averaging(graph: Tensor, copies: int = 1) -> Tensor:
    """Weights with which a node averages its neighbours, as in torch-geometric's ``DenseGraphConv(aggr="mean")``.

    With ``copies`` every neighbour exists so many times.
    """
    return graph / (copies * graph.sum(-1, keepdim=True)).clamp(min=1)


def decoder(size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, 1))


class GraphConv(nn.Module):
    """The weights of a torch-geometric ``DenseGraphConv``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lin_rel = nn.Linear(hidden, hidden)
        self.lin_root = nn.Linear(hidden, hidden, bias=False)


class GraphLayer(nn.Module):
    """Two graph convolutions, evaluated together; with encoder ``mlp`` one linear layer."""

    def __init__(self, hidden: int, graph: bool) -> None:
        super().__init__()
        self.graph = graph
        if graph:
            self.first, self.second = GraphConv(hidden), GraphConv(hidden)
        else:
            self.alone = nn.Linear(hidden, hidden)

    def root(self, x: Tensor) -> Tensor:
        """What a node computes from its own embedding, and the biases."""
        bias = self.first.lin_rel.bias + self.second.lin_rel.bias
        return linear(x, self.first.lin_root.weight + self.second.lin_root.weight, bias)

    def messages(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, self.first.lin_rel.weight), linear(x, self.second.lin_rel.weight)


class ExpertLayer(GraphLayer):
    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Experts (B, E, H) with averaging weights (B, E, E) of both graphs."""
        if not self.graph:
            return torch.relu(self.alone(x)) + x
        one, two = self.messages(x)
        return torch.relu(torch.baddbmm(torch.baddbmm(self.root(x), first, one), second, two)) + x


class NodeLayer(GraphLayer):
    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Nodes (B, kinds, G, H) with averaging weights (B, G, G) and (G, G) between GPUs, the same for all kinds."""
        if not self.graph:
            return torch.relu(self.alone(x)) + x
        one, two = self.messages(x.sum(1))
        return torch.relu((first @ one + second @ two)[:, None] + self.root(x)) + x


class Encoders(nn.Module):
    """Embeddings of the experts (B, E, H) and of the GPUs (B, G, H) before any choice."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        hidden, graph = config.hidden, config.encoder == "graph"
        self.experts_in = nn.Linear(N_EXPERT_FEATURES + N_DERIVED_FEATURES + len(PROGRESS), hidden)
        self.gpus_in = nn.Linear(N_GPU_FEATURES, hidden)
        self.around = nn.Linear(hidden, hidden, bias=False) if graph else None
        self.layers = nn.ModuleList(ExpertLayer(hidden, graph) for _ in range(config.graph_layers))
        self.gpu_layer = NodeLayer(hidden, graph)

    def forward(self, inputs: Inputs, near: Tensor, near_node: Tensor) -> tuple[Tensor, Tensor]:
        placement, same_node = inputs["placement"], inputs["same_node"]
        replicas, absent = placement.sum(-1).clamp(min=1), 1 - placement
        own = [(mass * placement).sum(-1) / replicas for mass in (near, near_node)]
        other = [(mass * absent).amax(-1) for mass in (near, near_node)]
        derived = torch.stack([own[0], other[0], own[1], other[1]], -1)
        progress = inputs["progress"][:, None].expand(-1, placement.shape[1], -1)
        experts = self.experts_in(torch.cat([inputs["experts"], derived, inputs["memory"], progress], -1))
        gpus = torch.relu(self.gpus_in(inputs["gpus"][:, : same_node.shape[0]]))
        gpus = self.gpu_layer(gpus[:, None], averaging(inputs["traffic"]), same_node)[:, 0]
        if self.around is not None:
            # Embeddings of the GPUs that hold an expert, and of those that hold the experts it is used with.
            share = placement / replicas[..., None] + near / near.sum(-1, keepdim=True).clamp(min=1e-6)
            experts = experts + share @ self.around(gpus)
        experts = torch.relu(experts)
        graphs = averaging(inputs["coactivation"]), inputs["similar"]
        for layer in self.layers:
            experts = layer(experts, *graphs)
        return experts, gpus


class PolicyNetwork(nn.Module):
    """Both actors of an exported policy."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        hidden, graph = config.hidden, config.encoder == "graph"
        self.encoders = Encoders(config)
        self.expert_head = decoder(2 * hidden, hidden)
        self.nodes_in = nn.Linear(N_GPU_FEATURES + N_PARTS + N_CHOSEN_FEATURES, hidden)
        self.chosen_in = nn.Linear(hidden, hidden, bias=False)
        self.gpus_on = nn.Linear(hidden, hidden, bias=False)
        self.node_layers = nn.ModuleList(NodeLayer(hidden, graph) for _ in range(config.graph_layers))
        self.node_head = decoder(hidden, hidden)
        self.look_scale = nn.Parameter(torch.ones(()))

    @classmethod
    def from_state(cls, network: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Self:
        """The actors from the trainer's network options and weights; those of the critic are ignored."""
        config = NetworkConfig(**{field.name: network[field.name] for field in fields(NetworkConfig)})
        with torch.random.fork_rng(
            devices=[]
        ):  # initial weights are replaced: draw nothing from the caller's generator
            policy = cls(config)
        policy.load_state_dict({name: weights[name] for name in policy.state_dict() if name in weights})
        return policy.eval()

    def encode(self, inputs: Inputs) -> dict[str, Tensor]:
        """Embeddings that both actors start from."""
        near = inputs["coactivation"] @ inputs["placement"]
        near_node = near @ inputs["same_node"]
        experts, gpus = self.encoders(inputs, near, near_node)
        return {"experts": experts, "gpus": gpus, "near": near, "near_node": near_node}

    def expert_logits(self, inputs: Inputs, encoded: dict[str, Tensor]) -> Tensor:
        """(B, E) scores of the experts, masked."""
        experts, (first, activation, last) = encoded["experts"], self.expert_head
        assert isinstance(first, nn.Linear)
        # The mean over experts is the same input for all of them: multiply it once.
        own, overall = first.weight.split(experts.shape[-1], -1)
        hidden = linear(experts, own) + linear(experts.mean(1, keepdim=True), overall, first.bias)
        return torch.where(inputs["expert_mask"], last(activation(hidden)).squeeze(-1), MASKED_LOGIT)

    def node_logits(
        self,
        inputs: Inputs,
        encoded: dict[str, Tensor],
        expert: Tensor,
        parts: Tensor,
        legal: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """(N, 3·G) scores of the nodes, masked, for chosen experts (N,), look-ahead (N, 3·G, parts) and legality.

        ``rows`` (N,) are the rows of the inputs that they belong to; by default there is one expert per row.
        """
        config, gpus, traffic = self.config, inputs["gpus"], inputs["traffic"]
        on_gpus = self.gpus_on(encoded["gpus"])
        if rows is None:
            rows = torch.arange(expert.shape[0], device=expert.device)
        else:
            gpus, traffic, on_gpus = gpus[rows], traffic[rows], on_gpus[rows]
        chosen = torch.stack(
            [x[rows, expert] for x in (inputs["placement"], encoded["near"], encoded["near_node"])], -1
        )
        if config.simultaneous:
            legal, chosen = inputs["gpu_mask"][rows], torch.zeros_like(chosen)
        if config.simultaneous or not config.lookahead:
            parts = torch.zeros_like(parts)
        features = [gpus, chosen.repeat(1, 3, 1), legal[..., None].float(), parts.clamp(-5, 5)]
        nodes = self.nodes_in(torch.cat(features, -1)).unflatten(1, (3, -1)) + on_gpus[:, None]
        if not config.simultaneous:
            nodes = nodes + self.chosen_in(encoded["experts"][rows, expert])[:, None, None]
        nodes = torch.relu(nodes)
        # Each of a GPU's three nodes is connected to all three nodes of the GPUs that it exchanges tokens with.
        traffic, same = averaging(traffic, copies=3), inputs["same_node"] / 3
        for layer in self.node_layers:
            nodes = layer(nodes, traffic, same)
        logits = self.node_head(nodes.flatten(1, 2)).squeeze(-1) + self.look_scale * gains(parts)
        return torch.where(legal, logits, MASKED_LOGIT)
