"""The allocation agent as a process: HTTP API, authentication, learning, and recovery after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import agent_kill
from agent_client import SCRIPT, TOKEN, Connection, Server, StubGpu, agent_server, run_load
from clustergym import cli
from clustergym.agent.versions import kept_versions, load_newest, open_store
from clustergym.gpu_allocation import compute_reward
from processes import wait_until

REQUEST = {"owner": "team/Deployment/web", "cores": 80, "memory": 4000, "qos_class": "best-effort"}


def report(allocation_id: str, **changes: Any) -> dict[str, Any]:
    outcome = {"actual_usage": 30, "qos_met": True, "pods": 2, "memory_used": 2000, "oom": False}
    return {"allocation_id": allocation_id, **outcome, **changes}


def allocate(server: Server, **changes: Any) -> dict[str, Any]:
    status, found = server.post("/allocate", REQUEST | changes)
    assert status == 200, found
    return dict(found)


def feedback(server: Server, allocation_id: str, **changes: Any) -> dict[str, Any]:
    status, found = server.post("/feedback", report(allocation_id, **changes))
    assert status == 200, found
    return dict(found)


def feedback_counts(server: Server) -> dict[str, float]:
    prefix = 'clustergym_feedback_total{status="'
    return {
        name.removeprefix(prefix).rstrip('"}'): value
        for name, value in server.metrics().items()
        if name.startswith(prefix)
    }


def allocations(server: Server) -> float:
    return sum(value for name, value in server.metrics().items() if name.startswith("clustergym_allocations_total"))


def version(server: Server) -> int:
    return int(json.loads(server.get("/readyz"))["policy_version"])


def rows(store: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(store / "store.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent") / "store"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> StubGpu:
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler to build the libnvidia-ml stub")
    return StubGpu(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def server(store: Path, gpu: StubGpu) -> Iterator[Server]:
    """An agent with a stub GPU that is sampled at each request. It never has enough experiences to learn."""
    with agent_server(
        store, "--telemetry-s", 0, "--batch-size", 10_000, "--max-batch", 10_000, **gpu.environment
    ) as one:
        yield one


# API


def test_an_allocation_is_at_most_the_request_and_its_feedback_is_scored(server: Server) -> None:
    found = allocate(server)
    assert 10 <= found["cores"] <= 80
    assert 512 <= found["memory"] <= 4000
    answer = feedback(server, found["allocation_id"], actual_usage=7.5, pods=3)
    assert answer == {
        "status": "accepted",
        "reward": compute_reward(found["cores"], found["memory"], 7.5, True, 3),
    }


def test_only_one_of_many_simultaneous_feedbacks_is_accepted(server: Server) -> None:
    found = allocate(server)

    async def send_all() -> list[str]:
        async def one() -> str:
            async with Connection(server.port) as connection:
                _, answer = await connection.post("/feedback", report(found["allocation_id"]))
                return str(answer["status"])

        return list(await asyncio.gather(*(one() for _ in range(20))))

    assert sorted(asyncio.run(send_all())) == ["accepted"] + ["duplicate"] * 19


def test_a_repeated_request_gets_the_same_allocation(server: Server) -> None:
    first = allocate(server, request_id="pod-1@node")
    assert allocate(server, request_id="pod-1@node") == first
    assert allocate(server, request_id="pod-2@node")["allocation_id"] != first["allocation_id"]


def ready(server: Server) -> tuple[int, dict[str, Any]]:
    """Status code and content of /readyz, without a token."""
    status, found = raw(server, "/readyz", b"", {}, "GET")
    return status, dict(found)


def test_readyz_writes_nothing(server: Server, store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store / "store.db")) as watcher:
        (before,) = watcher.execute("PRAGMA data_version").fetchone()
        for _ in range(10):
            assert ready(server)[0] == 200
        assert watcher.execute("PRAGMA data_version").fetchone() == (before,)
        allocate(server)
        assert watcher.execute("PRAGMA data_version").fetchone() != (before,)


def test_a_store_that_is_lost_or_becomes_corrupt_answers_503(tmp_path: Path) -> None:
    with agent_server(tmp_path, "--explore", "off") as server:
        rounds(server, 20)
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as connection:
            connection.execute("VACUUM INTO ?", (str(tmp_path / "backup"),))
        (tmp_path / "store.db").unlink()
        status, found = server.post("/allocate", REQUEST)
        assert status == 503
        assert "was deleted or replaced: put it back, or restart the agent" in found["detail"]
        assert ready(server)[0] == 503
        assert raw(server, "/healthz", b"", {}, "GET")[0] == 503  # the kubelet restarts the agent
        os.replace(tmp_path / "backup", tmp_path / "store.db")
        wait_until(lambda: ready(server)[0] == 200, "the store that is back")
        rounds(server, 5)
        # Garbage over the whole database and its log, in place, as a failing disk would leave it.
        for name in ("store.db", "store.db-wal", "store.db-shm"):
            with (tmp_path / name).open("r+b") as file:
                file.write(b"\xa5" * (tmp_path / name).stat().st_size)
        codes = [server.post("/allocate", REQUEST | {"request_id": f"r{i}", "owner": f"o{i}"})[0] for i in range(5)]
        assert codes[-1] == 503, codes
        assert set(codes) <= {200, 503}
        assert ready(server)[1]["status"] == "not ready"
        assert server.metrics()["clustergym_store_unavailable"] == 1
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/status.json")


# Telemetry


def last_obs(store: Path) -> np.ndarray:
    ((blob,),) = rows(store, "SELECT obs FROM allocations ORDER BY seq DESC LIMIT 1")
    return np.frombuffer(blob, np.float32)


def test_the_gpu_load_is_part_of_the_observation(server: Server, store: Path, gpu: StubGpu) -> None:
    gpu.set(util=45, used_mb=9830, total_mb=32768, processes=2)
    assert json.loads(server.get("/readyz"))["status"] == "ready"
    allocate(server)
    np.testing.assert_allclose(last_obs(store)[:5], [0.8, 4000 / 32768, 0.45, 9830 / 32768, 0.2], rtol=1e-5)
    # With MPS, the driver lists the clients separately from the one server process.
    gpu.set(util=100, used_mb=32768, processes=1, mps=4)
    allocate(server)
    np.testing.assert_allclose(last_obs(store)[2:5], [1.0, 1.0, 0.4], rtol=1e-5)
    assert server.metrics()['clustergym_gpu_pods{gpu="0"}'] == 4


def test_a_lost_gpu_is_reported_and_decisions_continue(server: Server, store: Path, gpu: StubGpu) -> None:
    gpu.set(error=15)
    allocate(server)
    np.testing.assert_array_equal(last_obs(store)[2:5], [0, 0, 0])
    found = json.loads(server.get("/readyz"))
    assert found["status"] == "degraded"
    assert "GPU is lost" in found["reasons"][0]
    gpu.set()


# Refused requests


def raw(server: Server, path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text.startswith(b"{") else text
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/allocate", "/feedback"])
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"bearer {TOKEN}x", TOKEN])
def test_requests_without_the_token_are_refused(server: Server, path: str, header: str | None) -> None:
    before = allocations(server)
    status, found = raw(server, path, json.dumps(REQUEST).encode(), {} if header is None else {"Authorization": header})
    assert (status, found["detail"]) == (401, "missing or wrong bearer token")
    assert allocations(server) == before


ODD_TARGETS = [
    "/allocate%0a", "/feedback%0A", "/allocate%0d%0a", "/allocate%00", "/allocate%20", "/allocate%09", "//allocate",
    "/./allocate", "/x/../allocate", "/allocate/", "/allocate//", "/allocate.", "/allocate..", "/allocate;a=1",
    "/ALLOCATE", "/Allocate", "/%61llocate", "/%2fallocate", "/%252fallocate", "/allocate?x=/healthz", "/allocate%3fx",
    "/allocate%23x", "/allocate\\", "/allocate%c0%af", "/healthz%0a", "/healthz/../allocate", "/metrics%0a",
    "/metrics/", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/", "*", "http://127.0.0.1/allocate",
    "http://healthz/allocate", "127.0.0.1:8080", "allocate", "/" + "a" * 4000,
]  # fmt: skip


@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "OPTIONS", "CONNECT", "HEAD", "post", "PROPFIND"])
def test_no_odd_path_avoids_the_token_check(server: Server, method: str) -> None:
    before = allocations(server)
    body = json.dumps(REQUEST).encode()
    for target in ODD_TARGETS:
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = connection.recv(65536).decode()
        # 400 comes from the HTTP parser: the request did not reach the application.
        assert answer.split(" ")[1] in ("400", "401"), (method, target, answer)
    for path in ("/healthz", "/readyz", "/metrics"):
        if method not in ("GET", "HEAD"):
            assert raw(server, path, body, {}, method)[0] in (400, 401)
    assert allocations(server) == before


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/allocate/", 404), ("GET", "/docs", 404), ("GET", "/nothing", 404), ("GET", "/redoc", 404),
        ("GET", "/allocate", 405), ("POST", "/healthz", 405), ("DELETE", "/metrics", 405),
        ("GET", "/openapi.json", 200),
    ],
)  # fmt: skip
def test_unknown_paths_are_not_found_after_authentication(server: Server, method: str, path: str, code: int) -> None:
    assert raw(server, path, b"", BEARER, method)[0] == code


def test_a_long_body_is_not_read_on_any_path(server: Server) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    for path in ("/allocate%0a", "/nothing", "/feedback"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 28}\r\n\r\n".encode())
            with contextlib.suppress(OSError):
                for _ in range(64):
                    connection.sendall(b" " * (1 << 20))
    assert psutil.Process(server.process.pid).memory_info().rss - before < 32 << 20


BEARER = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


def body_with(**changes: Any) -> bytes:
    return json.dumps(REQUEST | changes).encode()


@pytest.mark.parametrize(
    ("body", "code", "where"),
    [
        (b"", 400, "EOF"), (b"{", 400, "EOF"), (b"[]", 422, "object"), (b"null", 422, "object"),
        (b"\xff\xfe", 400, "JSON"), (b"[" * 10_000, 400, "JSON"), (b"{}", 422, "cores"),
        (body_with(cores=0), 422, "cores"), (body_with(cores=101), 422, "cores"),
        (body_with(cores="many"), 422, "cores"), (body_with(cores=float("nan")), 422, "cores"),
        (body_with(memory=float("inf")), 422, "memory"), (body_with(memory=-1), 422, "memory"),
        (body_with(owner=""), 422, "owner"), (body_with(owner="x" * 300), 422, "owner"),
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused_with_a_reason(server: Server, body: bytes, code: int, where: str) -> None:
    status, found = raw(server, "/allocate", body, BEARER)
    assert status == code, found
    assert where in json.dumps(found["detail"])


@pytest.mark.parametrize(
    "change",
    [
        {"actual_usage": -1},
        {"actual_usage": 101},
        {"actual_usage": None},
        {"qos_met": "perhaps"},
        {"pods": -1},
        {"pods": 1.5},
    ],
)
def test_invalid_feedback_is_refused_and_can_be_corrected(server: Server, change: dict[str, Any]) -> None:
    found = allocate(server)
    status, problem = server.post("/feedback", report(found["allocation_id"], **change))
    assert status == 422, problem
    assert next(iter(change)) in json.dumps(problem)
    assert feedback(server, found["allocation_id"])["status"] == "accepted"


def test_long_bodies_are_refused(server: Server) -> None:
    status, found = raw(server, "/allocate", b" " * 20_000, BEARER)
    assert (status, found["detail"]) == (413, "the body is longer than 16384 bytes")

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", "/allocate")
    for name, value in (*BEARER.items(), ("Transfer-Encoding", "chunked")):
        connection.putheader(name, value)
    connection.endheaders()
    for _ in range(4):  # the fourth is too much; the server may close the connection then, so nothing follows it
        connection.send(b"1388\r\n" + b" " * 5000 + b"\r\n")
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server: Server) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [
        Path(sys.executable).with_name("schemathesis"), "run", f"http://127.0.0.1:{server.port}/openapi.json",
        "--checks", checks, "--max-examples", "25", "--seed", "1", "--header", f"Authorization: Bearer {TOKEN}",
        "--no-color", "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing",
    ]  # fmt: skip
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    document = json.loads(server.get("/openapi.json"))
    assert document["paths"]["/allocate"]["post"]["security"] == [{"bearer": []}]


# Learning


def rounds(server: Server, n: int, **changes: Any) -> list[dict[str, Any]]:
    """Make n allocations and give feedback on each."""
    found = [allocate(server, **changes) for _ in range(n)]
    for one in found:
        assert feedback(server, one["allocation_id"])["status"] == "accepted"
    return found


def newest(store: Path) -> dict[str, Any]:
    with open_store(store) as connection:
        return load_newest(connection)


@pytest.mark.slow
def test_each_feedback_is_learned_from_once_even_across_kills(tmp_path: Path) -> None:
    flags = ("--update-interval-s", 0.05, "--max-policy-lag", 0)
    with agent_server(tmp_path, *flags) as server:
        found = rounds(server, 32)
        assert {one["policy_version"] for one in found} == {0}
        wait_until(lambda: version(server) == 1, "the first update")
        assert {"agent", "optimizer", "statistics"} <= set(newest(tmp_path))
        for one in found:
            assert feedback(server, one["allocation_id"])["status"] == "duplicate"
        repeated = allocate(server, request_id="pod")
        assert feedback_counts(server) == {"accepted": 32, "duplicate": 32}
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        server.kill()
        ended = lambda: not any(child.is_running() for child in children)  # noqa: E731
        wait_until(ended, "the learner process ends with its parent")
    with agent_server(tmp_path, *flags) as server:
        assert version(server) == 1
        assert allocate(server, request_id="pod") == repeated
        assert feedback(server, found[0]["allocation_id"])["status"] == "duplicate"
        assert (newest(tmp_path)["version"], newest(tmp_path)["experiences"]) == (1, 32)
        # A learner process that dies is restarted and continues where it was.
        children = psutil.Process(server.process.pid).children()
        (learner,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        learner.kill()
        wait_until(lambda: server.metrics()["clustergym_learner_restarts_total"] == 1, "a new learner process")
        rounds(server, 32)
        wait_until(lambda: version(server) == 2, "the second update")
        assert newest(tmp_path)["experiences"] == 64
        # A rollback, while the agent runs.
        assert cli.main(["agent", "rollback", "--store", str(tmp_path), "--to", "1"]) == 0
        wait_until(lambda: version(server) == 3, "the rollback")
        rounds(server, 32)
        wait_until(lambda: version(server) == 4, "the learner continues from it")
        with open_store(tmp_path) as connection:
            notes = [one.note for one in kept_versions(connection)]
        assert notes == ["initial", "update", "update", "rollback to 1", "update"]
        # A version that cannot be read is reported, and the old policy stays.
        with open_store(tmp_path) as connection:
            connection.execute("INSERT INTO versions VALUES (5, 0, 'broken', '{}', zeroblob(9))")
        wait_until(lambda: version(server) == 5, "an older version takes the place of the broken one")
        assert "version 5 cannot be read" in server.log.read_text()
        # Two agents on one store would overwrite each other's state.
        with pytest.raises(RuntimeError, match="is in use by another agent"), agent_server(tmp_path):
            pass
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


@pytest.mark.slow
def test_the_gaussian_agent_of_the_task(tmp_path: Path) -> None:
    """Five numbers in, two out, 32 experiences, one update, behind /allocate and /feedback."""
    flags = ("--preset", "seed", "--no-rails", "--explore", "all", "--update-interval-s", 0.05)
    with agent_server(tmp_path, *flags) as server:
        found = rounds(server, 32)
        assert {one["decided_by"] for one in found} == {"policy"}
        assert len({one["cores"] for one in found}) > 3
        assert all(10 <= one["cores"] <= 80 and 512 <= one["memory"] <= 4000 for one in found)
        wait_until(lambda: version(server) == 1, "the update")
        ((obs, action),) = rows(tmp_path, "SELECT obs, action FROM allocations LIMIT 1")
        assert (len(np.frombuffer(obs, np.float32)), len(np.frombuffer(action, np.float32))) == (5, 2)
    # The agent continues from what it has learned, even with another preset.
    with agent_server(tmp_path) as server:
        assert version(server) == 1


def test_an_agent_without_learning_has_no_learner(server: Server, tmp_path: Path) -> None:
    with agent_server(tmp_path, "--explore", "off", "--no-telemetry") as other:
        assert ready(other)[1] == {"status": "ready", "reasons": [], "policy_version": 0}
        assert not psutil.Process(other.process.pid).children()
        rounds(other, 3)
        assert not rows(tmp_path, "SELECT * FROM feedback WHERE learnable")


@pytest.mark.slow
def test_kills_under_load_lose_no_feedback_and_count_none_twice(tmp_path: Path) -> None:
    """Two rounds of benchmarks/agent/agent_kill.py, which checks the store after each kill."""
    args = agent_kill.Args(rounds=3, connections=8, shortest=0.5, longest=1.0)
    last = agent_kill.run_rounds(args, tmp_path)[-1]
    assert last["stored"] >= last["acknowledged"] > 0


def test_smoke_load(server: Server) -> None:
    load = asyncio.run(run_load(server.port, 16, 1.0))
    assert not load.errors
    assert load.accepted


def test_an_agent_whose_versions_are_all_damaged_starts_with_a_new_policy(tmp_path: Path) -> None:
    with agent_server(tmp_path, "--explore", "off") as server:
        known = rounds(server, 8)[0]["allocation_id"]
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    with open_store(tmp_path) as connection:
        connection.execute("UPDATE versions SET state = x'80'")
        connection.execute("UPDATE owners SET state = '{}'")
        connection.execute("UPDATE meta SET value = '[]' WHERE key = 'trials'")
        connection.execute("UPDATE allocations SET decision = '{}' WHERE seq > 6")
    with agent_server(tmp_path, "--explore", "off") as server:
        status, found = ready(server)
        assert (status, found["policy_version"]) == (200, 1)
        assert "the agent begins with a new policy" in found["reasons"][0]
        assert feedback(server, known)["status"] == "duplicate"
        assert json.loads(server.get("/status.json"))["pods"]
        rounds(server, 8)


def test_an_agent_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "empty").chmod(0o600)
    command = [sys.executable, SCRIPT, "--store", tmp_path / "s", "--token-file", tmp_path / "empty"]
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr == f"error: token file {tmp_path / 'empty'} is empty: expected a token\n"
    (tmp_path / "s" / "store.db").mkdir(parents=True)
    found = subprocess.run([str(part) for part in command[:4]], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.startswith(f"error: the store {tmp_path / 's'} cannot be used: ")
