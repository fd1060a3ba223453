"""PPO with an LSTM for discrete actions: details 32–36 of "The 37 Implementation Details of PPO" on top of ppo.py.

    python cleanrl_ppo/ppo_recurrent.py                                             # CartPole-v1
    python cleanrl_ppo/ppo_recurrent.py --env-id module:Id-v0                       # any task that needs memory
    python cleanrl_ppo/ppo_recurrent.py --resume                                    # continue after a crash
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_recurrent.py                        # two processes, averaged gradients

Works with any Gymnasium environment with Discrete or MultiDiscrete actions. ``diff cleanrl_ppo/ppo.py
cleanrl_ppo/ppo_recurrent.py`` shows the recurrent network, its state in rollouts and updates, and minibatches of whole
sequences. ppo_lstm.py is the same idea for GPU allocation. docs/reference/ppo_recurrent.md explains every metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

# Importing clustergym registers its environments, so --env-id can name them.
from clustergym.training import Run, TrainArgs, World, derive_seed, parse_args, run_trainer, vector
from clustergym.training.vector import EpisodeStatistics, VectorEnvs

# Replaces the logits of invalid actions. Their probability becomes exactly 0, without the NaN that 0 · −inf gives.
MASKED_LOGIT = -1e8


@dataclass
class Args(TrainArgs):
    env_id: str = "CartPole-v1"
    """Gymnasium id, with Discrete or MultiDiscrete actions. "module:Id-v0" imports the module first."""
    eval_episodes: int = 32
    """Number of episodes in an evaluation, with greedy actions and unseen seeds. 0 for no evaluation."""

    learning_rate: float = 2.5e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 32
    """Number of parallel environments per process."""
    num_steps: int = 64
    """Number of steps per environment between updates. The LSTM learns dependencies up to this length."""
    num_minibatches: int = 4
    """Number of minibatches per epoch. Each one holds whole sequences, so it must divide num_envs."""
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
    """Adapt kl_coef: double it if an iteration's KL exceeds 1.5 × kl_target, halve it below kl_target / 1.5. It starts
    at 1 if kl_coef is 0."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    hidden: int = 64
    """Width of the encoder and of the LSTM state."""


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


# ALGO LOGIC: memory


def init_lstm(lstm: nn.LSTM) -> nn.LSTM:
    """Initialise with orthogonal weights of gain 1 and zero biases."""
    for name, parameter in lstm.named_parameters():
        if "bias" in name:
            nn.init.constant_(parameter, 0.0)
        else:
            nn.init.orthogonal_(parameter, 1.0)
    return lstm


LSTMState = tuple[Tensor, Tensor]
"""Hidden and cell state, each of shape (1, envs, hidden)."""


class Agent(nn.Module):
    """Encoder and LSTM, shared by policy and value function."""

    def __init__(self, obs_size: int, num_actions: int | list[int], hidden: int = 64) -> None:
        super().__init__()
        self.components = [num_actions] if isinstance(num_actions, int) else num_actions
        self.encoder = nn.Sequential(layer_init(nn.Linear(obs_size, hidden)), nn.Tanh())
        self.lstm = init_lstm(nn.LSTM(hidden, hidden))
        self.actor_head = layer_init(nn.Linear(hidden, sum(self.components)), std=0.01)
        self.critic_head = layer_init(nn.Linear(hidden, 1), std=1.0)

    def initial_state(self, num_envs: int) -> LSTMState:
        """State at the start of an episode: zeros."""
        zeros = torch.zeros(1, num_envs, self.lstm.hidden_size, device=self.actor_head.weight.device)
        return zeros, zeros.clone()

    def remember(self, obs: Tensor, starts: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Run the LSTM over sequences. Returns features (steps, envs, hidden) and the state after the last step.

        ``starts`` (steps, envs), on the CPU, marks the first step of each episode; the state is reset there. The steps
        between two resets run through the LSTM in one call.
        """
        encoded = self.encoder(obs)
        cuts = [0, *(t for t in range(1, len(obs)) if bool(starts[t].any())), len(obs)]
        parts = []
        for begin, end in pairwise(cuts):
            keep = (~starts[begin]).to(encoded.device)[None, :, None]
            features, state = self.lstm(encoded[begin:end], (state[0] * keep, state[1] * keep))
            parts.append(features)
        return torch.cat(parts), state

    def forward(self, obs: Tensor, starts: Tensor, state: LSTMState) -> tuple[Tensor, Tensor, LSTMState]:
        """Returns (logits, values, state after the last step); see :meth:`remember`."""
        features, state = self.remember(obs, starts, state)
        return self.actor_head(features), self.critic_head(features).squeeze(-1), state

    def draw_noise(self, *shape: int) -> Tensor:
        """Gumbel noise for :meth:`act`, one number for each action."""
        noise = torch.empty(*shape, self.actor_head.out_features, device=self.actor_head.weight.device)
        return -noise.exponential_().log()

    def act(
        self, obs: Tensor, masks: Tensor | None, noise: Tensor | float, start: Tensor, state: LSTMState
    ) -> tuple[Tensor, LSTMState]:
        """Sample actions (Gumbel-max trick: the argmax of logits plus Gumbel noise). Noise 0 gives the best actions."""
        logits, _, state = self(obs[None], start[None], state)
        scores = mask_logits(logits[0], masks) + noise
        return torch.stack([part.argmax(-1) for part in scores.split(self.components, -1)], -1).squeeze(-1), state

    def get_value(self, obs: Tensor, start: Tensor, state: LSTMState) -> Tensor:
        """Values (envs,) of observations (envs, features)."""
        return self(obs[None], start[None], state)[1][0]

    def evaluate_actions(
        self, obs: Tensor, actions: Tensor, masks: Tensor | None, starts: Tensor, state: LSTMState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-probabilities of the actions, entropies, values). Components of an action are independent."""
        logits, values, _ = self(obs, starts, state)
        logprobs, entropies = torch.zeros_like(values), torch.zeros_like(values)
        parts = mask_logits(logits, masks).split(self.components, -1)
        for part, chosen in zip(parts, actions.view(*values.shape, -1).unbind(-1), strict=True):
            all_logprobs = part.log_softmax(-1)
            logprobs = logprobs + all_logprobs.gather(-1, chosen[..., None]).squeeze(-1)
            entropies = entropies + categorical_entropy(all_logprobs)
        return logprobs, entropies, values


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# Environments and rollouts


def make_envs(env_id: str, num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Create the environments. With ``videos``, their first episodes are recorded to that folder."""
    return vector.make_vector_env(env_id, num_envs, "discrete", videos, same_step=True)


@dataclass
class Batch:
    """Training data of one update: sequences of shape (steps, envs, …), and the LSTM state at their start.

    ``starts`` is on the CPU, because it decides where sequences are cut. The other tensors are on the device.
    """

    obs: Tensor
    actions: Tensor
    masks: Tensor | None
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    starts: Tensor
    state: LSTMState

    def take(self, envs: Tensor) -> Batch:
        """The whole sequences of some environments. ``envs`` is on the CPU."""
        *columns, (hidden, cell) = vars(self).values()
        rows = (None if column is None else column[:, envs] for column in columns)
        return Batch(*rows, (hidden[:, envs], cell[:, envs]))


class Rollouts:
    """Collects experience with the current policy. Episodes and LSTM states continue from one rollout to the next."""

    def __init__(self, args: Args, agent: Agent, device: torch.device) -> None:
        self.args, self.agent, self.device = args, agent, device
        self.envs: VectorEnvs | None = None
        self.episodes = EpisodeStatistics(args.num_envs)

    def restart(self, seed: int) -> None:
        """Create new environments. A resumed run does so at the same iterations and continues identically."""
        self.close()
        self.envs = VectorEnvs(make_envs(self.args.env_id, self.args.num_envs), seed, self.device, self.episodes)
        self.state = self.agent.initial_state(self.args.num_envs)
        self.start = torch.ones(self.args.num_envs, dtype=torch.bool)

    def close(self) -> None:
        if self.envs is not None:
            self.envs.close()

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """Play num_steps steps in each environment. Returns the training data and the charts of finished episodes."""
        args, agent, device, envs = self.args, self.agent, self.device, self.envs
        assert envs is not None, "call restart() first"
        shape = (args.num_steps, args.num_envs)
        seen, steps, starts = [], [], []
        final_values = torch.zeros(shape, device=device)
        initial = (self.state[0].clone(), self.state[1].clone())
        with torch.inference_mode():
            for t, noise in enumerate(agent.draw_noise(*shape).unbind()):
                obs, masks = envs.obs, envs.masks
                actions, self.state = agent.act(obs, masks, noise, self.start, self.state)
                seen.append((obs, actions, masks))
                starts.append(self.start)
                steps.append(envs.step(actions))
                cut, last_obs = steps[-1].final_obs
                if len(cut):
                    state = (self.state[0][:, cut], self.state[1][:, cut])
                    final_values[t, cut] = agent.get_value(last_obs, torch.zeros(len(cut), dtype=torch.bool), state)
                self.start = steps[-1].terminated | steps[-1].truncated

        with torch.no_grad():
            obs, actions, masks = (None if each[0] is None else torch.stack(each) for each in zip(*seen, strict=True))
            rewards, terminations, truncations = (
                torch.stack(each).to(device) for each in list(zip(*steps, strict=True))[:3]
            )
            # In one pass: the environments only needed the actions.
            logprobs, _, values = agent.evaluate_actions(obs, actions, masks, torch.stack(starts), initial)
            next_value = agent.get_value(envs.obs, self.start, self.state)
            dones = terminations | truncations
            ends = terminations if args.bootstrap_truncated else dones
            inputs = (rewards, values, ends, dones, next_value, final_values)
            advantages, returns = compute_gae(*inputs, args.gamma, args.gae_lambda)
            if args.returns == "td":
                # With λ = 0, the return of GAE is the one-step target.
                _, returns = compute_gae(*inputs, args.gamma, 0.0)
        batch = Batch(obs, actions, masks, logprobs, advantages, returns, values, torch.stack(starts), initial)
        return batch, self.episodes.charts()


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: Batch, args: Args, clip_coef: float, kl_coef: float, world: World
) -> dict[str, float]:
    """Train on one rollout: several epochs of shuffled minibatches. Returns the mean of each metric."""
    parameters = list(agent.parameters())
    seen: list[Tensor] = []
    for _ in range(args.update_epochs):
        for envs in torch.randperm(args.num_envs).chunk(args.num_minibatches):
            mb = batch.take(envs)
            logprobs, entropies, new_values = agent.evaluate_actions(mb.obs, mb.actions, mb.masks, mb.starts, mb.state)
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
    """Returns of the evaluation episodes, played with greedy actions. With ``videos``, another one is recorded."""
    # Training derives its seeds from (seed, iteration, rank), so this key gives unseen ones.
    seed = derive_seed(args.seed, 0, 0, 1)

    def play(num_envs: int, videos: Path | None) -> list[float]:
        state, start = agent.initial_state(num_envs), torch.ones(num_envs, dtype=torch.bool)

        def act(obs: Tensor, masks: Tensor | None) -> Tensor:
            nonlocal state, start
            actions, state = agent.act(obs, masks, 0.0, start, state)
            start = torch.zeros_like(start)
            return actions

        return vector.play_episodes(VectorEnvs(make_envs(args.env_id, num_envs, videos), seed, device), act)

    return vector.play_and_record(play, args.eval_episodes, videos)


def train(args: Args, world: World) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line (on rank 0)."""
    if args.num_envs % args.num_minibatches:
        raise ValueError(
            f"num_envs is {args.num_envs} and num_minibatches is {args.num_minibatches}: num_envs must be a multiple, "
            "because each minibatch holds whole sequences"
        )
    device = world.device
    run = Run("ppo_recurrent", args, world, args.env_id, args.num_envs * args.num_steps)
    torch.manual_seed(args.seed)
    agent = Agent(*vector.space_sizes(make_envs(args.env_id, 1)), args.hidden).to(device)
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
