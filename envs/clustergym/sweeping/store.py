"""Database of a sweep (SQLite): every run with its parameters, state, command and scores. Survives a crash."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCHEMA = """
create table if not exists sweep (id integer primary key check (id = 1), file text not null, config text not null,
  proposer text not null, seed integer not null, created real not null);
create table if not exists runs (id integer primary key, parameters text not null, state text not null, command text,
  folder text not null, starts integer not null default 0, exit_code integer, metric real,
  history text not null default '[]', result text, note text, started real, ended real);
"""


@dataclass
class Run:
    """One run of a sweep."""

    id: int
    parameters: dict[str, Any]
    state: str
    """pending (not started), running, finished, stopped (by early_terminate), or failed (error, or no score)."""
    folder: Path
    command: list[str] | None = None
    starts: int = 0
    """Number of starts: more than one if the sweep was interrupted."""
    exit_code: int | None = None
    metric: float | None = None
    history: list[float] = field(default_factory=list)
    result: dict[str, Any] | None = None
    note: str | None = None
    started: float | None = None
    ended: float | None = None

    @property
    def done(self) -> bool:
        return self.state in ("finished", "stopped", "failed")


class Store:
    """Database of a sweep. One process at a time runs a sweep (see :class:`~clustergym.sweeping.runner.Runner`), others
    may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.database = sqlite3.connect(path, isolation_level=None)
            self.database.row_factory = sqlite3.Row
            self.database.execute("pragma journal_mode=wal")
            self.database.execute("pragma synchronous=full")
            self.database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path}: not the database of a sweep: {error}") from error

    def close(self) -> None:
        self.database.close()

    def begin(self, file: Path, config: dict[str, Any], proposer: str, seed: int) -> None:
        """Store the sweep, or check that it is the one in the database."""
        given = {"config": json.dumps(config, sort_keys=True), "proposer": proposer, "seed": seed}
        found = self.database.execute("select config, proposer, seed from sweep").fetchone()
        if found is None:
            self.database.execute(
                "insert into sweep values (1, ?, ?, ?, ?, ?)", (str(file), *given.values(), time.time())
            )
        elif different := [key for key in given if found[key] != given[key]]:
            what = "sweep file" if different[0] == "config" else different[0]
            raise ValueError(
                f"{self.path} belongs to another {what}: give another --folder, or the same file, proposer and seed to "
                "resume"
            )

    def add(self, parameters: dict[str, Any], folder: Path) -> Run:
        """Store a proposed run before it starts."""
        run_id = self.database.execute("select coalesce(max(id), 0) + 1 from runs").fetchone()[0]
        where = folder / f"run-{run_id:04d}"
        self.database.execute(
            "insert into runs (id, parameters, state, folder) values (?, ?, 'pending', ?)",
            (run_id, json.dumps(parameters), str(where)),
        )
        return Run(run_id, parameters, "pending", where)

    def save(self, run: Run) -> None:
        self.database.execute(
            "update runs set state=?, command=?, starts=?, exit_code=?, metric=?, history=?, result=?, note=?, "
            "started=?, ended=? where id=?",
            (
                run.state, json.dumps(run.command), run.starts, run.exit_code, run.metric, json.dumps(run.history),
                json.dumps(run.result), run.note, run.started, run.ended, run.id,
            ),
        )  # fmt: skip

    def runs(self) -> list[Run]:
        def run(row: sqlite3.Row) -> Run:
            texts = {key: json.loads(row[key] or "null") for key in ("parameters", "command", "history", "result")}
            return Run(**{**dict(row), **texts, "folder": Path(row["folder"])})

        return [run(row) for row in self.database.execute("select * from runs order by id")]

    def config(self) -> tuple[str, dict[str, Any]] | None:
        """(file, config) of the sweep, or None if none was started."""
        found = self.database.execute("select file, config from sweep").fetchone()
        return None if found is None else (found["file"], json.loads(found["config"]))


def ranked(runs: list[Run], maximise: bool) -> list[Run]:
    """Runs with a score, best first, then runs without a score in the order of their ids."""
    scored = [(r.metric, r) for r in runs if r.metric is not None]
    scored.sort(key=lambda pair: -pair[0] if maximise else pair[0])
    return [r for _, r in scored] + [r for r in runs if r.metric is None]
