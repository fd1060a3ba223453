"""Security of the agent: tokens, slow and many clients, certificates, file modes, log lines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_client import SCRIPT, TOKEN, Server, agent_server
from certificates import make_certificates
from clustergym.agent.credentials import Access
from processes import wait_until

REQUEST = {"owner": "team/Deployment/web", "cores": 80, "memory": 4000, "qos_class": "best-effort"}
OUTCOME = {"actual_usage": 30, "qos_met": True, "pods": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent") / "store"


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    """An agent that allows few connections and little time."""
    flags = ("--explore", "off", "--max-connections", 20, "--read-timeout-s", 1)
    with agent_server(store, *flags) as one:
        yield one


def allocate(server: Server, **changes: Any) -> dict[str, Any]:
    status, found = server.post("/allocate", REQUEST | changes)
    assert status == 200, found
    return dict(found)


def decisions(server: Server) -> float:
    return sum(value for name, value in server.metrics().items() if name.startswith("clustergym_allocations_total"))


# Tokens


def test_every_role_may_do_only_its_own(tmp_path: Path) -> None:
    paths = {role: tmp_path / role for role in ("operator", "webhook", "collector")}
    for role, path in paths.items():
        path.touch(mode=0o600)
        path.write_text(f"{role}-token\n")
    access = Access(**paths)

    def allowed(method: str, path: str) -> set[str]:
        return {role for role in (*paths, "unknown") if access.allows(method, path, f"Bearer {role}-token".encode())}

    assert allowed("POST", "/allocate") == {"operator", "webhook"}
    assert allowed("POST", "/feedback") == {"operator", "collector"}
    for method, path in (("GET", "/status.json"), ("GET", "/feedback"), ("PUT", "/allocate"), ("POST", "//feedback")):
        assert allowed(method, path) == {"operator"}, path


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def accepts(access: Access, header: bytes) -> bool:
    return access.allows("GET", "/status.json", header)


def test_every_line_of_the_file_is_a_token(tmp_path: Path) -> None:
    """To change a token without a gap, both are in the file for a while."""
    access = Access(token_file(tmp_path, "old\n\n new \n"))
    assert all(accepts(access, f"Bearer {one}".encode()) for one in ("old", "new"))
    refused = (b"Bearer ", b"Bearer", b"", b"Bearer old new", b"old", b"bearer old", b"Bearer  old", b"Bearer \xff")
    assert not any(accepts(access, one) for one in refused)
    token_file(tmp_path, "new\n")
    access.refresh()
    assert not accepts(access, b"Bearer old")
    assert accepts(access, b"Bearer new")


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("x", 0o644, r"can be used by every user \(mode 644\): chmod 600"),
        ("x", 0o602, r"can be used by every user \(mode 602\)"),
        (" \n", 0o600, "is empty: expected a token"),
    ],
)
def test_a_bad_token_file_is_refused_at_the_start_and_reported_later(
    tmp_path: Path, text: str, mode: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Access(token_file(tmp_path, text, mode))
    access = Access(token_file(tmp_path, "good", 0o440))
    token_file(tmp_path, text, mode)
    access.refresh()
    assert access.problems
    assert accepts(access, b"Bearer good")
    assert not accepts(access, b"Bearer x")
    token_file(tmp_path, "better")
    access.refresh()
    assert not access.problems
    assert accepts(access, b"Bearer better")


def test_a_missing_token_file_is_reported_and_the_old_token_stays(server: Server, store: Path) -> None:
    (store / "token").unlink()
    wait_until(lambda: "cannot be read" in server.get("/readyz"), "the problem in /readyz")
    assert server.post("/allocate", REQUEST)[0] == 200
    token_file(store, "rotated\n")
    wait_until(lambda: server.post("/allocate", REQUEST, token="rotated")[0] == 200, "the rotated token")
    assert server.post("/allocate", REQUEST)[0] == 401
    token_file(store, TOKEN + "\n")
    wait_until(lambda: server.post("/allocate", REQUEST)[0] == 200, "the first token again")


# Files


def run_agent(*flags: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [str(part) for part in (sys.executable, SCRIPT, *flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def test_a_world_readable_token_file_ends_the_program(tmp_path: Path) -> None:
    path = token_file(tmp_path, "token", 0o644)
    found = run_agent("--store", tmp_path / "s", "--token-file", path)
    assert found.returncode == 1
    assert found.stderr == f"error: token file {path} can be used by every user (mode 644): chmod 600 {path}\n"


@pytest.mark.parametrize(
    ("port", "reason"), [(99_999, "error: --port is 99999: expected 0 to 65535\n"), (None, "Address already in use")]
)
def test_a_port_that_cannot_be_used_is_an_error_message(
    server: Server, tmp_path: Path, port: int | None, reason: str
) -> None:
    found = run_agent("--store", tmp_path / "s", "--port", port or server.port)
    assert found.returncode == 1
    assert reason in found.stderr
    assert "Traceback" not in found.stderr


# Slow and many clients


def closed_by_server(connection: socket.socket) -> bool:
    """Wait until the server closes the connection. Raises TimeoutError if it does not."""
    connection.settimeout(20)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


HEAD = f"POST /allocate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"


@pytest.mark.parametrize(
    "sent",
    ["", "POST /allo", HEAD, f"{HEAD}Content-Length: 50\r\n\r\n{{", f"{HEAD}Transfer-Encoding: chunked\r\n\r\n1\r\n{{"],
)
def test_a_request_that_does_not_arrive_ends_its_connection(server: Server, sent: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(sent.encode())
        assert closed_by_server(connection)


@pytest.mark.parametrize("sent", ["POST /allo", f"{HEAD}Content-Length: 50\r\n\r\n{{", "\r\n" * 9])
def test_a_request_after_the_first_that_does_not_arrive_ends_its_connection(server: Server, sent: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in connection.recv(65536)
        connection.sendall(sent.encode())
        assert closed_by_server(connection)


def test_a_client_that_does_not_read_its_answers_is_disconnected(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.2) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def disconnected() -> bool:
            try:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
            except TimeoutError:
                return False
            except ConnectionError:
                return True
            return False

        wait_until(disconnected, "the end of the connection")


def test_a_request_that_arrives_in_parts_is_answered(server: Server) -> None:
    body = json.dumps(REQUEST).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for part in (HEAD[:20], HEAD[20:], f"Content-Length: {len(body)}\r\n\r\n", body[:10], body[10:]):
            connection.sendall(part.encode() if isinstance(part, str) else part)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_body_that_ends_early_is_not_a_request(server: Server) -> None:
    """The part that arrived is valid JSON, but shorter than announced."""
    before = decisions(server)
    body = json.dumps(REQUEST).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(body) + 1}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        closed_by_server(connection)
    assert decisions(server) == before


def test_more_connections_than_allowed_are_refused_and_make_room_again(server: Server) -> None:
    flood = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        with pytest.raises(OSError, match="503"):
            server.get("/healthz")

        def answered() -> bool:
            with contextlib.suppress(OSError):
                return bool(server.get("/healthz"))
            return False

        # Connections that send nothing are closed after a while, though the clients keep them open.
        wait_until(answered, "room for other clients")
    finally:
        for connection in flood:
            connection.close()


# TLS


def certificate_of(port: int, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return int(connection.getpeercert()["serialNumber"], 16)  # type: ignore[index]


def test_a_rotated_certificate_is_loaded(tmp_path: Path) -> None:
    live, new = tmp_path / "live", tmp_path / "new"
    for folder in (live, new):
        make_certificates(folder, ["127.0.0.1"])
    flags = ("--explore", "off", "--tls-cert", live / "tls.crt", "--tls-key", live / "tls.key")
    with agent_server(tmp_path / "store", *flags, ca=live / "ca.crt") as server:
        first = certificate_of(server.port, live / "ca.crt")
        for name in ("tls.key", "tls.crt"):  # for a moment, key and certificate do not fit
            os.replace(new / name, live / name)

        def rotated() -> bool:
            try:
                return certificate_of(server.port, new / "ca.crt") != first
            except ssl.SSLCertVerificationError:
                return False

        wait_until(rotated, "the new certificate")


# Log lines


def test_invalid_requests_do_not_flood_the_log(server: Server) -> None:
    before = len(server.log.read_text().splitlines())
    for _ in range(60):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"\x00\r\n\r\n")
            assert b"400" in connection.recv(1000)
    assert len(server.log.read_text().splitlines()) - before <= 5
