"""PPO with an LSTM for discrete actions: details 32–36 of "The 37 Implementation Details of PPO" on top of ppo.py.

    python cleanrl_ppo/ppo_lstm.py                                        # CartPole-v1
    python cleanrl_ppo/ppo_lstm.py --env-id module:Id-v0                  # a task that needs memory
    python cleanrl_ppo/ppo_lstm.py --resume                               # continue after a crash

Works with every Gymnasium environment with Discrete or MultiDiscrete actions. ``diff ppo.py ppo_lstm.py`` shows the
differences: a network with a memory, its state in the roll-out and the update, and minibatches of whole sequences.
ppo_gpu_alloc_lstm.py is the same idea for the allocation task.

A resumed run is bit-identical if the environment can save its state, as those of clustergym can. Other environments
begin new episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

# Importing clustergym registers its environments.
from clustergym.training.args import FlagError, RunArgs, main, parse_args
from clustergym.training.envs import derive_seed, evaluate, make_vec
from clustergym.training.runs import Run


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """Gymnasium id, with Discrete or MultiDiscrete actions. "module:Id-v0" imports the module first."""
    eval_episodes: int = 32
    """Number of episodes in an evaluation, with greedy actions and unseen seeds. 0 for no evaluation."""
    learning_rate: float = 2.5e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 32
    """Number of parallel environments."""
    num_steps: int = 64
    """Number of steps per environment between updates. The LSTM learns dependencies up to this length."""
    num_minibatches: int = 4
    """Number of minibatches per epoch: a divisor of --num-envs, because a minibatch holds whole sequences."""
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
    clip_coef: float = 0.2
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
    hidden: int = 64
    """Width of the encoder and of the LSTM state."""


def make_envs(env_id: str, num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Create the environments. The step that ends an episode also begins the next one (SAME_STEP autoreset)."""
    envs = make_vec(env_id, num_envs, videos, flatten=True)
    if not isinstance(envs.single_action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        expected = "Discrete or MultiDiscrete: ppo_continuous_action.py takes Box"
        raise gym.error.Error(f"--env-id {env_id} has actions {envs.single_action_space}: expected {expected}")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Linear, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


LSTMState = tuple[Tensor, Tensor]
"""Hidden and cell state, each (1, envs, hidden)."""


class Agent(nn.Module):
    """Encoder and LSTM, which policy and value function share. Tensors are (steps, envs, …)."""

    def __init__(self, envs: gym.vector.VectorEnv, hidden: int = 64) -> None:
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        space = envs.single_action_space
        # Detail 37: the components of a MultiDiscrete action are independent. A Discrete action has one component.
        self.nvec = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()
        self.action_shape = space.shape

        self.encoder = nn.Sequential(layer_init(nn.Linear(obs_size, hidden)), nn.Tanh())
        self.lstm = nn.LSTM(hidden, hidden)
        # Detail 32: the LSTM has orthogonal weights of gain 1 and zero biases.
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.constant_(parameter, 0.0)
            else:
                nn.init.orthogonal_(parameter, 1.0)
        self.actor = layer_init(nn.Linear(hidden, sum(self.nvec)), std=0.01)
        self.critic = layer_init(nn.Linear(hidden, 1), std=1.0)

    def initial_state(self, num_envs: int) -> LSTMState:
        """Detail 33: the state is zero at first."""
        zeros = torch.zeros(1, num_envs, self.lstm.hidden_size, device=self.actor.weight.device)
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

    def get_policy(self, features: Tensor, mask: Tensor) -> list[Categorical]:
        """One distribution per component. Invalid actions get the logit −1e8: probability 0 and no gradient."""
        logits = torch.where(mask, self.actor(features), -1e8)
        return [Categorical(logits=part, validate_args=False) for part in logits.split(self.nvec, -1)]

    def get_action_and_value(
        self, obs: Tensor, mask: Tensor, starts: Tensor, state: LSTMState, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, LSTMState]:
        """Returns (actions, their log-probabilities, entropies, values, next state). Samples actions if not given."""
        features, state = self.get_features(obs, starts, state)
        policy = self.get_policy(features, mask)
        parts = [each.sample() for each in policy] if action is None else action.view(*obs.shape[:2], -1).unbind(-1)
        logprob = sum(each.log_prob(part) for each, part in zip(policy, parts, strict=True))
        entropy = sum(each.entropy() for each in policy)
        actions = torch.stack(list(parts), -1).view(*obs.shape[:2], *self.action_shape)
        return actions, logprob, entropy, self.critic(features).squeeze(-1), state

    def get_best_action(self, obs: Tensor, mask: Tensor, starts: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        features, state = self.get_features(obs, starts, state)
        parts = [each.logits.argmax(-1) for each in self.get_policy(features, mask)]
        return torch.stack(parts, -1).view(*obs.shape[:2], *self.action_shape), state


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    if args.num_envs % args.num_minibatches:
        expected = f"a divisor of --num-envs = {args.num_envs}, because a minibatch holds whole sequences"
        raise FlagError(f"--num-minibatches is {args.num_minibatches}: expected {expected}")
    envs = make_envs(args.env_id, args.num_envs)
    run = Run("ppo_lstm", args, args.env_id, steps_per_iteration=args.num_envs * args.num_steps)
    device = run.device
    agent = Agent(envs, args.hidden).to(device)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    def tensors(obs: np.ndarray, infos: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Observations and masks of valid actions, on the device."""
        mask = infos.get("action_mask", np.ones((len(obs), sum(agent.nvec))))
        return torch.as_tensor(obs, dtype=torch.float32, device=device), torch.as_tensor(mask == 1, device=device)

    def evaluate_agent() -> list[float]:
        memory: dict[str, Any] = {}

        def begin(num_envs: int) -> None:
            memory.update(starts=torch.ones(1, num_envs, dtype=torch.bool), state=agent.initial_state(num_envs))

        def act(obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
            seen, mask = tensors(obs, infos)
            action, memory["state"] = agent.get_best_action(seen[None], mask[None], **memory)
            memory["starts"] = torch.zeros_like(memory["starts"])
            return action[0].cpu().numpy()

        videos = run.video_folder()
        return evaluate(partial(make_envs, args.env_id), act, args.eval_episodes, args.seed, videos, begin)

    # Detail 1: num_envs × num_steps transitions per iteration. Episodes continue in the next iteration.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, *envs.single_observation_space.shape, device=device)
    masks = torch.ones(*shape, sum(agent.nvec), dtype=torch.bool, device=device)
    actions = torch.zeros(*shape, *agent.action_shape, dtype=torch.int64, device=device)
    logprobs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(4))
    starts = torch.zeros(shape, dtype=torch.bool)

    next_obs, next_mask = tensors(*envs.reset(seed=derive_seed(args.seed, run.first_iteration)))
    saved = run.load_checkpoint(agent=agent, optimizer=optimizer, envs=envs)
    next_start, next_state = torch.ones(args.num_envs, dtype=torch.bool), agent.initial_state(args.num_envs)
    if "envs" in saved:
        next_obs, next_mask, next_start = (
            saved["next_obs"].to(device),
            saved["next_mask"].to(device),
            saved["next_start"],
        )
        next_state = (saved["next_state"][0].to(device), saved["next_state"][1].to(device))

    for iteration in run.iterations():
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

        episodes = []
        initial_state = next_state
        for step in range(args.num_steps):
            obs[step], masks[step], starts[step] = next_obs, next_mask, next_start
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step], next_state = agent.get_action_and_value(
                    next_obs[None], next_mask[None], next_start[None], next_state
                )
            next_array, reward, terminations, truncations, infos = envs.step(actions[step].cpu().numpy())
            next_obs, next_mask = tensors(next_array, infos)
            rewards[step] = torch.as_tensor(reward)
            next_start = torch.as_tensor(terminations | truncations)
            dones[step] = next_start

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            cut = truncations & ~terminations
            if args.bootstrap_truncated and cut.any():
                final_obs = torch.as_tensor(np.stack(infos["final_obs"][cut]), dtype=torch.float32, device=device)
                state = (next_state[0][:, cut], next_state[1][:, cut])
                goes_on = torch.zeros(1, len(final_obs), dtype=torch.bool)
                with torch.no_grad():
                    final_value = agent.get_value(final_obs[None], goes_on, state)[0]
                    rewards[step, torch.as_tensor(cut)] += args.gamma * final_value
            if "episode" in infos:
                ended = infos["_episode"]
                episodes += zip(infos["episode"]["r"][ended], infos["episode"]["l"][ended], strict=True)

        # Detail 5: generalised advantage estimation.
        with torch.no_grad():
            next_value = agent.get_value(next_obs[None], next_start[None], next_state)[0]
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
                    masks[:, mb_envs],
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
        metrics["losses/explained_variance"] = float(1 - (returns - values).var() / returns.var())
        metrics["charts/updates"] = len(minibatch_metrics)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/mean_return_100"] = float(np.mean(envs.return_queue)) if envs.return_queue else float("nan")
        if episodes:
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0)
        if run.evaluation_due():
            metrics["eval/mean_return"] = float(np.mean(evaluate_agent()))
        run.log(metrics, mean_return=metrics["charts/mean_return_100"])
        following = {"next_obs": next_obs, "next_mask": next_mask, "next_start": next_start, "next_state": next_state}
        run.checkpoint(agent=agent, optimizer=optimizer, envs=envs, **following)

    envs.close()
    run.save_model(agent=agent)
    return run.finish(evaluate_agent(), env_id=args.env_id, train_return_100=metrics["charts/mean_return_100"])


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__))
