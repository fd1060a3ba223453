"""The store of the allocation agent: experiences, versions and rollback, lost and corrupt files."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_service import make_service
from clustergym import cli
from clustergym.agent import versions
from clustergym.agent.learner import Experiences, learn, read_experiences
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Store, StoreUnavailable, connect, set_aside_if_corrupt
from clustergym.agent.versions import add_version, kept_versions, load_newest, load_version, newest_version, roll_back
from clustergym.kubernetes.messages import AllocateRequest, FeedbackRequest
from trainers import load_trainer

SETTINGS = ServerSettings(max_batch=64)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def add_pods(store: Store, n: int, version: int = 0) -> None:
    """Pods with feedback, decided by this version."""
    service = make_service(store.folder)
    service.policy.version = version
    for _ in range(n):
        made = service.allocate(AllocateRequest(cores=80, memory=4000))
        report = FeedbackRequest(allocation_id=made.allocation_id, actual_usage=30, qos_met=True)
        assert service.feedback(report).status == "accepted"
    service.store.close()


def state(version: int, learned_through: int = 0) -> dict[str, Any]:
    """A version whose actor has this number as all of its biases."""
    online = load_trainer("ppo_gpu_alloc_online")
    found = online.initial_state(online.Args(levels=10)) | {"version": version, "learned_through": learned_through}
    found["agent"]["actor.4.bias"].fill_(version)
    return dict(found)


def number(found: dict[str, Any]) -> float:
    return float(found["agent"]["actor.4.bias"][0])


# Experiences


def test_experiences_are_read_in_order_and_in_full_batches(store: Store) -> None:
    add_pods(store, 31)
    assert read_experiences(store.connection, state(0), SETTINGS) is None
    add_pods(store, 69)
    batch = read_experiences(store.connection, state(0), SETTINGS)
    assert batch is not None
    assert (len(batch.rewards), batch.through, batch.obs.shape, batch.actions.shape) == (64, 64, (64, 19), (64, 2))
    rewards = store.connection.execute("SELECT sampled_reward FROM feedback ORDER BY seq LIMIT 64").fetchall()
    np.testing.assert_allclose(batch.rewards, np.array(rewards)[:, 0], rtol=1e-6)
    batch = read_experiences(store.connection, state(0, 64), SETTINGS)
    assert batch is not None
    assert (len(batch.rewards), batch.through) == (36, 100)
    assert read_experiences(store.connection, state(0, 100), SETTINGS) is None


def test_experiences_of_old_policies_do_not_stop_learning(store: Store) -> None:
    add_pods(store, 100, version=0)
    newer = SETTINGS.max_policy_lag + 1
    assert read_experiences(store.connection, state(newer), SETTINGS) is None  # all are too old
    add_pods(store, 32, version=1)
    batch = read_experiences(store.connection, state(newer), SETTINGS)
    assert batch is not None
    assert (len(batch.rewards), batch.through) == (32, 132)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("allocations", "obs", b"\0" * 7), ("allocations", "action", b""), ("allocations", "log_prob", "x"),
        ("feedback", "next_obs", b"\0" * 20), ("feedback", "sampled_reward", b"?"),
    ],
)  # fmt: skip
def test_damaged_experiences_do_not_stop_learning(store: Store, table: str, column: str, value: Any) -> None:
    add_pods(store, 40)
    store.connection.execute(f"UPDATE {table} SET {column} = ? WHERE seq <= 3", (value,))
    batch = read_experiences(store.connection, state(0), SETTINGS)
    assert batch is not None
    assert (len(batch.rewards), batch.through) == (37, 40)


def test_what_is_not_learned_from_is_not_read_again_and_again(store: Store) -> None:
    """Instructions of SQLite for a look at 1,000 rows that are not learned from."""
    add_pods(store, 300)
    store.connection.execute("UPDATE feedback SET learnable = 0")
    steps = []
    store.connection.set_progress_handler(lambda: steps.append(1), 1)
    assert read_experiences(store.connection, state(0), SETTINGS) is None
    assert len(steps) < 100


def update(before: dict[str, Any], batch: Experiences) -> tuple[dict[str, Any], dict[str, float]]:
    after = before | {"agent": before["agent"] | {"actor.4.bias": before["agent"]["actor.4.bias"] + 1}}
    return after, {"reward": float(batch.rewards.mean())}


def test_an_update_and_what_it_has_learned_from_are_one_transaction(store: Store) -> None:
    """A kill before the commit, as an exception: the next learner makes the same update."""
    add_version(store.connection, state(0), "initial", None, {})
    add_pods(store, 40)

    class Killed(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                raise KeyboardInterrupt
            return super().execute(sql, *values)

    path = store.folder / "store.db"
    connection = sqlite3.connect(path, isolation_level=None, factory=Killed)
    with pytest.raises(KeyboardInterrupt):
        learn(connection, SETTINGS, update)
    connection.close()
    assert newest_version(store.connection) == 0
    after = learn(store.connection, SETTINGS, update)
    assert (after["version"], after["learned_through"], number(after)) == (1, 40, 1.0)
    assert learn(store.connection, SETTINGS, update, after) is after  # nothing is learned from twice
    assert load_newest(store.connection)["learned_through"] == 40


# Versions


def test_old_versions_are_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "KEPT_VERSIONS", 3)
    for version in range(9):
        assert add_version(
            store.connection, state(version), "update", version - 1 if version else None, {"reward": 1.0}
        )
    assert [one.version for one in kept_versions(store.connection)] == [6, 7, 8]
    assert kept_versions(store.connection)[0].metrics == {"reward": 1.0}


def test_of_an_update_and_a_rollback_only_one_counts(store: Store) -> None:
    """A rollback that comes while an update is computed wins, and the learner continues from it."""
    for version in range(3):
        add_version(store.connection, state(version), "update", version - 1 if version else None, {})
    add_pods(store, 40)

    def slow(before: dict[str, Any], batch: Experiences) -> tuple[dict[str, Any], dict[str, float]]:
        assert roll_back(store.connection, 1) == 3
        return update(before, batch)

    after = learn(store.connection, SETTINGS, slow)
    assert (after["version"], after["learned_through"], number(after)) == (3, 40, 1.0)
    assert [one.note for one in kept_versions(store.connection)][-1] == "rollback to 1"
    # What was decided before the rollback is not learned from.
    assert learn(store.connection, SETTINGS, update, after) is after


def test_a_version_that_cannot_be_read_is_replaced_by_an_older_one(store: Store, caplog: Any) -> None:
    for version in range(3):
        add_version(store.connection, state(version), "update", version - 1 if version else None, {})
    store.connection.execute("UPDATE versions SET state = zeroblob(100) WHERE version = 2")
    found = load_newest(store.connection)
    assert (found["version"], number(found)) == (2, 1.0)
    assert "version 2 cannot be read" in caplog.text
    store.connection.execute("UPDATE versions SET state = 'cos' || char(10) || 'system'")
    with pytest.raises(ValueError, match="none of the 3 versions of the policy can be read"):
        load_newest(store.connection)


def test_a_version_without_a_usable_actor_is_replaced_by_an_older_one(store: Store) -> None:
    for version, damaged in enumerate(
        (state(0), state(1) | {"agent": {}}, state(2) | {"statistics": None}, state(3), state(4))
    ):
        if version >= 3:
            damaged["agent"]["actor.4.bias"] = torch.full((20 + version % 2,), float("nan"))
        add_version(store.connection, damaged, "update", version - 1 if version else None, {})
        assert number(load_newest(store.connection)) == 0.0


def test_the_commands_refuse_what_does_not_exist(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> tuple[int, str]:
        code = cli.main(["agent", *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    assert command("versions", "--store", str(tmp_path / "x")) == (
        2, f"error: {tmp_path}/x has no store.db: it is not the store of an agent\n",
    )  # fmt: skip
    for version in range(2):
        add_version(store.connection, state(version), "update", version - 1 if version else None, {})
    code, text = command("rollback", "--store", str(tmp_path), "--to", "7")
    assert (code, text) == (2, "error: version 7 is not kept; the versions are 0, 1\n")
    code, text = command("rollback", "--store", str(tmp_path), "--to", "0")
    assert (code, text) == (0, "version 2 has the weights of version 0\n")
    assert number(load_version(store.connection, 2)) == 0.0


# Files


def test_the_store_belongs_to_its_owner_only(store: Store) -> None:
    add_pods(store, 1)
    for path in store.folder.glob("store.db*"):
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_old_rows_are_deleted_and_their_numbers_are_not_reused(store: Store) -> None:
    add_pods(store, 250)
    deleted = [store.delete_old(keep=100) for _ in range(3)]
    assert deleted == [100, 50, 0]
    for table in ("allocations", "feedback"):
        assert store.connection.execute(f"SELECT min(seq), count(*) FROM {table}").fetchone() == (151, 100)
    store.connection.execute("DELETE FROM feedback")
    store.connection.execute("DELETE FROM allocations")
    add_pods(store, 1)
    assert store.connection.execute("SELECT seq FROM allocations").fetchall() == [(251,)]


def test_a_store_of_another_schema_is_refused(store: Store, tmp_path: Path) -> None:
    store.connection.execute("UPDATE meta SET value = 4 WHERE key = 'schema'")
    with pytest.raises(ValueError, match="has schema 4; this agent reads schema 5"):
        Store(tmp_path)


def test_a_deleted_store_is_opened_again_when_it_is_back(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    add_pods(store, 1)
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(path, tmp_path / "backup")
    path.unlink()
    with pytest.raises(StoreUnavailable, match="was deleted or replaced"), store.transaction():
        pass
    assert store.lost is not None
    store.recover()
    assert store.problem is not None
    with pytest.raises(sqlite3.OperationalError):  # nothing is made in its place, by a restarted learner either
        connect(tmp_path)
    assert not path.exists()
    os.replace(tmp_path / "backup", path)
    store.recover()
    assert store.problem is None
    assert len(store.newest(10)) == 1


def test_a_deleted_log_is_noticed_and_loses_nothing(store: Store, tmp_path: Path) -> None:
    """SQLite would go on writing into the deleted file, and all of that would be gone after a kill."""
    add_pods(store, 3)
    with store.transaction() as execute:
        execute("UPDATE meta SET value = value")
    (tmp_path / "store.db-wal").unlink()
    with pytest.raises(StoreUnavailable, match=r"store\.db-wal was deleted or replaced"), store.transaction():
        pass
    store.recover()
    assert store.problem is None
    assert len(store.newest(10)) == 3
    with store.transaction() as execute:
        execute("UPDATE feedback SET reward = 7")
    assert connect(tmp_path).execute("SELECT count(*) FROM feedback WHERE reward = 7").fetchone() == (3,)


@pytest.mark.parametrize("damage", ["header", "page"])
def test_a_corrupt_store_is_set_aside(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    assert set_aside_if_corrupt(tmp_path) is None
    add_pods(store, 20)
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    content = bytearray((tmp_path / "store.db").read_bytes())
    start = 0 if damage == "header" else 4096
    content[start : start + 1500] = b"\xa5" * 1500
    (tmp_path / "store.db").write_bytes(content)
    aside = set_aside_if_corrupt(tmp_path)
    assert aside is not None
    assert aside.read_bytes() == content
    Store(tmp_path).close()


def test_readers_do_not_wait_for_a_writer(store: Store, tmp_path: Path) -> None:
    """WAL: the learner reads while the server writes, and the other way round."""
    add_pods(store, 2)
    other = connect(tmp_path)
    found: list[Any] = []
    with store.transaction() as execute:
        execute("DELETE FROM feedback")
        thread = threading.Thread(
            target=lambda: found.append(other.execute("SELECT count(*) FROM feedback").fetchone())
        )
        thread.start()
        thread.join()
    assert found == [(2,)]
    other.close()
