"""Sweeps and benchmark runs on a Ray cluster of two nodes, of which one is killed half-way: the results are the same.

Needs the extra ``ray``.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustergym.bench.entries import Entry
from clustergym.bench.results import collect
from clustergym.bench.running import Unit, run_suite, suite_of
from clustergym.common.executors import LocalExecutor, RayExecutor, make_executor
from clustergym.sweeping import Run, Runner, load_sweep
from clustergym.sweeping.launchers import LocalLauncher, RayLauncher, make_launcher

ray = pytest.importorskip("ray")
PROGRAM = str(Path(__file__).parent / "sweep_program.py")
TASK = "small-4x4-prefill-drift"


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    """A cluster with one node. Starting it takes longer than most tests."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        # A killed node refuses connections at once. Ray would look every three seconds.
        environment.setenv("RAY_health_check_period_ms", "500")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def cluster(made: Any) -> Any:
    """The cluster with a second node: a new one if a test has killed it."""
    if len(made.list_all_nodes()) == 1:
        made.second = made.add_node(num_cpus=1)
    made.wait_for_nodes()
    return made


def one_node_is_lost() -> bool:
    """Whether Ray notices within a minute that one of the two nodes is gone."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if sum(node["Alive"] for node in ray.nodes()) == 1:
            return True
        time.sleep(0.2)
    return False


def test_a_benchmark_survives_the_loss_of_a_node(cluster: Any, tmp_path: Path) -> None:
    names = ("static", "eplb", "eplb-hierarchical", "incremental", "flashlb", "swift")
    entries = [Entry("named", name) for name in names]
    done: list[str] = []

    def kill_a_node(unit: Unit, error: str | None) -> None:
        assert error is None
        done.append(unit.entry.name)
        if len(done) == 2:
            cluster.remove_node(cluster.second, allow_graceful=False)

    executor = RayExecutor(cluster.address)
    run_suite("placement-v1", True, entries, tmp_path / "ray", executor, [TASK], kill_a_node)
    assert one_node_is_lost()
    run_suite("placement-v1", True, entries, tmp_path / "local", LocalExecutor(), [TASK])
    suite = suite_of("placement-v1", True)
    tables = [
        {name: results[TASK]["scores"] for name, results in collect([tmp_path / where], suite).items()}
        for where in ("ray", "local")
    ]
    assert tables[0] == tables[1]
    assert set(tables[0]) == {entry.name for entry in entries}


def test_a_sweep_survives_the_loss_of_a_node(cluster: Any, tmp_path: Path) -> None:
    config = {
        "program": PROGRAM, "method": "grid", "metric": {"name": "score", "goal": "maximize"},
        "parameters": {"x": {"values": [1, 2, 3, 4, 5]}, "steps": {"value": 4}, "pause": {"value": 0.5}},
    }  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(config))
    sweep, killed = load_sweep(tmp_path / "s.yaml"), []

    def kill_a_node(runs: Sequence[Run]) -> None:
        # Both nodes are at work: one run has ended, and two others have begun.
        starts = tmp_path / "ray" / "starts.txt"
        begun = len(starts.read_text().splitlines()) if starts.exists() else 0
        if not killed and begun >= 3 and any(run.done for run in runs):
            killed.append(begun)
            cluster.remove_node(cluster.second, allow_graceful=False)

    launcher = RayLauncher(cluster.address)
    runs = Runner(sweep, tmp_path / "ray", 2, watch=kill_a_node, launcher=launcher).run(None)
    assert killed
    assert one_node_is_lost()
    assert {run.parameters["x"]: run.metric for run in runs} == {x: -((x - 3) ** 2) for x in range(1, 6)}
    local = Runner(sweep, tmp_path / "local", 2).run(None)
    assert [(r.id, r.parameters, r.metric, r.state) for r in runs] == [
        (r.id, r.parameters, r.metric, r.state) for r in local
    ]


def test_a_run_on_ray_that_fails_or_is_stopped(cluster: Any, tmp_path: Path) -> None:
    launcher = RayLauncher(cluster.address)
    command = [sys.executable, PROGRAM, "--x=1", "--kind=crash", f"--run-dir={tmp_path}/a"]
    failed = launcher.start(command, tmp_path / "a", None, True)
    failed.wait(120)
    assert failed.poll() == 1
    assert "cannot train with x = 1.0" in (tmp_path / "a" / "output.log").read_text()
    endless = launcher.start(["sleep", "1000"], tmp_path / "b", None, False)
    with pytest.raises(TimeoutError):
        endless.wait(0.5)
    endless.stop()
    endless.wait(120)
    assert endless.poll() not in (0, None)


def test_a_run_stops_although_ray_loses_the_interrupt(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = RayLauncher(cluster.address)
    monkeypatch.setattr(ray, "cancel", lambda *_, **__: None)
    running = launcher.start(["sleep", "1000"], tmp_path, None, False)
    with pytest.raises(TimeoutError):
        running.wait(0.5)
    running.stop()
    running.wait(120)
    assert running.poll() == -signal.SIGTERM
    # The next start of the run is not stopped by what stopped the last one.
    again = launcher.start(["true"], tmp_path, None, True)
    again.wait(120)
    assert again.poll() == 0


def test_executors_and_launchers_by_name(cluster: Any) -> None:
    assert isinstance(make_executor("ray", 1, cluster.address), RayExecutor)
    assert isinstance(make_launcher("ray", cluster.address), RayLauncher)
    assert isinstance(make_launcher("local"), LocalLauncher)
    with pytest.raises(ValueError, match="is for --executor ray"):
        make_launcher("local", "auto")
