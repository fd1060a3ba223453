"""deploy/quickstart on a real kube-apiserver that knows nothing of us: applied as it is, with nothing prepared.

Pods do not run there. So webhook, recommender and collector run as processes, with the flags, the service accounts and
the secrets of what was applied; the test plays the kubelet.
"""

from __future__ import annotations

import base64
import datetime
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from agent_client import SCRIPT
from clustergym.kubernetes import certificates
from kubernetes_server import Cluster, assets, cluster
from processes import free_port, running, wait_until

ROOT = Path(__file__).parents[2]
SECRETS = "/api/v1/namespaces/clustergym/secrets"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/clustergym"
CLUSTERGYM = Path(sys.executable).with_name("clustergym")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the webhook listens on port 443 of its Service"),
]


@dataclass
class Installed:
    cluster: Cluster
    folder: Path
    objects: dict[str, dict[str, Any]]
    """Kind/name → what was applied."""
    recommender: str
    """URL."""
    address: str
    """Address of the Service of the webhook."""

    def args(self, name: str, **changed: object) -> list[object]:
        """The flags in a manifest, then those that tell a process where the others are."""
        (container,) = self.objects[name]["spec"]["template"]["spec"]["containers"]
        flags = [f"--{flag.replace('_', '-')}={value}" for flag, value in changed.items()]
        api = {"api-server": self.cluster.url, "api-ca": self.cluster.ca}
        if "recommender" not in name:
            flags += [f"--{flag}={value}" for flag, value in api.items()]
        return [*container["args"], *flags]

    def secret(self, name: str) -> dict[str, bytes]:
        data = self.cluster.client.get(f"{SECRETS}/{name}").json().get("data", {})
        return {key: base64.b64decode(value) for key, value in data.items()}

    def webhook(self, port: int, log: str) -> Any:
        flags = self.args(
            "Deployment/clustergym-webhook", host=self.address, port=port, health_port=free_port(),
            metrics_port=free_port(), recommender_url=self.recommender, reload_s=0.3,
            api_token_file=self.cluster.webhook_token,
        )  # fmt: skip
        return running([CLUSTERGYM, "webhook", *flags], self.folder / log)


def kubectl(api: Cluster, *words: object, **options: Any) -> str:
    command = [assets() / "kubectl", "--server", api.url, "--certificate-authority", api.ca, "--token", "admin-token"]
    environment = os.environ | {"HOME": "/nonexistent"}
    found = subprocess.run(
        list(map(str, (*command, *words))), capture_output=True, text=True, env=environment, **options
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("quickstart")
    # Services get addresses on which this process can listen.
    with ExitStack() as stack:
        api = stack.enter_context(cluster(folder, services="127.0.100.0/24"))
        rendered = kubectl(api, "kustomize", ROOT / "deploy" / "quickstart")
        # This API server is 1.20, and policy/v1 came with 1.21. Nor does it label namespaces with their names.
        text = rendered.replace("policy/v1\n", "policy/v1beta1\n")
        kubectl(api, "apply", "-f", "-", input=text)
        api.namespace("clustergym-demo")
        objects = {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(text)}
        service = api.client.get("/api/v1/namespaces/clustergym/services/clustergym-webhook").json()
        port = free_port()
        yield Installed(api, folder, objects, f"http://127.0.0.1:{port}", service["spec"]["clusterIP"])


def demo_pod(installed: Installed, **parameters: str) -> dict[str, Any]:
    """A pod as the Job controller makes it."""
    template = installed.objects["Job/demo"]["spec"]["template"]
    metadata = template["metadata"] | {
        "generateName": "demo-",
        "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "demo", "uid": "1", "controller": True}
        ],
    }  # fmt: skip
    body = {"metadata": metadata, "spec": template["spec"]}
    return installed.cluster.create("/api/v1/namespaces/clustergym-demo/pods", body, **parameters)


def granted_pod(installed: Installed) -> dict[str, Any]:
    """A pod with a grant. On a busy machine the recommender may be too slow for one: then it runs with its request."""
    for _ in range(5):
        pod = demo_pod(installed)
        if pod["metadata"]["annotations"].get("clustergym.io/status") == "granted":
            break
    assert pod["metadata"]["annotations"].get("clustergym.io/status") == "granted", pod["metadata"]["annotations"]
    return pod


def set_phase(installed: Installed, pod: dict[str, Any], phase: str) -> None:
    """What scheduler and kubelet do."""
    if phase == "Running":
        assert installed.cluster.bind("clustergym-demo", pod["metadata"]["name"], "node-1").status_code == 201
    path = f"/api/v1/namespaces/clustergym-demo/pods/{pod['metadata']['name']}/status"
    headers = {"Content-Type": "application/merge-patch+json"}
    body = {"status": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]}}
    assert installed.cluster.client.patch(path, json=body, headers=headers).status_code == 200


def test_the_quickstart_grants_less_after_a_few_pods_with_nothing_prepared(installed: Installed) -> None:
    api, folder = installed.cluster, installed.folder
    assert installed.secret("clustergym-agent-token") == {}
    assert "clustergym.io/status" not in demo_pod(installed)["metadata"]["annotations"]
    with ExitStack() as stack:
        # Two replicas start at the same time and agree on one certificate and one set of tokens.
        first = stack.enter_context(installed.webhook(443, "webhook.log"))
        stack.enter_context(installed.webhook(8443, "second.log"))
        for log in ("webhook.log", "second.log"):
            path = folder / log
            wait_until(lambda path=path: path.read_text().count("running on") == 3, "the webhook", first, path)
        tokens = installed.secret("clustergym-agent-token")
        assert {role: len(token) for role, token in tokens.items()} == {"operator": 64, "webhook": 64, "collector": 64}
        assert len(set(tokens.values())) == 3
        tls = installed.secret("clustergym-webhook-tls")
        bundles = {one["clientConfig"]["caBundle"] for one in api.client.get(CONFIGURATION).json()["webhooks"]}
        assert {base64.b64decode(bundle) for bundle in bundles} == {tls["ca.crt"]}
        # The kubelet mounts the tokens, now that they are there.
        mounted = folder / "tokens"
        mounted.mkdir()
        for role, token in tokens.items():
            (mounted / role).touch(mode=0o600)
            (mounted / role).write_bytes(token)
        flags = installed.args(
            "StatefulSet/clustergym-recommender", host="127.0.0.1", port=installed.recommender.rpartition(":")[2],
            store=folder / "store", min_run_s=0, token_file=mounted / "operator",
            webhook_token_file=mounted / "webhook", collector_token_file=mounted / "collector",
        )  # fmt: skip
        log = folder / "recommender.log"
        agent = stack.enter_context(running([sys.executable, SCRIPT, *flags], log))
        wait_until(lambda: "listening on" in log.read_text(), "the recommender", agent, log)
        flags = installed.args(
            "DaemonSet/clustergym-collector", node="node-1", recommender_url=installed.recommender, port=free_port(),
            agent_token_file=mounted / "collector", interval_s=0.2, api_token_file=api.collector_token,
            host="127.0.0.1", agent_url="None",
        )  # fmt: skip
        flags = [str(flag).replace("$(NODE_NAME)", "node-1") for flag in flags]
        log = folder / "collector.log"
        collector = stack.enter_context(running([CLUSTERGYM, "collector", *flags], log))
        wait_until(lambda: "watching" in log.read_text(), "the collector", collector, log)

        def managed() -> bool:
            return "clustergym.io/status" in demo_pod(installed, dryRun="All")["metadata"]["annotations"]

        wait_until(managed, "the API server trusts the webhook")
        granted = []
        for _ in range(8):
            pod = granted_pod(installed)
            annotations = pod["metadata"]["annotations"]
            granted.append(float(annotations["clustergym.io/granted-cores"]))
            if granted[-1] < 80:
                break
            before = finals(folder)
            set_phase(installed, pod, "Running")
            time.sleep(1.5)
            set_phase(installed, pod, "Succeeded")
            wait_until(lambda before=before: finals(folder) > before, "the feedback")
        assert granted[:5] == [80.0] * 5
        assert granted[-1] < 40
        # The certificate is about to expire: the webhook renews it, and the API server never loses it.
        serial = x509.load_pem_x509_certificate(tls["tls.crt"]).serial_number
        expired = expire(installed)
        wait_until(lambda: serial_of(installed) not in (serial, expired), "the new certificate")
        for _ in range(8):
            assert "clustergym.io/status" in demo_pod(installed)["metadata"]["annotations"]
            time.sleep(1)
        assert "certificate" in (folder / "webhook.log").read_text()
        assert installed.secret("clustergym-agent-token") == tokens  # they stay
        # Applied again, as for an update: what was made is kept.
        text = kubectl(api, "kustomize", ROOT / "deploy" / "quickstart").replace("policy/v1\n", "policy/v1beta1\n")
        kubectl(api, "apply", "-f", "-", input=text)
        assert installed.secret("clustergym-agent-token") == tokens
        granted_pod(installed)
        for path in folder.glob("*.log"):
            assert "Traceback" not in path.read_text(), path


def finals(folder: Path) -> int:
    """Number of finished pods in the store of the recommender."""
    with suppress(sqlite3.Error):
        connection = sqlite3.connect(folder / "store" / "store.db")
        try:
            return int(connection.execute("SELECT count(*) FROM feedback").fetchone()[0])
        finally:
            connection.close()
    return 0


def serial_of(installed: Installed) -> int:
    return x509.load_pem_x509_certificate(installed.secret("clustergym-webhook-tls")["tls.crt"]).serial_number


def expire(installed: Installed) -> int:
    """Replace the certificate by one that ends in a day. Returns its serial number."""
    authority = certificates.Authority("clustergym webhook authority", datetime.timedelta(days=1))
    host = "clustergym-webhook.clustergym.svc"
    certificate, key = authority.sign(host, x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, [host])
    old = installed.secret("clustergym-webhook-tls")["ca.crt"]
    data = {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.certificate + old}
    body = {"data": {name: base64.b64encode(content).decode() for name, content in data.items()}}
    headers = {"Content-Type": "application/merge-patch+json"}
    response = installed.cluster.client.patch(f"{SECRETS}/clustergym-webhook-tls", json=body, headers=headers)
    assert response.status_code == 200
    return x509.load_pem_x509_certificate(certificate).serial_number
