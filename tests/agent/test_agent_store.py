"""The store of the allocation agent: experiences, histories and allocations, also after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clustergym.agent import store as agent_store
from clustergym.agent.database import LOG_BYTES_KEPT, STORE_SCHEMA, connect
from clustergym.agent.learner import ExperienceReader, Experiences
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Allocation, Experience, Feedback, Store, StoreUnavailable
from clustergym.gpu_allocation import history

SETTINGS = ServerSettings()


def allocation(
    store: Store, owner: str = "team/a", created_s: float | None = None, version: int = 0, request_id: str | None = None
) -> Allocation:
    """Add an allocation of 60 of 80 % and 3000 of 4000 MB."""
    made = Allocation(
        seq=store.next_seq, token="0" * 32, created_s=time.time() if created_s is None else created_s, owner=owner,
        requested_cores=80.0, requested_memory_mb=4000.0, sensitive=False, cores=60.0, memory_mb=3000.0,
        version=version, learnable=True,
    )  # fmt: skip
    store.next_seq += 1
    store.add(made, Experience(np.zeros(19), np.zeros(2), 0.0, 0.0), request_id)
    return made


def accept(store: Store, made: Allocation, reward: float = 1.0, learnable: bool = True) -> None:
    """Add accepted feedback: the pod used 30 % of the GPU and 2000 MB."""
    outcome = Feedback(
        received_s=time.time(), usage=30.0, qos_met=True, pods=1, memory_used_mb=2000.0, oom=False, reward=reward,
        needed=0.375, advised_reward=reward, advised_qos=True,
        recommended_reward=reward, recommended_qos=True, vpa_reward=reward, regret=0.0,
        next_obs=np.zeros(19, np.float32).tobytes(),
        done=False,
    )  # fmt: skip
    store.add_feedback(made, "accepted", outcome, learnable)


def found(store: Store, allocation_id: str) -> Allocation:
    allocation = store.find(allocation_id)
    assert allocation is not None
    return allocation


def read(reader: ExperienceReader, learned_through: int, version: int) -> Experiences:
    batch = reader.read(learned_through, version)
    assert batch is not None
    return batch


def test_experiences_are_read_once_in_order_and_in_full_batches(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    connection = connect(tmp_path, "process")
    reader = ExperienceReader(connection, SETTINGS)
    for i in range(40):
        accept(store, allocation(store), reward=i / 10, learnable=i % 2 == 0)
    assert reader.read(0, 0) is None  # 20 of 32
    for i in range(40, 70):
        accept(store, allocation(store), reward=i / 10)
    batch = read(reader, 0, 0)
    expected = [i / 10 for i in range(70) if i >= 40 or i % 2 == 0]
    np.testing.assert_allclose(batch.rewards, expected, rtol=1e-6)
    assert reader.read(batch.through, 1) is None
    store.close()
    connection.close()


def test_experiences_of_old_policies_are_skipped(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    for version in [0] * 10 + [5] * 32:
        accept(store, allocation(store, version=version))
    batch = read(ExperienceReader(store.connection, SETTINGS), 0, 5 + SETTINGS.max_policy_lag)
    assert (len(batch.rewards), batch.skipped, batch.through) == (32, 10, 42)
    store.close()


def test_stale_experiences_at_the_head_do_not_stop_learning(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, max_batch=SETTINGS.batch_size)
    store = Store(tmp_path, "process")
    reader = ExperienceReader(store.connection, settings)
    for _ in range(3 * settings.max_batch):
        accept(store, allocation(store, version=0))
    version = settings.max_policy_lag + 1
    assert reader.read(0, version) is None  # all are stale
    for _ in range(settings.batch_size - 1):
        accept(store, allocation(store, version=1))
    assert reader.read(0, version) is None  # one is missing
    accept(store, allocation(store, version=1))
    batch = read(reader, 0, version)
    assert (len(batch.rewards), batch.skipped, batch.through) == (32, 96, 128)
    assert reader.read(batch.through, version) is None
    store.close()


def test_rows_that_cannot_be_learned_from_are_read_once(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    reader = ExperienceReader(store.connection, SETTINGS)
    for i in range(500):
        accept(store, allocation(store), learnable=i == 0)
    steps: list[int] = []
    for _ in range(2):
        steps.append(0)

        def count() -> None:
            steps[-1] += 1

        store.connection.set_progress_handler(count, 1)
        assert reader.read(0, 0) is None
        store.connection.set_progress_handler(None, 1)
    # Instructions of SQLite: the first call reads 500 rows, the second none.
    assert steps[0] > 1000
    assert steps[1] < 100
    for _ in range(SETTINGS.batch_size - 1):
        accept(store, allocation(store))
    batch = read(reader, 0, 0)
    assert (len(batch.rewards), batch.skipped, batch.through) == (SETTINGS.batch_size, 0, 499 + SETTINGS.batch_size)
    store.close()


def test_a_failed_commit_leaves_no_trace_in_memory(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    made = allocation(store)
    with locked(tmp_path), pytest.raises(StoreUnavailable, match="the store cannot be written: database is locked"):
        accept(store, made)
    assert found(store, made.id).feedback is None
    assert store.counters() == {"allocations": 1}
    assert store.history(made.owner) == history.new_history()
    assert store.problem is not None
    assert not store.recover()
    assert store.problem is None
    accept(store, found(store, made.id))
    assert found(Store(tmp_path, "process"), made.id).feedback == "accepted"
    store.close()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another process writes and does not end."""
    with contextlib.closing(sqlite3.connect(folder / "store.db", isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        yield


def test_request_ids_are_those_of_the_newest_committed_allocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(store: Store) -> list[int]:
        found = (store.find_request(f"pod-{i}") for i in range(8))
        return [i for i, one in enumerate(found) if one is not None]

    monkeypatch.setattr(agent_store, "MAX_CACHED_ALLOCATIONS", 4)
    store = Store(tmp_path, "process")
    for i in range(6):
        allocation(store, created_s=1000.0 * i, request_id=f"pod-{i}")
    assert known(store) == [2, 3, 4, 5]
    with contextlib.closing(Store(tmp_path, "process")) as again:  # after a restart
        assert known(again) == [2, 3, 4, 5]
        assert [again.find_request("pod-5").owner] == ["team/a"]  # type: ignore[union-attr]
    with locked(tmp_path), pytest.raises(StoreUnavailable):
        allocation(store, request_id="pod-6")
    assert known(store) == [2, 3, 4, 5]
    store.delete_before(3500.0)
    assert known(store) == [4, 5]
    allocation(store, request_id="pod-3")  # the old one is gone
    assert known(store) == [3, 4, 5]
    store.close()


def test_histories_survive_a_kill(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    for i in range(20):
        accept(store, allocation(store, owner=f"team/{i % 3}"))
    expected = {f"team/{i}": list(store.history(f"team/{i}")) for i in range(3)}
    # The first store is not closed, as after a kill.
    again = Store(tmp_path, "process")
    assert {owner: again.history(owner) for owner in expected} == expected
    again.close()
    store.connection.close()


def test_histories_are_complete_when_the_cache_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_store, "MAX_CACHED_OWNERS", 2)
    owners = [f"team/{i}" for i in range(5)]
    store = Store(tmp_path, "process")
    for _ in range(3):
        for owner in owners:
            accept(store, allocation(store, owner=owner))
            store.history(f"new/{owner}")
    expected = history.new_history()
    for _ in range(3):
        history.remember(expected, 0.375, 0.75, True, False, 0.5)
    assert all(store.history(owner) == expected for owner in owners)
    again = Store(tmp_path, "process")
    assert all(again.history(owner) == expected for owner in owners)
    again.close()
    store.connection.close()


def test_old_rows_are_deleted_and_their_numbers_are_not_reused(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    old = allocation(store, created_s=1000.0)
    accept(store, old)
    new = allocation(store)
    assert store.delete_before(2000.0) == 1
    assert store.find(old.id) is None
    assert store.find(new.id) is not None
    assert store.delete_before(2000.0) == 0
    store.delete_before(time.time() + 1)
    store.close()
    again = Store(tmp_path, "process")
    assert again.next_seq == 3
    made = allocation(again)
    accept(again, made)
    # Nor are feedback numbers: for a checkpoint that has learned up to 1, this feedback must be new.
    assert again.connection.execute("SELECT seq FROM feedback").fetchall() == [(2,)]
    again.close()


def test_an_allocation_is_found_only_by_its_full_id(tmp_path: Path) -> None:
    store = Store(tmp_path, "process")
    made = allocation(store)
    assert store.find(made.id) is made
    for forged in (
        f"{made.seq:x}-{'1' * 32}",
        f"{made.seq:x}",
        f"{made.seq:x}-",
        "",
        "x",
        "1-" + "g" * 32,
        f"2-{'0' * 32}",
    ):
        assert store.find(forged) is None
    store.close()


def test_a_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, "process").close()
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("UPDATE meta SET value = 99 WHERE key = 'schema'")
    connection.close()
    with pytest.raises(ValueError, match=f"has schema 99; this agent reads schema {STORE_SCHEMA}"):
        Store(tmp_path, "process")


def test_a_long_log_is_moved_into_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "MAX_LOG_BYTES", 1)
    store = Store(tmp_path, "process")
    made = allocation(store)
    before = (tmp_path / "store.db").stat().st_size
    asyncio.run(store.shrink_log())
    assert (tmp_path / "store.db").stat().st_size > before
    assert store.find(made.id) is made
    store.close()


def test_the_log_file_shrinks_after_it_has_been_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a log that was large once would be moved again every second."""
    monkeypatch.setattr(Store, "MAX_LOG_BYTES", LOG_BYTES_KEPT + 1)
    store, wal = Store(tmp_path, "process"), tmp_path / "store.db-wal"
    store.connection.execute("INSERT INTO owners VALUES ('large', zeroblob(?), '')", (LOG_BYTES_KEPT + (1 << 20),))
    assert wal.stat().st_size > LOG_BYTES_KEPT + (1 << 20)
    asyncio.run(store.shrink_log())
    allocation(store)
    assert wal.stat().st_size <= LOG_BYTES_KEPT
    store.close()
