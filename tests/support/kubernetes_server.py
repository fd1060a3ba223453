"""A real kube-apiserver and etcd for tests, started from KUBEBUILDER_ASSETS on loopback."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes import free_port, running, wait_until

WEBHOOK_USER = "system:serviceaccount:clustergym:clustergym-webhook"
COLLECTOR_USER = "system:serviceaccount:clustergym:clustergym-collector"


@dataclass
class Cluster:
    """Access to the API server, as its administrator and as the service accounts of the webhook and the collector."""

    url: str
    ca: Path
    webhook_token: Path
    collector_token: Path
    client: httpx.Client

    def post(self, path: str, body: dict[str, Any], **parameters: str) -> httpx.Response:
        return self.client.post(path, json=body, params=parameters)

    def create(self, path: str, body: dict[str, Any], **parameters: str) -> dict[str, Any]:
        """Create an object and check that it is accepted."""
        response = self.post(path, body, **parameters)
        assert response.status_code == 201, response.text
        found: dict[str, Any] = response.json()
        return found

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        response = self.client.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def namespace(self, name: str, **labels: str) -> str:
        """Create a namespace with its name as a label, which this old API server does not add."""
        metadata = {"name": name, "labels": {"kubernetes.io/metadata.name": name, **labels}}
        response = self.post("/api/v1/namespaces", {"metadata": metadata})
        if response.status_code == 409:
            patch = {"Content-Type": "application/merge-patch+json"}
            self.client.patch(f"/api/v1/namespaces/{name}", json={"metadata": metadata}, headers=patch)
        return name

    def bind(self, namespace: str, name: str, node: str, **parameters: str) -> httpx.Response:
        """Bind a pod to a node, as a scheduler does."""
        body = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "namespace": namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }  # fmt: skip
        return self.post(f"/api/v1/namespaces/{namespace}/pods/{name}/binding", body, **parameters)


def assets() -> Path:
    """The folder with kube-apiserver and etcd. Skips the test if there is none."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        pytest.skip(
            "KUBEBUILDER_ASSETS is not set to a folder with kube-apiserver and etcd: no test with a real API server"
        )
    for name in ("kube-apiserver", "etcd"):
        if not (Path(folder) / name).is_file():
            pytest.skip(f"KUBEBUILDER_ASSETS={folder} has no {name}: no test with a real API server")
    return Path(folder)


@contextmanager
def cluster(folder: Path, admission: Path | None = None, services: str = "10.0.0.0/24") -> Iterator[Cluster]:
    """Run etcd and kube-apiserver with RBAC, with this AdmissionConfiguration and range of service addresses."""
    binaries = assets()
    etcd_port, peer_port, port = free_port(), free_port(), free_port()
    key, tokens = folder / "sa.key", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens.write_text(
        f'admin-token,admin,1,"system:masters"\nwebhook-token,{WEBHOOK_USER},2\ncollector-token,{COLLECTOR_USER},3\n'
    )
    webhook_token, collector_token = folder / "webhook-token", folder / "collector-token"
    webhook_token.write_text("webhook-token\n")
    collector_token.write_text("collector-token\n")
    log = folder / "apiserver.log"
    with ExitStack() as stack:
        etcd = f"http://127.0.0.1:{etcd_port}"
        peer = f"http://127.0.0.1:{peer_port}"
        stack.enter_context(
            running(
                [
                    binaries / "etcd", "--data-dir", folder / "etcd", "--listen-client-urls", etcd,
                    "--advertise-client-urls", etcd, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"default={peer}",
                ],
                folder / "etcd.log",
            )
        )  # fmt: skip
        server = stack.enter_context(
            running(
                [
                    binaries / "kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={port}",
                    "--bind-address=127.0.0.1", f"--cert-dir={folder / 'certs'}",
                    f"--service-cluster-ip-range={services}", "--service-account-issuer=https://kubernetes.test",
                    f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
                    f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
                    "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
                    *([] if admission is None else [f"--admission-control-config-file={admission}"]),
                ],
                log,
            )
        )  # fmt: skip
        ca = folder / "certs" / "apiserver.crt"
        wait_until(ca.is_file, "the API server's certificate", server, log)
        url = f"https://127.0.0.1:{port}"
        context = ssl.create_default_context(cafile=str(ca))
        client = stack.enter_context(
            httpx.Client(
                base_url=url, verify=context, headers={"Authorization": "Bearer admin-token"}, timeout=20,
                trust_env=False,
            )
        )  # fmt: skip

        def ready() -> bool:
            with suppress(httpx.HTTPError):
                return client.get("/readyz").status_code == 200
            return False

        wait_until(ready, "the API server", server, log)
        yield Cluster(url, ca, webhook_token, collector_token, client)
