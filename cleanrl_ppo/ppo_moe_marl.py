"""Multi-agent PPO for MoE placement: an expert actor and a GPU actor with graph encoders, one centralised critic.

    python cleanrl_ppo/ppo_moe_marl.py                                          # the bundled trace, 4 × 4 GPUs
    python cleanrl_ppo/ppo_moe_marl.py --trace mine.npz --cluster h800-2x8 --profile sglang-decode
    python cleanrl_ppo/ppo_moe_marl.py --resume                                 # continue after a crash, bit for bit
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_moe_marl.py                     # two processes, averaged gradients
    clustergym eval --planner eplb anneal policy --checkpoint runs/ppo_moe_marl__tiny_moe__1

Between two intervals of traffic the agents visit the layers one after the other. A visit has ``ops_per_layer`` steps.
In each step the expert actor picks an expert, an exact simulation computes what each of the 3·G operations on it would
save on the interval that just ended, and the GPU actor picks one of the operations. The reward is what the operation
saves on the NEXT interval, which the agents do not see. A supervised phase first teaches both actors to find the
operations with the best simulated savings. PPO then teaches them which savings last until the next interval.

The task is the registered environment ``MoEPlacement-v0`` with the options of ``environment_options``, nothing else.
Core details 1–13 and 37 of "The 37 Implementation Details of PPO", masks, value normalisation.
docs/reference/ppo_moe_marl.md explains the decision process, the networks and every metric.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import gymnasium
import numpy as np
import torch
import tyro
from clustergym.planners.policy import inputs as observed
from clustergym.planners.policy.export import describe_run, initial_weights
from clustergym.planners.policy.inputs import LAYER_KEYS, PER_CENT, PROGRESS, STEP_KEYS, Inputs, gains
from clustergym.planners.policy.network import N_CHOSEN_FEATURES, N_DERIVED_FEATURES, averaging
from clustergym.planners.policy.task import Task, TaskArgs, environment_options, load_tasks
from clustergym.planners.validation import EvaluationArgs, Validator, summary
from clustergym.plans.report.training import report_training
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn import DenseGraphConv

from clustergym.moe_placement.batch import DEFAULT_TRACE, PlacementBatch
from clustergym.moe_placement.environment import frame_of
from clustergym.moe_placement.kernels.observation import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.kernels.state import CLOCK_OPERATION, N_PARTS, TIME_OPERATION
from clustergym.moe_placement.viewer import draw
from clustergym.training import Run, RunArgs, World, check_values, derive_seed, parse_args, plain_args, run_trainer

MASKED_LOGIT = -1e8


GRAPH_LAYERS = 1
"""Rounds of messages between nodes in each encoder."""
# The supervised phase: experts that are simulated per state, epochs over the states of each visit, learning rate (the
# initial value), and the temperature of the targets, which are a softmax over the savings in % of the layer's time.
PRETRAIN_EXPERTS, PRETRAIN_EPOCHS, PRETRAIN_LR, PRETRAIN_TEMPERATURE = 16, 3, 2e-3, 0.02


@dataclass
class PretrainArgs:
    pretrain_states: int = 8192
    """Number of states, 0 to skip the phase."""
    pretrain_sharpen: float = 4.0
    """Multiply all logits by this after the phase, so that PPO explores close to the most likely choices."""


@dataclass
class PPOArgs:
    learning_rate: float = 3e-4
    """Initial learning rate of Adam. It is annealed linearly to 0."""
    num_envs: int = 64
    """Number of parallel environments per process."""
    envs_per_stream: int = 8
    """Number of environments with the same stream. The mean advantage of the others is the baseline of each.
    1 for no baseline. If num_envs is not a multiple, a divisor of both is used."""
    num_steps: int = 64
    """Number of steps per environment between updates, a multiple of ops_per_layer."""
    num_minibatches: int = 8
    """Number of minibatches per epoch. Each has whole visits to layers."""
    update_epochs: int = 2
    """Number of epochs per update."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = 0.03
    """Stop an update after an epoch whose approximate KL exceeds this value."""


Ablation = Literal["mlp-encoder", "simultaneous", "no-lookahead", "two-critics", "separate-critic"]


@dataclass
class NetworkArgs:
    hidden: int = 32
    """Width of the networks."""


@dataclass
class AblationArgs:
    ablate: tuple[Ablation, ...] = ()
    """mlp-encoder: nodes do not exchange messages.
    no-lookahead: the GPU actor does not see what each operation would save on the observed interval.
    simultaneous: the GPU actor sees neither the look-ahead nor the chosen expert.
    two-critics: each actor has its own critic, which sees one graph only.
    separate-critic: the critic has its own encoders."""


@dataclass
class Args(RunArgs):
    trace: tuple[str, ...] = (DEFAULT_TRACE,)
    """Traces to train on: .npz or .npy files, or names of bundled traces.
    Those of one model are joined, each as its own domain."""
    eval_trace: tuple[str, ...] = ()
    """Traces for the evaluation after training. Default: the test split of the training traces."""
    cluster: tuple[str, ...] = ("h800-4x4",)
    """Cluster presets: gpu-NODESxGPUS. Each model, cluster and profile is a task; iterations take tasks in turn."""
    model: str | None = None
    """Model preset. Default: the model that the trace names."""
    total_timesteps: int = 131_072
    """Total number of operations, over all environments and processes. 0 stops after the supervised phase."""
    checkpoint_interval: int = 12
    """Iterations between checkpoints, 0 for none. Choose it longer than an episode of all tasks.
    Environments are reset at each checkpoint, so that resuming is exact."""
    eval_interval: int = 4
    """Iterations between evaluations on validation streams, 0 for none. They do not change the training."""
    init: str | None = None
    """Start from this policy instead of random weights: a policy.pt, a run folder, or pretrained."""
    save_model: bool = True
    """Save the policy: policy.pt for the planners policy and policy-guided, and model.safetensors with model.json."""
    capture_video: bool = False
    """Record an episode of each evaluation to the folder videos."""
    cuda: bool = False
    """Simulate and train on the GPU."""
    task: tyro.conf.OmitArgPrefixes[TaskArgs] = field(default_factory=TaskArgs)
    """The placement task that the agents are trained on."""
    pretrain: tyro.conf.OmitArgPrefixes[PretrainArgs] = field(default_factory=PretrainArgs)
    """The supervised phase before PPO."""
    ppo: tyro.conf.OmitArgPrefixes[PPOArgs] = field(default_factory=PPOArgs)
    """Hyperparameters of PPO."""
    network: tyro.conf.OmitArgPrefixes[NetworkArgs] = field(default_factory=NetworkArgs)
    """Size of the networks."""
    ablation: tyro.conf.OmitArgPrefixes[AblationArgs] = field(default_factory=AblationArgs)
    """Parts of the networks to leave out, to measure what they contribute."""
    evaluation: tyro.conf.OmitArgPrefixes[EvaluationArgs] = field(default_factory=EvaluationArgs)
    """Comparison with other planners."""


# ALGO LOGIC: functions that are identical in every trainer (tests/trainers/test_trainers_agree.py)


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
    following = torch.where(dones, final_values, torch.cat([values[1:], next_value[None]]))
    deltas = rewards + gamma * following * ~terminations - values
    decays = gamma * gae_lambda * (~dones).to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        advantages[t] = last = deltas[t] + decays[t] * last
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


def masked_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Entropy over the valid actions, from normalised log-probabilities of shape (…, actions)."""
    return -torch.where(mask, logprobs.exp() * logprobs, 0.0).sum(-1)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# Networks. clustergym/planners/policy/network.py has the same actors in plain torch and loads exported weights.

Layer = TypeVar("Layer", bound=nn.Module)
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
    return nn.Sequential(orthogonal(nn.Linear(size, hidden)), nn.ReLU(), orthogonal(nn.Linear(hidden, 1), std))


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

    def __init__(self, hidden: int, graph: bool) -> None:
        super().__init__()
        self.experts_in = orthogonal(nn.Linear(N_EXPERT_FEATURES + N_DERIVED_FEATURES + len(PROGRESS), hidden))
        self.gpus_in = orthogonal(nn.Linear(N_GPU_FEATURES, hidden))
        self.around = orthogonal(nn.Linear(hidden, hidden, bias=False), 1.0) if graph else None
        self.layers = nn.ModuleList(ExpertLayer(hidden, graph) for _ in range(GRAPH_LAYERS))
        self.gpu_layer = NodeLayer(hidden, graph)

    def forward(self, inputs: Inputs, near: Tensor, near_node: Tensor) -> tuple[Tensor, Tensor]:
        placement, same_node = inputs["placement"], inputs["same_node"]
        replicas, absent = placement.sum(-1).clamp(min=1), 1 - placement
        own = [(mass * placement).sum(-1) / replicas for mass in (near, near_node)]
        other = [(mass * absent).amax(-1) for mass in (near, near_node)]
        derived = torch.stack([own[0], other[0], own[1], other[1]], -1)
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

    The graph inputs (LAYER_KEYS) have one row per visit, all others one row per step, with the steps of a visit next to
    each other. Renumbering experts, or GPUs together with their nodes, renumbers the scores in the same way.
    """

    value_mean: Tensor
    value_std: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.ablate = args.ablation.ablate
        hidden, graph = args.network.hidden, "mlp-encoder" not in self.ablate
        self.encoders = Encoders(hidden, graph)
        self.expert_head = decoder(2 * hidden, hidden, 0.01)
        self.nodes_in = orthogonal(nn.Linear(N_GPU_FEATURES + N_PARTS + N_CHOSEN_FEATURES, hidden))
        self.chosen_in = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.gpus_on = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.node_layers = nn.ModuleList(NodeLayer(hidden, graph) for _ in range(GRAPH_LAYERS))
        self.node_head = decoder(hidden, hidden, 0.01)
        self.look_scale = nn.Parameter(torch.tensor(INITIAL_LOOK_SCALE))
        self.critic_encoders = Encoders(hidden, graph) if "separate-critic" in self.ablate else None
        two_critics = "two-critics" in self.ablate
        sizes = [2 * hidden + len(PROGRESS)] * 2 if two_critics else [4 * hidden + len(PROGRESS)]
        self.critics = nn.ModuleList(decoder(size, hidden, 1.0) for size in sizes)
        # The scale of returns depends on the trace, so the critic predicts normalised returns. Until the scale is known
        # all values are 0: with a guessed scale of 1, an untrained critic would outweigh rewards of 1e-4.
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.zeros(()))

    def encode(self, inputs: Inputs) -> dict[str, Tensor]:
        """Embeddings that both actors and the critic start from."""
        coactivation = inputs["coactivation"]
        placement = to_visits(inputs["placement"], len(coactivation))
        near = to_rows((coactivation @ placement.flatten(2)).unflatten(2, placement.shape[2:]))
        near_node = near @ inputs["same_node"]
        experts, gpus = self.encoders(inputs, near, near_node)
        return {"experts": experts, "gpus": gpus, "near": near, "near_node": near_node}

    def expert_logits(self, inputs: Inputs, encoded: dict[str, Tensor]) -> Tensor:
        """The expert actor: (B, E) scores of the experts, masked."""
        experts, (first, activation, last) = encoded["experts"], self.expert_head
        # The mean over experts is the same input for all of them: multiply it once.
        own, overall = first.weight.split(experts.shape[-1], -1)
        hidden = linear(experts, own) + linear(experts.mean(1, keepdim=True), overall, first.bias)
        return torch.where(inputs["expert_mask"], to_rows(last(activation(hidden)).squeeze(-1)), MASKED_LOGIT)

    def node_logits(
        self, inputs: Inputs, encoded: dict[str, Tensor], expert: Tensor, parts: Tensor, legal: Tensor
    ) -> Tensor:
        """The GPU actor: (B, 3·G) scores of the nodes, masked.

        It reads the chosen experts (B,), their look-ahead (B, 3·G, N_PARTS) and which nodes are legal (B, 3·G).
        """
        rows, simultaneous = torch.arange(len(expert), device=expert.device), "simultaneous" in self.ablate
        about = inputs["placement"], encoded["near"], encoded["near_node"]
        chosen = torch.stack([x[rows, expert] for x in about], -1)
        if simultaneous:
            legal, chosen = inputs["gpu_mask"], torch.zeros_like(chosen)
        if simultaneous or "no-lookahead" in self.ablate:
            parts = torch.zeros_like(parts)
        features = [inputs["gpus"], chosen.repeat(1, 3, 1), legal[..., None].float(), parts.clamp(-5, 5)]
        nodes = self.nodes_in(torch.cat(features, -1)).unflatten(1, (3, -1)) + self.gpus_on(encoded["gpus"])[:, None]
        if not simultaneous:
            steps = encoded["experts"].shape[2]
            embedding = encoded["experts"][rows // steps, expert, rows % steps]
            nodes = nodes + self.chosen_in(embedding)[:, None, None]
        nodes = torch.relu(nodes)
        # Each of a GPU's three nodes is connected to all three nodes of the GPUs that it exchanges tokens with.
        traffic, same = averaging(inputs["traffic"], copies=3), inputs["same_node"] / 3
        for layer in self.node_layers:
            nodes = layer(nodes, traffic, same)
        logits = self.node_head(nodes.flatten(1, 2)).squeeze(-1) + self.look_scale * gains(parts)
        return torch.where(legal, logits, MASKED_LOGIT)

    def values(self, inputs: Inputs, encoded: dict[str, Tensor]) -> Tensor:
        """The critics: (B, critics) normalised values."""
        experts, gpus = encoded["experts"], encoded["gpus"]
        if self.critic_encoders is not None:
            experts, gpus = self.critic_encoders(inputs, encoded["near"], encoded["near_node"])
        graphs = [torch.cat([experts.mean(1), experts.max(1).values], -1).flatten(0, 1)]
        graphs += [torch.cat([gpus.mean(1), gpus.max(1).values], -1)]
        if "two-critics" not in self.ablate:
            graphs = [torch.cat(graphs, -1)]
        graphs = [torch.cat([x, inputs["progress"]], -1) for x in graphs]
        return torch.cat([critic(x) for critic, x in zip(self.critics, graphs, strict=True)], -1)

    def forward(self, inputs: Inputs, expert: Tensor, parts: Tensor, legal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(expert logits, node logits for the chosen experts, normalised values) in one pass."""
        encoded = self.encode(inputs)
        expert_logits = self.expert_logits(inputs, encoded)
        node_logits = self.node_logits(inputs, encoded, expert, parts, legal)
        return expert_logits, node_logits, self.values(inputs, encoded)

    def get_value(self, inputs: Inputs, encoded: dict[str, Tensor]) -> Tensor:
        """(B, critics) values in units of reward."""
        return self.values(inputs, encoded) * self.value_std + self.value_mean

    @torch.no_grad()
    def set_value_scale(self, mean: float, std: float) -> None:
        """Set new statistics of the returns and correct the critics' last layers, so that no value changes.

        The first statistics need no correction: nothing has been learned yet.
        """
        new_mean, new_std = (torch.tensor(x, device=self.value_mean.device) for x in (mean, std))
        for critic in self.critics if float(self.value_std) > 0 else ():
            critic[-1].weight.mul_(self.value_std / new_std)
            critic[-1].bias.mul_(self.value_std).add_(self.value_mean - new_mean).div_(new_std)
        self.value_mean.copy_(new_mean)
        self.value_std.copy_(new_std)

    @torch.no_grad()
    def scale_logits(self, factor: float) -> None:
        """Multiply all logits: the most likely choice stays the same, others become less likely."""
        for head in (self.expert_head, self.node_head):
            head[-1].weight.mul_(factor)
            head[-1].bias.mul_(factor)
        self.look_scale.mul_(factor)


def check_args(args: Args) -> None:
    """Refuse arguments that do not fit together before anything is loaded."""
    ppo, ops_per_layer = args.ppo, args.task.ops_per_layer
    for group, name in ((ppo, "envs_per_stream"), (args.network, "hidden")):
        check_values(group, name, lambda value: value >= 1, "at least 1")
    check_values(args.pretrain, "pretrain_sharpen", lambda value: value > 0, "more than 0")
    if ppo.num_steps % ops_per_layer:
        raise ValueError(f"num_steps is {ppo.num_steps}: expected a multiple of ops_per_layer ({ops_per_layer})")
    visits = ppo.num_envs * ppo.num_steps // ops_per_layer
    if visits % ppo.num_minibatches:
        raise ValueError(
            f"num_envs × num_steps ÷ ops_per_layer is {visits} visits to a layer, which do not divide into "
            f"{ppo.num_minibatches} minibatches: lower --num-minibatches, or use more environments or steps"
        )


def network_options(args: Args) -> dict[str, Any]:
    """What a policy file stores about the networks."""
    ablate = args.ablation.ablate
    return {
        "hidden": args.network.hidden,
        "graph_layers": GRAPH_LAYERS,
        "encoder": "mlp" if "mlp-encoder" in ablate else "graph",
        "simultaneous": "simultaneous" in ablate,
        "lookahead": "no-lookahead" not in ablate,
        "centralised": "two-critics" not in ablate,
        "separate_critic": "separate-critic" in ablate,
    }


def make_agent(args: Args) -> Agent:
    """New networks, with the weights of --init if given."""
    agent = Agent(args)
    if args.init is not None:
        agent.load_state_dict(initial_weights(args.init, network_options(args), args.task.settings))
    return agent


# Rollouts


@dataclass
class Batch:
    """Training data with one row per step; the steps of a visit to a layer are neighbours and share its graphs."""

    steps: Inputs
    graphs: Inputs
    same_node: Tensor
    expert: Tensor
    node: Tensor
    parts: Tensor
    legal: Tensor
    logprobs: Tensor
    """(rows, 2): of the expert and of the node"""
    advantages: Tensor
    """(rows, critics), as the returns and values"""
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
        graphs = {key: x[visits] for key, x in self.graphs.items()}
        return {key: x[rows] for key, x in self.steps.items()} | graphs | {"same_node": self.same_node}


def sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Samples of categorical distributions and their log-probabilities."""
    logprobs = logits.log_softmax(-1)
    # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of the categorical distribution.
    drawn = (logprobs - torch.empty_like(logprobs).exponential_().log()).argmax(-1)
    return drawn, logprobs.gather(-1, drawn[:, None]).squeeze(-1)


def subtract_group_baseline(advantages: Tensor, envs_per_stream: int) -> Tensor:
    """Subtract the mean advantage of the other environments with the same stream, (steps, envs, critics).

    Most of the variance comes from the next interval, which no critic can predict and which is the same for the whole
    group. The mean of the others does not depend on an environment's own actions, so the gradient stays unbiased.
    """
    groups = advantages.unflatten(1, (-1, envs_per_stream))
    others = (groups.sum(2, keepdim=True) - groups) / (envs_per_stream - 1)
    return (groups - others).flatten(1, 2)


class Rollouts:
    """Plays both actors in the batched environment; episodes continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, task: Task, device: torch.device) -> None:
        self.args, self.agent = args, agent
        self.envs_per_stream = math.gcd(args.ppo.envs_per_stream, args.ppo.num_envs)
        options = environment_options(args.task, task) | {"device": device}
        self.batch: PlacementBatch = gymnasium.make_vec("MoEPlacement-v0", args.ppo.num_envs, **options).batch
        self.rows = torch.arange(args.ppo.num_envs, device=device)
        self.same_node = observed.same_node_weights(self.batch.cluster, device)
        self.seconds = {"simulator": 0.0, "policy": 0.0}
        self.episodic_return: float | None = None
        """Mean return of the last finished episodes; None before the first one ends."""

    def restart(self, seed: int) -> None:
        """Reset all environments. A resumed run does so at the same iterations and continues identically."""
        stream = np.arange(self.args.ppo.num_envs, dtype=np.int64) // self.envs_per_stream
        self.batch.seed(derive_seed(seed) * 2**20 + stream)
        self.batch.reset()
        self.similar = observed.similar_experts(self.batch.obs["affinity"])

    def inputs(self) -> Inputs:
        return observed.policy_inputs(self.batch.obs, self.similar, self.same_node)

    def legal(self, experts: Tensor) -> Tensor:
        """(B, M, 3·G): nodes that are legal for the experts (B, M)."""
        return self.batch.obs["joint_mask"][self.rows[:, None], experts].bool()

    def look(self, experts: Tensor) -> Tensor:
        """(B, M, 3·G, parts): what each operation on the experts (B, M) would save, in per cent of the layer's time."""
        return self.batch.lookahead(experts) * PER_CENT

    def step(self, expert: Tensor, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(reward, whether the visit to the layer ended, whether the episode ended); finished episodes are reset."""
        batch = self.batch
        _, reward, done = batch.step(expert, node)
        if not self.args.task.whole_stream:
            # Only what the operation itself saves; the scale does not matter.
            reward = batch.episode["times_us"][:, TIME_OPERATION] / batch.rules_host.static_us
        visit_end = (batch.episode["clock"][:, CLOCK_OPERATION] == 0) | done
        reward = reward.float()
        if bool(done.any()):
            self.episodic_return = float(batch.saved[done].mean())
            batch.reset(done)
        if bool(visit_end.any()):
            self.similar = observed.similar_experts(batch.obs["affinity"])
        return reward, visit_end, done

    @torch.no_grad()
    def collect(self) -> Batch:
        """Play num_steps steps in each environment. Returns the training data."""
        ppo, ops_per_layer, agent = self.args.ppo, self.args.task.ops_per_layer, self.agent
        steps: dict[str, list[Tensor]] = {key: [] for key in STEP_KEYS}
        graphs: dict[str, list[Tensor]] = {key: [] for key in LAYER_KEYS}
        taken: list[tuple[Tensor, ...]] = []
        for t in range(ppo.num_steps):
            started = time.perf_counter()
            inputs = self.inputs()
            for key in STEP_KEYS if t % ops_per_layer else (*STEP_KEYS, *LAYER_KEYS):
                (graphs if key in graphs else steps)[key].append(inputs[key].clone())
            encoded = agent.encode(inputs)
            expert, expert_logprob = sample(agent.expert_logits(inputs, encoded))
            values = agent.get_value(inputs, encoded)
            legal = self.legal(expert[:, None])[:, 0]
            expert_chosen = time.perf_counter()
            parts = self.look(expert[:, None])[:, 0]
            simulated = time.perf_counter()
            node, node_logprob = sample(agent.node_logits(inputs, encoded, expert, parts, legal))
            node_chosen = time.perf_counter()
            reward, visit_end, done = self.step(expert, node)
            self.seconds["policy"] += expert_chosen - started + node_chosen - simulated
            self.seconds["simulator"] += simulated - expert_chosen + time.perf_counter() - node_chosen
            end = done if self.args.task.whole_stream else visit_end
            logprobs = torch.stack([expert_logprob, node_logprob], -1)
            taken.append((expert, node, parts, legal, logprobs, values, reward, end))
        expert, node, parts, legal, logprobs, values, rewards, ends = (torch.stack(x) for x in zip(*taken, strict=True))
        inputs = self.inputs()
        next_value = agent.get_value(inputs, agent.encode(inputs))
        # Ends are terminations: what follows does not depend on what was done before.
        none = torch.zeros_like(rewards)
        found = [
            compute_gae(rewards, values[..., i], ends, ends, next_value[:, i], none, ppo.gamma, ppo.gae_lambda)
            for i in range(values.shape[-1])
        ]
        advantages, returns = (torch.stack(x, -1) for x in zip(*found, strict=True))
        if self.envs_per_stream > 1:
            advantages = subtract_group_baseline(advantages, self.envs_per_stream)

        def group(x: Tensor) -> Tensor:
            """(steps, envs, …) → rows with the steps of a visit next to each other."""
            return x.unflatten(0, (-1, ops_per_layer)).transpose(1, 2).flatten(0, 2)

        return Batch(
            {key: group(torch.stack(x)) for key, x in steps.items()},
            {key: torch.stack(x).flatten(0, 1) for key, x in graphs.items()},
            inputs["same_node"],
            *(group(x) for x in (expert, node, parts, legal, logprobs, advantages, returns, values)),
        )


# Learning


class Simulated(NamedTuple):
    """States of the supervised phase: inputs, candidate experts (B, M), and the look-ahead and legal nodes of each."""

    inputs: Inputs
    experts: Tensor
    parts: Tensor
    legal: Tensor

    def savings(self) -> Tensor:
        """(B, M, 3·G) what each operation saves, −∞ if it is illegal."""
        return torch.where(self.legal, gains(self.parts), -torch.inf)


def supervised_phase(agent: Agent, tasks: Sequence[Rollouts], args: Args, world: World) -> dict[str, float]:
    """Learn which experts, and which operations on them, save most on the observed interval.

    The states come from episodes that mostly take the best operation found, or else an operation on a random expert.
    """
    optimizer = make_optimizer(agent, PRETRAIN_LR)
    size, ops_per_layer, rows = args.ppo.num_envs, args.task.ops_per_layer, tasks[0].rows
    rounds = max(1, round(args.pretrain.pretrain_states / (size * ops_per_layer * world.size)))
    losses: dict[str, float] = {}
    started = time.perf_counter()
    for i in range(rounds):
        optimizer.param_groups[0]["lr"] = anneal(PRETRAIN_LR, i + 1, rounds)
        rollouts, states = tasks[i % len(tasks)], list[Simulated]()
        graphs = {key: rollouts.inputs()[key].clone() for key in LAYER_KEYS}
        for _ in range(ops_per_layer):
            inputs = {key: x.clone() for key, x in rollouts.inputs().items() if key not in graphs} | graphs
            order = torch.rand((size, rollouts.batch.n_experts), device=rows.device).argsort(-1)
            experts = order[:, :PRETRAIN_EXPERTS]
            remembered = rollouts.batch.obs["memory"].clone()
            states.append(Simulated(inputs, experts, rollouts.look(experts), rollouts.legal(experts)))
            best, node = states[-1].savings().max(-1)
            explore = torch.rand(size, device=rows.device) < 0.3
            pick = torch.where(explore, torch.zeros_like(rows), best.argmax(-1))
            expert, node = experts[rows, pick], node[rows, pick]
            # The agents will have looked at the chosen expert only.
            remembered[rows, expert] = rollouts.batch.obs["memory"][rows, expert]
            rollouts.batch.obs["memory"].copy_(remembered)
            rollouts.step(expert, node)
        for _ in range(PRETRAIN_EPOCHS):
            for t in torch.randperm(ops_per_layer).tolist():
                losses = supervised_step(agent, optimizer, states[t], args, world)
    return losses | {"pretrain/seconds": time.perf_counter() - started}


def supervised_step(
    agent: Agent, optimizer: torch.optim.Adam, state: Simulated, args: Args, world: World
) -> dict[str, float]:
    """One step of cross-entropy towards a softmax over the savings: of the candidates, and of the nodes of two."""
    inputs, experts, savings = state.inputs, state.experts, state.savings()
    rows = torch.arange(len(experts), device=experts.device)
    # Experts that cannot be chosen get a target of exactly 0.
    best = torch.where(inputs["expert_mask"].gather(-1, experts), savings.amax(-1), MASKED_LOGIT)
    encoded = agent.encode(inputs)
    logprobs = agent.expert_logits(inputs, encoded).gather(-1, experts).log_softmax(-1)
    expert_loss = -(logprobs * (best / PRETRAIN_TEMPERATURE).softmax(-1)).sum(-1).mean()
    node_loss = torch.zeros((), device=rows.device)
    # The best candidate, and the first, which is a random one.
    for pick in (best.argmax(-1), torch.zeros_like(rows)):
        parts, legal = state.parts[rows, pick], state.legal[rows, pick]
        logits = agent.node_logits(inputs, encoded, experts[rows, pick], parts, legal)
        target = (savings[rows, pick] / PRETRAIN_TEMPERATURE).softmax(-1)
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

    def state_dict(self) -> list[float]:
        return [self.weight, self.mean, self.square]

    def load_state_dict(self, state: list[float]) -> None:
        self.weight, self.mean, self.square = state


def update(agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, world: World) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric."""
    ppo = args.ppo
    seen: list[Tensor] = []
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
            expert_logits, node_logits, values = agent(inputs, batch.expert[rows], batch.parts[rows], legal)
            expert_logprobs, node_logprobs = expert_logits.log_softmax(-1), node_logits.log_softmax(-1)
            taken = ((expert_logprobs, batch.expert), (node_logprobs, batch.node))
            logprobs = torch.cat([logprob.gather(-1, choice[rows, None]) for logprob, choice in taken], -1)
            logratio = logprobs - batch.logprobs[rows]
            if "two-critics" not in args.ablation.ablate:
                # One critic, one advantage: two components of one action, whose log-probabilities add up.
                logratio = logratio.sum(-1, keepdim=True)
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            pg_loss = torch.zeros((), device=ratio.device)
            for agent_ratio, agent_advantages in zip(ratio.unbind(-1), batch.advantages[rows].unbind(-1), strict=True):
                if ppo.norm_adv:
                    agent_advantages = normalize_advantages(agent_advantages)
                pg_loss = pg_loss + policy_loss(agent_ratio, agent_advantages, ppo.clip_coef)
            clip_vloss = ppo.clip_coef if ppo.clip_vloss else None
            v_loss = value_loss(values, old_values[rows], returns[rows], clip_vloss)
            node_mask = inputs["gpu_mask"] if "simultaneous" in args.ablation.ablate else legal
            expert_entropy = masked_entropy(expert_logprobs, inputs["expert_mask"]).mean()
            node_entropy = masked_entropy(node_logprobs, node_mask).mean()
            approx_kl = k3.mean()
            loss = pg_loss - ppo.ent_coef * (expert_entropy + node_entropy) + ppo.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            world.average_gradients(agent.parameters())
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), ppo.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                clipfrac = ((ratio - 1.0).abs() > ppo.clip_coef).float().mean()
                entropies = [expert_entropy, node_entropy]
                seen.append(torch.stack([pg_loss, v_loss, *entropies, k1.mean(), approx_kl, clipfrac, grad_norm]))
        if ppo.target_kl is not None and world.mean(approx_kl.item()) > ppo.target_kl:
            break
    names = ("policy_loss", "value_loss", "expert_entropy", "node_entropy", "old_approx_kl", "approx_kl", "clipfrac",
             "grad_norm")  # fmt: skip
    metrics = {f"losses/{name}": value for name, value in zip(names, torch.stack(seen).mean(0).tolist(), strict=True)}
    return metrics | {"losses/explained_variance": explained_variance(batch.values.flatten(), batch.returns.flatten())}


def iterate(
    agent: Agent, optimizer: torch.optim.Adam, rollouts: Rollouts, scale: ReturnStatistics, args: Args, world: World
) -> dict[str, float]:
    """One rollout and one update. Returns the metrics."""
    rollouts.seconds = dict.fromkeys(rollouts.seconds, 0.0)
    started = time.perf_counter()
    batch = rollouts.collect()
    collected = time.perf_counter()
    mean, std = scale.update(batch.returns, world)
    agent.set_value_scale(mean, std)
    metrics = update(agent, optimizer, batch, args, world)
    ended = time.perf_counter()
    if rollouts.episodic_return is not None:
        metrics["charts/episodic_return"] = rollouts.episodic_return
    return metrics | {
        "charts/return_mean": mean,
        "charts/return_std": std,
        "charts/learning_rate": optimizer.param_groups[0]["lr"],
        "time/simulator": rollouts.seconds["simulator"] / (ended - started),
        "time/policy": rollouts.seconds["policy"] / (ended - started),
        "time/update": (ended - collected) / (ended - started),
    }


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    check_args(args)
    tasks = load_tasks(args.task, args.trace, args.eval_trace, args.model, args.cluster)
    torch.manual_seed(args.seed)
    agent = make_agent(args).to(world.device)
    steps = args.ppo.num_envs * args.ppo.num_steps
    run = Run("ppo_moe_marl", args, world, tasks[0].train.name, steps, may_be_empty=True)
    world.broadcast(agent)
    optimizer, statistics = make_optimizer(agent, args.ppo.learning_rate), ReturnStatistics()
    rollouts = [Rollouts(args, agent, task, world.device) for task in tasks]
    validator = Validator(tasks, network_options(args), args.task.intervals, derive_seed(args.seed, 7) % 10**6)
    validator.keep_stage("untrained", agent)
    saved = {"agent": agent, "optimizer": optimizer, "statistics": statistics, "validator": validator}
    resumed = run.load_checkpoint(**saved) is not None

    def record(iteration: int) -> None:
        if folder := run.video_folder(iteration):
            validator.record(agent.state_dict(), environment_options(args.task, tasks[0]), args.seed, folder)

    def validate(iteration: int) -> dict[str, float]:
        if not (args.eval_interval and world.is_main):
            return {}
        step = iteration * run.steps_per_iteration
        run.logger.image("placement", draw(frame_of(rollouts[0].batch, [])), step)
        record(iteration)
        return validator.validate(step, agent.state_dict())

    with run:
        validation: dict[str, float] = {}
        if not resumed:
            if args.pretrain.pretrain_states:
                if args.eval_interval and world.is_main:
                    validator.validate(-args.pretrain.pretrain_states, agent.state_dict())
                seed = run.seed_torch(0)
                for each in rollouts:
                    each.restart(seed)
                run.logger.scalars(supervised_phase(agent, rollouts, args, world), 0)
                agent.scale_logits(args.pretrain.pretrain_sharpen)
            validator.keep_stage("supervised", agent)
            validation = validate(0)
            run.logger.scalars(validation, 0)
            run.checkpoint(0, **saved)
        for iteration in run.iterations():
            if run.restart_due(iteration):
                # A resumed run also starts here, with the same networks, and then draws the same random numbers.
                seed = run.seed_torch(iteration)
                for each in rollouts:
                    each.restart(seed)
            optimizer.param_groups[0]["lr"] = anneal(args.ppo.learning_rate, iteration, run.num_iterations)
            metrics = iterate(agent, optimizer, rollouts[iteration % len(tasks)], statistics, args, world)
            run.check_finite(metrics, iteration)
            if iteration == run.num_iterations or iteration % (args.eval_interval or run.num_iterations) == 0:
                validation = validate(iteration)
            run.log(metrics | validation, iteration, saved_vs_eplb=validation.get("validation/saved_vs_eplb", math.nan))
            run.checkpoint(iteration, **saved)
        if not world.is_main:
            return {}
        if not args.eval_interval:
            record(run.num_iterations)
        policy = None
        if args.save_model:
            run.save_model(agent=agent)
            policy = validator.export(agent.state_dict(), describe_run(plain_args(args), run.total_steps), run.folder)
        if run.total_steps:
            validator.keep_stage("policy", agent)
        results = validator.compare(args.evaluation)
        found = summary(results)
        run.logger.scalars({f"eval/{name}": total_us for name, total_us in found["total_us"].items()}, run.total_steps)
        report_training(results, [task.title for task in tasks], validator.curve, run.folder)
    return run.result(**found, episodic_return=rollouts[0].episodic_return, policy=policy)


if __name__ == "__main__":
    run_trainer(train, parse_args(Args, __doc__))
