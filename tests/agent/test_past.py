"""What owners used before the agent came, from a real Prometheus with a past."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agent_service import make_service
from clustergym.agent.past import read_past
from clustergym.agent.rails import Amounts
from clustergym.agent.service import vpa_amounts
from clustergym.kubernetes.clients import Unavailable
from clustergym.kubernetes.messages import AllocateRequest
from processes import free_port, running, wait_until

WEB, OTHER, ODD = "team/Deployment/web", "team/Job/once", "team/StatefulSet/odd"


def openmetrics(now_s: float) -> str:
    """Six hours of three workloads: one steady, one with a peak of 60 %, one that does not say what it requests."""
    series: dict[str, list[tuple[str, float, float]]] = {}

    def add(name: str, labels: str, at: float, value: float) -> None:
        series.setdefault(name, []).append((labels, at, value))

    for minute in range(360, 0, -1):
        at = round(now_s - 60.0 * minute)
        add(
            "kube_replicaset_owner",
            'namespace="team",replicaset="web-5f",owner_kind="Deployment",owner_name="web"',
            at,
            1,
        )
        for pod, kind, owner, cores in (
            ("web-5f-1", "ReplicaSet", "web-5f", 0.18), ("once-1", "Job", "once", 0.6 if minute == 100 else 0.1),
            ("odd-0", "StatefulSet", "odd", 0.5),
        ):  # fmt: skip
            place = f'namespace="team",pod="{pod}"'
            add("kube_pod_owner", f'{place},owner_kind="{kind}",owner_name="{owner}",owner_is_controller="true"', at, 1)
            if pod == "web-5f-1":
                labels = 'annotation_clustergym_io_cores="80",annotation_clustergym_io_memory="4000"'
                add("kube_pod_annotations", f"{place},{labels}", at, 1)
            elif pod == "once-1":
                for resource, value in (("nvidia_com_gpucores", 80), ("nvidia_com_gpumem", 4000)):
                    limit = f'{place},container="main",resource="{resource}"'
                    add("kube_pod_container_resource_limits", limit, at, value)
            add("DCGM_FI_PROF_SM_ACTIVE", f'{place},UUID="GPU-1"', at, cores)
            add("DCGM_FI_DEV_FB_USED", f'{place},UUID="GPU-1"', at, 1000)
    lines = []
    for name, samples in series.items():
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{name}{{{labels}}} {value} {at}" for labels, at, value in sorted(samples)]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for name in ("prometheus", "promtool"):
        if shutil.which(name) is None:
            pytest.skip(f"no {name} in PATH: no test with a real Prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "past").write_text(openmetrics(time.time()))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "past"), str(folder / "data")]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "empty.yml").write_text("{}")
    port, log = free_port(), folder / "log"
    url = f"http://127.0.0.1:{port}"
    flags = [f"--config.file={folder / 'empty.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with running(["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"], log) as process:

        def ready() -> bool:
            try:
                return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, "Prometheus", process, log)
        yield url


def test_owners_begin_with_what_they_used(prometheus: str, tmp_path: Path) -> None:
    service = make_service(tmp_path)
    guard = service.settings.guard_settings
    assert read_past(service.store, prometheus, 1, guard) == 2  # a workload with unknown requests is left out
    web, other = service.store.owner(WEB), service.store.owner(OTHER)
    assert web.evidence == pytest.approx(36, abs=2)  # six hours, ten minutes each
    assert web.peak_need == pytest.approx(18 / 80, rel=0.02)
    assert web.peak_memory_mb == pytest.approx(1000, rel=0.02)
    assert other.peak_need == pytest.approx(60 / 80, rel=0.02)  # a mean over ten minutes would hide the peak
    request = {"cores": 80, "memory": 4000, "qos_class": "best-effort"}
    assert vpa_amounts(web, Amounts(80, 4000)).cores == 22
    found = service.allocate(AllocateRequest(owner=WEB, **request))  # type: ignore[arg-type]
    assert (found.cores, found.decided_by) == (22, "rule")
    assert service.allocate(AllocateRequest(owner=OTHER, **request)).cores > 60  # type: ignore[arg-type]
    assert service.allocate(AllocateRequest(owner=ODD, **request)).cores == 80  # type: ignore[arg-type]
    # Who is known is left as is, for example after a restart.
    assert read_past(service.store, prometheus, 1, guard) == 0
    service.store.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "not a url"])
def test_without_prometheus_nothing_is_stored(tmp_path: Path, url: str) -> None:
    service = make_service(tmp_path)
    with pytest.raises(Unavailable, match="Prometheus cannot be reached"):
        read_past(service.store, url, 1, service.settings.guard_settings)
    assert service.store.owners(10) == []
    service.store.close()
