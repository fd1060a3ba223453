"""PPO for GPU allocation: details 1–13 and 23–31 of "The 37 Implementation Details of PPO".

    python cleanrl_ppo/ppo_gpu_alloc.py                                   # GPUAllocationHistory-v0, Gaussian policy
    python cleanrl_ppo/ppo_gpu_alloc.py --preset levels                   # categorical policy over shares of a request
    python cleanrl_ppo/ppo_gpu_alloc.py --env-id GPUAllocation-v0         # five features, no history
    python cleanrl_ppo/ppo_gpu_alloc.py --preset plain                    # textbook PPO
    python cleanrl_ppo/ppo_gpu_alloc.py --resume                          # continue after a crash

The final evaluation compares the policy with rules that operators use and with an oracle, on streams of pods that
training has not seen. The checkpoint holds the network, the observation statistics and the environments; ``clustergym
eval --task gpu-allocation --checkpoint …`` evaluates it. docs/reference/ppo_gpu_alloc.md explains every metric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

# Importing clustergym registers its environments, so --env-id can name them.
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, episode_means, gap_closed, play, play_rules
from clustergym.gpu_allocation.policy import share_actions
from clustergym.gpu_allocation.state import COUNT_DECISIONS, OUTCOME_MET
from clustergym.training import (
    Run,
    TrainArgs,
    World,
    capture_rng_state,
    derive_seed,
    parse_args,
    record_video,
    restore_rng_state,
    run_trainer,
)


@dataclass
class Args(TrainArgs):
    env_id: str = "GPUAllocationHistory-v0"
    """GPUAllocationHistory-v0 or GPUAllocation-v0."""
    workload: Path | None = None
    """CSV file in the openb format with the requests and durations of pods. Default: synthetic pods."""
    reward: Literal["room", "seed"] = "room"
    """room: with a penalty for the waiting time of the next pod. seed: without it."""
    preset: Literal["tuned", "levels", "plain"] = "tuned"
    """levels: a categorical policy (LEVELS_PRESET). plain: textbook PPO with five features, one environment, batches of
    32 and no normalisation (PLAIN_PRESET). Other flags come before it."""
    total_timesteps: int = 12_000_000
    """Total number of environment steps, over all environments and processes. Rounded up to whole iterations."""
    eval_streams: int = 256
    """Number of held-out streams (one episode each) in an evaluation. 0 for no evaluation."""

    learning_rate: float = 5e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0. With final_std it also falls with the standard deviation, because the
    same step would move the mean by many standard deviations later."""
    num_envs: int = 256
    """Number of parallel environments per process."""
    num_steps: int = 32
    """Number of steps per environment between updates."""
    copies: int = 1
    """Number of environments that decide on the same pod in the same situation: 1 (off) or an even divisor of num_envs.
    Their mean reward is the baseline, so easy and hard pods count the same. Then all continue from the first one."""
    num_minibatches: int = 4
    """Number of minibatches per epoch."""
    update_epochs: int = 4
    """Number of epochs per update."""
    gamma: float = 0.0
    """Discount factor. A pod is rewarded immediately and affects later pods only slightly, so 0 learns fastest."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    bootstrap_truncated: bool = True
    """Bootstrap from the value of the last observation when an episode is truncated. Otherwise treat it as terminal."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    anneal_clip: bool = False
    """Anneal the clip range linearly to 0."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus (the initial value if annealed). Only has an effect if the standard deviation is
    learned (final_std None)."""
    anneal_ent: bool = True
    """Anneal the entropy bonus linearly to 0. The evaluation uses the mean action, and noise makes the learned mean too
    cautious."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    hidden: int = 64
    """Width of the two hidden layers."""
    levels: int = 0
    """Number of shares of the requested cores, and of the memory, that a categorical policy chooses from. 0: a Gaussian
    policy over cores and memory of the GPU, whose noise is the same for every pod."""
    qos_penalty: float = 0.0
    """Subtracted from the reward of a pod that misses its objective, in training. Evaluations do not subtract it."""
    action_scale: float = 0.1
    """Initial standard deviation of an action, whose range is 1."""
    final_std: float | None = 0.005
    """Standard deviation after 80 % of the run, reached by a geometric schedule. None: it is learned. A learned one
    becomes smaller than the unit of the GPU cores before the mean has converged, and learning stops."""
    initial_mean: float = 0.2
    """Mean of the actions before training. A pod never gets more than it requests, so all actions above the request
    have the same reward. From 0.5, small requests have no gradient."""
    norm_obs: bool = True
    """Normalise observations by their running mean and variance and clip to ±10."""
    norm_reward: bool = False
    """Divide rewards by the standard deviation of the discounted return and clip to ±10. Do not use it with gamma 0:
    rewards are near 1.4 and differ by 0.1, so clipping would make all good ones equal."""


PLAIN_PRESET: dict[str, Any] = {
    "env_id": "GPUAllocation-v0",
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "update_epochs": 4,
    "clip_coef": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "num_envs": 1,
    "num_steps": 32,
    "num_minibatches": 1,
    "anneal_lr": False,
    "anneal_ent": False,
    "norm_adv": False,
    "clip_vloss": False,
    "norm_obs": False,
    "norm_reward": False,
    "action_scale": 1.0,
    "final_std": None,
    "initial_mean": 0.5,
    "hidden": 64,
}
"""Defaults with ``--preset plain``."""
LEVELS_PRESET: dict[str, Any] = {
    "levels": 24,
    "num_envs": 512,
    "num_steps": 16,
    "copies": 4,
    "learning_rate": 3e-3,
    "update_epochs": 1,
    "ent_coef": 0.03,
    "norm_adv": False,
    "hidden": 128,
}
"""Defaults with ``--preset levels``. The entropy bonus is in units of the reward, so advantages are not normalised."""

NORM_CLIP = 10.0
STD_TO_LR = 0.7
"""With ``final_std``, the learning rate is multiplied by this power of the decrease of the standard deviation."""


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


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


# ALGO LOGIC: a categorical policy


def categorical_entropy(logprobs: Tensor) -> Tensor:
    """Entropy from normalised log-probabilities of shape (…, actions). Masked actions contribute exactly 0."""
    return -(logprobs.exp() * logprobs).sum(-1)


def level_logprobs(logits: Tensor) -> Tensor:
    """(B, 2, levels) log-probabilities of the shares of cores and memory, from the outputs of the actor."""
    return logits.unflatten(-1, (2, -1)).log_softmax(-1)


def sample_levels(logprobs: Tensor, copies: int) -> Tensor:
    """(B, 2) sampled levels. Each sample follows its probabilities (B, 2, levels).

    Copies of an environment draw from different parts of the distribution, so their rewards can be compared. The
    numbers that select the level are (rank + u) / copies, with a random order of ranks and the same u for all copies.
    """
    ranks = torch.rand(len(logprobs) // copies, copies, 2).argsort(1)
    numbers = ((ranks + torch.rand(len(ranks), 1, 2)) / copies).flatten(0, 1)
    below = logprobs.exp().cumsum(-1) < numbers[..., None]
    return below.sum(-1).clamp(max=logprobs.shape[-1] - 1)


# ALGO LOGIC: continuous actions


def gaussian_logprob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of independent normal components, summed over the last dimension."""
    deviations = (actions - mean) / std
    return (-0.5 * deviations**2 - (std.log() + 0.5 * np.log(2 * np.pi))).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of independent normal components, summed over the last dimension."""
    return (0.5 + 0.5 * np.log(2 * np.pi) + std.log()).sum(-1)


def scheduled_std(initial: float, final: float, iteration: int, num_iterations: int) -> float:
    """Geometric schedule from ``initial`` in iteration 1 to ``final`` after 80 % of the run, constant after that."""
    return initial * (final / initial) ** min(1.0, (iteration - 1) / (0.8 * num_iterations))


class RunningMeanStd:
    """Running mean and variance of the rows of all ranks, updated batch by batch (Chan et al., 1979)."""

    def __init__(self, shape: tuple[int, ...] = (), world: World | None = None) -> None:
        self.world = world or World()
        # NumPy: torch takes several times as long for a few numbers per step.
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: Tensor | np.ndarray) -> None:
        """Add a batch of rows (n, *shape)."""
        mean, var, n = self.world.moments(np.asarray(rows, np.float64))
        self.count += n
        new = n / self.count
        delta = mean - self.mean
        self.mean = self.mean + new * delta
        self.var = self.var + new * (var - self.var + (1 - new) * delta**2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("mean", "var", "count")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), float(state["count"])


def normalize_obs(obs: Tensor, statistics: RunningMeanStd) -> Tensor:
    """Normalise by the running mean and variance and clip to ±10."""
    scaled = (obs.numpy() - statistics.mean) / np.sqrt(statistics.var + 1e-8)
    return torch.from_numpy(scaled).clamp(-NORM_CLIP, NORM_CLIP).float()


class RewardScaler:
    """Divide rewards by the standard deviation of the discounted return (no mean subtracted) and clip to ±10."""

    def __init__(self, num_envs: int, gamma: float, world: World | None = None) -> None:
        self.gamma = gamma
        self.returns = np.zeros(num_envs)
        self.statistics = RunningMeanStd((), world)

    def __call__(self, rewards: Tensor, dones: Tensor) -> Tensor:
        self.returns = rewards.numpy() + self.gamma * self.returns
        self.statistics.update(self.returns)
        self.returns[dones.numpy()] = 0.0
        scaled = rewards.numpy() / np.sqrt(self.statistics.var + 1e-8)
        return torch.from_numpy(scaled).clamp(-NORM_CLIP, NORM_CLIP).float()

    def state_dict(self) -> dict[str, Any]:
        return {"returns": torch.tensor(self.returns), "statistics": self.statistics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns = state["returns"].numpy()
        self.statistics.load_state_dict(state["statistics"])


class Agent(nn.Module):
    """Gaussian policy with a sigmoid mean and a state-independent standard deviation, and a separate value network.

    With ``levels``, a categorical policy: for each action, the logits of that many shares of the request.
    """

    def __init__(
        self, obs_size: int, num_actions: int = 2, hidden: int = 64, action_scale: float = 0.2, levels: int = 0
    ) -> None:
        super().__init__()

        def network(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.levels = levels
        if levels:
            self.actor = network(num_actions * levels, 0.01)
        else:
            self.actor = network(num_actions, 0.01).append(nn.Sigmoid())
        self.critic = network(1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.action_scale = action_scale

    def std(self) -> Tensor:
        """Standard deviation of each action, the same in every state."""
        return self.action_scale * self.log_std.exp()

    def evaluate_actions(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities of the actions, entropies) from the outputs of the actor."""
        if not self.levels:
            return gaussian_logprob(actions, outputs, self.std()), gaussian_entropy(self.std())
        logprobs = level_logprobs(outputs)
        return logprobs.gather(-1, actions.long()[..., None]).sum((-1, -2)), categorical_entropy(logprobs).sum(-1)

    def set_std(self, std: float) -> None:
        """Fix the standard deviation of all actions at this value. It is no longer learned."""
        self.log_std.requires_grad_(False).fill_(np.log(std / self.action_scale))

    def set_mean(self, mean: float) -> None:
        """Set the bias of the last layer so that the initial mean of all actions is close to this value."""
        last = self.actor[-2]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias, np.log(mean / (1 - mean)))

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (outputs of the actor, values). The outputs are the means of the actions, or logits of shares."""
        return self.actor(obs), self.get_value(obs)


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# Environments and rollouts


def clip_action(raw: Tensor) -> Tensor:
    """Clip an action for the environment. The raw sample is stored, because the log-probability belongs to it."""
    return raw.clamp(0.0, 1.0)


def make_envs(args: Args, num_envs: int) -> AllocationBatch:
    """Create the batched environments of ``--env-id``."""
    if not args.env_id.startswith("GPUAllocation"):
        raise TypeError(f"{args.env_id} is not an allocation task: use GPUAllocation-v0 or GPUAllocationHistory-v0")
    options = {"workload": args.workload, "reward": args.reward}
    envs = gym.make_vec(args.env_id, num_envs=num_envs, vectorization_mode="vector_entry_point", **options)
    batch: AllocationBatch = envs.unwrapped.batch
    return batch


def film(args: Args, act: Callable[[Tensor], Tensor], videos: Path) -> None:
    """Record the first episode of the held-out streams. ``act`` maps observations (1, features) to actions."""
    options = {"workload": args.workload, "reward": args.reward}
    env = record_video(gym.make(args.env_id, render_mode="rgb_array", **options), videos)
    obs, ended = env.reset(seed=HELD_OUT_SEED)[0], False
    while not ended:
        obs, _, terminated, truncated, _ = env.step(act(torch.from_numpy(obs)[None])[0].numpy())
        ended = terminated or truncated
    env.close()


@dataclass
class Batch:
    """Training data of one update, one row per transition."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.actions)

    def take(self, rows: Tensor | slice) -> Batch:
        return Batch(*(column[rows] for column in vars(self).values()))


def episode_charts(finished: list[Tensor]) -> dict[str, float]:
    """Charts of the finished episodes, from their sums over all steps (episodes, SUM_* columns)."""
    return {f"charts/{key}": value for key, value in episode_means(torch.cat(finished)).items()} if finished else {}


class Rollouts:
    """Collects experience with the current policy. Episodes continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, device: torch.device, seed: int, world: World | None = None) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs = make_envs(args, args.num_envs)
        self.envs.seed(seed + np.arange(args.num_envs))
        self.envs.reset()
        # All episodes have the same length. Start them at different times, so that a rollout contains all phases.
        decisions = torch.arange(args.num_envs) * self.envs.config.arrivals // args.num_envs
        self.envs.state["counters"][:, COUNT_DECISIONS] = decisions
        if args.copies > 1:
            self.envs.copy_first(args.copies)
        self.statistics = RunningMeanStd((self.envs.n_features,), world)
        self.scaler = RewardScaler(args.num_envs, args.gamma, world)
        if args.norm_obs:
            self.statistics.update(self.envs.obs)

    def state_dict(self) -> dict[str, Any]:
        return {
            "envs": self.envs.state_dict(),
            "statistics": self.statistics.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.load_state_dict(state["envs"])
        self.statistics.load_state_dict(state["statistics"])
        self.scaler.load_state_dict(state["scaler"])

    def normalize(self, obs: Tensor) -> Tensor:
        return normalize_obs(obs, self.statistics) if self.args.norm_obs else obs.clone()

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """Play num_steps steps in each environment. Returns the training data and the charts of finished episodes."""
        args, agent, device, envs = self.args, self.agent, self.device, self.envs
        shape = (args.num_steps, args.num_envs)
        obs = torch.zeros(*shape, envs.n_features)
        actions = torch.zeros(*shape, 2)
        rewards = torch.zeros(shape)
        dones = torch.zeros(shape, dtype=torch.bool)
        last_obs: list[tuple[int, Tensor, Tensor]] = []
        finished: list[Tensor] = []
        raw_reward = 0.0

        noise = torch.randn(*shape, 2)
        if args.copies > 1:
            # Opposite noise: the difference of two rewards then shows the slope.
            noise[:, 1::2] = -noise[:, ::2]
        with torch.inference_mode():
            std = agent.std().cpu()
            for step in range(args.num_steps):
                obs[step] = self.normalize(envs.obs)
                mean = agent.actor(obs[step].to(device)).cpu()
                if args.levels:
                    actions[step] = sample_levels(level_logprobs(mean), args.copies)
                    next_obs, reward, ended = envs.step(share_actions(envs.obs, actions[step], args.levels))
                else:
                    actions[step] = mean + std * noise[step]
                    next_obs, reward, ended = envs.step(clip_action(actions[step]))
                if args.norm_obs:
                    self.statistics.update(next_obs)
                raw_reward += float(reward.sum())
                if args.qos_penalty:
                    reward = reward - args.qos_penalty * (1.0 - envs.outcome[:, OUTCOME_MET])
                rewards[step] = self.scaler(reward, ended) if args.norm_reward else reward
                dones[step] = ended
                if ended.any():
                    where = ended.nonzero().squeeze(-1)
                    last_obs.append((step, where, self.normalize(envs.last_obs[where])))
                    finished.append(envs.final_sums[where].clone())
                if args.copies > 1:
                    envs.copy_first(args.copies)

        with torch.no_grad():
            flat_obs, flat_actions = obs.flatten(0, 1).to(device), actions.flatten(0, 1).to(device)
            means, flat_values = agent(flat_obs)
            logprobs, _ = agent.evaluate_actions(means, flat_actions)
            values = flat_values.view(shape)
            next_value = agent.get_value(self.normalize(envs.obs).to(device))
            final_values = torch.zeros_like(values)
            for step, where, rows in last_obs:
                final_values[step, where.to(device)] = agent.get_value(rows.to(device))
            dones = dones.to(device)
            # Episodes only end because of their length, so all ends are truncations.
            ends = torch.zeros_like(dones) if args.bootstrap_truncated else dones
            steps = (rewards.to(device), values, ends, dones, next_value, final_values)
            advantages, returns = compute_gae(*steps, args.gamma, args.gae_lambda)
            if args.copies > 1:
                groups = advantages.view(args.num_steps, -1, args.copies)
                groups -= groups.mean(-1, keepdim=True)
        batch = Batch(flat_obs, flat_actions, logprobs, advantages.flatten(), returns.flatten(), values.flatten())
        return batch, {"charts/reward": raw_reward / len(batch)} | episode_charts(finished)


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, clip_coef: float, ent_coef: float, world: World
) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric."""
    parameters = list(agent.parameters())
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        shuffled = batch.take(torch.randperm(len(batch)).to(batch.obs.device))
        bounds = np.linspace(0, len(batch), args.num_minibatches + 1).astype(int)
        for start, end in pairwise(bounds):
            mb = shuffled.take(slice(start, end))
            means, new_values = agent(mb.obs)
            logprobs, entropies = agent.evaluate_actions(means, mb.actions)
            logratio = logprobs - mb.logprobs
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
            pg_loss = policy_loss(ratio, advantages, clip_coef)
            v_loss = value_loss(new_values, mb.values, mb.returns, clip_coef if args.clip_vloss else None)
            entropy = entropies.mean()
            approx_kl = k3.mean()
            loss = pg_loss - ent_coef * entropy + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            world.average_gradients(parameters)
            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                clipfrac = ((ratio - 1.0).abs() > clip_coef).float().mean()
                seen.append(torch.stack([pg_loss, v_loss, entropy, k1.mean(), approx_kl, clipfrac, grad_norm]))
        if args.target_kl is not None and world.mean(approx_kl.item()) > args.target_kl:
            break
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    means_seen = torch.stack(seen).mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means_seen, strict=True)}
    metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
    return metrics


def evaluate(
    agent: Agent, rollouts: Rollouts, args: Args, device: torch.device, videos: Path | None = None
) -> dict[str, Any]:
    """Play the most probable action on held-out streams, with fixed statistics. With ``videos``, record an episode."""
    envs = make_envs(args, args.eval_streams)

    def act(obs: Tensor) -> Tensor:
        outputs = agent.actor(rollouts.normalize(obs).to(device)).cpu()
        if args.levels:
            return share_actions(obs, level_logprobs(outputs).argmax(-1), args.levels)
        return clip_action(outputs)

    with torch.inference_mode():
        if videos is not None:
            film(args, act, videos)
        return play(envs, lambda: act(envs.obs))


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    if args.final_std is not None and args.final_std <= 0:
        raise ValueError(f"final_std is {args.final_std}: expected more than 0, or None for a learned one")
    if not 0 < args.initial_mean < 1:
        raise ValueError(f"initial_mean is {args.initial_mean}: expected a share between 0 and 1")
    if args.copies < 1 or (args.copies > 1 and (args.copies % 2 or args.num_envs % args.copies or args.gamma > 0)):
        expected = f"1, or an even divisor of num_envs {args.num_envs} with gamma 0"
        raise ValueError(f"copies is {args.copies} with gamma {args.gamma:g}: expected {expected}")
    if args.levels < 0 or args.levels == 1:
        raise ValueError(f"levels is {args.levels}: expected 2 or more shares, or 0 for a Gaussian policy")
    device = world.device
    run = Run("ppo_gpu_alloc", args, world, args.env_id, args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    agent = Agent(make_envs(args, 1).n_features, 2, args.hidden, args.action_scale, args.levels).to(device)
    if args.levels:
        agent.log_std.requires_grad_(False)
    else:
        agent.set_mean(args.initial_mean)
    optimizer = make_optimizer(agent, args.learning_rate)
    rollouts = Rollouts(args, agent, device, derive_seed(args.seed, 1, world.rank), world)
    if state := run.load_checkpoint(agent=agent, optimizer=optimizer, rollouts=rollouts):
        restore_rng_state(state["rng"])
    else:
        world.broadcast(agent)
        torch.manual_seed(derive_seed(args.seed, 2, world.rank))
    if args.compile:
        agent.compile()

    with run:
        for iteration in run.iterations():
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, run.num_iterations)
            if args.final_std is not None and not args.levels:
                std = scheduled_std(args.action_scale, args.final_std, iteration, run.num_iterations)
                agent.set_std(std)
                if args.anneal_lr:
                    optimizer.param_groups[0]["lr"] *= (std / args.action_scale) ** STD_TO_LR
            clip_coef = anneal(args.clip_coef, iteration, run.num_iterations) if args.anneal_clip else args.clip_coef
            ent_coef = anneal(args.ent_coef, iteration, run.num_iterations) if args.anneal_ent else args.ent_coef

            batch, metrics = rollouts.collect()
            metrics |= update(agent, optimizer, batch, args, clip_coef, ent_coef, world)

            std_cores, std_memory = agent.std().tolist()
            metrics |= {
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/clip_coef": clip_coef,
                "charts/ent_coef": ent_coef,
                "charts/std_cores": std_cores,
                "charts/std_memory": std_memory,
            }
            if run.evaluation_due(iteration) and args.eval_streams:
                evaluation = evaluate(agent, rollouts, args, device, run.video_folder(iteration))
                metrics |= {f"eval/{key}": evaluation[key] for key in ("reward", "qos", "efficiency")}
            run.log(metrics, iteration, reward=metrics["charts/reward"], qos=metrics.get("charts/qos", float("nan")))
            per_rank = {"rollouts": rollouts, "rng": capture_rng_state()}
            run.checkpoint(iteration, per_rank, agent=agent, optimizer=optimizer)
        if not world.is_main:
            return {}
        run.save_model(agent=agent, statistics=rollouts.statistics)
        result: dict[str, Any] = {}
        if args.eval_streams:
            result = evaluate(agent, rollouts, args, device, run.video_folder())
            run.logger.scalars({f"eval/{key}": result[key] for key in ("reward", "qos", "efficiency")}, run.total_steps)
            rules = play_rules(make_envs(args, args.eval_streams))
            result["rules"] = {
                name: {key: rule[key] for key in ("reward", "qos", "efficiency")} for name, rule in rules.items()
            }
            result["gap_closed"] = gap_closed(result["reward"], rules)
    reported = ("mean_return", "mean_return_ci95", "reward", "qos", "efficiency", "oom", "gap_closed", "rules")
    return run.result(env_id=args.env_id, **{key: result.get(key) for key in reported})


if __name__ == "__main__":
    run_trainer(train, parse_args(Args, __doc__, presets={"plain": PLAIN_PRESET, "levels": LEVELS_PRESET}))
