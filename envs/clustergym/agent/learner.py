"""The learner process: reads experiences from the store and replaces the checkpoint after each update."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from clustergym.agent.database import connect, exclusive_lock
from clustergym.agent.logs import setup_logging
from clustergym.agent.settings import ServerSettings
from clustergym.agent.versions import LEARNER_LOCK_NAME, handle_request, keep_version, load_or_restore, save_version

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


NUMBERS = ("through", "skipped")
"""Fields of :class:`Experiences` that are no tensors."""


@dataclass
class Experiences:
    """A batch of experiences, in the order of their feedback."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    rewards: Tensor
    """Rewards of the sampled actions; estimated where the pod got something else (shadow mode, rails)."""
    values: Tensor
    """V(obs) when the decisions were made."""
    next_obs: Tensor
    """Observations when the feedback arrived."""
    dones: Tensor
    """Always false, because a node has no episodes."""
    through: int
    """Sequence number of the last feedback."""
    skipped: int = 0
    """Number of experiences before ``through`` that were left out because their policy is too old."""

    def to(self, device: torch.device) -> Experiences:
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if name not in NUMBERS}
        return replace(self, **moved)


State = dict[str, Any]
"""Content of a checkpoint. The server reads ``version`` and ``learned_through``; the rest belongs to the policy."""
LearnOnce = Callable[[State, Experiences], tuple[State, dict[str, float]]]
"""Returns the state after one update, and metrics for the log."""


class MetricLogger(Protocol):
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log values of one step."""


OpenLogger = Callable[[int], contextlib.AbstractContextManager[MetricLogger]]
"""Opens the log of a run whose policy has this version."""
# The first columns of the rows that ExperienceReader keeps.
SEQ, VERSION = range(2)


class ExperienceReader:
    """Reads experiences from the store in the order of their feedback.

    Each call reads only feedback that is new since the last one, so that its time does not grow with the store. Until
    a batch is full, its rows wait in memory. Decisions of policies that are too old are left out, so that they cannot
    fill a batch. They never become recent again.
    """

    def __init__(self, connection: sqlite3.Connection, settings: ServerSettings) -> None:
        self.connection, self.settings = connection, settings
        self._read_through = 0
        self._waiting: list[tuple[Any, ...]] = []

    def newest(self) -> int:
        """Number of the newest feedback."""
        (seq,) = self.connection.execute("SELECT coalesce(max(seq), 0) FROM feedback").fetchone()
        return int(seq)

    def read(self, learned_through: int, version: int) -> Experiences | None:
        """The next batch that has not been learned from, or None if there are not enough experiences yet."""
        oldest, newest = version - self.settings.max_policy_lag, self.newest()
        self._waiting = [row for row in self._waiting if row[SEQ] > learned_through and row[VERSION] >= oldest]
        missing = self.settings.max_batch - len(self._waiting)
        rows = self.connection.execute(
            "SELECT f.seq, a.version, a.obs, a.action, a.log_prob, f.advised_reward, a.value, f.next_obs, f.done "
            "FROM feedback f JOIN allocations a ON a.seq = f.allocation "
            "WHERE f.seq > ? AND f.seq <= ? AND f.learnable AND a.version >= ? ORDER BY f.seq LIMIT ?",
            (max(learned_through, self._read_through), newest, oldest, missing),
        ).fetchall()
        self._waiting += rows
        if len(rows) < missing:
            self._read_through = max(newest, self._read_through)
        elif rows:
            self._read_through = rows[-1][SEQ]
        if len(self._waiting) < self.settings.batch_size:
            return None
        seqs, _, obs, actions, logprobs, rewards, values, next_obs, dones = zip(*self._waiting, strict=True)
        through = seqs[-1]
        (waiting,) = self.connection.execute(
            "SELECT count(*) FROM feedback WHERE seq > ? AND seq <= ? AND learnable", (learned_through, through)
        ).fetchone()
        return Experiences(
            obs=_stack(obs), actions=_stack(actions), logprobs=torch.tensor(logprobs), rewards=torch.tensor(rewards),
            values=torch.tensor(values), next_obs=_stack(next_obs), dones=torch.tensor(dones, dtype=torch.bool),
            through=through, skipped=max(waiting - len(self._waiting), 0),
        )  # fmt: skip


def _stack(rows: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(row, np.float32) for row in rows]))


def run_learner(settings: ServerSettings, learn_once: LearnOnce, open_logger: OpenLogger, parent_pid: int) -> None:
    """Main function of the learner process. The process ends when its parent ends, even if the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup_logging()
    # Requests have priority over learning.
    os.nice(19)
    torch.set_num_threads(1)
    with exclusive_lock(settings.store / LEARNER_LOCK_NAME, wait=True), contextlib.ExitStack() as stack:
        state = load_or_restore(settings.store)
        reader = ExperienceReader(connect(settings.store, settings.durability), settings)
        logger = None
        keep_version(settings.store, state["version"])
        while os.getppid() == parent_pid:
            state = handle_request(settings.store, state, reader.newest())
            batch = reader.read(state["learned_through"], state["version"])
            if batch is not None:
                first_version = state["version"]
                state, metrics = learn_once(state, batch)
                save_version(settings.store, state)
                log.info(
                    "version %d: %d experiences, mean reward %.3f",
                    state["version"], len(batch.rewards), float(batch.rewards.mean()),
                )  # fmt: skip
                # TensorBoard takes longer to load than an update takes: open it when there is something to log.
                logger = logger or stack.enter_context(open_logger(first_version))
                logger.scalars(metrics, state["version"])
            time.sleep(settings.update_interval_s)


class LearnerProcess:
    """Starts the learner process and restarts it if it dies."""

    def __init__(self, settings: ServerSettings, learn_once: LearnOnce, open_logger: OpenLogger) -> None:
        self._arguments = settings, learn_once, open_logger, os.getpid()
        self._backoff_s, self._restart_at = 1.0, 0.0
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=run_learner, args=self._arguments, name="learner", daemon=True)
        self._process.start()
        self._started_at = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def restart_if_dead(self) -> bool:
        """Restart a dead process; wait longer each time while it dies within a minute. True if it was restarted."""
        now = time.monotonic()
        if self.alive or now < self._restart_at:
            return False
        self._backoff_s = 1.0 if now - self._started_at > 60 else min(2 * self._backoff_s, 60.0)
        self._restart_at = now + self._backoff_s
        log.error("the learner process ended with exit code %s and is restarted", self._process.exitcode)
        self._start()
        return True

    def stop(self) -> None:
        # Killing it is safe: checkpoints are written atomically.
        self._process.kill()
        self._process.join()
