"""Attacks on the collector and on the clients of the webhook: hostile annotations, queries and answers."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_client import TOKEN
from clustergym.agent.collector.collect import Collector
from clustergym.agent.collector.pods import managed_pod
from clustergym.agent.collector.quality import Prometheus, read_queries
from clustergym.agent.collector.usage import Usage
from clustergym.kubernetes.clients import MAX_GRANT_BYTES, Agents, Client, Unavailable
from clustergym.kubernetes.messages import AllocateRequest, is_allocation_id
from collector_pods import Constant, Pods, allocation_id, pod_object
from webhook_servers import AgentServer, Quiet, Server, served


@pytest.fixture
def agent() -> Iterator[AgentServer]:
    server = AgentServer("127.0.0.1", 0)
    with served(server):
        yield server


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def collector_for(
    agent: AgentServer, pods: Pods, token: Path, prometheus: Prometheus | None = None, interval_s: float = 1.0
) -> Collector:
    urls = {"node": f"http://127.0.0.1:{agent.server_address[1]}"}
    return Collector("node-1", pods, Constant(), prometheus, Client(token), urls, interval_s, 3600.0)


def life(agent: AgentServer, token: Path, *hostile: dict[str, Any]) -> Collector:
    """Hostile pods and an honest one live and end. Returns the collector after three steps."""
    pods = Pods()
    collector = collector_for(agent, pods, token)

    async def steps() -> None:
        pods.items = [*hostile, pod_object("honest", 9)]
        await collector.step()
        pods.items = []
        await collector.step()
        await collector.step()
        await collector.close()

    asyncio.run(steps())
    return collector


# Annotations


@pytest.mark.parametrize(
    "annotations",
    [
        {"clustergym.io/allocation-id": "é"},
        {"clustergym.io/allocation-id": "a\nb"},
        {"clustergym.io/allocation-id": "x" * 10_000},
        {"clustergym.io/allocation-id": 7},
        {"clustergym.io/agent": "é\n"},
        {"clustergym.io/owner": "\ud800"},
        {"clustergym.io/granted-cores": "1e-320", "clustergym.io/requested-cores": "1e308"},
        {"clustergym.io/qos-objective": "5e-324", "clustergym.io/qos-query": "x"},
    ],
)
def test_one_pod_does_not_stop_the_feedback_of_the_others(
    agent: AgentServer, token: Path, annotations: dict[str, Any]
) -> None:
    collector = life(agent, token, pod_object("hostile", 1, annotations=annotations))
    assert (allocation_id("honest"), True) in [(one["allocation_id"], one["final"]) for one in agent.feedback]
    assert all(is_allocation_id(one["allocation_id"]) for one in agent.feedback)
    assert not collector.waiting


def test_a_pod_that_is_no_pod_does_not_stop_the_others(agent: AgentServer, token: Path) -> None:
    broken = pod_object("hostile", 1, status={"containerStatuses": [7]})
    collector = life(agent, token, broken)
    assert [one["allocation_id"] for one in agent.feedback] == [allocation_id("honest")]
    assert collector.errors.labels("collector")._value.get() > 0


def test_a_report_that_the_agent_cannot_take_does_not_wait(agent: AgentServer, token: Path) -> None:
    agent.mode = "bug"
    collector = life(agent, token)
    assert not collector.waiting
    assert agent.feedback == []


def test_annotations_hold_no_credentials(agent: AgentServer, token: Path) -> None:
    life(agent, token, pod_object("p", 1, annotations={"clustergym.io/feedback-token": "of-this-pod"}))
    assert set(agent.tokens) == {f"Bearer {TOKEN}"}


def test_pods_of_namespaces_that_did_not_opt_in_are_ignored(agent: AgentServer, token: Path) -> None:
    stranger = pod_object("stranger", 1)
    stranger["metadata"]["namespace"] = "elsewhere"
    life(agent, token, stranger)
    assert [one["allocation_id"] for one in agent.feedback] == [allocation_id("honest")]


def test_nothing_is_said_about_a_pod_that_has_not_run(agent: AgentServer, token: Path) -> None:
    """A pod of a StatefulSet has the name of the one before, so a metrics page still has the usage of that one."""
    life(agent, token, pod_object("waiting", 1, status={"phase": "Pending"}))
    assert [one["allocation_id"] for one in agent.feedback] == [allocation_id("honest")]


# Queries


class SlowPrometheus(Client):
    """A Prometheus that needs 4.5 s for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[str] = []

    async def send(self, method: str, url: str, what: str, **options: Any) -> tuple[int, bytes]:
        self.queries.append(options["data"]["query"])
        await asyncio.sleep(4.5)
        return 200, b'{"data": {"resultType": "scalar", "result": [0, "1"]}}'


def test_slow_queries_do_not_hold_up_samples(agent: AgentServer, token: Path) -> None:
    prometheus_client, pods = SlowPrometheus(), Pods()
    prometheus = Prometheus(
        prometheus_client, "http://x", {"latency": 'max(latency{namespace="$namespace", pod="$pod"})'}
    )
    collector = collector_for(agent, pods, token, prometheus, interval_s=0.2)
    query = {"clustergym.io/qos-query": "latency"}

    async def scenario() -> None:
        pods.items = [pod_object(f"p{i}", i, annotations=query) for i in range(64)]
        started = time.monotonic()
        for _ in range(5):
            await collector.step()
            await asyncio.sleep(0.1)
        assert time.monotonic() - started < 60  # 64 queries of 4.5 s would take longer
        assert collector.samples._value.get() == 5 * 64
        # One query of a namespace at a time.
        assert 1 <= len(prometheus_client.queries) <= 5
        await collector.close()

    asyncio.run(scenario())


def test_values_of_queries_reach_the_samples_after_them(agent: AgentServer, token: Path) -> None:
    class Fast(SlowPrometheus):
        async def send(self, method: str, url: str, what: str, **options: Any) -> tuple[int, bytes]:
            self.queries.append(options["data"]["query"])
            return 200, b'{"data": {"resultType": "scalar", "result": [0, "0"]}}'

    prometheus_client, pods = Fast(), Pods()
    collector = collector_for(
        agent, pods, token, Prometheus(prometheus_client, "http://x", {"latency": "q($namespace, $pod)"})
    )

    async def scenario() -> None:
        pods.items = [pod_object(annotations={"clustergym.io/qos-query": "latency"})]
        for _ in range(3):
            await collector.step()
            await asyncio.sleep(0.05)
        pods.items = []
        await collector.step()
        await collector.close()

    asyncio.run(scenario())
    assert prometheus_client.queries[0] == "q(team, p)"
    assert [one["qos_met"] for one in agent.feedback] == [False]


@pytest.mark.parametrize("query", ['{__name__=~".+"}', "../latency", "latency ", "", "$pod"])
def test_pods_cannot_bring_their_own_query(tmp_path: Path, query: str) -> None:
    (tmp_path / "latency").write_text("max(latency)\n")
    prometheus_client = SlowPrometheus()
    pod = managed_pod(pod_object(annotations={"clustergym.io/qos-query": query}))
    assert pod is not None
    with pytest.raises(Unavailable, match="which is unknown"):
        asyncio.run(Prometheus(prometheus_client, "http://x", read_queries(tmp_path)).value(pod))
    assert prometheus_client.queries == []


# Answers


class Bomb(Quiet):
    """Answers with 64 MiB in 64 kB, if the client accepts that, and with as much as the path says otherwise."""

    def do_POST(self) -> None:
        self.body()
        plain = b" " * (64 << 20 if self.path.startswith("/gzip") else MAX_GRANT_BYTES + 1)
        body = gzip.compress(plain) if self.path.startswith("/gzip") else plain
        self.send_response(200)
        if self.path.startswith("/gzip"):
            self.send_header("Content-Encoding", "gzip")
        self.server.accepted.append(self.headers["Accept-Encoding"])  # type: ignore[attr-defined]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("path", "reason"), [("gzip", "invalid allocation"), ("long", f"more than {MAX_GRANT_BYTES} bytes")]
)
def test_answers_are_capped_and_not_decompressed(monkeypatch: pytest.MonkeyPatch, path: str, reason: str) -> None:
    def decompress(*_: Any) -> bytes:
        raise AssertionError("the answer is decompressed")

    monkeypatch.setattr(httpx.Response, "aiter_bytes", decompress)
    server = Server(("127.0.0.1", 0), Bomb)
    server.accepted = []  # type: ignore[attr-defined]
    request = AllocateRequest(owner="team/x", cores=80, memory=4000)
    with served(server):
        agents = Agents(f"http://127.0.0.1:{server.server_address[1]}/{path}", None)
        with pytest.raises(Unavailable, match=reason):
            asyncio.run(agents.allocate(request))
    assert server.accepted == ["identity"]  # type: ignore[attr-defined]


def test_a_measured_pod_still_counts(agent: AgentServer, token: Path) -> None:
    """The tests above would also pass if nothing were ever reported."""
    life(agent, token)
    (last,) = agent.feedback
    assert (last["actual_usage"], last["final"]) == (Usage(10, 100.0).cores, True)
