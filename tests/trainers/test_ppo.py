"""The core details of PPO, checked by hand, against slow references and in a small environment with known outcomes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clustergym.training import (
    World,
    load_checkpoint,
    read_scalars,
)
from corridor import CPU, ppo, rollouts, small, trained

pytestmark = pytest.mark.usefixtures("corridors", "reproducible")


# 1: vectorised architecture


@pytest.mark.parametrize("env_id", ["Corridor-v0", "CorridorBatched-v0"])
def test_episodes_continue_in_the_next_rollout(env_id: str) -> None:
    runner = rollouts(env_id=env_id, num_steps=1, num_envs=2)
    seen: list[list[tuple[float, float]]] = [[], []]
    for _ in range(40):
        resets = runner.envs._ended.copy() if "Batched" in env_id else np.zeros(2, bool)
        batch, _ = runner.collect()
        rows = iter(batch.obs.tolist())
        for env in range(2):
            if not resets[env]:
                seen[env].append(tuple(next(rows)))
    for trail in seen:
        step, episode = trail[0]
        for now in trail:
            # No step or episode is missing or repeated between rollouts.
            assert now == (step, episode)
            step, episode = (step + 1, episode) if step + 1 < 2 + episode % 3 else (0, episode + 1)


def test_rollout_has_steps_times_envs_rows_in_time_order() -> None:
    batch, _ = rollouts(env_id="Corridor-v0").collect()
    assert batch.obs.shape == (24, 2)
    assert len(batch) == 24
    assert batch.obs.view(8, 3, 2)[0, :, 0].tolist() == [0, 0, 0]
    assert batch.obs.view(8, 3, 2)[1, :, 0].tolist() == [1, 1, 1]


def test_both_autoreset_modes_give_the_same_experience() -> None:
    """With NEXT_STEP autoreset, the rows of reset steps are left out; the others are the same as with SAME_STEP."""
    same, own = rollouts(env_id="Corridor-v0", num_steps=4), rollouts(env_id="CorridorBatched-v0", num_steps=10)
    own.agent.load_state_dict(same.agent.state_dict())
    one, other = same.collect()[0], own.collect()[0]
    seen = {tuple(row) for row in one.obs.tolist()}
    assert seen <= {tuple(row) for row in other.obs.tolist()}
    assert len(other) < 30


# 2: initialisation


@pytest.mark.parametrize("share", [False, True])
def test_weights_are_orthogonal_and_scaled(share: bool) -> None:
    agent = ppo.Agent(5, 4, hidden=16, share_network=share)

    def check(layer: nn.Linear, std: float) -> None:
        rows = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
        torch.testing.assert_close(rows @ rows.T, std**2 * torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert layer.bias.abs().max() == 0

    for trunk in (agent.actor_trunk, agent.critic_trunk):
        check(trunk[0], math.sqrt(2))
        check(trunk[2], math.sqrt(2))
    check(agent.actor_head, 0.01)
    check(agent.critic_head, 1.0)


# 3: Adam


def test_adam_epsilon_is_1e_5() -> None:
    """The first step is lr · g / (g + eps), so a small gradient g shows the value of eps."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = ppo.make_optimizer(layer, learning_rate=1.0)
    before, gradient = layer.weight.item(), 1e-6
    layer.weight.grad = torch.full((1, 1), gradient)
    optimizer.step()
    assert before - layer.weight.item() == pytest.approx(gradient / (gradient + 1e-5), rel=1e-2)


# 4: learning rate annealing, and clip annealing


def test_anneal_start_middle_and_end() -> None:
    assert ppo.anneal(3.0, 1, 10) == 3.0
    assert ppo.anneal(3.0, 6, 10) == pytest.approx(1.5)
    assert ppo.anneal(3.0, 10, 10) == pytest.approx(0.3)
    assert ppo.anneal(3.0, 11, 10) == 0.0


def test_learning_rate_and_clip_range_are_annealed(tmp_path: Path) -> None:
    trained(tmp_path, learning_rate=3e-3, clip_coef=0.3, anneal_clip=True)
    assert read_scalars(tmp_path, "charts/learning_rate")[1] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert read_scalars(tmp_path, "charts/clip_coef")[1] == pytest.approx([0.3, 0.2, 0.1])


def test_learning_rate_and_clip_range_are_constant_without_annealing(tmp_path: Path) -> None:
    trained(tmp_path, learning_rate=3e-3, clip_coef=0.3, anneal_lr=False)
    assert read_scalars(tmp_path, "charts/learning_rate")[1] == pytest.approx([3e-3] * 3)
    assert read_scalars(tmp_path, "charts/clip_coef")[1] == pytest.approx([0.3] * 3)


# 5: generalised advantage estimation


def slow_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    terminations: np.ndarray,
    dones: np.ndarray,
    next_value: np.ndarray,
    final_values: np.ndarray,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """The definition: Σ_l (γλ)^l δ_{t+l} up to the end of the episode or of the rollout."""
    steps, envs = rewards.shape
    out = np.zeros((steps, envs))
    for env in range(envs):
        for t in range(steps):
            weight = 1.0
            for s in range(t, steps):
                if terminations[s, env]:
                    following = 0.0
                elif dones[s, env]:
                    following = final_values[s, env]
                else:
                    following = values[s + 1, env] if s + 1 < steps else next_value[env]
                out[t, env] += weight * (rewards[s, env] + gamma * following - values[s, env])
                weight *= gamma * lam
                if dones[s, env]:
                    break
    return out


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 3), st.floats(0, 1), st.floats(0, 1))
def test_gae_matches_its_definition_with_terminations_and_truncations(
    data: st.DataObject, steps: int, envs: int, gamma: float, lam: float
) -> None:
    def numbers(*shape: int) -> np.ndarray:
        return data.draw(hnp.arrays(np.float64, shape, elements=st.floats(-5, 5)))

    rewards, values, final_values = (numbers(steps, envs) for _ in range(3))
    next_value = numbers(envs)
    kind = data.draw(hnp.arrays(np.int64, (steps, envs), elements=st.integers(0, 3)))
    terminations, dones = kind == 1, (kind == 1) | (kind == 2)
    inputs = (rewards, values, terminations, dones, next_value, final_values)
    advantages, returns = ppo.compute_gae(*map(torch.from_numpy, inputs), gamma, lam)
    expected = slow_gae(*inputs, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(returns.numpy(), expected + values, atol=1e-9)


# 6: minibatches


def made_up_batch(rows: int = 50, masked: bool = False) -> tuple[Any, Any]:
    """(agent, batch). The old log-probabilities and values differ from the agent's, so every clip has an effect."""
    agent = ppo.Agent(2, 3, hidden=8)
    with torch.no_grad():
        agent.actor_head.weight.mul_(100)
    obs = torch.randn(rows, 2)
    obs[:, 0] = torch.arange(rows) / rows
    masks = torch.ones(rows, 3, dtype=torch.bool) if masked else None
    if masks is not None:
        masks[torch.arange(rows), torch.arange(rows) % 3] = False
    actions = (torch.arange(rows) + 1) % 3
    with torch.no_grad():
        logits, values = agent(obs)
        logprobs = ppo.mask_logits(logits, masks).log_softmax(-1)[torch.arange(rows), actions]
    batch = ppo.Batch(
        obs,
        actions,
        masks,
        logprobs + 0.3 * torch.randn(rows),
        2 + 3 * torch.randn(rows),
        values + torch.randn(rows),
        values + 0.5 * torch.randn(rows),
    )
    return agent, batch


def test_epoch_uses_every_row_once_in_a_new_order() -> None:
    agent, batch = made_up_batch(50)
    orders: list[list[float]] = []
    agent.register_forward_pre_hook(lambda _, inputs: orders.append((inputs[0][:, 0] * 50).round().int().tolist()))
    ppo.update(
        agent, ppo.make_optimizer(agent, 0.0), batch, small(update_epochs=3, num_minibatches=4), 0.2, 0.0, World()
    )
    assert [len(part) for part in orders] == [12, 13, 12, 13] * 3
    epochs = [list(chain(*orders[i : i + 4])) for i in (0, 4, 8)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
        assert epoch != list(range(50))
    assert epochs[0] != epochs[1] != epochs[2]


# 7 to 11: losses and the optimisation step


def test_advantages_are_normalised() -> None:
    advantages = torch.tensor([1.0, 2.0, 3.0, 6.0])
    out = ppo.normalize_advantages(advantages)
    assert float(out.mean()) == pytest.approx(0, abs=1e-6)
    assert float(out.std()) == pytest.approx(1, abs=1e-6)
    assert torch.isfinite(ppo.normalize_advantages(torch.ones(3))).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0, 2.0, -2.0), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (1.5, -2.0, 3.0), (0.5, -2.0, 1.6), (1.1, -1.0, 1.1)],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, expected: float) -> None:
    loss = ppo.policy_loss(torch.tensor([ratio]), torch.tensor([advantage]), 0.2)
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("new", "old", "target", "expected"),
    [
        (1.0, 0.0, 2.0, 0.5 * 1.8**2),  # clipped to 0.2, which has the larger error
        (1.0, 0.9, 2.0, 0.5 * 1.0),  # within the range
        (3.0, 0.0, -1.0, 0.5 * 16.0),  # clipping would reduce the error, so the unclipped error counts
    ],
)
def test_value_loss_is_the_larger_of_unclipped_and_clipped(
    new: float, old: float, target: float, expected: float
) -> None:
    numbers = (torch.tensor([x]) for x in (new, old, target))
    assert float(ppo.value_loss(*numbers, 0.2)) == pytest.approx(expected)


def test_value_loss_without_clipping_is_half_the_squared_error() -> None:
    assert float(ppo.value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), None)) == 2.0


def test_gradients_are_clipped_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, batch = made_up_batch()
    norms = []
    step = torch.optim.Adam.step

    def spy(self: torch.optim.Adam, *args: Any) -> Any:
        norms.append(float(torch.stack([p.grad.norm() for p in agent.parameters()]).norm()))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    batch.advantages *= 100
    metrics = ppo.update(agent, ppo.make_optimizer(agent, 1e-3), batch, small(vf_coef=50.0), 0.2, 0.0, World())
    assert metrics["losses/grad_norm"] > 1
    assert max(norms) <= 0.5 + 1e-5
    assert ppo.Args().max_grad_norm == 0.5


def test_ratio_is_one_in_the_first_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first optimisation step, the new policy equals the old one."""
    ratios: list[Tensor] = []
    plain = ppo.policy_loss

    def spy(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
        ratios.append(ratio.detach().clone())
        return plain(ratio, advantages, clip_coef)

    monkeypatch.setattr(ppo, "policy_loss", spy)
    for env_id, actions, obs_size in (("CartPole-v1", 2, 4), ("CorridorMasked-v0", 3, 2)):
        ratios.clear()
        args = small(env_id=env_id, num_envs=8, num_steps=32)
        agent = ppo.Agent(obs_size, actions)
        runner = ppo.Rollouts(args, agent, CPU)
        runner.restart(3)
        optimizer = ppo.make_optimizer(agent, 1e-2)
        for _ in range(3):
            ratios.clear()
            ppo.update(agent, optimizer, runner.collect()[0], args, 0.2, 0.0, World())
            torch.testing.assert_close(ratios[0], torch.ones_like(ratios[0]), atol=1e-6, rtol=0)
            assert (ratios[1] - 1).abs().max() > 1e-4
        runner.close()


# 12: debug variables


def test_every_debug_variable_is_logged(tmp_path: Path) -> None:
    trained(tmp_path)
    losses = [
        "policy_loss",
        "value_loss",
        "entropy",
        "old_approx_kl",
        "approx_kl",
        "clipfrac",
        "explained_variance",
        "grad_norm",
    ]
    charts = [
        "learning_rate",
        "clip_coef",
        "kl_coef",
        "SPS",
        "mean_return_100",
        "episodic_return",
        "episodic_length",
        "updates",
    ]
    for tag in [f"losses/{name}" for name in losses] + [f"charts/{name}" for name in charts]:
        steps, values = read_scalars(tmp_path, tag)
        assert steps == [24, 48, 72], tag
        assert np.isfinite(values).all(), tag


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert ppo.explained_variance(returns, returns) == 1.0
    assert ppo.explained_variance(torch.zeros(4), returns) == pytest.approx(0.0)
    assert ppo.explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert math.isnan(ppo.explained_variance(returns, torch.ones(4)))


# 13: networks


def test_networks_are_separate_or_shared() -> None:
    separate, shared = ppo.Agent(4, 2, 64), ppo.Agent(4, 2, 64, share_network=True)
    trunk = 4 * 64 + 64 + 64 * 64 + 64
    assert sum(p.numel() for p in separate.parameters()) == 2 * trunk + (64 * 2 + 2) + 65
    assert sum(p.numel() for p in shared.parameters()) == trunk + (64 * 2 + 2) + 65
    for agent, touched in ((separate, False), (shared, True)):
        agent.get_value(torch.randn(5, 4)).sum().backward()
        assert (agent.actor_trunk[0].weight.grad is not None) == touched
        obs = torch.randn(6, 4)
        logits, values = agent(obs)
        assert torch.equal(logits, agent.get_logits(obs))
        assert torch.equal(values, agent.get_value(obs))


def test_share_network_flag_is_used(tmp_path: Path) -> None:
    trained(tmp_path, share_network=True)
    state = load_checkpoint(tmp_path / "checkpoint.pt", "ppo")["agent"]
    assert torch.equal(state["actor_trunk.0.weight"], state["critic_trunk.0.weight"])


# Masks


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
@settings(max_examples=50, deadline=None)
def test_masked_distribution_covers_only_valid_actions(logits: list[float], valid: list[bool]) -> None:
    mask, raw = torch.tensor([valid]), torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    logprobs = ppo.mask_logits(raw, mask).log_softmax(-1)
    known = torch.distributions.Categorical(logits=raw[mask])
    torch.testing.assert_close(logprobs[mask], known.logits)
    assert logprobs.exp()[~mask].sum() == 0
    entropy = ppo.categorical_entropy(logprobs)
    torch.testing.assert_close(entropy[0], known.entropy())
    entropy.sum().backward()
    assert raw.grad is not None
    assert raw.grad[~mask].abs().sum() == 0


def test_invalid_actions_are_never_played() -> None:
    """The corridor asserts that actions are valid. The stored mask belongs to the stored observation."""
    runner = rollouts(env_id="CorridorMasked-v0", num_steps=64)
    batch, _ = runner.collect()
    assert not (batch.actions == batch.obs[:, 0].long() % 3).any()
    assert batch.masks is not None
    assert torch.equal((~batch.masks).int().argmax(-1), batch.obs[:, 0].long() % 3)


def test_actions_follow_the_policy() -> None:
    """Frequencies of sampled actions are within five standard errors of the probabilities."""
    runner = rollouts(env_id="Corridor-v0", num_envs=16, num_steps=256)
    with torch.no_grad():
        runner.agent.actor_head.weight.zero_()
        runner.agent.actor_head.bias.copy_(torch.tensor([0.7, 0.2, 0.1]).log())
    actions = runner.collect()[0].actions
    for action, probability in enumerate((0.7, 0.2, 0.1)):
        share = float((actions == action).float().mean())
        assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / len(actions))


# KL


@pytest.mark.parametrize(("shift", "scale"), [(0.3, 1.0), (0.0, 1.3), (-0.5, 0.8)])
def test_kl_estimators_match_the_exact_kl_of_normals(shift: float, scale: float) -> None:
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(shift, scale)
    exact = float(torch.distributions.kl_divergence(old, new))
    samples = old.sample((400_000,))
    k1, k2, k3 = ppo.kl_estimators(new.log_prob(samples) - old.log_prob(samples))
    for unbiased in (k1, k3):
        error = float(unbiased.std()) / math.sqrt(len(samples))
        assert abs(float(unbiased.mean()) - exact) < 5 * error
    assert float(k3.min()) >= 0
    assert float(k1.min()) < 0
    grid = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    density = old.log_prob(grid).exp()
    squared = torch.trapezoid(density * (new.log_prob(grid) - old.log_prob(grid)) ** 2, grid)
    assert abs(float(k2.mean() - squared / 2)) < 5 * float(k2.std()) / math.sqrt(len(samples))


def test_kl_estimators_match_the_exact_kl_of_categoricals() -> None:
    """Exact expectations: k1 and k3 are unbiased, k2 = E[(log r)²] / 2."""
    old, new = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = float((old * (old / new).log()).sum())
    k1, k2, k3 = ppo.kl_estimators((new / old).log())
    assert float((old * k1).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((old * k3).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((old * k2).sum()) == pytest.approx(float((old * (new / old).log() ** 2).sum()) / 2, rel=1e-12)


def test_target_kl_stops_the_update_after_an_epoch() -> None:
    agent, batch = made_up_batch()
    optimizer = ppo.make_optimizer(agent, 1e-3)
    stopped = ppo.update(agent, optimizer, batch, small(update_epochs=4, target_kl=1e-9), 0.2, 0.0, World())
    whole = ppo.update(agent, optimizer, batch, small(update_epochs=4, target_kl=1e9), 0.2, 0.0, World())
    assert stopped["charts/updates"] == 4
    assert whole["charts/updates"] == 16


def test_kl_penalty_adapts_to_its_target(tmp_path: Path) -> None:
    trained(tmp_path / "low", kl_coef=1.0, kl_target=1e3)
    assert read_scalars(tmp_path / "low", "charts/kl_coef")[1] == [1.0, 0.5, 0.25]
    trained(tmp_path / "high", kl_coef=1.0, kl_target=1e-12)
    assert read_scalars(tmp_path / "high", "charts/kl_coef")[1] == [1.0, 2.0, 4.0]
    trained(tmp_path / "without a coefficient", kl_target=1e-12)
    assert read_scalars(tmp_path / "without a coefficient", "charts/kl_coef")[1] == [1.0, 2.0, 4.0]
    trained(tmp_path / "neither")
    assert read_scalars(tmp_path / "neither", "charts/kl_coef")[1] == [0.0] * 3


# 37: MultiDiscrete


class TwoChoices(gym.Env[Any, Any]):
    """Actions (0 … 1, 3 … 5). The reward counts the components that match the observation. One of them is invalid."""

    observation_space = gym.spaces.Dict(x=gym.spaces.Box(0, 1, (2,)), action_mask=gym.spaces.Box(0, 1, (5,), np.int8))
    action_space = gym.spaces.MultiDiscrete([2, 3], start=[0, 3])

    def observe(self) -> dict[str, np.ndarray]:
        self.best = self.np_random.integers(0, [2, 3])
        mask = np.ones(5, np.int8)
        mask[2 + (self.best[1] + 1) % 3] = 0
        return {"x": (self.best / [1, 2]).astype(np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        assert action[1] - 3 != (self.best[1] + 1) % 3, "the action is invalid"
        reward = float((action - [0, 3] == self.best).sum())
        self.steps += 1
        return self.observe(), reward, self.steps == 4, False, {}


@pytest.fixture
def _two_choices() -> Iterator[None]:
    gym.register("TwoChoices-v0", TwoChoices)
    yield
    del gym.registry["TwoChoices-v0"]


def test_log_probabilities_and_entropies_of_components_are_added() -> None:
    agent = ppo.Agent(2, [2, 3], hidden=8)
    with torch.no_grad():
        agent.actor_head.weight.mul_(100)
    obs, actions = torch.randn(50, 2), torch.stack([torch.arange(50) % 2, torch.arange(50) % 3], 1)
    first, second = (torch.distributions.Categorical(logits=part) for part in agent.get_logits(obs).split([2, 3], -1))
    logprobs, entropies, _ = agent.evaluate_actions(obs, actions, None)
    torch.testing.assert_close(logprobs, first.log_prob(actions[:, 0]) + second.log_prob(actions[:, 1]))
    torch.testing.assert_close(entropies, first.entropy() + second.entropy())
    masks = torch.ones(50, 5, dtype=torch.bool)
    masks[:, 4] = False
    masked = torch.distributions.Categorical(logits=agent.get_logits(obs)[:, 2:4])
    chosen = torch.stack([actions[:, 0], torch.arange(50) % 2], 1)
    logprobs, entropies, _ = agent.evaluate_actions(obs, chosen, masks)
    torch.testing.assert_close(logprobs, first.log_prob(chosen[:, 0]) + masked.log_prob(chosen[:, 1]))
    torch.testing.assert_close(entropies, first.entropy() + masked.entropy())


def test_every_component_is_sampled_from_its_own_distribution() -> None:
    agent = ppo.Agent(2, [2, 3], hidden=8)
    with torch.no_grad():
        agent.actor_head.weight.zero_()
        agent.actor_head.bias.copy_(torch.tensor([0.3, 0.7, 0.6, 0.3, 0.1]).log())
        actions = agent.act(torch.zeros(4000, 2), None, agent.draw_noise(4000))
    joint = torch.bincount(3 * actions[:, 0] + actions[:, 1], minlength=6) / 4000
    expected = torch.outer(torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.3, 0.1])).flatten()
    assert ((joint - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt()).all()
    assert agent.act(torch.zeros(1, 2), None, 0.0).tolist() == [[1, 0]]


@pytest.mark.usefixtures("_two_choices")
def test_multidiscrete_actions_are_learned(tmp_path: Path) -> None:
    """The best return is 8; random valid actions have 4 · (1/2 + 1/2)."""
    args = small(env_id="TwoChoices-v0", num_envs=8, num_steps=32, total_timesteps=8_000, eval_episodes=16)
    assert ppo.train(dataclasses.replace(args, run_dir=tmp_path, gamma=0.0), World())["mean_return"] == 8
