"""Every trainer in the form that ``test_trainer_updates.py`` needs: a made-up batch, a roll-out and their references.

A case knows what its trainer's functions are called and how its network is built from layers. The formulas are in
``update_reference.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn.utils import parameters_to_vector

from clustergym.agent.learner import Experiences
from clustergym.traces.tiny_moe import END, TinyMoE, TinyMoEConfig, decode
from clustergym.training import World
from trainers import load_trainer
from update_reference import (
    AllNumbers,
    ReturnScale,
    Sample,
    Script,
    ScriptedCluster,
    Settings,
    Transition,
    advantages_of,
    transitions,
)

CPU = torch.device("cpu")
DISCRETE, MASKED, NEXT_STEP, BOX = "Script-v0", "ScriptMasked-v0", "ScriptNextStep-v0", "ScriptBox-v0"


def different_episodes(num_envs: int, masked: bool = False) -> SyncVectorEnv:
    """Scripted environments that reset in a step of their own. Each starts with another episode."""
    makers = [partial(Script, gym.spaces.Discrete(4), masked=masked, first_episode=i) for i in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


@contextmanager
def scripted_environments() -> Iterator[None]:
    """Register the scripted environments."""
    box = gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 3]))
    gym.register(DISCRETE, Script, kwargs={"actions": gym.spaces.Discrete(4)}, disable_env_checker=True)
    gym.register(MASKED, Script, kwargs={"actions": gym.spaces.Discrete(4), "masked": True}, disable_env_checker=True)
    gym.register(BOX, Script, kwargs={"actions": box}, disable_env_checker=True)
    gym.register(NEXT_STEP, Script, vector_entry_point=different_episodes, disable_env_checker=True)
    try:
        yield
    finally:
        for name in (DISCRETE, MASKED, BOX, NEXT_STEP):
            del gym.registry[name]


@dataclass
class Problem:
    """A network and a batch, ready for an update and for its reference."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[..., dict[str, float]]
    """update(world), or update(world, rank) on every second row, starting with row ``rank``."""
    samples_of: Callable[[list[int]], tuple[list[Sample], Tensor | float]]
    split: Callable[[list[int]], list[list[int]]]
    """Minibatches of a shuffled list of rows."""
    settings: Settings
    values_and_targets: tuple[list[float], list[float]] | None = None
    """For the explained variance."""
    after_step: Callable[[], None] = lambda: None
    more_metrics: Callable[[Any], dict[str, float]] = lambda outcome: {}
    """Metrics of the trainer alone, from the outcome of the reference."""


@dataclass
class Played:
    """Consecutive roll-outs: data and charts of the trainer, and the steps of all environments [rollout][t][env]."""

    args: Any
    agent: nn.Module
    rollouts: list[tuple[Any, dict[str, float]]]
    steps: list[list[list[Transition | None]]]
    num_envs: int
    first_obs: list[Any]


def cut(steps_by_env: list[list[Transition | None]], num_steps: int) -> list[list[list[Transition | None]]]:
    """Steps of each environment as [rollout][t][env]."""
    by_time = [list(step) for step in zip(*steps_by_env, strict=True)]
    assert len(by_time) % num_steps == 0, "environments made another number of steps than the roll-outs"
    return [by_time[i : i + num_steps] for i in range(0, len(by_time), num_steps)]


def scripts_in(envs: Any) -> list[Script]:
    """The scripted environments inside a vector environment and its wrappers."""
    while not isinstance(envs, SyncVectorEnv):
        envs = envs.envs if hasattr(envs, "envs") else envs.env
    return [env.unwrapped for env in envs.envs]


def half(batch: Any, rank: int | None) -> Any:
    return batch if rank is None else batch.take(slice(rank, None, 2))


def equal_parts(order: list[int], count: int) -> list[list[int]]:
    cuts = [int(i * len(order) / count) for i in range(count + 1)]
    return [order[a:b] for a, b in pairwise(cuts)]


def larger_first(order: list[int], count: int) -> list[list[int]]:
    """Parts as even as possible, the first ones larger by 1."""
    size, rest = divmod(len(order), count)
    sizes = [size + (i < rest) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    return [order[a : a + n] for a, n in zip(starts, sizes, strict=True)]


class Case:
    """One trainer. Subclasses say how it differs from ``ppo.py``."""

    name = "ppo"
    small: dict[str, Any] = {"num_envs": 3, "num_steps": 7, "num_minibatches": 3, "update_epochs": 3}
    has_rollout = True
    has_world = True
    has_early_stop = True
    has_schedule = True
    logs_updates = True
    losses: tuple[str, ...] = (
        "policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm",
    )  # fmt: skip
    env_id = DISCRETE
    num_actions = 4
    rows = 20

    def __init__(self) -> None:
        self.trainer = load_trainer(self.name)

    @property
    def id(self) -> str:
        return self.name

    def knows(self, name: str) -> bool:
        return name in {each.name for each in dataclasses.fields(self.trainer.Args)}

    def args(self, **changes: Any) -> Any:
        known = {key: value for key, value in (self.small | changes).items() if self.knows(key)}
        return self.trainer.Args(**known)

    # The network, layer by layer

    def make_agent(self, args: Any) -> nn.Module:
        """A network whose policy differs between states."""
        agent = self.trainer.Agent(3, self.num_actions, args.hidden, args.share_network)
        with torch.no_grad():
            agent.actor_head.weight.mul_(100)
            agent.actor_head.bias.normal_()
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        logits = agent.actor_head(agent.actor_trunk(x))
        return Categorical(logits=logits if mask is None else logits.masked_fill(~torch.as_tensor(mask), -math.inf))

    def entropy(self, agent: Any, x: Tensor, mask: Any) -> Tensor:
        probabilities = self.distribution(agent, x, mask).probs
        probabilities = probabilities[probabilities > 0]
        return -(probabilities * probabilities.log()).sum()

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic_head(agent.critic_trunk(x))[0]

    # The update

    def made_up(self, agent: Any, obs: Tensor, actions: Tensor, masks: Tensor | None = None) -> dict[str, Tensor]:
        """Old probabilities and values differ from those of the network, so that every clip has an effect."""
        n = len(obs)
        with torch.no_grad():
            each_mask = [None] * n if masks is None else masks
            logprobs = torch.stack([
                self.distribution(agent, x, mask).log_prob(action)
                for x, action, mask in zip(obs, actions, each_mask, strict=True)
            ])  # fmt: skip
            values = torch.stack([self.value(agent, x) for x in obs])
        return {
            "obs": obs,
            "actions": actions,
            "logprobs": logprobs + 0.3 * torch.randn(n),
            "advantages": 2 + 3 * torch.randn(n),
            "returns": values + torch.randn(n),
            "values": values + 0.5 * torch.randn(n),
        }

    def made_up_obs(self) -> Tensor:
        return torch.randn(self.rows, 3)

    def made_up_actions(self) -> Tensor:
        return torch.arange(self.rows) % self.num_actions

    def sample(self, agent: Any, batch: Any, i: int) -> Sample:
        mask = None if getattr(batch, "masks", None) is None else batch.masks[i]
        x = batch.obs[i]
        return Sample(
            self.distribution(agent, x, mask).log_prob(batch.actions[i]),
            self.entropy(agent, x, mask),
            self.value(agent, x),
            *(float(column[i]) for column in (batch.logprobs, batch.values, batch.advantages, batch.returns)),
        )

    def settings(self, args: Any, **changes: Any) -> Settings:
        found = {
            "learning_rate": args.learning_rate,
            "clip_coef": args.clip_coef,
            "clip_policy": getattr(args, "use_clipping", True),
            "clip_value": getattr(args, "clip_vloss", False),
            "norm_adv": args.norm_adv,
            "ent_coef": getattr(args, "ent_coef", 0.0),
            "vf_coef": args.vf_coef,
            "max_grad_norm": args.max_grad_norm,
            "target_kl": getattr(args, "target_kl", None),
        }
        return Settings(**(found | changes))

    def make_batch(self, agent: Any, args: Any, masked: bool) -> Any:
        masks = None
        actions = self.made_up_actions()
        if masked:
            masks = torch.ones(self.rows, self.num_actions, dtype=torch.bool)
            masks[torch.arange(self.rows), (actions + 1) % self.num_actions] = False
        columns = self.made_up(agent, self.made_up_obs(), actions, masks)
        if "masks" in {each.name for each in dataclasses.fields(self.trainer.Batch)}:
            columns["masks"] = masks
        return self.trainer.Batch(**columns)

    def call_update(self, agent: Any, optimizer: Any, batch: Any, args: Any, s: Settings, world: World) -> Any:
        given = {
            "agent": agent, "optimizer": optimizer, "batch": batch, "args": args, "clip_coef": s.clip_coef,
            "ent_coef": s.ent_coef, "kl_coef": s.kl_coef, "world": world,
        }  # fmt: skip
        wanted = inspect.signature(self.trainer.update).parameters
        return self.trainer.update(*(given[name] for name in wanted))

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        agent = self.make_agent(args)
        batch = self.make_batch(agent, args, masked)
        s = self.settings(
            args, kl_coef=kl_coef if "kl_coef" in inspect.signature(self.trainer.update).parameters else 0
        )
        optimizer = self.trainer.make_optimizer(agent, args.learning_rate)
        return Problem(
            agent,
            optimizer,
            lambda world, rank=None: self.call_update(agent, optimizer, half(batch, rank), args, s, world),
            lambda rows: ([self.sample(agent, batch, i) for i in rows], 0.0),
            lambda order: equal_parts(order, args.num_minibatches),
            s,
            (batch.values.tolist(), batch.returns.tolist()),
        )

    # The roll-out

    def play(self, count: int = 3, **changes: Any) -> Played:
        """Play ``count`` roll-outs in scripted environments."""
        torch.manual_seed(0)
        args = self.args(**({"env_id": self.env_id} | changes))
        agent = self.make_agent(args)
        runner = self.trainer.Rollouts(args, agent, CPU)
        runner.restart(7)
        scripts = scripts_in(runner.envs)
        rollouts = [runner.collect() for _ in range(count)]
        steps = cut([transitions(each.journal, args.env_id == NEXT_STEP) for each in scripts], args.num_steps)
        runner.close()
        return Played(args, agent, rollouts, steps, args.num_envs, [each.journal[0].obs for each in scripts])

    # The whole run

    @contextmanager
    def scripted(self) -> Iterator[None]:
        """Train in scripted environments."""
        yield

    def schedules(self, folder: Path, iterations: int, **changes: Any) -> list[dict[str, float]]:
        """Learning rate and coefficients that each update of a run gets."""
        used: list[dict[str, float]] = []
        plain = self.trainer.update
        names = list(inspect.signature(plain).parameters)

        def update(*given: Any) -> dict[str, float]:
            named = dict(zip(names, given, strict=True))
            rate = named["optimizer"].param_groups[0]["lr"]
            used.append(
                {"learning_rate": rate} | {key: named[key] for key in ("clip_coef", "ent_coef") if key in named}
            )
            return plain(*given)

        args = self.run_args(folder, iterations, **changes)
        self.trainer.update = update
        try:
            with self.scripted():
                self.trainer.train(args, World())
        finally:
            self.trainer.update = plain
        return used

    def run_args(self, folder: Path, iterations: int, **changes: Any) -> Any:
        sizes = self.small["num_envs"] * self.small["num_steps"]
        more = {"eval_episodes": 0, "eval_streams": 0, "checkpoint_interval": 0, "final_std": None}
        more |= {"run_dir": folder, "total_timesteps": iterations * sizes}
        if type(self).scripted is Case.scripted:
            more["env_id"] = self.env_id
        return self.args(**(more | changes))

    @property
    def real_env_id(self) -> str:
        """An environment whose state a checkpoint can hold."""
        return self.env_id

    def real_environments(self) -> AbstractContextManager[None]:
        return self.scripted()

    def played_action(self, stored: Tensor) -> np.ndarray:
        """What the environment receives for an action of the batch."""
        return stored.numpy()

    def view(self, played: Played) -> View:
        return View(played)

    def memory(self, played: Played) -> Memory:
        return Memory(played)

    def rows_of(self, batch: Any) -> dict[str, Tensor]:
        """The columns of a batch that have a reference, one row per transition in time order."""
        names = ("obs", "actions", "logprobs", "advantages", "returns", "values")
        return {name: getattr(batch, name) for name in names}

    def gamma_and_lambda(self, args: Any) -> tuple[float, float]:
        return args.gamma, args.gae_lambda

    def charts(self, played: Played) -> list[dict[str, float]]:
        """Charts of each roll-out, from its finished episodes."""
        totals, lengths = np.zeros(played.num_envs), np.zeros(played.num_envs)
        last: list[float] = []
        out = []
        for steps in played.steps:
            ended: list[tuple[float, float]] = []
            for step in steps:
                for env, each in enumerate(step):
                    if each is not None:
                        totals[env] += each.reward
                        lengths[env] += 1
                        if each.done:
                            ended.append((totals[env], lengths[env]))
                            totals[env] = lengths[env] = 0
            last = [*last, *(total for total, _ in ended)][-100:]
            charts = {"charts/mean_return_100": float(np.mean(last)) if last else math.nan}
            if ended:
                charts["charts/episodic_return"] = float(np.mean([total for total, _ in ended]))
                charts["charts/episodic_length"] = float(np.mean([length for _, length in ended]))
            out.append(charts)
        return out

    @torch.no_grad()
    def expected(self, played: Played) -> list[dict[str, np.ndarray]]:
        """The columns of each roll-out, computed from the journals. Only the actions come from the batch."""
        args, agent = played.args, played.agent
        view, memory = self.view(played), self.memory(played)
        gamma, lam = self.gamma_and_lambda(args)
        out = []
        for (batch, _), steps in zip(played.rollouts, played.steps, strict=True):
            actions = iter(self.rows_of(batch)["actions"])
            rows: list[dict[str, Any]] = []
            chains: list[list[tuple[Transition, float, float, float]]] = [[] for _ in range(played.num_envs)]
            places: list[list[int]] = [[] for _ in range(played.num_envs)]
            for step in steps:
                known = [(env, each) for env, each in enumerate(step) if each is not None]
                for env, each in known:
                    row, action = view(each.obs), next(actions)
                    np.testing.assert_allclose(self.played_action(action), each.action, rtol=1e-6, atol=1e-6)
                    x = memory.step(env, row, each.first)
                    logprob = self.distribution(agent, x, each.mask).log_prob(action)
                    places[env].append(len(rows))
                    rows.append({
                        "obs": row.numpy(), "logprobs": float(logprob), "values": float(self.value(agent, x)),
                        "mask": each.mask, "distribution": self.distribution(agent, x, each.mask), "action": action,
                    })  # fmt: skip
                view.after(step)
                rewards = view.rewards(step)
                for env, each in known:
                    following = float(self.value(agent, memory.peek(env, view(each.successor))))
                    chains[env].append((each, rewards[env], rows[places[env][-1]]["values"], following))
            for chain, place in zip(chains, places, strict=True):
                bootstrap = getattr(args, "bootstrap_truncated", True)
                advantages = advantages_of(chain, gamma, lam, bootstrap)
                targets = advantages
                if getattr(args, "returns", "gae") == "td":
                    targets = advantages_of(chain, gamma, 0.0, bootstrap)
                for i, advantage, target, (_, _, value, _) in zip(place, advantages, targets, chain, strict=True):
                    rows[i] |= {"advantages": advantage, "returns": target + value}
            out.append({key: [row[key] for row in rows] for key in rows[0]})
        return out


class View:
    """What the agent sees of an observation and of a reward."""

    def __init__(self, played: Played) -> None:
        self.played = played

    def __call__(self, obs: Any) -> Tensor:
        return torch.as_tensor(obs)

    def after(self, step: list[Transition | None]) -> None:
        """Called after each step of all environments."""

    def rewards(self, step: list[Transition | None]) -> list[float]:
        return [0.0 if each is None else each.reward for each in step]


class Memory:
    """What the heads of the network get: the observation, or the features of an LSTM."""

    def __init__(self, played: Played) -> None:
        self.agent: Any = played.agent

    def step(self, env: int, row: Tensor, first: bool) -> Tensor:
        return row

    def peek(self, env: int, row: Tensor) -> Tensor:
        """Features of the next observation. The memory does not change."""
        return row


class AtariCase(Case):
    name = "ppo_atari"
    small = Case.small | {"num_steps": 6, "num_envs": 2}
    rows = 10

    @cached_property
    def heads(self) -> Any:
        """An agent without its network, whose initialisation takes long."""
        with torch.random.fork_rng():
            agent = self.trainer.Agent(self.num_actions)
        agent.network = nn.Identity()
        return agent

    def make_agent(self, args: Any) -> nn.Module:
        """The agent with a small network instead of the Nature CNN, which test_ppo_atari.py checks."""
        agent = copy.deepcopy(self.heads)
        agent.network = nn.Sequential(nn.AvgPool2d(28), nn.Flatten(), nn.Linear(36, 8), nn.Tanh())
        agent.actor_head, agent.critic_head = nn.Linear(8, self.num_actions), nn.Linear(8, 1)
        with torch.no_grad():
            agent.network[2].weight.normal_(0, 3)
            agent.actor_head.weight.normal_(0, 1.5)
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        return Categorical(logits=agent.actor_head(agent.network(x[None].to(agent.actor_head.weight) / 255))[0])

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic_head(agent.network(x[None].to(agent.actor_head.weight) / 255))[0, 0]

    def made_up_obs(self) -> Tensor:
        return torch.randint(0, 256, (self.rows, 4, 84, 84), dtype=torch.uint8)

    @contextmanager
    def scripted(self) -> Iterator[None]:
        def make_envs(env_id: str, num_envs: int, *options: Any, **named: Any) -> SyncVectorEnv:
            makers = [
                partial(Script, gym.spaces.Discrete(4), shape=(4, 84, 84), first_episode=i) for i in range(num_envs)
            ]
            wrapped = [lambda make=make: gym.wrappers.RecordEpisodeStatistics(make()) for make in makers]
            return SyncVectorEnv(wrapped, autoreset_mode=AutoresetMode.SAME_STEP)

        plain, self.trainer.make_envs = self.trainer.make_envs, make_envs
        try:
            yield
        finally:
            self.trainer.make_envs = plain

    def play(self, count: int = 3, **changes: Any) -> Played:
        with self.scripted():
            return super().play(count, **changes)


def diagonal_normal(mean: Tensor, std: Tensor) -> Independent:
    return Independent(Normal(mean, std), 1)


class ClusterView(View):
    """Normalised observations and scaled rewards."""

    def __init__(self, played: Played) -> None:
        super().__init__(played)
        self.numbers = AllNumbers()
        self.numbers.add(played.first_obs)
        self.scale = ReturnScale(played.num_envs, played.args.gamma)

    def __call__(self, obs: Any) -> Tensor:
        if not self.played.args.norm_obs:
            return torch.as_tensor(obs)
        return torch.as_tensor(self.numbers.normalize(obs), dtype=torch.float32)

    def after(self, step: list[Transition | None]) -> None:
        self.numbers.add([each.shown for each in step if each is not None])

    def rewards(self, step: list[Transition | None]) -> list[float]:
        plain = np.array(super().rewards(step))
        if not self.played.args.norm_reward:
            return plain.tolist()
        return self.scale.scale(plain, np.array([each is not None and each.done for each in step])).tolist()


class ContinuousCase(Case):
    name = "ppo_continuous_action"
    small = Case.small | {"hidden": 8}
    env_id = BOX
    num_actions = 2

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.Agent(3, 2, args.hidden)
        with torch.no_grad():
            agent.actor_head.weight.mul_(100)
            agent.log_std.copy_(torch.tensor([0.1, -0.4]))
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        return diagonal_normal(agent.actor_head(agent.actor_trunk(x)), torch.exp(agent.log_std))

    def entropy(self, agent: Any, x: Tensor, mask: Any) -> Tensor:
        return self.distribution(agent, x, mask).entropy()

    def made_up_actions(self) -> Tensor:
        return torch.randn(self.rows, 2)

    def played_action(self, stored: Tensor) -> np.ndarray:
        return np.clip(stored.numpy(), [-2, 0], [2, 3])

    def view(self, played: Played) -> View:
        return ClusterView(played)


class GpuAllocCase(Case):
    name = "ppo_gpu_alloc"
    logs_updates = False
    small = Case.small | {"gamma": 0.9, "hidden": 8, "num_envs": 4, "action_scale": 0.3}
    num_actions = 2

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.Agent(5, 2, args.hidden, args.action_scale)
        with torch.no_grad():
            agent.actor[4].weight.mul_(100)
            agent.log_std.copy_(torch.tensor([0.1, -0.4]))
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        std = agent.action_scale * torch.exp(agent.log_std)
        return diagonal_normal(torch.sigmoid(agent.actor[:5](x)), std)

    def entropy(self, agent: Any, x: Tensor, mask: Any) -> Tensor:
        return self.distribution(agent, x, mask).entropy()

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic(x)[0]

    def made_up_obs(self) -> Tensor:
        return torch.randn(self.rows, 5)

    def made_up_actions(self) -> Tensor:
        return torch.rand(self.rows, 2)

    @contextmanager
    def scripted(self) -> Iterator[None]:
        plain, self.trainer.make_envs = self.trainer.make_envs, lambda args, num_envs: ScriptedCluster(num_envs)
        try:
            yield
        finally:
            self.trainer.make_envs = plain

    def play(self, count: int = 3, **changes: Any) -> Played:
        torch.manual_seed(0)
        args = self.args(**changes)
        agent = self.make_agent(args)
        with self.scripted():
            runner = self.trainer.Rollouts(args, agent, CPU, 3)
        self.check_start(runner.envs, args)
        rollouts, self.finished = [], []
        for _ in range(count):
            before = len(runner.envs.finished)
            rollouts.append(runner.collect())
            self.finished.append(runner.envs.finished[before:])
        journals = runner.envs.journals
        steps = cut([transitions(journal, False) for journal in journals], args.num_steps)
        return Played(args, agent, rollouts, steps, args.num_envs, [journal[0].obs for journal in journals])

    @property
    def real_env_id(self) -> str:
        return "GPUAllocation-v0"

    def real_environments(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_start(self, cluster: ScriptedCluster, args: Any) -> None:
        """Environments have different seeds and start in different phases of their episodes."""
        assert cluster.seeds.tolist() == [3, 4, 5, 6]
        assert cluster.state["counters"][:, 0].tolist() == [0, 1, 2, 3]

    def played_action(self, stored: Tensor) -> np.ndarray:
        return np.clip(stored.numpy(), 0, 1)

    def view(self, played: Played) -> View:
        return ClusterView(played)

    def charts(self, played: Played) -> list[dict[str, float]]:
        out = []
        for steps, finished in zip(played.steps, self.finished, strict=True):
            charts = {"charts/reward": float(np.mean([[each.reward for each in step] for step in steps]))}
            if finished:
                sums = np.mean(finished, 0)
                names = ("qos", "efficiency", "oom", "monopoly", "wait_s")
                charts |= {"charts/episodic_return": sums[0], "charts/episodic_length": sums[6]}
                charts |= {f"charts/{name}": sums[1 + i] / sums[6] for i, name in enumerate(names)}
            out.append(charts)
        return out


def lstm_cell(lstm: nn.LSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of an LSTM, written out."""
    gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class LSTMMemory(Memory):
    def __init__(self, played: Played) -> None:
        super().__init__(played)
        size = self.agent.lstm.hidden_size
        self.state = [(torch.zeros(size), torch.zeros(size)) for _ in range(played.num_envs)]

    def step(self, env: int, row: Tensor, first: bool) -> Tensor:
        h, c = self.state[env]
        if first:
            h, c = torch.zeros_like(h), torch.zeros_like(c)
        self.state[env] = lstm_cell(self.agent.lstm, self.agent.encoder(row), h, c)
        return self.state[env][0]

    def peek(self, env: int, row: Tensor) -> Tensor:
        return lstm_cell(self.agent.lstm, self.agent.encoder(row), *self.state[env])[0]


class LSTMCase(GpuAllocCase):
    name = "ppo_lstm"
    small = GpuAllocCase.small | {"num_minibatches": 2}

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.Agent(5, 2, args.hidden, args.action_scale)
        with torch.no_grad():
            agent.actor[0].weight.mul_(100)
            agent.log_std.copy_(torch.tensor([0.1, -0.4]))
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        return diagonal_normal(torch.sigmoid(agent.actor[0](x)), agent.action_scale * torch.exp(agent.log_std))

    def check_start(self, cluster: ScriptedCluster, args: Any) -> None:
        assert cluster.seeds.tolist() == [3, 4, 5, 6]

    def memory(self, played: Played) -> Memory:
        return LSTMMemory(played)

    def rows_of(self, batch: Any) -> dict[str, Tensor]:
        return {name: column.flatten(0, 1) for name, column in super().rows_of(batch).items()}

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**({"num_envs": 5} | changes))
        agent = self.make_agent(args)
        shape = (args.num_steps, args.num_envs)
        starts = torch.rand(shape) < 0.3
        state = (torch.randn(1, args.num_envs, args.hidden), torch.randn(1, args.num_envs, args.hidden))
        obs = torch.randn(*shape, 5)
        numbers = {"logprobs": (0.0, 0.6), "advantages": (2, 3), "returns": (0.0, 1.0), "values": (0.0, 0.5)}
        columns = {name: a + b * torch.randn(shape) for name, (a, b) in numbers.items()}
        batch = self.trainer.Batch(obs=obs, actions=torch.rand(*shape, 2), starts=starts, state=state, **columns)
        with torch.no_grad():
            for env in range(args.num_envs):
                for t, sample in enumerate(self.sequence(agent, batch, env)):
                    for name, now in (
                        ("logprobs", sample.logprob),
                        ("returns", sample.value),
                        ("values", sample.value),
                    ):
                        getattr(batch, name)[t, env] += now
        s = self.settings(args)
        optimizer = self.trainer.make_optimizer(agent, args.learning_rate)

        def update(world: World, rank: int | None = None) -> dict[str, float]:
            envs = torch.arange(args.num_envs) if rank is None else torch.arange(rank, args.num_envs, 2)
            fewer = dataclasses.replace(args, num_envs=len(envs))
            return self.call_update(agent, optimizer, batch.take(envs), fewer, s, world)

        return Problem(
            agent,
            optimizer,
            update,
            lambda rows: ([sample for env in rows for sample in self.sequence(agent, batch, env)], 0.0),
            lambda order: chunks(order, args.num_minibatches),
            s,
            (batch.values.flatten().tolist(), batch.returns.flatten().tolist()),
        )

    def sequence(self, agent: Any, batch: Any, env: int) -> list[Sample]:
        """All decisions in one environment, from the stored state at the start of the roll-out."""
        h, c = batch.state[0][0, env], batch.state[1][0, env]
        out = []
        for t in range(len(batch.obs)):
            if batch.starts[t, env]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            h, c = lstm_cell(agent.lstm, agent.encoder(batch.obs[t, env]), h, c)
            distribution = self.distribution(agent, h, None)
            columns = (batch.logprobs, batch.values, batch.advantages, batch.returns)
            out.append(
                Sample(
                    distribution.log_prob(batch.actions[t, env]),
                    distribution.entropy(),
                    self.value(agent, h),
                    *(float(column[t, env]) for column in columns),
                )
            )
        return out


def chunks(order: list[int], count: int) -> list[list[int]]:
    """Parts of equal size; the last one can be smaller."""
    size = -(-len(order) // count)
    return [order[i : i + size] for i in range(0, len(order), size)]


class OnlineCase(GpuAllocCase):
    """The agent of a node learns from single experiences, each with the observation at its feedback."""

    name = "ppo_gpu_alloc_online"
    small = {"minibatch_size": 6, "update_epochs": 3, "gamma": 0.9, "action_scale": 0.3, "target_kl": None,
             "min_std": 0.199}  # fmt: skip
    has_rollout = False
    has_world = False
    has_schedule = False  # the learning rate is constant

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.Agent(5, 2, 8, args.action_scale)
        with torch.no_grad():
            agent.actor[4].weight.mul_(100)
            agent.log_std.copy_(torch.tensor([0.1, -0.4]))
        return agent

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        agent = self.make_agent(args)
        columns = self.made_up(agent, self.made_up_obs(), self.made_up_actions())
        batch = Experiences(
            columns["obs"], columns["actions"], columns["logprobs"], rewards=torch.randn(self.rows) + 1.5,
            values=columns["values"], next_obs=torch.randn(self.rows, 5), dones=torch.arange(self.rows) % 4 == 0,
            through=99, skipped=4,
        )  # fmt: skip
        with torch.no_grad():
            values = [float(self.value(agent, x)) for x in batch.obs]
            following = [float(self.value(agent, x)) for x in batch.next_obs]
        goes_on = (~batch.dones).tolist()
        targets = [
            reward + args.gamma * after * on
            for reward, after, on in zip(batch.rewards.tolist(), following, goes_on, strict=True)
        ]
        advantages = [target - value for target, value in zip(targets, values, strict=True)]

        def sample(i: int) -> Sample:
            distribution = self.distribution(agent, batch.obs[i], None)
            logprob = distribution.log_prob(batch.actions[i])
            old = (float(batch.logprobs[i]), values[i], advantages[i], targets[i])
            return Sample(logprob, distribution.entropy(), self.value(agent, batch.obs[i]), *old)

        def clamp() -> None:
            with torch.no_grad():
                for i, number in enumerate(agent.log_std.tolist()):
                    agent.log_std[i] = max(number, math.log(args.min_std / args.action_scale))

        count = min(max(1, self.rows // args.minibatch_size), 16)
        s = self.settings(args)
        optimizer = self.trainer.make_optimizer(agent, args.learning_rate)

        def more_metrics(outcome: Any) -> dict[str, float]:
            std = [args.action_scale * math.exp(number) for number in agent.log_std.tolist()]
            return {
                "charts/reward": float(batch.rewards.mean()), "charts/batch": self.rows, "charts/skipped": 4,
                "charts/std_cores": std[0], "charts/std_memory": std[1],
            }  # fmt: skip

        return Problem(
            agent,
            optimizer,
            lambda world: self.trainer.update(agent, optimizer, batch, args),
            lambda rows: ([sample(i) for i in rows], 0.0),
            lambda order: larger_first(order, count),
            s,
            (values, targets),
            clamp,
            more_metrics,
        )


class FederatedCase(Case):
    name = "ppo_federated"
    small = Case.small | {"num_envs": 3, "num_steps": 6, "n_agents": 3, "hidden": 8, "penalty_coeff": 0.7,
                          "adaptive_kl_beta": 0.6, "env_id": DISCRETE}  # fmt: skip
    rows = 18
    has_world = False
    matrix = np.array([[0.0, 1.0, 1.0], [2.0, 0.0, 0.5], [1.0, 1.0, 0.0]])

    def make_learner(self, args: Any) -> Any:
        learner = self.trainer.Learner(args, 1, self.matrix, CPU)
        with torch.no_grad():
            learner.agent.policy.net[4].weight.mul_(100)
            if learner.agent.policy.logstd is not None:
                learner.agent.policy.logstd.copy_(torch.tensor([0.1, -0.4]))
        return learner

    def of(self, policy: Any, x: Tensor, mask: Any = None) -> Any:
        """The distribution of a policy for one observation."""
        out = policy.net(x)
        if policy.logstd is not None:
            return diagonal_normal(out, policy.logstd.exp())
        return Categorical(logits=out if mask is None else out.masked_fill(~torch.as_tensor(mask), -math.inf))

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        return self.of(agent.policy, x, mask)

    def entropy(self, agent: Any, x: Tensor, mask: Any) -> Tensor:
        return self.distribution(agent, x, mask).entropy()

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic(x)[0]

    def made_up_actions(self) -> Tensor:
        return torch.arange(self.rows) % self.num_actions

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        learner = self.make_learner(args)
        agent = learner.agent
        neighbours = {0: copy.deepcopy(agent.policy), 2: copy.deepcopy(agent.policy)}
        with torch.no_grad():
            for policy in neighbours.values():
                for parameter in policy.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            old = copy.deepcopy(agent.policy)
            for parameter in old.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        learner.neighbours = {j: parameters_to_vector(policy.parameters()) for j, policy in neighbours.items()}
        columns = self.made_up(agent, self.made_up_obs(), self.made_up_actions())
        with torch.no_grad():
            columns["dist"] = old(columns["obs"])
        names = {each.name for each in dataclasses.fields(self.trainer.Transitions)}
        if "masks" in names:
            columns["masks"] = None
        learner.batch = batch = self.trainer.Transitions(**columns)
        s = self.settings(args)
        beta = learner.beta
        divergences: list[tuple[float, float]] = []

        def samples_of(rows: list[int]) -> tuple[list[Sample], Tensor]:
            extra, own_kl, comm_kl = torch.zeros(()), torch.zeros(()), torch.zeros(())
            if not args.use_clipping:
                pairs = [(self.of(old, batch.obs[i]), self.of(agent.policy, batch.obs[i])) for i in rows]
                own_kl = sum(kl_divergence(p, q) for p, q in pairs) / len(rows)
                extra = extra + beta * own_kl
            if args.use_comm_penalty:
                for j, policy in neighbours.items():
                    pairs = [(self.of(agent.policy, batch.obs[i]), self.of(policy, batch.obs[i])) for i in rows]
                    kl = sum(kl_divergence(p, type(q)(**frozen(q))) for p, q in pairs) / len(rows)
                    comm_kl = comm_kl + self.matrix[1, j] * kl
                extra = extra + args.penalty_coeff * comm_kl
            divergences.append((float(own_kl.detach()), float(comm_kl.detach())))
            return [self.sample(agent, batch, i) for i in rows], extra

        def more_metrics(outcome: Any) -> dict[str, float]:
            own_kl, comm_kl = (float(np.mean(column)) for column in zip(*divergences, strict=True))
            terms = {
                "policy": outcome.mean("policy_loss"),
                "entropy": args.ent_coef * outcome.mean("entropy"),
                "value": args.vf_coef * outcome.mean("value_loss"),
                "comm_penalty": args.penalty_coeff * comm_kl,
            }
            new_beta, found = beta, {"losses/own_kl": own_kl, "losses/comm_kl": comm_kl}
            if not args.use_clipping:
                terms["kl_penalty"] = beta * own_kl
                with torch.no_grad():
                    kls = [float(kl_divergence(self.of(old, x), self.of(agent.policy, x))) for x in batch.obs]
                found["losses/kl_after_update"] = kl = float(np.mean(kls))
                target = args.adaptive_kl_target
                new_beta = beta * 2 if kl > 1.5 * target else beta / 2 if kl < target / 1.5 else beta
            total = sum(map(abs, terms.values()))
            found |= {f"charts/loss_fractions/{name}": abs(term) / total for name, term in terms.items()}
            return found | {"charts/beta": new_beta}

        return Problem(
            agent,
            learner.optimizer,
            lambda world: learner.learn(),
            samples_of,
            lambda order: equal_parts(order, args.num_minibatches),
            s,
            (batch.values.tolist(), batch.returns.tolist()),
            more_metrics=more_metrics,
        )

    def schedules(self, folder: Path, iterations: int, **changes: Any) -> list[dict[str, float]]:
        args = self.args(total_timesteps=iterations * self.rows, **changes)
        learner = self.make_learner(args)
        used: list[dict[str, float]] = []
        learn = learner.learn

        def spy() -> dict[str, float]:
            used.append({"learning_rate": learner.optimizer.param_groups[0]["lr"]})
            return learn()

        learner.learn = spy
        for i in range(iterations):
            assert learner.iterate()["charts/learning_rate"] == used[i]["learning_rate"]
        return used

    def gamma_and_lambda(self, args: Any) -> tuple[float, float]:
        return args.gamma, args.gae_lambda if args.gae else 1.0

    def play(self, count: int = 3, **changes: Any) -> Played:
        torch.manual_seed(0)
        args = self.args(**changes)
        learner = self.make_learner(args)
        rollouts = []
        for _ in range(count):
            charts = learner.collect()
            rollouts.append((learner.batch, charts))
        scripts = [env.unwrapped for env in learner.envs.envs]
        steps = cut([transitions(each.journal, False) for each in scripts], args.num_steps)
        return Played(args, learner.agent, rollouts, steps, args.num_envs, [each.journal[0].obs for each in scripts])

    def charts(self, played: Played) -> list[dict[str, float]]:
        return [
            {key: value for key, value in charts.items() if key != "charts/mean_return_100"}
            for charts in super().charts(played)
        ]


def frozen(distribution: Any) -> dict[str, Any]:
    """The parameters of a distribution, without gradients."""
    if isinstance(distribution, Categorical):
        return {"logits": distribution.logits.detach()}
    base = Normal(distribution.base_dist.loc.detach(), distribution.base_dist.scale.detach())
    return {"base_distribution": base, "reinterpreted_batch_ndims": 1}


class FederatedBoxCase(FederatedCase):
    small = FederatedCase.small | {"env_id": BOX}
    num_actions = 2

    @property
    def id(self) -> str:
        return "ppo_federated-box"

    def made_up_actions(self) -> Tensor:
        return torch.randn(self.rows, 2)

    def played_action(self, stored: Tensor) -> np.ndarray:
        """Actions from −1 to 1 are scaled to the range of the space, −2 … 2 and 0 … 3, and clipped to it."""
        return np.clip(stored.numpy() * [2.0, 1.5] + [0.0, 1.5], [-2, 0], [2, 3])


class LLMCase(Case):
    """Tokens are actions; a response is an episode."""

    name = "ppo_llm"
    small = {"prompt_tokens": 3, "response_tokens": 5, "batch_size": 7, "num_minibatches": 3, "update_epochs": 2,
             "balance_coef": 0.4, "vf_coef": 0.3}  # fmt: skip
    config = TinyMoEConfig(n_layers=2, n_experts=4, top_k=2, hidden=16, intermediate=4, n_heads=2, context=32)
    has_world = False
    has_early_stop = False
    has_rollout = False
    logs_updates = False
    losses = ("policy_loss", "value_loss", "approx_kl", "clipfrac", "grad_norm", "max_ratio")

    def run_args(self, folder: Path, iterations: int, **changes: Any) -> Any:
        sizes = {"pretrain_steps": 1, "pretrain_batch": 2, "pretrain_length": 16, "eval_prompts": 2, "show": 0}
        text = folder.with_suffix(".txt")
        text.write_text("\n\n".join(f"Paragraph {i} has some words, and {i * i} more." for i in range(60)))
        more = {"model": self.config, "checkpoint_interval": 0, "iterations": iterations, "text": [text]}
        return self.args(**sizes, **more, run_dir=folder, **changes)

    def make_policy(self) -> Any:
        policy = self.trainer.PolicyWithValue(TinyMoE(self.config))
        with torch.no_grad():
            policy.language_model.embedding.mul_(20)
            policy.value_head.weight.normal_()
        return policy

    def response(self, policy: Any, tokens: Tensor, n_prompt: int) -> tuple[list[Any], list[Tensor]]:
        """Distribution and value before each token of the response, from one sequence at a time."""
        activations = policy.language_model.trunk(tokens[None, :-1])[0][0]
        rows = activations[n_prompt - 1 :]
        logits = rows @ policy.language_model.embedding.T
        values = rows @ policy.value_head.weight[0] + policy.value_head.bias[0]
        return [Categorical(logits=each) for each in logits], list(values)

    def balance(self, model: TinyMoE, tokens: Tensor, mask: Tensor, n_prompt: int) -> Tensor:
        """E · Σ_e (share of the choices) · (mean probability), the mean over layers, for the inputs that count."""
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            layer.router.register_forward_hook(lambda _, __, out: seen.append((out[0], out[2])))
            for layer in model.layers
        ]
        model.trunk(tokens[:, :-1])
        for hook in hooks:
            hook.remove()
        counts = self.balanced_inputs(tokens, mask, n_prompt).flatten()
        losses = []
        for logits, experts in seen:
            chosen = experts[counts].flatten().tolist()
            share = torch.tensor([chosen.count(e) / len(chosen) for e in range(self.config.n_experts)])
            probability = torch.stack([torch.softmax(row, 0) for row in logits[counts]]).mean(0)
            losses.append(self.config.n_experts * (share * probability).sum())
        return sum(losses) / len(losses)

    def balanced_inputs(self, tokens: Tensor, mask: Tensor, n_prompt: int) -> Tensor:
        """Inputs of the model that the routers have to balance (B, P + R − 1): no padding after the end token."""
        return torch.cat([torch.ones_like(tokens[:, :n_prompt], dtype=torch.bool), mask[:, :-1]], 1)

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        policy = self.make_policy()
        n, p, r = args.batch_size, args.prompt_tokens, args.response_tokens
        tokens = torch.randint(1, 60, (n, p + r))
        lengths = [1 + i % r for i in range(n)]
        mask = torch.tensor([[t < length for t in range(r)] for length in lengths])
        for i, length in enumerate(lengths):
            if length < r:
                tokens[i, p + length - 1 :] = END
        with torch.no_grad():
            both = [self.response(policy, row, p) for row in tokens]
        logprobs = torch.tensor([
            [float(each.log_prob(token)) for each, token in zip(distributions, row[p:], strict=True)]
            for (distributions, _), row in zip(both, tokens, strict=True)
        ])  # fmt: skip
        values = torch.tensor([[float(value) for value in numbers] for _, numbers in both])
        noise = partial(torch.randn, n, r)
        batch = self.trainer.Batch(
            tokens, mask, logprobs + 0.3 * noise(), values + 0.5 * noise(), 2 + 3 * noise(), values + noise()
        )
        optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5)
        s = self.settings(args, ent_coef=0.0)
        balances: list[float] = []

        def samples_of(rows: list[int]) -> tuple[list[Sample], Tensor]:
            samples = []
            for i in rows:
                distributions, new_values = self.response(policy, tokens[i], p)
                for t in range(lengths[i]):
                    columns = (batch.logprobs, batch.values, batch.advantages, batch.returns)
                    old = (float(column[i, t]) for column in columns)
                    logprob = distributions[t].log_prob(tokens[i, p + t])
                    samples.append(Sample(logprob, torch.zeros(()), new_values[t], *old))
            balance = self.balance(policy.language_model, tokens[rows], mask[rows], p)
            balances.append(float(balance.detach()))
            return samples, args.balance_coef * balance

        return Problem(
            policy,
            optimizer,
            lambda world: self.trainer.update(policy, optimizer, batch, args, torch.Generator().manual_seed(3)),
            samples_of,
            lambda order: larger_first(order, args.num_minibatches),
            s,
            more_metrics=lambda outcome: {"losses/balance_loss": float(np.mean(balances))},
        )

    @torch.no_grad()
    def compare_rollout(self, kl_coef: float, **changes: Any) -> None:
        """Compare a roll-out with responses that are scored one by one."""
        torch.manual_seed(0)
        args = self.args(**({"batch_size": 9, "gamma": 0.9, "gae_lambda": 0.8} | changes))
        policy, reference = self.make_policy(), self.make_policy().language_model
        policy.language_model.embedding[END] *= 3  # some responses end early
        p, r = args.prompt_tokens, args.response_tokens
        prompts = torch.randint(1, 60, (args.batch_size, p))
        scale = self.trainer.Scale(0.2, 0.1)
        generator = torch.Generator().manual_seed(2)
        batch, metrics = self.trainer.rollout(policy, reference, prompts, scale, kl_coef, args, generator)
        assert torch.equal(batch.tokens[:, :p], prompts)
        reward_of = {"vowels": lambda text: sum(each in "aeiouAEIOU" for each in text) / r}[args.reward]
        totals: dict[str, list[float]] = {key: [] for key in ("reward", "score", "length", "ended", "k1", "k2", "k3")}
        all_values, all_targets = [], []
        for i, row in enumerate(batch.tokens):
            response = row[p:].tolist()
            length = response.index(END) + 1 if END in response else r
            assert batch.mask[i].tolist() == [t < length for t in range(r)]
            distributions, values = self.response(policy, row, p)
            rows = reference.trunk(row[None, :-1])[0][0][p - 1 :]
            of_reference = [Categorical(logits=each) for each in rows @ reference.embedding.T]
            raw = reward_of(decode(response[:length]))
            rewards, kls = [], []
            for t in range(length):
                token = row[p + t]
                logprob = float(distributions[t].log_prob(token))
                assert math.isclose(float(batch.logprobs[i, t]), logprob, rel_tol=1e-9)
                k1 = logprob - float(of_reference[t].log_prob(token))
                kls.append((k1, k1**2 / 2, math.exp(-k1) - 1 + k1))
                rewards.append(-kl_coef * k1 + ((raw - 0.2) / 0.1 if t == length - 1 else 0.0))
            numbers = [float(value) for value in values[:length]]
            following = [*numbers[1:], 0.0]
            steps = [Transition(None, None, None, 0, t == length - 1, False, None, None, False) for t in range(length)]
            chain = list(zip(steps, rewards, numbers, following, strict=True))
            advantages = advantages_of(chain, args.gamma, args.gae_lambda, True)
            targets = [a + v for a, v in zip(advantages, numbers, strict=True)]
            for name, column in (("values", numbers), ("advantages", advantages), ("returns", targets)):
                np.testing.assert_allclose(getattr(batch, name)[i, :length], column, rtol=1e-9, atol=1e-9)
            all_values += numbers
            all_targets += targets
            found = (raw, sum(rewards), length, END in response, *map(sum, zip(*kls, strict=True)))
            for column, number in zip(totals.values(), found, strict=True):
                column.append(float(number))
        mean = {key: float(np.mean(column)) for key, column in totals.items()}
        assert 0 < mean["ended"] < 1, "the test needs responses with and without an end token"
        residuals = np.subtract(all_targets, all_values)
        assert metrics == {
            "charts/reward": approx(mean["reward"]),
            "charts/episodic_return": approx(mean["reward"]),
            "charts/episodic_length": approx(mean["length"]),
            "charts/penalized_score": approx(mean["score"]),
            "charts/response_tokens": approx(mean["length"]),
            "charts/ended": approx(mean["ended"]),
            "kl/k1": approx(mean["k1"]),
            "kl/k2": approx(mean["k2"]),
            "kl/k3": approx(mean["k3"]),
            "losses/explained_variance": approx(1 - np.var(residuals) / np.var(all_targets)),
        }


def approx(value: float) -> Any:
    import pytest

    return pytest.approx(value, rel=1e-6, abs=1e-9)


CASES: list[Case] = [
    Case(), ContinuousCase(), AtariCase(), GpuAllocCase(), LSTMCase(), OnlineCase(), FederatedCase(),
    FederatedBoxCase(), LLMCase(),
]  # fmt: skip
