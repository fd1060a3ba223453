"""Trainers of the allocation task: feed-forward, and with an LSTM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from update_cases.base import CPU, Case, Played, View, cut
from update_cases.continuous import NormalizedView, diagonal_normal
from update_cases.sequences import Sequences
from update_reference import ScriptedCluster, transitions


class GpuAllocCase(Case):
    name = "ppo_gpu_alloc"
    logs_updates = False
    small = Case.small | {"gamma": 0.9, "hidden": 8, "num_envs": 6, "action_scale": 0.3}
    obs_size = 5
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
        """Environments have different seeds and start in different phases of their episodes; only two end together."""
        assert cluster.seeds.tolist() == [3, 4, 5, 6, 7, 8]
        assert cluster.state["counters"][:, 0].tolist() == [0, 0, 1, 2, 3, 4]

    def played_action(self, stored: Tensor) -> np.ndarray:
        return np.clip(stored.numpy(), 0, 1)

    def view(self, played: Played) -> View:
        return NormalizedView(played)

    def charts(self, played: Played) -> list[dict[str, float]]:
        out = []
        for steps, finished in zip(played.steps, self.finished, strict=True):
            charts = {"charts/reward": float(np.mean([[each.reward for each in step] for step in steps]))}
            if finished:
                sums = np.mean(finished, 0)
                names = ("qos", "efficiency", "oom", "monopoly", "wait_s", "room")
                charts |= {"charts/episodic_return": sums[0], "charts/episodic_length": sums[7]}
                charts |= {f"charts/{name}": sums[1 + i] / sums[7] for i, name in enumerate(names)}
            out.append(charts)
        return out


class LSTMCase(Sequences, GpuAllocCase):
    name = "ppo_lstm"
    small = GpuAllocCase.small | {"num_minibatches": 2, "num_envs": 4}

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

    def made_up_sequences(self, shape: tuple[int, int]) -> Tensor:
        return torch.rand(*shape, 2)
