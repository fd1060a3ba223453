"""PPO with an LSTM for GPU allocation without history features: details 32–36 on top of 1–13 and 23–31.

    python cleanrl_ppo/ppo_lstm.py                                        # GPUAllocation-v0
    python cleanrl_ppo/ppo_lstm.py --total-timesteps 1000000
    python cleanrl_ppo/ppo_lstm.py --resume                               # continue after a crash

The five features of GPUAllocation-v0 do not show how much the owners of pods over-request. The utilisation that earlier
decisions led to does, so a network with memory can learn it. ``diff cleanrl_ppo/ppo_gpu_alloc.py
cleanrl_ppo/ppo_lstm.py`` shows the recurrent network, its state in rollouts and updates, and minibatches of whole
sequences. docs/reference/ppo_lstm.md explains every metric.
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
    env_id: str = "GPUAllocation-v0"
    """GPUAllocation-v0 or GPUAllocationHistory-v0."""
    workload: Path | None = None
    """CSV file in the openb format with the requests and durations of pods. Default: synthetic pods."""
    reward: Literal["room", "seed"] = "room"
    """room: with a penalty for the waiting time of the next pod. seed: without it."""
    total_timesteps: int = 2_000_000
    """Total number of environment steps, over all environments and processes. Rounded up to whole iterations."""
    eval_streams: int = 256
    """Number of held-out streams (one episode each) in an evaluation. 0 for no evaluation."""

    learning_rate: float = 2e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 32
    """Number of parallel environments per process."""
    num_steps: int = 128
    """Number of steps per environment between updates. The LSTM learns dependencies up to this length."""
    num_minibatches: int = 4
    """Number of minibatches per epoch. Each one holds whole sequences, so it must divide num_envs."""
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
    """Coefficient of the entropy bonus (the initial value if annealed)."""
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
    """Width of the encoder and of the LSTM state."""
    action_scale: float = 0.2
    """Initial standard deviation of an action, whose range is 1."""
    norm_obs: bool = True
    """Normalise observations by their running mean and variance and clip to ±10."""
    norm_reward: bool = True
    """Divide rewards by the standard deviation of the discounted return and clip to ±10."""


NORM_CLIP = 10.0


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


# ALGO LOGIC: continuous actions


def gaussian_logprob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of independent normal components, summed over the last dimension."""
    deviations = (actions - mean) / std
    return (-0.5 * deviations**2 - (std.log() + 0.5 * np.log(2 * np.pi))).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of independent normal components, summed over the last dimension."""
    return (0.5 + 0.5 * np.log(2 * np.pi) + std.log()).sum(-1)


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


def init_lstm(lstm: nn.LSTM) -> nn.LSTM:
    """Initialise with orthogonal weights of gain 1 and zero biases."""
    for name, parameter in lstm.named_parameters():
        if "bias" in name:
            nn.init.constant_(parameter, 0.0)
        else:
            nn.init.orthogonal_(parameter, 1.0)
    return lstm


LSTMState = tuple[Tensor, Tensor]
"""Hidden and cell state, each of shape (1, envs, hidden)."""


class Agent(nn.Module):
    """Encoder and LSTM, shared by a Gaussian policy with a sigmoid mean and a value function."""

    def __init__(self, obs_size: int, num_actions: int = 2, hidden: int = 64, action_scale: float = 0.2) -> None:
        super().__init__()
        self.encoder = nn.Sequential(layer_init(nn.Linear(obs_size, hidden)), nn.ReLU())
        self.lstm = init_lstm(nn.LSTM(hidden, hidden))
        self.actor = nn.Sequential(layer_init(nn.Linear(hidden, num_actions), std=0.01), nn.Sigmoid())
        self.critic = layer_init(nn.Linear(hidden, 1), std=1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.action_scale = action_scale

    def std(self) -> Tensor:
        """Standard deviation of each action, the same in every state."""
        return self.action_scale * self.log_std.exp()

    def initial_state(self, num_envs: int) -> LSTMState:
        """State at the start of an episode: zeros."""
        zeros = torch.zeros(1, num_envs, self.lstm.hidden_size, device=self.log_std.device)
        return zeros, zeros.clone()

    def remember(self, obs: Tensor, starts: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Run the LSTM over sequences. Returns features (steps, envs, hidden) and the state after the last step.

        ``starts`` (steps, envs), on the CPU, marks the first step of each episode; the state is reset there. The steps
        between two resets run through the LSTM in one call.
        """
        encoded = self.encoder(obs)
        cuts = [0, *(t for t in range(1, len(obs)) if bool(starts[t].any())), len(obs)]
        parts = []
        for begin, end in pairwise(cuts):
            keep = (~starts[begin]).to(encoded.device)[None, :, None]
            features, state = self.lstm(encoded[begin:end], (state[0] * keep, state[1] * keep))
            parts.append(features)
        return torch.cat(parts), state

    def forward(self, obs: Tensor, starts: Tensor, state: LSTMState) -> tuple[Tensor, Tensor, LSTMState]:
        """Returns (means of the actions, values, state after the last step); see :meth:`remember`."""
        features, state = self.remember(obs, starts, state)
        return self.actor(features), self.critic(features).squeeze(-1), state


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
    """Training data of one update: sequences of shape (steps, envs, …), and the LSTM state at their start.

    ``starts`` is on the CPU, because it decides where sequences are cut. The other tensors are on the device.
    """

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    starts: Tensor
    state: LSTMState

    def take(self, envs: Tensor) -> Batch:
        """The whole sequences of some environments. ``envs`` is on the CPU."""
        *columns, (hidden, cell) = vars(self).values()
        return Batch(*(column[:, envs] for column in columns), (hidden[:, envs], cell[:, envs]))


def episode_charts(finished: list[Tensor]) -> dict[str, float]:
    """Charts of the finished episodes, from their sums over all steps (episodes, SUM_* columns)."""
    return {f"charts/{key}": value for key, value in episode_means(torch.cat(finished)).items()} if finished else {}


class Rollouts:
    """Collects experience with the current policy. Episodes and LSTM states continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, device: torch.device, seed: int, world: World | None = None) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs = make_envs(args, args.num_envs)
        self.envs.seed(seed + np.arange(args.num_envs))
        self.envs.reset()
        self.statistics = RunningMeanStd((self.envs.n_features,), world)
        self.scaler = RewardScaler(args.num_envs, args.gamma, world)
        self.state = agent.initial_state(args.num_envs)
        self.start = torch.ones(args.num_envs, dtype=torch.bool)
        if args.norm_obs:
            self.statistics.update(self.envs.obs)

    def state_dict(self) -> dict[str, Any]:
        return {
            "envs": self.envs.state_dict(),
            "statistics": self.statistics.state_dict(),
            "scaler": self.scaler.state_dict(),
            "lstm": list(self.state),
            "start": self.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.load_state_dict(state["envs"])
        self.statistics.load_state_dict(state["statistics"])
        self.scaler.load_state_dict(state["scaler"])
        self.state = (state["lstm"][0].to(self.device), state["lstm"][1].to(self.device))
        self.start = state["start"]

    def normalize(self, obs: Tensor) -> Tensor:
        return normalize_obs(obs, self.statistics) if self.args.norm_obs else obs.clone()

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """Play num_steps steps in each environment. Returns the training data and the charts of finished episodes."""
        args, agent, device, envs = self.args, self.agent, self.device, self.envs
        shape = (args.num_steps, args.num_envs)
        obs = torch.zeros(*shape, envs.n_features)
        actions = torch.zeros(*shape, 2)
        rewards, logprobs, values, final_values = (torch.zeros(shape) for _ in range(4))
        dones, starts = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        finished: list[Tensor] = []
        raw_reward = 0.0

        initial = (self.state[0].clone(), self.state[1].clone())
        noise = torch.randn(*shape, 2)
        with torch.no_grad():
            std = agent.std().cpu()
            for step in range(args.num_steps):
                obs[step], starts[step] = self.normalize(envs.obs), self.start
                means, value, self.state = agent(obs[step : step + 1].to(device), self.start[None], self.state)
                mean, values[step] = means[0].cpu(), value[0].cpu()
                actions[step] = mean + std * noise[step]
                logprobs[step] = gaussian_logprob(actions[step], mean, std)
                next_obs, reward, ended = envs.step(clip_action(actions[step]))
                if args.norm_obs:
                    self.statistics.update(next_obs)
                raw_reward += float(reward.sum())
                rewards[step] = self.scaler(reward, ended) if args.norm_reward else reward
                dones[step] = ended
                self.start = ended.clone()
                if ended.any():
                    final_values[step] = self._value(envs.last_obs, torch.zeros_like(ended))
                    finished.append(envs.final_sums[ended.nonzero().squeeze(-1)].clone())
            next_value = self._value(envs.obs, self.start)
            # Episodes only end because of their length, so all ends are truncations.
            ends = torch.zeros_like(dones) if args.bootstrap_truncated else dones
            steps = (rewards, values, ends, dones, next_value, final_values)
            advantages, returns = compute_gae(*steps, args.gamma, args.gae_lambda)
        parts = (each.to(device) for each in (obs, actions, logprobs, advantages, returns, values))
        batch = Batch(*parts, starts, initial)
        return batch, {"charts/reward": raw_reward / rewards.numel()} | episode_charts(finished)

    def _value(self, obs: Tensor, start: Tensor) -> Tensor:
        """Values (envs,) of the next observations. Does not change the LSTM state."""
        _, values, _ = self.agent(self.normalize(obs)[None].to(self.device), start[None], self.state)
        return values[0].cpu()


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, clip_coef: float, ent_coef: float, world: World
) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric.

    A minibatch holds the whole sequences of some environments. The LSTM runs over them from the state at the start of
    the rollout, so the states in training are those of the current network.
    """
    parameters = list(agent.parameters())
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        for envs in torch.randperm(args.num_envs).chunk(args.num_minibatches):
            mb = batch.take(envs)
            means, new_values, _ = agent(mb.obs, mb.starts, mb.state)
            std = agent.std()
            logprobs = gaussian_logprob(mb.actions, means, std)
            logratio = logprobs - mb.logprobs
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
            pg_loss = policy_loss(ratio, advantages, clip_coef)
            v_loss = value_loss(new_values, mb.values, mb.returns, clip_coef if args.clip_vloss else None)
            entropy = gaussian_entropy(std)
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
    """Play the mean action on held-out streams, with the current statistics. With ``videos``, record an episode."""
    envs = make_envs(args, args.eval_streams)

    def policy(num_envs: int) -> Callable[[Tensor], Tensor]:
        state, start = agent.initial_state(num_envs), torch.ones(1, num_envs, dtype=torch.bool)

        def act(obs: Tensor) -> Tensor:
            nonlocal state, start
            means, _, state = agent(rollouts.normalize(obs)[None].to(device), start, state)
            start = torch.zeros_like(start)
            return clip_action(means[0].cpu())

        return act

    with torch.inference_mode():
        if videos is not None:
            film(args, policy(1), videos)
        act = policy(args.eval_streams)
        return play(envs, lambda: act(envs.obs))


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    if args.num_envs % args.num_minibatches:
        raise ValueError(
            f"num_envs is {args.num_envs} and num_minibatches is {args.num_minibatches}: num_envs must be a multiple, "
            "because each minibatch holds whole sequences"
        )
    device = world.device
    run = Run("ppo_lstm", args, world, args.env_id, args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    agent = Agent(make_envs(args, 1).n_features, 2, args.hidden, args.action_scale).to(device)
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
    run_trainer(train, parse_args(Args, __doc__))
