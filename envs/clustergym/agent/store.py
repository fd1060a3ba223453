"""SQLite store of allocations, feedback, owners, trials and versions of the policy. One transaction per request."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from clustergym.agent.owners import STRICT, OwnerState
from clustergym.agent.rails import Amounts
from clustergym.agent.trial import Trial
from clustergym.kubernetes.messages import DecidedBy, FeedbackStatus, is_allocation_id

log = logging.getLogger(__name__)

DATABASE_NAME = "store.db"
STORE_SCHEMA = 5
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS allocations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL, request_id TEXT UNIQUE, created_s REAL NOT NULL,
    owner TEXT NOT NULL, version INTEGER NOT NULL, learnable INTEGER NOT NULL, decision TEXT NOT NULL,
    obs BLOB NOT NULL, action BLOB NOT NULL, log_prob REAL NOT NULL, sampled_s REAL NOT NULL, status TEXT);
CREATE INDEX IF NOT EXISTS open_allocations ON allocations (owner, seq) WHERE status IS NULL;
CREATE TABLE IF NOT EXISTS feedback (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, allocation INTEGER NOT NULL UNIQUE REFERENCES allocations (seq),
    received_s REAL NOT NULL, reward REAL NOT NULL, learnable INTEGER NOT NULL, sampled_reward REAL NOT NULL,
    next_obs BLOB NOT NULL, outcome TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS experiences ON feedback (seq) WHERE learnable;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, changed_s REAL NOT NULL, state TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, created_s REAL NOT NULL, note TEXT NOT NULL,
    metrics TEXT NOT NULL, state BLOB NOT NULL);
"""


@dataclass(slots=True)
class Allocation:
    """A request and the decision on it."""

    seq: int
    token: str
    created_s: float
    owner: str
    version: int
    learnable: bool
    requested: Amounts
    sensitive: bool
    gpu: int
    granted: Amounts
    recommended: Amounts
    """What would be granted without shadow mode."""
    vpa: Amounts
    """What the VPA rule alone would give."""
    rule: Amounts
    """The rule within rails and bounds: one arm of the trial."""
    policy: Amounts
    """The most probable action of the policy within rails and bounds: the other arm."""
    sampled: Amounts
    """The sampled action, from which the policy learns, within rails and bounds."""
    decided_by: DecidedBy
    why: str
    sampled_s: float = 0.0
    """Up to when the running time of the pod has been counted."""
    status: FeedbackStatus | None = None
    """Status of the last report about the whole life of the pod."""
    qos_met: bool = False
    oom: bool = False

    __pydantic_config__ = STRICT

    @property
    def id(self) -> str:
        return f"{self.seq:x}-{self.token}"


NAMES = ("seq", "token", "created_s", "owner", "version", "learnable", "sampled_s", "status")
"""Fields of an allocation that are columns. Those of the outcome are in the feedback, all others in ``decision``."""
COLUMNS = ", ".join(f"a.{name}" for name in NAMES) + ", a.decision, f.outcome"


def read_allocation(row: tuple[Any, ...]) -> Allocation:
    """The allocation in a row of ``COLUMNS``. Raises ValueError if the row is damaged."""
    *columns, decision, outcome = row
    after = None if outcome is None else OUTCOME.validate_json(outcome)
    content = json.loads(decision) | dict(zip(NAMES, columns, strict=True))
    return ALLOCATION.validate_python(content | ({} if after is None else {"qos_met": after.qos_met, "oom": after.oom}))


class Experience(NamedTuple):
    """What the policy saw and did, for learning."""

    obs: NDArray[Any]
    action: NDArray[Any]
    log_prob: float


@dataclass(frozen=True)
class Outcome:
    """What came of an allocation. Rewards and objectives of amounts that were not granted are estimates."""

    usage: float
    """Share of the GPU that was used, in %."""
    qos_met: bool
    oom: bool
    pods: int
    memory_used_mb: float
    needed: float
    """Cores that the pod needed / requested cores."""
    reward: float
    recommended_reward: float
    recommended_qos: bool
    rule_reward: float
    rule_qos: bool
    policy_reward: float
    policy_qos: bool
    regret: float
    """Reward of the best allocation in hindsight minus ``recommended_reward``."""

    __pydantic_config__ = STRICT


ALLOCATION, OUTCOME, TRIALS = TypeAdapter(Allocation), TypeAdapter(Outcome), TypeAdapter(dict[str, Trial])
Read = TypeVar("Read")


class StoreUnavailable(Exception):
    """A transaction failed and had no effect."""


def connect(folder: Path) -> sqlite3.Connection:
    """Open the database in write-ahead mode, so that the learner can read while the server writes.

    A file that is missing is not created: an empty one must not take the place of one that was deleted by mistake.
    """
    uri = (folder / DATABASE_NAME).absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=rw", uri=True, isolation_level=None, timeout=1.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # what was answered survives a kill of the process
    return connection


def create(folder: Path) -> None:
    """Create the file for its owner only, and the tables.

    Raises:
        ValueError: the tables are those of another version of the agent.
    """
    path = folder / DATABASE_NAME
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    path.chmod(0o600)  # the log and the shared memory of SQLite get the same mode
    with contextlib.closing(connect(folder)) as connection:
        (used,) = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()
        if used:
            found = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
            schema = "none" if found is None else found[0]
            if schema != str(STORE_SCHEMA):
                raise ValueError(
                    f"{path} has schema {schema}; this agent reads schema {STORE_SCHEMA}: use another --store, or "
                    "rename the file"
                )
        connection.executescript(TABLES)
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (STORE_SCHEMA,))


@contextlib.contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[Callable[..., sqlite3.Cursor]]:
    """One transaction: the statements of the block, or none of them."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection.execute
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process ends, even if it is killed."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path.parent} is in use by another agent") from None
        yield


def set_aside_if_corrupt(folder: Path) -> Path | None:
    """Rename a database that SQLite cannot read. Returns its new path, or None if there is nothing wrong."""
    path = folder / DATABASE_NAME
    if not path.exists():
        return None
    try:
        with contextlib.closing(connect(folder)) as connection:
            (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        raise  # locked, or no permission: not a corrupt file
    except sqlite3.DatabaseError as error:
        problem = str(error)
    if problem == "ok":
        return None
    aside = path.with_name(f"{DATABASE_NAME}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error("%s is corrupt (%s): it is now %s, and the agent starts with an empty store", path, problem, aside)
    return aside


class Store:
    """The database of the server. All methods run on the event loop. What failed to commit has no effect."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failure: str | None = None
        """Why the last access failed; None after a transaction that succeeded."""
        self.unreadable = 0
        """Reads of damaged rows. A damaged allocation is left out; an owner or a trial begins again."""
        create(folder)
        self._open()

    def _open(self) -> None:
        self.connection = connect(self.folder)
        self.connection.execute("SELECT count(*) FROM meta")  # SQLite opens the log now
        self._identities = self._file_identities()

    def _file_identities(self) -> list[tuple[int, int] | None]:
        """Those of the database and of its log."""
        found: list[tuple[int, int] | None] = []
        for suffix in ("", "-wal"):
            try:
                status = os.stat(f"{self.folder / DATABASE_NAME}{suffix}")
                found.append((status.st_dev, status.st_ino))
            except OSError:
                found.append(None)
        return found

    @property
    def lost(self) -> str | None:
        """Set if the files of the database are not those that are open."""
        found = self._file_identities()
        if found == self._identities:
            return None
        name = DATABASE_NAME if found[0] != self._identities[0] else f"{DATABASE_NAME}-wal"
        return f"{self.folder / name} was deleted or replaced: put it back, or restart the agent"

    @property
    def problem(self) -> str | None:
        """Why the store cannot be used; None if it can. Writes nothing."""
        return self.lost or self.failure

    def recover(self) -> None:
        """If the store cannot be used, try again; a file that is back is opened."""
        if self.problem is None:
            return
        try:
            found = self._file_identities()
            if self.lost is not None and found[0] is not None:
                if found == [self._identities[0], None]:
                    # Only the log was deleted: what it holds is still open here, and goes into the database.
                    self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                # Closing the old connection would delete the log of the new file, which has the same name.
                self._abandoned = self.connection
                create(self.folder)
                self._open()
                log.warning("%s is back and was opened again", self.folder / DATABASE_NAME)
            with self.transaction():
                pass
        except (sqlite3.Error, StoreUnavailable, ValueError) as error:
            self.failure = str(error)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Do the statements of the block, or nothing.

        Raises:
            StoreUnavailable: the database cannot be written.
        """
        if self.lost is not None:
            raise StoreUnavailable(self.lost)
        try:
            with writing(self.connection) as execute:
                yield execute
        except sqlite3.Error as error:
            raise StoreUnavailable(self.fail(f"the store cannot be written: {error}")) from error
        self.failure = None

    def fail(self, problem: str) -> str:
        """Remember and log why the store cannot be used: once, not for each request."""
        if problem != self.failure:
            log.error("%s", problem)
        self.failure = problem
        return problem

    def _read(self, read: Callable[..., Read], *content: Any) -> Read | None:
        """What ``read`` makes of content of a row; None if it is damaged."""
        try:
            return read(*content)
        except (RecursionError, TypeError, ValueError) as error:
            self.unreadable += 1
            problem = str(error).splitlines()[0]
            log.error("a row of the store is damaged (%s): %.200s", problem, content)
            return None

    def close(self) -> None:
        self.connection.close()

    # Allocations

    def add(self, allocation: Allocation, experience: Experience, request_id: str | None) -> Allocation:
        """Store an allocation and number it."""
        a, e = allocation, experience
        decision = {name: value for name, value in asdict(a).items() if name not in (*NAMES, "qos_met", "oom")}
        arrays = (np.asarray(array, np.float32).tobytes() for array in (e.obs, e.action))
        values = (
            a.token, request_id, a.created_s, a.owner, a.version, a.learnable, json.dumps(decision, allow_nan=False),
            *arrays, e.log_prob, a.created_s,
        )  # fmt: skip
        with self.transaction() as execute:
            execute(
                "INSERT INTO allocations (token, request_id, created_s, owner, version, learnable, decision, obs, "
                f"action, log_prob, sampled_s) VALUES ({', '.join('?' * len(values))})",
                values,
            )
            (a.seq,) = execute("SELECT last_insert_rowid()").fetchone()
        a.sampled_s = a.created_s
        return a

    def _select(self, where: str, *values: Any) -> list[Allocation]:
        rows = self.connection.execute(
            f"SELECT {COLUMNS} FROM allocations a LEFT JOIN feedback f ON f.allocation = a.seq WHERE {where}", values
        )
        found = [self._read(read_allocation, row) for row in rows.fetchall()]
        return [one for one in found if one is not None]

    def find(self, allocation_id: str) -> Allocation | None:
        """The allocation with this id. The second half of an id is random, so ids cannot be guessed."""
        if not is_allocation_id(allocation_id):
            return None
        number, _, token = allocation_id.partition("-")
        found = self._select("a.seq = ?", int(number, 16))
        return found[0] if found and hmac.compare_digest(found[0].token, token) else None

    def find_request(self, request_id: str) -> Allocation | None:
        """The allocation that was made for this request id."""
        found = self._select("a.request_id = ?", request_id)
        return found[0] if found else None

    def open_of(self, owner: str, since_s: float) -> list[Allocation]:
        """Up to two allocations of an owner since this time that have no feedback, the newest first."""
        return self._select(
            "a.status IS NULL AND a.owner = ? AND a.created_s >= ? ORDER BY a.seq DESC LIMIT 2", owner, since_s
        )

    def delete_old(self, keep: int) -> int:
        """Delete up to 100 allocations before the newest ``keep``, with their feedback. Returns how many.

        By number, not by age: a wrong system clock deletes nothing.
        """
        (newest,) = self.connection.execute("SELECT coalesce(max(seq), 0) FROM allocations").fetchone()
        rows = self.connection.execute(
            "SELECT seq FROM allocations WHERE seq <= ? ORDER BY seq LIMIT 100", (newest - keep,)
        ).fetchall()
        if rows:
            with self.transaction() as execute:
                execute("DELETE FROM feedback WHERE allocation BETWEEN ? AND ?", (rows[0][0], rows[-1][0]))
                execute("DELETE FROM allocations WHERE seq BETWEEN ? AND ?", (rows[0][0], rows[-1][0]))
        return len(rows)

    # Feedback, owners and trials

    def add_feedback(
        self, allocation: Allocation, status: str, now_s: float, outcome: Outcome, sampled_reward: float,
        next_obs: NDArray[Any], owner: OwnerState, trials: dict[str, Trial],
    ) -> None:  # fmt: skip
        """Store the report about the whole life of a pod. A second one replaces the first, with a new number."""
        a = allocation
        with self.transaction() as execute:
            execute(
                "INSERT OR REPLACE INTO feedback (allocation, received_s, reward, learnable, sampled_reward, next_obs, "
                "outcome) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    a.seq, now_s, outcome.reward, a.learnable, sampled_reward,
                    np.asarray(next_obs, np.float32).tobytes(), json.dumps(asdict(outcome), allow_nan=False),
                ),
            )  # fmt: skip
            execute("UPDATE allocations SET status = ?, sampled_s = ? WHERE seq = ?", (status, now_s, a.seq))
            self.save_owner(execute, a.owner, now_s, owner)
            execute("INSERT OR REPLACE INTO meta VALUES ('trials', ?)", (TRIALS.dump_json(trials).decode(),))

    def add_sample(self, allocation: Allocation, now_s: float, owner: OwnerState) -> None:
        """Store what a running pod has added to its owner."""
        with self.transaction() as execute:
            execute("UPDATE allocations SET sampled_s = ? WHERE seq = ?", (now_s, allocation.seq))
            self.save_owner(execute, allocation.owner, now_s, owner)

    def save_owner(self, execute: Callable[..., Any], owner: str, now_s: float, state: OwnerState) -> None:
        execute("INSERT OR REPLACE INTO owners VALUES (?, ?, ?)", (owner, now_s, state.to_json()))

    def owner(self, owner: str) -> OwnerState:
        """State of an owner. Changes have no effect until they are stored."""
        row = self.connection.execute("SELECT state FROM owners WHERE owner = ?", (owner,)).fetchone()
        return OwnerState() if row is None else self._read(OwnerState.from_json, row[0]) or OwnerState()

    def owners(self, n: int) -> list[tuple[str, OwnerState]]:
        """The n owners whose pods were reported last, the newest first."""
        rows = self.connection.execute("SELECT owner, state FROM owners ORDER BY changed_s DESC LIMIT ?", (n,))
        return [(owner, self._read(OwnerState.from_json, text) or OwnerState()) for owner, text in rows.fetchall()]

    def trials(self, classes: tuple[str, ...]) -> dict[str, Trial]:
        """Who decides about each class of pods. What cannot be read begins again: the rule decides."""
        row = self.connection.execute("SELECT value FROM meta WHERE key = 'trials'").fetchone()
        found = {} if row is None else self._read(TRIALS.validate_json, row[0]) or {}
        return {name: found.get(name, Trial()) for name in classes}

    def newest(self, n: int) -> list[tuple[Allocation, Outcome]]:
        """The newest n allocations with feedback, and what came of them, the oldest first."""
        rows = self.connection.execute(
            f"SELECT {COLUMNS} FROM feedback f JOIN allocations a ON a.seq = f.allocation ORDER BY f.seq DESC LIMIT ?",
            (n,),
        ).fetchall()
        found = [(self._read(read_allocation, row), self._read(OUTCOME.validate_json, row[-1])) for row in rows]
        return [(a, outcome) for a, outcome in reversed(found) if a is not None and outcome is not None]

    def open_allocations(self, n: int) -> list[Allocation]:
        """The newest n allocations without feedback: pods that may run."""
        return self._select("a.status IS NULL ORDER BY a.seq DESC LIMIT ?", n)
