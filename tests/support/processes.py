"""Processes for tests. They end with the test run, even if it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


@contextmanager
def running(command: Sequence[object], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a new process group, and kill the group at the end. The kernel kills it if the test dies."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            yield process
        finally:
            end(process)


def wait_until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
) -> None:
    """Wait up to a minute for a condition. On failure, show the log of the process."""
    deadline = time.monotonic() + 60
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            output = log.read_text()[-3000:] if log is not None else ""
            raise AssertionError(f"{what}: {'the process ended' if ended else 'not within a minute'}\n{output}")
        time.sleep(0.05)
