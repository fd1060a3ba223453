"""Submitted code in a process of its own, with limits on time and memory.

The limits protect the benchmark from accidents. They are no protection from malice: run code that you do not trust in a
container.
"""

from __future__ import annotations

import io
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from clustergym.bench.suites import Limits
from clustergym.bench.worker import HEADER, LENGTH
from clustergym.traces.arrays import read_npy

MAX_ANSWER_BYTES = 64 << 20
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


class CallFailed(Exception):
    """The code raised, took too long, ran out of memory, or gave an invalid answer."""


class WorkerFunction:
    """Calls a function in a subprocess.

    Args:
        target: ``module:function`` or ``file.py:function``.
        kind: ``planner`` or ``agent``: how the function is called.
        options: what the process must know of the task, JSON.
        limits: per call.
    """

    def __init__(self, target: str, kind: str, options: Mapping[str, Any], limits: Limits) -> None:
        self.target, self.kind, self.options, self.limits = target, kind, dict(options), limits
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def start(self) -> str:
        """Start the process and import the code. Returns what it sees: ``loads``, ``tokens`` or ``obs``.

        Raises:
            CallFailed: the code cannot be imported within the limits.
        """
        self.close()
        # The standard error goes to a file: nobody reads a pipe while the function runs.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "clustergym.bench.worker", self.target, self.kind, json.dumps(self.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **_ONE_THREAD},
            start_new_session=True,
            preexec_fn=self._limit,
        )
        return self._answer(self.limits.start_seconds).decode()

    def _limit(self) -> None:
        memory = self.limits.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def __call__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The answer to ``arrays``.

        Raises:
            CallFailed: see there. A process that broke a limit is ended, and started again for the next call.
        """
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        request = io.BytesIO()
        np.savez(request, **arrays)  # type: ignore[arg-type, unused-ignore]
        try:
            self._process.stdin.write(LENGTH.pack(request.tell()) + request.getvalue())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        payload = self._answer(self.limits.seconds)
        try:
            return read_npy(io.BytesIO(payload), len(payload), "the answer")
        except ValueError as error:
            raise CallFailed(str(error)) from error

    def _answer(self, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        error, length = HEADER.unpack(self._read(HEADER.size, until, seconds))
        if length > MAX_ANSWER_BYTES:
            self.close()
            raise CallFailed(f"the answer has {length} bytes: at most {MAX_ANSWER_BYTES} are accepted")
        payload = self._read(length, until, seconds)
        if error:
            raise CallFailed(payload.decode("utf-8", "replace"))
        return payload

    def _read(self, n: int, until: float, seconds: float) -> bytes:
        """Read ``n`` bytes before the deadline."""
        assert self._process is not None
        assert self._process.stdout is not None
        found, pipe = bytearray(), self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(found) < n:
                left = until - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.close()
                    raise CallFailed(f"took more than {seconds:g} s")
                piece = os.read(pipe.fileno(), n - len(found))
                if not piece:
                    raise self._ended()
                found += piece
        return bytes(found)

    def _ended(self) -> CallFailed:
        """The error of a process that ended by itself."""
        assert self._process is not None
        assert self._errors is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        self.close()
        return CallFailed(f"the process ended with code {code}: {lines[-1][:300] if lines else 'no message'}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __enter__(self) -> WorkerFunction:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
