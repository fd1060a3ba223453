"""SQLite store of allocations, feedback, owner histories and counters."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import logging
import re
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clustergym.gpu_allocation.history import new_history, remember

log = logging.getLogger(__name__)

DATABASE_NAME = "store.db"
STORE_SCHEMA = 1
MAX_CACHED_ALLOCATIONS = 100_000
MAX_CACHED_OWNERS = 50_000
_ALLOCATION_ID = re.compile(r"([0-9a-f]{1,15})-([0-9a-f]{32})")


@dataclass(slots=True)
class Allocation:
    """A request and the decision on it. ``feedback`` is the status of the feedback, None until it arrives."""

    seq: int
    token: str
    created_s: float
    owner: str
    requested_cores: float
    requested_memory_mb: float
    sensitive: bool
    cores: float
    memory_mb: float
    version: int
    learnable: bool
    feedback: str | None = None

    @property
    def id(self) -> str:
        return f"{self.seq:x}-{self.token}"


class Feedback(NamedTuple):
    """The outcome of an allocation. Field names are column names."""

    received_s: float
    usage: float
    """Share of the GPU that was used, in %."""
    qos_met: bool
    pods: int
    memory_used_mb: float
    oom: bool
    reward: float
    needed: float
    """Cores that the pod needed / requested cores."""


TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS allocations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL, request_id TEXT, created_s REAL NOT NULL,
    owner TEXT NOT NULL, asked_cores REAL NOT NULL, asked_memory_mb REAL NOT NULL, sensitive INTEGER NOT NULL,
    obs BLOB NOT NULL, action BLOB NOT NULL, log_prob REAL NOT NULL, version INTEGER NOT NULL,
    learnable INTEGER NOT NULL, cores REAL NOT NULL, memory_mb REAL NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS requests ON allocations (request_id) WHERE request_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS feedback (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, allocation INTEGER NOT NULL UNIQUE REFERENCES allocations (seq),
    received_s REAL NOT NULL, status TEXT NOT NULL, usage REAL NOT NULL, qos_met INTEGER NOT NULL,
    pods INTEGER NOT NULL, memory_used_mb REAL NOT NULL, oom INTEGER NOT NULL, reward REAL NOT NULL,
    needed REAL NOT NULL, learnable INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, history BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
ALLOCATION_COLUMNS = (
    "a.seq, a.token, a.created_s, a.owner, a.asked_cores, a.asked_memory_mb, a.sensitive, a.cores, a.memory_mb, "
    "a.version, a.learnable, f.status"
)
"""Columns of an :class:`Allocation`, in the order of its fields."""
INSERT_FEEDBACK = (
    f"INSERT INTO feedback (allocation, status, {', '.join(Feedback._fields)}, learnable) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def connect(folder: Path, durability: str) -> sqlite3.Connection:
    """Open the database in write-ahead mode, so that the learner can read while the server writes."""
    connection = sqlite3.connect(folder / DATABASE_NAME, isolation_level=None, timeout=1.0, check_same_thread=False)
    # A commit writes whole pages: small pages mean less to write.
    connection.execute("PRAGMA page_size = 2048")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    # Moving the log into the database waits for the disk. Store.shrink_log does it outside of requests.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


@contextlib.contextmanager
def exclusive_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process ends, even if it is killed."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(f"{path.parent} is in use by another agent") from None
        yield


class StoreUnavailable(Exception):
    """A transaction failed, and none of its requests took effect."""


class Store:
    """Allocations, feedback, owner histories and counters in SQLite.

    All methods run on the event loop. Requests that arrive together are committed together, and their clients are
    answered after the commit. Memory holds the state after that commit: of two feedbacks on one allocation in the same
    group, the first is accepted and the second is a duplicate.
    """

    COMMIT_INTERVAL_S = 0.005
    HISTORY_INTERVAL_S = 1.0
    MAX_LOG_BYTES = 16 << 20

    def __init__(self, folder: Path, durability: str) -> None:
        self.folder, self.durability = folder, durability
        self.connection = connect(folder, durability)
        self.connection.executescript(TABLES)
        self.connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (STORE_SCHEMA,))
        (schema,) = self.connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if schema != STORE_SCHEMA:
            raise ValueError(f"{folder / DATABASE_NAME} has schema {schema}; this agent reads schema {STORE_SCHEMA}")
        row = self.connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'allocations'").fetchone()
        self.next_seq: int = 1 + (row[0] if row else 0)
        self._allocations: OrderedDict[int, Allocation] = OrderedDict()
        self._seq_by_request: OrderedDict[str, int] = OrderedDict()
        self._histories: OrderedDict[str, list[float]] = OrderedDict()
        self._unsaved_owners: set[str] = set()
        self._statements: list[tuple[str, tuple[Any, ...]]] = []
        self._counts: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []
        self._committed_at = self._histories_saved_at = 0.0
        self._replay_feedback()

    # Allocations

    def add(
        self, allocation: Allocation, obs: NDArray[Any], action: NDArray[Any], log_prob: float, request_id: str | None
    ) -> None:
        """Add an allocation; call :meth:`committed` before it is answered."""
        a = allocation
        self._add_statement(
            "INSERT INTO allocations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            a.seq, a.token, request_id, a.created_s, a.owner, a.requested_cores, a.requested_memory_mb, a.sensitive,
            obs.astype(np.float32).tobytes(), action.astype(np.float32).tobytes(), log_prob, a.version, a.learnable,
            a.cores, a.memory_mb,
        )  # fmt: skip
        _cache(self._allocations, a.seq, a)
        if request_id is not None:
            _cache(self._seq_by_request, request_id, a.seq)
        self._counts["allocations"] += 1

    def find(self, allocation_id: str) -> Allocation | None:
        """The allocation with this id. The second half of an id is random, so ids cannot be guessed."""
        match = _ALLOCATION_ID.fullmatch(allocation_id)
        if match is None:
            return None
        found = self._find_seq(int(match[1], 16))
        return found if found is not None and hmac.compare_digest(found.token, match[2]) else None

    def find_request(self, request_id: str) -> Allocation | None:
        """The allocation that was made for this request id."""
        seq = self._seq_by_request.get(request_id)
        if seq is None:
            row = self.connection.execute("SELECT seq FROM allocations WHERE request_id = ?", (request_id,)).fetchone()
            if row is None:
                return None
            (seq,) = row
        return self._find_seq(seq)

    def _find_seq(self, seq: int) -> Allocation | None:
        if seq not in self._allocations:
            row = self.connection.execute(
                f"SELECT {ALLOCATION_COLUMNS} FROM allocations a LEFT JOIN feedback f ON f.allocation = a.seq "
                "WHERE a.seq = ?",
                (seq,),
            ).fetchone()
            if row is None:
                return None
            _cache(self._allocations, seq, Allocation(*row))
        return self._allocations[seq]

    def delete_before(self, created_s: float) -> int:
        """Delete up to 200 allocations that are older than this, with their feedback. Returns how many."""
        seqs = self.connection.execute(
            "SELECT seq FROM allocations WHERE created_s < ? ORDER BY seq LIMIT 200", (created_s,)
        ).fetchall()
        if seqs:
            for (seq,) in seqs:
                self._allocations.pop(seq, None)
                self._add_statement("DELETE FROM feedback WHERE allocation = ?", seq)
                self._add_statement("DELETE FROM allocations WHERE seq = ?", seq)
            self.flush()
        return len(seqs)

    # Feedback and owner histories

    def add_feedback(self, allocation: Allocation, status: str, feedback: Feedback, learnable: bool) -> None:
        """Add the only feedback that an allocation can have (the table's UNIQUE would refuse a second one)."""
        allocation.feedback = status
        self._add_statement(INSERT_FEEDBACK, allocation.seq, status, *feedback, learnable)
        self._remember(allocation, feedback)

    def history(self, owner: str) -> list[float]:
        """History of an owner's pods. It is cached and saved about once per second; feedback can always rebuild it."""
        if owner not in self._histories:
            if len(self._histories) >= MAX_CACHED_OWNERS:
                # The oldest saved history makes room. Unsaved ones are not in the database yet, so they stay.
                oldest = next((name for name in self._histories if name not in self._unsaved_owners), None)
                if oldest is not None:
                    del self._histories[oldest]
            row = self.connection.execute("SELECT history FROM owners WHERE owner = ?", (owner,)).fetchone()
            self._histories[owner] = new_history() if row is None else np.frombuffer(row[0]).tolist()
        return self._histories[owner]

    def _remember(self, allocation: Allocation, feedback: Feedback) -> None:
        """Add the outcome of an allocation to the history of its owner."""
        share = allocation.cores / allocation.requested_cores
        memory = min(feedback.memory_used_mb / allocation.requested_memory_mb, 1.0)
        history = self.history(allocation.owner)
        remember(history, feedback.needed, share, bool(feedback.qos_met), bool(feedback.oom), memory)
        self._unsaved_owners.add(allocation.owner)

    def _save_histories(self) -> None:
        sql = "INSERT INTO owners VALUES (?1, ?2) ON CONFLICT DO UPDATE SET history = ?2"
        for owner in self._unsaved_owners:
            self._add_statement(sql, owner, np.array(self._histories[owner]).tobytes())
        self._unsaved_owners.clear()
        # Committed together with the histories: a restart replays only feedback that was added later.
        self._add_statement(
            "INSERT OR REPLACE INTO meta SELECT 'remembered', coalesce(max(seq), 0) FROM sqlite_sequence "
            "WHERE name = 'feedback'"
        )

    def _replay_feedback(self) -> None:
        """Rebuild the histories that a killed process had not saved, from the feedback since the last save."""
        columns = ", ".join(f"f.{name}" for name in Feedback._fields)
        rows = self.connection.execute(
            f"SELECT {columns}, {ALLOCATION_COLUMNS} FROM feedback f JOIN allocations a ON a.seq = f.allocation "
            "WHERE f.seq > coalesce((SELECT value FROM meta WHERE key = 'remembered'), 0) ORDER BY f.seq"
        ).fetchall()
        split = len(Feedback._fields)
        for row in rows:
            self._remember(Allocation(*row[split:]), Feedback(*row[:split]))

    # Transactions

    def _add_statement(self, sql: str, *values: Any) -> None:
        """Add a statement to the next transaction."""
        self._statements.append((sql, values))

    def count(self, name: str) -> None:
        """Increment a counter that survives restarts."""
        self._counts[name] += 1

    def counters(self) -> dict[str, int]:
        self.flush()
        return dict(self.connection.execute("SELECT name, value FROM counters").fetchall())

    async def committed(self) -> None:
        """Wait until everything added so far is in the database. Raises :class:`StoreUnavailable` if it cannot be."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # An idle store commits at once. Under load it commits groups: one commit costs as much as ten requests.
            loop.call_at(self._committed_at + self.COMMIT_INTERVAL_S, self.flush)
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        await future

    def flush(self) -> None:
        """Commit everything added so far and wake the requests that wait for it."""
        waiting, self._waiting = self._waiting, []
        self._committed_at = time.monotonic()  # the clock of the event loop
        problem: str | None = None
        try:
            self._commit()
        except sqlite3.Error as error:
            problem = str(error)
            log.error("the store cannot be written: %s", problem)
            # Memory holds what was not committed: discard it and read the database again.
            self._allocations.clear()
            self._seq_by_request.clear()
            self._histories.clear()
            self._unsaved_owners.clear()
            with contextlib.suppress(sqlite3.Error):
                self._replay_feedback()
        for future in waiting:
            if future.done():
                continue
            if problem is None:
                future.set_result(None)
            else:
                future.set_exception(StoreUnavailable(f"the store cannot be written: {problem}"))

    def _commit(self) -> None:
        if self._unsaved_owners and self._committed_at - self._histories_saved_at > self.HISTORY_INTERVAL_S:
            self._histories_saved_at = self._committed_at
            self._save_histories()
        statements, self._statements = self._statements, []
        counts, self._counts = self._counts, Counter()
        sql = "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT DO UPDATE SET value = value + ?2"
        statements += [(sql, pair) for pair in counts.items()]
        if not statements:
            return
        execute = self.connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            for sql, values in statements:
                execute(sql, values)
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise

    async def shrink_log(self) -> None:
        """Move a long write-ahead log into the database: most of it in a thread, the rest on the event loop."""
        try:
            if (self.folder / f"{DATABASE_NAME}-wal").stat().st_size < self.MAX_LOG_BYTES:
                return
        except FileNotFoundError:
            return

        def move() -> None:
            with contextlib.closing(connect(self.folder, self.durability)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

        # The second pass moves what was written during the first, so that the event loop has little left to wait for.
        await asyncio.to_thread(move)
        await asyncio.to_thread(move)
        self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        self.flush()
        self.connection.close()


def _cache(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Add to a cache and drop its oldest entry if it is full; the database still has it."""
    cache[key] = value
    if len(cache) > MAX_CACHED_ALLOCATIONS:
        cache.popitem(last=False)
