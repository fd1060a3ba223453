"""Run entries on the tasks of a suite."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustergym.bench.entries import Entry
from clustergym.bench.play import play
from clustergym.bench.results import Result, is_done, result_of, result_path, save_result
from clustergym.bench.suites import Suite, Task, load_suite
from clustergym.common.executors import Executor


@dataclass(frozen=True)
class Unit:
    """One entry on one task. Contains names only, so that it can be sent to another host."""

    suite: str
    quick: bool
    task: str
    entry: Entry


def suite_of(name: str, quick: bool) -> Suite:
    suite = load_suite(name)
    return suite.quick() if quick else suite


def tasks_of(suite: Suite, names: Sequence[str]) -> dict[str, Task]:
    """Some tasks of a suite by name; without names, all."""
    chosen = {task.name: task for task in suite.tasks if not names or task.name in names}
    unknown = sorted(set(names) - set(chosen))
    if unknown:
        raise ValueError(f"{suite.name} has no task {unknown[0]!r}; it has: {', '.join(t.name for t in suite.tasks)}")
    return chosen


def play_unit(unit: Unit) -> Result | str:
    """The result of a unit, or why there is none."""
    suite = suite_of(unit.suite, unit.quick)
    task = next(task for task in suite.tasks if task.name == unit.task)
    began = time.perf_counter()
    try:
        played = play(task, unit.entry)
    except ValueError as error:
        return str(error)
    return result_of(suite, task, unit.entry, played, time.perf_counter() - began)


def run_suite(
    name: str,
    quick: bool,
    entries: Sequence[Entry],
    folder: Path,
    executor: Executor,
    tasks: Sequence[str] = (),
    progress: Callable[[Unit, str | None], None] = lambda unit, error: None,
) -> dict[str, str]:
    """Play every entry on every task that has no result yet, and save each result as soon as it is known.

    Args:
        tasks: names of some tasks; by default all.
        progress: called with each finished unit and its error, if any.

    Returns:
        ``{"entry, task": why it failed}``.
    """
    suite = suite_of(name, quick)
    chosen = tasks_of(suite, tasks)
    units, errors = [], {}
    for task in chosen.values():
        for entry in entries:
            unit = Unit(name, quick, task.name, entry)
            if is_done(result_path(folder, suite, task, entry), task, entry):
                progress(unit, None)
            else:
                units.append(unit)
    for i, result in executor.run(play_unit, units):
        unit = units[i]
        if isinstance(result, str):
            errors[f"{unit.entry.name}, {unit.task}"] = result
        else:
            save_result(result_path(folder, suite, chosen[unit.task], unit.entry), result)
        progress(unit, result if isinstance(result, str) else None)
    return errors
