"""The learner process: reads experiences from the store and adds a version of the policy after each update."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import connect
from clustergym.agent.versions import State, add_version, load_newest, newest_version
from clustergym.common.logs import configure_logging

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


@dataclass
class Experiences:
    """A batch of experiences, in the order of their feedback."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    rewards: Tensor
    """Rewards of the sampled actions; estimated where the pod got something else."""
    next_obs: Tensor
    """Observations when the feedback arrived."""
    through: int
    """Number of the last feedback."""


LearnOnce = Callable[[State, Experiences], tuple[State, dict[str, float]]]
"""Returns the state after one update, and metrics. ``version`` and ``learned_through`` are set by the learner."""


def read_experiences(connection: sqlite3.Connection, state: State, settings: ServerSettings) -> Experiences | None:
    """The next batch that has not been learned from, or None if there are not enough experiences yet.

    Decisions of policies that are too old are left out. They never become recent again. So are damaged rows.
    """
    size = 4 * len(state["statistics"]["mean"])  # float32
    rows = connection.execute(
        "SELECT f.seq, a.obs, a.action, a.log_prob, f.sampled_reward, f.next_obs "
        "FROM feedback f JOIN allocations a ON a.seq = f.allocation "
        "WHERE f.seq > ? AND f.learnable AND a.version >= ? AND length(a.obs) = ? AND length(f.next_obs) = ? "
        "AND length(a.action) = 8 AND typeof(a.log_prob) = 'real' AND typeof(f.sampled_reward) = 'real' "
        "ORDER BY f.seq LIMIT ?",
        (state["learned_through"], state["version"] - settings.max_policy_lag, size, size, settings.max_batch),
    ).fetchall()
    if len(rows) < settings.batch_size:
        return None
    seqs, obs, actions, logprobs, rewards, next_obs = zip(*rows, strict=True)
    return Experiences(
        _stack(obs), _stack(actions), torch.tensor(logprobs), torch.tensor(rewards), _stack(next_obs), seqs[-1]
    )


def _stack(rows: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(row, np.float32) for row in rows]))


def learn(
    connection: sqlite3.Connection, settings: ServerSettings, learn_once: LearnOnce, state: State | None = None
) -> State:
    """Make one update if there are enough experiences. Its version and what it has learned from are one row.

    So a crash neither loses an experience nor learns from one twice. Returns the newest version; ``state`` is that of
    the last call.
    """
    if state is None or newest_version(connection) != state["version"]:
        state = load_newest(connection)
    batch = read_experiences(connection, state, settings)
    if batch is None:
        return state
    after, metrics = learn_once(state, batch)
    after = after | {"version": state["version"] + 1, "learned_through": batch.through}
    if not add_version(connection, after, "update", state["version"], metrics):
        return load_newest(connection)  # a rollback came first
    reward = float(batch.rewards.mean())
    log.info("version %d: %d experiences, mean reward %.3f", after["version"], len(batch.rewards), reward)
    return after


def run_learner(settings: ServerSettings, learn_once: LearnOnce, parent_pid: int) -> None:
    """Main function of the learner process. The process ends when its parent ends, even if the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging()
    # Requests have priority over learning.
    os.nice(19)
    torch.set_num_threads(1)
    state: State | None = None
    while os.getppid() == parent_pid:
        # A new connection each time: the file may have been replaced.
        try:
            with closing(connect(settings.store)) as connection:
                state = learn(connection, settings, learn_once, state)
        except sqlite3.Error as error:
            log.warning("the store cannot be used: %s", error)
        time.sleep(settings.update_interval_s)


class LearnerProcess:
    """Starts the learner process and restarts it if it dies."""

    def __init__(self, settings: ServerSettings, learn_once: LearnOnce) -> None:
        self._arguments = settings, learn_once, os.getpid()
        self._backoff_s = 1.0
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
        ran_s = time.monotonic() - self._started_at
        if self.alive or ran_s < self._backoff_s:
            return False
        self._backoff_s = 1.0 if ran_s > 60 else min(2 * self._backoff_s, 60.0)
        log.error("the learner process ended with exit code %s and is restarted", self._process.exitcode)
        self._start()
        return True

    def stop(self) -> None:
        # Killing it is safe: an update is one transaction.
        self._process.kill()
        self._process.join()
