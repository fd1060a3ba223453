"""Continuous actions: normal distributions, normalised observations and scaled rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from update_cases.base import BOX, Case, Played, View
from update_reference import AllNumbers, ReturnScale, Transition


def diagonal_normal(mean: Tensor, std: Tensor) -> Independent:
    return Independent(Normal(mean, std), 1)


class NormalizedView(View):
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
        return NormalizedView(played)
