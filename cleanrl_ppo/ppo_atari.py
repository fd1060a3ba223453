"""PPO for Atari games: details 14–22 of "The 37 Implementation Details of PPO" on top of the core in ppo.py.

    python cleanrl_ppo/ppo_atari.py                                       # BreakoutNoFrameskip-v4
    python cleanrl_ppo/ppo_atari.py --env-id PongNoFrameskip-v4 --cuda
    python cleanrl_ppo/ppo_atari.py --resume                              # continue after a crash

Needs the ``atari`` extra: ale-py, which contains the ROMs, and OpenCV. ``diff cleanrl_ppo/ppo.py
cleanrl_ppo/ppo_atari.py`` shows what Atari adds: six wrappers, a stack of four frames, and a convolutional network that
policy and value function share. Gymnasium's AtariPreprocessing is not used, because it restarts the game after every
lost life. docs/reference/ppo_atari.md explains every metric.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, RecordEpisodeStatistics
from torch import Tensor, nn

from clustergym.training import Run, TrainArgs, World, derive_seed, parse_args, run_trainer, vector
from clustergym.training.vector import EpisodeStatistics, VectorEnvs

gym.register_envs(ale_py)
# One thread per process, because OpenCV's thread pool would compete with the other environments.
cv2.setNumThreads(1)

# Replaces the logits of invalid actions. Their probability becomes exactly 0, without the NaN that 0 · −inf gives.
MASKED_LOGIT = -1e8


@dataclass
class Args(TrainArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """Atari id without frame skip and repeated actions: <Game>NoFrameskip-v4."""
    total_timesteps: int = 10_000_000
    """Total number of environment steps (four frames each). Rounded up to whole iterations."""
    checkpoint_interval: int = 200
    """Iterations between checkpoints, 0 for none. Environments are reset there, so that resuming is exact."""
    async_envs: bool = False
    """Run each environment in its own process. Faster if enough cores are free."""
    eval_episodes: int = 8
    """Number of games in an evaluation, with sampled actions, unclipped rewards and all lives. 0 for no evaluation."""

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
    returns: Literal["gae", "td"] = "gae"
    """Target of the value function: gae is advantage + value, td is the one-step target r + γ·V(s')."""
    bootstrap_truncated: bool = True
    """Bootstrap from the value of the last observation when an episode is truncated. Otherwise treat it as terminal."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    use_clipping: bool = True
    """Use the clipped surrogate loss. Without it, limit the policy change with kl_coef."""
    clip_coef: float = 0.1
    """Clip range of the probability ratio and of the value change."""
    anneal_clip: bool = False
    """Anneal the clip range linearly to 0."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.01
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
        self.components = [num_actions]
        self.actor_head = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic_head = layer_init(nn.Linear(512, 1), std=1.0)

    def get_logits(self, obs: Tensor) -> Tensor:
        return self(obs)[0]

    def get_value(self, obs: Tensor) -> Tensor:
        return self(obs)[1]

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (logits, values) for uint8 observations of shape (batch, 4, 84, 84)."""
        features = self.network(obs / 255.0)
        return self.actor_head(features), self.critic_head(features).squeeze(-1)

    def draw_noise(self, *shape: int) -> Tensor:
        """Gumbel noise for :meth:`act`, one number for each action."""
        noise = torch.empty(*shape, self.actor_head.out_features, device=self.actor_head.weight.device)
        return -noise.exponential_().log()

    def act(self, obs: Tensor, masks: Tensor | None, noise: Tensor | float) -> Tensor:
        """Sample actions (Gumbel-max trick: the argmax of logits plus Gumbel noise). Noise 0 gives the best actions."""
        scores = mask_logits(self.get_logits(obs), masks) + noise
        return torch.stack([part.argmax(-1) for part in scores.split(self.components, -1)], -1).squeeze(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-probabilities of the actions, entropies, values). Components of an action are independent."""
        logits, values = self(obs)
        logprobs, entropies = torch.zeros_like(values), torch.zeros_like(values)
        parts = mask_logits(logits, masks).split(self.components, -1)
        for part, chosen in zip(parts, actions.view(len(obs), -1).unbind(-1), strict=True):
            all_logprobs = part.log_softmax(-1)
            logprobs = logprobs + all_logprobs.gather(-1, chosen[:, None]).squeeze(-1)
            entropies = entropies + categorical_entropy(all_logprobs)
        return logprobs, entropies, values


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


def make_env(env_id: str, training: bool = True, videos: Path | None = None) -> gym.Env:
    """Create one game with all wrappers. Evaluation games have neither EpisodicLife nor ClipReward."""
    env = gym.make(env_id, render_mode=None if videos is None else "rgb_array")
    if getattr(env.unwrapped, "_frameskip", None) != 1:
        raise ValueError(f"{env_id} already skips frames, and MaxAndSkip would skip again: use <Game>NoFrameskip-v4")
    if videos is not None:
        env = vector.record_video(env, videos)
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


def make_envs(
    env_id: str, num_envs: int, videos: Path | None = None, training: bool = True, async_envs: bool = False
) -> gym.vector.VectorEnv:
    """Create the environments. With ``videos``, their first episodes are recorded to that folder."""
    vectorize = gym.vector.AsyncVectorEnv if async_envs else gym.vector.SyncVectorEnv
    return vectorize([partial(make_env, env_id, training, videos)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


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

    def __init__(self, args: Args, agent: Agent, device: torch.device) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs: VectorEnvs | None = None
        self.episodes = EpisodeStatistics(args.num_envs)

    def restart(self, seed: int) -> None:
        """Create new environments. A resumed run does so at the same iterations and continues identically."""
        self.close()
        envs = make_envs(self.args.env_id, self.args.num_envs, async_envs=self.args.async_envs)
        # Pixels keep their shape. The charts show whole games and unclipped rewards, as RecordEpisodeStatistics does.
        self.envs = VectorEnvs(envs, seed, self.device, self.episodes, flat=False, recorded=True)

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


def evaluate(agent: Agent, args: Args, device: torch.device, videos: Path | None = None) -> list[float]:
    """Scores of the evaluation games, played with sampled actions. With ``videos``, another one is recorded."""
    # Training derives its seeds from (seed, iteration, rank), so this key gives unseen ones.
    seed = derive_seed(args.seed, 0, 0, 1)

    def play(num_envs: int, videos: Path | None) -> list[float]:
        envs = VectorEnvs(make_envs(args.env_id, num_envs, videos, training=False), seed, device, flat=False)
        return vector.play_episodes(envs, lambda obs, masks: agent.act(obs, masks, agent.draw_noise(num_envs)))

    # The random numbers of training stay as they are.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return vector.play_and_record(play, args.eval_episodes, videos)


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    device = world.device
    run = Run("ppo_atari", args, world, args.env_id, args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    agent = Agent(vector.space_sizes(make_envs(args.env_id, 1))[1]).to(device)
    optimizer = make_optimizer(agent, args.learning_rate)
    rollouts = Rollouts(args, agent, device)
    saved = {"agent": agent, "optimizer": optimizer, "returns_100": rollouts.episodes}
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
                metrics |= run.mean_return(evaluate(agent, args, device, run.video_folder(iteration)))
            run.log(metrics, iteration, mean_return=metrics["charts/mean_return_100"])
            run.checkpoint(iteration, **saved, kl_coef=kl_coef)
        rollouts.close()
        if not world.is_main:
            return {}
        run.save_model(agent=agent)
        evaluation = run.log_returns(evaluate(agent, args, device, run.video_folder()))
    return run.result(env_id=args.env_id, train_return_100=rollouts.episodes.mean_return_100, **evaluation)


if __name__ == "__main__":
    run_trainer(train, parse_args(Args, __doc__))
