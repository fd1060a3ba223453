"""Faults around the agent: bad files, a corrupt, deleted or full store, a wrong clock, signals; and short bodies."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sqlite3
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from agent_client import Server, agent_server
from clustergym.agent.clock import DAY_S, Clock
from clustergym.agent.store import Allocation, Experience, Feedback, Store
from clustergym.agent.versions import CHECKPOINT_KIND
from clustergym.common.checkpoints import load_checkpoint, save_checkpoint
from clustergym.gpu_allocation import compute_reward
from processes import wait_until

REQUEST = {"owner": "team/Deployment/web", "cores": 80, "memory": 4000, "qos_class": "best-effort"}
OUTCOME = {"actual_usage": 30, "qos_met": True, "pods": 2}


def ready(server: Server) -> tuple[int, dict[str, Any]]:
    """Status code and content of /readyz."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def round_trip(server: Server, n: int = 1) -> None:
    for _ in range(n):
        status, found = server.post("/allocate", REQUEST)
        assert status == 200, found
        status, answer = server.post("/feedback", OUTCOME | {"allocation_id": found["allocation_id"]})
        assert (status, answer["status"]) in ((200, "accepted"), (200, "stale")), answer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with agent_server(tmp_path, "--explore", "off") as one:
        yield one


# Files


def test_a_broken_checkpoint_is_reported_and_the_old_policy_stays(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    state = load_checkpoint(path, CHECKPOINT_KIND)
    path.write_bytes(path.read_bytes()[:1000])
    wait_until(lambda: "truncated" in str(ready(server)[1]["reasons"]), "the problem in /readyz")
    round_trip(server)
    assert server.metrics()['clustergym_task_failures_total{task="policy"}'] > 0
    assert "the background task 'policy' failed" in server.log.read_text()
    save_checkpoint(path, CHECKPOINT_KIND, state | {"version": 7})
    wait_until(lambda: ready(server)[1]["policy_version"] == 7, "the repaired checkpoint")
    assert "truncated" not in str(ready(server)[1]["reasons"])


@pytest.mark.parametrize("damage", ["header", "page"])
def test_a_corrupt_store_is_set_aside_at_the_start(tmp_path: Path, damage: str) -> None:
    with agent_server(tmp_path, "--explore", "off") as server:
        round_trip(server, 60)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
    content = bytearray((tmp_path / "store.db").read_bytes())
    start = 0 if damage == "header" else 2048
    content[start : start + 1500] = b"\xa5" * 1500
    (tmp_path / "store.db").write_bytes(content)
    with agent_server(tmp_path, "--explore", "off") as server:
        (aside,) = tmp_path.glob("store.db.corrupt-*[0-9a-f]")
        assert aside.read_bytes() == content
        assert f"is corrupt ({'file is not a database' if damage == 'header' else ''}" in server.log.read_text()
        status, found = ready(server)
        assert (status, str(aside) in str(found["reasons"])) == (200, True)
        round_trip(server)


def test_a_store_that_becomes_corrupt_answers_503(server: Server, tmp_path: Path) -> None:
    round_trip(server, 40)
    # Garbage over the whole database and its log, in place, as a failing disk would leave it.
    for name in ("store.db", "store.db-wal"):
        with (tmp_path / name).open("r+b") as file:
            file.write(b"\xa5" * (tmp_path / name).stat().st_size)
    (tmp_path / "store.db-shm").write_bytes(b"\xa5" * 32768)
    codes = [server.post("/allocate", REQUEST | {"request_id": f"r{i}", "owner": f"o{i}"})[0] for i in range(5)]
    assert codes[-1] == 503, codes
    assert set(codes) <= {200, 503}
    status, found = ready(server)
    assert (status, found["status"]) == (503, "not ready")
    assert server.metrics()["clustergym_store_unavailable"] == 1


def test_readyz_writes_nothing(server: Server, tmp_path: Path) -> None:
    round_trip(server)
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as watcher:
        (before,) = watcher.execute("PRAGMA data_version").fetchone()
        for _ in range(10):
            assert ready(server)[0] == 200
        assert watcher.execute("PRAGMA data_version").fetchone() == (before,)
        round_trip(server)
        assert watcher.execute("PRAGMA data_version").fetchone() != (before,)


def test_a_deleted_store_is_not_ready_until_it_is_back(server: Server, tmp_path: Path) -> None:
    round_trip(server)
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("VACUUM INTO ?", (str(tmp_path / "backup"),))
    (tmp_path / "store.db").unlink()
    status, found = server.post("/allocate", REQUEST)
    assert status == 503
    assert "was deleted or replaced: put it back, or restart the agent" in found["detail"]
    assert ready(server)[0] == 503
    with pytest.raises(urllib.error.HTTPError, match="503"):  # the kubelet restarts the agent
        server.get("/healthz")
    for name in ("store.db-wal", "store.db-shm"):
        (tmp_path / name).unlink()
    os.replace(tmp_path / "backup", tmp_path / "store.db")
    wait_until(lambda: ready(server)[0] == 200, "the store is opened again")
    round_trip(server)


def test_a_full_disk_is_not_ready_until_there_is_room(server: Server, tmp_path: Path) -> None:
    round_trip(server, 20)
    process = psutil.Process(server.process.pid)
    size = (tmp_path / "store.db-wal").stat().st_size
    process.rlimit(psutil.RLIMIT_FSIZE, (size, -1))
    status, found = server.post("/allocate", REQUEST)
    assert (status, "the store cannot be written" in found["detail"]) == (503, True)
    assert ready(server)[0] == 503
    process.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    round_trip(server)
    assert ready(server)[0] == 200


def test_learning_goes_on_after_the_database_is_lost(tmp_path: Path) -> None:
    """How many experiences an update takes depends on when the learner looks: the test asks only for progress."""
    flags = ("--explore", "all", "--update-interval-s", 0.05)
    with agent_server(tmp_path, *flags) as server:
        round_trip(server, 64)
        wait_until(lambda: ready(server)[1]["policy_version"] >= 1, "the first update")
        server.kill()
    before = load_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND)
    assert 32 <= before["learned_through"] == before["experiences"] <= 64
    for path in tmp_path.glob("store.db*"):
        path.unlink()
    with agent_server(tmp_path, *flags) as server:
        assert f"numbers continue after {before['learned_through']}" in server.log.read_text()
        round_trip(server, 32)
        wait_until(lambda: ready(server)[1]["policy_version"] > before["version"], "the next update")
    after = load_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND)
    # The new database holds 32 experiences: one update takes them all, and none of them twice.
    learned = [after[name] - before[name] for name in ("version", "learned_through", "experiences")]
    assert learned == [1, 32, 32]


def test_sigterm_saves_the_model_even_if_it_is_sent_twice(tmp_path: Path) -> None:
    with agent_server(tmp_path, "--explore", "off", "--save-model") as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        kept.request("GET", "/healthz")
        kept.getresponse().read()
        os.kill(server.process.pid, signal.SIGTERM)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
    assert load_checkpoint(tmp_path / "model.pt", "ppo_gpu_alloc-model")


# Clock and retention


class Clocks:
    """A system clock and a monotonic clock that a test can set."""

    def __init__(self) -> None:
        self.system_s, self.monotonic_s = 1e9, 0.0

    def make(self, last_s: float | None = None, **options: Any) -> Clock:
        return Clock(last_s, system=lambda: self.system_s, monotonic=lambda: self.monotonic_s, **options)

    def pass_s(self, seconds: float) -> None:
        self.system_s += seconds
        self.monotonic_s += seconds


def test_the_clock_follows_small_corrections_and_never_goes_back() -> None:
    clocks = Clocks()
    clock = clocks.make()
    clocks.pass_s(10)
    assert clock.now() == 1e9 + 10
    clocks.system_s += 3600
    assert clock.now() == 1e9 + 3610
    clocks.system_s -= 7200
    assert clock.now() == 1e9 + 3610
    assert clock.problem is None


@pytest.mark.parametrize("jump_s", [40 * DAY_S, -40 * DAY_S])
def test_a_jump_of_the_clock_is_refused_until_it_is_corrected(jump_s: float) -> None:
    clocks = Clocks()
    clock = clocks.make()
    clocks.system_s += jump_s
    clocks.pass_s(5)
    assert clock.now() == 1e9 + 5
    assert f"jumped by {jump_s / DAY_S:.1f} days" in str(clock.problem)
    clocks.system_s -= jump_s
    clocks.pass_s(5)
    assert clock.now() == 1e9 + 10
    assert clock.problem is None


def test_a_clock_that_is_wrong_at_the_start_is_refused() -> None:
    clocks = Clocks()
    stopped = clocks.make(1e9 - 20 * DAY_S, max_stop_s=30 * DAY_S)
    assert (stopped.now(), stopped.problem) == (1e9, None)
    wrong = clocks.make(1e9 - 40 * DAY_S, max_stop_s=30 * DAY_S)
    assert wrong.now() == 1e9 - 40 * DAY_S
    assert wrong.problem is not None
    assert clocks.make(1e9 - 40 * DAY_S, max_stop_s=30 * DAY_S, accept_jump=True).now() == 1e9


def add_row(store: Store, created_s: float) -> Allocation:
    made = Allocation(store.next_seq, "0" * 32, created_s, "a", 80.0, 4000.0, False, 60.0, 3000.0, 0, True)
    store.next_seq += 1
    store.add(made, Experience(np.zeros(19), np.zeros(2), 0.0, 0.0), None)
    outcome = Feedback(created_s, 30.0, True, 1, 2000.0, False, 1.0, 0.375, 1.0, True, 1.0, True, 1.0, 0.0, b"", False)
    store.add_feedback(made, "accepted", outcome, True)
    return made


def test_a_wrong_clock_at_a_restart_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, "process")
    made = add_row(store, store.clock.now())
    store.close()
    now = time.time()
    monkeypatch.setattr("clustergym.agent.clock.time.time", lambda: now + 40 * DAY_S)
    again = Store(tmp_path, "process", 30 * DAY_S)
    # The default of an argument was bound before the patch.
    again.clock = Clock(now, 30 * DAY_S, system=lambda: now + 40 * DAY_S)
    assert again.delete_before(again.clock.now() - 30 * DAY_S) == 0
    assert again.find(made.id) is not None
    again.close()


def test_old_rows_are_deleted_in_batches_by_the_primary_key(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    for i in range(150):
        add_row(store, 1000.0 + i)
    assert [store.delete_before(1120.0) for _ in range(4)] == [50, 50, 20, 0]
    for table in ("allocations", "feedback"):
        assert store.connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (30,)
    # However many rows there are, the search reads at most a batch of them.
    plan = store.connection.execute(
        "EXPLAIN QUERY PLAN SELECT seq, created_s, owner FROM allocations ORDER BY seq LIMIT 50"
    ).fetchall()
    assert "TEMP B-TREE" not in str(plan)
    store.close()


# The short bodies of the task's document


def test_the_short_bodies_of_the_task_are_accepted(server: Server, tmp_path: Path) -> None:
    status, found = server.post("/allocate", {"cores": 80, "memory": 4000})
    assert status == 200
    assert found["cores"] <= 80
    assert found["memory"] <= 4000
    status, answer = server.post("/feedback", {"actual_usage": 5, "qos_met": True, "pods": 3})
    assert (status, answer["status"]) == (200, "accepted")
    assert answer["reward"] == compute_reward(found["cores"], found["memory"], 5, True, 3)
    # Nothing is open any more.
    assert server.post("/feedback", OUTCOME)[1] == {"status": "unknown", "reward": None}
    # V(s), the next state and done are stored with the experience.
    connection = sqlite3.connect(tmp_path / "store.db")
    value, next_obs, done = connection.execute(
        "SELECT a.value, f.next_obs, f.done FROM feedback f JOIN allocations a ON a.seq = f.allocation"
    ).fetchone()
    connection.close()
    assert isinstance(value, float)
    assert np.frombuffer(next_obs, np.float32)[:2] == pytest.approx([0.8, 4000 / 32768])
    assert done == 0


def test_feedback_without_an_id_is_refused_if_it_is_ambiguous(server: Server) -> None:
    first = server.post("/allocate", {"cores": 80, "memory": 4000})[1]
    server.post("/allocate", {"cores": 60, "memory": 4000})
    server.post("/allocate", {"cores": 60, "memory": 4000, "owner": "another"})
    status, found = server.post("/feedback", OUTCOME)
    assert status == 409
    assert "more than one open allocation" in found["detail"]
    # Another owner has only one.
    assert server.post("/feedback", OUTCOME | {"owner": "another"})[1]["status"] == "accepted"
    # With one of the two closed, the other is meant.
    assert server.post("/feedback", OUTCOME | {"allocation_id": first["allocation_id"]})[1]["status"] == "accepted"
    assert server.post("/feedback", OUTCOME)[1]["status"] == "accepted"
    assert server.post("/feedback", OUTCOME)[1]["status"] == "unknown"


def test_open_allocations_are_known_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    add_row(store, 1.0)
    made = Allocation(store.next_seq, "0" * 32, 5.0, "a", 80.0, 4000.0, False, 60.0, 3000.0, 0, True)
    store.next_seq += 1
    store.add(made, Experience(np.zeros(19), np.zeros(2), 0.0, 0.0), None)
    again = Store(tmp_path, "process")
    assert [one.id for one in again.open_of("a", 0.0)] == [made.id]
    assert again.open_of("a", 6.0) == []
    again.close()
    store.close()


def test_the_documentation_page_needs_no_other_server(server: Server) -> None:
    page = server.get("/docs")
    assert "POST /allocate" in page
    assert "allocation_id" in page
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "<script" not in page
