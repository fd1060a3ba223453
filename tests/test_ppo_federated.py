"""Federated PPO: closed forms, signs, frozen neighbours, two engines with the same numbers, agents that die and return."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from clustergym.training import load_checkpoint, read_scalars
from federation import ROOT, TRAINER, free_port, load_trainer, run_agent, run_store, start, wait_for

fed = load_trainer()
CPU = torch.device("cpu")
PAIR = np.array([[0.0, 1.0], [1.0, 0.0]])
SMALL: dict[str, Any] = {
    "n_agents": 2, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2, "local_updates": 2,
    "total_timesteps": 64 * 6, "hidden": 16, "eval_episodes": 2, "seed": 3,
}  # fmt: skip


def small(**changes: Any) -> Any:
    return fed.Args(**(SMALL | changes))


def differences(a: Any, b: Any, where: str = "state") -> list[str]:
    """Where two nested states differ, bit for bit; arguments aside."""
    if isinstance(a, dict):
        return [each for key in a if key != "args" for each in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list | tuple):
        pairs = enumerate(zip(a, b, strict=True))
        return [each for i, (x, y) in pairs for each in differences(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    return [] if a == b else [f"{where}: {a} and {b}"]


def assert_same_runs(a: Path, b: Path, n_agents: int = 2) -> None:
    for i in range(n_agents):
        saved = [load_checkpoint(folder / f"agent_{i}" / "checkpoint.pt", "ppo_federated") for folder in (a, b)]
        assert differences(*saved) == []
        for tag in ("charts/episodic_return", f"charts/kl_{i}_{1 - i}", "losses/comm_kl"):
            assert read_scalars(a / f"agent_{i}", tag) == read_scalars(b / f"agent_{i}", tag)


@pytest.fixture
def processes() -> Iterator[list[ForkServerProcess]]:
    """Processes of a test, ended with it whatever happens."""
    started: list[ForkServerProcess] = []
    yield started
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


# Closed forms


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_categorical_divergence_is_the_exact_one(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for actions in (2, 3, 18):
        p, q = (scale * torch.randn(500, actions, generator=generator, dtype=torch.float64) for _ in range(2))
        expected = kl_divergence(Categorical(logits=p), Categorical(logits=q))
        torch.testing.assert_close(fed.categorical_kl(p, q), expected)
        assert fed.categorical_kl(p, p).abs().max() == 0


@pytest.mark.parametrize("dimensions", [1, 2, 7])
def test_normal_divergence_is_the_exact_one(dimensions: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(500, 2 * dimensions, generator=generator, dtype=torch.float64) for _ in range(2))
    normals = [Normal(each[:, :dimensions], each[:, dimensions:].exp()) for each in (p, q)]
    torch.testing.assert_close(fed.normal_kl(p, q), kl_divergence(*normals).sum(-1))
    torch.testing.assert_close(fed.normal_kl(p, p), torch.zeros(500, dtype=torch.float64))
    actions = torch.randn(500, dimensions, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(fed.log_prob(p, actions, True), normals[0].log_prob(actions).sum(-1))
    torch.testing.assert_close(fed.policy_entropy(p, True), normals[0].entropy().sum(-1))


def test_log_probabilities_and_entropy_of_discrete_actions() -> None:
    logits = torch.randn(100, 5, dtype=torch.float64)
    actions = torch.randint(5, (100,))
    torch.testing.assert_close(fed.log_prob(logits, actions, False), Categorical(logits=logits).log_prob(actions))
    torch.testing.assert_close(fed.policy_entropy(logits, False), Categorical(logits=logits).entropy())


def test_divergence_worked_by_hand() -> None:
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
def test_beta_doubles_above_one_and_a_half_targets_and_halves_below_a_1_5th(kl: float, expected: float) -> None:
    assert fed.adapted_beta(3.0, kl, 0.01) == expected


# The penalty


def pair_of_learners(**changes: Any) -> list[Any]:
    """Two agents whose policies are clearly apart, before their first exchange."""
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


def distance(learner: Any, obs: torch.Tensor) -> float:
    """To its first neighbour, as frozen."""
    (vector,) = learner.neighbours.values()
    with torch.no_grad():
        return float(learner.kl(learner.agent.policy(obs), learner._frozen_parameters(vector, obs)).mean())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_one_update_brings_coupled_policies_closer_and_moves_the_learner_alone(env_id: str) -> None:
    learner, other = pair_of_learners(env_id=env_id, penalty_coeff=100.0, vf_coef=0.0, ent_coef=0.0)
    exchange_once([learner, other])
    learner.collect()
    obs = learner.batch.obs
    frozen, before = learner.neighbours[1].clone(), distance(learner, obs)
    learner.learn()
    assert distance(learner, obs) < before
    assert torch.equal(learner.neighbours[1], frozen)
    assert torch.equal(other.outgoing(), frozen)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_step_against_the_gradient_of_the_penalty_shrinks_it(env_id: str) -> None:
    learner, other = pair_of_learners(env_id=env_id)
    exchange_once([learner, other])
    learner.collect()
    obs = learner.batch.obs
    target = learner._frozen_parameters(learner.neighbours[1], obs)
    assert not target.requires_grad
    penalty = learner.kl(learner.agent.policy(obs), target).mean()
    penalty.backward()
    gradients = [parameter.grad for parameter in learner.agent.policy.parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert all(parameter.grad is None for parameter in learner._frozen.parameters())
    with torch.no_grad():
        for parameter in learner.agent.policy.parameters():
            parameter -= 1e-3 * parameter.grad
    assert distance(learner, obs) < penalty.item()


def test_weights_multiply_the_penalty() -> None:
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


def test_the_adaptive_penalty_replaces_clipping() -> None:
    learner, _ = pair_of_learners(use_clipping=False, adaptive_kl_target=1e-9, learning_rate=1e-2)
    metrics = learner.iterate()
    assert metrics["losses/kl_after_update"] > 1.5e-9
    assert learner.beta == 2.0
    fractions = [value for key, value in metrics.items() if key.startswith("charts/loss_fractions/")]
    assert len(fractions) == 5
    assert sum(fractions) == pytest.approx(1)


def test_target_kl_stops_an_update_early() -> None:
    metrics = pair_of_learners(target_kl=1e-12, update_epochs=4, learning_rate=1e-2)[0].iterate()
    assert metrics["charts/updates"] == 2  # one epoch of two minibatches


def test_returns_without_gae_are_discounted_rewards() -> None:
    learner, _ = pair_of_learners(gae=False, gamma=0.5)
    learner.collect()
    batch, envs, steps = learner.batch, learner.args.num_envs, learner.args.num_steps
    # In CartPole every reward is 1, so far from any end the return is the geometric sum up to what is bootstrapped.
    returns = batch.returns.view(steps, envs)
    long_before = returns[: steps - 26]
    assert float((long_before - 2.0).abs().min()) < 1e-4


# Independence and freezing


def test_a_zero_matrix_is_independent_ppo_bit_for_bit(tmp_path: Path) -> None:
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


def test_a_neighbour_that_diverges_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    learner, other = pair_of_learners()
    exchange_once([learner, other])
    good = learner.neighbours[1]
    learner.receive(1, learner.outgoing(), {1: torch.full_like(good, float("nan"))})
    assert torch.equal(learner.neighbours[1], good)
    assert "agent 1 published NaN or infinity; keeping the last policy of it" in caplog.text


def test_what_is_published_is_the_policy_alone_unless_agents_are_averaged() -> None:
    learner = pair_of_learners()[0]
    assert len(learner.outgoing()) == sum(p.numel() for p in learner.agent.policy.parameters())
    averaging = pair_of_learners(average_weights=True)[0]
    assert len(averaging.outgoing()) == sum(p.numel() for p in averaging.agent.parameters())


def test_averaging_follows_the_rows_and_the_diagonal() -> None:
    args = small(n_agents=3, average_weights=True)
    matrix = np.array([[2.0, 1.0, 1.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    learners = [fed.Learner(args, i, matrix, CPU) for i in range(3)]
    a, b, c = (learner.outgoing() for learner in learners)
    exchange_once(learners)
    torch.testing.assert_close(learners[0].outgoing(), (2 * a + b + c) / 4)
    torch.testing.assert_close(learners[1].outgoing(), (b + 3 * c) / 4)
    assert torch.equal(learners[2].outgoing(), c)


def test_common_init_starts_all_agents_alike() -> None:
    vectors = [fed.Learner(small(common_init=True), i, PAIR, CPU).outgoing() for i in range(2)]
    assert torch.equal(*vectors)
    vectors = [fed.Learner(small(), i, PAIR, CPU).outgoing() for i in range(2)]
    assert not torch.equal(*vectors)


def test_making_an_agent_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fed.Learner(small(), 0, PAIR, CPU)
    assert torch.equal(torch.rand(3), expected)


# Environments


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "MountainCarContinuous-v0"])
def test_environments_are_brought_back_exactly_in_the_middle_of_an_episode(env_id: str) -> None:
    args = small(env_id=env_id)

    def play(envs: Any, steps: int, generator: np.random.Generator) -> list[Any]:
        seen = []
        for _ in range(steps):
            if envs.continuous:
                actions = generator.normal(size=(2, envs.action_size)).astype(np.float32)
            else:
                actions = generator.integers(envs.action_size, size=2)
            seen.append(envs.step(actions)[:4])
        return seen

    envs = fed.Environments(args, 0, 2, fed.TRAINING)
    envs.reset()
    generator = np.random.default_rng(0)
    play(envs, 57, generator)
    copy = fed.Environments(args, 0, 2, fed.TRAINING)
    copy.restore(envs.state())
    noise = generator.bit_generator.state
    first = play(envs, 230, generator)
    generator.bit_generator.state = noise
    for x, y in zip(first, play(copy, 230, generator), strict=True):
        for a, b in zip(x, y, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_last_observation_of_a_truncated_episode_is_kept_for_its_value() -> None:
    envs = fed.Environments(small(env_id="Pendulum-v1"), 0, 2, fed.TRAINING)
    envs.reset()
    for _ in range(199):
        *_, truncated, last = envs.step(np.zeros((2, 1), np.float32))
        assert not truncated.any()
        assert not last
    obs, _, terminated, truncated, last = envs.step(np.zeros((2, 1), np.float32))
    assert truncated.all()
    assert not terminated.any()
    assert sorted(last) == [0, 1]
    assert not np.array_equal(obs, np.stack([last[0], last[1]]))


def test_continuous_actions_are_clipped_for_the_environment_and_kept_raw() -> None:
    learner, _ = pair_of_learners(env_id="Pendulum-v1")
    with torch.no_grad():
        learner.agent.policy.logstd.fill_(2.0)
    learner.collect()
    assert learner.batch.actions.abs().max() > 2.0
    played = np.array(learner.envs.envs[0].actions)
    assert np.abs(played).max() == 2.0


def test_agents_and_purposes_have_seeds_of_their_own() -> None:
    args = small()
    starts = [fed.Environments(args, i, 2, purpose).reset() for i in range(2) for purpose in (1, 2)]
    rows = np.concatenate(starts)
    assert len(np.unique(rows, axis=0)) == len(rows)


# Communication matrices


@pytest.mark.parametrize(("name", "n_agents", "edges"), [("pair", 2, 2), ("two_pairs", 4, 4), ("ring", 4, 8), ("star", 4, 6), ("all_to_all", 4, 12)])  # fmt: skip
def test_bundled_matrices_load_by_name_and_by_path(name: str, n_agents: int, edges: int) -> None:
    for path in (name, f"{name}.json", f"comm_matrices/{name}.json", str(fed.MATRICES / f"{name}.json")):
        matrix = fed.read_comm_matrix(Path(path), n_agents)
        assert matrix.shape == (n_agents, n_agents)
        assert np.count_nonzero(matrix) == edges
        assert (matrix == matrix.T).all()
        assert not matrix.diagonal().any()


def test_matrices_may_be_asymmetric_and_rows_normalised(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"comm_matrix": {"0": {"1": 10, "2": 30}, "2": {"0": 0.5}}}')
    args = small(n_agents=3, comm_matrix_config=path)
    assert fed.comm_matrix(args).tolist() == [[0, 10, 30], [0, 0, 0], [0.5, 0, 0]]
    normalised = fed.comm_matrix(replace(args, normalise_rows=True))
    assert normalised.tolist() == [[0, 0.25, 0.75], [0, 0, 0], [1, 0, 0]]
    assert fed.comm_matrix(small(n_agents=3)).tolist() == (1 - np.eye(3)).tolist()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"comm_matrix": {"0": {"2": 1}}}', r"""comm_matrix\["0"\] names agent '2': with --n-agents 2 agents are 0 … 1"""),
        ('{"comm_matrix": {"-1": {"0": 1}}}', r"comm_matrix names agent '-1': with --n-agents 2 agents are 0 … 1"),
        ('{"comm_matrix": {"01": {"0": 1}}}', r"names agent '01'"),
        ('{"comm_matrix": {"zero": {"0": 1}}}', r"names agent 'zero'"),
        ('{"comm_matrix": {"0": {"1": -2}}}', r'comm_matrix\["0"\]\["1"\] is -2: a weight is a finite number, 0 or more'),
        ('{"comm_matrix": {"0": {"1": NaN}}}', r'comm_matrix\["0"\]\["1"\] is nan'),
        ('{"comm_matrix": {"0": {"1": Infinity}}}', r'comm_matrix\["0"\]\["1"\] is inf'),
        ('{"comm_matrix": {"0": {"1": true}}}', r"is True: expected a number"),
        ('{"comm_matrix": {"0": {"1": "10"}}}', r"is '10': expected a number"),
        ('{"comm_matrix": {"0": [1]}}', r'comm_matrix\["0"\] is \[1\]: expected an object'),
        ('{"comm_matrix": {"0": {"1": 1, "1": 2}}}', r"key '1' occurs twice"),
        ('{"comm_matrix": [[0, 1]]}', r"comm_matrix has 1 rows: expected 2 × 2"),
        ('{"comm_matrix": [[0, 1], [1]]}', r"comm_matrix\[1\] has 1 entries: expected 2, the matrix is square"),
        ('{"comm_matrix": [[0, 1], [-1, 0]]}', r"comm_matrix\[1\]\[0\] is -1"),
        ('{"comm_matrix": 3}', r"comm_matrix is 3: expected an object of rows"),
        ('{"matrix": {}}', r"found 'matrix'; expected"),
        ('{"comm_matrix": {}, "n": 2}', r"unknown key 'n'"),
        ("[1, 2", r"not JSON"),
    ],
)  # fmt: skip
def test_a_bad_matrix_is_refused_by_key_and_range(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        fed.read_comm_matrix(path, 2)
    assert str(path) in str(caught.value)


def test_the_graph_is_drawn(tmp_path: Path) -> None:
    for n in (1, 4, 12):
        fed.plot_graph(1.0 - np.eye(n), tmp_path / f"{n}.png")
        assert (tmp_path / f"{n}.png").read_bytes().startswith(b"\x89PNG")


# Arguments


def test_booleans_are_taken_in_every_usual_spelling() -> None:
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
    args = fed.parse_args([*given, "--comm-coeff=10", "--target-kl", "0.02", "--no_clip_vloss"])
    assert (args.use_clipping, args.anneal_lr, args.gae, args.clip_vloss) == (False, False, False, False)
    assert (args.capture_video, args.norm_adv, args.track) == (True, True, True)
    assert (args.penalty_coeff, args.target_kl) == (10.0, 0.02)


def test_defaults_are_those_of_the_document() -> None:
    args = fed.parse_args([])
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
        ({"num_minibatches": 3}, "= 64 transitions, which --num-minibatches 3 does not divide"),
        ({"total_timesteps": 63}, "--total-timesteps is 63: expected at least one rollout of 64 steps"),
        ({"penalty_coeff": -1.0}, "--penalty-coeff is -1.0: expected 0 or more"),
        ({"penalty_coeff": float("nan")}, "--penalty-coeff is nan"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0: expected more than 0"),
        ({"gamma": 1.5}, "--gamma is 1.5: expected 0 … 1"),
        ({"target_kl": -0.1}, "--target-kl is -0.1: expected more than 0"),
        ({"local_updates": 0}, "--local-updates is 0: expected 1 or more"),
        ({"num_minibatches": 64}, "--norm-adv needs two transitions"),
        ({"comm_matrix_config": Path("nowhere.json")}, "no such file, and none of the bundled ones .*pair"),
        ({"comm_matrix_config": Path("ring")}, "with --n-agents 2 agents are 0 … 1"),
        ({"env_id": "CartPoll-v1"}, "CartPoll"),
        ({"env_id": "Blackjack-v1"}, "observation space"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, FileNotFoundError, gym.error.Error), match=complaint):
        fed.train(small(**changes))
    assert not list(tmp_path.iterdir())


def test_the_command_line_answers_an_error_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAINER), "--n-agents", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == "ppo_federated.py: --n-agents is 0: expected 1 or more\n"
    assert not done.stdout


# Runs


def test_a_run_leaves_logs_plots_videos_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    args = small(run_dir=folder, capture_video=True, save_model=True, plot_comm_matrix=True, log_all_kl=True)
    result = fed.train(args)
    assert result["steps"] == 2 * 6 * 64
    assert result["missing_agents"] == []
    assert result["mean_return"] == pytest.approx(np.mean(list(result["mean_returns"].values())))
    assert {"summary.png", "comm_matrix.png", "comm_matrix.json"} <= {each.name for each in folder.iterdir()}
    policy_bytes = 4 * (4 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2) + 16
    for i in range(2):
        own = folder / f"agent_{i}"
        assert list((own / "videos").glob("*.mp4"))
        steps, fractions = read_scalars(own, "charts/loss_fractions/comm_penalty")
        assert steps == [64 * k for k in range(1, 7)]
        assert max(fractions) < 1
        assert read_scalars(own, f"charts/kl_{i}_{1 - i}")[0] == [128, 256, 384]
        assert read_scalars(own, "exchange/received_bytes")[1] == [policy_bytes] * 4
        assert json.loads((own / "result.json").read_text())["mean_return"] == result["mean_returns"][i]
        model = load_checkpoint(own / "model.pt", "ppo_federated-model")
        fresh = fed.FederatedAgent(4, 2, False, 16)
        fresh.load_state_dict(model["agent"])
    with pytest.raises(FileExistsError, match="--resume continues that run"):
        fed.train(args)


def test_a_run_that_is_killed_resumes_bit_for_bit(tmp_path: Path, processes: list[ForkServerProcess]) -> None:
    settings = SMALL | {"total_timesteps": 64 * 20}
    fed.train(fed.Args(**settings, run_dir=tmp_path / "whole"))
    settings["run_dir"] = tmp_path / "cut"
    process = start(run_agent, None, settings, {}, str(tmp_path / "log"))
    processes.append(process)
    saved = tmp_path / "cut" / "agent_1" / "checkpoint.pt"
    wait_for(lambda: saved.exists() and load_checkpoint(saved, "ppo_federated")["round"] >= 3, "round 3")
    process.kill()
    process.join()
    time.sleep(1.1)  # TensorBoard orders files by the second they were started in
    assert load_checkpoint(saved, "ppo_federated")["round"] < 10
    fed.train(fed.Args(**settings, resume=True))
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


# A process an agent


def test_agents_in_processes_of_their_own_learn_the_same_numbers(
    tmp_path: Path, processes: list[ForkServerProcess]
) -> None:
    fed.train(small(run_dir=tmp_path / "one"))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = SMALL | {"run_dir": tmp_path / "two"}
    for rank in range(2):
        processes.append(start(run_agent, rank, settings, address, str(tmp_path / f"log{rank}")))
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    assert_same_runs(tmp_path / "one", tmp_path / "two")


def test_an_agent_killed_and_back_in_time_changes_nothing(tmp_path: Path, processes: list[ForkServerProcess]) -> None:
    settings = SMALL | {"total_timesteps": 64 * 20}
    fed.train(fed.Args(**settings, run_dir=tmp_path / "whole"))
    port = free_port()
    processes.append(start(run_store, ("127.0.0.1", port)))
    settings |= {"run_dir": tmp_path / "cut", "exchange_store": f"127.0.0.1:{port}", "exchange_timeout": 80.0}
    first, second = (start(run_agent, rank, settings, {}, str(tmp_path / f"log{rank}")) for rank in range(2))
    processes += [first, second]
    saved = tmp_path / "cut" / "agent_1" / "checkpoint.pt"
    wait_for(lambda: saved.exists() and load_checkpoint(saved, "ppo_federated")["round"] >= 3, "round 3")
    second.kill()
    second.join()
    time.sleep(1.1)
    assert load_checkpoint(saved, "ppo_federated")["round"] < 10
    back = start(run_agent, 1, settings | {"resume": True}, {}, str(tmp_path / "log1"))
    processes.append(back)
    for process in (first, back):
        process.join(90)
        assert process.exitcode == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_the_others_go_on_without_a_dead_agent_and_take_it_back(
    tmp_path: Path, processes: list[ForkServerProcess]
) -> None:
    port = free_port()
    processes.append(start(run_store, ("127.0.0.1", port)))
    settings = SMALL | {
        "run_dir": tmp_path / "run", "exchange_store": f"127.0.0.1:{port}", "exchange_timeout": 2.0,
        "total_timesteps": 64 * 1200, "local_updates": 1, "update_epochs": 1,
    }  # fmt: skip
    first, second = (start(run_agent, rank, settings, {}, str(tmp_path / f"log{rank}")) for rank in range(2))
    processes += [first, second]
    saved = tmp_path / "run" / "agent_1" / "checkpoint.pt"
    wait_for(lambda: saved.exists() and load_checkpoint(saved, "ppo_federated")["round"] >= 3, "round 3")
    second.kill()
    second.join()
    said = tmp_path / "log0"
    wait_for(lambda: "going on with its policy of round" in said.read_text(), "the survivor's warning")
    processes.append(start(run_agent, 1, settings | {"resume": True}, {}, str(tmp_path / "log1")))
    wait_for(lambda: "agent 1 is back with its policy of round" in said.read_text(), "the return")
    assert first.is_alive()
    assert "agent 1 goes on at round" in (tmp_path / "log1").read_text()


def test_torchrun_starts_all_ranks_again_from_their_checkpoints(tmp_path: Path) -> None:
    """The real launcher; one rank is killed, and the run ends with the numbers of one that was left alone."""
    settings = SMALL | {"total_timesteps": 64 * 160}
    fed.train(fed.Args(**settings, run_dir=tmp_path / "whole"))
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
        "--master-port", str(free_port()), str(TRAINER), *flags, "--run-dir", str(tmp_path / "cut"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                          start_new_session=True) as launcher:  # fmt: skip
        try:
            own = psutil.Process(launcher.pid)

            def ranks() -> dict[str | None, psutil.Process]:
                return {child.environ().get("RANK"): child for child in own.children()}

            wait_for(lambda: {"0", "1"} <= ranks().keys(), "two ranks")
            victim = ranks()["1"]
            wait_for((tmp_path / "cut" / "agent_1" / "checkpoint.pt").exists, "a checkpoint")
            victim.kill()
            stdout, stderr = launcher.communicate(timeout=120)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, stderr
    assert "goes on at round" in stderr
    assert json.loads(stdout.splitlines()[-1].removeprefix("result "))["missing_agents"] == []
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


# The store


@pytest.fixture
def store() -> Iterator[tuple[str, int]]:
    kept = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", kept.port
    del kept


def member(address: tuple[str, int], agent: int, timeout_s: float = 30.0, config: str = "{}") -> Any:
    return fed.StoreExchange(address, False, agent, [1 - agent], config, timeout_s)


def vector(value: float) -> torch.Tensor:
    return torch.full((3,), value)


def test_an_agent_in_step_waits_for_the_round_it_needs(store: tuple[str, int]) -> None:
    a, b = member(store, 0), member(store, 1)
    for round_ in range(4):
        a.publish(0, round_, vector(round_))
        late = threading.Timer(0.05, b.publish, (1, round_, vector(10 + round_)))
        late.start()
        assert a.gather(0, round_, [1])[1].tolist() == [10 + round_] * 3
        late.join()
        assert b.gather(1, round_, [0])[0].tolist() == [round_] * 3
    assert a.wait_s > 0.1
    assert not a.behind
    assert a.sent_bytes == a.received_bytes == 4 * (16 + 12)


def test_a_neighbour_one_round_ahead_is_read_as_it_was(store: tuple[str, int]) -> None:
    a, b = member(store, 0), member(store, 1)
    for round_ in (4, 5):
        b.publish(1, round_, vector(round_))
    a.publish(0, 4, vector(0))
    assert a.gather(0, 4, [1])[1].tolist() == [4.0] * 3


def test_a_late_agent_is_left_behind_and_taken_back(store: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="ppo_federated")
    a, b = member(store, 0, timeout_s=0.1), member(store, 1, timeout_s=0.1)
    for exchange in (a, b):
        exchange.publish(exchange.agent, 0, vector(exchange.agent))
    assert a.gather(0, 0, [1])[1].tolist() == [1.0] * 3
    a.publish(0, 1, vector(0))
    assert a.gather(0, 1, [1])[1].tolist() == [1.0] * 3
    assert "agent 1 has not published round 1 within 0.1 s; going on with its policy of round 0" in caplog.text
    began = time.perf_counter()
    a.timeout_s = 30.0
    a.publish(0, 2, vector(0))
    assert a.gather(0, 2, [1])[1].tolist() == [1.0] * 3  # nobody waits for it any more
    assert time.perf_counter() - began < 10
    b.publish(1, 1, vector(5))
    a.publish(0, 3, vector(0))
    assert a.gather(0, 3, [1])[1].tolist() == [5.0] * 3
    assert "agent 1 is back with its policy of round 1, 2 behind" in caplog.text
    b.publish(1, 2, vector(5.5))
    a.publish(0, 4, vector(0))
    assert a.gather(0, 4, [1])[1].tolist() == [5.5] * 3
    assert caplog.text.count("is back") == 1
    b.publish(1, 5, vector(6))
    a.publish(0, 5, vector(0))
    assert a.gather(0, 5, [1])[1].tolist() == [6.0] * 3
    assert "agent 1 is in step again at round 5" in caplog.text
    # Whoever comes back from far behind takes the newest of the others.
    b.publish(1, 2, vector(7))
    assert b.gather(1, 2, [0])[0].tolist() == [0.0] * 3


def test_a_store_that_dies_does_not_end_learning(caplog: pytest.LogCaptureFixture, processes: list[Any]) -> None:
    caplog.set_level(logging.WARNING, logger="ppo_federated")
    address = ("127.0.0.1", free_port())
    keeper = start(run_store, address)
    processes.append(keeper)
    a = member(address, 0, timeout_s=30.0)
    a.publish(0, 0, vector(1))
    keeper.kill()
    keeper.join()
    for round_ in (1, 2, 3):
        a.publish(0, round_, vector(round_))
        assert a.gather(0, round_, [1]) == {}
    assert caplog.text.count("lost the store") == 1
    processes.append(start(run_store, address))
    b = member(address, 1, timeout_s=60.0)
    b.publish(1, 4, vector(9))
    a.publish(0, 4, vector(4))
    assert a.gather(0, 4, [1])[1].tolist() == [9.0] * 3
    assert "is back" in caplog.text


def test_another_run_cannot_mix_in(store: tuple[str, int]) -> None:
    a = member(store, 0, config='{"seed": 1}')
    with pytest.raises(ValueError, match="belongs to another run: seed is 1 there, 2 here"):
        member(store, 1, config='{"seed": 2}')
    a.publish(0, 0, vector(0))
    with pytest.raises(ValueError, match="holds policies that agent 0 published before"):
        member(store, 0, config='{"seed": 1}').start_afresh()


@pytest.mark.parametrize("blob", [b"", b"short", fed.pack(0, torch.zeros(4)), fed.pack(0, torch.zeros(3))[:-1]])
def test_a_malformed_policy_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"agent 7 published .* bytes: expected 28 for 3 parameters"):
        fed.unpack(blob, 3, 7)


def test_a_malformed_policy_in_the_store_is_passed_over(
    store: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = member(store, 0), member(store, 1)
    b.publish(1, 0, torch.zeros(4))
    a.publish(0, 0, vector(0))
    assert a.gather(0, 0, [1]) == {}
    assert "agent 1 published 32 bytes: expected 28" in caplog.text


def test_policies_survive_the_wire() -> None:
    values = torch.tensor([1.5, -0.0, 1e-42, float("inf")])
    round_, back = fed.unpack(fed.pack(12, values), 4, 0)
    assert round_ == 12
    assert back.numpy().tobytes() == values.numpy().tobytes()


@pytest.mark.parametrize("text", ["", "29500", "host:", "host:0", "host:70000", "host:x"])
def test_a_bad_store_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        fed.parse_address(text)


def test_ranks_must_be_as_many_as_agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="rank 0 of 3 processes for --n-agents 2: a process an agent, so start 2"):
        fed.train(small(run_dir=tmp_path / "run"))


def test_the_sweep_names_flags_that_exist() -> None:
    import yaml

    sweep = yaml.safe_load((ROOT / "sweeps" / "ppo_federated.yaml").read_text())
    names = set(vars(fed.Args()))
    for name in sweep["parameters"]:
        assert name.replace("-", "_") in names, name
