"""A trainer in the form that ``test_trainer_updates.py`` needs, and how that of ``ppo.py`` is built."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

from clustergym.training import World
from trainers import load_trainer
from update_reference import Sample, Script, Settings, Transition, advantages_of, transitions

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
    obs_size = 3
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
        return torch.randn(self.rows, self.obs_size)

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
        if "kl_coef" not in inspect.signature(getattr(self.trainer, "update", self.settings)).parameters:
            changes.pop("kl_coef", None)
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
        s = self.settings(args, kl_coef=kl_coef)
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
