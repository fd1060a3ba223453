"""PPO for continuous actions on any Box environment: details 23–31, resuming, ranks, a task with a known optimum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from clustergym.training import RunLogger, World, load_checkpoint, read_scalars
from trainers import in_two_processes, load_trainer

ppo = load_trainer("ppo_continuous_action")
CPU = torch.device("cpu")


class Target(gym.Env[Any, Any]):
    """Episodes of 5 steps. The reward is −(distance of the action to the observation), so the optimum is known."""

    observation_space = gym.spaces.Box(-100, 100, (2, 1))
    action_space = gym.spaces.Box(np.float32([[-1.0], [-2.0]]), np.float32([[1.0], [3.0]]))
    played: list[np.ndarray]

    def observe(self) -> np.ndarray:
        self.goal = self.np_random.uniform(-0.8, 0.8, (2, 1)).astype(np.float32)
        return 10 + 5 * self.goal

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.played = 0, []
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        self.played.append(action)
        reward = -float(np.abs(action - self.goal).sum())
        self.steps += 1
        return self.observe(), reward, False, self.steps == 5, {}


@pytest.fixture(scope="module", autouse=True)
def _environments() -> Iterator[None]:
    gym.register("Target-v0", Target)
    yield
    del gym.registry["Target-v0"]


pytestmark = pytest.mark.usefixtures("reproducible")


def small(**changes: Any) -> Any:
    defaults = {"env_id": "Target-v0", "num_envs": 3, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    return ppo.Args(**(defaults | {"eval_episodes": 0, "total_timesteps": 72, "hidden": 8} | changes))


def rollouts(**changes: Any) -> Any:
    runner = ppo.Rollouts(small(**changes), ppo.Agent(2, 2, hidden=8), CPU)
    runner.restart(7)
    return runner


def test_observations_are_normalised_and_rewards_scaled_by_running_statistics() -> None:
    """A slow reference sees the raw observations and rewards of the environments, in the order of the steps."""
    runner = rollouts(num_steps=12, gamma=0.9, bootstrap_truncated=False, gae_lambda=0.0)
    raw_obs, raw_rewards = [runner.envs.envs.obs.clone()], []
    step = runner.envs.envs.step

    def spy(actions: Tensor) -> Any:
        found = step(actions)
        raw_obs.append(runner.envs.envs.obs.clone())
        raw_rewards.append((found.rewards, found.truncated))
        return found

    runner.envs.envs.step = spy
    batch, _ = runner.collect()
    returns, seen = np.zeros(3), []
    values = batch.values.view(12, 3).numpy()
    for t in range(12):
        known = torch.cat(raw_obs[: t + 1]).double().numpy()
        expected = np.clip((raw_obs[t].numpy() - known.mean(0)) / np.sqrt(known.var(0) + 1e-8), -10, 10)
        np.testing.assert_allclose(batch.obs.view(12, 3, 2)[t], expected, atol=2e-2)
        rewards, ended = (each.numpy() for each in raw_rewards[t])
        returns = returns * 0.9 + rewards
        seen.append(returns.copy())
        scaled = np.clip(rewards / np.sqrt(np.var(np.concatenate(seen)) + 1e-8), -10, 10)
        following = values[t + 1] if t + 1 < 12 else None
        if following is not None:
            target = scaled + 0.9 * np.where(ended, 0.0, following)
            np.testing.assert_allclose(batch.returns.view(12, 3)[t], target, rtol=2e-3, atol=2e-3)
        returns = np.where(ended, 0.0, returns)


def test_actions_are_clipped_for_the_environment_and_stored_raw() -> None:
    runner = rollouts(num_steps=5)
    with torch.no_grad():
        runner.agent.log_std.fill_(math.log(5.0))
    scripts = [env.unwrapped for env in runner.envs.envs.envs.envs]
    played: list[Any] = []
    for env in scripts:
        env.step = lambda action, plain=env.step: (played.append(action), plain(action))[1]
    batch, _ = runner.collect()
    raw = batch.actions.view(5, 3, 2)
    assert raw.abs().max() > 3
    low, high = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 3.0])
    expected = raw.clamp(low, high).reshape(-1, 2)
    np.testing.assert_allclose(np.stack(played).reshape(-1, 2), expected)
    known = torch.distributions.Normal(runner.agent.get_mean(batch.obs), runner.agent.log_std.exp())
    torch.testing.assert_close(batch.logprobs, known.log_prob(batch.actions).sum(-1).detach())


def test_truncated_episodes_bootstrap_from_the_normalised_last_observation() -> None:
    runner = rollouts(num_envs=1, num_steps=5, gamma=0.5, gae_lambda=0.0, norm_reward=False)
    last: list[Tensor] = []
    step = runner.envs.envs.step

    def spy(actions: Tensor) -> Any:
        found = step(actions)
        last.append(found.final_obs[1])
        rewards.append(float(found.rewards))
        return found

    rewards: list[float] = []
    runner.envs.envs.step = spy
    batch, _ = runner.collect()
    assert [len(each) for each in last] == [0, 0, 0, 0, 1]
    with torch.no_grad():
        value = runner.agent.get_value(ppo.normalize_obs(last[-1], runner.statistics))
    assert float(batch.returns[-1]) == pytest.approx(rewards[-1] + 0.5 * float(value), rel=1e-4)


def test_ratio_is_one_in_the_first_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ratios = rollouts(num_steps=32), []
    plain = ppo.policy_loss
    monkeypatch.setattr(
        ppo, "policy_loss", lambda ratio, *rest: (ratios.append(ratio.detach()), plain(ratio, *rest))[1]
    )
    optimizer = ppo.make_optimizer(runner.agent, 1e-2)
    ppo.update(runner.agent, optimizer, runner.collect()[0], runner.args, 0.2, 0.0, World())
    torch.testing.assert_close(ratios[0], torch.ones_like(ratios[0]), atol=1e-5, rtol=0)
    assert (ratios[1] - 1).abs().max() > 1e-4


def test_evaluation_uses_the_statistics_and_leaves_them_unchanged(tmp_path: Path) -> None:
    ppo.train(small(run_dir=tmp_path, save_model=True, eval_episodes=4, eval_interval=1), World())
    state = load_checkpoint(tmp_path / "checkpoint.pt", "ppo_continuous_action")
    assert float(state["statistics"]["count"]) == pytest.approx(3 * (24 + 1), abs=1e-3)
    model = load_checkpoint(tmp_path / "model.pt", "ppo_continuous_action-model")
    assert torch.equal(model["statistics"]["mean"], state["statistics"]["mean"])
    agent, statistics = ppo.Agent(2, 2, hidden=8), ppo.RunningMeanStd((2,))
    agent.load_state_dict(model["agent"])
    statistics.load_state_dict(model["statistics"])
    returns = ppo.evaluate(agent, small(eval_episodes=4), statistics, CPU)
    assert float(np.mean(returns)) == pytest.approx(read_scalars(tmp_path, "eval/mean_return")[1][-1])
    other = ppo.evaluate(agent, small(eval_episodes=4), ppo.RunningMeanStd((2,)), CPU)
    assert other != returns


@pytest.mark.parametrize("env_id", ["Target-v0", "GPUAllocation-v0"])
def test_resume_continues_bit_for_bit(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = small(env_id=env_id, checkpoint_interval=2, total_timesteps=24 * 5)
    ppo.train(dataclasses.replace(args, run_dir=tmp_path / "whole"), World())
    log = RunLogger.scalars

    def dies(self: Any, values: dict[str, float], step: int) -> None:
        if step == 24 * 3:
            raise KeyboardInterrupt
        log(self, values, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "scalars", dies)
        with pytest.raises(KeyboardInterrupt):
            ppo.train(dataclasses.replace(args, run_dir=tmp_path / "cut"), World())
    ppo.train(dataclasses.replace(args, run_dir=tmp_path / "cut", resume=True), World())
    one, other = (
        load_checkpoint(tmp_path / name / "checkpoint.pt", "ppo_continuous_action") for name in ("whole", "cut")
    )
    for part in ("agent", "statistics"):
        for key, value in one[part].items():
            assert torch.equal(value, other[part][key]), key


def test_two_ranks_share_weights_and_statistics(tmp_path: Path) -> None:
    def work(world: World, folder: Path) -> list[Tensor]:
        runners: list[Any] = []
        plain = ppo.Rollouts
        ppo.Rollouts = lambda *given: (runners.append(plain(*given)), runners[-1])[1]
        ppo.train(small(run_dir=folder / "run", total_timesteps=96), world)
        statistics = (runners[0].statistics, runners[0].scaler.statistics)
        return [
            *(each.state_dict()["mean"] for each in statistics),
            *(p.detach() for p in runners[0].agent.parameters()),
        ]

    ours, theirs = in_two_processes(work, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(TypeError, match=r"CartPole-v1 has action space Discrete.* needs Box"):
        ppo.make_envs("CartPole-v1", 1)


def test_known_optimum_is_learned(tmp_path: Path) -> None:
    """The best return is 0. The mean action 0 has 5 · 2 · 0.4 = −4."""
    args = small(run_dir=tmp_path, num_envs=16, num_steps=32, total_timesteps=25_000, eval_episodes=64, hidden=32)
    changes = {"learning_rate": 3e-3, "gamma": 0.0, "num_minibatches": 4, "update_epochs": 4, "checkpoint_interval": 0}
    assert ppo.train(dataclasses.replace(args, **changes), World())["mean_return"] > -2
