"""Whole iterations of a trainer, again: slowly, from the formulas, with what the environments were asked and answered.

``record`` runs ``train(args)`` and writes down its initial weights, sampled actions, environments and shuffles.
``replay`` computes the weights and metrics after each iteration from that. ``update_reference`` has the formulas.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clustergym.training.envs import make_vec
from clustergym.training.runs import Run
from trainers import load_trainer
from update_reference import (
    Adam,
    AllNumbers,
    ReturnScale,
    Sample,
    Script,
    Settings,
    Transition,
    advantages_of,
    reference_update,
)

DISCRETE, MASKED, TWO = "Script-v0", "ScriptMasked-v0", "ScriptTwo-v0"
BOX, OUTLIERS = "ScriptBox-v0", "ScriptOutliers-v0"
ACTIONS = {
    DISCRETE: gym.spaces.Discrete(4),
    MASKED: gym.spaces.Discrete(4),
    TWO: gym.spaces.MultiDiscrete([2, 3]),
    BOX: gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 3])),
    OUTLIERS: gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 3])),
}


@contextmanager
def scripted_environments() -> Iterator[None]:
    for name, actions in ACTIONS.items():
        kwargs = {"actions": actions, "masked": name == MASKED, "outliers": name == OUTLIERS}
        gym.register(name, Script, kwargs=kwargs, disable_env_checker=True)
    try:
        yield
    finally:
        for name in ACTIONS:
            del gym.registry[name]


@dataclass
class Record:
    """What a run did. Lists are in order of time."""

    args: Any
    agents: list[nn.Module] = field(default_factory=list)
    """The network before training."""
    actions: list[Tensor] = field(default_factory=list)
    """Sampled actions of each step, (envs, …)."""
    answers: list[tuple[Any, ...]] = field(default_factory=list)
    """Answers of the environments: (obs, infos) to the reset, then (obs, rewards, terminated, truncated, infos)."""
    played: list[np.ndarray] = field(default_factory=list)
    """Actions that the environments got."""
    orders: list[list[int]] = field(default_factory=list)
    """The shuffle of each epoch."""
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """The network after each iteration."""
    metrics: list[dict[str, float]] = field(default_factory=list)


def record(trainer: ModuleType, args: Any, monkeypatch: pytest.MonkeyPatch, make_envs: Any = None) -> Record:
    """Run ``train(args)`` with 64 bits. The first policy differs between states. ``make_envs`` replaces the games."""
    found = Record(args)
    make_envs = make_envs or trainer.make_envs

    class Watched(trainer.Agent):  # type: ignore[name-defined, misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            with torch.no_grad():
                heads = [each for each in self.actor.modules() if isinstance(each, nn.Linear)]
                heads[-1].weight.mul_(100)
                heads[-1].bias.normal_()
                if hasattr(self, "log_std"):
                    self.log_std += torch.tensor([0.1, -0.4])
            found.agents.append(copy.deepcopy(self))

        def get_action_and_value(self, *given: Any, **named: Any) -> Any:
            out = super().get_action_and_value(*given, **named)
            if "action" not in inspect.signature(super().get_action_and_value).bind(*given, **named).arguments:
                sampled = out[0]
                found.actions.append(sampled[0] if len(out) == 5 else sampled.clone())
            return out

        def get_action(self, *given: Any, **named: Any) -> Any:
            found.actions.append(super().get_action(*given, **named))
            return found.actions[-1]

    def watched_envs(*given: Any, **named: Any) -> Any:
        envs = make_envs(*given, **named)
        reset, step = envs.reset, envs.step

        def watched_reset(**options: Any) -> Any:
            found.answers.append(reset(**options))
            return found.answers[-1]

        def watched_step(actions: Any) -> Any:
            found.played.append(np.array(actions))
            found.answers.append(step(actions))
            return found.answers[-1]

        envs.reset, envs.step = watched_reset, watched_step
        return envs

    def randperm(n: int, plain: Any = torch.randperm, **options: Any) -> Tensor:
        order: Tensor = plain(n, **options)
        found.orders.append(order.tolist())
        return order

    def checkpoint(self: Run, **state: Any) -> None:
        found.weights.append(copy.deepcopy(state["agent"].state_dict()))

    def log(self: Run, metrics: dict[str, float], **shown: float) -> None:
        found.metrics.append(dict(metrics))

    torch.set_default_dtype(torch.float64)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(trainer, "Agent", Watched)
            patch.setattr(trainer, "make_envs", watched_envs)
            patch.setattr(torch, "randperm", randperm)
            patch.setattr(Run, "checkpoint", checkpoint)
            patch.setattr(Run, "log", log)
            trainer.train(args)
    finally:
        torch.set_default_dtype(torch.float32)
    return found


# The network, decision by decision


def softmax_logprobs(logits: Tensor, mask: np.ndarray | None) -> Tensor:
    """Log-probabilities of the valid actions; the others have −∞."""
    valid = torch.ones(len(logits), dtype=torch.bool) if mask is None else torch.as_tensor(mask == 1)
    total = sum(torch.exp(logit) for logit, known in zip(logits, valid, strict=True) if known)
    return torch.stack([
        logit - torch.log(total) if known else torch.tensor(-math.inf)
        for logit, known in zip(logits, valid, strict=True)
    ])  # fmt: skip


def categorical(logits: Tensor, sizes: list[int], action: Tensor, mask: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of independent components."""
    logprob, entropy, first = torch.tensor(0.0), torch.tensor(0.0), 0
    for size, chosen in zip(sizes, action.view(-1).tolist(), strict=True):
        part = slice(first, first + size)
        each = softmax_logprobs(logits[part], None if mask is None else mask[part])
        logprob = logprob + each[chosen]
        entropy = entropy - sum(p.exp() * p for p in each if p > -math.inf)
        first += size
    return logprob, entropy


def normal(mean: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    logprob, entropy = torch.tensor(0.0), torch.tensor(0.0)
    for m, s, a in zip(mean, log_std, action, strict=True):
        logprob = logprob - (a - m) ** 2 / (2 * s.exp() ** 2) - s - 0.5 * math.log(2 * math.pi)
        entropy = entropy + s + 0.5 * math.log(2 * math.pi * math.e)
    return logprob, entropy


def lstm_cell(lstm: nn.LSTM, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One step of an LSTM, written out. The hidden state is the feature."""
    h, c = state
    gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@dataclass
class Case:
    """How a trainer differs from ppo.py."""

    name: str
    env_id: str = DISCRETE
    flags: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{'-' if self.label else ''}{self.label}"

    @property
    def trainer(self) -> ModuleType:
        return load_trainer(self.name)

    def policy(self, agent: Any, x: Tensor, action: Tensor, mask: np.ndarray | None) -> tuple[Tensor, Tensor]:
        outputs = agent.actor(x)
        if hasattr(agent, "log_std") and not getattr(agent, "levels", 0):
            return normal(outputs, agent.log_std, action)
        sizes = {MASKED: [4], DISCRETE: [4], TWO: [2, 3]}.get(self.env_id) or [agent.levels] * 2
        return categorical(outputs, sizes, action, mask)

    def played(self, found: Record, step: int) -> np.ndarray:
        """What the environments should get for the actions of a step."""
        raw = found.actions[step].numpy()
        if self.env_id in (BOX, OUTLIERS):
            return np.clip(raw, [-2, 0], [2, 3])
        if not self.env_id.startswith("GPU"):
            return raw
        if not getattr(found.args, "levels", 0):
            return np.clip(raw, 0, 1)
        copies = found.args.copies
        requests = np.array([found.answers[step][0][env - env % copies][:2] for env in range(len(raw))], np.float64)
        shares = np.array([0.1, 0.5]) + np.array([0.9, 0.5]) * raw / (found.args.levels - 1)
        amounts = requests * shares * [100, 32768]
        return ((amounts - [10, 512]) / [90, 32768 - 512]).clip(0, 1)

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic(x)[0]

    def look(self, agent: Any, obs: Tensor) -> Tensor:
        """What the heads get in a network without memory."""
        return agent.network(obs[None] / 255)[0] if hasattr(agent, "network") else obs


@dataclass
class Row:
    """One decision of a roll-out."""

    env: int
    seen: Tensor
    action: Tensor
    mask: np.ndarray | None
    first: bool
    logprob: float = 0.0
    value: float = 0.0
    advantage: float = 0.0
    target: float = 0.0


class Replay:
    """Computes a recorded run again."""

    def __init__(self, case: Case, found: Record) -> None:
        self.case, self.found, self.args = case, found, found.args
        self.agent: Any = copy.deepcopy(found.agents[0])
        self.adam = Adam([p for p in self.agent.parameters() if p.requires_grad], 0.0)
        self.recurrent = hasattr(self.agent, "lstm")
        self.numbers = AllNumbers()
        self.scale = ReturnScale(self.args.num_envs, self.args.gamma)
        self.state = [self.empty() for _ in range(self.args.num_envs)]
        self.beta = getattr(self.args, "kl_coef", 0.0)
        self.num_iterations, self.orders = len(found.weights), iter(found.orders)
        (obs, infos), *self.answers = found.answers
        copies = getattr(self.args, "copies", 1)
        self.obs = np.stack([obs[env - env % copies] for env in range(self.args.num_envs)])
        self.masks = infos.get("action_mask")
        self.first = [True] * self.args.num_envs
        self.numbers.add(self.obs)

    def empty(self) -> tuple[Tensor, Tensor]:
        size = self.agent.lstm.hidden_size if self.recurrent else 0
        return torch.zeros(size), torch.zeros(size)

    def see(self, obs: Any) -> Tensor:
        """The observation as the agent gets it."""
        if getattr(self.args, "norm_obs", False):
            return torch.as_tensor(self.numbers.normalize(obs))
        return torch.as_tensor(obs, dtype=torch.float64)

    def step_of(self, number: int) -> list[Transition]:
        """The transitions of all environments in one step. ``shown`` is the observation after it."""
        obs, rewards, terminated, truncated, infos = self.answers[number]
        copies = getattr(self.args, "copies", 1)
        out = []
        for env in range(self.args.num_envs):
            done = bool(terminated[env] or truncated[env])
            missed = 0.0
            if getattr(self.args, "qos_penalty", 0.0):
                missed = float(not (infos["final_info"] if done else infos)["qos_met"][env])
            out.append(
                Transition(
                    self.obs[env],
                    None if self.masks is None else self.masks[env],
                    self.found.actions[number][env],
                    float(rewards[env]) - getattr(self.args, "qos_penalty", 0.0) * missed,
                    bool(terminated[env]),
                    bool(truncated[env]),
                    infos["final_obs"][env] if done else obs[env],
                    obs[env - env % copies],
                    self.first[env],
                )
            )
        self.obs, self.masks = np.stack([each.shown for each in out]), infos.get("action_mask")
        self.first = [each.done for each in out]
        return out

    @torch.no_grad()
    def rollout(self, iteration: int) -> list[Row]:
        """The decisions of an iteration with their advantages and targets, in the order of the trainer's batch."""
        args, case, agent = self.args, self.case, self.agent
        self.state_before = list(self.state)
        rows: list[Row] = []
        chains: list[list[tuple[Any, ...]]] = [[] for _ in range(args.num_envs)]
        for number in range(iteration * args.num_steps, (iteration + 1) * args.num_steps):
            seen = [self.see(each) for each in self.obs]
            step = self.step_of(number)
            own = []
            for env, each in enumerate(step):
                row = Row(env, seen[env], each.action, each.mask, each.first)
                x = self.features(row)
                row.logprob = float(case.policy(agent, x, row.action, row.mask)[0])
                row.value = float(case.value(agent, x))
                own.append(row)
            rows += own
            self.numbers.add(self.obs)
            rewards = np.array([each.reward for each in step])
            if getattr(args, "norm_reward", False):
                rewards = self.scale.scale(rewards, np.array([each.done for each in step]))
            for env, each in enumerate(step):
                ahead = self.see(each.successor)
                x = (
                    lstm_cell(agent.lstm, agent.encoder(ahead), self.state[env])[0]
                    if self.recurrent
                    else case.look(agent, ahead)
                )
                chains[env].append((each, rewards[env], own[env].value, float(case.value(agent, x))))
        bootstrap = getattr(args, "bootstrap_truncated", True)
        for env, chain in enumerate(chains):
            own = [row for row in rows if row.env == env]
            advantages = advantages_of(chain, args.gamma, args.gae_lambda, bootstrap)
            one_step = hasattr(args, "kl_target")  # ppo_kl.py learns r + γ V(s')
            targets = advantages_of(chain, args.gamma, 0.0, bootstrap) if one_step else advantages
            for row, advantage, target in zip(own, advantages, targets, strict=True):
                row.advantage, row.target = advantage, target + row.value
        copies = getattr(args, "copies", 1)
        for first in range(0, len(rows), copies) if copies > 1 else ():
            group = rows[first : first + copies]
            mean = sum(row.advantage for row in group) / copies
            for row in group:
                row.advantage -= mean
        return rows

    def features(self, row: Row) -> Tensor:
        """What the heads get for the next decision of an environment; moves its memory on."""
        if not self.recurrent:
            return self.case.look(self.agent, row.seen)
        state = self.empty() if row.first else self.state[row.env]
        self.state[row.env] = lstm_cell(self.agent.lstm, self.agent.encoder(row.seen), state)
        return self.state[row.env][0]

    def sample(self, row: Row, x: Tensor) -> Sample:
        logprob, entropy = self.case.policy(self.agent, x, row.action, row.mask)
        value = self.case.value(self.agent, x)
        return Sample(logprob, entropy, value, row.logprob, row.value, row.advantage, row.target)

    def samples(self, rows: list[Row]) -> list[Sample]:
        """Decisions as the current network sees them. Those of a network with memory are whole sequences."""
        if not self.recurrent:
            return [self.sample(row, self.case.look(self.agent, row.seen)) for row in rows]
        after, self.state = self.state, list(self.state_before)
        out = [self.sample(row, self.features(row)) for row in rows]
        self.state = after
        return out

    def minibatches(self, order: list[int], rows: list[Row]) -> list[list[int]]:
        """Indices of rows. With a memory, the shuffled things are environments."""
        size = len(order) // self.args.num_minibatches
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        if not self.recurrent:
            return parts
        return [[i for i, row in enumerate(rows) if row.env in part] for part in parts]

    def iteration(self, number: int) -> dict[str, float]:
        """One iteration. Returns its metrics."""
        args = self.args
        remaining = 1 - number / self.num_iterations
        rows = self.rollout(number)
        clips = hasattr(args, "clip_coef")
        settings = Settings(
            args.learning_rate * (remaining if args.anneal_lr else 1),
            args.clip_coef if clips else 1.0,
            clip_policy=clips,
            clip_value=clips and args.clip_vloss,
            norm_adv=getattr(args, "norm_adv", False),
            ent_coef=args.ent_coef * (remaining if args.anneal_lr and hasattr(args, "eval_streams") else 1),
            vf_coef=args.vf_coef,
            kl_coef=self.beta,
            max_grad_norm=args.max_grad_norm,
            target_kl=getattr(args, "target_kl", None),
        )
        outcome = reference_update(
            self.agent.parameters(),
            (self.minibatches(order, rows) for order in islice(self.orders, args.update_epochs)),
            lambda chosen: (self.samples([rows[i] for i in chosen]), 0.0),
            settings,
            adam=self.adam,
        )
        names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "grad_norm"]
        metrics = {f"losses/{name}": outcome.mean(name) for name in [*names, *(["clipfrac"] if clips else [])]}
        targets, values = np.array([row.target for row in rows]), np.array([row.value for row in rows])
        metrics["losses/explained_variance"] = 1 - (targets - values).var() / targets.var()
        metrics["charts/learning_rate"] = settings.learning_rate
        if hasattr(args, "kl_target"):
            with torch.no_grad():
                logratios = [float(each.logprob) - each.old_logprob for each in self.samples(rows)]
            kl = sum(math.exp(x) - 1 - x for x in logratios) / len(rows)
            self.beta *= 2 if kl > 1.5 * args.kl_target else 0.5 if kl < args.kl_target / 1.5 else 1
            self.beta = max(self.beta, 0.1)
            metrics |= {"losses/kl_after_update": kl, "charts/kl_coef": self.beta}
        return metrics


def replay(case: Case, found: Record) -> Iterator[tuple[dict[str, Tensor], dict[str, float]]]:
    """The weights and metrics after each iteration."""
    torch.set_default_dtype(torch.float64)
    try:
        again = Replay(case, found)
        for number in range(len(found.weights)):
            metrics = again.iteration(number)
            yield again.agent.state_dict(), metrics
        assert not list(again.orders), "the trainer made more epochs"
    finally:
        torch.set_default_dtype(torch.float32)


def short_streams(args: Any, num_envs: int, videos: Any = None) -> gym.vector.VectorEnv:
    """Allocation environments whose episodes have five pods."""
    return gym.wrappers.vector.RecordEpisodeStatistics(make_vec(args.env_id, num_envs, arrivals=5))


def games(env_id: str, num_envs: int, *rest: Any, **options: Any) -> gym.vector.VectorEnv:
    """Scripted pixels instead of Atari games."""
    makers = [lambda: gym.wrappers.RecordEpisodeStatistics(Script(gym.spaces.Discrete(4), (4, 84, 84)))] * num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
