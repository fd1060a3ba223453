"""SQLite store of allocations, feedback, owner histories and counters."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hmac
import logging
import os
import re
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clustergym.agent.clock import DAY_S, Clock
from clustergym.agent.database import DATABASE_NAME, connect, create_file, create_tables
from clustergym.agent.owners import GuardSettings, OwnerState
from clustergym.gpu_allocation.history import new_history, remember

log = logging.getLogger(__name__)

MAX_CACHED_ALLOCATIONS = 100_000
MAX_CACHED_OWNERS = 50_000
OOM_GROWTH, OOM_MORE_MB = 1.2, 100.0
Execute = Callable[..., sqlite3.Cursor]
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
    gpu: int = 0
    advised_cores: float = 0.0
    """What the policy, within its rails, advises."""
    advised_memory_mb: float = 0.0
    recommended_cores: float = 0.0
    """What the owner's level allows: the policy's advice, that of the VPA rule, or the request."""
    recommended_memory_mb: float = 0.0
    decided_by: str = "policy"
    """What determined the grant: policy, vpa, request or shadow."""
    feedback: str | None = None
    qos_met: bool = False
    """Whether the feedback says that the pod met its objective."""
    oom: bool = False
    """Whether the feedback says that the pod ran out of memory."""
    champion: tuple[float, float, float, float] | None = None
    """Mean advice of this version and of the last good one (cores, memory, cores, memory). Not stored."""

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
    advised_reward: float
    """Reward of the advised allocation. It is an estimate where the pod got something else."""
    advised_qos: bool
    """Whether the pod would have met its objective with the advised allocation."""
    recommended_reward: float
    """The same for the recommended allocation."""
    recommended_qos: bool
    vpa_reward: float
    """The same for the VPA rule."""
    regret: float
    """Reward of the best allocation in hindsight minus ``recommended_reward``."""
    next_obs: bytes
    """Observation when the feedback arrived: the same request, the load and the history at that time."""
    done: bool
    """Always false: a node has no episodes."""


class Experience(NamedTuple):
    """What the policy saw and did, for learning. Field names are column names."""

    obs: NDArray[Any]
    action: NDArray[Any]
    """Indices of the chosen shares of cores and memory."""
    log_prob: float
    value: float
    """V(obs) at the time of the decision."""


ALLOCATION_COLUMNS = (
    "a.seq, a.token, a.created_s, a.owner, a.asked_cores, a.asked_memory_mb, a.sensitive, a.cores, a.memory_mb, "
    "a.version, a.learnable, a.gpu, a.advised_cores, a.advised_memory_mb, a.recommended_cores, "
    "a.recommended_memory_mb, a.decided_by, f.status, f.qos_met, f.oom"
)
"""Columns of an :class:`Allocation`, in the order of its fields."""
INSERT_ALLOCATION = f"INSERT INTO allocations VALUES ({', '.join('?' * 22)})"
INSERT_FEEDBACK = (
    f"INSERT OR REPLACE INTO feedback (allocation, status, {', '.join(Feedback._fields)}, learnable) "
    f"VALUES ({', '.join('?' * (len(Feedback._fields) + 3))})"
)


class StoreUnavailable(Exception):
    """A transaction failed and had no effect."""


class Store:
    """Allocations, feedback, owner histories and counters in SQLite.

    All methods run on the event loop. Each change is one transaction. Memory is changed after the commit, so a change
    that fails has no effect, and nothing has to be rebuilt after a kill.
    """

    MAX_LOG_BYTES = 16 << 20

    def __init__(
        self,
        folder: Path,
        durability: str,
        retention_s: float = 30 * DAY_S,
        accept_clock_jump: bool = False,
        guard: GuardSettings | None = None,
    ) -> None:
        self.folder, self.durability, self.guard = folder, durability, guard or GuardSettings()
        self.failure: str | None = None
        """Why the last access failed; None after a transaction that succeeded."""
        self.unreadable_owners = 0
        """Owners whose stored state could not be read. They begin again."""
        self._last_counters: dict[str, int] = {}
        create_file(folder)
        self._open_database()
        last = self.connection.execute("SELECT value FROM meta WHERE key = 'clock_s'").fetchone()
        self.clock = Clock(None if last is None else float(last[0]), retention_s, accept_clock_jump)

    def _open_database(self) -> None:
        """Connect, and read what is kept in memory."""
        self.connection = connect(self.folder, self.durability)
        self._identity = self._file_identity()
        create_tables(self.connection, self.folder)
        row = self.connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'allocations'").fetchone()
        self.next_seq: int = 1 + (row[0] if row else 0)
        self._allocations: OrderedDict[int, Allocation] = OrderedDict()
        self._seq_by_request: OrderedDict[str, int] = OrderedDict()
        self._owners: OrderedDict[str, tuple[list[float], OwnerState]] = OrderedDict()
        self._open: dict[str, OrderedDict[int, float]] = {}
        self._find_open()
        self._find_requests()

    @property
    def lost(self) -> str | None:
        """Set if the file of the database is not the one that is open."""
        if self._file_identity() == self._identity:
            return None
        return f"{self.folder / DATABASE_NAME} was deleted or replaced: put it back, or restart the agent"

    @property
    def problem(self) -> str | None:
        """Why the store cannot be used; None if it can. Reads only the directory."""
        return self.lost or self.failure

    def recover(self) -> bool:
        """Try again if the store cannot be used. True if another database file was opened."""
        if self.problem is None:
            return False
        replaced = self._file_identity() not in (None, self._identity)
        try:
            if replaced:
                # Closing the old connection would delete the log of the new file, which has the same name.
                self._abandoned = self.connection
                self._open_database()
                log.warning("%s is back and was opened again", self.folder / DATABASE_NAME)
            with self.transaction():
                pass
        except (sqlite3.Error, StoreUnavailable, ValueError) as error:
            self.failure = str(error)
        return replaced

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.folder / DATABASE_NAME)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def number_feedback_after(self, seq: int) -> None:
        """Give new feedback numbers above ``seq``: a checkpoint that outlived its database has learned up to there."""
        row = self.connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'feedback'").fetchone()
        if (row[0] if row else 0) >= seq:
            return
        log.warning("the checkpoint has learned from feedback that is not in the store: numbers continue after %d", seq)
        self.connection.execute("DELETE FROM sqlite_sequence WHERE name = 'feedback'")
        self.connection.execute("INSERT INTO sqlite_sequence VALUES ('feedback', ?)", (seq,))

    # Allocations

    def add(self, allocation: Allocation, experience: Experience, request_id: str | None) -> None:
        """Store an allocation."""
        a, e = allocation, experience
        values = (
            a.seq, a.token, request_id, a.created_s, a.owner, a.requested_cores, a.requested_memory_mb, a.sensitive,
            e.obs.astype(np.float32).tobytes(), e.action.astype(np.float32).tobytes(), e.log_prob, a.version,
            a.learnable, a.cores, a.memory_mb, e.value, a.gpu, a.advised_cores, a.advised_memory_mb,
            a.recommended_cores, a.recommended_memory_mb, a.decided_by,
        )  # fmt: skip
        with self.transaction("allocations") as execute:
            execute(INSERT_ALLOCATION, values)
        self.next_seq = a.seq + 1
        _cache(self._allocations, a.seq, a)
        self._open.setdefault(a.owner, OrderedDict())[a.seq] = a.created_s
        if request_id is not None:
            _cache(self._seq_by_request, request_id, a.seq)

    def find(self, allocation_id: str) -> Allocation | None:
        """The allocation with this id. The second half of an id is random, so ids cannot be guessed."""
        match = _ALLOCATION_ID.fullmatch(allocation_id)
        if match is None:
            return None
        found = self._find_seq(int(match[1], 16))
        return found if found is not None and hmac.compare_digest(found.token, match[2]) else None

    def find_request(self, request_id: str) -> Allocation | None:
        """The allocation that was made for this request id, if it is one of the newest 100,000."""
        seq = self._seq_by_request.get(request_id)
        return None if seq is None else self._find_seq(seq)  # a deleted allocation is not found

    def _find_requests(self) -> None:
        """Read the request ids of the newest allocations. The database has no index of them.

        They are random: with an index, each request would write a page of its own, and the log would grow with it.
        """
        rows = self.connection.execute(
            "SELECT request_id, seq FROM allocations WHERE seq >= ? AND request_id IS NOT NULL ORDER BY seq",
            (self.next_seq - MAX_CACHED_ALLOCATIONS,),
        )
        self._seq_by_request = OrderedDict(rows)

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

    def open_of(self, owner: str, since_s: float) -> list[Allocation]:
        """Up to two allocations of an owner since this time that have no feedback, the newest first."""
        waiting = self._open.get(owner, OrderedDict())
        while waiting and next(iter(waiting.values())) < since_s:
            waiting.popitem(last=False)
        newest = [seq for seq, _ in zip(reversed(waiting), range(2), strict=False)]
        found = [self._find_seq(seq) for seq in newest]
        return [one for one in found if one is not None]

    def _find_open(self) -> None:
        """Read which allocations have no feedback yet; the newest 10,000 of them."""
        rows = self.connection.execute(
            "SELECT a.seq, a.owner, a.created_s FROM allocations a LEFT JOIN feedback f ON f.allocation = a.seq "
            "WHERE a.seq > ? - 100000 AND f.seq IS NULL ORDER BY a.seq DESC LIMIT 10000",
            (self.next_seq,),
        ).fetchall()
        self._open = {}
        for seq, owner, created_s in reversed(rows):
            self._open.setdefault(owner, OrderedDict())[seq] = created_s

    def _close(self, owner: str, seq: int) -> None:
        waiting = self._open.get(owner)
        if waiting is not None:
            waiting.pop(seq, None)
            if not waiting:
                del self._open[owner]

    def delete_before(self, created_s: float) -> int:
        """Delete up to 50 allocations that are older than this, with their feedback. Returns how many.

        The clock never goes back, so the oldest rows have the smallest numbers, and the primary key finds them.
        """
        rows = self.connection.execute("SELECT seq, created_s, owner FROM allocations ORDER BY seq LIMIT 50").fetchall()
        old = [(seq, owner) for seq, created, owner in takewhile(lambda row: row[1] < created_s, rows)]
        if old:
            numbers = old[0][0], old[-1][0]
            with self.transaction() as execute:
                execute("DELETE FROM feedback WHERE allocation BETWEEN ? AND ?", numbers)
                execute("DELETE FROM allocations WHERE seq BETWEEN ? AND ?", numbers)
            for seq, owner in old:
                self._allocations.pop(seq, None)
                self._close(owner, seq)
        return len(old)

    # Feedback and owner histories

    def add_feedback(
        self, allocation: Allocation, status: str, feedback: Feedback, learnable: bool, correction: bool = False
    ) -> str | None:
        """Store the feedback on an allocation, and what it says about the owner. A correction replaces the first one.

        Returns why the level of the owner has changed, or None.
        """
        a, f = allocation, feedback
        history, state = copy.deepcopy(self._owner(a.owner))
        change = self._remember(history, state, a, f)
        with self.transaction("feedback:corrected" if correction else f"feedback:{status}") as execute:
            execute(INSERT_FEEDBACK, (a.seq, status, *f, learnable))
            self._save_owner(execute, a.owner, history, state)
        a.feedback, a.qos_met, a.oom = status, bool(f.qos_met), bool(f.oom)
        self._close(a.owner, a.seq)
        self._keep_owner(a.owner, history, state)
        return change

    def add_sample(self, allocation: Allocation, needed: float, usage: float, used_mb: float, oom: bool) -> None:
        """Add what was measured of a running pod to its owner's peaks."""
        a, needed_mb = allocation, needed_memory_mb(allocation, used_mb, oom)
        history, state = copy.deepcopy(self._owner(a.owner))
        state.sample(self.clock.now(), needed, usage / a.requested_cores, needed_mb, needed_mb / a.requested_memory_mb)
        with self.transaction("feedback:sample") as execute:
            self._save_owner(execute, a.owner, history, state)
        self._keep_owner(a.owner, history, state)

    def history(self, owner: str) -> list[float]:
        """History of an owner's pods."""
        return self._owner(owner)[0]

    def owner_state(self, owner: str) -> OwnerState:
        """State of an owner."""
        return self._owner(owner)[1]

    def owner_states(self, n: int) -> list[tuple[str, OwnerState]]:
        """The n owners whose pods were reported last, the newest first. Only cached ones."""
        return [(owner, state) for owner, (_, state) in islice(reversed(self._owners.items()), n)]

    def _owner(self, owner: str) -> tuple[list[float], OwnerState]:
        if owner not in self._owners:
            row = self.connection.execute("SELECT history, state FROM owners WHERE owner = ?", (owner,)).fetchone()
            history, state = new_history(), OwnerState()
            if row is not None:
                try:
                    history, state = read_history(row[0]), OwnerState.from_array(np.frombuffer(row[1], np.float32))
                except (TypeError, ValueError) as error:
                    self.unreadable_owners += 1
                    log.error("the state of %r cannot be read, so the owner begins again: %s", owner, error)
            self._keep_owner(owner, history, state)
        return self._owners[owner]

    def _keep_owner(self, owner: str, history: list[float], state: OwnerState) -> None:
        self._owners[owner] = history, state
        self._owners.move_to_end(owner)
        if len(self._owners) > MAX_CACHED_OWNERS:
            self._owners.popitem(last=False)

    def _save_owner(self, execute: Execute, owner: str, history: list[float], state: OwnerState) -> None:
        values = owner, np.array(history).tobytes(), state.to_array().tobytes()
        execute("INSERT INTO owners VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET history = ?2, state = ?3", values)

    def _remember(self, history: list[float], state: OwnerState, a: Allocation, f: Feedback) -> str | None:
        """Add the outcome of an allocation to the history and the state of its owner."""
        share, met, oom = a.cores / a.requested_cores, bool(f.qos_met), bool(f.oom)
        memory = min(f.memory_used_mb / a.requested_memory_mb, 1.0)
        remember(history, f.needed, share, met, oom, memory)
        needed_mb = needed_memory_mb(a, f.memory_used_mb, oom)
        state.remember(
            time_s=f.received_s, share=a.recommended_cores / a.requested_cores,
            memory_share=a.recommended_memory_mb / a.requested_memory_mb, needed=f.needed,
            usage_share=f.usage / a.requested_cores, needed_mb=needed_mb,
            needed_memory_share=needed_mb / a.requested_memory_mb, oom=oom,
        )  # fmt: skip
        advantage = f.advised_reward - f.vpa_reward
        return state.judge(bool(a.sensitive), met, bool(f.advised_qos), advantage, self.guard)

    # Transactions

    @contextlib.contextmanager
    def transaction(self, *counters: str) -> Iterator[Execute]:
        """Do the statements of the block and increment these counters, or do nothing.

        Raises:
            StoreUnavailable: the database cannot be written.
        """
        if self.lost is not None:
            raise StoreUnavailable(self.lost)
        execute = self.connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            try:
                yield execute
                for name in counters:
                    execute("INSERT INTO counters VALUES (?, 1) ON CONFLICT DO UPDATE SET value = value + 1", (name,))
                execute("INSERT OR REPLACE INTO meta VALUES ('clock_s', ?)", (int(self.clock.now()),))
                execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            self.failure = f"the store cannot be written: {error}"
            log.error("%s", self.failure)
            raise StoreUnavailable(self.failure) from error
        self.failure = None

    def count(self, name: str) -> None:
        """Increment a counter that survives restarts."""
        with self.transaction(name):
            pass

    def counters(self) -> dict[str, int]:
        """The counters; the last known ones if the database cannot be read."""
        with contextlib.suppress(sqlite3.Error):
            self._last_counters = dict(self.connection.execute("SELECT name, value FROM counters").fetchall())
        return self._last_counters

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
        self.connection.close()


def read_history(content: bytes) -> list[float]:
    """The history of an owner from its bytes. Raises ValueError if it is not one."""
    history: list[float] = np.frombuffer(content).tolist()
    if len(history) != len(new_history()) or not np.isfinite(history).all():
        raise ValueError(f"the history has {len(history)} numbers or is not finite")
    return history


def needed_memory_mb(allocation: Allocation, used_mb: float, oom: bool) -> float:
    """Memory that a pod needed. One that ran out of memory needed more than it had; VPA's guess of how much more."""
    return max(OOM_GROWTH * allocation.memory_mb, allocation.memory_mb + OOM_MORE_MB, used_mb) if oom else used_mb


def _cache(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Add to a cache and drop its oldest entry if it is full; the database still has it."""
    cache[key] = value
    if len(cache) > MAX_CACHED_ALLOCATIONS:
        cache.popitem(last=False)
