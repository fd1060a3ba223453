"""Slow references for roll-outs and updates: written from the formulas, one decision at a time, with plain numbers.

Nothing here calls a function of a trainer. ``test_trainer_updates.py`` compares every trainer with these references.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

# Updates


@dataclass
class Sample:
    """One decision of a minibatch: what the network says about it now, and what the roll-out stored."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor
    old_logprob: float
    old_value: float
    advantage: float
    target: float
    """Target of the value function."""
    actor: int = 0
    """Actors with advantages of their own: their policy losses and entropies are added."""


@dataclass
class Settings:
    """Hyperparameters of an update, under the same names in every trainer."""

    learning_rate: float
    clip_coef: float
    clip_policy: bool = True
    clip_value: bool = True
    norm_adv: bool = True
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    kl_coef: float = 0.0
    max_grad_norm: float = 0.5
    target_kl: float | None = None


class Adam:
    """Adam as in the paper, with ε = 1e-5."""

    def __init__(self, parameters: Sequence[nn.Parameter], learning_rate: float) -> None:
        self.parameters, self.learning_rate, self.count = parameters, learning_rate, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.count += 1
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            p -= self.learning_rate * (m / (1 - 0.9**self.count)) / ((v / (1 - 0.999**self.count)).sqrt() + 1e-5)


def normalized(numbers: list[float]) -> list[float]:
    mean = sum(numbers) / len(numbers)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
    return [(x - mean) / (deviation + 1e-8) for x in numbers]


def minibatch_loss(samples: list[Sample], extra: Tensor | float, s: Settings) -> tuple[Tensor, dict[str, float]]:
    """Loss of a minibatch, and its metrics. ``extra`` is the part of the loss that only one trainer has."""
    advantages = [sample.advantage for sample in samples]
    actors = {sample.actor for sample in samples}
    for actor in actors if s.norm_adv else ():
        own = [i for i, sample in enumerate(samples) if sample.actor == actor]
        for i, advantage in zip(own, normalized([advantages[i] for i in own]), strict=True):
            advantages[i] = advantage
    columns: dict[str, list[Tensor]] = {key: [] for key in ("policy_loss", "value_loss", "entropy", "k1", "k3", "far")}
    for sample, advantage in zip(samples, advantages, strict=True):
        logratio = sample.logprob - sample.old_logprob
        ratio = logratio.exp()
        gain = ratio * advantage
        if s.clip_policy:
            gain = torch.minimum(gain, torch.clamp(ratio, 1 - s.clip_coef, 1 + s.clip_coef) * advantage)
        error = (sample.value - sample.target) ** 2
        if s.clip_value:
            change = torch.clamp(sample.value - sample.old_value, -s.clip_coef, s.clip_coef)
            error = torch.maximum(error, (sample.old_value + change - sample.target) ** 2)
        far = (torch.abs(ratio - 1) > s.clip_coef).to(ratio)
        row = (-gain, 0.5 * error, sample.entropy, -logratio, ratio - 1 - logratio, far)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    mean = {key: torch.stack(column).sum() / len(samples) for key, column in columns.items()}
    for key in ("policy_loss", "entropy"):
        mean[key] = mean[key] * len(actors)
    loss = mean["policy_loss"] - s.ent_coef * mean["entropy"] + s.vf_coef * mean["value_loss"]
    loss = loss + s.kl_coef * mean["k3"] + extra
    names = {"k1": "old_approx_kl", "k3": "approx_kl", "far": "clipfrac"}
    metrics = {names.get(key, key): float(value.detach()) for key, value in mean.items()}
    return loss, metrics | {"max_ratio": max(math.exp(float(x.logprob.detach()) - x.old_logprob) for x in samples)}


@dataclass
class Outcome:
    """What an update did: metrics of each minibatch by epoch, and the gradients of the last one."""

    epochs: list[list[dict[str, float]]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(map(len, self.epochs))

    def mean(self, name: str) -> float:
        return sum(metrics[name] for epoch in self.epochs for metrics in epoch) / self.steps


def reference_update(
    parameters: Iterable[nn.Parameter],
    epochs: Iterable[list[list[int]]],
    samples_of: Callable[[list[int]], tuple[list[Sample], Tensor | float]],
    s: Settings,
    average: Callable[[list[Tensor]], list[Tensor]] = lambda gradients: gradients,
    mean_kl: Callable[[float], float] = lambda kl: kl,
    after_step: Callable[[], None] = lambda: None,
    adam: Adam | None = None,
) -> Outcome:
    """Train ``parameters`` on the minibatches of ``epochs``. ``average`` and ``mean_kl`` stand for the other ranks."""
    learned = [p for p in parameters if p.requires_grad]
    adam, outcome = adam or Adam(learned, s.learning_rate), Outcome()
    adam.learning_rate = s.learning_rate
    for epoch in epochs:
        outcome.epochs.append([])
        for rows in epoch:
            samples, extra = samples_of(rows)
            loss, metrics = minibatch_loss(samples, extra, s)
            gradients = average(list(torch.autograd.grad(loss, learned)))
            norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
            outcome.gradients = [g * min(1.0, s.max_grad_norm / (norm + 1e-6)) for g in gradients]
            adam.step(outcome.gradients)
            after_step()
            outcome.epochs[-1].append(metrics | {"grad_norm": norm})
        if s.target_kl is not None and mean_kl(outcome.epochs[-1][-1]["approx_kl"]) > s.target_kl:
            break
    return outcome


# Roll-outs


@dataclass
class Event:
    """What an environment was asked and answered: a reset, or a step with its action."""

    obs: Any
    mask: np.ndarray | None = None
    action: Any = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    is_reset: bool = False


@dataclass
class Transition:
    obs: Any
    mask: np.ndarray | None
    action: Any
    reward: float
    terminated: bool
    truncated: bool
    successor: Any
    """Observation that the action led to, also at the end of an episode."""
    shown: Any
    """Observation that the agent sees next: the first one of the next episode if this one has ended."""
    first: bool
    """First step of an episode."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def transitions(journal: list[Event], reset_takes_a_step: bool) -> list[Transition | None]:
    """The steps of one environment in order. None stands for a step that only reset the environment."""
    out: list[Transition | None] = []
    for before, now, after in zip(journal, journal[1:], [*journal[2:], None], strict=False):
        if now.is_reset:
            if reset_takes_a_step:
                out.append(None)
            continue
        shown = after.obs if after is not None and after.is_reset and not reset_takes_a_step else now.obs
        out.append(
            Transition(
                before.obs, before.mask, now.action, now.reward, now.terminated, now.truncated, now.obs, shown,
                before.is_reset,
            )
        )  # fmt: skip
    return out


def advantages_of(
    steps: list[tuple[Transition, float, float, float]], gamma: float, lam: float, bootstrap: bool
) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l} to the end of the episode or of the roll-out, for (transition, reward, value, next value)."""
    out = []
    for start in range(len(steps)):
        total, weight = 0.0, 1.0
        for step, reward, value, next_value in steps[start:]:
            goes_on = not (step.terminated or (step.truncated and not bootstrap))
            total += weight * (reward + (gamma * next_value if goes_on else 0.0) - value)
            weight *= gamma * lam
            if step.done:
                break
        out.append(total)
    return out


class AllNumbers:
    """Mean and variance of all rows so far, and of a first pseudo-row with weight 1e-4, mean 0 and variance 1."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def add(self, rows: Any) -> None:
        self.rows += [np.asarray(row, np.float64) for row in rows]
        weight = len(self.rows) + 1e-4
        everything = np.array(self.rows)
        self.mean = everything.sum(0) / weight
        self.variance = (((everything - self.mean) ** 2).sum(0) + 1e-4 * (1 + self.mean**2)) / weight

    def normalize(self, row: Any) -> np.ndarray:
        return np.clip((np.asarray(row, np.float64) - self.mean) / np.sqrt(self.variance + 1e-8), -10, 10)


class ReturnScale:
    """Rewards divided by the standard deviation of the discounted returns of all environments so far."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma, self.returns, self.seen = gamma, np.zeros(num_envs), AllNumbers()

    def scale(self, rewards: np.ndarray, dones: np.ndarray) -> np.ndarray:
        self.returns = self.returns * self.gamma + rewards
        self.seen.add(self.returns.copy())
        self.returns[dones] = 0.0
        return np.clip(rewards / np.sqrt(self.seen.variance + 1e-8), -10, 10)


# Scripted environments


class Script(gym.Env):
    """A small environment that keeps a journal. What happens follows from the number of the episode and of the step.

    Episode e has 2 + e % 3 steps. It is truncated if e is odd, and terminates otherwise; every fourth is both.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self,
        actions: gym.Space[Any],
        shape: tuple[int, ...] = (3,),
        masked: bool = False,
        first_episode: int = 0,
        outliers: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.action_space, self.masked, self.render_mode = actions, masked, render_mode
        self.outliers = outliers
        pixels = len(shape) == 3
        self.observation_space = (
            gym.spaces.Box(0, 255, shape, np.uint8) if pixels else gym.spaces.Box(-9, 9, shape, np.float32)
        )
        self.episode = first_episode - 1
        self.journal: list[Event] = []

    def _observe(self) -> tuple[np.ndarray, dict[str, Any], np.ndarray | None]:
        rng = np.random.default_rng((self.episode, self.count))
        if self.observation_space.dtype == np.uint8:
            obs = rng.integers(0, 256, self.observation_space.shape, dtype=np.uint8)
        else:
            obs = rng.normal(0, 1.5, self.observation_space.shape).clip(-9, 9).astype(np.float32)
            if self.outliers and self.episode == 17:
                obs[0] = -500
        if not self.masked:
            return obs, {}, None
        mask = np.ones(self.action_space.n, np.int8)
        mask[(self.count + self.episode) % self.action_space.n] = 0
        return obs, {"action_mask": mask}, mask.astype(bool)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        # Environments begin with different episodes.
        self.episode = self.episode + 1 if seed is None else seed % 4
        self.count = 0
        obs, info, mask = self._observe()
        self.journal.append(Event(obs, mask, is_reset=True))
        return obs, info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = (
            -1000.0
            if self.outliers and self.episode == 17
            else float(1.0 + self.count - 0.5 * self.episode % 4 + 3.0 * np.sum(np.asarray(action, np.float64)))
        )
        self.count += 1
        ended = self.count >= 2 + self.episode % 3
        terminated, truncated = ended and self.episode % 2 == 0, ended and self.episode % 4 != 0
        obs, info, mask = self._observe()
        self.journal.append(Event(obs, mask, np.array(action), reward, terminated, truncated))
        return obs, reward, terminated, truncated, info

    def render(self) -> np.ndarray:
        return np.full((16, 16, 3), 40 * self.count, np.uint8)


class ScriptedCluster:
    """The interface of an AllocationBatch that the trainers use. Episodes end after ``config.arrivals`` steps."""

    n_features = 5

    class config:
        arrivals = 5

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.state = {"counters": torch.zeros(num_envs, 4, dtype=torch.int64)}
        self.journals: list[list[Event]] = [[] for _ in range(num_envs)]
        self.finished: list[np.ndarray] = []
        self.generator = np.random.default_rng(0)
        self.obs, self.last_obs = torch.zeros(num_envs, 5), torch.zeros(num_envs, 5)
        self.final_sums = torch.zeros(num_envs, 8)

    def seed(self, seeds: np.ndarray) -> None:
        self.seeds = np.asarray(seeds)

    def _draw(self) -> np.ndarray:
        return self.generator.normal(2.0, 3.0, 5).astype(np.float32)

    def reset(self) -> None:
        for env, journal in enumerate(self.journals):
            journal.append(Event(self._draw(), is_reset=True))
            self.obs[env] = torch.from_numpy(journal[-1].obs)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rewards, ended = torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.bool)
        self.obs, self.last_obs = self.obs.clone(), self.last_obs.clone()
        for env, journal in enumerate(self.journals):
            counters = self.state["counters"]
            counters[env, 0] += 1
            action = actions[env].numpy().copy()
            rewards[env] = float(self.generator.normal(1.0, 2.0) + 4 * action[0] - 3 * action[1])
            ended[env] = bool(counters[env, 0] >= self.config.arrivals)
            obs = self._draw()
            journal.append(Event(obs, action=action, reward=float(rewards[env]), truncated=bool(ended[env])))
            self.last_obs[env] = torch.from_numpy(obs)
            if ended[env]:
                counters[env, 0] = 0
                self.final_sums[env] = torch.from_numpy(self.generator.uniform(1, 2, 8))
                self.finished.append(self.final_sums[env].numpy().copy())
                journal.append(Event(self._draw(), is_reset=True))
            self.obs[env] = torch.from_numpy(journal[-1].obs)
        return self.obs, rewards, ended
