"""The agent, simulated pods and the status page on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
from rich.console import Console

from clustergym.agent.traffic import SimulatedNode

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
    command += ["--shadow"] if shadow else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    with (store / "agent.log").open("ab") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], store: Path) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):
            client.get("/healthz")
            return
        if process.poll() is not None:
            raise ValueError(f"the agent did not start: {(store / 'agent.log').read_text()[-500:]}")
        time.sleep(0.1)


def run(store: Path, port: int, pods: int, pods_per_s: float, shadow: bool, console: Console) -> None:
    """Start the agent and send it pods until ``pods`` have run, or without end if it is 0."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # SIGTERM, as from a service manager, ends the agent like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        running_agent(store, port, shadow) as process,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        wait_until_ready(client, process, store)
        console.print(f"status page: {url}/ui   metrics: {url}/metrics   Ctrl-C ends it")
        node, begin = SimulatedNode(1, 10**8, "quickstart"), time.monotonic()
        for i in range(pods) if pods else count():
            time.sleep(max(0.0, begin + i / pods_per_s - time.monotonic()))
            granted = client.post("/allocate", json=node.request()).raise_for_status().json()
            outcome, _ = node.apply(granted["cores"], granted["memory"])
            feedback = outcome | {"allocation_id": granted["allocation_id"]}
            client.post("/feedback", json=feedback).raise_for_status()
            if i % 200 == 199:
                console.print(f"{i + 1} pods, policy version {granted['policy_version']}")
