"""Versions of the policy: rows of the store. A rollback is a new version with old weights."""

from __future__ import annotations

import io
import json
import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clustergym.agent.policy import Policy
from clustergym.agent.store import DATABASE_NAME, connect, writing

log = logging.getLogger(__name__)

KEPT_VERSIONS = 32
State = dict[str, Any]
"""Content of a version. The server reads ``version``, ``learned_through`` and the actor; the rest is the trainer's."""


class Version(NamedTuple):
    """A row without its content."""

    version: int
    created_s: float
    note: str
    """What it is: initial, update, or rollback to N."""
    metrics: dict[str, float]
    """Metrics of the update."""


def newest_version(connection: sqlite3.Connection) -> int | None:
    """Number of the newest version; None without one."""
    version: int | None = connection.execute("SELECT max(version) FROM versions").fetchone()[0]
    return version


def kept_versions(connection: sqlite3.Connection) -> list[Version]:
    """Versions that can be rolled back to, the oldest first."""
    rows = connection.execute("SELECT version, created_s, note, metrics FROM versions ORDER BY version").fetchall()
    return [Version(version, created_s, note, json.loads(metrics)) for version, created_s, note, metrics in rows]


def add_version(
    connection: sqlite3.Connection, state: State, note: str, based_on: int | None, metrics: dict[str, float]
) -> bool:
    """Add a version, and delete the oldest ones. False, without an effect, if ``based_on`` is not the newest any more.

    So of an update and a rollback at the same time only one counts.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with writing(connection) as execute:
        if newest_version(connection) != based_on:
            return False
        row = (state["version"], time.time(), note, json.dumps(metrics), buffer.getvalue())
        execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", row)
        execute("DELETE FROM versions WHERE version <= ?", (state["version"] - KEPT_VERSIONS,))
    return True


def load_version(connection: sqlite3.Connection, version: int) -> State:
    """The content of a version. Only plain data is loaded: it cannot run code.

    Raises:
        ValueError: there is no such version, or it cannot be read.
    """
    row = connection.execute("SELECT state FROM versions WHERE version = ?", (version,)).fetchone()
    if row is None:
        kept = ", ".join(str(one.version) for one in kept_versions(connection))
        raise ValueError(f"version {version} is not kept; the versions are {kept or 'none'}")
    try:
        state: State = torch.load(io.BytesIO(row[0]), map_location="cpu", weights_only=True)
        if state["version"] != version:
            raise ValueError(f"it says that it is version {state['version']}")
        Policy(state)
    except Exception as error:  # a broken file can raise almost anything in torch
        raise ValueError(f"version {version} cannot be read: {error}") from error
    return state


def load_newest(connection: sqlite3.Connection) -> State:
    """The newest version that can be read, under the newest number.

    Raises:
        ValueError: there is none.
    """
    kept = kept_versions(connection)
    for one in reversed(kept):
        try:
            state = load_version(connection, one.version)
        except ValueError as error:
            log.error("%s; an older version takes its place", error)
            continue
        return state | {"version": kept[-1].version}
    raise ValueError(f"none of the {len(kept)} versions of the policy can be read: delete the store to begin again")


def roll_back(connection: sqlite3.Connection, version: int) -> int:
    """Add a version with the weights of an older one. Returns its number.

    What was decided before is not learned from. An agent that runs uses it within a second.
    """
    while True:
        newest = newest_version(connection)
        state = load_version(connection, version)
        (through,) = connection.execute("SELECT coalesce(max(seq), 0) FROM feedback").fetchone()
        after = state | {"version": (newest or 0) + 1, "learned_through": through}
        if add_version(connection, after, f"rollback to {version}", newest, {}):
            return int(after["version"])


def open_store(folder: Path) -> closing[sqlite3.Connection]:
    """The database of a store, for the commands.

    Raises:
        ValueError: it is not the store of an agent.
    """
    if not (folder / DATABASE_NAME).is_file():
        raise ValueError(f"{folder} has no {DATABASE_NAME}: it is not the store of an agent")
    return closing(connect(folder))
