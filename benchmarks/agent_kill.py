"""Kill the agent under load again and again: no acknowledged feedback may be lost or counted twice.

Each round starts the agent on the store of the previous round, puts it under load and kills it (SIGKILL) at a random
time after the first update of the round, while requests are in flight and updates run. In every other round a rollback
is requested shortly before the kill. Then the store, the checkpoint and the kept versions are checked. Without any
update or rollback the benchmark fails: on a busy machine the learner, which has a low priority, may get no time.

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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Load, Server, agent_server, run_load
from clustergym.agent.versions import CHECKPOINT_KIND, kept_versions, request_rollback, version_path
from clustergym.common.checkpoints import CHECKPOINT_NAME, load_checkpoint

ACCEPTED = 'clustergym_feedback_total{status="accepted"}'
VERSION = "clustergym_policy_version"


@dataclass
class Args:
    rounds: int = 20
    """Number of kills."""
    connections: int = 32
    """Number of parallel connections."""
    shortest: float = 1.0
    """Minimum seconds of load before a kill."""
    longest: float = 6.0
    """Maximum seconds of load before a kill."""
    update_s: float = 60.0
    """Longest wait for an update under load, in seconds, before the time to the kill begins."""
    seed: int = 0
    """Seed of the times of the kills and of the load."""
    output: Path = Path("runs/agent_kill.json")
    """JSON file for the results."""


def ask_for_rollback(store: Path) -> None:
    """Ask for the oldest version that is kept."""
    kept = kept_versions(store)
    if kept:
        request_rollback(store, kept[0], "benchmark")


def kill_under_load(
    server: Server, after_s: float, connections: int, seed: int, rollback_of: Path | None = None, update_s: float = 0.0
) -> Load:
    """Run a load and kill the server during it, and perhaps during a rollback of this store.

    The kill comes ``after_s`` seconds after the first update, or after ``update_s`` seconds without any.
    """

    def kill() -> None:
        try:
            until, before = time.monotonic() + update_s, server.metrics()[VERSION]
            while time.monotonic() < until and server.metrics()[VERSION] == before:
                time.sleep(0.2)
            # Up to 0.3 s before the kill: the learner looks for requests five times per second.
            early = 0.3 * random.Random(seed).random()
            time.sleep(max(after_s - early, 0.0))
            if rollback_of is not None:
                ask_for_rollback(rollback_of)
            time.sleep(early)
        finally:
            server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    load = asyncio.run(run_load(server.port, connections, update_s + after_s + 30, seed))
    killer.join()
    return load


def check_store(store: Path, acknowledged: set[str], unanswered: set[str]) -> dict[str, Any]:
    """Check the store of a killed agent. Raises RuntimeError if something is lost or counted twice."""
    state = load_checkpoint(store / CHECKPOINT_NAME, CHECKPOINT_KIND)
    for version in kept_versions(store):
        load_checkpoint(version_path(store, version), CHECKPOINT_KIND)
    with sqlite3.connect(store / "store.db") as connection:
        (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
        rows = connection.execute(
            "SELECT printf('%x-%s', a.seq, a.token), f.status, f.seq, f.learnable FROM feedback f "
            "JOIN allocations a ON a.seq = f.allocation"
        ).fetchall()
        counted = connection.execute("SELECT sum(value) FROM counters WHERE name = 'feedback:accepted'").fetchone()
    connection.close()
    stored = [allocation_id for allocation_id, status, _, _ in rows if status == "accepted"]
    last_seq = max((seq for _, _, seq, _ in rows), default=0)
    learnable = sum(learnable for _, _, seq, learnable in rows if seq <= state["learned_through"])
    problems = {
        "integrity": integrity != "ok",
        "acknowledged but lost": acknowledged - set(stored),
        "stored twice": len(stored) - len(set(stored)),
        "stored but never sent": set(stored) - acknowledged - unanswered,
        "counter differs from rows": (counted[0] or 0) - len(stored),
        "learned from the future": max(0, state["learned_through"] - last_seq),
        "learned twice": max(0, state["experiences"] - learnable),
    }
    broken = {name: value for name, value in problems.items() if value}
    if broken:
        raise RuntimeError(f"{store}: {broken}")
    return {
        "acknowledged": len(acknowledged), "stored": len(stored), "version": state["version"],
        "experiences": state["experiences"], "rolled_back_to": state.get("rolled_back_to"),
    }  # fmt: skip


def run_rounds(args: Args, store: Path) -> list[dict[str, Any]]:
    """Results of each round."""
    rng = random.Random(args.seed)
    acknowledged: set[str] = set()
    unanswered: set[str] = set()
    rows = []
    for i in range(args.rounds):
        with agent_server(store) as server:
            if rows:
                # The new agent continues the counters of the killed one, and knows what that one acknowledged.
                if server.metrics()[ACCEPTED] != rows[-1]["stored"]:
                    raise RuntimeError(
                        f"round {i}: {server.metrics()[ACCEPTED]:g} counted, {rows[-1]['stored']} stored"
                    )
                for old in rng.sample(sorted(acknowledged), min(20, len(acknowledged))):
                    body = {"allocation_id": old, "actual_usage": 1, "qos_met": False}
                    status, found = server.post("/feedback", body)
                    if (status, found["status"]) != (200, "duplicate"):
                        raise RuntimeError(f"round {i}: repeated feedback on {old} got {status} {found}")
            after_s = rng.uniform(args.shortest, args.longest)
            rollback_of = store if i % 2 else None
            load = kill_under_load(server, after_s, args.connections, i, rollback_of, args.update_s)
        acknowledged |= set(load.accepted)
        unanswered |= set(load.unanswered)
        rows.append(check_store(store, acknowledged, unanswered) | {"in_flight": len(load.unanswered)})
    return rows


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_rounds(args, Path(folder) / "store")
    table = Table(
        "round", "acknowledged", "stored", "in flight at the kill", "policy version", "experiences learned",
        "rolled back to",
        title=f"{args.rounds} kills: no feedback lost, none counted twice, every checkpoint valid",
    )  # fmt: skip
    for i, row in enumerate(rows):
        keys = ("acknowledged", "stored", "in_flight", "version", "experiences", "rolled_back_to")
        table.add_row(str(i + 1), *(str(row[key]) for key in keys))
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rounds": rows}, indent=2) + "\n")
    console.print(f"results: {args.output}")
    updates, rollbacks = rows[-1]["version"], sum(row["rolled_back_to"] is not None for row in rows)
    if not updates or not rollbacks:
        raise SystemExit(f"{updates} updates and {rollbacks} rollbacks: kills during these were not tested")


if __name__ == "__main__":
    main()
