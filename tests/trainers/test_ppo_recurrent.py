"""PPO with an LSTM on any environment with discrete actions: details 32–36 and a task that needs memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from clustergym.training import RunLogger, World, load_checkpoint
from trainers import load_trainer

ppo = load_trainer("ppo_recurrent")
CPU = torch.device("cpu")


class Recall(gym.Env[Any, Any]):
    """The first of 3 observations is a cue. The reward is 1 for naming it in the last step, so memory is needed."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, truncates: bool = True) -> None:
        self.truncates = truncates

    def observe(self) -> np.ndarray:
        return np.array([2 * self.cue - 1 if self.count == 0 else 0, self.count / 3], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.count = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(self.count == 2 and action == self.cue)
        self.count += 1
        ended = self.count == 3
        return self.observe(), reward, ended and not self.truncates, ended and self.truncates, {}


@pytest.fixture(scope="module", autouse=True)
def _environments() -> Iterator[None]:
    gym.register("Recall-v0", Recall)
    gym.register("RecallEnds-v0", Recall, kwargs={"truncates": False})
    yield
    del gym.registry["Recall-v0"], gym.registry["RecallEnds-v0"]


pytestmark = pytest.mark.usefixtures("reproducible")


def small(**changes: Any) -> Any:
    defaults = {"env_id": "Recall-v0", "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    return ppo.Args(**(defaults | {"eval_episodes": 0, "total_timesteps": 96, "hidden": 8} | changes))


def rollouts(**changes: Any) -> Any:
    agent = ppo.Agent(2, 2, hidden=8)
    with torch.no_grad():
        agent.actor_head.weight.mul_(100)
    runner = ppo.Rollouts(small(**changes), agent, CPU)
    runner.restart(7)
    return runner


def cell(agent: Any, row: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One step of the LSTM, written out."""
    lstm, (h, c) = agent.lstm, state
    x = torch.tanh(agent.encoder[0](row))
    i, f, g, o = (lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@torch.no_grad()
@pytest.mark.parametrize("env_id", ["Recall-v0", "RecallEnds-v0"])
def test_rollouts_match_a_reference_that_steps_one_environment_at_a_time(env_id: str) -> None:
    """Two roll-outs: states continue between them, are zero at the start of an episode, and values follow from them."""
    runner = rollouts(env_id=env_id, gamma=0.9, gae_lambda=0.7)
    batches = [runner.collect()[0] for _ in range(2)]
    agent, zeros = runner.agent, (torch.zeros(8), torch.zeros(8))
    obs, actions, values, logprobs, returns = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("obs", "actions", "values", "logprobs", "returns")
    )
    for env in range(4):
        state, after = zeros, []
        for t in range(16):
            state = cell(agent, obs[t, env], zeros if obs[t, env, 1] == 0 else state)
            after.append(state)
            known = torch.distributions.Categorical(logits=agent.actor_head(state[0]))
            torch.testing.assert_close(logprobs[t, env], known.log_prob(actions[t, env]), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(values[t, env], agent.critic_head(state[0])[0], atol=1e-5, rtol=1e-4)
        for t in range(7):
            if obs[t, env, 1] > 0.6:  # the last step of an episode
                last = torch.tensor([0.0, 1.0])
                cue = [obs[s, env, 0] for s in range(t + 1) if obs[s, env, 1] == 0][-1]
                following = agent.critic_head(cell(agent, last, after[t])[0])[0] if env_id == "Recall-v0" else 0.0
                reward = float(actions[t, env] == (cue + 1) / 2)
                torch.testing.assert_close(
                    returns[t, env], torch.as_tensor(reward + 0.9 * following), atol=1e-4, rtol=1e-4
                )
    runner.close()


def test_ratio_is_one_in_the_first_minibatch_and_minibatches_hold_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, ratios = rollouts(), []
    plain = ppo.policy_loss
    monkeypatch.setattr(
        ppo, "policy_loss", lambda ratio, *rest: (ratios.append(ratio.detach()), plain(ratio, *rest))[1]
    )
    runner.collect()
    batch, _ = runner.collect()
    seen: list[Tensor] = []
    remember = runner.agent.remember
    runner.agent.remember = lambda obs, *rest: (seen.append(obs), remember(obs, *rest))[1]
    optimizer = ppo.make_optimizer(runner.agent, 1e-2)
    ppo.update(runner.agent, optimizer, batch, runner.args, 0.2, 0.0, World())
    torch.testing.assert_close(ratios[0], torch.ones(8, 2), atol=1e-5, rtol=0)
    assert [obs.shape for obs in seen] == [(8, 2, 2)] * 4
    for epoch in (seen[:2], seen[2:]):
        sequences = torch.cat(epoch, 1).unbind(1)
        assert all(any(torch.equal(sequence, each) for each in sequences) for sequence in batch.obs.unbind(1))
    with pytest.raises(ValueError, match="num_envs must be a multiple"):
        ppo.train(small(num_minibatches=3), World())


def test_resume_continues_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = small(checkpoint_interval=2, total_timesteps=32 * 5)
    ppo.train(dataclasses.replace(args, run_dir=tmp_path / "whole"), World())
    log = RunLogger.scalars

    def dies(self: Any, values: dict[str, float], step: int) -> None:
        if step == 32 * 3:
            raise KeyboardInterrupt
        log(self, values, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "scalars", dies)
        with pytest.raises(KeyboardInterrupt):
            ppo.train(dataclasses.replace(args, run_dir=tmp_path / "cut"), World())
    ppo.train(dataclasses.replace(args, run_dir=tmp_path / "cut", resume=True), World())
    one, other = (load_checkpoint(tmp_path / name / "checkpoint.pt", "ppo_recurrent") for name in ("whole", "cut"))
    assert all(torch.equal(value, other["agent"][key]) for key, value in one["agent"].items())


def test_task_that_needs_memory_is_learned(tmp_path: Path) -> None:
    """Without memory, the best return is 0.5."""
    args = small(run_dir=tmp_path, num_envs=16, num_steps=24, total_timesteps=16_000, eval_episodes=64, hidden=16)
    changes = {"learning_rate": 1e-2, "num_minibatches": 4, "update_epochs": 4, "checkpoint_interval": 0}
    assert ppo.train(dataclasses.replace(args, **changes), World())["mean_return"] == 1.0
