"""Multi-agent PPO for MoE placement: an expert actor and a GPU actor with graph encoders, one centralised critic.

    python cleanrl_ppo/ppo_moe_marl.py                                          # the bundled trace, 4 × 4 GPUs
    python cleanrl_ppo/ppo_moe_marl.py --trace mine.npz --cluster h800-2x8 --total-timesteps 400000
    python cleanrl_ppo/ppo_moe_marl.py --resume                                 # after a crash: goes on as if nothing had happened
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_moe_marl.py                     # two processes, averaged gradients
    clustergym eval --planner eplb anneal policy --checkpoint runs/ppo_moe_marl__tiny_moe__1

Between two windows of traffic the agents walk through the layers. On each one, ``ops_per_layer`` times, the expert actor picks an
expert, an exact simulation tells what each of the 3·G operations on it would save on the window just served, and the GPU
actor picks one of them. The reward is what the operation saves on the window TO COME, which nobody sees. A supervised phase first teaches
both actors to find what the simulation likes; PPO then teaches them what holds up on the next window.

Core details 1–13 and 37 of "The 37 Implementation Details of PPO", masks, value normalisation. docs/ppo_moe_marl.md explains the
decision process, the networks and every metric.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

from clustergym.common.statistics import ci95
from clustergym.moe_placement import PlacementBatch, PlacementConfig, Simulator
from clustergym.moe_placement.batch import DEFAULT_TRACE, model_for
from clustergym.moe_placement.environment import frame_of
from clustergym.moe_placement.evaluation import Protocol, Result, evaluate_planner
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.policy.network import MASKED_LOGIT, NetworkConfig, PlacementPolicy
from clustergym.moe_placement.policy.planner import FILE_NAME, Policy, ViewSettings, load_policy, save_policy
from clustergym.moe_placement.policy.view import LAYER_KEYS, STEP_KEYS, Inputs, PolicyView, gains
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


@dataclass
class Args:
    trace: tuple[str, ...] = (DEFAULT_TRACE,)
    """Traces to train on: .npz or .npy files or names of bundled ones. Several are joined, each as a domain of its own."""
    eval_trace: tuple[str, ...] = ()
    """Traces to evaluate on at the end. By default the training traces are split in two by sequence."""
    cluster: str = "h800-4x4"
    """Cluster preset: gpu-NODESxGPUS."""
    model: str | None = None
    """Model preset; by default the one that the trace names."""
    layers: int = 6
    """Evenly spaced layers of the trace to train and evaluate on; 0 takes all."""
    seed: int = 1
    """Everything random follows from it: weights, streams, choices, minibatches."""
    total_timesteps: int = 131_072
    """Operations in all, over all environments and processes; 0 stops after the supervised phase."""
    run_dir: Path | None = None
    """Folder for curves, checkpoints and the policy; runs/ppo_moe_marl__<trace>__<seed> unless given."""
    resume: bool = False
    """Go on from the folder's checkpoint; the result is bit for bit that of a run that was never interrupted."""
    checkpoint_interval: int = 12
    """Iterations between checkpoints, 0 for none. Environments start anew there: keep it longer than an episode."""
    init: str | None = None
    """Start from this policy (policy.pt, a run folder, or pretrained) in place of fresh weights."""
    save_model: bool = True
    """Write policy.pt, which the planners ``policy`` and ``policy-guided`` load."""
    cuda: bool = False
    """Simulate and train on the GPU."""
    threads: int = 1
    """Torch threads in the update, where products are large: as many as cores where nothing else runs. Playing takes one."""
    compile: bool = False
    """torch.compile the networks' pass over a minibatch."""
    track: bool = False
    """Log to Weights & Biases as well; offline where there is no account."""

    windows: int = 4
    """Windows that an episode serves."""
    window_tokens: int = 2048
    """Tokens in a window."""
    ops_per_layer: int = 16
    """Operations on each layer between two windows."""
    schedule: str = "drift"
    """How sequences are drawn: stationary, drift, switch or replay."""
    drift_rate: float = 0.5
    """Step of the mixture walk."""
    passes_per_window: int = 100
    """Forward passes that a window stands for."""
    start: str = "eplb"
    """Placement that an episode begins with: eplb or static."""
    homes: Literal["even", "served"] = "even"
    """Observe the last window with its tokens dealt evenly over the GPUs, or as it was served."""
    lookahead_norm: int = 4
    """Smooth norm over GPUs in the look-ahead; 0 is the true time."""
    reward_norm: int = 4
    """As lookahead_norm, for the reward."""
    reward_window: Literal["next", "observed"] = "next"
    """The window whose saving is the reward."""
    credit: Literal["operation", "stream"] = "operation"
    """operation: a layer's operations are an episode, and a migration is spread over horizon windows. stream: the whole stream is
    one, each window adds what earlier operations still save."""
    horizon: float = 4.0
    """Windows that a move is expected to be of use (1 with credit stream)."""

    pretrain_states: int = 8192
    """States of the supervised phase, 0 for none."""
    pretrain_experts: int = 16
    """Experts looked at in each of them."""
    pretrain_epochs: int = 3
    """Passes over each layer's states."""
    pretrain_lr: float = 2e-3
    """Adam's step size in the supervised phase."""
    pretrain_temperature: float = 0.02
    """Targets are a softmax over the savings, in per cent of the layer's time, divided by this."""
    pretrain_sharpen: float = 4.0
    """Scores are multiplied by this after the supervised phase, so that PPO explores around what the policy does at work."""

    learning_rate: float = 3e-4
    """Adam's step size (at the start, if annealed)."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to 0."""
    num_envs: int = 64
    """Environments that step side by side, in each process."""
    twins: int = 8
    """Environments that play the same stream: what the others of them gained is taken off an advantage. 1 for none; fewer
    where num_envs is no multiple."""
    num_steps: int = 64
    """Steps of each environment between updates; a multiple of ops_per_layer."""
    num_minibatches: int = 8
    """Parts that a rollout is cut into, whole visits to a layer shuffled anew in each epoch."""
    update_epochs: int = 2
    """Passes over a rollout."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Weight of longer returns in the advantage."""
    norm_adv: bool = True
    """Normalise advantages in each minibatch."""
    clip_coef: float = 0.2
    """Range of the ratio, and of the value function's change."""
    clip_vloss: bool = True
    """Clip the value function's change as well."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    norm_value: bool = True
    """The critic predicts returns standardised by their running mean and deviation."""
    max_grad_norm: float = 0.5
    """Global norm that gradients are clipped to."""
    target_kl: float | None = 0.03
    """Stop an update after the epoch whose approximate KL exceeds this."""

    hidden: int = 32
    """Width of the networks."""
    graph_layers: int = 1
    """Rounds of messages in each encoder."""
    encoder: Literal["graph", "mlp"] = "graph"
    """Graph encoders, or nodes that do not exchange messages."""
    simultaneous: bool = False
    """Both actors choose at once, as in the seed: the GPU actor knows neither the expert nor the look-ahead."""
    lookahead: bool = True
    """The GPU actor sees what each operation on the chosen expert would save on the observed window."""
    centralised: bool = True
    """One critic sees both graphs; otherwise each actor has a critic that sees its own."""
    separate_critic: bool = False
    """The critic has encoders of its own."""

    eval_interval: int = 4
    """Iterations between looks at the validation stream, 0 for none."""
    eval_streams: int = 4
    """Held-out streams at the end, 0 for no evaluation."""
    eval_windows: int = 7
    """Windows of each of them."""
    eval_planners: tuple[str, ...] = ("static", *EPLB_NAMES, "bottleneck-8", "anneal")
    """Planners in the table at the end, beside the untrained, the supervised and the trained policy."""


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


# The task


@dataclass
class Task:
    """Everything that follows from the arguments before any training: a mismatch is refused here."""

    train: TokenTrace
    test: TokenTrace
    config: PlacementConfig
    simulator: Simulator
    view: ViewSettings


def evenly_spaced(trace: TokenTrace, layers: int) -> TokenTrace:
    picked = np.unique(np.linspace(0, trace.n_layers - 1, min(layers or trace.n_layers, trace.n_layers)).round())
    return trace.select(layers=picked.astype(int).tolist())


def make_task(args: Args) -> Task:
    whole = evenly_spaced(load_traces(list(args.trace)), args.layers)
    if args.eval_trace:
        train, test = whole, evenly_spaced(load_traces(list(args.eval_trace)), args.layers)
        shapes = [(t.n_experts, t.top_k) for t in (train, test)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--eval-trace {test.name} is top-{shapes[1][1]} of {shapes[1][0]} experts, but --trace {train.name} is "
                f"top-{shapes[0][1]} of {shapes[0][0]}: one run is about one model; clustergym eval --checkpoint tries another"
            )
    else:
        train, test = whole.split(0.5, seed=0)
    model = model_for(train, args.model)
    simulator = Simulator(model, get_cluster(args.cluster), passes_per_window=args.passes_per_window)
    if args.num_steps % args.ops_per_layer:
        raise ValueError(
            f"num_steps is {args.num_steps}: expected a multiple of ops_per_layer, which is {args.ops_per_layer}"
        )
    visits = args.num_envs * args.num_steps // args.ops_per_layer
    if visits % args.num_minibatches:
        raise ValueError(
            f"{visits} visits to a layer ({args.num_envs} environments, {args.num_steps} steps, {args.ops_per_layer} operations each) "
            f"do not divide into {args.num_minibatches} minibatches: lower --num-minibatches, or take more environments or steps"
        )
    if args.threads < 1:
        raise ValueError(f"threads is {args.threads}: expected at least 1")
    if args.twins < 1:
        raise ValueError(f"twins is {args.twins}: expected at least 1")
    if args.pretrain_sharpen <= 0:
        raise ValueError(f"pretrain_sharpen is {args.pretrain_sharpen}: expected more than 0")
    horizon = 1.0 if args.credit == "stream" else args.horizon
    view = ViewSettings(args.homes, args.lookahead_norm, horizon, args.ops_per_layer)
    config = PlacementConfig(
        trace=train,
        cluster=simulator.cluster,
        model=model,
        windows=args.windows,
        window_tokens=args.window_tokens,
        ops_per_layer=args.ops_per_layer,
        schedule=args.schedule,
        drift_rate=args.drift_rate,
        passes_per_window=view.passes(args.passes_per_window),
        start=args.start,
        reward_window=args.reward_window,
        reward_norm=args.reward_norm,
        credit=args.credit,
    )
    return Task(train, test, config, simulator, view)


def make_agent(args: Args) -> PlacementPolicy:
    """Fresh networks, or those of --init where their shape is the one asked for."""
    wanted = NetworkConfig(**{field.name: getattr(args, field.name) for field in fields(NetworkConfig)})
    if args.init is None:
        return PlacementPolicy(wanted)
    agent, view, _ = load_policy(args.init)
    asked = ViewSettings(
        args.homes, args.lookahead_norm, 1.0 if args.credit == "stream" else args.horizon, args.ops_per_layer
    )
    for what, found, expected in (("network", agent.config, wanted), ("view", view, asked)):
        if found != expected:
            raise CheckpointError(f"--init {args.init} has {what} {found}, but the arguments ask for {expected}")
    return agent.train()


# Rollouts


@dataclass
class Batch:
    """What an update learns from, one row a step. Steps of a visit to a layer are neighbours and share its graphs."""

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
        """All steps of some visits."""
        each = len(self) // self.visits
        return (visits[:, None] * each + torch.arange(each, device=visits.device)).flatten()

    def inputs(self, visits: Tensor, rows: Tensor) -> Inputs:
        return {key: each[rows] for key, each in self.steps.items()} | {
            key: each[visits] for key, each in self.graphs.items()
        }


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A sample and its log-probability."""
    logprobs = logits.log_softmax(-1)
    # Adding Gumbel noise to logits and taking the largest samples the categorical distribution.
    drawn = (logprobs - torch.empty_like(logprobs).exponential_().log()).argmax(-1)
    return drawn, logprobs.gather(-1, drawn[:, None]).squeeze(-1)


def without_luck(advantages: Tensor, twins: int) -> Tensor:
    """Take off what the other twins gained at the same time of the same stream, (steps, envs) → (steps, envs).

    Most of what varies is what the next window happens to bring, which no critic can know and which twins share. An
    environment's own actions are not in the mean of the others, so the gradient stays unbiased.
    """
    groups = advantages.unflatten(1, (-1, twins))
    others = (groups.sum(-1, keepdim=True) - groups) / (twins - 1)
    return (groups - others).flatten(1)


class Rollouts:
    """Plays both actors in the batched environment; layers and windows are carried from one rollout to the next."""

    def __init__(self, args: Args, agent: PlacementPolicy, task: Task, device: torch.device) -> None:
        self.args, self.agent = args, agent
        self.twins = math.gcd(args.twins, args.num_envs)
        self.view = PolicyView(PlacementBatch(task.config, args.num_envs, device), args.homes, args.lookahead_norm)
        self.seconds = {"simulator": 0.0, "policy": 0.0}
        self.saved = float("nan")
        """Share of the static time that the last finished episodes saved."""

    def restart(self, seed: int) -> None:
        """New episodes from a seed: nothing of the old ones is left, so a resumed run and an uninterrupted one agree."""
        stream = np.arange(self.args.num_envs, dtype=np.int64) // self.twins
        self.view.batch.seed(derive_seed(seed) * 2**20 + stream)
        self.view.reset()

    def step(self, expert: Tensor, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(reward, where a layer ended, where an episode ended); ended episodes begin anew."""
        reward, layer_end = self.view.step(expert, node)
        batch = self.view.batch
        done = batch.done
        if bool(done.any()):
            saved = batch.env["time"][done, 5] / batch.rules_host.static_us / batch.config.windows
            self.saved = float(saved.mean())
            self.view.reset(done)
            layer_end = layer_end | done
        return reward, layer_end, done

    @torch.no_grad()
    def collect(self) -> Batch:
        """One rollout of num_steps × num_envs steps with advantages."""
        args, agent, view = self.args, self.agent, self.view
        same_node = view.same_node
        steps: dict[str, list[Tensor]] = {key: [] for key in STEP_KEYS}
        graphs: dict[str, list[Tensor]] = {key: [] for key in LAYER_KEYS}
        taken: list[tuple[Tensor, ...]] = []
        for t in range(args.num_steps):
            began = time.perf_counter()
            inputs = view.inputs()
            for key in STEP_KEYS:
                steps[key].append(inputs[key].clone())
            if t % args.ops_per_layer == 0:
                for key in LAYER_KEYS:
                    graphs[key].append(inputs[key].clone())
            encoded = agent.encode(inputs, same_node)
            expert, expert_logprob = choose(agent.expert_logits(inputs, encoded))
            values = self.denormalised(agent.values(inputs, encoded, same_node))
            legal = view.legal(expert)
            seen = time.perf_counter()
            parts = view.look(expert)
            looked = time.perf_counter()
            node, node_logprob = choose(agent.node_logits(inputs, encoded, same_node, expert, parts, legal))
            chosen = time.perf_counter()
            reward, layer_end, done = self.step(expert, node)
            self.seconds["policy"] += seen - began + chosen - looked
            self.seconds["simulator"] += looked - seen + time.perf_counter() - chosen
            end = layer_end if args.credit == "operation" else done
            taken.append((expert, node, parts, legal, expert_logprob + node_logprob, values, reward, end))
        expert, node, parts, legal, logprobs, values, rewards, ends = (
            torch.stack(each) for each in zip(*taken, strict=True)
        )
        inputs = view.inputs()
        next_value = self.denormalised(agent.values(inputs, agent.encode(inputs, same_node), same_node))
        # An end is an end: what comes after does not depend on what was done before.
        advantages, returns = compute_gae(
            rewards, values, ends, ends, next_value, torch.zeros_like(values), args.gamma, args.gae_lambda
        )
        if self.twins > 1:
            advantages = without_luck(advantages, self.twins)

        def by_visit(each: Tensor) -> Tensor:
            """(steps, envs, …) → rows with the steps of a visit next to each other."""
            return each.unflatten(0, (-1, args.ops_per_layer)).transpose(1, 2).flatten(0, 2)

        return Batch(
            {key: by_visit(torch.stack(each)) for key, each in steps.items()},
            {key: torch.stack(each).flatten(0, 1) for key, each in graphs.items()},
            *(by_visit(each) for each in (expert, node, parts, legal, logprobs, advantages, returns, values)),
        )

    def denormalised(self, values: Tensor) -> Tensor:
        """(B,) values in units of reward: the mean over critics."""
        return values.mean(-1) * self.agent.value_std + self.agent.value_mean


# Learning


def imitate(agent: PlacementPolicy, rollouts: Rollouts, args: Args, world: World) -> dict[str, float]:
    """The supervised phase: which experts, and which operations on them, save most on the observed window.

    States come from a walk that mostly follows the best operation found and now and then a random expert's.
    """
    view, optimizer = rollouts.view, make_optimizer(agent, args.pretrain_lr)
    size, n_experts, device = args.num_envs, view.batch.n_experts, view.batch.device
    n_seen = min(args.pretrain_experts, n_experts)
    chunks = max(1, round(args.pretrain_states / (size * args.ops_per_layer * world.size)))
    losses: dict[str, float] = {}
    for chunk in range(chunks):
        optimizer.param_groups[0]["lr"] = anneal(args.pretrain_lr, chunk + 1, chunks)
        states: list[tuple[Inputs, Tensor, Tensor, Tensor]] = []
        graphs: Inputs = {}
        for t in range(args.ops_per_layer):
            inputs = {key: each.clone() for key, each in view.inputs().items() if t == 0 or key in STEP_KEYS}
            if t == 0:
                graphs = {key: inputs[key] for key in LAYER_KEYS}
            looked = torch.rand((size, n_experts), device=device).argsort(-1)[:, :n_seen]
            parts = view.look_many(looked)
            legal = view.batch.obs["joint_mask"].bool()[view.rows[:, None], looked]
            states.append((inputs, looked, parts, legal))
            worth = torch.where(legal, gains(parts), -torch.inf)
            best, node = worth.max(-1)
            random = torch.rand(size, device=device) < 0.3
            pick = torch.where(random, torch.zeros_like(view.rows), best.argmax(-1))
            expert, node = looked[view.rows, pick], node[view.rows, pick]
            view.look(expert)
            rollouts.step(expert, node)
        for _ in range(args.pretrain_epochs):
            for t in torch.randperm(args.ops_per_layer).tolist():
                inputs, looked, parts, legal = states[t]
                losses = supervised_step(agent, optimizer, inputs | graphs, view, looked, parts, legal, args, world)
    return losses


def supervised_step(
    agent: PlacementPolicy,
    optimizer: torch.optim.Adam,
    inputs: Inputs,
    view: PolicyView,
    looked: Tensor,
    parts: Tensor,
    legal: Tensor,
    args: Args,
    world: World,
) -> dict[str, float]:
    """One step of cross-entropy towards a softmax over what was found: among the experts, and among each one's nodes."""
    rows = view.rows
    worth = torch.where(legal, gains(parts), -torch.inf)
    # Experts that cannot be chosen are no target: the weight of a masked score is 0, not merely small.
    best = torch.where(inputs["expert_mask"].gather(-1, looked), worth.amax(-1), MASKED_LOGIT)
    encoded = agent.encode(inputs, view.same_node)
    logprobs = agent.expert_logits(inputs, encoded).gather(-1, looked).log_softmax(-1)
    expert_loss = -(logprobs * (best / args.pretrain_temperature).softmax(-1)).sum(-1).mean()
    node_loss = torch.zeros((), device=rows.device)
    # The best expert, and one at random.
    for pick in (best.argmax(-1), torch.zeros_like(rows)):
        expert = looked[rows, pick]
        nodes = agent.node_logits(inputs, encoded, view.same_node, expert, parts[rows, pick], legal[rows, pick])
        target = (worth[rows, pick] / args.pretrain_temperature).softmax(-1)
        node_loss = node_loss - (nodes.log_softmax(-1) * target).sum(-1).mean()
    optimizer.zero_grad()
    (expert_loss + node_loss).backward()
    world.average_gradients(agent.parameters())
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"pretrain/expert_loss": expert_loss.item(), "pretrain/node_loss": node_loss.item()}


class ReturnStatistics:
    """Running mean and deviation of the returns, for the critic."""

    def __init__(self) -> None:
        self.weight, self.mean, self.square = 0.0, 0.0, 0.0

    def update(self, returns: Tensor, world: World) -> tuple[float, float]:
        self.weight = 0.9 * self.weight + 0.1
        self.mean = 0.9 * self.mean + 0.1 * world.mean(float(returns.mean()))
        self.square = 0.9 * self.square + 0.1 * world.mean(float((returns**2).mean()))
        mean = self.mean / self.weight
        return mean, max(self.square / self.weight - mean**2, 1e-16) ** 0.5


def update(
    agent: PlacementPolicy, optimizer: torch.optim.Adam, batch: Batch, same_node: Tensor, args: Args, world: World
) -> dict[str, float]:
    """Several epochs of shuffled minibatches on one rollout; returns the means of what was seen."""
    seen: list[Tensor] = []
    old_values = (batch.values - agent.value_mean) / agent.value_std
    returns = (batch.returns - agent.value_mean) / agent.value_std
    for _ in range(args.update_epochs):
        # Visits are shuffled and not steps: the pass over a minibatch then multiplies a visit's graphs with all its steps at once.
        shuffled = torch.randperm(batch.visits, device=batch.expert.device)
        bounds = np.linspace(0, batch.visits, args.num_minibatches + 1).astype(int)
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

            advantages = normalize_advantages(batch.advantages[rows]) if args.norm_adv else batch.advantages[rows]
            pg_loss = policy_loss(ratio, advantages, args.clip_coef)
            v_loss = value_loss(
                values, old_values[rows, None], returns[rows, None], args.clip_coef if args.clip_vloss else None
            )
            expert_entropy = categorical_entropy(expert_logprobs, inputs["expert_mask"]).mean()
            node_entropy = categorical_entropy(node_logprobs, inputs["gpu_mask"] if args.simultaneous else legal).mean()
            approx_kl = k3.mean()
            loss = pg_loss - args.ent_coef * (expert_entropy + node_entropy) + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            world.average_gradients(agent.parameters())
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                seen.append(
                    torch.stack(
                        [pg_loss, v_loss, expert_entropy, node_entropy, k1.mean(), approx_kl, clipfrac, grad_norm]
                    )
                )
        if args.target_kl is not None and world.mean(float(seen[-1][5])) > args.target_kl:
            break
    names = (
        "policy_loss", "value_loss", "expert_entropy", "node_entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm",
    )  # fmt: skip
    means = torch.stack(seen).detach().mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
    metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
    return metrics


def iterate(
    agent: PlacementPolicy,
    optimizer: torch.optim.Adam,
    rollouts: Rollouts,
    statistics: ReturnStatistics,
    args: Args,
    world: World,
) -> dict[str, float]:
    """One rollout and what is learnt from it; returns the metrics."""
    rollouts.seconds = dict.fromkeys(rollouts.seconds, 0.0)
    began = time.perf_counter()
    batch = rollouts.collect()
    collected = time.perf_counter()
    mean, std = statistics.update(batch.returns, world) if args.norm_value else (0.0, 1.0)
    device = batch.returns.device
    agent.standardise(torch.tensor(mean, device=device), torch.tensor(std, device=device))
    torch.set_num_threads(args.threads)
    metrics = update(agent, optimizer, batch, rollouts.view.same_node, args, world)
    torch.set_num_threads(1)
    updated = time.perf_counter()
    elapsed = max(updated - began, 1e-9)
    return metrics | {
        "charts/episodic_saved": rollouts.saved,
        "charts/return_mean": mean,
        "charts/return_std": std,
        "charts/learning_rate": optimizer.param_groups[0]["lr"],
        "charts/SPS": len(batch) * world.size / elapsed,
        "time/simulator": rollouts.seconds["simulator"] / elapsed,
        "time/policy": rollouts.seconds["policy"] / elapsed,
        "time/update": (updated - collected) / elapsed,
    }


def all_finite(agent: nn.Module, metrics: dict[str, float]) -> bool:
    """Whether a run can go on: no NaN or infinity in the losses (an undefined explained variance is no fault) or weights."""
    losses = [
        value for name, value in metrics.items() if name.startswith("losses/") and name != "losses/explained_variance"
    ]
    return bool(np.isfinite(losses).all()) and all(bool(torch.isfinite(p).all()) for p in agent.parameters())


# Evaluation


class Referee:
    """The policy beside the planners, on a validation stream while it trains and on held-out streams at the end."""

    def __init__(self, args: Args, task: Task) -> None:
        self.args, self.task = args, task
        self.validation = Protocol(
            args.schedule,
            args.windows,
            args.window_tokens,
            args.drift_rate,
            streams=2,
            seed=derive_seed(args.seed, 7) % 10**6,
        )
        names = ("static", "eplb")
        self.reference = {name: self.planner(name, self.validation, task.train).total_us for name in names}

    def planner(self, name: str, protocol: Protocol, trace: TokenTrace, **options: object) -> Result:
        planner = make_planner(name, self.task.simulator, **options)
        return evaluate_planner(planner, name, self.task.train, trace, protocol)

    def policy(self, agent: PlacementPolicy, name: str, protocol: Protocol, trace: TokenTrace) -> Result:
        # A copy on the CPU, where planners work.
        copy = PlacementPolicy.from_state(agent.as_state()).eval()
        planner = Policy(self.task.simulator, policy=(copy, self.task.view))
        return evaluate_planner(planner, name, self.task.train, trace, protocol)

    def look(self, agent: PlacementPolicy) -> dict[str, float]:
        """What the policy takes off the time of the static placement and of EPLB on the validation stream, in per cent."""
        total = self.policy(agent, "policy", self.validation, self.task.train).total_us
        return {
            "validation/total_us": total,
            "validation/saved_vs_static": 100 * (1 - total / self.reference["static"]),
            "validation/saved_vs_eplb": 100 * (1 - total / self.reference["eplb"]),
        }

    def final(self, agents: dict[str, PlacementPolicy]) -> list[Result]:
        """The table at the end, on streams that share no sequence with training."""
        args = self.args
        protocol = Protocol(
            args.schedule, args.eval_windows, args.window_tokens, args.drift_rate, args.eval_streams, seed=0
        )
        results = [self.planner(name, protocol, self.task.test) for name in args.eval_planners]
        return results + [self.policy(agent, name, protocol, self.task.test) for name, agent in agents.items()]


def draw_curve(folder: Path, curve: list[tuple[int, float, float]]) -> None:
    """The validation stream while training went on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [step for step, _, _ in curve]
    axes.plot(steps, [static for _, static, _ in curve], "o-", ms=3, color="#4477AA", label="vs static")
    axes.plot(steps, [eplb for _, _, eplb in curve], "s-", ms=3, color="#EE6677", label="vs EPLB every window")
    axes.axhline(0, color="#BBBBBB", lw=1)
    axes.set(xlabel="operations (0: after the supervised phase)", ylabel="time saved, %", title="validation stream")
    axes.legend()
    figure.savefig(folder / "validation.png", dpi=120)
    plt.close(figure)


def train(args: Args, world: World) -> dict[str, Any]:
    """The whole run; returns what the result line shows (on rank 0, where evaluation happens)."""
    device, console = world.device, Console(stderr=True)
    task = make_task(args)
    torch.manual_seed(args.seed)
    agent = make_agent(args).to(device)
    folder = run_folder(f"ppo_moe_marl__{task.train.name}__{args.seed}", args.run_dir, args.resume)
    config = plain_args(args) | {"world_size": world.size}
    batch_size = args.num_envs * args.num_steps * world.size
    num_iterations = args.total_timesteps // batch_size
    if args.total_timesteps and num_iterations < 1:
        raise ValueError(
            f"total_timesteps is {args.total_timesteps}: expected 0, or at least one rollout of {batch_size}"
        )
    world.broadcast(agent)
    stages = {"untrained": PlacementPolicy.from_state(agent.as_state()).eval()}
    optimizer = make_optimizer(agent, args.learning_rate)
    rollouts = Rollouts(args, agent, task, device)
    statistics, first, curve = ReturnStatistics(), 1, []
    state = None
    if args.resume and (folder / CHECKPOINT_NAME).exists():
        state = load_checkpoint(folder / CHECKPOINT_NAME, "ppo_moe_marl", device)
        check_same_args(state["args"], config)
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        statistics.weight, statistics.mean, statistics.square = state["statistics"]
        stages["supervised"] = PlacementPolicy.from_state(agent.as_state()).eval()
        stages["supervised"].load_state_dict(state["supervised"])
        first, curve = state["iteration"] + 1, [tuple(each) for each in state["curve"]]
    if args.compile:
        agent.compile()

    def save(iteration: int) -> None:
        if not world.is_main or not args.checkpoint_interval:
            return
        logger.flush()
        content = {
            "args": config,
            "agent": agent.state_dict(),
            "supervised": stages["supervised"].state_dict(),
            "optimizer": optimizer.state_dict(),
            "statistics": [statistics.weight, statistics.mean, statistics.square],
            "iteration": iteration,
            "curve": [list(each) for each in curve],
        }
        save_checkpoint(folder / CHECKPOINT_NAME, "ppo_moe_marl", content)

    def look(step: int) -> dict[str, float]:
        if referee is None:
            return {}
        found = referee.look(agent)
        curve.append((step, found["validation/saved_vs_static"], found["validation/saved_vs_eplb"]))
        logger.image("placement", draw(frame_of(rollouts.view.batch, [])), step)
        return found

    start_step, total_steps = (first - 1) * batch_size, num_iterations * batch_size
    logger = RunLogger(folder, config, args.track, start_step=start_step, enabled=world.is_main)
    with logger, Progress(total_steps, start_step, enabled=world.is_main) as progress:
        referee = Referee(args, task) if world.is_main and args.eval_interval else None
        shown: dict[str, float] = {}
        if state is None:
            if args.pretrain_states:
                torch.manual_seed(derive_seed(args.seed, 0, world.rank))
                rollouts.restart(derive_seed(args.seed, 0, world.rank))
                began = time.perf_counter()
                losses = imitate(agent, rollouts, args, world)
                logger.scalars(losses | {"pretrain/seconds": time.perf_counter() - began}, 0)
                agent.sharpen(args.pretrain_sharpen)
            stages["supervised"] = PlacementPolicy.from_state(agent.as_state()).eval()
            shown = look(0)
            logger.scalars(shown, 0)
            save(0)
        else:
            console.print(f"resumed after iteration {first - 1} of {num_iterations}", highlight=False)
        for iteration in range(first, num_iterations + 1):
            interval = args.checkpoint_interval or num_iterations
            if (iteration - 1) % interval == 0:
                # Interrupted or not, every run passes here with the same networks and then draws the same numbers.
                torch.manual_seed(derive_seed(args.seed, iteration, world.rank))
                rollouts.restart(derive_seed(args.seed, iteration, world.rank))
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, num_iterations)
            metrics = iterate(agent, optimizer, rollouts, statistics, args, world)
            if not all_finite(agent, metrics):
                good = folder / CHECKPOINT_NAME
                kept = f"the last good checkpoint is {good}" if good.exists() else "there is no checkpoint yet"
                raise FloatingPointError(
                    f"iteration {iteration}: a loss or weight is not finite ({metrics}); {kept}; "
                    "a lower --learning-rate may help"
                )
            step = iteration * batch_size
            if args.eval_interval and (iteration % args.eval_interval == 0 or iteration == num_iterations):
                shown = look(step)
            logger.scalars(metrics | shown, step)
            progress.update(step, **{name.removeprefix("validation/"): value for name, value in shown.items()})
            if iteration % interval == 0 or iteration == num_iterations:
                save(iteration)
        steps_per_s = progress.steps_per_s(total_steps)
        if not world.is_main:
            return {}
        about = {"args": {key: str(value) for key, value in config.items()}, "steps": total_steps}
        if args.save_model:
            save_policy(folder / FILE_NAME, agent, task.view, about)
            save_policy(folder / "supervised" / FILE_NAME, stages["supervised"], task.view, about | {"steps": 0})
        results: list[Result] = []
        if args.eval_streams:
            agents = stages | {"policy": agent} if total_steps else stages
            results = (referee or Referee(args, task)).final(agents)
            title = f"{task.test.name} on {task.simulator.cluster.name}, held out, {args.schedule}"
            Console(width=130).print(results_table(results, title))
            plot_results(results, title, folder / "planners.png")
            logger.scalars({f"eval/{r.planner}": r.total_us for r in results}, total_steps)
        if curve:
            draw_curve(folder, curve)
    by_name = {result.planner: result for result in results}
    best_eplb = min((by_name[name].total_us for name in EPLB_NAMES if name in by_name), default=float("nan"))
    ours = by_name.get("policy") or by_name.get("supervised")
    ratios = [] if ours is None or "eplb" not in by_name else [
        a / b for a, b in zip(ours.stream_totals_us, by_name["eplb"].stream_totals_us, strict=True)
    ]  # fmt: skip
    return {
        "seed": args.seed,
        "mean_return": None if ours is None else 1 - ours.total_us / best_eplb,
        "total_us": {name: result.total_us for name, result in by_name.items()},
        "vs_best_eplb": None if ours is None else ours.total_us / best_eplb,
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
