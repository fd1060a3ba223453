"""Attacks on the agent: extreme numbers, forged feedback, wrong roles, failing commits, lost and corrupt files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from clustergym.agent.connections import ConnectionLimits, ConnectionPool
from clustergym.agent.credentials import Access
from clustergym.agent.database import connect
from clustergym.agent.messages import AllocateRequest, AllocateResponse, FeedbackRequest
from clustergym.agent.service import Policy, Service
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Allocation, Experience, Store, StoreUnavailable
from clustergym.agent.telemetry import Telemetry
from clustergym.agent.versions import CHECKPOINT_KIND, kept_versions, load_or_restore, save_version, version_path
from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint
from processes import wait_until
from trainers import load_trainer

OWNER = "team/Deployment/web"
REQUEST = AllocateRequest(owner=OWNER, cores=80, memory=4000)
GOOD = {"actual_usage": 30, "qos_met": True, "memory_used": 1000}


def make_policy(version: int) -> Policy:
    trainer = load_trainer("ppo_gpu_alloc_online")
    policy: Policy = trainer.Policy(trainer.untrained(24) | {"version": version})
    return policy


def make_service(folder: Path, **changes: Any) -> Service:
    """A service without HTTP, learner and GPU, with an untrained policy."""
    server = dataclasses.replace(ServerSettings(store=folder, telemetry_s=0), **changes)
    pool = ConnectionPool(ConnectionLimits(2, 1.0, 1.0))
    return Service(server, Store(folder, "process"), Telemetry((), 0), make_policy(0), None, Access(None), pool, seed=0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = make_service(tmp_path)
    yield made
    made.store.close()


def feedback(service: Service, allocation: Allocation, **changes: Any) -> str:
    return service.feedback(FeedbackRequest(allocation_id=allocation.id, **(GOOD | changes)))[0]


def everything(service: Service) -> dict[str, Any]:
    """All that a decision about the owner depends on, and all that is counted."""
    store = service.store
    return {
        "state": store.owner_state(OWNER).to_array().tolist(), "history": list(store.history(OWNER)),
        "counters": store.counters(), "last": dict(service._last_shares), "test": service.test.samples,
        "pods": len(service.status.pods), "next": store.next_seq,
    }  # fmt: skip


# Numbers


def test_numbers_below_one_are_refused() -> None:
    """cores or memory of 1e-320 made shares of a request infinite, in memory and in every replay."""
    for name in ("cores", "memory", "max_cores", "max_memory"):
        with pytest.raises(ValidationError, match="greater than or equal to 1"):
            AllocateRequest(**({"cores": 80, "memory": 4000} | {name: 1e-320}))  # type: ignore[arg-type]


def numbers(most: float) -> st.SearchStrategy[float]:
    """Legal and illegal numbers, with the extremes of floating point."""
    return st.one_of(st.sampled_from([0.0, 5e-324, 1e-320, 1e-5, 1.0, most, 1e308]), st.floats(0, 2 * most))


@settings(max_examples=200, deadline=None)
@given(
    request=st.fixed_dictionaries(
        {"cores": numbers(100), "memory": numbers(1 << 20)},
        optional={name: numbers(100) for name in ("min_cores", "max_cores", "min_memory", "max_memory")}
        | {"qos_class": st.sampled_from(["be", "latency-sensitive"])},
    ),
    outcome=st.fixed_dictionaries(
        {"actual_usage": numbers(100), "qos_met": st.booleans()},
        optional={
            "memory_used": numbers(1 << 20), "pressure": numbers(1000), "pods": st.integers(0, 10_000),
            "oom": st.booleans(), "final": st.booleans(),
        },
    ),
)  # fmt: skip
def test_no_pair_of_legal_requests_stops_the_agent(
    tmp_path_factory: pytest.TempPathFactory, request: dict[str, Any], outcome: dict[str, Any]
) -> None:
    service = shared_service(tmp_path_factory)
    try:
        asked, told = AllocateRequest(owner=OWNER, **request), FeedbackRequest(**outcome)
    except ValidationError:
        return
    made = service.allocate(asked)
    assert 0 < made.cores <= asked.cores
    assert 0 < made.memory_mb <= asked.memory
    status, _ = service.feedback(told.model_copy(update={"allocation_id": made.id}))
    assert status == ("accepted" if told.final else "sample")
    with contextlib.closing(Store(service.settings.store, "process")) as again:  # after a restart
        state = service.store.owner_state(OWNER).to_array()
        assert again.owner_state(OWNER).to_array().tolist() == pytest.approx(state.tolist(), rel=1e-5)
        assert again.unreadable_owners == 0


_SHARED: list[Service] = []


def shared_service(factory: pytest.TempPathFactory) -> Service:
    """One service for all examples: each finds the owner as the ones before have left it."""
    if not _SHARED:
        _SHARED.append(make_service(factory.mktemp("fuzzed")))
    return _SHARED[0]


def test_an_owner_that_cannot_be_read_begins_again_and_is_counted(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    feedback(service, service.allocate(REQUEST))
    service.store.connection.execute("UPDATE owners SET state = zeroblob(7)")
    service.store.close()
    again = make_service(tmp_path)
    assert feedback(again, again.allocate(REQUEST)) == "accepted"
    assert again.store.unreadable_owners == 1
    again.store.close()


# Nothing has an effect before its commit


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(folder / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def test_a_request_that_cannot_be_stored_has_no_effect(service: Service, tmp_path: Path) -> None:
    made = service.allocate(REQUEST)
    service.champion = make_policy(version=-1)
    made.champion = 40.0, 2000.0, 80.0, 4000.0
    before = everything(service)
    with locked(tmp_path):
        for attempt in (lambda: service.allocate(REQUEST), lambda: feedback(service, made)):
            with pytest.raises(StoreUnavailable):
                attempt()
    assert everything(service) == before
    assert feedback(service, made) == "accepted"
    assert everything(service)["test"] == 1


def test_a_value_that_sqlite_refuses_leaves_the_store_usable(service: Service) -> None:
    made = service.allocate(REQUEST)
    bad = dataclasses.replace(made, seq=service.store.next_seq, version=1 << 70)
    with pytest.raises(OverflowError):
        service.store.add(bad, Experience(np.zeros(19), np.zeros(2), 0.0, 0.0), "pod-1")
    assert service.store.find_request("pod-1") is None
    assert feedback(service, service.allocate(REQUEST)) == "accepted"


# Forged feedback


def test_the_answer_holds_no_credential() -> None:
    assert not [name for name in AllocateResponse.model_fields if "token" in name]


@pytest.mark.parametrize("lie", [{"qos_met": False}, {"oom": True}])
def test_a_later_report_of_a_missed_objective_counts(service: Service, lie: dict[str, Any]) -> None:
    made = service.allocate(REQUEST)
    assert feedback(service, made, actual_usage=0) == "accepted"
    assert feedback(service, made, actual_usage=90) == "duplicate"
    qos = service.store.owner_state(OWNER).qos
    assert feedback(service, made, **lie) == "corrected"
    assert service.store.owner_state(OWNER).qos < qos
    assert feedback(service, made, **lie) == "duplicate"
    assert feedback(service, made) == "duplicate"
    # One row, that of the honest report, and with a new number: a learner that has passed the first one sees it.
    rows = service.store.connection.execute("SELECT seq, qos_met FROM feedback").fetchall()
    assert rows == [(2, 0)]


def test_forged_good_reports_do_not_drive_an_owner_down(service: Service) -> None:
    """Each pod of the owner is reported idle first and as missed later."""
    for _ in range(40):
        made = service.allocate(REQUEST)
        feedback(service, made, actual_usage=0, memory_used=1)
        feedback(service, made, qos_met=False, actual_usage=80)
    made = service.allocate(REQUEST)
    assert (made.cores, made.memory_mb) == (80, 4000)


def test_a_final_report_before_a_pod_could_have_run_is_ignored(tmp_path: Path) -> None:
    service = make_service(tmp_path, min_run_s=1000.0)
    made = service.allocate(REQUEST)
    assert feedback(service, made) == "early"
    assert feedback(service, made, final=False) == "sample"
    service.settings = dataclasses.replace(service.settings, min_run_s=0.0)
    assert feedback(service, made) == "accepted"
    service.store.close()


def test_every_role_may_do_only_its_own(tmp_path: Path) -> None:
    paths = {role: tmp_path / role for role in ("operator", "webhook", "collector")}
    for role, path in paths.items():
        path.touch(mode=0o600)
        path.write_text(f"{role}-token\n")
    access = Access(**paths)

    def allowed(method: str, path: str) -> set[str]:
        return {role for role in (*paths, "unknown") if access.allows(method, path, f"Bearer {role}-token".encode())}

    assert allowed("POST", "/allocate") == {"operator", "webhook"}
    assert allowed("POST", "/feedback") == {"operator", "collector"}
    for method, path in (("GET", "/status.json"), ("GET", "/feedback"), ("PUT", "/allocate"), ("POST", "//feedback")):
        assert allowed(method, path) == {"operator"}, path
    with pytest.raises(ValueError, match="need --token-file"):
        ServerSettings(webhook_token_file=paths["webhook"]).check()


# Files


def checkpoint(version: int) -> dict[str, Any]:
    return {"version": version, "learned_through": 0}


def test_a_corrupt_checkpoint_is_replaced_by_the_newest_good_version(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        save_version(tmp_path, checkpoint(version))
    # The newest version is a link to the same file, so it is as corrupt.
    with (tmp_path / CHECKPOINT_NAME).open("r+b") as file:
        file.truncate(100)
    assert load_or_restore(tmp_path)["version"] == 2
    assert load_checkpoint(tmp_path / CHECKPOINT_NAME, CHECKPOINT_KIND)["version"] == 2
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"")
    for version in kept_versions(tmp_path):
        version_path(tmp_path, version).write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated"):
        load_or_restore(tmp_path)


def test_checkpoints_follow_the_umask_of_the_agent(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        save_version(tmp_path, checkpoint(1))
    finally:
        os.umask(before)
    for path in (tmp_path / CHECKPOINT_NAME, version_path(tmp_path, 1)):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_deleted_store_is_opened_again_when_it_is_back(service: Service, tmp_path: Path) -> None:
    made, path = service.allocate(REQUEST), tmp_path / "store.db"
    service.store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(path, tmp_path / "backup")
    path.unlink()
    with pytest.raises(StoreUnavailable, match="was deleted or replaced"):
        service.allocate(REQUEST)
    assert service.store.lost is not None
    assert not service.store.recover()
    with pytest.raises(sqlite3.OperationalError):  # nothing is made in its place, by a restarted learner either
        connect(tmp_path, "process")
    assert not path.exists()
    os.replace(tmp_path / "backup", path)
    assert service.store.recover()
    assert service.store.problem is None
    found = service.store.find(made.id)
    assert found is not None
    assert feedback(service, found) == "accepted"


def test_quickstart_ends_its_agent_on_sigterm(tmp_path: Path) -> None:
    program = "import sys; from clustergym import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "agent", "quickstart", "--port", "0", "--store", str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(psutil.Process(process.pid).children()), "the agent of quickstart", process)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        process.kill()
