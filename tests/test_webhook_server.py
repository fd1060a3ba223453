"""The webhooks as a process: TLS, rotated certificates, invalid bodies and memory use."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509

from clustergym import cli
from clustergym.webhook.certificates import Reloader, make_certificates
from processes import free_port, running, wait_until
from webhook_pods import pod

COMMAND = [Path(sys.executable).with_name("clustergym"), "webhook"]


@dataclass
class Installed:
    """A running webhook. Its API server and agents are not running."""

    port: int
    folder: Path
    client: httpx.Client
    pid: int

    def serial(self) -> int:
        """Serial number of the certificate that a new connection gets."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        with (
            socket.create_connection(("127.0.0.1", self.port)) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("webhook")
    make_certificates(folder, ["127.0.0.1"])
    port, log = free_port(), folder / "log"
    command = [
        *COMMAND, "--host", "127.0.0.1", "--port", port, "--cert", folder / "tls.crt", "--key", folder / "tls.key",
        "--api-server", f"http://127.0.0.1:{free_port()}", "--reload-s", "0.1", "--deadline-s", "1",
    ]  # fmt: skip
    with running(command, log) as process:
        wait_until(lambda: "running on" in log.read_text(), "the webhook", process, log)
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False) as client:
            yield Installed(port, folder, client, process.pid)


def review(subject: dict[str, Any], resource: str = "pods", sub: str | None = None, **extra: Any) -> dict[str, Any]:
    request = {
        "uid": "u-1", "namespace": "team", "operation": "CREATE", "object": subject, "subResource": sub,
        "resource": {"group": "", "version": "v1", "resource": resource}, **extra,
    }  # fmt: skip
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


BINDING = {"metadata": {"name": "train"}, "target": {"kind": "Node", "name": "node-1"}}


def test_the_response_for_a_pod_has_a_patch_and_a_warning(installed: Installed) -> None:
    response = installed.client.post("/mutate/pods?timeout=3s", json=review(pod()))
    found = response.json()["response"]
    assert (found["uid"], found["allowed"], found["patchType"]) == ("u-1", True, "JSONPatch")
    paths = [operation["path"] for operation in json.loads(base64.b64decode(found["patch"]))]
    assert paths[0] == "/spec/containers/0/env"
    assert found["warnings"][0].startswith("clustergym: main: ")


def test_a_binding_is_admitted_if_the_api_server_is_down(installed: Installed) -> None:
    response = installed.client.post("/mutate/bindings", json=review(BINDING, sub="binding", name="train"))
    found = response.json()["response"]
    assert found["allowed"] is True
    assert "patch" not in found
    assert "cannot be reached" in found["warnings"][0]


@pytest.mark.parametrize(
    ("path", "resource", "sub", "operation"),
    [
        ("pods", "pods", "binding", "CREATE"), ("pods", "pods", None, "UPDATE"), ("pods", "nodes", None, "CREATE"),
        ("bindings", "pods", None, "CREATE"), ("bindings", "pods", "binding", "UPDATE"),
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
    response = installed.client.post("/mutate/pods", json=body)
    assert response.status_code == 200
    assert response.json()["response"]["allowed"] is True
    assert "patch" not in response.json()["response"]


@pytest.mark.parametrize(
    ("target", "name"),
    [(None, "x"), ({"name": "../secrets"}, "x"), ({"name": "n"}, "../../x"), ({"kind": "Other", "name": "n"}, "x")],
)
def test_invalid_names_are_not_used_in_urls(installed: Installed, target: Any, name: str) -> None:
    body = review({"metadata": {"name": name}, "target": target}, sub="binding", name=name)
    found = installed.client.post("/mutate/bindings", json=body).json()["response"]
    assert found["allowed"] is True
    assert "patch" not in found


@pytest.mark.parametrize("body", [b"", b"{", b"null", b'{"kind": "Pod"}', b"\xff\xfe", b"[" * 100_000])
def test_invalid_bodies_are_refused_with_a_reason(installed: Installed, body: bytes) -> None:
    response = installed.client.post("/mutate/pods", content=body)
    assert response.status_code == 400
    assert response.json()["detail"]


def test_a_long_body_is_refused(installed: Installed) -> None:
    response = installed.client.post("/mutate/pods", content=b" " * (9 << 20))
    assert response.status_code == 413
    assert "8388608" in response.json()["detail"]


def test_a_rotated_certificate_is_used_without_a_restart(installed: Installed) -> None:
    before = installed.serial()
    make_certificates(installed.folder, ["127.0.0.1"])
    wait_until(lambda: _serial_or_none(installed) not in (before, None), "the new certificate")
    # The open connection still works.
    assert installed.client.get("/healthz").text == "ok"


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
    reloader = Reloader(context, live / "tls.crt", live / "tls.key")
    assert not reloader.check()
    (live / "tls.crt").write_bytes((tmp_path / "b" / "tls.crt").read_bytes())
    assert not reloader.check()
    (live / "tls.key").unlink()
    assert not reloader.check()
    (live / "tls.key").write_bytes((tmp_path / "b" / "tls.key").read_bytes())
    assert reloader.check()
    assert not reloader.check()
    assert reloader.loads == 1


def test_health_and_metrics(installed: Installed) -> None:
    assert installed.client.get("/healthz").text == "ok"
    assert installed.client.get("/readyz").text == "ok"
    text = installed.client.get("/metrics").text
    assert 'clustergym_webhook_decisions_total{outcome="injected",webhook="pods"}' in text
    assert "clustergym_webhook_certificate_expiry_timestamp_seconds" in text


def test_an_expired_certificate_is_not_ready(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"], days=0)
    port, log = free_port(), tmp_path / "log"
    command = [
        *COMMAND, "--host", "127.0.0.1", "--port", port, "--cert", tmp_path / "tls.crt", "--key", tmp_path / "tls.key",
        "--api-server", "http://127.0.0.1:1",
    ]  # fmt: skip
    with running(command, log) as process:
        wait_until(lambda: "running on" in log.read_text(), "the webhook", process, log)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False, trust_env=False) as client:
            response = client.get("/readyz")
    assert response.status_code == 503
    assert "certificate expired" in response.json()["detail"]


def test_the_process_is_small(installed: Installed) -> None:
    # Torch alone would need 300 MB.
    assert psutil.Process(installed.pid).memory_info().rss < 150 << 20
    program = "import sys, clustergym.cli.webhook, clustergym.webhook.server; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("torch", "numba", "scipy", "matplotlib", "pygame") if f"'{name}'" in loaded]


def test_make_certs_writes_a_certificate_for_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["webhook", "--make-certs", str(tmp_path), "--cert-host", "a.b.svc", "10.0.0.1"]) == 0
    output = capsys.readouterr().out
    bundle = base64.b64encode((tmp_path / "ca.crt").read_bytes()).decode()
    assert bundle in output.replace("\n", "")
    leaf = x509.load_pem_x509_certificate((tmp_path / "tls.crt").read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.b.svc"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    assert (tmp_path / "tls.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cert", "nowhere.crt"], "--cert nowhere.crt is not a file"),
        (["--agent-url", "http://{host}"], "expected a URL with {ip} or {node}"),
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
    pair = ["--cert", str(tmp_path / "tls.crt"), "--key", str(tmp_path / "tls.key")]
    assert cli.main(["webhook", *pair, *arguments]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert cli.main(["webhook"]) == 2
    assert "httpx is not installed: pip install 'clustergym[agent]'" in " ".join(capsys.readouterr().err.split())
