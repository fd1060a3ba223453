"""Results: one JSON file per entry and task, written atomically. A repeated run keeps finished results.

Results of the test track are signed with its secret, so a file that was edited, or made by someone else, is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clustergym import __version__
from clustergym.bench.entries import Entry, sees_the_future
from clustergym.bench.run_task import run_task
from clustergym.bench.suites import Suite, Task, sha256_of
from clustergym.common.files import write_atomically

FORMAT = "clustergym-bench"
SCHEMA = 2
CODE = ("bench", "common", "gpu_allocation", "moe_offload", "moe_placement", "planners", "traces", "training")
"""Packages whose code decides a result."""
PACKAGES = ("numpy", "numba", "scipy", "torch", "gymnasium")
HASHES = ("task_sha256", "specs_sha256", "code_sha256")
"""What must be equal in all results of a table: the task with its data, what it is made of, and our code."""

Result = dict[str, Any]


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """Hash of the source files that decide a result."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for package in CODE:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """The machine that decision times were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    found = {"clustergym": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def signature(result: Result, secret: bytes) -> str:
    """What only the holder of the secret can compute for this content."""
    content = {key: value for key, value in result.items() if key != "signature"}
    return hmac.new(secret, json.dumps(content, sort_keys=True).encode(), "sha256").hexdigest()


def task_sha256(task: Task) -> str:
    """Hash of a task as it is played. That of a test task says nothing about the secret."""
    return sha256_of(asdict(task))


def compute(suite: Suite, task: Task, entry: Entry, secret: bytes | None) -> Result:
    """Play a task of a track. Raises a ValueError if the entry cannot play it."""
    began = time.perf_counter()
    found = run_task(task, entry)
    result: Result = {
        "format": FORMAT,
        "schema": SCHEMA,
        "suite": suite.name,
        "track": "validation" if secret is None else "test",
        "task": task.name,
        "task_sha256": task_sha256(task),
        "entry": entry.as_dict(),
        "hindsight": sees_the_future(entry, task.kind),
        "code_sha256": code_sha256(),
        "machine": machine(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - began, 1),
        **asdict(found),
    }
    if secret is not None:
        result["signature"] = signature(result, secret)
    return result


def result_path(folder: Path, suite: Suite, task: Task, entry: Entry) -> Path:
    return folder / suite.name / entry.folder / f"{task.name}.json"


def read_result(path: Path) -> Result:
    """Read a result file. Raises a ValueError if it is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a result of clustergym bench: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"{path}: not a result of clustergym bench")
    if result.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {result.get('schema')}, but this version reads {SCHEMA}: run it again")
    return result


def is_done(path: Path, task: Task, entry: Entry, secret: bytes | None) -> bool:
    """Whether the file has the result of this task, this entry and this code."""
    try:
        result = read_result(path)
        check_result(result, task, secret, path)
    except (ValueError, OSError):
        return False
    return bool(result["entry"] == entry.as_dict() and result["code_sha256"] == code_sha256())


def check_result(result: Result, task: Task, secret: bytes | None, where: object) -> None:
    """Raise a ValueError if a result is not of this task and track, or was not computed here."""
    if secret is not None and not hmac.compare_digest(str(result.get("signature")), signature(result, secret)):
        raise ValueError(f"{where}: not signed with this secret: run the submitted code again")
    if result.get("task_sha256") != task_sha256(task):
        raise ValueError(f"{where}: the task {task.name} or its track has changed since this result: run it again")
    scores = result.get("scores")
    if not isinstance(scores, list) or len(scores) != task.streams:
        raise ValueError(f"{where}: expected {task.streams} scores, one per run")
    if not all(isinstance(score, int | float) and abs(score) < 1e6 for score in scores):
        raise ValueError(f"{where}: a score is not a finite number")


Found = dict[str, dict[str, Result]]
"""Entry → task → result"""


def collect(folder: Path, suite: Suite, secret: bytes | None) -> Found:
    """All results of a suite in a folder.

    Raises:
        ValueError: a file is no result of this track, or results are of different code.
    """
    tasks, found, hashes = {task.name: task for task in suite.tasks}, Found(), dict[str, tuple[Any, ...]]()
    for path in sorted((folder / suite.name).rglob("*.json")):
        result = read_result(path)
        if result["task"] not in tasks:
            continue
        check_result(result, tasks[result["task"]], secret, path)
        own = tuple(result[name] for name in HASHES)
        if hashes.setdefault(result["task"], own) != own:
            raise ValueError(f"{path}: made with other code or specs than the results before it: run it again")
        found.setdefault(result["entry"]["name"], {})[result["task"]] = result
    return found


def run_suite(
    suite: Suite,
    entries: Sequence[Entry],
    folder: Path,
    secret: bytes | None,
    progress: Callable[[str, str], None] = lambda task, entry: None,
) -> dict[str, str]:
    """Play every entry on every task that has no result yet, and save each result as soon as it is known.

    Returns:
        ``{"entry, task": why it failed}``.
    """
    errors = {}
    for task in suite.tasks:
        for entry in entries:
            progress(task.name, entry.name)
            path = result_path(folder, suite, task, entry)
            if is_done(path, task, entry, secret):
                continue
            try:
                result = compute(suite, task, entry, secret)
            except ValueError as error:
                errors[f"{entry.name}, {task.name}"] = str(error)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(result, indent=2) + "\n")
    return errors
