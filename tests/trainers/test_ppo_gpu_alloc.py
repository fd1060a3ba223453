"""The allocation trainers: saved policies, resuming, arguments, and learning a task with a known optimum."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clustergym.cli import main
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig, state
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, play, play_rules
from clustergym.gpu_allocation.policy import AllocationPolicy, share_actions
from clustergym.training import CheckpointError, World, load_checkpoint, read_scalars, save_checkpoint
from trainers import FOLDER, in_two_processes, load_trainer

ppo = load_trainer("ppo_gpu_alloc")
lstm = load_trainer("ppo_lstm")
TRAINERS = {"ppo_gpu_alloc": ppo, "ppo_lstm": lstm}
SMALL: dict[str, Any] = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2, "eval_streams": 16}


def trained(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    module = TRAINERS[name]
    result: dict[str, Any] = module.train(module.Args(run_dir=folder, **(SMALL | options)), World())
    return result


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def learned(name: str, folder: Path) -> dict[str, Any]:
    state = load_checkpoint(folder / "checkpoint.pt", name)
    return {key: state[key] for key in ("agent", "optimizer", "rollouts", "rng", "iteration")}


@pytest.mark.parametrize(
    ("name", "env_id", "options"),
    [
        ("ppo_gpu_alloc", "GPUAllocationHistory-v0", {}),
        ("ppo_gpu_alloc", "GPUAllocationHistory-v0", {"levels": 7}),
        ("ppo_lstm", "GPUAllocation-v0", {}),
    ],
)
def test_loaded_checkpoint_gives_the_same_evaluation(
    name: str, env_id: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network, the checkpoint and the saved model give the same returns. Evaluation does not change statistics."""
    result = trained(name, tmp_path / "run", total_timesteps=1024, save_model=True, env_id=env_id, **options)
    assert result["mean_return"] == pytest.approx(128 * result["reward"])
    for file in ("checkpoint.pt", "model.pt"):
        policy = AllocationPolicy.load(tmp_path / "run" / file)
        assert policy.statistics is not None
        before = {key: value.clone() for key, value in policy.statistics.items()}
        batch = AllocationBatch(AllocationConfig(history="History" in env_id), 16)
        for _ in range(2):
            policy.reset()
            found = play(batch, lambda policy=policy, batch=batch: policy.act(batch.obs), seed=HELD_OUT_SEED)
            assert found["mean_return"] == result["mean_return"]
        assert same(before, policy.statistics)
    figures = tmp_path / "figures.json"
    flags = ["--env-id", env_id, "--checkpoint", str(tmp_path / "run" / "checkpoint.pt"), "--streams", "16"]
    assert main(["eval", "--task", "gpu-allocation", *flags, "--json", str(figures)]) == 0
    rows = {row["policy"]: row for row in json.loads(figures.read_text())["policies"]}
    row = rows[str(tmp_path / "run" / "checkpoint.pt")]
    assert (row["reward"], row["qos"]) == (result["reward"], result["qos"])
    assert row["gap_closed"] == result["gap_closed"]
    other = "GPUAllocation-v0" if "History" in env_id else "GPUAllocationHistory-v0"
    assert main(["eval", "--task", "gpu-allocation", "--env-id", other, *flags[2:]]) == 2
    assert "give the --env-id that it was trained on" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("name", TRAINERS)
def test_resume_after_sigkill_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The process is killed at a random moment after the first checkpoint, in the middle of episodes."""
    options = {"num_envs": 8, "num_steps": 24, "num_minibatches": 2, "update_epochs": 1, "eval_streams": 0}
    options |= {"total_timesteps": 8 * 24 * 150, "checkpoint_interval": 10}
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / f"{name}.py"), "--run-dir", str(killed), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 180
        while not (killed / "checkpoint.pt").exists():
            assert process.poll() is None, "the trainer ended before its first checkpoint"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert 10 <= learned(name, killed)["iteration"] < 150
    trained(name, killed, resume=True, **options)
    trained(name, tmp_path / "whole", **options)
    assert same(learned(name, killed), learned(name, tmp_path / "whole"))


@pytest.mark.parametrize("name", TRAINERS)
def test_two_ranks_share_statistics_and_resume_from_one_checkpoint(name: str, tmp_path: Path) -> None:
    """Rank 1 is interrupted after rank 0 has saved: both resume from the same iteration, bit for bit."""
    options = {"total_timesteps": 2 * 8 * 32 * 4, "checkpoint_interval": 2, "eval_streams": 0, "norm_reward": True}

    def whole(world: World, folder: Path) -> None:
        TRAINERS[name].train(TRAINERS[name].Args(run_dir=folder / "whole", **(SMALL | options)), world)

    def interrupted(world: World, folder: Path) -> None:
        module = TRAINERS[name]
        plain = module.Rollouts.collect
        calls = []

        def collect(self: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:  # in the iteration after the first checkpoint
                raise KeyboardInterrupt
            return plain(self)

        module.Rollouts.collect = collect
        with pytest.raises(KeyboardInterrupt):
            module.train(module.Args(run_dir=folder / "cut", **(SMALL | options)), world)
        module.Rollouts.collect = plain
        module.train(module.Args(run_dir=folder / "cut", resume=True, **(SMALL | options)), world)

    for work, folder in ((whole, "a"), (interrupted, "b")):
        (tmp_path / folder).mkdir()
        in_two_processes(work, tmp_path / folder)
    one, other = (load_checkpoint(tmp_path / each / "checkpoint.pt", name) for each in ("a/whole", "b/cut"))
    assert same({**one, "args": 0}, {**other, "args": 0})
    (rank_1,) = one["other_ranks"]
    assert same(one["rollouts"]["statistics"], rank_1["rollouts"]["statistics"])
    assert same(one["rollouts"]["scaler"]["statistics"], rank_1["rollouts"]["scaler"]["statistics"])
    assert not same(one["rollouts"]["envs"], rank_1["rollouts"]["envs"])
    # One row per environment and step, and the first observations.
    assert float(one["rollouts"]["statistics"]["count"]) == pytest.approx(2 * 8 * (32 * 4 + 1), abs=1e-3)


@pytest.mark.parametrize("name", TRAINERS)
def test_non_finite_loss_stops_training(name: str, tmp_path: Path) -> None:
    """A minibatch of one transition has no standard deviation, so its normalised advantage is NaN."""
    changes = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "total_timesteps": 4, "eval_streams": 0}
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--run-dir", str(tmp_path)]
    flags = [part for key, value in changes.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "training stopped: iteration 1: losses/policy_loss is nan" in done.stderr
    assert "result" not in done.stdout
    assert not (tmp_path / "checkpoint.pt").exists()


def test_compile_compiles_the_lstm_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled call is used in rollouts and in updates."""
    calls = []
    plain = lstm.Agent.compile

    def compile_(self: Any) -> None:
        plain(self, backend="eager")
        compiled = self._compiled_call_impl
        self._compiled_call_impl = lambda *inputs: (calls.append(len(inputs[0])), compiled(*inputs))[1]

    monkeypatch.setattr(lstm.Agent, "compile", compile_)
    trained("ppo_lstm", tmp_path, total_timesteps=256, eval_streams=0, compile=True)
    assert calls.count(1) == 32 + 1  # each step, and the value of the last observations
    assert calls.count(32) == 4  # 2 epochs of 2 minibatches


def test_resume_with_other_arguments_is_refused(tmp_path: Path) -> None:
    trained("ppo_gpu_alloc", tmp_path, total_timesteps=256, eval_streams=0)
    with pytest.raises(CheckpointError, match=r"learning_rate was 0.0\d*, now 0.5"):
        trained("ppo_gpu_alloc", tmp_path, total_timesteps=256, eval_streams=0, resume=True, learning_rate=0.5)


def test_plain_preset_sets_the_textbook_values(tmp_path: Path) -> None:
    """Five inputs, 64-64 ReLU, sigmoid mean, initial standard deviation 1, one batch of 32 for 4 epochs."""
    flags = ["--preset", "plain", "--run-dir", str(tmp_path), "--total-timesteps", "64", "--eval-streams", "4"]
    args = ppo.parse_args(ppo.Args, argv=flags, presets={"plain": ppo.PLAIN_PRESET})
    result = ppo.train(args, World())
    assert result["steps"] == 64
    state = load_checkpoint(tmp_path / "checkpoint.pt", "ppo_gpu_alloc")
    used = state["args"]
    expected = {
        "num_envs": 1, "num_steps": 32, "num_minibatches": 1, "update_epochs": 4, "learning_rate": 3e-4, "gamma": 0.99,
        "gae_lambda": 0.95, "clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "norm_obs": False,
        "norm_reward": False, "anneal_lr": False, "action_scale": 1.0, "final_std": None, "hidden": 64,
    }  # fmt: skip
    assert {key: used[key] for key in expected} == expected
    shapes = {key: tuple(value.shape) for key, value in state["agent"].items() if key.startswith("actor")}
    assert shapes == {
        "actor.0.weight": (64, 5), "actor.0.bias": (64,), "actor.2.weight": (64, 64), "actor.2.bias": (64,),
        "actor.4.weight": (2, 64), "actor.4.bias": (2,),
    }  # fmt: skip
    assert AllocationPolicy.load(tmp_path / "checkpoint.pt").statistics is None
    explicit = [*flags, "--num-envs", "256", "--env-id", "GPUAllocationHistory-v0", "--norm-adv"]
    args = ppo.parse_args(ppo.Args, argv=explicit, presets={"plain": ppo.PLAIN_PRESET})
    assert (args.num_envs, args.env_id, args.norm_adv) == (256, "GPUAllocationHistory-v0", True)
    assert (args.gamma, args.num_steps, args.total_timesteps) == (0.99, 32, 64)
    agent = ppo.Agent(5, 2, 64, 1.0)
    assert agent.std().tolist() == [1.0, 1.0]
    assert [type(layer).__name__ for layer in agent.actor] == ["Linear", "ReLU", "Linear", "ReLU", "Linear", "Sigmoid"]


def test_standard_deviation_follows_a_geometric_schedule(tmp_path: Path) -> None:
    """From 0.1 to 0.001 in the first 8 of 10 iterations. The learning rate decreases with it."""
    stds = [ppo.scheduled_std(0.1, 0.001, iteration, 10) for iteration in range(1, 11)]
    assert stds[0] == 0.1
    assert stds[4] == pytest.approx(0.01)
    assert stds[8] == stds[9] == pytest.approx(0.001)
    assert all(b / a == pytest.approx(100 ** (-1 / 8)) for a, b in pairwise(stds[:9]))
    options = {
        "total_timesteps": 2560,
        "action_scale": 0.1,
        "final_std": 0.001,
        "eval_streams": 0,
        "learning_rate": 0.01,
    }
    trained("ppo_gpu_alloc", tmp_path / "falls", **options)
    state = load_checkpoint(tmp_path / "falls" / "checkpoint.pt", "ppo_gpu_alloc")
    assert (0.1 * state["agent"]["log_std"].exp()).tolist() == pytest.approx([0.001, 0.001])
    assert read_scalars(tmp_path / "falls", "charts/std_cores")[1] == pytest.approx(stds)
    rates = [0.01 * (1 - i / 10) * (std / 0.1) ** 0.7 for i, std in enumerate(stds)]
    assert read_scalars(tmp_path / "falls", "charts/learning_rate")[1] == pytest.approx(rates)
    trained("ppo_gpu_alloc", tmp_path / "learned", **(options | {"final_std": None}))
    state = load_checkpoint(tmp_path / "learned" / "checkpoint.pt", "ppo_gpu_alloc")
    cores, memory = state["agent"]["log_std"].tolist()
    assert cores != memory
    with pytest.raises(ValueError, match="final_std is 0: expected more than 0, or None"):
        trained("ppo_gpu_alloc", tmp_path / "none", **(options | {"final_std": 0}))


def test_set_mean_sets_the_initial_mean() -> None:
    torch.manual_seed(0)
    agent = ppo.Agent(5)
    agent.set_mean(0.2)
    mean = agent.actor(torch.randn(64, 5))
    torch.testing.assert_close(mean, torch.full_like(mean, 0.2), atol=0.01, rtol=0)


@pytest.mark.parametrize("mean", [0.0, 1.0, float("nan")])
def test_initial_mean_outside_the_range_is_refused(mean: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"initial_mean is .*: expected a share between 0 and 1"):
        ppo.train(ppo.Args(initial_mean=mean, run_dir=tmp_path / "run"), World())
    assert not (tmp_path / "run").exists()


def test_learning_finds_a_known_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pod needs the same share of its request, so PPO must be better than every fixed rule."""
    config = AllocationConfig(node_spread=0.0, owner_spread=0.0, pod_spread=0.0, load=1.0)
    monkeypatch.setattr(ppo, "make_envs", lambda args, num_envs: AllocationBatch(config, num_envs))
    result = trained(
        "ppo_gpu_alloc", tmp_path, env_id="GPUAllocation-v0", total_timesteps=300_000, num_envs=64, num_minibatches=4,
        update_epochs=4, eval_streams=64, learning_rate=3e-3, gamma=0.0, checkpoint_interval=0,
    )  # fmt: skip
    rules = play_rules(AllocationBatch(config, 64), ["grant", "cut-0.8", "oracle"])
    assert result["reward"] > rules["cut-0.8"]["reward"] + 0.01
    assert result["qos"] > 0.95
    assert result["reward"] < rules["oracle"]["reward"]


def test_categorical_policy_finds_a_known_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same task: a few thousand pods are enough for a policy over shares of the request."""
    config = AllocationConfig(node_spread=0.0, owner_spread=0.0, pod_spread=0.0, load=1.0, idle_share=0.0)
    monkeypatch.setattr(ppo, "make_envs", lambda args, num_envs: AllocationBatch(config, num_envs))
    options = ppo.LEVELS_PRESET | {"num_envs": 64, "eval_streams": 64, "checkpoint_interval": 0}
    result = trained("ppo_gpu_alloc", tmp_path, env_id="GPUAllocation-v0", total_timesteps=65_536, **options)
    rules = play_rules(AllocationBatch(config, 64), ["grant", "cut-0.8", "oracle"])
    assert result["qos"] > 0.99
    assert rules["grant"]["reward"] < rules["cut-0.8"]["reward"] < result["reward"] < rules["oracle"]["reward"]
    assert ppo.gap_closed(result["reward"], rules) > 0.5


def test_shares_of_a_categorical_policy() -> None:
    """The highest level grants the request; the lowest 10 % of the cores and half of the memory."""
    batch = AllocationBatch(AllocationConfig(history=True), 32)
    batch.reset()
    for level, cores, memory in ((4, 1.0, 1.0), (2, 0.55, 0.75), (0, 0.1, 0.5)):
        asked = batch.obs[:, :2].clone()
        batch.step(share_actions(batch.obs, torch.full((32, 2), level), 5))
        given = batch.outcome[:, [state.OUTCOME_CORES, state.OUTCOME_MEMORY]]
        # Whole percents and MB, and at least 10 % and 512 MB.
        expected = (asked * torch.tensor([100.0, 32768.0]) * torch.tensor([cores, memory])).clamp(min=10.0)
        torch.testing.assert_close(given, expected, atol=0.51, rtol=0)


def test_categorical_policy_matches_torch_distributions() -> None:
    torch.manual_seed(0)
    agent = ppo.Agent(19, levels=7)
    torch.nn.init.normal_(agent.actor[4].weight)
    outputs = agent.actor(torch.randn(50, 19))
    both = torch.distributions.Categorical(logits=outputs.view(50, 2, 7))
    chosen = both.sample()
    logprobs, entropies = agent.evaluate_actions(outputs, chosen.float())
    torch.testing.assert_close(logprobs, both.log_prob(chosen).sum(1))
    torch.testing.assert_close(entropies, both.entropy().sum(1))


def test_copies_draw_from_different_parts_of_the_distribution() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    chosen = ppo.sample_levels(probabilities.log().expand(80_000, 2, 3), 4)
    for column, expected in enumerate(probabilities):
        for copy in range(4):  # each copy alone follows the policy
            found = torch.bincount(chosen[copy::4, column], minlength=3) / 20_000
            torch.testing.assert_close(found, expected, atol=0.015, rtol=0)
        # Of four copies, 4 p take a level if that is a whole number, else one more or less.
        counts = torch.nn.functional.one_hot(chosen[:, column].view(-1, 4), 3).sum(1)
        assert ((counts - 4 * expected).abs() < 1.0).all()
    # The order of the copies is not the same for cores and memory.
    assert not torch.equal(chosen[:4000, 0].argsort(), chosen[:4000, 1].argsort())
    alone = ppo.sample_levels(probabilities.log().expand(20_000, 2, 3), 1)
    torch.testing.assert_close(torch.bincount(alone[:, 0]) / 20_000, probabilities[0], atol=0.015, rtol=0)


def test_categorical_rollouts_follow_the_policy_and_penalise_missed_objectives() -> None:
    """Copies see the same pod. Returns are the simulator's rewards less the penalty; the chart is without it."""
    args = ppo.Args(num_envs=64, num_steps=64, copies=2, levels=3, qos_penalty=5.0, norm_obs=False)
    torch.manual_seed(0)
    agent = ppo.Agent(19, levels=3)
    torch.nn.init.constant_(agent.actor[4].weight, 0.0)
    with torch.no_grad():
        agent.actor[4].bias.copy_(torch.tensor([0.1, 0.2, 0.7, 0.5, 0.25, 0.25]).log())
    batch, charts = ppo.Rollouts(args, agent, torch.device("cpu"), seed=3).collect()
    for column, shares in enumerate(((0.1, 0.2, 0.7), (0.5, 0.25, 0.25))):
        found = torch.bincount(batch.actions[:, column].long(), minlength=3) / len(batch)
        torch.testing.assert_close(found, torch.tensor(shares), atol=0.03, rtol=0)
    obs = batch.obs.view(64, 32, 2, -1)
    assert torch.equal(obs[:, :, 0], obs[:, :, 1])
    alone = ppo.make_envs(args, 64)
    alone.seed(3 + torch.arange(64).numpy())
    alone.reset()
    alone.state["counters"][:, 0] = torch.arange(64) * 2
    alone.copy_first(2)
    _, rewards, _ = alone.step(share_actions(alone.obs, batch.actions[:64], 3))
    missed = 1.0 - alone.outcome[:, state.OUTCOME_MET]
    assert 0 < missed.sum() < 64
    difference = (rewards - 5.0 * missed).view(32, 2)
    expected = (difference - difference.mean(1, keepdim=True)).flatten().float()
    torch.testing.assert_close(batch.advantages[:64], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.returns[:64], difference.flatten().float(), atol=1e-5, rtol=0)
    assert charts["charts/reward"] > 0.0


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="levels is 1: expected 2 or more shares, or 0"):
        trained("ppo_gpu_alloc", tmp_path, levels=1, total_timesteps=256)
    with pytest.raises(ValueError, match="total_timesteps is 0: expected 1 or more"):
        trained("ppo_gpu_alloc", tmp_path, total_timesteps=0)
    with pytest.raises(TypeError, match="CartPole-v1 is not an allocation task"):
        trained("ppo_gpu_alloc", tmp_path, env_id="CartPole-v1", total_timesteps=256)
    with pytest.raises(ValueError, match="num_envs is 8 and num_minibatches is 3: num_envs must be a multiple"):
        trained("ppo_lstm", tmp_path, num_minibatches=3, total_timesteps=256)


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.pt", "ppo", {"agent": {}})
    with pytest.raises(CheckpointError, match=r"holds no allocation policy: .* belongs to 'ppo'"):
        AllocationPolicy.load(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="truncated or not a clustergym checkpoint"):
        AllocationPolicy.load(tmp_path / "y.pt")
    policy = AllocationPolicy(ppo.Agent(5).state_dict(), None)
    message = r"observations have shape \(3, 19\), but the policy was trained on \(…, 5\)"
    with pytest.raises(ValueError, match=message):
        policy.act(torch.zeros(3, 19))


def test_copies_decide_on_the_same_pod_and_share_a_baseline(tmp_path: Path) -> None:
    args = ppo.Args(num_envs=4, num_steps=16, copies=2, norm_obs=False)
    torch.manual_seed(0)
    agent = ppo.Agent(19)
    rollouts = ppo.Rollouts(args, agent, torch.device("cpu"), seed=3)
    batch, _ = rollouts.collect()
    obs, actions, advantages = (column.view(16, 2, 2, -1) for column in (batch.obs, batch.actions, batch.advantages))
    assert torch.equal(obs[:, :, 0], obs[:, :, 1])
    assert not torch.equal(obs[:, 0], obs[:, 1])
    # Opposite noise around the same mean, and advantages relative to the mean of the two.
    means = agent.actor(obs[:, :, 0])
    torch.testing.assert_close(actions.mean(2), means, atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.sum(2), torch.zeros(16, 2, 1), atol=1e-6, rtol=0)
    # The difference is that of the rewards in copies of one environment.
    alone = ppo.make_envs(args, 4)
    alone.seed(3 + torch.arange(4).numpy())
    alone.reset()
    alone.state["counters"][:, 0] = torch.arange(4) * 32
    alone.copy_first(2)
    _, rewards, _ = alone.step(ppo.clip_action(actions[0].flatten(0, 1)))
    torch.testing.assert_close(advantages[0, :, 0, 0], (rewards[::2] - rewards[1::2]).float() / 2, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", [{"copies": 3}, {"copies": 16}, {"copies": 2, "gamma": 0.5}])
def test_copies_that_cannot_work_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 1, or an even divisor of num_envs 8 with gamma 0"):
        trained("ppo_gpu_alloc", tmp_path, total_timesteps=256, **changes)
