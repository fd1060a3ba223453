"""The placement policy: two graph actors and a critic, for any number of experts, GPUs and layers.

``expert`` actor: a graph encoder over the E experts (load, drift, company; co-activation and shared predecessors as dense weighted
graphs) and an MLP decoder that scores each expert. ``gpu`` actor: a graph encoder over the 3·G nodes (PLACE, ADD, DELETE on each GPU;
cluster features, the traffic between GPUs and who shares a node as dense weighted graphs), conditioned on the chosen expert and on
the exact look-ahead for it, and an MLP decoder that scores each node. The critic pools both graphs.

Nothing depends on a position: renumbering experts, or GPUs together with their nodes, renumbers the scores alike.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn import DenseGraphConv

from clustergym.moe_placement.episode import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.policy.view import PROGRESS, Inputs, gains
from clustergym.moe_placement.policy.view_kernels import N_PARTS

Layer = TypeVar("Layer", bound=nn.Module)

MASKED_LOGIT = -1e8
# Features that the policy derives for each expert: co-active mass on its own and on the best other GPU and node, memory.
N_DERIVED = 4 + 2
# Weight of the look-ahead in a node's score before anything is learnt: 0.1 % of the layer's time is worth this much.
LOOK_SCALE = 0.3


@dataclass(frozen=True)
class NetworkConfig:
    """What makes a network; kept in its checkpoint."""

    hidden: int = 32
    graph_layers: int = 1
    encoder: str = "graph"
    """``graph``, or ``mlp``: nodes do not exchange messages."""
    simultaneous: bool = False
    """The GPU actor does not know the chosen expert: the seed's independent choice, and no look-ahead."""
    lookahead: bool = True
    centralised: bool = True
    """One critic sees both graphs; otherwise two, each its own actor's."""
    separate_critic: bool = False
    """The critic has encoders of its own."""

    def __post_init__(self) -> None:
        if self.encoder not in ("graph", "mlp"):
            raise ValueError(f"unknown encoder {self.encoder!r}; expected graph or mlp")
        if self.hidden < 1 or self.graph_layers < 1:
            raise ValueError(f"hidden is {self.hidden} and graph_layers {self.graph_layers}: expected at least 1")


def orthogonal(layer: Layer, std: float = 2**0.5) -> Layer:
    """Orthogonal weights scaled by ``std``, biases 0, in every linear layer inside."""
    for part in layer.modules():
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            nn.init.orthogonal_(weight, std)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
    return layer


def decoder(size: int, hidden: int, std: float) -> nn.Sequential:
    """Two layers to one number."""
    return nn.Sequential(orthogonal(nn.Linear(size, hidden)), nn.ReLU(), orthogonal(nn.Linear(hidden, 1), std))


def averaging(graph: Tensor, copies: int = 1) -> Tensor:
    """The weights with which a node averages its neighbours, as ``DenseGraphConv(aggr="mean")`` has them.

    ``copies`` joins each node to so many equal copies of every neighbour.
    """
    return graph / (copies * graph.sum(-1, keepdim=True)).clamp(min=1)


def by_visit(each: Tensor, visits: int) -> Tensor:
    """(B, E, …) rows, those of a visit next to each other → (visits, E, steps, …), a view."""
    return each.unflatten(0, (visits, -1)).transpose(1, 2)


def by_row(each: Tensor) -> Tensor:
    """(visits, E, steps, …) → (B, E, …)."""
    return each.transpose(1, 2).flatten(0, 1)


class GraphLayer(nn.Module):
    """Every node hears its neighbours in two weighted graphs; without graphs it only hears itself.

    The two torch-geometric layers hold the weights; they are evaluated together, which saves one product in four, and nodes with the
    same neighbours hear the same message, which is computed once.
    """

    def __init__(self, hidden: int, graph: bool) -> None:
        super().__init__()
        self.graph = graph
        if graph:
            self.first = orthogonal(DenseGraphConv(hidden, hidden, aggr="mean"), 1.0)
            self.second = orthogonal(DenseGraphConv(hidden, hidden, aggr="mean"), 1.0)
        else:
            self.alone = orthogonal(nn.Linear(hidden, hidden))

    def myself(self, x: Tensor) -> Tensor:
        """What a node makes of itself, and the biases."""
        bias = self.first.lin_rel.bias + self.second.lin_rel.bias
        return linear(x, self.first.lin_root.weight + self.second.lin_root.weight, bias)


class ExpertLayer(GraphLayer):
    """Between experts."""

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """(visits, E, steps, H) with averaging weights (visits, E, E): the steps of a visit share their graphs."""
        if not self.graph:
            return torch.relu(self.alone(x)) + x
        one, two = (linear(x, conv.lin_rel.weight).flatten(2) for conv in (self.first, self.second))
        heard = torch.baddbmm(torch.baddbmm(self.myself(x).flatten(2), first, one), second, two)
        return torch.relu(heard.unflatten(2, x.shape[2:])) + x


class NodeLayer(GraphLayer):
    """Between GPUs, each of them one node or several."""

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """(B, kinds, G, H) with averaging weights (B, G, G) and (G, G) between GPUs, whatever the kind."""
        if not self.graph:
            return torch.relu(self.alone(x)) + x
        together = x.sum(1)
        one, two = (linear(together, conv.lin_rel.weight) for conv in (self.first, self.second))
        heard = first @ one + second @ two
        return torch.relu(heard[:, None] + self.myself(x)) + x


class Encoders(nn.Module):
    """Embeddings of the experts (visits, E, steps, H) and of the GPUs (B, G, H) before any choice."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        hidden, graph = config.hidden, config.encoder == "graph"
        self.experts_in = orthogonal(nn.Linear(N_EXPERT_FEATURES + N_DERIVED + len(PROGRESS), hidden))
        self.gpus_in = orthogonal(nn.Linear(N_GPU_FEATURES, hidden))
        self.around = orthogonal(nn.Linear(hidden, hidden, bias=False), 1.0) if graph else None
        self.layers = nn.ModuleList(ExpertLayer(hidden, graph) for _ in range(config.graph_layers))
        self.gpu_layer = NodeLayer(hidden, graph)

    def forward(self, inputs: Inputs, near: Tensor, near_node: Tensor, same_node: Tensor) -> tuple[Tensor, Tensor]:
        n_gpus, visits = same_node.shape[0], len(inputs["coactivation"])
        placement, progress = inputs["placement"], inputs["progress"]
        replicas = placement.sum(-1).clamp(min=1)
        absent = 1 - placement
        derived = torch.stack(
            [
                (near * placement).sum(-1) / replicas,
                (near * absent).amax(-1),
                (near_node * placement).sum(-1) / replicas,
                (near_node * absent).amax(-1),
            ],
            -1,
        )
        everywhere = progress[:, None].expand(-1, placement.shape[1], -1)
        experts = self.experts_in(torch.cat([inputs["experts"], derived, inputs["memory"], everywhere], -1))
        gpus = torch.relu(self.gpus_in(inputs["gpus"][:, :n_gpus]))
        gpus = self.gpu_layer(gpus[:, None], averaging(inputs["traffic"]), same_node)[:, 0]
        if self.around is not None:
            # What the GPUs that hold an expert, and those that hold its company, are like.
            share = placement / replicas[..., None] + near / near.sum(-1, keepdim=True).clamp(min=1e-6)
            experts = experts + share @ self.around(gpus)
        experts = torch.relu(by_visit(experts, visits).contiguous())
        graphs = averaging(inputs["coactivation"]), inputs["similar"]  # whose rows sum to 1
        for layer in self.layers:
            experts = layer(experts, *graphs)
        return experts, gpus


class PlacementPolicy(nn.Module):
    """Both actors and the critic."""

    value_mean: Tensor
    value_std: Tensor

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        hidden, graph = config.hidden, config.encoder == "graph"
        self.encoders = Encoders(config)
        self.expert_head = decoder(2 * hidden, hidden, 0.01)
        self.nodes_in = orthogonal(nn.Linear(N_GPU_FEATURES + N_PARTS + 4, hidden))
        self.chosen_in = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.gpus_on = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.node_layers = nn.ModuleList(NodeLayer(hidden, graph) for _ in range(config.graph_layers))
        self.node_head = decoder(hidden, hidden, 0.01)
        self.look_scale = nn.Parameter(torch.tensor(LOOK_SCALE * 10))
        self.critic_encoders = Encoders(config) if config.separate_critic else None
        sizes = [4 * hidden + len(PROGRESS)] if config.centralised else [2 * hidden + len(PROGRESS)] * 2
        self.critics = nn.ModuleList(decoder(size, hidden, 1.0) for size in sizes)
        # Returns are small and their size depends on the trace: the critic predicts them standardised. Until their size is
        # known every value is 0; a guess of 1 would drown rewards of 1e-4 in the noise of an untrained critic.
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.zeros(()))

    def encode(self, inputs: Inputs, same_node: Tensor) -> dict[str, Tensor]:
        """Embeddings that both actors and the critic start from.

        ``coactivation`` and ``similar`` may have fewer rows than the other inputs: those are then so many visits to a layer, each with
        its steps next to each other in the others' rows.
        """
        together, placement = inputs["coactivation"], inputs["placement"]
        by_layer = by_visit(placement, len(together))
        near = by_row((together @ by_layer.flatten(2)).unflatten(2, by_layer.shape[2:]))
        near_node = near @ same_node
        experts, gpus = self.encoders(inputs, near, near_node, same_node)
        return {"experts": experts, "gpus": gpus, "near": near, "near_node": near_node}

    def expert_logits(self, inputs: Inputs, encoded: dict[str, Tensor]) -> Tensor:
        """(B, E) scores of the experts, masked."""
        experts, (first, activation, last) = encoded["experts"], self.expert_head
        assert isinstance(first, nn.Linear)
        # The first layer's part for the mean over experts is the same for all of them.
        own, overall = first.weight.split(experts.shape[-1], -1)
        hidden = linear(experts, own) + linear(experts.mean(1, keepdim=True), overall, first.bias)
        logits = by_row(last(activation(hidden)).squeeze(-1))
        return torch.where(inputs["expert_mask"], logits, MASKED_LOGIT)

    def node_logits(
        self,
        inputs: Inputs,
        encoded: dict[str, Tensor],
        same_node: Tensor,
        expert: Tensor,
        parts: Tensor,
        legal: Tensor,
    ) -> Tensor:
        """(B, 3·G) scores of the nodes for the chosen expert (B,), its look-ahead (B, 3·G, parts) and legality, masked."""
        config, rows = self.config, torch.arange(len(expert), device=expert.device)
        if config.simultaneous:
            legal = inputs["gpu_mask"]
        if config.simultaneous or not config.lookahead:
            parts = torch.zeros_like(parts)
        about = torch.stack(
            [inputs["placement"][rows, expert], encoded["near"][rows, expert], encoded["near_node"][rows, expert]], -1
        ).repeat(1, 3, 1)
        if config.simultaneous:
            about = torch.zeros_like(about)
        nodes = self.nodes_in(torch.cat([inputs["gpus"], about, legal[..., None].float(), parts.clamp(-5, 5)], -1))
        nodes = nodes.unflatten(1, (3, -1)) + self.gpus_on(encoded["gpus"])[:, None]
        if not config.simultaneous:
            steps = encoded["experts"].shape[2]
            chosen = encoded["experts"][rows // steps, expert, rows % steps]
            nodes = nodes + self.chosen_in(chosen)[:, None, None]
        nodes = torch.relu(nodes)
        # The three nodes of a GPU are joined to all three of the GPUs that it talks to.
        traffic, same = averaging(inputs["traffic"], copies=3), same_node / 3
        for layer in self.node_layers:
            nodes = layer(nodes, traffic, same)
        nodes = nodes.flatten(1, 2)
        logits = self.node_head(nodes).squeeze(-1) + self.look_scale * gains(parts)
        return torch.where(legal, logits, MASKED_LOGIT)

    def values(self, inputs: Inputs, encoded: dict[str, Tensor], same_node: Tensor) -> Tensor:
        """(B, critics) standardised values."""
        experts, gpus = encoded["experts"], encoded["gpus"]
        if self.critic_encoders is not None:
            experts, gpus = self.critic_encoders(inputs, encoded["near"], encoded["near_node"], same_node)
        left = torch.cat([experts.mean(1), experts.max(1).values], -1).flatten(0, 1)
        right = torch.cat([gpus.mean(1), gpus.max(1).values], -1)
        seen = [torch.cat([left, right], -1)] if self.config.centralised else [left, right]
        each = [
            critic(torch.cat([part, inputs["progress"]], -1)) for critic, part in zip(self.critics, seen, strict=True)
        ]
        return torch.cat(each, -1)

    def forward(
        self, inputs: Inputs, same_node: Tensor, expert: Tensor, parts: Tensor, legal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(expert logits, node logits for the chosen expert, standardised values) in one pass."""
        encoded = self.encode(inputs, same_node)
        return (
            self.expert_logits(inputs, encoded),
            self.node_logits(inputs, encoded, same_node, expert, parts, legal),
            self.values(inputs, encoded, same_node),
        )

    @torch.no_grad()
    def standardise(self, mean: Tensor, std: Tensor) -> None:
        """Take new statistics of the returns, and change the critics' last layers so that no value changes.

        The first ones are taken as they are: there is nothing learnt to keep.
        """
        for critic in self.critics if float(self.value_std) > 0 else ():
            last = list(critic.children())[-1]
            assert isinstance(last, nn.Linear)
            last.weight.mul_(self.value_std / std)
            last.bias.mul_(self.value_std).add_(self.value_mean - mean).div_(std)
        self.value_mean.copy_(mean)
        self.value_std.copy_(std)

    @torch.no_grad()
    def sharpen(self, factor: float) -> None:
        """Multiply all scores: the likeliest choice stays, chance departs from it less."""
        for head in (self.expert_head, self.node_head):
            last = list(head.children())[-1]
            assert isinstance(last, nn.Linear)
            last.weight.mul_(factor)
            last.bias.mul_(factor)
        self.look_scale.mul_(factor)

    def as_state(self) -> dict[str, Any]:
        """Weights and configuration, fit for a checkpoint."""
        return {"network": asdict(self.config), "weights": self.state_dict()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PlacementPolicy:
        policy = cls(NetworkConfig(**state["network"]))
        policy.load_state_dict(state["weights"])
        return policy
