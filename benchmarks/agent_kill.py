"""Kill the agent under load again and again: no acknowledged feedback may be lost or counted twice.

Each round starts the agent on the store of the previous round, puts it under load, waits for the first update, and
kills it (SIGKILL) while requests are in flight. The rounds take turns:

    any        at a random time; only the server is killed, and the learner process must end by itself
    update     while the learner computes an update (its process is running and no file is being written)
    save       while the checkpoint of an update is being written
    rollback   while the checkpoint of a rollback is being written

Then the store, the checkpoint and the kept versions are checked, and whether the kill hit: the temporary file of a
write that did not finish is still there. Without a hit of each kind the benchmark fails.

    python benchmarks/agent_kill.py
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Load, Server, agent_server, run_load
from clustergym.agent.settings import ServerSettings
from clustergym.agent.versions import CHECKPOINT_KIND, kept_versions, read_request, request_rollback, version_path
from clustergym.common.checkpoints import CHECKPOINT_NAME, load_checkpoint

ACCEPTED = 'clustergym_feedback_total{status="accepted"}'
VERSION = "clustergym_policy_version"
KINDS = ("any", "update", "save", "rollback")


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
    """Longest wait for an update under load, and then for the event to hit, in seconds."""
    seed: int = 0
    """Seed of the times of the kills and of the load."""
    output: Path = Path("runs/agent_kill.json")
    """JSON file for the results."""


def unfinished(store: Path) -> list[Path]:
    """Temporary files of checkpoints that are being written."""
    return list(store.glob(f".{CHECKPOINT_NAME}-*"))


def was_hit(store: Path, kind: str) -> bool:
    """Whether a write did not finish, and with a rollback, whether its request still waits. Removes temporary files."""
    left = unfinished(store)
    for path in left:
        path.unlink()
    return bool(left) and (kind != "rollback" or read_request(store) is not None)


def wait_for(kind: str, server: Server, store: Path, until_s: float) -> bool:
    """Wait until the learner does what a kill of this kind shall hit. False if it does not until then."""
    children = psutil.Process(server.process.pid).children()
    (learner,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    if kind == "rollback":
        # After an update the learner sleeps. A request at this time is carried out before the next update.
        version = load_checkpoint(store / CHECKPOINT_NAME, CHECKPOINT_KIND)["version"]
        while not version_path(store, version + 1).exists() and time.monotonic() < until_s:
            time.sleep(0.001)
        request_rollback(store, kept_versions(store)[0], "benchmark")
        if time.time() - version_path(store, version + 1).stat().st_mtime > ServerSettings.update_interval_s:
            return False
    while time.monotonic() < until_s:
        writing = bool(unfinished(store))
        if kind == "update" and not writing and learner.status() == psutil.STATUS_RUNNING:
            return True
        if kind in ("save", "rollback") and writing:
            return True
        time.sleep(0.0002)
    return False


def kill_under_load(server: Server, store: Path, kind: str, args: Args, after_s: float, seed: int) -> tuple[Load, bool]:
    """Run a load and kill the server during it. Returns the load, and whether the learner was at work."""
    ready = False

    def kill() -> None:
        nonlocal ready
        try:
            until, before = time.monotonic() + args.update_s, server.metrics()[VERSION]
            while time.monotonic() < until and server.metrics()[VERSION] == before:
                time.sleep(0.2)
            time.sleep(after_s)
            if kind != "any":
                ready = wait_for(kind, server, store, time.monotonic() + args.update_s)
                os.killpg(server.process.pid, signal.SIGKILL)
        finally:
            server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    seconds = 2 * args.update_s + after_s + 30
    load = asyncio.run(run_load(server.port, args.connections, seconds, seed, args.pause_s))
    killer.join()
    return load, ready


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
            kind, after_s = KINDS[i % len(KINDS)], rng.uniform(args.shortest, args.longest)
            load, ready = kill_under_load(server, store, kind, args, after_s, i)
        hit = ready and (kind == "update" or was_hit(store, kind))
        acknowledged |= set(load.accepted)
        unanswered |= set(load.unanswered)
        checked = check_store(store, acknowledged, unanswered)
        rows.append({"kind": kind, "hit": hit, "in_flight": len(load.unanswered)} | checked)
    return rows


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_rounds(args, Path(folder) / "store")
    table = Table(
        "round", "kill during", "hit", "acknowledged", "stored", "in flight at the kill", "policy version",
        "experiences learned", "rolled back to",
        title=f"{args.rounds} kills: no feedback lost, none counted twice, every checkpoint valid",
    )  # fmt: skip
    keys = ("kind", "hit", "acknowledged", "stored", "in_flight", "version", "experiences", "rolled_back_to")
    for i, row in enumerate(rows):
        table.add_row(str(i + 1), *(str(row[key]) for key in keys))
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "rounds": rows}, indent=2) + "\n")
    console.print(f"results: {args.output}")
    hits = {kind: sum(row["hit"] for row in rows if row["kind"] == kind) for kind in KINDS[1:]}
    console.print(f"kills that hit: {hits}; updates: {rows[-1]['version']}")
    if not all(hits.values()):
        raise SystemExit(f"kills that hit: {hits}, so not all of these were tested")


if __name__ == "__main__":
    main()
