"""PPO with a KL penalty instead of clipping, and a critic that learns one-step targets.

    python cleanrl_ppo/ppo_kl.py                                          # CartPole-v1
    python cleanrl_ppo/ppo_kl.py --kl-target 0.003
    python cleanrl_ppo/ppo_kl.py --resume                                 # continue after a crash

The policy loss is −r·A + β·KL(old ‖ new). After each update, the KL of the whole batch is measured: β is doubled if it
exceeds 1.5 × the target, and halved if it is below the target / 1.5 (Schulman et al. 2017, section 4). The value
function learns the TD target r + γ·V(s'), computed before the update, not advantage + value.

``diff ppo.py ppo_kl.py`` shows the differences: details 8 and 9 are gone, 1–7, 10–13 and 37 are those of ppo.py.

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

# Importing clustergym registers its environments.
from clustergym.training.args import RunArgs, main, parse_args
from clustergym.training.envs import derive_seed, evaluate, make_vec
from clustergym.training.runs import Run

MIN_KL_COEF = 0.1
"""Smallest coefficient of the penalty."""


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
    kl_coef: float = 1.0
    """Initial coefficient of the penalty on KL(old policy ‖ new policy)."""
    kl_target: float = 0.01
    """KL of an update that the coefficient is adapted to."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    hidden: int = 64
    """Width of the two hidden layers."""
    compile: bool = False
    """Compile the network with torch.compile, for the roll-out and the update."""
    cudagraphs: bool = False
    """Compile the network to CUDA graphs: less time per call on a GPU. The same as --compile on the CPU."""


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


class Agent(nn.Module):
    """Policy and value function: two separate MLPs (detail 13)."""

    def __init__(self, envs: gym.vector.VectorEnv, hidden: int = 64) -> None:
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        space = envs.single_action_space
        # Detail 37: the components of a MultiDiscrete action are independent. A Discrete action has one component.
        self.nvec = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()
        self.action_shape = space.shape

        def mlp(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.Tanh(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.Tanh(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.actor = mlp(sum(self.nvec), std=0.01)
        self.critic = mlp(1, std=1.0)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def get_policy(self, obs: Tensor, mask: Tensor) -> list[Tensor]:
        """Log-probabilities of the actions of each component. Invalid ones get the logit −1e8: probability 0."""
        logits = torch.where(mask, self.actor(obs), -1e8)
        return [part.log_softmax(-1) for part in logits.split(self.nvec, -1)]

    def get_action(self, obs: Tensor, mask: Tensor, greedy: bool = False) -> Tensor:
        """Sampled actions, or the most probable ones."""
        policy = self.get_policy(obs, mask)
        parts = [each.argmax(-1, keepdim=True) if greedy else each.exp().multinomial(1) for each in policy]
        return torch.cat(parts, -1).view(-1, *self.action_shape)

    def evaluate_action(self, obs: Tensor, mask: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-probabilities of the actions, entropies, values)."""
        policy, parts = self.get_policy(obs, mask), action.view(*obs.shape[:-1], -1).split(1, -1)
        logprobs = [each.gather(-1, part) for each, part in zip(policy, parts, strict=True)]
        entropies = [-each.exp() * each for each in policy]
        return torch.cat(logprobs, -1).sum(-1), torch.cat(entropies, -1).sum(-1), self.get_value(obs)


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    envs = make_envs(args.env_id, args.num_envs)
    run = Run("ppo_kl", args, args.env_id, steps_per_iteration=batch_size)
    device = run.device
    agent = Agent(envs, args.hidden).to(device)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    get_action, evaluate_action = agent.get_action, agent.evaluate_action
    if args.compile or args.cudagraphs:
        mode = "reduce-overhead" if args.cudagraphs else None
        get_action, evaluate_action = (torch.compile(each, mode=mode) for each in (get_action, evaluate_action))

    def tensors(obs: np.ndarray, infos: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Observations and masks of valid actions, on the device."""
        mask = infos.get("action_mask", np.ones((len(obs), sum(agent.nvec))))
        return torch.as_tensor(obs, dtype=torch.float32, device=device), torch.as_tensor(mask == 1, device=device)

    def evaluate_agent() -> list[float]:
        def act(obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
            return agent.get_action(*tensors(obs, infos), greedy=True).cpu().numpy()

        return evaluate(partial(make_envs, args.env_id), act, args.eval_episodes, args.seed, run.video_folder())

    # Detail 1: num_envs × num_steps transitions per iteration. Episodes continue in the next iteration.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, *envs.single_observation_space.shape, device=device)
    masks = torch.ones(*shape, sum(agent.nvec), dtype=torch.bool, device=device)
    actions = torch.zeros(*shape, *agent.action_shape, dtype=torch.int64, device=device)
    rewards, dones = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    next_obs, next_mask = tensors(*envs.reset(seed=derive_seed(args.seed, run.first_iteration)))
    saved = run.load_checkpoint(agent=agent, optimizer=optimizer, envs=envs)
    kl_coef = saved.get("kl_coef", args.kl_coef)
    if "envs" in saved:
        next_obs, next_mask = saved["next_obs"].to(device), saved["next_mask"].to(device)

    for iteration in run.iterations():
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

        episodes = []
        for step in range(args.num_steps):
            obs[step], masks[step] = next_obs, next_mask
            with torch.no_grad():
                actions[step] = get_action(next_obs, next_mask)
            next_array, reward, terminations, truncations, infos = envs.step(actions[step].cpu().numpy())
            next_obs, next_mask = tensors(next_array, infos)
            rewards[step] = torch.as_tensor(reward)
            dones[step] = torch.as_tensor(terminations | truncations)

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            cut = truncations & ~terminations
            if args.bootstrap_truncated and cut.any():
                final_obs = torch.as_tensor(np.stack(infos["final_obs"][cut]), dtype=torch.float32, device=device)
                with torch.no_grad():
                    rewards[step, torch.as_tensor(cut)] += args.gamma * agent.get_value(final_obs)
            if "episode" in infos:
                ended = infos["_episode"]
                episodes += zip(infos["episode"]["r"][ended], infos["episode"]["l"][ended], strict=True)

        # Detail 5: generalised advantage estimation.
        with torch.no_grad():
            # In one pass for all steps, because the environments only needed the actions.
            logprobs, _, values = agent.evaluate_action(obs, masks, actions)
            next_value = agent.get_value(next_obs)
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(args.num_envs, device=device)
        nextvalues = torch.cat([values[1:], next_value[None]])
        td_targets = rewards + args.gamma * nextvalues * (1 - dones)
        deltas = td_targets - values
        decays = args.gamma * args.gae_lambda * (1 - dones)
        for t in reversed(range(args.num_steps)):
            advantages[t] = lastgaelam = deltas[t] + decays[t] * lastgaelam

        b_obs, b_masks, b_actions = obs.flatten(0, 1), masks.flatten(0, 1), actions.flatten(0, 1)
        b_logprobs, b_values = logprobs.flatten(), values.flatten()
        b_advantages, b_td_targets = advantages.flatten(), td_targets.flatten()

        minibatch_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6: every transition is in one minibatch of an epoch.
            b_inds = torch.randperm(batch_size, device=device)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                newlogprob, entropy, newvalue = evaluate_action(b_obs[mb_inds], b_masks[mb_inds], b_actions[mb_inds])
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()

                # Detail 7: advantages are normalised per minibatch.
                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                # The policy loss without clipping, and the penalty (estimator k3, never negative).
                pg_loss = (-mb_advantages * ratio).mean()
                approx_kl = ((ratio - 1) - logratio).mean()

                # The value function learns the TD target.
                v_loss = 0.5 * ((newvalue - b_td_targets[mb_inds]) ** 2).mean()

                # Detail 10: one loss for policy, penalty, entropy bonus and value function.
                entropy_loss = entropy.mean()
                loss = pg_loss + kl_coef * approx_kl - args.ent_coef * entropy_loss + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                # Detail 11: the global norm of the gradients is limited.
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

                # Detail 12: debug variables. Both KL estimators are from http://joschu.net/blog/kl-approx.html.
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    seen = [pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, grad_norm]
                    minibatch_metrics.append(torch.stack(seen))

        # KL(old ‖ new) of the whole batch after the update. The estimates above are from before each step.
        with torch.no_grad():
            logratio = evaluate_action(b_obs, b_masks, b_actions)[0] - b_logprobs
            kl = float(((logratio.exp() - 1) - logratio).mean())
        if kl > 1.5 * args.kl_target:
            kl_coef *= 2
        elif kl < args.kl_target / 1.5:
            kl_coef = max(kl_coef / 2, MIN_KL_COEF)

        names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "grad_norm")
        means = torch.stack(minibatch_metrics).mean(0).tolist()
        metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
        metrics["losses/explained_variance"] = float(1 - (b_td_targets - b_values).var() / b_td_targets.var())
        metrics["losses/kl_after_update"], metrics["charts/kl_coef"] = kl, kl_coef
        metrics["charts/updates"] = len(minibatch_metrics)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/mean_return_100"] = float(np.mean(envs.return_queue)) if envs.return_queue else float("nan")
        if episodes:
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0)
        if run.evaluation_due():
            metrics["eval/mean_return"] = float(np.mean(evaluate_agent()))
        run.log(metrics, mean_return=metrics["charts/mean_return_100"])
        run.checkpoint(
            agent=agent, optimizer=optimizer, envs=envs, next_obs=next_obs, next_mask=next_mask, kl_coef=kl_coef
        )

    envs.close()
    run.save_model(agent=agent)
    return run.finish(evaluate_agent(), env_id=args.env_id, train_return_100=metrics["charts/mean_return_100"])


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__))
