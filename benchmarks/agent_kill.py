"""SIGKILL under load, round after round on one store: no acknowledged feedback lost, none counted twice, checkpoint whole.

In each round the agent is started on the store of the round before, put under load, and killed at a moment drawn at random
while requests are in flight and updates run. Then the store is looked at from outside, and the next round's agent is asked.

    python benchmarks/agent_kill.py
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import sqlite3
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Load, Server, agent_server, run_load
from clustergym.training import CHECKPOINT_NAME, load_checkpoint

ACCEPTED = 'clustergym_feedback_total{status="accepted"}'


@dataclass
class Args:
    rounds: int = 20
    """Times the agent is killed."""
    connections: int = 32
    """Connections in flight."""
    shortest: float = 1.0
    """Least seconds of load before the kill."""
    longest: float = 6.0
    """Most seconds of load before the kill."""
    seed: int = 0
    """Of the moments."""
    output: Path = Path("runs/agent_kill.json")
    """Where the figures go."""


def kill_under_load(server: Server, after_s: float, connections: int, seed: int) -> Load:
    """Load that ends with the server's life."""
    timer = threading.Timer(after_s, server.kill)
    timer.start()
    load = asyncio.run(run_load(server.port, connections, after_s + 30, seed))
    timer.join()
    return load


def inspect(store: Path, acknowledged: set[str], doubtful: set[str]) -> dict[str, Any]:
    """What the dead agent left behind; raises where it broke its word."""
    state = load_checkpoint(store / CHECKPOINT_NAME, "ppo_gpu_alloc_online")
    with sqlite3.connect(store / "store.db") as connection:
        (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
        rows = connection.execute(
            "SELECT printf('%x-%s', a.seq, a.token), f.status, f.seq, f.learnable FROM feedback f "
            "JOIN allocations a ON a.seq = f.allocation"
        ).fetchall()
        found = connection.execute("SELECT value FROM counters WHERE name = 'feedback:accepted'").fetchone()
    connection.close()
    counted = found[0] if found else 0
    stored = [row[0] for row in rows if row[1] == "accepted"]
    problems = {
        "integrity": integrity != "ok",
        "acknowledged but lost": acknowledged - set(stored),
        "stored twice": len(stored) - len(set(stored)),
        "stored but never sent": set(stored) - acknowledged - doubtful,
        "counter differs from rows": counted - len(stored),
        "learned from the future": max(0, state["learned_through"] - max((row[2] for row in rows), default=0)),
        "learned twice": max(
            0, state["experiences"] - sum(row[3] for row in rows if row[2] <= state["learned_through"])
        ),
    }
    broken = {name: value for name, value in problems.items() if value}
    if broken:
        raise RuntimeError(f"{store}: {broken}")
    return {
        "acknowledged": len(acknowledged), "stored": len(stored), "version": state["version"],
        "experiences": state["experiences"],
    }  # fmt: skip


def run_rounds(args: Args, store: Path) -> list[dict[str, Any]]:
    rng = random.Random(args.seed)
    acknowledged: set[str] = set()
    doubtful: set[str] = set()
    rows = []
    for i in range(args.rounds):
        with agent_server(store) as server:
            if rows:
                # The new agent counts on from where the old one died, and knows what it acknowledged.
                if server.metrics()[ACCEPTED] != rows[-1]["stored"]:
                    raise RuntimeError(
                        f"round {i}: {server.metrics()[ACCEPTED]:g} counted, {rows[-1]['stored']} stored"
                    )
                for old in rng.sample(sorted(acknowledged), min(20, len(acknowledged))):
                    body = {"allocation_id": old, "actual_usage": 1, "qos_met": False}
                    status, found = server.post("/feedback", body)
                    if (status, found["status"]) != (200, "duplicate"):
                        raise RuntimeError(f"round {i}: {old} again was {status} {found}")
            load = kill_under_load(server, rng.uniform(args.shortest, args.longest), args.connections, seed=i)
        acknowledged |= set(load.accepted)
        doubtful |= set(load.doubtful)
        rows.append(inspect(store, acknowledged, doubtful) | {"in_flight": len(load.doubtful)})
    return rows


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_rounds(args, Path(folder) / "store")
    table = Table(
        "round", "acknowledged", "stored", "in flight at the kill", "policy version", "experiences learned",
        title=f"{args.rounds} kills, nothing lost, nothing twice, every checkpoint whole",
    )  # fmt: skip
    for i, row in enumerate(rows):
        keys = ("acknowledged", "stored", "in_flight", "version", "experiences")
        table.add_row(str(i + 1), *(str(row[key]) for key in keys))
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rounds": rows}, indent=2) + "\n")
    console.print(f"figures: {args.output}")


if __name__ == "__main__":
    main()
