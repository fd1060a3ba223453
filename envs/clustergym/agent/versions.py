"""Versions of the policy: kept as files, compared by a sequential test, and rolled back."""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from clustergym.agent.database import InUse, connect, exclusive_lock
from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint
from clustergym.common.files import write_atomically

log = logging.getLogger(__name__)

CHECKPOINT_KIND = "ppo_gpu_alloc_online"
FOLDER_NAME = "versions"
REQUEST_NAME = "rollback.json"
CHAMPION_NAME = "champion.json"
LEARNER_LOCK_NAME = "trainer.lock"
KEPT_VERSIONS = 32


def version_path(store: Path, version: int) -> Path:
    return store / FOLDER_NAME / f"{version:08d}.pt"


def kept_versions(store: Path) -> list[int]:
    """Versions that can be rolled back to, the oldest first."""
    return sorted(int(path.stem) for path in (store / FOLDER_NAME).glob("[0-9]*.pt") if path.stem.isdigit())


def read_champion(store: Path) -> int | None:
    """The last version that passed the test."""
    try:
        return int(json.loads((store / CHAMPION_NAME).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_champion(store: Path, version: int) -> None:
    write_atomically(store / CHAMPION_NAME, json.dumps({"version": version}) + "\n")


def save_version(store: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint and keep the version as a file; delete the oldest ones, but not the champion."""
    save_checkpoint(store / CHECKPOINT_NAME, CHECKPOINT_KIND, state)
    keep_version(store, state["version"])


def keep_version(store: Path, version: int) -> None:
    """Link the checkpoint to the file of its version: no second copy on the disk."""
    path = version_path(store, version)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")
    os.link(store / CHECKPOINT_NAME, temporary)
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # os.replace leaves it if both names were already the same file
    champion = read_champion(store)
    for old in kept_versions(store)[:-KEPT_VERSIONS]:
        if old != champion:
            version_path(store, old).unlink(missing_ok=True)


def load_or_restore(store: Path) -> dict[str, Any]:
    """The checkpoint. If it is corrupt, the newest version that can be loaded takes its place.

    Raises:
        CheckpointError: no version can be loaded either.
    """
    try:
        return load_checkpoint(store / CHECKPOINT_NAME, CHECKPOINT_KIND)
    except CheckpointError as error:
        for version in reversed(kept_versions(store)):
            with suppress(CheckpointError, FileNotFoundError):
                state = load_checkpoint(version_path(store, version), CHECKPOINT_KIND)
                save_checkpoint(store / CHECKPOINT_NAME, CHECKPOINT_KIND, state)
                log.error("%s; version %d takes its place", error, version)
                return state
        raise


class RollbackRequest(NamedTuple):
    id: str
    version: int
    reason: str


def request_rollback(store: Path, version: int, reason: str) -> RollbackRequest:
    """Ask the learner process to go back to a version. It does so before its next update."""
    request = RollbackRequest(secrets.token_hex(8), version, reason)
    write_atomically(store / REQUEST_NAME, json.dumps(request._asdict()) + "\n")
    return request


def read_request(store: Path) -> RollbackRequest | None:
    try:
        return RollbackRequest(**json.loads((store / REQUEST_NAME).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.error("%s cannot be read and is ignored: %s", store / REQUEST_NAME, error)
        return None


def roll_back(store: Path, state: dict[str, Any], request: RollbackRequest, through: int) -> dict[str, Any]:
    """The state after a rollback: the weights of the old version under a new number.

    ``through`` is the number of the newest feedback: decisions of the rejected versions are not learned from. The
    state records the request, so that a process killed before the request is deleted does not roll back twice.
    """
    if state.get("rollback_id") == request.id:
        return state
    old = load_checkpoint(version_path(store, request.version), CHECKPOINT_KIND)
    return state | {
        "agent": old["agent"], "optimizer": old["optimizer"], "statistics": old["statistics"],
        "version": state["version"] + 1,
        "learned_through": max(through, state["learned_through"]),
        "rollback_id": request.id, "rolled_back_to": request.version,
    }  # fmt: skip


def handle_request(store: Path, state: dict[str, Any], through: int) -> dict[str, Any]:
    """Carry out a waiting request, if there is one. Returns the new state. A request that cannot be met is dropped."""
    request = read_request(store)
    if request is None:
        return state
    try:
        after = roll_back(store, state, request, through)
        if after is not state:
            save_version(store, after)
            write_champion(store, after["version"])
            log.warning(
                "rolled back from version %d to %d, as version %d: %s",
                state["version"], request.version, after["version"], request.reason,
            )  # fmt: skip
        state = after
    except (FileNotFoundError, CheckpointError) as error:
        log.error("no rollback to version %d: %s", request.version, error)
    (store / REQUEST_NAME).unlink(missing_ok=True)
    return state


def operator_rollback(store: Path, version: int | None) -> str:
    """Go back to a version, or ask the learner process of a running agent to do so. Returns what was done.

    Raises:
        ValueError: there is no such version.
    """
    os.umask(0o077)
    if not (store / CHECKPOINT_NAME).exists():
        raise ValueError(f"{store} has no {CHECKPOINT_NAME}: it is not the store of an agent")
    kept = kept_versions(store)
    if version is None:
        version = read_champion(store)
        if version is None:
            raise ValueError("no version has passed the test yet: choose one with --to")
    if version not in kept:
        raise ValueError(f"version {version} is not kept; the versions are {', '.join(map(str, kept)) or 'none'}")
    request = request_rollback(store, version, "by the operator")
    try:
        with exclusive_lock(store / LEARNER_LOCK_NAME):
            state = load_checkpoint(store / CHECKPOINT_NAME, CHECKPOINT_KIND)
            with closing(connect(store, "process")) as connection:
                (through,) = connection.execute("SELECT coalesce(max(seq), 0) FROM feedback").fetchone()
            after = handle_request(store, state, through)
    except InUse:
        return f"the running agent goes back to version {request.version}; see its log"
    return f"version {after['version']} has the weights of version {request.version}"


class SequentialTest:
    """Decides whether a new version is worse than the last good one, as early as the evidence allows.

    Each sample is the difference of two rewards for the same pod, between −2 and 2. A gambler bets on "worse" with a
    part of the capital that does not depend on the sample. If the new version is not worse on average, the expected
    capital never grows, so it reaches 1 / alpha with a probability of at most alpha, however long the test runs
    (Ville's inequality). A second gambler bets on "not worse by more than the margin".
    """

    BETS = (0.02, 0.08, 0.3)
    """The capital is split between these bets; each must be less than 1 / (largest difference + margin)."""
    LARGEST = 2.0

    def __init__(self, alpha: float = 0.001, margin: float = 0.02) -> None:
        self.alpha, self.margin = alpha, margin
        self.samples, self.mean = 0, 0.0
        self._worse = [1.0] * len(self.BETS)
        self._fine = [1.0] * len(self.BETS)

    def add(self, difference: float) -> str | None:
        """Add the reward of the new version minus that of the old one. Returns "worse", "fine" or None (undecided)."""
        difference = min(max(difference, -self.LARGEST), self.LARGEST)
        self.samples += 1
        self.mean += (difference - self.mean) / self.samples
        self._worse = [k * (1.0 - bet * difference) for k, bet in zip(self._worse, self.BETS, strict=True)]
        self._fine = [
            k * (1.0 + bet * (difference + self.margin)) for k, bet in zip(self._fine, self.BETS, strict=True)
        ]
        if sum(self._worse) / len(self.BETS) >= 1.0 / self.alpha:
            return "worse"
        if sum(self._fine) / len(self.BETS) >= 1.0 / self.alpha:
            return "fine"
        return None
