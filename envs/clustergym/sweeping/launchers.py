"""Where the runs of a sweep are started: as processes on this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clustergym.common.executors import RETRIES, connect_ray
from clustergym.sweeping.processes import CHECKPOINT, OUTPUT, die_with_parent

STOP = ".stop"
"""File in the folder of a run on a cluster that tells it to end."""
_GRACE_S = 10.0
_POLL_S = 0.1


class Handle(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def stop(self) -> None:
        """Ask the run and its subprocesses to end."""

    def kill(self) -> None:
        """End the run and its subprocesses at once."""

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended.

        Raises:
            TimeoutError: it has not ended after so many seconds.
        """


class Launcher(Protocol):
    """Starts runs."""

    def start(self, command: Sequence[str], folder: Path, cwd: Path | None, resume: bool) -> Handle:
        """Start a command. Its output is appended to a file in ``folder``.

        Args:
            resume: add ``--resume`` if the folder has a checkpoint.

        Raises:
            OSError: the command cannot be started.
        """


def popen(command: Sequence[str], folder: Path, cwd: Path | None, resume: bool) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, which dies with this process."""
    # A trainer with several agents or seeds has one checkpoint each, in subfolders.
    flags = ["--resume"] if resume and any(folder.rglob(CHECKPOINT)) else []
    with open(folder / OUTPUT, "ab") as output:
        return subprocess.Popen(
            [*command, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and its subprocesses."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@dataclass
class LocalHandle:
    """A process on this machine."""

    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        signal_group(self.process, signal.SIGTERM)

    def kill(self) -> None:
        signal_group(self.process, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error


class LocalLauncher:
    """Starts runs as processes on this machine."""

    def start(self, command: Sequence[str], folder: Path, cwd: Path | None, resume: bool) -> LocalHandle:
        return LocalHandle(popen(command, folder, cwd, resume))


# Ray


def run_command(command: Sequence[str], folder: Path, cwd: Path | None, resume: bool) -> int:
    """On a host of the cluster: run a command to its end. Returns its exit code.

    Ray calls this again on another host if the first one is lost. Then the run resumes from its checkpoint.

    It ends early if ray.cancel interrupts it, or if the folder has the file :data:`STOP`. Ray may lose an interrupt
    that comes while a busy worker is about to start the task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / STOP).exists():
        return -signal.SIGTERM
    process = popen(command, folder, cwd, resume)
    try:
        # ray.cancel raises between two lines of Python. It does not interrupt process.wait().
        while (code := process.poll()) is None:
            if (folder / STOP).exists():
                end(process)
                return -signal.SIGTERM
            time.sleep(_POLL_S)
        return code
    except KeyboardInterrupt:
        end(process)
        raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process and its children to stop, and kill them if they do not."""
    signal_group(process, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        signal_group(process, signal.SIGKILL)


@dataclass
class RayHandle:
    """A task of a Ray cluster."""

    ray: Any
    reference: Any
    folder: Path
    code: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        if self.code is None:
            done, _ = self.ray.wait([self.reference], timeout=0)
            if done:
                self.code = self._result()
        return self.code

    def _result(self) -> int:
        try:
            return int(self.ray.get(self.reference))
        except self.ray.exceptions.TaskCancelledError:
            return -signal.SIGTERM
        except self.ray.exceptions.RayError as error:
            # The output of a failed run is read from this file, so the reason is written there.
            with open(self.folder / OUTPUT, "a") as output:
                output.write(f"{type(error).__name__}: {str(error).splitlines()[-1]}\n")
            return 1

    def stop(self) -> None:
        self._stop(force=False)

    def kill(self) -> None:
        self._stop(force=True)

    def _stop(self, force: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / STOP).touch()
        self.ray.cancel(self.reference, force=force)

    def wait(self, seconds: float | None = None) -> None:
        done, _ = self.ray.wait([self.reference], timeout=seconds)
        if not done:
            raise TimeoutError
        self.poll()


class RayLauncher:
    """Starts runs as Ray tasks, which Ray starts again if their host is lost.

    The folder of the sweep must be on a file system that all hosts share.
    """

    def __init__(self, address: str | None = None) -> None:
        self.ray = connect_ray(address)
        self.remote = self.ray.remote(num_cpus=1, max_retries=RETRIES)(run_command)

    def start(self, command: Sequence[str], folder: Path, cwd: Path | None, resume: bool) -> RayHandle:
        where = Path.cwd() if cwd is None else cwd
        (folder / STOP).unlink(missing_ok=True)
        return RayHandle(self.ray, self.remote.remote(list(command), folder, where, resume), folder)


def make_launcher(name: str, address: str | None = None) -> Launcher:
    """A launcher by name: ``local`` or ``ray``."""
    if name == "ray":
        return RayLauncher(address)
    if address is not None:
        raise ValueError(f"--address {address} is for --executor ray, found --executor {name}")
    return LocalLauncher()
