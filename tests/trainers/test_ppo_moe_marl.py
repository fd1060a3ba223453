"""The MoE trainer in a scripted task: weights against a slow reference, resuming, export, and a known optimum."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from clustergym.cli import main as cli_main
from clustergym.cli import offload_curve
from clustergym.common.checkpoints import CheckpointError, load_checkpoint
from clustergym.moe_offload import evaluation
from clustergym.training.args import FlagError
from clustergym.training.distributed import World
from clustergym.training.envs import evaluate, evaluation_seed
from clustergym.training.policies import Policy
from clustergym.training.runs import Run
from scripted_moe import DELAY, G, R, ScriptedMoE, Step, registered_script
from second_device import second_device
from trainers import load_trainer
from update_reference import Adam

marl = load_trainer("ppo_moe_marl")
BOTH = pytest.mark.parametrize("events", [False, True], ids=["reward", "events"])


@pytest.fixture(autouse=True)
def _script() -> Iterator[None]:
    with registered_script():
        yield


def small(folder: Path, events: bool = False, iterations: int = 1, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "env_id": "ScriptedMoE-v0", "env_args": (f"events={events}", "truncate=True"), "num_envs": 3, "num_steps": 8,
        "num_minibatches": 2, "update_epochs": 2, "hidden": 4, "eval_episodes": 0, "checkpoint_interval": 1,
        "save_model": False, "run_dir": folder, "gamma": 0.9, "gae_lambda": 0.8, "ent_coef": 0.02,
        "total_timesteps": 24 * iterations, "learning_rate": 0.05, "event_share": 0.7,
    }  # fmt: skip
    return marl.Args(**settings | changes)


def final_weights(folder: Path) -> dict[str, Tensor]:
    return load_checkpoint(folder / "checkpoint.pt", "ppo_moe_marl")["shared"]["agent"]


def example(num_envs: int = 7, seed: int = 3) -> dict[str, Tensor]:
    obs, _ = ScriptedMoE(num_envs).reset(seed=seed)
    return {key: torch.from_numpy(value) for key, value in obs.items()}


def make_agent(hidden: int = 8) -> Any:
    torch.manual_seed(0)
    return marl.Agent(ScriptedMoE(1).single_observation_space, hidden)


# The slow reference: one decision at a time, from the formulas


def row(obs: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value[None]) for key, value in obs.items()}


def log_probabilities(logits: Tensor, legal: np.ndarray) -> Tensor:
    """Over the legal choices only."""
    return logits[legal] - torch.log(torch.exp(logits[legal]).sum())


def decision(agent: Any, step: Step) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropies of the two choices of a step."""
    mask = step.obs["action_mask"] == 1
    expert_logits, gpu_logits = agent(row(step.obs))
    logprobs, entropies = [], []
    picked, node = step.action
    for logits, legal, choice in ((expert_logits[0], mask.any(1), picked), (gpu_logits[0, picked], mask[picked], node)):
        p = log_probabilities(logits, legal)
        logprobs.append(p[int(legal[:choice].sum())])
        entropies.append(-(p.exp() * p).sum())
    return logprobs, entropies


def expected_credit(agent: Any, step: Step) -> tuple[Tensor, Tensor]:
    """Of the picked row, and on average over the legal rows."""
    expert_logits, _, credits = agent.scores(row(step.obs))
    legal = (step.obs["action_mask"] == 1).any(1)
    return credits[0, step.action[0]], (log_probabilities(expert_logits[0], legal).exp() * credits[0, legal]).sum()


def masked_moments(numbers: list[float], counts: list[float], lost: int) -> tuple[float, float]:
    kept = [x for x, count in zip(numbers, counts, strict=True) if count]
    mean = sum(kept) / max(len(kept), 1 + lost)
    return mean, (sum((x - mean) ** 2 for x in kept) / max(len(kept) - lost, 1)) ** 0.5


class Reference:
    """Trains a copy of the initial agent on the journal of the environments."""

    def __init__(self, agent: Any, envs: ScriptedMoE, args: Any, orders: list[list[int]]) -> None:
        self.agent, self.envs, self.args, self.orders = agent, envs, args, orders
        self.adam = Adam(list(agent.parameters()), args.learning_rate)
        self.mean, self.std = 0.0, 1.0
        self.earned: list[float] = []

    def head(self, obs: dict[str, np.ndarray]) -> float:
        with torch.no_grad():
            return float(self.agent.get_value(row(obs)))

    def value(self, obs: dict[str, np.ndarray]) -> float:
        return self.head(obs) * self.std + self.mean

    def advantages(self, steps: list[Step], after: dict[str, np.ndarray]) -> list[float]:
        """Σ over later steps of the episode: (γλ)^(time until then) · δ."""
        a, out = self.args, []
        for start in range(len(steps)):
            total, weight = 0.0, 1.0
            for i, step in enumerate(steps[start:], start):
                shown = steps[i + 1].obs if i + 1 < len(steps) else after
                following = 0.0 if step.terminated else self.value(step.successor if step.truncated else shown)
                total += weight * (step.reward + a.gamma**step.elapsed * following - self.value(step.obs))
                weight *= (a.gamma * a.gae_lambda) ** step.elapsed
                if step.terminated or step.truncated:
                    break
            out.append(total)
        return out

    def credits(self, steps: list[Step]) -> list[float]:
        """What the picks turned out to be worth, where that is known before the roll-out and the episode end."""
        out = []
        for t, step in enumerate(steps):
            known = t + DELAY < len(steps) and not any(s.terminated or s.truncated for s in steps[t : t + DELAY])
            out.append(ScriptedMoE.judge(step.obs, *step.action)[0] if known and not step.no_op else 0.0)
        return out

    def iterate(self, iteration: int, events: bool) -> None:
        a, envs = self.args, self.envs
        length, iterations = a.num_steps, a.total_timesteps // (a.num_envs * a.num_steps)
        self.adam.learning_rate = a.learning_rate * (1 - (iteration - 1) / iterations)
        columns = []
        for env in range(a.num_envs):
            journal = envs.journal[env]
            steps = journal[(iteration - 1) * length : iteration * length]
            after = journal[iteration * length].obs if iteration < iterations else envs.now[env]
            credits = self.credits(steps) if events else [0.0] * length
            advantages = self.advantages(steps, after)
            column = []
            for t, step in enumerate(steps):
                head = self.head(step.obs)
                counts = [float(not step.no_op), float(step.obs["action_mask"][step.action[0]].sum() > 1)]
                gain = [advantages[t], advantages[t]]
                if events:
                    gain[0] = credits[t] - float(expected_credit(self.agent, step)[1].detach())
                old = [float(x.detach()) for x in decision(self.agent, step)[0]]
                target = advantages[t] + self.value(step.obs)
                column.append((step, head, counts, gain, target, credits[t] if events else None, old))
            columns.append(column)
        # Row t · num_envs + env of the batch.
        rows = [columns[env][t] for t in range(length) for env in range(a.num_envs)]
        self.earned += [r[5] for r in rows if r[2][0] and r[5]]
        returns = [r[4] for r in rows]
        mean, std = masked_moments(returns, [1.0] * len(returns), 0)
        new = 1.0 if iteration == 1 else 0.2
        self.mean += new * (mean - self.mean)
        self.std += new * (max(std, 1e-6) - self.std)
        for _ in range(a.update_epochs):
            order = self.orders.pop(0)
            size = len(rows) // a.num_minibatches
            assert sorted(order) == list(range(int(a.event_share * length) * a.num_envs if events else len(rows)))
            for start in range(0, len(order), size):
                self.step([rows[i] for i in order[start : start + size]])

    def step(self, rows: list[Any]) -> None:
        a, loss = self.args, torch.zeros(())
        moments = [masked_moments([r[3][i] for r in rows], [r[2][i] for r in rows], 1) for i in range(2)]
        for step, head, counts, gain, target, credit, old in rows:
            logprobs, entropies = decision(self.agent, step)
            for i in range(2):
                advantage = (gain[i] - moments[i][0]) / (moments[i][1] + 1e-8)
                ratio = torch.exp(logprobs[i] - old[i])
                clipped = torch.clamp(ratio, 1 - a.clip_coef, 1 + a.clip_coef)
                loss = loss - counts[i] * torch.minimum(ratio * advantage, clipped * advantage)
                loss = loss - a.ent_coef * entropies[i]
            value, target = self.agent.get_value(row(step.obs))[0], (target - self.mean) / self.std
            near = head + torch.clamp(value - head, -a.clip_coef, a.clip_coef)
            loss = loss + a.vf_coef * 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
            if credit is not None:
                error = expected_credit(self.agent, step)[0] - credit
                loss = loss + a.vf_coef * 0.5 * counts[0] * error**2
        parameters = self.adam.parameters
        gradients = torch.autograd.grad(loss / len(rows), parameters, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        norm = float(torch.sqrt(sum((g * g).sum() for g in gradients)))
        self.adam.step([g * min(1.0, a.max_grad_norm / (norm + 1e-6)) for g in gradients])


@BOTH
@pytest.mark.parametrize("iterations", [1, 2])
def test_weights_equal_the_slow_reference(
    events: bool, iterations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial, orders = [], []
    make, shuffle = marl.Agent, torch.randperm

    def make_and_keep(*args: Any) -> Any:
        agent = make(*args)
        initial.append(copy.deepcopy(agent))
        return agent

    def shuffle_and_keep(*args: Any, **kwargs: Any) -> Tensor:
        order = shuffle(*args, **kwargs)
        orders.append(order.tolist())
        return order

    monkeypatch.setattr(marl, "Agent", make_and_keep)
    monkeypatch.setattr(torch, "randperm", shuffle_and_keep)
    args = small(tmp_path, events, iterations, num_envs=6, total_timesteps=48 * iterations)
    marl.train(args)
    assert len(orders) == iterations * args.update_epochs
    reference = Reference(initial[0], ScriptedMoE.instances[0], args, orders)
    for iteration in range(1, iterations + 1):
        reference.iterate(iteration, events)
    weights = final_weights(tmp_path)
    for name, parameter in reference.agent.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=2e-5, rtol=1e-3, msg=lambda m, n=name: n + m)
    np.testing.assert_allclose(weights["value_mean"], reference.mean, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(weights["value_std"], reference.std, atol=1e-5, rtol=1e-4)
    journal = [step for each in ScriptedMoE.instances[0].journal for step in each]
    assert len(reference.earned) >= 2 * events
    assert any(step.no_op for step in journal)
    assert any(step.truncated for step in journal)
    assert any(step.terminated for step in journal)


# Runs


def assert_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int, **changes: Any) -> None:
    """A run that dies in the fourth of four iterations and resumes ends with the same weights and observations."""
    marl.train(small(tmp_path / "whole", iterations=4, checkpoint_interval=7, **changes))
    log = Run.log

    def crash(self: Run, *args: Any, **kwargs: Any) -> None:
        if self.iteration == 4:
            raise KeyboardInterrupt
        log(self, *args, **kwargs)

    args = small(tmp_path / "parts", iterations=4, checkpoint_interval=interval, **changes)
    monkeypatch.setattr(Run, "log", crash)
    with pytest.raises(KeyboardInterrupt):
        marl.train(args)
    monkeypatch.setattr(Run, "log", log)
    args.resume = True
    marl.train(args)
    one, other = (load_checkpoint(tmp_path / name / "checkpoint.pt", "ppo_moe_marl") for name in ("whole", "parts"))
    for name, tensor in one["shared"]["agent"].items():
        assert torch.equal(tensor, other["shared"]["agent"][name]), name
    for name, tensor in one["ranks"][0]["next_obs"].items():
        assert torch.equal(tensor, other["ranks"][0]["next_obs"][name]), name


@pytest.mark.parametrize("interval", [1, 2, 5])
@BOTH
def test_resumed_run_is_bit_identical(
    events: bool, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the interval between checkpoints: it does not change the training."""
    assert_resumes(tmp_path, monkeypatch, interval, events=events)


TASKS = {
    "MoEPlacement-v0": ("cluster=h800-2x4", "tokens_per_rank=8", "ops_per_layer=2"),
    "MoEOffload-v0": ("max_tokens=3",),
}


@pytest.mark.slow
@pytest.mark.parametrize("env_id", TASKS)
def test_both_tasks_train_resume_and_play(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smoke test of training; what it checks is that the real environments continue bit for bit."""
    changes = {"env_id": env_id, "env_args": TASKS[env_id], "save_model": True}
    assert_resumes(tmp_path, monkeypatch, 2, **changes)
    policy = Policy(tmp_path / "parts")
    args = small(tmp_path, **changes)
    envs = marl.make_envs(args, args.eval_args, 3)
    obs, _ = envs.reset(seed=1)
    for _ in range(20):
        actions = policy.act(obs)
        assert obs["action_mask"][np.arange(3), actions[:, 0], actions[:, 1]].all()
        obs = envs.step(actions)[0]
    envs.close()


def learned(folder: Path, events: bool, **changes: Any) -> dict[str, Any]:
    sizes = {"num_envs": 16, "num_steps": 32, "num_minibatches": 4, "update_epochs": 4, "hidden": 16}
    return marl.train(
        small(folder, events, learning_rate=5e-3, ent_coef=0.0, total_timesteps=16_384, **sizes, **changes)
    )


def best_return(seed: int, episodes: int) -> float:
    """Mean return of the best legal actions in the episodes of an evaluation."""
    envs = ScriptedMoE(episodes)
    envs.reset(seed=seed)
    returns, playing = np.zeros(episodes), np.ones(episodes, bool)
    while playing.any():
        actions = []
        for obs in envs.now:
            legal = [(i, j) for i, j in np.argwhere(obs["action_mask"]).tolist() if j != i % G]
            actions.append(max(legal, key=lambda pair, obs=obs: sum(ScriptedMoE.judge(obs, *pair))))
        _, rewards, terminations, truncations, _ = envs.step(np.array(actions))
        returns += rewards * playing
        playing &= ~(terminations | truncations)
    return float(returns.mean())


def test_the_optimum_is_learned(tmp_path: Path) -> None:
    """Random actions get 20 % of it."""
    result = learned(tmp_path, events=False, gamma=0.0, eval_episodes=64, eval_args=())
    assert result["mean_return"] > 0.9 * best_return(evaluation_seed(1), 64)


def test_rows_are_learned_from_events(tmp_path: Path) -> None:
    """The reward is that of the node only: without the events, 1 of 5 rows would be right."""
    learned(tmp_path, events=True)
    last = [step for journal in ScriptedMoE.instances[0].journal for step in journal[-32:] if not step.no_op]
    assert np.mean([ScriptedMoE.judge(step.obs, *step.action)[0] for step in last]) > 0.8


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@BOTH
def test_training_on_another_device_gives_the_same_weights(
    events: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marl.train(small(tmp_path / "cpu", events, 2))
    with second_device() as device:
        monkeypatch.setattr(marl, "init_distributed", lambda *_: World(device=device))
        marl.train(small(tmp_path / "device", events, 2))
    one, other = final_weights(tmp_path / "cpu"), final_weights(tmp_path / "device")
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)


def test_step_of_a_roll_out_waits_once_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the actions are needed by the environments."""
    transfers, plain = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (transfers.append(self.shape), plain(self))[1])
    marl.train(small(tmp_path, True, 2, env_args=("events=True",), checkpoint_interval=0))
    assert transfers == [(3, 2)] * 16


def train_one_rank(folder: Path, rank: int) -> None:
    agents = []
    make = marl.Agent

    def make_and_keep(*args: Any) -> Any:
        agents.append(make(*args))
        return agents[-1]

    marl.Agent = make_and_keep
    marl.train(small(folder / "run", True, iterations=4))
    first = torch.from_numpy(ScriptedMoE.instances[0].journal[0][0].obs["experts"])
    torch.save({"weights": agents[0].state_dict(), "first": first}, folder / f"{rank}.pt")


@pytest.mark.slow
def test_ranks_learn_the_same_weights_from_different_experience(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                train_one_rank(tmp_path, rank)
            finally:
                os._exit(not (tmp_path / f"{rank}.pt").exists())
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert not torch.equal(one["first"], other["first"])
    for name, tensor in one["weights"].items():
        assert torch.equal(tensor, other["weights"][name]), name
    assert len(load_checkpoint(tmp_path / "run" / "checkpoint.pt", "ppo_moe_marl")["ranks"]) == 2


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="--env-args events: expected name=value"):
        marl.train(small(tmp_path, env_args=("events",)))
    with pytest.raises(
        FlagError, match=r"--env-id ScriptedMoE-v0 with .*'slots': 0.3.*unexpected keyword argument 'slots'"
    ):
        marl.train(small(tmp_path, env_args=("slots=0.3",)))
    with pytest.raises(gym.error.Error, match="CartPole-v1 has observations Box"):
        marl.make_envs(small(tmp_path, env_id="CartPole-v1", env_args=()), (), 2, tmp_path / "videos")


def test_start_takes_the_actors_and_no_critic(tmp_path: Path) -> None:
    marl.train(small(tmp_path / "first", save_model=True))
    marl.train(small(tmp_path / "second", start=tmp_path / "first", learning_rate=0.0, seed=2))
    first, second = final_weights(tmp_path / "first"), final_weights(tmp_path / "second")
    for name, weight in second.items():
        assert torch.equal(weight, first[name]) != name.startswith(("critic.", "value_")), name
    assert not second["critic.2.weight"].any()


def test_unsuitable_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=r"--start .*: expected a folder that --save-model wrote.*: No such file"):
        marl.train(small(tmp_path / "run", start=tmp_path))
    marl.train(small(tmp_path, save_model=True))
    with pytest.raises(FlagError, match=r"--start .*, with the same --hidden and --predictor: .*size mismatch"):
        marl.train(small(tmp_path / "run", start=tmp_path, hidden=6))


# Networks


def test_scores_do_not_depend_on_the_order_of_experts_and_gpus() -> None:
    agent, obs = make_agent(), example()
    rows, gpus = torch.randperm(R), torch.randperm(G)
    nodes = torch.cat([kind * G + gpus for kind in range(3)])
    moved = {
        "experts": obs["experts"][:, rows],
        "gpus": obs["gpus"][:, nodes],
        "pairs": obs["pairs"][:, rows][:, :, gpus],
        "expert_graph": obs["expert_graph"][:, rows][:, :, rows],
        "gpu_graph": obs["gpu_graph"][:, gpus][:, :, gpus],
        "context": obs["context"],
        "action_mask": obs["action_mask"][:, rows][:, :, nodes],
    }
    for expected, found in zip(agent(obs), agent(moved), strict=True):
        expected = expected[:, rows] if expected.dim() == 2 else expected[:, rows][:, :, nodes]
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(agent.get_value(moved), agent.get_value(obs))


def test_every_part_of_the_observation_matters() -> None:
    agent, obs = make_agent(), example()
    for key in set(obs) - {"action_mask"}:
        changed = obs | {key: obs[key] + torch.rand_like(obs[key])}
        assert not torch.equal(agent(changed)[0], agent(obs)[0]), key


def test_invalid_actions_have_no_probability_and_no_gradient() -> None:
    agent, obs = make_agent(), example(200)
    expert_logits, gpu_logits = agent(obs)
    mask = obs["action_mask"] == 1
    assert expert_logits.softmax(-1)[~mask.any(-1)].sum() == 0
    legal_rows = mask.any(-1)
    assert gpu_logits[legal_rows].softmax(-1)[~mask[legal_rows]].sum() == 0
    actions, logprobs, *_ = agent.get_action(obs)
    assert mask[torch.arange(200), actions[:, 0], actions[:, 1]].all()
    _, again, *_ = agent.get_action(obs, actions)
    assert torch.equal(again, logprobs)
    best = agent.get_best_action(obs)
    joint = torch.where(legal_rows[..., None], gpu_logits.log_softmax(-1), -torch.inf)
    for i in range(200):
        assert best[i, 0] == expert_logits[i].argmax()
        assert best[i, 1] == joint[i, best[i, 0]].argmax()


def test_values_are_zero_at_first_and_do_not_train_the_actors() -> None:
    agent, obs = make_agent(), example()
    assert (agent.get_value(obs) == 0).all()
    torch.nn.init.normal_(agent.critic[-1].weight)
    agent.get_value(obs).sum().backward()
    touched = {name.split(".")[0] for name, each in agent.named_parameters() if each.grad is not None}
    assert touched == {"critic"}


def test_tasks_without_pair_features() -> None:
    space = ScriptedMoE(1).single_observation_space
    space.spaces["pairs"] = type(space["pairs"])(-1, 1, (R, G, 0))
    agent = marl.Agent(space, 8)
    obs = example()
    assert agent(obs | {"pairs": obs["pairs"][..., :0]})[1].shape == (7, R, 3 * G)


# The exported policy


def test_exported_policy_acts_like_the_agent(tmp_path: Path) -> None:
    marl.train(small(tmp_path, save_model=True))
    agent = make_agent(4)
    agent.load_state_dict(final_weights(tmp_path))
    policy = Policy(tmp_path)
    assert policy.about["env_id"] == "ScriptedMoE-v0"
    assert policy.about["env_args"]["truncate"] is True
    for batch in (1, 7, 50):
        obs = example(batch, seed=batch)
        arrays = {key: value.numpy() for key, value in obs.items()}
        with torch.no_grad():
            for found, expected in zip(policy.logits(arrays), agent(obs), strict=True):
                np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
            assert policy.act(arrays).tolist() == agent.get_best_action(obs).tolist()
    single = {key: value[0] for key, value in arrays.items()}
    assert policy.act(single).tolist() == policy.act(arrays)[0].tolist()
    with pytest.raises(ValueError, match=r"reads context of shape \(2,\) .* trained in ScriptedMoE-v0"):
        policy.act(arrays | {"context": arrays["context"][:, :1]})


def test_a_file_that_is_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no policy at"):
        Policy(tmp_path)
    (tmp_path / "policy.onnx").write_bytes(b"not a program")
    with pytest.raises(CheckpointError, match="is not a policy"):
        Policy(tmp_path)


@pytest.mark.slow
def test_the_learning_curve_is_that_of_the_evaluated_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last point of ``offload curve`` is the stall of the exported policy on the evaluated episodes.

    The environments have the seeds of the evaluation, because rows with equal features are chosen by their order.
    """
    options = ("max_tokens=4", "slots=0.5")
    args = small(tmp_path, env_id="MoEOffload-v0", env_args=options, save_model=True, eval_episodes=5)
    marl.train(args)
    drawn: list[Any] = []
    monkeypatch.setattr(offload_curve, "plot_curve", lambda *a: drawn.append(a))
    assert cli_main(["offload", "curve", str(tmp_path), "--policy", "lru", "--tune-tokens", "200"]) == 0
    steps, stall, levels, *_ = drawn[0]
    policy, make = Policy(tmp_path), partial(marl.make_envs, args, args.eval_args)
    returns = evaluate(make, lambda obs, infos: policy.act(obs), 5, args.seed)
    load_ms, tokens = 13.2 / 50, 5 * 4
    assert len(steps) == len(stall)
    assert stall[-1] == pytest.approx(-sum(returns) * load_ms / tokens, rel=1e-5)
    _, infos = make(5).reset(seed=evaluation_seed(args.seed))
    _, _, episodes = offload_curve.evaluations_of(tmp_path, evaluation.Player.of(policy))
    assert episodes.tolist() == infos["group"].tolist()
    assert list(levels) == ["lru"]
