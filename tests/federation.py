"""Agents of a federation as real processes: forked from a server that has imported everything once, so that they start fast."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "cleanrl_ppo" / "ppo_federated.py"


def load_trainer() -> ModuleType:
    """The trainer as a module; it is a script, not part of the package."""
    if "ppo_federated" not in sys.modules:
        spec = importlib.util.spec_from_file_location("ppo_federated", TRAINER)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["ppo_federated"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["ppo_federated"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def context() -> ForkServerContext:
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["federation", "torch", "gymnasium", "torch.utils.tensorboard"])
    return forkserver


def run_agent(rank: int | None, settings: dict[str, Any], environment: dict[str, str], log_file: str) -> None:
    """What a process does: one rank of a federation, or, without a rank, all agents."""
    os.environ.update(environment)
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(settings["n_agents"]))
    fed = load_trainer()
    fed.log.addHandler(logging.FileHandler(log_file))
    fed.log.setLevel(logging.INFO)
    fed.train(fed.Args(**settings))


def run_store(address: tuple[str, int]) -> None:
    load_trainer().serve_store(address)


def start(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    process = context().Process(target=target, args=args, daemon=True)
    process.start()
    return process


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)
