"""PPO agent that allocates GPU shares on a live node and learns online from feedback.

    python cleanrl_ppo/ppo_gpu_alloc_online.py --port 8080
    python cleanrl_ppo/ppo_gpu_alloc_online.py --store DIR --token-file F --init-checkpoint CKPT --explore best-effort

    POST /allocate {"owner", "cores", "memory", "qos_class"} -> {"allocation_id", "cores", "memory", "feedback_token"}
    POST /feedback {"allocation_id", "actual_usage", "qos_met", "pods", "memory_used", "oom"} -> {"status", "reward"}
    GET /healthz /readyz /metrics /docs

The policy is that of ppo_gpu_alloc.py. Each allocation is a sampled action, stored with its log-probability. Feedback
turns it into one experience. A learner process waits for 32 experiences, makes a PPO update and replaces the
checkpoint. The server loads the new policy between two requests. The checkpoint records the last feedback that it has
learned from, so a crash never loses an experience and never learns from one twice.

This file holds the policy and the update. The package clustergym.agent holds the server, the store and the learner
process. See docs/reference/agent.md.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import clustergym.agent
from clustergym.agent.learner import Experiences, State
from clustergym.agent.logs import setup_logging
from clustergym.agent.server import serve
from clustergym.agent.settings import ServerSettings, check_positive
from clustergym.agent.store import STORE_SCHEMA
from clustergym.agent.versions import CHECKPOINT_KIND
from clustergym.common.extras import MissingExtra
from clustergym.gpu_allocation.history import N_FEATURES
from clustergym.gpu_allocation.space import STATE_NAMES
from clustergym.training import (
    CHECKPOINT_NAME,
    BaseArgs,
    CheckpointError,
    RunLogger,
    World,
    choose_device,
    derive_seed,
    load_checkpoint,
    parse_args,
    plain_args,
    save_model,
)

NORM_CLIP = 10.0
PRETRAINED = Path(clustergym.agent.__file__).with_name("pretrained.pt")
"""The policy of ``benchmarks/gpu_allocation.py --only history --seeds 1``."""
log = logging.getLogger("clustergym.agent")


@dataclass
class Args(BaseArgs):
    server: tyro.conf.OmitArgPrefixes[ServerSettings] = field(default_factory=ServerSettings)
    """Settings of the server and of the learner process."""
    init_checkpoint: Path | None = None
    """Checkpoint or model.pt of ppo_gpu_alloc.py to start from; pretrained is the policy that comes with clustergym. It
    is ignored if the store has a checkpoint."""
    run_dir: Path | None = None
    """Folder for TensorBoard logs and the saved model. Default: the store."""
    resume: bool = True
    """Resume from an existing store. --no-resume refuses one that has been used."""
    cuda: bool = False
    """Learn on the GPU. The network is small, so it is better to leave the GPU to the pods."""

    learning_rate: float = 2e-3
    """Learning rate of Adam."""
    gamma: float = 0.0
    """Discount factor. 0, because feedback describes a single allocation and arrives in no particular order. With more,
    the value of the state at the feedback counts."""
    update_epochs: int = 10
    """Number of epochs per update."""
    target_kl: float | None = 0.02
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    minibatch_size: int = 32
    """Minimum size of a minibatch. A large batch is split into at most 16 minibatches."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio."""
    ent_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    action_scale: float = 0.1
    """Initial standard deviation of an action, whose range is 1. Not used with --init-checkpoint."""
    min_std: float = 0.01
    """Minimum standard deviation of an action. The pods of a node change, so exploration must not stop."""


# ALGO LOGIC: functions that are identical in every trainer (tests/test_trainers_agree.py)


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear | nn.Conv2d:
    """Initialise a layer with orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


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


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 for perfect values, 0 for constant ones, NaN for constant returns."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# ALGO LOGIC: continuous actions


def gaussian_logprob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of independent normal components, summed over the last dimension."""
    deviations = (actions - mean) / std
    return (-0.5 * deviations**2 - (std.log() + 0.5 * np.log(2 * np.pi))).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of independent normal components, summed over the last dimension."""
    return (0.5 + 0.5 * np.log(2 * np.pi) + std.log()).sum(-1)


class RunningMeanStd:
    """Running mean and variance of the rows of all ranks, updated batch by batch (Chan et al., 1979)."""

    def __init__(self, shape: tuple[int, ...] = (), world: World | None = None) -> None:
        self.world = world or World()
        # NumPy: torch takes several times as long for a few numbers per step.
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: Tensor | np.ndarray) -> None:
        """Add a batch of rows (n, *shape)."""
        mean, var, n = self.world.moments(np.asarray(rows, np.float64))
        self.count += n
        new = n / self.count
        delta = mean - self.mean
        self.mean = self.mean + new * delta
        self.var = self.var + new * (var - self.var + (1 - new) * delta**2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("mean", "var", "count")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), float(state["count"])


def normalize_obs(obs: Tensor, statistics: RunningMeanStd) -> Tensor:
    """Normalise by the running mean and variance and clip to ±10."""
    scaled = (obs.numpy() - statistics.mean) / np.sqrt(statistics.var + 1e-8)
    return torch.from_numpy(scaled).clamp(-NORM_CLIP, NORM_CLIP).float()


class Agent(nn.Module):
    """Actor and critic. The policy is Gaussian: a sigmoid gives the mean, the standard deviation is a parameter."""

    def __init__(self, obs_size: int, num_actions: int = 2, hidden: int = 64, action_scale: float = 0.2) -> None:
        super().__init__()

        def network(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.actor = network(num_actions, 0.01).append(nn.Sigmoid())
        self.critic = network(1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.action_scale = action_scale

    def std(self) -> Tensor:
        """Standard deviation of the actions (actions,). It equals ``action_scale`` if log_std is 0."""
        return self.action_scale * self.log_std.exp()

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (mean actions, values)."""
        return self.actor(obs), self.get_value(obs)


class Policy:
    """The actor in numpy, for the server: a request is a single row, for which numpy is faster than torch."""

    def __init__(self, state: State) -> None:
        weights = {name: tensor.cpu().numpy().astype(np.float32) for name, tensor in state["agent"].items()}
        statistics = {name: tensor.cpu().numpy() for name, tensor in state["statistics"].items()}
        self.version: int = state["version"]
        self.obs_size = len(statistics["mean"])
        self._mean, self._scale = statistics["mean"], 1.0 / np.sqrt(statistics["var"] + 1e-8)
        self._actor, self._critic = (
            [(weights[f"{name}.{i}.weight"].T.copy(), weights[f"{name}.{i}.bias"]) for i in (0, 2, 4)]
            for name in ("actor", "critic")
        )
        self.std = state["action_scale"] * np.exp(weights["log_std"].astype(np.float64))
        self._log_scale = float(np.log(self.std).sum()) + math.log(2 * math.pi)

    def _normalize(self, obs: np.ndarray) -> np.ndarray:
        # np.clip takes longer than both of these.
        return np.maximum(np.minimum((obs - self._mean) * self._scale, NORM_CLIP), -NORM_CLIP).astype(np.float32)

    @staticmethod
    def _run(layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> np.ndarray:
        for weight, bias in layers[:-1]:
            x = np.maximum(x @ weight + bias, 0.0)
        weight, bias = layers[-1]
        return x @ weight + bias

    def mean(self, obs: np.ndarray) -> np.ndarray:
        """Mean action (2,) for one observation."""
        return 1.0 / (1.0 + np.exp(-self._run(self._actor, self._normalize(obs)).astype(np.float64)))

    def evaluate(self, obs: np.ndarray) -> tuple[np.ndarray, float]:
        """Mean action (2,) and V(obs) for one observation."""
        x = self._normalize(obs)
        mean = 1.0 / (1.0 + np.exp(-self._run(self._actor, x).astype(np.float64)))
        return mean, float(self._run(self._critic, x)[0])

    def sample(self, mean: np.ndarray, rng: np.random.Generator | None) -> tuple[np.ndarray, float]:
        """An action and its log-probability; the mean itself if ``rng`` is None. Actions are not clipped."""
        if rng is None:
            return mean, -self._log_scale
        noise = rng.standard_normal(2)
        return mean + self.std * noise, float(-0.5 * (noise @ noise)) - self._log_scale


# Checkpoints


def make_agent(state: State) -> tuple[Agent, RunningMeanStd]:
    """The network of a checkpoint and the statistics that normalise its observations."""
    statistics = RunningMeanStd()
    statistics.load_state_dict(state["statistics"])
    agent = Agent(len(statistics.mean), 2, len(state["agent"]["actor.0.bias"]), state["action_scale"])
    agent.load_state_dict(state["agent"])
    return agent, statistics


def untrained(action_scale: float) -> State:
    """New weights. The observations are between 0 and 1, so their statistics are fixed."""
    statistics = RunningMeanStd((len(STATE_NAMES) + N_FEATURES,))
    statistics.mean += 0.5
    statistics.var *= 0.09
    agent = Agent(len(statistics.mean), action_scale=action_scale)
    return {
        "agent": agent.state_dict(),
        "statistics": statistics.state_dict(),
        "action_scale": action_scale,
        "env_id": "GPUAllocationHistory-v0",
    }


def pretrained(path: Path) -> State:
    """The policy of ppo_gpu_alloc.py. The value function is new, because there it was trained on other rewards."""
    path = PRETRAINED if path == Path("pretrained") else path
    try:
        found = load_checkpoint(path, "ppo_gpu_alloc")
        statistics = found["rollouts"]["statistics"]
    except CheckpointError:
        found = load_checkpoint(path, "ppo_gpu_alloc-model")
        statistics = found["statistics"]
    args = found["args"]
    if args.get("levels"):
        raise ValueError(f"{path} holds a categorical policy: the agent needs a Gaussian one (--levels 0)")
    if not args["norm_obs"]:
        statistics = RunningMeanStd((len(statistics["mean"]),)).state_dict()
    agent = Agent(len(statistics["mean"]), 2, args["hidden"], args["action_scale"])
    new_critic = agent.critic.state_dict()
    agent.load_state_dict(found["agent"])
    agent.critic.load_state_dict(new_critic)
    return {
        "agent": agent.state_dict(),
        "statistics": statistics,
        "action_scale": args["action_scale"],
        "env_id": args["env_id"],
    }


def initial_state(args: Args) -> State:
    """Content of the first checkpoint."""
    torch.manual_seed(args.seed)
    state = untrained(args.action_scale) if args.init_checkpoint is None else pretrained(args.init_checkpoint)
    agent, _ = make_agent(state)
    return state | {
        "optimizer": make_optimizer(agent, args.learning_rate).state_dict(),
        "version": 0,
        "learned_through": 0,
        "experiences": 0,
        "store_schema": STORE_SCHEMA,
        "args": plain_args(args),
    }


def export_model(args: Args, state: State) -> None:
    """Save the policy in the format of ppo_gpu_alloc.py, for ``clustergym eval``."""
    hidden = len(state["agent"]["actor.0.bias"])
    network = {"env_id": state["env_id"], "norm_obs": True, "hidden": hidden, "action_scale": state["action_scale"]}
    folder, weights = args.run_dir or args.server.store, {key: state[key] for key in ("agent", "statistics")}
    save_model(folder, "ppo_gpu_alloc", plain_args(args) | network, **weights)


# Learning, in the learner process


def update(agent: Agent, optimizer: torch.optim.Adam, batch: Experiences, args: Args) -> dict[str, float]:
    """One PPO update. Returns metrics, averaged over its minibatches."""
    with torch.no_grad():
        # The values are those of this version: an experience can be up to --max-policy-lag versions old.
        values, next_values = agent.get_value(batch.obs), agent.get_value(batch.next_obs)
        # One row of steps, one column per experience: they come from different pods, so none continues another.
        ends = torch.ones_like(batch.dones)[None]
        advantages, returns = compute_gae(
            batch.rewards[None], values[None], batch.dones[None], ends, next_values, next_values[None], args.gamma, 1.0
        )
        advantages, returns = advantages[0], returns[0]
    seen = []
    for _ in range(args.update_epochs):
        # At most 16 minibatches: a backlog must not make updates longer and longer.
        minibatches = min(max(1, len(values) // args.minibatch_size), 16)
        for rows in torch.randperm(len(values)).to(values.device).tensor_split(minibatches):
            means, new_values = agent(batch.obs[rows])
            std = agent.std()
            logratio = gaussian_logprob(batch.actions[rows], means, std) - batch.logprobs[rows]
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            mb_advantages = normalize_advantages(advantages[rows]) if args.norm_adv else advantages[rows]
            pg_loss = policy_loss(ratio, mb_advantages, args.clip_coef)
            v_loss = value_loss(new_values, values[rows], returns[rows], None)
            entropy = gaussian_entropy(std)
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                agent.log_std.clamp_(min=math.log(args.min_std / agent.action_scale))
                approx_kl = k3.mean()
                clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                seen.append(torch.stack([pg_loss, v_loss, entropy, k1.mean(), approx_kl, clipfrac, grad_norm]))
        if args.target_kl is not None and approx_kl.item() > args.target_kl:
            break
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    averages = torch.stack(seen).detach().mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, averages, strict=True)}
    std_cores, std_memory = agent.std().tolist()
    return metrics | {
        "losses/explained_variance": explained_variance(values, returns),
        "charts/reward": float(batch.rewards.mean()),
        "charts/batch": float(len(values)),
        "charts/skipped": float(batch.skipped),
        "charts/std_cores": std_cores,
        "charts/std_memory": std_memory,
    }


def learn_once(state: State, batch: Experiences, args: Args, device: torch.device) -> tuple[State, dict[str, float]]:
    """The state after one update, and metrics. If weights are not finite, the update is discarded with its batch."""
    agent, statistics = make_agent(state)
    agent = agent.to(device)
    optimizer = make_optimizer(agent, args.learning_rate)
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate
    # After a crash, the same batch gives the same minibatches.
    torch.manual_seed(derive_seed(args.seed, state["version"]))
    obs, next_obs = normalize_obs(batch.obs, statistics), normalize_obs(batch.next_obs, statistics)
    metrics = update(agent, optimizer, replace(batch, obs=obs, next_obs=next_obs).to(device), args)
    after = state | {"learned_through": batch.through, "args": plain_args(args)}
    if not all(torch.isfinite(tensor).all() for tensor in agent.state_dict().values()):
        log.error("update %d has non-finite weights and is discarded", state["version"] + 1)
        return after, {"charts/discarded": 1.0}
    return after | {
        "agent": agent.cpu().state_dict(),
        "optimizer": optimizer.state_dict(),
        "version": state["version"] + 1,
        "experiences": state["experiences"] + len(batch.rewards),
    }, metrics


def open_logger(version: int, args: Args) -> RunLogger:
    """A TensorBoard log, or none if TensorBoard is not installed: an image for a node does not need it."""
    folder = args.run_dir or args.server.store
    try:
        project, entity = args.wandb_project_name, args.wandb_entity
        return RunLogger(folder, plain_args(args), args.track, project, start_step=version, entity=entity)
    except ImportError as error:
        log.info("no metrics are logged: %s", error)
        return RunLogger(folder, {}, enabled=False)


def main() -> None:
    args = parse_args(Args, __doc__)
    setup_logging()
    checkpoint = args.server.store / CHECKPOINT_NAME
    if args.init_checkpoint is not None and checkpoint.exists():
        log.info("%s exists: --init-checkpoint is ignored", checkpoint)
    try:
        check_positive(args, "minibatch_size", "min_std", "action_scale")
        if not 0 <= args.gamma <= 1:
            raise ValueError(f"--gamma is {args.gamma}: expected 0 to 1")
        device = choose_device(args.cuda, deterministic=args.torch_deterministic)
        serve(
            args.server,
            seed=args.seed,
            resume=args.resume,
            initial_state=partial(initial_state, args),
            make_policy=Policy,
            learn_once=partial(learn_once, args=args, device=device),
            open_logger=partial(open_logger, args=args),
        )
        if args.save_model:
            export_model(args, load_checkpoint(checkpoint, CHECKPOINT_KIND))
    except (MissingExtra, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
