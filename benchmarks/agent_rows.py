"""Latency of the agent with an empty store and with a million rows, while old rows are being deleted.

Two agents run at the same time, and only one of them is not stopped (SIGSTOP). They get the same requests in short
slices: pairs of one slice each, in random order. The p99 of an agent is that of all its slices together. The interval
of the ratio comes from a bootstrap over pairs.

The rows are written into the database before the agent starts. A fifth of them is older than the retention, so the
agent deletes rows during all its slices. Every row has a random request id, as the webhook sends it, and so have the
requests.

    python benchmarks/agent_rows.py
    python benchmarks/agent_rows.py --rows 0       # two empty stores: what the method itself shows
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import sqlite3
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from numpy.typing import NDArray
from rich.console import Console

from agent_client import TOKEN, Server, agent_server
from clustergym.agent.store import Feedback, Store

BIN_MS = 0.01
"""Latencies are counted in bins of this width."""
MAX_MS = 1000.0


@dataclass
class Args:
    rows: int = 1_000_000
    """Number of allocations with feedback."""
    pairs: int = 60
    """Number of slices of each store."""
    slice_s: float = 1.0
    """Seconds of load per slice."""
    settle_s: float = 0.2
    """Seconds of load before each slice that are not counted."""
    connections: int = 16
    """Number of parallel connections."""
    seed: int = 1
    """Seed of requests, order and bootstrap."""
    output: Path = Path("runs/agent_rows.json")
    """JSON file for the results."""


def fill(folder: Path, rows: int, rng: random.Random) -> None:
    """Write rows as the agent does; a fifth of them 31 days old."""
    folder.mkdir(parents=True)
    Store(folder, "process").close()
    now, obs = time.time(), np.zeros(19, np.float32).tobytes()
    connection = sqlite3.connect(folder / "store.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -300000")
    connection.execute("BEGIN")

    def created(i: int) -> float:
        return now - (31 if i < rows // 5 else 1) * 86_400 + i * 1e-3

    connection.executemany(
        f"INSERT INTO allocations VALUES ({', '.join('?' * 22)})",
        (
            (i + 1, "0" * 32, request_id(rng), created(i), f"team/{i % 200}", 80.0, 4000.0, 0, obs, obs[:8], 0.0, 0, 1,
             60.0, 3000.0, 0.0, 0, 60.0, 3000.0, 60.0, 3000.0, "policy")
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
    # No histories to rebuild.
    connection.execute("INSERT OR REPLACE INTO meta SELECT 'remembered', coalesce(max(seq), 0) FROM feedback")
    connection.execute("COMMIT")
    connection.close()


def request_id(rng: random.Random) -> str:
    return f"{uuid.UUID(int=rng.getrandbits(128), version=4)}@node-7"


class Pods(asyncio.Protocol):
    """A connection that sends /allocate and /feedback in turn, with little work per answer."""

    def __init__(self) -> None:
        self.rng = random.Random()
        self.running = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.found: list[tuple[float, float]] = []
        """Start and latency of each request, in seconds."""
        self.errors: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if not self.idle.is_set():
            self.errors.append(b"connection lost")
            self.idle.set()

    def begin(self, seed: str) -> None:
        self.rng.seed(seed)
        self.running = True
        self.idle.clear()
        self.allocate()

    def allocate(self) -> None:
        self.requested = self.rng.choice((20, 40, 60, 80))
        qos = self.rng.choice(("best-effort", "latency-sensitive"))
        self.send(
            "/allocate",
            f'{{"owner":"team/{self.rng.randrange(200)}","cores":{self.requested},"memory":4000,"qos_class":"{qos}",'
            f'"request_id":"{request_id(self.rng)}"}}',
        )

    def send(self, path: str, body: str) -> None:
        self.path, self.answer = path, b""
        data = (
            f"POST {path} HTTP/1.1\r\nHost: agent\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self.start = time.perf_counter()
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if not self.answer.endswith(b"}"):  # the last byte of a JSON object
            return
        self.found.append((self.start, time.perf_counter() - self.start))
        if not self.answer.startswith(b"HTTP/1.1 200"):
            self.errors.append(self.answer)
        elif self.path == "/allocate":
            found = json.loads(self.answer[self.answer.index(b"{") :])
            needed = 0.5 * self.requested
            self.send(
                "/feedback",
                f'{{"allocation_id":"{found["allocation_id"]}","actual_usage":{min(needed, found["cores"])},'
                f'"qos_met":{"true" if found["cores"] >= needed else "false"},"pods":{self.rng.randrange(1, 4)},'
                '"memory_used":2000,"oom":false}',
            )
            return
        if self.running:
            self.allocate()
        else:
            self.idle.set()


@dataclass
class Agent:
    """One of the two agents, with its connections and what was measured."""

    server: Server
    pods: list[Pods]
    slices: list[NDArray[np.int64]]
    """Number of requests per bin of latency, for each slice."""
    cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    longest_ms: float = 0.0

    async def run_slice(self, args: Args, seed: str) -> None:
        """Continue the agent, load it, and stop it again."""
        os.kill(self.server.process.pid, signal.SIGCONT)
        process = psutil.Process(self.server.process.pid)
        for i, pod in enumerate(self.pods):
            pod.found.clear()
            pod.begin(f"{seed}/{i}")
        await asyncio.sleep(args.settle_s)
        begin, server_cpu, client_cpu = time.perf_counter(), process.cpu_times(), time.process_time()
        await asyncio.sleep(args.slice_s)
        end, after = time.perf_counter(), process.cpu_times()
        self.client_cpu_s += time.process_time() - client_cpu
        self.cpu_s += after.user + after.system - server_cpu.user - server_cpu.system
        for pod in self.pods:
            pod.running = False
        await asyncio.gather(*(pod.idle.wait() for pod in self.pods))
        os.kill(self.server.process.pid, signal.SIGSTOP)
        errors = [error for pod in self.pods for error in pod.errors]
        if errors:
            raise RuntimeError(f"{len(errors)} requests failed: {errors[0]!r}")
        latencies_ms = [1e3 * latency for pod in self.pods for start, latency in pod.found if begin <= start < end]
        self.longest_ms = max(self.longest_ms, *latencies_ms)
        counts, _ = np.histogram(np.minimum(latencies_ms, MAX_MS - BIN_MS), int(MAX_MS / BIN_MS), (0, MAX_MS))
        self.slices.append(counts)


async def measure(args: Args, servers: list[Server], rng: random.Random) -> list[Agent]:
    agents = []
    for server in servers:
        loop = asyncio.get_running_loop()
        pods = [(await loop.create_connection(Pods, "127.0.0.1", server.port))[1] for _ in range(args.connections)]
        agents.append(Agent(server, pods, []))
        os.kill(server.process.pid, signal.SIGSTOP)
    for pair in range(-3, args.pairs):
        if pair == 0:  # the first three pairs warm up
            for agent in agents:
                agent.slices.clear()
                agent.cpu_s = agent.client_cpu_s = agent.longest_ms = 0.0
        for agent in rng.sample(agents, 2):
            await agent.run_slice(args, f"{args.seed}/{pair}")
    return agents


def percentile(counts: NDArray[Any], q: float) -> NDArray[np.float64]:
    """Percentile in ms of the requests in bins (..., bins), at the upper end of its bin."""
    total = counts.cumsum(-1)
    return BIN_MS * (1 + (total < q * total[..., -1:]).sum(-1))


def figures(counts: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """Percentiles in ms and the number of requests, from counts per bin (..., bins)."""
    parts = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p99.9_ms": 0.999}
    return {name: percentile(counts, part) for name, part in parts.items()} | {"requests": counts.sum(-1)}


def compare(empty: NDArray[Any], full: NDArray[Any], rng: np.random.Generator) -> dict[str, Any]:
    """Figures of both stores, and their ratios with 95 % intervals from a bootstrap over the pairs of slices."""
    used = 1 + int(max(np.flatnonzero(one.sum(0))[-1] for one in (empty, full)))
    empty, full = empty[:, :used].astype(float), full[:, :used].astype(float)
    drawn: dict[str, list[NDArray[np.float64]]] = {}
    for _ in range(50):
        weights = rng.multinomial(len(empty), np.full(len(empty), 1 / len(empty)), 40)
        below = figures(weights @ empty)
        for name, value in figures(weights @ full).items():
            drawn.setdefault(name, []).append(value / below[name])
    one, other = figures(empty.sum(0)), figures(full.sum(0))
    found = {}
    for name, ratios in drawn.items():
        low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
        values = {"empty": one[name], "full": other[name], "ratio": other[name] / one[name], "low": low, "high": high}
        found[name] = {key: float(value) for key, value in values.items()}
    return found


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    rng = random.Random(args.seed)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stores = [Path(folder) / "empty", Path(folder) / "full"]
        for store, rows in zip(stores, (0, args.rows), strict=True):
            fill(store, rows, rng)
        servers = [stack.enter_context(agent_server(store, "--explore", "off")) for store in stores]
        try:
            agents = asyncio.run(measure(args, servers, rng))
        finally:
            for server in servers:
                os.kill(server.process.pid, signal.SIGCONT)
        connection = sqlite3.connect(stores[1] / "store.db")
        ((left,),) = connection.execute("SELECT count(*) FROM allocations WHERE seq <= ?", (args.rows,))
        connection.close()
    found = compare(*(np.array(agent.slices) for agent in agents), np.random.default_rng(args.seed))
    seconds = args.pairs * args.slice_s
    for name, one in found.items():
        console.print(
            f"{name}: {one['empty']:.2f} empty, {one['full']:.2f} with {args.rows:,} rows, "
            f"ratio {one['ratio']:.3f} ({one['low']:.3f} … {one['high']:.3f})"
        )
    for name, agent in zip(("empty", "full"), agents, strict=True):
        console.print(
            f"{name}: longest {agent.longest_ms:.1f} ms, server {agent.cpu_s / seconds:.2f} cores, "
            f"client {agent.client_cpu_s / seconds:.2f} cores"
        )
    console.print(f"{args.rows - left:,} of {args.rows // 5:,} old rows were deleted meanwhile")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"command": shlex.join(sys.argv), **found}, indent=1) + "\n")
    console.print(f"results: {args.output}")


if __name__ == "__main__":
    main()
