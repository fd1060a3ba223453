"""A running allocation agent and fast clients, for benchmarks and tests."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "cleanrl_ppo" / "ppo_gpu_alloc_online.py"
TOKEN = "benchmark-token"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass
class Server:
    """An agent on loopback."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    host: str = "127.0.0.1"
    ca: Path | None = None
    """Certificate authority of an agent that serves HTTPS."""

    def get(self, path: str) -> str:
        scheme = "http" if self.ca is None else "https"
        context = None if self.ca is None else ssl.create_default_context(cafile=str(self.ca))
        request = urllib.request.Request(
            f"{scheme}://{self.host}:{self.port}{path}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            text: str = response.read().decode()
            return text

    def post(self, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any]:
        """Status and JSON of one request. For many requests, use :class:`Connection`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metrics(self) -> dict[str, float]:
        """Values of /metrics. The keys are names with labels, as in the text."""
        lines = [line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def kill(self) -> None:
        """Send SIGKILL to the server only. Its learner process must end without help."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def agent_server(
    store: Path,
    *flags: object,
    host: str = "127.0.0.1",
    port: int | None = None,
    ready_s: float = 300.0,
    ca: Path | None = None,
    **environment: str,
) -> Iterator[Server]:
    """Run the agent in another process, and kill it at the end of the block or with this process."""
    store.mkdir(parents=True, exist_ok=True)
    token, log = store / "token", store / "agent.log"
    token.touch(mode=0o600)
    token.chmod(0o600)
    token.write_text(TOKEN + "\n")
    port = port or free_port()
    command = [
        sys.executable, SCRIPT, "--host", host, "--port", port, "--store", store, "--token-file", token, *flags,
    ]  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, preexec_fn=_die_with_parent,
        )  # fmt: skip
    server = Server(port, process, log, host, ca)
    try:
        deadline = time.monotonic() + ready_s
        while True:
            with suppress(OSError):
                server.get("/healthz")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the agent did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class StubGpu:
    """A stub GPU: libnvidia-ml.so.1, compiled from tests/support/nvml_stub.c, with a load that :meth:`set` sets."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("no C compiler to build the libnvidia-ml stub")
        library, source = folder / "libnvidia-ml.so.1", ROOT / "tests" / "support" / "nvml_stub.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        self._state = folder / "gpu"
        self.set()
        self.environment = {"LD_LIBRARY_PATH": str(folder), "NVML_STUB": str(self._state)}

    def set(
        self, util: int = 0, used_mb: int = 0, total_mb: int = 32768, processes: int = 0, mps: int = 0, error: int = 0
    ) -> None:
        """Set utilisation (%), memory (MB), processes, MPS clients, and an error that every query returns."""
        self.set_all((util, used_mb, total_mb, processes, mps, error))

    def set_all(self, *gpus: tuple[int, int, int, int, int, int]) -> None:
        """The same numbers for several GPUs."""
        temporary = self._state.with_suffix(".new")
        temporary.write_text("".join(" ".join(map(str, gpu)) + "\n" for gpu in gpus))
        os.replace(temporary, self._state)


class Connection:
    """A keep-alive connection with minimal work on the client side."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        if self.reader.at_eof():
            # The server closes idle connections.
            await self.__aenter__()
        self.writer.write(
            f"POST {path} HTTP/1.1\r\nHost: agent\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        answer = await self.reader.readexactly(length)
        return int(head[9:12]), json.loads(answer)


@dataclass
class Load:
    """Results of a load test."""

    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {"/allocate": [], "/feedback": []})
    errors: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Ids of allocations whose feedback was acknowledged."""
    unanswered: list[str] = field(default_factory=list)
    """Ids of allocations whose feedback was sent but not answered."""
    elapsed_s: float = 0.0


async def _pods(port: int, until_s: float, load: Load, rng: random.Random, pause_s: float) -> None:
    """Allocate and give feedback at once, until the time is up or the server is gone."""
    pending = None
    try:
        async with Connection(port) as connection:
            while time.perf_counter() < until_s:
                if pause_s:
                    await asyncio.sleep(rng.uniform(0, 2 * pause_s))  # or all connections would send at once
                requested = rng.choice((20, 40, 60, 80))
                body = {
                    "owner": f"team/{rng.randrange(200)}", "cores": requested, "memory": 4000,
                    "qos_class": rng.choice(("best-effort", "latency-sensitive")),
                }  # fmt: skip
                start = time.perf_counter()
                status, found = await connection.post("/allocate", body)
                load.latencies_s["/allocate"].append(time.perf_counter() - start)
                if status != 200:
                    load.errors.append(f"/allocate {status} {found}")
                    continue
                pending = found["allocation_id"]
                needed = 0.5 * requested
                body = {
                    "allocation_id": pending, "actual_usage": min(needed, found["cores"]),
                    "qos_met": found["cores"] >= needed, "pods": rng.randrange(1, 4), "memory_used": 2000, "oom": False,
                }  # fmt: skip
                start = time.perf_counter()
                status, found = await connection.post("/feedback", body)
                load.latencies_s["/feedback"].append(time.perf_counter() - start)
                if status != 200 or found["status"] != "accepted":
                    load.errors.append(f"/feedback {status} {found}")
                else:
                    load.accepted.append(pending)
                pending = None
    except (OSError, asyncio.IncompleteReadError) as error:
        load.errors.append(f"{type(error).__name__}: {error}")
        if pending is not None:
            load.unanswered.append(pending)


async def run_load(port: int, connections: int, seconds: float, seed: int = 0, pause_s: float = 0.0) -> Load:
    """Send /allocate and /feedback in turn on every connection, with a pause before each pair."""
    load, start = Load(), time.perf_counter()
    until = start + seconds
    rngs = [random.Random(f"{seed}/{i}") for i in range(connections)]
    await asyncio.gather(*(_pods(port, until, load, rng, pause_s) for rng in rngs))
    load.elapsed_s = time.perf_counter() - start
    return load
