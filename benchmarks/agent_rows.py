"""Latency of the agent with an empty store and with a million rows, while old rows are being deleted.

The rows are written into the database before the agent starts. A tenth of them is older than the retention, so the
agent deletes them during the measurement. The two stores are measured in turn, so that the spread between rounds shows
what a difference is worth.

    python benchmarks/agent_rows.py
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from agent_client import agent_server, run_load
from clustergym.agent.store import Feedback, Store
from clustergym.common.statistics import ci95


@dataclass
class Args:
    rows: int = 1_000_000
    """Number of allocations with feedback."""
    seconds: float = 8.0
    """Seconds of load per measurement."""
    rounds: int = 3
    """Number of measurements of each store."""
    connections: int = 16
    """Number of parallel connections."""
    output: Path = Path("runs/agent_rows.json")
    """JSON file for the results."""


def fill(folder: Path, rows: int) -> None:
    """Write rows as the agent does; a tenth of them 31 days old."""
    folder.mkdir(parents=True)
    Store(folder, "process").close()
    now, obs = time.time(), np.zeros(19, np.float32).tobytes()
    connection = sqlite3.connect(folder / "store.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")

    def created(i: int) -> float:
        return now - (31 if i < rows // 10 else 1) * 86_400 + i * 1e-3

    connection.executemany(
        f"INSERT INTO allocations VALUES ({', '.join('?' * 22)})",
        (
            (i + 1, "0" * 32, None, created(i), f"team/{i % 200}", 80.0, 4000.0, 0, obs, obs[:8], 0.0, 0, 1, 60.0,
             3000.0, 0.0, 0, 60.0, 3000.0, 60.0, 3000.0, "policy")
            for i in range(rows)
        ),
    )  # fmt: skip
    columns = ", ".join(Feedback._fields)
    values = (30.0, 1, 1, 2000.0, 0, 1.0, 0.4, 1.0, 1, 1.0, 1, 1.0, 0.1, obs, 0)
    connection.executemany(
        f"INSERT INTO feedback (allocation, status, learnable, {columns}) "
        f"VALUES ({', '.join('?' * (len(Feedback._fields) + 3))})",
        ((i + 1, "accepted", 0, created(i), *values) for i in range(rows)),
    )
    connection.execute(
        "INSERT OR REPLACE INTO meta SELECT 'remembered', max(seq) FROM feedback"
    )  # no histories to rebuild
    connection.execute("COMMIT")
    connection.close()


def measure(args: Args, store: Path, rows: int) -> dict[str, Any]:
    begin = time.perf_counter()
    with agent_server(store, "--explore", "off", ready_s=300) as server:
        start_s = time.perf_counter() - begin
        asyncio.run(run_load(server.port, args.connections, 2.0, seed=1))
        load = asyncio.run(run_load(server.port, args.connections, args.seconds, seed=2))
    connection = sqlite3.connect(store / "store.db")
    (left,) = connection.execute("SELECT count(*) FROM allocations WHERE seq <= ?", (rows,)).fetchone()
    connection.close()
    every = 1e3 * np.array(load.latencies_s["/allocate"] + load.latencies_s["/feedback"])
    return {
        "rows": rows, "deleted": rows - left, "start_s": start_s, "requests_per_s": len(every) / load.elapsed_s,
        "errors": len(load.errors), "p50_ms": float(np.percentile(every, 50)),
        "p99_ms": float(np.percentile(every, 99)), "max_ms": float(every.max()),
    }  # fmt: skip


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / str(args.rows), args.rows)
        found = [measure(args, Path(folder) / str(n), n) for _ in range(args.rounds) for n in (0, args.rows)]
    table = Table(*found[0])
    for one in found:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in one.values()))
    console = Console(width=130)
    console.print(table)
    for key in ("p99_ms", "requests_per_s"):
        empty, full = ([one[key] for one in found if one["rows"] == n] for n in (0, args.rows))
        change = [b / a - 1 for a, b in zip(empty, full, strict=True)]
        console.print(
            f"{key}: {np.mean(empty):.1f} empty, {np.mean(full):.1f} with {args.rows:,} rows, {shown(change)}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), "measurements": found}, indent=1) + "\n")
    console.print(f"results: {args.output}")


def shown(changes: list[float]) -> str:
    return f"{100 * np.mean(changes):+.1f} ± {100 * ci95(changes):.1f} %"


if __name__ == "__main__":
    main()
