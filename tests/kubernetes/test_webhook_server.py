"""The webhooks as a process: mutual TLS, rotated certificates, invalid bodies, limits, logs and memory use."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from certificates import make_certificates
from clustergym import cli
from clustergym.common.tls import CertificateReloader
from clustergym.kubernetes import certificates
from clustergym.kubernetes.server import ByteBudget
from processes import free_port, running, wait_until
from webhook_pods import pod

COMMAND = [Path(sys.executable).with_name("clustergym"), "webhook"]


@dataclass
class Installed:
    """A running webhook. Its API server and agents are not running."""

    port: int
    folder: Path
    client: httpx.Client
    """Shows the client certificate of the API server."""
    health: httpx.Client
    metrics: httpx.Client
    log: Path
    pid: int

    def context(self, client: Path | None = None) -> ssl.SSLContext:
        """Trusts the webhook, and shows the client certificate of this folder."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        if client is not None:
            context.load_cert_chain(client / "client.crt", client / "client.key")
        return context

    def serial(self) -> int:
        """Serial number of the certificate that a new connection gets."""
        with (
            socket.create_connection(("127.0.0.1", self.port)) as raw,
            self.context(self.folder).wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[Installed]:
    """A webhook with the certificates of this folder."""
    port, health_port, metrics_port, log = free_port(), free_port(), free_port(), folder / "log"
    command = [
        *COMMAND, "--host", "127.0.0.1", "--port", port, "--cert", folder / "tls.crt", "--key", folder / "tls.key",
        "--client-ca", folder / "client-ca.crt", "--health-port", health_port, "--metrics-port", metrics_port,
        "--api-server", f"http://127.0.0.1:{free_port()}", *arguments,
    ]  # fmt: skip
    with running(command, log) as process, ExitStack() as stack:
        wait_until(lambda: log.read_text().count("running on") == 3, "the webhook", process, log)
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.load_cert_chain(folder / "client.crt", folder / "client.key")

        def client(url: str) -> httpx.Client:
            return stack.enter_context(httpx.Client(base_url=url, verify=context, trust_env=False, timeout=30))

        yield Installed(
            port, folder, client(f"https://127.0.0.1:{port}"), client(f"http://127.0.0.1:{health_port}"),
            client(f"http://127.0.0.1:{metrics_port}"), log, process.pid,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("webhook")
    make_certificates(folder, ["127.0.0.1"])
    with started(folder, "--reload-s", "0.1", "--deadline-s", "1") as found:
        yield found


def review(subject: dict[str, Any], resource: str = "pods", sub: str | None = None, **extra: Any) -> dict[str, Any]:
    request = {
        "uid": "u-1", "namespace": "team", "operation": "CREATE", "object": subject, "subResource": sub,
        "resource": {"group": "", "version": "v1", "resource": resource}, **extra,
    }  # fmt: skip
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_the_response_for_a_pod_has_a_patch_and_a_warning(installed: Installed) -> None:
    response = installed.client.post("/mutate/pods/initial?timeout=3s", json=review(pod()))
    found = response.json()["response"]
    assert (found["uid"], found["allowed"], found["patchType"]) == ("u-1", True, "JSONPatch")
    paths = [operation["path"] for operation in json.loads(base64.b64decode(found["patch"]))]
    assert paths[0] == "/spec/containers/0/env"
    assert found["warnings"][0].startswith("clustergym: main: ")


@pytest.mark.parametrize(
    ("path", "resource", "sub", "operation"),
    [
        ("pods/off", "pods", "binding", "CREATE"), ("pods/initial", "pods", None, "UPDATE"),
        ("pods/initial", "nodes", None, "CREATE"),
    ],
)  # fmt: skip
def test_other_resources_and_operations_are_admitted_unchanged(
    installed: Installed, path: str, resource: str, sub: str | None, operation: str
) -> None:
    body = review(pod(), resource, sub, operation=operation)
    found = installed.client.post(f"/mutate/{path}", json=body).json()["response"]
    assert found == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize(
    "subject",
    [
        {"spec": 5}, {"spec": {"containers": 5}}, {"spec": {"containers": [{}]}}, {"spec": {"containers": [None]}},
        {"spec": {"containers": [{"name": "x", "resources": {"limits": 3}}]}},
    ],
)  # fmt: skip
def test_malformed_objects_are_admitted(installed: Installed, subject: dict[str, Any]) -> None:
    """An API server never sends these. They stand for a bug in the webhook, which must not block a pod."""
    body = review(subject | {"metadata": {"labels": {"clustergym.io/allocate": "true"}}})
    response = installed.client.post("/mutate/pods/initial", json=body)
    assert response.status_code == 200
    assert response.json()["response"]["allowed"] is True
    assert "patch" not in response.json()["response"]


@pytest.mark.parametrize("node", ["../secrets", "n/../../x", "N", "x" * 300, "é", " "])
def test_invalid_names_are_not_used_in_urls(installed: Installed, node: str) -> None:
    subject = pod()
    subject["spec"]["nodeName"] = node
    found = installed.client.post("/mutate/pods/initial", json=review(subject)).json()["response"]
    assert found["allowed"] is True
    assert "the node's name is" in base64.b64decode(found["patch"]).decode()


def test_a_pod_that_names_its_node_gets_its_request_if_the_api_server_is_down(installed: Installed) -> None:
    subject = pod()
    subject["spec"]["nodeName"] = "node-1"
    found = installed.client.post("/mutate/pods/initial", json=review(subject)).json()["response"]
    assert found["allowed"] is True
    assert "the API server (node node-1) cannot be reached" in base64.b64decode(found["patch"]).decode()


@pytest.mark.parametrize("body", [b"", b"{", b"null", b'{"kind": "Pod"}', b"\xff\xfe", b"[" * 100_000])
def test_invalid_bodies_are_refused_with_a_reason(installed: Installed, body: bytes) -> None:
    response = installed.client.post("/mutate/pods/initial", content=body)
    assert response.status_code == 400
    assert response.json()["detail"]


def test_a_long_body_is_refused(installed: Installed) -> None:
    response = installed.client.post("/mutate/pods/initial", content=b" " * (4 << 20))
    assert response.status_code == 413
    assert "3145728" in response.json()["detail"]


def test_a_body_of_unknown_length_is_refused(installed: Installed) -> None:
    response = installed.client.post("/mutate/pods/initial", content=iter([b"{}"]))
    assert response.status_code == 411


@pytest.mark.parametrize(
    "path", ["/healthz", "/metrics", "/docs", "/openapi.json", "/mutate/pods", "/mutate/pods/x", "/mutate/pods/auto"]
)
def test_the_webhook_port_serves_only_reviews(installed: Installed, path: str) -> None:
    assert installed.client.post(path, json=review(pod())).status_code == 404
    assert installed.client.get(path).status_code in (404, 405)


# Who may call


def call(installed: Installed, context: ssl.SSLContext) -> int:
    with httpx.Client(verify=context, trust_env=False) as client:
        return client.post(f"https://127.0.0.1:{installed.port}/mutate/pods/initial", json=review(pod())).status_code


def test_only_clients_with_a_certificate_of_the_authority_may_call(installed: Installed, tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"])
    # The serving certificate has another authority, so it is no client certificate.
    own = installed.context()
    own.load_cert_chain(installed.folder / "tls.crt", installed.folder / "tls.key")
    assert call(installed, installed.context(installed.folder)) == 200
    for stranger in (installed.context(), installed.context(tmp_path), own):
        with pytest.raises(httpx.TransportError):
            call(installed, stranger)


def test_a_rotated_client_authority_is_trusted_without_a_restart(tmp_path: Path) -> None:
    old, new, live = tmp_path / "old", tmp_path / "new", tmp_path / "live"
    for folder in (old, new, live):
        make_certificates(folder, ["127.0.0.1"])
    (live / "client-ca.crt").write_bytes((old / "client-ca.crt").read_bytes())
    for name in ("client.crt", "client.key"):
        (live / name).write_bytes((old / name).read_bytes())
    with started(live, "--reload-s", "0.05") as installed:
        with pytest.raises(httpx.TransportError):
            call(installed, installed.context(new))
        (live / "client-ca.crt").write_bytes((new / "client-ca.crt").read_bytes())

        def accepted() -> bool:
            try:
                return call(installed, installed.context(new)) == 200
            except httpx.TransportError:
                return False

        wait_until(accepted, "the new authority")


def test_the_plain_ports_serve_only_health_and_only_metrics(installed: Installed) -> None:
    assert installed.health.get("/healthz").text == "ok"
    assert installed.health.get("/readyz").text == "ok"
    installed.client.post("/mutate/pods/initial", json=review(pod()))
    text = installed.metrics.get("/metrics").text
    assert 'clustergym_webhook_decisions_total{outcome="injected"}' in text
    assert "clustergym_webhook_certificate_expiry_timestamp_seconds" in text
    for client, paths in (
        (installed.health, ("/metrics", "/mutate/pods/initial", "/mutate/bindings", "/", "/healthz/", "/healthz%0a")),
        (installed.metrics, ("/healthz", "/mutate/pods/initial", "/metrics/", "/metrics%00")),
    ):
        for path in paths:
            assert client.get(path).status_code == 404, path
            assert client.post(path, json=review(pod())).status_code == 404, path
    assert installed.health.post("/healthz").status_code == 404


# Limits and logs


def test_many_large_bodies_use_bounded_memory(installed: Installed) -> None:
    """60 bodies of 2.9 MB whose last byte never comes: all would stay in memory, but the budget is 24 MiB."""
    process = psutil.Process(installed.pid)
    before = process.memory_info().rss
    outcomes: list[bytes] = []

    def send() -> None:
        with (
            socket.create_connection(("127.0.0.1", installed.port), timeout=60) as raw,
            installed.context(installed.folder).wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"POST /mutate/pods/initial HTTP/1.1\r\nHost: x\r\nContent-Length: 2900001\r\n\r\n")
            with suppress(OSError):  # the server closes the connection before it has read everything
                connection.sendall(b" " * 2_900_000)
            with suppress(OSError):
                outcomes.append(connection.recv(12))

    threads = [threading.Thread(target=send) for _ in range(60)]
    for thread in threads:
        thread.start()
    peak = before
    for thread in threads:
        while thread.is_alive():
            peak = max(peak, process.memory_info().rss)
            thread.join(0.005)
    # The API server admits a pod unchanged if the webhook is busy.
    assert set(outcomes) <= {b"HTTP/1.1 503", b""}
    assert b"HTTP/1.1 503" in outcomes
    print("growth in MiB", (peak - before) >> 20)
    assert peak - before < 100 << 20
    assert installed.client.post("/mutate/pods/initial", json=review(pod())).status_code == 200


def test_bodies_wait_until_others_are_done() -> None:
    async def scenario() -> list[str]:
        budget, events, first_may_end = ByteBudget(10), [], asyncio.Event()

        async def use(name: str, size: int, until: asyncio.Event | None = None) -> None:
            async with budget.hold(size):
                events.append(f"{name} begins")
                if until is not None:
                    await until.wait()
            events.append(f"{name} ends")

        first = asyncio.create_task(use("first", 8, first_may_end))
        await asyncio.sleep(0)
        second, small = asyncio.create_task(use("second", 8)), asyncio.create_task(use("small", 2))
        await small
        assert "second begins" not in events
        cancelled = asyncio.create_task(use("cancelled", 8))
        await asyncio.sleep(0)
        cancelled.cancel()
        first_may_end.set()
        await asyncio.gather(first, second)
        # A cancelled holder gives its bytes back too.
        third = asyncio.create_task(use("third", 10, asyncio.Event()))
        await asyncio.sleep(0.01)
        third.cancel()
        await asyncio.wait([third])
        await asyncio.wait_for(use("last", 10), 10)
        return events

    events = asyncio.run(scenario())
    assert events.index("second begins") > events.index("small ends")
    assert events[-1] == "last ends"


def test_a_body_that_never_comes_is_given_up(installed: Installed) -> None:
    with (
        socket.create_connection(("127.0.0.1", installed.port)) as raw,
        installed.context(installed.folder).wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        connection.settimeout(30)
        connection.sendall(b"POST /mutate/pods/initial HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 503")


def test_connections_without_progress_are_closed_on_every_port(installed: Installed) -> None:
    """Half of a request after a whole one, and headers without end: both would hold a connection for ever."""
    plain = [
        int(str(client.base_url).rpartition(":")[2].rstrip("/")) for client in (installed.health, installed.metrics)
    ]
    attacks = (b"GET /hea", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 40_000)
    for port, path, sent in zip(plain, ("/healthz", "/metrics"), attacks, strict=True):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection, suppress(ConnectionError):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b"HTTP/1.1 200" in connection.recv(1 << 20)
            connection.sendall(sent)
            while connection.recv(65536):
                pass


def test_no_newline_of_a_request_reaches_a_log_line(installed: Installed) -> None:
    forged = "x\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\u2028\x85y"
    broken = {
        "spec": {"containers": [{"name": forged}, None]},
        "metadata": {"labels": {"clustergym.io/allocate": "true"}},
    }
    for name, subject in ((forged, pod()), (forged, broken)):
        body = review(subject, name=name, namespace=forged)
        assert installed.client.post("/mutate/pods/initial", json=body).status_code == 200
    text = installed.log.read_bytes().decode()
    assert r"x\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\u2028\x85y" in text
    assert "Traceback" in text
    line = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) ")
    assert all(line.match(one) for one in text.splitlines())


def test_a_rotated_certificate_is_used_without_a_restart(installed: Installed) -> None:
    before = installed.serial()
    make_certificates(installed.folder, ["127.0.0.1"])
    wait_until(lambda: _serial_or_none(installed) not in (before, None), "the new certificate")
    # The open connection still works.
    assert installed.client.post("/mutate/pods/initial", json=review(pod())).status_code == 200


def _serial_or_none(installed: Installed) -> int | None:
    try:
        return installed.serial()
    except ssl.SSLError:
        return None


def test_an_incomplete_rotation_keeps_the_old_pair(tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", ["127.0.0.1"])
    make_certificates(tmp_path / "b", ["127.0.0.1"])
    live = tmp_path / "live"
    live.mkdir()
    for name in ("tls.crt", "tls.key"):
        (live / name).write_bytes((tmp_path / "a" / name).read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(live / "tls.crt", live / "tls.key")
    reloader = CertificateReloader(context, live / "tls.crt", live / "tls.key")
    assert not reloader.check()
    (live / "tls.crt").write_bytes((tmp_path / "b" / "tls.crt").read_bytes())
    assert not reloader.check()
    (live / "tls.key").unlink()
    assert not reloader.check()
    (live / "tls.key").write_bytes((tmp_path / "b" / "tls.key").read_bytes())
    assert reloader.check()
    assert not reloader.check()
    assert reloader.loads == 1


def test_an_expired_certificate_is_not_ready(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"], days=0)
    with started(tmp_path) as installed:
        response = installed.health.get("/readyz")
        assert installed.health.get("/healthz").status_code == 200
    assert response.status_code == 503
    assert "certificate expired" in response.text


def test_the_process_is_small(installed: Installed) -> None:
    # Before it has answered anything: what other tests sent may stay in its heap. Torch alone would need 300 MB.
    with started(installed.folder) as fresh:
        assert psutil.Process(fresh.pid).memory_info().rss < 150 << 20
    program = "import sys, clustergym.cli.webhook, clustergym.kubernetes.server; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("torch", "numba", "scipy", "matplotlib", "pygame") if f"'{name}'" in loaded]


def test_a_certificate_is_renewed_before_it_expires_and_when_it_is_damaged() -> None:
    host = "clustergym-webhook.clustergym.svc"
    made = certificates.new_certificate({}, host)
    assert certificates.is_usable(made, host)
    assert certificates.new_certificate(made, host) == {}
    leaf = x509.load_pem_x509_certificate(made["tls.crt"])
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host]
    other = certificates.new_certificate({}, host)
    short = certificates.Authority("short", certificates.RENEWED)
    expiring = dict(zip(("tls.crt", "tls.key"), short.sign(host, ExtendedKeyUsageOID.SERVER_AUTH, [host]), strict=True))
    for damaged in (
        {**made, "tls.crt": b"x"}, {**made, "tls.key": b""}, {**made, "tls.key": other["tls.key"]},
        {**made, "ca.crt": other["ca.crt"]}, {name: made[name] for name in ("tls.crt", "tls.key")},
        {**expiring, "ca.crt": short.certificate},
    ):  # fmt: skip
        assert not certificates.is_usable(damaged, host)
        again = certificates.new_certificate(damaged, host)
        assert certificates.is_usable(again, host)
        # Replicas that still use the old certificate are trusted, too.
        assert again["ca.crt"].endswith(damaged.get("ca.crt", b""))
    assert not certificates.is_usable(made, "another.svc")


def test_only_missing_tokens_are_made() -> None:
    made = certificates.missing_tokens({"operator": b"mine", "webhook": b" \n"})
    assert set(made) == {"webhook", "collector"}
    assert {len(token) for token in made.values()} == {64}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cert", "nowhere.crt"], "--cert nowhere.crt is not a file"),
        (["--client-ca", "nowhere.crt"], "--client-ca nowhere.crt is not a file"),
        (["--cert=None"], "--cert and --key must be given together"),
        (["--cert=None", "--key=None"], "no certificate: give --cert and --key, or --secrets-namespace"),
        (["--secrets-namespace=x", "--agent-token-file=y"], "--secrets-namespace makes the tokens"),
        (["--port", "99999"], "expected three ports, 1 to 65535"),
        (["--port", "8081"], "expected three ports"),
        (["--api-server", "http://x", "--agent-url", "http://{host}"], "expected a URL, possibly with {ip} or {node}"),
        ([], "use --api-server"),
        (["--api-server", "http://x", "--deadline-s", "0"], "deadline is 0.0 s"),
        (["--agent-token-file", "nowhere"], "--agent-token-file nowhere is not a file"),
    ],
)
def test_invalid_settings_are_refused_with_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    make_certificates(tmp_path, ["127.0.0.1"])
    files = {"cert": "tls.crt", "key": "tls.key", "client-ca": "client-ca.crt"}
    flags = [part for flag, name in files.items() for part in (f"--{flag}", str(tmp_path / name))]
    assert cli.main(["webhook", *flags, *arguments]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert cli.main(["webhook"]) == 2
    assert "httpx is not installed: pip install 'clustergym[agent]'" in " ".join(capsys.readouterr().err.split())
