"""Runs of the classic and allocation trainers: checkpoints, resuming, devices, compilation and processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

import savable
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.training.args import main, parse_args
from clustergym.training.runs import Run
from slow_training import BOX, TWO, scripted_environments
from trainers import FOLDER, in_two_processes, load_trainer

pytestmark = pytest.mark.usefixtures("reproducible")

SMALL: dict[str, Any] = {
    "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "hidden": 8, "eval_episodes": 0,
    "eval_streams": 0, "total_timesteps": 4 * 8 * 6, "checkpoint_interval": 2,
}  # fmt: skip
TASKS = {
    "ppo": savable.SAVABLE, "ppo_kl": savable.SAVABLE, "ppo_lstm": savable.SAVABLE,
    "ppo_continuous_action": "GPUAllocation-v0", "ppo_gpu_alloc": "GPUAllocationHistory-v0",
    "ppo_gpu_alloc_lstm": "GPUAllocation-v0",
}  # fmt: skip
"""Tasks whose environments can save their state."""
every_trainer = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(scope="module", autouse=True)
def _environments() -> Iterator[None]:
    with scripted_environments():
        savable.register()
        yield
        del gym.registry[savable.SAVABLE]


def make_args(name: str, folder: Path, **changes: Any) -> Any:
    """A short run. The flags that the trainer does not have are left out."""
    args_class = load_trainer(name).Args
    known = {field.name for field in fields(args_class)}
    flags = SMALL | {"env_id": TASKS[name], "run_dir": folder} | changes
    return args_class(**{key: value for key, value in flags.items() if key in known})


def train(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    result: dict[str, Any] = load_trainer(name).train(make_args(name, folder, **changes))
    return result


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or a != a)


def final(folder: Path) -> dict[str, Any]:
    """Everything that the last checkpoint holds, except for the arguments."""
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
    del state["args"]
    return state


def weights(folder: Path) -> dict[str, torch.Tensor]:
    agent: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)["state"]["agent"]
    return agent


# Checkpoints


@pytest.mark.parametrize(("name", "env_id"), [*TASKS.items(), ("ppo", "CartPole-v1"), ("ppo_continuous_action", BOX)])
def test_checkpoints_and_evaluations_have_no_influence(name: str, env_id: str, tmp_path: Path) -> None:
    """Also with environments that cannot save their state: they are not reset at a checkpoint."""
    found = []
    for number, changes in enumerate([
        {"checkpoint_interval": 0}, {"checkpoint_interval": 1}, {"checkpoint_interval": 5},
        {"eval_interval": 2, "eval_episodes": 2, "eval_streams": 2, "capture_video": "CartPole" in env_id},
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        train(name, folder, env_id=env_id, save_model=True, **changes)
        found.append(weights(folder))
        assert bool(list(folder.rglob("*.mp4"))) == changes.get("capture_video", False)
    assert all(same(each, found[0]) for each in found)


class Crash(BaseException):
    pass


def crashes(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A run that ends in iteration 5, one after the checkpoint of iteration 4."""
    log = Run.log

    def deadly(self: Run, *given: Any, **shown: Any) -> None:
        if self.iteration == 5:
            raise Crash
        log(self, *given, **shown)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", deadly)
        with pytest.raises(Crash):
            train(name, folder, **changes)
    assert final(folder)["iteration"] == 4


@every_trainer
def test_resumed_run_equals_one_without_interruption(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network, optimizer, statistics, environments, random numbers, and ppo_kl.py's coefficient."""
    changes = {"kl_target": 1e-4, "num_steps": 50, "total_timesteps": 4 * 50 * 6}
    train(name, tmp_path / "whole", **changes)
    crashes(name, tmp_path / "cut", monkeypatch, **changes)
    torch.manual_seed(99)
    train(name, tmp_path / "cut", resume=True, **changes)
    assert same(final(tmp_path / "cut"), final(tmp_path / "whole"))


@pytest.mark.parametrize(("name", "env_id"), [("ppo", TWO), ("ppo_lstm", TWO), ("ppo_continuous_action", BOX)])
def test_environments_that_cannot_save_their_state_begin_new_episodes(
    name: str, env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other seeds than those of the beginning."""
    seeds, plain = [], gym.vector.SyncVectorEnv.reset

    def reset(self: Any, *, seed: Any = None, options: Any = None) -> Any:
        seeds.append(seed)
        return plain(self, seed=seed, options=options)

    monkeypatch.setattr(gym.vector.SyncVectorEnv, "reset", reset)
    crashes(name, tmp_path, monkeypatch, env_id=env_id)
    assert final(tmp_path)["ranks"][0]["envs"] is None
    train(name, tmp_path, env_id=env_id, resume=True)
    assert final(tmp_path)["iteration"] == 6
    assert len(seeds) == len(set(seeds)) == 2


VICTIM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_runs_of_trainers as t
plain, saves = os.replace, []
def replace(source, target):
    saves.append(target)
    if len(saves) == 3:
        os.truncate(source, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    plain(source, target)
os.replace = replace
t.train("ppo_gpu_alloc", Path(sys.argv[2]))
"""


def test_process_killed_while_it_writes_a_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL with half of the third checkpoint written: the second one is whole."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    killed = subprocess.run(
        [sys.executable, "-c", VICTIM, here, str(tmp_path / "killed")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert final(tmp_path / "killed")["iteration"] == 4
    train("ppo_gpu_alloc", tmp_path / "killed", resume=True)
    train("ppo_gpu_alloc", tmp_path / "whole")
    assert same(final(tmp_path / "killed"), final(tmp_path / "whole"))


# Processes


@pytest.mark.parametrize("name", ["ppo_gpu_alloc", "ppo_gpu_alloc_lstm"])
def test_two_processes_train_one_network_and_resume(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and statistics are equal on both ranks, which see different pods. They resume bit for bit."""
    trainer = load_trainer(name)

    def work(world: Any, folder: Path) -> list[Any]:
        monkeypatch.setattr(trainer, "init_distributed", lambda *_: world)
        monkeypatch.setattr(type(world), "close", lambda self: None)
        agents: list[Any] = []
        plain = Run.checkpoint

        def checkpoint(self: Run, **state: Any) -> None:
            agents.append((state["agent"], state["statistics"], state["next_obs"]))
            plain(self, **state)

        monkeypatch.setattr(Run, "checkpoint", checkpoint)
        train(name, folder / "whole", total_timesteps=2 * 32 * 4)
        agent, statistics, obs = agents[-1]
        out = [dict(agent.state_dict()), statistics.state_dict(), obs]
        train(name, folder / "cut", total_timesteps=2 * 32 * 2, anneal_lr=False)
        train(name, folder / "cut", total_timesteps=2 * 32 * 4, anneal_lr=False, resume=True)
        train(name, folder / "again", total_timesteps=2 * 32 * 4, anneal_lr=False)
        return out

    one, other = in_two_processes(work, tmp_path)
    assert same(one[:2], other[:2])
    assert not torch.equal(one[2], other[2])
    assert one[1]["count"] == pytest.approx(2 * 4 * (4 * 8 + 1), abs=1e-3)
    assert same(final(tmp_path / "cut"), final(tmp_path / "again"))
    assert len(final(tmp_path / "cut")["ranks"]) == 2


@pytest.mark.parametrize("name", ["ppo", "ppo_lstm"])
def test_classic_trainers_refuse_torchrun(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"{name}.py runs in one process: start it with python"):
        train(name, tmp_path)


# Speed


@pytest.mark.parametrize("name", ["ppo", "ppo_kl", "ppo_continuous_action"])
@pytest.mark.parametrize("flag", ["compile", "cudagraphs"])
def test_roll_out_and_update_call_the_compiled_network(
    name: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, modes = [], []

    def compiled(function: Any, mode: str | None = None) -> Any:
        modes.append(mode)

        def call(*given: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return function(*given)

        return call

    train(name, tmp_path / "plain", save_model=True, total_timesteps=64)
    monkeypatch.setattr(torch, "compile", compiled)
    train(name, tmp_path / "compiled", save_model=True, total_timesteps=64, **{flag: True})
    assert modes == ["reduce-overhead" if flag == "cudagraphs" else None] * 2
    # Two iterations with 8 steps and 2 epochs of 2 minibatches. ppo_kl.py measures the KL after the update too.
    assert calls.count(False) == 2 * (8 + (name == "ppo_kl"))
    assert calls.count(True) == 2 * 2 * 2
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "compiled"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "ppo_continuous_action"])
def test_compiled_network_learns_the_same(name: str, tmp_path: Path) -> None:
    """With the real compiler, on the CPU, where CUDA graphs are ordinary compilation."""
    for number, changes in enumerate([{}, {"compile": True}, {"cudagraphs": True}]):
        train(name, tmp_path / str(number), save_model=True, total_timesteps=64, **changes)
    for number in ("1", "2"):
        for key, weight in weights(tmp_path / "0").items():
            torch.testing.assert_close(weights(tmp_path / number)[key], weight, rtol=1e-3, atol=1e-4)


@every_trainer
def test_step_of_a_roll_out_waits_once_for_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actions are the only thing that goes from the device to the environments."""
    calls, plain = [], torch.Tensor.cpu

    def cpu(self: torch.Tensor) -> torch.Tensor:
        calls.append(self.shape)
        return plain(self)

    for method in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, method)
        monkeypatch.setattr(
            torch.Tensor,
            method,
            lambda self, *given, original=original: (
                (calls.append(self.shape) if not torch.is_grad_enabled() and self.numel() > 4 else None),
                original(self, *given),
            )[1],
        )
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    train(name, tmp_path, total_timesteps=64, checkpoint_interval=0)
    assert len(calls) == 2 * 8


# Bad flags and help


BAD = {
    "--gamma": ("1.5", "-0.1", "nan", "abc"), "--gae-lambda": ("2",), "--clip-coef": ("-0.2", "0"), "--hidden": ("0",),
    "--num-envs": ("0", "-3"), "--num-steps": ("0",), "--num-minibatches": ("0", "3", "100000"),
    "--update-epochs": ("0",), "--learning-rate": ("0", "-1", "inf"), "--max-grad-norm": ("0",), "--ent-coef": ("-1",),
    "--vf-coef": ("-1",), "--total-timesteps": ("0",), "--seed": ("-1",), "--checkpoint-interval": ("-1",),
    "--eval-interval": ("-2",), "--target-kl": ("0",), "--eval-episodes": ("-1",), "--eval-streams": ("-1",),
    "--kl-target": ("0",), "--levels": ("1", "-2"), "--copies": ("0", "5"),
    "--qos-penalty": ("-1",), "--env-id": ("Nowhere-v0", "FrozenLake-v1x", "Pendulum-v1"), "--gama": ("0.9",),
}  # fmt: skip
ALL = ["ppo_atari", *TASKS]


@pytest.mark.parametrize("name", ALL)
def test_bad_flags_exit_with_one_line_that_names_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = load_trainer(name)
    known = {f"--{field.name}".replace("_", "-") for field in fields(trainer.Args)}
    for flag, values in BAD.items():
        for value in values if flag in known | {"--gama"} else ():
            if (flag, value) == ("--env-id", "Pendulum-v1") and name == "ppo_continuous_action":
                continue
            argv = ["--total-timesteps", "1", "--run-dir", str(tmp_path / "run"), flag, value]
            with pytest.raises(SystemExit) as stop:
                main(trainer.train, parse_args(trainer.Args, argv=argv, ranges=getattr(trainer, "RANGES", None)))
            assert stop.value.code == 2, (flag, value)
            lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("device ")]
            assert len(lines) == 1, (flag, value, lines)
            assert lines[0].startswith("error: "), lines
            assert flag in lines[0] or value.partition("-v")[0] in lines[0], lines
            assert not (tmp_path / "run").exists(), (flag, value)


def test_renamed_trainer_says_where_it_went() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "ppo_recurrent.py"), "--seed", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "ppo_lstm.py" in done.stderr


@pytest.mark.parametrize("name", ALL)
def test_help_is_short_and_explains_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = load_trainer(name)
    with pytest.raises(SystemExit):
        parse_args(trainer.Args, trainer.__doc__, ["--help"])
    shown = capsys.readouterr().out
    flags = set(re.findall(r"(?m)^\W*--([a-z-]+)", shown))
    names = {field.name.replace("_", "-") for field in fields(trainer.Args)}
    assert names <= flags | {"help"}
    assert len(names) <= 35


def test_presets_are_those_of_the_document(tmp_path: Path) -> None:
    """Five inputs, 64-64 ReLU, sigmoid mean, learned deviation from 1, one batch of 32 for 4 epochs, γ 0.99."""
    trainer = load_trainer("ppo_gpu_alloc")
    argv = ["--preset", "seed", "--run-dir", str(tmp_path), "--total-timesteps", "64", "--eval-streams", "2"]
    args = parse_args(trainer.Args, argv=argv, presets={"seed": trainer.SEED_PRESET})
    expected = {
        "num_envs": 1, "num_steps": 32, "num_minibatches": 1, "update_epochs": 4, "learning_rate": 3e-4, "gamma": 0.99,
        "gae_lambda": 0.95, "clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "norm_obs": False,
        "anneal_lr": False, "hidden": 64, "reward": "seed", "env_id": "GPUAllocation-v0",
    }  # fmt: skip
    assert {key: getattr(args, key) for key in expected} == expected
    trainer.train(args)
    agent = final(tmp_path)["shared"]["agent"]
    assert {key: tuple(each.shape) for key, each in agent.items() if "weight" in key and "actor" in key} == {
        "actor.0.weight": (64, 5), "actor.2.weight": (64, 64), "actor.4.weight": (2, 64),
    }  # fmt: skip
    assert agent["log_std"].abs().max() < 0.1
    assert agent["log_std"].abs().min() > 0
    policy = AllocationPolicy.load(tmp_path / "checkpoint.pt")
    obs = torch.rand(3, 5)
    network = trainer.Agent(5, 64, 0)
    network.load_state_dict(agent)
    torch.testing.assert_close(torch.from_numpy(policy.act(obs.numpy())), network.actor(obs))
    explicit = parse_args(trainer.Args, argv=[*argv, "--num-envs", "8"], presets={"seed": trainer.SEED_PRESET})
    assert (explicit.num_envs, explicit.gamma) == (8, 0.99)
    assert replace(explicit, num_envs=1) == args
