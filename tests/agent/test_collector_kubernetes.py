"""The collector with a real API server, a real Prometheus and the real agent; DCGM's page is served from a file."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from agent_client import TOKEN, agent_server
from agent_client import Server as Agent
from collector_pods import QuietFiles, allocation_id
from kubernetes_server import Cluster, cluster
from processes import free_port, running, wait_until
from webhook_pods import pod
from webhook_servers import AgentServer, Server, served

ROOT = Path(__file__).parents[2]
NODE, NAMESPACE = "node-1", "team"
QUERIES = {
    "latency": 'max(latency_s{app="$pod"})', "fast": 'max(latency_s{app="$pod"}) < bool 0.2', "wrong": "max(",
}  # fmt: skip
"""Queries of the operator."""


@dataclass
class Setup:
    """A collector for one node, and what it reads and reports to."""

    cluster: Cluster
    pages: Path
    """Folder with the pages of DCGM (dcgm) and of the workload (app)."""
    prometheus: str
    agent: Agent
    recommender: AgentServer
    metrics: str
    log: Path
    usage: dict[str, tuple[float, float]] = field(default_factory=dict)

    def use(self, name: str, ratio: float, memory_mb: float) -> None:
        """Set what DCGM measures of the GPU of a pod."""
        self.usage[name] = ratio, memory_mb
        text = ""
        for metric, index in (("DCGM_FI_PROF_SM_ACTIVE", 0), ("DCGM_FI_DEV_FB_USED", 1)):
            text += f"# TYPE {metric} gauge\n"
            for pod_name, values in self.usage.items():
                labels = f'UUID="GPU-{pod_name}",container="main",namespace="{NAMESPACE}",pod="{pod_name}"'
                text += f"{metric}{{{labels}}} {values[index]}\n"
        publish(self.pages / "dcgm", text)

    def start(self, name: str, allocation: str | None = None, **annotations: str) -> None:
        """Create a pod that was granted 40 of 80 %, bind it, and say that it is running.

        With an allocation, the real agent is that of the node; otherwise the recommender has decided.
        """
        subject = pod(name=name)
        subject["metadata"]["annotations"] |= {
            "clustergym.io/allocation-id": allocation or allocation_id(name),
            "clustergym.io/agent": "node" if allocation else "recommender",
            "clustergym.io/requested-cores": "80", "clustergym.io/granted-cores": "40",
            "clustergym.io/granted-memory": "1000",
        } | {f"clustergym.io/{key.replace('_', '-')}": value for key, value in annotations.items()}  # fmt: skip
        self.cluster.create(f"/api/v1/namespaces/{NAMESPACE}/pods", subject)
        assert self.cluster.bind(NAMESPACE, name, NODE).status_code == 201
        self.status(name, phase="Running", conditions=[{"type": "Ready", "status": "True"}])

    def status(self, name: str, **status: Any) -> None:
        """Set the status of a pod, as a kubelet does."""
        response = self.cluster.client.patch(
            f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status",
            content=json.dumps({"status": status}),
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert response.status_code == 200, response.text

    def delete(self, name: str) -> None:
        parameters = {"gracePeriodSeconds": "0"}
        response = self.cluster.client.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", params=parameters)
        assert response.status_code == 200, response.text

    def reports(self, name: str) -> list[dict[str, Any]]:
        return [one for one in list(self.recommender.feedback) if one["allocation_id"] == allocation_id(name)]

    def wait(self, name: str, condition: Any, what: str) -> dict[str, Any]:
        """The first report on a pod that fulfils a condition."""
        wait_until(lambda: any(map(condition, self.reports(name))), what, log=self.log)
        found: dict[str, Any] = next(filter(condition, self.reports(name)))
        return found

    def allocate(self, owner: str) -> str:
        body = {"owner": owner, "cores": 80, "memory": 4000, "request_id": owner}
        status, answer = self.agent.post("/allocate", body)
        assert status == 200, answer
        return str(answer["allocation_id"])


def publish(path: Path, text: str) -> None:
    """Replace a page at once: a reader never sees half of it."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no prometheus in PATH: no test with a real Prometheus")
    folder = tmp_path_factory.mktemp("collector")
    pages = folder / "pages"
    pages.mkdir()
    for name in ("dcgm", "app"):
        publish(pages / name, "# TYPE nothing gauge\nnothing 0\n")
    with ExitStack() as stack:
        api = stack.enter_context(cluster(folder))
        files = Server(("127.0.0.1", 0), partial(QuietFiles, directory=str(pages)))
        stack.enter_context(served(files))
        files_port = files.server_address[1]
        recommender = AgentServer("127.0.0.1", 0)
        stack.enter_context(served(recommender))
        agent = stack.enter_context(agent_server(folder / "agent", "--explore", "off", ready_s=180))
        config, prometheus_port = folder / "prometheus.yml", free_port()
        scrape = {
            "job_name": "app",
            "metrics_path": "/app",
            "static_configs": [{"targets": [f"127.0.0.1:{files_port}"]}],
        }
        config.write_text(yaml.safe_dump({"global": {"scrape_interval": "200ms"}, "scrape_configs": [scrape]}))
        url, log = f"http://127.0.0.1:{prometheus_port}", folder / "prometheus.log"
        command = [
            prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        ]  # fmt: skip
        process = stack.enter_context(running(command, log))
        wait_until(lambda: answers(f"{url}/-/ready"), "Prometheus", process, log)
        for one in yaml.safe_load_all((ROOT / "deploy" / "base" / "namespace.yaml").read_text()):
            api.create("/api/v1/namespaces", one)
        for one in yaml.safe_load_all((ROOT / "deploy" / "base" / "rbac.yaml").read_text()):
            if one["kind"].startswith("Cluster"):
                api.create(f"/apis/{one['apiVersion']}/{one['kind'].lower()}s", one)
        api.namespace(NAMESPACE, **{"clustergym.io/mode": "Initial"})
        api.create("/api/v1/nodes", {"metadata": {"name": NODE}})
        token, port, log = folder / "token", free_port(), folder / "collector.log"
        token.write_text(TOKEN + "\n")
        queries = folder / "queries"
        queries.mkdir()
        for name, query in QUERIES.items():
            (queries / name).write_text(query)
        command = [
            Path(sys.executable).with_name("clustergym"), "collector", "--node", NODE,
            "--agent-url", f"http://127.0.0.1:{agent.port}",
            "--recommender-url", f"http://127.0.0.1:{recommender.server_address[1]}", "--agent-token-file", token,
            "--metrics-url", f"http://127.0.0.1:{files_port}/dcgm", "--prometheus-url", url, "--interval-s", "0.1",
            "--qos-queries", queries,
            "--report-s", "0.3", "--host", "127.0.0.1", "--port", port, "--api-server", api.url,
            "--api-token-file", api.collector_token, "--api-ca", api.ca,
        ]  # fmt: skip
        process = stack.enter_context(running(command, log))
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/healthz"), "the collector", process, log)
        yield Setup(api, pages, url, agent, recommender, f"http://127.0.0.1:{port}/metrics", log)


def test_usage_and_peak_memory_are_reported_again_and_again(setup: Setup) -> None:
    setup.use("steady", 0.25, 700)
    setup.start("steady")
    first = setup.wait("steady", lambda one: one["actual_usage"] == 25.0, "a report")
    assert (first["final"], first["memory_used"], first["qos_met"], first["oom"]) == (False, 700, True, False)
    assert first["owner"] == "team/Pod/steady"
    setup.use("steady", 0.1, 300)
    later = setup.wait("steady", lambda one: one["actual_usage"] == 10.0, "a later report")
    assert (later["memory_used"], later["qos_met"]) == (700, True)
    # The grant of 40 % of the requested 80 % limits the pod.
    setup.use("steady", 0.4, 300)
    limited = setup.wait("steady", lambda one: one["actual_usage"] == 40.0, "a report at the limit")
    assert limited["qos_met"] is False
    setup.delete("steady")
    last = setup.wait("steady", lambda one: one["final"], "the last report")
    assert 10 < last["actual_usage"] < 40
    assert sum(one["final"] for one in setup.reports("steady")) == 1


def test_the_agent_of_the_node_hears_of_its_own_pods(setup: Setup) -> None:
    setup.use("own", 0.25, 700)
    setup.start("own", setup.allocate("team/Pod/own"))
    name = 'clustergym_feedback_total{status="sample"}'
    wait_until(lambda: setup.agent.metrics().get(name, 0) > 1, "samples of the running pod")
    setup.delete("own")
    name = 'clustergym_feedback_total{status="accepted"}'
    wait_until(lambda: setup.agent.metrics().get(name, 0) == 1, "the feedback on its whole life")
    assert setup.reports("own") == []


def test_oom_kills_and_restarts_come_from_the_status(setup: Setup) -> None:
    setup.use("killed", 0.2, 100)
    setup.start("killed")
    setup.wait("killed", lambda one: one["qos_met"], "a first report")
    finished = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://1", "finishedAt": finished}
    container = {
        "name": "main", "image": "cuda", "imageID": "cuda", "ready": True, "restartCount": 1,
        "lastState": {"terminated": ended},
    }  # fmt: skip
    setup.status("killed", containerStatuses=[container])
    report = setup.wait("killed", lambda one: one["oom"], "the report of the kill")
    assert report["qos_met"] is False
    # It is counted once: the next report is good again.
    wait_until(lambda: setup.reports("killed")[-1]["oom"] is False, "the next report")
    setup.status("killed", phase="Succeeded")
    last = setup.wait("killed", lambda one: one["final"], "the last report")
    assert last["oom"] is True


def latency(setup: Setup, name: str, value: float) -> None:
    """Publish a latency, and wait until Prometheus has it."""
    publish(setup.pages / "app", f'# TYPE latency_s gauge\nlatency_s{{app="{name}"}} {value}\n')

    def scraped() -> bool:
        query = {"query": f'latency_s{{app="{name}"}} == {value}'}
        found = httpx.get(f"{setup.prometheus}/api/v1/query", params=query, trust_env=False).json()
        return bool(found["data"]["result"])

    wait_until(scraped, "Prometheus scrapes the latency")


def test_an_expression_of_the_pod_decides_about_its_objective(setup: Setup) -> None:
    latency(setup, "served", 0.1)
    setup.use("served", 0.2, 100)
    setup.start("served", qos_query="latency", qos_objective="0.2")
    met = setup.wait("served", lambda one: one.get("pressure") == 0.5, "a report on the latency")
    assert met["qos_met"] is True
    latency(setup, "served", 0.3)
    missed = setup.wait("served", lambda one: one.get("pressure") == pytest.approx(1.5), "a report on the high latency")
    assert missed["qos_met"] is False
    setup.delete("served")
    setup.wait("served", lambda one: one["final"], "the last report")


def test_a_comparison_in_the_expression_needs_no_objective(setup: Setup) -> None:
    latency(setup, "compared", 0.3)
    setup.use("compared", 0.2, 100)
    setup.start("compared", qos_query="fast")
    setup.wait("compared", lambda one: not one["qos_met"], "a report on the high latency")
    latency(setup, "compared", 0.1)
    wait_until(lambda: setup.reports("compared")[-1]["qos_met"], "a report on the low latency")
    setup.delete("compared")


def test_a_wrong_expression_is_counted_and_the_default_rule_applies(setup: Setup) -> None:
    setup.use("wrong", 0.2, 100)
    setup.start("wrong", qos_query="wrong")
    assert setup.wait("wrong", lambda one: True, "a report")["qos_met"] is True
    text = httpx.get(setup.metrics, trust_env=False).text
    assert 'clustergym_collector_errors_total{source="prometheus"}' in text
    setup.delete("wrong")


def test_the_role_allows_only_to_list_pods_and_namespaces(setup: Setup) -> None:
    headers, client = {"Authorization": "Bearer collector-token"}, setup.cluster.client
    for path in ("/api/v1/pods", "/api/v1/namespaces"):
        assert client.get(path, headers=headers).status_code == 200, path
    for path in ("/api/v1/nodes", "/api/v1/secrets", f"/api/v1/namespaces/{NAMESPACE}/pods/x"):
        assert client.get(path, headers=headers).status_code == 403, path
    assert client.post(f"/api/v1/namespaces/{NAMESPACE}/pods", json=pod(), headers=headers).status_code == 403
