"""PPO for Atari games: details 14–22 of "The 37 Implementation Details of PPO", and 1–12 as in ppo.py.

    python cleanrl_ppo/ppo_atari.py                                       # BreakoutNoFrameskip-v4
    python cleanrl_ppo/ppo_atari.py --env-id PongNoFrameskip-v4 --cuda
    python cleanrl_ppo/ppo_atari.py --resume                              # continue after a crash, with new games

Needs the ``atari`` extra: ale-py, which contains the ROMs, and OpenCV. ``diff ppo.py ppo_atari.py`` shows the
differences: six wrappers, a stack of four frames, and a convolutional network that policy and value function share.
Gymnasium's AtariPreprocessing is not used, because it restarts the game after every lost life.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, RecordEpisodeStatistics, TransformObservation, TransformReward
from torch import Tensor, nn
from torch.distributions import Categorical

from clustergym.training.args import RunArgs, main, parse_args
from clustergym.training.envs import derive_seed, evaluate, evaluation_seed, record_video
from clustergym.training.runs import Run

gym.register_envs(ale_py)
cv2.setNumThreads(1)  # a thread pool would compete with the other environments


@dataclass
class Args(RunArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """Atari id without frame skip and repeated actions: <Game>NoFrameskip-v4."""
    total_timesteps: int = 10_000_000
    """Total number of environment steps (four frames each). Rounded up to whole iterations."""
    async_envs: bool = False
    """Run each environment in its own process. Faster if enough cores are free."""
    eval_episodes: int = 8
    """Number of games in an evaluation, with sampled actions, all lives and the real score. 0 for no evaluation."""
    learning_rate: float = 2.5e-4
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 8
    """Number of parallel environments."""
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
    bootstrap_truncated: bool = True
    """Bootstrap from the value of the last observation when an episode is truncated. Otherwise treat it as terminal."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.1
    """Clip range of the probability ratio and of the value change."""
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
    compile: bool = False
    """Compile the network with torch.compile, for the roll-out and the update."""
    cudagraphs: bool = False
    """Compile the network to CUDA graphs: less time per call on a GPU. The same as --compile on the CPU."""


class NoopReset(gym.Wrapper):
    """Detail 14: each game starts with 1 to 30 no-op frames, so that games differ."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    """Detail 15: each action is repeated for 4 frames. The last two are merged, because sprites flicker."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        frames, total = [], 0.0
        for _ in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            frames.append(obs)
            total += float(reward)
            if terminated or truncated:
                break
        return np.max(frames[-2:], axis=0), total, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """Detail 16: a lost life ends the episode. The game is reset only when it is over or a seed is given."""

    game_over = True

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        before, self.lives = self.lives, self.unwrapped.ale.lives()
        # Some games show 0 lives for a few frames before they are over. The episode ends with the game then.
        return obs, reward, terminated or 0 < self.lives < before, truncated, info

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        over = self.game_over or seed is not None
        if not over:
            obs, _, terminated, truncated, info = self.env.step(0)
            over = terminated or truncated
        if over:
            obs, info = self.env.reset(seed=seed, **kwargs)
        self.game_over, self.lives = False, self.unwrapped.ale.lives()
        return obs, info


class FireReset(gym.Wrapper):
    """Detail 17: FIRE is pressed at the start of an episode, for games that do not start without it."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        for action in (1, 2):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


def warp_frame(frame: np.ndarray) -> np.ndarray:
    """Detail 18: grayscale, 84 × 84, by area averaging."""
    return cv2.resize(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)


def make_env(env_id: str, training: bool, videos: Path | None) -> gym.Env:
    """A game with all wrappers. Evaluations play whole games with the real score."""
    env = gym.make(env_id, render_mode=None if videos is None else "rgb_array")
    if getattr(env.unwrapped, "_frameskip", None) != 1:
        expected = "<Game>NoFrameskip-v4, because MaxAndSkip skips frames"
        raise gym.error.Error(f"--env-id {env_id} already skips frames: expected {expected}")
    env = RecordEpisodeStatistics(env if videos is None else record_video(env, videos))
    env = MaxAndSkip(NoopReset(env))
    if training:
        env = EpisodicLife(env)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    env = TransformObservation(env, warp_frame, gym.spaces.Box(0, 255, (84, 84), np.uint8))
    if training:
        env = TransformReward(env, np.sign)  # detail 19: scales of games differ
    return FrameStackObservation(env, 4)  # detail 20


def make_envs(
    env_id: str, num_envs: int, videos: Path | None = None, training: bool = False, async_envs: bool = False
) -> gym.vector.VectorEnv:
    """Create the environments. The step that ends an episode also begins the next one (SAME_STEP autoreset)."""
    vectorize = gym.vector.AsyncVectorEnv if async_envs else gym.vector.SyncVectorEnv
    return vectorize([partial(make_env, env_id, training, videos)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear | nn.Conv2d:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The network of Mnih et al. (Nature, 2015), which policy and value function share (detail 21)."""

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
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
        self.actor = layer_init(nn.Linear(512, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(self.network(obs / 255.0)).squeeze(-1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (actions, their log-probabilities, entropies, values). Samples the actions if none are given."""
        # Detail 22: pixels are scaled to 0 … 1.
        features = self.network(obs / 255.0)
        policy = Categorical(logits=self.actor(features), validate_args=False)
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(features).squeeze(-1)


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    envs = make_envs(args.env_id, args.num_envs, training=True, async_envs=args.async_envs)
    run = Run("ppo_atari", args, args.env_id, steps_per_iteration=batch_size)
    device = run.device
    agent = Agent(envs).to(device)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    get_action_and_value = agent.get_action_and_value
    if args.compile or args.cudagraphs:
        mode = "reduce-overhead" if args.cudagraphs else None
        get_action_and_value = torch.compile(get_action_and_value, mode=mode)

    def evaluate_agent() -> list[float]:
        def act(obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
            return agent.get_action_and_value(torch.as_tensor(obs, device=device))[0].cpu().numpy()

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # training stays as it is
            torch.manual_seed(evaluation_seed(args.seed))
            return evaluate(partial(make_envs, args.env_id), act, args.eval_episodes, args.seed, run.video_folder())

    # Detail 1: num_envs × num_steps transitions per iteration. Episodes continue in the next iteration.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, *envs.single_observation_space.shape, dtype=torch.uint8, device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(4))

    recent: deque[float] = deque(maxlen=100)  # real scores of whole games: a lost life is no end
    next_obs = torch.as_tensor(envs.reset(seed=derive_seed(args.seed, run.first_iteration))[0], device=device)
    run.load_checkpoint(agent=agent, optimizer=optimizer)

    for iteration in run.iterations():
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

        episodes = []
        for step in range(args.num_steps):
            obs[step] = next_obs
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = get_action_and_value(next_obs)
            next_array, reward, terminations, truncations, infos = envs.step(actions[step].cpu().numpy())
            next_obs = torch.as_tensor(next_array, device=device)
            rewards[step] = torch.as_tensor(reward)
            dones[step] = torch.as_tensor(terminations | truncations)

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            cut = truncations & ~terminations
            if args.bootstrap_truncated and cut.any():
                final_obs = torch.as_tensor(np.stack(infos["final_obs"][cut]), device=device)
                with torch.no_grad():
                    rewards[step, torch.as_tensor(cut)] += args.gamma * agent.get_value(final_obs)
            if "episode" in infos.get("final_info", {}):
                games, ended = infos["final_info"]["episode"], infos["final_info"]["_episode"]
                episodes += zip(games["r"][ended], games["l"][ended], strict=True)
                recent.extend(games["r"][ended])

        # Detail 5: generalised advantage estimation.
        with torch.no_grad():
            next_value = agent.get_value(next_obs)
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(args.num_envs, device=device)
        nextvalues = torch.cat([values[1:], next_value[None]])
        deltas = rewards + args.gamma * nextvalues * (1 - dones) - values
        decays = args.gamma * args.gae_lambda * (1 - dones)
        for t in reversed(range(args.num_steps)):
            advantages[t] = lastgaelam = deltas[t] + decays[t] * lastgaelam
        returns = advantages + values

        b_obs, b_actions = obs.flatten(0, 1), actions.flatten(0, 1)
        b_logprobs, b_values = logprobs.flatten(), values.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()

        minibatch_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6: every transition is in one minibatch of an epoch.
            b_inds = torch.randperm(batch_size, device=device)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                _, newlogprob, entropy, newvalue = get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()

                # Detail 7: advantages are normalised per minibatch.
                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                # Detail 8: the clipped surrogate loss.
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                # Detail 9: the larger of the value losses with and without clipping.
                v_loss = (newvalue - b_returns[mb_inds]) ** 2
                if args.clip_vloss:
                    change = torch.clamp(newvalue - b_values[mb_inds], -args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss, (b_values[mb_inds] + change - b_returns[mb_inds]) ** 2)
                v_loss = 0.5 * v_loss.mean()

                # Detail 10: one loss for policy, entropy bonus and value function.
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                # Detail 11: the global norm of the gradients is limited.
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

                # Detail 12: debug variables. Both KL estimators are from http://joschu.net/blog/kl-approx.html.
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
                    seen = [pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac, grad_norm]
                    minibatch_metrics.append(torch.stack(seen))
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
        means = torch.stack(minibatch_metrics).mean(0).tolist()
        metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
        metrics["losses/explained_variance"] = float(1 - (b_returns - b_values).var() / b_returns.var())
        metrics["charts/updates"] = len(minibatch_metrics)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/mean_return_100"] = float(np.mean(recent)) if recent else float("nan")
        if episodes:
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0)
        if run.evaluation_due():
            metrics["eval/mean_return"] = float(np.mean(evaluate_agent()))
        run.log(metrics, mean_return=metrics["charts/mean_return_100"])
        run.checkpoint(agent=agent, optimizer=optimizer)

    envs.close()
    run.save_model(agent=agent)
    return run.finish(evaluate_agent(), env_id=args.env_id, train_return_100=metrics["charts/mean_return_100"])


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__))
