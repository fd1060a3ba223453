"""Federated PPO: N agents learn each in environments of their own, and a communication matrix holds their policies together.

    python cleanrl_ppo/ppo_federated.py --n-agents 2                                       # two agents, each the other's neighbour
    python cleanrl_ppo/ppo_federated.py --n-agents 4 --comm-matrix-config comm_matrices/two_pairs.json --penalty-coeff 10
    torchrun --nproc-per-node 4 cleanrl_ppo/ppo_federated.py --n-agents 4                  # a process an agent, the same curves
    python cleanrl_ppo/ppo_federated.py --env-id gpu_allocation_v0 --n-agents 4            # agent i is edge node i
    python cleanrl_ppo/ppo_federated.py --n-agents 2 --resume                              # after a crash

Agent i minimises

    policy loss − ent_coef · entropy + vf_coef · value loss + penalty_coeff · Σ_j w_ij · KL(π_i ‖ π_j)

where w is the communication matrix and π_j the neighbour's policy, frozen when policies were last exchanged, every
``local_updates`` rollouts. The divergence is the exact one between the two distributions in each state that agent i visited, and only
π_i is moved by its gradient. docs/ppo_federated.md has the protocol, the metrics and the experiments.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clustergym.common.files import write_atomically

# Importing anything of clustergym registers its environments, so that --env-id finds them.
from clustergym.common.statistics import ci95
from clustergym.training import (
    CHECKPOINT_NAME,
    Progress,
    RunLogger,
    check_same_args,
    choose_device,
    derive_seed,
    load_checkpoint,
    plain_args,
    print_result,
    read_scalars,
    save_checkpoint,
)

MATRICES = Path(__file__).resolve().parent / "comm_matrices"
EDGE_NODES = "gpu_allocation_v0"
log = logging.getLogger("ppo_federated")


@dataclass
class Args:
    n_agents: int = 2
    """Number of agents, each with environments and networks of its own; 1 is plain PPO."""
    comm_matrix_config: Path | None = None
    """JSON file with the communication matrix, {"comm_matrix": {"0": {"1": 10}, …}} or a list of rows; a bare name such as
    "ring" takes the one in comm_matrices/. Without it every agent is every other's neighbour with weight 1."""
    normalise_rows: Annotated[bool, tyro.conf.arg(aliases=["--normalize-rows"])] = False
    """Divide each row of the matrix by its sum, so that an agent with many neighbours is pulled no harder than one with few."""
    plot_comm_matrix: bool = False
    """Draw the communication graph to comm_matrix.png in the run folder before training starts."""
    local_updates: int = 16
    """Rollouts that each agent learns from on its own before agents tell each other their policies again."""
    use_comm_penalty: bool = True
    """Add the sum of KL divergences to the neighbours' policies to each agent's loss."""
    penalty_coeff: Annotated[float, tyro.conf.arg(aliases=["--comm-coeff"])] = 1.0
    """Weight of that sum; it multiplies every entry of the matrix."""
    average_weights: bool = False
    """At each exchange, replace an agent's networks by the mean over itself (weight 1, or the matrix's diagonal) and its neighbours
    (the matrix's row). Use it with --common-init: the mean of networks that started apart is no network at all."""
    common_init: bool = False
    """All agents start from the same weights instead of each from its own."""
    log_all_kl: bool = False
    """Log KL divergences to all agents and not to neighbours alone; every agent then receives every policy."""
    exchange_timeout: float = 60.0
    """With a process an agent: seconds to wait at an exchange for agents that are late, before going on with their last policy."""
    exchange_store: str | None = None
    """With a process an agent: HOST:PORT of a store started with --serve-store. Without it the store is torchrun's, and where
    ranks are started by hand, rank 0 keeps it."""
    serve_store: str | None = None
    """Keep a store for the exchange at HOST:PORT until interrupted, and do nothing else."""

    env_id: str = "CartPole-v1"
    """Gymnasium id with Discrete or Box actions ("module:Id-v0" imports the module first), or gpu_allocation_v0: agent i is edge
    node i of the allocation task."""
    env_options: str = "{}"
    """JSON object of further arguments for the environment, such as {"history": true} for gpu_allocation_v0."""
    total_timesteps: int = 500_000
    """Environment steps of each agent, over all its environments."""
    learning_rate: float = 2.5e-4
    """Adam's step size (at the start, if annealed)."""
    num_envs: int = 4
    """Environments in which each agent plays side by side."""
    num_steps: int = 128
    """Steps of each environment between updates: a rollout has num_steps · num_envs transitions."""
    num_minibatches: int = 4
    """Parts that a rollout is cut into, shuffled anew in each epoch; num_steps · num_envs must be a multiple."""
    update_epochs: int = 4
    """Passes over each rollout."""
    use_clipping: bool = True
    """The clipped surrogate; False takes the plain one with a penalty β · KL(π_old ‖ π) and adapts β."""
    clip_coef: float = 0.2
    """Range of the probability ratio, and of the value function's change with --clip-vloss."""
    adaptive_kl_target: float = 0.01
    """With --use-clipping False: KL that an update should reach; β is doubled above 1.5 times this and halved below a 1.5th."""
    adaptive_kl_beta: float = 1.0
    """With --use-clipping False: β at the start."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus, which keeps a policy from settling too early."""
    vf_coef: float = 0.5
    """Weight of the value function's loss. Networks are separate, so it matters through gradient clipping, which takes both together."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to 0 over the run."""
    gae: bool = True
    """Advantages by generalised advantage estimation; False takes the discounted return to the rollout's end minus the value."""
    gamma: float = 0.99
    """Discount of rewards a step ahead."""
    gae_lambda: float = 0.95
    """Weight of longer returns in the advantage: 0 trusts the value function, 1 the rewards."""
    norm_adv: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 in each minibatch."""
    clip_vloss: bool = True
    """Clip the value function's change to clip_coef as well, and take the larger of the two losses."""
    max_grad_norm: float = 0.5
    """Norm that the gradient of all of an agent's parameters together is clipped to."""
    target_kl: float | None = None
    """Stop an update after the epoch whose KL to the policy before the update exceeds this; None never stops."""
    bootstrap_truncated: bool = True
    """At a time limit, value the state that would have come next; False counts it as the end."""
    init_logstd: float = 0.0
    """With Box actions: logarithm of the policy's standard deviation at the start, in units of half the box where it is bounded."""
    hidden: int = 64
    """Width of the two hidden layers of policy and value network."""

    exp_description: str = ""
    """A few words about the experiment, kept with the logs."""
    seed: int = 1
    """Everything random follows from it and from the agent's number: weights, environments, actions, minibatches."""
    run_dir: Path | None = None
    """Folder of the run; agent i logs to agent_<i> below it. runs/ppo_federated__<env>__<seed> unless given."""
    resume: bool = False
    """Go on from the checkpoints in the run folder; bit for bit what a run that was never interrupted would do."""
    cuda: bool = False
    """Train on the GPU."""
    track: bool = False
    """Log to Weights & Biases as well, a run an agent; offline where there is no account."""
    capture_video: bool = False
    """Record episodes of each agent's first environment (0, 1, 8, 27, … and every thousandth) to agent_<i>/videos."""
    save_model: bool = False
    """Also write each trained agent to agent_<i>/model.pt."""
    eval_episodes: int = 20
    """Held-out episodes that each agent plays greedily at the end, on seeds that training never used; 0 for none."""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    @property
    def num_rounds(self) -> int:
        """Rounds of local updates; the last may be shorter."""
        return -(-self.num_iterations // self.local_updates)


def parse_args(argv: Sequence[str]) -> Args:
    """Booleans may be written --flag, --no-flag, --flag=True or --flag False."""
    flags = {f"--{each.name.replace('_', '-')}" for each in fields(Args) if isinstance(each.default, bool)}
    expanded: list[str] = []
    for i, word in enumerate(argv):
        following = argv[i + 1] if i + 1 < len(argv) else "--"
        name = word.replace("_", "-")
        if name in flags and following.startswith("-"):
            expanded += [name, "True"]
        elif name.startswith("--no-") and (positive := "--" + name.removeprefix("--no-")) in flags:
            expanded += [positive, "False"]
        else:
            expanded.append(word)
    return tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagConversionOff,), args=expanded)


def check_args(args: Args) -> None:
    """Refuse what cannot be trained, before anything is."""
    least = {
        "n_agents": 1, "local_updates": 1, "num_envs": 1, "num_steps": 1, "num_minibatches": 1, "update_epochs": 1, "hidden": 1,
        "eval_episodes": 0, "penalty_coeff": 0, "ent_coef": 0, "vf_coef": 0, "adaptive_kl_beta": 0, "seed": 0,
    }  # fmt: skip
    for name, bound in least.items():
        value = getattr(args, name)
        if not (math.isfinite(value) and value >= bound):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected {bound} or more")
    for name in ("learning_rate", "clip_coef", "max_grad_norm", "exchange_timeout", "adaptive_kl_target", "target_kl"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected more than 0")
    for name in ("gamma", "gae_lambda"):
        value = getattr(args, name)
        if not 0 <= value <= 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected 0 … 1")
    if args.batch_size % args.num_minibatches:
        raise ValueError(
            f"a rollout has --num-steps {args.num_steps} · --num-envs {args.num_envs} = {args.batch_size} transitions, which "
            f"--num-minibatches {args.num_minibatches} does not divide: expected a divisor of {args.batch_size}"
        )
    if args.norm_adv and args.batch_size == args.num_minibatches:
        raise ValueError(
            "--norm-adv needs two transitions or more in a minibatch: fewer --num-minibatches, or --norm-adv False"
        )
    try:
        options = json.loads(args.env_options)
    except json.JSONDecodeError as reason:
        raise ValueError(f"--env-options {args.env_options!r} is not JSON: {reason}") from reason
    if not isinstance(options, dict):
        raise ValueError(f'--env-options is {options!r}: expected a JSON object such as {{"history": true}}')
    if args.num_iterations < 1:
        raise ValueError(
            f"--total-timesteps is {args.total_timesteps}: expected at least one rollout of {args.batch_size} steps"
        )


# The communication matrix


def read_comm_matrix(path: Path, n_agents: int) -> np.ndarray:
    """(n_agents, n_agents) weights from a JSON file: row i says how strongly agent i is drawn to each other agent.

    Rows are objects {"i": {"j": weight}}, where what is not named is 0, or a square list of lists. The matrix need not be
    symmetric. The diagonal is an agent's own weight for --average-weights; the penalty does not use it.

    Raises:
        FileNotFoundError: no such file, neither as given nor in comm_matrices/ beside this script.
        ValueError: naming the file, the key and what is allowed there.
    """
    file = next((each for each in (path, MATRICES / path.name, MATRICES / f"{path.name}.json") if each.is_file()), None)
    if file is None:
        bundled = ", ".join(sorted(each.stem for each in MATRICES.glob("*.json")))
        raise FileNotFoundError(f"--comm-matrix-config {path}: no such file, and none of the bundled ones ({bundled})")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"{file}: key {key!r} occurs twice in one object")
            seen[key] = value
        return seen

    try:
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise ValueError(f"{file}: not JSON: {reason}") from reason
    if not isinstance(document, dict) or "comm_matrix" not in document:
        found = ", ".join(map(repr, document)) if isinstance(document, dict) else type(document).__name__
        raise ValueError(f'{file}: found {found or "an empty object"}; expected {{"comm_matrix": …}}')
    unknown = sorted(document.keys() - {"comm_matrix", "description"})
    if unknown:
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; allowed are 'comm_matrix' and 'description'")

    allowed = f"with --n-agents {n_agents} agents are 0 … {n_agents - 1}"
    matrix = np.zeros((n_agents, n_agents))

    def weight(value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file}: {where} is {value!r}: expected a number, 0 or more")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{file}: {where} is {value}: a weight is a finite number, 0 or more")
        return float(value)

    def agent(key: str, where: str) -> int:
        if not (key.isascii() and key.isdigit() and str(int(key)) == key and int(key) < n_agents):
            raise ValueError(f"{file}: {where} names agent {key!r}: {allowed}")
        return int(key)

    rows = document["comm_matrix"]
    if isinstance(rows, list):
        if len(rows) != n_agents:
            raise ValueError(f"{file}: comm_matrix has {len(rows)} rows: expected {n_agents} × {n_agents} (--n-agents)")
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != n_agents:
                found = f"{len(row)} entries" if isinstance(row, list) else repr(row)
                raise ValueError(f"{file}: comm_matrix[{i}] has {found}: expected {n_agents}, the matrix is square")
            matrix[i] = [weight(value, f"comm_matrix[{i}][{j}]") for j, value in enumerate(row)]
    elif isinstance(rows, dict):
        for key, row in rows.items():
            i = agent(key, "comm_matrix")
            if not isinstance(row, dict):
                raise ValueError(f'{file}: comm_matrix["{key}"] is {row!r}: expected an object {{"neighbour": weight}}')
            for other, value in row.items():
                matrix[i, agent(other, f'comm_matrix["{key}"]')] = weight(value, f'comm_matrix["{key}"]["{other}"]')
    else:
        raise ValueError(f"{file}: comm_matrix is {rows!r}: expected an object of rows, or a list of lists")
    return matrix


def comm_matrix(args: Args) -> np.ndarray:
    """The matrix that the arguments ask for."""
    if args.comm_matrix_config is None:
        matrix = 1.0 - np.eye(args.n_agents)
    else:
        matrix = read_comm_matrix(args.comm_matrix_config, args.n_agents)
    if args.normalise_rows:
        sums = matrix.sum(1, keepdims=True)
        matrix = np.divide(matrix, sums, out=np.zeros_like(matrix), where=sums > 0)
    return matrix


def plot_graph(matrix: np.ndarray, path: Path) -> None:
    """Agents on a circle; an arrow from i to j says that i is drawn to j, its width and label how strongly."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch

    n = len(matrix)
    angles = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    places = np.stack([np.cos(angles), np.sin(angles)], 1) * (0 if n == 1 else 1)
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    heaviest = matrix.max() or 1.0
    for i, j in zip(*np.nonzero(matrix), strict=True):
        if i == j:
            continue
        width = 0.8 + 2.2 * matrix[i, j] / heaviest
        axes.add_patch(
            FancyArrowPatch(
                tuple(places[i]), tuple(places[j]), arrowstyle="-|>", mutation_scale=14, linewidth=width,
                connectionstyle="arc3,rad=0.14", shrinkA=17, shrinkB=17, color="#4477aa",
            )
        )  # fmt: skip
        if n <= 10:
            # A third of the way along the arc, where the arrow back does not pass.
            along = places[j] - places[i]
            at = places[i] + 0.36 * along + 0.065 * np.array([along[1], -along[0]])
            axes.text(*at, f"{matrix[i, j]:g}", ha="center", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axes.scatter(*places.T, s=700, color="white", edgecolors="black", zorder=3)
    for i, place in enumerate(places):
        axes.text(*place, str(i), ha="center", va="center", zorder=4)
    axes.set(
        xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title="i → j: the policy of agent i is drawn to that of j"
    )
    axes.axis("off")
    figure.savefig(path, dpi=110)


# ALGO LOGIC: functions that are identical in every trainer (tests/test_trainers_agree.py)


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear | nn.Conv2d:
    """Initialise a layer with orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


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


def gaussian_logprob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of independent normal components, summed over the last dimension."""
    return (-((actions - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * np.log(2 * np.pi)).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of independent normal components, summed over the last dimension."""
    return (0.5 + 0.5 * np.log(2 * np.pi) + std.log()).sum(-1)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


def flat_size(space: gym.Space) -> int:
    """Size of a flattened observation. Discrete spaces are one-hot encoded, ``action_mask`` is left out."""
    if isinstance(space, gym.spaces.Dict):
        return sum(flat_size(each) for key, each in space.items() if key != "action_mask")
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        return int(np.prod(space.shape))
    raise TypeError(
        f"observation space {space} is not supported: expected Box, Discrete, MultiBinary or a Dict of them"
    )


def flatten(space: gym.Space, obs: Any) -> np.ndarray:
    """Flatten a batch of observations to a float32 array of shape (envs, flat_size)."""
    if isinstance(space, gym.spaces.Dict):
        parts = [flatten(each, obs[key]) for key, each in space.items() if key != "action_mask"]
        return np.concatenate(parts, axis=1)
    if isinstance(space, gym.spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[np.asarray(obs) - int(space.start)]
    return np.asarray(obs, np.float32).reshape(len(obs), -1)


# ALGO LOGIC: policies, exact divergences, agents


class FederatedPolicy(nn.Module):
    """From observations (B, obs) to the parameters of a distribution over actions.

    Discrete actions: logits (B, actions). Continuous ones: mean and log standard deviation, (B, 2 · dimensions); the latter does
    not depend on the observation. This is the part of an agent that its neighbours see.
    """

    def __init__(
        self, obs_size: int, action_size: int, continuous: bool, hidden: int, init_logstd: float = 0.0
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            layer_init(nn.Linear(obs_size, hidden)), nn.Tanh(), layer_init(nn.Linear(hidden, hidden)), nn.Tanh(),
            layer_init(nn.Linear(hidden, action_size), std=0.01),
        )  # fmt: skip
        self.logstd = nn.Parameter(torch.full((action_size,), init_logstd)) if continuous else None

    def forward(self, obs: Tensor) -> Tensor:
        out = self.net(obs)
        return out if self.logstd is None else torch.cat([out, self.logstd.expand_as(out)], -1)


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p ‖ q) of categorical distributions over the last axis: Σ_a p(a) · (log p(a) − log q(a))."""
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def normal_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of diagonal normal distributions, each (…, 2 · D): means, then log standard deviations.

    Σ_d log σ_q − log σ_p + (σ_p² + (μ_p − μ_q)²) / (2 σ_q²) − ½
    """
    (mean_p, logstd_p), (mean_q, logstd_q) = p.chunk(2, -1), q.chunk(2, -1)
    squares = (2 * logstd_p).exp() + (mean_p - mean_q) ** 2
    return (logstd_q - logstd_p + 0.5 * squares * (-2 * logstd_q).exp() - 0.5).sum(-1)


def log_prob(parameters: Tensor, actions: Tensor, continuous: bool) -> Tensor:
    """Of an action (B,) or (B, D) under a policy's parameters; components of a continuous action are independent."""
    if not continuous:
        return parameters.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
    mean, logstd = parameters.chunk(2, -1)
    return gaussian_logprob(actions, mean, logstd.exp())


def policy_entropy(parameters: Tensor, continuous: bool) -> Tensor:
    if not continuous:
        return categorical_entropy(parameters.log_softmax(-1), None)
    return gaussian_entropy(parameters.chunk(2, -1)[1].exp())


def adapted_beta(beta: float, kl: float, target: float) -> float:
    """Doubled where an update moved the policy more than 1.5 times as far as it should, halved where less than a 1.5th."""
    if kl > 1.5 * target:
        return 2 * beta
    return beta / 2 if kl < target / 1.5 else beta


class FederatedAgent(nn.Module):
    """A policy and a value function, two multilayer perceptrons."""

    def __init__(
        self, obs_size: int, action_size: int, continuous: bool, hidden: int, init_logstd: float = 0.0
    ) -> None:
        super().__init__()
        self.policy = FederatedPolicy(obs_size, action_size, continuous, hidden, init_logstd)
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, hidden)), nn.Tanh(), layer_init(nn.Linear(hidden, hidden)), nn.Tanh(),
            layer_init(nn.Linear(hidden, 1), std=1.0),
        )  # fmt: skip

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


# Environments


class ReplayableEnv(gym.Wrapper):
    """Starts every episode from a seed of its own, so that the episode's number and its actions so far bring it back exactly.

    This is how a checkpoint holds any environment that is deterministic given its seed, without knowing its insides.
    """

    def __init__(self, env: gym.Env, *key: int) -> None:
        super().__init__(env)
        self.key, self.episode, self.actions = key, 0, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode += 1
        self.actions = []
        return self.env.reset(seed=derive_seed(*self.key, self.episode), options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self.env.step(action)

    def state(self) -> dict[str, Any]:
        return {"episode": self.episode, "actions": torch.from_numpy(np.array(self.actions))}

    def restore(self, state: dict[str, Any]) -> None:
        self.episode = state["episode"] - 1
        self.reset()
        for action in state["actions"].numpy():
            self.step(action)


def make_env(args: Args, index: int, videos: Path | None = None) -> gym.Env:
    """One environment of agent ``index``; with ``videos``, episodes are recorded to that folder."""
    options = json.loads(args.env_options) | ({} if videos is None else {"render_mode": "rgb_array"})
    if args.env_id == EDGE_NODES:
        # Here and not above: other environments do not need the simulator.
        from clustergym.gpu_allocation.environment import GPUAllocationEnv
        from clustergym.gpu_allocation.workload import edge_mixes

        env: gym.Env = GPUAllocationEnv(mix=edge_mixes(index + 1)[index], **options)
    else:
        env = gym.make(args.env_id, disable_env_checker=True, **options)
    if not isinstance(env.action_space, gym.spaces.Discrete | gym.spaces.Box):
        raise TypeError(f"{args.env_id} has action space {env.action_space}: expected Discrete or Box")
    if videos is not None:
        env = gym.wrappers.RecordVideo(env, str(videos), name_prefix=f"agent_{index}", disable_logger=True)
    return env


class Environments:
    """An agent's environments, stepped in turn; an episode that ends is followed by a new one within the same step."""

    def __init__(self, args: Args, index: int, count: int, purpose: int, videos: Path | None = None) -> None:
        # Keys end in numbers from 1: numpy's seed sequences do not tell (1, 2) from (1, 2, 0).
        self.envs = [
            ReplayableEnv(make_env(args, index, videos if i == 0 else None), args.seed, index, purpose, i + 1)
            for i in range(count)
        ]
        self.space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.continuous = isinstance(action_space, gym.spaces.Box)
        self.obs_size = flat_size(self.space)
        if isinstance(action_space, gym.spaces.Box):
            self.action_shape, self.low, self.high = action_space.shape, action_space.low, action_space.high
            self.action_size = math.prod(action_space.shape)
            # A bounded box is what −1 … 1 is stretched to: a fresh policy, of mean 0 and deviation 1, then covers it.
            bounded = np.isfinite(self.low) & np.isfinite(self.high)
            self.middle = np.where(bounded, (self.low + self.high) / 2, 0.0).astype(np.float32)
            self.half = np.where(bounded, (self.high - self.low) / 2, 1.0).astype(np.float32)
        else:
            self.first_action, self.action_size = int(action_space.start), int(action_space.n)

    def __len__(self) -> int:
        return len(self.envs)

    def reset(self) -> np.ndarray:
        return self._flat([env.reset()[0] for env in self.envs])

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """(observations, rewards, terminations, truncations, last observations of episodes that were truncated)."""
        observations, last = [], {}
        rewards = np.zeros(len(self), np.float32)
        terminated, truncated = np.zeros(len(self), bool), np.zeros(len(self), bool)
        if self.continuous:
            stretched = self.middle + self.half * actions.reshape(-1, *self.action_shape)
            played = list(np.clip(stretched, self.low, self.high))
        else:
            played = (actions + self.first_action).tolist()
        for i, (env, action) in enumerate(zip(self.envs, played, strict=True)):
            obs, reward, terminated[i], truncated[i], _ = env.step(action)
            rewards[i] = reward
            if terminated[i] or truncated[i]:
                if truncated[i] and not terminated[i]:
                    last[i] = self._flat([obs])[0]
                obs, _ = env.reset()
            observations.append(obs)
        return self._flat(observations), rewards, terminated, truncated, last

    def _flat(self, observations: list[Any]) -> np.ndarray:
        if isinstance(self.space, gym.spaces.Dict):
            return flatten(self.space, {key: np.stack([obs[key] for obs in observations]) for key in self.space})
        return flatten(self.space, np.stack(observations))

    def state(self) -> list[dict[str, Any]]:
        return [env.state() for env in self.envs]

    def restore(self, states: list[dict[str, Any]]) -> None:
        for env, state in zip(self.envs, states, strict=True):
            env.restore(state)

    def close(self) -> None:
        for env in self.envs:
            env.close()


TRAINING, EVALUATION, WEIGHTS = 1, 2, 3
"""What seeds are for: the third number of their key."""


# One agent's learning


@dataclass
class Transitions:
    """A rollout, one row a transition."""

    obs: Tensor
    actions: Tensor
    parameters: Tensor
    """Of the policy that acted."""
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def take(self, rows: Tensor | slice) -> Transitions:
        return Transitions(*(getattr(self, each.name)[rows] for each in fields(self)))


class Learner:
    """One agent: its networks, environments, random numbers, the neighbours' frozen policies. Knows nothing of other learners."""

    def __init__(
        self, args: Args, index: int, matrix: np.ndarray, device: torch.device, videos: Path | None = None
    ) -> None:
        self.args, self.index, self.device = args, index, device
        self.envs = Environments(args, index, args.num_envs, TRAINING, videos)
        self.continuous = self.envs.continuous
        self.weights = {j: float(matrix[index, j]) for j in range(args.n_agents) if j != index and matrix[index, j] > 0}
        self.own_weight = float(matrix[index, index]) or 1.0
        self.peers = [j for j in range(args.n_agents) if j != index and (args.log_all_kl or j in self.weights)]
        """Agents whose policies this one receives."""
        sizes = (self.envs.obs_size, self.envs.action_size, self.continuous, args.hidden, args.init_logstd)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(args.seed, 0 if args.common_init else index, WEIGHTS))
            self.agent = FederatedAgent(*sizes).to(device)
            self._frozen = FederatedPolicy(*sizes).to(device)
        self.optimizer = make_optimizer(self.agent, args.learning_rate)
        self.generator = torch.Generator(device).manual_seed(derive_seed(args.seed, index, TRAINING))
        self.iteration = 0
        """Rollouts learned from."""
        self.round = -1
        """Exchanges taken part in, less one; −1 before the first."""
        self.published = torch.zeros(0)
        self.neighbours: dict[int, Tensor] = {}
        """What each peer published last, as far as is known here."""
        self.beta = args.adaptive_kl_beta
        self.batch: Transitions | None = None
        self.returns_100: deque[float] = deque(maxlen=100)
        self.episode_return = np.zeros(args.num_envs)
        self.episode_length = np.zeros(args.num_envs, np.int64)
        self.next_obs = self.envs.reset()

    @property
    def step(self) -> int:
        return self.iteration * self.args.batch_size

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return normal_kl(p, q) if self.continuous else categorical_kl(p, q)

    # What is exchanged

    def _shared(self) -> nn.Module:
        """Neighbours need the policy alone, unless they average whole agents."""
        return self.agent if self.args.average_weights else self.agent.policy

    def outgoing(self) -> Tensor:
        """This agent as one vector, to be published."""
        return parameters_to_vector(self._shared().parameters()).detach().cpu()

    def _frozen_parameters(self, vector: Tensor, obs: Tensor) -> Tensor:
        """Parameters of a published policy in each state; they carry no gradient."""
        with torch.no_grad():
            # An agent's parameters begin with its policy's.
            size = sum(each.numel() for each in self._frozen.parameters())
            vector_to_parameters(vector[:size].to(self.device), self._frozen.parameters())
            return self._frozen(obs)

    def receive(self, round_: int, published: Tensor, received: dict[int, Tensor]) -> dict[str, float]:
        """Take part in an exchange; returns the distances to the policies that came in, in the states visited last."""
        self.round, self.published = round_, published
        for j, vector in received.items():
            if bool(vector.isfinite().all()):
                self.neighbours[j] = vector
            else:
                # One agent that diverges must not take its neighbours along.
                log.warning(
                    "agent %d: agent %d published NaN or infinity; keeping the last policy of it", self.index, j
                )
        charts = {}
        if self.batch is not None:
            with torch.no_grad():
                own = self.agent.policy(self.batch.obs)
            for j, vector in sorted(self.neighbours.items()):
                distance = self.kl(own, self._frozen_parameters(vector, self.batch.obs)).mean()
                charts[f"charts/kl_{self.index}_{j}"] = float(distance)
        if self.args.average_weights and round_ < self.args.num_rounds:
            known = {j: weight for j, weight in self.weights.items() if j in self.neighbours}
            mean = self.own_weight * published
            for j, weight in sorted(known.items()):
                mean = mean + weight * self.neighbours[j]
            mean = mean / (self.own_weight + sum(known.values()))
            with torch.no_grad():
                vector_to_parameters(mean.to(self.device), self.agent.parameters())
        return charts

    # Playing and learning

    def collect(self) -> dict[str, float]:
        """Play one rollout into ``batch``; returns what its finished episodes brought."""
        args, device = self.args, self.device
        shape = (args.num_steps, args.num_envs)
        size = self.envs.action_size
        # Kept in numpy until the rollout is whole: environments speak it, and writing a row is cheaper there.
        obs = np.zeros((*shape, self.envs.obs_size), np.float32)
        actions = np.zeros((*shape, size), np.float32) if self.continuous else np.zeros(shape, np.int64)
        rewards = np.zeros(shape, np.float32)
        terminations, dones = np.zeros(shape, bool), np.zeros(shape, bool)
        last_obs: list[tuple[int, int, np.ndarray]] = []
        finished: list[tuple[float, int]] = []

        noise = torch.empty(*shape, size, device=device)
        if self.continuous:
            noise.normal_(generator=self.generator)
        else:
            # Adding Gumbel noise to logits and taking the largest samples the categorical distribution.
            noise = -noise.exponential_(generator=self.generator).log()
        with torch.inference_mode():
            for step, drawn in enumerate(noise.unbind()):
                obs[step] = self.next_obs
                parameters = self.agent.policy(torch.from_numpy(self.next_obs).to(device))
                if self.continuous:
                    mean, logstd = parameters.chunk(2, -1)
                    actions[step] = (mean + logstd.exp() * drawn).cpu().numpy()
                else:
                    actions[step] = (parameters + drawn).argmax(-1).cpu().numpy()
                self.next_obs, rewards[step], terminations[step], truncated, last = self.envs.step(actions[step])
                done = dones[step] = terminations[step] | truncated
                last_obs += [(step, env, each) for env, each in last.items()]
                self.episode_return += rewards[step]
                self.episode_length += 1
                for env in np.flatnonzero(done):
                    finished.append((float(self.episode_return[env]), int(self.episode_length[env])))
                    self.episode_return[env] = self.episode_length[env] = 0

        with torch.no_grad():
            flat_obs = torch.from_numpy(obs).flatten(0, 1).to(device)
            flat_actions = torch.from_numpy(actions).flatten(0, 1).to(device)
            parameters = self.agent.policy(flat_obs)
            values = self.agent.get_value(flat_obs).view(shape)
            next_value = self.agent.get_value(torch.from_numpy(self.next_obs).to(device))
            final_values = torch.zeros_like(values)
            if last_obs:
                steps, envs, rows = zip(*last_obs, strict=True)
                final_values[list(steps), list(envs)] = self.agent.get_value(
                    torch.from_numpy(np.stack(rows)).to(device)
                )
            ends = terminations if args.bootstrap_truncated else dones
            advantages, returns = compute_gae(
                torch.from_numpy(rewards).to(device),
                values,
                torch.from_numpy(ends).to(device),
                torch.from_numpy(dones).to(device),
                next_value,
                final_values,
                args.gamma,
                # Discounted rewards to the rollout's end are what GAE sums up at λ = 1.
                args.gae_lambda if args.gae else 1.0,
            )
        self.batch = Transitions(
            flat_obs,
            flat_actions,
            parameters,
            log_prob(parameters, flat_actions, self.continuous),
            advantages.flatten(),
            returns.flatten(),
            values.flatten(),
        )
        self.returns_100.extend(episode for episode, _ in finished)
        charts = {}
        if finished:
            charts["charts/episodic_return"] = float(np.mean([episode for episode, _ in finished]))
            charts["charts/episodic_length"] = float(np.mean([length for _, length in finished]))
        return charts

    def learn(self) -> dict[str, float]:
        """Several epochs of shuffled minibatches on ``batch``; returns the means of what was seen."""
        args, agent, batch = self.args, self.agent, self.batch
        assert batch is not None, "collect() comes first"
        # Neighbours are frozen and the states are known, so their side of the divergence is computed once.
        coupled = [
            (self.weights[j], self._frozen_parameters(vector, batch.obs))
            for j, vector in sorted(self.neighbours.items())
            if args.use_comm_penalty and j in self.weights
        ]
        size = args.batch_size // args.num_minibatches
        zero = torch.zeros((), device=self.device)
        seen: list[Tensor] = []
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=self.generator, device=self.device)
            shuffled, shuffled_coupled = batch.take(order), [(weight, q[order]) for weight, q in coupled]
            for start in range(0, args.batch_size, size):
                rows = slice(start, start + size)
                mb = shuffled.take(rows)
                parameters, new_values = agent.policy(mb.obs), agent.get_value(mb.obs)
                logratio = log_prob(parameters, mb.actions, self.continuous) - mb.logprobs
                ratio = logratio.exp()
                advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
                pg_loss = policy_loss(ratio, advantages, args.clip_coef if args.use_clipping else float("inf"))
                v_loss = value_loss(new_values, mb.values, mb.returns, args.clip_coef if args.clip_vloss else None)
                entropy = policy_entropy(parameters, self.continuous).mean()
                loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
                own_kl = comm_kl = zero
                if not args.use_clipping:
                    own_kl = self.kl(mb.parameters, parameters).mean()
                    loss = loss + self.beta * own_kl
                if coupled:
                    comm_kl = torch.stack(
                        [weight * self.kl(parameters, q[rows]).mean() for weight, q in shuffled_coupled]
                    ).sum()
                    loss = loss + args.penalty_coeff * comm_kl

                self.optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                self.optimizer.step()
                with torch.no_grad():
                    k1, _, k3 = kl_estimators(logratio)
                    clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                    seen.append(
                        torch.stack(
                            [pg_loss, v_loss, entropy, comm_kl, own_kl, k1.mean(), k3.mean(), clipfrac, grad_norm]
                        )
                    )
            if args.target_kl is not None and float(seen[-1][6]) > args.target_kl:
                break
        names = (
            "policy_loss", "value_loss", "entropy", "comm_kl", "own_kl", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm",
        )  # fmt: skip
        means = dict(zip(names, torch.stack(seen).mean(0).tolist(), strict=True))
        terms = {
            "policy": means["policy_loss"],
            "entropy": args.ent_coef * means["entropy"],
            "value": args.vf_coef * means["value_loss"],
            "comm_penalty": args.penalty_coeff * means["comm_kl"],
        }
        if not args.use_clipping:
            terms["kl_penalty"] = self.beta * means["own_kl"]
            with torch.no_grad():
                moved = float(self.kl(batch.parameters, agent.policy(batch.obs)).mean())
            self.beta = adapted_beta(self.beta, moved, args.adaptive_kl_target)
            means["kl_after_update"] = moved
        total = sum(abs(term) for term in terms.values()) or 1.0
        metrics = {f"losses/{name}": value for name, value in means.items()}
        metrics |= {f"charts/loss_fractions/{name}": abs(term) / total for name, term in terms.items()}
        metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
        metrics["charts/updates"] = float(len(seen))
        metrics["charts/beta"] = self.beta
        return metrics

    def iterate(self) -> dict[str, float]:
        """One rollout and what is learned from it."""
        args = self.args
        self.iteration += 1
        if args.anneal_lr:
            self.optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, self.iteration, args.num_iterations)
        charts = self.collect() | self.learn()
        charts["charts/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        charts["charts/mean_return_100"] = float(np.mean(self.returns_100)) if self.returns_100 else float("nan")
        return charts

    def evaluate(self) -> list[float]:
        """Returns of held-out episodes, one an environment, played with the likeliest actions."""
        if not self.args.eval_episodes:
            return []
        envs = Environments(self.args, self.index, self.args.eval_episodes, EVALUATION)
        obs = envs.reset()
        returns, playing = np.zeros(len(envs)), np.ones(len(envs), bool)
        with torch.inference_mode():
            while playing.any():
                parameters = self.agent.policy(torch.from_numpy(obs).to(self.device)).cpu()
                best = parameters.chunk(2, -1)[0] if self.continuous else parameters.argmax(-1)
                obs, reward, terminated, truncated, _ = envs.step(best.numpy())
                returns += reward * playing
                playing &= ~(terminated | truncated)
        envs.close()
        return returns.tolist()

    # Checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "args": plain_args(self.args),
            "index": self.index,
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "iteration": self.iteration,
            "round": self.round,
            "published": self.published,
            "neighbours": dict(self.neighbours),
            "beta": self.beta,
            "envs": self.envs.state(),
            "next_obs": torch.from_numpy(self.next_obs),
            "episode_return": torch.from_numpy(self.episode_return),
            "episode_length": torch.from_numpy(self.episode_length),
            "returns_100": list(self.returns_100),
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_same_args(state["args"], plain_args(self.args), may_differ=FREE_ON_RESUME)
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.iteration, self.round, self.beta = state["iteration"], state["round"], state["beta"]
        self.published = state["published"].cpu()
        self.neighbours = {int(j): vector.cpu() for j, vector in state["neighbours"].items()}
        self.envs.restore(state["envs"])
        self.next_obs = state["next_obs"].cpu().numpy()
        self.episode_return = state["episode_return"].cpu().numpy().copy()
        self.episode_length = state["episode_length"].cpu().numpy().copy()
        self.returns_100.extend(state["returns_100"])


FREE_ON_RESUME = (
    "exchange_timeout", "exchange_store", "capture_video", "eval_episodes", "exp_description", "plot_comm_matrix",
)  # fmt: skip
"""Arguments that may change between a run and its resumption, for they do not touch what is learned."""


# The exchange of policies


class Exchange(Protocol):
    """Carries policies between agents. Round r's policies are those after r · local_updates rollouts."""

    sent_bytes: int
    received_bytes: int
    wait_s: float
    transfer_s: float

    def publish(self, agent: int, round_: int, vector: Tensor) -> None: ...

    def gather(self, agent: int, round_: int, peers: Sequence[int]) -> dict[int, Tensor]: ...


class LocalExchange:
    """All agents in this process."""

    def __init__(self) -> None:
        self._published: dict[int, Tensor] = {}
        self.sent_bytes = self.received_bytes = 0
        self.wait_s = self.transfer_s = 0.0

    def publish(self, agent: int, round_: int, vector: Tensor) -> None:
        self._published[agent] = vector
        self.sent_bytes += HEADER.size + 4 * vector.numel()

    def gather(self, agent: int, round_: int, peers: Sequence[int]) -> dict[int, Tensor]:
        self.received_bytes += sum(HEADER.size + 4 * self._published[j].numel() for j in peers)
        return {j: self._published[j] for j in peers}


HEADER = struct.Struct("<qq")
"""In front of a published vector of float32: its round and its length."""


def pack(round_: int, vector: Tensor) -> bytes:
    return HEADER.pack(round_, vector.numel()) + vector.numpy().astype("<f4").tobytes()


def unpack(blob: bytes, expected: int, agent: int) -> tuple[int, Tensor]:
    """(round, vector); refuses what is not a vector of the expected length, for it comes over the network."""
    round_, length = HEADER.unpack_from(blob) if len(blob) >= HEADER.size else (-1, -1)
    if length != expected or len(blob) != HEADER.size + 4 * length:
        raise ValueError(
            f"agent {agent} published {len(blob)} bytes: expected {HEADER.size + 4 * expected} for {expected} parameters; "
            f"do all agents have the same environment and --hidden?"
        )
    return round_, torch.from_numpy(np.frombuffer(blob, "<f4", offset=HEADER.size).astype(np.float32))


class StoreExchange:
    """One agent in this process, the others wherever they are; policies pass through a torch.distributed.TCPStore.

    A collective such as all_gather would hang, or end every process, when one agent dies. A store does neither: an agent
    writes its policy and the number of its round, and reads what the others last wrote.

    Agents that are in step wait for each other at every round, so that a healthy run is bit for bit the in-process one. An agent
    that has not published a round ``timeout_s`` after it was due counts as behind: nobody waits for it any more, its newest
    policy stands, and once it has caught up it is waited for again.

    Two slots an agent suffice, even and odd rounds: whoever is in step publishes round r + 2 only after all have published
    r + 1, and hence have read r.
    """

    def __init__(
        self, address: tuple[str, int], keep: bool, agent: int, readers: Iterable[int], config: str, timeout_s: float
    ) -> None:
        self.address, self.agent, self.timeout_s, self.config = address, agent, timeout_s, config
        self.readers = sorted(readers)
        self.behind: dict[int, int] = {}
        """Agents that are late, and the newest round known of each (−1: none)."""
        self._returning: set[int] = set()
        """Those of them that publish again; their return was told."""
        self.sent_bytes = self.received_bytes = 0
        self.wait_s = self.transfer_s = 0.0
        self._newest: tuple[int, Tensor] | None = None
        self._lost = False
        self._keep = keep
        self._store: torch.distributed.Store | None = None
        self._connect(timeout_s)

    def _connect(self, timeout_s: float) -> None:
        from datetime import timedelta

        host, port = self.address
        self._store = torch.distributed.TCPStore(
            host, port, is_master=self._keep, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        # The first to come says what the run is; whoever means another one must not mix in.
        agreed = self._store.compare_set("config", "", self.config).decode()
        if agreed != self.config:
            theirs, ours = json.loads(agreed), json.loads(self.config)
            differing = [
                f"{key} is {theirs.get(key)!r} there, {ours.get(key)!r} here"
                for key in ours
                if theirs.get(key) != ours[key]
            ]
            raise ValueError(f"the store at {host}:{port} belongs to another run: {'; '.join(differing)}")

    @contextmanager
    def _reachable(self) -> Iterator[torch.distributed.Store | None]:
        """The store, or None while it cannot be reached; learning goes on either way."""
        if self._store is None:
            try:
                # A refused connection is noticed at once here, and after a long wait in TCPStore.
                socket.create_connection(self.address, timeout=1.0).close()
                self._connect(5.0)
                log.warning("agent %d: the store at %s:%d is back", self.agent, *self.address)
                self._lost = False
                if self._newest is not None:
                    self._write(*self._newest)
            except (OSError, RuntimeError):
                yield None
                return
        try:
            yield self._store
        except torch.distributed.DistError as reason:
            self._store = None
            if not self._lost:
                self._lost = True
                log.warning(
                    "agent %d: lost the store at %s:%d (%s); going on with the last policies of all neighbours",
                    self.agent, *self.address, str(reason).splitlines()[0],
                )  # fmt: skip

    def _write(self, round_: int, vector: Tensor) -> None:
        assert self._store is not None
        blob = pack(round_, vector)
        self._store.set(f"policy/{self.agent}/{round_ % 2}", blob)
        self._store.set(f"rounds/{self.agent}", str(round_ + 1))
        self._rounds(self._store, self.agent)  # Setting does not wait for the store, reading back does.
        self.sent_bytes += len(blob)

    def _rounds(self, store: torch.distributed.Store, agent: int) -> int:
        """How many rounds an agent has published; adding 0 reads without waiting for the key to exist."""
        return store.add(f"rounds/{agent}", 0)

    def start_afresh(self) -> None:
        """A run that does not resume must not find its own traces: neighbours would take them for its policy."""
        with self._reachable() as store:
            if store is not None and self._rounds(store, self.agent) > 0:
                raise ValueError(
                    f"the store at {self.address[0]}:{self.address[1]} holds policies that agent {self.agent} published before: "
                    "--resume goes on with that run, a new store starts another"
                )

    def publish(self, agent: int, round_: int, vector: Tensor) -> None:
        began = time.perf_counter()
        self._newest = round_, vector
        with self._reachable() as store:
            if store is not None:
                self._write(round_, vector)
        self.transfer_s += time.perf_counter() - began

    def gather(self, agent: int, round_: int, peers: Sequence[int]) -> dict[int, Tensor]:
        received: dict[int, Tensor] = {}
        with self._reachable() as store:
            if store is None:
                return received
            self._wait(store, round_, {*peers, *self.readers})
            began = time.perf_counter()
            for j in peers:
                newest = self._rounds(store, j) - 1
                if newest < 0:
                    continue
                # A neighbour in step is at this round or one further; one that is far ahead has overwritten this round.
                slot = round_ if round_ <= newest <= round_ + 1 else newest
                blob = store.get(f"policy/{j}/{slot % 2}")
                self.received_bytes += len(blob)
                assert self._newest is not None, "an agent publishes before it gathers"
                try:
                    received[j] = unpack(blob, self._newest[1].numel(), j)[1]
                except ValueError as reason:
                    log.warning("agent %d: %s; keeping the last policy of it", self.agent, reason)
            self.transfer_s += time.perf_counter() - began
        return received

    def _wait(self, store: torch.distributed.Store, round_: int, others: set[int]) -> None:
        """Until everyone who is in step has published the round, or the time is up."""
        began = time.perf_counter()
        pause_s = 0.0005
        waiting = others - self.behind.keys()
        while True:
            waiting = {j for j in waiting if self._rounds(store, j) <= round_}
            if not waiting or time.perf_counter() - began > self.timeout_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        self.wait_s += time.perf_counter() - began
        for j in sorted(others & self.behind.keys()):
            newest = self._rounds(store, j) - 1
            if newest >= round_:
                del self.behind[j]
                self._returning.discard(j)
                log.warning("agent %d: agent %d is in step again at round %d", self.agent, j, newest)
            elif newest != self.behind[j]:
                self.behind[j] = newest
                if j not in self._returning:
                    self._returning.add(j)
                    log.warning(
                        "agent %d: agent %d is back with its policy of round %d, %d behind; taking it as it comes",
                        self.agent, j, newest, round_ - newest,
                    )  # fmt: skip
        for j in sorted(waiting):
            self.behind[j] = self._rounds(store, j) - 1
            last = f"its policy of round {self.behind[j]}" if self.behind[j] >= 0 else "no policy of it"
            log.warning(
                "agent %d: agent %d has not published round %d within %g s; going on with %s",
                self.agent, j, round_, self.timeout_s, last,
            )  # fmt: skip

    def agree_on_folder(self, folder: Path) -> Path:
        """The first rank's choice is everybody's."""
        with self._reachable() as store:
            if store is not None:
                return Path(store.compare_set("folder", "", str(folder)).decode())
        return folder

    def share_result(self, result: dict[str, Any]) -> None:
        with self._reachable() as store:
            if store is not None:
                store.set(f"result/{self.agent}", json.dumps(result))

    def collect_results(self, n_agents: int) -> dict[int, dict[str, Any]]:
        """What agents reported at their end; waits for those that are not behind, and for all where this process keeps the store."""
        results: dict[int, dict[str, Any]] = {}
        began = time.perf_counter()
        with self._reachable() as store:
            while store is not None and len(results) < n_agents:
                for j in range(n_agents):
                    if j not in results and store.check([f"result/{j}"]):
                        results[j] = json.loads(store.get(f"result/{j}"))
                missing = set(range(n_agents)) - results.keys() - (set() if self._keep else self.behind.keys())
                if not missing or time.perf_counter() - began > self.timeout_s:
                    break
                time.sleep(0.05)
        return results


def parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"store address is {text!r}: expected HOST:PORT with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def serve_store(address: tuple[str, int]) -> None:
    """Keep a store until interrupted. It holds two policies an agent and nothing else."""
    store = torch.distributed.TCPStore(*address, is_master=True, wait_for_workers=False)
    print(f"store at {address[0]}:{store.port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass


def store_exchange(args: Args, rank: int, matrix: np.ndarray, resume: bool) -> StoreExchange:
    """This rank's way to the others: an address that was given, torchrun's own store, or one that rank 0 keeps."""
    if args.exchange_store is not None:
        address, keep = parse_address(args.exchange_store), False
    else:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"RANK is set and {missing[0]} is not: start with torchrun, or give --exchange-store HOST:PORT"
            )
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        # torchrun's agent process keeps the store, so that it outlives any rank.
        keep = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    free = {*FREE_ON_RESUME, "run_dir", "resume", "cuda", "track", "save_model", "serve_store", "comm_matrix_config"}
    config = {key: value for key, value in plain_args(args).items() if key not in free} | {
        "comm_matrix": matrix.tolist()
    }
    readers = range(args.n_agents) if args.log_all_kl else np.flatnonzero(matrix[:, rank]).tolist()
    exchange = StoreExchange(
        address,
        keep,
        rank,
        [j for j in readers if j != rank],
        json.dumps(config, sort_keys=True),
        args.exchange_timeout,
    )
    if not resume:
        exchange.start_afresh()
    return exchange


# The whole run


def federation_folder(args: Args, resume: bool) -> Path:
    """--run-dir, or runs/<name>, or the first free runs/<name>-2, … ; to resume, the last of these that holds checkpoints."""
    if args.run_dir is not None:
        return args.run_dir
    name = f"ppo_federated__{args.env_id.replace('/', '-')}__{args.seed}"
    number = 1
    while (Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    if resume and number > 1:
        number -= 1
    return Path("runs") / (name if number == 1 else f"{name}-{number}")


@dataclass
class Member:
    """A learner of this process with its folder and its log."""

    learner: Learner
    folder: Path
    logger: RunLogger
    result: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        self.logger.flush()
        save_checkpoint(self.folder / CHECKPOINT_NAME, "ppo_federated", self.learner.state())


def run_rounds(args: Args, members: list[Member], exchange: Exchange, progress: Progress) -> None:
    """Rounds of local learning between exchanges, for the agents of this process: all of them, or one."""
    for member in members:
        if member.learner.round >= 0:
            # What a resumed agent said at its last exchange, it says again: the others or the store may have lost it.
            exchange.publish(member.learner.index, member.learner.round, member.learner.published)
    for round_ in range(max(0, min(member.learner.round for member in members)), args.num_rounds + 1):
        # Checkpoints are written one after the other, so after a crash some agents may have this exchange behind them.
        due = [member for member in members if member.learner.round < round_]
        outgoing = [member.learner.outgoing() for member in due]
        for member, vector in zip(due, outgoing, strict=True):
            exchange.publish(member.learner.index, round_, vector)
        for member, vector in zip(due, outgoing, strict=True):
            learner = member.learner
            before = (exchange.received_bytes, exchange.wait_s, exchange.transfer_s)
            received = exchange.gather(learner.index, round_, learner.peers)
            charts = learner.receive(round_, vector, received)
            charts["exchange/sent_bytes"] = HEADER.size + 4 * vector.numel()
            charts["exchange/received_bytes"] = exchange.received_bytes - before[0]
            charts["exchange/wait_s"] = exchange.wait_s - before[1]
            charts["exchange/transfer_s"] = exchange.transfer_s - before[2]
            charts["exchange/missing"] = len(learner.peers) - len(received)
            member.logger.scalars(charts, learner.step)
        for member in due:
            member.save()
        end = min((round_ + 1) * args.local_updates, args.num_iterations)
        while min(member.learner.iteration for member in members) < end:
            for member in members:
                learner = member.learner
                if learner.iteration < end:
                    charts = learner.iterate()
                    charts["charts/SPS"] = progress.steps_per_s(sum(each.learner.step for each in members))
                    member.logger.scalars(charts, learner.step)
            steps = sum(member.learner.step for member in members)
            returns = [each for member in members for each in member.learner.returns_100]
            progress.update(steps, mean_return=float(np.mean(returns)) if returns else float("nan"), round=round_)


def plot_summary(folder: Path, n_agents: int, title: str) -> Path | None:
    """Returns of all agents found below the folder, and their mean; None where none has finished an episode."""
    from matplotlib.figure import Figure

    curves = {}
    for i in range(n_agents):
        try:
            steps, values = read_scalars(folder / f"agent_{i}", "charts/mean_return_100")
        except (KeyError, FileNotFoundError, ValueError):
            continue
        shown = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
        if shown:
            curves[i] = np.array(shown)
    if not curves:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, curve in curves.items():
        axes.plot(*curve.T, linewidth=1, alpha=0.7, label=f"agent {i}" if n_agents <= 8 else None)
    if len(curves) > 1:
        # Agents log at the same steps; the mean starts where all of them have finished an episode.
        first, last = max(c[0, 0] for c in curves.values()), min(c[-1, 0] for c in curves.values())
        at = np.unique(np.concatenate([c[:, 0] for c in curves.values()]))
        at = at[(at >= first) & (at <= last)]
        axes.plot(at, np.mean([np.interp(at, *c.T) for c in curves.values()], 0), "k", linewidth=2, label="mean")
    axes.set(xlabel="steps of each agent", ylabel="return, mean of the last 100 episodes", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "summary.png"
    figure.savefig(path, dpi=110)
    return path


def finish(args: Args, member: Member) -> None:
    """Held-out evaluation of an agent, its result and, if asked for, its model."""
    learner = member.learner
    returns = learner.evaluate()
    member.result = {
        "agent": learner.index,
        "steps": learner.step,
        "mean_return": float(np.mean(returns)) if returns else None,
        "mean_return_ci95": ci95(returns) if returns else None,
        "train_return_100": float(np.mean(learner.returns_100)) if learner.returns_100 else None,
        "checkpoint": str(member.folder / CHECKPOINT_NAME),
    }
    if returns:
        member.logger.scalar("eval/mean_return", float(np.mean(returns)), learner.step)
    write_atomically(member.folder / "result.json", json.dumps(member.result, indent=1) + "\n")
    if args.save_model:
        state = {"args": plain_args(args), "agent": learner.agent.state_dict()}
        save_checkpoint(member.folder / "model.pt", "ppo_federated-model", state)


def train(args: Args) -> dict[str, Any] | None:
    """The whole run; returns what the result line shows, or None in a process that is not rank 0."""
    torch.set_num_threads(1)
    check_args(args)
    matrix = comm_matrix(args)
    make_env(args, 0).close()  # An unknown id or a strange action space is an error before there is a folder.
    by_process = "RANK" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    # torchrun starts all ranks again when one fails, with the arguments of the first time.
    resume = args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    exchange: LocalExchange | StoreExchange = LocalExchange()
    indices = list(range(args.n_agents))
    folder = federation_folder(args, resume)
    if by_process:
        size = int(os.environ.get("WORLD_SIZE", str(args.n_agents)))
        if size != args.n_agents or not 0 <= rank < size:
            raise ValueError(
                f"rank {rank} of {size} processes for --n-agents {args.n_agents}: a process an agent, so start {args.n_agents}"
            )
        exchange = store_exchange(args, rank, matrix, resume)
        folder = exchange.agree_on_folder(folder)
        indices = [rank]
    device = choose_device(args.cuda, int(os.environ.get("LOCAL_RANK", "0")))

    members: list[Member] = []
    for i in indices:
        own = folder / f"agent_{i}"
        saved = own / CHECKPOINT_NAME
        if saved.exists() and not resume:
            raise FileExistsError(
                f"{saved} is there already: --resume continues that run, another --run-dir starts a new one"
            )
        learner = Learner(args, i, matrix, device, own / "videos" if args.capture_video else None)
        if saved.exists():
            learner.restore(load_checkpoint(saved, "ppo_federated", device))
            log.info("agent %d goes on at round %d, step %d", i, learner.round, learner.step)
        if learner.step == 0:
            # What an attempt that got nowhere has logged would stand twice.
            for curves in own.glob("events.out.tfevents.*"):
                curves.unlink()
        logger = RunLogger(own, plain_args(args), args.track, start_step=learner.step, name=f"{folder.name}-agent_{i}")
        members.append(Member(learner, own, logger))
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "comm_matrix.json", json.dumps({"comm_matrix": matrix.tolist()}) + "\n")
        if args.plot_comm_matrix:
            plot_graph(matrix, folder / "comm_matrix.png")

    total = len(members) * args.num_iterations * args.batch_size
    done = sum(member.learner.step for member in members)
    try:
        with Progress(total, done, enabled=rank == 0) as progress:
            run_rounds(args, members, exchange, progress)
            steps_per_s = progress.steps_per_s(total)
        for member in members:
            finish(args, member)
    finally:
        for member in members:
            member.logger.close()
            member.learner.envs.close()

    results = {member.learner.index: member.result for member in members}
    if isinstance(exchange, StoreExchange):
        exchange.share_result(results[rank] | {"steps_per_s": steps_per_s})
        if rank != 0:
            return None
        results |= exchange.collect_results(args.n_agents)
        steps_per_s = sum(result.get("steps_per_s", 0.0) for result in results.values())
    returns = [result["mean_return"] for result in results.values() if result["mean_return"] is not None]
    summary = plot_summary(folder, args.n_agents, args.exp_description or f"{args.n_agents} agents on {args.env_id}")
    return {
        "env_id": args.env_id,
        "seed": args.seed,
        "n_agents": args.n_agents,
        "mean_return": float(np.mean(returns)) if returns else None,
        "mean_returns": {i: result["mean_return"] for i, result in sorted(results.items())},
        "missing_agents": sorted(set(range(args.n_agents)) - results.keys()),
        "steps": sum(result["steps"] for result in results.values()),
        "steps_per_s": steps_per_s,
        "exchange_wait_s": exchange.wait_s,
        "exchange_transfer_s": exchange.transfer_s,
        "sent_bytes": exchange.sent_bytes,
        "received_bytes": exchange.received_bytes,
        "checkpoint": folder / "agent_0" / CHECKPOINT_NAME,
        "summary": summary,
        "run_dir": folder,
    }


def main() -> None:
    args = parse_args(sys.argv[1:])
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        if args.serve_store is not None:
            serve_store(parse_address(args.serve_store))
            return
        result = train(args)
    except (ValueError, TypeError, FileNotFoundError, FileExistsError, gym.error.Error) as reason:
        raise SystemExit(f"ppo_federated.py: {reason}") from reason
    except torch.distributed.DistNetworkError as reason:
        raise SystemExit(f"ppo_federated.py: no store for the exchange: {str(reason).splitlines()[0]}") from reason
    if result is not None:
        print_result(result)


if __name__ == "__main__":
    main()
