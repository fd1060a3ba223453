"""Fuzz the allocation agent: random paths, headers and bodies must give no 5xx, no hang and no growth.

Requests are mutations of valid ones, sent as raw bytes on fresh connections, half of them with the token. After every
thousand requests, a valid request must be answered, and memory and open files are recorded.

    python benchmarks/agent/agent_fuzz.py
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console

from agent_client import TOKEN, Connection, agent_server

PATHS = ("/allocate", "/feedback", "/healthz", "/readyz", "/metrics", "/ui", "/status.json", "/x")
METHODS = ("POST", "POST", "POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "post", "\x00", "")
PIECES = ("%0a", "%00", "//", ";", "..", "%2f", "?", "#", "\\", "%", "\xff", " ", "a" * 300, "%c0%af", "'", '"', "{}")
VALUES: tuple[Any, ...] = (
    0, -1, 1e308, -1e-308, 10**400, None, True, "", "x" * 5000, "\x00", "1", [], {}, [[[]]], "é\u2028\ud7ff", 50, 4000,
)  # fmt: skip
BODIES: tuple[dict[str, Any], ...] = (
    {"cores": 80, "memory": 4000, "owner": "fuzz", "qos_class": "best-effort", "request_id": "r", "gpu": 0},
    {"allocation_id": "1-" + "0" * 32, "actual_usage": 30, "qos_met": True, "pods": 2, "pressure": 1, "final": False},
    {"actual_usage": 30, "qos_met": True, "pods": 2},
)
HEADERS = (
    "Content-Type: application/json",
    "Expect: 100-continue",
    "Connection: close",
    "X-A: " + "b" * 9000,
    "Transfer-Encoding: gzip",
    "Host: \x01",
    "Authorization: Basic eA==",
    "Content-Length: -5",
    ": x",
    "A",
    "",
)


@dataclass
class Args:
    requests: int = 20_000
    """Number of requests."""
    connections: int = 8
    """Number of requests at the same time."""
    timeout_s: float = 30.0
    """A request without an answer after this time is a hang."""
    seed: int = 0
    """Seed of the requests."""
    output: Path = Path("runs/agent_fuzz.json")
    """JSON file for the results."""


def make_body(rng: random.Random) -> bytes:
    """A valid body with a few changed values, then perhaps changed bytes."""
    body = dict(rng.choice(BODIES))
    for _ in range(rng.randrange(3)):
        body[rng.choice([*body, "extra"])] = rng.choice(VALUES)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice((0, 0, 0, 1, 5))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


def make_request(rng: random.Random) -> bytes:
    path, method = rng.choice(PATHS), rng.choice(METHODS)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        at = rng.randrange(len(path) + 1)
        path = path[:at] + rng.choice(PIECES) + path[at:]
    body = make_body(rng)
    lines = [f"{method} {path} HTTP/1.1", "Host: agent"]
    if rng.random() < 0.5:
        lines.append(f"Authorization: Bearer {TOKEN}")
    lines += [rng.choice(HEADERS) for _ in range(rng.choice((0, 0, 1, 2)))]
    length = len(body) + rng.choice((0,) * 18 + (1, -1))
    chunked = rng.random() < 0.1
    lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}")
    if chunked:
        body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


async def send(port: int, data: bytes, timeout_s: float) -> str:
    """Status of the answer; "closed" if the server closed the connection without one, "hang" if it did nothing."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        return "hang"
    except OSError:
        return "closed"
    parts = line.split(b" ")
    return parts[1].decode() if len(parts) > 1 else "closed"


async def fuzz(port: int, process: psutil.Process, args: Args) -> dict[str, Any]:
    rng, found, memory, open_files = random.Random(args.seed), Counter[str](), [], []
    bad: list[str] = []
    slots = asyncio.Semaphore(args.connections)

    async def one(data: bytes) -> None:
        async with slots:
            status = await send(port, data, args.timeout_s)
        found[status] += 1
        if status == "hang" or status.startswith("5"):
            bad.append(f"{status}: {data[:400]!r}")

    for start in range(0, args.requests, 1000):
        size = min(1000, args.requests - start)
        await asyncio.gather(*(one(make_request(rng)) for _ in range(size)))
        async with Connection(port) as connection:
            status, answer = await connection.post("/allocate", {"cores": 50, "memory": 1000})
        if status != 200:
            bad.append(f"a valid request got {status}: {answer}")
        memory.append(process.memory_info().rss / 1e6)
        open_files.append(process.num_fds())
    return {"answers": dict(found), "bad": bad[:20], "n_bad": len(bad), "memory_mb": memory, "open_files": open_files}


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    begin = time.perf_counter()
    flags = ("--explore", "off", "--read-timeout-s", 2)
    with tempfile.TemporaryDirectory() as folder, agent_server(Path(folder), *flags) as server:
        result = asyncio.run(fuzz(server.port, psutil.Process(server.process.pid), args))
        log_lines = len(server.log.read_text().splitlines())
    result |= {"log_lines": log_lines, "seconds": time.perf_counter() - begin, "command": shlex.join(sys.argv)}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    console = Console(width=130)
    console.print(f"{args.requests} requests in {result['seconds']:.0f} s: {result['answers']}")
    console.print(
        f"bad: {result['n_bad']}; memory {result['memory_mb'][0]:.0f} → {result['memory_mb'][-1]:.0f} MB; open files "
        f"{result['open_files'][0]} → {result['open_files'][-1]}; {log_lines} log lines"
    )
    if result["n_bad"]:
        raise SystemExit("\n".join(result["bad"]))


if __name__ == "__main__":
    main()
