"""PPO for continuous actions: details 23–31 of "The 37 Implementation Details of PPO", and 1–12 as in ppo.py.

    python cleanrl_ppo/ppo_continuous_action.py                                       # Pendulum-v1
    python cleanrl_ppo/ppo_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000
    python cleanrl_ppo/ppo_continuous_action.py --resume                              # continue after a crash

Works with every Gymnasium environment with a Box of actions. Observations are flattened. ``diff ppo.py
ppo_continuous_action.py`` shows the differences: a normal distribution, clipped actions, normalised observations and
scaled rewards. The running statistics are saved with the network, and evaluations do not change them.

A resumed run is bit-identical if the environment can save its state, as those of clustergym can. Other environments
begin new episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

# Importing clustergym registers its environments.
from clustergym.training.args import RunArgs, main, parse_args
from clustergym.training.envs import derive_seed, evaluate, make_vec
from clustergym.training.runs import Run


@dataclass
class Args(RunArgs):
    env_id: str = "Pendulum-v1"
    """Gymnasium id, with a Box of actions. "module:Id-v0" imports the module first."""
    eval_episodes: int = 32
    """Number of episodes in an evaluation, with mean actions and unseen seeds. 0 for no evaluation."""
    learning_rate: float = 1e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 16
    """Number of parallel environments."""
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
    bootstrap_truncated: bool = True
    """Bootstrap from the value of the last observation when an episode is truncated. Otherwise treat it as terminal."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    hidden: int = 64
    """Width of the two hidden layers."""
    norm_obs: bool = True
    """Normalise observations by their running mean and variance, and clip them to ±10."""
    norm_reward: bool = True
    """Divide rewards by the standard deviation of the discounted return, and clip them to ±10."""
    compile: bool = False
    """Compile the network with torch.compile, for the roll-out and the update."""
    cudagraphs: bool = False
    """Compile the network to CUDA graphs: less time per call on a GPU. The same as --compile on the CPU."""


def make_envs(env_id: str, num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Create the environments. The step that ends an episode also begins the next one (SAME_STEP autoreset)."""
    envs = make_vec(env_id, num_envs, videos, flatten=True)
    if not isinstance(envs.single_action_space, gym.spaces.Box):
        expected = "Box: ppo.py takes Discrete and MultiDiscrete"
        raise gym.error.Error(f"--env-id {env_id} has actions {envs.single_action_space}: expected {expected}")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Linear, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class RunningMeanStd:
    """Mean and variance of all rows so far, updated batch by batch (Chan et al., 1979). In NumPy: rows are few."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: np.ndarray) -> None:
        mean, var, n = rows.mean(0, np.float64), rows.var(0, np.float64), len(rows)
        self.count += n
        new, delta = n / self.count, mean - self.mean
        self.mean = self.mean + new * delta
        self.var = self.var + new * (var - self.var + (1 - new) * delta**2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), float(state["count"])


class Agent(nn.Module):
    """Normal policy (detail 23) and value function: two separate MLPs (detail 26)."""

    def __init__(self, envs: gym.vector.VectorEnv, hidden: int = 64) -> None:
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        num_actions = int(np.prod(envs.single_action_space.shape))

        def mlp(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.Tanh(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.Tanh(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.actor = mlp(num_actions, std=0.01)
        self.critic = mlp(1, std=1.0)
        # Detail 24: the standard deviation is the same in every state, initially 1.
        self.log_std = nn.Parameter(torch.zeros(num_actions))

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def get_action(self, obs: Tensor, greedy: bool = False) -> Tensor:
        """Sampled actions, or the most probable ones."""
        mean = self.actor(obs)
        return mean if greedy else torch.normal(mean, self.log_std.exp())

    def evaluate_action(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-probabilities of the actions, entropies, values)."""
        policy = Normal(self.actor(obs), self.log_std.exp(), validate_args=False)
        # Detail 25: the components are independent, so their log-probabilities are added.
        return policy.log_prob(action).sum(-1), policy.entropy().sum(-1), self.get_value(obs)


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    envs = make_envs(args.env_id, args.num_envs)
    run = Run("ppo_continuous_action", args, args.env_id, steps_per_iteration=batch_size)
    device = run.device
    agent = Agent(envs, args.hidden).to(device)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    get_action, evaluate_action = agent.get_action, agent.evaluate_action
    if args.compile or args.cudagraphs:
        mode = "reduce-overhead" if args.cudagraphs else None
        get_action, evaluate_action = (torch.compile(each, mode=mode) for each in (get_action, evaluate_action))

    obs_rms, return_rms = RunningMeanStd(envs.single_observation_space.shape), RunningMeanStd()
    discounted = np.zeros(args.num_envs)
    space = envs.single_action_space

    def see(obs: np.ndarray) -> Tensor:
        """Normalised observations, on the device."""
        if args.norm_obs:
            # Details 28 and 29: observations are normalised by their running mean and variance, and clipped.
            obs = np.clip((obs - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8), -10, 10)
        return torch.as_tensor(obs, dtype=torch.float32, device=device)

    def clip_action(action: Tensor) -> np.ndarray:
        """Detail 27: the environment gets a clipped action. The raw one is stored, as its log-probability is known."""
        return action.cpu().numpy().reshape(-1, *space.shape).clip(space.low, space.high)

    def evaluate_agent() -> list[float]:
        def act(obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
            return clip_action(agent.get_action(see(obs), greedy=True))

        return evaluate(partial(make_envs, args.env_id), act, args.eval_episodes, args.seed, run.video_folder())

    # Detail 1: num_envs × num_steps transitions per iteration. Episodes continue in the next iteration.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, *envs.single_observation_space.shape, device=device)
    actions = torch.zeros(*shape, len(agent.log_std), device=device)
    rewards, dones = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    next_array, _ = envs.reset(seed=derive_seed(args.seed, run.first_iteration))
    saved = run.load_checkpoint(agent=agent, optimizer=optimizer, obs_rms=obs_rms, return_rms=return_rms, envs=envs)
    if "envs" in saved:
        next_obs, discounted = saved["next_obs"].to(device), saved["discounted"].numpy()
    else:
        obs_rms.update(next_array)
        next_obs = see(next_array)

    for iteration in run.iterations():
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

        episodes = []
        for step in range(args.num_steps):
            obs[step] = next_obs
            with torch.no_grad():
                actions[step] = get_action(next_obs)
            next_array, reward, terminations, truncations, infos = envs.step(clip_action(actions[step]))
            obs_rms.update(next_array)
            next_obs = see(next_array)
            done = terminations | truncations
            if args.norm_reward:
                # Details 30 and 31: rewards are divided by the deviation of the discounted return, and clipped.
                discounted = discounted * args.gamma + reward
                return_rms.update(discounted)
                discounted[done] = 0
                reward = np.clip(reward / np.sqrt(return_rms.var + 1e-8), -10, 10)
            rewards[step] = torch.as_tensor(reward)
            dones[step] = torch.as_tensor(done)

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            cut = truncations & ~terminations
            if args.bootstrap_truncated and cut.any():
                final_obs = see(np.stack(infos["final_obs"][cut]))
                with torch.no_grad():
                    rewards[step, torch.as_tensor(cut)] += args.gamma * agent.get_value(final_obs)
            if "episode" in infos:
                ended = infos["_episode"]
                episodes += zip(infos["episode"]["r"][ended], infos["episode"]["l"][ended], strict=True)

        # Detail 5: generalised advantage estimation.
        with torch.no_grad():
            # In one pass for all steps, because the environments only needed the actions.
            logprobs, _, values = agent.evaluate_action(obs, actions)
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
                newlogprob, entropy, newvalue = evaluate_action(b_obs[mb_inds], b_actions[mb_inds])
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
        metrics["charts/mean_return_100"] = float(np.mean(envs.return_queue)) if envs.return_queue else float("nan")
        if episodes:
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0)
        if run.evaluation_due():
            metrics["eval/mean_return"] = float(np.mean(evaluate_agent()))
        run.log(metrics, mean_return=metrics["charts/mean_return_100"])
        statistics = {"obs_rms": obs_rms, "return_rms": return_rms, "discounted": torch.from_numpy(discounted)}
        run.checkpoint(agent=agent, optimizer=optimizer, envs=envs, next_obs=next_obs, **statistics)

    envs.close()
    run.save_model(agent=agent, obs_rms=obs_rms)
    return run.finish(evaluate_agent(), env_id=args.env_id, train_return_100=metrics["charts/mean_return_100"])


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__))
