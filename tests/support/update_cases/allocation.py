"""Trainers of the allocation task: feed-forward, with an LSTM, and online on a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent

from clustergym.agent.learner import Experiences
from update_cases.base import CPU, Case, Played, Problem, View, cut, larger_first
from update_cases.continuous import NormalizedView, diagonal_normal
from update_cases.sequences import Sequences
from update_reference import Sample, ScriptedCluster, transitions


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


class OnlineCase(GpuAllocCase):
    """The agent of a node learns from single experiences, each with the observation at its feedback."""

    name = "ppo_gpu_alloc_online"
    small = {"minibatch_size": 6, "update_epochs": 3, "gamma": 0.9, "target_kl": None}
    has_rollout = False
    has_world = False
    has_schedule = False  # the learning rate is constant

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.Agent(5, 8, levels=3)
        with torch.no_grad():
            agent.actor[4].weight.mul_(100)
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        """Two independent choices of one of three shares."""
        return Independent(Categorical(logits=agent.actor(x).view(2, 3)), 1)

    def made_up_actions(self) -> Tensor:
        return torch.randint(3, (self.rows, 2)).float()

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**changes)
        agent = self.make_agent(args)
        columns = self.made_up(agent, self.made_up_obs(), self.made_up_actions())
        batch = Experiences(
            columns["obs"], columns["actions"], columns["logprobs"], rewards=torch.randn(self.rows) + 1.5,
            values=columns["values"], next_obs=torch.randn(self.rows, self.obs_size),
            dones=torch.arange(self.rows) % 4 == 0, through=99, skipped=4,
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

        count = min(max(1, self.rows // args.minibatch_size), 16)
        s = self.settings(args)
        optimizer = self.trainer.make_optimizer(agent, args.learning_rate)

        def more_metrics(outcome: Any) -> dict[str, float]:
            return {"charts/reward": float(batch.rewards.mean()), "charts/batch": self.rows, "charts/skipped": 4}

        return Problem(
            agent,
            optimizer,
            lambda world: self.trainer.update(agent, optimizer, batch, args),
            lambda rows: ([sample(i) for i in rows], 0.0),
            lambda order: larger_first(order, count),
            s,
            (values, targets),
            more_metrics=more_metrics,
        )
