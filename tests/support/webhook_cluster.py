"""A kube-apiserver with the webhooks of every backend, healthy and faulty, and agents on its nodes."""

from __future__ import annotations

import base64
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent_client import TOKEN, agent_server
from agent_client import Server as Agent
from certificates import make_certificates
from clustergym.kubernetes import BACKENDS, MODES
from kubernetes_server import Cluster, cluster
from processes import free_port, running, wait_until
from webhook_pods import pod
from webhook_servers import AgentServer, faulty_webhook, served

ROOT = Path(__file__).parents[2]
CORES, MEMORY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
AGENT_MODES = ("good", "slow", "401", "500", "garbage", "empty", "greedy", "injection", "down", "real")
# Row of the contract table -> (status with failurePolicy Fail, status with Ignore).
TABLE = {
    "down": (500, 201),
    "other-uid": (500, 201),
    "no-patch-type": (500, 201),
    "v1beta1": (500, 201),
    "bad-patch": (500, 500),
    "slow": (500, 201),
    "denied": (403, 403),
}
NAMES = (f"pod-{i}" for i in itertools.count())


@dataclass
class Setup:
    """The servers of the tests.

    Namespaces are named after the backend of their webhook and their mode; "mps" and "down" are in mode Initial, and
    the webhook of "down" is down. The webhooks of HAMi and KAI ask the recommender about pods that do not name a node.
    """

    cluster: Cluster
    agents: dict[str, AgentServer]
    agent_port: int
    recommender: AgentServer
    metrics: dict[str, str]
    """URL of the metrics of each webhook."""
    folder: Path
    ports: dict[str, int]
    """Ports of the webhooks for which the API server has a client certificate."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """The running webhooks."""

    def calls(self) -> float:
        """Number of calls of our webhooks that the API server has made, answered or not."""
        families = text_string_to_metric_families(self.cluster.client.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "apiserver_admission_webhook_admission_duration_seconds_count"
            and sample.labels["name"].startswith("mps.")
        )

    def request_count(self) -> int:
        """Number of requests that the agents have received."""
        return sum(len(agent.seen) for agent in self.agents.values())

    def decisions(self, suite: str) -> float:
        """Number of reviews that a webhook has answered."""
        families = text_string_to_metric_families(httpx.get(self.metrics[suite], trust_env=False).text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "clustergym_webhook_decisions_total"
        )


def documents(*names: str) -> list[dict[str, Any]]:
    return [one for name in names for one in yaml.safe_load_all((ROOT / "deploy" / "base" / name).read_text())]


def configuration(name: str, ports: dict[str, int], bundle: str, suite: str) -> dict[str, Any]:
    """The configuration of deploy/ for the namespaces of one suite, with a URL instead of a Service."""
    (found,) = documents("mutating-webhook.yaml")
    found["metadata"] = {"name": name}
    for webhook in found["webhooks"]:
        path = webhook["clientConfig"]["service"]["path"]
        webhook["clientConfig"] = {"url": f"https://127.0.0.1:{ports[suite]}{path}", "caBundle": bundle}
        webhook["name"] = f"{suite}.{webhook['name']}"
        webhook["namespaceSelector"]["matchLabels"]["suite"] = suite
    return found


def faulty(ports: dict[str, int], bundle: str) -> list[dict[str, Any]]:
    """One webhook per row of the table and policy, for pods with its label, and a sidecar injector."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}

    def webhook(row: str, policy: str, labels: dict[str, str]) -> dict[str, Any]:
        port = ports["down" if row == "down" else "faulty"]
        return {
            "name": f"{row}.{policy.lower()}.test.io", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/{row}", "caBundle": bundle}, "rules": [rule],
            "failurePolicy": policy, "timeoutSeconds": 1, "objectSelector": {"matchLabels": labels},
        }  # fmt: skip

    rows = [webhook(row, policy, {"row": f"{row}-{policy}"}) for row in TABLE for policy in ("Fail", "Ignore")]
    sidecar = webhook("add-container", "Fail", {"sidecar": "true"})
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
    return [
        {**kind, "metadata": {"name": "table"}, "webhooks": rows},
        {**kind, "metadata": {"name": "zz-after-ours"}, "webhooks": [sidecar]},
    ]


def says_running(log: Path) -> bool:
    return log.read_text().count("running on") == 3


def admission_configuration(certificates: Path, ports: list[int]) -> Path:
    """The files of make_certificates, for webhooks with URLs: their users are named after host and port."""
    path = certificates / "webhook-kubeconfig.yaml"
    kubeconfig = yaml.safe_load(path.read_text())
    (user,) = kubeconfig["users"]
    kubeconfig["users"] = [user | {"name": f"{user['name']}:{port}"} for port in ports]
    path.write_text(yaml.safe_dump(kubeconfig))
    return certificates / "admission.yaml"


@contextmanager
def webhook_server(setup: Setup, name: str, backend: str, recommender_url: str | None) -> Iterator[str]:
    """Run a webhook on one of the ports. Returns the URL of its metrics."""
    log, metrics_port, certificates = setup.folder / f"{name}.log", free_port(), setup.folder / "tls"
    api = setup.cluster
    command = [
        Path(sys.executable).with_name("clustergym"), "webhook", "--host", "127.0.0.1",
        "--port", setup.ports[name], "--health-port", free_port(), "--metrics-port", metrics_port,
        "--cert", certificates / "tls.crt", "--key", certificates / "tls.key",
        "--client-ca", certificates / "client-ca.crt", "--backend", backend,
        "--agent-url", f"http://{{ip}}:{setup.agent_port}", "--agent-token-file", setup.folder / "agent-token",
        "--api-server", api.url, "--api-token-file", api.webhook_token, "--api-ca", api.ca, "--deadline-s", "2",
        *([] if recommender_url is None else ["--recommender-url", recommender_url]),
    ]  # fmt: skip
    with running(command, log) as process:
        wait_until(partial(says_running, log), "the webhook", process, log)
        setup.processes[name] = process
        yield f"http://127.0.0.1:{metrics_port}/metrics"


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        certificates = folder / "tls"
        make_certificates(certificates, ["127.0.0.1"])
        ports = {name: free_port() for name in ("down", "spare", *BACKENDS)}
        api = stack.enter_context(cluster(folder, admission_configuration(certificates, list(ports.values()))))
        bundle = base64.b64encode((certificates / "ca.crt").read_bytes()).decode()
        token = folder / "agent-token"
        token.write_text(TOKEN + "\n")
        # Each agent has its own address and all have the same port, as on real nodes.
        port = free_port()
        agents = {}
        for i, mode in enumerate(AGENT_MODES):
            address = f"127.0.0.{10 + i}"
            node = {"metadata": {"name": f"node-{mode}"}}
            api.create("/api/v1/nodes", node)
            status = node | {"status": {"addresses": [{"type": "InternalIP", "address": address}]}}
            headers = {"Content-Type": "application/merge-patch+json"}
            api.client.patch(f"/api/v1/nodes/node-{mode}/status", json=status, headers=headers)
            if mode not in ("down", "real"):
                agents[mode] = AgentServer(address, port, mode)
                stack.enter_context(served(agents[mode]))
        for one in documents("namespace.yaml", "rbac.yaml"):
            group = "/api/v1" if one["apiVersion"] == "v1" else f"/apis/{one['apiVersion']}"
            namespace = one["metadata"].get("namespace")
            inside = f"/namespaces/{namespace}" if namespace else ""
            api.create(f"{group}{inside}/{one['kind'].lower()}s", one)
        recommender = AgentServer("127.0.0.9", port)
        stack.enter_context(served(recommender))
        ports["faulty"] = stack.enter_context(faulty_webhook(certificates))
        metrics: dict[str, str] = {}
        found = Setup(api, agents, port, recommender, metrics, folder, ports)
        for backend in BACKENDS:
            url = None if backend == "mps" else f"http://127.0.0.9:{port}"
            metrics[backend] = stack.enter_context(webhook_server(found, backend, backend, url))
        for suite, modes in (("mps", MODES), ("hami", MODES), ("kai", ("Initial",)), ("down", ("Initial",))):
            for mode in modes:
                label = {"clustergym.io/mode": mode, "suite": suite}
                api.namespace(
                    suite if suite in ("mps", "down") and mode == "Initial" else f"{suite}-{mode.lower()}", **label
                )
            one = configuration(f"clustergym-{suite}", ports, bundle, suite)
            api.create("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", one)
        api.namespace("not-opted-in", suite="mps")
        api.namespace("plain")
        api.namespace("kube-system", suite="mps", **{"clustergym.io/mode": "Initial"})
        for one in faulty(ports, bundle):
            api.create("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", one)
        path = "/api/v1/namespaces/{}/pods"

        def effective() -> bool:
            # The API server loads new configurations after a delay. The sidecar injector is the last one.
            tried = [
                api.create(path.format(suite), pod(labels={"sidecar": "true"}), dryRun="All")["spec"]["containers"]
                for suite in ("mps", "hami-initial", "kai-initial")
            ]
            return all(len(found) == 2 and found[0].get("env") for found in tried)

        wait_until(effective, "the configurations take effect")
        yield found


def made(setup: Setup, subject: dict[str, Any], namespace: str = "mps", **parameters: str) -> dict[str, Any]:
    subject["metadata"]["name"] = next(NAMES)
    return setup.cluster.create(f"/api/v1/namespaces/{namespace}/pods", subject, **parameters)


def on_node(subject: dict[str, Any], node: str) -> dict[str, Any]:
    """The pod, which names its node."""
    subject["spec"]["nodeName"] = node
    return subject


def environment(found: dict[str, Any], kind: str = "containers", index: int = 0) -> dict[str, str]:
    """Variables as a kubelet would resolve them."""
    annotations = found["metadata"].get("annotations", {})
    result = {}
    for variable in found["spec"][kind][index].get("env", []):
        reference = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        # A kubelet reads a missing annotation as the empty string.
        key = None if reference is None else reference.split("'")[1]
        result[variable["name"]] = variable.get("value") if key is None else annotations.get(key, "")
    return result


@pytest.fixture(scope="module")
def real_agent(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """The real agent of node-real, which is also a recommender."""
    address = f"127.0.0.{10 + AGENT_MODES.index('real')}"
    store = tmp_path_factory.mktemp("agent")
    with agent_server(store, "--explore", "off", host=address, port=setup.agent_port, ready_s=180) as server:
        yield server
