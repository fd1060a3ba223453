"""PPO for GPU allocation: how much of a GPU each pod gets. Details 1–12, 23–29 and 37 of the 37.

    python cleanrl_ppo/ppo_gpu_alloc.py                                   # GPUAllocationHistory-v0
    python cleanrl_ppo/ppo_gpu_alloc.py --env-id GPUAllocation-v0         # five features, no history
    python cleanrl_ppo/ppo_gpu_alloc.py --preset seed                     # textbook PPO with a normal policy
    python cleanrl_ppo/ppo_gpu_alloc.py --resume                          # continue after a crash, bit for bit
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_gpu_alloc.py              # two processes, averaged gradients

A pod asks for cores and memory. The policy chooses which share of each it gets, from ``--levels`` shares (a categorical
distribution each). ``--copies`` environments decide on the same pod in the same situation; their mean reward is the
baseline, so that easy and hard pods count the same. ``diff ppo_continuous_action.py ppo_gpu_alloc.py`` shows the rest.

The final evaluation compares the policy with rules that operators use and with an oracle, on unseen streams of pods.
``clustergym eval --task gpu-allocation --checkpoint …`` and ``clustergym agent serve`` load the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, gap_closed, play_policy, play_rules
from clustergym.gpu_allocation.policy import AllocationPolicy, share_actions
from clustergym.training.args import FlagError, Range, RunArgs, main, parse_args
from clustergym.training.distributed import World, init_distributed
from clustergym.training.envs import derive_seed, make_vec, play_episodes
from clustergym.training.runs import Run


@dataclass
class Args(RunArgs):
    env_id: str = "GPUAllocationHistory-v0"
    """GPUAllocationHistory-v0 or GPUAllocation-v0."""
    workload: Path | None = None
    """CSV file in the openb format with the requests and durations of pods. Default: synthetic pods."""
    reward: Literal["room", "seed"] = "room"
    """room: with a penalty for the waiting time of the next pod. seed: without it."""
    preset: Literal["levels", "seed"] = "levels"
    """seed: a normal policy with a sigmoid mean and a learned standard deviation, five features, one environment,
    batches of 32, discount 0.99 and no normalisation (SEED_PRESET). Other flags come before it."""
    total_timesteps: int = 12_000_000
    """Total number of environment steps, over all environments and processes. Rounded up to whole iterations."""
    eval_streams: int = 256
    """Number of held-out streams (one episode each) in an evaluation. 0 for no evaluation."""
    learning_rate: float = 3e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal learning rate and entropy bonus linearly to 0. Evaluations use the most probable action."""
    num_envs: int = 512
    """Number of parallel environments per process."""
    num_steps: int = 16
    """Number of steps per environment between updates."""
    copies: int = 4
    """Number of environments that decide on the same pod: a divisor of --num-envs, 1 for none. Needs --gamma 0."""
    num_minibatches: int = 4
    """Number of minibatches per epoch."""
    update_epochs: int = 1
    """Number of epochs per update."""
    gamma: float = 0.0
    """Discount factor. A pod is rewarded immediately and affects later pods only slightly, so 0 learns fastest."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = False
    """Normalise advantages per minibatch. Otherwise --ent-coef is in units of the reward."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.03
    """Coefficient of the entropy bonus (the initial value if annealed)."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    hidden: int = 128
    """Width of the two hidden layers."""
    levels: int = 24
    """Number of shares of the requested cores, and of the memory, to choose from. 0: a normal policy over amounts."""
    qos_penalty: float = 0.0
    """Subtracted from the reward of a pod that misses its objective, in training. Evaluations do not subtract it."""
    norm_obs: bool = True
    """Normalise observations by their running mean and variance, and clip them to ±10."""


SEED_PRESET: dict[str, Any] = {
    "env_id": "GPUAllocation-v0", "reward": "seed", "levels": 0, "copies": 1, "num_envs": 1, "num_steps": 32,
    "num_minibatches": 1, "update_epochs": 4, "learning_rate": 3e-4, "anneal_lr": False, "gamma": 0.99,
    "clip_vloss": False, "ent_coef": 0.01, "hidden": 64, "norm_obs": False,
}  # fmt: skip
"""Defaults with ``--preset seed``."""
RANGES = {"levels": Range(0), "copies": Range(1), "qos_penalty": Range(0)}
EPISODE = ("qos", "efficiency", "oom", "monopoly", "wait_s", "room")


def make_envs(args: Args, num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Create the environments. The step that ends an episode also begins the next one (SAME_STEP autoreset)."""
    if args.env_id not in ("GPUAllocationHistory-v0", "GPUAllocation-v0"):
        raise gym.error.Error(f"--env-id is {args.env_id}: expected GPUAllocationHistory-v0 or GPUAllocation-v0")
    envs = make_vec(args.env_id, num_envs, videos, workload=args.workload, reward=args.reward)
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Linear, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class RunningMeanStd:
    """Mean and variance of all rows of all processes so far (Chan et al., 1979)."""

    def __init__(self, shape: tuple[int, ...], world: World) -> None:
        self.world = world
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: np.ndarray) -> None:
        mean, var, n = self.world.moments(rows.astype(np.float64))
        self.count += n
        new, delta = n / self.count, mean - self.mean
        self.mean = self.mean + new * delta
        self.var = self.var + new * (var - self.var + (1 - new) * delta**2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("mean", "var", "count")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), float(state["count"])


class Agent(nn.Module):
    """Policy and value function: two separate MLPs (details 13 and 26). With 0 levels, a normal policy."""

    def __init__(self, obs_size: int, hidden: int = 128, levels: int = 24, copies: int = 1) -> None:
        super().__init__()
        self.levels, self.copies = levels, copies

        def mlp(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.actor = mlp(2 * levels, std=0.01) if levels else mlp(2, std=0.01).append(nn.Sigmoid())
        self.critic = mlp(1, std=1.0)
        # Detail 24: the standard deviation of a normal policy is the same in every state, initially 1.
        self.log_std = nn.Parameter(torch.zeros(2), requires_grad=not levels)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def get_policy(self, obs: Tensor) -> Categorical | Normal:
        """Distributions of cores and memory: over shares of the request, or normal (detail 23)."""
        if self.levels:
            return Categorical(logits=self.actor(obs).unflatten(-1, (2, self.levels)), validate_args=False)
        return Normal(self.actor(obs), self.log_std.exp(), validate_args=False)

    def sample(self, policy: Categorical | Normal) -> Tensor:
        """Sampled actions. Copies of an environment draw from different parts of the distribution of shares."""
        if not self.levels:
            return policy.sample()
        groups = len(policy.probs) // self.copies
        ranks = torch.rand(groups, self.copies, 2, device=policy.probs.device).argsort(1)
        numbers = (ranks + torch.rand(groups, 1, 2, device=ranks.device)) / self.copies
        below = policy.probs.cumsum(-1) < numbers.flatten(0, 1)[..., None]
        return below.sum(-1).clamp(max=self.levels - 1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (actions, their log-probabilities, entropies, values). Samples the actions if none are given."""
        policy = self.get_policy(obs)
        if action is None:
            action = self.sample(policy)
        # Details 25 and 37: the components are independent, so their log-probabilities are added.
        return action, policy.log_prob(action).sum(-1), policy.entropy().sum(-1), self.get_value(obs)


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    if args.levels == 1:
        raise FlagError("--levels is 1: expected at least 2 shares, or 0 for a normal policy")
    if args.copies > 1 and (args.num_envs % args.copies or args.gamma > 0):
        expected = f"1, or a divisor of --num-envs = {args.num_envs} with --gamma 0"
        raise FlagError(f"--copies is {args.copies} with --gamma {args.gamma:g}: expected {expected}")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    world = init_distributed(args.cuda, args.torch_deterministic)
    envs = make_envs(args, args.num_envs)
    run = Run("ppo_gpu_alloc", args, args.env_id, steps_per_iteration=batch_size, world=world)
    device = run.device
    agent = Agent(envs.single_observation_space.shape[0], args.hidden, args.levels, args.copies).to(device)
    world.broadcast(agent)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    statistics = RunningMeanStd(envs.single_observation_space.shape, world)

    def see(obs: np.ndarray) -> Tensor:
        """Normalised observations, on the device."""
        if args.norm_obs:
            # Details 28 and 29: observations are normalised by their running mean and variance, and clipped.
            obs = np.clip((obs - statistics.mean) / np.sqrt(statistics.var + 1e-8), -10, 10)
        return torch.as_tensor(obs, dtype=torch.float32, device=device)

    def play_action(obs: np.ndarray, action: Tensor) -> np.ndarray:
        """What the environment gets: shares of the request, or a clipped amount (detail 27). The raw one is stored."""
        if args.levels:
            return share_actions(obs, action.cpu().numpy(), args.levels)
        return action.cpu().numpy().clip(0, 1)

    def same_pods(obs: np.ndarray) -> np.ndarray:
        """All copies of an environment continue from the first one. Returns what they see."""
        if args.copies == 1:
            return obs
        return envs.unwrapped.batch.copy_first(args.copies).copy()

    def evaluate_agent() -> dict[str, Any]:
        """Play the most probable actions on held-out streams, with fixed statistics."""
        policy = AllocationPolicy(agent.state_dict(), statistics.state_dict() if args.norm_obs else None)
        if videos := run.video_folder():
            film = make_envs(args, 1, videos)
            play_episodes(film, lambda obs, infos: policy.act(obs), HELD_OUT_SEED)
        return play_policy(make_envs(args, args.eval_streams).unwrapped.batch, policy)

    # Detail 1: num_envs × num_steps transitions per iteration. Episodes continue in the next iteration.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, *envs.single_observation_space.shape, device=device)
    actions = torch.zeros(*shape, 2, dtype=torch.int64 if args.levels else torch.float32, device=device)
    logprobs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(4))

    next_array = same_pods(envs.reset(seed=derive_seed(args.seed, run.first_iteration, world.rank))[0])
    saved = run.load_checkpoint(agent=agent, optimizer=optimizer, statistics=statistics, envs=envs)
    if saved:
        next_array = saved["next_obs"].numpy()
    else:
        statistics.update(next_array)

    evaluation: dict[str, Any] = {}
    for iteration in run.iterations():
        remaining = 1 - (iteration - 1) / run.num_iterations
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        ent_coef = remaining * args.ent_coef if args.anneal_lr else args.ent_coef

        episodes, sum_of_rewards = [], 0.0
        for step in range(args.num_steps):
            obs[step] = see(next_array)
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = agent.get_action_and_value(obs[step])
            next_array, reward, _, truncations, infos = envs.step(play_action(next_array, actions[step]))
            next_array = same_pods(next_array)
            statistics.update(next_array)
            sum_of_rewards += reward.sum()
            missed, ended = ~infos["qos_met"], infos.get("final_info")
            if ended:
                missed = np.where(truncations, ~ended["qos_met"], missed)
                episodes.append([ended[f"mean_{name}"][truncations].mean() for name in EPISODE])
            rewards[step] = torch.as_tensor(reward - args.qos_penalty * missed)
            dones[step] = torch.as_tensor(truncations)

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            if truncations.any() and args.gamma > 0:
                final_obs = see(np.stack(infos["final_obs"][truncations]))
                with torch.no_grad():
                    rewards[step, torch.as_tensor(truncations)] += args.gamma * agent.get_value(final_obs)

        # Detail 5: generalised advantage estimation.
        with torch.no_grad():
            next_value = agent.get_value(see(next_array))
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(args.num_envs, device=device)
        nextvalues = torch.cat([values[1:], next_value[None]])
        deltas = rewards + args.gamma * nextvalues * (1 - dones) - values
        decays = args.gamma * args.gae_lambda * (1 - dones)
        for t in reversed(range(args.num_steps)):
            advantages[t] = lastgaelam = deltas[t] + decays[t] * lastgaelam
        returns = advantages + values
        if args.copies > 1:
            # Only the difference to the other decisions on the same pod counts.
            groups = advantages.view(args.num_steps, -1, args.copies)
            advantages = (groups - groups.mean(-1, keepdim=True)).view(shape)

        b_obs, b_actions = obs.flatten(0, 1), actions.flatten(0, 1)
        b_logprobs, b_values = logprobs.flatten(), values.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()

        minibatch_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6: every transition is in one minibatch of an epoch.
            b_inds = torch.randperm(batch_size, device=device)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
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
                loss = pg_loss - ent_coef * entropy_loss + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                world.average_gradients(agent.parameters())
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

        names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
        means = torch.stack(minibatch_metrics).mean(0).tolist()
        metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
        metrics["losses/explained_variance"] = float(1 - (b_returns - b_values).var() / b_returns.var())
        metrics["charts/reward"] = sum_of_rewards / batch_size
        metrics["charts/learning_rate"], metrics["charts/ent_coef"] = optimizer.param_groups[0]["lr"], ent_coef
        if not args.levels:
            metrics["charts/std_cores"], metrics["charts/std_memory"] = agent.log_std.exp().tolist()
        if episodes:
            metrics |= {f"charts/{name}": mean for name, mean in zip(EPISODE, np.mean(episodes, axis=0), strict=True)}
        if args.eval_streams and world.is_main and (iteration == run.num_iterations or run.evaluation_due()):
            evaluation = evaluate_agent()
            metrics |= {f"eval/{key}": evaluation[key] for key in ("reward", "qos", "efficiency")}
        run.log(metrics, reward=metrics["charts/reward"], qos=metrics.get("charts/qos", float("nan")))
        next_obs = torch.from_numpy(next_array)
        run.checkpoint(agent=agent, optimizer=optimizer, statistics=statistics, envs=envs, next_obs=next_obs)

    envs.close()
    run.save_model(agent=agent, statistics=statistics)
    if evaluation:
        rules = play_rules(make_envs(args, args.eval_streams).unwrapped.batch)
        evaluation["gap_closed"] = gap_closed(evaluation["reward"], rules)
        shown = ("reward", "qos", "efficiency")
        evaluation["rules"] = {name: {key: rule[key] for key in shown} for name, rule in rules.items()}
    reported = ("mean_return", "mean_return_ci95", "reward", "qos", "efficiency", "oom", "gap_closed", "rules")
    world.close()
    return run.finish(env_id=args.env_id, **{key: evaluation.get(key) for key in reported})


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__, presets={"seed": SEED_PRESET}, ranges=RANGES))
