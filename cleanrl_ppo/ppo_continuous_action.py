"""PPO for continuous actions: details 23–31 of "The 37 Implementation Details of PPO" on top of the core in ppo.py.

    python cleanrl_ppo/ppo_continuous_action.py                                       # Pendulum-v1
    python cleanrl_ppo/ppo_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000
    python cleanrl_ppo/ppo_continuous_action.py --resume                              # continue after a crash
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_continuous_action.py                  # two processes

Works with any Gymnasium environment with a Box action space. ``diff cleanrl_ppo/ppo.py
cleanrl_ppo/ppo_continuous_action.py`` shows what continuous actions add: a normal distribution, and environments that
clip actions, normalise observations and scale rewards. docs/reference/ppo_continuous_action.md explains every metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

# Importing clustergym registers its environments, so --env-id can name them.
from clustergym.training import Run, TrainArgs, World, derive_seed, parse_args, run_trainer, vector
from clustergym.training.vector import EpisodeStatistics, Step, VectorEnvs

NORM_CLIP = 10.0


@dataclass
class Args(TrainArgs):
    env_id: str = "Pendulum-v1"
    """Gymnasium id of an environment with a Box action space. "module:Id-v0" imports the module first."""
    eval_episodes: int = 32
    """Number of episodes in an evaluation, with greedy actions and unseen seeds. 0 for no evaluation."""

    learning_rate: float = 1e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 16
    """Number of parallel environments per process."""
    num_steps: int = 128
    """Number of steps per environment between updates."""
    num_minibatches: int = 16
    """Number of minibatches per epoch."""
    update_epochs: int = 10
    """Number of epochs per update."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    returns: Literal["gae", "td"] = "gae"
    """Target of the value function: gae is advantage + value, td is the one-step target r + γ·V(s')."""
    bootstrap_truncated: bool = True
    """Bootstrap from the value of the last observation when an episode is truncated. Otherwise treat it as terminal."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    use_clipping: bool = True
    """Use the clipped surrogate loss. Without it, limit the policy change with kl_coef."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    anneal_clip: bool = False
    """Anneal the clip range linearly to 0."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    kl_coef: float = 0.0
    """Coefficient of the penalty on KL(old policy ‖ new policy), estimated by k3."""
    kl_target: float | None = None
    """Adapt kl_coef: double it if an iteration's KL exceeds 1.5 × kl_target, halve it below kl_target / 1.5. It starts
    at 1 if kl_coef is 0."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    hidden: int = 64
    """Width of the two hidden layers."""
    norm_obs: bool = True
    """Normalise observations by their running mean and variance and clip to ±10."""
    norm_reward: bool = True
    """Divide rewards by the standard deviation of the discounted return and clip to ±10."""


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


class Agent(nn.Module):
    """Gaussian policy with a standard deviation that does not depend on the state, and a separate value function."""

    def __init__(self, obs_size: int, num_actions: int, hidden: int = 64) -> None:
        super().__init__()

        def trunk() -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)), nn.Tanh(), layer_init(nn.Linear(hidden, hidden)), nn.Tanh()
            )

        self.actor_trunk = trunk()
        self.critic_trunk = trunk()
        self.actor_head = layer_init(nn.Linear(hidden, num_actions), std=0.01)
        self.critic_head = layer_init(nn.Linear(hidden, 1), std=1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions))

    def get_mean(self, obs: Tensor) -> Tensor:
        return self.actor_head(self.actor_trunk(obs))

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic_head(self.critic_trunk(obs)).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (means of the actions, values)."""
        return self.get_mean(obs), self.get_value(obs)

    def draw_noise(self, *shape: int) -> Tensor:
        """Normal noise for :meth:`act` with the standard deviation of the policy, one number for each component."""
        return torch.randn(*shape, len(self.log_std), device=self.log_std.device) * self.log_std.exp()

    def act(self, obs: Tensor, masks: Tensor | None, noise: Tensor | float) -> Tensor:
        """Sample actions. Noise 0 gives the mean actions. Continuous actions have no masks."""
        return self.get_mean(obs) + noise

    def evaluate_actions(self, obs: Tensor, actions: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-probabilities of the actions, their entropy, which is the same in every state, values)."""
        means, values = self(obs)
        std = self.log_std.exp()
        return gaussian_logprob(actions, means, std), gaussian_entropy(std), values


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# Environments and rollouts


def make_envs(env_id: str, num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Create the environments. With ``videos``, their first episodes are recorded to that folder."""
    return vector.make_vector_env(env_id, num_envs, "continuous", videos)


class NormalizedEnvs:
    """Environments that clip actions, normalise observations and scale rewards. The statistics outlive them."""

    def __init__(
        self, args: Args, envs: VectorEnvs, statistics: RunningMeanStd, scaler: RewardScaler | None = None
    ) -> None:
        space = envs.envs.single_action_space
        self.low, self.high, self.action_shape = torch.tensor(space.low), torch.tensor(space.high), space.shape
        self.args, self.envs, self.statistics, self.scaler = args, envs, statistics, scaler
        self.num_envs, self.masks = envs.num_envs, None
        self.observe()

    def observe(self) -> None:
        if self.args.norm_obs and self.scaler is not None:
            self.statistics.update(self.envs.obs.cpu())
        self.obs = self.normalize(self.envs.obs)

    def normalize(self, obs: Tensor) -> Tensor:
        return normalize_obs(obs.cpu(), self.statistics).to(obs.device) if self.args.norm_obs else obs

    def step(self, actions: Tensor) -> Step:
        """Play clipped actions. The trainer keeps the raw ones, because the log-probability belongs to them."""
        raw = actions.cpu().view(-1, *self.action_shape)
        step = self.envs.step(raw.clamp(self.low, self.high))
        self.observe()
        cut, last_obs = step.final_obs
        if len(cut):
            step = step._replace(final_obs=(cut, self.normalize(last_obs)))
        if self.args.norm_reward and self.scaler is not None:
            step = step._replace(rewards=self.scaler(step.rewards, step.terminated | step.truncated))
        return step

    def close(self) -> None:
        self.envs.close()


@dataclass
class Batch:
    """Training data of one update, one row per transition."""

    obs: Tensor
    actions: Tensor
    masks: Tensor | None
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.actions)

    def take(self, rows: Tensor | slice) -> Batch:
        return Batch(*(None if column is None else column[rows] for column in vars(self).values()))


class Rollouts:
    """Collects experience with the current policy. Episodes continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, device: torch.device, world: World | None = None) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs: NormalizedEnvs | None = None
        self.episodes = EpisodeStatistics(args.num_envs)
        self.statistics = RunningMeanStd((agent.actor_trunk[0].in_features,), world)
        self.scaler = RewardScaler(args.num_envs, args.gamma, world)

    def restart(self, seed: int) -> None:
        """Create new environments. A resumed run does so at the same iterations and continues identically."""
        self.close()
        envs = VectorEnvs(make_envs(self.args.env_id, self.args.num_envs), seed, self.device, self.episodes)
        self.scaler.returns = np.zeros_like(self.scaler.returns)
        self.envs = NormalizedEnvs(self.args, envs, self.statistics, self.scaler)

    def close(self) -> None:
        if self.envs is not None:
            self.envs.close()

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """Play num_steps steps in each environment. Returns the training data and the charts of finished episodes."""
        args, agent, device, envs = self.args, self.agent, self.device, self.envs
        assert envs is not None, "call restart() first"
        shape = (args.num_steps, args.num_envs)
        seen, steps = [], []
        with torch.inference_mode():
            for noise in agent.draw_noise(*shape).unbind():
                obs, masks = envs.obs, envs.masks
                actions = agent.act(obs, masks, noise)
                seen.append((obs, actions, masks))
                steps.append(envs.step(actions))

        with torch.no_grad():
            obs, actions, masks = (None if each[0] is None else torch.cat(each) for each in zip(*seen, strict=True))
            *columns, final_obs = zip(*steps, strict=True)
            rewards, terminations, truncations, valid = (torch.stack(each).to(device) for each in columns)
            # In one pass: the environments only needed the actions.
            logprobs, _, flat_values = agent.evaluate_actions(obs, actions, masks)
            values = flat_values.view(shape)
            next_value = agent.get_value(envs.obs)
            final_values = torch.zeros_like(values)
            for t, (cut, last_obs) in enumerate(final_obs):
                if len(cut):
                    final_values[t, cut] = agent.get_value(last_obs)
            dones = terminations | truncations
            ends = terminations if args.bootstrap_truncated else dones
            inputs = (rewards, values, ends, dones, next_value, final_values)
            advantages, returns = compute_gae(*inputs, args.gamma, args.gae_lambda)
            if args.returns == "td":
                # With λ = 0, the return of GAE is the one-step target.
                _, returns = compute_gae(*inputs, args.gamma, 0.0)
        batch = Batch(obs, actions, masks, logprobs, advantages.flatten(), returns.flatten(), values.flatten())
        # Steps that only reset an environment are left out.
        return batch if bool(valid.all()) else batch.take(valid.flatten()), self.episodes.charts()


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, clip_coef: float, kl_coef: float, world: World
) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric."""
    parameters = list(agent.parameters())
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        shuffled = batch.take(torch.randperm(len(batch), device=batch.obs.device))
        bounds = np.linspace(0, len(batch), args.num_minibatches + 1).astype(int)
        for start, end in pairwise(bounds):
            mb = shuffled.take(slice(start, end))
            logprobs, entropies, new_values = agent.evaluate_actions(mb.obs, mb.actions, mb.masks)
            logratio = logprobs - mb.logprobs
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
            pg_loss = policy_loss(ratio, advantages, clip_coef if args.use_clipping else float("inf"))
            v_loss = value_loss(new_values, mb.values, mb.returns, clip_coef if args.clip_vloss else None)
            entropy = entropies.mean()
            approx_kl = k3.mean()
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
            if kl_coef:
                loss = loss + kl_coef * approx_kl

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
    means = torch.stack(seen).mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
    metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
    metrics["charts/updates"] = float(len(seen))
    return metrics


def evaluate(
    agent: Agent, args: Args, statistics: RunningMeanStd, device: torch.device, videos: Path | None = None
) -> list[float]:
    """Returns of the evaluation episodes, played with mean actions. With ``videos``, another one is recorded."""
    # Training derives its seeds from (seed, iteration, rank), so this key gives unseen ones.
    seed = derive_seed(args.seed, 0, 0, 1)

    def play(num_envs: int, videos: Path | None) -> list[float]:
        envs = NormalizedEnvs(args, VectorEnvs(make_envs(args.env_id, num_envs, videos), seed, device), statistics)
        return vector.play_episodes(envs, lambda obs, masks: agent.act(obs, masks, noise=0.0))

    return vector.play_and_record(play, args.eval_episodes, videos)


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    device = world.device
    run = Run("ppo_continuous_action", args, world, args.env_id, args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    agent = Agent(*vector.space_sizes(make_envs(args.env_id, 1)), args.hidden).to(device)
    optimizer = make_optimizer(agent, args.learning_rate)
    rollouts = Rollouts(args, agent, device, world)
    saved = {"agent": agent, "optimizer": optimizer, "returns_100": rollouts.episodes}
    saved |= {"statistics": rollouts.statistics, "scaler": rollouts.scaler}
    state = run.load_checkpoint(**saved)
    kl_coef = state["kl_coef"] if state else args.kl_coef or (0.0 if args.kl_target is None else 1.0)
    world.broadcast(agent)
    if args.compile:
        agent.compile()

    with run:
        for iteration in run.iterations():
            if run.restart_due(iteration):
                # A resumed run also starts here, with the same network, and then draws the same random numbers.
                rollouts.restart(run.seed_torch(iteration))
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, run.num_iterations)
            clip_coef = anneal(args.clip_coef, iteration, run.num_iterations) if args.anneal_clip else args.clip_coef

            batch, metrics = rollouts.collect()
            metrics |= update(agent, optimizer, batch, args, clip_coef, kl_coef, world)

            learning_rate = optimizer.param_groups[0]["lr"]
            metrics |= {"charts/learning_rate": learning_rate, "charts/clip_coef": clip_coef, "charts/kl_coef": kl_coef}
            if args.kl_target is not None:
                kl = world.mean(metrics["losses/approx_kl"])
                kl_coef *= 2.0 if kl > 1.5 * args.kl_target else 0.5 if kl < args.kl_target / 1.5 else 1.0
            if run.evaluation_due(iteration):
                videos = run.video_folder(iteration)
                metrics |= run.mean_return(evaluate(agent, args, rollouts.statistics, device, videos))
            run.log(metrics, iteration, mean_return=metrics["charts/mean_return_100"])
            run.checkpoint(iteration, **saved, kl_coef=kl_coef)
        rollouts.close()
        if not world.is_main:
            return {}
        run.save_model(agent=agent, statistics=rollouts.statistics)
        evaluation = run.log_returns(evaluate(agent, args, rollouts.statistics, device, run.video_folder()))
    return run.result(env_id=args.env_id, train_return_100=rollouts.episodes.mean_return_100, **evaluation)


if __name__ == "__main__":
    run_trainer(train, parse_args(Args, __doc__))
