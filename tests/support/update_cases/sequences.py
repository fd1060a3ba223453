"""Trainers with an LSTM, which is written out here step by step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from clustergym.training import World
from update_cases.base import Case, Memory, Played, Problem
from update_reference import Sample


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


def chunks(order: list[int], count: int) -> list[list[int]]:
    """Parts of equal size; the last one can be smaller."""
    size = -(-len(order) // count)
    return [order[i : i + size] for i in range(0, len(order), size)]


class Sequences(Case):
    """A trainer with an LSTM: minibatches hold the whole sequences of some environments."""

    def made_up_sequences(self, shape: tuple[int, int]) -> Tensor:
        """Actions (steps, envs, …)."""
        return torch.arange(shape[0] * shape[1]).view(shape) % self.num_actions

    def memory(self, played: Played) -> Memory:
        return LSTMMemory(played)

    def rows_of(self, batch: Any) -> dict[str, Tensor]:
        return {name: column.flatten(0, 1) for name, column in super().rows_of(batch).items()}

    def problem(self, masked: bool = False, kl_coef: float = 0.0, **changes: Any) -> Problem:
        torch.manual_seed(0)
        args = self.args(**({"num_envs": 5} | changes))
        agent = self.make_agent(args)
        shape = (args.num_steps, args.num_envs)
        actions = self.made_up_sequences(shape)
        starts = torch.rand(shape) < 0.3
        state = (torch.randn(1, args.num_envs, args.hidden), torch.randn(1, args.num_envs, args.hidden))
        obs = torch.randn(*shape, self.obs_size)
        numbers = {"logprobs": (0.0, 0.6), "advantages": (2, 3), "returns": (0.0, 1.0), "values": (0.0, 0.5)}
        columns = {name: a + b * torch.randn(shape) for name, (a, b) in numbers.items()}
        if "masks" in {each.name for each in dataclasses.fields(self.trainer.Batch)}:
            forbidden = nn.functional.one_hot((actions + 1) % self.num_actions, self.num_actions) if masked else None
            columns["masks"] = None if forbidden is None else forbidden == 0
        batch = self.trainer.Batch(obs=obs, actions=actions, starts=starts, state=state, **columns)
        with torch.no_grad():
            for env in range(args.num_envs):
                for t, sample in enumerate(self.sequence(agent, batch, env)):
                    for name, now in (
                        ("logprobs", sample.logprob),
                        ("returns", sample.value),
                        ("values", sample.value),
                    ):
                        getattr(batch, name)[t, env] += now
        s = self.settings(args, kl_coef=kl_coef)
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
        masks, out = getattr(batch, "masks", None), []
        for t in range(len(batch.obs)):
            if batch.starts[t, env]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            h, c = lstm_cell(agent.lstm, agent.encoder(batch.obs[t, env]), h, c)
            mask = None if masks is None else masks[t, env]
            columns = (batch.logprobs, batch.values, batch.advantages, batch.returns)
            out.append(
                Sample(
                    self.distribution(agent, h, mask).log_prob(batch.actions[t, env]),
                    self.entropy(agent, h, mask),
                    self.value(agent, h),
                    *(float(column[t, env]) for column in columns),
                )
            )
        return out


class RecurrentCase(Sequences):
    name = "ppo_recurrent"
    small = Case.small | {"num_envs": 4, "num_minibatches": 2, "hidden": 8}

    def make_agent(self, args: Any) -> nn.Module:
        agent = self.trainer.Agent(self.obs_size, self.num_actions, args.hidden)
        with torch.no_grad():
            agent.actor_head.weight.mul_(500)
            agent.actor_head.bias.normal_()
        return agent

    def distribution(self, agent: Any, x: Tensor, mask: Any) -> Any:
        logits = agent.actor_head(x)
        return Categorical(logits=logits if mask is None else logits.masked_fill(~torch.as_tensor(mask), -math.inf))

    def value(self, agent: Any, x: Tensor) -> Tensor:
        return agent.critic_head(x)[0]
