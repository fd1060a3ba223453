"""Short federated runs: arguments, what two runs must share, and agents as real processes, forked from a server."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from clustergym.common.checkpoints import load_checkpoint
from clustergym.training import read_scalars
from clustergym.training.federated.exchange import StoreLocation, serve_store
from trainers import load_trainer

fed = load_trainer("ppo_federated")
SMALL: dict[str, Any] = {
    "n_agents": 2, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2, "local_updates": 2,
    "total_timesteps": 64 * 6, "hidden": 16, "eval_episodes": 2, "seed": 3,
}  # fmt: skip


def small(**changes: Any) -> Any:
    return fed.Args(**(SMALL | changes))


def differences(a: Any, b: Any, where: str = "state") -> list[str]:
    """Paths at which two nested states differ, except for their arguments."""
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
    """Processes that are killed at the end of the test."""
    started: list[ForkServerProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def run_agent(rank: int | None, settings: dict[str, Any], environment: dict[str, str], log_file: str) -> None:
    """Train one rank of a federation in this process, or all agents if ``rank`` is None."""
    os.environ.update(environment)
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(settings["n_agents"]))
    fed.log.addHandler(logging.FileHandler(log_file))
    fed.log.setLevel(logging.INFO)
    fed.train(fed.Args(**settings))


def run_store(host: str, port: int) -> None:
    serve_store(StoreLocation(host, port))


def start(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["federation", "torch", "gymnasium", "torch.utils.tensorboard"])
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)
