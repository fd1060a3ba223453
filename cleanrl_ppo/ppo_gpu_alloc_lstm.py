"""PPO with an LSTM for GPU allocation without history features: details 32–36 on top of ppo_gpu_alloc.py.

    python cleanrl_ppo/ppo_gpu_alloc_lstm.py                              # GPUAllocation-v0
    python cleanrl_ppo/ppo_gpu_alloc_lstm.py --total-timesteps 1000000
    python cleanrl_ppo/ppo_gpu_alloc_lstm.py --resume                     # continue after a crash, bit for bit
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_gpu_alloc_lstm.py         # two processes, averaged gradients

The five features of GPUAllocation-v0 do not show how much the owners of pods over-request. The utilisation that earlier
decisions led to does, so a network with memory can learn it. The policy is normal over amounts of cores and memory.
``diff ppo_gpu_alloc.py ppo_gpu_alloc_lstm.py`` shows the rest: a network with a memory, its state in the roll-out and
the update, and minibatches of whole sequences. ``clustergym eval --task gpu-allocation`` loads the checkpoint.
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
from torch.distributions import Normal

from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, gap_closed, play_policy, play_rules
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.training.args import FlagError, RunArgs, main, parse_args
from clustergym.training.distributed import World, init_distributed
from clustergym.training.envs import derive_seed, make_vec, play_episodes
from clustergym.training.runs import Run


@dataclass
class Args(RunArgs):
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
    """Anneal learning rate and entropy bonus linearly to 0. Evaluations use the most probable action."""
    num_envs: int = 32
    """Number of parallel environments per process."""
    num_steps: int = 128
    """Number of steps per environment between updates. The LSTM learns dependencies up to this length."""
    num_minibatches: int = 4
    """Number of minibatches per epoch: a divisor of --num-envs, because a minibatch holds whole sequences."""
    update_epochs: int = 4
    """Number of epochs per update."""
    gamma: float = 0.0
    """Discount factor. A pod is rewarded immediately and affects later pods only slightly, so 0 learns fastest."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus (the initial value if annealed)."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    hidden: int = 64
    """Width of the encoder and of the LSTM state."""
    norm_obs: bool = True
    """Normalise observations by their running mean and variance, and clip them to ±10."""


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
    """Mean and variance of all rows of all processes so far, updated batch by batch (Chan et al., 1979)."""

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


LSTMState = tuple[Tensor, Tensor]
"""Hidden and cell state, each (1, envs, hidden)."""


class Agent(nn.Module):
    """Encoder and LSTM, which policy and value function share. Tensors are (steps, envs, …)."""

    def __init__(self, obs_size: int, hidden: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(layer_init(nn.Linear(obs_size, hidden)), nn.ReLU())
        self.lstm = nn.LSTM(hidden, hidden)
        # Detail 32: the LSTM has orthogonal weights of gain 1 and zero biases.
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.constant_(parameter, 0.0)
            else:
                nn.init.orthogonal_(parameter, 1.0)
        self.actor = nn.Sequential(layer_init(nn.Linear(hidden, 2), std=0.01), nn.Sigmoid())
        self.critic = layer_init(nn.Linear(hidden, 1), std=1.0)
        # Detail 24: the standard deviation is the same in every state, initially 0.2: the range of an action is 1.
        self.log_std = nn.Parameter(torch.full((2,), np.log(0.2)))

    def initial_state(self, num_envs: int) -> LSTMState:
        """Detail 33: the state is zero at first."""
        zeros = torch.zeros(1, num_envs, self.lstm.hidden_size, device=self.log_std.device)
        return zeros, zeros.clone()

    def get_features(self, obs: Tensor, starts: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Returns the features of all steps and the state after the last one.

        Detail 34: the state is reset where an episode starts. ``starts`` (steps, envs) is on the CPU: the steps between
        two resets run through the LSTM in one call.
        """
        encoded, features = self.encoder(obs), []
        cuts = [0, *(t for t in range(1, len(obs)) if starts[t].any()), len(obs)]
        for begin, end in pairwise(cuts):
            keep = (~starts[begin]).to(encoded.device)[None, :, None]
            part, state = self.lstm(encoded[begin:end], (keep * state[0], keep * state[1]))
            features.append(part)
        return torch.cat(features), state

    def get_value(self, obs: Tensor, starts: Tensor, state: LSTMState) -> Tensor:
        return self.critic(self.get_features(obs, starts, state)[0]).squeeze(-1)

    def get_action_and_value(
        self, obs: Tensor, starts: Tensor, state: LSTMState, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, LSTMState]:
        """Returns (actions, their log-probabilities, entropies, values, next state). Samples actions if not given."""
        features, state = self.get_features(obs, starts, state)
        policy = Normal(self.actor(features), self.log_std.exp(), validate_args=False)
        if action is None:
            action = policy.sample()
        # Detail 25: the components are independent, so their log-probabilities are added.
        value = self.critic(features).squeeze(-1)
        return action, policy.log_prob(action).sum(-1), policy.entropy().sum(-1), value, state


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    if args.num_envs % args.num_minibatches:
        expected = f"a divisor of --num-envs = {args.num_envs}, because a minibatch holds whole sequences"
        raise FlagError(f"--num-minibatches is {args.num_minibatches}: expected {expected}")
    batch_size = args.num_envs * args.num_steps
    world = init_distributed(args.cuda, args.torch_deterministic)
    envs = make_envs(args, args.num_envs)
    run = Run("ppo_gpu_alloc_lstm", args, args.env_id, steps_per_iteration=batch_size, world=world)
    device = run.device
    agent = Agent(envs.single_observation_space.shape[0], args.hidden).to(device)
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
    actions = torch.zeros(*shape, 2, device=device)
    logprobs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(4))
    starts = torch.zeros(shape, dtype=torch.bool)

    next_array, _ = envs.reset(seed=derive_seed(args.seed, run.first_iteration, world.rank))
    saved = run.load_checkpoint(agent=agent, optimizer=optimizer, statistics=statistics, envs=envs)
    next_start, next_state = torch.ones(args.num_envs, dtype=torch.bool), agent.initial_state(args.num_envs)
    if saved:
        next_array, next_start = saved["next_obs"].numpy(), saved["next_start"]
        next_state = (saved["next_state"][0].to(device), saved["next_state"][1].to(device))
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
        initial_state = next_state
        for step in range(args.num_steps):
            obs[step], starts[step] = see(next_array), next_start
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step], next_state = agent.get_action_and_value(
                    obs[step : step + 1], next_start[None], next_state
                )
            # Detail 27: the environment gets a clipped action. The raw one is stored, as its log-probability is known.
            next_array, reward, _, truncations, infos = envs.step(actions[step].cpu().numpy().clip(0, 1))
            statistics.update(next_array)
            sum_of_rewards += reward.sum()
            if truncations.any():
                episodes.append([infos["final_info"][f"mean_{name}"][truncations].mean() for name in EPISODE])
            rewards[step] = torch.as_tensor(reward)
            next_start = torch.as_tensor(truncations)
            dones[step] = next_start

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            if truncations.any() and args.gamma > 0:
                final_obs = see(np.stack(infos["final_obs"][truncations]))
                state = (next_state[0][:, truncations], next_state[1][:, truncations])
                goes_on = torch.zeros(1, len(final_obs), dtype=torch.bool)
                with torch.no_grad():
                    final_value = agent.get_value(final_obs[None], goes_on, state)[0]
                    rewards[step, torch.as_tensor(truncations)] += args.gamma * final_value

        # Detail 5: generalised advantage estimation.
        with torch.no_grad():
            next_value = agent.get_value(see(next_array)[None], next_start[None], next_state)[0]
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(args.num_envs, device=device)
        nextvalues = torch.cat([values[1:], next_value[None]])
        deltas = rewards + args.gamma * nextvalues * (1 - dones) - values
        decays = args.gamma * args.gae_lambda * (1 - dones)
        for t in reversed(range(args.num_steps)):
            advantages[t] = lastgaelam = deltas[t] + decays[t] * lastgaelam
        returns = advantages + values

        minibatch_metrics = []
        for _ in range(args.update_epochs):
            # Detail 35: a minibatch holds the whole sequences of some environments. Each is in one of an epoch.
            for mb_envs in torch.randperm(args.num_envs).chunk(args.num_minibatches):
                # Detail 36: the states are computed again, from the first one of the roll-out.
                _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(
                    obs[:, mb_envs],
                    starts[:, mb_envs],
                    (initial_state[0][:, mb_envs], initial_state[1][:, mb_envs]),
                    actions[:, mb_envs],
                )
                logratio = newlogprob - logprobs[:, mb_envs]
                ratio = logratio.exp()

                # Detail 7: advantages are normalised per minibatch.
                mb_advantages = advantages[:, mb_envs]
                if args.norm_adv:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                # Detail 8: the clipped surrogate loss.
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                # Detail 9: the larger of the value losses with and without clipping.
                v_loss = (newvalue - returns[:, mb_envs]) ** 2
                if args.clip_vloss:
                    change = torch.clamp(newvalue - values[:, mb_envs], -args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss, (values[:, mb_envs] + change - returns[:, mb_envs]) ** 2)
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
        metrics["losses/explained_variance"] = float(1 - (returns - values).var() / returns.var())
        metrics["charts/reward"] = sum_of_rewards / batch_size
        metrics["charts/learning_rate"], metrics["charts/ent_coef"] = optimizer.param_groups[0]["lr"], ent_coef
        metrics["charts/std_cores"], metrics["charts/std_memory"] = agent.log_std.exp().tolist()
        if episodes:
            metrics |= {f"charts/{name}": mean for name, mean in zip(EPISODE, np.mean(episodes, axis=0), strict=True)}
        if args.eval_streams and world.is_main and (iteration == run.num_iterations or run.evaluation_due()):
            evaluation = evaluate_agent()
            metrics |= {f"eval/{key}": evaluation[key] for key in ("reward", "qos", "efficiency")}
        run.log(metrics, reward=metrics["charts/reward"], qos=metrics.get("charts/qos", float("nan")))
        following = {"next_obs": torch.from_numpy(next_array), "next_start": next_start, "next_state": next_state}
        run.checkpoint(agent=agent, optimizer=optimizer, statistics=statistics, envs=envs, **following)

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
    main(train, parse_args(Args, __doc__))
