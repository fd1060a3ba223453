"""PPO for Atari games: details 14–22 of "The 37 Implementation Details of PPO" on top of the core in ppo.py.

    python cleanrl_ppo/ppo_atari.py                                       # BreakoutNoFrameskip-v4
    python cleanrl_ppo/ppo_atari.py --env-id PongNoFrameskip-v4 --cuda
    python cleanrl_ppo/ppo_atari.py --resume                              # continue after a crash

Needs the ``atari`` extra: ale-py, which contains the ROMs, and OpenCV. ``diff cleanrl_ppo/ppo.py
cleanrl_ppo/ppo_atari.py`` shows what Atari adds: six wrappers, a stack of four frames, and a convolutional network that
policy and value function share. Gymnasium's AtariPreprocessing is not used, because it restarts the game after every
lost life. docs/ppo_atari.md explains every metric.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, RecordEpisodeStatistics
from torch import Tensor, nn

from clustergym.training import EpisodeStatistics, Run, World, derive_seed, play_episodes, run_trainer

gym.register_envs(ale_py)
# One thread per process, because OpenCV's thread pool would compete with the other environments.
cv2.setNumThreads(1)


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """Atari id without frame skip and repeated actions: <Game>NoFrameskip-v4."""
    seed: int = 1
    """Seed for all random number generators."""
    total_timesteps: int = 10_000_000
    """Total number of environment steps (four frames each), over all environments and processes."""
    run_dir: Path | None = None
    """Folder for logs and checkpoints. Default: runs/ppo_atari__<env>__<seed>."""
    resume: bool = False
    """Resume from the checkpoint in the run folder. The result is bit-identical to that of an uninterrupted run."""
    checkpoint_interval: int = 200
    """Iterations between checkpoints, 0 for none. Games are reset at each checkpoint (and bootstrapped, as at a time
    limit), so that resuming is exact. Longer games are cut."""
    save_model: bool = False
    """Also save the trained network as model.pt in the run folder."""
    cuda: bool = False
    """Train on the GPU."""
    compile: bool = False
    """Compile the network with torch.compile."""
    track: bool = False
    """Also log to Weights & Biases. Without an account, the run is recorded offline."""
    async_envs: bool = False
    """Run each environment in its own process. Faster if enough cores are free."""
    eval_episodes: int = 8
    """Number of evaluation games after training, with sampled actions, unclipped rewards and all lives. 0 for none."""

    learning_rate: float = 2.5e-4
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 8
    """Number of parallel environments per process."""
    num_steps: int = 128
    """Number of steps per environment between updates."""
    num_minibatches: int = 4
    """Number of minibatches per epoch."""
    update_epochs: int = 4
    """Number of epochs per update."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.1
    """Clip range of the probability ratio and of the value change (the initial value if annealed)."""
    anneal_clip: bool = False
    """Anneal the clip range linearly to 0, as in the original Atari experiments."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""


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


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


class Agent(nn.Module):
    """Convolutional network of Mnih et al. (Nature, 2015) with a policy head and a value head."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor_head = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic_head = layer_init(nn.Linear(512, 1), std=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (logits, values) for uint8 observations of shape (batch, 4, 84, 84)."""
        features = self.network(obs / 255.0)
        return self.actor_head(features), self.critic_head(features).squeeze(-1)

    def get_value(self, obs: Tensor) -> Tensor:
        return self(obs)[1]


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# Environments and rollouts


class NoopReset(gym.Wrapper):
    """Start each game with 1 to ``noop_max`` no-op frames, so that games differ."""

    def __init__(self, env: gym.Env, noop_max: int = 30) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()
        if meanings[0] != "NOOP":
            raise ValueError(f"action 0 is {meanings[0]!r}: expected 'NOOP'")
        self.noop_max = noop_max

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, self.noop_max + 1)):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    """Repeat each action for ``skip`` frames and return the maximum of the last two, because sprites flicker."""

    def __init__(self, env: gym.Env, skip: int = 4) -> None:
        super().__init__(env)
        self.skip = skip

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        frames: deque[np.ndarray] = deque(maxlen=2)
        total = 0.0
        for _ in range(self.skip):
            obs, reward, terminated, truncated, info = self.env.step(action)
            frames.append(obs)
            total += float(reward)
            if terminated or truncated:
                break
        return np.max(frames, axis=0), total, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the episode when a life is lost. The game itself is reset only when it is over or a seed is given."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.lives = 0
        self.game_over = True

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        lives = self.unwrapped.ale.lives()
        # Some games show 0 lives for a few frames before they are over. The episode ends with the game then.
        if 0 < lives < self.lives:
            terminated = True
        self.lives = lives
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.game_over or seed is not None:
            obs, info = self.env.reset(seed=seed, **kwargs)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset(**kwargs)
        self.game_over = False
        self.lives = self.unwrapped.ale.lives()
        return obs, info


class FireReset(gym.Wrapper):
    """Press FIRE at the start of an episode, for games that do not start without it."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()
        if meanings[1] != "FIRE" or len(meanings) < 3:
            raise ValueError(f"actions are {meanings}: expected FIRE as action 1 and at least three actions")

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        for action in (1, 2):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class WarpFrame(gym.ObservationWrapper):
    """Convert frames to grayscale and resize them to 84 × 84 by area averaging."""

    def __init__(self, env: gym.Env, size: int = 84) -> None:
        super().__init__(env)
        self.size = size
        self.observation_space = gym.spaces.Box(0, 255, (size, size), np.uint8)

    def observation(self, frame: np.ndarray) -> np.ndarray:
        gray = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(gray, (self.size, self.size), interpolation=cv2.INTER_AREA)


class ClipReward(gym.RewardWrapper):
    """Replace each reward by its sign, because the scales of games differ."""

    def reward(self, reward: Any) -> float:
        return float(np.sign(reward))


def make_env(env_id: str, training: bool) -> gym.Env:
    """Create one game with all wrappers. Evaluation games have neither EpisodicLife nor ClipReward."""
    env = gym.make(env_id)
    if getattr(env.unwrapped, "_frameskip", None) != 1:
        raise ValueError(f"{env_id} already skips frames, and MaxAndSkip would skip again: use <Game>NoFrameskip-v4")
    env = RecordEpisodeStatistics(env)
    env = NoopReset(env)
    env = MaxAndSkip(env)
    if training:
        env = EpisodicLife(env)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    env = WarpFrame(env)
    if training:
        env = ClipReward(env)
    return FrameStackObservation(env, 4)


def make_envs(env_id: str, num_envs: int, training: bool = True, async_envs: bool = False) -> gym.vector.VectorEnv:
    """Create games that reset in the same step; ``info["final_obs"]`` holds the last observation of an episode."""
    vectorize = gym.vector.AsyncVectorEnv if async_envs else gym.vector.SyncVectorEnv
    return vectorize([partial(make_env, env_id, training)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


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


class Rollouts:
    """Collects experience with the current policy. Episodes continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, device: torch.device) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs: gym.vector.VectorEnv | None = None
        self.episodes = EpisodeStatistics(args.num_envs)

    def restart(self, seed: int) -> None:
        """Create new environments. A resumed run does so at the same iterations and continues identically."""
        self.close()
        self.envs = make_envs(self.args.env_id, self.args.num_envs, async_envs=self.args.async_envs)
        self.next_obs, _ = self.envs.reset(seed=seed)

    def close(self) -> None:
        if self.envs is not None:
            self.envs.close()
            self.envs = None

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """Play num_steps steps in each environment. Returns the training data and the charts of finished games."""
        args, agent, device, envs = self.args, self.agent, self.device, self.envs
        assert envs is not None, "call restart() first"
        shape = (args.num_steps, args.num_envs)
        obs = torch.zeros((*shape, 4, 84, 84), dtype=torch.uint8, device=device)
        actions = torch.zeros(shape, dtype=torch.int64, device=device)
        logprobs, values, final_values = (torch.zeros(shape, device=device) for _ in range(3))
        rewards = torch.zeros(shape)
        terminations, truncations = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))

        with torch.no_grad():
            for step in range(args.num_steps):
                obs[step] = torch.from_numpy(self.next_obs)
                logits, values[step] = agent(obs[step])
                all_logprobs = logits.log_softmax(-1)
                actions[step] = torch.multinomial(all_logprobs.exp(), 1).squeeze(-1)
                logprobs[step] = all_logprobs.gather(-1, actions[step][:, None]).squeeze(-1)
                self.next_obs, reward, terminated, truncated, infos = envs.step(actions[step].cpu().numpy())
                rewards[step] = torch.from_numpy(reward)
                terminations[step] = torch.from_numpy(terminated)
                truncations[step] = torch.from_numpy(truncated)
                if truncated.any():
                    cut = np.flatnonzero(truncated)
                    final_obs = torch.from_numpy(np.stack([np.asarray(infos["final_obs"][env]) for env in cut]))
                    final_values[step, cut] = agent.get_value(final_obs.to(device))
                if "episode" in infos.get("final_info", {}):
                    # Set only at the end of a game, not when a life is lost.
                    games, ended = infos["final_info"]["episode"], infos["final_info"]["_episode"]
                    self.episodes.add(games["r"][ended].tolist(), games["l"][ended].tolist())
            next_value = agent.get_value(torch.from_numpy(self.next_obs).to(device))
            rewards, terminations, truncations = rewards.to(device), terminations.to(device), truncations.to(device)
            dones = terminations | truncations
            steps = (rewards, values, terminations, dones, next_value, final_values)
            advantages, returns = compute_gae(*steps, args.gamma, args.gae_lambda)
        batch = Batch(*(each.flatten(0, 1) for each in (obs, actions, logprobs, advantages, returns, values)))
        return batch, self.episodes.charts()


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, clip_coef: float, world: World
) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric."""
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch), device=batch.obs.device)
        bounds = np.linspace(0, len(batch), args.num_minibatches + 1).astype(int)
        for start, end in pairwise(bounds):
            mb = batch.take(order[start:end])
            logits, new_values = agent(mb.obs)
            all_logprobs = logits.log_softmax(-1)
            logprobs = all_logprobs.gather(-1, mb.actions[:, None]).squeeze(-1)
            logratio = logprobs - mb.logprobs
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
            pg_loss = policy_loss(ratio, advantages, clip_coef)
            v_loss = value_loss(new_values, mb.values, mb.returns, clip_coef if args.clip_vloss else None)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1).mean()
            approx_kl = k3.mean()
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            world.average_gradients(agent.parameters())
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                clipfrac = ((ratio - 1.0).abs() > clip_coef).float().mean()
                seen.append(torch.stack([pg_loss, v_loss, entropy, k1.mean(), approx_kl, clipfrac, grad_norm]))
        if args.target_kl is not None and world.mean(float(approx_kl)) > args.target_kl:
            break
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    means = torch.stack(seen).mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
    metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
    metrics["charts/updates"] = float(len(seen))
    return metrics


def evaluate(agent: Agent, args: Args, device: torch.device) -> list[float]:
    """Scores of the evaluation games, played with sampled actions and all lives."""
    envs = make_envs(args.env_id, args.eval_episodes, training=False)

    def act(obs: Any, infos: dict[str, Any]) -> np.ndarray:
        logits, _ = agent(torch.from_numpy(obs).to(device))
        return torch.multinomial(logits.softmax(-1), 1).squeeze(-1).cpu().numpy()

    # Training derives its seeds from (seed, iteration, rank), so this key gives unseen ones.
    seed = derive_seed(args.seed, 0, 0, 1)
    torch.manual_seed(seed)
    with torch.inference_mode():
        return play_episodes(envs, act, seed)


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    device = world.device
    run = Run("ppo_atari", args, world, args.env_id, args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    probe = make_env(args.env_id, training=True)
    num_actions = int(probe.action_space.n)
    probe.close()
    agent = Agent(num_actions).to(device)
    optimizer = make_optimizer(agent, args.learning_rate)
    rollouts = Rollouts(args, agent, device)
    if state := run.load_checkpoint():
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        rollouts.episodes.last_100_returns.extend(state["returns_100"])
    world.broadcast(agent)
    if args.compile:
        agent.compile()

    with run:
        for iteration in run.iterations():
            if (iteration - 1) % (args.checkpoint_interval or run.num_iterations) == 0:
                # A resumed run also starts here, with the same network, and then draws the same random numbers.
                seed = derive_seed(args.seed, iteration, world.rank)
                torch.manual_seed(seed)
                rollouts.restart(seed)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, run.num_iterations)
            clip_coef = anneal(args.clip_coef, iteration, run.num_iterations) if args.anneal_clip else args.clip_coef

            batch, metrics = rollouts.collect()
            metrics |= update(agent, optimizer, batch, args, clip_coef, world)

            metrics |= {
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/clip_coef": clip_coef,
            }
            run.log(metrics, iteration, mean_return=metrics["charts/mean_return_100"])
            if run.checkpoint_due(iteration):
                run.save_checkpoint(
                    iteration,
                    agent=agent.state_dict(),
                    optimizer=optimizer.state_dict(),
                    returns_100=list(rollouts.episodes.last_100_returns),
                )
        rollouts.close()
        if not world.is_main:
            return {}
        run.save_model(agent=agent.state_dict())
        evaluation = run.log_returns(evaluate(agent, args, device) if args.eval_episodes else [])
    return run.result(env_id=args.env_id, train_return_100=rollouts.episodes.mean_return_100, **evaluation)


if __name__ == "__main__":
    run_trainer(train, tyro.cli(Args, description=__doc__))
