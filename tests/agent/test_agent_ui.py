"""The status page in a real browser, the quickstart, and several GPUs per node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from agent_client import ROOT, TOKEN, Server, StubGpu, agent_server
from clustergym.agent.quickstart import find_script
from clustergym.agent.traffic import SimulatedNode
from processes import free_port, wait_until

CHROMIUM = Path("/usr/bin/chromium")
# The tests may run as root (no sandbox) and without a network (no background requests).
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NASTY = "<img src=x onerror='window.hacked=1'>"


def play(server: Server, node: SimulatedNode, pods: int) -> None:
    for _ in range(pods):
        status, made = server.post("/allocate", node.request())
        assert status == 200, made
        outcome, _ = node.apply(made["cores"], made["memory"])
        status, answer = server.post("/feedback", outcome | {"allocation_id": made["allocation_id"]})
        assert status == 200, answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agent")
    with agent_server(folder, "--explore", "off", "--init-checkpoint", "pretrained") as one:
        play(one, SimulatedNode(1, 200, NASTY), 100)
        yield one


def test_the_status_page_shows_owners_grants_and_events(server: Server, tmp_path: Path) -> None:
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 1500})
        messages: list[str] = []
        urls: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        base = f"http://127.0.0.1:{server.port}"
        page.goto(f"{base}/ui")
        # The page is public, what it shows is not.
        page.wait_for_selector("#login:not([hidden])")
        assert page.locator("#owners tr").count() == 0
        page.fill("#login input", TOKEN)
        page.click("#login button")
        page.wait_for_selector("#owners tr:nth-child(3)")
        assert not page.is_visible("#login")
        assert page.locator("#grants rect").count() == 300  # requested, granted and used of 100 pods
        assert page.locator("#grants line[stroke='var(--rule)']").count() == 100  # what VPA would have given
        assert "less" in page.inner_text("#owners")
        assert "get less: QoS" in page.inner_text("#events")
        assert "rule" in page.inner_text("#figures")
        assert "GPUs freed now" in page.inner_text("#figures")
        rows = [row.split("\t") for row in page.inner_text("#table").splitlines()]
        assert [row[0] for row in rows[1:]] == ["granted", "VPA rule in rails", "policy in rails", "VPA rule alone"]
        freed = [float(row[1]) for row in rows[1:]]
        assert freed[0] == freed[1] <= freed[3]
        assert page.locator("#arms polyline").count() == 2
        assert page.locator("#qos polyline").count() == 2
        page.screenshot(path=os.environ.get("AGENT_SCREENSHOT", str(tmp_path / "ui.png")), full_page=True)
        assert page.evaluate("window.hacked") is None
        assert all(url.startswith(base) for url in urls), urls
        # The browser itself reports the refused request before the token was given.
        assert not [text for text in messages if "401" not in text], messages
        page.set_viewport_size({"width": 420, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        browser.close()


def test_the_status_is_not_public(server: Server) -> None:
    assert server.post("/status.json", {}, token="wrong")[0] == 401
    found = json.loads(server.get("/status.json"))
    assert len(found["pods"]) == 100
    assert {trial["decides"] for trial in found["trials"].values()} == {"rule"}
    assert {pod["decided_by"] for pod in found["pods"]} == {"request", "rule"}
    assert all(pod["vpa"] <= pod["requested"] and pod["why"] for pod in found["pods"])
    assert sum(owner["pods"] for owner in found["owners"]) == 100
    assert [one["note"] for one in found["versions"]] == ["initial"]
    body = {"owner": "team/a", "cores": 100, "memory": 1000}
    assert server.post("/allocate", body)[0] == 200
    freed = json.loads(server.get("/status.json"))["gpus_freed"]
    assert freed == dict.fromkeys(("granted", "recommended", "rule", "policy", "vpa"), 0)  # an owner that is new


def test_dashboard_and_alerts_use_metrics_that_exist(server: Server, tmp_path: Path) -> None:
    """Every metric name in deploy/ is one that a running agent exports."""
    names = {name.split("{")[0] for name in server.metrics()}
    # Counters with labels appear in /metrics with their first value.
    names |= {f"clustergym_{name}_total" for name in ("refused", "task_failures", "verdicts")}
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    alerts = yaml.safe_load((ROOT / "deploy" / "components" / "monitoring" / "alerts.yaml").read_text())["spec"]
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    used = {name for expression in expressions for name in re.findall(r"clustergym_\w+", expression)}
    assert used <= names, used - names
    assert {"clustergym_qos_mean", "clustergym_regret_mean", "clustergym_policy_decides"} <= used
    promtool = shutil.which("promtool")
    if promtool is not None:
        (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(alerts))
        subprocess.run([promtool, "check", "rules", tmp_path / "alerts.yaml"], check=True, capture_output=True)


def test_the_quickstart_runs_agent_pods_and_page(tmp_path: Path) -> None:
    port = free_port()
    code = "import sys; from clustergym.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable, "-c", code, "agent", "quickstart", "--port", port, "--store", tmp_path / "store", "--pods", 60,
        "--pods-per-s", 1000,
    ]  # fmt: skip
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"http://127.0.0.1:{port}/ui" in found.stdout
    connection = sqlite3.connect(tmp_path / "store" / "store.db")
    assert connection.execute("SELECT count(*) FROM feedback").fetchone() == (60,)
    connection.close()
    assert find_script().name == "ppo_gpu_alloc_online.py"


def test_quickstart_ends_its_agent_on_sigterm(tmp_path: Path) -> None:
    program = "import sys; from clustergym import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "agent", "quickstart", "--port", "0", "--store", str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Imports start short processes of their own: wait for the agent.
        log = tmp_path / "store" / "agent.log"
        wait_until(log.exists, "the agent of quickstart", process)
        wait_until(lambda: bool(psutil.Process(process.pid).children()), "the agent of quickstart", process)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    finally:
        process.kill()


def test_several_gpus_of_different_sizes(tmp_path: Path) -> None:
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler to build the libnvidia-ml stub")
    gpu = StubGpu(tmp_path)
    #            busy, used, total, processes, MPS clients, error
    gpu.set_all((50, 1000, 81920, 3, 0, 0), (20, 8192, 16384, 1, 0, 0), (0, 0, 32768, 0, 0, 15))
    body = {"owner": "a", "cores": 80, "memory": 8192, "qos_class": "best-effort"}
    flags = ("--telemetry-s", 0, "--explore", "off", "--no-rails")
    with agent_server(tmp_path / "store", *flags, **gpu.environment) as server:
        # The GPU with the fewest pods, unless the request names one. A lost GPU is not used.
        assert server.post("/allocate", body)[1]["gpu"] == 1
        assert server.post("/allocate", body | {"gpu": 0})[1]["gpu"] == 0
        status, problem = server.post("/allocate", body | {"gpu": 2})
        assert (status, problem["detail"]) == (422, "there is no GPU 2: the GPUs of this node are 0, 1")
        assert "GPU 2" in str(json.loads(server.get("/readyz"))["reasons"])
        metrics = server.metrics()
        assert metrics['clustergym_gpu_memory_mb{gpu="0"}'] == 81920
        assert metrics['clustergym_gpu_pods{gpu="1"}'] == 1
        connection = sqlite3.connect(tmp_path / "store" / "store.db")
        rows = connection.execute("SELECT obs FROM allocations ORDER BY seq").fetchall()
        connection.close()
        second, first = (np.frombuffer(blob, np.float32) for (blob,) in rows)
        # Memory is relative to the GPU: 8192 of 16384 MB and of 81920 MB.
        assert first[:5] == pytest.approx([0.8, 0.1, 0.5, 1000 / 81920, 0.3])
        assert second[:5] == pytest.approx([0.8, 0.5, 0.2, 0.5, 0.1])
        # More than the 32 GB of the task can be granted on a large GPU.
        assert server.post("/allocate", body | {"gpu": 0, "memory": 80000})[1]["memory"] > 32768
        os.kill(server.process.pid, signal.SIGTERM)
        wait_until(lambda: server.process.poll() == 0, "the agent ends")
