"""Details 23–37: continuous actions, LSTM, and actions with several components."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from clustergym.training import World, load_checkpoint
from trainers import load_trainer

gpu = load_trainer("ppo_gpu_alloc")
lstm = load_trainer("ppo_lstm")
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("reproducible")


def rollouts(trainer: Any, **changes: Any) -> Any:
    args = trainer.Args(
        **(
            {"env_id": "GPUAllocation-v0", "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "eval_streams": 2}
            | changes
        )
    )
    agent = trainer.Agent(trainer.make_envs(args, 1).n_features, hidden=16)
    return trainer.Rollouts(args, agent, CPU, 3)


def first_ratios(trainer: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Probability ratios of the first minibatch of an update."""
    seen: list[Tensor] = []
    plain = trainer.policy_loss
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer, "policy_loss", lambda ratio, *rest: (seen.append(ratio.detach()), plain(ratio, *rest))[1]
        )
        optimizer = trainer.make_optimizer(run.agent, 1e-2)
        trainer.update(run.agent, optimizer, run.collect()[0], run.args, 0.2, 0.0, World())
    return seen[0]


# 23 to 27: continuous actions


def test_gaussian_functions_match_torch_distributions() -> None:
    mean, std, actions = torch.randn(7, 2), torch.tensor([0.3, 1.7]), torch.randn(7, 2)
    known = Independent(Normal(mean, std), 1)
    torch.testing.assert_close(gpu.gaussian_logprob(actions, mean, std), known.log_prob(actions))
    torch.testing.assert_close(gpu.gaussian_entropy(std), known.entropy()[0])


def test_sampled_actions_follow_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rollouts(gpu, num_steps=200)
    with torch.no_grad():
        run.agent.log_std.copy_(torch.tensor([0.0, math.log(3.0)]))
    batch, _ = run.collect()
    with torch.no_grad():
        noise = (batch.actions - run.agent.actor(batch.obs)) / torch.tensor([0.2, 0.6])
    assert noise.std(0).tolist() == pytest.approx([1.0, 1.0], abs=0.12)
    assert noise.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=0.18)
    torch.testing.assert_close(first_ratios(gpu, run, monkeypatch), torch.ones(400), atol=1e-5, rtol=0)


def test_standard_deviation_is_a_state_independent_parameter() -> None:
    agent = gpu.Agent(5)
    assert agent.log_std.tolist() == [0.0, 0.0]
    assert isinstance(agent.log_std, torch.nn.Parameter)
    assert agent.std().shape == (2,)
    with torch.no_grad():
        agent.log_std.add_(1.0)
    assert agent.std().tolist() == pytest.approx([0.2 * math.e] * 2)


def test_policy_and_value_have_separate_networks() -> None:
    agent = gpu.Agent(5)
    agent.get_value(torch.randn(3, 5)).sum().backward()
    assert all(p.grad is None for p in agent.actor.parameters())
    assert all(p.grad is not None for p in agent.critic.parameters())


def test_actions_are_clipped_for_the_environment_and_stored_raw() -> None:
    run = rollouts(gpu, num_steps=32)
    with torch.no_grad():
        run.agent.log_std.fill_(2.0)
    played: list[Tensor] = []
    step = run.envs.step

    def spy(action: Tensor) -> Any:
        played.append(action.clone())
        return step(action)

    run.envs.step = spy
    batch, _ = run.collect()
    stored = batch.actions.view(32, 4, 2)
    assert stored.min() < 0
    assert stored.max() > 1
    assert torch.equal(torch.stack(played), stored.clamp(0, 1))


# 28 to 31: normalisation


def test_running_statistics_match_those_of_all_rows() -> None:
    batches = [torch.randn(n, 3) * 5 + 2 for n in (4, 1, 50)]
    statistics = gpu.RunningMeanStd((3,))
    for batch in batches:
        statistics.update(batch)
    everything = torch.cat(batches).double().numpy()
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics.var, everything.var(0), rtol=1e-4, atol=1e-4)


def test_observations_are_normalised_and_clipped_to_10() -> None:
    statistics = gpu.RunningMeanStd((2,))
    statistics.load_state_dict(
        {"mean": torch.tensor([1.0, 0.0]), "var": torch.tensor([4.0, 1e-4]), "count": torch.tensor(9.0)}
    )
    obs = torch.tensor([[5.0, 0.0], [1.0, 1.0], [1.0, -1.0]])
    expected = torch.tensor([[2.0, 0.0], [0.0, 10.0], [0.0, -10.0]])
    torch.testing.assert_close(gpu.normalize_obs(obs, statistics), expected)


def test_statistics_are_updated_in_training_saved_and_fixed_in_evaluation(tmp_path: Path) -> None:
    run = rollouts(gpu)
    before = float(run.statistics.count)
    raw = run.envs.obs.clone()
    batch, _ = run.collect()
    assert float(run.statistics.count) == before + 8 * 4
    assert not torch.equal(batch.obs[:4], raw)
    frozen = {key: value.clone() for key, value in run.statistics.state_dict().items()}
    gpu.evaluate(run.agent, run, run.args, CPU)
    assert all(torch.equal(value, run.statistics.state_dict()[key]) for key, value in frozen.items())
    args = gpu.Args(
        num_envs=4,
        num_steps=8,
        total_timesteps=64,
        num_minibatches=2,
        eval_streams=0,
        run_dir=tmp_path,
        save_model=True,
    )
    gpu.train(args, World())
    saved = load_checkpoint(tmp_path / "checkpoint.pt", "ppo_gpu_alloc")["rollouts"]["statistics"]
    model = load_checkpoint(tmp_path / "model.pt", "ppo_gpu_alloc-model")["statistics"]
    assert float(saved["count"]) == pytest.approx(4 * (1 + 2 * 8), abs=0.01)
    assert torch.equal(saved["mean"], model["mean"])


def test_rewards_are_divided_by_the_standard_deviation_of_the_return() -> None:
    """The reference computes the variance of all returns so far. The mean is not subtracted from the reward."""
    scaler = gpu.RewardScaler(3, gamma=0.9)
    running, seen = np.zeros(3), []
    generator = np.random.default_rng(0)
    for _ in range(20):
        rewards, dones = generator.normal(2.0, 1.0, 3), generator.random(3) < 0.2
        running = 0.9 * running + rewards
        seen.append(running.copy())
        scaled = scaler(torch.from_numpy(rewards), torch.from_numpy(dones))
        expected = rewards / np.sqrt(np.concatenate(seen).var() + 1e-8)
        np.testing.assert_allclose(scaled.numpy(), np.clip(expected, -10, 10), rtol=2e-3)
        running[dones] = 0.0


def test_scaled_rewards_are_clipped_to_10() -> None:
    scaler = gpu.RewardScaler(1, gamma=0.0)
    for _ in range(100):
        scaler(torch.tensor([0.01]), torch.tensor([False]))
        scaler(torch.tensor([-0.01]), torch.tensor([False]))
    assert scaler(torch.tensor([50.0]), torch.tensor([False])).item() == 10.0
    scaler = gpu.RewardScaler(1, gamma=0.0)
    for _ in range(100):
        scaler(torch.tensor([0.01]), torch.tensor([False]))
    assert scaler(torch.tensor([-50.0]), torch.tensor([False])).item() == -10.0


def test_scaled_rewards_are_used_for_the_advantages() -> None:
    """With γ = 0, the returns of a rollout equal the scaled rewards."""
    run = rollouts(gpu, gamma=0.0, num_steps=64, norm_reward=True)
    scaled: list[Tensor] = []
    scaler = run.scaler
    run.scaler = lambda *inputs: (scaled.append(scaler(*inputs)), scaled[-1])[1]
    batch, _ = run.collect()
    torch.testing.assert_close(batch.returns.view(64, 4), torch.stack(scaled), atol=1e-5, rtol=1e-5)


# 32 to 36: LSTM


def test_lstm_weights_are_orthogonal_and_biases_are_zero() -> None:
    agent = lstm.Agent(5, hidden=16)
    for name, parameter in agent.lstm.named_parameters():
        if "bias" in name:
            assert parameter.abs().max() == 0
        else:
            torch.testing.assert_close(parameter.T @ parameter, torch.eye(16), atol=1e-5, rtol=0)


def test_initial_lstm_state_is_zero() -> None:
    hidden, cell = lstm.Agent(5, hidden=16).initial_state(3)
    assert hidden.shape == cell.shape == (1, 3, 16)
    assert hidden.abs().sum() == cell.abs().sum() == 0
    run = rollouts(lstm)
    assert run.state[0].abs().sum() == run.state[1].abs().sum() == 0


def test_lstm_state_is_reset_at_the_start_of_an_episode() -> None:
    """The features of a sequence with two episodes equal those of the episodes run separately."""
    agent = lstm.Agent(5, hidden=16)
    obs = torch.randn(6, 2, 5)
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[3, 0] = True
    state = (torch.randn(1, 2, 16), torch.randn(1, 2, 16))
    features, _ = agent.remember(obs, starts, state)
    whole, _ = agent.remember(obs, torch.zeros_like(starts), state)
    fresh, _ = agent.remember(obs[3:], torch.zeros_like(starts[3:]), agent.initial_state(2))
    torch.testing.assert_close(features[:, 1], whole[:, 1])
    torch.testing.assert_close(features[:3, 0], whole[:3, 0])
    torch.testing.assert_close(features[3:, 0], fresh[:, 0])
    assert not torch.allclose(features[3:, 0], whole[3:, 0])


def test_rollout_and_update_reset_the_lstm_state_at_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an end of an episode in the rollout, the ratios are 1 only if both reset at the same steps."""
    run = rollouts(lstm, num_steps=16, num_minibatches=1)
    with torch.no_grad():
        run.agent.actor[0].weight.mul_(100)  # makes the actions depend on the LSTM state
    step = run.envs.step
    ended_at: list[Tensor] = []

    def ends_now_and_then(action: Tensor) -> Any:
        obs, reward, ended = step(action)
        ended = ended.clone()
        ended[len(ended_at) % 4] = len(ended_at) % 3 == 0
        ended_at.append(ended)
        return obs, reward, ended

    run.envs.step = ends_now_and_then
    starts = [run.start.clone()]
    batch, _ = run.collect()
    starts += ended_at
    assert torch.equal(batch.starts, torch.stack(starts[:16]))
    assert torch.equal(run.start, ended_at[-1])
    ratios = first_ratios(lstm, run, monkeypatch)
    torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-4, rtol=0)
    features, _ = run.agent.remember(batch.obs, batch.starts, batch.state)
    assert features.shape == (16, 4, 16)


def test_minibatches_hold_whole_sequences(tmp_path: Path) -> None:
    run = rollouts(lstm, num_envs=6, num_minibatches=3, update_epochs=2)
    batch, _ = run.collect()
    batch.obs[:, :, 0] = torch.arange(6.0)
    seen: list[Tensor] = []
    remember = run.agent.remember
    run.agent.remember = lambda obs, *rest: (seen.append(obs), remember(obs, *rest))[1]
    lstm.update(run.agent, lstm.make_optimizer(run.agent, 0.0), batch, run.args, 0.2, 0.0, World())
    assert [obs.shape[:2] for obs in seen] == [(8, 2)] * 6
    for epoch in (seen[:3], seen[3:]):
        assert sorted(torch.cat([obs[0, :, 0] for obs in epoch]).tolist()) == list(range(6))
        for obs in epoch:
            assert (obs[:, :, 0] == obs[0, :, 0]).all()
    with pytest.raises(ValueError, match="num_minibatches"):
        lstm.train(lstm.Args(num_envs=6, num_minibatches=4, run_dir=tmp_path), World())


def test_update_starts_from_the_lstm_state_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rollouts(lstm)
    with torch.no_grad():
        run.agent.actor[0].weight.mul_(100)
    run.collect()
    before = run.state[0].clone()
    assert before.abs().sum() > 0
    ratios = first_ratios(lstm, run, monkeypatch)
    torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-4, rtol=0)
    again, _ = run.collect()
    assert not torch.equal(again.state[0], before)
