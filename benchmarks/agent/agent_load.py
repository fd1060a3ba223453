"""Latency of the allocation agent at a fixed rate of requests, while it learns and without learning.

Connections send /allocate and /feedback in turn with pauses, about 200 requests per second in total, to an agent with
an empty store on loopback. Every request is durable before it is answered. Beside latencies, the table has the CPU time
per request and how long the server waited for a processor that other programs used: on an idle machine that is nothing.

    python benchmarks/agent/agent_load.py
    python benchmarks/agent/agent_load.py --priority  # as root: server and client come before other programs
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
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

from agent_client import agent_server, run_load


@dataclass
class Args:
    rate: float = 200.0
    """Requests per second."""
    connections: int = 20
    """Number of parallel connections."""
    seconds: float = 30.0
    """Seconds per measurement."""
    priority: bool = False
    """Give server and client the highest priority, as if no other programs ran. The learner keeps the lowest."""
    output: Path = Path("runs/agent_load.json")
    """JSON file for the results."""


def waited_s(pid: int) -> float:
    """Seconds for which the threads of a process could run, but had no processor."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9


def measure(args: Args, learning: bool, store: Path) -> dict[str, Any]:
    """Results of one measurement."""
    pause_s = 2 * args.connections / args.rate
    with agent_server(store, "--explore", "all" if learning else "off") as server:
        process = psutil.Process(server.process.pid)
        if args.priority:
            tasks = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
            for task in (0, *tasks):
                os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(1))
        until = time.monotonic() + 60.0
        while learning and not server.metrics()["clustergym_policy_version"] and time.monotonic() < until:
            asyncio.run(run_load(server.port, args.connections, 2.0, seed=1, pause_s=pause_s))
        version = server.metrics()["clustergym_policy_version"]
        cpu, waited = sum(process.cpu_times()[:2]), waited_s(process.pid)
        load = asyncio.run(run_load(server.port, args.connections, args.seconds, 2, pause_s))
        cpu, waited = sum(process.cpu_times()[:2]) - cpu, waited_s(process.pid) - waited
        updates = server.metrics()["clustergym_policy_version"] - version
    if learning and not updates:
        raise RuntimeError("no update ran during the measurement, so the effect of learning was not measured")
    every_ms = 1e3 * np.array(load.latencies_s["/allocate"] + load.latencies_s["/feedback"])
    return {
        "requests/s": len(every_ms) / load.elapsed_s, "errors": len(load.errors), "updates": updates,
        **{f"p{q:g} ms": float(np.percentile(every_ms, q)) for q in (50, 99, 99.9, 100)},
        "CPU ms per request": 1e3 * cpu / len(every_ms), "waited for a processor, %": 100 * waited / load.elapsed_s,
    }  # fmt: skip


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: measure(args, name == "learning", Path(folder) / name) for name in ("learning", "not learning")}
    table = Table("", *rows["learning"], title=f"{args.connections} connections, {args.seconds:g} s")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rows": rows}, indent=2) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main()
