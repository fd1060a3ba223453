"""Run a sweep: propose parameters, start processes, read their scores, stop bad runs early, store everything."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustergym.sweeping.config import Sweep, sweeps_package
from clustergym.sweeping.launchers import Handle, Launcher, LocalLauncher
from clustergym.sweeping.processes import OUTPUT, tail
from clustergym.sweeping.proposers import as_sweep_runs, make_proposer
from clustergym.sweeping.scores import Scores, last_result, score
from clustergym.sweeping.store import Run, Store

# Time between SIGTERM and SIGKILL.
_GRACE_S = 10.0
_POLL_S = 0.2
# Interval for reading scores from files: short enough to stop runs early, long enough to cost little.
_SCORE_S = 2.0
# After this many failures in a row the sweep ends: then the parameters are not the cause.
_MAX_FAILURES = 3


@dataclass
class _Process:
    run: Run
    handle: Handle
    scores: Scores
    stop_requested: float | None = None
    """Time at which it was asked to stop early."""


class Runner:
    """Starts or resumes a sweep.

    Args:
        sweep: the sweep file.
        folder: for ``sweep.db`` and one folder per run with its output, events and checkpoint.
        jobs: number of runs at the same time.
        proposer: ``sweeps`` or ``optuna``.
        seed: for the proposals.
        run_dir_flag: flag of the program that sets its run folder. With None, only its result line is read.
        cwd: working directory of the programs.
        launcher: where the runs are started; by default this machine.
        watch: called regularly with all runs.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        jobs: int = 1,
        proposer: str = "sweeps",
        seed: int = 0,
        run_dir_flag: str | None = "--run-dir",
        cwd: Path | None = None,
        watch: Callable[[Sequence[Run]], None] = lambda runs: None,
        launcher: Launcher | None = None,
    ) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is {jobs}: expected at least 1")
        self.sweep, self.folder, self.jobs, self.watch = sweep, folder, jobs, watch
        self.run_dir_flag, self.cwd = run_dir_flag, cwd
        self.launcher = LocalLauncher() if launcher is None else launcher
        self.proposer = make_proposer(proposer, sweep, seed)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ValueError(f"{folder}: another process is running this sweep") from error
        try:
            self.store = Store(folder / "sweep.db")
            self.store.begin(sweep.path, sweep.config, proposer, seed)
        except BaseException:
            os.close(self._lock)
            raise
        self._processes: list[_Process] = []
        self._failures: list[Run] = []

    def run(self, count: int | None) -> list[Run]:
        """Run until there are ``count`` runs, ``run_cap`` is reached or the grid ends. Returns all runs."""
        limit = min(n for n in (count, self.sweep.run_cap, 10**9) if n is not None)
        try:
            waiting = self._recover()
            self._loop(limit, waiting)
        finally:
            self._end_all()
            runs = self.store.runs()
            self.store.close()
            os.close(self._lock)
        return runs

    def _recover(self) -> list[Run]:
        """Runs that were proposed but not started, or interrupted. Runs that ended unnoticed are marked as finished."""
        waiting = []
        for run in self.store.runs():
            if run.done:
                continue
            if run.state == "running" and (result := last_result(run.folder / OUTPUT)) is not None:
                history = Scores(run.folder, self.sweep.metric).history()
                self._finish(run, result, history, 0, "ended while the sweep was interrupted")
            else:
                waiting.append(run)
        return waiting

    def _loop(self, limit: int, waiting: list[Run]) -> None:
        exhausted, scored = False, 0.0
        while True:
            self._reap()
            if time.monotonic() - scored > _SCORE_S:
                scored = time.monotonic()
                if self.sweep.early_terminate:
                    self._stop_early()
            self._check_failures()
            while len(self._processes) < self.jobs:
                if waiting:
                    self._start(waiting.pop(0))
                    continue
                runs = self.store.runs()
                if exhausted or len(runs) >= limit:
                    break
                parameters = self.proposer.propose(runs)
                exhausted = parameters is None
                if parameters is not None:
                    self._start(self.store.add(parameters, self.folder))
            if not self._processes:
                return
            self.watch(self.store.runs())
            time.sleep(_POLL_S)

    def _start(self, run: Run) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        command = self.sweep.command(run.parameters, run.folder)
        if self.run_dir_flag is not None:
            command += [f"{self.run_dir_flag}={run.folder}"]
        run.command, run.state, run.starts, run.started = command, "running", run.starts + 1, time.time()
        # Stored before it starts, so that the run is known even after a crash.
        self.store.save(run)
        try:
            handle = self.launcher.start(command, run.folder, self.cwd, self.run_dir_flag is not None)
        except OSError as error:
            self._fail(run, f"cannot start {command[0]}: {error}", None)
            return
        self._processes.append(_Process(run, handle, Scores(run.folder, self.sweep.metric)))

    def _reap(self) -> None:
        for process in list(self._processes):
            if process.stop_requested is not None and time.monotonic() - process.stop_requested > _GRACE_S:
                process.handle.kill()
            code = process.handle.poll()
            if code is None:
                continue
            self._processes.remove(process)
            run, history = process.run, process.scores.history()
            result = last_result(run.folder / OUTPUT)
            if process.stop_requested is not None:
                run.history, run.metric, run.result = history, score(self.sweep.metric, result, history), result
                run.state, run.exit_code, run.ended, run.note = "stopped", code, time.time(), "stopped early"
                self.store.save(run)
            elif code != 0:
                run.history = history
                self._fail(run, f"exit code {code}: {tail(run.folder / OUTPUT)}", code)
            else:
                self._finish(run, result, history, code)

    def _finish(
        self, run: Run, result: dict[str, Any] | None, history: list[float], code: int, note: str | None = None
    ) -> None:
        run.history, run.result, run.metric = history, result, score(self.sweep.metric, result, history)
        if self.sweep.metric is not None and run.metric is None:
            self._fail(run, f"exit code 0, but reported no {self.sweep.metric!r}", code)
            return
        run.state, run.exit_code, run.ended, run.note = "finished", code, time.time(), note
        self._failures.clear()
        self.store.save(run)

    def _fail(self, run: Run, note: str, code: int | None) -> None:
        run.state, run.note, run.exit_code, run.ended = "failed", note, code, time.time()
        self._failures.append(run)
        self.store.save(run)

    def _stop_early(self) -> None:
        for process in self._processes:
            process.run.history = process.scores.history()
            process.run.metric = process.run.history[-1] if process.run.history else None
            self.store.save(process.run)
        runs = as_sweep_runs(self.store.runs(), self.sweep.metric)
        names = {run.name for run in sweeps_package().stop_runs(self.sweep.config, runs)}
        for process in self._processes:
            if str(process.run.id) in names and process.stop_requested is None:
                process.stop_requested = time.monotonic()
                process.handle.stop()

    def _check_failures(self) -> None:
        if len(self._failures) >= _MAX_FAILURES:
            last = self._failures[-1]
            raise ValueError(f"{_MAX_FAILURES} runs failed in a row; the last one, in {last.folder}: {last.note}")

    def _end_all(self) -> None:
        """Stop all processes. Their runs stay 'running' in the store and continue when the sweep is resumed."""
        for process in self._processes:
            process.handle.stop()
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.handle.wait(max(0.1, until - time.monotonic()))
            except TimeoutError:
                process.handle.kill()
                process.handle.wait()
