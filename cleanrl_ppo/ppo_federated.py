"""Federated PPO: each of N agents learns in its own environments and stays close to the policies of its neighbours.

    python cleanrl_ppo/ppo_federated.py --n-agents 2                              # two agents that are neighbours
    python cleanrl_ppo/ppo_federated.py --n-agents 4 --comm-matrix-config comm_matrices/two_pairs.json
    torchrun --nproc-per-node 4 cleanrl_ppo/ppo_federated.py --n-agents 4         # one process per agent, same curves
    python cleanrl_ppo/ppo_federated.py --env-id gpu_allocation_v0 --n-agents 4   # agent i is edge node i
    python cleanrl_ppo/ppo_federated.py --n-agents 2 --resume                     # after a crash

Agent i minimises

    policy loss − ent_coef · entropy + vf_coef · value loss + penalty_coeff · Σ_j w_ij · KL(π_i ‖ π_j)

where w is the communication matrix and π_j the policy of neighbour j. Agents exchange their policies every
``local_updates`` rollouts; in between, π_j is frozen. The KL is exact, averaged over the states that agent i visited,
and its gradient changes π_i only. docs/reference/ppo_federated.md describes the protocol and the metrics.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# Importing clustergym registers its environments, so that --env-id finds them.
from clustergym.common.checkpoints import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from clustergym.common.extras import require
from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.training import Progress, RunLogger, check_finite, choose_device, choose_folder, derive_seed
from clustergym.training.arguments import FREE_ON_RESUME as ALWAYS_FREE
from clustergym.training.arguments import RunArgs, check_same_args, check_values, parse_args, plain_args
from clustergym.training.federated.environments import Environments, Episode, ReplayableEnv
from clustergym.training.federated.exchange import Exchange, LocalExchange, StoreLocation, connect_rank, serve_store
from clustergym.training.federated.matrices import Matrix, load_matrix
from clustergym.training.federated.plots import plot_graph, plot_returns
from clustergym.training.logger import read_scalars
from clustergym.training.progress import print_result
from clustergym.training.run import Run, save_model

# Replaces the logits of invalid actions. Their probability becomes exactly 0, without the NaN that 0 · −inf gives.
MASKED_LOGIT = -1e8
BUNDLED_MATRICES = Path(__file__).resolve().parent / "comm_matrices"
EDGE_NODES = "gpu_allocation_v0"
TRAINING, EVALUATION, WEIGHTS = 1, 2, 3
"""What a seed is used for: part of the key that it is derived from."""
FREE_ON_RESUME = (
    "exchange_timeout", "exchange_store", "eval_episodes", "eval_interval", "exp_description", "plot_comm_matrix",
)  # fmt: skip
"""Arguments that can change when a run is resumed, because they do not affect learning."""
log = logging.getLogger("clustergym.training.federated")


@dataclass
class Args(RunArgs):
    n_agents: int = 2
    """Number of agents. Each has its own environments and networks. With 1 agent this is plain PPO."""
    comm_matrix_config: Path | None = None
    """JSON file with the communication matrix, {"comm_matrix": {"0": {"1": 10}, …}} or a list of rows. A name such as
    "ring" selects a file in comm_matrices/. Default: all agents are neighbours with weight 1."""
    normalise_rows: Annotated[bool, tyro.conf.arg(aliases=["--normalize-rows"])] = False
    """Divide each row of the matrix by its sum, so that the penalty does not grow with the number of neighbours."""
    plot_comm_matrix: bool = False
    """Draw the communication graph to comm_matrix.png in the run folder before training starts."""
    local_updates: int = 16
    """Number of rollouts per agent between two exchanges of policies."""
    use_comm_penalty: bool = True
    """Add the weighted sum of KL divergences to the neighbours' policies to the loss of each agent."""
    penalty_coeff: Annotated[float, tyro.conf.arg(aliases=["--comm-coeff"])] = 1.0
    """Coefficient of that sum. It multiplies every entry of the matrix."""
    average_weights: bool = False
    """At each exchange, replace the networks of an agent by the weighted mean over the agent (weight 1, or the diagonal
    entry of the matrix) and its neighbours (the row of the matrix). Use it together with --common-init."""
    common_init: bool = False
    """Start all agents from the same weights."""
    log_all_kl: bool = False
    """Log KL divergences to all agents, not only to neighbours. Every agent then receives every policy."""
    exchange_timeout: float = 60.0
    """With one process per agent: seconds to wait for late agents at an exchange. Then their last policy is used."""
    exchange_store: str | None = None
    """With one process per agent: HOST:PORT of a store that was started with --serve-store. Default: the store of
    torchrun, or one on rank 0 if the ranks are started by hand."""
    serve_store: str | None = None
    """Run only a store for the exchange, at HOST:PORT, until interrupted."""

    env_id: str = "CartPole-v1"
    """Gymnasium id with Discrete or Box actions ("module:Id-v0" imports the module first), or gpu_allocation_v0, where
    agent i is edge node i of the allocation task."""
    env_options: str = "{}"
    """JSON object with further arguments for the environment, such as {"history": true} for gpu_allocation_v0."""
    total_timesteps: int = 500_000
    """Number of environment steps per agent, over all its environments. Rounded up to whole rollouts."""
    eval_interval: int = 0
    """Exchanges between evaluations, for learning curves. 0: only after training. They do not change the training."""
    learning_rate: float = 2.5e-4
    """Learning rate of Adam (the initial value if annealed)."""
    num_envs: int = 4
    """Number of parallel environments per agent."""
    num_steps: int = 128
    """Number of steps per environment between updates. A rollout has num_steps · num_envs transitions."""
    num_minibatches: int = 4
    """Number of minibatches per epoch. It must divide num_steps · num_envs."""
    update_epochs: int = 4
    """Number of epochs per update."""
    use_clipping: bool = True
    """Use the clipped surrogate loss. False uses the unclipped one with a penalty β · KL(π_old ‖ π) and adapts β."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio, and of the value change with --clip-vloss."""
    adaptive_kl_target: float = 0.01
    """With --use-clipping False: target KL of an update. β doubles above 1.5 × target and halves below target / 1.5."""
    adaptive_kl_beta: float = 1.0
    """With --use-clipping False: initial β."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss. The networks are separate, but their gradients are clipped together."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    gae: bool = True
    """Use generalised advantage estimation. False uses the discounted return until the rollout ends minus the value."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_vloss: bool = True
    """Clip the value change as well, and use the larger of the two losses."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients of an agent."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    bootstrap_truncated: bool = True
    """Bootstrap from the value of the last observation when an episode is truncated. Otherwise treat it as terminal."""
    init_logstd: float = 0.0
    """With Box actions: initial log standard deviation, in units of half the range where an action is bounded."""
    hidden: int = 64
    """Width of the two hidden layers of the policy and of the value network."""

    exp_description: str = ""
    """Description of the experiment, stored with the logs."""
    capture_video: bool = False
    """Record episodes of the first environment of each agent (0, 1, 8, 27, … and every 1000th) to agent_<i>/videos."""
    eval_episodes: int = 20
    """Number of evaluation episodes per agent after training, with greedy actions and unseen seeds. 0 for none."""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return -(-self.total_timesteps // self.batch_size)

    @property
    def num_rounds(self) -> int:
        """Number of rounds of local updates. The last one can be shorter."""
        return -(-self.num_iterations // self.local_updates)


def check_args(args: Args) -> None:
    """Raise ValueError for invalid arguments, before anything is created."""
    counts = "n_agents local_updates num_envs num_steps num_minibatches update_epochs hidden total_timesteps"
    positive = "learning_rate clip_coef max_grad_norm exchange_timeout adaptive_kl_target target_kl"
    not_negative = "eval_episodes eval_interval penalty_coeff ent_coef vf_coef adaptive_kl_beta seed"
    check_values(args, counts, lambda value: value >= 1, "1 or more")
    check_values(args, positive, lambda value: value > 0, "more than 0")
    check_values(args, not_negative, lambda value: value >= 0, "0 or more")
    check_values(args, "gamma gae_lambda", lambda value: 0 <= value <= 1, "0 … 1")
    size = args.batch_size
    if size % args.num_minibatches:
        raise ValueError(
            f"--num-minibatches is {args.num_minibatches}: expected a divisor of {size}, the transitions of a rollout "
            f"(--num-steps {args.num_steps} · --num-envs {args.num_envs})"
        )
    if args.norm_adv and size == args.num_minibatches:
        raise ValueError("--norm-adv needs 2 or more transitions per minibatch: decrease --num-minibatches")
    try:
        options = json.loads(args.env_options)
    except json.JSONDecodeError as reason:
        raise ValueError(f"--env-options {args.env_options!r} is not JSON: {reason}") from reason
    if not isinstance(options, dict):
        raise ValueError(f'--env-options is {options!r}: expected a JSON object such as {{"history": true}}')


# ALGO LOGIC: functions that are identical in every trainer (tests/trainers/test_trainers_agree.py)


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


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Set the logits of invalid actions (mask False) to −1e8, so that they are never sampled and get no gradient."""
    return logits if mask is None else torch.where(mask, logits, MASKED_LOGIT)


def categorical_entropy(logprobs: Tensor) -> Tensor:
    """Entropy from normalised log-probabilities of shape (…, actions). Masked actions contribute exactly 0."""
    return -(logprobs.exp() * logprobs).sum(-1)


def gaussian_logprob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of independent normal components, summed over the last dimension."""
    deviations = (actions - mean) / std
    return (-0.5 * deviations**2 - (std.log() + 0.5 * np.log(2 * np.pi))).sum(-1)


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


# ALGO LOGIC: policies, exact KL divergences, networks


def mlp(inputs: int, hidden: int, outputs: int, output_std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, hidden)), nn.Tanh(), layer_init(nn.Linear(hidden, hidden)), nn.Tanh(),
        layer_init(nn.Linear(hidden, outputs), std=output_std),
    )  # fmt: skip


class FederatedPolicy(nn.Module):
    """Maps observations (B, obs) to the parameters of the action distribution.

    Discrete actions: logits (B, actions). Continuous actions: mean and log standard deviation, (B, 2 · dimensions). The
    standard deviation does not depend on the observation. Neighbours receive this part of an agent.
    """

    def __init__(self, obs_size: int, action_size: int, hidden: int, continuous: bool, logstd: float = 0.0) -> None:
        super().__init__()
        self.net = mlp(obs_size, hidden, action_size, output_std=0.01)
        self.logstd = nn.Parameter(torch.full((action_size,), logstd)) if continuous else None

    def forward(self, obs: Tensor) -> Tensor:
        out = self.net(obs)
        return out if self.logstd is None else torch.cat([out, self.logstd.expand_as(out)], -1)


class FederatedAgent(nn.Module):
    """A policy and a value function, two multilayer perceptrons."""

    def __init__(self, obs_size: int, action_size: int, hidden: int, continuous: bool, logstd: float = 0.0) -> None:
        super().__init__()
        self.policy = FederatedPolicy(obs_size, action_size, hidden, continuous, logstd)
        self.critic = mlp(obs_size, hidden, 1, output_std=1.0)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p ‖ q) of categorical distributions over the last dimension: Σ_a p(a) · (log p(a) − log q(a))."""
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def normal_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of diagonal normal distributions, each (…, 2 · D): means, then log standard deviations.

    Σ_d log σ_q − log σ_p + (σ_p² + (μ_p − μ_q)²) / (2 σ_q²) − ½
    """
    (mean_p, logstd_p), (mean_q, logstd_q) = p.chunk(2, -1), q.chunk(2, -1)
    squares = (2 * logstd_p).exp() + (mean_p - mean_q) ** 2
    return (logstd_q - logstd_p + 0.5 * squares * (-2 * logstd_q).exp() - 0.5).sum(-1)


def log_prob(dist: Tensor, actions: Tensor, continuous: bool) -> Tensor:
    """Log-probability (B,) of actions (B,) or (B, D), given the parameters of their distributions."""
    if not continuous:
        return dist.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
    mean, logstd = dist.chunk(2, -1)
    return gaussian_logprob(actions, mean, logstd.exp())


def policy_entropy(dist: Tensor, continuous: bool) -> Tensor:
    if not continuous:
        return categorical_entropy(dist.log_softmax(-1))
    _, logstd = dist.chunk(2, -1)
    return gaussian_entropy(logstd.exp())


def adapted_beta(beta: float, kl: float, target: float) -> float:
    """Double β if an update exceeded 1.5 × the target KL, halve it if the KL stayed below target / 1.5."""
    if kl > 1.5 * target:
        return 2 * beta
    return beta / 2 if kl < target / 1.5 else beta


# Environments


def make_env(args: Args, index: int, videos: Path | None = None) -> gym.Env:
    """Make one environment of agent ``index``. With ``videos``, episodes are recorded to that folder."""
    env_id, options = args.env_id, json.loads(args.env_options)
    if env_id == EDGE_NODES:
        from clustergym.gpu_allocation.workload import edge_mixes  # other environments do not need it

        env_id, options["mix"] = "GPUAllocation-v0", edge_mixes(index + 1)[index]
    if videos is not None:
        options["render_mode"] = "rgb_array"
    env = gym.make(env_id, disable_env_checker=True, **options)
    if videos is not None:
        env = gym.wrappers.RecordVideo(env, str(videos), name_prefix=f"agent_{index}", disable_logger=True)
    return env


def make_envs(args: Args, index: int, count: int, purpose: int, videos: Path | None = None) -> Environments:
    """Make ``count`` environments of agent ``index``. The first one records videos."""
    # Environments count from 1 here: numpy derives the same seed from the keys (1, 2) and (1, 2, 0).
    return Environments([
        ReplayableEnv(
            make_env(args, index, videos if number == 1 else None),
            partial(derive_seed, args.seed, index, purpose, number),
        )
        for number in range(1, count + 1)
    ])  # fmt: skip


# ALGO LOGIC: one agent


@dataclass
class Transitions:
    """A rollout, with one row per transition."""

    obs: Tensor
    actions: Tensor
    masks: Tensor | None
    """Valid actions, if the environment tells."""
    dist: Tensor
    """Parameters of the distributions that the actions were drawn from."""
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def take(self, rows: Tensor | slice) -> Transitions:
        return Transitions(*(None if column is None else column[rows] for column in vars(self).values()))


class Learner:
    """One agent: its networks, environments and random numbers, and the frozen policies of its neighbours."""

    def __init__(self, args: Args, index: int, matrix: Matrix, device: torch.device, folder: Path = Path()) -> None:
        self.args, self.index, self.device, self.folder = args, index, device, folder
        videos = folder / "videos" if args.capture_video else None
        self.envs = make_envs(args, index, args.num_envs, TRAINING, videos)
        self.continuous = self.envs.continuous
        others = [j for j in range(args.n_agents) if j != index]
        self.weights = {j: float(matrix[index, j]) for j in others if matrix[index, j] > 0}
        self.own_weight = float(matrix[index, index]) or 1.0
        self.peers = [j for j in others if args.log_all_kl or j in self.weights]
        """Agents whose policies this one receives."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(args.seed, 0 if args.common_init else index, WEIGHTS))
            sizes = (self.envs.obs_size, self.envs.action_size, args.hidden)
            self.agent = FederatedAgent(*sizes, self.continuous, args.init_logstd).to(device)
        self._neighbour_policy = deepcopy(self.agent.policy)
        self.optimizer = make_optimizer(self.agent, args.learning_rate)
        # On the CPU, so that a run has the same random numbers on every device.
        self.generator = torch.Generator().manual_seed(derive_seed(args.seed, index, TRAINING))
        self.iteration = 0
        """Number of rollouts so far."""
        self.round = -1
        """Round of the last exchange; −1 before the first."""
        self.published = torch.zeros(0)
        self.neighbours: dict[int, Tensor] = {}
        """Last known parameters of each peer."""
        self.beta = args.adaptive_kl_beta
        self.batch: Transitions | None = None
        self.returns_100: deque[float] = deque(maxlen=100)
        self.envs.reset()

    @property
    def step(self) -> int:
        return self.iteration * self.args.batch_size

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return normal_kl(p, q) if self.continuous else categorical_kl(p, q)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _dist(self, envs: Environments) -> Tensor:
        """Action distributions for the current observations of the environments, on the CPU."""
        masks = None if envs.masks is None else self._tensor(envs.masks)
        return mask_logits(self.agent.policy(self._tensor(envs.obs)), masks).cpu()

    def outgoing(self) -> Tensor:
        """The parameters to publish: the policy, or the whole agent if agents are averaged."""
        shared = self.agent if self.args.average_weights else self.agent.policy
        return parameters_to_vector(shared.parameters()).detach().cpu()

    @torch.no_grad()
    def neighbour_dist(self, vector: Tensor, obs: Tensor, masks: Tensor | None = None) -> Tensor:
        """Action distributions of a published policy for the given observations, without gradients."""
        # The parameters of an agent start with those of its policy; what follows is not used.
        vector_to_parameters(vector.to(self.device), self._neighbour_policy.parameters())
        return mask_logits(self._neighbour_policy(obs), masks)

    @torch.no_grad()
    def receive(self, round_: int, published: Tensor, received: dict[int, Tensor]) -> dict[str, float]:
        """Complete an exchange. Returns the KL to each known policy in the states of the last rollout."""
        self.round, self.published = round_, published
        for j, vector in received.items():
            if bool(vector.isfinite().all()):
                self.neighbours[j] = vector
            else:
                log.warning("agent %d: agent %d published NaN or infinity; keeping its last policy", self.index, j)
        charts = {}
        if self.batch is not None:
            own = mask_logits(self.agent.policy(self.batch.obs), self.batch.masks)
            for j, vector in sorted(self.neighbours.items()):
                kl = self.kl(own, self.neighbour_dist(vector, self.batch.obs, self.batch.masks)).mean()
                charts[f"charts/kl_{self.index}_{j}"] = float(kl)
        if self.args.average_weights and round_ < self.args.num_rounds:
            known = {j: weight for j, weight in sorted(self.weights.items()) if j in self.neighbours}
            mean = self.own_weight * published
            for j, weight in known.items():
                mean = mean + weight * self.neighbours[j]
            mean = mean / (self.own_weight + sum(known.values()))
            vector_to_parameters(mean.to(self.device), self.agent.parameters())
        return charts

    def collect(self) -> dict[str, float]:
        """Play one rollout into ``batch``. Returns statistics of the episodes that ended."""
        args = self.args
        shape = (args.num_steps, args.num_envs)
        size = self.envs.action_size
        # The rollout is kept in numpy: environments use it, and writing one row is cheaper than with torch.
        obs = np.zeros((*shape, self.envs.obs_size), np.float32)
        actions = np.zeros((*shape, size), np.float32) if self.continuous else np.zeros(shape, np.int64)
        rewards = np.zeros(shape, np.float32)
        terminations, dones = np.zeros(shape, bool), np.zeros(shape, bool)
        masks = None if self.envs.masks is None else np.zeros((*shape, size), bool)
        final_obs: dict[tuple[int, int], np.ndarray] = {}
        episodes: list[Episode] = []

        noise = torch.empty(*shape, size)
        if self.continuous:
            noise.normal_(generator=self.generator)
        else:
            # The argmax of logits plus Gumbel noise is a sample of the categorical distribution.
            noise = -noise.exponential_(generator=self.generator).log()
        with torch.inference_mode():
            for step, step_noise in enumerate(noise.unbind()):
                obs[step] = self.envs.obs
                if masks is not None:
                    masks[step] = self.envs.masks
                dist = self._dist(self.envs)
                if self.continuous:
                    mean, logstd = dist.chunk(2, -1)
                    actions[step] = (mean + logstd.exp() * step_noise).numpy()
                else:
                    actions[step] = (dist + step_noise).argmax(-1).numpy()
                result = self.envs.step(actions[step])
                rewards[step], terminations[step] = result.rewards, result.terminated
                dones[step] = result.terminated | result.truncated
                final_obs |= {(step, env): each for env, each in result.final_obs.items()}
                episodes += result.episodes

        with torch.no_grad():
            flat_obs, flat_actions = self._tensor(obs).flatten(0, 1), self._tensor(actions).flatten(0, 1)
            flat_masks = None if masks is None else self._tensor(masks).flatten(0, 1)
            dist = mask_logits(self.agent.policy(flat_obs), flat_masks)
            logprobs = log_prob(dist, flat_actions, self.continuous)
            values = self.agent.get_value(flat_obs).view(shape)
            next_value = self.agent.get_value(self._tensor(self.envs.obs))
            final_values = torch.zeros_like(values)
            if final_obs:
                steps, envs = zip(*final_obs, strict=True)
                stacked = self._tensor(np.stack(list(final_obs.values())))
                final_values[list(steps), list(envs)] = self.agent.get_value(stacked)
            all_dones = self._tensor(dones)
            ends = self._tensor(terminations) if args.bootstrap_truncated else all_dones
            gae_lambda = args.gae_lambda if args.gae else 1.0  # 1 gives the discounted return to the end of the rollout
            advantages, returns = compute_gae(
                self._tensor(rewards), values, ends, all_dones, next_value, final_values, args.gamma, gae_lambda
            )
        columns = (each.flatten() for each in (advantages, returns, values))
        self.batch = Transitions(flat_obs, flat_actions, flat_masks, dist, logprobs, *columns)
        self.returns_100.extend(episode.reward_sum for episode in episodes)
        if not episodes:
            return {}
        mean_return, mean_length = np.mean(episodes, 0).tolist()
        return {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}

    def loss(self, mb: Transitions, neighbours: list[tuple[float, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a minibatch and its metrics. ``neighbours``: weight and action distributions of each neighbour."""
        args = self.args
        dist, new_values = mask_logits(self.agent.policy(mb.obs), mb.masks), self.agent.get_value(mb.obs)
        logratio = log_prob(dist, mb.actions, self.continuous) - mb.logprobs
        ratio = logratio.exp()
        advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
        pg_loss = policy_loss(ratio, advantages, args.clip_coef if args.use_clipping else float("inf"))
        v_loss = value_loss(new_values, mb.values, mb.returns, args.clip_coef if args.clip_vloss else None)
        entropy = policy_entropy(dist, self.continuous).mean()
        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
        own_kl = comm_kl = torch.zeros((), device=self.device)
        if not args.use_clipping:
            own_kl = self.kl(mb.dist, dist).mean()
            loss = loss + self.beta * own_kl
        if neighbours:
            comm_kl = torch.stack([weight * self.kl(dist, other).mean() for weight, other in neighbours]).sum()
            loss = loss + args.penalty_coeff * comm_kl
        with torch.no_grad():
            k1, _, k3 = kl_estimators(logratio)
            clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
        return loss, {
            "policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy, "comm_kl": comm_kl, "own_kl": own_kl,
            "old_approx_kl": k1.mean(), "approx_kl": k3.mean(), "clipfrac": clipfrac,
        }  # fmt: skip

    def learn(self) -> dict[str, float]:
        """Update the networks with several epochs of shuffled minibatches from ``batch``. Returns mean metrics."""
        args, batch = self.args, self.batch
        assert batch is not None, "collect() comes before learn()"
        # Neighbours are frozen, so their distributions are computed once per rollout.
        neighbours = [
            (self.weights[j], self.neighbour_dist(vector, batch.obs, batch.masks))
            for j, vector in sorted(self.neighbours.items())
            if args.use_comm_penalty and j in self.weights
        ]
        size = args.batch_size // args.num_minibatches
        seen: list[Tensor] = []
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=self.generator).to(self.device)
            shuffled, shuffled_neighbours = batch.take(order), [(weight, dist[order]) for weight, dist in neighbours]
            for start in range(0, args.batch_size, size):
                rows = slice(start, start + size)
                loss, metrics = self.loss(
                    shuffled.take(rows), [(weight, dist[rows]) for weight, dist in shuffled_neighbours]
                )
                self.optimizer.zero_grad()
                loss.backward()
                metrics["grad_norm"] = nn.utils.clip_grad_norm_(self.agent.parameters(), args.max_grad_norm)
                self.optimizer.step()
                seen.append(torch.stack(list(metrics.values())).detach())
            if args.target_kl is not None and metrics["approx_kl"].item() > args.target_kl:
                break
        means = dict(zip(metrics, torch.stack(seen).mean(0).tolist(), strict=True))
        terms = {
            "policy": means["policy_loss"],
            "entropy": args.ent_coef * means["entropy"],
            "value": args.vf_coef * means["value_loss"],
            "comm_penalty": args.penalty_coeff * means["comm_kl"],
        }
        if not args.use_clipping:
            terms["kl_penalty"] = self.beta * means["own_kl"]
            with torch.no_grad():
                dist = mask_logits(self.agent.policy(batch.obs), batch.masks)
                means["kl_after_update"] = float(self.kl(batch.dist, dist).mean())
        total = sum(abs(term) for term in terms.values()) or 1.0
        charts = {f"losses/{name}": value for name, value in means.items()}
        charts |= {f"charts/loss_fractions/{name}": abs(term) / total for name, term in terms.items()}
        charts["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
        charts["charts/updates"] = float(len(seen))
        charts["charts/beta"] = self.beta
        if not args.use_clipping:
            self.beta = adapted_beta(self.beta, means["kl_after_update"], args.adaptive_kl_target)
        return charts

    def iterate(self) -> dict[str, float]:
        """Collect one rollout and learn from it."""
        args = self.args
        self.iteration += 1
        if args.anneal_lr:
            self.optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, self.iteration, args.num_iterations)
        charts = self.collect() | self.learn()
        charts["charts/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        charts["charts/mean_return_100"] = float(np.mean(self.returns_100)) if self.returns_100 else float("nan")
        return charts

    def evaluate(self) -> list[float]:
        """Returns of the evaluation episodes, played with the most probable actions, one per environment."""
        if not self.args.eval_episodes:
            return []
        envs = make_envs(self.args, self.index, self.args.eval_episodes, EVALUATION)
        envs.reset()
        returns, running = np.zeros(len(envs)), np.ones(len(envs), bool)
        with torch.inference_mode():
            while running.any():
                dist = self._dist(envs)
                actions = dist.chunk(2, -1)[0] if self.continuous else dist.argmax(-1)
                result = envs.step(actions.numpy())
                returns += result.rewards * running
                running &= ~(result.terminated | result.truncated)
        envs.close()
        return returns.tolist()

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint needs to resume bit-identically."""
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
            "returns_100": list(self.returns_100),
            **self.envs.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_same_args(state["args"], plain_args(self.args), may_differ=FREE_ON_RESUME)
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.iteration, self.round, self.beta = state["iteration"], state["round"], state["beta"]
        self.published = state["published"]
        self.neighbours = dict(state["neighbours"])
        self.returns_100.extend(state["returns_100"])
        self.envs.restore(state)


# The loop over rounds, for the agents of this process


def connect(args: Args, matrix: Matrix, rank: int, resume: bool) -> Exchange:
    """Connect the process of agent ``rank`` to the store that policies are exchanged through."""
    # The ranks must agree on everything that affects learning.
    own = {*FREE_ON_RESUME, *ALWAYS_FREE, "serve_store", "comm_matrix_config"} - {"total_timesteps"}
    config = {key: value for key, value in plain_args(args).items() if key not in own}
    config["comm_matrix"] = matrix.tolist()
    readers = range(args.n_agents) if args.log_all_kl else np.flatnonzero(matrix[:, rank]).tolist()
    return connect_rank(
        args.exchange_store, rank, args.n_agents, {*readers} - {rank}, config, args.exchange_timeout, resume
    )


def make_learner(args: Args, index: int, matrix: Matrix, device: torch.device, run: Path, resume: bool) -> Learner:
    """Make a new agent, or with ``resume`` restore it from its checkpoint if there is one."""
    folder = run / f"agent_{index}"
    checkpoint = folder / CHECKPOINT_NAME
    if checkpoint.exists() and not resume:
        raise FileExistsError(f"{checkpoint} exists: add --resume to continue that run, or choose another --run-dir")
    learner = Learner(args, index, matrix, device, folder)
    if checkpoint.exists():
        learner.restore(load_checkpoint(checkpoint, "ppo_federated"))
        log.info("agent %d resumes at round %d, step %d", index, learner.round, learner.step)
    if learner.step == 0:
        # Logs of an attempt that did not reach its first rollout would appear twice.
        for events in folder.glob("events.out.tfevents.*"):
            events.unlink()
    return learner


def run_rounds(
    args: Args, learners: list[Learner], loggers: dict[int, RunLogger], exchange: Exchange, progress: Progress
) -> None:
    """Alternate between exchanges and local updates, for all agents of this process."""
    for learner in learners:
        if learner.round >= 0:
            # A resumed agent publishes again, because the other agents or the store may have been restarted too.
            exchange.publish(learner.index, learner.round, learner.published)
    for round_ in range(max(0, min(learner.round for learner in learners)), args.num_rounds + 1):
        # Checkpoints are written one after another, so a crash can leave some agents before and some after an exchange.
        due = [learner for learner in learners if learner.round < round_]
        outgoing = {learner.index: learner.outgoing() for learner in due}
        sent = {index: exchange.publish(index, round_, vector) for index, vector in outgoing.items()}
        for learner in due:
            before = replace(exchange.traffic)
            received = exchange.gather(learner.index, round_, learner.peers)
            charts = learner.receive(round_, outgoing[learner.index], received)
            charts |= {f"exchange/{name}": value for name, value in vars(exchange.traffic.since(before)).items()}
            charts["exchange/sent_bytes"] = sent[learner.index]
            charts["exchange/missing"] = len(learner.peers) - len(received)
            if args.eval_interval and round_ % args.eval_interval == 0 and 0 < round_ < args.num_rounds:
                charts |= Run.mean_return(learner.evaluate())
            loggers[learner.index].scalars(charts, learner.step)
        for learner in due:
            loggers[learner.index].flush()
            save_checkpoint(learner.folder / CHECKPOINT_NAME, "ppo_federated", learner.state())
        end = min((round_ + 1) * args.local_updates, args.num_iterations)
        while any(learner.iteration < end for learner in learners):
            for learner in learners:
                if learner.iteration < end:
                    charts = learner.iterate()
                    check_finite(charts, learner.iteration, learner.folder / CHECKPOINT_NAME)
                    charts["charts/SPS"] = progress.steps_per_s(sum(each.step for each in learners))
                    loggers[learner.index].scalars(charts, learner.step)
            returns = [each for learner in learners for each in learner.returns_100]
            mean_return = float(np.mean(returns)) if returns else float("nan")
            progress.update(sum(learner.step for learner in learners), mean_return=mean_return, round=round_)


def finish(args: Args, learner: Learner, logger: RunLogger) -> dict[str, Any]:
    """Evaluate an agent and write its result and, with --save-model, its networks."""
    returns = learner.evaluate()
    result = {
        "agent": learner.index,
        "steps": learner.step,
        "mean_return": float(np.mean(returns)) if returns else None,
        "mean_return_ci95": ci95(returns) if returns else None,
        "train_return_100": float(np.mean(learner.returns_100)) if learner.returns_100 else None,
        "checkpoint": str(learner.folder / CHECKPOINT_NAME),
    }
    if returns:
        logger.scalar("eval/mean_return", float(np.mean(returns)), learner.step)
    write_atomically(learner.folder / "result.json", json.dumps(result, indent=1) + "\n")
    if args.save_model:
        save_model(learner.folder, "ppo_federated", plain_args(args), agent=learner.agent.state_dict())
    return result


def plot_summary(args: Args, folder: Path) -> Path | None:
    """Plot the returns of all agents to summary.png. None if no episode has ended or matplotlib is missing."""
    # The folder of an agent that runs on another machine may be missing here.
    folders = {i: folder / f"agent_{i}" for i in range(args.n_agents) if (folder / f"agent_{i}").is_dir()}
    curves = {i: np.array(read_scalars(each, "charts/mean_return_100")) for i, each in folders.items()}
    title = args.exp_description or f"{args.n_agents} agents on {args.env_id}"
    try:
        return plot_returns(curves, folder / "summary.png", title)
    except ImportError as reason:
        log.warning("no summary.png: %s", reason)
        return None


def train(args: Args) -> dict[str, Any] | None:
    """Run the training. Returns the contents of the result line, or None in a process that is not rank 0."""
    torch.set_num_threads(1)
    check_args(args)
    matrix = load_matrix(args.comm_matrix_config, args.n_agents, BUNDLED_MATRICES, args.normalise_rows)
    if args.plot_comm_matrix:
        require("matplotlib", "render")
    make_envs(args, 0, 1, TRAINING).close()  # report an unknown id or unsupported space before creating a folder
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
    is_main = rank is None or rank == 0
    # When a rank fails, torchrun restarts all ranks with their original arguments.
    resume = args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    exchange: Exchange = LocalExchange() if rank is None else connect(args, matrix, rank, resume)
    name = f"ppo_federated__{args.env_id.replace('/', '-')}__{args.seed}"
    folder = exchange.agree_on_folder(choose_folder(name, args.run_dir, resume, f"agent_*/{CHECKPOINT_NAME}"))
    device = choose_device(args.cuda, int(os.environ.get("LOCAL_RANK", "0")), args.torch_deterministic)
    indices = range(args.n_agents) if rank is None else [rank]
    learners = [make_learner(args, i, matrix, device, folder, resume) for i in indices]
    loggers = {}
    for learner in learners:
        name, config = f"{folder.name}-agent_{learner.index}", plain_args(args)
        project, entity = args.wandb_project_name, args.wandb_entity
        loggers[learner.index] = RunLogger(
            learner.folder, config, args.track, project, learner.step, name=name, entity=entity
        )
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "comm_matrix.json", json.dumps({"comm_matrix": matrix.tolist()}) + "\n")
        if args.plot_comm_matrix:
            plot_graph(matrix, folder / "comm_matrix.png")

    total = len(learners) * args.num_iterations * args.batch_size
    done = sum(learner.step for learner in learners)
    try:
        with Progress(total, done, enabled=is_main) as progress:
            run_rounds(args, learners, loggers, exchange, progress)
            steps_per_s = progress.steps_per_s(total)
        for learner in learners:
            result = finish(args, learner, loggers[learner.index])
            exchange.share_result(learner.index, result | {"steps_per_s": steps_per_s / len(learners)})
    finally:
        for learner in learners:
            loggers[learner.index].close()
            learner.envs.close()

    if not is_main:
        return None
    results = exchange.collect_results(args.n_agents)
    returns = [result["mean_return"] for result in results.values() if result["mean_return"] is not None]
    return {
        "env_id": args.env_id,
        "seed": args.seed,
        "n_agents": args.n_agents,
        "mean_return": float(np.mean(returns)) if returns else None,
        "mean_returns": {i: result["mean_return"] for i, result in sorted(results.items())},
        "missing_agents": sorted(set(range(args.n_agents)) - results.keys()),
        "steps": sum(result["steps"] for result in results.values()),
        "steps_per_s": sum(result["steps_per_s"] for result in results.values()),
        "exchange_wait_s": exchange.traffic.wait_s,
        "exchange_transfer_s": exchange.traffic.transfer_s,
        "sent_bytes": exchange.traffic.sent_bytes,
        "received_bytes": exchange.traffic.received_bytes,
        "checkpoint": folder / "agent_0" / CHECKPOINT_NAME,
        "summary": plot_summary(args, folder),
        "run_dir": folder,
    }


def main() -> None:
    args = parse_args(Args, __doc__)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    try:
        if args.serve_store is not None:
            serve_store(StoreLocation.parse(args.serve_store))
            return
        result = train(args)
    except (ValueError, TypeError, ImportError, ArithmeticError, OSError, gym.error.Error) as reason:
        raise SystemExit(f"ppo_federated.py: {reason}") from reason
    except torch.distributed.DistNetworkError as reason:
        raise SystemExit(f"ppo_federated.py: cannot reach the store: {str(reason).splitlines()[0]}") from reason
    if result is not None:
        print_result(result)


if __name__ == "__main__":
    main()
