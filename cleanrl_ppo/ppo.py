"""Proximal policy optimisation for discrete actions: the core details 1–13 of "The 37 Implementation Details of PPO".

    python cleanrl_ppo/ppo.py                                             # CartPole-v1
    python cleanrl_ppo/ppo.py --env-id Acrobot-v1 --total-timesteps 300000
    python cleanrl_ppo/ppo.py --resume                                    # after a crash: goes on as if nothing had happened
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo.py                        # two processes, averaged gradients

Any Gymnasium id with a Discrete action space works; observations may be Box, Discrete, MultiBinary or a Dict of them, and invalid
actions are masked where the environment offers an ``action_mask`` in its observation or its info. docs/ppo.md explains
every metric; docs/37-details.md says which line carries which detail.

What makes it fast, at no change to the algorithm: environments step as arrays where they can, a step of the rollout asks the
policy for logits only (noise for all steps is drawn at once, log-probabilities and values follow in one pass over the
whole rollout), and each epoch gathers its shuffled batch once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor, nn

# Importing anything of clustergym registers its environments, so that --env-id finds them.
from clustergym.common.statistics import ci95
from clustergym.training import (
    CHECKPOINT_NAME,
    Progress,
    RunLogger,
    World,
    check_same_args,
    derive_seed,
    init_distributed,
    load_checkpoint,
    plain_args,
    print_result,
    run_folder,
    save_checkpoint,
)

# Stands for minus infinity in masked logits: its probability is exactly 0, and 0 · −1e8 is 0 where 0 · −inf would be NaN.
MASKED_LOGIT = -1e8


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """Gymnasium id of an environment with a Discrete action space. "module:Id-v0" imports the module first."""
    seed: int = 1
    """Seed for all random number generators."""
    total_timesteps: int = 500_000
    """Total number of environment steps, over all environments and processes."""
    run_dir: Path | None = None
    """Folder for logs and checkpoints. Default: runs/ppo__<env>__<seed>."""
    resume: bool = False
    """Resume from the checkpoint in the run folder. The result is bit-identical to that of an uninterrupted run."""
    checkpoint_interval: int = 50
    """Iterations between checkpoints, 0 for none. Environments are reset at each checkpoint (and bootstrapped, as at a
    time limit), so that resuming is exact for every environment. Longer episodes are cut."""
    save_model: bool = False
    """Also save the trained network as model.pt in the run folder."""
    cuda: bool = False
    """Train on the GPU."""
    compile: bool = False
    """Compile the network with torch.compile."""
    track: bool = False
    """Also log to Weights & Biases. Without an account, the run is recorded offline."""
    eval_episodes: int = 32
    """Number of evaluation episodes after training, with greedy actions and unseen seeds. 0 for none."""

    learning_rate: float = 2.5e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 32
    """Number of parallel environments per process."""
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
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    kl_coef: float = 0.0
    """Coefficient of the penalty on KL(old policy ‖ new policy), estimated by k3."""
    kl_target: float | None = None
    """Adapt kl_coef: double it if an iteration's KL exceeds 1.5 × kl_target, halve it below kl_target / 1.5."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    hidden: int = 64
    """Width of the two hidden layers."""
    share_network: bool = False
    """Share the hidden layers between policy and value function."""


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
    """Half the mean squared error. With ``clip_coef``, the larger of the errors of the new and the clipped new value."""
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
    """Logits with those of invalid actions (mask 0) at −1e8: never sampled, no gradient, no share in the entropy."""
    return logits if mask is None else torch.where(mask, logits, MASKED_LOGIT)


def categorical_entropy(logprobs: Tensor, mask: Tensor | None) -> Tensor:
    """Entropy over the valid actions, from normalised log-probabilities of shape (…, actions)."""
    terms = logprobs.exp() * logprobs
    return -(terms if mask is None else torch.where(mask, terms, 0.0)).sum(-1)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 if the values are perfect, 0 if constant, NaN if returns are constant."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


class Agent(nn.Module):
    """Policy and value function: two multilayer perceptrons, or one trunk with two heads."""

    def __init__(self, obs_size: int, num_actions: int, hidden: int = 64, share_network: bool = False) -> None:
        super().__init__()

        def trunk() -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)), nn.Tanh(), layer_init(nn.Linear(hidden, hidden)), nn.Tanh()
            )

        self.actor_trunk = trunk()
        self.critic_trunk = self.actor_trunk if share_network else trunk()
        self.actor_head = layer_init(nn.Linear(hidden, num_actions), std=0.01)
        self.critic_head = layer_init(nn.Linear(hidden, 1), std=1.0)
        self.share_network = share_network

    def get_logits(self, obs: Tensor) -> Tensor:
        return self.actor_head(self.actor_trunk(obs))

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic_head(self.critic_trunk(obs)).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, values); a shared trunk is passed once."""
        features = self.actor_trunk(obs)
        value_features = features if self.share_network else self.critic_trunk(obs)
        return self.actor_head(features), self.critic_head(value_features).squeeze(-1)


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# Environments


def make_envs(env_id: str, num_envs: int) -> gym.vector.VectorEnv:
    """A batched implementation where the environment registers one, else copies stepped in turn that reset within the step."""
    spec = gym.spec(env_id)
    if spec.vector_entry_point is not None:
        envs = gym.make_vec(spec, num_envs=num_envs)
    else:
        envs = gym.make_vec(
            spec,
            num_envs=num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        )
    if not isinstance(envs.single_action_space, gym.spaces.Discrete):
        raise TypeError(f"{env_id} has action space {envs.single_action_space}: ppo.py needs Discrete actions")
    return envs


def flat_size(space: gym.Space) -> int:
    """Size of a flattened observation. Discrete spaces are one-hot encoded, ``action_mask`` is left out."""
    if isinstance(space, gym.spaces.Dict):
        return sum(flat_size(each) for key, each in space.items() if key != "action_mask")
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        return int(np.prod(space.shape))
    raise TypeError(
        f"observation space {space} is not supported: expected Box, Discrete, MultiBinary or a Dict of them"
    )


def flatten(space: gym.Space, obs: Any) -> np.ndarray:
    """Flatten a batch of observations to a float32 array of shape (envs, flat_size)."""
    if isinstance(space, gym.spaces.Dict):
        parts = [flatten(each, obs[key]) for key, each in space.items() if key != "action_mask"]
        return np.concatenate(parts, axis=1)
    if isinstance(space, gym.spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[np.asarray(obs) - int(space.start)]
    return np.asarray(obs, np.float32).reshape(len(obs), -1)


def action_mask(obs: Any, infos: dict[str, Any]) -> np.ndarray | None:
    """(envs, actions) of bool where the environment offers one in its observation or its info."""
    mask = obs.get("action_mask") if isinstance(obs, dict) else infos.get("action_mask")
    return None if mask is None else np.asarray(mask, bool)


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
        masks = None if self.masks is None else self.masks[rows]
        return Batch(
            self.obs[rows],
            self.actions[rows],
            masks,
            self.logprobs[rows],
            self.advantages[rows],
            self.returns[rows],
            self.values[rows],
        )


class Rollouts:
    """Plays the policy in vectorised environments; observations and episodes are carried from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, device: torch.device) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs: gym.vector.VectorEnv | None = None
        self.returns_100: deque[float] = deque(maxlen=100)
        """Returns of the last hundred episodes that ended."""

    def restart(self, seed: int) -> None:
        """New environments from a seed: nothing of the old ones is left, so a resumed run and an uninterrupted one agree."""
        self.close()
        args = self.args
        self.envs = make_envs(args.env_id, args.num_envs)
        self.space = self.envs.single_observation_space
        self.same_step = self.envs.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
        obs, infos = self.envs.reset(seed=seed)
        self.next_obs = flatten(self.space, obs)
        self.next_mask = action_mask(obs, infos)
        self.next_done = np.zeros(args.num_envs, bool)
        self.episode_return = np.zeros(args.num_envs)
        self.episode_length = np.zeros(args.num_envs, np.int64)

    def close(self) -> None:
        if self.envs is not None:
            self.envs.close()
            self.envs = None

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """One rollout of num_steps × num_envs transitions, and what its finished episodes returned."""
        args, agent, device, envs = self.args, self.agent, self.device, self.envs
        assert envs is not None, "restart() comes first"
        shape = (args.num_steps, args.num_envs)
        num_actions = int(envs.single_action_space.n)
        obs = torch.zeros(*shape, self.next_obs.shape[1])
        actions = torch.zeros(shape, dtype=torch.int64)
        rewards = torch.zeros(shape)
        terminations = torch.zeros(shape, dtype=torch.bool)
        truncations = torch.zeros(shape, dtype=torch.bool)
        valid = torch.ones(shape, dtype=torch.bool)
        masks = None if self.next_mask is None else torch.zeros(*shape, num_actions, dtype=torch.bool)
        final_obs: list[tuple[int, int, Any]] = []
        finished: list[tuple[float, int]] = []

        # Adding Gumbel noise to logits and taking the largest samples the categorical distribution.
        noise = -torch.empty(*shape, num_actions, device=device).exponential_().log()
        with torch.inference_mode():
            for step in range(args.num_steps):
                obs[step] = torch.from_numpy(self.next_obs)
                logits = agent.get_logits(obs[step].to(device))
                if masks is not None:
                    masks[step] = torch.from_numpy(self.next_mask)
                    logits = mask_logits(logits, masks[step].to(device))
                actions[step] = (logits + noise[step]).argmax(-1)
                # With NEXT_STEP autoreset the step after an episode's end only resets: it is played and not learned from.
                if not self.same_step:
                    valid[step] = torch.from_numpy(~self.next_done)
                next_obs, reward, terminated, truncated, infos = envs.step(actions[step].numpy())
                rewards[step] = torch.from_numpy(np.asarray(reward, np.float32))
                terminations[step] = torch.from_numpy(terminated)
                truncations[step] = torch.from_numpy(truncated)
                self.next_obs = flatten(self.space, next_obs)
                self.next_mask = action_mask(next_obs, infos)
                self.next_done = terminated | truncated
                self.episode_return += reward
                self.episode_length += 1 if self.same_step else valid[step].numpy()
                if self.next_done.any():
                    ended = np.flatnonzero(self.next_done)
                    finished += zip(
                        self.episode_return[ended].tolist(), self.episode_length[ended].tolist(), strict=True
                    )
                    self.episode_return[ended] = 0.0
                    self.episode_length[ended] = 0
                    if self.same_step:
                        final_obs += [(step, env, infos["final_obs"][env]) for env in np.flatnonzero(truncated)]

        with torch.no_grad():
            flat_obs = obs.flatten(0, 1).to(device)
            flat_actions = actions.flatten().to(device)
            flat_masks = None if masks is None else masks.flatten(0, 1).to(device)
            logits, flat_values = agent(flat_obs)
            logprobs = mask_logits(logits, flat_masks).log_softmax(-1).gather(-1, flat_actions[:, None]).squeeze(-1)
            values = flat_values.view(shape)
            next_value = agent.get_value(torch.from_numpy(self.next_obs).to(device))
            final_values = self._final_values(values, next_value, final_obs)
            terminations, truncations, rewards = (
                terminations.to(device),
                truncations.to(device),
                rewards.to(device),
            )
            dones = terminations | truncations
            ends = terminations if args.bootstrap_truncated else dones
            advantages, returns = compute_gae(
                rewards, values, ends, dones, next_value, final_values, args.gamma, args.gae_lambda
            )
            if args.returns == "td":
                # The one-step target is what GAE returns at λ = 0.
                _, returns = compute_gae(rewards, values, ends, dones, next_value, final_values, args.gamma, 0.0)
        batch = Batch(
            flat_obs, flat_actions, flat_masks, logprobs, advantages.flatten(), returns.flatten(), values.flatten()
        )
        if not self.same_step:
            batch = batch.take(valid.flatten().to(device))
        self.returns_100.extend(episode for episode, _ in finished)
        charts = {}
        if finished:
            charts["charts/episodic_return"] = float(np.mean([episode for episode, _ in finished]))
            charts["charts/episodic_length"] = float(np.mean([length for _, length in finished]))
        return batch, charts

    def _final_values(self, values: Tensor, next_value: Tensor, final_obs: list[tuple[int, int, Any]]) -> Tensor:
        """Values of the observations that episodes ended with, (steps, envs); meaningful where an episode was truncated."""
        if not self.same_step:
            # Under NEXT_STEP the last observation is the next row: its value is there already.
            return torch.cat([values[1:], next_value[None]])
        final_values = torch.zeros_like(values)
        if final_obs:
            steps, envs, items = zip(*final_obs, strict=True)
            stacked = concatenate(self.space, items, create_empty_array(self.space, len(items)))
            rows = torch.from_numpy(flatten(self.space, stacked)).to(values.device)
            final_values[list(steps), list(envs)] = self.agent.get_value(rows)
        return final_values


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, clip_coef: float, kl_coef: float, world: World
) -> dict[str, float]:
    """Several epochs of shuffled minibatches on one rollout; returns the means of what was seen."""
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        shuffled = batch.take(torch.randperm(len(batch), device=batch.obs.device))
        bounds = np.linspace(0, len(batch), args.num_minibatches + 1).astype(int)
        for start, end in pairwise(bounds):
            mb = shuffled.take(slice(start, end))
            logits, new_values = agent(mb.obs)
            all_logprobs = mask_logits(logits, mb.masks).log_softmax(-1)
            logprobs = all_logprobs.gather(-1, mb.actions[:, None]).squeeze(-1)
            logratio = logprobs - mb.logprobs
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages
            pg_loss = policy_loss(ratio, advantages, clip_coef if args.use_clipping else float("inf"))
            v_loss = value_loss(new_values, mb.values, mb.returns, clip_coef if args.clip_vloss else None)
            entropy = categorical_entropy(all_logprobs, mb.masks).mean()
            approx_kl = k3.mean()
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
            if kl_coef:
                loss = loss + kl_coef * approx_kl

            optimizer.zero_grad()
            loss.backward()
            world.average_gradients(agent.parameters())
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                clipfrac = ((ratio - 1.0).abs() > clip_coef).float().mean()
                seen.append(torch.stack([pg_loss, v_loss, entropy, k1.mean(), approx_kl, clipfrac, grad_norm]))
        if args.target_kl is not None and world.mean(float(seen[-1][4])) > args.target_kl:
            break
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    means = torch.stack(seen).detach().mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
    metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
    metrics["charts/updates"] = float(len(seen))
    return metrics


def evaluate(agent: Agent, args: Args, device: torch.device) -> list[float]:
    """Returns of held-out episodes, one an environment, played with the likeliest actions."""
    envs = make_envs(args.env_id, args.eval_episodes)
    space = envs.single_observation_space
    # The trailing 1 keeps these seeds apart from those of training, whose keys are (seed, iteration, rank).
    obs, infos = envs.reset(seed=derive_seed(args.seed, 0, 0, 1))
    returns = np.zeros(args.eval_episodes)
    playing = np.ones(args.eval_episodes, bool)
    with torch.inference_mode():
        while playing.any():
            logits = agent.get_logits(torch.from_numpy(flatten(space, obs)).to(device))
            mask = action_mask(obs, infos)
            logits = mask_logits(logits, None if mask is None else torch.from_numpy(mask).to(device))
            obs, reward, terminated, truncated, infos = envs.step(logits.argmax(-1).cpu().numpy())
            returns += reward * playing
            playing &= ~(terminated | truncated)
    envs.close()
    return returns.tolist()


def train(args: Args, world: World) -> dict[str, Any]:
    """The whole run; returns what the result line shows (on rank 0, where evaluation happens)."""
    device = world.device
    folder = run_folder(f"ppo__{args.env_id.replace('/', '-')}__{args.seed}", args.run_dir, args.resume)
    config = plain_args(args) | {"world_size": world.size}
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // (batch_size * world.size)
    if num_iterations < 1:
        raise ValueError(
            f"total_timesteps is {args.total_timesteps}: expected at least one rollout of {batch_size * world.size}"
        )

    torch.manual_seed(args.seed)
    probe = make_envs(args.env_id, 1)
    agent = Agent(
        flat_size(probe.single_observation_space), int(probe.single_action_space.n), args.hidden, args.share_network
    ).to(device)
    probe.close()
    optimizer = make_optimizer(agent, args.learning_rate)
    rollouts = Rollouts(args, agent, device)
    first, kl_coef = 1, args.kl_coef
    if args.resume and (folder / CHECKPOINT_NAME).exists():
        state = load_checkpoint(folder / CHECKPOINT_NAME, "ppo", device)
        check_same_args(state["args"], config)
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        rollouts.returns_100.extend(state["returns_100"])
        first, kl_coef = state["iteration"] + 1, state["kl_coef"]
    world.broadcast(agent)
    if args.compile:
        agent.compile()

    start_step = (first - 1) * batch_size * world.size
    total_steps = num_iterations * batch_size * world.size
    logger = RunLogger(folder, config, args.track, start_step=start_step, enabled=world.is_main)
    with logger, Progress(total_steps, start_step, enabled=world.is_main) as progress:
        for iteration in range(first, num_iterations + 1):
            interval = args.checkpoint_interval or num_iterations
            if (iteration - 1) % interval == 0:
                # Interrupted or not, every run passes here with the same network and then draws the same numbers.
                seed = derive_seed(args.seed, iteration, world.rank)
                torch.manual_seed(seed)
                rollouts.restart(seed)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, num_iterations)
            clip_coef = anneal(args.clip_coef, iteration, num_iterations) if args.anneal_clip else args.clip_coef

            batch, charts = rollouts.collect()
            metrics = update(agent, optimizer, batch, args, clip_coef, kl_coef, world)
            if args.kl_target is not None:
                kl = world.mean(metrics["losses/approx_kl"])
                kl_coef *= 2.0 if kl > 1.5 * args.kl_target else 0.5 if kl < args.kl_target / 1.5 else 1.0

            step = iteration * batch_size * world.size
            mean_return = float(np.mean(rollouts.returns_100)) if rollouts.returns_100 else float("nan")
            charts |= metrics | {
                "charts/mean_return_100": mean_return,
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/clip_coef": clip_coef,
                "charts/kl_coef": kl_coef,
                "charts/SPS": progress.steps_per_s(step),
            }
            logger.scalars(charts, step)
            progress.update(step, mean_return=mean_return)
            due = iteration % interval == 0 or iteration == num_iterations
            if world.is_main and args.checkpoint_interval and due:
                logger.flush()
                state = {
                    "args": config,
                    "agent": agent.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iteration": iteration,
                    "kl_coef": kl_coef,
                    "returns_100": list(rollouts.returns_100),
                }
                save_checkpoint(folder / CHECKPOINT_NAME, "ppo", state)
        rollouts.close()
        steps_per_s = progress.steps_per_s(total_steps)
        if not world.is_main:
            return {}

        returns = evaluate(agent, args, device) if args.eval_episodes else []
        if returns:
            logger.scalar("eval/mean_return", float(np.mean(returns)), total_steps)
    if args.save_model:
        save_checkpoint(folder / "model.pt", "ppo-model", {"args": config, "agent": agent.state_dict()})
    return {
        "env_id": args.env_id,
        "seed": args.seed,
        "mean_return": float(np.mean(returns)) if returns else None,
        "mean_return_ci95": ci95(returns) if returns else None,
        "train_return_100": float(np.mean(rollouts.returns_100)) if rollouts.returns_100 else None,
        "steps": total_steps,
        "steps_per_s": steps_per_s,
        "checkpoint": folder / CHECKPOINT_NAME if args.checkpoint_interval else None,
        "run_dir": folder,
    }


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    world = init_distributed(args.cuda)
    try:
        result = train(args, world)
    finally:
        world.close()
    if world.is_main:
        print_result(result)


if __name__ == "__main__":
    main()
