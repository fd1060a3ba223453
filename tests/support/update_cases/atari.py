"""Games: the agent with a small network, on scripted pixels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

from clustergym.training import record_video
from update_cases.base import Case, Played
from update_reference import Script


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
        def make(first_episode: int, videos: Path | None) -> gym.Env:
            mode = None if videos is None else "rgb_array"
            env = Script(gym.spaces.Discrete(4), (4, 84, 84), first_episode=first_episode, render_mode=mode)
            return gym.wrappers.RecordEpisodeStatistics(env if videos is None else record_video(env, videos))

        def make_envs(env_id: str, num_envs: int, videos: Path | None = None, **options: Any) -> SyncVectorEnv:
            makers = [partial(make, i, videos) for i in range(num_envs)]
            return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)

        plain, self.trainer.make_envs = self.trainer.make_envs, make_envs
        try:
            yield
        finally:
            self.trainer.make_envs = plain

    def play(self, count: int = 3, **changes: Any) -> Played:
        with self.scripted():
            return super().play(count, **changes)
