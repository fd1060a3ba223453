"""The agent, simulated pods and the status page on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from clustergym.agent.traffic import SimulatedNode

RUNNING = 10
"""Pods that run at the same time."""
SCRIPT_NAME = "ppo_gpu_alloc_online.py"
PACKAGE = Path(__file__).parents[1]


def find_script() -> Path:
    """The agent's program: in the checkout, or in the wheel."""
    places = [PACKAGE.parents[1] / "cleanrl_ppo" / SCRIPT_NAME, PACKAGE / "agent" / SCRIPT_NAME]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"{SCRIPT_NAME} was not found; looked at {', '.join(map(str, places))}")


@contextlib.contextmanager
def running_agent(store: Path, port: int, shadow: bool) -> Iterator[subprocess.Popen[bytes]]:
    """An agent in another process; its log is in the store."""
    store.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, find_script(), "--port", port, "--store", store, "--init-checkpoint", "pretrained"]
    command += ["--no-telemetry"]
    command += ["--shadow"] if shadow else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    with (store / "agent.log").open("ab") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(
    client: httpx.Client, process: subprocess.Popen[bytes], store: Path, stop: threading.Event
) -> None:
    while not stop.wait(0.1):
        with contextlib.suppress(httpx.HTTPError):
            client.get("/healthz")
            return
        if process.poll() is not None:
            raise ValueError(f"the agent did not start: {(store / 'agent.log').read_text()[-500:]}")


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. An exception instead could leave the agent behind while it is started."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(store: Path, port: int, pods: int, pods_per_s: float, shadow: bool, console: Console) -> None:
    """Start the agent and send it pods until ``pods`` have run, or without end if it is 0."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (
        stop_signals() as stop,
        running_agent(store, port, shadow) as process,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        wait_until_ready(client, process, store, stop)
        console.print(f"status page: {url}/ui   metrics: {url}/metrics   Ctrl-C ends it")
        node, begin = SimulatedNode(1, 10**8, "quickstart"), time.monotonic()
        running: deque[dict[str, Any]] = deque()
        for i in range(pods) if pods else count():
            if stop.wait(max(0.0, begin + i / pods_per_s - time.monotonic())):
                return
            try:
                granted = client.post("/allocate", json=node.request()).raise_for_status().json()
                outcome, _ = node.apply(granted["cores"], granted["memory"])
                running.append(outcome | {"allocation_id": granted["allocation_id"]})
                if len(running) > RUNNING:
                    client.post("/feedback", json=running.popleft()).raise_for_status()
            except httpx.HTTPError:
                if stop.is_set():  # Ctrl-C in a terminal ends the agent, too
                    return
                raise
            if i % 200 == 199:
                console.print(f"{i + 1} pods, policy version {granted['policy_version']}")
        for feedback in running:
            client.post("/feedback", json=feedback).raise_for_status()
