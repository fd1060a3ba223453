"""Runs agents of a federation as real processes, forked from a server that has already imported everything."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

from clustergym.federation.exchange import StoreLocation, serve_store
from trainers import load_trainer


def run_agent(rank: int | None, settings: dict[str, Any], environment: dict[str, str], log_file: str) -> None:
    """Train one rank of a federation in this process, or all agents if ``rank`` is None."""
    os.environ.update(environment)
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(settings["n_agents"]))
    fed = load_trainer("ppo_federated")
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
