"""Details that one iteration does not show: initial weights, sampling, masks and evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from clustergym.training.envs import evaluation_seed
from slow_training import BOX, DISCRETE, MASKED, TWO, scripted_environments
from trainers import load_trainer

pytestmark = pytest.mark.usefixtures("reproducible")
CLASSIC = {"ppo": DISCRETE, "ppo_kl": DISCRETE, "ppo_continuous_action": BOX, "ppo_lstm": DISCRETE}


@pytest.fixture(scope="module", autouse=True)
def _environments() -> Iterator[None]:
    with scripted_environments():
        yield


def make_agent(name: str, env_id: str, *sizes: Any) -> Any:
    trainer = load_trainer(name)
    if "gpu_alloc" in name:
        return trainer.Agent(5, *sizes)
    return trainer.Agent(trainer.make_envs(env_id, 1), *sizes)


# Details 2, 13, 24, 26 and 32


@pytest.mark.parametrize("name", [*CLASSIC, "ppo_gpu_alloc", "ppo_gpu_alloc_lstm"])
def test_weights_are_orthogonal_with_the_gains_of_the_paper(name: str) -> None:
    """√2 in hidden layers, 0.01 before the policy, 1 before the value and in an LSTM. Biases are 0."""
    agent = make_agent(name, CLASSIC.get(name, ""), 16)
    heads = {"actor": 0.01, "critic": 1.0}
    layers = [(key, each) for key, each in agent.named_modules() if isinstance(each, nn.Linear)]
    last = {part: [each for key, each in layers if key.startswith(part)][-1] for part in heads}
    for _, layer in layers:
        std = next((heads[part] for part, head in last.items() if head is layer), 2**0.5)
        rows = layer.weight if len(layer.weight) <= layer.weight.shape[1] else layer.weight.T
        torch.testing.assert_close(rows @ rows.T, std**2 * torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert layer.bias.abs().max() == 0
    if hasattr(agent, "lstm"):
        for key, parameter in agent.lstm.named_parameters():
            if "bias" in key:
                assert parameter.abs().max() == 0
            else:
                torch.testing.assert_close(parameter.T @ parameter, torch.eye(16), atol=1e-5, rtol=0)
        assert not any(part.any() for part in agent.initial_state(3))
    else:
        value = agent.get_value(torch.randn(5, len(agent.actor[0].weight.T))).sum()
        value.backward()
        assert agent.actor[0].weight.grad is None, "the networks are separate"
    if hasattr(agent, "log_std"):
        assert agent.log_std.exp().tolist() == pytest.approx([0.2 if "lstm" in name else 1.0] * 2)


# Details 23, 25 and 37, and masks


def check_frequencies(probabilities: torch.Tensor, actions: torch.Tensor) -> None:
    """Within five standard deviations."""
    n = len(actions)
    found = torch.bincount(actions, minlength=len(probabilities)) / n
    assert ((found - probabilities).abs() <= 5 * (probabilities * (1 - probabilities) / n).sqrt()).all()


@pytest.mark.parametrize("name", ["ppo", "ppo_kl", "ppo_lstm"])
def test_valid_actions_are_sampled_with_their_probabilities(name: str) -> None:
    """Logits 0, 1, 2 and 9, of which the last is invalid; then two independent components."""
    agent, n = make_agent(name, MASKED), 4000
    bias = agent.actor[-1].bias if isinstance(agent.actor, nn.Sequential) else agent.actor.bias
    with torch.no_grad():
        bias.copy_(torch.tensor([0.0, 1.0, 2.0, 9.0]))
    mask = torch.tensor([True, True, True, False]).expand(n, 4)

    def ask(agent: Any, n: int, mask: torch.Tensor) -> Any:
        if name != "ppo_lstm":
            actions = agent.get_action(torch.zeros(n, 3), mask)
            return actions, *agent.evaluate_action(torch.zeros(n, 3), mask, actions)
        starts, state = torch.ones(1, n, dtype=torch.bool), agent.initial_state(n)
        out = agent.get_action_and_value(torch.zeros(1, n, 3), mask[None], starts, state)
        return [each[0] for each in out]

    actions, _, entropies, *_ = ask(agent, n, mask)
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    check_frequencies(torch.cat([expected, torch.zeros(1)]), actions)
    assert entropies[0].item() == pytest.approx(-float((expected * expected.log()).sum()))
    ask(agent, n, mask)[2].sum().backward()
    assert bias.grad is not None
    assert bias.grad[3] == 0
    agent = make_agent(name, TWO)
    bias = agent.actor[-1].bias if isinstance(agent.actor, nn.Sequential) else agent.actor.bias
    with torch.no_grad():
        bias.copy_(torch.tensor([0.3, 0.7, 0.6, 0.3, 0.1]).log())
    actions = ask(agent, n, torch.ones(n, 5, dtype=torch.bool))[0]
    joint = torch.outer(torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.3, 0.1])).flatten()
    check_frequencies(joint, 3 * actions[:, 0] + actions[:, 1])


def test_continuous_actions_are_independent_samples_around_the_mean() -> None:
    agent = make_agent("ppo_continuous_action", BOX)
    with torch.no_grad():
        agent.actor[-1].bias.copy_(torch.tensor([3.0, -1.0]))
        agent.log_std.copy_(torch.tensor([0.5, 2.0]).log())
        noise = agent.get_action(torch.zeros(4000, 3)) - torch.tensor([3.0, -1.0])
    noise /= torch.tensor([0.5, 2.0])
    assert (noise.mean(0).abs() < 5 / 4000**0.5).all()
    assert ((noise**2).mean(0) - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    assert abs(float((noise[:, 0] * noise[:, 1]).mean())) < 5 / 4000**0.5


def test_copies_draw_from_different_parts_of_the_distribution() -> None:
    agent = load_trainer("ppo_gpu_alloc").Agent(5, 8, 3, 4)
    shares = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    with torch.no_grad():
        agent.actor[-1].weight.zero_()
        agent.actor[-1].bias.copy_(shares.log().flatten())
        chosen = agent.get_action_and_value(torch.zeros(40_000, 5))[0]
    for column, expected in enumerate(shares):
        for number in range(4):
            check_frequencies(expected, chosen[number::4, column])
        # Of four copies, 4 p choose a share if that is a whole number, else one more or less.
        counts = nn.functional.one_hot(chosen[:, column].view(-1, 4), 3).sum(1)
        assert ((counts - 4 * expected).abs() < 1).all()
    assert not torch.equal(chosen[:4000, 0].argsort(), chosen[:4000, 1].argsort())


# Evaluations


@pytest.mark.parametrize("name", CLASSIC)
def test_evaluations_are_greedy_on_seeds_that_training_does_not_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step of an evaluation, all actions are the best ones of the saved network."""
    trainer, resets, first_actions = load_trainer(name), [], []
    plain = trainer.make_envs

    def make_envs(*given: Any) -> Any:
        envs = plain(*given)
        reset, step = envs.reset, envs.step

        def watched_reset(**options: Any) -> Any:
            resets.append((options["seed"], reset(**options)))
            first_actions.append(None)
            return resets[-1][1]

        def watched_step(actions: Any) -> Any:
            first_actions[-1] = actions if first_actions[-1] is None else first_actions[-1]
            return step(actions)

        envs.reset, envs.step = watched_reset, watched_step
        return envs

    monkeypatch.setattr(trainer, "make_envs", make_envs)
    args = trainer.Args(
        env_id=CLASSIC[name], num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=64, eval_episodes=6,
        eval_interval=1, checkpoint_interval=0, hidden=8, save_model=True, run_dir=tmp_path,
    )  # fmt: skip
    trainer.train(args)
    (training, _), *evaluations = resets
    assert [seed for seed, _ in evaluations] == [evaluation_seed(1)] * 2
    assert not {training + i for i in range(4)} & {evaluation_seed(1) + i for i in range(6)}
    state = torch.load(tmp_path / "model.pt", weights_only=True)["state"]
    agent = make_agent(name, CLASSIC[name], 8)
    agent.load_state_dict(state["agent"])
    obs = evaluations[-1][1][0]
    if name == "ppo_continuous_action":
        # The statistics of the training: 4 · (8 · 2 + 1) observations. Evaluations add none.
        assert state["obs_rms"]["count"] == pytest.approx(68, abs=1e-3)
        obs = (obs - state["obs_rms"]["mean"].numpy()) / np.sqrt(state["obs_rms"]["var"].numpy() + 1e-8)
    rows = torch.as_tensor(obs, dtype=torch.float32)
    with torch.no_grad():
        if name == "ppo_lstm":
            starts, memory = torch.ones(1, 6, dtype=torch.bool), agent.initial_state(6)
            best = agent.actor(agent.get_features(rows[None], starts, memory)[0])[0].argmax(-1)
        else:
            best = agent.actor(rows)
            best = best.clamp(torch.tensor([-2, 0]), torch.tensor([2, 3])) if "cont" in name else best.argmax(-1)
    np.testing.assert_allclose(first_actions[-1], best.numpy(), rtol=1e-5, atol=1e-6)


def test_memory_is_empty_at_the_start_of_every_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded episode and the next evaluation begin with a zero state, and it is kept within an episode."""
    trainer, seen = load_trainer("ppo_lstm"), []
    best = trainer.Agent.get_best_action

    def watched(self: Any, obs: Any, mask: Any, starts: Any, state: Any) -> Any:
        seen.append((obs.shape[1], bool(starts.all()), bool(state[0].any())))
        return best(self, obs, mask, starts, state)

    monkeypatch.setattr(trainer.Agent, "get_best_action", watched)
    args = trainer.Args(
        env_id=DISCRETE, num_envs=4, num_steps=8, total_timesteps=32, eval_episodes=1, capture_video=True, hidden=8,
        checkpoint_interval=0, run_dir=tmp_path,
    )  # fmt: skip
    trainer.train(args)
    fresh = [(starts, any_state) for _, starts, any_state in seen]
    assert fresh.count((True, False)) == 2
    assert all(each in ((True, False), (False, True)) for each in fresh)
    assert list(tmp_path.rglob("*.mp4"))


# Learning


class Recall(gym.Env[Any, Any]):
    """The first of 3 observations is a cue. The reward is 1 for naming it in the last step, so memory is needed."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def observe(self) -> np.ndarray:
        return np.array([2 * self.cue - 1 if self.count == 0 else 0, self.count / 3], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.count = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(self.count == 2 and action == self.cue)
        self.count += 1
        return self.observe(), reward, False, self.count == 3, {}


class Target(gym.Env[Any, Any]):
    """Episodes of 5 steps. The reward is −(distance of the action to the observation): the best return is 0."""

    observation_space = gym.spaces.Box(-100, 100, (2, 1))
    action_space = gym.spaces.Box(np.float32([[-1.0], [-2.0]]), np.float32([[1.0], [3.0]]))

    def observe(self) -> np.ndarray:
        self.goal = self.np_random.uniform(-0.8, 0.8, (2, 1)).astype(np.float32)
        return 10 + 5 * self.goal

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        reward = -float(np.abs(action - self.goal).sum())
        self.count += 1
        return self.observe(), reward, False, self.count == 5, {}


@pytest.mark.parametrize(
    ("name", "env_id", "flags", "wanted"),
    [
        # A tenth of the default run. Random actions have a return of about 22.
        ("ppo", "CartPole-v1", {"total_timesteps": 51_200}, 150),
        # Without memory, the best return is 0.5.
        ("ppo_lstm", "Recall-v0", {"num_envs": 16, "num_steps": 24, "total_timesteps": 16_000, "hidden": 16,
                                   "learning_rate": 1e-2}, 1.0),
        # The mean action 0 has 5 · 2 · −0.4 = −4.
        ("ppo_continuous_action", "Target-v0", {"num_steps": 32, "total_timesteps": 25_000, "learning_rate": 3e-3,
                                                "gamma": 0.0, "num_minibatches": 4, "update_epochs": 4}, -2),
    ],
)  # fmt: skip
def test_tasks_with_a_known_optimum_are_learned(
    name: str, env_id: str, flags: dict[str, Any], wanted: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym, "registry", dict(gym.registry))
    monkeypatch.setattr(gym.envs.registration, "registry", gym.registry)
    gym.register("Recall-v0", Recall)
    gym.register("Target-v0", Target)
    trainer = load_trainer(name)
    args = trainer.Args(env_id=env_id, run_dir=tmp_path, checkpoint_interval=0, **flags)
    assert trainer.train(args)["mean_return"] >= wanted


def test_best_share_of_a_request_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pod needs the same share of its request, so PPO must be better than every fixed rule."""
    trainer = load_trainer("ppo_gpu_alloc")
    task = {"node_spread": 0.0, "owner_spread": 0.0, "pod_spread": 0.0, "load": 1.0, "idle_share": 0.0}
    plain = trainer.make_vec
    monkeypatch.setattr(trainer, "make_vec", lambda *given, **options: plain(*given, **(options | task)))
    args = trainer.Args(
        env_id="GPUAllocation-v0", num_envs=64, total_timesteps=65_536, eval_streams=64, checkpoint_interval=0,
        run_dir=tmp_path,
    )  # fmt: skip
    result = trainer.train(args)
    reward = {name: rule["reward"] for name, rule in result["rules"].items()}
    assert result["qos"] > 0.99
    assert reward["grant"] < reward["cut-0.8"] < result["reward"] < reward["oracle"]
    assert result["gap_closed"] > 0.5


def test_other_actions_are_refused() -> None:
    for name, env_id in (("ppo", "Pendulum-v1"), ("ppo_continuous_action", "CartPole-v1"), ("ppo_lstm", "Pendulum-v1")):
        with pytest.raises(gym.error.Error, match=f"--env-id {env_id} has actions .*: expected"):
            load_trainer(name).make_envs(env_id, 1)
