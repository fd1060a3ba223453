"""Federated PPO: whole runs, resuming, and one process per agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import psutil
import pytest

from clustergym.common.checkpoints import load_checkpoint
from clustergym.training import read_scalars
from federation import SMALL, assert_same_runs, fed, run_agent, run_store, small, start, wait_for
from federation import processes as processes  # a fixture
from processes import free_port
from trainers import FOLDER

TRAINER = FOLDER / "ppo_federated.py"

# Runs


def test_run_without_matplotlib_has_no_summary_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    args = small(run_dir=tmp_path / "run", total_timesteps=128)
    with pytest.raises(ImportError, match=r"matplotlib is not installed: pip install 'clustergym\[render\]'"):
        fed.train(replace(args, plot_comm_matrix=True))
    assert not list(tmp_path.iterdir())
    assert fed.train(args)["summary"] is None
    assert "no summary.png: matplotlib.figure is not installed" in caplog.text


def test_run_writes_logs_plots_videos_and_results(tmp_path: Path) -> None:
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
        fresh = fed.FederatedAgent(4, 2, 16, continuous=False)
        fresh.load_state_dict(model["agent"])
    with pytest.raises(FileExistsError, match="add --resume to continue that run"):
        fed.train(args)


def test_killed_run_resumes_bit_for_bit(tmp_path: Path, processes: list[ForkServerProcess]) -> None:
    settings = SMALL | {"total_timesteps": 64 * 20}
    fed.train(fed.Args(**settings, run_dir=tmp_path / "whole"))
    settings["run_dir"] = tmp_path / "cut"
    process = start(run_agent, None, settings, {}, str(tmp_path / "log"))
    processes.append(process)
    saved = tmp_path / "cut" / "agent_1" / "checkpoint.pt"
    wait_for(lambda: saved.exists() and load_checkpoint(saved, "ppo_federated")["round"] >= 3, "round 3")
    process.kill()
    process.join()
    time.sleep(1.1)  # TensorBoard sorts log files by the second in which they were created
    assert load_checkpoint(saved, "ppo_federated")["round"] < 10
    fed.train(fed.Args(**settings, resume=True))
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


# One process per agent


def test_one_process_per_agent_gives_the_same_numbers(tmp_path: Path, processes: list[ForkServerProcess]) -> None:
    fed.train(small(run_dir=tmp_path / "one"))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = SMALL | {"run_dir": tmp_path / "two"}
    for rank in range(2):
        processes.append(start(run_agent, rank, settings, address, str(tmp_path / f"log{rank}")))
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    assert_same_runs(tmp_path / "one", tmp_path / "two")


def test_agent_that_resumes_before_the_timeout_changes_nothing(
    tmp_path: Path, processes: list[ForkServerProcess]
) -> None:
    settings = SMALL | {"total_timesteps": 64 * 20}
    fed.train(fed.Args(**settings, run_dir=tmp_path / "whole"))
    port = free_port()
    processes.append(start(run_store, "127.0.0.1", port))
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


def test_agents_continue_without_a_dead_agent_until_it_is_back(
    tmp_path: Path, processes: list[ForkServerProcess]
) -> None:
    port = free_port()
    processes.append(start(run_store, "127.0.0.1", port))
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
    wait_for(lambda: "continuing with its policy of round" in said.read_text(), "the survivor's warning")
    processes.append(start(run_agent, 1, settings | {"resume": True}, {}, str(tmp_path / "log1")))
    wait_for(lambda: "agent 1 is back with its policy of round" in said.read_text(), "the return")
    assert first.is_alive()
    assert "agent 1 resumes at round" in (tmp_path / "log1").read_text()


def test_torchrun_restarts_all_ranks_from_their_checkpoints(tmp_path: Path) -> None:
    """One rank is killed. The result is bit-identical to an undisturbed run in one process."""
    settings = SMALL | {"total_timesteps": 64 * 48}
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
                found = {}
                for child in own.children():
                    with suppress(psutil.Error):  # a helper process of torchrun that has just ended
                        found[child.environ().get("RANK")] = child
                return found

            wait_for(lambda: {"0", "1"} <= ranks().keys(), "two ranks")
            victim = ranks()["1"]
            wait_for((tmp_path / "cut" / "agent_1" / "checkpoint.pt").exists, "a checkpoint")
            victim.kill()
            stdout, stderr = launcher.communicate(timeout=120)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, stderr
    assert "resumes at round" in stderr
    assert json.loads(stdout.splitlines()[-1].removeprefix("result "))["missing_agents"] == []
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_one_rank_per_agent_is_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="rank 0 of 3 with --n-agents 2: start one process per agent"):
        fed.train(small(run_dir=tmp_path / "run"))


def test_rank_without_a_store_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK is set but MASTER_ADDR is not"):
        fed.train(small(run_dir=tmp_path / "run"))


def test_resume_takes_the_last_folder_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fed.train(small(total_timesteps=64, eval_episodes=0))
    (tmp_path / "runs" / "ppo_federated__CartPole-v1__3-2" / "agent_0").mkdir(parents=True)
    result = fed.train(small(total_timesteps=64, eval_episodes=0, resume=True))
    assert result["run_dir"] == Path("runs/ppo_federated__CartPole-v1__3")
