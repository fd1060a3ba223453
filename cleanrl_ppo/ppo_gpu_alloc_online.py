"""PPO agent that allocates GPU shares on a live node and learns online from feedback.

    python cleanrl_ppo/ppo_gpu_alloc_online.py --port 8080                             # or: clustergym agent serve
    python cleanrl_ppo/ppo_gpu_alloc_online.py --store DIR --token-file F --init-checkpoint CKPT
    python cleanrl_ppo/ppo_gpu_alloc_online.py --preset seed --no-rails --explore all  # the Gaussian agent of the task

    POST /allocate {"owner", "cores", "memory", "qos_class"} -> {"allocation_id", "cores", "memory", "decided_by", …}
    POST /feedback {"allocation_id", "actual_usage", "qos_met", "pods", "memory_used", "oom"} -> {"status", "reward"}
    GET /healthz /readyz /metrics /ui

The server (clustergym.agent) samples an action for each pod and stores it with its log-probability. Feedback turns it
into one experience. The learner process waits for 32 experiences and calls ``update`` here. The result is a new version
of the policy, which the server loads between two requests. By default the VPA rule decides, and the policy takes over
after a test says that it is better. See docs/reference/agent.md.

Compared with ppo.py, a batch is what has arrived since the last update, and there are no episodes: nothing is ever
done. Details 1-3, 5-8 and 10-12 apply; 25 for the Gaussian actor.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import clustergym.agent
from clustergym.agent.learner import Experiences
from clustergym.agent.server import serve
from clustergym.agent.settings import ServerSettings
from clustergym.agent.versions import State
from clustergym.common.extras import MissingExtra
from clustergym.common.logs import configure_logging
from clustergym.gpu_allocation.history import N_FEATURES
from clustergym.gpu_allocation.policy import OBS_CLIP, AllocationPolicy
from clustergym.gpu_allocation.space import STATE_NAMES
from clustergym.training.args import COUNT, POSITIVE, Range, parse_args

PRETRAINED = Path(clustergym.agent.__file__).with_name("pretrained.pt")
"""The policy of ``benchmarks/allocation/gpu_allocation.py --only qos --seeds 1``."""
INITIAL_BIAS = 3.0
"""In the untrained policy, the smallest share is less probable than the whole request by this power of e."""
log = logging.getLogger("clustergym.agent")


@dataclass
class Args:
    server: tyro.conf.OmitArgPrefixes[ServerSettings] = field(default_factory=ServerSettings)
    """Settings of the server and of the learner process."""
    preset: Literal["levels", "seed"] = "levels"
    """levels: a categorical policy over shares of the request, which sees the history of the owner. seed: a Gaussian
    policy over cores and memory with five features and textbook PPO (PRESETS). Other flags come before it."""
    init_checkpoint: Path | None = None
    """Checkpoint or model of ppo_gpu_alloc.py to start from; pretrained is the policy that comes with clustergym. It is
    ignored if the store has a policy."""
    resume: bool = True
    """Resume from an existing store. --no-resume refuses one that has been used."""
    seed: int = 1
    """Seed of the weights, the minibatches and the exploration."""

    learning_rate: float = 2e-3
    """Learning rate of Adam."""
    gamma: float = 0.0
    """Discount factor. 0, because feedback describes a single allocation and arrives in no particular order. With more,
    the value of the state at the feedback counts."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation, over the experiences in the order of their feedback."""
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
    """Number of shares of the request that the policy chooses from; 0 for a Gaussian policy. Not used with
    --init-checkpoint."""
    initial_std: float = 0.1
    """Standard deviation of a Gaussian policy at the start, whose actions are between 0 and 1. It is learned."""


PRESETS: dict[str, dict[str, Any]] = {"seed": {
    "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "update_epochs": 4, "target_kl": None, "clip_coef": 0.2,
    "ent_coef": 0.01, "vf_coef": 1.0, "max_grad_norm": 0.5, "levels": 0, "initial_std": 1.0,
}}  # fmt: skip
"""Defaults with ``--preset seed``: K = 4 epochs, and the value loss 0.5 · MSE (ours is half the squared error)."""
RANGES = {"minibatch_size": COUNT, "levels": Range(0, 1000), "initial_std": POSITIVE}


def layer_init(layer: nn.Linear, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """Actor and critic: two separate MLPs. clustergym.agent.policy runs the actor in numpy."""

    def __init__(self, obs_size: int, hidden: int = 64, levels: int = 24, std: float = 0.1) -> None:
        super().__init__()

        def mlp(outputs: int, gain: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, outputs), gain),
            )

        self.levels = levels
        self.actor = mlp(2 * levels or 2, 0.01)
        self.critic = mlp(1, 1.0)
        if not levels:
            # Detail 25: the standard deviation does not depend on the state.
            self.log_std = nn.Parameter(torch.full((2,), std).log())

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def get_policy(self, obs: Tensor) -> Independent:
        """The distribution of both components of the action: shares of the request, or cores and memory."""
        outputs = self.actor(obs)
        if self.levels:
            return Independent(Categorical(logits=outputs.unflatten(-1, (2, -1)), validate_args=False), 1)
        std = self.log_std.exp().expand_as(outputs)
        return Independent(Normal(outputs.sigmoid(), std, validate_args=False), 1)


def make_agent(state: State) -> Agent:
    """The network of a version of the policy."""
    weights = state["agent"]
    outputs = len(weights["actor.4.bias"])
    agent = Agent(len(state["statistics"]["mean"]), len(weights["actor.0.bias"]), outputs // 2 if outputs > 2 else 0)
    agent.load_state_dict(weights)
    return agent


def make_optimizer(agent: Agent, learning_rate: float) -> torch.optim.Adam:
    # Detail 3: Adam's epsilon.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


def initial_state(args: Args) -> State:
    """The first version of the policy: new weights, or the actor of ppo_gpu_alloc.py.

    The critic is new in any case, because there it was trained on other rewards.
    """
    torch.manual_seed(args.seed)
    if args.init_checkpoint is not None:
        path = PRETRAINED if args.init_checkpoint == Path("pretrained") else args.init_checkpoint
        found = AllocationPolicy.load(path)
        if found.recurrent:
            raise ValueError(f"--init-checkpoint {path} has an LSTM: the agent needs a policy of ppo_gpu_alloc.py")
        hidden, size = found.actor[0].weight.shape
        agent = Agent(size, hidden, found.levels, args.initial_std)
        agent.actor.load_state_dict(found.actor.state_dict())
        statistics = found.statistics or {"mean": torch.zeros(size), "var": torch.ones(size)}
    else:
        size = len(STATE_NAMES) + (N_FEATURES if args.levels else 0)
        agent = Agent(size, levels=args.levels, std=args.initial_std)
        # The observations are between 0 and 1, so their statistics are fixed. A Gaussian policy sees them as they are.
        statistics = {"mean": torch.zeros(size), "var": torch.ones(size)}
        if args.levels:
            statistics = {"mean": torch.full((size,), 0.5), "var": torch.full((size,), 0.09)}
            with torch.no_grad():
                # Before it has learned, the policy grants the request, and samples smaller shares less often.
                agent.actor[4].bias.copy_(torch.linspace(-INITIAL_BIAS, 0.0, args.levels).repeat(2))
    optimizer = make_optimizer(agent, args.learning_rate)
    return {
        "agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "experiences": 0,
        "statistics": {name: statistics[name].double() for name in ("mean", "var")},
    }  # fmt: skip


def update(state: State, batch: Experiences, args: Args) -> tuple[State, dict[str, float]]:
    """One PPO update: the new state, and metrics. If weights are not finite, it is discarded with its batch."""
    agent = make_agent(state)
    optimizer = make_optimizer(agent, args.learning_rate)
    optimizer.load_state_dict(state["optimizer"])
    optimizer.param_groups[0]["lr"] = args.learning_rate
    # After a crash, the same batch gives the same minibatches.
    torch.manual_seed(args.seed + state["version"])
    mean, var = state["statistics"]["mean"], state["statistics"]["var"]
    obs, next_obs = (
        ((each - mean) / torch.sqrt(var + 1e-8)).clamp(-OBS_CLIP, OBS_CLIP).float()
        for each in (batch.obs, batch.next_obs)
    )
    batch_size = len(obs)

    # Detail 5: generalised advantage estimation, without episodes. The values are those of this version: an experience
    # can be up to --max-policy-lag versions old.
    with torch.no_grad():
        values, next_values = agent.get_value(obs), agent.get_value(next_obs)
    deltas = batch.rewards + args.gamma * next_values - values
    advantages, lastgaelam = torch.zeros(batch_size), 0.0
    for t in reversed(range(batch_size)):
        advantages[t] = lastgaelam = deltas[t] + args.gamma * args.gae_lambda * lastgaelam
    returns = advantages + values

    minibatch_metrics = []
    # At most 16 minibatches: a backlog must not make updates longer and longer.
    num_minibatches = min(max(1, batch_size // args.minibatch_size), 16)
    for _ in range(args.update_epochs):
        # Detail 6: every experience is in one minibatch of an epoch.
        for mb_inds in torch.randperm(batch_size).tensor_split(num_minibatches):
            policy = agent.get_policy(obs[mb_inds])
            logratio = policy.log_prob(batch.actions[mb_inds]) - batch.logprobs[mb_inds]
            ratio = logratio.exp()

            # Detail 7: advantages are normalised per minibatch (off by default: rewards have a known scale).
            mb_advantages = advantages[mb_inds]
            if args.norm_adv:
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

            # Detail 8: the clipped surrogate objective.
            pg_loss1 = -mb_advantages * ratio
            pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()

            v_loss = 0.5 * ((agent.get_value(obs[mb_inds]) - returns[mb_inds]) ** 2).mean()

            # Detail 10: one loss for policy, entropy bonus and value function.
            entropy_loss = policy.entropy().mean()
            loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            # Detail 11: the global norm of the gradients is limited.
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

            # Detail 12: debug variables.
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                minibatch_metrics.append(torch.stack([pg_loss, v_loss, entropy_loss, approx_kl, clipfrac, grad_norm]))
        if args.target_kl is not None and approx_kl > args.target_kl:
            break

    if not all(torch.isfinite(tensor).all() for tensor in agent.state_dict().values()):
        log.error("update %d has non-finite weights and is discarded", state["version"] + 1)
        return state, {"discarded": 1.0}
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm")
    metrics = dict(zip(names, torch.stack(minibatch_metrics).detach().mean(0).tolist(), strict=True))
    metrics["explained_variance"] = float(1 - (returns - values).var() / returns.var())
    metrics["reward"], metrics["batch"] = float(batch.rewards.mean()), float(batch_size)
    return state | {
        "agent": agent.state_dict(), "optimizer": optimizer.state_dict(),
        "experiences": state["experiences"] + batch_size,
    }, metrics  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    args = parse_args(Args, __doc__, argv, PRESETS, RANGES)
    configure_logging()
    try:
        if args.levels == 1:
            raise ValueError("--levels is 1: expected 2 or more, or 0 for a Gaussian policy")
        start, learn_once = partial(initial_state, args), partial(update, args=args)
        serve(args.server, seed=args.seed, resume=args.resume, initial_state=start, learn_once=learn_once)
    except (MissingExtra, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
