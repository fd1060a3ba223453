"""PPO agent that allocates GPU shares on a live node and learns online from feedback.

    python cleanrl_ppo/ppo_gpu_alloc_online.py --port 8080
    python cleanrl_ppo/ppo_gpu_alloc_online.py --store DIR --token-file F --init-checkpoint CKPT --explore best-effort

    POST /allocate {"owner", "cores", "memory", "qos_class"} -> {"allocation_id", "cores", "memory", "feedback_token"}
    POST /feedback {"allocation_id", "actual_usage", "qos_met", "pods", "memory_used", "oom"} -> {"status", "reward"}
    GET /healthz /readyz /metrics /docs

The policy is the categorical one of ppo_gpu_alloc.py (--preset levels), which chooses shares of the request. Each
allocation is a sampled pair of shares, stored with its log-probability. Feedback turns it into one experience. A
learner process waits for 32 experiences, makes a PPO update and replaces the checkpoint. The server loads the new
policy between two requests. The checkpoint records the last feedback that it has learned from, so a crash never loses
an experience and never learns from one twice.

This file holds the policy and the update. The package clustergym.agent holds the server, the store and the learner
process. See docs/reference/agent.md.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import clustergym.agent
from clustergym.agent.database import STORE_SCHEMA
from clustergym.agent.learner import Experiences, State
from clustergym.agent.logs import setup_logging
from clustergym.agent.server import serve
from clustergym.agent.settings import ServerSettings, check_positive
from clustergym.agent.versions import CHECKPOINT_KIND
from clustergym.common.extras import MissingExtra
from clustergym.gpu_allocation.history import N_FEATURES
from clustergym.gpu_allocation.policy import MIN_SHARES
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
"""The policy of ``benchmarks/gpu_allocation.py --only qos --seeds 1``."""
INITIAL_BIAS = 3.0
"""In the untrained policy, the smallest share is less probable than the whole request by this power of e."""
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
    target_kl: float | None = 0.05
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    minibatch_size: int = 32
    """Minimum size of a minibatch. A large batch is split into at most 16 minibatches."""
    norm_adv: bool = False
    """Normalise advantages per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio."""
    ent_coef: float = 0.03
    """Coefficient of the entropy bonus, in units of the reward. The pods of a node change, so exploration must not
    stop."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    levels: int = 24
    """Number of shares of the request that the policy chooses from. Not used with --init-checkpoint."""


# ALGO LOGIC: functions that are identical in every trainer (tests/trainers/test_trainers_agree.py)


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


# ALGO LOGIC: a categorical policy


def categorical_entropy(logprobs: Tensor) -> Tensor:
    """Entropy from normalised log-probabilities of shape (…, actions). Masked actions contribute exactly 0."""
    return -(logprobs.exp() * logprobs).sum(-1)


def level_logprobs(logits: Tensor) -> Tensor:
    """(B, 2, levels) log-probabilities of the shares of cores and memory, from the outputs of the actor."""
    return logits.unflatten(-1, (2, -1)).log_softmax(-1)


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
    """Actor and critic. The policy is categorical: logits of the shares of cores and of memory."""

    def __init__(self, obs_size: int, hidden: int = 64, levels: int = 24) -> None:
        super().__init__()

        def network(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.actor = network(2 * levels, 0.01)
        self.critic = network(1, 1.0)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (logits of the shares, values)."""
        return self.actor(obs), self.get_value(obs)


class Policy:
    """The networks in numpy, for the server: a request is a single row, for which numpy is faster than torch."""

    def __init__(self, state: State) -> None:
        weights = {name: tensor.cpu().float() for name, tensor in state["agent"].items()}
        statistics = state["statistics"]
        self.version: int = state["version"]
        self.obs_size = len(statistics["mean"])
        self.levels = levels_of(weights)
        self._mean = statistics["mean"].float().numpy()
        self._scale = (statistics["var"] + 1e-8).rsqrt().float().numpy()
        # Actor and critic side by side in one network: the number of operations counts, not their size.
        first, *later = (
            [weights[f"{network}.{i}.{kind}"] for network in ("actor", "critic")]
            for i in (0, 2, 4)
            for kind in ("weight", "bias")
        )
        joined = [torch.cat(first), *(torch.block_diag(*p) if p[0].ndim == 2 else torch.cat(p) for p in later)]
        self._layers = [(w.T.numpy().copy(), b.numpy()) for w, b in zip(joined[::2], joined[1::2], strict=True)]

    def _run(self, obs: np.ndarray) -> np.ndarray:
        """Outputs (…, 2 · levels + 1): logits and V(obs)."""
        # np.clip takes longer than both of these.
        x = np.maximum(np.minimum((obs - self._mean) * self._scale, NORM_CLIP), -NORM_CLIP)
        *hidden, (weight, bias) = self._layers
        for w, b in hidden:
            x = np.maximum(x @ w + b, 0.0)
        return x @ weight + bias

    def logits(self, obs: np.ndarray) -> np.ndarray:
        """Logits (…, 2, levels) of the shares of cores and memory for observations (…, features)."""
        return self._run(obs)[..., :-1].reshape(*obs.shape[:-1], 2, self.levels)

    def evaluate(self, obs: np.ndarray) -> tuple[np.ndarray, float]:
        """Logits (2, levels) and V(obs) for one observation."""
        outputs = self._run(obs)
        return outputs[:-1].reshape(2, self.levels), float(outputs[-1])

    def choose(self, logits: np.ndarray, rng: np.random.Generator | None) -> tuple[np.ndarray, float]:
        """Indices (2,) of sampled shares and their log-probability; of the most probable shares if ``rng`` is None."""
        if rng is None:
            return logits.argmax(1), 0.0
        chosen, log_prob = [], 0.0
        for row, u in zip(logits.tolist(), rng.random(2).tolist(), strict=True):
            # Lists: numpy takes longer for so few numbers.
            top = max(row)
            sums = list(accumulate(math.exp(x - top) for x in row))
            k = min(bisect_right(sums, u * sums[-1]), self.levels - 1)
            chosen.append(k)
            log_prob += row[k] - top - math.log(sums[-1])
        return np.array(chosen), log_prob

    def shares(self, chosen: np.ndarray) -> tuple[float, float]:
        """The shares of the requested cores and memory with these indices (2,)."""
        (cores, memory), top = chosen.tolist(), self.levels - 1
        return (
            MIN_SHARES[0] + (1.0 - MIN_SHARES[0]) * cores / top,
            MIN_SHARES[1] + (1.0 - MIN_SHARES[1]) * memory / top,
        )


# Checkpoints


def levels_of(weights: dict[str, Tensor]) -> int:
    """Number of shares that a network chooses from."""
    outputs = len(weights["actor.4.bias"])
    if outputs < 4:
        raise ValueError("the checkpoint holds a Gaussian policy: the agent needs a categorical one (--preset levels)")
    return outputs // 2


def make_agent(state: State) -> tuple[Agent, RunningMeanStd]:
    """The network of a checkpoint and the statistics that normalise its observations."""
    statistics = RunningMeanStd()
    statistics.load_state_dict(state["statistics"])
    weights = state["agent"]
    agent = Agent(len(statistics.mean), len(weights["actor.0.bias"]), levels_of(weights))
    agent.load_state_dict(weights)
    return agent, statistics


def untrained(levels: int) -> State:
    """New weights. The observations are between 0 and 1, so their statistics are fixed."""
    statistics = RunningMeanStd((len(STATE_NAMES) + N_FEATURES,))
    statistics.mean += 0.5
    statistics.var *= 0.09
    agent = Agent(len(statistics.mean), levels=levels)
    with torch.no_grad():
        # Before it has learned, the policy grants the request, and samples smaller shares less often.
        agent.actor[4].bias.copy_(torch.linspace(-INITIAL_BIAS, 0.0, levels).repeat(2))
    return {
        "agent": agent.state_dict(),
        "statistics": statistics.state_dict(),
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
    args, weights = found["args"], found["agent"]
    if not args["norm_obs"]:
        statistics = RunningMeanStd((len(statistics["mean"]),)).state_dict()
    agent = Agent(len(statistics["mean"]), len(weights["actor.0.bias"]), levels_of(weights))
    agent.actor.load_state_dict({k.removeprefix("actor."): t for k, t in weights.items() if k.startswith("actor.")})
    return {"agent": agent.state_dict(), "statistics": statistics, "env_id": args["env_id"]}


def initial_state(args: Args) -> State:
    """Content of the first checkpoint."""
    torch.manual_seed(args.seed)
    state = untrained(args.levels) if args.init_checkpoint is None else pretrained(args.init_checkpoint)
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
    weights = state["agent"]
    network = {"hidden": len(weights["actor.0.bias"]), "levels": levels_of(weights)}
    network |= {"env_id": state["env_id"], "norm_obs": True}
    folder = args.run_dir or args.server.store
    save_model(folder, "ppo_gpu_alloc", plain_args(args) | network, agent=weights, statistics=state["statistics"])


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
            logits, new_values = agent(batch.obs[rows])
            logprobs = level_logprobs(logits)
            chosen = batch.actions[rows].long()[..., None]
            logratio = logprobs.gather(-1, chosen).sum((-1, -2)) - batch.logprobs[rows]
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            mb_advantages = normalize_advantages(advantages[rows]) if args.norm_adv else advantages[rows]
            pg_loss = policy_loss(ratio, mb_advantages, args.clip_coef)
            v_loss = value_loss(new_values, values[rows], returns[rows], None)
            entropy = categorical_entropy(logprobs).sum(-1).mean()
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                approx_kl = k3.mean()
                clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                seen.append(torch.stack([pg_loss, v_loss, entropy, k1.mean(), approx_kl, clipfrac, grad_norm]))
        if args.target_kl is not None and approx_kl.item() > args.target_kl:
            break
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    averages = torch.stack(seen).detach().mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, averages, strict=True)}
    return metrics | {
        "losses/explained_variance": explained_variance(values, returns),
        "charts/reward": float(batch.rewards.mean()),
        "charts/batch": float(len(values)),
        "charts/skipped": float(batch.skipped),
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
        check_positive(args, "minibatch_size")
        if args.levels < 2:
            raise ValueError(f"--levels is {args.levels}: expected 2 or more")
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
