"""Kill the agent under load again and again: no acknowledged feedback may be lost or counted twice.

Each round starts the agent on the store of the previous round, puts it under load, waits for an update, and kills it
(SIGKILL) while requests are in flight. In every second round only the server is killed, and the learner process must
end by itself. Then the store is checked: what was acknowledged is there once, and what was learned from was learned
from once.

    python benchmarks/agent/agent_kill.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Load, Server, agent_server, run_load
from clustergym.agent.versions import kept_versions, load_newest, load_version

VERSION = "clustergym_policy_version"


@dataclass
class Args:
    rounds: int = 20
    """Number of kills."""
    connections: int = 32
    """Number of parallel connections."""
    pause_s: float = 0.02
    """Pause of each connection between two pods. Without it the learner, which has a low priority, gets no time."""
    shortest: float = 0.2
    """Minimum seconds of load after the first update of a round, before the kill."""
    longest: float = 2.0
    """Maximum seconds of it."""
    update_s: float = 60.0
    """Longest wait for an update under load, in seconds."""
    seed: int = 0
    """Seed of the times of the kills and of the load."""
    output: Path = Path("runs/agent_kill.json")
    """JSON file for the results."""


def kill_under_load(server: Server, group: bool, args: Args, after_s: float, seed: int) -> Load:
    """Run a load and kill the server during it; with ``group``, the learner at the same time."""

    def kill() -> None:
        try:
            until, before = time.monotonic() + args.update_s, server.metrics()[VERSION]
            while time.monotonic() < until and server.metrics()[VERSION] == before:
                time.sleep(0.2)
            time.sleep(after_s)
            if group:
                os.killpg(server.process.pid, signal.SIGKILL)
        finally:
            server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    load = asyncio.run(run_load(server.port, args.connections, args.update_s + after_s + 30, seed, args.pause_s))
    killer.join()
    return load


def check_store(store: Path, acknowledged: set[str], unanswered: set[str]) -> dict[str, Any]:
    """Check the store of a killed agent. Raises RuntimeError if something is lost or counted twice."""
    with closing(sqlite3.connect(store / "store.db")) as connection:
        (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
        for one in kept_versions(connection):
            load_version(connection, one.version)
        state = load_newest(connection)
        rows = connection.execute(
            "SELECT printf('%x-%s', a.seq, a.token), f.seq, f.learnable FROM feedback f "
            "JOIN allocations a ON a.seq = f.allocation"
        ).fetchall()
    stored = [allocation_id for allocation_id, _, _ in rows]
    learned = sum(learnable for _, seq, learnable in rows if seq <= state["learned_through"])
    problems = {
        "integrity": integrity != "ok",
        "acknowledged but lost": acknowledged - set(stored),
        "stored twice": len(stored) - len(set(stored)),
        "stored but never sent": set(stored) - acknowledged - unanswered,
        "learned twice": max(0, state["experiences"] - learned),
    }
    broken = {name: value for name, value in problems.items() if value}
    if broken:
        raise RuntimeError(f"{store}: {broken}")
    return {
        "acknowledged": len(acknowledged), "stored": len(stored), "version": state["version"],
        "experiences": state["experiences"],
    }  # fmt: skip


def run_rounds(args: Args, store: Path) -> list[dict[str, Any]]:
    """Results of each round."""
    rng = random.Random(args.seed)
    acknowledged: set[str] = set()
    unanswered: set[str] = set()
    rows = []
    for i in range(args.rounds):
        with agent_server(store) as server:
            # The new agent knows what the killed one acknowledged.
            for old in rng.sample(sorted(acknowledged), min(20, len(acknowledged))):
                body = {"allocation_id": old, "actual_usage": 1, "qos_met": True}
                status, found = server.post("/feedback", body)
                if (status, found["status"]) not in ((200, "duplicate"), (200, "corrected")):
                    raise RuntimeError(f"round {i}: repeated feedback on {old} got {status} {found}")
            after_s = rng.uniform(args.shortest, args.longest)
            load = kill_under_load(server, bool(i % 2), args, after_s, i)
        acknowledged |= set(load.accepted)
        unanswered |= set(load.unanswered)
        rows.append({"in_flight": len(load.unanswered)} | check_store(store, acknowledged, unanswered))
    return rows


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_rounds(args, Path(folder) / "store")
    table = Table(
        "round", "acknowledged", "stored", "in flight at the kill", "policy version", "experiences learned",
        title=f"{args.rounds} kills: no feedback lost, none counted twice, every version valid",
    )  # fmt: skip
    for i, row in enumerate(rows):
        keys = ("acknowledged", "stored", "in_flight", "version", "experiences")
        table.add_row(str(i + 1), *(str(row[key]) for key in keys))
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rounds": rows}, indent=2) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main()
