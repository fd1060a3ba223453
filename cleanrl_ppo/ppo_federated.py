"""Federated PPO: N agents learn in environments of their own, and each stays close to the policies of its neighbours.

    python cleanrl_ppo/ppo_federated.py --n-agents 2                          # two neighbours on CartPole-v1
    python cleanrl_ppo/ppo_federated.py --n-agents 4 --comm-matrix-config comm_matrices/4_agents.json --vf-coef 0.001
    torchrun --nproc-per-node 4 cleanrl_ppo/ppo_federated.py --n-agents 4     # one process per agent, the same curves
    python cleanrl_ppo/ppo_federated.py --env-id gpu_allocation_v0 --n-agents 4   # agent i is edge node i

Agent i minimises

    policy loss − ent_coef · entropy + vf_coef · value loss + penalty_coeff · Σ_j w_ij · KL(π_i ‖ π_j)

where w is the communication matrix and π_j the policy of neighbour j at the last exchange. The agents exchange their
policies every ``local_updates`` iterations. The KL is exact, the mean over the states that agent i visited, and its
gradient changes π_i only. Without ``use_clipping``, a penalty on KL(π_old ‖ π_i) replaces the clipping (ppo_kl.py).

The comments in ``train`` have the numbers of "The 37 Implementation Details of PPO": 1–13, and 23–27 for Box actions.
docs/reference/ppo_federated.md describes the exchange and the metrics. A resumed run is bit-identical if the
environment can save its state, as those of clustergym can. Other environments begin new episodes.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# Importing clustergym registers its environments.
from clustergym.training.args import COUNT, NOT_NEGATIVE, FlagError, RunArgs, main, parse_args
from clustergym.training.distributed import init_distributed
from clustergym.training.envs import derive_seed, evaluate, get_state, make_vec, set_state
from clustergym.training.logs import open_tensorboard
from clustergym.training.runs import Run

MATRICES = Path(__file__).resolve().parent / "comm_matrices"
MIN_KL_COEF = 0.01
"""Smallest β, the coefficient of the penalty that replaces clipping."""
RANGES = {"n_agents": COUNT, "local_updates": COUNT, "penalty_coeff": NOT_NEGATIVE}


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """Gymnasium id with Discrete or Box actions. "module:Id-v0" imports the module first. gpu_allocation_v0: agent i
    is edge node i of the allocation task."""
    total_timesteps: int = 500_000
    """Number of environment steps per agent. Rounded up to whole iterations."""
    exp_description: str = ""
    """Description of the experiment, stored with the logs."""
    eval_episodes: int = 20
    """Number of episodes per agent in an evaluation, with the most probable actions and unseen seeds. 0 for none."""
    n_agents: int = 2
    """Number of agents. With 1 agent this is plain PPO."""
    comm_matrix_config: Path | None = None
    """JSON file with the communication matrix, {"comm_matrix": {"0": {"1": 10}, …}} or a list of rows. A name such as
    "ring" selects a file in comm_matrices. Default: all agents are neighbours with weight 1."""
    local_updates: int = 16
    """Number of iterations between two exchanges of policies."""
    use_comm_penalty: bool = True
    """Add the weighted sum of the KL to the neighbours' policies to the loss of each agent."""
    penalty_coeff: Annotated[float, tyro.conf.arg(aliases=["--comm-coeff"])] = 1.0
    """Coefficient of this sum. It multiplies every entry of the matrix."""
    average_weights: bool = False
    """Federated averaging: all agents start with the same weights, and an exchange replaces the weights of agent i by
    the mean over itself (weight 1, or the diagonal entry of the matrix) and its neighbours (weights w_ij)."""
    learning_rate: float = 2.5e-4
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 4
    """Number of parallel environments per agent."""
    num_steps: int = 128
    """Number of steps per environment between updates."""
    num_minibatches: int = 4
    """Number of minibatches per epoch."""
    update_epochs: int = 4
    """Number of epochs per update."""
    gamma: float = 0.99
    """Discount factor."""
    gae: bool = True
    """Generalised advantage estimation. Otherwise advantages use the discounted rewards to the end of the roll-out."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    norm_adv: bool = True
    """Normalise advantages per minibatch."""
    use_clipping: bool = True
    """Clip the probability ratio. Otherwise add β · KL(old policy ‖ new policy) to the loss and adapt β."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    kl_coef: float = 1.0
    """Without use_clipping: initial β."""
    kl_target: float = 0.01
    """Without use_clipping: KL of an update that β is adapted to."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients of an agent."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    hidden: int = 64
    """Width of the two hidden layers."""


def make_envs(env_id: str, agent: int, num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Environments of one agent. The step that ends an episode also begins the next one (SAME_STEP autoreset)."""
    options = {}
    if env_id == "gpu_allocation_v0":
        from clustergym.gpu_allocation import edge_mixes

        env_id, options = "GPUAllocationHistory-v0", {"mix": edge_mixes(agent + 1)[agent]}
    envs = make_vec(env_id, num_envs, videos, flatten=True, **options)
    space = envs.single_action_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        # Actions from −1 to 1 are scaled to a bounded range. Detail 27: actions outside the range are clipped for the
        # environment, but the policy learns from those that it sampled.
        if space.is_bounded():
            one = np.ones(space.shape, space.dtype)
            envs = gym.wrappers.vector.RescaleAction(envs, -one, one)
        envs = gym.wrappers.vector.ClipAction(envs)
    elif not isinstance(space, gym.spaces.Discrete):
        raise gym.error.Error(f"--env-id {env_id} has actions {space}: expected Discrete or Box with one dimension")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Linear, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(inputs: int, hidden: int, outputs: int, std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, hidden)),
        nn.Tanh(),
        layer_init(nn.Linear(hidden, hidden)),
        nn.Tanh(),
        layer_init(nn.Linear(hidden, outputs), std=std),
    )


class Actor(nn.Module):
    """Policy: observations to the parameters of the action distribution. This is what neighbours receive.

    Discrete actions have logits. Box actions have means and log standard deviations (detail 24: the standard deviation
    does not depend on the observation and begins at 1).
    """

    def __init__(self, envs: gym.vector.VectorEnv, hidden: int) -> None:
        super().__init__()
        space = envs.single_action_space
        self.continuous = isinstance(space, gym.spaces.Box)
        self.size = int(np.prod(space.shape)) if self.continuous else int(space.n)
        self.net = mlp(envs.single_observation_space.shape[0], hidden, self.size, std=0.01)
        self.logstd = nn.Parameter(torch.zeros(self.size)) if self.continuous else None

    def forward(self, obs: Tensor, mask: Tensor) -> Tensor:
        """Parameters of the distributions. Invalid actions get the logit −1e8: probability 0 and no gradient."""
        out = self.net(obs)
        if self.logstd is None:
            return torch.where(mask, out, -1e8)
        return torch.cat([out, self.logstd.expand_as(out)], -1)

    def distribution(self, params: Tensor) -> Categorical | Independent:
        if not self.continuous:
            return Categorical(logits=params, validate_args=False)
        # Details 23 and 25: a normal distribution with independent components, whose log-probabilities are added.
        mean, logstd = params.chunk(2, -1)
        return Independent(Normal(mean, logstd.exp(), validate_args=False), 1)


class Agent(nn.Module):
    """Policy and value function: two separate MLPs (details 13 and 26)."""

    def __init__(self, envs: gym.vector.VectorEnv, hidden: int = 64) -> None:
        super().__init__()
        self.actor = Actor(envs, hidden)
        self.critic = mlp(envs.single_observation_space.shape[0], hidden, 1, std=1.0)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def exact_kl(p: Categorical | Independent, q: Categorical | Independent) -> Tensor:
    """KL(p ‖ q) for each row, in closed form."""
    if isinstance(p, Categorical):
        # That of torch is infinite where a probability of q rounds to 0.
        return (p.probs * (p.logits - q.logits)).sum(-1)
    return torch.distributions.kl_divergence(p, q)


def load_matrix(config: Path | None, n_agents: int) -> NDArray[np.float64]:
    """The communication matrix (agents, agents) of ``--comm-matrix-config``. None connects all agents with weight 1.

    Rows are objects ``{"i": {"j": weight}}``, where missing entries are 0, or a square list of lists.
    """
    if config is None:
        return 1.0 - np.eye(n_agents)
    file = next((f for f in (config, MATRICES / config.name, MATRICES / f"{config.name}.json") if f.is_file()), None)
    if file is None:
        names = ", ".join(sorted(each.stem for each in MATRICES.glob("*.json")))
        raise FlagError(f"--comm-matrix-config {config}: no such file. Bundled matrices: {names}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise FlagError(f"{file}: key {twice[0]!r} occurs twice in one object")
        return dict(pairs)

    def by_agent(entries: Any, where: str, expected: str) -> dict[int, Any]:
        """The entries of an object or a list, by the number of the agent."""
        if isinstance(entries, list):
            if len(entries) != n_agents:
                raise FlagError(f"{where} has {len(entries)} entries: expected {n_agents}, one per agent (--n-agents)")
            return dict(enumerate(entries))
        if not isinstance(entries, dict):
            raise FlagError(f"{where} is {entries!r}: expected {expected}")
        if unknown := [key for key in entries if key not in map(str, range(n_agents))]:
            limit = f"with --n-agents {n_agents}, agents are 0 … {n_agents - 1}"
            raise FlagError(f"{where} names agent {unknown[0]!r}: {limit}")
        return {int(key): value for key, value in entries.items()}

    try:
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise FlagError(f"{file}: not JSON: {reason}") from reason
    keys = document.keys() if isinstance(document, dict) else [type(document).__name__]
    if "comm_matrix" not in keys or set(keys) - {"comm_matrix", "description"}:
        found = ", ".join(map(repr, keys)) or "nothing"
        raise FlagError(f"{file}: found {found}: expected 'comm_matrix' and, if you like, 'description'")
    matrix, where = np.zeros((n_agents, n_agents)), f"{file}: comm_matrix"
    for i, row in by_agent(document["comm_matrix"], where, "an object of rows or a list of lists").items():
        for j, weight in by_agent(row, f"{where}[{i}]", 'an object {"neighbour": weight} or a list').items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e30:
                raise FlagError(f"{where}[{i}][{j}] is {weight!r}: expected a number from 0 to 1e30")
            matrix[i, j] = weight
    return matrix


@dataclass
class Member:
    """An agent with everything that it does not share."""

    index: int
    envs: gym.vector.VectorEnv
    agent: Agent
    optimizer: torch.optim.Adam
    generator: torch.Generator
    """Random numbers of its own, so that the number of processes makes no difference."""
    kl_coef: float
    next_obs: Tensor
    next_mask: Tensor

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "kl_coef": self.kl_coef,
            "envs": get_state(self.envs),
            "next_obs": self.next_obs,
            "next_mask": self.next_mask,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.kl_coef = state["kl_coef"]
        if state["envs"] is not None:
            set_state(self.envs, state["envs"])
            self.next_obs = state["next_obs"].to(self.next_obs.device)
            self.next_mask = state["next_mask"].to(self.next_mask.device)


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    world = init_distributed(args.cuda, args.torch_deterministic)
    if world.size not in (1, args.n_agents):
        raise FlagError(f"--n-agents is {args.n_agents}, but torchrun started {world.size} processes: expected as many")
    matrix = torch.from_numpy(load_matrix(args.comm_matrix_config, args.n_agents)).float()
    # All steps are counted, but --total-timesteps are those of one agent.
    steps, iterations = batch_size * args.n_agents // world.size, math.ceil(args.total_timesteps / batch_size)
    # Without torchrun, all agents live in this process. With it, one agent does.
    indices = range(args.n_agents) if world.size == 1 else [world.rank]
    all_envs = [make_envs(args.env_id, index, args.num_envs) for index in indices]
    run = Run("ppo_federated", args, args.env_id, steps_per_iteration=steps, world=world, num_iterations=iterations)
    device = run.device

    def tensors(obs: np.ndarray, infos: dict[str, Any], size: int) -> tuple[Tensor, Tensor]:
        """Observations and masks of valid actions, on the device."""
        mask = infos.get("action_mask", np.ones((len(obs), size)))
        return torch.as_tensor(obs, dtype=torch.float32, device=device), torch.as_tensor(mask == 1, device=device)

    members = []
    for index, envs in zip(indices, all_envs, strict=True):
        torch.manual_seed(derive_seed(args.seed, 0 if args.average_weights else index))
        agent = Agent(envs, args.hidden).to(device)
        # Detail 3: Adam's epsilon.
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        seed = derive_seed(args.seed, run.first_iteration, index)
        generator = torch.Generator(device).manual_seed(seed)
        first = tensors(*envs.reset(seed=seed), agent.actor.size)
        members.append(Member(index, envs, agent, optimizer, generator, args.kl_coef, *first))
    frozen = deepcopy(agent.actor)  # takes the parameters of one neighbour after the other
    logs = []
    if world.is_main:
        folders = [run.folder / f"agent_{index}" for index in range(args.n_agents)]
        logs = [open_tensorboard(folder, vars(args), run.iteration * batch_size) for folder in folders]

    def evaluate_member(member: Member) -> list[float]:
        actor = member.agent.actor

        def act(obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
            params = actor(*tensors(obs, infos, actor.size))
            return (params.chunk(2, -1)[0] if actor.continuous else params.argmax(-1)).cpu().numpy()

        videos = run.video_folder() and run.video_folder() / f"agent_{member.index}"
        envs = partial(make_envs, args.env_id, member.index)
        return evaluate(envs, act, args.eval_episodes, args.seed, videos)

    def exchange() -> Tensor:
        """The policies of all agents, one row of parameters each. To average the weights, the critics as well."""
        shared = [member.agent if args.average_weights else member.agent.actor for member in members]
        return world.all_gather(torch.stack([parameters_to_vector(each.parameters()).detach() for each in shared]))

    @torch.no_grad()
    def policy_of(index: int, obs: Tensor, mask: Tensor) -> Tensor:
        """Parameters of the action distributions of agent ``index``, as it was at the last exchange."""
        # The critic comes behind the actor and is not used here.
        vector_to_parameters(published[index], frozen.parameters())
        return frozen(obs, mask)

    # Detail 1: num_envs × num_steps transitions per agent and iteration. Episodes continue in the next iteration.
    shape, actor = (args.num_steps, args.num_envs), members[0].agent.actor
    all_obs = torch.zeros(len(members), *shape, actor.net[0].in_features, device=device)
    all_masks = torch.ones(len(members), *shape, actor.size, dtype=torch.bool, device=device)
    actions = torch.zeros(*shape, *([actor.size] if actor.continuous else []), device=device)
    actions = actions if actor.continuous else actions.long()
    rewards, dones = (torch.zeros(shape, device=device) for _ in range(2))

    saved = run.load_checkpoint()
    for member, state in zip(members, saved.get("members", []), strict=False):
        member.load(state)
    published = saved["published"].to(device) if saved else exchange()

    for iteration in run.iterations():
        own_metrics = []
        for member, obs, masks in zip(members, all_obs, all_masks, strict=True):
            i, envs, agent, optimizer = member.index, member.envs, member.agent, member.optimizer
            if args.anneal_lr:
                # Detail 4: the learning rate falls linearly to 0.
                optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

            episodes = []
            for step in range(args.num_steps):
                obs[step], masks[step] = member.next_obs, member.next_mask
                with torch.no_grad():
                    params = agent.actor(obs[step], masks[step])
                if actor.continuous:
                    mean, logstd = params.chunk(2, -1)
                    actions[step] = mean + logstd.exp() * torch.randn(
                        mean.shape, generator=member.generator, device=device
                    )
                else:
                    actions[step] = torch.multinomial(params.softmax(-1), 1, generator=member.generator)[:, 0]
                next_array, reward, terminations, truncations, infos = envs.step(actions[step].cpu().numpy())
                member.next_obs, member.next_mask = tensors(next_array, infos, actor.size)
                rewards[step] = torch.as_tensor(reward)
                dones[step] = torch.as_tensor(terminations | truncations)

                # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
                cut = truncations & ~terminations
                if cut.any():
                    final_obs = torch.as_tensor(np.stack(infos["final_obs"][cut]), dtype=torch.float32, device=device)
                    with torch.no_grad():
                        rewards[step, torch.as_tensor(cut)] += args.gamma * agent.get_value(final_obs)
                if "episode" in infos:
                    ended = infos["_episode"]
                    episodes += zip(infos["episode"]["r"][ended], infos["episode"]["l"][ended], strict=True)

            b_obs, b_masks, b_actions = obs.flatten(0, 1), masks.flatten(0, 1), actions.flatten(0, 1)
            with torch.no_grad():
                b_params = agent.actor(b_obs, b_masks)
                b_logprobs = actor.distribution(b_params).log_prob(b_actions)
                values, next_value = agent.get_value(obs), agent.get_value(member.next_obs)

            # Detail 5: generalised advantage estimation. Lambda 1 gives discounted rewards minus the value.
            gae_lambda = args.gae_lambda if args.gae else 1.0
            advantages = torch.zeros_like(rewards)
            lastgaelam = torch.zeros(args.num_envs, device=device)
            for t in reversed(range(args.num_steps)):
                nextvalues = values[t + 1] if t + 1 < args.num_steps else next_value
                delta = rewards[t] + args.gamma * nextvalues * (1 - dones[t]) - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * gae_lambda * (1 - dones[t]) * lastgaelam
            b_values, b_advantages, b_returns = values.flatten(), advantages.flatten(), (advantages + values).flatten()

            # The neighbours' policies do not change between exchanges, so their distributions are computed once.
            neighbours = [j for j in range(args.n_agents) if j != i and matrix[i, j] and args.use_comm_penalty]
            b_neighbours = [(matrix[i, j].item(), policy_of(j, b_obs, b_masks)) for j in neighbours]

            minibatch_metrics = []
            for _ in range(args.update_epochs):
                # Detail 6: every transition is in one minibatch of an epoch.
                b_inds = torch.randperm(batch_size, generator=member.generator, device=device)
                for start in range(0, batch_size, minibatch_size):
                    mb_inds = b_inds[start : start + minibatch_size]
                    policy = actor.distribution(agent.actor(b_obs[mb_inds], b_masks[mb_inds]))
                    newvalue = agent.get_value(b_obs[mb_inds])
                    logratio = policy.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]
                    ratio = logratio.exp()

                    # Detail 7: advantages are normalised per minibatch.
                    mb_advantages = b_advantages[mb_inds]
                    if args.norm_adv:
                        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                    # Detail 8: the clipped surrogate loss; or no clipping, and a penalty on the change of the policy.
                    pg_loss, own_kl = -mb_advantages * ratio, torch.zeros((), device=device)
                    if args.use_clipping:
                        clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                        pg_loss = torch.max(pg_loss, -mb_advantages * clipped)
                    else:
                        own_kl = exact_kl(actor.distribution(b_params[mb_inds]), policy).mean()
                    pg_loss = pg_loss.mean()

                    # Detail 9: the larger of the value losses with and without clipping.
                    v_loss = (newvalue - b_returns[mb_inds]) ** 2
                    if args.clip_vloss:
                        change = torch.clamp(newvalue - b_values[mb_inds], -args.clip_coef, args.clip_coef)
                        v_loss = torch.max(v_loss, (b_values[mb_inds] + change - b_returns[mb_inds]) ** 2)
                    v_loss = 0.5 * v_loss.mean()

                    # The penalty that keeps the agent close to its neighbours.
                    comm_kl = torch.zeros((), device=device)
                    for weight, params in b_neighbours:
                        comm_kl = comm_kl + weight * exact_kl(policy, actor.distribution(params[mb_inds])).mean()

                    # Detail 10: one loss for policy, entropy bonus, value function and penalties.
                    entropy_loss = policy.entropy().mean()
                    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
                    loss = loss + member.kl_coef * own_kl + args.penalty_coeff * comm_kl

                    optimizer.zero_grad()
                    loss.backward()
                    # Detail 11: the global norm of the gradients is limited.
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()

                    # Detail 12: debug variables. Both estimators are from http://joschu.net/blog/kl-approx.html.
                    with torch.no_grad():
                        old_approx_kl = (-logratio).mean()
                        approx_kl = ((ratio - 1) - logratio).mean()
                        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
                        seen = [pg_loss, v_loss, entropy_loss, own_kl, comm_kl]
                        minibatch_metrics.append(torch.stack([*seen, old_approx_kl, approx_kl, clipfrac, grad_norm]))
                if args.target_kl is not None and approx_kl > args.target_kl:
                    break

            names = ("policy_loss", "value_loss", "entropy", "own_kl", "comm_kl")
            names += ("old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
            means = dict(zip(names, torch.stack(minibatch_metrics).mean(0).tolist(), strict=True))
            metrics = {f"losses/{name}": value for name, value in means.items()}
            # How large each term of the loss is, as a part of the sum of their absolute values.
            terms = {"policy": means["policy_loss"], "entropy": args.ent_coef * means["entropy"]}
            terms |= {"value": args.vf_coef * means["value_loss"], "kl_penalty": member.kl_coef * means["own_kl"]}
            terms |= {"comm_penalty": args.penalty_coeff * means["comm_kl"]}
            total = sum(map(abs, terms.values())) or 1.0
            metrics |= {f"charts/loss_fractions/{name}": abs(term) / total for name, term in terms.items()}
            if not args.use_clipping:
                # KL of the whole batch after the update. The means above are from before each step.
                with torch.no_grad():
                    p, q = b_params, agent.actor(b_obs, b_masks)
                    kl = float(exact_kl(actor.distribution(p), actor.distribution(q)).mean())
                metrics["losses/kl_after_update"], metrics["charts/kl_coef"] = kl, member.kl_coef
                if kl > 1.5 * args.kl_target:
                    member.kl_coef *= 2
                elif kl < args.kl_target / 1.5:
                    member.kl_coef = max(member.kl_coef / 2, MIN_KL_COEF)
            metrics["losses/explained_variance"] = float(1 - (b_returns - b_values).var() / b_returns.var())
            metrics["charts/updates"] = len(minibatch_metrics)
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            metrics["charts/mean_return_100"] = float(np.mean(envs.return_queue)) if envs.return_queue else float("nan")
            if episodes:
                metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0)
            if run.evaluation_due():
                metrics["eval/mean_return"] = float(np.mean(evaluate_member(member)))
            own_metrics.append(metrics)

        if iteration % args.local_updates == 0:
            published = exchange()
            for member, metrics, obs, masks in zip(members, own_metrics, all_obs, all_masks, strict=True):
                i, states = member.index, (obs.flatten(0, 1), masks.flatten(0, 1))
                with torch.no_grad():
                    own = actor.distribution(member.agent.actor(*states))
                for j in set(range(args.n_agents)) - {i}:
                    kl = exact_kl(own, actor.distribution(policy_of(j, *states))).mean()
                    metrics[f"charts/kl_{i}_{j}"] = float(kl)
                if args.average_weights:
                    weights = matrix[i].clone().to(device)
                    weights[i] = weights[i] or 1.0
                    vector_to_parameters(weights @ published / weights.sum(), member.agent.parameters())

        everyone = [each for rank in world.gather(own_metrics) for each in rank] or own_metrics
        for log, metrics in zip(logs, everyone, strict=False):
            for name, value in metrics.items():
                log.add_scalar(name, value, iteration * batch_size)
        names = {name for metrics in everyone for name in metrics}
        means = {name: float(np.mean([each[name] for each in everyone if name in each])) for name in sorted(names)}
        run.log(means, mean_return=means["charts/mean_return_100"])
        run.checkpoint(members=[member.state() for member in members], published=published)

    returns = [each for rank in world.gather([evaluate_member(member) for member in members]) for each in rank]
    if args.save_model:
        weights = torch.stack([parameters_to_vector(member.agent.parameters()).detach() for member in members])
        agents = [deepcopy(members[0].agent) for _ in range(args.n_agents)]
        for each, vector in zip(agents, world.all_gather(weights), strict=True):
            vector_to_parameters(vector, each.parameters())
        run.save_model(**{f"agent_{i}": each for i, each in enumerate(agents)})
    for member in members:
        member.envs.close()
    for log in logs:
        log.close()
    world.close()
    return run.finish(
        [each for own in returns for each in own],
        env_id=args.env_id,
        n_agents=args.n_agents,
        mean_returns={i: float(np.mean(own)) for i, own in enumerate(returns) if own},
        train_return_100=means["charts/mean_return_100"],
    )


if __name__ == "__main__":
    main(train, parse_args(Args, __doc__, ranges=RANGES))
