"""Multi-agent PPO for the two MoE tasks: an expert actor, a GPU actor and one centralised critic.

    python cleanrl_ppo/ppo_moe_marl.py                                          # MoEOffload-v0, the bundled trace
    python cleanrl_ppo/ppo_moe_marl.py --env-id MoEPlacement-v0 --num-envs 16 --num-steps 256   # another task
    python cleanrl_ppo/ppo_moe_marl.py --env-args link=pcie4 --resume           # an option; continue after a crash
    torchrun --nproc-per-node 2 cleanrl_ppo/ppo_moe_marl.py                     # two processes, averaged gradients

In each step the expert actor picks a row of a table of experts. The GPU actor sees the picked row and picks one of 3·G
nodes: PLACE, ADD or DELETE on one of G GPUs. Both get the same reward. docs/reference/ppo_moe_marl.md describes the
observation, which is all that this file knows about a task, and the networks.

What is different from ppo.py: two actors with a ratio and a mask of credit each, value normalisation, discounts that
follow the time that has passed (``infos["elapsed"]``), and credit that follows objects where an environment reports
what became of earlier decisions (``infos["events"]``). Details 1–12 and 37 of "The 37 Implementation Details of PPO".
A resumed run is bit-identical.
"""

from __future__ import annotations

import sys
import warnings
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributions import Categorical
from torch_geometric.nn import DenseGraphConv

# Importing clustergym registers its environments.
from clustergym.training.args import PROBABILITY, FlagError, RunArgs, exit_with, main, parse_args
from clustergym.training.distributed import init_distributed
from clustergym.training.envs import derive_seed, evaluate, make_vec
from clustergym.training.policies import export_policy
from clustergym.training.runs import Run


@dataclass
class Args(RunArgs):
    env_id: str = "MoEOffload-v0"
    """Gymnasium id of an MoE task. "module:Id-v0" imports the module first."""
    trace: str | None = None
    """Token trace: a file, or the name of a bundled trace. Default: that of the environment."""
    predictor: str | None = None
    """Folder of a fitted predictor, for environments with this option."""
    start: Path | None = None
    """Start the actors from the policy in this folder (model.safetensors, as --save-model writes it)."""
    env_args: tuple[str, ...] = ()
    """Other options of the environment: name=value …"""
    eval_args: tuple[str, ...] = ("split=test",)
    """Further options of the environment in evaluations."""
    eval_episodes: int = 32
    """Number of episodes in an evaluation, with greedy actions and unseen seeds. 0 for no evaluation."""
    save_model: bool = True
    """Save the trained networks: model.safetensors with model.json, and policy.onnx, which runs without this file."""
    learning_rate: float = 2.5e-3
    """Learning rate of Adam (the initial value if annealed)."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int = 64
    """Number of parallel environments per process."""
    num_steps: int = 1024
    """Number of steps per environment between updates."""
    num_minibatches: int = 32
    """Number of minibatches per epoch."""
    update_epochs: int = 1
    """Number of epochs per update."""
    gamma: float = 0.98
    """Discount factor per unit of elapsed time."""
    gae_lambda: float = 0.5
    """Lambda of generalised advantage estimation, per unit of elapsed time."""
    norm_adv: bool = True
    """Normalise the advantages of each actor per minibatch."""
    clip_coef: float = 0.2
    """Clip range of the probability ratios and of the value change."""
    clip_vloss: bool = True
    """Clip the value change as well."""
    ent_coef: float = 0.003
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum global norm of the gradients."""
    target_kl: float | None = None
    """Stop an update after an epoch whose approximate KL exceeds this value."""
    event_share: float = 0.75
    """With events, share of a roll-out that is learned from. What became of the later decisions is not known yet."""
    hidden: int = 32
    """Width of the networks."""
    compile: bool = False
    """Compile the networks with torch.compile, for the roll-out and the update."""
    cudagraphs: bool = False
    """Compile the networks to CUDA graphs: less time per call on a GPU. The same as --compile on the CPU."""


def make_envs(args: Args, extra: Sequence[str], num_envs: int, videos: Path | None = None) -> gym.vector.VectorEnv:
    """Create the environments. The step that ends an episode also begins the next one (SAME_STEP autoreset)."""
    options: dict[str, Any] = {key: getattr(args, key) for key in ("trace", "predictor") if getattr(args, key)}
    for word in (*args.env_args, *extra):
        name, equals, value = word.partition("=")
        if not equals:
            raise FlagError(f"--env-args {word}: expected name=value")
        try:
            options[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    if videos is None:
        options["autoreset_mode"] = AutoresetMode.SAME_STEP
    try:
        envs = make_vec(args.env_id, num_envs, videos, **options)
    except (TypeError, ValueError) as reason:
        raise FlagError(f"--env-id {args.env_id} with {options or 'no options'}: {reason}") from reason
    if not isinstance(envs.single_observation_space, gym.spaces.Dict):
        expected = "the observation of the MoE tasks, see docs/reference/ppo_moe_marl.md"
        raise gym.error.Error(f"--env-id {args.env_id} has observations {envs.single_observation_space}: {expected}")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer: nn.Linear, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear:
    """Detail 2: orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias_const)
    return layer


def of_row(table: Tensor, row: Tensor) -> Tensor:
    """What a table (B, R, nodes) has for the picked rows (B,)."""
    return torch.take_along_dim(table, row[:, None, None], 1)[:, 0]


class GraphEncoder(nn.Module):
    """Embeds the nodes of a weighted graph: a linear layer, then one round of messages between neighbours.

    A graph without edges is given as an array of size 0. Then the second layer sees each node alone.
    """

    def __init__(self, features: int, context: int, edges: int, hidden: int) -> None:
        super().__init__()
        self.own = layer_init(nn.Linear(features, hidden))
        self.context = layer_init(nn.Linear(context, hidden, bias=False))
        self.messages: nn.Module
        if edges:
            self.messages = DenseGraphConv(hidden, hidden, aggr="mean")
            layer_init(self.messages.lin_rel, std=1.0)
            layer_init(self.messages.lin_root)
        else:
            self.messages = layer_init(nn.Linear(hidden, hidden))

    def forward(self, nodes: Tensor, graph: Tensor, context: Tensor) -> Tensor:
        """Nodes (B, N, features), weights (B, N, N), context (B, C) → (B, N, hidden), before the activation."""
        nodes = torch.relu(self.own(nodes) + self.context(context)[:, None])
        return self.messages(nodes, graph) if graph.numel() else self.messages(nodes)


class Agent(nn.Module):
    """Expert actor, GPU actor and critic. They accept any number of experts and GPUs.

    Each pair of an expert and a node gets two scores. The logsumexp of the first ones over the legal nodes of an expert
    is its logit: an expert with one excellent node is picked even if its other nodes are bad. The second ones are the
    logits of the GPU actor.
    """

    value_mean: Tensor
    value_std: Tensor

    def __init__(self, space: gym.spaces.Dict, hidden: int) -> None:
        super().__init__()
        experts, gpus, pairs, context, edges = (
            space[key].shape[-1] for key in ("experts", "gpus", "pairs", "context", "expert_graph")
        )
        # The actors: graph encoders of the experts and of the 3·G nodes, decoder of a pair.
        self.experts = GraphEncoder(experts, context, edges, hidden)
        self.gpus = GraphEncoder(gpus, context, gpus, hidden)
        self.pairs = layer_init(nn.Linear(pairs, hidden, bias=False), std=1.0) if pairs else None
        # Both scores, of a pair with each of the three operations and of a node; and the expected credit of a pair.
        self.pair_decoder = layer_init(nn.Linear(hidden, 2 * 3 + 1), std=0.01)
        self.node_decoder = layer_init(nn.Linear(hidden, 2, bias=False), std=0.01)
        # The critic has weights of its own, and all its values are 0 at first: a critic that shares encoders, or starts
        # with random values, disturbs the actors while it learns. It sees the mean row, mean and maximum of the nodes.
        self.critic = nn.Sequential(
            layer_init(nn.Linear(experts + 2 * gpus + context, 2 * hidden)), nn.Tanh(),
            layer_init(nn.Linear(2 * hidden, 1), std=0.0),
        )  # fmt: skip
        # Value normalisation: mean and standard deviation of the returns.
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.ones(()))

    def scores(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the experts (B, R), logits of the nodes for each expert (B, R, 3·G), expected credits (B, R).

        Invalid actions get the logit −1e8: probability 0 and no gradient.
        """
        rows = self.experts(obs["experts"], obs["expert_graph"], obs["context"])
        # Each of a GPU's three nodes is connected to all nodes of the GPUs that it exchanges data with.
        nodes = self.gpus(obs["gpus"], obs["gpu_graph"].repeat(1, 3, 3), obs["context"])
        pairs = rows[:, :, None] + nodes.unflatten(1, (3, -1)).sum(1)[:, None]
        if self.pairs is not None:
            pairs = pairs + self.pairs(obs["pairs"])
        scores, credits = self.pair_decoder(torch.relu(pairs)).split([6, 1], -1)
        # (B, R, G, 2·3) → (B, R, 2, 3·G)
        scores = scores.unflatten(3, (2, 3)).permute(0, 1, 3, 4, 2).flatten(3)
        illegal = 1e8 * (1 - obs["action_mask"].float())
        scores = scores + (self.node_decoder(torch.relu(nodes)).transpose(1, 2)[:, None] - illegal[:, :, None])
        pick, node = scores.unbind(2)
        return pick.logsumexp(-1), node, credits.squeeze(3).mean(2)

    def forward(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the exported policy computes."""
        expert_logits, gpu_logits, _ = self.scores(obs)
        return expert_logits, gpu_logits

    def get_value(self, obs: dict[str, Tensor]) -> Tensor:
        """Normalised values (B,)."""
        experts, gpus = obs["experts"], obs["gpus"]
        pooled = [experts.mean(1), gpus.mean(1), gpus.amax(1), obs["context"]]
        return self.critic(torch.cat(pooled, -1)).squeeze(-1)

    def get_action(self, obs: dict[str, Tensor], action: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns (actions, log-probabilities, entropies), each (B, 2): of the expert actor and of the GPU actor; and
        the expected credits (B, 2) of the picked row, and on average over the rows.

        Samples the actions if none are given.
        """
        expert_logits, gpu_logits, credits = self.scores(obs)
        expert_policy = Categorical(logits=expert_logits, validate_args=False)
        expert = expert_policy.sample() if action is None else action[:, 0]
        # Detail 37: two components of one action. The second actor sees what the first one has picked.
        gpu_policy = Categorical(logits=of_row(gpu_logits, expert), validate_args=False)
        node = gpu_policy.sample() if action is None else action[:, 1]
        mean_credit = (expert_policy.probs.detach() * credits).sum(-1)
        return (
            torch.stack([expert, node], -1),
            torch.stack([expert_policy.log_prob(expert), gpu_policy.log_prob(node)], -1),
            torch.stack([expert_policy.entropy(), gpu_policy.entropy()], -1),
            torch.stack([credits.gather(1, expert[:, None]).squeeze(1), mean_credit], -1),
        )

    def get_best_action(self, obs: dict[str, Tensor]) -> Tensor:
        expert_logits, gpu_logits = self(obs)
        expert = expert_logits.argmax(-1)
        return torch.stack([expert, of_row(gpu_logits, expert).argmax(-1)], -1)


def load_actors(agent: Agent, folder: Path) -> None:
    """Load the actors of a saved policy. The critic starts anew: it values the policy that is being trained."""
    actors = [name for name in agent.state_dict() if not name.startswith(("critic.", "value_"))]
    try:
        saved = load_file(folder / "model.safetensors")
        agent.load_state_dict({name: saved[f"agent.{name}"] for name in actors}, strict=False)
    except (OSError, KeyError, RuntimeError) as reason:
        expected = "expected a folder that --save-model wrote, with the same --hidden and --predictor"
        raise FlagError(f"--start {folder}: {expected}: {' '.join(str(reason).split())}") from reason


def train(args: Args) -> dict[str, Any]:
    """Train and evaluate. Returns the content of the result line."""
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    world = init_distributed(args.cuda, args.torch_deterministic)
    run = Run("ppo_moe_marl", args, args.env_id, steps_per_iteration=batch_size, world=world)
    device = run.device

    envs = make_envs(args, (), args.num_envs)
    agent = Agent(envs.single_observation_space, args.hidden).to(device)
    if args.start is not None:
        load_actors(agent, args.start)
    world.broadcast(agent)
    # Detail 3: Adam's epsilon.
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    get_action, get_value = agent.get_action, agent.get_value
    if args.compile or args.cudagraphs:
        mode = "reduce-overhead" if args.cudagraphs else None
        get_action, get_value = torch.compile(get_action, mode=mode), torch.compile(get_value, mode=mode)

    # Environments can return read-only arrays. They are only read here.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    def tensors(obs: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {key: torch.as_tensor(value, device=device) for key, value in obs.items()}

    def evaluate_agent() -> list[float]:
        def act(obs: dict[str, np.ndarray], infos: dict[str, Any]) -> np.ndarray:
            return agent.get_best_action(tensors(obs)).cpu().numpy()

        make = partial(make_envs, args, args.eval_args)
        return evaluate(make, act, args.eval_episodes, args.seed, run.video_folder()) if world.is_main else []

    # Detail 1: num_envs × num_steps transitions per iteration. Episodes continue in the next iteration.
    shape = (args.num_steps, args.num_envs)
    next_obs = tensors(envs.reset(seed=derive_seed(args.seed, run.first_iteration, world.rank))[0])
    saved = run.load_checkpoint(agent=agent, optimizer=optimizer, envs=envs)
    if "envs" in saved:
        next_obs = {key: value.to(device) for key, value in saved["next_obs"].items()}
    obs = {
        key: torch.zeros(*shape, *value.shape[1:], dtype=value.dtype, device=device) for key, value in next_obs.items()
    }
    actions = torch.zeros(*shape, 2, dtype=torch.int64, device=device)
    logprobs = torch.zeros(*shape, 2, device=device)
    expected_credits = torch.zeros(*shape, device=device)

    for iteration in run.iterations():
        if args.anneal_lr:
            # Detail 4: the learning rate falls linearly to 0.
            optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / run.num_iterations) * args.learning_rate

        episodes = []
        # What the environments report. It moves to the device once, after the roll-out.
        reported = np.zeros((5, *shape), np.float32)
        rewards, dones, elapsed, no_op, credits = reported
        for step in range(args.num_steps):
            for key, value in next_obs.items():
                obs[key][step] = value
            with torch.no_grad():
                actions[step], logprobs[step], _, credit = get_action(next_obs)
                expected_credits[step] = credit[:, 1]
            next_array, reward, terminations, truncations, infos = envs.step(actions[step].cpu().numpy())
            next_obs = tensors(next_array)
            rewards[step], dones[step] = reward, terminations | truncations
            elapsed[step], no_op[step] = infos["elapsed"], infos["no_op"]

            if "events" in infos:
                # Credit follows objects: what became of an expert is credited to the decision on it, ``age`` steps ago.
                events = infos["events"]
                at = step - events["age"]
                np.add.at(credits, (at[at >= 0], events["env"][at >= 0]), events["value"][at >= 0])

            # Detail 5: a truncated episode would have continued, so the value of its last observation is added.
            cut = truncations & ~terminations
            if cut.any():
                last = infos["final_obs"][cut]
                last_obs = tensors({key: np.stack([each[key] for each in last]) for key in next_obs})
                with torch.no_grad():
                    last_value = agent.get_value(last_obs) * agent.value_std + agent.value_mean
                rewards[step, cut] += args.gamma ** elapsed[step, cut] * last_value.cpu().numpy()
            if "episode" in infos:
                ended = infos["_episode"]
                episodes += zip(infos["episode"]["r"][ended], infos["episode"]["l"][ended], strict=True)

        # The critic's values, in normalised units and as returns. One call per minibatch is cheaper than one per step.
        b_obs = {key: value.flatten(0, 1) for key, value in obs.items()}
        b_values = torch.zeros(batch_size, device=device)
        with torch.no_grad():
            for start in range(0, batch_size, minibatch_size):
                part = slice(start, start + minibatch_size)
                b_values[part] = get_value({key: value[part] for key, value in b_obs.items()})
            next_value = agent.get_value(next_obs) * agent.value_std + agent.value_mean
        values = (b_values * agent.value_std + agent.value_mean).view(shape)

        rewards, dones, elapsed, no_op, credits = torch.as_tensor(reported, device=device)
        b_actions, b_logprobs = actions.flatten(0, 1), logprobs.flatten(0, 1)
        # An actor learns where its choice meant something: not from a row that was picked under a no-op, nor from the
        # only legal node.
        b_counts = torch.ones(batch_size, 2, device=device)
        b_counts[:, 0] = 1 - no_op.flatten()
        b_counts[:, 1] = of_row(b_obs["action_mask"], b_actions[:, 0]).sum(-1) > 1

        # Detail 5: generalised advantage estimation. Discounts follow the time that has passed.
        discounts = (1 - dones) * args.gamma**elapsed
        decays = discounts * args.gae_lambda**elapsed
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(args.num_envs, device=device)
        for t in reversed(range(args.num_steps)):
            nextvalues = values[t + 1] if t + 1 < args.num_steps else next_value
            delta = rewards[t] + discounts[t] * nextvalues - values[t]
            advantages[t] = lastgaelam = delta + decays[t] * lastgaelam
        returns = advantages + values

        # Both actors share the reward. With events, the expert actor's pick is judged by its own credit instead: the
        # reward is the sum of what became of all experts, and the rest of it would be noise.
        b_advantages = torch.stack([advantages, advantages], -1).view(-1, 2)
        num_learned = batch_size
        if "events" in infos:
            b_advantages[:, 0] = (credits - expected_credits).flatten()
            # The last decisions are too young: what became of them is not known yet.
            num_learned = int(args.event_share * args.num_steps) * args.num_envs

        # Value normalisation: the critic learns targets with mean 0 and standard deviation 1 (running statistics).
        mean, square = (world.mean(float(each.mean())) for each in (returns, returns**2))
        new = 1.0 if iteration == 1 else 0.2
        agent.value_mean.lerp_(torch.tensor(mean, device=device), new)
        agent.value_std.lerp_(torch.tensor(max(square - mean**2, 1e-12) ** 0.5, device=device), new)
        b_returns = (returns.flatten() - agent.value_mean) / agent.value_std

        minibatch_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6: every transition is in one minibatch of an epoch.
            b_inds = torch.randperm(num_learned, device=device)
            for start in range(0, num_learned, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                mb_obs = {key: value[mb_inds] for key, value in b_obs.items()}
                _, newlogprob, entropy, credit = get_action(mb_obs, b_actions[mb_inds])
                newvalue = get_value(mb_obs)
                # One ratio per actor.
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()

                # Detail 7: advantages are normalised per minibatch, those of each actor where they count.
                mb_advantages, mb_counts = b_advantages[mb_inds], b_counts[mb_inds]
                if args.norm_adv:
                    number = mb_counts.sum(0).clamp(min=2)
                    mb_advantages = mb_advantages - (mb_counts * mb_advantages).sum(0) / number
                    std = ((mb_counts * mb_advantages**2).sum(0) / (number - 1)).sqrt()
                    mb_advantages = mb_advantages / (std + 1e-8)

                # Detail 8: the clipped surrogate loss, summed over the actors.
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = (mb_counts * torch.max(pg_loss1, pg_loss2)).mean(0).sum()

                # Detail 9: the larger of the value losses with and without clipping.
                v_loss = (newvalue - b_returns[mb_inds]) ** 2
                if args.clip_vloss:
                    change = torch.clamp(newvalue - b_values[mb_inds], -args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss, (b_values[mb_inds] + change - b_returns[mb_inds]) ** 2)
                v_loss = 0.5 * v_loss.mean()
                if "events" in infos:
                    v_loss = v_loss + 0.5 * (mb_counts[:, 0] * (credit[:, 0] - credits.view(-1)[mb_inds]) ** 2).mean()

                # Detail 10: one loss for both policies, entropy bonus and value function.
                entropy_loss = entropy.mean(0).sum()
                loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                world.average_gradients(agent.parameters())
                # Detail 11: the global norm of the gradients is limited.
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

                # Detail 12: debug variables. Both KL estimators are from http://joschu.net/blog/kl-approx.html.
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean(0).sum()
                    approx_kl = ((ratio - 1) - logratio).mean(0).sum()
                    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
                    seen = [pg_loss, v_loss, *entropy.mean(0), old_approx_kl, approx_kl, clipfrac, grad_norm]
                    minibatch_metrics.append(torch.stack(seen))
            if args.target_kl is not None and world.mean(float(approx_kl)) > args.target_kl:
                break

        names = ("policy_loss", "value_loss", "expert_entropy", "gpu_entropy", "old_approx_kl", "approx_kl", "clipfrac",
                 "grad_norm")  # fmt: skip
        means = torch.stack(minibatch_metrics).mean(0).tolist()
        metrics = {f"losses/{name}": value for name, value in zip(names, means, strict=True)}
        metrics["losses/explained_variance"] = float(1 - (returns - values).var() / returns.var())
        metrics["charts/updates"] = len(minibatch_metrics)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/reward_per_time"] = float(reported[0].sum() / reported[2].sum())
        metrics["charts/no_op"] = float(no_op.mean())
        metrics["charts/mean_return_100"] = float(np.mean(envs.return_queue)) if envs.return_queue else float("nan")
        if episodes:
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0)
        if run.evaluation_due() and world.is_main:
            metrics["eval/mean_return"] = float(np.mean(evaluate_agent()))
        run.log(metrics, reward_per_time=metrics["charts/reward_per_time"])
        run.checkpoint(agent=agent, optimizer=optimizer, envs=envs, next_obs=next_obs)

    envs.close()
    run.save_model(agent=agent)
    if args.save_model and world.is_main:
        about = {"env_id": args.env_id, "env_args": envs.spec.kwargs, "steps": run.total_steps}
        export_policy(run.folder / "policy.onnx", agent, next_obs, about)
    result = run.finish(evaluate_agent(), env_id=args.env_id, train_return_100=metrics["charts/mean_return_100"])
    world.close()
    return result


if __name__ == "__main__":
    options = ("--cluster", "--profile", "--model", "--intervals", "--ops-per-layer")
    if moved := [word for word in sys.argv if word in options]:
        exit_with(f"{moved[0]} is an option of the environment: --env-args {moved[0][2:].replace('-', '_')}=VALUE")
    main(train, parse_args(Args, __doc__, ranges={"event_share": PROBABILITY}))
