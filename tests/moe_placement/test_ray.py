"""A benchmark run on a Ray cluster of two nodes, of which one is killed half-way: the results are the same.

Needs the extra ``ray``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustergym.bench.entries import Entry
from clustergym.bench.results import collect
from clustergym.bench.running import Unit, run_suite, suite_of
from clustergym.common.executors import LocalExecutor, RayExecutor

ray = pytest.importorskip("ray")
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
