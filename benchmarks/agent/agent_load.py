"""Load test of the allocation agent: 64 connections send /allocate and /feedback for 30 s, beside a minimal server.

The minimal server is FastAPI with the same two paths and bodies that stores nothing and decides nothing, in the same
HTTP server with the same number of processes: what remains if the agent costs nothing.

The agent with learning is measured first, then the agent with --explore off, which has no learner process. Each starts
with an empty store on loopback. Every request is durable before it is answered. Prints a table and writes JSON.

    python benchmarks/agent/agent_load.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Load, agent_server, free_port, run_load


@dataclass
class Args:
    connections: int = 64
    """Number of parallel connections."""
    seconds: float = 30.0
    """Seconds per measurement."""
    rounds: int = 1
    """Number of measurements of each agent. The table shows means, and the worst of each high percentile."""
    warmup: float = 2.0
    """Seconds of load before each measurement."""
    output: Path = Path("runs/agent_load.json")
    """JSON file for the results."""


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.softirq + times.irq)


def own_s(pid: int) -> float:
    """CPU seconds of this process, the agent and its learner process."""
    tree = [psutil.Process(), psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in tree)


def measure(args: Args, learning: bool, store: Path) -> dict[str, Any]:
    """Results of one measurement."""
    with agent_server(store, "--explore", "all" if learning else "off") as server:
        # The learner has a low priority and would not even start under full load: with pauses, until its first update.
        until = time.monotonic() + 60.0
        while learning and not server.metrics()["clustergym_policy_version"] and time.monotonic() < until:
            asyncio.run(run_load(server.port, args.connections, 2.0, seed=1, pause_s=0.1))
        asyncio.run(run_load(server.port, args.connections, args.warmup, seed=1))
        before = server.metrics()
        busy, own = busy_s(), own_s(server.process.pid)
        load = asyncio.run(run_load(server.port, args.connections, args.seconds, seed=2))
        # CPU cores that other programs used during the measurement.
        others = (busy_s() - busy - own_s(server.process.pid) + own) / load.elapsed_s
        after = server.metrics()
    updates = after["clustergym_policy_version"] - before["clustergym_policy_version"]
    if learning and not updates:
        raise RuntimeError("no update ran during the measurement, so the effect of learning was not measured")
    counted = 'clustergym_feedback_total{status="accepted"}'
    if after[counted] - before[counted] != len(load.accepted):
        raise RuntimeError(
            f"{len(load.accepted)} acknowledged, {after[counted] - before[counted]:g} counted by the agent"
        )
    return summarise(load) | {"updates": updates, "cores_used_by_others": others}


HELLO = """
import sys
import uvicorn
from fastapi import FastAPI
from clustergym.kubernetes.messages import AllocateRequest, FeedbackRequest

app = FastAPI()

@app.post("/allocate")
async def allocate(request: AllocateRequest):
    return {"allocation_id": "1-" + "0" * 32, "cores": request.cores, "memory": request.memory, "policy_version": 0}

@app.post("/feedback")
async def feedback(request: FeedbackRequest):
    return {"status": "accepted", "reward": 1.0}

uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="error", http="h11")
"""


def measure_hello(args: Args) -> dict[str, Any]:
    """The same load on the minimal server."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", HELLO, str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if time.monotonic() > deadline:
                raise RuntimeError("the minimal server did not start")
            time.sleep(0.1)
        asyncio.run(run_load(port, args.connections, args.warmup, seed=1))
        busy, own = busy_s(), own_s(process.pid)
        load = asyncio.run(run_load(port, args.connections, args.seconds, seed=2))
        others = (busy_s() - busy - own_s(process.pid) + own) / load.elapsed_s
    finally:
        process.kill()
        process.wait()
    return summarise(load) | {"updates": 0, "cores_used_by_others": others}


def summarise(load: Load) -> dict[str, Any]:
    """Rate, errors and percentiles."""
    every = np.array(load.latencies_s["/allocate"] + load.latencies_s["/feedback"])
    figures: dict[str, Any] = {"requests": len(every), "errors": len(load.errors)}
    figures["requests_per_s"] = len(every) / load.elapsed_s
    for path, values in (("all", every), *((p, np.array(v)) for p, v in load.latencies_s.items())):
        for q in (50, 99, 99.9, 100):
            figures[f"{path} p{q:g} ms"] = 1e3 * float(np.percentile(values, q))
    return figures | {"first_errors": load.errors[:3]}


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    rows: dict[str, list[dict[str, Any]]] = {"hello world": [], "learning": [], "not learning": []}
    for i in range(args.rounds):
        for name, found in rows.items():
            if name == "hello world":
                found.append(measure_hello(args))
                continue
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(args, name == "learning", Path(folder) / f"store-{i}"))
    table = Table(title=f"{args.connections} connections, {args.seconds:g} s, {args.rounds} round(s)")
    columns = ["requests/s", "errors", "updates", "p50 ms", "p99 ms", "p99.9 ms", "largest ms", "cores used by others"]
    for column in ["", *columns]:
        table.add_column(column, justify="right" if column else "left")
    for name, found in rows.items():
        table.add_row(
            name,
            f"{np.mean([f['requests_per_s'] for f in found]):.0f}",
            str(sum(f["errors"] for f in found)),
            f"{np.mean([f['updates'] for f in found]):.0f}",
            f"{np.mean([f['all p50 ms'] for f in found]):.1f}",
            *(f"{max(f[f'all p{q} ms'] for f in found):.1f}" for q in ("99", "99.9", "100")),
            f"{np.mean([f['cores_used_by_others'] for f in found]):.2f}",
        )
    console.print(table)
    for name in ("learning", "not learning"):
        each = [
            f"{agent['requests_per_s'] / hello['requests_per_s']:.2f}"
            for agent, hello in zip(rows[name], rows["hello world"], strict=True)
        ]
        console.print(f"{name}: {', '.join(each)} of the requests per second of hello world, round by round")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "command": shlex.join(sys.argv),
        "connections": args.connections,
        "seconds": args.seconds,
        "rounds": rows,
    }
    args.output.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main()
