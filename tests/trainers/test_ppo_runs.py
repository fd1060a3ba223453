"""Runs of ``ppo.py``: several processes, resuming, environments, evaluation and a task that is learned."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from clustergym.training import (
    CheckpointError,
    NonFiniteLoss,
    RunLogger,
    VectorEnvs,
    World,
    load_checkpoint,
    read_scalars,
    run_folder,
)
from corridor import CPU, Corridor, ppo, rollouts, small, trained
from trainers import in_two_processes

pytestmark = pytest.mark.usefixtures("corridors", "reproducible")


# Several processes


def test_gradients_are_averaged_over_processes(tmp_path: Path) -> None:
    def work(world: World, _: Path) -> list[Tensor]:
        layer = nn.Linear(2, 1)
        layer.weight.grad = torch.full((1, 2), 1.0 + world.rank)
        layer.bias.grad = torch.full((1,), 10.0 * world.rank)
        world.average_gradients(layer.parameters())
        return [layer.weight.grad, layer.bias.grad, torch.tensor(world.mean(3.0 * world.rank))]

    for weight, bias, mean in in_two_processes(work, tmp_path):
        assert weight.tolist() == [[1.5, 1.5]]
        assert bias.tolist() == [5.0]
        assert float(mean) == 1.5


def test_ranks_use_the_same_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder("a")
    folders = in_two_processes(lambda world, _: str(run_folder("a")), tmp_path)
    assert folders == ["runs/a-2", "runs/a-2"]


def test_two_processes_train_one_network(tmp_path: Path) -> None:
    """Both ranks end with the same weights, and these differ from those of a single rank."""

    def work(world: World, folder: Path) -> list[Tensor]:
        torch.set_num_threads(1)
        agents: list[nn.Module] = []
        make = ppo.make_optimizer
        ppo.make_optimizer = lambda agent, lr: (agents.append(agent), make(agent, lr))[1]
        ppo.train(small(env_id="CartPole-v1", run_dir=folder / "run", total_timesteps=96, target_kl=0.02), world)
        return [p.detach() for p in agents[0].parameters()]

    ours, theirs = in_two_processes(work, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    ppo.train(small(env_id="CartPole-v1", run_dir=tmp_path / "alone", total_timesteps=48), World())
    alone = load_checkpoint(tmp_path / "alone" / "checkpoint.pt", "ppo")["agent"]
    assert not torch.equal(alone["actor_head.weight"], ours[8])
    # Two ranks with 24 steps each make 48 steps per iteration.
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt", "ppo")["iteration"] == 2


# Resuming


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return bool(a == b)


def final(folder: Path) -> dict[str, Any]:
    state = load_checkpoint(folder / "checkpoint.pt", "ppo")
    del state["args"]
    return state


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Taxi-v4"])
def test_resume_after_an_exception_continues_bit_for_bit(
    env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = small(env_id=env_id, checkpoint_interval=2, total_timesteps=24 * 7, num_minibatches=2)
    whole = ppo.train(dataclasses.replace(args, run_dir=tmp_path / "whole", eval_episodes=2), World())

    log = RunLogger.scalars

    def dies(self: Any, values: dict[str, float], step: int) -> None:
        if step == 24 * 5:  # one iteration after the checkpoint of iteration 4
            raise KeyboardInterrupt
        log(self, values, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "scalars", dies)
        with pytest.raises(KeyboardInterrupt):
            ppo.train(dataclasses.replace(args, run_dir=tmp_path / "cut"), World())
    assert final(tmp_path / "cut")["iteration"] == 4
    torch.manual_seed(99)
    again = dataclasses.replace(args, run_dir=tmp_path / "cut", resume=True, eval_episodes=2)
    with pytest.raises(ValueError, match="eval_episodes was 0, now 2"):
        ppo.train(again, World())
    resumed = ppo.train(dataclasses.replace(again, eval_episodes=0), World())
    assert same_state(final(tmp_path / "cut"), final(tmp_path / "whole"))
    assert resumed["train_return_100"] == whole["train_return_100"]


KILLED: dict[str, Any] = {
    "num_envs": 4,
    "num_steps": 16,
    "total_timesteps": 64 * 30,
    "checkpoint_interval": 7,
    "update_epochs": 1,
    "eval_episodes": 0,
}

# Runs the trainer and sends it SIGKILL: between two checkpoints, or with half of a checkpoint written.
VICTIM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from clustergym.training import RunLogger, World
from trainers import in_two_processes, load_trainer
ppo = load_trainer("ppo")
saves = 0
def replace(source, target, plain=os.replace):
    global saves
    saves += 1
    if sys.argv[3] == "saving" and saves == 3:
        os.truncate(source, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    plain(source, target)
def scalars(self, values, step, plain=RunLogger.scalars):
    plain(self, values, step)
    if sys.argv[3] == "between" and step == 64 * 18:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace, RunLogger.scalars = replace, scalars
ppo.train(ppo.Args(run_dir=Path(sys.argv[2]), **eval(sys.argv[4])), World())
"""


@pytest.mark.parametrize("moment", ["between", "saving"])
def test_resume_after_sigkill_continues_bit_for_bit(moment: str, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    command = [
        sys.executable,
        "-c",
        VICTIM,
        str(Path(__file__).parents[1] / "support"),
        str(folder),
        moment,
        repr(KILLED),
    ]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert final(folder)["iteration"] == 14
    assert len(list(folder.glob(".checkpoint.pt?*"))) == (moment == "saving")
    ppo.train(ppo.Args(run_dir=folder, resume=True, **KILLED), World())
    ppo.train(ppo.Args(run_dir=tmp_path / "whole", **KILLED), World())
    assert same_state(final(folder), final(tmp_path / "whole"))
    # Entries that the killed process logged after its checkpoint are hidden: one value per step.
    steps, _ = read_scalars(folder, "losses/entropy")
    assert steps == [64 * i for i in range(1, 31)]


# Environments and evaluation


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Pendulum-v1 has action space Box.* needs Discrete"):
        ppo.make_envs("Pendulum-v1", 1)


def test_timesteps_are_rounded_up_to_whole_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path / "a", total_timesteps=25)["steps"] == 48
    assert "25 steps are not a multiple of 24, the steps of an iteration: training for 48" in capsys.readouterr().err
    assert trained(tmp_path / "b", total_timesteps=24)["steps"] == 24
    assert "multiple" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="total_timesteps is 0: expected 1 or more"):
        trained(tmp_path / "c", total_timesteps=0)


def test_run_can_be_extended_on_resume(tmp_path: Path) -> None:
    trained(tmp_path, total_timesteps=24 * 3, checkpoint_interval=2)
    assert trained(tmp_path, total_timesteps=24 * 5, checkpoint_interval=2, resume=True)["steps"] == 24 * 5
    assert final(tmp_path)["iteration"] == 5
    assert read_scalars(tmp_path, "losses/entropy")[0] == [24, 48, 72, 96, 120]
    with pytest.raises(CheckpointError, match="already has 120 steps: increase --total-timesteps"):
        trained(tmp_path, total_timesteps=24 * 4, checkpoint_interval=2, resume=True)


def test_evaluations_during_training_do_not_change_it(tmp_path: Path) -> None:
    options = {"total_timesteps": 24 * 5, "eval_episodes": 2}
    trained(tmp_path / "one", **options)
    trained(tmp_path / "other", eval_interval=2, **options)
    assert same_state(final(tmp_path / "one"), final(tmp_path / "other"))
    assert read_scalars(tmp_path / "other", "eval/mean_return")[0] == [48, 96, 120]


def successor(step: float, episode: float) -> tuple[bool, bool]:
    """(terminated, truncated) after a step of the corridor."""
    ended = step + 1 >= 2 + episode % 3
    return ended and episode % 2 == 0, ended and episode % 2 == 1


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_every_autoreset_mode_and_shifted_actions_give_the_right_returns(mode: str) -> None:
    """An action a of Discrete(3, start=5) is played as 5 + a; rewards and ends follow from the rules."""

    class Shifted(Corridor):
        action_space = gym.spaces.Discrete(3, start=5)

        def step(self, action: Any) -> Any:
            assert action in (5, 6, 7)
            return super().step(action - 5)

    envs = SyncVectorEnv([Shifted] * 2, autoreset_mode=AutoresetMode[mode])
    runner = rollouts(num_envs=2, num_steps=23, gamma=0.9, gae_lambda=1.0)
    runner.close()
    runner.envs = VectorEnvs(envs, 7, episodes=runner.episodes)
    batch, charts = runner.collect()
    lengths = [2 + episode % 3 for episode in range(1, 30)]
    assert charts["charts/episodic_length"] <= max(lengths)
    for (step, episode), action, value, target in zip(
        batch.obs.tolist(), batch.actions.tolist(), batch.values.tolist(), batch.returns.tolist(), strict=True
    ):
        terminated, truncated = successor(step, episode)
        if terminated or truncated:
            last = torch.tensor([[step + 1, episode]])
            bootstrap = 0.0 if terminated else float(runner.agent.get_value(last).detach())
            assert target == pytest.approx(1 + step + 10 * action + 0.9 * bootstrap, rel=1e-4), value
    assert len(batch) == 46 if mode != "NEXT_STEP" else len(batch) < 46


def test_non_finite_loss_stops_training(tmp_path: Path) -> None:
    """A minibatch of one transition has no standard deviation, so its normalised advantage is NaN."""
    with pytest.raises(NonFiniteLoss, match="iteration 1: losses/policy_loss is nan"):
        trained(tmp_path, num_minibatches=24)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_video_of_an_evaluation_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    options = {"env_id": "CartPole-v1", "total_timesteps": 72, "eval_episodes": 2}
    with_video = ppo.train(small(run_dir=tmp_path / "video", capture_video=True, eval_interval=2, **options), World())
    without = ppo.train(small(run_dir=tmp_path / "plain", **options), World())
    assert with_video["mean_return"] == without["mean_return"]
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.mp4"))
    assert files == [f"video/videos/step-{step}/rl-video-episode-0.mp4" for step in (48, 72)]


def test_evaluation_plays_whole_episodes_greedily() -> None:
    """The return of the greedy policy is known: 1 + step + 10 · action per step."""
    args = small(env_id="Corridor-v0", eval_episodes=5)
    agent = ppo.Agent(2, 3)
    with torch.no_grad():
        agent.actor_head.weight.zero_()
        agent.actor_head.bias.copy_(torch.tensor([0.0, 0.1, 0.0]))
    returns = ppo.evaluate(agent, args, CPU)
    possible = {sum(11.0 + step for step in range(length)) for length in (2, 3, 4)}
    assert len(returns) == 5
    assert set(returns) <= possible


def test_cartpole_is_learned(tmp_path: Path) -> None:
    """A tenth of the default run is enough for a return above 150; a random policy has about 22."""
    args = ppo.Args(run_dir=tmp_path, total_timesteps=51_200, eval_episodes=16, checkpoint_interval=0)
    assert ppo.train(args, World())["mean_return"] > 150
