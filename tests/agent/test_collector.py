"""The collector: usage from DCGM, HAMi and NVML, objectives, and what is reported over the life of a pod."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clustergym import cli
from clustergym.agent.collector.collect import Collector, Watch
from clustergym.agent.collector.pods import managed_pod
from clustergym.agent.collector.quality import judge, read_value
from clustergym.agent.collector.usage import MetricsPage, Usage, parse_metrics, pod_uid
from clustergym.kubernetes.clients import Client, Unavailable
from collector_pods import UID, Constant, Pods, QuietFiles, allocation_id, managed, pod_object
from webhook_servers import AgentServer, Server, served

DCGM = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="A100",container="main",namespace="team",pod="p"} 92
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",modelName="A100",container="main",namespace="team",pod="q"} 50
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",modelName="A100",container="main",namespace="team",pod="p"} 4210
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",container="main",namespace="team",pod="q"} 9223372036854775794
# HELP DCGM_FI_PROF_SM_ACTIVE The ratio of cycles an SM has at least 1 warp assigned.
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",modelName="A100",container="main",namespace="team",pod="p"} 0.31
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-b",modelName="A100",container="main",namespace="team",pod="q"} 0.5
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-b",modelName="A100",container="main",namespace="team",pod="r"} 0.5
DCGM_FI_PROF_SM_ACTIVE{gpu="2",UUID="GPU-c",modelName="A100"} 0.1
"""
HAMI = """\
# TYPE Device_utilization_desc_of_container gauge
Device_utilization_desc_of_container{podnamespace="team",podname="p",ctrname="a",deviceuuid="GPU-a"} 20
Device_utilization_desc_of_container{podnamespace="team",podname="p",ctrname="b",deviceuuid="GPU-a"} 5
Device_utilization_desc_of_container{podnamespace="team",podname="q",ctrname="a",deviceuuid="GPU-a"} 30
# TYPE vGPU_device_memory_usage_in_bytes gauge
vGPU_device_memory_usage_in_bytes{podnamespace="team",podname="p",ctrname="a",deviceuuid="GPU-a"} 1048576000
"""


def ended(reason: str, code: int, at: str = "2100-01-01T00:00:00Z") -> dict[str, Any]:
    state = {"reason": reason, "exitCode": code, "containerID": "containerd://c1", "finishedAt": at}
    return {"name": "main", "restartCount": 1, "lastState": {"terminated": state}}


# Usage


def test_dcgm_is_read_from_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(DCGM)
    page = Server(("127.0.0.1", 0), partial(QuietFiles, directory=str(tmp_path)))
    with served(page):
        source = MetricsPage(Client(), f"http://127.0.0.1:{page.server_address[1]}/metrics")
        pods = [managed(), managed(name="q", index=1), managed(name="absent", index=2)]
        found = asyncio.run(source.read(pods))
    assert found == {
        # SM activity, not the share of time with any kernel. A blank value of DCGM is not a measurement.
        f"{UID}0": Usage(31.0, 4210.0),
        f"{UID}1": Usage(50.0, None, pods=2, exact=False),
    }


def test_hami_measures_containers() -> None:
    assert parse_metrics(HAMI) == {
        ("team", "p"): Usage(25.0, 1000.0, pods=2),
        ("team", "q"): Usage(30.0, None, pods=2),
    }


def test_a_page_that_prometheus_relabelled_is_understood() -> None:
    labels = 'UUID="GPU-a",namespace="gpu-operator",pod="dcgm-x",exported_namespace="t",exported_pod="p"'
    text = f"# TYPE DCGM_FI_DEV_GPU_UTIL gauge\nDCGM_FI_DEV_GPU_UTIL{{{labels}}} 7\n"
    assert parse_metrics(text) == {("t", "p"): Usage(7.0, None)}


@pytest.mark.parametrize("text", ["", "# TYPE x gauge\nx 1\n"])
def test_a_page_without_gpus_has_no_usage(text: str) -> None:
    assert parse_metrics(text) == {}


@pytest.mark.parametrize(
    ("line", "uid"),
    [
        (f"0::/kubepods.slice/kubepods-burstable-pod{UID.replace('-', '_')}1.slice/cri-containerd-ab.scope", f"{UID}1"),
        (f"12:memory:/kubepods/burstable/pod{UID}2/abc", f"{UID}2"),
        ("0::/system.slice/ssh.service", None),
    ],
)
def test_the_pod_of_a_process_is_in_its_control_group(tmp_path: Path, line: str, uid: str | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(line + "\n")
    assert pod_uid(tmp_path, 7) == uid
    assert pod_uid(tmp_path, 8) is None


NVML_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from clustergym.agent.collector.usage import Nvml
from collector_pods import managed

async def main():
    source = Nvml(Path(sys.argv[1]))
    pods = [managed(name=name, index=i) for i, name in enumerate("pqr")]
    for rows in sys.argv[3:]:
        Path(sys.argv[2]).write_text(rows)
        found = await source.read(pods)
        print(json.dumps({uid[-1]: [u.cores, u.memory_mb, u.pods] for uid, u in sorted(found.items())}))

asyncio.run(main())
"""


def test_nvml_attributes_processes_to_pods(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stub of NVML")
    library, state, proc = tmp_path / "libnvidia-ml.so.1", tmp_path / "load", tmp_path / "proc"
    source = Path(__file__).parents[1] / "support" / "nvml_processes_stub.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    for pid, index in ((11, 0), (12, 0), (13, 1), (14, 2)):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{UID}{index}/x\n")
    (proc / "99").mkdir()
    (proc / "99" / "cgroup").write_text("0::/init.scope\n")
    first = [
        "0 11 20 300 0 1000", "0 12 10 200 1 1000",  # two processes of one pod, one of them a client of MPS
        "0 13 30 400 1 1000", "0 99 40 500 0 1000",  # another pod on the same GPU, and a process of no pod
        "1 14 70 900 0 1000",
    ]  # fmt: skip
    # The driver keeps old samples: only newer ones count. Pod r has none, but it still has memory.
    second = ["0 11 20 300 0 1000", "0 11 60 300 0 2000", "0 11 80 300 0 3000", "1 14 70 950 0 1000"]
    done = subprocess.run(
        [sys.executable, "-c", NVML_PROGRAM, proc, state, "\n".join(first), "\n".join(second)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
        env={
            "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB": str(state), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{Path(cli.__file__).parents[2]}:{source.parent}:{source.parents[2] / 'benchmarks/agent'}",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"0": [30.0, 500.0, 2], "1": [30.0, 400.0, 2], "2": [70.0, 900.0, 1]},
        {"0": [70.0, 300.0, 1], "2": [0.0, 950.0, 1]},
    ]


# Pods and objectives


def test_only_pods_with_an_allocation_are_reported() -> None:
    assert managed_pod({"metadata": {"annotations": {"clustergym.io/cores": "80"}}}) is None
    assert managed_pod(pod_object(annotations={"clustergym.io/allocation-id": "x"})) is None
    found = managed()
    assert (found.agent, found.allocation_id) == ("node", allocation_id("p"))
    assert managed(annotations={"clustergym.io/agent": "x"}).agent == "recommender"
    assert (found.owner, found.requested_cores, found.granted_cores) == ("team/Pod/p", 80, 40)


def test_in_mode_off_a_pod_has_its_request() -> None:
    found = managed_pod(
        {
            "metadata": {
                "name": "p", "namespace": "team",
                "annotations": {
                    "clustergym.io/allocation-id": allocation_id("p"), "clustergym.io/requested-cores": "80",
                    "clustergym.io/requested-memory": "4000", "clustergym.io/recommended-cores": "30",
                },
            }
        }
    )  # fmt: skip
    assert found is not None
    assert (found.granted_cores, found.granted_memory_mb) == (80, 4000)


QUERY = {"clustergym.io/qos-query": "latency"}
OBJECTIVE = QUERY | {"clustergym.io/qos-objective": "0.2"}
BEST_EFFORT = {"clustergym.io/qos-class": "BestEffort"}
WHOLE = {"clustergym.io/granted-cores": "80"}
NOT_READY = {"conditions": [{"type": "Ready", "status": "False"}]}


@pytest.mark.parametrize(
    ("annotations", "status", "cores", "exact", "value", "disturbed", "met", "pressure"),
    [
        ({}, {}, 20, True, None, False, True, None),
        ({}, {}, 39, True, None, False, False, None),  # 39 of 40 % in use, and 80 % were requested
        (WHOLE, {}, 79, True, None, False, True, None),  # nothing was taken away from this pod
        (BEST_EFFORT, {}, 39, True, None, False, True, None),  # batch work uses whatever it gets
        ({}, {}, 39, False, None, False, True, None),  # the usage of a shared GPU is not that of the pod
        ({}, {}, 20, True, None, True, False, None),
        ({}, NOT_READY, 20, True, None, False, False, None),
        ({}, {"phase": "Failed"}, 20, True, None, False, False, None),
        ({}, NOT_READY | {"phase": "Succeeded"}, 20, True, None, False, True, None),
        (QUERY, {}, 39, True, 1.0, False, True, None),
        (QUERY, {}, 20, True, 0.0, False, False, None),
        (OBJECTIVE, {}, 20, True, 0.1, False, True, 0.5),
        (OBJECTIVE, {}, 30, True, 0.1, False, True, 0.75),  # the load says more than the latency
        (OBJECTIVE, {}, 20, True, 0.3, False, False, 1.5),
        (OBJECTIVE, {}, 20, True, 0.1, True, False, None),
        (OBJECTIVE, {}, 39, True, None, False, False, None),  # no data: the default rule
    ],
)
def test_objectives(
    annotations: dict[str, str], status: dict[str, Any], cores: float, exact: bool, value: float | None,
    disturbed: bool, met: bool, pressure: float | None,
) -> None:  # fmt: skip
    pod = managed(annotations=annotations, status=status)
    quality = judge(pod, Usage(cores, None, exact=exact), value, disturbed, was_ready=True)
    assert quality.met is met
    assert quality.pressure == (None if pressure is None else pytest.approx(pressure))


def test_a_starting_pod_is_not_blamed_for_not_being_ready() -> None:
    assert judge(managed(status=NOT_READY), Usage(1, None), None, False, was_ready=False).met


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ({"resultType": "scalar", "result": [1.0, "0.5"]}, 0.5),
        ({"resultType": "vector", "result": [{"metric": {}, "value": [1.0, "3"]}]}, 3.0),
        ({"resultType": "vector", "result": []}, None),
        ({"resultType": "vector", "result": [{"metric": {}, "value": [1.0, "NaN"]}]}, None),
    ],
)
def test_values_of_prometheus(data: Any, value: float | None) -> None:
    assert read_value({"data": data}) == value


@pytest.mark.parametrize(
    "data",
    [
        None, {}, {"resultType": "matrix", "result": []}, {"resultType": "vector", "result": [{}]},
        {"resultType": "vector", "result": [{"value": [1, "1"]}, {"value": [1, "2"]}]},
    ],
)  # fmt: skip
def test_other_responses_of_prometheus_are_refused(data: Any) -> None:
    with pytest.raises(Unavailable):
        read_value({"data": data})


# Reports


def test_reports_cover_their_time_and_the_last_one_the_whole_life() -> None:
    watch = Watch(managed())
    for cores, memory in ((10, 100.0), (20, 900.0)):
        watch.sample(managed(), Usage(cores, memory, pods=3), None, 0.0)
    first = watch.report(final=False)
    assert first == {
        "allocation_id": allocation_id("p"), "owner": "team/Pod/p", "final": False, "actual_usage": 15.0,
        "qos_met": True, "pods": 3, "oom": False, "memory_used": 900.0, "pressure": None,
    }  # fmt: skip
    watch.window = type(watch.window)()
    watch.sample(managed(), Usage(39, 200.0), None, 0.0)
    second, last = watch.report(final=False), watch.report(final=True)
    assert second is not None
    assert last is not None
    # The peak of the memory is that of the whole life.
    assert (second["actual_usage"], second["qos_met"], second["memory_used"]) == (39.0, False, 900.0)
    assert (last["actual_usage"], last["qos_met"], last["final"]) == (23.0, False, True)


def test_nothing_is_reported_of_a_pod_that_was_not_measured() -> None:
    watch = Watch(managed())
    watch.sample(managed(), None, None, 0.0)
    assert watch.report(final=True) is None


def test_memory_of_a_shared_gpu_counts_up_to_the_grant() -> None:
    watch = Watch(managed())
    watch.sample(managed(), Usage(10, 30_000.0, pods=2, exact=False), None, 0.0)
    assert watch.peak_memory_mb == 1000.0


@pytest.mark.parametrize(
    ("status", "memory", "oom"),
    [
        (ended("OOMKilled", 137), 100.0, True),
        (ended("Error", 1), 100.0, False),
        (ended("Error", 1), 980.0, True),  # failed with its GPU memory full: CUDA is out of memory
        (ended("Completed", 0), 980.0, False),
    ],
)
def test_oom_kills_are_counted_once(status: dict[str, Any], memory: float, oom: bool) -> None:
    now = time.time()
    watch = Watch(managed())
    watch.sample(managed(), Usage(10, memory), None, now)
    for _ in range(2):
        watch.sample(managed(status={"containerStatuses": [status]}), Usage(10, memory), None, now)
    assert watch.life.oom is oom
    failed = status["lastState"]["terminated"]["exitCode"] != 0
    assert watch.life.met == (2 if failed else 3)


def test_what_happened_before_the_collector_started_is_not_counted_again() -> None:
    watch = Watch(managed())
    status = {"containerStatuses": [ended("OOMKilled", 137, at="2020-01-01T00:00:00Z")]}
    watch.sample(managed(status=status), Usage(10, 100.0), None, time.time())
    assert not watch.life.oom


@pytest.fixture
def agent() -> Iterator[AgentServer]:
    server = AgentServer("127.0.0.1", 0)
    with served(server):
        yield server


def collector_for(agent: AgentServer, pods: Pods, source: Constant, token: Path, report_s: float = 1e-9) -> Collector:
    urls = {"node": f"http://127.0.0.1:{agent.server_address[1]}"}
    return Collector("node-1", pods, source, None, Client(token), urls, 1.0, report_s)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("benchmark-token\n")
    return path


def test_a_pod_is_reported_during_its_life_and_once_at_its_end(agent: AgentServer, token: Path) -> None:
    async def scenario() -> None:
        pods = Pods()
        collector = collector_for(agent, pods, Constant(), token)
        pods.items = [pod_object()]
        await collector.step()
        await collector.step()
        assert [one["final"] for one in agent.feedback] == [False, False]
        # An API server that does not answer is not the end of the pod.
        pods.items = None
        await collector.step()
        assert len(agent.feedback) == 2
        pods.items = [pod_object(status={"phase": "Succeeded"})]
        await collector.step()
        await collector.step()
        pods.items = []
        await collector.step()
        assert [one["final"] for one in agent.feedback] == [False, False, True]
        await collector.close()

    asyncio.run(scenario())


def test_a_deleted_pod_is_reported(agent: AgentServer, token: Path) -> None:
    async def scenario() -> None:
        pods = Pods()
        collector = collector_for(agent, pods, Constant(), token, report_s=3600)
        pods.items = [pod_object()]
        await collector.step()
        assert agent.feedback == []
        pods.items = []
        await collector.step()
        assert [one["final"] for one in agent.feedback] == [True]
        await collector.close()

    asyncio.run(scenario())


def test_reports_wait_for_an_agent_that_is_down(agent: AgentServer, token: Path) -> None:
    async def scenario() -> None:
        pods, source = Pods(), Constant()
        collector = collector_for(agent, pods, source, token)
        agent.mode = "503"
        pods.items = [pod_object()]
        await collector.step()
        source.usage = Usage(30, 100.0)
        agent.mode = "good"
        await collector.step()
        # The report that failed is part of the next one.
        assert [one["actual_usage"] for one in agent.feedback] == [20.0]
        agent.mode, pods.items = "503", []
        await collector.step()
        agent.mode = "good"
        await collector.step()
        assert [one["final"] for one in agent.feedback] == [False, True]
        await collector.close()

    asyncio.run(scenario())


def test_an_agent_that_is_down_is_asked_once_per_step(agent: AgentServer, token: Path) -> None:
    """Otherwise 100 pods would wait for 100 timeouts."""

    async def scenario() -> None:
        pods = Pods()
        collector = collector_for(agent, pods, Constant(), token)
        agent.mode = "503"
        pods.items = [pod_object(f"p{i}", i) for i in range(5)]
        for steps in (1, 2):
            await collector.step()
            assert len(agent.tokens) == steps
        agent.mode = "good"
        await collector.step()
        assert len(agent.feedback) == 5
        await collector.close()

    asyncio.run(scenario())


def test_a_broken_source_does_not_end_the_collector(agent: AgentServer, token: Path) -> None:
    async def scenario() -> None:
        pods, source = Pods(), Constant()
        collector = collector_for(agent, pods, source, token)
        source.usage = None
        pods.items = [
            pod_object(),
            {"metadata": None},
            {"metadata": {"annotations": {"clustergym.io/allocation-id": "x"}}},
        ]
        await collector.step()
        source.usage = Usage(10, 100.0)
        await collector.step()
        assert len(agent.feedback) == 1
        assert collector.errors.labels("usage")._value.get() == 1
        await collector.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --agent-url, --recommender-url or both"),
        (["--agent-url", "http://x"], "give one of --metrics-url"),
        (["--agent-url", "http://x", "--nvml", "--metrics-url", "http://y"], "give one of --metrics-url"),
        (["--agent-url", "http://x", "--nvml", "--agent-token-file", "nowhere"], "--agent-token-file nowhere is not"),
        (["--agent-url", "http://x", "--metrics-url", "http://y"], "use --api-server"),
        (
            ["--agent-url", "http://x", "--metrics-url", "http://y", "--api-server", "http://z", "--interval-s", "0"],
            "interval is 0.0 s: expected more than 0",
        ),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert cli.main(["collector", "--node", "node-1", *arguments]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert cli.main(["collector", "--node", "../x", *arguments]) == 2


def test_the_collector_imports_neither_torch_nor_numba() -> None:
    program = "import sys, clustergym.cli.collector, clustergym.agent.collector.server; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("torch", "numba", "scipy") if f"'{name}'" in loaded]
