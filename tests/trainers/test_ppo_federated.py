"""Federated PPO: KL divergences, the penalty, exchanges and arguments."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from clustergym.common.checkpoints import load_checkpoint
from clustergym.training.federated.matrices import load_matrix
from federation import differences, fed, small
from federation import processes as processes  # a fixture
from trainers import FOLDER

TRAINER = FOLDER / "ppo_federated.py"
CPU = torch.device("cpu")
PAIR = np.array([[0.0, 1.0], [1.0, 0.0]])


# Distributions


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_categorical_kl_equals_torch_distributions(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for actions in (2, 3, 18):
        p, q = (scale * torch.randn(500, actions, generator=generator, dtype=torch.float64) for _ in range(2))
        expected = kl_divergence(Categorical(logits=p), Categorical(logits=q))
        torch.testing.assert_close(fed.categorical_kl(p, q), expected)
        assert fed.categorical_kl(p, p).abs().max() == 0


@pytest.mark.parametrize("dimensions", [1, 2, 7])
def test_normal_kl_log_prob_and_entropy_equal_torch_distributions(dimensions: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(500, 2 * dimensions, generator=generator, dtype=torch.float64) for _ in range(2))
    normals = [Normal(each[:, :dimensions], each[:, dimensions:].exp()) for each in (p, q)]
    torch.testing.assert_close(fed.normal_kl(p, q), kl_divergence(*normals).sum(-1))
    torch.testing.assert_close(fed.normal_kl(p, p), torch.zeros(500, dtype=torch.float64))
    actions = torch.randn(500, dimensions, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(fed.log_prob(p, actions, True), normals[0].log_prob(actions).sum(-1))
    torch.testing.assert_close(fed.policy_entropy(p, True), normals[0].entropy().sum(-1))


def test_log_prob_and_entropy_of_discrete_actions_equal_torch_distributions() -> None:
    logits = torch.randn(100, 5, dtype=torch.float64)
    actions = torch.randint(5, (100,))
    torch.testing.assert_close(fed.log_prob(logits, actions, False), Categorical(logits=logits).log_prob(actions))
    torch.testing.assert_close(fed.policy_entropy(logits, False), Categorical(logits=logits).entropy())


def test_kl_of_examples_computed_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert float(fed.categorical_kl(p, q)) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))
    # N(0, 1) against N(1, 2): log 2 + (1 + 1) / 8 − 1/2
    assert float(fed.normal_kl(torch.tensor([0.0, 0.0]), torch.tensor([1.0, np.log(2.0)]))) == pytest.approx(
        np.log(2) + 0.25 - 0.5, rel=1e-6
    )


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0151, 6.0), (0.015, 3.0), (0.01, 3.0), (0.01 / 1.5, 3.0), (0.0066, 1.5), (0.0, 1.5)],
)
def test_beta_doubles_above_1_5_targets_and_halves_below_target_over_1_5(kl: float, expected: float) -> None:
    assert fed.adapted_beta(3.0, kl, 0.01) == expected


# The penalty


def pair_of_learners(**changes: Any) -> list[Any]:
    """Two agents with clearly different policies, before their first exchange."""
    args = small(**changes)
    learners = [fed.Learner(args, i, PAIR, CPU) for i in range(2)]
    for learner in learners:
        generator = torch.Generator().manual_seed(learner.index)
        with torch.no_grad():
            for parameter in learner.agent.policy.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return learners


def exchange_once(learners: list[Any], round_: int = 0) -> None:
    vectors = [learner.outgoing() for learner in learners]
    for learner in learners:
        learner.receive(round_, vectors[learner.index], {j: vectors[j] for j in learner.peers})


def neighbour_kl(learner: Any, obs: torch.Tensor) -> float:
    """Mean KL to the only neighbour."""
    (vector,) = learner.neighbours.values()
    with torch.no_grad():
        return float(learner.kl(learner.agent.policy(obs), learner.neighbour_dist(vector, obs)).mean())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_update_moves_the_policy_towards_its_neighbour_and_leaves_the_neighbour_unchanged(env_id: str) -> None:
    learner, other = pair_of_learners(env_id=env_id, penalty_coeff=100.0, vf_coef=0.0, ent_coef=0.0)
    exchange_once([learner, other])
    learner.collect()
    obs = learner.batch.obs
    frozen, before = learner.neighbours[1].clone(), neighbour_kl(learner, obs)
    learner.learn()
    assert neighbour_kl(learner, obs) < before
    assert torch.equal(learner.neighbours[1], frozen)
    assert torch.equal(other.outgoing(), frozen)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_gradient_step_decreases_the_penalty(env_id: str) -> None:
    learner, other = pair_of_learners(env_id=env_id)
    exchange_once([learner, other])
    learner.collect()
    obs = learner.batch.obs
    target = learner.neighbour_dist(learner.neighbours[1], obs)
    assert not target.requires_grad
    penalty = learner.kl(learner.agent.policy(obs), target).mean()
    penalty.backward()
    gradients = [parameter.grad for parameter in learner.agent.policy.parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert all(parameter.grad is None for parameter in learner._neighbour_policy.parameters())
    with torch.no_grad():
        for parameter in learner.agent.policy.parameters():
            parameter -= 1e-3 * parameter.grad
    assert neighbour_kl(learner, obs) < penalty.item()


def test_penalty_is_weighted_by_the_matrix() -> None:
    args = small(n_agents=3, penalty_coeff=2.0, update_epochs=1, num_minibatches=1)
    matrix = np.array([[0.0, 3.0, 5.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    learners = [fed.Learner(args, i, matrix, CPU) for i in range(3)]
    with torch.no_grad():
        for learner in learners:
            learner.agent.policy.net[-1].bias.copy_(torch.tensor([0.0, float(learner.index)]))
    exchange_once(learners)
    learners[0].collect()
    obs = learners[0].batch.obs
    p = learners[0].agent.policy(obs)
    by_hand = sum(w * learners[0].kl(p, learners[j].agent.policy(obs)).mean() for j, w in ((1, 3.0), (2, 5.0)))
    metrics = learners[0].learn()
    assert metrics["losses/comm_kl"] == pytest.approx(by_hand.item(), rel=1e-5)
    terms = [
        abs(metrics["losses/policy_loss"]),
        args.ent_coef * metrics["losses/entropy"],
        args.vf_coef * metrics["losses/value_loss"],
        2.0 * by_hand.item(),
    ]
    fractions = [metrics[f"charts/loss_fractions/{name}"] for name in ("policy", "entropy", "value", "comm_penalty")]
    assert fractions == pytest.approx([term / sum(terms) for term in terms], rel=1e-4)
    assert sum(fractions) == pytest.approx(1)


def test_adaptive_kl_penalty_replaces_clipping() -> None:
    learner, _ = pair_of_learners(use_clipping=False, adaptive_kl_target=1e-9, learning_rate=1e-2)
    metrics = learner.iterate()
    assert metrics["losses/kl_after_update"] > 1.5e-9
    assert learner.beta == 2.0
    fractions = [value for key, value in metrics.items() if key.startswith("charts/loss_fractions/")]
    assert len(fractions) == 5
    assert sum(fractions) == pytest.approx(1)


def test_target_kl_stops_the_update_after_one_epoch() -> None:
    metrics = pair_of_learners(target_kl=1e-12, update_epochs=4, learning_rate=1e-2)[0].iterate()
    assert metrics["charts/updates"] == 2  # one epoch of two minibatches


def test_returns_without_gae_are_discounted_rewards() -> None:
    learner, _ = pair_of_learners(gae=False, gamma=0.5)
    learner.collect()
    # Every reward of CartPole is 1. Episodes this short end by termination, where the return is 1.
    returns = learner.batch.returns.view(learner.args.num_steps, learner.args.num_envs)
    continues = (returns[:-1] - (1 + 0.5 * returns[1:])).abs() < 1e-5
    ends = (returns[:-1] - 1).abs() < 1e-5
    assert bool((continues | ends).all())
    assert bool(ends.any())
    assert float(continues.float().mean()) > 0.8


# Exchanges


def test_zero_matrix_equals_independent_ppo_bit_for_bit(tmp_path: Path) -> None:
    zeros = tmp_path / "zeros.json"
    zeros.write_text('{"comm_matrix": [[0, 0], [0, 0]]}')
    args = small(run_dir=tmp_path / "run", comm_matrix_config=zeros)
    fed.train(args)
    for i in range(2):
        alone = fed.Learner(replace(args, use_comm_penalty=False), i, np.zeros((2, 2)), CPU)
        for _ in range(args.num_iterations):
            alone.iterate()
        together = load_checkpoint(tmp_path / "run" / f"agent_{i}" / "checkpoint.pt", "ppo_federated")
        alone.round, alone.published = together["round"], alone.outgoing()
        assert differences(together, alone.state()) == []
    lone = small(run_dir=tmp_path / "lone", n_agents=1)
    fed.train(lone)
    saved = [load_checkpoint(tmp_path / run / "agent_0" / "checkpoint.pt", "ppo_federated") for run in ("run", "lone")]
    assert differences(*saved) == []


def test_neighbours_are_frozen_between_exchanges() -> None:
    learners = pair_of_learners(local_updates=3)
    exchange_once(learners)
    published = [learner.outgoing().clone() for learner in learners]
    for _ in range(3):
        for learner in learners:
            learner.iterate()
        assert torch.equal(learners[0].neighbours[1], published[1])
        assert torch.equal(learners[1].neighbours[0], published[0])
        assert not torch.equal(learners[1].outgoing(), published[1])
    exchange_once(learners, 1)
    assert torch.equal(learners[0].neighbours[1], learners[1].outgoing())


def test_policy_with_nan_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    learner, other = pair_of_learners()
    exchange_once([learner, other])
    good = learner.neighbours[1]
    learner.receive(1, learner.outgoing(), {1: torch.full_like(good, float("nan"))})
    assert torch.equal(learner.neighbours[1], good)
    assert "agent 1 published NaN or infinity; keeping its last policy" in caplog.text


def test_only_the_policy_is_published_unless_weights_are_averaged() -> None:
    learner = pair_of_learners()[0]
    assert len(learner.outgoing()) == sum(p.numel() for p in learner.agent.policy.parameters())
    averaging = pair_of_learners(average_weights=True)[0]
    assert len(averaging.outgoing()) == sum(p.numel() for p in averaging.agent.parameters())


def test_average_weights_uses_the_rows_and_the_diagonal() -> None:
    args = small(n_agents=3, average_weights=True)
    matrix = np.array([[2.0, 1.0, 1.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    learners = [fed.Learner(args, i, matrix, CPU) for i in range(3)]
    a, b, c = (learner.outgoing() for learner in learners)
    exchange_once(learners)
    torch.testing.assert_close(learners[0].outgoing(), (2 * a + b + c) / 4)
    torch.testing.assert_close(learners[1].outgoing(), (b + 3 * c) / 4)
    assert torch.equal(learners[2].outgoing(), c)


def test_common_init_gives_all_agents_the_same_weights() -> None:
    vectors = [fed.Learner(small(common_init=True), i, PAIR, CPU).outgoing() for i in range(2)]
    assert torch.equal(*vectors)
    vectors = [fed.Learner(small(), i, PAIR, CPU).outgoing() for i in range(2)]
    assert not torch.equal(*vectors)


def test_creating_a_learner_does_not_change_the_global_rng() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fed.Learner(small(), 0, PAIR, CPU)
    assert torch.equal(torch.rand(3), expected)


# Environments


def test_continuous_actions_are_clipped_for_the_environment_but_not_for_learning() -> None:
    learner, _ = pair_of_learners(env_id="Pendulum-v1")
    with torch.no_grad():
        learner.agent.policy.logstd.fill_(2.0)
    learner.collect()
    assert learner.batch.actions.abs().max() > 2.0
    played = np.array(learner.envs.envs[0].actions)
    assert np.abs(played).max() == 2.0


def test_agents_training_and_evaluation_use_different_seeds() -> None:
    starts = []
    for agent in range(2):
        for purpose in (fed.TRAINING, fed.EVALUATION):
            envs = fed.make_envs(small(), agent, 2, purpose)
            envs.reset()
            starts.append(envs.obs)
    rows = np.concatenate(starts)
    assert len(np.unique(rows, axis=0)) == len(rows)


# Arguments


def test_booleans_can_be_written_in_four_ways() -> None:
    given = [
        "--use-clipping=False",
        "--anneal-lr",
        "False",
        "--no-gae",
        "--capture-video",
        "--norm-adv",
        "True",
        "--track",
    ]
    args = fed.parse_args(fed.Args, argv=[*given, "--comm-coeff=10", "--target-kl", "0.02", "--no_clip_vloss"])
    assert (args.use_clipping, args.anneal_lr, args.gae, args.clip_vloss) == (False, False, False, False)
    assert (args.capture_video, args.norm_adv, args.track) == (True, True, True)
    assert (args.penalty_coeff, args.target_kl) == (10.0, 0.02)


def test_defaults_are_the_documented_ones() -> None:
    args = fed.parse_args(fed.Args, argv=[])
    assert (args.n_agents, args.local_updates, args.num_envs, args.num_steps) == (2, 16, 4, 128)
    assert (args.num_minibatches, args.update_epochs, args.use_comm_penalty, args.penalty_coeff) == (4, 4, True, 1.0)
    assert (args.use_clipping, args.clip_coef, args.ent_coef, args.vf_coef) == (True, 0.2, 0.01, 0.5)
    assert (args.gamma, args.gae_lambda, args.max_grad_norm, args.learning_rate) == (0.99, 0.95, 0.5, 2.5e-4)
    assert (args.anneal_lr, args.gae, args.norm_adv, args.clip_vloss, args.target_kl) == (True, True, True, True, None)
    assert (args.env_id, args.average_weights) == ("CartPole-v1", False)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_agents": 0}, "--n-agents is 0: expected 1 or more"),
        ({"num_minibatches": 3}, "--num-minibatches is 3: expected a divisor of 64"),
        ({"total_timesteps": 0}, "--total-timesteps is 0: expected 1 or more"),
        ({"penalty_coeff": -1.0}, "--penalty-coeff is -1.0: expected 0 or more"),
        ({"penalty_coeff": float("nan")}, "--penalty-coeff is nan"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0: expected more than 0"),
        ({"gamma": 1.5}, "--gamma is 1.5: expected 0 … 1"),
        ({"target_kl": -0.1}, "--target-kl is -0.1: expected more than 0"),
        ({"local_updates": 0}, "--local-updates is 0: expected 1 or more"),
        ({"num_minibatches": 64}, "--norm-adv needs 2 or more transitions"),
        ({"comm_matrix_config": Path("nowhere.json")}, "no such file. Bundled matrices: .*pair"),
        ({"comm_matrix_config": Path("ring")}, "with --n-agents 2, agents are 0 … 1"),
        ({"env_id": "CartPoll-v1"}, "CartPoll"),
        ({"env_options": "[1]"}, "--env-options is .1.: expected a JSON object"),
        ({"env_options": "{"}, "--env-options '{' is not JSON"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, FileNotFoundError, gym.error.Error), match=complaint):
        fed.train(small(**changes))
    assert not list(tmp_path.iterdir())


def test_command_line_reports_an_error_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAINER), "--n-agents", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == "ppo_federated.py: --n-agents is 0: expected 1 or more\n"
    assert not done.stdout


class Masked(gym.Env[Any, Any]):
    """Three actions, of which one is invalid in each step. Playing it raises an error."""

    observation_space = gym.spaces.Dict(x=gym.spaces.Box(0, 1, (2,)), action_mask=gym.spaces.Box(0, 1, (3,), np.int8))
    action_space = gym.spaces.Discrete(3, start=4)

    def observe(self) -> dict[str, np.ndarray]:
        mask = np.ones(3, np.int8)
        mask[self.count % 3] = 0
        return {"x": np.full(2, self.count / 8, np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action - 4 != self.count % 3, "the action is invalid"
        self.count += 1
        return self.observe(), 1.0, False, self.count == 7, {}


def test_invalid_actions_are_masked_in_rollouts_updates_and_evaluation(tmp_path: Path) -> None:
    gym.register("FederatedMasked-v0", Masked)
    try:
        learners = pair_of_learners(env_id="FederatedMasked-v0")
        exchange_once(learners)
        learner = learners[0]
        learner.collect()
        batch = learner.batch
        invalid = (batch.obs[:, 0] * 8).round().long() % 3
        assert torch.equal((~batch.masks).int().argmax(-1), invalid)
        assert not (batch.actions == invalid).any()
        known = torch.distributions.Categorical(logits=batch.dist)
        torch.testing.assert_close(batch.logprobs, known.log_prob(batch.actions))
        assert float(known.probs[~batch.masks].sum()) == 0.0
        other = learner.neighbour_dist(learner.neighbours[1], batch.obs, batch.masks)
        assert bool((other[~batch.masks] == fed.MASKED_LOGIT).all())
        assert all(math.isfinite(value) for key, value in learner.learn().items() if "explained" not in key)
        assert len(learner.evaluate()) == learner.args.eval_episodes
        state = learner.state()
        assert torch.equal(state["next_masks"], torch.from_numpy(learner.envs.masks))
    finally:
        del gym.registry["FederatedMasked-v0"]


def test_documented_matrix_of_four_agents_is_bundled() -> None:
    matrix = load_matrix(Path("comm_matrices/4_agents.json"), 4, fed.BUNDLED_MATRICES)
    assert matrix.tolist() == [[0, 100, 0, 0], [100, 0, 0, 0], [0, 0, 0, 100], [0, 0, 100, 0]]
