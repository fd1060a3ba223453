"""Run independent pieces of work on this machine or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from clustergym.common.extras import require

Item = TypeVar("Item")
Answer = TypeVar("Answer")
RETRIES = 5
"""Times that Ray starts a piece of work again after a host or process was lost."""


class Executor(Protocol):
    """Calls a function on every item, in any order."""

    def run(self, function: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[tuple[int, Answer]]:
        """(index of the item, answer), as they finish."""


@dataclass(frozen=True)
class LocalExecutor:
    """Runs items one after the other, or in ``jobs`` processes."""

    jobs: int = 1

    def run(self, function: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[tuple[int, Answer]]:
        if self.jobs == 1:
            yield from ((i, function(item)) for i, item in enumerate(items))
            return
        with ProcessPoolExecutor(self.jobs, get_context("spawn")) as pool:
            futures = {pool.submit(function, item): i for i, item in enumerate(items)}
            for future in as_completed(futures):
                yield futures[future], future.result()


def connect_ray(address: str | None) -> Any:
    """The module ``ray``, connected to a cluster. Without an address, Ray is started on this machine."""
    ray = require("ray", "ray")
    if not ray.is_initialized():
        # Workers must find this checkout if clustergym is not installed.
        environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="warning")
    return ray


@dataclass(frozen=True)
class RayExecutor:
    """Runs items as Ray tasks, one CPU each. Ray starts an item again if its host is lost."""

    address: str | None = None

    def run(self, function: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[tuple[int, Answer]]:
        ray = connect_ray(self.address)
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(function)
        waiting = {remote.remote(item): i for i, item in enumerate(items)}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            for reference in done:
                yield waiting.pop(reference), ray.get(reference)


def make_executor(name: str, jobs: int = 1, address: str | None = None) -> Executor:
    """An executor by name: ``local`` or ``ray``."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}: expected at least 1")
    if name == "ray":
        return RayExecutor(address)
    if address is not None:
        raise ValueError(f"--address {address} is for --executor ray, found --executor {name}")
    return LocalExecutor(jobs)
