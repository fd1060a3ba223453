"""Result files: one JSON file per entry and task, written atomically. A repeated run keeps finished results."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clustergym import __version__
from clustergym.bench.entries import Entry, sees_the_future
from clustergym.bench.play import Played
from clustergym.bench.suites import Suite, Task, task_sha256
from clustergym.common.files import write_atomically

FORMAT = "clustergym-bench"
SCHEMA = 1
CODE = ("bench", "common", "gpu_allocation", "moe_placement", "traces")
"""Packages whose code decides a result."""
PACKAGES = ("numpy", "numba", "scipy", "torch", "gymnasium")

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
    names = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
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
    try:
        where = Path(__file__).resolve().parent
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, timeout=10, check=True
        )
        found["commit"] = commit.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return found


def result_of(suite: Suite, task: Task, entry: Entry, played: Played, seconds: float) -> Result:
    """The document of a result."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "suite": suite.name,
        "task": task.name,
        "task_sha256": task_sha256(task),
        "data_sha256": task.data_sha256,
        "entry": entry.as_dict() | {"name": entry.name, "code_sha256": entry.code_sha256},
        "hindsight": sees_the_future(entry, task.kind),
        "code_sha256": code_sha256(),
        "machine": machine(),
        "versions": versions(),
        "seconds": seconds,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **asdict(played),
    }


def result_path(folder: Path, suite: Suite, task: Task, entry: Entry) -> Path:
    return folder / suite.name / entry.folder / f"{task.name}.json"


def save_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=2) + "\n")


def read_result(path: Path) -> Result:
    """Read a result file. Raises a ValueError if it is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a result of clustergym bench: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"{path}: not a result of clustergym bench")
    if not isinstance(result.get("schema"), int) or result["schema"] > SCHEMA:
        raise ValueError(f"{path}: schema {result.get('schema')}, but this version reads up to {SCHEMA}")
    return result


def is_done(path: Path, task: Task, entry: Entry) -> bool:
    """Whether the file has the result of this task, this entry and this code."""
    if not path.is_file():
        return False
    try:
        result = read_result(path)
    except ValueError:
        return False
    return bool(
        result["task_sha256"] == task_sha256(task)
        and result["entry"]["code_sha256"] == entry.code_sha256
        and result["code_sha256"] == code_sha256()
    )


def check_result(result: Result, task: Task, where: object) -> None:
    """Raise a ValueError if a result is not of this task as it is frozen, or has other runs."""
    if result["task_sha256"] != task_sha256(task):
        raise ValueError(f"{where}: the task {task.name} has changed since this result: run it again")
    if result["data_sha256"] != task.data_sha256:
        raise ValueError(f"{where}: the data are not those of the suite")
    scores = result.get("scores")
    if not isinstance(scores, list) or len(scores) != task.streams:
        raise ValueError(f"{where}: expected {task.streams} scores, one per run")
    if not all(isinstance(score, int | float) and abs(score) < 1e6 for score in scores):
        raise ValueError(f"{where}: a score is not a finite number")


def collect(folders: Iterable[Path], suite: Suite) -> dict[str, dict[str, Result]]:
    """{entry: {task: result}} of all result and submission files of a suite in some folders.

    Raises:
        ValueError: a file is no result, or was made with another version of the suite.
    """
    tasks = {task.name: task for task in suite.tasks}
    found: dict[str, dict[str, Result]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            document = read_result(path)
            for result in document.get("results", [document]):
                if result["suite"] == suite.name and result["task"] in tasks:
                    check_result(result, tasks[result["task"]], path)
                    found.setdefault(result["entry"]["name"], {})[result["task"]] = result
    return found


def bundle(results: dict[str, Result], suite: Suite) -> Result:
    """One document with the results of an entry on every task, for the leaderboard.

    Raises:
        ValueError: a task is missing, or the results are not of the same code.
    """
    missing = [task.name for task in suite.tasks if task.name not in results]
    if missing:
        raise ValueError(f"no result of {', '.join(missing)}: run the whole suite first")
    if len({(result["code_sha256"], result["entry"]["code_sha256"]) for result in results.values()}) > 1:
        raise ValueError("the results were made with different versions of the code: run the whole suite again")
    ordered = [results[task.name] for task in suite.tasks]
    return {"format": FORMAT, "schema": SCHEMA, "suite": suite.name, "suite_sha256": suite.sha256, "results": ordered}
