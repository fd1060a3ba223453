"""The database file of the agent: tables, connections, lock, and what happens if it is corrupt."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

DATABASE_NAME = "store.db"
STORE_SCHEMA = 4
LOG_BYTES_KEPT = 4 << 20
"""Size of the log file once its content is in the database. Writing over it is cheaper than growing it."""
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS allocations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL, request_id TEXT, created_s REAL NOT NULL,
    owner TEXT NOT NULL, asked_cores REAL NOT NULL, asked_memory_mb REAL NOT NULL, sensitive INTEGER NOT NULL,
    obs BLOB NOT NULL, action BLOB NOT NULL, log_prob REAL NOT NULL, version INTEGER NOT NULL,
    learnable INTEGER NOT NULL, cores REAL NOT NULL, memory_mb REAL NOT NULL, value REAL NOT NULL,
    gpu INTEGER NOT NULL, advised_cores REAL NOT NULL, advised_memory_mb REAL NOT NULL,
    recommended_cores REAL NOT NULL, recommended_memory_mb REAL NOT NULL, decided_by TEXT NOT NULL);
DROP INDEX IF EXISTS requests; -- of earlier versions: random keys made every commit slower as the table grew
CREATE TABLE IF NOT EXISTS feedback (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, allocation INTEGER NOT NULL UNIQUE REFERENCES allocations (seq),
    received_s REAL NOT NULL, status TEXT NOT NULL, usage REAL NOT NULL, qos_met INTEGER NOT NULL,
    pods INTEGER NOT NULL, memory_used_mb REAL NOT NULL, oom INTEGER NOT NULL, reward REAL NOT NULL,
    needed REAL NOT NULL, learnable INTEGER NOT NULL, advised_reward REAL NOT NULL,
    advised_qos INTEGER NOT NULL, recommended_reward REAL NOT NULL, recommended_qos INTEGER NOT NULL,
    vpa_reward REAL NOT NULL, regret REAL NOT NULL, next_obs BLOB NOT NULL, done INTEGER NOT NULL);
DROP TABLE IF EXISTS secrets; -- of earlier versions: the key of credentials that pods carried
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, history BLOB NOT NULL, state BLOB NOT NULL)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


def create_file(folder: Path) -> None:
    """Create the file of the database if there is none, for its owner only."""
    path = folder / DATABASE_NAME
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    path.chmod(0o600)  # the log and the shared memory of SQLite get the same mode


def connect(folder: Path, durability: str) -> sqlite3.Connection:
    """Open the database in write-ahead mode, so that the learner can read while the server writes.

    A file that is missing is not created: an empty one must not take the place of one that was deleted by mistake.
    """
    uri = (folder / DATABASE_NAME).absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=rw", uri=True, isolation_level=None, timeout=1.0, check_same_thread=False)
    # A commit writes whole pages: small pages mean less to write.
    connection.execute("PRAGMA page_size = 2048")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    # Moving the log into the database waits for the disk. Store.shrink_log does it outside of requests.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # Without a limit the file keeps its largest size, and the size no longer shows whether the log has been moved.
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}")
    return connection


def create_tables(connection: sqlite3.Connection, folder: Path) -> None:
    """Create the tables of a new database.

    Raises:
        ValueError: the tables are those of another version of the agent.
    """
    connection.executescript(TABLES)
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (STORE_SCHEMA,))
    (schema,) = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if schema != STORE_SCHEMA:
        raise ValueError(
            f"{folder / DATABASE_NAME} has schema {schema}; this agent reads schema {STORE_SCHEMA}: use another "
            "--store, or rename the file; the checkpoint beside it can be kept"
        )


class InUse(ValueError):
    """Another process has the lock."""


@contextlib.contextmanager
def exclusive_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process ends, even if it is killed."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InUse(f"{path.parent} is in use by another agent") from None
        yield


def set_aside_if_corrupt(folder: Path) -> Path | None:
    """Rename a database that SQLite cannot read. Returns its new path, or None if there is nothing wrong."""
    path = folder / DATABASE_NAME
    if not path.exists():
        return None
    try:
        with contextlib.closing(connect(folder, "process")) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            problem = None if found == "ok" else found
    except sqlite3.OperationalError:
        raise  # locked, or no permission: not a corrupt file
    except sqlite3.DatabaseError as error:
        problem = str(error)
    if problem is None:
        return None
    aside = path.with_name(f"{DATABASE_NAME}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error(
        "%s is corrupt (%s): it was renamed to %s, and the agent starts with an empty store. The policy is kept; "
        "the histories of owners are lost",
        path, problem, aside,
    )  # fmt: skip
    return aside
