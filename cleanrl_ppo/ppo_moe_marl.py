"""Multi-agent PPO for MoE placement: an expert actor and a GPU actor with graph encoders, one centralised critic.

    python cleanrl_ppo/ppo_moe_marl.py                                          # the bundled trace, 4 × 4 GPUs
    python cleanrl_ppo/ppo_moe_marl.py --trace mine.npz --cluster h800-2x8 --total-timesteps 400000
    python cleanrl_ppo/ppo_moe_marl.py --resume                                 # continue after a crash, bit for bit
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_moe_marl.py                     # two processes, averaged gradients
    clustergym eval --planner eplb anneal policy --checkpoint runs/ppo_moe_marl__tiny_moe__1

Between two windows of traffic the agents visit the layers one after the other. A visit has ``ops_per_layer`` steps. In
each step the expert actor picks an expert, an exact simulation computes what each of the 3·G operations on it would
save on the window that was just served, and the GPU actor picks one of the operations. The reward is what the operation
saves on the NEXT window, which the agents do not see. A supervised phase first teaches both actors to find the
operations with the best simulated savings. PPO then teaches them which savings last until the next window.

Core details 1–13 and 37 of "The 37 Implementation Details of PPO", masks, value normalisation. docs/ppo_moe_marl.md
explains the decision process, the networks and every metric.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import tyro
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn import DenseGraphConv

from clustergym.common.statistics import ci95
from clustergym.moe_placement import PlacementBatch, PlacementConfig, Simulator
from clustergym.moe_placement.batch import DEFAULT_TRACE, model_for
from clustergym.moe_placement.environment import frame_of
from clustergym.moe_placement.evaluation import Protocol, Result, evaluate_planner
from clustergym.moe_placement.kernels.observation import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.policy.export import FILE_NAME, PolicySettings, read_policy, save_policy
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.planner import Policy
from clustergym.moe_placement.policy.view import LAYER_KEYS, PROGRESS, STEP_KEYS, Inputs, PolicyView, gains
from clustergym.moe_placement.policy.view_kernels import N_PARTS
from clustergym.moe_placement.report.plots import plot_results
from clustergym.moe_placement.report.tables import results_table
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.viewer import draw
from clustergym.traces import TokenTrace, load_traces
from clustergym.training import (
    CHECKPOINT_NAME,
    CheckpointError,
    Progress,
    RunLogger,
    World,
    check_same_args,
    derive_seed,
    init_distributed,
    load_checkpoint,
    plain_args,
    print_result,
    run_folder,
    save_checkpoint,
)

EPLB_NAMES = ("eplb-once", "eplb", "eplb-ema", "eplb-threshold")
MASKED_LOGIT = -1e8


@dataclass
class TaskArgs:
    """The placement task that the agents are trained on."""

    layers: int = 6
    """Number of evenly spaced layers of the trace to train and evaluate on; 0 for all."""
    windows: int = 4
    """Windows served per episode."""
    window_tokens: int = 2048
    """Tokens per window."""
    ops_per_layer: int = 16
    """Operations per layer between two windows."""
    schedule: str = "drift"
    """How sequences are drawn: stationary, drift, switch or replay."""
    drift_rate: float = 0.5
    """Step size of the random walk of the domain mixture."""
    passes_per_window: int = 100
    """Forward passes per window. A migration is paid once, serving is paid in every pass."""
    start: str = "eplb"
    """Placement at the start of an episode: eplb or static."""
    homes: Literal["even", "served"] = "even"
    """Home GPUs of the observed tokens: distributed evenly over the GPUs, or as they were served."""
    lookahead_norm: int = 4
    """p-norm over GPUs in the look-ahead; 0 is the true time."""
    reward_norm: int = 4
    """p-norm over GPUs in the reward; 0 is the true time."""
    reward_window: Literal["next", "observed"] = "next"
    """Window on which the saved time is the reward."""
    credit: Literal["operation", "stream"] = "operation"
    """operation: each visit to a layer is an episode, and the cost of a migration is spread over horizon windows.
    stream: the whole stream is an episode, and each window adds what earlier operations still save."""
    horizon: float = 4.0
    """Number of windows over which the cost of a migration is spread (1 with credit stream)."""


@dataclass
class PretrainArgs:
    """The supervised phase before PPO."""

    pretrain_states: int = 8192
    """Number of states; 0 skips the phase."""
    pretrain_experts: int = 16
    """Experts that are simulated in each state."""
    pretrain_epochs: int = 3
    """Number of passes over the states of each visit."""
    pretrain_lr: float = 2e-3
    """Learning rate of the phase."""
    pretrain_temperature: float = 0.02
    """Targets are a softmax over the savings, in per cent of the layer's time, divided by this temperature."""
    pretrain_sharpen: float = 4.0
    """Multiplies all logits after the phase, so that PPO explores close to the most likely choices."""


@dataclass
class PPOArgs:
    """PPO."""

    learning_rate: float = 3e-4
    """Learning rate of Adam (its initial value with anneal_lr)."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to 0."""
    num_envs: int = 64
    """Number of parallel environments per process."""
    envs_per_stream: int = 8
    """Environments that play the same stream: the mean advantage of the others in the group is the baseline of each. 1
    for no baseline; fewer if num_envs is not a multiple."""
    num_steps: int = 64
    """Steps per environment and rollout; a multiple of ops_per_layer."""
    num_minibatches: int = 8
    """Number of minibatches. Each has whole visits to layers, shuffled in every epoch."""
    update_epochs: int = 2
    """Number of epochs per rollout."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages in each minibatch."""
    clip_coef: float = 0.2
    """Clipping range of the probability ratio and of the change of the value function."""
    clip_vloss: bool = True
    """Also clip the change of the value function."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient."""
    target_kl: float | None = 0.03
    """Stop an update after an epoch in which the approximate KL divergence exceeds this."""


@dataclass
class NetworkArgs:
    """Size of the networks."""

    hidden: int = 32
    """Width of the networks."""
    graph_layers: int = 1
    """Number of graph layers in each encoder."""


@dataclass
class AblationArgs:
    """Parts of the networks that can be switched off to measure what they contribute."""

    encoder: Literal["graph", "mlp"] = "graph"
    """graph: graph encoders; mlp: nodes do not exchange messages."""
    simultaneous: bool = False
    """Both actors choose at the same time: the GPU actor sees neither the chosen expert nor a look-ahead."""
    lookahead: bool = True
    """The GPU actor sees what each operation on the chosen expert would save on the observed window."""
    centralised: bool = True
    """One critic sees both graphs; otherwise each actor has a critic that sees its own graph."""
    separate_critic: bool = False
    """The critic has its own encoders."""


@dataclass
class EvaluationArgs:
    """Comparison with other planners."""

    eval_interval: int = 4
    """Iterations between evaluations on the validation streams; 0 for none."""
    eval_streams: int = 4
    """Number of held-out streams at the end; 0 for no evaluation."""
    eval_windows: int = 7
    """Windows per held-out stream."""
    eval_planners: tuple[str, ...] = ("static", *EPLB_NAMES, "bottleneck-8", "anneal")
    """Planners in the final table, in addition to the untrained, the supervised and the trained policy."""


@dataclass
class Args:
    trace: tuple[str, ...] = (DEFAULT_TRACE,)
    """Traces to train on: .npz or .npy files or names of bundled traces. Several are joined, each as its own domain."""
    eval_trace: tuple[str, ...] = ()
    """Traces for the final evaluation. By default the training traces are split in half by sequence."""
    cluster: str = "h800-4x4"
    """Cluster preset: gpu-NODESxGPUS."""
    model: str | None = None
    """Model preset; by default the model that the trace names."""
    total_timesteps: int = 131_072
    """Total number of operations over all environments and processes; 0 stops after the supervised phase."""
    seed: int = 1
    """Seed for all random number generators."""
    run_dir: Path | None = None
    """Folder for curves, checkpoints and the policy; by default runs/ppo_moe_marl__<trace>__<seed>."""
    resume: bool = False
    """Resume from the checkpoint in the run folder. The result is bit for bit that of an uninterrupted run."""
    checkpoint_interval: int = 12
    """Iterations between checkpoints; 0 for none. Environments are reset there: choose it longer than an episode."""
    init: str | None = None
    """Start from this policy (policy.pt, a run folder, or pretrained) instead of random weights."""
    save_model: bool = True
    """Write policy.pt, which the planners ``policy`` and ``policy-guided`` load."""
    cuda: bool = False
    """Simulate and train on the GPU."""
    threads: int = 1
    """Torch threads during updates; use all cores if nothing else runs. Rollouts use one thread."""
    track: bool = False
    """Also log to Weights & Biases; offline if there is no account."""
    task: tyro.conf.OmitArgPrefixes[TaskArgs] = field(default_factory=TaskArgs)
    """Options of the task."""
    pretrain: tyro.conf.OmitArgPrefixes[PretrainArgs] = field(default_factory=PretrainArgs)
    """Options of the supervised phase."""
    ppo: tyro.conf.OmitArgPrefixes[PPOArgs] = field(default_factory=PPOArgs)
    """Options of PPO."""
    network: tyro.conf.OmitArgPrefixes[NetworkArgs] = field(default_factory=NetworkArgs)
    """Size of the networks."""
    ablation: tyro.conf.OmitArgPrefixes[AblationArgs] = field(default_factory=AblationArgs)
    """Parts to switch off."""
    evaluation: tyro.conf.OmitArgPrefixes[EvaluationArgs] = field(default_factory=EvaluationArgs)
    """Options of the evaluation."""


def flat_args(args: Args) -> dict[str, Any]:
    """All arguments by the name of their flag, without the groups."""
    flat: dict[str, Any] = {}
    for name, value in plain_args(args).items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


# ALGO LOGIC: functions that are identical in every trainer (tests/test_trainers_agree.py)


def anneal(initial: float, iteration: int, num_iterations: int) -> float:
    """Linear schedule: ``initial`` in iteration 1, falling to 0 after the last iteration."""
    return initial * (1.0 - (iteration - 1) / num_iterations)


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    next_value: Tensor,
    final_values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Returns (advantages, returns), both of shape (steps, envs).

    ``terminations`` and ``dones`` (terminated or truncated) describe the outcome of step t. If an episode ended at step
    t, ``final_values[t]`` is the value of its last observation. It is used after a truncation, not after a termination.
    ``next_value`` (envs,) is the value of the observation that follows the last step of the rollout.
    """
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else next_value
        following = torch.where(dones[t], final_values[t], following)
        delta = rewards[t] + gamma * following * ~terminations[t] - values[t]
        last = delta + gamma * gae_lambda * last * ~dones[t]
        advantages[t] = last
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor) -> Tensor:
    """Normalise to mean 0 and standard deviation 1 within the minibatch."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def policy_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate loss: for each sample, the larger of the unclipped and the clipped loss."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(unclipped, clipped).mean()


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """Half the mean squared error. With ``clip_coef``, the larger of the errors with and without clipping."""
    unclipped = (new_values - returns) ** 2
    if clip_coef is None:
        return 0.5 * unclipped.mean()
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max(unclipped, (clipped_values - returns) ** 2).mean()


def kl_estimators(logratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates (k1, k2, k3) of KL(old ‖ new) from samples of the old policy, where logratio = log new − log old.

    k1 = −log r is unbiased but has high variance and can be negative. k2 = (log r)² / 2 is biased with low variance.
    k3 = (r − 1) − log r is unbiased with low variance and never negative. See http://joschu.net/blog/kl-approx.html.
    """
    return -logratio, logratio**2 / 2, logratio.exp() - 1 - logratio


def categorical_entropy(logprobs: Tensor, mask: Tensor | None) -> Tensor:
    """Entropy over the valid actions, from normalised log-probabilities of shape (…, actions)."""
    terms = logprobs.exp() * logprobs
    return -(terms if mask is None else torch.where(mask, terms, 0.0)).sum(-1)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# The networks. policy/network.py has the same actors in plain torch: it loads the weights that this trainer exports.

Layer = TypeVar("Layer", bound=nn.Module)
N_DERIVED_FEATURES = 6
"""Features that the encoder adds to each expert: co-activation with its own and the best other GPU and node, memory."""
N_CHOSEN_FEATURES = 4
"""Features of each node that describe the chosen expert there: placed, co-activation with GPU and node, legal."""
INITIAL_LOOK_SCALE = 3.0
"""Initial weight of the look-ahead in the score of an operation, per 1 % of the layer's time."""


def orthogonal(layer: Layer, std: float = 2**0.5) -> Layer:
    """Initialise every linear layer inside ``layer``: orthogonal weights scaled by ``std``, biases 0."""
    for part in layer.modules():
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            nn.init.orthogonal_(weight, std)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
    return layer


def decoder(size: int, hidden: int, std: float) -> nn.Sequential:
    """An MLP with one hidden layer and one output."""
    return nn.Sequential(orthogonal(nn.Linear(size, hidden)), nn.ReLU(), orthogonal(nn.Linear(hidden, 1), std))


def averaging(graph: Tensor, copies: int = 1) -> Tensor:
    """Weights with which a node averages its neighbours, as in ``DenseGraphConv(aggr="mean")``.

    With ``copies`` every neighbour exists so many times.
    """
    return graph / (copies * graph.sum(-1, keepdim=True)).clamp(min=1)


def to_visits(rows: Tensor, visits: int) -> Tensor:
    """(B, E, …) rows, with the steps of a visit next to each other → (visits, E, steps, …), a view."""
    return rows.unflatten(0, (visits, -1)).transpose(1, 2)


def to_rows(visits: Tensor) -> Tensor:
    """(visits, E, steps, …) → (B, E, …)."""
    return visits.transpose(1, 2).flatten(0, 1)


class GraphLayer(nn.Module):
    """Two graph convolutions over two weighted graphs; with encoder ``mlp`` one linear layer without messages.

    The torch-geometric layers hold the weights. They are evaluated together, which saves a quarter of the products.
    """

    def __init__(self, hidden: int, graph: bool) -> None:
        super().__init__()
        self.graph = graph
        if graph:
            self.first = orthogonal(DenseGraphConv(hidden, hidden, aggr="mean"), 1.0)
            self.second = orthogonal(DenseGraphConv(hidden, hidden, aggr="mean"), 1.0)
        else:
            self.alone = orthogonal(nn.Linear(hidden, hidden))

    def root(self, x: Tensor) -> Tensor:
        """What a node computes from its own embedding, and the biases."""
        bias = self.first.lin_rel.bias + self.second.lin_rel.bias
        return linear(x, self.first.lin_root.weight + self.second.lin_root.weight, bias)

    def messages(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, self.first.lin_rel.weight), linear(x, self.second.lin_rel.weight)


class ExpertLayer(GraphLayer):
    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Experts (visits, E, steps, H), averaging weights (visits, E, E): the steps of a visit share their graphs."""
        if not self.graph:
            return torch.relu(self.alone(x)) + x
        one, two = (message.flatten(2) for message in self.messages(x))
        received = torch.baddbmm(torch.baddbmm(self.root(x).flatten(2), first, one), second, two)
        return torch.relu(received.unflatten(2, x.shape[2:])) + x


class NodeLayer(GraphLayer):
    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Nodes (B, kinds, G, H) with averaging weights (B, G, G) and (G, G) between GPUs, the same for all kinds."""
        if not self.graph:
            return torch.relu(self.alone(x)) + x
        one, two = self.messages(x.sum(1))
        return torch.relu((first @ one + second @ two)[:, None] + self.root(x)) + x


class Encoders(nn.Module):
    """Embeddings of the experts (visits, E, steps, H) and of the GPUs (B, G, H) before any choice."""

    def __init__(self, hidden: int, graph_layers: int, graph: bool) -> None:
        super().__init__()
        self.experts_in = orthogonal(nn.Linear(N_EXPERT_FEATURES + N_DERIVED_FEATURES + len(PROGRESS), hidden))
        self.gpus_in = orthogonal(nn.Linear(N_GPU_FEATURES, hidden))
        self.around = orthogonal(nn.Linear(hidden, hidden, bias=False), 1.0) if graph else None
        self.layers = nn.ModuleList(ExpertLayer(hidden, graph) for _ in range(graph_layers))
        self.gpu_layer = NodeLayer(hidden, graph)

    def forward(self, inputs: Inputs, near: Tensor, near_node: Tensor, same_node: Tensor) -> tuple[Tensor, Tensor]:
        placement = inputs["placement"]
        replicas, absent = placement.sum(-1).clamp(min=1), 1 - placement
        derived = torch.stack(
            [
                (near * placement).sum(-1) / replicas,
                (near * absent).amax(-1),
                (near_node * placement).sum(-1) / replicas,
                (near_node * absent).amax(-1),
            ],
            -1,
        )
        progress = inputs["progress"][:, None].expand(-1, placement.shape[1], -1)
        experts = self.experts_in(torch.cat([inputs["experts"], derived, inputs["memory"], progress], -1))
        gpus = torch.relu(self.gpus_in(inputs["gpus"][:, : len(same_node)]))
        gpus = self.gpu_layer(gpus[:, None], averaging(inputs["traffic"]), same_node)[:, 0]
        if self.around is not None:
            # Embeddings of the GPUs that hold an expert, and of those that hold the experts it is used with.
            share = placement / replicas[..., None] + near / near.sum(-1, keepdim=True).clamp(min=1e-6)
            experts = experts + share @ self.around(gpus)
        experts = torch.relu(to_visits(experts, len(inputs["coactivation"])).contiguous())
        graphs = averaging(inputs["coactivation"]), inputs["similar"]  # rows of similar sum to 1 already
        for layer in self.layers:
            experts = layer(experts, *graphs)
        return experts, gpus


class Agent(nn.Module):
    """The expert actor, the GPU actor and the critic, for any number of experts, GPUs and layers.

    The graph inputs (LAYER_KEYS) have one row per visit, all other inputs one row per step, with the steps of a visit
    next to each other. Renumbering experts, or GPUs together with their nodes, renumbers the scores in the same way.
    """

    value_mean: Tensor
    value_std: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.options = args.ablation
        hidden, graph_layers, graph = args.network.hidden, args.network.graph_layers, args.ablation.encoder == "graph"
        self.encoders = Encoders(hidden, graph_layers, graph)
        self.expert_head = decoder(2 * hidden, hidden, 0.01)
        self.nodes_in = orthogonal(nn.Linear(N_GPU_FEATURES + N_PARTS + N_CHOSEN_FEATURES, hidden))
        self.chosen_in = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.gpus_on = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.node_layers = nn.ModuleList(NodeLayer(hidden, graph) for _ in range(graph_layers))
        self.node_head = decoder(hidden, hidden, 0.01)
        self.look_scale = nn.Parameter(torch.tensor(INITIAL_LOOK_SCALE))
        self.critic_encoders = Encoders(hidden, graph_layers, graph) if self.options.separate_critic else None
        sizes = [4 * hidden + len(PROGRESS)] if self.options.centralised else [2 * hidden + len(PROGRESS)] * 2
        self.critics = nn.ModuleList(decoder(size, hidden, 1.0) for size in sizes)
        # The scale of returns depends on the trace, so the critic predicts normalised returns. Until the scale is known
        # all values are 0: with a guessed scale of 1, an untrained critic would outweigh rewards of 1e-4.
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.zeros(()))

    def encode(self, inputs: Inputs, same_node: Tensor) -> dict[str, Tensor]:
        """Embeddings that both actors and the critic start from."""
        coactivation = inputs["coactivation"]
        placement = to_visits(inputs["placement"], len(coactivation))
        near = to_rows((coactivation @ placement.flatten(2)).unflatten(2, placement.shape[2:]))
        near_node = near @ same_node
        experts, gpus = self.encoders(inputs, near, near_node, same_node)
        return {"experts": experts, "gpus": gpus, "near": near, "near_node": near_node}

    def expert_logits(self, inputs: Inputs, encoded: dict[str, Tensor]) -> Tensor:
        """The expert actor: (B, E) scores of the experts, masked."""
        experts, (first, activation, last) = encoded["experts"], self.expert_head
        # The mean over experts is the same input for all of them: multiply it once.
        own, overall = first.weight.split(experts.shape[-1], -1)
        hidden = linear(experts, own) + linear(experts.mean(1, keepdim=True), overall, first.bias)
        logits = to_rows(last(activation(hidden)).squeeze(-1))
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
        """The GPU actor: (B, 3·G) scores of the nodes, masked.

        It reads the chosen experts (B,), their look-ahead ``parts`` (B, 3·G, parts) and which nodes are legal (B, 3·G).
        """
        options, rows = self.options, torch.arange(len(expert), device=expert.device)
        if options.simultaneous:
            legal = inputs["gpu_mask"]
        if options.simultaneous or not options.lookahead:
            parts = torch.zeros_like(parts)
        chosen = torch.stack(
            [inputs["placement"][rows, expert], encoded["near"][rows, expert], encoded["near_node"][rows, expert]], -1
        ).repeat(1, 3, 1)
        if options.simultaneous:
            chosen = torch.zeros_like(chosen)
        nodes = self.nodes_in(torch.cat([inputs["gpus"], chosen, legal[..., None].float(), parts.clamp(-5, 5)], -1))
        nodes = nodes.unflatten(1, (3, -1)) + self.gpus_on(encoded["gpus"])[:, None]
        if not options.simultaneous:
            steps = encoded["experts"].shape[2]
            embedding = encoded["experts"][rows // steps, expert, rows % steps]
            nodes = nodes + self.chosen_in(embedding)[:, None, None]
        nodes = torch.relu(nodes)
        # Each of a GPU's three nodes is connected to all three nodes of the GPUs that it exchanges tokens with.
        traffic, same = averaging(inputs["traffic"], copies=3), same_node / 3
        for layer in self.node_layers:
            nodes = layer(nodes, traffic, same)
        logits = self.node_head(nodes.flatten(1, 2)).squeeze(-1) + self.look_scale * gains(parts)
        return torch.where(legal, logits, MASKED_LOGIT)

    def values(self, inputs: Inputs, encoded: dict[str, Tensor], same_node: Tensor) -> Tensor:
        """The critics: (B, critics) normalised values."""
        experts, gpus = encoded["experts"], encoded["gpus"]
        if self.critic_encoders is not None:
            experts, gpus = self.critic_encoders(inputs, encoded["near"], encoded["near_node"], same_node)
        pooled_experts = torch.cat([experts.mean(1), experts.max(1).values], -1).flatten(0, 1)
        pooled_gpus = torch.cat([gpus.mean(1), gpus.max(1).values], -1)
        graphs = [pooled_experts, pooled_gpus]
        if self.options.centralised:
            graphs = [torch.cat(graphs, -1)]
        values = [
            critic(torch.cat([x, inputs["progress"]], -1)) for critic, x in zip(self.critics, graphs, strict=True)
        ]
        return torch.cat(values, -1)

    def forward(
        self, inputs: Inputs, same_node: Tensor, expert: Tensor, parts: Tensor, legal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(expert logits, node logits for the chosen experts, normalised values) in one pass."""
        encoded = self.encode(inputs, same_node)
        return (
            self.expert_logits(inputs, encoded),
            self.node_logits(inputs, encoded, same_node, expert, parts, legal),
            self.values(inputs, encoded, same_node),
        )

    def rewards_to_go(self, inputs: Inputs, encoded: dict[str, Tensor], same_node: Tensor) -> Tensor:
        """(B,) values in units of reward, the mean over critics."""
        return self.values(inputs, encoded, same_node).mean(-1) * self.value_std + self.value_mean

    @torch.no_grad()
    def set_value_scale(self, mean: Tensor, std: Tensor) -> None:
        """Set new statistics of the returns and correct the critics' last layers, so that no value changes.

        The first statistics need no correction: nothing has been learned yet.
        """
        for critic in self.critics if float(self.value_std) > 0 else ():
            critic[-1].weight.mul_(self.value_std / std)
            critic[-1].bias.mul_(self.value_std).add_(self.value_mean - mean).div_(std)
        self.value_mean.copy_(mean)
        self.value_std.copy_(std)

    @torch.no_grad()
    def scale_logits(self, factor: float) -> None:
        """Multiply all logits: the most likely choice stays the same, others become less likely."""
        for head in (self.expert_head, self.node_head):
            head[-1].weight.mul_(factor)
            head[-1].bias.mul_(factor)
        self.look_scale.mul_(factor)


# The task


@dataclass
class Task:
    """What follows from the arguments before training starts."""

    train: TokenTrace
    test: TokenTrace
    config: PlacementConfig
    simulator: Simulator
    settings: PolicySettings


def evenly_spaced(trace: TokenTrace, layers: int) -> TokenTrace:
    picked = np.unique(np.linspace(0, trace.n_layers - 1, min(layers or trace.n_layers, trace.n_layers)).round())
    return trace.select(layers=picked.astype(int).tolist())


def policy_settings(args: TaskArgs) -> PolicySettings:
    horizon = 1.0 if args.credit == "stream" else args.horizon
    return PolicySettings(args.homes, args.lookahead_norm, horizon, args.ops_per_layer)


def check_arguments(args: Args) -> None:
    """Refuse sizes that do not fit together before anything is loaded."""
    ppo, ops_per_layer = args.ppo, args.task.ops_per_layer
    flat = flat_args(args)
    for name in ("threads", "envs_per_stream", "hidden", "graph_layers"):
        if flat[name] < 1:
            raise ValueError(f"{name} is {flat[name]}: expected at least 1")
    if args.pretrain.pretrain_sharpen <= 0:
        raise ValueError(f"pretrain_sharpen is {args.pretrain.pretrain_sharpen}: expected more than 0")
    if ppo.num_steps % ops_per_layer:
        raise ValueError(
            f"num_steps is {ppo.num_steps}: expected a multiple of ops_per_layer, which is {ops_per_layer}"
        )
    visits = ppo.num_envs * ppo.num_steps // ops_per_layer
    if visits % ppo.num_minibatches:
        raise ValueError(
            f"{visits} visits to a layer ({ppo.num_envs} environments, {ppo.num_steps} steps, {ops_per_layer} steps "
            f"per visit) do not divide into {ppo.num_minibatches} minibatches: lower --num-minibatches, or use more "
            "environments or steps"
        )


def make_task(args: Args) -> Task:
    check_arguments(args)
    options = args.task
    train = evenly_spaced(load_traces(list(args.trace)), options.layers)
    if args.eval_trace:
        test = evenly_spaced(load_traces(list(args.eval_trace)), options.layers)
        if (test.n_experts, test.top_k) != (train.n_experts, train.top_k):
            raise ValueError(
                f"--eval-trace {test.name} is top-{test.top_k} of {test.n_experts} experts, but --trace {train.name} "
                f"is top-{train.top_k} of {train.n_experts}: expected traces of one model. Use clustergym eval "
                "--checkpoint to evaluate on another model"
            )
    else:
        train, test = train.split(0.5, seed=0)
    model = model_for(train, args.model)
    simulator = Simulator(model, get_cluster(args.cluster), passes_per_window=options.passes_per_window)
    settings = policy_settings(options)
    config = PlacementConfig(
        trace=train,
        cluster=simulator.cluster,
        model=model,
        windows=options.windows,
        window_tokens=options.window_tokens,
        ops_per_layer=options.ops_per_layer,
        schedule=options.schedule,
        drift_rate=options.drift_rate,
        passes_per_window=settings.passes(options.passes_per_window),
        start=options.start,
        reward_window=options.reward_window,
        reward_norm=options.reward_norm,
        credit=options.credit,
    )
    return Task(train, test, config, simulator, settings)


def network_options(args: Args) -> dict[str, Any]:
    return asdict(args.network) | asdict(args.ablation)


def make_agent(args: Args) -> Agent:
    """New networks, with the weights of --init if given."""
    agent = Agent(args)
    if args.init is not None:
        found = read_policy(args.init)
        for key, expected in (("network", network_options(args)), ("view", asdict(policy_settings(args.task)))):
            if found[key] != expected:
                raise CheckpointError(
                    f"--init {args.init} has {key} options {found[key]}, but the arguments ask for {expected}"
                )
        agent.load_state_dict(found["weights"])
    return agent


# Rollouts


@dataclass
class Batch:
    """Training data with one row per step; the steps of a visit to a layer are neighbours and share its graphs."""

    steps: Inputs
    graphs: Inputs
    expert: Tensor
    node: Tensor
    parts: Tensor
    legal: Tensor
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.expert)

    @property
    def visits(self) -> int:
        return len(self.graphs[LAYER_KEYS[0]])

    def rows(self, visits: Tensor) -> Tensor:
        """Rows of all steps of some visits."""
        steps = len(self) // self.visits
        return (visits[:, None] * steps + torch.arange(steps, device=visits.device)).flatten()

    def inputs(self, visits: Tensor, rows: Tensor) -> Inputs:
        return {key: x[rows] for key, x in self.steps.items()} | {key: x[visits] for key, x in self.graphs.items()}


def sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Samples of categorical distributions and their log-probabilities."""
    logprobs = logits.log_softmax(-1)
    # Gumbel trick: the argmax of logits plus Gumbel noise is a sample.
    drawn = (logprobs - torch.empty_like(logprobs).exponential_().log()).argmax(-1)
    return drawn, logprobs.gather(-1, drawn[:, None]).squeeze(-1)


def subtract_group_baseline(advantages: Tensor, envs_per_stream: int) -> Tensor:
    """Subtract the mean advantage of the other environments with the same stream, (steps, envs) → (steps, envs).

    Most of the variance comes from the next window, which no critic can predict and which is the same for the whole
    group. The mean of the others does not depend on an environment's own actions, so the gradient stays unbiased.
    """
    groups = advantages.unflatten(1, (-1, envs_per_stream))
    others = (groups.sum(-1, keepdim=True) - groups) / (envs_per_stream - 1)
    return (groups - others).flatten(1)


class Rollouts:
    """Plays both actors in the batched environment; episodes continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, task: Task, device: torch.device) -> None:
        self.args, self.agent = args, agent
        self.envs_per_stream = math.gcd(args.ppo.envs_per_stream, args.ppo.num_envs)
        batch = PlacementBatch(task.config, args.ppo.num_envs, device)
        self.view = PolicyView(batch, args.task.homes, args.task.lookahead_norm)
        self.seconds = {"simulator": 0.0, "policy": 0.0}
        self.saved = float("nan")
        """Share of the static time that the last finished episodes saved."""

    def restart(self, seed: int) -> None:
        """Reset all environments from a seed. A resumed run continues from here with the same episodes."""
        stream = np.arange(self.args.ppo.num_envs, dtype=np.int64) // self.envs_per_stream
        self.view.batch.seed(derive_seed(seed) * 2**20 + stream)
        self.view.reset()

    def step(self, expert: Tensor, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(reward, whether the visit to the layer ended, whether the episode ended); finished episodes are reset."""
        reward, visit_end = self.view.step(expert, node)
        batch = self.view.batch
        done = batch.done
        if bool(done.any()):
            saved = batch.saved[done] / batch.config.windows
            self.saved = float(saved.mean())
            self.view.reset(done)
            visit_end = visit_end | done
        return reward, visit_end, done

    @torch.no_grad()
    def collect(self) -> Batch:
        """One rollout of num_steps × num_envs steps, with advantages."""
        ppo, ops_per_layer, agent, view = self.args.ppo, self.args.task.ops_per_layer, self.agent, self.view
        same_node = view.same_node
        steps: dict[str, list[Tensor]] = {key: [] for key in STEP_KEYS}
        graphs: dict[str, list[Tensor]] = {key: [] for key in LAYER_KEYS}
        taken: list[tuple[Tensor, ...]] = []
        for t in range(ppo.num_steps):
            started = time.perf_counter()
            inputs = view.inputs()
            for key in STEP_KEYS:
                steps[key].append(inputs[key].clone())
            if t % ops_per_layer == 0:
                for key in LAYER_KEYS:
                    graphs[key].append(inputs[key].clone())
            encoded = agent.encode(inputs, same_node)
            expert, expert_logprob = sample(agent.expert_logits(inputs, encoded))
            values = agent.rewards_to_go(inputs, encoded, same_node)
            legal = view.legal(expert)
            expert_chosen = time.perf_counter()
            parts = view.look(expert)
            simulated = time.perf_counter()
            node, node_logprob = sample(agent.node_logits(inputs, encoded, same_node, expert, parts, legal))
            node_chosen = time.perf_counter()
            reward, visit_end, done = self.step(expert, node)
            self.seconds["policy"] += expert_chosen - started + node_chosen - simulated
            self.seconds["simulator"] += simulated - expert_chosen + time.perf_counter() - node_chosen
            end = visit_end if self.args.task.credit == "operation" else done
            taken.append((expert, node, parts, legal, expert_logprob + node_logprob, values, reward, end))
        expert, node, parts, legal, logprobs, values, rewards, ends = (torch.stack(x) for x in zip(*taken, strict=True))
        inputs = view.inputs()
        next_value = agent.rewards_to_go(inputs, agent.encode(inputs, same_node), same_node)
        # Ends are terminations: what follows does not depend on what was done before.
        advantages, returns = compute_gae(
            rewards, values, ends, ends, next_value, torch.zeros_like(values), ppo.gamma, ppo.gae_lambda
        )
        if self.envs_per_stream > 1:
            advantages = subtract_group_baseline(advantages, self.envs_per_stream)

        def group(x: Tensor) -> Tensor:
            """(steps, envs, …) → rows with the steps of a visit next to each other."""
            return x.unflatten(0, (-1, ops_per_layer)).transpose(1, 2).flatten(0, 2)

        return Batch(
            {key: group(torch.stack(x)) for key, x in steps.items()},
            {key: torch.stack(x).flatten(0, 1) for key, x in graphs.items()},
            *(group(x) for x in (expert, node, parts, legal, logprobs, advantages, returns, values)),
        )


# Learning


def supervised_phase(agent: Agent, rollouts: Rollouts, args: Args, world: World) -> dict[str, float]:
    """The supervised phase: learn which experts, and which operations on them, save most on the observed window.

    The states come from episodes that mostly take the best operation found, and an operation on a random expert
    otherwise.
    """
    options, view, optimizer = args.pretrain, rollouts.view, make_optimizer(agent, args.pretrain.pretrain_lr)
    size, ops_per_layer = args.ppo.num_envs, args.task.ops_per_layer
    n_experts, device = view.batch.n_experts, view.batch.device
    n_candidates = min(options.pretrain_experts, n_experts)
    rounds = max(1, round(options.pretrain_states / (size * ops_per_layer * world.size)))
    losses: dict[str, float] = {}
    for i in range(rounds):
        optimizer.param_groups[0]["lr"] = anneal(options.pretrain_lr, i + 1, rounds)
        states: list[tuple[Inputs, Tensor, Tensor, Tensor]] = []
        graphs = {key: x.clone() for key, x in view.inputs().items() if key in LAYER_KEYS}
        for _ in range(ops_per_layer):
            inputs = {key: x.clone() for key, x in view.inputs().items() if key in STEP_KEYS} | graphs
            candidates = torch.rand((size, n_experts), device=device).argsort(-1)[:, :n_candidates]
            parts = view.look_many(candidates)
            legal = view.batch.obs["joint_mask"].bool()[view.rows[:, None], candidates]
            states.append((inputs, candidates, parts, legal))
            best, node = torch.where(legal, gains(parts), -torch.inf).max(-1)
            explore = torch.rand(size, device=device) < 0.3
            pick = torch.where(explore, torch.zeros_like(view.rows), best.argmax(-1))
            expert, node = candidates[view.rows, pick], node[view.rows, pick]
            view.look(expert)
            rollouts.step(expert, node)
        for _ in range(options.pretrain_epochs):
            for t in torch.randperm(ops_per_layer).tolist():
                losses = supervised_step(agent, optimizer, view, *states[t], args, world)
    return losses


def supervised_step(
    agent: Agent,
    optimizer: torch.optim.Adam,
    view: PolicyView,
    inputs: Inputs,
    candidates: Tensor,
    parts: Tensor,
    legal: Tensor,
    args: Args,
    world: World,
) -> dict[str, float]:
    """One step of cross-entropy towards a softmax over the savings: of the candidates, and of the nodes of two."""
    rows, temperature = view.rows, args.pretrain.pretrain_temperature
    savings = torch.where(legal, gains(parts), -torch.inf)
    # Experts that cannot be chosen get a target of exactly 0.
    best = torch.where(inputs["expert_mask"].gather(-1, candidates), savings.amax(-1), MASKED_LOGIT)
    encoded = agent.encode(inputs, view.same_node)
    logprobs = agent.expert_logits(inputs, encoded).gather(-1, candidates).log_softmax(-1)
    expert_loss = -(logprobs * (best / temperature).softmax(-1)).sum(-1).mean()
    node_loss = torch.zeros((), device=rows.device)
    # The best candidate, and the first, which is a random one.
    for pick in (best.argmax(-1), torch.zeros_like(rows)):
        expert = candidates[rows, pick]
        logits = agent.node_logits(inputs, encoded, view.same_node, expert, parts[rows, pick], legal[rows, pick])
        target = (savings[rows, pick] / temperature).softmax(-1)
        node_loss = node_loss - (logits.log_softmax(-1) * target).sum(-1).mean()
    optimizer.zero_grad()
    (expert_loss + node_loss).backward()
    world.average_gradients(agent.parameters())
    nn.utils.clip_grad_norm_(agent.parameters(), args.ppo.max_grad_norm)
    optimizer.step()
    return {"pretrain/expert_loss": expert_loss.item(), "pretrain/node_loss": node_loss.item()}


class ReturnStatistics:
    """Running mean and standard deviation of the returns, for the critic."""

    def __init__(self) -> None:
        self.weight, self.mean, self.square = 0.0, 0.0, 0.0

    def update(self, returns: Tensor, world: World) -> tuple[float, float]:
        self.weight = 0.9 * self.weight + 0.1
        self.mean = 0.9 * self.mean + 0.1 * world.mean(float(returns.mean()))
        self.square = 0.9 * self.square + 0.1 * world.mean(float((returns**2).mean()))
        mean = self.mean / self.weight
        return mean, max(self.square / self.weight - mean**2, 1e-16) ** 0.5


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, same_node: Tensor, args: Args, world: World
) -> dict[str, float]:
    """Several epochs of shuffled minibatches on one rollout; returns the mean metrics."""
    ppo = args.ppo
    metrics: list[dict[str, Tensor]] = []
    old_values = (batch.values - agent.value_mean) / agent.value_std
    returns = (batch.returns - agent.value_mean) / agent.value_std
    for _ in range(ppo.update_epochs):
        # Whole visits are shuffled, not steps: all steps of a visit are multiplied with its graphs at once.
        shuffled = torch.randperm(batch.visits, device=batch.expert.device)
        bounds = np.linspace(0, batch.visits, ppo.num_minibatches + 1).astype(int)
        for start, end in pairwise(bounds):
            visits = shuffled[start:end]
            rows = batch.rows(visits)
            inputs, legal = batch.inputs(visits, rows), batch.legal[rows]
            expert_logits, node_logits, values = agent(inputs, same_node, batch.expert[rows], batch.parts[rows], legal)
            expert_logprobs, node_logprobs = expert_logits.log_softmax(-1), node_logits.log_softmax(-1)
            # Two components of one action: their log-probabilities add up.
            logprobs = (
                expert_logprobs.gather(-1, batch.expert[rows, None]) + node_logprobs.gather(-1, batch.node[rows, None])
            ).squeeze(-1)
            logratio = logprobs - batch.logprobs[rows]
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            advantages = normalize_advantages(batch.advantages[rows]) if ppo.norm_adv else batch.advantages[rows]
            pg_loss = policy_loss(ratio, advantages, ppo.clip_coef)
            v_loss = value_loss(
                values, old_values[rows, None], returns[rows, None], ppo.clip_coef if ppo.clip_vloss else None
            )
            node_mask = inputs["gpu_mask"] if args.ablation.simultaneous else legal
            expert_entropy = categorical_entropy(expert_logprobs, inputs["expert_mask"]).mean()
            node_entropy = categorical_entropy(node_logprobs, node_mask).mean()
            approx_kl = k3.mean()
            loss = pg_loss - ppo.ent_coef * (expert_entropy + node_entropy) + ppo.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            world.average_gradients(agent.parameters())
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), ppo.max_grad_norm)
            optimizer.step()
            metrics.append({
                "policy_loss": pg_loss.detach(),
                "value_loss": v_loss.detach(),
                "expert_entropy": expert_entropy.detach(),
                "node_entropy": node_entropy.detach(),
                "old_approx_kl": k1.detach().mean(),
                "approx_kl": approx_kl.detach(),
                "clipfrac": ((ratio.detach() - 1.0).abs() > ppo.clip_coef).float().mean(),
                "grad_norm": grad_norm,
            })  # fmt: skip
        if ppo.target_kl is not None and world.mean(approx_kl.item()) > ppo.target_kl:
            break
    means = {f"losses/{name}": float(torch.stack([m[name] for m in metrics]).mean()) for name in metrics[0]}
    return means | {"losses/explained_variance": explained_variance(batch.values, batch.returns)}


def iterate(
    agent: Agent,
    optimizer: torch.optim.Adam,
    rollouts: Rollouts,
    statistics: ReturnStatistics,
    args: Args,
    world: World,
) -> dict[str, float]:
    """One rollout and one update; returns the metrics."""
    rollouts.seconds = dict.fromkeys(rollouts.seconds, 0.0)
    started = time.perf_counter()
    batch = rollouts.collect()
    collected = time.perf_counter()
    mean, std = statistics.update(batch.returns, world)
    device = batch.returns.device
    agent.set_value_scale(torch.tensor(mean, device=device), torch.tensor(std, device=device))
    torch.set_num_threads(args.threads)
    metrics = update(agent, optimizer, batch, rollouts.view.same_node, args, world)
    torch.set_num_threads(1)
    ended = time.perf_counter()
    elapsed = max(ended - started, 1e-9)
    return metrics | {
        "charts/episodic_saved": rollouts.saved,
        "charts/return_mean": mean,
        "charts/return_std": std,
        "charts/learning_rate": optimizer.param_groups[0]["lr"],
        "charts/SPS": len(batch) * world.size / elapsed,
        "time/simulator": rollouts.seconds["simulator"] / elapsed,
        "time/policy": rollouts.seconds["policy"] / elapsed,
        "time/update": (ended - collected) / elapsed,
    }


def all_finite(agent: nn.Module, metrics: dict[str, float]) -> bool:
    """Whether all losses and weights are finite. The explained variance may be undefined."""
    losses = [
        value for name, value in metrics.items() if name.startswith("losses/") and name != "losses/explained_variance"
    ]
    return bool(np.isfinite(losses).all()) and all(bool(torch.isfinite(p).all()) for p in agent.parameters())


# Evaluation


class Evaluator:
    """Compares the policy with other planners: on validation streams in training, on held-out streams at the end."""

    def __init__(self, args: Args, task: Task) -> None:
        self.args, self.task = args, task
        self.validation = self.protocol(args.task.windows, 2, derive_seed(args.seed, 7) % 10**6)
        self.reference_us = {
            name: self.run(name, make_planner(name, task.simulator), self.validation, task.train).total_us
            for name in ("static", "eplb")
        }

    def protocol(self, windows: int, streams: int, seed: int) -> Protocol:
        options = self.args.task
        return Protocol(options.schedule, windows, options.window_tokens, options.drift_rate, streams, seed)

    def run(self, name: str, planner: Planner, protocol: Protocol, trace: TokenTrace) -> Result:
        return evaluate_planner(planner, name, self.task.train, trace, protocol)

    def policy(self, weights: dict[str, Tensor]) -> Policy:
        """The planner that uses the exported network."""
        network = PolicyNetwork.from_state(network_options(self.args), weights)
        return Policy(self.task.simulator, policy=(network, self.task.settings))

    def validate(self, agent: Agent) -> dict[str, float]:
        """Time of the policy on the validation streams, and what it saves compared with static placement and EPLB."""
        # The weights of a new network are drawn and not used: recorded runs drew these random numbers here.
        Agent(self.args)
        total_us = self.run("policy", self.policy(agent.state_dict()), self.validation, self.task.train).total_us
        saved = {
            f"validation/saved_vs_{name}": 100 * (1 - total_us / reference_us)
            for name, reference_us in self.reference_us.items()
        }
        return {"validation/total_us": total_us} | saved

    def compare(self, stages: dict[str, dict[str, Tensor]]) -> list[Result]:
        """Results of the planners and of all stages of the policy on streams that share no sequence with training."""
        options, task = self.args.evaluation, self.task
        protocol = self.protocol(options.eval_windows, options.eval_streams, 0)
        planners = {name: make_planner(name, task.simulator) for name in options.eval_planners}
        planners |= {name: self.policy(weights) for name, weights in stages.items()}
        return [self.run(name, planner, protocol, task.test) for name, planner in planners.items()]


def draw_curve(folder: Path, curve: list[tuple[int, float, float]]) -> None:
    """Plot the time saved on the validation streams."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps, static, eplb = zip(*curve, strict=True)
    axes.plot(steps, static, "o-", ms=3, color="#4477AA", label="vs static")
    axes.plot(steps, eplb, "s-", ms=3, color="#EE6677", label="vs EPLB in every window")
    axes.axhline(0, color="#BBBBBB", lw=1)
    axes.set(xlabel="operations (0: after the supervised phase)", ylabel="time saved, %", title="validation streams")
    axes.legend()
    figure.savefig(folder / "validation.png", dpi=120)
    plt.close(figure)


def snapshot(agent: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in agent.state_dict().items()}


def train(args: Args, world: World) -> dict[str, Any]:
    """The whole run; returns the fields of the result line (on rank 0, which evaluates)."""
    device, evaluation = world.device, args.evaluation
    task = make_task(args)
    torch.manual_seed(args.seed)
    agent = make_agent(args).to(device)
    folder = run_folder(f"ppo_moe_marl__{task.train.name}__{args.seed}", args.run_dir, args.resume)
    config = flat_args(args) | {"world_size": world.size}
    batch_size = args.ppo.num_envs * args.ppo.num_steps * world.size
    num_iterations = args.total_timesteps // batch_size
    if args.total_timesteps and num_iterations < 1:
        raise ValueError(
            f"total_timesteps is {args.total_timesteps}: expected 0, or at least one rollout of {batch_size}"
        )
    world.broadcast(agent)
    stages = {"untrained": snapshot(agent)}
    optimizer = make_optimizer(agent, args.ppo.learning_rate)
    rollouts = Rollouts(args, agent, task, device)
    statistics, first, curve = ReturnStatistics(), 1, []
    state = None
    if args.resume and (folder / CHECKPOINT_NAME).exists():
        state = load_checkpoint(folder / CHECKPOINT_NAME, "ppo_moe_marl", device)
        check_same_args(state["args"], config)
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        statistics.weight, statistics.mean, statistics.square = state["statistics"]
        stages["supervised"] = state["supervised"]
        first, curve = state["iteration"] + 1, [tuple(point) for point in state["curve"]]

    def save(iteration: int) -> None:
        if not world.is_main or not args.checkpoint_interval:
            return
        logger.flush()
        content = {
            "args": config,
            "agent": agent.state_dict(),
            "supervised": stages["supervised"],
            "optimizer": optimizer.state_dict(),
            "statistics": [statistics.weight, statistics.mean, statistics.square],
            "iteration": iteration,
            "curve": [list(point) for point in curve],
        }
        save_checkpoint(folder / CHECKPOINT_NAME, "ppo_moe_marl", content)

    def validate(step: int) -> dict[str, float]:
        if evaluator is None:
            return {}
        found = evaluator.validate(agent)
        curve.append((step, found["validation/saved_vs_static"], found["validation/saved_vs_eplb"]))
        logger.image("placement", draw(frame_of(rollouts.view.batch, [])), step)
        return found

    start_step, total_steps = (first - 1) * batch_size, num_iterations * batch_size
    logger = RunLogger(folder, config, args.track, start_step=start_step, enabled=world.is_main)
    with logger, Progress(total_steps, start_step, enabled=world.is_main) as progress:
        evaluator = Evaluator(args, task) if world.is_main and evaluation.eval_interval else None
        validation: dict[str, float] = {}
        if state is None:
            if args.pretrain.pretrain_states:
                torch.manual_seed(derive_seed(args.seed, 0, world.rank))
                rollouts.restart(derive_seed(args.seed, 0, world.rank))
                started = time.perf_counter()
                losses = supervised_phase(agent, rollouts, args, world)
                logger.scalars(losses | {"pretrain/seconds": time.perf_counter() - started}, 0)
                agent.scale_logits(args.pretrain.pretrain_sharpen)
            stages["supervised"] = snapshot(agent)
            validation = validate(0)
            logger.scalars(validation, 0)
            save(0)
        else:
            message = f"resumed after iteration {first - 1} of {num_iterations}"
            Console(stderr=True).print(message, highlight=False)
        for iteration in range(first, num_iterations + 1):
            interval = args.checkpoint_interval or num_iterations
            if (iteration - 1) % interval == 0:
                # Resumed or not, every run gets here with the same networks and then draws the same random numbers.
                torch.manual_seed(derive_seed(args.seed, iteration, world.rank))
                rollouts.restart(derive_seed(args.seed, iteration, world.rank))
            if args.ppo.anneal_lr:
                optimizer.param_groups[0]["lr"] = anneal(args.ppo.learning_rate, iteration, num_iterations)
            metrics = iterate(agent, optimizer, rollouts, statistics, args, world)
            if not all_finite(agent, metrics):
                good = folder / CHECKPOINT_NAME
                kept = f"the last good checkpoint is {good}" if good.exists() else "there is no checkpoint yet"
                raise FloatingPointError(
                    f"iteration {iteration}: a loss or weight is not finite ({metrics}); {kept}; "
                    "a lower --learning-rate may help"
                )
            step = iteration * batch_size
            if evaluation.eval_interval and (iteration % evaluation.eval_interval == 0 or iteration == num_iterations):
                validation = validate(step)
            logger.scalars(metrics | validation, step)
            progress.update(step, **{name.removeprefix("validation/"): value for name, value in validation.items()})
            if iteration % interval == 0 or iteration == num_iterations:
                save(iteration)
        steps_per_s = progress.steps_per_s(total_steps)
        if not world.is_main:
            return {}
        stages |= {"policy": snapshot(agent)} if total_steps else {}
        if args.save_model:
            options = network_options(args)
            about = {"args": {key: str(value) for key, value in config.items()}, "steps": total_steps}
            save_policy(folder / FILE_NAME, options, agent.state_dict(), task.settings, about)
            about |= {"steps": 0}
            save_policy(folder / "supervised" / FILE_NAME, options, stages["supervised"], task.settings, about)
        results: list[Result] = []
        if evaluation.eval_streams:
            results = (evaluator or Evaluator(args, task)).compare(stages)
            title = f"{task.test.name} on {task.simulator.cluster.name}, held out, {args.task.schedule}"
            Console(width=130).print(results_table(results, title))
            plot_results(results, title, folder / "planners.png")
            logger.scalars({f"eval/{r.planner}": r.total_us for r in results}, total_steps)
        if curve:
            draw_curve(folder, curve)
    by_name = {result.planner: result for result in results}
    best_eplb_us = min((by_name[name].total_us for name in EPLB_NAMES if name in by_name), default=float("nan"))
    ours = by_name.get("policy") or by_name.get("supervised")
    ratios = []
    if ours is not None and "eplb" in by_name:
        pairs = zip(ours.stream_totals_us, by_name["eplb"].stream_totals_us, strict=True)
        ratios = [policy_us / eplb_us for policy_us, eplb_us in pairs]
    return {
        "seed": args.seed,
        "mean_return": None if ours is None else 1 - ours.total_us / best_eplb_us,
        "total_us": {name: result.total_us for name, result in by_name.items()},
        "vs_best_eplb": None if ours is None else ours.total_us / best_eplb_us,
        "vs_eplb": float(np.mean(ratios)) if ratios else None,
        "vs_eplb_ci95": ci95(ratios) if ratios else None,
        "episodic_saved": rollouts.saved,
        "steps": total_steps,
        "steps_per_s": steps_per_s,
        "checkpoint": folder / CHECKPOINT_NAME if args.checkpoint_interval else None,
        "policy": folder / FILE_NAME if args.save_model else None,
        "run_dir": folder,
    }


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    world = init_distributed(args.cuda)
    try:
        result = train(args, world)
    finally:
        world.close()
    if world.is_main:
        print_result(result)


if __name__ == "__main__":
    main()
